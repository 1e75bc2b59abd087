"""Triton kernels with matrix products."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile(pid, rows, columns, GROUP: tl.constexpr):
    in_group = GROUP * columns
    first = pid // in_group * GROUP
    size = min(rows - first, GROUP)
    return first + (pid % in_group) % size, (pid % in_group) // size


@triton.jit
def matmul(a_ptr, b_ptr, c_ptr, M, N, K, sam, sak, sbk, sbn, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
           GROUP: tl.constexpr, ACC: tl.constexpr, ACT: tl.constexpr):  # fmt: skip
    """Any types and strides; K is a multiple of BK."""
    m, n = _tile(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), GROUP)
    am, bn, k = m * BM + tl.arange(0, BM), n * BN + tl.arange(0, BN), tl.arange(0, BK)
    a = a_ptr + (am % M)[:, None] * sam + k[None, :] * sak
    b = b_ptr + k[:, None] * sbk + (bn % N)[None, :] * sbn
    acc = tl.zeros([BM, BN], ACC)
    for _ in range(0, K, BK):
        acc = tl.dot(tl.load(a), tl.load(b), acc, out_dtype=ACC)
        a += BK * sak
        b += BK * sbk
    if ACT == "relu2":
        acc = tl.maximum(acc, 0)
        acc = acc * acc
    out = c_ptr + am[:, None] * N + bn[None, :]
    tl.store(out, acc.to(c_ptr.dtype.element_ty), mask=(am[:, None] < M) & (bn[None, :] < N))


@triton.jit
def matmul_split(
    a_ptr, b_ptr, c_ptr, M, N, K, SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """Parts of K, added in memory."""
    m, n = _tile(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), 8)
    am, bn = m * BM + tl.arange(0, BM), n * BN + tl.arange(0, BN)
    k = tl.program_id(1) * (K // SPLITS) + tl.arange(0, BK)
    a = a_ptr + am[:, None] * K + k[None, :]
    b = b_ptr + k[:, None] * N + bn[None, :]
    acc = tl.zeros([BM, BN], tl.float32)
    for _ in range(0, K // SPLITS, BK):
        acc = tl.dot(tl.load(a), tl.load(b), acc)
        a += BK
        b += BK * N
    tl.atomic_add(c_ptr + am[:, None] * N + bn[None, :], acc, sem="relaxed")


@triton.jit
def matmul_weights(
    a_ptr, b_ptr, scale_ptr, c_ptr, M, N, K, INT4: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """Weights [N, K] of one byte, or two in a byte, with a scale for each row; few rows of activations."""
    m, n = tl.program_id(0), tl.program_id(1)
    am, bn, k = m * BM + tl.arange(0, BM), n * BN + tl.arange(0, BN), tl.arange(0, BK)
    acc = tl.zeros([BM, BN], tl.float32)
    for first in range(0, K, BK):
        a = tl.load(a_ptr + am[:, None] * K + first + k[None, :], mask=am[:, None] < M, other=0.0)
        if INT4:
            both = tl.load(b_ptr + bn[None, :] * (K // 2) + (first + k[:, None]) // 2)
            b = ((both.to(tl.int32) >> (k[:, None] % 2 * 4)) & 15) - 8
        else:
            b = tl.load(b_ptr + bn[None, :] * K + first + k[:, None])
        acc = tl.dot(a, b.to(a.dtype), acc)
    acc *= tl.load(scale_ptr + bn)[None, :]
    tl.store(c_ptr + am[:, None] * N + bn[None, :], acc.to(c_ptr.dtype.element_ty), mask=am[:, None] < M)


@triton.jit
def matmul_scaled(a_ptr, b_ptr, sa_ptr, sb_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """FP8 with a scale for every 128 of a row of A and every 128 x 128 of B [N, K]."""
    m, n = _tile(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), 8)
    am, bn, k = m * BM + tl.arange(0, BM), n * BN + tl.arange(0, BN), tl.arange(0, BK)
    a = a_ptr + am[:, None] * K + k[None, :]
    b = b_ptr + bn[None, :] * K + k[:, None]
    acc = tl.zeros([BM, BN], tl.float32)
    for first in range(0, K, BK):
        group = first // 128
        sa = tl.load(sa_ptr + am * (K // 128) + group)
        sb = tl.load(sb_ptr + bn // 128 * (K // 128) + group)
        acc += tl.dot(tl.load(a), tl.load(b)) * sa[:, None] * sb[None, :]
        a += BK
        b += BK
    tl.store(c_ptr + am[:, None] * N + bn[None, :], acc.to(c_ptr.dtype.element_ty))


@triton.jit
def matmul_swiglu(x_ptr, w_ptr, v_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """silu(x w) * (x v)"""
    m, n = _tile(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), 8)
    am, bn, k = m * BM + tl.arange(0, BM), n * BN + tl.arange(0, BN), tl.arange(0, BK)
    gate, up = tl.zeros([BM, BN], tl.float32), tl.zeros([BM, BN], tl.float32)
    for first in range(0, K, BK):
        x = tl.load(x_ptr + am[:, None] * K + first + k[None, :])
        at = (first + k[:, None]) * N + bn[None, :]
        gate = tl.dot(x, tl.load(w_ptr + at), gate)
        up = tl.dot(x, tl.load(v_ptr + at), up)
    z = gate * tl.sigmoid(gate) * up
    tl.store(c_ptr + am[:, None] * N + bn[None, :], z.to(c_ptr.dtype.element_ty))


@triton.jit
def matmul_batched(a_ptr, b_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    batch = tl.program_id(2).to(tl.int64)
    am, bn = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    a = a_ptr + batch * M * K + am[:, None] * K + k[None, :]
    b = b_ptr + batch * K * N + k[:, None] * N + bn[None, :]
    acc = tl.zeros([BM, BN], tl.float32)
    for _ in range(0, K, BK):
        acc = tl.dot(tl.load(a), tl.load(b), acc)
        a += BK
        b += BK * N
    tl.store(c_ptr + batch * M * N + am[:, None] * N + bn[None, :], acc.to(c_ptr.dtype.element_ty))


@triton.jit
def matmul_experts(
    x_ptr, rows_ptr, expert_ptr, w_ptr, c_ptr, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """BM rows of one expert at a time: rows gathered by number, weights [experts, K, N]."""
    block, n = tl.program_id(0), tl.program_id(1)
    rows = tl.load(rows_ptr + block * BM + tl.arange(0, BM))
    w = w_ptr + tl.load(expert_ptr + block).to(tl.int64) * K * N
    bn, k = n * BN + tl.arange(0, BN), tl.arange(0, BK)
    a = x_ptr + rows[:, None] * K + k[None, :]
    b = w + k[:, None] * N + bn[None, :]
    acc = tl.zeros([BM, BN], tl.float32)
    for _ in range(0, K, BK):
        acc = tl.dot(tl.load(a), tl.load(b), acc)
        a += BK
        b += BK * N
    out = (block * BM + tl.arange(0, BM))[:, None] * N + bn[None, :]
    tl.store(c_ptr + out, acc.to(c_ptr.dtype.element_ty))


@triton.jit
def matmul_boxes(a_desc, b_desc, c_desc, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """TMA, a program for each tile; B is [N, K]."""
    m, n = _tile(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), 8)
    acc = tl.zeros([BM, BN], tl.float32)
    for first in range(0, K, BK):
        acc = tl.dot(a_desc.load([m * BM, first]), b_desc.load([n * BN, first]).T, acc)
    c_desc.store([m * BM, n * BN], acc.to(tl.bfloat16))


@triton.jit
def conv2d(x_ptr, w_ptr, out_ptr, H, W, C, F, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """3 x 3, channels last: pixels by filters, a sum over nine places and C channels."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    image, h, w = m // (H * W), m // W % H, m % W
    k = tl.arange(0, BK)
    acc = tl.zeros([BM, BN], tl.float32)
    for place in range(9):
        y, x = h + place // 3 - 1, w + place % 3 - 1
        inside = (y >= 0) & (y < H) & (x >= 0) & (x < W)
        at = ((image * H + y) * W + x) * C
        for first in range(0, C, BK):
            a = tl.load(x_ptr + at[:, None] + first + k[None, :], mask=inside[:, None], other=0.0)
            acc = tl.dot(a, tl.load(w_ptr + (place * C + first + k[:, None]) * F + n[None, :]), acc)
    tl.store(out_ptr + m[:, None] * F + n[None, :], acc.to(out_ptr.dtype.element_ty))


