"""A fifth set, of seven kernels, drawn at random by SEED."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from softsm_time.case import BF16, FP16, FP32, SHORT, Call, cdiv, empty, values
from softsm_time.drawing import Drawn, Families, shuffled
from softsm_time.users import draw
from softsm_time.users.kernels import fifth as kernels

SEED = 20261819
drawn = Families()


@drawn
def gelu_bias(r: random.Random) -> Iterator[Drawn]:
    rows, columns, dtype = r.choice((2048, 8192)), r.choice((3072, 4096, 11008)), r.choice((BF16, FP32))
    for block, warps in shuffled(r, (512, 1024, 4096), (4, 8)):

        def make(device: str, block=block, warps=warps) -> Call:
            x, bias = values(rows, columns, device=device, dtype=dtype), values(columns, device=device)
            y = torch.empty_like(x)
            return lambda: kernels.gelu_bias[(rows,)](x, bias, y, columns, BLOCK=block, num_warps=warps)

        yield f"{rows}x{columns} {SHORT[dtype]}", f"b{block} w{warps}", make


@drawn
def search_sorted(r: random.Random) -> Iterator[Drawn]:
    edges, n = r.choice((255, 4000, 1 << 20)), r.choice((1 << 20, 1 << 22))
    for block, warps in shuffled(r, (128, 256, 1024), (1, 4, 8)):

        def make(device: str, block=block, warps=warps) -> Call:
            found = torch.rand(edges).sort().values.to(device)
            x, out = torch.rand(n).to(device), empty(n, device=device, dtype=torch.int32)
            steps = edges.bit_length() + 1
            return lambda: kernels.search_sorted[(cdiv(n, block),)](
                found, x, out, edges, n, STEPS=steps, BLOCK=block, num_warps=warps
            )

        yield f"{n} in {edges}", f"b{block} w{warps}", make


@drawn
def add_noise(r: random.Random) -> Iterator[Drawn]:
    n, dtype = r.choice((1 << 22, 1 << 24, 3 << 24)), r.choice((BF16, FP16, FP32))
    for block, warps in shuffled(r, (256, 512, 1024), (4, 8)):

        def make(device: str, block=block, warps=warps) -> Call:
            x = values(n, device=device, dtype=dtype)
            out = torch.empty_like(x)
            return lambda: kernels.add_noise[(cdiv(n, block * 4),)](x, out, n, 0.1, 7, BLOCK=block, num_warps=warps)

        yield f"{n} {str(dtype)[6:]}", f"b{block} w{warps}", make


@drawn
def grouped_by_address(r: random.Random) -> Iterator[Drawn]:
    sizes = [[256 * r.randint(1, 12), r.choice((1024, 2048)), r.choice((1024, 4096))] for _ in range(r.choice((4, 8)))]
    flops = sum(2 * m * n * k for m, n, k in sizes)
    for bm, bn, stages, warps in shuffled(r, (64, 128), (64, 128), (3, 4), (4, 8)):

        def make(device: str, bm=bm, bn=bn, stages=stages, warps=warps) -> Call:
            a = [values(m, k, device=device) for m, n, k in sizes]
            b = [values(k, n, device=device) for m, n, k in sizes]
            c = [empty(m, n, device=device) for m, n, k in sizes]
            at = [torch.tensor([x.data_ptr() for x in xs]).to(device) for xs in (a, b, c)]
            size = torch.tensor(sizes, dtype=torch.int32).to(device)
            leading = torch.tensor([[k, n, n] for m, n, k in sizes], dtype=torch.int32).to(device)
            keep = a, b, c  # the kernel has their addresses alone

            def call(keep=keep) -> None:
                kernels.grouped_matmul[(132,)](
                    *at, size, leading, len(sizes), SMS=132, BLOCK_M=bm, BLOCK_N=bn, BLOCK_K=64, num_stages=stages,
                    num_warps=warps,
                )  # fmt: skip

            return call

        yield f"{len(sizes)} {flops / 1e9:.0f} GFLOP", f"{bm}x{bn} s{stages} w{warps}", make


@drawn
def pendulum_fp64(r: random.Random) -> Iterator[Drawn]:
    n, steps = r.choice((1 << 16, 1 << 20)), r.choice((64, 256))
    for block, warps in shuffled(r, (128, 256, 512), (2, 4)):

        def make(device: str, block=block, warps=warps) -> Call:
            angle, speed = (values(n, device=device, dtype=torch.float64) for _ in "av")
            return lambda: kernels.pendulum[(cdiv(n, block),)](
                angle, speed, n, steps, 0.001, BLOCK=block, num_warps=warps
            )

        yield f"{n} x {steps}", f"b{block} w{warps}", make


@drawn
def game_of_life(r: random.Random) -> Iterator[Drawn]:
    h, w = r.choice((1024, 4096)), r.choice((2048, 8192))
    for by, bx, warps in shuffled(r, (1, 4, 16), (128, 256), (2, 4)):

        def make(device: str, by=by, bx=bx, warps=warps) -> Call:
            cells = torch.randint(0, 2, (h, w), dtype=torch.int8).to(device)
            after = torch.empty_like(cells)
            return lambda: kernels.life[(w // bx, h // by)](cells, after, h, w, BLOCK_Y=by, BLOCK_X=bx, num_warps=warps)

        yield f"{h}x{w}", f"{by}x{bx} w{warps}", make


@drawn
def edit_distance(r: random.Random) -> Iterator[Drawn]:
    pairs, length = r.choice((1024, 8192)), r.choice((64, 200))
    for block, warps in ((block, warps) for block in r.sample((64, 256), 1) for warps in r.sample((1, 2, 4), 3)):

        def make(device: str, block=block, warps=warps) -> Call:
            a, b = (torch.randint(0, 4, (pairs, n), dtype=torch.int32).to(device) for n in (length, block))
            out = empty(pairs, device=device, dtype=torch.int32)
            return lambda: kernels.edit_distance[(pairs,)](a, b, out, length, BLOCK=block, num_warps=warps)

        yield f"{pairs} of {length} by {block}", f"w{warps}", make


CASES = draw(drawn, SEED)
