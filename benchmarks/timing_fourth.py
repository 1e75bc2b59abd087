"""A fourth set of kernels as users bring them: two shapes of each with two variants, drawn at random by SEED
(timing_third.drawn_cases). Predicted, committed, then measured.

python benchmarks/timing.py --set fourth --predict --json FILE     # then --measure on an H200, --table
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from timing_case import Call, Case, empty, values
from timing_family import BF16, FP8, FP16, FP32, INT8, Drawn, cdiv, numbers, shuffled, typed
from timing_third import drawn_cases

SEED = 20261717


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


def matmul_of(r: random.Random) -> Iterator[Drawn]:
    M, N, K = r.choice((2048, 4096, 8192)), r.choice((2048, 4096)), r.choice((2048, 4096))
    for (bm, bn), bk, stages, warps in shuffled(r, ((128, 128), (128, 256), (64, 128)), (64, 128), (3, 4), (4, 8)):
        if stages * (bm + bn) * bk > 200 << 10 or bm * bn // warps > 4096:
            continue

        def make(device: str, bm=bm, bn=bn, bk=bk, stages=stages, warps=warps) -> Call:
            a, b = typed(M, K, device=device, dtype=FP8), typed(N, K, device=device, dtype=FP8)
            c = empty(M, N, device=device, dtype=FP16)
            return lambda: persistent_matmul[(132,)](
                a, b, c, M, N, K, BLOCK_M=bm, BLOCK_N=bn, BLOCK_K=bk, GROUP=8, SMS=132, num_stages=stages,
                num_warps=warps,
            )  # fmt: skip

        yield f"{M}x{N}x{K}", f"{bm}x{bn}x{bk} s{stages} w{warps}", make


def linear_of(r: random.Random) -> Iterator[Drawn]:
    M, N, K = r.choice((77, 1024, 4096)), r.choice((3072, 4096, 12288)), r.choice((1024, 4096))
    for (bm, bn), bk, stages, warps in shuffled(r, ((64, 64), (128, 128), (64, 128)), (64, 128), (2, 3, 4), (4, 8)):

        def make(device: str, bm=bm, bn=bn, bk=bk, stages=stages, warps=warps) -> Call:
            a, b = typed(M, K, device=device, dtype=INT8), typed(N, K, device=device, dtype=INT8)
            sa, sb = values(M, device=device, dtype=FP32), values(N, device=device, dtype=FP32)
            bias, c = values(N, device=device), empty(M, N, device=device)
            return lambda: int8_linear[(cdiv(M, bm), N // bn)](
                a, b, sa, sb, bias, c, M, N, K, BLOCK_M=bm, BLOCK_N=bn, BLOCK_K=bk, num_stages=stages, num_warps=warps
            )

        yield f"{M}x{N}x{K}", f"{bm}x{bn}x{bk} s{stages} w{warps}", make


def stream_k_of(r: random.Random) -> Iterator[Drawn]:
    M, N, K = r.choice((512, 1024, 1536)), r.choice((1536, 2048, 3072)), r.choice((2048, 4096, 8192))
    for (bm, bn), bk, stages, warps in shuffled(r, ((64, 128), (128, 128)), (32, 64), (3, 4), (4, 8)):

        def make(device: str, bm=bm, bn=bn, bk=bk, stages=stages, warps=warps) -> Call:
            a, b = values(M, K, device=device, dtype=FP16), values(K, N, device=device, dtype=FP16)
            c, each = torch.zeros(M, N, device=device), cdiv(cdiv(M, bm) * (N // bn) * (K // bk), 132)
            return lambda: stream_k_sums[(132,)](
                a, b, c, M, N, K, each, BLOCK_M=bm, BLOCK_N=bn, BLOCK_K=bk, num_stages=stages, num_warps=warps
            )

        yield f"{M}x{N}x{K}", f"{bm}x{bn}x{bk} s{stages} w{warps}", make


def cross_entropy_of(r: random.Random) -> Iterator[Drawn]:
    rows, columns, dtype = r.choice((1024, 4096, 8192)), r.choice((32000, 50257, 128256)), r.choice((BF16, FP32))
    for block, warps in shuffled(r, (2048, 4096, 8192, 16384), (4, 8, 16, 32)):

        def make(device: str, block=block, warps=warps) -> Call:
            x, target = values(rows, columns, device=device, dtype=dtype), numbers(rows, columns, device)
            loss = empty(rows, device=device, dtype=FP32)
            return lambda: cross_entropy[(rows,)](x, target, loss, columns, 0.1, BLOCK=block, num_warps=warps)

        yield f"{rows}x{columns} {'fp32' if dtype == FP32 else 'bf16'}", f"b{block} w{warps}", make


def geglu_of(r: random.Random) -> Iterator[Drawn]:
    n = r.choice((1 << 20, 1 << 24, 3 << 23))
    for block, warps in shuffled(r, (256, 1024, 4096), (4, 8)):

        def make(device: str, block=block, warps=warps) -> Call:
            dy, gate, up = (values(n, device=device) for _ in "dgu")
            return lambda: geglu_backward[(cdiv(n, block),)](dy, gate, up, n, BLOCK=block, num_warps=warps)

        yield f"{n}", f"b{block} w{warps}", make


def chunks_of(r: random.Random) -> Iterator[Drawn]:
    heads, T, D = r.choice((32, 64, 128)), r.choice((1024, 2048)), r.choice((64, 128))
    for C, bv, stages, warps in shuffled(r, (32, 64), (32, 64), (1, 2), (2, 4)):

        def make(device: str, C=C, bv=bv, stages=stages, warps=warps) -> Call:
            q, k, v, o = (values(heads, T, D, device=device) for _ in "qkvo")
            g = -values(heads, T, device=device, dtype=FP32).abs() * 0.1
            return lambda: chunk_attention[(D // bv, heads)](
                q, k, v, g, o, T, D**-0.5, C=C, D=D, BV=bv, num_stages=stages, num_warps=warps
            )

        yield f"{heads}x{T}x{D}", f"c{C} v{bv} s{stages} w{warps}", make


def embedding_of(r: random.Random) -> Iterator[Drawn]:
    n, table, columns = r.choice((4096, 16384)), r.choice((1000, 32000, 128000)), r.choice((512, 1024, 2048))
    for rows, block, warps in shuffled(r, (1, 4, 8), (256, 512), (4, 8)):

        def make(device: str, rows=rows, block=block, warps=warps) -> Call:
            index, dy = numbers(n, table, device), values(n, columns, device=device)
            dw = torch.zeros(table, columns, device=device)
            return lambda: embedding_backward[(n // rows, columns // block)](
                index, dy, dw, n, columns, ROWS=rows, BLOCK=block, num_warps=warps
            )

        yield f"{n} of {table} x {columns}", f"r{rows} b{block} w{warps}", make


def sort_of(r: random.Random) -> Iterator[Drawn]:
    rows, columns, k = r.choice((512, 4096, 16384)), r.choice((100, 500, 1024, 2000)), r.choice((8, 32))
    for (warps,) in shuffled(r, (1, 2, 4, 8)):

        def make(device: str, warps=warps) -> Call:
            x = values(rows, columns, device=device)
            best, index = empty(rows, k, device=device), empty(rows, k, device=device, dtype=torch.int32)
            block = 1 << (columns - 1).bit_length()
            return lambda: sort_rows[(rows,)](x, best, index, columns, BLOCK=block, K=k, num_warps=warps)

        yield f"{rows}x{columns} best {k}", f"w{warps}", make


def groups_of(r: random.Random) -> Iterator[Drawn]:
    rows, columns, group = r.choice((4096, 11008)), r.choice((4096, 8192)), r.choice((64, 128))
    for each, warps in shuffled(r, (4, 16, 32), (1, 2, 4)):

        def make(device: str, each=each, warps=warps) -> Call:
            x, q = (
                values(rows, columns, device=device, dtype=FP16),
                torch.zeros(rows, columns // 2, dtype=torch.uint8, device=device),
            )
            scale, zero = (empty(rows, columns // group, device=device, dtype=FP32) for _ in "sz")
            return lambda: quantise_groups[(rows // each, columns // group)](
                x, q, scale, zero, columns, GROUP=group, ROWS=each, num_warps=warps
            )

        yield f"{rows}x{columns} by {group}", f"r{each} w{warps}", make


def bias_of(r: random.Random) -> Iterator[Drawn]:
    rows, columns, dtype = r.choice((8192, 32768)), r.choice((1000, 4096, 12288)), r.choice((BF16, FP32))
    for each, br, bc, warps in shuffled(r, (128, 512), (16, 32), (64, 128, 256), (4, 8)):

        def make(device: str, each=each, br=br, bc=bc, warps=warps) -> Call:
            dy, db = values(rows, columns, device=device, dtype=dtype), torch.zeros(columns, device=device)
            return lambda: bias_gradient[(cdiv(columns, bc), rows // each)](
                dy, db, rows, columns, ROWS=each, BLOCK_R=br, BLOCK_C=bc, num_warps=warps
            )

        yield f"{rows}x{columns} {'fp32' if dtype == FP32 else 'bf16'}", f"{each} {br}x{bc} w{warps}", make


def keys_of(r: random.Random) -> Iterator[Drawn]:
    heads, T, D = r.choice((16, 32, 64)), r.choice((1024, 2048, 4096)), r.choice((64, 128))
    for bm, bn, stages, warps in shuffled(r, (32, 64), (64, 128), (1, 2, 3), (4, 8)):

        def make(device: str, bm=bm, bn=bn, stages=stages, warps=warps) -> Call:
            q, k, v, do, dk, dv = (values(heads, T, D, device=device, dtype=FP16) for _ in range(6))
            lse, delta = (values(heads, T, device=device, dtype=FP32) for _ in "ld")
            return lambda: keys_backward[(T // bn, heads)](
                q, k, v, do, lse, delta, dk, dv, T, D**-0.5, D=D, BLOCK_M=bm, BLOCK_N=bn, num_stages=stages,
                num_warps=warps,
            )  # fmt: skip

        yield f"{heads}x{T}x{D}", f"{bm}x{bn} s{stages} w{warps}", make


def neighbours_of(r: random.Random) -> Iterator[Drawn]:
    nodes, degree, columns = r.choice((4096, 20000)), r.choice((8, 32)), r.choice((64, 128, 256))
    for be, bc, warps in shuffled(r, (8, 16, 32), (64,), (1, 2, 4)):

        def make(device: str, be=be, bc=bc, warps=warps) -> Call:
            first = torch.cat((torch.zeros(1), torch.randint(1, 2 * degree, (nodes,)).cumsum(0))).to(torch.int32)
            x, out = values(nodes, columns, device=device), empty(nodes, columns, device=device)
            neighbour = numbers(int(first[-1]), nodes, device)
            first = first.to(device)
            return lambda: neighbour_max[(nodes, columns // bc)](
                x, first, neighbour, out, columns, BLOCK_E=be, BLOCK_C=bc, num_warps=warps
            )

        yield f"{nodes} by {degree} x {columns}", f"{be}x{bc} w{warps}", make


FOURTH = {
    "persistent_fp8": matmul_of, "int8_linear": linear_of, "stream_k_sums": stream_k_of,
    "cross_entropy_in_place": cross_entropy_of, "geglu_backward": geglu_of, "chunk_attention": chunks_of,
    "embedding_backward": embedding_of, "sort_rows": sort_of, "quantise_groups": groups_of, "bias_gradient": bias_of,
    "keys_backward": keys_of, "neighbour_max": neighbours_of,
}  # fmt: skip


def cases() -> list[Case]:
    return drawn_cases(FOURTH, SEED)
