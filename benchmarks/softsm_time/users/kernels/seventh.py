"""The twelve kernels of the seventh set, as users bring them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def relaxed(f, weight, rho, cu, u2, omega):
    """One direction of a lattice, towards its equilibrium."""
    return f + omega * (weight * rho * (1 + 3 * cu + 4.5 * cu * cu - u2) - f)


@triton.jit
def lattice(F, OUT, W, H, omega, BLOCK: tl.constexpr):
    """A step of a lattice Boltzmann method (D2Q9): nine planes come from nine neighbours, collide and are stored."""
    y, x = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    west, east = tl.where(x == 0, W - 1, x - 1), tl.where(x == W - 1, 0, x + 1)
    up, down = tl.where(y == 0, H - 1, y - 1) * W, tl.where(y == H - 1, 0, y + 1) * W
    n, row = W * H, y * W
    f0, f1, f2 = tl.load(F + row + x), tl.load(F + n + row + west), tl.load(F + 2 * n + up + x)
    f3, f4, f5 = tl.load(F + 3 * n + row + east), tl.load(F + 4 * n + down + x), tl.load(F + 5 * n + up + west)
    f6, f7, f8 = tl.load(F + 6 * n + up + east), tl.load(F + 7 * n + down + east), tl.load(F + 8 * n + down + west)
    rho = f0 + f1 + f2 + f3 + f4 + f5 + f6 + f7 + f8
    u, v = (f1 + f5 + f8 - f3 - f6 - f7) / rho, (f2 + f5 + f6 - f4 - f7 - f8) / rho
    u2 = 1.5 * (u * u + v * v)
    tl.store(OUT + row + x, relaxed(f0, 4 / 9, rho, 0.0, u2, omega))
    tl.store(OUT + n + row + x, relaxed(f1, 1 / 9, rho, u, u2, omega))
    tl.store(OUT + 2 * n + row + x, relaxed(f2, 1 / 9, rho, v, u2, omega))
    tl.store(OUT + 3 * n + row + x, relaxed(f3, 1 / 9, rho, -u, u2, omega))
    tl.store(OUT + 4 * n + row + x, relaxed(f4, 1 / 9, rho, -v, u2, omega))
    tl.store(OUT + 5 * n + row + x, relaxed(f5, 1 / 36, rho, u + v, u2, omega))
    tl.store(OUT + 6 * n + row + x, relaxed(f6, 1 / 36, rho, v - u, u2, omega))
    tl.store(OUT + 7 * n + row + x, relaxed(f7, 1 / 36, rho, -u - v, u2, omega))
    tl.store(OUT + 8 * n + row + x, relaxed(f8, 1 / 36, rho, u - v, u2, omega))


@triton.jit
def murmur(X, OUT, words, BLOCK: tl.constexpr):
    """MurmurHash3 of records: a lane goes along its own, four bytes at a time."""
    record = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    h = tl.zeros([BLOCK], tl.uint32)
    for i in range(words):
        k = tl.load(X + record * words + i).to(tl.uint32, bitcast=True) * 0xCC9E2D51
        h ^= ((k << 15) | (k >> 17)) * 0x1B873593
        h = ((h << 13) | (h >> 19)) * 5 + 0xE6546B64
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    tl.store(OUT + record, (h ^ (h >> 16)).to(tl.int32, bitcast=True))


@triton.jit
def forces(ATOMS, LIST, OUT, n, K: tl.constexpr, BLOCK: tl.constexpr):
    """Lennard-Jones forces between atoms and the neighbours in their lists."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    x, y, z = (tl.load(ATOMS + 3 * i, mask), tl.load(ATOMS + 3 * i + 1, mask), tl.load(ATOMS + 3 * i + 2, mask))
    fx, fy = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    fz = tl.zeros([BLOCK], tl.float32)
    for k in range(K):
        j = 3 * tl.load(LIST + k * n + i, mask, other=0)
        dx, dy = x - tl.load(ATOMS + j, mask), y - tl.load(ATOMS + j + 1, mask)
        dz = z - tl.load(ATOMS + j + 2, mask)
        inverse = 1 / (dx * dx + dy * dy + dz * dz + 1e-3)
        sixth = inverse * inverse * inverse
        force = tl.where(inverse > 0.16, (48 * sixth * sixth - 24 * sixth) * inverse, 0.0)
        fx, fy, fz = fx + force * dx, fy + force * dy, fz + force * dz
    tl.store(OUT + 3 * i, fx, mask)
    tl.store(OUT + 3 * i + 1, fy, mask)
    tl.store(OUT + 3 * i + 2, fz, mask)


