"""Families of kernels that take numbers one by one, in rows or in columns."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch

from softsm_time.case import BF16, FP8, FP16, FP32, INT8, SHORT, Call, cdiv, numbers, power, typed, values
from softsm_time.drawing import Drawn, Families, shuffled
from softsm_time.drawn.kernels import rows as kernels

family = Families()

# ---- numbers one by one ----------------------------------------------------------------------------------------------


@family
def pointwise(r: random.Random) -> Iterator[Drawn]:
    n, dtype = r.choice((1 << 22, 3 << 22, 1 << 25, 5 << 23)), r.choice((BF16, FP32))
    op = r.choice(("add", "gelu", "silu", "exp"))
    for block, warps in shuffled(r, (256, 512, 1024, 2048, 4096), (2, 4, 8)):

        def make(device: str, block=block, warps=warps) -> Call:
            x, y = (values(n, device=device, dtype=dtype) for _ in "xy")
            out = torch.empty_like(x)
            return lambda: kernels.pointwise[(cdiv(n, block),)](x, y, out, n, OP=op, BLOCK=block, num_warps=warps)

        yield f"{op} {n} {SHORT[dtype]}", f"b{block} w{warps}", make


@family
def dropout(r: random.Random) -> Iterator[Drawn]:
    n = r.choice((1 << 22, 1 << 24, 3 << 23))
    for block, warps in shuffled(r, (512, 1024, 2048, 4096), (4, 8)):

        def make(device: str, block=block, warps=warps) -> Call:
            x = values(n, device=device)
            out = torch.empty_like(x)
            return lambda: kernels.dropout[(cdiv(n, block),)](x, out, n, 0.1, 7, BLOCK=block, num_warps=warps)

        yield f"{n}", f"b{block} w{warps}", make


@family
def unpack(r: random.Random) -> Iterator[Drawn]:
    n = r.choice((1 << 23, 3 << 22, 1 << 25))
    for block, warps in shuffled(r, (512, 1024, 2048), (4, 8)):

        def make(device: str, block=block, warps=warps) -> Call:
            x, out = numbers(n, 100, device).to(torch.uint8), torch.empty(2 * n, dtype=BF16, device=device)
            return lambda: kernels.unpack_int4[(cdiv(n, block),)](x, out, n, BLOCK=block, num_warps=warps)

        yield f"int4 {n}", f"b{block} w{warps}", make


@family
def strided(r: random.Random) -> Iterator[Drawn]:
    n, stride, dtype = r.choice((1 << 21, 1 << 22, 3 << 21)), r.choice((2, 3, 4, 8, 17)), r.choice((BF16, FP32))
    for block, warps in shuffled(r, (256, 512, 1024, 2048), (4, 8)):

        def make(device: str, block=block, warps=warps) -> Call:
            x, out = values(n * stride, device=device, dtype=dtype), torch.empty(n, dtype=dtype, device=device)
            return lambda: kernels.strided[(cdiv(n, block),)](x, out, n, STRIDE=stride, BLOCK=block, num_warps=warps)

        yield f"{n} by {stride} {SHORT[dtype]}", f"b{block} w{warps}", make


@family
def pick(r: random.Random) -> Iterator[Drawn]:
    n, of = r.choice((1 << 20, 1 << 22, 3 << 20)), r.choice((1 << 16, 1 << 20, 1 << 23, 1 << 25))
    for block, warps in shuffled(r, (256, 512, 1024, 2048), (4, 8)):

        def make(device: str, block=block, warps=warps) -> Call:
            x, index = values(of, device=device, dtype=FP32), numbers(n, of, device)
            out = torch.empty(n, device=device)
            return lambda: kernels.pick[(cdiv(n, block),)](x, index, out, n, BLOCK=block, num_warps=warps)

        yield f"{n} of {of}", f"b{block} w{warps}", make


@family
def recurrence(r: random.Random) -> Iterator[Drawn]:
    steps, channels = r.choice((512, 1024, 2048)), r.choice((4096, 8192, 16384))
    for block, warps in shuffled(r, (64, 128, 256), (1, 2, 4)):

        def make(device: str, block=block, warps=warps) -> Call:
            a, x = (values(steps, channels, device=device) for _ in "ax")
            out = torch.empty_like(x)
            return lambda: kernels.recurrence[(channels // block,)](
                a, x, out, steps, channels, BC=block, num_warps=warps
            )

        yield f"{steps}x{channels}", f"b{block} w{warps}", make


# ---- rows and columns ------------------------------------------------------------------------------------------------


@family
def gather(r: random.Random) -> Iterator[Drawn]:
    many, of, columns = r.choice((8192, 20000, 32768)), r.choice((4096, 32000, 60000)), r.choice((256, 1024, 4096))
    for at_once, warps, block in shuffled(r, (1, 2, 4), (2, 4, 8), (256, 512, 1024)):

        def make(device: str, at_once=at_once, warps=warps, block=block) -> Call:
            table, index = values(of, columns, device=device), numbers(many, of, device)
            out = torch.empty(many, columns, dtype=BF16, device=device)
            grid = (many // at_once, cdiv(columns, block))
            return lambda: kernels.gather_rows[grid](
                table, index, out, columns, ROWS=at_once, BLOCK=block, num_warps=warps
            )

        yield f"{many} of {of} x {columns}", f"r{at_once} b{block} w{warps}", make


@family
def scatter(r: random.Random) -> Iterator[Drawn]:
    many, columns = r.choice((8192, 16384, 30000)), r.choice((512, 1024, 4096))
    for block, warps in shuffled(r, (256, 512, 1024), (2, 4, 8)):

        def make(device: str, block=block, warps=warps) -> Call:
            x, out = values(many, columns, device=device), torch.empty(32768, columns, dtype=BF16, device=device)
            index = torch.randperm(32768, device=device, dtype=torch.int32)[:many]
            grid = (many, cdiv(columns, block))
            return lambda: kernels.scatter_rows[grid](x, index, out, columns, BLOCK=block, ADD=False, num_warps=warps)

        yield f"{many} x {columns}", f"b{block} w{warps}", make


@family
def scatter_add(r: random.Random) -> Iterator[Drawn]:
    """The gradient of an embedding: atomics, few or many rows to the same place."""
    many, of, columns = r.choice((4096, 16384)), r.choice((64, 1024, 32000)), r.choice((256, 1024))
    for block, warps in shuffled(r, (128, 256, 512), (2, 4, 8)):

        def make(device: str, block=block, warps=warps) -> Call:
            x, out = values(many, columns, device=device, dtype=FP32), torch.zeros(of, columns, device=device)
            index, grid = numbers(many, of, device), (many, cdiv(columns, block))
            return lambda: kernels.scatter_rows[grid](x, index, out, columns, BLOCK=block, ADD=True, num_warps=warps)

        yield f"{many} to {of} x {columns}", f"b{block} w{warps}", make


@family
def transpose(r: random.Random) -> Iterator[Drawn]:
    M, N, dtype = r.choice((4096, 8192, 6000)), r.choice((2048, 8192, 5120)), r.choice((BF16, FP32))
    for BM, BN, warps in shuffled(r, (32, 64, 128), (32, 64, 128), (4, 8)):

        def make(device: str, BM=BM, BN=BN, warps=warps) -> Call:
            x, out = values(M, N, device=device, dtype=dtype), torch.empty(N, M, dtype=dtype, device=device)
            return lambda: kernels.transpose[(cdiv(M, BM), cdiv(N, BN))](x, out, M, N, BM=BM, BN=BN, num_warps=warps)

        yield f"{M}x{N} {SHORT[dtype]}", f"{BM}x{BN} w{warps}", make


@family
def stencil(r: random.Random) -> Iterator[Drawn]:
    H, W = r.choice((2048, 4096, 8192)), r.choice((2048, 4096, 4000))
    for BH, BW, warps in shuffled(r, (4, 8, 16, 32), (64, 128, 256), (4, 8)):

        def make(device: str, BH=BH, BW=BW, warps=warps) -> Call:
            x = values(H, W, device=device, dtype=FP32)
            out = torch.empty_like(x)
            return lambda: kernels.stencil[(cdiv(H, BH), cdiv(W, BW))](x, out, H, W, BH=BH, BW=BW, num_warps=warps)

        yield f"{H}x{W}", f"{BH}x{BW} w{warps}", make


def _rowwise(r: random.Random, kernel: Any, columns: int, whole: bool, **more: Any) -> Iterator[Drawn]:
    """Kernels over rows (x, out), in blocks or with the whole row at once."""
    many, dtype = r.choice((2048, 4096, 8192, 12000)), r.choice((BF16, FP32))
    blocks = (power(columns),) if whole else (512, 1024, 2048, 4096)
    for block, warps in shuffled(r, blocks, (2, 4, 8, 16)):

        def make(device: str, block=block, warps=warps) -> Call:
            x = values(many, columns, device=device, dtype=dtype)
            out = torch.empty(many, columns, dtype=dtype, device=device)
            return lambda: kernel[(many,)](x, out, columns, BLOCK=block, num_warps=warps, **more)

        what = " ".join(str(x) for x in more.values())
        yield f"{many}x{columns} {SHORT[dtype]} {what}".strip(), f"b{block} w{warps}", make


@family
def row_reduce(r: random.Random) -> Iterator[Drawn]:
    yield from _rowwise(r, kernels.row_reduce, r.choice((1000, 4096, 8192, 20000)), False, OP=r.choice(("sum", "max")))


@family
def arg_max(r: random.Random) -> Iterator[Drawn]:
    yield from _rowwise(r, kernels.arg_max, r.choice((1000, 4096, 8192, 20000)), False)


@family
def softmax(r: random.Random) -> Iterator[Drawn]:
    yield from _rowwise(r, kernels.softmax_online, r.choice((2048, 8192, 10000)), False)


@family
def cross_entropy(r: random.Random) -> Iterator[Drawn]:
    many, columns = r.choice((1024, 2048, 4096)), r.choice((8192, 32000, 50257))
    for block, warps in shuffled(r, (1024, 2048, 4096), (4, 8, 16)):

        def make(device: str, block=block, warps=warps) -> Call:
            x, target = values(many, columns, device=device), numbers(many, columns, device)
            loss = torch.empty(many, device=device)
            return lambda: kernels.cross_entropy[(many,)](x, target, loss, columns, BLOCK=block, num_warps=warps)

        yield f"{many}x{columns}", f"b{block} w{warps}", make


@family
def norm(r: random.Random) -> Iterator[Drawn]:
    many, columns, mean = r.choice((4096, 16384, 30000)), r.choice((256, 1024, 2560, 4096)), r.choice((True, False))
    block = power(columns)
    for at_once, warps in shuffled(r, (1, 2, 4), (2, 4, 8)):

        def make(device: str, at_once=at_once, warps=warps) -> Call:
            x, w = values(many, columns, device=device), values(columns, device=device)
            out = torch.empty_like(x)
            return lambda: kernels.norm_rows[(cdiv(many, at_once),)](
                x, out, w, many, columns, 1e-5, MEAN=mean, ROWS=at_once, BLOCK=block, num_warps=warps
            )

        yield f"{'layer' if mean else 'rms'} {many}x{columns}", f"r{at_once} w{warps}", make


@family
def group_norm(r: random.Random) -> Iterator[Drawn]:
    groups, size = r.choice((512, 1024, 2048)), r.choice((4096, 16384, 25600))
    for block, warps in shuffled(r, (1024, 2048, 4096), (4, 8)):

        def make(device: str, block=block, warps=warps) -> Call:
            x = values(groups, size, device=device)
            out = torch.empty_like(x)
            return lambda: kernels.group_norm[(groups,)](x, out, size, 1e-5, BLOCK=block, num_warps=warps)

        yield f"{groups}x{size}", f"b{block} w{warps}", make


@family
def swiglu(r: random.Random) -> Iterator[Drawn]:
    many, columns = r.choice((2048, 4096, 8192)), r.choice((2816, 4096, 11008))
    for block, warps in shuffled(r, (512, 1024, 2048, 4096), (4, 8)):

        def make(device: str, block=block, warps=warps) -> Call:
            a, b = (values(many, columns, device=device) for _ in "ab")
            out, grid = torch.empty_like(a), (many, cdiv(columns, block))
            return lambda: kernels.swiglu_rows[grid](a, b, out, columns, BLOCK=block, num_warps=warps)

        yield f"{many}x{columns}", f"b{block} w{warps}", make


@family
def column_reduce(r: random.Random) -> Iterator[Drawn]:
    M, N = r.choice((1024, 4096, 16384)), r.choice((2048, 4096, 8192))
    for BM, BN, warps in shuffled(r, (8, 16, 32, 64), (16, 32, 64), (4, 8)):

        def make(device: str, BM=BM, BN=BN, warps=warps) -> Call:
            x, out = values(M, N, device=device), torch.empty(N, device=device)
            return lambda: kernels.column_reduce[(cdiv(N, BN),)](x, out, M, N, BM=BM, BN=BN, num_warps=warps)

        yield f"{M}x{N}", f"{BM}x{BN} w{warps}", make


@family
def column_atomics(r: random.Random) -> Iterator[Drawn]:
    M, N = r.choice((4096, 8192, 20000)), r.choice((1024, 2048, 4096))
    for BM, BN, warps in shuffled(r, (16, 32, 64), (64, 128, 256), (4, 8)):

        def make(device: str, BM=BM, BN=BN, warps=warps) -> Call:
            x, out = values(M, N, device=device, dtype=FP32), torch.zeros(N, device=device)
            grid = (cdiv(M, BM), cdiv(N, BN))
            return lambda: kernels.column_atomics[grid](x, out, M, N, BM=BM, BN=BN, num_warps=warps)

        yield f"{M}x{N}", f"{BM}x{BN} w{warps}", make


@family
def histogram(r: random.Random) -> Iterator[Drawn]:
    n, bins = r.choice((1 << 20, 1 << 22, 3 << 21)), r.choice((64, 256, 1024))
    for block, warps in shuffled(r, (1024, 2048, 4096), (4, 8)):

        def make(device: str, block=block, warps=warps) -> Call:
            x, out = numbers(n, bins, device), torch.zeros(bins, dtype=torch.int32, device=device)
            return lambda: kernels.histogram[(cdiv(n, block),)](x, out, n, BINS=bins, BLOCK=block, num_warps=warps)

        yield f"{n} in {bins}", f"b{block} w{warps}", make


@family
def scan(r: random.Random) -> Iterator[Drawn]:
    many, columns, dtype = r.choice((2048, 8192)), r.choice((1024, 2048, 4096)), r.choice((BF16, FP32))
    op = r.choice(("sum", "linear"))
    for (warps,) in shuffled(r, (2, 4, 8, 16)):

        def make(device: str, warps=warps) -> Call:
            x, y = (values(many, columns, device=device, dtype=dtype) for _ in "xy")
            out = torch.empty_like(x)
            return lambda: kernels.scan[(many,)](x, y, out, columns, OP=op, BLOCK=columns, num_warps=warps)

        yield f"{op} {many}x{columns} {SHORT[dtype]}", f"w{warps}", make


@family
def sort(r: random.Random) -> Iterator[Drawn]:
    many, columns, dtype = r.choice((2048, 4096)), r.choice((128, 256, 512, 1024, 2048)), r.choice((BF16, FP32))
    for at_once, warps in shuffled(r, (1, 2, 4), (2, 4, 8)):
        if at_once * columns > 2048:
            continue

        def make(device: str, at_once=at_once, warps=warps) -> Call:
            x = values(many, columns, device=device, dtype=dtype)
            out, grid = torch.empty_like(x), (many // at_once,)
            return lambda: kernels.sort[grid](x, out, columns, ROWS=at_once, BLOCK=columns, num_warps=warps)

        yield f"{many}x{columns} {SHORT[dtype]}", f"r{at_once} w{warps}", make


@family
def top_k(r: random.Random) -> Iterator[Drawn]:
    many, columns, k = r.choice((2048, 8192)), r.choice((256, 1024, 2048)), r.choice((8, 16, 32))
    for (warps,) in shuffled(r, (1, 2, 4, 8)):

        def make(device: str, warps=warps) -> Call:
            x, out = values(many, columns, device=device, dtype=FP32), torch.empty(many, k, device=device)
            return lambda: kernels.top_k[(many,)](x, out, columns, K=k, BLOCK=columns, num_warps=warps)

        yield f"{k} of {many}x{columns}", f"w{warps}", make


@family
def quantise(r: random.Random) -> Iterator[Drawn]:
    many, columns, to = r.choice((4096, 8192)), r.choice((2048, 4096, 7168)), r.choice((FP8, INT8))
    for at_once, group, warps in shuffled(r, (1, 4, 16, 32), (128,), (1, 2, 4)):

        def make(device: str, at_once=at_once, group=group, warps=warps) -> Call:
            x, out = values(many, columns, device=device), torch.empty(many, columns, dtype=to, device=device)
            scale = torch.empty(many, columns // group, device=device)
            grid = (many // at_once, columns // group)
            return lambda: kernels.quantise[grid](
                x, out, scale, columns, TOP=448.0 if to == FP8 else 127.0, ROWS=at_once, GROUP=group, num_warps=warps
            )

        yield f"{many}x{columns} {SHORT[to]}", f"r{at_once} w{warps}", make


@family
def dequantise(r: random.Random) -> Iterator[Drawn]:
    many, columns, of = r.choice((4096, 8192)), r.choice((2048, 4096, 8192)), r.choice((FP8, INT8))
    for block, warps in shuffled(r, (512, 1024, 2048), (2, 4, 8)):

        def make(device: str, block=block, warps=warps) -> Call:
            x = typed(many, columns, device=device, dtype=of)
            scale = values(many, columns // 128, device=device, dtype=FP32)
            out, grid = torch.empty(many, columns, dtype=BF16, device=device), (many, columns // block)
            return lambda: kernels.dequantise[grid](x, scale, out, columns, GROUP=128, BLOCK=block, num_warps=warps)

        yield f"{many}x{columns} {SHORT[of]}", f"b{block} w{warps}", make


@family
def rope(r: random.Random) -> Iterator[Drawn]:
    tokens, heads, half = r.choice((2048, 4096, 8192)), r.choice((8, 32, 64)), r.choice((32, 64))
    for at_once, warps in shuffled(r, (4, 8), (1, 2, 4)):

        def make(device: str, at_once=at_once, warps=warps) -> Call:
            x = values(tokens, heads, 2 * half, device=device)
            cos, sin = (values(tokens, half, device=device, dtype=FP32) for _ in "cs")
            grid = (tokens, heads // at_once)
            return lambda: kernels.rope[grid](x, cos, sin, heads, HALF=half, HEADS=at_once, num_warps=warps)

        yield f"{tokens}x{heads}x{2 * half}", f"h{at_once} w{warps}", make


@family
def conv1d(r: random.Random) -> Iterator[Drawn]:
    T, C, width = r.choice((4096, 8192)), r.choice((1024, 2048, 4096)), r.choice((3, 4))
    for BT, BC, warps in shuffled(r, (8, 16, 32), (64, 128, 256), (4, 8)):

        def make(device: str, BT=BT, BC=BC, warps=warps) -> Call:
            x, w = values(T, C, device=device), values(width, C, device=device)
            out = torch.empty_like(x)
            return lambda: kernels.conv1d[(cdiv(T, BT), C // BC)](
                x, w, out, T, C, WIDTH=width, BT=BT, BC=BC, num_warps=warps
            )

        yield f"{T}x{C} width {width}", f"{BT}x{BC} w{warps}", make


@family
def gemv(r: random.Random) -> Iterator[Drawn]:
    M, N, dtype = r.choice((4096, 8192, 16384)), r.choice((2048, 4096, 8192)), r.choice((BF16, FP16))
    for BM, BN, warps in shuffled(r, (4, 8, 16, 32), (128, 256, 512), (2, 4, 8)):

        def make(device: str, BM=BM, BN=BN, warps=warps) -> Call:
            a, x = values(M, N, device=device, dtype=dtype), values(N, device=device, dtype=dtype)
            out = torch.empty(M, dtype=dtype, device=device)
            return lambda: kernels.gemv[(cdiv(M, BM),)](a, x, out, M, N, BM=BM, BN=BN, num_warps=warps)

        yield f"{M}x{N} {SHORT[dtype]}", f"{BM}x{BN} w{warps}", make


@family
def copy_boxes(r: random.Random) -> Iterator[Drawn]:
    M, N, dtype = r.choice((4096, 8192)), r.choice((2048, 4096, 8192)), r.choice((BF16, FP32))
    for BM, BN, warps in shuffled(r, (16, 32, 64, 128), (64, 128), (4, 8)):

        def make(device: str, BM=BM, BN=BN, warps=warps) -> Call:
            from triton.tools.tensor_descriptor import TensorDescriptor

            x = values(M, N, device=device, dtype=dtype)
            out = torch.empty_like(x)
            given = [TensorDescriptor.from_tensor(t, [BM, BN]) for t in (x, out)]
            return lambda: kernels.copy_boxes[(M // BM, N // BN)](*given, BM=BM, BN=BN, num_warps=warps)

        yield f"{M}x{N} {SHORT[dtype]}", f"{BM}x{BN} w{warps}", make
