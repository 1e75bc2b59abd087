"""A fourth set, of twelve kernels, drawn at random by SEED."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from softsm_time.case import BF16, FP8, FP16, FP32, INT8, SHORT, Call, cdiv, empty, numbers, power, typed, values
from softsm_time.drawing import Drawn, Families, shuffled
from softsm_time.users import draw
from softsm_time.users.kernels import fourth as kernels

SEED = 20261717
drawn = Families()


@drawn
def persistent_fp8(r: random.Random) -> Iterator[Drawn]:
    M, N, K = r.choice((2048, 4096, 8192)), r.choice((2048, 4096)), r.choice((2048, 4096))
    for (bm, bn), bk, stages, warps in shuffled(r, ((128, 128), (128, 256), (64, 128)), (64, 128), (3, 4), (4, 8)):
        if stages * (bm + bn) * bk > 200 << 10 or bm * bn // warps > 4096:
            continue

        def make(device: str, bm=bm, bn=bn, bk=bk, stages=stages, warps=warps) -> Call:
            a, b = typed(M, K, device=device, dtype=FP8), typed(N, K, device=device, dtype=FP8)
            c = empty(M, N, device=device, dtype=FP16)
            return lambda: kernels.persistent_matmul[(132,)](
                a, b, c, M, N, K, BLOCK_M=bm, BLOCK_N=bn, BLOCK_K=bk, GROUP=8, SMS=132, num_stages=stages,
                num_warps=warps,
            )  # fmt: skip

        yield f"{M}x{N}x{K}", f"{bm}x{bn}x{bk} s{stages} w{warps}", make


@drawn
def int8_linear(r: random.Random) -> Iterator[Drawn]:
    M, N, K = r.choice((77, 1024, 4096)), r.choice((3072, 4096, 12288)), r.choice((1024, 4096))
    for (bm, bn), bk, stages, warps in shuffled(r, ((64, 64), (128, 128), (64, 128)), (64, 128), (2, 3, 4), (4, 8)):

        def make(device: str, bm=bm, bn=bn, bk=bk, stages=stages, warps=warps) -> Call:
            a, b = typed(M, K, device=device, dtype=INT8), typed(N, K, device=device, dtype=INT8)
            sa, sb = values(M, device=device, dtype=FP32), values(N, device=device, dtype=FP32)
            bias, c = values(N, device=device), empty(M, N, device=device)
            return lambda: kernels.int8_linear[(cdiv(M, bm), N // bn)](
                a, b, sa, sb, bias, c, M, N, K, BLOCK_M=bm, BLOCK_N=bn, BLOCK_K=bk, num_stages=stages, num_warps=warps
            )

        yield f"{M}x{N}x{K}", f"{bm}x{bn}x{bk} s{stages} w{warps}", make


@drawn
def stream_k_sums(r: random.Random) -> Iterator[Drawn]:
    M, N, K = r.choice((512, 1024, 1536)), r.choice((1536, 2048, 3072)), r.choice((2048, 4096, 8192))
    for (bm, bn), bk, stages, warps in shuffled(r, ((64, 128), (128, 128)), (32, 64), (3, 4), (4, 8)):

        def make(device: str, bm=bm, bn=bn, bk=bk, stages=stages, warps=warps) -> Call:
            a, b = values(M, K, device=device, dtype=FP16), values(K, N, device=device, dtype=FP16)
            c, each = torch.zeros(M, N, device=device), cdiv(cdiv(M, bm) * (N // bn) * (K // bk), 132)
            return lambda: kernels.stream_k_sums[(132,)](
                a, b, c, M, N, K, each, BLOCK_M=bm, BLOCK_N=bn, BLOCK_K=bk, num_stages=stages, num_warps=warps
            )

        yield f"{M}x{N}x{K}", f"{bm}x{bn}x{bk} s{stages} w{warps}", make


@drawn
def cross_entropy_in_place(r: random.Random) -> Iterator[Drawn]:
    rows, columns, dtype = r.choice((1024, 4096, 8192)), r.choice((32000, 50257, 128256)), r.choice((BF16, FP32))
    for block, warps in shuffled(r, (2048, 4096, 8192, 16384), (4, 8, 16, 32)):

        def make(device: str, block=block, warps=warps) -> Call:
            x, target = values(rows, columns, device=device, dtype=dtype), numbers(rows, columns, device)
            loss = empty(rows, device=device, dtype=FP32)
            return lambda: kernels.cross_entropy[(rows,)](x, target, loss, columns, 0.1, BLOCK=block, num_warps=warps)

        yield f"{rows}x{columns} {SHORT[dtype]}", f"b{block} w{warps}", make


@drawn
def geglu_backward(r: random.Random) -> Iterator[Drawn]:
    n = r.choice((1 << 20, 1 << 24, 3 << 23))
    for block, warps in shuffled(r, (256, 1024, 4096), (4, 8)):

        def make(device: str, block=block, warps=warps) -> Call:
            dy, gate, up = (values(n, device=device) for _ in "dgu")
            return lambda: kernels.geglu_backward[(cdiv(n, block),)](dy, gate, up, n, BLOCK=block, num_warps=warps)

        yield f"{n}", f"b{block} w{warps}", make


@drawn
def chunk_attention(r: random.Random) -> Iterator[Drawn]:
    heads, T, D = r.choice((32, 64, 128)), r.choice((1024, 2048)), r.choice((64, 128))
    for C, bv, stages, warps in shuffled(r, (32, 64), (32, 64), (1, 2), (2, 4)):

        def make(device: str, C=C, bv=bv, stages=stages, warps=warps) -> Call:
            q, k, v, o = (values(heads, T, D, device=device) for _ in "qkvo")
            g = -values(heads, T, device=device, dtype=FP32).abs() * 0.1
            return lambda: kernels.chunk_attention[(D // bv, heads)](
                q, k, v, g, o, T, D**-0.5, C=C, D=D, BV=bv, num_stages=stages, num_warps=warps
            )

        yield f"{heads}x{T}x{D}", f"c{C} v{bv} s{stages} w{warps}", make


@drawn
def embedding_backward(r: random.Random) -> Iterator[Drawn]:
    n, table, columns = r.choice((4096, 16384)), r.choice((1000, 32000, 128000)), r.choice((512, 1024, 2048))
    for rows, block, warps in shuffled(r, (1, 4, 8), (256, 512), (4, 8)):

        def make(device: str, rows=rows, block=block, warps=warps) -> Call:
            index, dy = numbers(n, table, device), values(n, columns, device=device)
            dw = torch.zeros(table, columns, device=device)
            return lambda: kernels.embedding_backward[(n // rows, columns // block)](
                index, dy, dw, n, columns, ROWS=rows, BLOCK=block, num_warps=warps
            )

        yield f"{n} of {table} x {columns}", f"r{rows} b{block} w{warps}", make


@drawn
def sort_rows(r: random.Random) -> Iterator[Drawn]:
    rows, columns, k = r.choice((512, 4096, 16384)), r.choice((100, 500, 1024, 2000)), r.choice((8, 32))
    for (warps,) in shuffled(r, (1, 2, 4, 8)):

        def make(device: str, warps=warps) -> Call:
            x = values(rows, columns, device=device)
            best, index = empty(rows, k, device=device), empty(rows, k, device=device, dtype=torch.int32)
            block = power(columns)
            return lambda: kernels.sort_rows[(rows,)](x, best, index, columns, BLOCK=block, K=k, num_warps=warps)

        yield f"{rows}x{columns} best {k}", f"w{warps}", make


@drawn
def quantise_groups(r: random.Random) -> Iterator[Drawn]:
    rows, columns, group = r.choice((4096, 11008)), r.choice((4096, 8192)), r.choice((64, 128))
    for each, warps in shuffled(r, (4, 16, 32), (1, 2, 4)):

        def make(device: str, each=each, warps=warps) -> Call:
            x, q = (
                values(rows, columns, device=device, dtype=FP16),
                torch.zeros(rows, columns // 2, dtype=torch.uint8, device=device),
            )
            scale, zero = (empty(rows, columns // group, device=device, dtype=FP32) for _ in "sz")
            return lambda: kernels.quantise_groups[(rows // each, columns // group)](
                x, q, scale, zero, columns, GROUP=group, ROWS=each, num_warps=warps
            )

        yield f"{rows}x{columns} by {group}", f"r{each} w{warps}", make


@drawn
def bias_gradient(r: random.Random) -> Iterator[Drawn]:
    rows, columns, dtype = r.choice((8192, 32768)), r.choice((1000, 4096, 12288)), r.choice((BF16, FP32))
    for each, br, bc, warps in shuffled(r, (128, 512), (16, 32), (64, 128, 256), (4, 8)):

        def make(device: str, each=each, br=br, bc=bc, warps=warps) -> Call:
            dy, db = values(rows, columns, device=device, dtype=dtype), torch.zeros(columns, device=device)
            return lambda: kernels.bias_gradient[(cdiv(columns, bc), rows // each)](
                dy, db, rows, columns, ROWS=each, BLOCK_R=br, BLOCK_C=bc, num_warps=warps
            )

        yield f"{rows}x{columns} {SHORT[dtype]}", f"{each} {br}x{bc} w{warps}", make


@drawn
def keys_backward(r: random.Random) -> Iterator[Drawn]:
    heads, T, D = r.choice((16, 32, 64)), r.choice((1024, 2048, 4096)), r.choice((64, 128))
    for bm, bn, stages, warps in shuffled(r, (32, 64), (64, 128), (1, 2, 3), (4, 8)):

        def make(device: str, bm=bm, bn=bn, stages=stages, warps=warps) -> Call:
            q, k, v, do, dk, dv = (values(heads, T, D, device=device, dtype=FP16) for _ in range(6))
            lse, delta = (values(heads, T, device=device, dtype=FP32) for _ in "ld")
            return lambda: kernels.keys_backward[(T // bn, heads)](
                q, k, v, do, lse, delta, dk, dv, T, D**-0.5, D=D, BLOCK_M=bm, BLOCK_N=bn, num_stages=stages,
                num_warps=warps,
            )  # fmt: skip

        yield f"{heads}x{T}x{D}", f"{bm}x{bn} s{stages} w{warps}", make


@drawn
def neighbour_max(r: random.Random) -> Iterator[Drawn]:
    nodes, degree, columns = r.choice((4096, 20000)), r.choice((8, 32)), r.choice((64, 128, 256))
    for be, bc, warps in shuffled(r, (8, 16, 32), (64,), (1, 2, 4)):

        def make(device: str, be=be, bc=bc, warps=warps) -> Call:
            first = torch.cat((torch.zeros(1), torch.randint(1, 2 * degree, (nodes,)).cumsum(0))).to(torch.int32)
            x, out = values(nodes, columns, device=device), empty(nodes, columns, device=device)
            neighbour = numbers(int(first[-1]), nodes, device)
            first = first.to(device)
            return lambda: kernels.neighbour_max[(nodes, columns // bc)](
                x, first, neighbour, out, columns, BLOCK_E=be, BLOCK_C=bc, num_warps=warps
            )

        yield f"{nodes} by {degree} x {columns}", f"{be}x{bc} w{warps}", make


CASES = draw(drawn, SEED)
