"""Fused attention in plain Triton: online softmax over blocks of keys."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from bounds import assert_attention, assert_lse
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def attention_kernel(q_desc, k_desc, v_desc, o_desc, lse_ptr, T, S, scale, BM: tl.constexpr, BN: tl.constexpr,
                     D: tl.constexpr, CAUSAL: tl.constexpr):  # fmt: skip
    start, head = tl.program_id(0) * BM, tl.program_id(1)
    rows = start + tl.arange(0, BM)
    m = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    q = q_desc.load([head * T + start, 0])
    scale *= 1.4426950408889634
    end = min(S, start + BM + S - T) if CAUSAL else S
    for n in tl.range(0, end, BN):
        s = tl.dot(q, k_desc.load([head * S + n, 0]).T) * scale
        if CAUSAL:
            s = tl.where(rows[:, None] + S - T >= n + tl.arange(0, BN)[None, :], s, float("-inf"))
        new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - new[:, None])
        alpha = tl.exp2(m - new)
        total = total * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(v_desc.dtype), v_desc.load([head * S + n, 0]), acc)
        m = new
    o_desc.store([head * T + start, 0], (acc / total[:, None]).to(o_desc.dtype))
    tl.store(lse_ptr + head * T + rows, (m + tl.log2(total)) / 1.4426950408889634)


def check_fused_attention(dtype, D, causal):
    H, T, S, scale = 2, 128, 192, D**-0.5
    q, k, v = (torch.randn(H, n, D).to(dtype) for n in (T, S, S))
    o, lse = torch.empty_like(q), torch.empty(H, T)
    blocks = [64, D], [64, D], [64, D], [64, D]
    descriptors = [TensorDescriptor.from_tensor(x.view(-1, D), b) for x, b in zip((q, k, v, o), blocks)]
    attention_kernel[(T // 64, H)](*descriptors, lse, T, S, scale, 64, 64, D, causal)
    assert_attention(o, q, k, v, scale, causal)
    assert_lse(lse, q, k, scale, causal)


FP16, BF16 = torch.float16, torch.bfloat16
QUICK = [("sm_90a", FP16, 64, True), ("sm_100a", FP16, 64, True)]
SLOW = [(sm, *x) for sm in ("sm_90a", "sm_100a") for x in ((FP16, 64, False), (BF16, 128, True), (BF16, 128, False))]


@pytest.mark.parametrize(
    "sm, dtype, D, causal", [*QUICK, *(pytest.param(*x, marks=pytest.mark.slow) for x in SLOW)], indirect=["sm"]
)
def test_fused_attention(sm, dtype, D, causal):
    check_fused_attention(dtype, D, causal)


def test_fused_attention_in_every_order(sm, order):
    check_fused_attention(torch.float16, 64, True)
