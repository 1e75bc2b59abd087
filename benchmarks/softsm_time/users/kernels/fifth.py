"""The seven kernels of the fifth set, as users bring them."""

from __future__ import annotations

import triton
import triton.language as tl


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
