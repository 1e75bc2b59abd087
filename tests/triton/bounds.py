"""How far a result may be from the exact one: rounding of the output plus the error of fp32 accumulation."""

from __future__ import annotations

import torch

UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}  # half an ulp, relative
TINY = {torch.float32: 0.0, torch.float16: 2.0**-25, torch.bfloat16: 0.0}  # half the smallest step


def assert_matmul(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, extra: float = 0.0, relu: bool = False) -> None:
    """out = a @ b, accumulated in fp32 in any order; with relu its positive part, which is off by no more. `extra`:
    relative error the inputs may get on the way."""
    a, b = a.double(), b.double()
    magnitude = a.abs() @ b.abs()
    exact = (a @ b).relu() if relu else a @ b
    allowed = UNIT[out.dtype] * exact.abs() + TINY[out.dtype]
    allowed += (a.shape[-1] * 2 * UNIT[torch.float32] + extra) * magnitude
    worst = ((out.double() - exact).abs() - allowed).max().item()
    assert worst <= 0, f"beyond the bound by {worst}"


def assert_attention(out: torch.Tensor, q, k, v, scale: float, causal: bool = False) -> None:
    """softmax(q k^T scale) v with P rounded to the dtype of v: each factor of P is off by one rounding at most, and
    exp2 and the normalisation add a few of fp32."""
    q, k, v = q.double(), k.double(), v.double()
    scores = q @ k.transpose(-1, -2) * scale
    if causal:
        T, S = scores.shape[-2:]
        scores = scores.masked_fill(~torch.ones(T, S).tril(S - T).bool(), float("-inf"))
    p = torch.softmax(scores, -1)
    exact = p @ v
    unit = UNIT[out.dtype]
    largest = (q.abs() @ k.abs().transpose(-1, -2)).max().item() * abs(scale)
    relative = 2 * unit + (q.shape[-1] + 8) * UNIT[torch.float32] * (2 + largest)
    allowed = unit * exact.abs() + relative * (p @ v.abs()) + TINY[out.dtype]
    worst = ((out.double() - exact).abs() - allowed).max().item()
    assert worst <= 0, f"beyond the bound by {worst}"


def assert_lse(lse: torch.Tensor, q, k, scale: float, causal: bool = False) -> None:
    """The log of the sum of e^score: off by a score's error, by exp2's and the sum's (relative, so absolute in the
    log), and by the roundings of its own value."""
    q, k = q.double(), k.double()
    scores = q @ k.transpose(-1, -2) * scale
    T, S = scores.shape[-2:]
    if causal:
        scores = scores.masked_fill(~torch.ones(T, S).tril(S - T).bool(), float("-inf"))
    exact = scores.logsumexp(-1)
    largest = (q.abs() @ k.abs().transpose(-1, -2)).max().item() * abs(scale)
    allowed = UNIT[torch.float32] * ((q.shape[-1] + 8) * (2 + largest) + S + 4 * exact.abs())
    worst = ((lse.double() - exact).abs() - allowed).max().item()
    assert worst <= 0, f"beyond the bound by {worst}"


def within(got, want, steps: int) -> None:
    """`got` in fp32 differs from the fp64 reference by at most `steps` roundings of the largest value."""
    largest = want.double().abs().max()
    error = (got.double() - want.double()).abs().max()
    assert error <= steps * 2.0**-23 * largest, f"{float(error):.3g} with values up to {float(largest):.3g}"
