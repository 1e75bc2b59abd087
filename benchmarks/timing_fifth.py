"""A fifth set of kernels as users bring them, of kinds that no other set has: two shapes of each with two variants,
drawn at random by SEED (timing_third.drawn_cases). Predicted, committed, then measured.

python benchmarks/timing.py --set fifth --predict --json FILE     # then --measure on an H200, --table
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from timing_case import Call, Case, empty, values
from timing_family import BF16, FP16, FP32, Drawn, cdiv, shuffled
from timing_third import drawn_cases

SEED = 20261819


@triton.jit
def gelu_bias(X, BIAS, Y, columns, BLOCK: tl.constexpr):
    """The exact gelu of a row and a bias; erf branches for each number."""
    row = tl.program_id(0).to(tl.int64) * columns
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(X + row + at, mask=at < columns).to(tl.float32)
        x += tl.load(BIAS + at, mask=at < columns).to(tl.float32)
        y = x * 0.5 * (1.0 + tl.math.erf(x * 0.70710678))
        tl.store(Y + row + at, y.to(Y.dtype.element_ty), mask=at < columns)


@triton.jit
def search_sorted(EDGES, X, OUT, edges, n, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """For each number the first edge that is not below it, by bisection."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + at, mask=at < n, other=0.0)
    low, high = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32) + edges
    for _ in range(STEPS):
        middle = (low + high) // 2
        below = (tl.load(EDGES + tl.minimum(middle, edges - 1)) < x) & (low < high)
        low = tl.where(below, middle + 1, low)
        high = tl.where(below, high, middle)
    tl.store(OUT + at, low, mask=at < n)


@triton.jit
def add_noise(X, OUT, n, scale, seed, BLOCK: tl.constexpr):
    """Normal noise by Philox, four numbers from each counter."""
    counter = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b, c, d = tl.randn4x(seed, counter)
    at = tl.program_id(0) * BLOCK * 4 + tl.arange(0, BLOCK)
    for k in tl.static_range(4):
        noise = a if k == 0 else (b if k == 1 else (c if k == 2 else d))
        here = at + k * BLOCK
        x = tl.load(X + here, mask=here < n, other=0.0).to(tl.float32)
        tl.store(OUT + here, (x + scale * noise).to(OUT.dtype.element_ty), mask=here < n)


