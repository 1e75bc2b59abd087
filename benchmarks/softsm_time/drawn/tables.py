"""Families of kernels with matrix products that go by tables, over parts, or through a ring."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from softsm_time.case import BF16, FP16, FP32, Call, cdiv, numbers, parts_of, values
from softsm_time.drawing import Drawn, Families, shuffled
from softsm_time.drawn.kernels import tables as kernels
from softsm_time.drawn.products import TILES, tiles

family = Families()


@family
def grouped(r: random.Random) -> Iterator[Drawn]:
    groups, rows, N, K = r.choice((4, 8, 32)), r.choice((2048, 8192)), r.choice((1024, 2048)), r.choice((1024, 2048))
    for (BM, BN), BK, stages in shuffled(r, TILES[:4], (32, 64), (3, 4)):

        def make(device: str, BM=BM, BN=BN, BK=BK, stages=stages) -> Call:
            x, w = values(rows, K, device=device), values(groups, K, N, device=device)
            first, c = parts_of(rows, groups, device), torch.empty(rows, N, dtype=BF16, device=device)
            return lambda: kernels.grouped[(132,)](
                x, w, c, first, groups, N, K, BM=BM, BN=BN, BK=BK, num_stages=stages, num_warps=4
            )

        yield f"{groups} of {rows}x{N}x{K}", f"{BM}x{BN}x{BK} s{stages}", make


@family
def stream_k(r: random.Random) -> Iterator[Drawn]:
    M, N, K = r.choice((512, 1024, 2048)), r.choice((1024, 1536, 3072)), r.choice((2048, 4096))
    for (BM, BN), BK, stages in shuffled(r, TILES[:4], (32, 64), (3, 4)):

        def make(device: str, BM=BM, BN=BN, BK=BK, stages=stages) -> Call:
            a, b, c = values(M, K, device=device), values(K, N, device=device), torch.zeros(M, N, device=device)
            each = cdiv(M // BM * (N // BN) * (K // BK), 132)
            return lambda: kernels.stream_k[(132,)](
                a, b, c, M, N, K, each, BM=BM, BN=BN, BK=BK, num_stages=stages, num_warps=4
            )

        yield f"{M}x{N}x{K}", f"{BM}x{BN}x{BK} s{stages}", make


@family
def mlp(r: random.Random) -> Iterator[Drawn]:
    M, D, F = r.choice((4096, 8192, 20480)), r.choice((64, 128)), r.choice((512, 1024, 2048))
    for BM, BF, stages, warps in shuffled(r, (64, 128), (32, 64, 128), (2, 3), (4, 8)):
        if warps == 8 and BM == 64:
            continue

        def make(device: str, BM=BM, BF=BF, stages=stages, warps=warps) -> Call:
            x, w1, w2 = values(M, D, device=device), values(D, F, device=device), values(F, D, device=device)
            out = torch.empty_like(x)
            return lambda: kernels.mlp[(M // BM,)](
                x, w1, w2, out, F, D=D, BM=BM, BF=BF, num_stages=stages, num_warps=warps
            )

        yield f"{M}x{D}x{F}", f"{BM}x{BF} s{stages} w{warps}", make


@family
def matmul_groups(r: random.Random) -> Iterator[Drawn]:
    M, N, K = r.choice((16, 64, 256, 1024)), r.choice((2048, 4096)), r.choice((2048, 4096))
    for BM, BN, BK, stages in shuffled(r, (16, 64), (64, 128), (32, 64), (2, 3, 4)):
        if BM > M:
            continue

        def make(device: str, BM=BM, BN=BN, BK=BK, stages=stages) -> Call:
            a, b = values(M, K, device=device, dtype=FP16), numbers(K // 8 * N, 1 << 30, device)
            scale, zero = (values(K // 128, N, device=device, dtype=FP16) for _ in "sz")
            c, grid = torch.empty(M, N, dtype=FP16, device=device), (cdiv(M, BM) * (N // BN),)
            return lambda: kernels.matmul_groups[grid](
                a, b, scale, zero, c, M, N, K, GROUP=128, BM=BM, BN=BN, BK=BK, num_stages=stages, num_warps=4
            )

        yield f"{M}x{N}x{K}", f"{BM}x{BN}x{BK} s{stages}", make


@family
def sparse_blocks(r: random.Random) -> Iterator[Drawn]:
    side, N, share, B = r.choice((2048, 4096)), r.choice((1024, 4096)), r.choice((0.05, 0.1, 0.25)), r.choice((32, 64))
    for BN, stages in shuffled(r, (64, 128), (2, 3, 4)):

        def make(device: str, BN=BN, stages=stages) -> Call:
            of = side // B
            there = torch.rand(of, of, generator=torch.Generator().manual_seed(side)) < share
            first = torch.cat([torch.zeros(1), there.sum(1).cumsum(0)]).to(torch.int32).to(device)
            column = there.nonzero()[:, 1].to(torch.int32).to(device)
            value, x = values(len(column), B, B, device=device), values(side, N, device=device)
            out, grid = torch.empty(side, N, dtype=BF16, device=device), (of, N // BN)
            return lambda: kernels.sparse_blocks[grid](
                value, column, first, x, out, N, B=B, BN=BN, num_stages=stages, num_warps=4
            )

        yield f"{side}x{N} {share:.0%} of {B}", f"{BN} s{stages}", make


@family
def paged_decode(r: random.Random) -> Iterator[Drawn]:
    requests, heads, length, d = (
        r.choice((16, 64, 128)),
        r.choice((4, 8)),
        r.choice((512, 1024, 4096)),
        r.choice((64, 128)),
    )
    page = r.choice((16, 32, 64))
    for dot, stages, warps in shuffled(r, (True, False), (2, 3), (2, 4)):
        group = 16 if dot else 4
        if not dot and page * d * group > 32768:
            continue

        def make(device: str, dot=dot, stages=stages, warps=warps, group=group) -> Call:
            pages = cdiv(length, page)
            k, v = (values(requests * pages, page, heads, d, device=device) for _ in "kv")
            table = torch.randperm(requests * pages, device=device, dtype=torch.int32).view(requests, pages)
            lengths = torch.randint(length // 2, length, (requests,), generator=torch.Generator().manual_seed(length))
            q, given = values(requests, heads, group, d, device=device), lengths.to(torch.int32).to(device)
            out = torch.empty_like(q)
            return lambda: kernels.paged_decode[(requests, heads)](q, k, v, table, given, out, heads, pages, D=d,
                                                                  G=group, PAGE=page, DOT=dot, num_stages=stages,
                                                                  num_warps=warps)  # fmt: skip

        yield f"{requests}x{heads}x{length}x{d} pages of {page}", f"{'dot' if dot else 'sum'} s{stages} w{warps}", make


@family
def attention_keys(r: random.Random) -> Iterator[Drawn]:
    heads, T, d, causal = r.choice((16, 32)), r.choice((1024, 2048)), r.choice((64, 128)), r.choice((True, False))
    for BM, BN, stages, warps in shuffled(r, (32, 64), (64, 128), (1, 2, 3), (4, 8)):
        if d == 128 and BM * BN > 4096:
            continue

        def make(device: str, BM=BM, BN=BN, stages=stages, warps=warps) -> Call:
            q, k, v, do = (values(heads, T, d, device=device) for _ in "qkvo")
            lse, delta = (values(heads, T, device=device, dtype=FP32) for _ in "ld")
            dk, dv = torch.empty_like(k), torch.empty_like(v)
            return lambda: kernels.attention_keys[(T // BN, heads)](
                q, k, v, do, lse, delta, dk, dv, T, D=d, BM=BM, BN=BN, CAUSAL=causal, num_stages=stages, num_warps=warps
            )

        yield f"{'causal' if causal else 'full'} {heads}x{T}x{d}", f"{BM}x{BN} s{stages} w{warps}", make


@family
def chunk_scan(r: random.Random) -> Iterator[Drawn]:
    """Mamba-like: states of chunks, a scan over them, outputs."""
    T, heads, P, S = r.choice((2048, 8192)), r.choice((16, 64)), 64, r.choice((64, 128))
    for C, warps, block in shuffled(r, (64, 128), (4, 8), (256, 512)):

        def make(device: str, C=C, warps=warps, block=block) -> Call:
            x, b, c = values(T, heads, P, device=device), values(T, S, device=device), values(T, S, device=device)
            decay = -values(T, heads, device=device, dtype=FP32).abs() / 8
            chunks = T // C
            ends = decay.view(chunks, C, heads).sum(1)
            state = torch.empty(chunks, heads, P, S, device=device)
            out = torch.empty_like(x)

            def call() -> None:
                kernels.chunk_states[(chunks, heads)](x, b, decay, state, T, heads, P=P, S=S, C=C, num_warps=warps)
                kernels.chunk_scan[(P * S // block, heads)](state, ends, chunks, P * S, BLOCK=block, num_warps=4)
                kernels.chunk_outputs[(chunks, heads)](
                    x, b, c, decay, state, out, T, heads, P=P, S=S, C=C, num_warps=warps
                )

            return call

        yield f"{T}x{heads}x{P}x{S}", f"c{C} w{warps} b{block}", make


def _boxes(M: int, N: int, K: int, BM: int, BN: int, BK: int, device: str) -> list[tuple[torch.Tensor, list[int]]]:
    a, b = values(M, K, device=device), values(N, K, device=device)
    return [(a, [BM, BK]), (b, [BN, BK]), (torch.empty(M, N, dtype=BF16, device=device), [BM, BN])]


@family
def persistent_boxes(r: random.Random) -> Iterator[Drawn]:
    M, N, K = r.choice((2048, 4096)), r.choice((2048, 3072, 4096)), r.choice((512, 1024, 4096))
    for BM, BN, BK, stages, warps in tiles(r, (64,), (3, 4), 2):
        flatten = r.choice((True, False))
        if (BM + BN) * BK * 2 * stages + BM * BN * 2 > 225_000:
            continue

        def make(device: str, BM=BM, BN=BN, BK=BK, stages=stages, warps=warps, flatten=flatten) -> Call:
            from triton.tools.tensor_descriptor import TensorDescriptor

            given = [TensorDescriptor.from_tensor(x, box) for x, box in _boxes(M, N, K, BM, BN, BK, device)]
            return lambda: kernels.persistent_boxes[(132,)](
                *given, M, N, K, BM=BM, BN=BN, BK=BK, FLATTEN=flatten, num_stages=stages, num_warps=warps
            )

        yield f"{M}x{N}x{K}", f"{BM}x{BN}x{BK} s{stages} w{warps}{' flat' if flatten else ''}", make


@family
def weight_gradient(r: random.Random) -> Iterator[Drawn]:
    T, N, K = r.choice((2048, 4096, 8192)), r.choice((1024, 2048)), r.choice((1024, 2048))
    for (BM, BN), BK, stages in shuffled(r, TILES[:4], (32, 64), (2, 3, 4)):

        def make(device: str, BM=BM, BN=BN, BK=BK, stages=stages) -> Call:
            x, dy = values(T, K, device=device), values(T, N, device=device)
            dw = torch.empty(N, K, dtype=BF16, device=device)
            return lambda: kernels.weight_gradient[(N // BM, K // BN)](
                x, dy, dw, T, N, K, BM=BM, BN=BN, BK=BK, num_stages=stages, num_warps=4
            )

        yield f"{T}x{N}x{K}", f"{BM}x{BN}x{BK} s{stages}", make


@family
def ring(r: random.Random) -> Iterator[Drawn]:
    """Gluon, wgmma."""
    M, N, K = r.choice((1024, 2048, 4096)), r.choice((2048, 4096)), r.choice((1024, 2048, 4096))
    for (BM, BN), BK, slots in shuffled(r, TILES, (32, 64), (3, 4, 5)):
        if ((BM + BN) * BK * slots + BM * BN) * 2 > 220_000:
            continue

        def make(device: str, BM=BM, BN=BN, BK=BK, slots=slots) -> Call:
            from triton.experimental.gluon import language as gl
            from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

            given = [
                TensorDescriptor.from_tensor(x, box, gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16))
                for x, box in _boxes(M, N, K, BM, BN, BK, device)
            ]
            warps = 8 if BM == 128 else 4
            return lambda: kernels.ring[(M // BM, N // BN)](
                *given, K, BM=BM, BN=BN, BK=BK, SLOTS=slots, num_warps=warps
            )

        yield f"{M}x{N}x{K}", f"{BM}x{BN}x{BK} s{slots}", make
