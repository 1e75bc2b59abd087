"""The eighteen kernels of the first set, as users bring them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dropout_add_layer_norm(x_ptr, res_ptr, w_ptr, b_ptr, out_ptr, sum_ptr, n, seed, p, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    mask = col < n
    off = row * n + col
    x = tl.load(x_ptr + off, mask=mask, other=0.0).to(tl.float32)
    keep = tl.rand(seed, off) > p
    x = tl.where(keep, x / (1 - p), 0.0) + tl.load(res_ptr + off, mask=mask, other=0.0).to(tl.float32)
    tl.store(sum_ptr + off, x.to(sum_ptr.dtype.element_ty), mask=mask)
    mean = tl.sum(x, 0) / n
    d = tl.where(mask, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(d * d, 0) / n + eps)
    y = d * rstd * tl.load(w_ptr + col, mask=mask).to(tl.float32) + tl.load(b_ptr + col, mask=mask).to(tl.float32)
    tl.store(out_ptr + off, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def rope_in_place(q_ptr, cos_ptr, sin_ptr, pos_ptr, HEADS: tl.constexpr, D: tl.constexpr):
    """All heads of a token, at the position that a table gives it."""
    token = tl.program_id(0)
    pos = tl.load(pos_ptr + token)
    half = tl.arange(0, D // 2)
    cos, sin = tl.load(cos_ptr + pos * (D // 2) + half), tl.load(sin_ptr + pos * (D // 2) + half)
    base = q_ptr + token * HEADS * D + tl.arange(0, HEADS)[:, None] * D + half[None, :]
    a, b = tl.load(base).to(tl.float32), tl.load(base + D // 2).to(tl.float32)
    tl.store(base, (a * cos[None, :] - b * sin[None, :]).to(q_ptr.dtype.element_ty))
    tl.store(base + D // 2, (b * cos[None, :] + a * sin[None, :]).to(q_ptr.dtype.element_ty))


@triton.jit
def state_update(state_ptr, x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, out_ptr, HEADS: tl.constexpr, D: tl.constexpr,
                 N: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """One token of a Mamba-2 layer: the state is read, changed and written."""
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    batch, head = tl.program_id(1), tl.program_id(2)
    n = tl.arange(0, N)
    row = batch * HEADS + head
    at = row.to(tl.int64) * D * N + d[:, None] * N + n[None, :]
    dt = tl.load(dt_ptr + row)
    decay = tl.exp(tl.load(a_ptr + head) * tl.where(dt > 20.0, dt, tl.log(1 + tl.exp(dt))))
    x = tl.load(x_ptr + row * D + d).to(tl.float32)
    b, c = tl.load(b_ptr + batch * N + n).to(tl.float32), tl.load(c_ptr + batch * N + n).to(tl.float32)
    state = tl.load(state_ptr + at) * decay + (x * dt)[:, None] * b[None, :]
    tl.store(state_ptr + at, state)
    tl.store(out_ptr + row * D + d, tl.sum(state * c[None, :], 1).to(out_ptr.dtype.element_ty))


@triton.jit
def copy_blocks(k_ptr, v_ptr, pairs_ptr, words, BLOCK: tl.constexpr):
    """Blocks of a paged cache to others, as a beam search forks: pairs of (from, to)."""
    pair = tl.program_id(0)
    source, target = tl.load(pairs_ptr + 2 * pair), tl.load(pairs_ptr + 2 * pair + 1)
    for first in range(0, words, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(k_ptr + target * words + at, tl.load(k_ptr + source * words + at))
        tl.store(v_ptr + target * words + at, tl.load(v_ptr + source * words + at))


@triton.jit
def assign(x_ptr, centre_ptr, norm_ptr, label_ptr, count_ptr, K, D: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    """k-means: the nearest centre of every point, and how many each centre has."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    x = tl.load(x_ptr + row[:, None] * D + d[None, :])
    best = tl.full([BM], float("inf"), tl.float32)
    where = tl.zeros([BM], tl.int32)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        c = tl.load(centre_ptr + k[None, :] * D + d[:, None])
        far = tl.load(norm_ptr + k)[None, :] - 2.0 * tl.dot(x, c)
        low, at = tl.min(far, 1, return_indices=True)
        where = tl.where(low < best, first + at, where)
        best = tl.minimum(best, low)
    tl.store(label_ptr + row, where)
    tl.atomic_add(count_ptr + where, 1)


