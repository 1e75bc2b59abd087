"""The twelve kernels of the sixth set, as users bring them."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@triton.jit
def black_scholes(SPOT, STRIKE, YEARS, CALL, PUT, n, BLOCK: tl.constexpr):
    """Prices of options: logarithms, roots, exponentials and erf."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    s, x = tl.load(SPOT + i, mask, other=1.0), tl.load(STRIKE + i, mask, other=1.0)
    t = tl.load(YEARS + i, mask, other=1.0)
    root = 0.3 * tl.sqrt(t)
    d1 = (tl.log(s / x) + 0.065 * t) / root
    n1, n2 = 0.5 + 0.5 * tl.math.erf(d1 * 0.7071068), 0.5 + 0.5 * tl.math.erf((d1 - root) * 0.7071068)
    later = x * tl.exp(-0.02 * t)
    tl.store(CALL + i, s * n1 - later * n2, mask)
    tl.store(PUT + i, later * (1 - n2) - s * (1 - n1), mask)


@triton.jit
def wkv(R, K, V, W, U, OUT, T, C, BLOCK: tl.constexpr):
    """The recurrence of RWKV 4, token by token, a channel a lane."""
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    base = tl.program_id(0) * T * C + c
    w, u = tl.load(W + c), tl.load(U + c)
    a, b = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    most = tl.zeros([BLOCK], tl.float32) - 1e38
    for t in range(T):
        k, v = tl.load(K + base + t * C).to(tl.float32), tl.load(V + base + t * C).to(tl.float32)
        p = tl.maximum(most, u + k)
        e1, e2 = tl.exp(most - p), tl.exp(u + k - p)
        r = tl.sigmoid(tl.load(R + base + t * C).to(tl.float32))
        tl.store(OUT + base + t * C, (r * (e1 * a + e2 * v) / (e1 * b + e2)).to(tl.bfloat16))
        p = tl.maximum(w + most, k)
        e1, e2 = tl.exp(w + most - p), tl.exp(k - p)
        a, b, most = e1 * a + e2 * v, e1 * b + e2, p


@triton.jit
def biquad(X, OUT, T, b0, b1, a1, a2, BLOCK: tl.constexpr):
    """A recursive filter of each channel: a lane goes along its row."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x1, y1 = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    y2 = tl.zeros([BLOCK], tl.float32)
    for t in range(T):
        x = tl.load(X + c * T + t)
        y = b0 * x + b1 * x1 - a1 * y1 - a2 * y2
        tl.store(OUT + c * T + t, y)
        x1, y2, y1 = x, y1, y


@triton.jit
def viterbi(EMIT, MOVE, OUT, T, N: tl.constexpr):
    """The best score of every state after T steps, a sequence a program."""
    i = tl.arange(0, N)
    move = tl.load(MOVE + i[:, None] * N + i[None, :])
    base = EMIT + tl.program_id(0) * T * N + i
    score = tl.load(base)
    for t in range(1, T):
        score = tl.max(score[:, None] + move, 0) + tl.load(base + t * N)
    tl.store(OUT + tl.program_id(0) * N + i, score)


@triton.jit
def padded_softmax(X, LENGTHS, OUT, columns, BLOCK: tl.constexpr):
    """Rows up to their own lengths, in one block: data decide the mask, not the path."""
    row = tl.program_id(0).to(tl.int64) * columns
    i = tl.arange(0, BLOCK)
    mask = i < tl.load(LENGTHS + tl.program_id(0))
    x = tl.load(X + row + i, mask, other=-float("inf")).to(tl.float32)
    x = tl.exp(x - tl.max(x, 0))
    tl.store(OUT + row + i, (x / tl.sum(x, 0)).to(OUT.dtype.element_ty), mask)


@triton.jit
def grid_sample(IMAGE, GRID, OUT, H, W, many, C: tl.constexpr, BLOCK: tl.constexpr):
    """Bilinear samples of all channels at points of a list."""
    b, p = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = p < many
    at = GRID + (b * many + p) * 2
    x = (tl.load(at, mask, other=0.0) + 1) * 0.5 * (W - 1)
    y = (tl.load(at + 1, mask, other=0.0) + 1) * 0.5 * (H - 1)
    x0, y0 = tl.floor(x), tl.floor(y)
    fx, fy = x - x0, y - y0
    left = tl.minimum(tl.maximum(x0.to(tl.int32), 0), W - 2)
    top = tl.minimum(tl.maximum(y0.to(tl.int32), 0), H - 2)
    for c in range(C):
        corner = IMAGE + ((b * C + c) * H + top) * W + left
        upper = tl.load(corner, mask, other=0.0) * (1 - fx) + tl.load(corner + 1, mask, other=0.0) * fx
        lower = tl.load(corner + W, mask, other=0.0) * (1 - fx) + tl.load(corner + W + 1, mask, other=0.0) * fx
        tl.store(OUT + (b * C + c) * many + p, upper * (1 - fy) + lower * fy, mask)


@triton.jit
def smith_waterman(A, B, OUT, n, m, BLOCK: tl.constexpr):
    """Local alignment along anti-diagonals in registers; a gather brings the neighbour's number."""
    p, j = tl.program_id(0), tl.arange(0, BLOCK)
    b = tl.load(B + p * m + j, j < m, other=-1)
    last, before = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    best = tl.zeros([BLOCK], tl.int32)
    for d in range(n + m - 1):
        i = d - j
        inside = (i >= 0) & (i < n)
        a = tl.load(A + p * n + i, inside, other=-2)
        left = tl.where(j > 0, tl.gather(last, tl.maximum(j - 1, 0), 0), 0)
        corner = tl.where(j > 0, tl.gather(before, tl.maximum(j - 1, 0), 0), 0)
        now = tl.maximum(corner + tl.where(a == b, 3, -2), tl.maximum(last, left) - 1)
        now = tl.where(inside & (j < m), tl.maximum(now, 0), 0)
        best, before, last = tl.maximum(best, now), last, now
    tl.store(OUT + p, tl.max(best, 0))


