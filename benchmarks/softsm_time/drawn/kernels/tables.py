"""Triton kernels with matrix products that go by tables, over parts, or with roles."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from softsm_time.drawn.kernels.products import _tile


@triton.jit
def grouped(x_ptr, w_ptr, c_ptr, first_ptr, groups, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Rows first[g] to first[g + 1] of x by w[g]: as many programs as multiprocessors go through the tiles of all."""
    tile = tl.program_id(0)
    done = 0
    columns = tl.cdiv(N, BN)
    for g in range(groups):
        begin, end = tl.load(first_ptr + g), tl.load(first_ptr + g + 1)
        tiles = tl.cdiv(end - begin, BM) * columns
        while tile < done + tiles:
            inner = tile - done
            m, n = begin + inner // columns * BM + tl.arange(0, BM), inner % columns * BN + tl.arange(0, BN)
            k = tl.arange(0, BK)
            a = x_ptr + m[:, None] * K + k[None, :]
            b = w_ptr + g.to(tl.int64) * K * N + k[:, None] * N + n[None, :]
            acc = tl.zeros([BM, BN], tl.float32)
            for _ in range(0, K, BK):
                acc = tl.dot(tl.load(a, mask=m[:, None] < end, other=0.0), tl.load(b), acc)
                a += BK
                b += BK * N
            tl.store(c_ptr + m[:, None] * N + n[None, :], acc.to(c_ptr.dtype.element_ty), mask=m[:, None] < end)
            tile += tl.num_programs(0)
        done += tiles


