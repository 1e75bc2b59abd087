"""Triton kernels that carry a state, reduce in odd ways or move images."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def selective_scan(x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, out_ptr, T, channels, BLOCK: tl.constexpr, S: tl.constexpr):
    """Mamba: a state [BLOCK, S] that every token of x[T, channels] changes; b and c are [T, S]."""
    batch = tl.program_id(1).to(tl.int64)
    d, s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, S)
    a = tl.load(a_ptr + d[:, None] * S + s[None, :])
    h = tl.zeros([BLOCK, S], tl.float32)
    for t in range(T):
        row = batch * T + t
        x = tl.load(x_ptr + row * channels + d).to(tl.float32)
        dt = tl.load(dt_ptr + row * channels + d).to(tl.float32)
        b, c = tl.load(b_ptr + row * S + s).to(tl.float32), tl.load(c_ptr + row * S + s).to(tl.float32)
        h = h * tl.exp(dt[:, None] * a) + (dt * x)[:, None] * b[None, :]
        tl.store(out_ptr + row * channels + d, tl.sum(h * c[None, :], 1).to(out_ptr.dtype.element_ty))


@triton.jit
def delta_rule(q_ptr, k_ptr, v_ptr, beta_ptr, out_ptr, T, D: tl.constexpr, BV: tl.constexpr):
    """A state [D, BV] of a head that every key corrects: two sums over D a token."""
    head = tl.program_id(1).to(tl.int64)
    d, e = tl.arange(0, D), tl.program_id(0) * BV + tl.arange(0, BV)
    h = tl.zeros([D, BV], tl.float32)
    for t in range(T):
        row = (head * T + t) * D
        q, k = tl.load(q_ptr + row + d).to(tl.float32), tl.load(k_ptr + row + d).to(tl.float32)
        v = tl.load(v_ptr + row + e).to(tl.float32)
        v = (v - tl.sum(h * k[:, None], 0)) * tl.load(beta_ptr + head * T + t)
        h += k[:, None] * v[None, :]
        tl.store(out_ptr + row + e, tl.sum(h * q[:, None], 0).to(out_ptr.dtype.element_ty))


@triton.jit
def norm_atomics(x_ptr, w_ptr, dy_ptr, dx_ptr, dw_ptr, rows, columns, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Gradients of an RMS norm; that of w by atomics, once for ROWS rows."""
    at = tl.arange(0, BLOCK)
    inside = at < columns
    w = tl.load(w_ptr + at, mask=inside, other=0.0).to(tl.float32)
    dw = tl.zeros([BLOCK], tl.float32)
    for k in range(ROWS):
        row = tl.program_id(0).to(tl.int64) * ROWS + k
        keep = inside & (row < rows)
        x = tl.load(x_ptr + row * columns + at, mask=keep, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * columns + at, mask=keep, other=0.0).to(tl.float32)
        r = tl.rsqrt(tl.sum(x * x, 0) / columns + eps)
        y, g = x * r, w * dy
        dx = (g - y * (tl.sum(g * y, 0) / columns)) * r
        tl.store(dx_ptr + row * columns + at, dx.to(dx_ptr.dtype.element_ty), mask=keep)
        dw += dy * y
    tl.atomic_add(dw_ptr + at, dw, mask=inside, sem="relaxed")


@triton.jit
def batch_norm(x_ptr, w_ptr, out_ptr, images, channels, pixels, eps, BLOCK: tl.constexpr):
    """A channel of x[images, channels, pixels]: its mean and variance over all images, then the values."""
    c = tl.program_id(0)
    total, squares = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for image in range(images):
        base = (image * channels + c).to(tl.int64) * pixels
        for first in range(0, pixels, BLOCK):
            at = first + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + base + at, mask=at < pixels, other=0.0).to(tl.float32)
            total += x
            squares += x * x
    n = images * pixels
    mean = tl.sum(total, 0) / n
    scale = tl.load(w_ptr + c).to(tl.float32) * tl.rsqrt(tl.sum(squares, 0) / n - mean * mean + eps)
    for image in range(images):
        base = (image * channels + c).to(tl.int64) * pixels
        for first in range(0, pixels, BLOCK):
            at = first + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + base + at, mask=at < pixels, other=0.0).to(tl.float32)
            tl.store(out_ptr + base + at, ((x - mean) * scale).to(out_ptr.dtype.element_ty), mask=at < pixels)


