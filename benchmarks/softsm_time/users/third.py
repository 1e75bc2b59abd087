"""A third set, of thirteen kernels, with two variants of two shapes each, drawn at random by SEED."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from softsm_time.case import BF16, FP16, FP32, SHORT, Call, cdiv, empty, numbers, power, values
from softsm_time.drawing import Drawn, Families, shuffled
from softsm_time.users import draw
from softsm_time.users.kernels import third as kernels

SEED = 20261119
drawn = Families()


@drawn
def flash_backward(r: random.Random) -> Iterator[Drawn]:
    heads, T, D, causal = r.choice((16, 32, 64)), r.choice((1024, 2048, 4096)), r.choice((64, 128)), r.random() < 0.5
    for bm, bn, stages, warps in shuffled(r, (32, 64), (64, 128), (1, 2), (4, 8)):

        def make(device: str, bm=bm, bn=bn, stages=stages, warps=warps) -> Call:
            q, k, v, do, dk, dv = (values(heads, T, D, device=device) for _ in range(6))
            lse, delta = (values(heads, T, device=device, dtype=FP32) for _ in "ld")
            dq = torch.zeros(heads, T, D, device=device)
            return lambda: kernels.flash_backward[(T // bn, heads)](
                q, k, v, do, lse, delta, dq, dk, dv, T, D**-0.5, D=D, BLOCK_M=bm, BLOCK_N=bn, CAUSAL=causal,
                num_stages=stages, num_warps=warps,
            )  # fmt: skip

        yield f"{heads}x{T}x{D}{' causal' * causal}", f"{bm}x{bn} s{stages} w{warps}", make


@drawn
def pair_bias_attention(r: random.Random) -> Iterator[Drawn]:
    T, D, heads = r.choice((256, 384, 512, 768)), r.choice((32, 64)), r.choice((4, 8))
    for bm, bn, stages, warps in shuffled(r, (64, 128), (32, 64, 128), (2, 3), (4, 8)):

        def make(device: str, bm=bm, bn=bn, stages=stages, warps=warps) -> Call:
            q, k, v, out = (values(T, heads, T, D, device=device) for _ in "qkvo")
            bias, mask = values(heads, T, T, device=device), torch.ones(T, T, device=device, dtype=torch.uint8)
            return lambda: kernels.pair_bias_attention[(cdiv(T, bm), T * heads)](
                q, k, v, bias, mask, out, T, heads, D**-0.5, D=D, BLOCK_M=bm, BLOCK_N=bn, num_stages=stages,
                num_warps=warps,
            )  # fmt: skip

        if bm <= T:
            yield f"{T}x{heads}x{T}x{D}", f"{bm}x{bn} s{stages} w{warps}", make


@drawn
def latent_decode(r: random.Random) -> Iterator[Drawn]:
    requests, heads, length = r.choice((8, 32, 64)), r.choice((16, 32, 128)), r.choice((2048, 4096, 8192))
    for bn, splits, warps, stages in shuffled(r, (16, 32), (4, 8), (4, 8), (1, 2)):

        def make(device: str, bn=bn, splits=splits, warps=warps, stages=stages) -> Call:
            pages = length // 64
            q, qr = values(requests, heads, 512, device=device), values(requests, heads, 64, device=device)
            cache = values(requests * pages, 64, 576, device=device)
            table = torch.randperm(requests * pages, device=device).to(torch.int32).view(requests, pages)
            lengths = torch.full((requests,), length - 37, device=device, dtype=torch.int32)
            out = empty(requests, heads, splits, 512, device=device, dtype=FP32)
            lse = empty(requests, heads, splits, device=device, dtype=FP32)
            return lambda: kernels.latent_decode[(requests, heads // 16, splits)](
                q, qr, cache, table, lengths, out, lse, heads, pages, 0.0417, SPLITS=splits, L=512, R=64, PAGE=64,
                BLOCK_H=16, BLOCK_N=bn, num_stages=stages, num_warps=warps,
            )  # fmt: skip

        yield f"{requests}x{heads}x{length}", f"b{bn} in {splits} s{stages} w{warps}", make


@drawn
def hash_grid(r: random.Random) -> Iterator[Drawn]:
    points, log, F = r.choice((1 << 18, 1 << 19, 1 << 20)), r.choice((15, 17, 19)), r.choice((2, 4))
    for block, warps in shuffled(r, (128, 256, 512), (4, 8)):

        def make(device: str, block=block, warps=warps) -> Call:
            xyz, table = torch.rand(points, 3).to(device), values(16 << log, F, device=device, dtype=FP16)
            sizes = torch.tensor([16 * 1.45**n for n in range(16)]).floor().to(device)
            out = empty(points, 16 * F, device=device, dtype=FP16)
            return lambda: kernels.hash_grid[(points // block, 16)](
                xyz, table, sizes, out, points, LEVELS=16, WORDS=1 << log, F=F, BLOCK=block, num_warps=warps
            )

        yield f"{points} in 2^{log} x{F}", f"b{block} w{warps}", make


@drawn
def cholesky(r: random.Random) -> Iterator[Drawn]:
    N, many = r.choice((16, 32, 64)), r.choice((2048, 8192, 16384))
    for (warps,) in shuffled(r, (1, 2, 4)):

        def make(device: str, warps=warps) -> Call:
            a = (torch.eye(N) * N).expand(many, N, N).contiguous().to(device)
            out = torch.empty_like(a)
            return lambda: kernels.cholesky[(many,)](a, out, N=N, num_warps=warps)

        yield f"{many}x{N}x{N}", f"w{warps}", make


@drawn
def sinkhorn(r: random.Random) -> Iterator[Drawn]:
    N, many, steps = r.choice((4, 8, 16)), r.choice((16384, 65536)), r.choice((10, 20))
    for rows, warps in shuffled(r, (4, 8, 16), (1, 2, 4)):

        def make(device: str, rows=rows, warps=warps) -> Call:
            x = values(many, N, N, device=device, dtype=FP32)
            out = torch.empty_like(x)
            return lambda: kernels.sinkhorn[(many // rows,)](x, out, steps, 1e-6, N=N, ROWS=rows, num_warps=warps)

        yield f"{many}x{N}x{N} {steps} steps", f"{rows} w{warps}", make


@drawn
def mandelbrot(r: random.Random) -> Iterator[Drawn]:
    side, limit = r.choice((1024, 2048)), r.choice((64, 256))
    for bx, by, warps in shuffled(r, (16, 32, 64), (8, 16), (2, 4)):

        def make(device: str, bx=bx, by=by, warps=warps) -> Call:
            out = empty(side, side, device=device, dtype=torch.int32)
            return lambda: kernels.mandelbrot[(side // bx, side // by)](
                out, side, side, -2.0, -1.25, 2.5 / side, limit, BLOCK_X=bx, BLOCK_Y=by, num_warps=warps
            )

        yield f"{side}x{side} to {limit}", f"{by}x{bx} w{warps}", make


@drawn
def binary_matmul(r: random.Random) -> Iterator[Drawn]:
    side, words = r.choice((1024, 2048, 4096)), r.choice((32, 64, 128))
    for bm, bn, warps in shuffled(r, (32, 64), (64, 128), (4, 8)):

        def make(device: str, bm=bm, bn=bn, warps=warps) -> Call:
            a, b = (numbers(side * words, 1 << 30, device) for _ in "ab")
            out = empty(side, side, device=device, dtype=torch.int32)
            return lambda: kernels.binary_matmul[(side // bm, side // bn)](
                a, b, out, side, side, words, BLOCK_M=bm, BLOCK_N=bn, num_warps=warps
            )

        yield f"{side}x{side}x{words * 32}", f"{bm}x{bn} w{warps}", make


@drawn
def edge_scores(r: random.Random) -> Iterator[Drawn]:
    nodes, edges, D = r.choice((20_000, 170_000)), r.choice((500_000, 2_000_000)), r.choice((64, 128, 256))
    for block, warps in shuffled(r, (8, 16, 32, 64), (2, 4)):

        def make(device: str, block=block, warps=warps) -> Call:
            x, y = values(nodes, D, device=device, dtype=FP16), values(nodes, D, device=device, dtype=FP16)
            source, target = numbers(edges, nodes, device).sort()[0], numbers(edges, nodes, device)
            out = empty(edges, device=device, dtype=FP32)
            return lambda: kernels.edge_scores[(cdiv(edges, block),)](
                x, y, source, target, out, edges, D=D, BLOCK=block, num_warps=warps
            )

        yield f"{edges} of {nodes}x{D}", f"b{block} w{warps}", make


@drawn
def image_planes(r: random.Random) -> Iterator[Drawn]:
    images, side = r.choice((32, 128, 256)), r.choice((224, 384, 512))
    for block, warps in shuffled(r, (256, 512, 1024, 2048), (4, 8)):

        def make(device: str, block=block, warps=warps) -> Call:
            x = torch.randint(0, 256, (images, side, side, 3), dtype=torch.uint8).to(device)
            out = empty(images, 3, side, side, device=device, dtype=FP16)
            mean, std = values(3, device=device, dtype=FP32), values(3, device=device, dtype=FP32)
            return lambda: kernels.image_planes[(cdiv(side * side, block), images)](
                x, out, mean, std, side, side, BLOCK=block, num_warps=warps
            )

        yield f"{images}x{side}x{side}", f"b{block} w{warps}", make


@drawn
def persistent_softmax(r: random.Random) -> Iterator[Drawn]:
    rows, columns, dtype = r.choice((4096, 16384)), r.choice((781, 1823, 4096, 6144)), r.choice((FP32, BF16))
    for many, stages, warps in shuffled(r, (1, 2, 4), (2, 4), (4, 8)):

        def make(device: str, many=many, stages=stages, warps=warps) -> Call:
            x = values(rows, columns, device=device, dtype=dtype)
            out, block = torch.empty_like(x), power(columns)
            return lambda: kernels.persistent_softmax[(132 * many,)](
                x, out, rows, columns, STAGES=stages, BLOCK=block, num_warps=warps
            )

        yield f"{rows}x{columns} {SHORT[dtype]}", f"{132 * many} s{stages} w{warps}", make


@drawn
def linear_gelu_residual(r: random.Random) -> Iterator[Drawn]:
    M, N, K = r.choice((1000, 4096, 8192)), r.choice((1536, 4096, 5120)), r.choice((768, 1280, 4096))
    for bm, bn, bk, stages, warps in shuffled(r, (64, 128), (64, 128, 256), (32, 64), (3, 4), (4, 8)):
        if stages * (bm + bn) * bk * 2 > 200 << 10 or bm * bn // warps > 4096:
            continue

        def make(device: str, bm=bm, bn=bn, bk=bk, stages=stages, warps=warps) -> Call:
            x, w, b = values(M, K, device=device), values(N, K, device=device), values(N, device=device)
            res, out = values(M, N, device=device), empty(M, N, device=device)
            return lambda: kernels.linear_gelu_residual[(cdiv(M, bm) * cdiv(N, bn),)](
                x, w, b, res, out, M, N, K, BLOCK_M=bm, BLOCK_N=bn, BLOCK_K=bk, GROUP=8, num_stages=stages,
                num_warps=warps,
            )  # fmt: skip

        yield f"{M}x{N}x{K}", f"{bm}x{bn}x{bk} s{stages} w{warps}", make


@drawn
def fft_rows(r: random.Random) -> Iterator[Drawn]:
    N, many = r.choice((32, 64)), r.choice((2048, 8192, 16384))
    for (warps,) in shuffled(r, (1, 2, 4, 8)):

        def make(device: str, warps=warps) -> Call:
            re, im, xr, xi = (values(many, N, N, device=device, dtype=FP16) for _ in "rixy")
            tables = [values(N, N, device=device, dtype=FP16) for _ in range(4)]
            return lambda: kernels.fft_rows[(many,)](re, im, *tables, xr, xi, N=N, num_warps=warps)

        yield f"{many}x{N * N}", f"w{warps}", make


CASES = draw(drawn, SEED)
