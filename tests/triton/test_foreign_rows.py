"""Row and index programs in the manner of public kernel collections: losses, norms, rotary embedding, quantisation,
routing, recurrences. Each must be right and give no finding, on both targets."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from bounds import within

pytestmark = pytest.mark.usefixtures("silent")


@triton.jit
def cross_entropy_kernel(x_ptr, stride, target_ptr, loss_ptr, n, ignore, smoothing, BLOCK: tl.constexpr):
    """The loss, and the gradient in place of the logits, in two passes over the row."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride
    target = tl.load(target_ptr + row)
    if target == ignore:
        for i in range(0, n, BLOCK):
            at = i + tl.arange(0, BLOCK)
            tl.store(x_ptr + at, 0.0, mask=at < n)
        tl.store(loss_ptr + row, 0.0)
        return
    m = float("-inf")
    d = 0.0
    total = 0.0
    chosen = tl.load(x_ptr + target)
    for i in range(0, n, BLOCK):
        at = i + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < n, other=float("-inf"))
        total += tl.sum(tl.where(at < n, x, 0.0))
        new = tl.maximum(m, tl.max(x))
        d = d * tl.exp(m - new) + tl.sum(tl.exp(x - new))
        m = new
    for i in range(0, n, BLOCK):
        at = i + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < n, other=float("-inf"))
        grad = tl.exp(x - m) / d - smoothing / n
        grad = tl.where(at == target, grad - (1 - smoothing), grad)
        tl.store(x_ptr + at, grad, mask=at < n)
    tl.debug_barrier()
    lse = m + tl.log(d)
    tl.store(loss_ptr + row, (1 - smoothing) * (lse - chosen) + smoothing * (lse - total / n))


def test_cross_entropy_in_place(sm):
    x = torch.randn(5, 300, dtype=torch.float64)
    target = torch.tensor([3, 299, -100, 0, 150])
    logits = x.clone().requires_grad_()
    want = torch.nn.functional.cross_entropy(logits, target, reduction="none", label_smoothing=0.1)
    want.sum().backward()
    got, loss = x.float(), torch.empty(5)
    cross_entropy_kernel[(5,)](got, got.stride(0), target, loss, 300, -100, 0.1, BLOCK=128, num_warps=4)
    within(loss, want.detach(), 300)
    within(got, logits.grad, 300)


@triton.jit
def rms_backward_kernel(
    dy_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr, dw_ptr, rows, n, PER: tl.constexpr, BLOCK: tl.constexpr
):
    """Programs take blocks of rows and leave partial sums of dW, which the host adds up."""
    pid = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    w = tl.load(w_ptr + i, mask=i < n, other=0.0)
    dw = tl.zeros((BLOCK,), tl.float32)
    for row in range(pid * PER, min((pid + 1) * PER, rows)):
        x = tl.load(x_ptr + row * n + i, mask=i < n, other=0.0)
        dy = tl.load(dy_ptr + row * n + i, mask=i < n, other=0.0)
        rstd = tl.load(rstd_ptr + row)
        m = dy * w
        dx = rstd * (m - x * (rstd * rstd / n) * tl.sum(m * x))
        tl.store(dx_ptr + row * n + i, dx, mask=i < n)
        dw += dy * x * rstd
    tl.store(dw_ptr + pid * n + i, dw, mask=i < n)


def test_rms_norm_backward(sm):
    x, w = torch.randn(7, 100, dtype=torch.float64, requires_grad=True), torch.randn(100, dtype=torch.float64)
    w.requires_grad_()
    rstd = (x * x).mean(1, keepdim=True).rsqrt()
    dy = torch.randn(7, 100, dtype=torch.float64)
    (x * rstd * w).backward(dy)
    dx, dw = torch.empty(7, 100), torch.empty(3, 100)
    given = [v.detach().float().contiguous() for v in (dy, x, w, rstd)]
    rms_backward_kernel[(3,)](*given, dx, dw, 7, 100, PER=3, BLOCK=128)
    within(dx, x.grad, 100)
    within(dw.sum(0), w.grad, 100)