@triton.jit
def jagged_softmax(x_ptr, first_ptr, out_ptr, BLOCK: tl.constexpr):
    """Values first[r] to first[r + 1] are a row: its maximum and sum on the way, then its values again."""
    row = tl.program_id(0)
    begin, end = tl.load(first_ptr + row), tl.load(first_ptr + row + 1)
    top, total = tl.full([BLOCK], -1e9, tl.float32), tl.zeros([BLOCK], tl.float32)
    for first in range(begin, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < end, other=-1e9).to(tl.float32)
        higher = tl.maximum(top, x)
        total = total * tl.exp(top - higher) + tl.exp(x - higher)
        top = higher
    highest = tl.max(top, 0)
    whole = tl.sum(total * tl.exp(top - highest), 0)
    for first in range(begin, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < end, other=-1e9).to(tl.float32)
        tl.store(out_ptr + at, (tl.exp(x - highest) / whole).to(out_ptr.dtype.element_ty), mask=at < end)


@triton.jit
def gumbel(x_ptr, out_ptr, columns, seed, BLOCK: tl.constexpr):
    """A number drawn by the largest of logit + noise, over a large vocabulary."""
    row = tl.program_id(0)
    best, where = tl.full([BLOCK], -1e9, tl.float32), tl.zeros([BLOCK], tl.int32)
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row.to(tl.int64) * columns + at, mask=at < columns, other=-1e9).to(tl.float32)
        x -= tl.log(-tl.log(tl.rand(seed, row * columns + at) + 1e-7) + 1e-7)
        where = tl.where(x > best, at, where)
        best = tl.maximum(best, x)
    _, place = tl.max(best, 0, return_indices=True)
    tl.store(out_ptr + row, tl.sum(tl.where(tl.arange(0, BLOCK) == place, where, 0), 0))


@triton.jit
def hadamard(x_ptr, out_ptr, N: tl.constexpr, STEPS: tl.constexpr):
    """A row of N: sums and differences of neighbours, then of pairs, ..."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, N)
    x = tl.load(x_ptr + row * N + at).to(tl.float32)
    for _ in tl.static_range(STEPS):
        a, b = tl.split(tl.reshape(x, [N // 2, 2]))
        x = tl.reshape(tl.trans(tl.join(a + b, a - b)), [N])
    tl.store(out_ptr + row * N + at, x.to(out_ptr.dtype.element_ty))


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def scan_columns(x_ptr, out_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr):
    """The largest so far, down columns, a tile of rows after another."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    top = tl.full([BN], -float("inf"), tl.float32)
    for first in range(0, M, BM):
        at = (first + tl.arange(0, BM))[:, None] * N + n[None, :]
        x = tl.maximum(tl.load(x_ptr + at).to(tl.float32), top[None, :])
        tl.store(out_ptr + at, tl.associative_scan(x, 0, _larger).to(out_ptr.dtype.element_ty))
        top = tl.max(x, 0)