@triton.jit
def attention(q_ptr, k_ptr, v_ptr, out_ptr, slope_ptr, T, groups, window, D: tl.constexpr, BM: tl.constexpr,
              BN: tl.constexpr, FORM: tl.constexpr):  # fmt: skip
    """[heads, T, D] queries, [heads / groups, T, D] keys: full, causal, ALiBi, a sliding window or a softcap."""
    head = tl.program_id(1)
    first = tl.program_id(0) * BM
    q_base, kv_base = head.to(tl.int64) * T * D, (head // groups).to(tl.int64) * T * D
    rows, d = first + tl.arange(0, BM), tl.arange(0, D)
    q = tl.load(q_ptr + q_base + rows[:, None] * D + d[None, :])
    slope = tl.load(slope_ptr + head) if FORM == "alibi" else 0.0
    top = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    begin = tl.maximum(0, first - window) // BN * BN if FORM == "window" else 0
    end = first + BM if FORM == "causal" or FORM == "window" else T
    scale = 0.1803 if D == 64 else 0.1275
    for start in range(begin, end, BN):
        keys = start + tl.arange(0, BN)
        k = tl.load(k_ptr + kv_base + keys[None, :] * D + d[:, None])
        s = tl.dot(q, k) * scale
        if FORM == "alibi":
            s -= slope * tl.abs(rows[:, None] - keys[None, :])
        if FORM == "softcap":
            s = 30.0 - 60.0 / (1 + tl.exp2(s * 0.0961797))
        if FORM == "causal":
            s = tl.where(rows[:, None] >= keys[None, :], s, -float("inf"))
        if FORM == "window":
            s = tl.where((rows[:, None] >= keys[None, :]) & (rows[:, None] - keys[None, :] < window), s, -1e30)
        new = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - new[:, None])
        alpha = tl.exp2(top - new)
        total = total * alpha + tl.sum(p, 1)
        v = tl.load(v_ptr + kv_base + keys[:, None] * D + d[None, :])
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
        top = new
    tl.store(out_ptr + q_base + rows[:, None] * D + d[None, :], (acc / total[:, None]).to(out_ptr.dtype.element_ty))


