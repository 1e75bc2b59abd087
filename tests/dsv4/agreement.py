"""Inputs, and the one comparison of a result with the oracle that the fmha tests share."""

import torch
from torch import Tensor

from dsv4.suites.calls import FEATURES, judge, judge_lse, relative

# torch's CPU flash kernel takes exp from a 20-bit approximation, fp32 products and sums add less.
FP32_BOUND = 2.0**-19


def qkv(
    b: int, t: int, s: int, hq: int, hkv: int, d: int, dtype=torch.float32, seed: int = 0
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((b, t, hq, d), (b, s, hkv, d), (b, s, hkv, d))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def assert_agrees(got: tuple[Tensor, Tensor], reference_call, *args, **options) -> None:
    """(out, lse) of a public operation against its definition with the same arguments."""
    out, lse = got
    ref, ref_lse = reference_call(*args, **options)
    if out.dtype == torch.float32:
        assert out.shape == ref.shape and not out.isnan().any()
        assert relative(out - ref, ref) <= FP32_BOUND
        assert torch.equal(out[(ref == 0).all(-1)], torch.zeros_like(out)[(ref == 0).all(-1)])
        results = []
    else:
        low, _ = reference_call(*args, p_dtype=out.dtype, **options)
        results = judge(out, ref, low, FEATURES)
    for check in results + judge_lse(lse, ref_lse):
        assert check.ok, str(check)