@triton.jit
def expert_counts(ids_ptr, place_ptr, count_ptr, n, E: tl.constexpr, BLOCK: tl.constexpr):
    """For each entry how many of its expert come before it in its block, and each block's counts."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + at, mask=at < n, other=-1)
    hit = (ids[:, None] == tl.arange(0, E)[None, :]).to(tl.int32)
    before = tl.cumsum(hit, 0)
    tl.store(place_ptr + at, tl.sum((before - 1) * hit, 1), mask=at < n)
    tl.store(count_ptr + tl.program_id(0) * E + tl.arange(0, E), tl.sum(hit, 0))


@triton.jit
def cache_write(k_ptr, slot_ptr, cache_ptr, scale_ptr, heads, HEADS: tl.constexpr, D: tl.constexpr):
    """Rows of a token in FP8, with a scale for each head, to the slot that a table names."""
    token = tl.program_id(0).to(tl.int64)
    head, d = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, D)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    x = tl.load(k_ptr + (token * heads + head[:, None]) * D + d[None, :]).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 1), 1e-6) / 448
    tl.store(cache_ptr + (slot * heads + head[:, None]) * D + d[None, :], (x / scale[:, None]).to(tl.float8e4nv))
    tl.store(scale_ptr + slot * heads + head, scale)


@triton.jit
def quantise_tiles(x_ptr, out_ptr, scale_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr):
    """FP8 of a transposed matrix, with a scale for each tile."""
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    x = tl.load(x_ptr + m[:, None] * N + n[None, :]).to(tl.float32)
    scale = tl.maximum(tl.max(tl.max(tl.abs(x), 1), 0), 1e-6) / 448
    tl.store(out_ptr + n[:, None] * M + m[None, :], tl.trans(x / scale).to(tl.float8e4nv))
    tl.store(scale_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), scale)


@triton.jit
def permute(x_ptr, out_ptr, T, heads, D: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr):
    """[batch, T, heads, D] to [batch, heads, T, D]"""
    t, h = tl.program_id(0) * BT + tl.arange(0, BT), tl.program_id(1) * BH + tl.arange(0, BH)
    d, batch = tl.arange(0, D), tl.program_id(2).to(tl.int64)
    x = tl.load(x_ptr + ((batch * T + t[:, None, None]) * heads + h[None, :, None]) * D + d[None, None, :])
    tl.store(out_ptr + ((batch * heads + h[None, :, None]) * T + t[:, None, None]) * D + d[None, None, :], x)


@triton.jit
def stencil_3d(x_ptr, out_ptr, Y, Z, BY: tl.constexpr, BZ: tl.constexpr):
    """Seven points of a box; the innermost side is Z."""
    i, y = tl.program_id(0), tl.program_id(1) * BY + tl.arange(0, BY)
    z = tl.program_id(2) * BZ + tl.arange(0, BZ)
    at = (i * Y + y[:, None]) * Z + z[None, :]
    there = (y[:, None] < Y) & (z[None, :] < Z)
    acc = -6.0 * tl.load(x_ptr + at, mask=there, other=0.0)
    acc += tl.load(x_ptr + at - 1, mask=there & (z[None, :] > 0), other=0.0)
    acc += tl.load(x_ptr + at + 1, mask=there & (z[None, :] < Z - 1), other=0.0)
    acc += tl.load(x_ptr + at - Z, mask=there & (y[:, None] > 0), other=0.0)
    acc += tl.load(x_ptr + at + Z, mask=there & (y[:, None] < Y - 1), other=0.0)
    acc += tl.load(x_ptr + at - Y * Z, mask=there & (i > 0), other=0.0)
    acc += tl.load(x_ptr + at + Y * Z, mask=there & (i < tl.num_programs(0) - 1), other=0.0)
    tl.store(out_ptr + at, acc, mask=there)


@triton.jit
def upsample(x_ptr, out_ptr, H, W, BLOCK: tl.constexpr):
    """Twice the sides, bilinear, of images of one channel."""
    row, x = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    image, y = row // (2 * H), row % (2 * H)
    sy, sx = tl.maximum(y * 0.5 - 0.25, 0.0), tl.maximum(x * 0.5 - 0.25, 0.0)
    y0, x0 = sy.to(tl.int32), sx.to(tl.int32)
    y1, x1 = tl.minimum(y0 + 1, H - 1), tl.minimum(x0 + 1, W - 1)
    fy, fx = sy - y0, sx - x0
    inside, base = x < 2 * W, x_ptr + image.to(tl.int64) * H * W
    a, b = tl.load(base + y0 * W + x0, mask=inside), tl.load(base + y0 * W + x1, mask=inside)
    c, d = tl.load(base + y1 * W + x0, mask=inside), tl.load(base + y1 * W + x1, mask=inside)
    out = (a * (1 - fx) + b * fx) * (1 - fy) + (c * (1 - fx) + d * fx) * fy
    tl.store(out_ptr + row.to(tl.int64) * 2 * W + x, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def distances(x_ptr, y_ptr, out_ptr, M, N, D, BM: tl.constexpr, BN: tl.constexpr):
    """exp(-|x - y|), the sum of absolute differences: no tensor core. x is [D, M], y [D, N]."""
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros([BM, BN], tl.float32)
    for d in range(D):
        acc += tl.abs(tl.load(x_ptr + d * M + m)[:, None] - tl.load(y_ptr + d * N + n)[None, :])
    tl.store(out_ptr + m[:, None] * N + n[None, :], tl.exp(-acc))


@triton.jit
def overlaps(box_ptr, out_ptr, N, BM: tl.constexpr, BN: tl.constexpr):
    """Which pairs of boxes [4, N] overlap by more than half."""
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    left = tl.maximum(tl.load(box_ptr + m)[:, None], tl.load(box_ptr + n)[None, :])
    top = tl.maximum(tl.load(box_ptr + N + m)[:, None], tl.load(box_ptr + N + n)[None, :])
    right = tl.minimum(tl.load(box_ptr + 2 * N + m)[:, None], tl.load(box_ptr + 2 * N + n)[None, :])
    bottom = tl.minimum(tl.load(box_ptr + 3 * N + m)[:, None], tl.load(box_ptr + 3 * N + n)[None, :])
    both = tl.maximum(right - left, 0.0) * tl.maximum(bottom - top, 0.0)
    first = (tl.load(box_ptr + 2 * N + m) - tl.load(box_ptr + m)) * (
        tl.load(box_ptr + 3 * N + m) - tl.load(box_ptr + N + m)
    )
    second = (tl.load(box_ptr + 2 * N + n) - tl.load(box_ptr + n)) * (
        tl.load(box_ptr + 3 * N + n) - tl.load(box_ptr + N + n)
    )
    share = both / (first[:, None] + second[None, :] - both)
    tl.store(out_ptr + m[:, None].to(tl.int64) * N + n[None, :], (share > 0.5).to(tl.int8))


@triton.jit
def gemv_int4(w_ptr, scale_ptr, x_ptr, out_ptr, N, K, GROUP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Rows of weights of eight in a word, a scale for every GROUP, by one vector."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    acc = tl.zeros([BN, BK // 8], tl.float32)
    for first in range(0, K, BK):
        word = first // 8 + tl.arange(0, BK // 8)
        words = tl.load(w_ptr + n[:, None] * (K // 8) + word[None, :])
        scale = tl.load(scale_ptr + n[:, None] * (K // GROUP) + (word * 8 // GROUP)[None, :]).to(tl.float32)
        part = tl.zeros([BN, BK // 8], tl.float32)
        for j in tl.static_range(8):
            x = tl.load(x_ptr + word * 8 + j).to(tl.float32)
            part += (((words >> (4 * j)) & 15) - 8).to(tl.float32) * x[None, :]
        acc += part * scale
    tl.store(out_ptr + n, tl.sum(acc, 1).to(out_ptr.dtype.element_ty))


@triton.jit
def attention_queries(q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, T, D: tl.constexpr, BM: tl.constexpr,
                      BN: tl.constexpr, CAUSAL: tl.constexpr):  # fmt: skip
    """The gradient of BM queries."""
    head = tl.program_id(1).to(tl.int64) * T
    m, d, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D), tl.arange(0, BN)
    q = tl.load(q_ptr + (head + m)[:, None] * D + d[None, :])
    do = tl.load(do_ptr + (head + m)[:, None] * D + d[None, :])
    lse, delta = tl.load(lse_ptr + head + m), tl.load(delta_ptr + head + m)
    dq = tl.zeros([BM, D], tl.float32)
    for first in range(0, (tl.program_id(0) + 1) * BM if CAUSAL else T, BN):
        k = tl.load(k_ptr + (head + first + n)[:, None] * D + d[None, :])
        v = tl.load(v_ptr + (head + first + n)[:, None] * D + d[None, :])
        p = tl.exp2(tl.dot(q, k.T) * 0.18 - lse[:, None])
        if CAUSAL:
            p = tl.where(m[:, None] >= first + n[None, :], p, 0.0)
        ds = p * (tl.dot(do, v.T) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    tl.store(dq_ptr + (head + m)[:, None] * D + d[None, :], dq.to(dq_ptr.dtype.element_ty))