@triton.jit
def top_k_threshold(x_ptr, out_ptr, n, k, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """Keeps the k largest of a row, found by bisection."""
    row = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n + col, mask=col < n, other=-float("inf")).to(tl.float32)
    low, high = tl.min(tl.where(col < n, x, float("inf")), 0), tl.max(x, 0)
    for _ in range(STEPS):
        middle = 0.5 * (low + high)
        enough = tl.sum((x >= middle).to(tl.int32), 0) >= k
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    tl.store(out_ptr + row * n + col, tl.where(x >= low, x, -float("inf")).to(out_ptr.dtype.element_ty), mask=col < n)


@triton.jit
def quantise_both_ways(x_ptr, q_ptr, t_ptr, s_ptr, M, N, B: tl.constexpr):
    """A tile to FP8 with one scale, as it is and transposed: for the forward and the backward product."""
    i, j = tl.program_id(0), tl.program_id(1)
    r, c = i * B + tl.arange(0, B), j * B + tl.arange(0, B)
    x = tl.load(x_ptr + r[:, None] * N + c[None, :]).to(tl.float32)
    scale = tl.maximum(tl.max(tl.max(tl.abs(x), 1), 0), 1e-8) / 448.0
    q = (x / scale).to(tl.float8e4nv)
    tl.store(q_ptr + r[:, None] * N + c[None, :], q)
    tl.store(t_ptr + c[:, None] * M + r[None, :], tl.trans(q))
    tl.store(s_ptr + i * (N // B) + j, scale)


@triton.jit
def grid_sample(x_ptr, at_ptr, out_ptr, H, W, pixels, C: tl.constexpr, BLOCK: tl.constexpr):
    """Bilinear, NHWC: four neighbours of every pixel, where a field of coordinates says."""
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, C)
    image = pixel // pixels
    u, v = tl.load(at_ptr + 2 * pixel) * (W - 1), tl.load(at_ptr + 2 * pixel + 1) * (H - 1)
    left, top = tl.floor(u).to(tl.int32), tl.floor(v).to(tl.int32)
    fu, fv = u - left, v - top
    acc = tl.zeros([BLOCK, C], tl.float32)
    for dy in tl.static_range(2):
        for dx in tl.static_range(2):
            ix, iy = left + dx, top + dy
            inside = (ix >= 0) & (ix < W) & (iy >= 0) & (iy < H)
            weight = tl.where(dx == 1, fu, 1 - fu) * tl.where(dy == 1, fv, 1 - fv)
            at = ((image * H + iy) * W + ix)[:, None] * C + c[None, :]
            acc += weight[:, None] * tl.load(x_ptr + at, mask=inside[:, None], other=0.0).to(tl.float32)
    tl.store(out_ptr + pixel[:, None] * C + c[None, :], acc.to(out_ptr.dtype.element_ty))


@triton.jit
def window_attention(
    q_ptr, k_ptr, v_ptr, o_ptr, T, scale, WINDOW: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """Causal, over the last WINDOW keys."""
    tile, head = tl.program_id(0), tl.program_id(1)
    m, d = tile * BM + tl.arange(0, BM), tl.arange(0, D)
    base = head.to(tl.int64) * T * D
    q = tl.load(q_ptr + base + m[:, None] * D + d[None, :])
    top, total = tl.full([BM], -1e30, tl.float32), tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    begin = tl.maximum(tile * BM - WINDOW, 0) // BN * BN
    for first in range(begin, (tile + 1) * BM, BN):
        n = first + tl.arange(0, BN)
        k = tl.load(k_ptr + base + n[None, :] * D + d[:, None])
        s = tl.dot(q, k) * scale
        s = tl.where((n[None, :] <= m[:, None]) & (n[None, :] > m[:, None] - WINDOW), s, -1e30)
        higher = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - higher[:, None])
        less = tl.exp2(top - higher)
        total = total * less + tl.sum(p, 1)
        acc = acc * less[:, None]
        v = tl.load(v_ptr + base + n[:, None] * D + d[None, :])
        acc = tl.dot(p.to(v.dtype), v, acc)
        top = higher
    tl.store(o_ptr + base + m[:, None] * D + d[None, :], (acc / total[:, None]).to(o_ptr.dtype.element_ty))


@triton.jit
def varlen_attention(q_ptr, k_ptr, v_ptr, o_ptr, first_ptr, scale, HEADS: tl.constexpr, D: tl.constexpr,
                     BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Sequences of different lengths in one tensor [tokens, heads, D]; tiles behind the end of theirs do nothing."""
    tile, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin, end = tl.load(first_ptr + sequence), tl.load(first_ptr + sequence + 1)
    if tile * BM >= end - begin:
        return
    m, d = begin + tile * BM + tl.arange(0, BM), tl.arange(0, D)
    q = tl.load(q_ptr + (m[:, None] * HEADS + head) * D + d[None, :], mask=m[:, None] < end, other=0.0)
    top, total = tl.full([BM], -1e30, tl.float32), tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    for first in range(begin, end, BN):
        n = first + tl.arange(0, BN)
        k = tl.load(k_ptr + (n[None, :] * HEADS + head) * D + d[:, None], mask=n[None, :] < end, other=0.0)
        s = tl.where(n[None, :] < end, tl.dot(q, k) * scale, -1e30)
        higher = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - higher[:, None])
        less = tl.exp2(top - higher)
        total = total * less + tl.sum(p, 1)
        v = tl.load(v_ptr + (n[:, None] * HEADS + head) * D + d[None, :], mask=n[:, None] < end, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * less[:, None])
        top = higher
    out = (acc / total[:, None]).to(o_ptr.dtype.element_ty)
    tl.store(o_ptr + (m[:, None] * HEADS + head) * D + d[None, :], out, mask=m[:, None] < end)


@triton.jit
def instance_norm_silu(x_ptr, out_ptr, pixels, C, BC: tl.constexpr, BP: tl.constexpr):
    """NHWC, Welford's way: the channels of a block over all pixels of an image, twice."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    base = tl.program_id(1).to(tl.int64) * pixels * C
    count, mean, m2 = 0.0, tl.zeros([BC], tl.float32), tl.zeros([BC], tl.float32)
    for first in range(0, pixels, BP):
        p = first + tl.arange(0, BP)
        x = tl.load(x_ptr + base + p[:, None] * C + c[None, :]).to(tl.float32)
        new = tl.sum(x, 0) / BP
        d = x - new[None, :]
        shift = new - mean
        count += BP
        mean += shift * (BP / count)
        m2 += tl.sum(d * d, 0) + shift * shift * (BP * (count - BP) / count)
    rstd = tl.rsqrt(m2 / count + 1e-5)
    for first in range(0, pixels, BP):
        at = base + (first + tl.arange(0, BP))[:, None] * C + c[None, :]
        y = (tl.load(x_ptr + at).to(tl.float32) - mean[None, :]) * rstd[None, :]
        tl.store(out_ptr + at, (y * tl.sigmoid(y)).to(out_ptr.dtype.element_ty))


@triton.jit
def silu_mul_quantise(h_ptr, place_ptr, q_ptr, s_ptr, N, GROUP: tl.constexpr):
    """Rows of an expert layer in the order of a list, gated, to FP8 with a scale for every GROUP columns."""
    row, group = tl.program_id(0), tl.program_id(1)
    source = tl.load(place_ptr + row).to(tl.int64)
    c = group * GROUP + tl.arange(0, GROUP)
    gate = tl.load(h_ptr + source * 2 * N + c).to(tl.float32)
    y = gate * tl.sigmoid(gate) * tl.load(h_ptr + source * 2 * N + N + c).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(y), 0), 1e-8) / 448.0
    tl.store(q_ptr + row.to(tl.int64) * N + c, (y / scale).to(tl.float8e4nv))
    tl.store(s_ptr + row * (N // GROUP) + group, scale)


@triton.jit
def short_conv(x_ptr, w_ptr, out_ptr, T, C, BT: tl.constexpr, BC: tl.constexpr):
    """Causal, four taps, SiLU; channels last."""
    t, c = tl.program_id(0) * BT + tl.arange(0, BT), tl.program_id(1) * BC + tl.arange(0, BC)
    base = tl.program_id(2).to(tl.int64) * T * C
    acc = tl.zeros([BT, BC], tl.float32)
    for tap in tl.static_range(4):
        at = t - 3 + tap
        x = tl.load(x_ptr + base + at[:, None] * C + c[None, :], mask=(at >= 0)[:, None], other=0.0).to(tl.float32)
        acc += x * tl.load(w_ptr + c * 4 + tap)[None, :]
    tl.store(out_ptr + base + t[:, None] * C + c[None, :], (acc * tl.sigmoid(acc)).to(out_ptr.dtype.element_ty))


@triton.jit
def lora(x_ptr, a_ptr, b_ptr, index_ptr, out_ptr, K, N, R: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr):
    """A token through the two thin matrices of its adapter, added to the layer's result."""
    token = tl.program_id(0)
    adapter = tl.load(index_ptr + token).to(tl.int64)
    r = tl.arange(0, R)
    down = tl.zeros([R], tl.float32)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        x = tl.load(x_ptr + token * K + k).to(tl.float32)
        a = tl.load(a_ptr + adapter * R * K + r[:, None] * K + k[None, :]).to(tl.float32)
        down += tl.sum(a * x[None, :], 1)
    for first in range(0, N, BN):
        n = first + tl.arange(0, BN)
        b = tl.load(b_ptr + adapter * N * R + n[:, None] * R + r[None, :]).to(tl.float32)
        y = tl.load(out_ptr + token * N + n).to(tl.float32) + tl.sum(b * down[None, :], 1)
        tl.store(out_ptr + token * N + n, y.to(out_ptr.dtype.element_ty))


@triton.jit
def norm_matmul(x_ptr, w_ptr, out_ptr, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """RMS norm and a product in one: the squares of a row are summed on the way."""
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    acc, squares = tl.zeros([BM, BN], tl.float32), tl.zeros([BM], tl.float32)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        x = tl.load(x_ptr + m[:, None] * K + k[None, :])
        w = tl.load(w_ptr + n[None, :] * K + k[:, None])
        acc = tl.dot(x, w, acc)
        squares += tl.sum(x.to(tl.float32) * x.to(tl.float32), 1)
    acc *= tl.rsqrt(squares / K + 1e-6)[:, None]
    tl.store(out_ptr + m[:, None] * N + n[None, :], acc.to(out_ptr.dtype.element_ty))


@triton.jit
def nf4(q_ptr, table_ptr, scale_ptr, out_ptr, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Four-bit codes to bf16 by a table of 16 values, a scale for every GROUP of them."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    codes = tl.load(q_ptr + at).to(tl.int32)
    scale = tl.load(scale_ptr + at * 2 // GROUP)
    low, high = tl.load(table_ptr + (codes & 15)) * scale, tl.load(table_ptr + (codes >> 4 & 15)) * scale
    out = tl.interleave(low, high).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + tl.program_id(0) * 2 * BLOCK + tl.arange(0, 2 * BLOCK), out)


@triton.jit
def csr_rows(value_ptr, column_ptr, first_ptr, x_ptr, out_ptr, N, BLOCK: tl.constexpr, BN: tl.constexpr):
    """A sparse matrix (CSR) times a dense one: a row of the result for each CTA."""
    row, n = tl.program_id(0), tl.program_id(1) * BN + tl.arange(0, BN)
    begin, end = tl.load(first_ptr + row), tl.load(first_ptr + row + 1)
    acc = tl.zeros([BN], tl.float32)
    for first in range(begin, end, BLOCK):
        e = first + tl.arange(0, BLOCK)
        column = tl.load(column_ptr + e, mask=e < end, other=0)
        value = tl.load(value_ptr + e, mask=e < end, other=0.0)
        x = tl.load(x_ptr + column[:, None] * N + n[None, :], mask=(e < end)[:, None], other=0.0).to(tl.float32)
        acc += tl.sum(x * value[:, None], 0)
    tl.store(out_ptr + row * N + n, acc)


@triton.jit
def merge_splits(o_ptr, lse_ptr, out_ptr, HEADS, SPLITS: tl.constexpr, D: tl.constexpr):
    """The parts of a split decode to one."""
    row = tl.program_id(0) * HEADS + tl.program_id(1)
    s, d = tl.arange(0, SPLITS), tl.arange(0, D)
    lse = tl.load(lse_ptr + row * SPLITS + s)
    w = tl.exp(lse - tl.max(lse, 0))
    o = tl.load(o_ptr + (row * SPLITS + s)[:, None] * D + d[None, :])
    tl.store(out_ptr + row * D + d, (tl.sum(o * w[:, None], 0) / tl.sum(w, 0)).to(out_ptr.dtype.element_ty))
