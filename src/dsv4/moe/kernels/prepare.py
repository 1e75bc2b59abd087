"""moe from a validated problem to a program. Shared by all architectures: sort, rows, two products, sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from dsv4.moe import cpu, formats
from dsv4.moe.kernels.arguments import (
    Activations,
    Choice,
    Hidden,
    SlotOutputs,
    SortedRows,
    SortOutputs,
    Sums,
    WeightTiles,
)
from dsv4.moe.kernels.rows import COLUMNS, moe_rows, moe_sort, moe_sum
from dsv4.moe.problem import MoeProblem, RouteProblem
from dsv4.runtime.program import Null, Program, Slot


def supports(p: MoeProblem | RouteProblem) -> str | None:
    """None, or why these kernels cannot run the problem."""
    if isinstance(p, RouteProblem):
        return "routing is torch code so far"
    if p.format != "mxfp4":
        return f"weights in {p.format}; the GPU kernels take MXFP4"
    if p.activations != "fp8_128":
        return f"activations {p.activations!r}; the GPU kernels take 'fp8_128'"
    if p.x.dtype != torch.bfloat16:
        return f"x {p.x.dtype}; the GPU kernels take torch.bfloat16"
    if p.spread > formats.MAX_SPREAD:
        return f"exponents that spread by {p.spread} in a row of weights; the GPU kernels take {formats.MAX_SPREAD}"
    if p.tokens * p.topk >= 1 << 24:
        return f"{p.tokens * p.topk} slots; the GPU kernels take fewer than 2**24"
    if p.experts > 1024:
        return f"{p.experts} experts; the GPU kernels take up to 1024"
    return None


class Product(NamedTuple):
    """One of the two products, for an architecture to launch."""

    first: bool
    tiles: Slot
    scales: Slot
    x: Slot  # e4m3 [rows, width]
    x_scales: Slot  # fp32 [width / 128, line]
    rows: SortedRows
    weights: WeightTiles
    out: Hidden | SlotOutputs


def prepare_moe(p: MoeProblem, program: Program, multiply: Callable[[Product], None]) -> None:
    """The tensors of p are slots."""
    slots, line = p.tokens * p.topk, scale_line(p)
    ids = p.ids if p.ids.is_contiguous() else program.copied(p.ids)
    weights = p.weights if p.weights.is_contiguous() else program.copied(p.weights)

    def ints(name: str, n: int) -> Slot:
        return program.workspace(name, (n,), torch.int32)

    starts, slot_of, row_of = ints("starts", p.experts + 1), ints("slot of row", slots), ints("row of slot", slots)
    row_weight = program.workspace("weight of row", (slots,), torch.float32)
    x_rows = program.workspace("rows of x", (slots, p.hidden), torch.float8_e4m3fn)
    x_scales = program.workspace("scales of x", (p.hidden // formats.GROUP, line), torch.float32)
    h_rows = program.workspace("rows of h", (slots, p.intermediate), torch.float8_e4m3fn)
    h_scales = program.workspace("scales of h", (p.intermediate // formats.GROUP, line), torch.float32)
    y = p.slots
    if y is None or not y.is_contiguous():
        y = program.workspace("outputs of slots", (p.tokens, p.topk, p.hidden), p.x.dtype)
    if p.slots is not None:
        program.fill(y, 0.0)
    choice = Choice(ids, weights, slots, p.experts)
    program.launch(
        moe_sort, (p.experts,), dict(choice=choice, to=SortOutputs(starts, slot_of, row_weight, row_of)), num_warps=4
    )
    parts = -(-p.hidden // COLUMNS.value)
    given = Activations(p.x, p.x.stride(0), p.hidden, ids, starts, row_of, p.topk, x_rows, x_scales, line)
    program.launch(moe_rows, (p.tokens, parts), dict(x=given), num_warps=4)
    rows = SortedRows(starts, slot_of, row_weight, p.experts)
    blocks = p.intermediate // formats.GROUP
    hidden = Hidden(h_rows, h_scales, p.intermediate, line, p.limit)
    steps = p.hidden // formats.GROUP
    tiles = WeightTiles(p.w13_factors, blocks, steps)
    multiply(Product(True, p.w13, p.w13_scales, x_rows, x_scales, rows, tiles, hidden))
    tiles = WeightTiles(p.w2_factors, p.hidden // formats.TILE_ROWS, p.intermediate // formats.GROUP)
    multiply(Product(False, p.w2, p.w2_scales, h_rows, h_scales, rows, tiles, SlotOutputs(y, p.hidden)))
    shared: Any = Null(p.x.dtype)
    if p.shared_w13 is not None:
        shared = program.workspace("shared", (p.tokens, p.hidden), p.x.dtype)
        program.compute(_shared, p, shared)
    sums = Sums(y, row_of, p.topk, p.hidden, shared, p.out, p.out.stride(0))
    program.launch(moe_sum, (p.tokens, parts), dict(sums=sums), SHARED=p.shared_w13 is not None, num_warps=4)
    if p.slots is not None and y is not p.slots:
        program.copy(p.slots, y)


def _shared(p: MoeProblem, to: torch.Tensor) -> None:
    to.copy_(cpu.shared(p))


def scale_line(p: MoeProblem) -> int:
    """Rows, each expert's from a multiple of 4 on (sm90/products.py, scale_shift)."""
    return -(-p.tokens * p.topk // 4) * 4 + 4 * p.experts


def rows_per_expert(p: MoeProblem) -> float:
    """Of those that tokens choose, if they choose evenly."""
    touched = p.experts * (1 - (1 - min(p.topk / p.experts, 1)) ** p.tokens)
    return p.tokens * p.topk / max(touched, 1)