@triton.jit
def ordered(a, b):
    return tl.minimum(a, b), tl.maximum(a, b)


@triton.jit
def median(X, OUT, W, H, BLOCK: tl.constexpr):
    """The median of 3 x 3 pixels of one byte, by a network of comparisons."""
    y, x = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = x < W
    left, right = tl.maximum(x - 1, 0), tl.minimum(x + 1, W - 1)
    above, below = X + tl.maximum(y - 1, 0) * W, X + tl.minimum(y + 1, H - 1) * W
    row = X + y * W
    a, b, c = (tl.load(above + left, mask, 0), tl.load(above + x, mask, 0), tl.load(above + right, mask, 0))
    d, e, f = tl.load(row + left, mask, 0), tl.load(row + x, mask, 0), tl.load(row + right, mask, 0)
    g, h, i = (tl.load(below + left, mask, 0), tl.load(below + x, mask, 0), tl.load(below + right, mask, 0))
    b, c = ordered(b, c)
    e, f = ordered(e, f)
    h, i = ordered(h, i)
    a, b = ordered(a, b)
    d, e = ordered(d, e)
    g, h = ordered(g, h)
    b, c = ordered(b, c)
    e, f = ordered(e, f)
    h, i = ordered(h, i)
    middle = ordered(ordered(b, e)[1], h)[0]
    middle = tl.maximum(tl.minimum(b, e), middle)
    low, high = tl.maximum(tl.maximum(a, d), g), tl.minimum(tl.minimum(c, f), i)
    low, high = ordered(low, high)
    tl.store(OUT + y * W + x, tl.maximum(low, tl.minimum(high, middle)), mask)


@triton.jit
def tridiagonal(LOWER, DIAGONAL, UPPER, RIGHT, C, OUT, n, systems, BLOCK: tl.constexpr):
    """Thomas's algorithm: a system a lane, forward and back."""
    s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(DIAGONAL + s)
    c, d = tl.load(UPPER + s) / first, tl.load(RIGHT + s) / first
    tl.store(C + s, c)
    tl.store(OUT + s, d)
    for i in range(1, n):
        at = i * systems + s
        lower = tl.load(LOWER + at)
        scale = 1 / (tl.load(DIAGONAL + at) - lower * c)
        c, d = tl.load(UPPER + at) * scale, (tl.load(RIGHT + at) - lower * d) * scale
        tl.store(C + at, c)
        tl.store(OUT + at, d)
    for i in range(1, n):
        at = (n - 1 - i) * systems + s
        d = tl.load(OUT + at) - tl.load(C + at) * d
        tl.store(OUT + at, d)


@triton.jit
def tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def lstm_cell(GATES, BIAS, CELL, HIDDEN, NEW, width, BLOCK: tl.constexpr):
    """What follows the product of an LSTM's step."""
    row, j = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = j < width
    at = GATES + row * 4 * width + j
    i = tl.load(at, mask, other=0.0).to(tl.float32) + tl.load(BIAS + j, mask, other=0.0)
    f = tl.load(at + width, mask, other=0.0).to(tl.float32) + tl.load(BIAS + width + j, mask, other=0.0)
    g = tl.load(at + 2 * width, mask, other=0.0).to(tl.float32) + tl.load(BIAS + 2 * width + j, mask, other=0.0)
    o = tl.load(at + 3 * width, mask, other=0.0).to(tl.float32) + tl.load(BIAS + 3 * width + j, mask, other=0.0)
    c = tl.sigmoid(f + 1) * tl.load(CELL + row * width + j, mask, other=0.0) + tl.sigmoid(i) * tanh(g)
    tl.store(NEW + row * width + j, c, mask)
    tl.store(HIDDEN + row * width + j, (tl.sigmoid(o) * tanh(c)).to(HIDDEN.dtype.element_ty), mask)


