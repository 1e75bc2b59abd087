"""A Triton kernel for every GPU, for quantize.py: activations to MXFP8, in groups of 32 values wherever rows begin."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.caches.kernels.pack import E4M3_MAX, LEAST_MXFP8, inverse_of, largest_of_groups, ue8m0
from dsv4.runtime import calls
from dsv4.runtime.program import Changing, Launch

GROUP = 32
GROUPS = 128  # groups per program


@triton.jit(do_not_specialize=["groups"])
def mxfp8_groups(x_ptr, codes_ptr, scales_ptr, groups, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """Quantise x [groups, GROUP] -> codes, as bytes of e4m3, and scales, as bytes of ue8m0 [groups]."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    there = group < groups
    y = tl.load(x_ptr + at, mask=there[:, None], other=0.0).to(tl.float32)
    scale = ue8m0(tl.div_rn(tl.maximum(largest_of_groups(y, GROUP), LEAST_MXFP8), E4M3_MAX))  # [GROUPS, 1]
    codes = (y * inverse_of(scale)).to(tl.float8e4nv)
    tl.store(codes_ptr + at, codes.to(tl.uint8, bitcast=True), mask=there[:, None])
    tl.store(scales_ptr + group[:, None], scale.to(tl.uint8), mask=there[:, None])


def write_mxfp8(x: Tensor, codes: Tensor, scales: Tensor, launch: Callable[[Launch], Any] = calls.launch) -> None:
    """Quantise x to codes and scales; all three are contiguous."""
    groups = scales.numel()
    if groups:
        arguments = [x, codes.view(torch.uint8), scales.view(torch.uint8), Changing(groups)]
        constants = dict(GROUPS=GROUPS, GROUP=GROUP, num_warps=4)
        launch(Launch(mxfp8_groups, (triton.cdiv(groups, GROUPS),), arguments, constants))
