"""Triton kernels of the usual kind, for validation: what tutorials teach and other packages ship, written plainly."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=inside) + tl.load(y_ptr + at, mask=inside), mask=inside)


@triton.jit
def softmax_kernel(x_ptr, out_ptr, stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + at, mask=at < columns, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, 0))
    tl.store(out_ptr + row * stride + at, (e / tl.sum(e, 0)).to(out_ptr.dtype.element_ty), mask=at < columns)


@triton.jit
def layer_norm_kernel(x_ptr, out_ptr, w_ptr, b_ptr, stride, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + row * stride + at, mask=at < columns, other=0.0).to(tl.float32)
    mean = tl.sum(total, 0) / columns
    squares = tl.zeros([BLOCK], tl.float32)
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride + at, mask=at < columns, other=0.0).to(tl.float32)
        x = tl.where(at < columns, x - mean, 0.0)
        squares += x * x
    scale = tl.rsqrt(tl.sum(squares, 0) / columns + eps)
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < columns
        x = tl.load(x_ptr + row * stride + at, mask=inside, other=0.0).to(tl.float32)
        w, b = tl.load(w_ptr + at, mask=inside), tl.load(b_ptr + at, mask=inside)
        tl.store(out_ptr + row * stride + at, ((x - mean) * scale * w + b).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm_kernel(x_ptr, out_ptr, w_ptr, stride, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + at, mask=at < columns, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / columns + eps)
    w = tl.load(w_ptr + at, mask=at < columns, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * stride + at, (x * scale * w).to(out_ptr.dtype.element_ty), mask=at < columns)


@triton.jit
def swiglu_kernel(a_ptr, b_ptr, out_ptr, stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    a = tl.load(a_ptr + row * stride + at, mask=at < columns, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + row * stride + at, mask=at < columns, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * stride + at, (a * tl.sigmoid(a) * b).to(out_ptr.dtype.element_ty), mask=at < columns)


@triton.jit
def matmul_kernel(a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
                  BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    """Tutorial 03: pointers, tiles in groups of rows so that the L2 serves neighbours."""
    pid = tl.program_id(0)
    rows, columns = tl.cdiv(M, BM), tl.cdiv(N, BN)
    in_group = GROUP * columns
    first = pid // in_group * GROUP
    size = min(rows - first, GROUP)
    m = first + (pid % in_group) % size
    n = (pid % in_group) // size
    am = (m * BM + tl.arange(0, BM)) % M
    bn = (n * BN + tl.arange(0, BN)) % N
    k = tl.arange(0, BK)
    a = a_ptr + am[:, None] * stride_am + k[None, :] * stride_ak
    b = b_ptr + k[:, None] * stride_bk + bn[None, :] * stride_bn
    acc = tl.zeros([BM, BN], tl.float32)
    for step in range(0, tl.cdiv(K, BK)):
        left = K - step * BK
        acc = tl.dot(tl.load(a, mask=k[None, :] < left, other=0.0), tl.load(b, mask=k[:, None] < left, other=0.0), acc)
        a += BK * stride_ak
        b += BK * stride_bk
    cm, cn = m * BM + tl.arange(0, BM), n * BN + tl.arange(0, BN)
    out = c_ptr + stride_cm * cm[:, None] + stride_cn * cn[None, :]
    tl.store(out, acc.to(c_ptr.dtype.element_ty), mask=(cm[:, None] < M) & (cn[None, :] < N))


@triton.jit
def tma_matmul_kernel(a_desc, b_desc, c_desc, M, N, K, SMS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                      BK: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    """Tutorial 09: one program per multiprocessor loops over tiles, loads and stores by TMA. B is [N, K]."""
    rows, columns, steps = tl.cdiv(M, BM), tl.cdiv(N, BN), tl.cdiv(K, BK)
    for tile in tl.range(tl.program_id(0), rows * columns, SMS, flatten=False):
        in_group = GROUP * columns
        first = tile // in_group * GROUP
        size = min(rows - first, GROUP)
        m = (first + (tile % in_group) % size) * BM
        n = ((tile % in_group) // size) * BN
        acc = tl.zeros([BM, BN], tl.float32)
        for step in range(steps):
            a = a_desc.load([m, step * BK])
            b = b_desc.load([n, step * BK])
            acc = tl.dot(a, b.T, acc)
        c_desc.store([m, n], acc.to(tl.bfloat16))


@triton.jit
def attention_kernel(q_ptr, k_ptr, v_ptr, out_ptr, scale, stride_h, T, D: tl.constexpr, BM: tl.constexpr,
                     BN: tl.constexpr, CAUSAL: tl.constexpr):  # fmt: skip
    """Tutorial 06, forward, pointers: [heads, T, D]."""
    head = tl.program_id(1).to(tl.int64) * stride_h
    first = tl.program_id(0) * BM
    rows = first + tl.arange(0, BM)
    d = tl.arange(0, D)
    q = tl.load(q_ptr + head + rows[:, None] * D + d[None, :])
    top = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    end = first + BM if CAUSAL else T
    for start in range(0, end, BN):
        keys = start + tl.arange(0, BN)
        k = tl.load(k_ptr + head + keys[None, :] * D + d[:, None])
        s = tl.dot(q, k) * scale
        if CAUSAL:
            s = tl.where(rows[:, None] >= keys[None, :], s, -float("inf"))
        new = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - new[:, None])
        alpha = tl.exp2(top - new)
        total = total * alpha + tl.sum(p, 1)
        v = tl.load(v_ptr + head + keys[:, None] * D + d[None, :])
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
        top = new
    tl.store(out_ptr + head + rows[:, None] * D + d[None, :], (acc / total[:, None]).to(out_ptr.dtype.element_ty))