@triton.jit
def deltas(PACKED, FIRST, OUT, BLOCK: tl.constexpr):
    """Numbers stored as differences of twelve bits, in blocks that begin with a whole one."""
    block, i = tl.program_id(0), tl.arange(0, BLOCK)
    at = PACKED + block * (BLOCK * 3 // 2) + i * 3 // 2
    low, high = tl.load(at).to(tl.int32), tl.load(at + 1).to(tl.int32)
    code = tl.where(i % 2 == 0, low | ((high & 15) << 8), (low >> 4) | (high << 4))
    step = (code >> 1) ^ -(code & 1)
    tl.store(OUT + block * BLOCK + i, tl.load(FIRST + block) + tl.cumsum(step, 0))


@triton.jit
def ctc(LOGITS, LABELS, OUT, T, C, L, BLOCK: tl.constexpr):
    """The forward pass of connectionist temporal classification, an utterance a program."""
    p, s = tl.program_id(0), tl.arange(0, BLOCK)
    odd, inside = s % 2 == 1, s < 2 * L + 1
    label = tl.load(LABELS + p * L + s // 2, odd & inside, other=0)
    skips = odd & (s > 1) & (label != tl.gather(label, tl.maximum(s - 2, 0), 0))
    base = LOGITS + p * T * C + label
    alpha = tl.where(s < 2, tl.load(base, inside, other=0.0), -1e30)
    for t in range(1, T):
        emit = tl.load(base + t * C, inside, other=0.0)
        one = tl.where(s > 0, tl.gather(alpha, tl.maximum(s - 1, 0), 0), -1e30)
        two = tl.where(skips, tl.gather(alpha, tl.maximum(s - 2, 0), 0), -1e30)
        most = tl.maximum(alpha, tl.maximum(one, two))
        total = tl.exp(alpha - most) + tl.exp(one - most) + tl.exp(two - most)
        alpha = tl.where(inside, most + tl.log(total) + emit, -1e30)
    tl.store(OUT + p * BLOCK + s, alpha)


@triton.jit
def walk(STARTS, EDGES, OUT, n, steps, BLOCK: tl.constexpr):
    """Random walks on a graph: each step's loads depend on the last one's."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    node, state = i % n, i.to(tl.uint32) * 747796405
    for _ in range(steps):
        first = tl.load(STARTS + node)
        many = tl.load(STARTS + node + 1) - first
        state = state * 1664525 + 1013904223
        node = tl.load(EDGES + first + (state >> 8).to(tl.int32) % many)
    tl.store(OUT + i, node)


@triton.jit
def butterflies(X, ROOTS, QUOTIENTS, OUT, half, prime, BLOCK: tl.constexpr):
    """A pass of a number-theoretic transform, with Shoup's products modulo a prime."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = i % half
    low = i // half * half * 2 + k
    a, b = tl.load(X + low).to(tl.uint32, bitcast=True), tl.load(X + low + half).to(tl.uint32, bitcast=True)
    root, quotient = tl.load(ROOTS + k).to(tl.uint32, bitcast=True), tl.load(QUOTIENTS + k).to(tl.uint32, bitcast=True)
    modulus = prime.to(tl.uint32)
    b = b * root - tl.math.umulhi(b, quotient) * modulus
    b = tl.where(b >= modulus, b - modulus, b)
    more, less = a + b, a + modulus - b
    tl.store(OUT + low, tl.where(more >= modulus, more - modulus, more).to(tl.int32, bitcast=True))
    tl.store(OUT + low + half, tl.where(less >= modulus, less - modulus, less).to(tl.int32, bitcast=True))


@triton.jit
def gram(X, OUT, M, K, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """The lower triangle of X times its transpose: a tile a program, numbered along the triangle."""
    p = tl.program_id(0)
    i = ((tl.sqrt(8.0 * p + 1.0) - 1) * 0.5).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > p, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= p, i + 1, i)
    j = p - i * (i + 1) // 2
    m, n = i * BLOCK + tl.arange(0, BLOCK), j * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, BLOCK_K)
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for at in range(0, K, BLOCK_K):
        left = tl.load(X + m[:, None] * K + at + k[None, :])
        total = tl.dot(left, tl.load(X + n[None, :] * K + at + k[:, None]), total)
    tl.store(OUT + m[:, None] * M + n[None, :], total.to(tl.bfloat16), n[None, :] <= m[:, None])


@triton.jit
def min_plus(A, B, OUT, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The shortest ways over one more node: a product of matrices with sums and minima."""
    m, n = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    best = tl.full([BLOCK_M, BLOCK_N], 1e30, tl.float32)
    for k in range(K):
        best = tl.minimum(best, tl.load(A + m * K + k)[:, None] + tl.load(B + k * N + n)[None, :])
    tl.store(OUT + m[:, None] * N + n[None, :], best)