@triton.jit
def grouped_matmul(
    A, B, C, SIZES, LEADING, groups, SMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Products of several sizes in one launch; addresses and sizes lie in memory, a program has every SMS-th tile."""
    tile, before = tl.program_id(0), 0
    for g in range(groups):
        m, n, k = tl.load(SIZES + g * 3), tl.load(SIZES + g * 3 + 1), tl.load(SIZES + g * 3 + 2)
        columns = tl.cdiv(n, BLOCK_N)
        tiles = tl.cdiv(m, BLOCK_M) * columns
        while tile >= before and tile < before + tiles:
            lda, ldb = tl.load(LEADING + g * 3), tl.load(LEADING + g * 3 + 1)
            ldc = tl.load(LEADING + g * 3 + 2)
            a_base = tl.load(A + g).to(tl.pointer_type(tl.bfloat16))
            b_base = tl.load(B + g).to(tl.pointer_type(tl.bfloat16))
            c_base = tl.load(C + g).to(tl.pointer_type(tl.bfloat16))
            rows = (tile - before) // columns * BLOCK_M + tl.arange(0, BLOCK_M)
            cols = (tile - before) % columns * BLOCK_N + tl.arange(0, BLOCK_N)
            inner = tl.arange(0, BLOCK_K)
            a = a_base + rows[:, None] * lda + inner[None, :]
            b = b_base + inner[:, None] * ldb + cols[None, :]
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for _ in range(tl.cdiv(k, BLOCK_K)):
                tl.multiple_of(a, [16, 16])
                tl.multiple_of(b, [16, 16])
                acc = tl.dot(tl.load(a), tl.load(b), acc)
                a += BLOCK_K
                b += BLOCK_K * ldb
            tl.store(c_base + rows[:, None] * ldc + cols[None, :], acc.to(tl.bfloat16))
            tile += SMS
        before += tiles


@triton.jit
def pendulum(ANGLE, SPEED, n, steps, dt, BLOCK: tl.constexpr):
    """Steps of an integration in double precision."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, v = tl.load(ANGLE + at, mask=at < n, other=0.0), tl.load(SPEED + at, mask=at < n, other=0.0)
    for _ in range(steps):
        y = x * x
        force = -x * (1.0 + y * (-0.16666666 + y * (0.0083333333 - y * 0.000198412698)))
        v += dt * force
        x += dt * v
    tl.store(ANGLE + at, x, mask=at < n)
    tl.store(SPEED + at, v, mask=at < n)


@triton.jit
def life(CELLS, NEXT, H, W, BLOCK_Y: tl.constexpr, BLOCK_X: tl.constexpr):
    """A step of Conway's game on bytes, the world closed in both directions."""
    y = tl.program_id(1) * BLOCK_Y + tl.arange(0, BLOCK_Y)
    x = tl.program_id(0) * BLOCK_X + tl.arange(0, BLOCK_X)
    total = tl.zeros([BLOCK_Y, BLOCK_X], tl.int32)
    for dy in tl.static_range(3):
        for dx in tl.static_range(3):
            if dy != 1 or dx != 1:
                at = ((y + H + dy - 1) % H)[:, None] * W + ((x + W + dx - 1) % W)[None, :]
                total += tl.load(CELLS + at).to(tl.int32)
    here = y[:, None] * W + x[None, :]
    alive = tl.load(CELLS + here).to(tl.int32)
    tl.store(NEXT + here, ((total == 3) | ((total == 2) & (alive == 1))).to(tl.int8))


@triton.jit
def edit_distance(A, B, OUT, length, BLOCK: tl.constexpr):
    """Levenshtein distance of a pair of words, a row of the table at a time: the row's minima come from a scan."""
    pair = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    letters = tl.load(B + pair * BLOCK + at)
    row = at + 1
    for i in range(length):
        letter = tl.load(A + pair * length + i)
        diagonal = tl.where(at == 0, i, tl.gather(row, tl.maximum(at - 1, 0), 0))
        new = tl.minimum(diagonal + (letters != letter).to(tl.int32), row + 1)
        new = tl.minimum(new, i + 2 + at)
        row = tl.associative_scan(new - at, 0, _least) + at
    tl.store(OUT + pair, tl.max(tl.where(at == BLOCK - 1, row, 0)))


@triton.jit
def _least(a, b):
    return tl.minimum(a, b)


def gelu_of(r: random.Random) -> Iterator[Drawn]:
    rows, columns, dtype = r.choice((2048, 8192)), r.choice((3072, 4096, 11008)), r.choice((BF16, FP32))
    for block, warps in shuffled(r, (512, 1024, 4096), (4, 8)):

        def make(device: str, block=block, warps=warps) -> Call:
            x, bias = values(rows, columns, device=device, dtype=dtype), values(columns, device=device)
            y = torch.empty_like(x)
            return lambda: gelu_bias[(rows,)](x, bias, y, columns, BLOCK=block, num_warps=warps)

        yield f"{rows}x{columns} {'fp32' if dtype == FP32 else 'bf16'}", f"b{block} w{warps}", make


def search_of(r: random.Random) -> Iterator[Drawn]:
    edges, n = r.choice((255, 4000, 1 << 20)), r.choice((1 << 20, 1 << 22))
    for block, warps in shuffled(r, (128, 256, 1024), (1, 4, 8)):

        def make(device: str, block=block, warps=warps) -> Call:
            found = torch.rand(edges).sort().values.to(device)
            x, out = torch.rand(n).to(device), empty(n, device=device, dtype=torch.int32)
            steps = edges.bit_length() + 1
            return lambda: search_sorted[(cdiv(n, block),)](
                found, x, out, edges, n, STEPS=steps, BLOCK=block, num_warps=warps
            )

        yield f"{n} in {edges}", f"b{block} w{warps}", make


def noise_of(r: random.Random) -> Iterator[Drawn]:
    n, dtype = r.choice((1 << 22, 1 << 24, 3 << 24)), r.choice((BF16, FP16, FP32))
    for block, warps in shuffled(r, (256, 512, 1024), (4, 8)):

        def make(device: str, block=block, warps=warps) -> Call:
            x = values(n, device=device, dtype=dtype)
            out = torch.empty_like(x)
            return lambda: add_noise[(cdiv(n, block * 4),)](x, out, n, 0.1, 7, BLOCK=block, num_warps=warps)

        yield f"{n} {str(dtype)[6:]}", f"b{block} w{warps}", make


def groups_of(r: random.Random) -> Iterator[Drawn]:
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
                grouped_matmul[(132,)](*at, size, leading, len(sizes), SMS=132, BLOCK_M=bm, BLOCK_N=bn, BLOCK_K=64,
                                       num_stages=stages, num_warps=warps)  # fmt: skip

            return call

        yield f"{len(sizes)} {flops / 1e9:.0f} GFLOP", f"{bm}x{bn} s{stages} w{warps}", make


def pendulum_of(r: random.Random) -> Iterator[Drawn]:
    n, steps = r.choice((1 << 16, 1 << 20)), r.choice((64, 256))
    for block, warps in shuffled(r, (128, 256, 512), (2, 4)):

        def make(device: str, block=block, warps=warps) -> Call:
            angle, speed = (values(n, device=device, dtype=torch.float64) for _ in "av")
            return lambda: pendulum[(cdiv(n, block),)](angle, speed, n, steps, 0.001, BLOCK=block, num_warps=warps)

        yield f"{n} x {steps}", f"b{block} w{warps}", make


def life_of(r: random.Random) -> Iterator[Drawn]:
    h, w = r.choice((1024, 4096)), r.choice((2048, 8192))
    for by, bx, warps in shuffled(r, (1, 4, 16), (128, 256), (2, 4)):

        def make(device: str, by=by, bx=bx, warps=warps) -> Call:
            cells = torch.randint(0, 2, (h, w), dtype=torch.int8).to(device)
            after = torch.empty_like(cells)
            return lambda: life[(w // bx, h // by)](cells, after, h, w, BLOCK_Y=by, BLOCK_X=bx, num_warps=warps)

        yield f"{h}x{w}", f"{by}x{bx} w{warps}", make


def distance_of(r: random.Random) -> Iterator[Drawn]:
    pairs, length = r.choice((1024, 8192)), r.choice((64, 200))
    for block, warps in ((block, warps) for block in r.sample((64, 256), 1) for warps in r.sample((1, 2, 4), 3)):

        def make(device: str, block=block, warps=warps) -> Call:
            a, b = (torch.randint(0, 4, (pairs, n), dtype=torch.int32).to(device) for n in (length, block))
            out = empty(pairs, device=device, dtype=torch.int32)
            return lambda: edit_distance[(pairs,)](a, b, out, length, BLOCK=block, num_warps=warps)

        yield f"{pairs} of {length} by {block}", f"w{warps}", make


FIFTH = {
    "gelu_bias": gelu_of, "search_sorted": search_of, "add_noise": noise_of, "grouped_by_address": groups_of,
    "pendulum_fp64": pendulum_of, "game_of_life": life_of, "edit_distance": distance_of,
}  # fmt: skip


def cases() -> list[Case]:
    return drawn_cases(FIFTH, SEED)