@triton.jit
def spmv(STARTS, COLUMNS, VALUES, X, OUT, BLOCK: tl.constexpr):
    """A sparse matrix by a vector, a row a program."""
    row = tl.program_id(0)
    first, end = tl.load(STARTS + row), tl.load(STARTS + row + 1)
    total = tl.zeros([BLOCK], tl.float32)
    for at in range(first, end, BLOCK):
        i = at + tl.arange(0, BLOCK)
        mask = i < end
        total += tl.load(VALUES + i, mask, other=0.0) * tl.load(
            X + tl.load(COLUMNS + i, mask, other=0), mask, other=0.0
        )
    tl.store(OUT + row, tl.sum(total, 0))


@triton.jit
def march(SPHERES, OUT, count, BLOCK: tl.constexpr):
    """Rays go on by the distance to the nearest sphere until all of a program have hit or left."""
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    u, v = (p % 1024).to(tl.float32) / 512 - 1, (p // 1024).to(tl.float32) / 512 - 1
    z = tl.rsqrt(u * u + v * v + 1)
    far, live = tl.zeros([BLOCK], tl.float32), tl.full([BLOCK], 1, tl.int32)
    step = 0
    while (tl.max(live, 0) > 0) & (step < 64):
        near = tl.full([BLOCK], 1e9, tl.float32)
        for s in range(count):
            dx = u * z * far - tl.load(SPHERES + s * 4)
            dy = v * z * far - tl.load(SPHERES + s * 4 + 1)
            dz = z * far - tl.load(SPHERES + s * 4 + 2)
            near = tl.minimum(near, tl.sqrt(dx * dx + dy * dy + dz * dz) - tl.load(SPHERES + s * 4 + 3))
        far += tl.where(live > 0, near, 0.0)
        live = ((near > 1e-3) & (far < 20)).to(tl.int32)
        step += 1
    tl.store(OUT + p, far)


@triton.jit
def ranks(X, OUT, BLOCK: tl.constexpr):
    """Sorts short rows: the place of a number is how many are smaller."""
    row, i = tl.program_id(0) * BLOCK, tl.arange(0, BLOCK)
    x, rank = tl.load(X + row + i), tl.zeros([BLOCK], tl.int32)
    for j in range(BLOCK):
        other = tl.load(X + row + j)
        rank += ((other < x) | ((other == x) & (j < i))).to(tl.int32)
    tl.store(OUT + row + rank, x)


@triton.jit
def packed_attention(Q, K, V, STARTS, OUT, scale, H: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr,
                     BLOCK_N: tl.constexpr):  # fmt: skip
    """Causal attention of sequences one behind the other; programs behind the end of a sequence leave at once."""
    h, first = tl.program_id(1), tl.load(STARTS + tl.program_id(2))
    length = tl.load(STARTS + tl.program_id(2) + 1) - first
    top = tl.program_id(0) * BLOCK_M
    if top >= length:
        return
    rows, d = top + tl.arange(0, BLOCK_M), tl.arange(0, D)
    at_rows = ((first + rows)[:, None] * H + h) * D + d[None, :]
    q = tl.load(Q + at_rows, rows[:, None] < length, other=0.0)
    most = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total, out = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, D], tl.float32)
    for start in range(0, tl.minimum(top + BLOCK_M, length), BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        k = tl.load(K + ((first + keys)[None, :] * H + h) * D + d[:, None], keys[None, :] < length, other=0.0)
        s = tl.dot(q, k) * scale * 1.44269504
        s = tl.where((keys[None, :] < length) & (keys[None, :] <= rows[:, None]), s, -1e30)
        above = tl.maximum(most, tl.max(s, 1))
        p, fade = tl.exp2(s - above[:, None]), tl.exp2(most - above)
        v = tl.load(V + ((first + keys)[:, None] * H + h) * D + d[None, :], keys[:, None] < length, other=0.0)
        out = tl.dot(p.to(tl.bfloat16), v, out * fade[:, None])
        total, most = total * fade + tl.sum(p, 1), above
    tl.store(OUT + at_rows, (out / total[:, None]).to(tl.bfloat16), rows[:, None] < length)


@gluon.jit
def transpose(X, OUT, M, N, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, WARPS: gl.constexpr, SWIZZLED: gl.constexpr):
    """In Gluon, through shared memory, which is swizzled or not."""
    by_rows: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    by_columns: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [1, WARPS], [0, 1])
    phases: gl.constexpr = 8 if SWIZZLED else 1
    shared: gl.constexpr = gl.SwizzledSharedLayout(4 if SWIZZLED else 1, 1, phases, [1, 0])
    top, left = gl.program_id(0) * BLOCK_M, gl.program_id(1) * BLOCK_N
    m = top + gl.arange(0, BLOCK_M, gl.SliceLayout(1, by_rows))
    n = left + gl.arange(0, BLOCK_N, gl.SliceLayout(0, by_rows))
    x = gl.load(X + m[:, None] * N + n[None, :])
    y = gl.allocate_shared_memory(gl.float32, [BLOCK_M, BLOCK_N], shared, x).load(by_columns)
    m = top + gl.arange(0, BLOCK_M, gl.SliceLayout(1, by_columns))
    n = left + gl.arange(0, BLOCK_N, gl.SliceLayout(0, by_columns))
    gl.store(OUT + n[None, :] * M + m[:, None], y)
