"""Programs over vectors and rows: addition, softmax, layer norm, dropout."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from bounds import within


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=mask) + tl.load(y_ptr + offsets, mask=mask), mask=mask)


def test_vector_add(sm):
    n = 1000  # not a multiple of the block
    x, y, out = torch.randn(n), torch.randn(n), torch.full((n + 24,), 7.0)
    add_kernel[(triton.cdiv(n, 256),)](x, y, out, n, BLOCK=256)
    assert torch.equal(out[:n], x + y)
    assert (out[n:] == 7).all()


def test_vector_add_of_several_types(sm):
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.int8):
        x = torch.randint(-50, 50, (300,)).to(dtype)
        y = torch.randint(-50, 50, (300,)).to(dtype)
        out = torch.empty_like(x)
        add_kernel[(2,)](x, y, out, 300, BLOCK=256)
        assert torch.equal(out, x + y), dtype


@triton.jit
def softmax_kernel(out_ptr, in_ptr, in_stride, out_stride, rows, columns, BLOCK: tl.constexpr):
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        i = tl.arange(0, BLOCK)
        x = tl.load(in_ptr + row * in_stride + i, mask=i < columns, other=-float("inf"))
        e = tl.exp(x - tl.max(x, axis=0))
        tl.store(out_ptr + row * out_stride + i, e / tl.sum(e, axis=0), mask=i < columns)


def test_fused_softmax(sm):
    x = torch.randn(23, 781)
    out = torch.empty_like(x)
    softmax_kernel[(4,)](out, x, x.stride(0), out.stride(0), 23, 781, BLOCK=1024, num_warps=8, num_stages=2)
    # Each exponential is off by its argument's rounding (an argument of 8 by 8 units) and by 2 of its own; the sum, of
    # positive numbers, by as much and by a rounding in each of the ten levels of its tree.
    exact = torch.softmax(x.double(), 1)
    assert ((out - exact).abs() <= 40 * 2.0**-24 * exact).all()


@triton.jit
def layer_norm_forward(x_ptr, y_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, stride, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    mask = i < n
    x = tl.load(x_ptr + row * stride + i, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / n
    centred = tl.where(mask, x - mean, 0.0)
    rstd = 1 / tl.sqrt(tl.sum(centred * centred, axis=0) / n + eps)
    y = centred * rstd * tl.load(w_ptr + i, mask=mask) + tl.load(b_ptr + i, mask=mask)
    tl.store(y_ptr + row * stride + i, y, mask=mask)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)


@triton.jit
def layer_norm_backward(
    dx_ptr, dy_ptr, dw_ptr, locks, x_ptr, w_ptr, mean_ptr, rstd_ptr, stride, n, BLOCK: tl.constexpr
):
    """dx per row; dw summed over rows under a spin lock, as kernels without atomics on vectors do."""
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    mask = i < n
    x = tl.load(x_ptr + row * stride + i, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * stride + i, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + i, mask=mask, other=0.0)
    rstd = tl.load(rstd_ptr + row)
    xhat = tl.where(mask, (x - tl.load(mean_ptr + row)) * rstd, 0.0)
    wdy = w * dy
    c1 = tl.sum(xhat * wdy, axis=0) / n
    c2 = tl.sum(wdy, axis=0) / n
    tl.store(dx_ptr + row * stride + i, (wdy - (xhat * c1 + c2)) * rstd, mask=mask)
    while tl.atomic_cas(locks, 0, 1) == 1:
        pass
    tl.store(dw_ptr + i, tl.load(dw_ptr + i, mask=mask) + dy * xhat, mask=mask)
    tl.debug_barrier()
    tl.atomic_xchg(locks, 0)


def test_layer_norm(sm):
    rows, n = 7, 300
    x, dy = torch.randn(rows, n), torch.randn(rows, n)
    w, b = torch.rand(n), torch.rand(n)
    y, mean, rstd = torch.empty_like(x), torch.empty(rows), torch.empty(rows)
    layer_norm_forward[(rows,)](x, y, w, b, mean, rstd, n, n, 1e-5, BLOCK=512)
    xr, wr = x.double().requires_grad_(), w.double().requires_grad_()
    expected = torch.nn.functional.layer_norm(xr, (n,), wr, b.double(), 1e-5)
    # Mean, variance and the sums of the gradients are trees of ten levels; a value passes two of them and few products.
    within(y, expected.detach(), 32)
    expected.backward(dy.double())
    dx, dw, lock = torch.empty_like(x), torch.zeros(n), torch.zeros(1, dtype=torch.int32)
    layer_norm_backward[(rows,)](dx, dy, dw, lock, x, w, mean, rstd, n, n, BLOCK=512)
    within(dx, xr.grad, 32)
    within(dw, wr.grad, 32)
    assert lock.item() == 0


@triton.jit
def dropout_kernel(x_ptr, out_ptr, n, p, seed, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = tl.rand(seed, i) > p
    tl.store(out_ptr + i, tl.where(keep, tl.load(x_ptr + i, mask=i < n) / (1 - p), 0.0), mask=i < n)


def test_dropout(sm):
    n, p = 2000, 0.3
    x = torch.ones(n)
    outs = [torch.empty_like(x) for _ in range(3)]
    for out, seed in zip(outs, (5, 5, 6)):
        dropout_kernel[(triton.cdiv(n, 512),)](x, out, n, p, seed, BLOCK=512)
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    kept = (outs[0] != 0).float().mean().item()
    assert abs(kept - 0.7) < 5 * (0.21 / n) ** 0.5  # five standard deviations
    assert set(outs[0].tolist()) <= {0.0, (1 / (1 - torch.tensor(p))).item()}
