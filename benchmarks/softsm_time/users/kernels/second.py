"""The ten kernels of the second set, as users bring them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gather_pages(
    pages, scales, block_table, out, stride_table, HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr
):
    """FP8 keys of a paged cache [pages, PAGE, HEADS, D] with a scale for each row, in the order of a request."""
    seq, page, head = tl.program_id(1), tl.program_id(0), tl.program_id(2)
    physical = tl.load(block_table + seq * stride_table + page).to(tl.int64)
    slot, d = tl.arange(0, PAGE), tl.arange(0, D)
    row = (physical * PAGE + slot) * HEADS + head
    x = tl.load(pages + row[:, None] * D + d[None, :]).to(tl.float32) * tl.load(scales + row)[:, None]
    to = ((seq * stride_table + page).to(tl.int64) * PAGE + slot) * HEADS + head
    tl.store(out + to[:, None] * D + d[None, :], x.to(out.dtype.element_ty))


@triton.jit
def grouped_conv(x, w, out, H, W, CIN: tl.constexpr, COUT: tl.constexpr, BW: tl.constexpr, BH: tl.constexpr):
    """3 x 3, [images, groups, CIN, H, W] to COUT channels of each group, without products."""
    xs, ys = tl.program_id(0) * BW + tl.arange(0, BW), tl.program_id(1) * BH + tl.arange(0, BH)
    group = tl.program_id(2)
    base = x + group.to(tl.int64) * CIN * H * W
    to = out + group.to(tl.int64) * COUT * H * W + ys[:, None] * W + xs[None, :]
    inside = (ys[:, None] < H) & (xs[None, :] < W)
    for co in range(COUT):
        acc = tl.zeros([BH, BW], tl.float32)
        for ci in range(CIN):
            for tap in tl.static_range(9):
                y, z = ys + tap // 3 - 1, xs + tap % 3 - 1
                ok = (y[:, None] >= 0) & (y[:, None] < H) & (z[None, :] >= 0) & (z[None, :] < W)
                v = tl.load(base + ci * H * W + y[:, None] * W + z[None, :], mask=ok, other=0.0)
                acc += v.to(tl.float32) * tl.load(w + ((group % 32 * COUT + co) * CIN + ci) * 9 + tap)
        tl.store(to + co * H * W, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def radix_digits(keys, counts, n, SHIFT: tl.constexpr, BLOCK: tl.constexpr, LOOPS: tl.constexpr):
    """How often each of 256 digits is in a part of the keys: the first pass of a radix sort."""
    pid = tl.program_id(0)
    total = tl.zeros([256], tl.int32)
    for i in range(LOOPS):
        at = (pid * LOOPS + i) * BLOCK + tl.arange(0, BLOCK)
        digit = (tl.load(keys + at, mask=at < n, other=0) >> SHIFT) & 255
        total += tl.histogram(digit, 256)
    tl.store(counts + tl.arange(0, 256) * tl.num_programs(0) + pid, total)


@triton.jit
def bilateral(img, out, H, W, spatial, tonal, R: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr):
    """An edge-preserving blur: weights by distance and by difference of tone."""
    y, x = tl.program_id(1) * BH + tl.arange(0, BH), tl.program_id(0) * BW + tl.arange(0, BW)
    here = y[:, None] * W + x[None, :]
    centre = tl.load(img + here).to(tl.float32)
    num, den = tl.zeros([BH, BW], tl.float32), tl.zeros([BH, BW], tl.float32)
    for dy in tl.static_range(-R, R + 1):
        for dx in tl.static_range(-R, R + 1):
            yy, xx = tl.minimum(tl.maximum(y + dy, 0), H - 1), tl.minimum(tl.maximum(x + dx, 0), W - 1)
            v = tl.load(img + yy[:, None] * W + xx[None, :]).to(tl.float32)
            diff = v - centre
            weight = tl.exp(-(dy * dy + dx * dx) * spatial - diff * diff * tonal)
            num += weight * v
            den += weight
    tl.store(out + here, (num / den).to(out.dtype.element_ty))


@triton.jit
def pass_states(states, decay, out, last, chunks, dim, BLOCK: tl.constexpr):
    """Between the chunks of a state-space model: s = s exp(decay) + new, over [batch, chunks, heads, dim]."""
    head, batch = tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    s = tl.zeros([BLOCK], tl.float32)
    for c in range(chunks):
        row = ((batch * chunks + c) * heads + head).to(tl.int64)
        tl.store(out + row * dim + at, s.to(out.dtype.element_ty))
        s = s * tl.exp(tl.load(decay + row)) + tl.load(states + row * dim + at).to(tl.float32)
    tl.store(last + (batch * heads + head) * dim + at, s)


@triton.jit
def router(logits, weights, ids, tokens, E: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr):
    """The K best of E experts, one after another, with weights that sum to one."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    e = tl.arange(0, E)
    x = tl.load(logits + rows[:, None] * E + e[None, :], mask=rows[:, None] < tokens, other=0.0).to(tl.float32)
    p = tl.exp(x - tl.max(x, 1)[:, None])
    total = tl.zeros([ROWS], tl.float32)
    left = p
    for k in tl.static_range(K):
        best = tl.argmax(left, 1)
        w = tl.max(left, 1)
        total += w
        tl.store(ids + rows * K + k, best, mask=rows < tokens)
        tl.store(weights + rows * K + k, w, mask=rows < tokens)
        left = tl.where(e[None, :] == best[:, None], -1.0, left)
    for k in tl.static_range(K):
        w = tl.load(weights + rows * K + k, mask=rows < tokens)
        tl.store(weights + rows * K + k, w / total, mask=rows < tokens)


