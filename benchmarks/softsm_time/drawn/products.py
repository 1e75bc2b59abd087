"""Families of kernels with matrix products."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from softsm_time.case import BF16, FP8, FP16, FP32, INT8, SHORT, Call, cdiv, numbers, typed, values
from softsm_time.drawing import Drawn, Families, shuffled
from softsm_time.drawn.kernels import products as kernels

family = Families()

# ---- matrix products -------------------------------------------------------------------------------------------------

SIZES = (1024, 2048, 3072, 4096)
TILES = ((64, 64), (64, 128), (128, 64), (128, 128), (64, 256), (128, 256))


def _warps(BM: int, BN: int) -> tuple[int, ...]:
    return (4,) if BM * BN <= 8192 else (8,) if BM * BN > 16384 else (4, 8)


def tiles(r: random.Random, depths: tuple, stages: tuple, element: int) -> Iterator[tuple[int, int, int, int, int]]:
    """BM, BN, BK, stages, warps that fit into shared memory."""
    for (BM, BN), BK, s in shuffled(r, TILES, depths, stages):
        if (BM + BN) * BK * element * s <= 220_000:
            yield BM, BN, BK, s, r.choice(_warps(BM, BN))


def _matmul(r: random.Random, dtype: torch.dtype, depths: tuple, column_b: bool, out: torch.dtype) -> Iterator[Drawn]:
    import triton.language as tl

    M, N, K = r.choice(SIZES), r.choice(SIZES), r.choice((1024, 2048, 4096, 8192))
    act = r.choice(("", "relu2"))
    for BM, BN, BK, stages, warps in tiles(r, depths, (2, 3, 4), dtype.itemsize):

        def make(device: str, BM=BM, BN=BN, BK=BK, stages=stages, warps=warps) -> Call:
            a = typed(M, K, device=device, dtype=dtype)
            b = typed(N, K, device=device, dtype=dtype).T if column_b else typed(K, N, device=device, dtype=dtype)
            c, grid = torch.empty(M, N, dtype=out, device=device), (cdiv(M, BM) * cdiv(N, BN),)
            acc = tl.int32 if dtype == INT8 else tl.float32
            return lambda: kernels.matmul[grid](a, b, c, M, N, K, *a.stride(), *b.stride(), BM=BM, BN=BN, BK=BK,
                                                 GROUP=8, ACC=acc, ACT=act, num_stages=stages,
                                                 num_warps=warps)  # fmt: skip

        way = " B by columns" if column_b else ""
        yield f"{M}x{N}x{K} {SHORT[dtype]}{way} {act}".strip(), f"{BM}x{BN}x{BK} s{stages} w{warps}", make


@family
def matmul(r: random.Random) -> Iterator[Drawn]:
    dtype = r.choice((BF16, FP16))
    yield from _matmul(r, dtype, (32, 64, 128), r.choice((True, False)), dtype)


@family
def matmul_fp8(r: random.Random) -> Iterator[Drawn]:
    yield from _matmul(r, FP8, (64, 128), True, BF16)


@family
def matmul_int8(r: random.Random) -> Iterator[Drawn]:
    yield from _matmul(r, INT8, (64, 128), True, torch.int32)


@family
def matmul_tf32(r: random.Random) -> Iterator[Drawn]:
    yield from _matmul(r, FP32, (32, 64), True, FP32)


@family
def matmul_split(r: random.Random) -> Iterator[Drawn]:
    M, N, K = r.choice((128, 256, 512)), r.choice((1024, 2048, 4096)), r.choice((4096, 8192, 16384))
    for (BM, BN), BK, splits, stages in shuffled(r, TILES[:4], (32, 64), (2, 4, 8), (3, 4)):

        def make(device: str, BM=BM, BN=BN, BK=BK, splits=splits, stages=stages) -> Call:
            a, b = values(M, K, device=device), values(K, N, device=device)
            c, grid = torch.zeros(M, N, device=device), (M // BM * (N // BN), splits)
            return lambda: kernels.matmul_split[grid](
                a, b, c, M, N, K, SPLITS=splits, BM=BM, BN=BN, BK=BK, num_stages=stages, num_warps=4
            )

        yield f"{M}x{N}x{K}", f"{BM}x{BN}x{BK} by {splits} s{stages}", make


@family
def matmul_weights(r: random.Random) -> Iterator[Drawn]:
    M, N, K = r.choice((16, 32, 64)), r.choice((4096, 8192)), r.choice((4096, 8192))
    int4 = r.choice((True, False))
    for BN, BK, stages, warps in shuffled(r, (32, 64, 128), (64, 128), (2, 3, 4), (4,)):

        def make(device: str, BN=BN, BK=BK, stages=stages, warps=warps) -> Call:
            a, b = values(M, K, device=device), typed(N, K // (1 + int4), device=device, dtype=INT8)
            scale, c = values(N, device=device, dtype=FP32), torch.empty(M, N, dtype=BF16, device=device)
            return lambda: kernels.matmul_weights[(1, N // BN)](
                a, b, scale, c, M, N, K, INT4=int4, BM=M, BN=BN, BK=BK, num_stages=stages, num_warps=warps
            )

        yield f"{M}x{N}x{K} {'int4' if int4 else 'int8'}", f"{BN}x{BK} s{stages} w{warps}", make


@family
def matmul_scaled(r: random.Random) -> Iterator[Drawn]:
    M, N, K = r.choice(SIZES), r.choice(SIZES), r.choice((1024, 2048, 4096))
    for (BM, BN), stages, warps in shuffled(r, TILES[:4], (2, 3, 4), (4, 8)):

        def make(device: str, BM=BM, BN=BN, stages=stages, warps=warps) -> Call:
            a, b = typed(M, K, device=device, dtype=FP8), typed(N, K, device=device, dtype=FP8)
            sa = values(M, K // 128, device=device, dtype=FP32)
            sb = values(N // 128, K // 128, device=device, dtype=FP32)
            c, grid = torch.empty(M, N, dtype=BF16, device=device), (M // BM * (N // BN),)
            return lambda: kernels.matmul_scaled[grid](
                a, b, sa, sb, c, M, N, K, BM=BM, BN=BN, BK=128, num_stages=stages, num_warps=warps
            )

        yield f"{M}x{N}x{K}", f"{BM}x{BN} s{stages} w{warps}", make


@family
def matmul_swiglu(r: random.Random) -> Iterator[Drawn]:
    M, N, K = r.choice(SIZES), r.choice(SIZES), r.choice((1024, 2048))
    for (BM, BN), BK, stages in shuffled(r, TILES[:4], (32, 64), (2, 3)):
        warps = r.choice((4, 8)) if BM * BN < 16384 else 8

        def make(device: str, BM=BM, BN=BN, BK=BK, stages=stages, warps=warps) -> Call:
            x, w, v = values(M, K, device=device), values(K, N, device=device), values(K, N, device=device)
            c, grid = torch.empty(M, N, dtype=BF16, device=device), (M // BM * (N // BN),)
            return lambda: kernels.matmul_swiglu[grid](
                x, w, v, c, M, N, K, BM=BM, BN=BN, BK=BK, num_stages=stages, num_warps=warps
            )

        yield f"{M}x{N}x{K}", f"{BM}x{BN}x{BK} s{stages} w{warps}", make


@family
def matmul_batched(r: random.Random) -> Iterator[Drawn]:
    batch, M, N = r.choice((16, 64, 128)), r.choice((128, 256, 512)), r.choice((128, 256, 512))
    K = r.choice((128, 512, 1024))
    for (BM, BN), BK, stages in shuffled(r, TILES[:4], (32, 64), (2, 3)):

        def make(device: str, BM=BM, BN=BN, BK=BK, stages=stages) -> Call:
            a, b = values(batch, M, K, device=device), values(batch, K, N, device=device)
            c, grid = torch.empty(batch, M, N, dtype=BF16, device=device), (M // BM, N // BN, batch)
            return lambda: kernels.matmul_batched[grid](
                a, b, c, M, N, K, BM=BM, BN=BN, BK=BK, num_stages=stages, num_warps=4
            )

        yield f"{batch}x{M}x{N}x{K}", f"{BM}x{BN}x{BK} s{stages}", make


@family
def matmul_experts(r: random.Random) -> Iterator[Drawn]:
    experts, blocks, N, K = r.choice((8, 16)), r.choice((32, 64)), r.choice((1024, 2048)), r.choice((1024, 2048))
    for BM, BN, stages in shuffled(r, (64, 128), (64, 128), (2, 3, 4)):

        def make(device: str, BM=BM, BN=BN, stages=stages) -> Call:
            x, w = values(4096, K, device=device), values(experts, K, N, device=device)
            which, of = numbers(blocks * 128, 4096, device), numbers(blocks * 128 // BM, experts, device).sort()[0]
            c, grid = torch.empty(blocks * 128, N, dtype=BF16, device=device), (blocks * 128 // BM, N // BN)
            return lambda: kernels.matmul_experts[grid](
                x, which, of, w, c, N, K, BM=BM, BN=BN, BK=64, num_stages=stages, num_warps=4
            )

        yield f"{experts} experts {blocks * 128}x{N}x{K}", f"{BM}x{BN} s{stages}", make


@family
def matmul_boxes(r: random.Random) -> Iterator[Drawn]:
    M, N, K = r.choice(SIZES), r.choice(SIZES), r.choice((1024, 2048, 4096))
    for BM, BN, BK, stages, warps in tiles(r, (32, 64), (2, 3, 4), 2):

        def make(device: str, BM=BM, BN=BN, BK=BK, stages=stages, warps=warps) -> Call:
            from triton.tools.tensor_descriptor import TensorDescriptor

            a, b = values(M, K, device=device), values(N, K, device=device)
            c, grid = torch.empty(M, N, dtype=BF16, device=device), (cdiv(M, BM) * cdiv(N, BN),)
            boxes = ((a, [BM, BK]), (b, [BN, BK]), (c, [BM, BN]))
            given = [TensorDescriptor.from_tensor(x, box) for x, box in boxes]
            return lambda: kernels.matmul_boxes[grid](
                *given, M, N, K, BM=BM, BN=BN, BK=BK, num_stages=stages, num_warps=warps
            )

        yield f"{M}x{N}x{K}", f"{BM}x{BN}x{BK} s{stages} w{warps}", make


@family
def conv2d(r: random.Random) -> Iterator[Drawn]:
    images, side, C, F = r.choice((8, 16)), r.choice((32, 64)), r.choice((64, 128)), r.choice((128, 256))
    for (BM, BN), BK, stages in shuffled(r, TILES[:4], (32, 64), (2, 3)):

        def make(device: str, BM=BM, BN=BN, BK=BK, stages=stages) -> Call:
            x, w = values(images, side, side, C, device=device), values(9, C, F, device=device)
            out = torch.empty(images, side, side, F, dtype=BF16, device=device)
            grid = (images * side * side // BM, F // BN)
            return lambda: kernels.conv2d[grid](
                x, w, out, side, side, C, F, BM=BM, BN=BN, BK=BK, num_stages=stages, num_warps=4
            )

        yield f"{images}x{side}x{side}x{C} to {F}", f"{BM}x{BN}x{BK} s{stages}", make


@family
def attention(r: random.Random) -> Iterator[Drawn]:
    yield from _attention(r, r.choice(("full", "alibi", "softcap")))


@family
def attention_masked(r: random.Random) -> Iterator[Drawn]:
    yield from _attention(r, r.choice(("causal", "window")))


def _attention(r: random.Random, form: str) -> Iterator[Drawn]:
    heads, T, d, groups = r.choice((16, 32, 64)), r.choice((1024, 2048, 4096)), r.choice((64, 128)), r.choice((1, 4))
    for BM, BN, stages, warps in shuffled(r, (64, 128), (32, 64, 128), (2, 3), (4, 8)):
        if warps == 8 and BM == 64:
            continue

        def make(device: str, BM=BM, BN=BN, stages=stages, warps=warps) -> Call:
            q = values(heads, T, d, device=device)
            k, v = (values(heads // groups, T, d, device=device) for _ in "kv")
            slope, out = values(heads, device=device, dtype=FP32).abs(), torch.empty_like(q)
            return lambda: kernels.attention[(T // BM, heads)](
                q, k, v, out, slope, T, groups, 512, D=d, BM=BM, BN=BN, FORM=form, num_stages=stages, num_warps=warps
            )

        yield f"{form} {heads}:{heads // groups}x{T}x{d}", f"{BM}x{BN} s{stages} w{warps}", make


@family
def attention_decode(r: random.Random) -> Iterator[Drawn]:
    heads, T, d, group = r.choice((16, 64)), r.choice((4096, 8192, 16384)), r.choice((64, 128)), 16
    for splits, BN, stages in shuffled(r, (4, 8, 16), (32, 64, 128), (2, 3)):

        def make(device: str, splits=splits, BN=BN, stages=stages) -> Call:
            q, k, v = (values(heads, n, d, device=device) for n in (group, T, T))
            out, lse = (torch.empty(heads * splits * group * n, device=device) for n in (d, 1))
            return lambda: kernels.attention_decode[(heads, splits)](
                q, k, v, out, lse, T, T // splits, D=d, G=group, BN=BN, num_stages=stages, num_warps=4
            )

        yield f"{heads}x{T}x{d}", f"by {splits} b{BN} s{stages}", make


@family
def linear_attention(r: random.Random) -> Iterator[Drawn]:
    heads, T, d = r.choice((32, 64, 128)), r.choice((1024, 2048)), r.choice((64, 128))
    for BV, C, stages in shuffled(r, (32, 64), (32, 64), (1, 2)):

        def make(device: str, BV=BV, C=C, stages=stages) -> Call:
            q, k, v = (values(heads, T, d, device=device) for _ in "qkv")
            out = torch.empty_like(q)
            return lambda: kernels.linear_attention[(d // BV, heads)](
                q, k, v, out, T, D=d, BV=BV, C=C, num_stages=stages, num_warps=4
            )

        yield f"{heads}x{T}x{d}", f"{BV}x{C} s{stages}", make
