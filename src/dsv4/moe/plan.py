"""The memory that a plan for moe reserves: all that lies between its kernels. It is counted with memoryless tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dsv4.moe import formats, problem
from dsv4.moe.problem import MoeProblem
from dsv4.runtime import calls, dispatch
from dsv4.runtime.dispatch import Target
from dsv4.runtime.plan import Capacities


def reserved(c: Capacities, num_sms: int, deterministic: bool) -> tuple[int, int]:
    """Return (1, fp32 words) for a call of this size on the current GPU."""
    return 1, words(c, dispatch.cuda_target(torch.device("cuda", torch.cuda.current_device())))


def words(c: Capacities, target: Target) -> int:
    """Return the words of workspace that a call may need, for the recipe of the kernels that needs the most."""
    layout = "sm100" if target.capability[0] >= 10 else "sm90"
    sizes = (c.batch, c.q_heads, c.kv_heads, c.head_dim, c.max_seqlen_k)
    recipes: Sequence[tuple[str, str]] = dispatch.kernel_module("moe", target.capability).RECIPES
    problems = [without_memory(sizes, layout, x, fused, True) for x in recipes for fused in {False, layout == "sm100"}]
    return max(calls.workspace_of(p, target) for p in problems) // 4


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def without_memory(
    sizes: tuple[int, int, int, int, int],
    layout: str,
    recipe: tuple[str, str],
    fused: bool,
    shared: bool,
    numbers: torch.dtype = torch.int32,
) -> MoeProblem:
    """Return a problem of this size with its output. sizes: tokens, slots of a token, experts, hidden, inner; recipe:
    format of weights, activations; numbers: the dtype of ids."""
    (tokens, topk, experts, hidden, inner), (format, activations) = sizes, recipe
    columns = formats.TILE_COLUMNS
    each, dtype = (4, torch.uint8) if format == "mxfp4" else (8, torch.float8_e4m3fn)
    tiles = {"w13": (inner // columns, hidden // columns), "w2": (hidden // 256, inner // columns)}
    given = {}
    for name, (down, across) in tiles.items():
        given[name] = empty(experts, down, across, 256, 64, dtype=torch.uint8)
        given[f"{name}_scales"] = empty(experts, down, across, 256, each, dtype=dtype)
        given[f"{name}_factors"] = empty(experts, down * 256, dtype=torch.float32)
    if shared:
        given |= dict(shared_w13=empty(2 * inner, hidden), shared_w2=empty(hidden, inner))
    given |= dict(ids=empty(tokens, topk, dtype=numbers), weights=empty(tokens, topk, dtype=torch.float32))
    options = dict(activations=activations, format=format, layout=layout, fused=fused)
    p = problem.build(empty(tokens, hidden), **given, **options)
    return replace(p, out=empty(tokens, hidden))
