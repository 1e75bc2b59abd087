"""The twelve kernels of the fourth set, as users bring them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def persistent_matmul(
    A, B, C, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    SMS: tl.constexpr,
):  # fmt: skip
    """A [M, K], B [N, K] of FP8: each program has every SMS-th tile."""
    rows, columns = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for tile in range(tl.program_id(0), rows * columns, SMS):
        group = tile // (GROUP * columns)
        high = min(rows - group * GROUP, GROUP)
        m = (group * GROUP + tile % high) * BLOCK_M + tl.arange(0, BLOCK_M)
        n = tile % (GROUP * columns) // high * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        a, b = A + (m % M)[:, None] * K + k[None, :], B + (n % N)[None, :] * K + k[:, None]
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for _ in range(0, K, BLOCK_K):
            acc = tl.dot(tl.load(a), tl.load(b), acc)
            a += BLOCK_K
            b += BLOCK_K
        tl.store(C + m[:, None] * N + n[None, :], acc.to(C.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def int8_linear(A, B, SA, SB, BIAS, C, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """A [M, K] and B [N, K] of int8, with a scale for each row of both, and a bias."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for first in range(0, K, BLOCK_K):
        a = tl.load(A + m[:, None] * K + first + k[None, :], mask=(m < M)[:, None], other=0)
        b = tl.load(B + n[None, :] * K + first + k[:, None])
        acc = tl.dot(a, b, acc, out_dtype=tl.int32)
    out = acc.to(tl.float32) * tl.load(SA + m, mask=m < M, other=0.0)[:, None] * tl.load(SB + n)[None, :]
    out += tl.load(BIAS + n).to(tl.float32)[None, :]
    tl.store(C + m[:, None] * N + n[None, :], out.to(C.dtype.element_ty), mask=(m < M)[:, None])


