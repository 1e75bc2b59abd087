"""The thirteen kernels of the third set, as users bring them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def flash_backward(
    Q, K, V, DO, LSE, DELTA, DQ, DK, DV, T, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """All gradients of attention in one pass over [heads, T, D]; dQ is added up in fp32."""
    base = tl.program_id(1).to(tl.int64) * T
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, D)
    kv_at = (base + n)[:, None] * D + d[None, :]
    k = tl.load(K + kv_at)
    v = tl.load(V + kv_at)
    dk = tl.zeros([BLOCK_N, D], tl.float32)
    dv = tl.zeros([BLOCK_N, D], tl.float32)
    lo = tl.program_id(0) * BLOCK_N // BLOCK_M * BLOCK_M if CAUSAL else 0
    for start in range(lo, T, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        q_at = (base + m)[:, None] * D + d[None, :]
        q = tl.load(Q + q_at)
        do = tl.load(DO + q_at)
        p = tl.exp2(tl.dot(q, tl.trans(k)) * (scale * 1.44269504) - tl.load(LSE + base + m)[:, None])
        if CAUSAL:
            p = tl.where(m[:, None] >= n[None, :], p, 0.0)
        dv += tl.dot(tl.trans(p.to(do.dtype)), do)
        dp = tl.dot(do, tl.trans(v))
        ds = (p * (dp - tl.load(DELTA + base + m)[:, None]) * scale).to(q.dtype)
        dk += tl.dot(tl.trans(ds), q)
        tl.atomic_add(DQ + q_at, tl.dot(ds, k), sem="relaxed")
    tl.store(DK + kv_at, dk.to(DK.dtype.element_ty))
    tl.store(DV + kv_at, dv.to(DV.dtype.element_ty))


@triton.jit
def pair_bias_attention(
    Q, K, V, BIAS, MASK, OUT, T, H, scale, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Attention over the rows of a pair representation [rows, H, T, D] with a bias [H, T, T] and a mask of keys."""
    row, head = tl.program_id(1) // H, tl.program_id(1) % H
    base = tl.program_id(1).to(tl.int64) * T * D
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, D)
    q = tl.load(Q + base + m[:, None] * D + d[None, :])
    high = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    for start in range(0, T, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        k = tl.load(K + base + n[None, :] * D + d[:, None])
        bias = tl.load(BIAS + head * T * T + m[:, None] * T + n[None, :])
        keep = tl.load(MASK + row * T + n)
        s = tl.dot(q, k) * scale + bias.to(tl.float32)
        s = tl.where(keep[None, :] != 0, s, -1e9)
        new = tl.maximum(high, tl.max(s, 1))
        p = tl.exp(s - new[:, None])
        fade = tl.exp(high - new)
        total = total * fade + tl.sum(p, 1)
        v = tl.load(V + base + n[:, None] * D + d[None, :])
        acc = acc * fade[:, None] + tl.dot(p.to(v.dtype), v)
        high = new
    tl.store(OUT + base + m[:, None] * D + d[None, :], (acc / total[:, None]).to(OUT.dtype.element_ty))


@triton.jit
def latent_decode(
    Q, QR, CACHE, TABLE, LENGTHS, OUT, LSE, H, pages, scale, SPLITS: tl.constexpr, L: tl.constexpr, R: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Decoding from latent rows [page, slot, L + R]: the first L words are keys and values, R more are rotated keys."""
    seq, group, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    h = group * BLOCK_H + tl.arange(0, BLOCK_H)
    at, rot = tl.arange(0, L), tl.arange(0, R)
    q = tl.load(Q + (seq * H + h)[:, None] * L + at[None, :])
    qr = tl.load(QR + (seq * H + h)[:, None] * R + rot[None, :])
    length = tl.load(LENGTHS + seq)
    each = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK_N) * BLOCK_N
    first, last = split * each, tl.minimum(split * each + each, length)
    high = tl.full([BLOCK_H], -1e30, tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, L], tl.float32)
    for start in range(first, last, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        page = tl.load(TABLE + seq * pages + n // PAGE, mask=n < last, other=0)
        row = (page * PAGE + n % PAGE).to(tl.int64) * (L + R)
        c = tl.load(CACHE + row[None, :] + at[:, None], mask=n[None, :] < last, other=0.0)
        cr = tl.load(CACHE + row[None, :] + L + rot[:, None], mask=n[None, :] < last, other=0.0)
        s = (tl.dot(q, c) + tl.dot(qr, cr)) * scale
        s = tl.where(n[None, :] < last, s, -1e30)
        new = tl.maximum(high, tl.max(s, 1))
        p = tl.exp(s - new[:, None])
        fade = tl.exp(high - new)
        total = total * fade + tl.sum(p, 1)
        acc = acc * fade[:, None] + tl.dot(p.to(c.dtype), tl.trans(c))
        high = new
    to = (seq * H + h) * SPLITS + split
    tl.store(OUT + to[:, None] * L + at[None, :], acc / total[:, None])
    tl.store(LSE + to, high + tl.log(total))


@triton.jit
def hash_grid(
    XYZ, TABLE, SIZES, OUT, points, LEVELS: tl.constexpr, WORDS: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr
):
    """Features of points from grids of growing resolution whose corners are hashed into tables (instant NGP)."""
    level = tl.program_id(1)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < points
    size = tl.load(SIZES + level)
    x = tl.load(XYZ + i * 3, mask=inside, other=0.0) * size
    y = tl.load(XYZ + i * 3 + 1, mask=inside, other=0.0) * size
    z = tl.load(XYZ + i * 3 + 2, mask=inside, other=0.0) * size
    x0, y0, z0 = tl.floor(x), tl.floor(y), tl.floor(z)
    fx, fy, fz = x - x0, y - y0, z - z0
    f = tl.arange(0, F)
    acc = tl.zeros([BLOCK, F], tl.float32)
    for corner in tl.static_range(8):
        dx, dy, dz = corner & 1, (corner >> 1) & 1, corner >> 2
        cx, cy, cz = x0.to(tl.uint32) + dx, y0.to(tl.uint32) + dy, z0.to(tl.uint32) + dz
        slot = (cx ^ (cy * 2654435761) ^ (cz * 805459861)) & (WORDS - 1)
        weight = (fx if dx else 1 - fx) * (fy if dy else 1 - fy) * (fz if dz else 1 - fz)
        words = tl.load(TABLE + (level * WORDS + slot.to(tl.int32))[:, None] * F + f[None, :])
        acc += weight[:, None] * words.to(tl.float32)
    to = OUT + i[:, None] * (LEVELS * F) + level * F + f[None, :]
    tl.store(to, acc.to(OUT.dtype.element_ty), mask=inside[:, None])


@triton.jit
def cholesky(A, OUT, N: tl.constexpr):
    """One small symmetric matrix a program, factorised column by column in registers."""
    at = tl.program_id(0).to(tl.int64) * N * N
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    a = tl.load(A + at + i * N + j)
    rows = tl.arange(0, N)
    for k in range(N):
        column = tl.sum(tl.where(j == k, a, 0.0), 1)
        pivot = tl.sum(tl.where(rows == k, column, 0.0), 0)
        column = tl.where(rows >= k, column * tl.rsqrt(pivot), 0.0)
        across = tl.sum(tl.where(i == j, column[:, None], 0.0), 0)
        a = tl.where(j == k, column[:, None], tl.where(j > k, a - column[:, None] * across[None, :], a))
    tl.store(OUT + at + i * N + j, tl.where(i >= j, a, 0.0))


@triton.jit
def sinkhorn(X, OUT, steps, eps, N: tl.constexpr, ROWS: tl.constexpr):
    """Matrices [N, N] of logits made doubly stochastic by dividing rows and columns in turn."""
    b = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None, None]
    at = (b * N + tl.arange(0, N)[None, :, None]) * N + tl.arange(0, N)[None, None, :]
    x = tl.load(X + at).to(tl.float32)
    x = tl.exp(x - tl.max(tl.max(x, 2), 1)[:, None, None])
    for _ in range(steps):
        x = x / (tl.sum(x, 2) + eps)[:, :, None]
        x = x / (tl.sum(x, 1) + eps)[:, None, :]
    tl.store(OUT + at, x.to(OUT.dtype.element_ty))


@triton.jit
def mandelbrot(OUT, W, H, left, top, step, limit, BLOCK_X: tl.constexpr, BLOCK_Y: tl.constexpr):
    """How many turns each pixel takes to escape; a tile stops when all of its pixels have."""
    px = tl.program_id(0) * BLOCK_X + tl.arange(0, BLOCK_X)
    py = tl.program_id(1) * BLOCK_Y + tl.arange(0, BLOCK_Y)
    cx = (left + px * step)[None, :] + tl.zeros([BLOCK_Y, BLOCK_X], tl.float32)
    cy = (top + py * step)[:, None] + tl.zeros([BLOCK_Y, BLOCK_X], tl.float32)
    x, y = cx, cy
    count = tl.zeros([BLOCK_Y, BLOCK_X], tl.int32)
    alive = 1
    turn = 0
    while (alive > 0) & (turn < limit):
        xx, yy = x * x, y * y
        inside = xx + yy < 4.0
        y = tl.where(inside, 2 * x * y + cy, y)
        x = tl.where(inside, xx - yy + cx, x)
        count += inside.to(tl.int32)
        alive = tl.max(tl.max(inside.to(tl.int32), 1), 0)
        turn += 1
    tl.store(OUT + py[:, None] * W + px[None, :], count, mask=(py[:, None] < H) & (px[None, :] < W))


@triton.jit
def binary_matmul(A, B, OUT, M, N, words, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Products of signs packed 32 to a word, by counting bits: A [M, words], B [words, N]."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for k in range(words):
        a = tl.load(A + m * words + k)
        b = tl.load(B + k * N + n)
        x = a[:, None] ^ b[None, :]
        acc += tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1)
    tl.store(OUT + m[:, None] * N + n[None, :], words * 32 - 2 * acc)


@triton.jit
def edge_scores(X, Y, SOURCE, TARGET, OUT, edges, D: tl.constexpr, BLOCK: tl.constexpr):
    """For each edge of a graph the product of its two nodes' rows."""
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = e < edges
    s = tl.load(SOURCE + e, mask=inside, other=0)
    t = tl.load(TARGET + e, mask=inside, other=0)
    d = tl.arange(0, D)
    x = tl.load(X + s[:, None] * D + d[None, :]).to(tl.float32)
    y = tl.load(Y + t[:, None] * D + d[None, :]).to(tl.float32)
    tl.store(OUT + e, tl.sum(x * y, 1), mask=inside)


@triton.jit
def image_planes(IN, OUT, MEAN, STD, H, W, BLOCK: tl.constexpr):
    """Bytes r g b r g b to three normalised planes."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    image = tl.program_id(1).to(tl.int64)
    inside = at < H * W
    for c in tl.static_range(3):
        x = tl.load(IN + image * H * W * 3 + at * 3 + c, mask=inside, other=0).to(tl.float32) / 255.0
        x = (x - tl.load(MEAN + c)) / tl.load(STD + c)
        tl.store(OUT + (image * 3 + c) * H * W + at, x.to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def persistent_softmax(X, OUT, rows, columns, STAGES: tl.constexpr, BLOCK: tl.constexpr):
    """Rows dealt out to as many programs as run together (tutorial 02)."""
    at = tl.arange(0, BLOCK)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
        x = tl.load(X + row.to(tl.int64) * columns + at, mask=at < columns, other=-float("inf")).to(tl.float32)
        e = tl.exp(x - tl.max(x, axis=0))
        y = e / tl.sum(e, axis=0)
        tl.store(OUT + row.to(tl.int64) * columns + at, y.to(OUT.dtype.element_ty), mask=at < columns)


@triton.jit
def linear_gelu_residual(
    X, W, B, RES, OUT, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr
):
    """gelu(x w^T + b) + residual, with the grouped order of tutorial 03."""
    pid, across = tl.program_id(0), tl.cdiv(N, BLOCK_N)
    first = pid // (GROUP * across) * GROUP
    high = min(tl.cdiv(M, BLOCK_M) - first, GROUP)
    m = (first + pid % (GROUP * across) % high) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (pid % (GROUP * across) // high) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    xs = X + (m % M)[:, None] * K + k[None, :]
    ws = W + (n % N)[None, :] * K + k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for at in range(0, tl.cdiv(K, BLOCK_K)):
        x = tl.load(xs, mask=k[None, :] < K - at * BLOCK_K, other=0.0)
        w = tl.load(ws, mask=k[:, None] < K - at * BLOCK_K, other=0.0)
        acc = tl.dot(x, w, acc)
        xs += BLOCK_K
        ws += BLOCK_K
    acc += tl.load(B + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    acc = 0.5 * acc * (1 + tl.erf(acc * 0.70710678))
    inside = (m[:, None] < M) & (n[None, :] < N)
    at = m[:, None] * N + n[None, :]
    acc += tl.load(RES + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(OUT + at, acc.to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def fft_rows(RE, IM, FRE, FIM, TRE, TIM, ORE, OIM, N: tl.constexpr):
    """Fourier transforms of N * N points a program: products with a matrix [N, N], twiddles, products again."""
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    at = tl.program_id(0).to(tl.int64) * N * N + i * N + j
    re, im = tl.load(RE + at), tl.load(IM + at)
    fr, fi = tl.load(FRE + i * N + j), tl.load(FIM + i * N + j)
    tr, ti = tl.load(TRE + i * N + j), tl.load(TIM + i * N + j)
    yr = tl.dot(fr, re) - tl.dot(fi, im)
    yi = tl.dot(fr, im) + tl.dot(fi, re)
    zr = (yr * tr - yi * ti).to(re.dtype)
    zi = (yr * ti + yi * tr).to(re.dtype)
    xr = tl.dot(zr, fr) - tl.dot(zi, fi)
    xi = tl.dot(zr, fi) + tl.dot(zi, fr)
    to = tl.program_id(0).to(tl.int64) * N * N + j * N + i
    tl.store(ORE + to, xr.to(ORE.dtype.element_ty))
    tl.store(OIM + to, xi.to(OIM.dtype.element_ty))