@triton.jit
def turn(ptr, cos, sin, HEADS: tl.constexpr, PADDED: tl.constexpr, D: tl.constexpr):
    h = tl.arange(0, PADDED)[:, None]
    at = ptr + h * D + tl.arange(0, D // 2)[None, :]
    a, b = tl.load(at, mask=h < HEADS), tl.load(at + D // 2, mask=h < HEADS)
    tl.store(at, a * cos - b * sin, mask=h < HEADS)
    tl.store(at + D // 2, b * cos + a * sin, mask=h < HEADS)


@triton.jit
def rope_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, tokens, HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BACKWARD: tl.constexpr
):
    """Both halves of every head of one token, in place; the gradient turns the other way."""
    token = tl.program_id(0)
    i = tl.arange(0, D // 2)
    cos = tl.load(cos_ptr + token % tokens * D + i)[None, :]
    sin = tl.load(sin_ptr + token % tokens * D + i)[None, :]
    if BACKWARD:
        sin = -sin
    turn(q_ptr + token * HQ * D, cos, sin, HQ, triton.next_power_of_2(HQ), D)
    turn(k_ptr + token * HK * D, cos, sin, HK, triton.next_power_of_2(HK), D)


def test_rotary_embedding_there_and_back(sm):
    q, k = torch.randn(6, 3, 64), torch.randn(6, 1, 64)
    angle = torch.outer(torch.arange(6.0), 1e4 ** (-torch.arange(32) / 32)).repeat(1, 2)
    cos, sin = angle.cos(), angle.sin()

    def turned(x):
        half = torch.cat([-x[..., 32:], x[..., :32]], -1)
        return x.double() * cos[:, None] + half.double() * sin[:, None]

    got = [q.clone(), k.clone()]
    rope_kernel[(6,)](*got, cos, sin, 6, 3, 1, 64, False)
    for x, y in zip(got, (q, k)):
        within(x, turned(y), 4)
    rope_kernel[(6,)](*got, cos, sin, 6, 3, 1, 64, True)
    within(got[0], q.double(), 8)


@triton.jit
def quantise_kernel(x_ptr, q_ptr, s_ptr, n, GROUP: tl.constexpr, LIMIT: tl.constexpr):
    """One scale per group of a row, a power of two; fp8."""
    row, group = tl.program_id(0), tl.program_id(1)
    i = group * GROUP + tl.arange(0, GROUP)
    x = tl.load(x_ptr + row * n + i, mask=i < n, other=0.0).to(tl.float32)
    scale = tl.exp2(tl.ceil(tl.log2(tl.maximum(tl.max(tl.abs(x)), 1e-4) / LIMIT)))
    q = tl.clamp(x / scale, -LIMIT, LIMIT).to(q_ptr.dtype.element_ty)
    tl.store(q_ptr + row * n + i, q, mask=i < n)
    tl.store(s_ptr + row * tl.num_programs(1) + group, scale)


def test_fp8_quantisation_by_groups(sm):
    x = (torch.randn(3, 200) * torch.tensor([[1e-3], [1.0], [300.0]])).bfloat16()
    q, s = torch.zeros(3, 200, dtype=torch.float8_e4m3fn), torch.empty(3, 2)
    quantise_kernel[(3, 2)](x, q, s, 200, GROUP=128, LIMIT=448.0)
    assert torch.equal(s.log2(), s.log2().round())
    scale = s.repeat_interleave(128, 1)[:, :200]
    error = (q.float() * scale - x.float()).abs()
    assert (error <= torch.maximum(x.float().abs() * 2.0**-4, scale * 2.0**-10)).all()  # e4m3: 3 bits, least step 2^-9


@triton.jit
def top_k_kernel(x_ptr, value_ptr, index_ptr, n, K: tl.constexpr, BLOCK: tl.constexpr):
    """Route tokens: find the largest K of a row by packing value and column into one sortable integer; softmax them."""
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n + i, mask=i < n, other=float("-inf"))
    bits = x.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, ~bits, bits | -2147483648).to(tl.uint32, bitcast=True)
    packed = (ordered.to(tl.uint64) << 32) | (BLOCK - 1 - i).to(tl.uint64)
    best = tl.topk(packed, K)
    column = BLOCK - 1 - (best & 0xFFFFFFFF).to(tl.int32)
    key = (best >> 32).to(tl.uint32)
    back = tl.where(key >= 2147483648, key ^ 2147483648, ~key).to(tl.float32, bitcast=True)
    e = tl.exp(back - tl.max(back))
    j = tl.arange(0, K)
    tl.store(value_ptr + row * K + j, e / tl.sum(e))
    tl.store(index_ptr + row * K + j, column)


def test_routing_by_packed_top_k(sm):
    x = torch.randn(9, 60)
    value, index = torch.empty(9, 4), torch.empty(9, 4, dtype=torch.int32)
    top_k_kernel[(9,)](x, value, index, 60, K=4, BLOCK=64, num_warps=1)
    want = x.topk(4)
    assert torch.equal(index.long(), want.indices)
    within(value, want.values.double().softmax(1), 8)


@triton.jit
def align_kernel(expert_ptr, offset_ptr, sorted_ptr, n, E: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Sort tokens by expert in one program, each expert's run padded to SIDE."""
    i = tl.arange(0, BLOCK)
    expert = tl.load(expert_ptr + i, mask=i < n, other=E - 1)
    counts = tl.histogram(tl.where(i < n, expert, E - 1), E)
    e = tl.arange(0, E)
    counts -= tl.where(e == E - 1, BLOCK - n, 0)
    padded = (counts + SIDE - 1) // SIDE * SIDE
    starts = tl.cumsum(padded) - padded
    tl.store(offset_ptr + e, starts)
    same = (expert[:, None] == expert[None, :]) & (i[None, :] < i[:, None]) & (i[None, :] < n)
    place = tl.gather(starts, expert, 0) + tl.sum(same.to(tl.int32), 1)
    tl.store(sorted_ptr + place, i, mask=i < n)


def test_tokens_sorted_by_expert(sm):
    expert = torch.randint(0, 8, (50,), dtype=torch.int32)
    offsets, order = torch.empty(8, dtype=torch.int32), torch.full((50 + 8 * 16,), -1, dtype=torch.int32)
    align_kernel[(1,)](expert, offsets, order, 50, E=8, SIDE=16, BLOCK=64)
    for e in range(8):
        mine = (expert == e).nonzero().flatten().int()
        assert torch.equal(order[offsets[e] : offsets[e] + len(mine)], mine) and offsets[e] % 16 == 0
    assert (order >= 0).sum() == 50


@triton.jit
def combine(a1, b1, a2, b2):
    return a1 * a2, b1 * a2 + b2


@triton.jit
def recurrence_kernel(a_ptr, b_ptr, h_ptr, length, channels, BLOCK: tl.constexpr, REVERSE: tl.constexpr):
    """h[t] = a[t] h[t-1] + b[t], by chunks: a scan inside, a carried state between them."""
    c = tl.program_id(0)
    carry = 0.0
    for start in range(0, length, BLOCK):
        t = start + tl.arange(0, BLOCK)
        at = (length - 1 - t if REVERSE else t) * channels + c
        a = tl.load(a_ptr + at, mask=t < length, other=1.0)
        b = tl.load(b_ptr + at, mask=t < length, other=0.0)
        b = tl.where(t == start, b + a * carry, b)
        _, h = tl.associative_scan((a, b), 0, combine)
        tl.store(h_ptr + at, h, mask=t < length)
        carry = tl.sum(tl.where(t == tl.minimum(start + BLOCK, length) - 1, h, 0.0))


@pytest.mark.parametrize("reverse", [False, True])
def test_gated_recurrence(sm, reverse):
    a, b = torch.rand(70, 3) * 0.9, torch.randn(70, 3)
    h = torch.empty(70, 3)
    recurrence_kernel[(3,)](a, b, h, 70, 3, BLOCK=32, REVERSE=reverse)
    want, state = torch.empty(70, 3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for t in reversed(range(70)) if reverse else range(70):
        state = a[t] * state + b[t]
        want[t] = state
    within(h, want, 70)


@triton.jit
def swiglu_kernel(x_ptr, out_ptr, n, HALF: tl.constexpr, LIMIT: tl.constexpr, ACT: tl.constexpr):
    """Gate and up interleaved in one row; the activation is a function given by the caller."""
    row = tl.program_id(0)
    i = tl.arange(0, 2 * HALF)
    x = tl.load(x_ptr + row * 2 * n + i, mask=i < 2 * n, other=0.0)
    gate, up = tl.split(tl.reshape(x, (HALF, 2)))
    j = tl.arange(0, HALF)
    tl.store(out_ptr + row * n + j, ACT(tl.minimum(gate, LIMIT)) * (up + 1), mask=j < n)


@triton.jit
def silu(x):
    return x * tl.sigmoid(x)


def test_interleaved_swiglu(sm):
    x = torch.randn(4, 96) * 4
    out = torch.empty(4, 48)
    swiglu_kernel[(4,)](x, out, 48, HALF=64, LIMIT=7.0, ACT=silu)
    gate, up = x[:, 0::2].double().clamp(max=7), x[:, 1::2].double()
    within(out, gate * gate.sigmoid() * (up + 1), 8)


@triton.jit
def embedding_backward_kernel(grad_ptr, index_ptr, out_ptr, n, D: tl.constexpr, ROWS: tl.constexpr):
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, D)
    to = tl.load(index_ptr + r, mask=r < n, other=0)
    grad = tl.load(grad_ptr + r[:, None] * D + d[None, :], mask=r[:, None] < n, other=0.0)
    tl.atomic_add(out_ptr + to[:, None] * D + d[None, :], grad, mask=r[:, None] < n, sem="relaxed")


def test_embedding_gradient_by_atomics(sm):
    index, grad = torch.randint(0, 5, (37,)), torch.randn(37, 32)
    out = torch.zeros(5, 32)
    embedding_backward_kernel[(5,)](grad, index, out, 37, D=32, ROWS=8)
    within(out, torch.zeros(5, 32, dtype=torch.float64).index_add_(0, index, grad.double()), 37)


@triton.jit
def conv_kernel(x_ptr, w_ptr, b_ptr, out_ptr, length, C: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr):
    """Causal depthwise convolution with a short window, then silu."""
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, C)
    acc = tl.load(b_ptr + c)[None, :] + tl.zeros((BLOCK, C), tl.float32)
    for k in tl.static_range(W):
        at = t - (W - 1) + k
        x = tl.load(x_ptr + at[:, None] * C + c[None, :], mask=(at[:, None] >= 0) & (at[:, None] < length), other=0.0)
        acc += x * tl.load(w_ptr + c * W + k)[None, :]
    tl.store(out_ptr + t[:, None] * C + c[None, :], silu(acc), mask=t[:, None] < length)


def test_causal_convolution(sm):
    x, w, b = torch.randn(50, 16), torch.randn(16, 4), torch.randn(16)
    out = torch.empty(50, 16)
    conv_kernel[(4,)](x, w, b, out, 50, C=16, W=4, BLOCK=16)
    padded = torch.nn.functional.pad(x.t().double()[None], (3, 0))
    want = torch.nn.functional.conv1d(padded, w.double()[:, None], b.double(), groups=16)[0].t()
    within(out, torch.nn.functional.silu(want), 16)