@triton.jit
def stream_k(a_ptr, b_ptr, c_ptr, M, N, K, each, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Every program has the same number of steps, which begin and end within tiles; parts are added in memory."""
    steps = tl.cdiv(K, BK)
    at = tl.program_id(0) * each
    end = min(at + each, tl.cdiv(M, BM) * tl.cdiv(N, BN) * steps)
    while at < end:
        tile, step = at // steps, at % steps
        many = min(steps - step, end - at)
        m, n = _tile(tile, tl.cdiv(M, BM), tl.cdiv(N, BN), 8)
        am, bn = m * BM + tl.arange(0, BM), n * BN + tl.arange(0, BN)
        k = step * BK + tl.arange(0, BK)
        a = a_ptr + am[:, None] * K + k[None, :]
        b = b_ptr + k[:, None] * N + bn[None, :]
        acc = tl.zeros([BM, BN], tl.float32)
        for _ in range(many):
            acc = tl.dot(tl.load(a), tl.load(b), acc)
            a += BK
            b += BK * N
        to = c_ptr + am[:, None] * N + bn[None, :]
        if many == steps:
            tl.store(to, acc)
        else:
            tl.atomic_add(to, acc, sem="relaxed")
        at += many


@triton.jit
def mlp(x_ptr, w1_ptr, w2_ptr, out_ptr, F, D: tl.constexpr, BM: tl.constexpr, BF: tl.constexpr):
    """silu(x w1) w2 with what is between in registers: x[M, D], w1[D, F], w2[F, D]."""
    m, d = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D)
    x = tl.load(x_ptr + m[:, None] * D + d[None, :])
    acc = tl.zeros([BM, D], tl.float32)
    for first in range(0, F, BF):
        f = first + tl.arange(0, BF)
        h = tl.dot(x, tl.load(w1_ptr + d[:, None] * F + f[None, :]))
        h = h * tl.sigmoid(h)
        acc = tl.dot(h.to(x.dtype), tl.load(w2_ptr + f[:, None] * D + d[None, :]), acc)
    tl.store(out_ptr + m[:, None] * D + d[None, :], acc.to(out_ptr.dtype.element_ty))


@triton.jit
def matmul_groups(a_ptr, b_ptr, scale_ptr, zero_ptr, c_ptr, M, N, K, GROUP: tl.constexpr, BM: tl.constexpr,
                  BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Weights [K / 8, N] of eight in a word; a scale and a zero for every GROUP of a column."""
    m, n = _tile(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), 8)
    am, bn, k = m * BM + tl.arange(0, BM), n * BN + tl.arange(0, BN), tl.arange(0, BK)
    acc = tl.zeros([BM, BN], tl.float32)
    for first in range(0, K, BK):
        a = tl.load(a_ptr + am[:, None] * K + first + k[None, :], mask=am[:, None] < M, other=0.0)
        words = tl.load(b_ptr + ((first + k) // 8)[:, None] * N + bn[None, :])
        group = first // GROUP
        scale = tl.load(scale_ptr + group * N + bn)
        zero = tl.load(zero_ptr + group * N + bn)
        b = ((words >> ((k % 8) * 4)[:, None]) & 15).to(tl.float16)
        acc = tl.dot(a, (b - zero[None, :]) * scale[None, :], acc)
    tl.store(c_ptr + am[:, None] * N + bn[None, :], acc.to(c_ptr.dtype.element_ty), mask=am[:, None] < M)


@triton.jit
def sparse_blocks(value_ptr, column_ptr, first_ptr, x_ptr, out_ptr, N, B: tl.constexpr, BN: tl.constexpr):
    """A matrix of blocks B x B, rows of blocks from first[r] to first[r + 1], by x[., N]."""
    r = tl.program_id(0)
    n, k = tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, B)
    acc = tl.zeros([B, BN], tl.float32)
    for at in range(tl.load(first_ptr + r), tl.load(first_ptr + r + 1)):
        column = tl.load(column_ptr + at)
        a = tl.load(value_ptr + at.to(tl.int64) * B * B + k[:, None] * B + k[None, :])
        x = tl.load(x_ptr + (column * B + k)[:, None] * N + n[None, :])
        acc = tl.dot(a, x, acc)
    tl.store(out_ptr + (r * B + k)[:, None] * N + n[None, :], acc.to(out_ptr.dtype.element_ty))


@triton.jit
def paged_decode(q_ptr, k_ptr, v_ptr, table_ptr, length_ptr, out_ptr, kv_heads, pages, D: tl.constexpr,
                 G: tl.constexpr, PAGE: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """One token of a request, G query heads of a key head; keys [page, PAGE, kv_heads, D]."""
    request, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(length_ptr + request)
    g, d, t = tl.arange(0, G), tl.arange(0, D), tl.arange(0, PAGE)
    at = ((request * kv_heads + head) * G + g)[:, None] * D + d[None, :]
    q = tl.load(q_ptr + at)
    top, total = tl.full([G], -float("inf"), tl.float32), tl.zeros([G], tl.float32)
    acc = tl.zeros([G, D], tl.float32)
    for page in range(tl.cdiv(length, PAGE)):
        number = tl.load(table_ptr + request * pages + page).to(tl.int64)
        where = ((number * PAGE + t) * kv_heads + head)[:, None] * D + d[None, :]
        inside = page * PAGE + t < length
        k = tl.load(k_ptr + where, mask=inside[:, None], other=0.0)
        v = tl.load(v_ptr + where, mask=inside[:, None], other=0.0)
        if DOT:
            s = tl.dot(q, k.T)
        else:
            s = tl.sum(q[:, None, :].to(tl.float32) * k[None, :, :].to(tl.float32), 2)
        s = tl.where(inside[None, :], s * 0.1275, -1e30)
        new = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - new[:, None])
        alpha = tl.exp2(top - new)
        total = total * alpha + tl.sum(p, 1)
        if DOT:
            acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
        else:
            acc = acc * alpha[:, None] + tl.sum(p[:, :, None] * v[None, :, :].to(tl.float32), 1)
        top = new
    tl.store(out_ptr + at, (acc / total[:, None]).to(out_ptr.dtype.element_ty))


@triton.jit
def attention_keys(q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, T, D: tl.constexpr,
                   BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr):  # fmt: skip
    """Gradients of BN keys and values, over the queries: [heads, T, D]."""
    base = tl.program_id(1).to(tl.int64) * T
    n, d = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, D)
    k = tl.load(k_ptr + (base + n)[:, None] * D + d[None, :])
    v = tl.load(v_ptr + (base + n)[:, None] * D + d[None, :])
    dk, dv = tl.zeros([BN, D], tl.float32), tl.zeros([BN, D], tl.float32)
    begin = tl.program_id(0) * BN // BM * BM if CAUSAL else 0
    for first in range(begin, T, BM):
        m = first + tl.arange(0, BM)
        q = tl.load(q_ptr + (base + m)[:, None] * D + d[None, :])
        do = tl.load(do_ptr + (base + m)[:, None] * D + d[None, :])
        p = tl.exp2(tl.dot(k, q.T) * 0.18 - tl.load(lse_ptr + base + m)[None, :])
        if CAUSAL:
            p = tl.where(m[None, :] >= n[:, None], p, 0.0)
        dv = tl.dot(p.to(do.dtype), do, dv)
        ds = p * (tl.dot(v, do.T) - tl.load(delta_ptr + base + m)[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk)
    tl.store(dk_ptr + (base + n)[:, None] * D + d[None, :], (dk * 0.125).to(dk_ptr.dtype.element_ty))
    tl.store(dv_ptr + (base + n)[:, None] * D + d[None, :], dv.to(dv_ptr.dtype.element_ty))


@triton.jit
def chunk_states(x_ptr, b_ptr, decay_ptr, state_ptr, T, heads, P: tl.constexpr, S: tl.constexpr, C: tl.constexpr):
    """Mamba-like: what a chunk of C tokens adds to the state [P, S] of a head; x[T, heads, P], b[T, S]."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    t, p, s = chunk * C + tl.arange(0, C), tl.arange(0, P), tl.arange(0, S)
    decay = tl.cumsum(tl.load(decay_ptr + t * heads + head), 0)
    left = tl.exp(tl.min(decay, 0) - decay)
    x = tl.load(x_ptr + (t[None, :] * heads + head) * P + p[:, None])
    b = tl.load(b_ptr + t[:, None] * S + s[None, :])
    state = tl.dot(x, (b.to(tl.float32) * left[:, None]).to(b.dtype))
    tl.store(state_ptr + ((chunk * heads + head) * P + p[:, None]) * S + s[None, :], state)


@triton.jit
def chunk_scan(state_ptr, decay_ptr, chunks, size, BLOCK: tl.constexpr):
    """States of chunks one after another, in place."""
    head = tl.program_id(1)
    at = head * size + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    h = tl.zeros([BLOCK], tl.float32)
    for chunk in range(chunks):
        where = state_ptr + chunk * tl.num_programs(1) * size + at
        new = tl.load(where)
        tl.store(where, h)
        h = h * tl.exp(tl.load(decay_ptr + chunk * tl.num_programs(1) + head)) + new


@triton.jit
def chunk_outputs(
    x_ptr, b_ptr, c_ptr, decay_ptr, state_ptr, out_ptr, T, heads, P: tl.constexpr, S: tl.constexpr, C: tl.constexpr
):
    chunk, head = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, C)
    t, p, s = chunk * C + i, tl.arange(0, P), tl.arange(0, S)
    decay = tl.cumsum(tl.load(decay_ptr + t * heads + head), 0)
    c = tl.load(c_ptr + t[:, None] * S + s[None, :])
    b = tl.load(b_ptr + t[None, :] * S + s[:, None])
    x = tl.load(x_ptr + (t[:, None] * heads + head) * P + p[None, :])
    inner = tl.dot(c, b) * tl.exp(decay[:, None] - decay[None, :])
    inner = tl.where(i[:, None] >= i[None, :], inner, 0.0)
    state = tl.load(state_ptr + ((chunk * heads + head) * P + p[None, :]) * S + s[:, None])
    out = tl.dot(inner.to(x.dtype), x) + tl.dot(c, state.to(c.dtype)) * tl.exp(decay)[:, None]
    tl.store(out_ptr + (t[:, None] * heads + head) * P + p[None, :], out.to(out_ptr.dtype.element_ty))


@triton.jit
def persistent_boxes(
    a_desc, b_desc, c_desc, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FLATTEN: tl.constexpr
):
    """TMA; as many programs as multiprocessors, each goes through tiles. B is [N, K]."""
    tiles = tl.cdiv(M, BM) * tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        m, n = _tile(tile, tl.cdiv(M, BM), tl.cdiv(N, BN), 8)
        acc = tl.zeros([BM, BN], tl.float32)
        for step in range(tl.cdiv(K, BK)):
            acc = tl.dot(a_desc.load([m * BM, step * BK]), b_desc.load([n * BN, step * BK]).T, acc)
        c_desc.store([m * BM, n * BN], acc.to(tl.bfloat16))


@triton.jit
def weight_gradient(x_ptr, dy_ptr, dw_ptr, T, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """dw[N, K] = dy[T, N]^T x[T, K]"""
    n = tl.program_id(0) * BM + tl.arange(0, BM)
    k = tl.program_id(1) * BN + tl.arange(0, BN)
    t = tl.arange(0, BK)
    acc = tl.zeros([BM, BN], tl.float32)
    for first in range(0, T, BK):
        dy = tl.load(dy_ptr + (first + t)[None, :] * N + n[:, None])
        acc = tl.dot(dy, tl.load(x_ptr + (first + t)[:, None] * K + k[None, :]), acc)
    tl.store(dw_ptr + n[:, None] * K + k[None, :], acc.to(dw_ptr.dtype.element_ty))


@gluon.jit
def ring(a_desc, b_desc, c_desc, K, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, SLOTS: gl.constexpr,
         num_warps: gl.constexpr):  # fmt: skip
    """Gluon: boxes of A and B in a ring, one product under way while the next boxes come. B is [N, K]."""
    m, n = gl.program_id(0) * BM, gl.program_id(1) * BN
    a_slots = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, BM, BK], a_desc.layout)
    b_slots = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, BN, BK], b_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(ready.index(slot), count=1)
    fence_async_shared()
    steps = K // BK
    for step in gl.static_range(SLOTS - 1):
        mbarrier.expect(ready.index(step), 2 * (BM + BN) * BK)
        tma.async_copy_global_to_shared(a_desc, [m, step * BK], ready.index(step), a_slots.index(step))
        tma.async_copy_global_to_shared(b_desc, [n, step * BK], ready.index(step), b_slots.index(step))
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, BN, 16]
    )
    acc = gl.zeros([BM, BN], gl.float32, layout)
    for turn in range(steps):
        at = turn % SLOTS
        mbarrier.wait(ready.index(at), turn // SLOTS & 1)
        acc = warpgroup_mma(a_slots.index(at), b_slots.index(at).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])  # the product before has read its slot
        later = turn + SLOTS - 1
        if later < steps:
            to = later % SLOTS
            mbarrier.expect(ready.index(to), 2 * (BM + BN) * BK)
            tma.async_copy_global_to_shared(a_desc, [m, later * BK], ready.index(to), a_slots.index(to))
            tma.async_copy_global_to_shared(b_desc, [n, later * BK], ready.index(to), b_slots.index(to))
    acc = warpgroup_mma_wait(0, deps=[acc])
    for slot in gl.static_range(SLOTS):
        mbarrier.invalidate(ready.index(slot))
    c_box = gl.allocate_shared_memory(gl.bfloat16, [BM, BN], c_desc.layout)
    c_box.store(acc.to(gl.bfloat16))
    fence_async_shared()
    tma.async_copy_shared_to_global(c_desc, [m, n], c_box)
    tma.store_wait(0)
