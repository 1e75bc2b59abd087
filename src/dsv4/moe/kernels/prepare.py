"""Turn a validated problem of moe into a program. All architectures share it: sort, rows, two products, sum."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch

from dsv4.moe import cpu, formats
from dsv4.moe.kernels.arguments import (
    Activations,
    Choice,
    Hidden,
    Logits,
    Pieces,
    Rules,
    SharedHidden,
    SharedRows,
    SlotOutputs,
    SortedRows,
    SortOutputs,
    Sums,
    WeightTiles,
)
from dsv4.moe.kernels.route import CHUNKS, moe_choose, moe_logits
from dsv4.moe.kernels.rows import PIECE, SOME, moe_count, moe_place, moe_rows, moe_sort_rows, moe_sum, words_of
from dsv4.moe.kernels.shared import moe_shared_hidden, moe_shared_rows
from dsv4.moe.problem import MoeProblem, RouteProblem
from dsv4.runtime.checks import LOW_PRECISION
from dsv4.runtime.program import Null, Program, Slot

SORTED_AT_ONCE = 1024  # slots
COLUMNS = 1024  # columns of a token per program, if there are few tokens
FEW_TOKENS = 128  # up to this many tokens, programs share the sum of a logit


def supports_moe(p: MoeProblem, layout: str, recipes: Collection[tuple[str, str]]) -> str | None:
    """Return None, or why the kernels of this layout cannot run the problem. recipes: (weights, activations)."""
    forms = sorted({form for form, _ in recipes})
    if p.format not in forms:
        return f"weights in {p.format}; these kernels accept {' and '.join(forms)}"
    accepted = [repr(activations) for form, activations in recipes if form == p.format]
    if repr(p.activations) not in accepted:
        return (
            f"activations {p.activations!r} with weights in {p.format}; these kernels accept {' and '.join(accepted)}"
        )
    if p.x.dtype != torch.bfloat16:
        return f"x {p.x.dtype}; the GPU kernels accept torch.bfloat16"
    if p.layout != layout:
        return f"weights in the layout {p.layout!r}; these kernels accept {layout!r} (Fp4Experts.pack)"
    if p.tokens * p.topk >= 1 << 24:
        return f"{p.tokens * p.topk} slots; the GPU kernels accept fewer than 2**24"
    if p.experts > 1024:
        return f"{p.experts} experts; the GPU kernels accept up to 1024"
    return None


class Product(NamedTuple):
    """One of the two products; an architecture launches it."""

    first: bool
    tiles: Slot
    scales: Slot
    x: Slot  # e4m3 [rows, width], or two e2m1 per byte
    x_scales: Slot  # [width / 128, line]
    rows: SortedRows
    weights: WeightTiles
    out: Hidden | SlotOutputs
    signals: Slot | None = None  # int32 [1 + experts], zeros


def prepare_moe(
    p: MoeProblem,
    program: Program,
    multiply: Callable[[Product], None],
    tile: int = 0,
    hidden: tuple[int, int] | None = None,
) -> None:
    """Add the launches of moe. The tensors of p are slots. tile: rows of activations per tile, if their scales lie in
    atoms. hidden: rows of hidden values and scales per line, if they do not lie as those of x do."""
    slots, atoms = p.tokens * p.topk, p.tokens * p.topk // tile + p.experts if tile else 0
    words = words_of(p.activations)
    line, scale = (128 * words * atoms, torch.int32) if tile else (scale_line(p), torch.float32)
    codes, each = (torch.uint8, 2) if p.activations == "nvfp4" else (torch.float8_e4m3fn, 1)
    ids = p.ids if p.ids.is_contiguous() else program.copied(p.ids)
    weights = p.weights if p.weights.is_contiguous() else program.copied(p.weights)

    def ints(name: str, n: int) -> Slot:
        return program.workspace(name, (n,), torch.int32)

    starts, slot_of, row_of = ints("starts", p.experts + 1), ints("slot of row", slots), ints("row of slot", slots)
    row_weight = program.workspace("weight of row", (slots,), torch.float32)
    x_rows = program.workspace("rows of x", (slots, p.hidden // each), codes)
    x_scales = program.workspace("scales of x", (p.hidden // formats.GROUP, line), scale)
    h_count, h_line = hidden or (slots, line)
    h_rows = program.workspace("rows of h", (h_count, p.intermediate // each), codes)
    h_scales = program.workspace("scales of h", (p.intermediate // formats.GROUP, h_line), scale)
    y = p.slots
    if y is None or not y.is_contiguous():
        y = program.workspace("outputs of slots", (p.tokens, p.topk, p.hidden), p.x.dtype)
    if p.slots is not None:
        program.fill(y, 0.0)
    choice = Choice(ids, weights, slots, p.experts)
    place_of = ints("scales of slot", slots)
    signals = ints("signals", 1 + p.experts)
    to = SortOutputs(starts, slot_of, row_weight, row_of, place_of, signals)
    parts = -(-p.hidden // COLUMNS)
    x = p.x if p.x.stride(0) % 8 == 0 else program.copied(p.x)
    groups = p.hidden // formats.GROUP
    given = Activations(x, x.stride(0) // 8, groups, row_of, place_of, x_rows, x_scales, line, parts)
    # The first launch is a plain one: all that it and the next launches read is complete when it begins.
    if slots <= SORTED_AT_ONCE:
        program.launch(
            moe_sort_rows,
            (p.experts + p.tokens * parts,),
            dict(choice=choice, to=to, x=given),
            TOPK=p.topk,
            SLOTS=max(64, 1 << (slots - 1).bit_length()),
            COLUMNS=COLUMNS,
            TILE=tile,
            RECIPE=p.activations,
            num_warps=4,
        )
    else:
        count, experts = -(-slots // PIECE.value), max(SOME.value, 1 << (p.experts - 1).bit_length())
        pieces = Pieces(ints("counts", count * experts), ints("bases", count * 2 * experts))
        program.launch(moe_count, (count,), dict(choice=choice, pieces=pieces), EXPERTS=experts, num_warps=4)
        arguments = dict(choice=choice, pieces=pieces, to=to)
        program.launch(
            moe_place, (count,), arguments, EXPERTS=experts, TILE=tile, WORDS=words, num_warps=4, launch_pdl=True
        )
        columns = min(4096, 1 << (p.hidden - 1).bit_length())
        program.launch(
            moe_rows,
            (p.tokens, -(-p.hidden // columns)),
            dict(x=given),
            TOPK=p.topk,
            COLUMNS=columns,
            TILE=tile,
            RECIPE=p.activations,
            num_warps=max(1, columns // 512),
            launch_pdl=True,
        )
    rows = SortedRows(starts, slot_of, row_weight, p.experts, atoms)
    blocks = p.intermediate // formats.GROUP
    tiles = WeightTiles(p.w13_factors, blocks, groups)
    values = Hidden(h_rows, h_scales, p.intermediate, h_line, p.limit)
    multiply(Product(True, p.w13, p.w13_scales, x_rows, x_scales, rows, tiles, values, signals))
    tiles = WeightTiles(p.w2_factors, p.hidden // formats.TILE_ROWS, p.intermediate // formats.GROUP)
    multiply(Product(False, p.w2, p.w2_scales, h_rows, h_scales, rows, tiles, SlotOutputs(y, p.hidden), signals))
    shared = prepare_shared(p, program)
    out = p.out if p.out.stride(0) % 8 == 0 else program.workspace("out", p.out.shape, p.out.dtype)
    sums = Sums(y, groups, shared, out, out.stride(0) // 8)
    program.launch(
        moe_sum,
        (p.tokens, parts),
        dict(sums=sums, choice=choice),
        TOPK=p.topk,
        SHARED=p.shared_w13 is not None,
        COLUMNS=COLUMNS,
        num_warps=4,
        launch_pdl=True,
    )
    if out is not p.out:
        program.copy(p.out, out)
    if p.slots is not None and y is not p.slots:
        program.copy(p.slots, y)


def supports_route(p: RouteProblem) -> str | None:
    if p.x.dtype not in LOW_PRECISION or p.gate.dtype != p.x.dtype:
        return (
            f"x {p.x.dtype} and gate {p.gate.dtype}; the GPU kernels accept torch.bfloat16 or torch.float16, both alike"
        )
    if p.gate.shape[0] > 1024:
        return f"{p.gate.shape[0]} experts; the GPU kernels accept up to 1024"
    return None


def prepare_route(p: RouteProblem, program: Program) -> None:
    """Add the launches of moe_route. The tensors of p are slots."""
    (tokens, width), experts = p.x.shape, p.gate.shape[0]
    few = tokens <= FEW_TOKENS
    logits = program.workspace("logits", (CHUNKS.value if few else 1, tokens, experts), torch.float32)
    numbers = (p.x.stride(0), p.gate.stride(0), width)
    unit = 8 if all(n % 8 == 0 for n in numbers) else 1
    line, gate_line, units = (n // unit for n in numbers)
    x = Logits(p.x, line, p.gate, gate_line, tokens, experts, units, logits)
    tile, columns = (16, 32) if few else (32, 64)
    program.launch(
        moe_logits, (-(-tokens // tile), -(-experts // columns), CHUNKS.value if few else 1), dict(x=x), SHARED=few,
        TOKENS=tile, EXPERTS=columns, UNIT=unit, num_warps=4,
    )  # fmt: skip
    assert p.ids is not None and p.weights is not None
    ids = p.ids if p.ids.is_contiguous() else program.workspace("ids", p.ids.shape, torch.int32)

    def given(y: Any, dtype: torch.dtype) -> Any:
        if y is None:
            return Null(dtype)
        return y if y.is_contiguous() else program.copied(y)

    rules = Rules(
        given(p.bias, torch.float32),
        given(p.bias_vl, torch.float32),
        given(p.image, torch.bool),
        given(p.table, torch.int32),
        0 if p.table is None else p.table.shape[0],
        given(p.token_ids, torch.int32),
        ids,
        p.weights,
        float(p.eps),
        float(p.scale),
    )
    program.launch(
        moe_choose,
        (tokens,),
        dict(x=x, choice=rules),
        SHARED=few,
        TOPK=p.topk,
        EXPERTS=max(32, 1 << (experts - 1).bit_length()),
        BIAS=p.bias is not None,
        IMAGE=p.image is not None,
        TABLE=p.table is not None,
        num_warps=1,
        launch_pdl=True,
    )
    if ids is not p.ids:
        program.copy(p.ids, ids)


def prepare_shared(p: MoeProblem, program: Program) -> Any:
    """Add the shared expert, whose products are torch's -> its outputs [tokens, hidden], or Null."""
    if p.shared_w13 is None or p.shared_w2 is None:
        return Null(p.x.dtype)
    shared = program.workspace("shared", (p.tokens, p.hidden), p.x.dtype)
    if p.activations not in ("fp8_128", "fp8_32"):
        program.compute(shared_into, p, shared)
        return shared
    inner = p.shared_w2.shape[1]
    rows = program.workspace("rounded x", (p.tokens, p.hidden), p.x.dtype)
    both = program.workspace("gate and up", (p.tokens, 2 * inner), p.x.dtype)
    hidden = program.workspace("hidden values", (p.tokens, inner), p.x.dtype)

    def rounding(kernel: Any, width: int, given: dict[str, Any]) -> None:
        grid, group = (p.tokens, -(-width // COLUMNS)), formats.columns(p.activations, width)
        program.launch(kernel, grid, given, COLUMNS=COLUMNS, GROUP=group, num_warps=4)

    x = p.x if p.x.stride(0) % 8 == 0 else program.copied(p.x)
    rounding(moe_shared_rows, p.hidden, dict(x=SharedRows(x, x.stride(0) // 8, p.hidden // 8, rows)))
    program.compute(multiplied, rows, p.shared_w13, both)
    rounding(moe_shared_hidden, inner, dict(h=SharedHidden(both, inner // 8, float(p.limit), hidden)))
    program.compute(multiplied, hidden, p.shared_w2, shared)
    return shared


def multiplied(x: torch.Tensor, w: torch.Tensor, to: torch.Tensor) -> None:
    torch.mm(x, w.T, out=to)


def shared_into(p: MoeProblem, to: torch.Tensor) -> None:
    to.copy_(cpu.shared(p))


def scale_line(p: MoeProblem) -> int:
    """Return the rows of a line; each expert's begin at a multiple of 4 (sm90/products.py, scale_shift)."""
    return -(-p.tokens * p.topk // 4) * 4 + 4 * p.experts


def rows_per_expert(p: MoeProblem, ranks: int = 1) -> float:
    """Return the rows of a chosen expert, if tokens choose evenly. ranks: each has as many tokens and experts."""
    experts, tokens = p.experts * ranks, p.tokens * ranks
    touched = experts * (1 - (1 - min(p.topk / experts, 1)) ** tokens)
    return tokens * p.topk / max(touched, 1)
