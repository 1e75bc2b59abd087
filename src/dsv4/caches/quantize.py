"""Quantise activations to MXFP8, for an FP8 product whose weights have one scale per 32 columns, as V4.1's wo_a has."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.caches.formats import E4M3_MAX, Mxfp8Rows, ceil_log2
from dsv4.runtime import checks, dispatch, operators
from dsv4.runtime.checks import Backend

GROUP = 32


def quantize_mxfp8(x: Tensor, *, backend: Backend = "auto") -> tuple[Tensor, Tensor]:
    """Quantise x to e4m3 with one scale per 32 neighbouring values, in the recipe of DeepSeek-V4.1::

        scale = 2 ** ceil(log2(max(amax, 1e-4) / 448))        code = e4m3(x / scale)

    x: bf16, fp16 or fp32 [..., D], D a multiple of 32; the output of `v4_attention` with ``inverse_rope`` for wo_a,
    whose groups of heads are neighbours in x. -> (float8_e4m3fn [..., D], float8_e8m0fnu [..., D / 32]), contiguous.
    A group that holds a NaN or an infinity gets the scale NaN. It has no gradient.
    """
    if not checks.is_tensor(x) or x.ndim < 1 or x.dtype not in checks.FLOATS or x.shape[-1] % GROUP:
        checks.fail("x", checks.describe(x), f"bf16, fp16 or fp32 [..., D], D a multiple of {GROUP}")
    checks.tensor("x", x, x.shape, checks.FLOATS, unit_last=False)
    checks.forward_only(x=x)  # the operator does not see what torch.func differentiates
    return torch.ops.dsv4.quantize_mxfp8(x, backend=checks.backend(backend))


def _quantized(x: Tensor, backend: str = "auto") -> tuple[Tensor, Tensor]:
    found, x = dispatch.resolve(backend, x.device), x.contiguous()
    if found == "cpu":
        return in_torch(x)
    from dsv4.caches.kernels.mxfp8 import write_mxfp8  # imports Triton, which a CPU does not need

    codes, scales = like(x)
    with dispatch.entered(found, x.device):
        write_mxfp8(x, codes, scales)
    return codes, scales


def like(x: Tensor, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Allocate the result."""
    shape = (*x.shape[:-1], x.shape[-1] // GROUP)
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty(shape, dtype=torch.float8_e8m0fnu)


def in_torch(x: Tensor) -> tuple[Tensor, Tensor]:
    groups = x.float().unflatten(-1, (-1, GROUP))
    target = groups.abs().amax(-1).clamp_min(Mxfp8Rows.LEAST) / E4M3_MAX
    scales = torch.where(torch.isfinite(target), ceil_log2(target) + 127, 255).to(torch.uint8)
    scales = scales.view(torch.float8_e8m0fnu)
    return (groups / scales.float()[..., None]).to(torch.float8_e4m3fn).flatten(-2), scales


operators.define("quantize_mxfp8(Tensor x, *, str backend='auto') -> (Tensor, Tensor)", _quantized, like)