@triton.jit
def attention_decode(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, T, part, D: tl.constexpr, G: tl.constexpr, BN: tl.constexpr
):
    """G query heads of one key head, a part of the keys: [heads, T, D]."""
    head, piece = tl.program_id(0), tl.program_id(1)
    base = head.to(tl.int64) * T * D
    g, d = tl.arange(0, G), tl.arange(0, D)
    q = tl.load(q_ptr + (head * G + g[:, None]) * D + d[None, :])
    top = tl.full([G], -float("inf"), tl.float32)
    total = tl.zeros([G], tl.float32)
    acc = tl.zeros([G, D], tl.float32)
    for start in range(piece * part, piece * part + part, BN):
        keys = start + tl.arange(0, BN)
        k = tl.load(k_ptr + base + keys[None, :] * D + d[:, None])
        s = tl.dot(q, k) * 0.1275
        new = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - new[:, None])
        alpha = tl.exp2(top - new)
        total = total * alpha + tl.sum(p, 1)
        v = tl.load(v_ptr + base + keys[:, None] * D + d[None, :])
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
        top = new
    at = (head * tl.num_programs(1) + piece) * G + g
    tl.store(out_ptr + at[:, None] * D + d[None, :], acc / total[:, None])
    tl.store(lse_ptr + at, top + tl.log2(total))


@triton.jit
def linear_attention(q_ptr, k_ptr, v_ptr, out_ptr, T, D: tl.constexpr, BV: tl.constexpr, C: tl.constexpr):
    """Chunks of C tokens one after the other, with a state [D, BV] between them: [heads, T, D]."""
    base = tl.program_id(1).to(tl.int64) * T * D
    d, v = tl.arange(0, D), tl.program_id(0) * BV + tl.arange(0, BV)
    c = tl.arange(0, C)
    state = tl.zeros([D, BV], tl.float32)
    for first in range(0, T, C):
        t = first + c
        q = tl.load(q_ptr + base + t[:, None] * D + d[None, :])
        k = tl.load(k_ptr + base + t[None, :] * D + d[:, None])
        values = tl.load(v_ptr + base + t[:, None] * D + v[None, :])
        inner = tl.where(c[:, None] >= c[None, :], tl.dot(q, k), 0.0)
        out = tl.dot(q, state.to(q.dtype)) + tl.dot(inner.to(q.dtype), values)
        state += tl.dot(k, values)
        tl.store(out_ptr + base + t[:, None] * D + v[None, :], out.to(out_ptr.dtype.element_ty))