@triton.jit
def stream_k_sums(A, B, C, M, N, K, each, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Each program has `each` steps of all tiles' K in a row; what it has of a tile it adds in memory."""
    at, left = tl.program_id(0) * each, each
    steps = K // BLOCK_K
    total = tl.cdiv(M, BLOCK_M) * (N // BLOCK_N) * steps
    end = min(at + left, total)
    while at < end:
        tile, step = at // steps, at % steps
        last = min(steps, step + end - at)
        m = tile // (N // BLOCK_N) * BLOCK_M + tl.arange(0, BLOCK_M)
        n = tile % (N // BLOCK_N) * BLOCK_N + tl.arange(0, BLOCK_N)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for s in range(step, last):
            k = s * BLOCK_K + tl.arange(0, BLOCK_K)
            acc = tl.dot(tl.load(A + m[:, None] * K + k[None, :]), tl.load(B + k[:, None] * N + n[None, :]), acc)
        tl.atomic_add(C + m[:, None] * N + n[None, :], acc, sem="relaxed")
        at += last - step


@triton.jit
def cross_entropy(X, TARGET, LOSS, columns, smoothing, BLOCK: tl.constexpr):
    """The loss of a row of logits, and in place of these its gradient."""
    row = X + tl.program_id(0).to(tl.int64) * columns
    target = tl.load(TARGET + tl.program_id(0))
    high, total, mean = -float("inf"), 0.0, 0.0
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(row + at, mask=at < columns, other=-float("inf")).to(tl.float32)
        new = tl.maximum(high, tl.max(x))
        total = total * tl.exp(high - new) + tl.sum(tl.exp(x - new))
        mean += tl.sum(tl.where(at < columns, x, 0.0)) / columns
        high = new
    chosen = tl.load(row + target).to(tl.float32)
    lse = high + tl.log(total)
    tl.debug_barrier()
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(row + at, mask=at < columns, other=-float("inf")).to(tl.float32)
        g = tl.exp(x - lse) - smoothing / columns - tl.where(at == target, 1.0 - smoothing, 0.0)
        tl.store(row + at, g.to(X.dtype.element_ty), mask=at < columns)
    tl.store(LOSS + tl.program_id(0), lse - (1.0 - smoothing) * chosen - smoothing * mean)


@triton.jit
def geglu_backward(DY, GATE, UP, n, BLOCK: tl.constexpr):
    """The gradients of gelu(gate) * up take the places of gate and up."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep = at < n
    dy = tl.load(DY + at, mask=keep, other=0).to(tl.float32)
    x, up = tl.load(GATE + at, mask=keep, other=0).to(tl.float32), tl.load(UP + at, mask=keep, other=0).to(tl.float32)
    half = 0.5 * (1.0 + tl.math.erf(x * 0.70710678118))
    tl.store(UP + at, (dy * x * half).to(UP.dtype.element_ty), mask=keep)
    slope = half + 0.3989422804 * x * tl.exp(-0.5 * x * x)
    tl.store(GATE + at, (dy * up * slope).to(GATE.dtype.element_ty), mask=keep)


@triton.jit
def chunk_attention(
    Q, K, V, G, O, T, scale, C: tl.constexpr, D: tl.constexpr, BV: tl.constexpr
):  # fmt: skip
    """Linear attention with a decay for each token, chunk after chunk, with its state in registers."""
    head = tl.program_id(1).to(tl.int64) * T
    t, d, v_ = tl.arange(0, C), tl.arange(0, D), tl.program_id(0) * BV + tl.arange(0, BV)
    state = tl.zeros([D, BV], tl.float32)
    for first in range(0, T, C):
        at = head + first + t
        q, k = tl.load(Q + at[:, None] * D + d[None, :]), tl.load(K + at[:, None] * D + d[None, :])
        v = tl.load(V + at[:, None] * D + v_[None, :])
        g = tl.cumsum(tl.load(G + at), 0)
        end = tl.sum(tl.where(t == C - 1, g, 0.0), 0)
        s = tl.dot(q, tl.trans(k)) * tl.exp(g[:, None] - g[None, :])
        s = tl.where(t[:, None] >= t[None, :], s, 0.0)
        o = tl.dot(s.to(v.dtype), v) + tl.dot(q, state.to(q.dtype)) * tl.exp(g)[:, None]
        tl.store(O + at[:, None] * D + v_[None, :], (o * scale).to(O.dtype.element_ty))
        state = state * tl.exp(end) + tl.dot(tl.trans(k), (v * tl.exp(end - g)[:, None]).to(v.dtype))


@triton.jit
def embedding_backward(INDEX, DY, DW, n, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Adds rows to those of a table that an index names."""
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    for r in range(ROWS):
        row = tl.program_id(0) * ROWS + r
        if row < n:
            to = tl.load(INDEX + row).to(tl.int64)
            dy = tl.load(DY + row.to(tl.int64) * columns + c, mask=c < columns, other=0.0).to(tl.float32)
            tl.atomic_add(DW + to * columns + c, dy, mask=c < columns, sem="relaxed")


@triton.jit
def sort_rows(X, VALUES, INDEX, columns, BLOCK: tl.constexpr, K: tl.constexpr):
    """The K largest of each row with their places: both are sorted as one number."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    x = tl.load(X + row * columns + at, mask=at < columns, other=-float("inf")).to(tl.float32)
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    words = tl.sort((bits << 32) | (BLOCK - 1 - at).to(tl.int64), descending=True)
    bits = (words >> 32).to(tl.int32)
    x = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)
    tl.store(VALUES + row * K + at, x.to(VALUES.dtype.element_ty), mask=at < K)
    tl.store(INDEX + row * K + at, BLOCK - 1 - (words & 0xFFFFFFFF).to(tl.int32), mask=at < K)


@triton.jit
def quantise_groups(X, Q, SCALE, ZERO, columns, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Groups of each row to four bits, two numbers to a byte, with a scale and a zero."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, GROUP // 2)
    base = row[:, None].to(tl.int64) * columns + tl.program_id(1) * GROUP
    low, high = (
        tl.load(X + base + 2 * at[None, :]).to(tl.float32),
        tl.load(X + base + 2 * at[None, :] + 1).to(tl.float32),
    )
    least = tl.minimum(tl.min(low, 1), tl.min(high, 1))
    most = tl.maximum(tl.max(low, 1), tl.max(high, 1))
    scale = tl.maximum(most - least, 1e-5) / 15
    zero = tl.floor(-least / scale + 0.5)
    a = tl.clamp(tl.floor(low / scale[:, None] + zero[:, None] + 0.5), 0.0, 15.0).to(tl.uint8)
    b = tl.clamp(tl.floor(high / scale[:, None] + zero[:, None] + 0.5), 0.0, 15.0).to(tl.uint8)
    tl.store(
        Q + row[:, None].to(tl.int64) * (columns // 2) + tl.program_id(1) * (GROUP // 2) + at[None, :], a | (b << 4)
    )
    to = row * (columns // GROUP) + tl.program_id(1)
    tl.store(SCALE + to, scale)
    tl.store(ZERO + to, zero)


@triton.jit
def bias_gradient(DY, DB, rows, columns, ROWS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Sums of columns; ROWS of them by each program, which then adds in memory."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    acc = tl.zeros([BLOCK_C], tl.float32)
    for first in range(0, ROWS, BLOCK_R):
        r = tl.program_id(1) * ROWS + first + tl.arange(0, BLOCK_R)
        keep = (r < rows)[:, None] & (c < columns)[None, :]
        acc += tl.sum(tl.load(DY + r[:, None] * columns + c[None, :], mask=keep, other=0.0).to(tl.float32), 0)
    tl.atomic_add(DB + c, acc, mask=c < columns)


@triton.jit
def keys_backward(
    Q, K, V, DO, LSE, DELTA, DK, DV, T, scale, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The gradients of keys and values of causal attention, transposed products."""
    base = tl.program_id(1).to(tl.int64) * T
    n, d = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, D)
    k, v = tl.load(K + (base + n)[:, None] * D + d[None, :]), tl.load(V + (base + n)[:, None] * D + d[None, :])
    dk, dv = tl.zeros([BLOCK_N, D], tl.float32), tl.zeros([BLOCK_N, D], tl.float32)
    for start in range(tl.program_id(0) * BLOCK_N, T, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        qt = tl.load(Q + (base + m)[None, :] * D + d[:, None])
        p = tl.exp2(tl.dot(k, qt) * (scale * 1.44269504) - tl.load(LSE + base + m)[None, :])
        p = tl.where(m[None, :] >= n[:, None], p, 0.0)
        do = tl.load(DO + (base + m)[:, None] * D + d[None, :])
        dv += tl.dot(p.to(do.dtype), do)
        ds = p * (tl.dot(v, tl.trans(do)) - tl.load(DELTA + base + m)[None, :])
        dk += tl.dot(ds.to(qt.dtype), tl.trans(qt))
    tl.store(DK + (base + n)[:, None] * D + d[None, :], (dk * scale).to(DK.dtype.element_ty))
    tl.store(DV + (base + n)[:, None] * D + d[None, :], dv.to(DV.dtype.element_ty))


@triton.jit
def neighbour_max(X, FIRST, NEIGHBOUR, OUT, columns, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr):
    """The largest of each feature over the neighbours of a node, which a list of edges names."""
    node = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    begin, end = tl.load(FIRST + node), tl.load(FIRST + node + 1)
    best = tl.full([BLOCK_C], -1e30, tl.float32)
    for first in range(begin, end, BLOCK_E):
        e = first + tl.arange(0, BLOCK_E)
        j = tl.load(NEIGHBOUR + e, mask=e < end, other=0)
        x = tl.load(X + j[:, None] * columns + c[None, :], mask=(e < end)[:, None], other=-1e30)
        best = tl.maximum(best, tl.max(x.to(tl.float32), 0))
    tl.store(OUT + node * columns + c, best.to(OUT.dtype.element_ty))
