"""Triton kernels that do several things at once, or go by tables."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softmax_dropout(x_ptr, out_ptr, columns, p, seed, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * columns + at, mask=at < columns, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, 0))
    z = e / tl.sum(e, 0)
    kept = tl.rand(seed, row.to(tl.int32) * columns + at) > p
    z = tl.where(kept, z / (1 - p), 0.0)
    tl.store(out_ptr + row * columns + at, z.to(out_ptr.dtype.element_ty), mask=at < columns)


@triton.jit
def norm_backward(x_ptr, w_ptr, dy_ptr, dx_ptr, dw_ptr, db_ptr, rows, columns, eps, BLOCK: tl.constexpr):
    """Each program has a part of the rows, and its own sums of the gradients of w and b."""
    at = tl.arange(0, BLOCK)
    inside = at < columns
    w = tl.load(w_ptr + at, mask=inside, other=0.0).to(tl.float32)
    dw, db = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        where = row.to(tl.int64) * columns + at
        x = tl.load(x_ptr + where, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + where, mask=inside, other=0.0).to(tl.float32)
        centred = tl.where(inside, x - tl.sum(x, 0) / columns, 0.0)
        r = tl.rsqrt(tl.sum(centred * centred, 0) / columns + eps)
        y = centred * r
        g = w * dy
        dx = (g - tl.sum(g, 0) / columns - y * (tl.sum(g * y, 0) / columns)) * r
        tl.store(dx_ptr + where, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        dw += dy * y
        db += dy
    to = tl.program_id(0) * columns + at
    tl.store(dw_ptr + to, dw, mask=inside)
    tl.store(db_ptr + to, db, mask=inside)


@triton.jit
def sum_parts(parts_ptr, out_ptr, parts, columns, BM: tl.constexpr, BN: tl.constexpr):
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    acc = tl.zeros([BM, BN], tl.float32)
    for first in range(0, parts, BM):
        m = first + tl.arange(0, BM)
        acc += tl.load(
            parts_ptr + m[:, None] * columns + n[None, :], mask=(m[:, None] < parts) & (n[None, :] < columns), other=0.0
        )
    tl.store(out_ptr + n, tl.sum(acc, 0).to(out_ptr.dtype.element_ty), mask=n < columns)


@triton.jit
def add_norm(x_ptr, residual_ptr, w_ptr, out_ptr, columns, eps, BLOCK: tl.constexpr):
    """The residual stream gets x; RMS norm of it."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    where, inside = row * columns + at, at < columns
    h = tl.load(residual_ptr + where, mask=inside, other=0.0).to(tl.float32)
    h += tl.load(x_ptr + where, mask=inside, other=0.0).to(tl.float32)
    tl.store(residual_ptr + where, h.to(residual_ptr.dtype.element_ty), mask=inside)
    r = tl.rsqrt(tl.sum(h * h, 0) / columns + eps)
    w = tl.load(w_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + where, (h * r * w).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def adamw(p_ptr, g_ptr, m_ptr, v_ptr, n, lr, b1, b2, eps, decay, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    g = tl.load(g_ptr + at, mask=inside).to(tl.float32)
    m = b1 * tl.load(m_ptr + at, mask=inside) + (1 - b1) * g
    v = b2 * tl.load(v_ptr + at, mask=inside) + (1 - b2) * g * g
    p = tl.load(p_ptr + at, mask=inside)
    p = p * (1 - lr * decay) - lr * m / (tl.sqrt(v) + eps)
    tl.store(p_ptr + at, p, mask=inside)
    tl.store(m_ptr + at, m, mask=inside)
    tl.store(v_ptr + at, v, mask=inside)


@triton.jit
def loss_and_gradient(x_ptr, target_ptr, loss_ptr, columns, scale, BLOCK: tl.constexpr):
    """Cross entropy; the gradient takes the place of the logits."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * columns
    target = tl.load(target_ptr + row)
    right = tl.load(x_ptr + target).to(tl.float32)
    top, total = -float("inf"), 0.0
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < columns, other=-float("inf")).to(tl.float32)
        new = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - new) + tl.sum(tl.exp(x - new), 0)
        top = new
    tl.store(loss_ptr + row, top + tl.log(total) - right)
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < columns, other=-float("inf")).to(tl.float32)
        g = tl.exp(x - top) / total
        g = tl.where(at == target, g - 1.0, g) * scale
        tl.store(x_ptr + at, g.to(x_ptr.dtype.element_ty), mask=at < columns)


@triton.jit
def rope_quantise(x_ptr, cos_ptr, sin_ptr, out_ptr, scale_ptr, heads, HALF: tl.constexpr, HEADS: tl.constexpr):
    """x[token, head, 2 * HALF] turned, a scale per head, to FP8."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, HALF)
    cos, sin = tl.load(cos_ptr + token * HALF + d)[None, :], tl.load(sin_ptr + token * HALF + d)[None, :]
    at = (token * heads + head[:, None]) * 2 * HALF + d[None, :]
    a, b = tl.load(x_ptr + at).to(tl.float32), tl.load(x_ptr + at + HALF).to(tl.float32)
    u, v = a * cos - b * sin, b * cos + a * sin
    top = tl.maximum(tl.max(tl.abs(u), 1), tl.max(tl.abs(v), 1))
    scale = tl.maximum(top, 1e-6) / 448.0
    tl.store(scale_ptr + token * heads + head, scale)
    tl.store(out_ptr + at, (u / scale[:, None]).to(out_ptr.dtype.element_ty))
    tl.store(out_ptr + at + HALF, (v / scale[:, None]).to(out_ptr.dtype.element_ty))


@triton.jit
def top_p(x_ptr, u_ptr, out_ptr, columns, p, BLOCK: tl.constexpr):
    """A number drawn from the likeliest that have p together; logits and numbers are sorted as one word."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * columns + at, mask=at < columns, other=-1e9).to(tl.float32)
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    words = tl.sort((bits.to(tl.int64) << 32) | at.to(tl.int64), descending=True)
    number = (words & 0xFFFFFFFF).to(tl.int32)
    bits = (words >> 32).to(tl.int32)
    x = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)
    e = tl.exp(x - tl.max(x, 0))
    share = tl.cumsum(e / tl.sum(e, 0), 0)
    u = tl.load(u_ptr + row) * p
    chosen = tl.sum((share < u).to(tl.int32), 0)
    tl.store(out_ptr + row, tl.sum(tl.where(at == chosen, number, 0), 0))


@triton.jit
def sort_pairs(key_ptr, value_ptr, columns, BLOCK: tl.constexpr):
    """Keys from 0 on and their values, both of 32 bits."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    where = row * columns + at
    words = (tl.load(key_ptr + where).to(tl.int64) << 32) | tl.load(value_ptr + where).to(tl.int64)
    words = tl.sort(words)
    tl.store(key_ptr + where, (words >> 32).to(tl.int32))
    tl.store(value_ptr + where, (words & 0xFFFFFFFF).to(tl.int32))


@triton.jit
def part_sums(x_ptr, sums_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(tl.load(x_ptr + at, mask=at < n, other=0.0), 0))


@triton.jit
def scan_sums(sums_ptr, parts, BLOCK: tl.constexpr):
    """By one program, in turns; each number becomes the sum of those before it."""
    carry = 0.0
    for first in range(0, parts, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(sums_ptr + at, mask=at < parts, other=0.0)
        tl.store(sums_ptr + at, carry + tl.cumsum(x, 0) - x, mask=at < parts)
        carry += tl.sum(x, 0)


@triton.jit
def scan_parts(x_ptr, sums_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    tl.store(out_ptr + at, tl.load(sums_ptr + tl.program_id(0)) + tl.cumsum(x, 0), mask=at < n)


@triton.jit
def long_rows(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    """cumsum of a row in turns of BLOCK."""
    row = tl.program_id(0).to(tl.int64)
    carry = 0.0
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * columns + at, mask=at < columns, other=0.0).to(tl.float32)
        tl.store(
            out_ptr + row * columns + at, (carry + tl.cumsum(x, 0)).to(out_ptr.dtype.element_ty), mask=at < columns
        )
        carry += tl.sum(x, 0)


@triton.jit
def segment_sums(x_ptr, first_ptr, out_ptr, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows first[s] to first[s + 1] together."""
    segment = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin, end = tl.load(first_ptr + segment), tl.load(first_ptr + segment + 1)
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(begin, end, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row[:, None] < end) & (at[None, :] < columns)
        acc += tl.load(x_ptr + row[:, None] * columns + at[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + segment * columns + at, tl.sum(acc, 0).to(out_ptr.dtype.element_ty), mask=at < columns)


@triton.jit
def embedding_bag(table_ptr, index_ptr, out_ptr, columns, EACH: tl.constexpr, BLOCK: tl.constexpr):
    """The mean of EACH rows of a table."""
    bag = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for k in range(EACH):
        row = tl.load(index_ptr + bag * EACH + k).to(tl.int64)
        acc += tl.load(table_ptr + row * columns + at, mask=at < columns, other=0.0).to(tl.float32)
    tl.store(out_ptr + bag * columns + at, (acc / EACH).to(out_ptr.dtype.element_ty), mask=at < columns)


@triton.jit
def combine(y_ptr, place_ptr, weight_ptr, out_ptr, columns, K: tl.constexpr, BLOCK: tl.constexpr):
    """The K results of a token's experts, weighted."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        row = tl.load(place_ptr + token * K + k).to(tl.int64)
        weight = tl.load(weight_ptr + token * K + k)
        acc += weight * tl.load(y_ptr + row * columns + at, mask=at < columns, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * columns + at, acc.to(out_ptr.dtype.element_ty), mask=at < columns)


@triton.jit
def bin_count(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """An atomic operation for each number."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(out_ptr + tl.load(x_ptr + at, mask=at < n, other=0), 1, mask=at < n, sem="relaxed")


@triton.jit
def compact(x_ptr, out_ptr, count_ptr, n, BLOCK: tl.constexpr):
    """Those above zero, in any order of blocks: a block asks a counter for its place in a ring of n, a power of two."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    kept = x > 0
    before = tl.cumsum(kept.to(tl.int32), 0)
    base = tl.atomic_add(count_ptr, tl.sum(kept.to(tl.int32), 0))
    tl.store(out_ptr + ((base + before - 1) & (n - 1)), x, mask=kept)


@triton.jit
def depthwise(x_ptr, w_ptr, out_ptr, H, W, C, BW: tl.constexpr, BC: tl.constexpr):
    """3 x 3, channels last, one filter for each channel."""
    h = tl.program_id(0) % H
    image = tl.program_id(0) // H
    w = tl.program_id(1) * BW + tl.arange(0, BW)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    acc = tl.zeros([BW, BC], tl.float32)
    for place in tl.static_range(9):
        y, x = h + place // 3 - 1, w + place % 3 - 1
        inside = (y >= 0) & (y < H) & (x >= 0) & (x < W)
        at = ((image * H + y) * W + x)[:, None] * C + c[None, :]
        z = tl.load(x_ptr + at, mask=inside[:, None], other=0.0).to(tl.float32)
        acc += z * tl.load(w_ptr + place * C + c).to(tl.float32)[None, :]
    to = ((image * H + h) * W + w)[:, None] * C + c[None, :]
    tl.store(out_ptr + to, acc.to(out_ptr.dtype.element_ty), mask=(w < W)[:, None])


@triton.jit
def max_pool(x_ptr, out_ptr, H, W, BLOCK: tl.constexpr):
    """2 x 2 of images [n, H, W]."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    base = x_ptr + (row // (H // 2)) * H * W + (row % (H // 2)) * 2 * W + 2 * at
    inside = at < W // 2
    a = tl.maximum(tl.load(base, mask=inside), tl.load(base + 1, mask=inside))
    b = tl.maximum(tl.load(base + W, mask=inside), tl.load(base + W + 1, mask=inside))
    tl.store(out_ptr + row * (W // 2) + at, tl.maximum(a, b), mask=inside)
