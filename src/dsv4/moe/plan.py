"""What a plan for moe reserves: all memory between its kernels."""

from __future__ import annotations

from dataclasses import replace

import torch

from dsv4.moe import formats, problem
from dsv4.runtime import calls, dispatch
from dsv4.runtime.dispatch import Target
from dsv4.runtime.plan import Capacities

RECIPES = {"sm90": (("mxfp4", "fp8_128"),), "sm100": (("mxfp4", "fp8_32"), ("nvfp4", "nvfp4"))}  # the most of each


def reserved(c: Capacities, num_sms: int, deterministic: bool) -> tuple[int, int]:
    """(1, fp32 words) of a call of this size on the current GPU, with every recipe of its kernels."""
    return 1, words(c, dispatch.cuda_target(torch.device("cuda", torch.cuda.current_device())))


def words(c: Capacities, target: Target) -> int:
    layout = "sm90" if target.capability[0] == 9 else "sm100"
    forms = [(*recipe, fused) for recipe in RECIPES[layout] for fused in {False, layout == "sm100"}]
    return max(_bytes(c, target, layout, *form) for form in forms) // 4


def _bytes(c: Capacities, target: Target, layout: str, format: str, activations: str, fused: bool) -> int:
    """As the kernels' own preparation counts them, of tensors without memory."""
    t, k, e, h, i = c.batch, c.q_heads, c.kv_heads, c.head_dim, c.max_seqlen_k
    scale, each = (torch.uint8, 4) if format == "mxfp4" else (torch.float8_e4m3fn, 8)

    def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def tiles(rows: int, columns: int) -> tuple[torch.Tensor, ...]:
        shape = (e, rows // formats.TILE_ROWS, columns // formats.TILE_COLUMNS, formats.TILE_ROWS)
        return empty(torch.uint8, *shape, 64), empty(scale, *shape, each), empty(torch.float32, e, rows)

    (w13, s13, f13), (w2, s2, f2) = tiles(2 * i, h), tiles(h, i)
    x, out = empty(torch.bfloat16, t, h), empty(torch.bfloat16, t, h)
    shared = empty(torch.bfloat16, 2 * formats.GROUP, h), empty(torch.bfloat16, h, formats.GROUP)
    p = problem.build(
        x, w13, w2, empty(torch.int64, t, k), empty(torch.float32, t, k), w13_scales=s13, w2_scales=s2, w13_factors=f13,
        w2_factors=f2, shared_w13=shared[0], shared_w2=shared[1], activations=activations, format=format, layout=layout,
        fused=fused,
    )  # fmt: skip
    return calls.workspace_of(replace(p, out=out), target)
