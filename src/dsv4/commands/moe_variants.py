"""Which launches `dsv4 compile` compiles for the experts. Nothing is computed: tensors have shapes and no memory.

The kernels fix the number of experts and how many of them a token has, both from the model; the tile of a product
follows from the rows that an expert may expect, and how rows are sorted from how many there are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from dsv4.moe import formats, problem
from dsv4.moe.plan import empty, without_memory
from dsv4.moe.problem import MoeProblem, RouteProblem
from dsv4.runtime import dispatch

# Few tokens of many experts and of few, each power of two of slots up to 1024, then many.
TOKENS = (1, 3, 20, 40, 80, 160, 300, 512, 8192)
# Rows that the experts expect, for each tile
ROWS = (6, 16, 28, 48, 85, 110, 150)
INTEGERS = (torch.int32, torch.int64)


def problems(
    what: str, other: bool, hidden: int, experts: int, topk: int, arch: str
) -> Iterator[MoeProblem | RouteProblem]:
    """Yield problems. what: "route", or the format of weights. other: tokens of images (route), a shared expert."""
    if what == "route":
        yield from route_problems(other, hidden, experts, topk)
        return
    capability = dispatch.compile_target(arch).capability
    layout = "sm100" if capability[0] >= 10 else "sm90"
    entry = dispatch.kernel_module("moe", capability)
    inner = 2 * formats.TILE_COLUMNS  # no variant depends on it
    recipes = [x for x in entry.RECIPES if x[0] == what]
    counts = sorted({*TOKENS, *(rows * experts // topk for rows in ROWS)})
    every = itertools.product(recipes, (False, True) if layout == "sm100" else (False,), counts, INTEGERS)
    for recipe, fused, tokens, numbers in every:
        yield without_memory((tokens, topk, experts, hidden, inner), layout, recipe, fused, other, numbers)


def route_problems(images: bool, hidden: int, experts: int, topk: int) -> Iterator[RouteProblem]:
    """Yield layers that learned their choice, by a bias or without, and layers with a table; few tokens and many."""
    rules: tuple[Any, ...] = (None, "bias", *INTEGERS)  # a dtype: of the table
    for tokens, rule in itertools.product((1, 4096), rules):
        more: dict[str, Any] = {}
        if rule == "bias":
            more["bias"] = empty(experts, dtype=torch.float32)
        elif rule is not None:
            more |= dict(table=empty(1024, topk, dtype=rule), token_ids=empty(tokens, dtype=rule))
        if images:
            more |= dict(bias_vl=empty(experts, dtype=torch.float32), image=empty(tokens, dtype=torch.bool))
        p = problem.build_route(empty(tokens, hidden), empty(experts, hidden), topk=topk, **more)
        ids, weights = empty(tokens, topk, dtype=torch.int32), empty(tokens, topk, dtype=torch.float32)
        yield replace(p, ids=ids, weights=weights)
