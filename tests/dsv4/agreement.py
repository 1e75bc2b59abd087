"""Inputs, and the one comparison of a result with the oracle that the fmha tests share."""

from functools import partial

import torch
from torch import Tensor

from dsv4.suites.calls import FEATURES, Rule, judge, judge_lse, relative, rounded

# torch's CPU flash kernel may be off by 20 units in the last place in exp, 20 * 2^-24; fp32 products and sums add less.
FP32_BOUND = 2.0**-19


def qkv(b: int, t: int, s: int, hq: int, hkv: int, d: int, dtype=torch.float32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((b, t, hq, d), (b, s, hkv, d), (b, s, hkv, d))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def assert_agrees(
    got: tuple[Tensor, Tensor], reference_call, *args, merged: bool = False, sink_last: bool = False, **options
) -> None:
    """(out, lse) of a public operation against its definition with the same arguments.

    merged: of partial results, each rounded to the dtype once more; in fp32 their weights are as far off as they are.
    sink_last: rounded before the sink is applied as well, as by fmha's cpu backend (`cpu.sink_last`).
    """
    out, lse = got
    want, want_lse = reference_call(*args, **options)
    low = None
    if out.dtype != torch.float32:
        low = rounded(partial(reference_call, *args), options, out.dtype, sink_last)
    assert_right(out, want, low, merged)
    assert_lse(lse, want_lse)


def assert_right(out: Tensor, want: Tensor, low: Tensor | None = None, merged: bool = False) -> None:
    """A result against the oracle in fp64; low: the oracle with P rounded to the dtype of a 16-bit result."""
    if out.dtype == torch.float32:
        assert out.shape == want.shape and not out.isnan().any()
        error = relative(out - want, want)
        assert error <= (1 + merged) * FP32_BOUND, f"off by {error:.2e}"
        dead = (want == 0).all(-1)
        assert not out[dead].any()
        return
    rule = FEATURES
    if merged:
        unavoidable = relative(low.to(out.dtype) - want, want) + relative(want.to(out.dtype) - want, want)
        rule = Rule(floor=max(1.5 * unavoidable, torch.finfo(out.dtype).eps / 4))
    for check in judge(out, want, low, rule):
        assert check.ok, str(check)


def assert_lse(lse: Tensor, want: Tensor) -> None:
    for check in judge_lse(lse, want):
        assert check.ok, str(check)


def assert_same(got: Tensor, other: Tensor) -> None:
    """Two results of the same attention by different ways: in fp32 each may be off by its bound, in 16 bits by half a
    unit in the last place (the rounding of P averages out over the keys)."""
    assert got.dtype == other.dtype and got.shape == other.shape
    error = relative(got.double() - other.double(), other.double())
    bound = FP32_BOUND if got.dtype == torch.float32 else torch.finfo(got.dtype).eps / 2
    assert error <= 2 * bound, f"off by {error:.2e}"
