"""How large scores may be in the kernels (DESIGN.md, Rules of the operations): below 2^30 in base 2, 2^27 in fp16.

P = 2^(s scale - m) is one fused product and difference, and m is rounded: at 2^30 the largest P lies between 2^-64 and
2^64, and its sum with it. Differences between scores are so large that each row is one of the values."""

import pytest
import torch
from agreement import assert_agrees

import dsv4
import softsm
from dsv4 import reference
from dsv4.kernels.compat import TRITON_VERSION

LOG2E = 1.4426950408889634


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.compile)])
@pytest.mark.parametrize(
    "dtype, limit", [(torch.bfloat16, 30), pytest.param(torch.float16, 27, marks=pytest.mark.slow)]
)
def test_scores_just_below_the_limit_are_right(arch, dtype, limit):
    q, k, v = drawn(0.9 * 2.0**limit, dtype)
    got = attention(arch, q, k, v)
    assert float(got[1].abs().max()) * LOG2E > 0.5 * 2.0**limit
    assert_agrees(got, reference.fmha, q, k, v)


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.compile)])
def test_rows_beyond_the_limit_are_nan_and_never_zero(arch):
    """A row whose P all vanish is not taken for one that sees no key."""
    out, lse = attention(arch, *drawn(2.0**60, torch.bfloat16))
    assert out.isnan().all(-1).sum() > 20 and not (out == 0).all(-1).any()
    assert (lse.isnan() | (lse == float("inf"))).sum() > 20 and not (lse == -float("inf")).any()


def drawn(largest: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v with scores of that size in base 2."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(16, n, 1, 64, generator=generator) for n in (2, 9, 9))
    size = (largest / (float((q[:, :, 0] @ k[:, :, 0].mT).abs().max()) * LOG2E / 8)) ** 0.5
    return [(q * size).to(dtype), (k * size).to(dtype), v.to(dtype)]


def attention(arch: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if arch == "sm_100a" and TRITON_VERSION < (3, 9):
        pytest.skip("the Blackwell kernels need triton >= 3.9")
    with softsm.use(arch):
        return dsv4.fmha(q, k, v, return_lse=True, backend="softsm")