@triton.jit
def listed_attention(
    q, k, v, o, lists, T, scale, NB: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """Each tile of queries attends to the NB blocks of keys that its list names."""
    tile, head = tl.program_id(0), tl.program_id(1)
    m, d, n = tile * BM + tl.arange(0, BM), tl.arange(0, D), tl.arange(0, BN)
    base = head.to(tl.int64) * T * D
    query = tl.load(q + base + m[:, None] * D + d[None, :])
    high, low, acc = tl.full([BM], -1e30, tl.float32), tl.zeros([BM], tl.float32), tl.zeros([BM, D], tl.float32)
    for i in range(NB):
        block = tl.load(lists + (head * tl.num_programs(0) + tile) * NB + i)
        keys = block * BN + n
        s = tl.dot(query, tl.load(k + base + keys[None, :] * D + d[:, None])) * scale
        top = tl.maximum(high, tl.max(s, 1))
        p = tl.exp2(s - top[:, None])
        fade = tl.exp2(high - top)
        low = low * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(query.dtype), tl.load(v + base + keys[:, None] * D + d[None, :]), acc * fade[:, None])
        high = top
    tl.store(o + base + m[:, None] * D + d[None, :], (acc / low[:, None]).to(o.dtype.element_ty))


@triton.jit
def wkv(r, k, v, w, u, out, T, D: tl.constexpr, BV: tl.constexpr):
    """RWKV's recurrence: a state [D, BV] in registers, one token after the other; [heads, T, D]."""
    head, part = tl.program_id(1), tl.program_id(0)
    i, j = tl.arange(0, D), part * BV + tl.arange(0, BV)
    bonus = tl.load(u + head * D + i)
    state = tl.zeros([D, BV], tl.float32)
    at = head.to(tl.int64) * T * D
    for _ in range(T):
        kv = tl.load(k + at + i).to(tl.float32)[:, None] * tl.load(v + at + j).to(tl.float32)[None, :]
        y = tl.sum(tl.load(r + at + i).to(tl.float32)[:, None] * (state + bonus[:, None] * kv), 0)
        state = state * tl.load(w + at + i)[:, None] + kv
        tl.store(out + at + j, y.to(out.dtype.element_ty))
        at += D


@triton.jit
def linear_loss(x, w, target, loss, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Cross entropy of x w^T over all N columns, whose scores are never stored."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    k = tl.arange(0, BK)
    goal = tl.load(target + m)
    high, low, hit = tl.full([BM], -1e30, tl.float32), tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    for first in range(0, N, BN):
        n = first + tl.arange(0, BN)
        s = tl.zeros([BM, BN], tl.float32)
        for at in range(0, K, BK):
            a = tl.load(x + m[:, None] * K + at + k[None, :])
            s = tl.dot(a, tl.load(w + n[None, :] * K + at + k[:, None]), s)
        top = tl.maximum(high, tl.max(s, 1))
        low = low * tl.exp(high - top) + tl.sum(tl.exp(s - top[:, None]), 1)
        hit += tl.sum(tl.where(n[None, :] == goal[:, None], s, 0.0), 1)
        high = top
    tl.store(loss + m, high + tl.log(low) - hit)


@triton.jit
def n_body(pos, acc, n, soft, BM: tl.constexpr, BN: tl.constexpr):
    """Forces between all pairs of n points [4, n]: x, y, z, mass."""
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    x, y, z = tl.load(pos + i), tl.load(pos + n + i), tl.load(pos + 2 * n + i)
    ax, ay, az = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    for first in range(0, n, BN):
        j = first + tl.arange(0, BN)
        dx = tl.load(pos + j)[None, :] - x[:, None]
        dy = tl.load(pos + n + j)[None, :] - y[:, None]
        dz = tl.load(pos + 2 * n + j)[None, :] - z[:, None]
        inv = tl.rsqrt(dx * dx + dy * dy + dz * dz + soft)
        f = tl.load(pos + 3 * n + j)[None, :] * inv * inv * inv
        ax += tl.sum(f * dx, 1)
        ay += tl.sum(f * dy, 1)
        az += tl.sum(f * dz, 1)
    tl.store(acc + i, ax)
    tl.store(acc + n + i, ay)
    tl.store(acc + 2 * n + i, az)
