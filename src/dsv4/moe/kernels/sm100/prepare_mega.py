"""Turn a validated problem of moe into one launch (mega.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dsv4.moe import formats
from dsv4.moe.kernels.arguments import Counters, Hidden, Peers, Pool, SlotOutputs, Tokens, Total, WeightTiles
from dsv4.moe.kernels.prepare import Product, prepare_shared
from dsv4.moe.kernels.rows import words_of
from dsv4.moe.problem import MoeProblem
from dsv4.runtime.program import Null, Program

COUNTERS = 224  # words before the counters of tiles, as in mega.py


def prepare_mega(
    p: MoeProblem,
    program: Program,
    launch: Callable[[Product, Product, dict[str, object]], None],
    tile: int,
    ranks: Any = None,
) -> None:
    """Add the launch. The tensors of p are slots. launch(product 1, product 2, the kernel's other arguments by name).
    ranks: None, or distributed.experts.Ranks: then x, ids, weights and slots lie in memory that all ranks reach."""
    size = 1 if ranks is None else ranks.size
    slots = size * p.tokens * p.topk
    atoms = slots // tile + p.experts
    line = 128 * words_of(p.activations) * atoms
    codes, each = (torch.uint8, 2) if p.activations == "nvfp4" else (torch.float8_e4m3fn, 1)
    ids = p.ids if p.ids.is_contiguous() else program.copied(p.ids)
    weights = p.weights if p.weights.is_contiguous() else program.copied(p.weights)
    x = p.x if p.x.stride(0) % 8 == 0 else program.copied(p.x)
    assert p.out is not None
    out = p.out if p.out.stride(0) % 8 == 0 else program.workspace("out", p.out.shape, p.out.dtype)
    counters = program.workspace("counters", (COUNTERS + atoms + p.experts,), torch.int32)
    program.fill(counters, 0)
    rows = atoms * tile
    place = program.workspace("place of slot", (slots,), torch.int32)
    line_of = program.workspace("line of row", (rows,), torch.int64)
    row_weight = program.workspace("weight of row", (rows,), torch.float32)
    x_rows = program.workspace("rows of x", (rows, p.hidden // each), codes)
    x_scales = program.workspace("scales of x", (p.hidden // formats.GROUP, line), torch.int32)
    h_rows = program.workspace("rows of h", (rows, p.intermediate // each), codes)
    h_scales = program.workspace("scales of h", (p.intermediate // formats.GROUP, line), torch.int32)
    y = p.slots
    if y is None or not y.is_contiguous():
        y = program.workspace("outputs of slots", (p.tokens, p.topk, p.hidden), p.x.dtype)
    if p.slots is not None and ranks is None:
        program.fill(y, 0.0)
    shared = prepare_shared(p, program)
    pool = Pool(place, line_of, row_weight, p.experts, atoms)
    up = WeightTiles(p.w13_factors, p.intermediate // formats.GROUP, p.hidden // formats.GROUP)
    down = WeightTiles(p.w2_factors, p.hidden // formats.TILE_ROWS, p.intermediate // formats.GROUP)
    hidden, outputs = Hidden(h_rows, h_scales, p.intermediate, line, p.limit), SlotOutputs(y, p.hidden)
    arguments: dict[str, object] = dict(
        tokens=Tokens(ids, weights, p.tokens * p.topk, x, x.stride(0) // 8, p.hidden, x_rows, x_scales),
        pool=pool,
        up=up,
        down=down,
        hidden=hidden,
        out=outputs,
        sums=Total(shared, out, out.stride(0) // 8),
        counters=Counters(
            counters, counters.view((atoms,), (1,), COUNTERS), counters.view((p.experts,), (1,), COUNTERS + atoms)
        ),
    )
    if ranks is None:
        arguments["peers"] = Peers(Null(torch.int64), Null(torch.int32), Null(torch.int32), 0, p.experts)
    else:
        first_expert = ranks.rank * p.experts
        arguments["peers"] = Peers(ranks.distance, ranks.signals, ranks.call, first_expert, size * p.experts)
    first = Product(True, p.w13, p.w13_scales, x_rows, x_scales, pool, up, hidden)
    launch(first, Product(False, p.w2, p.w2_scales, h_rows, h_scales, pool, down, outputs), arguments)
    if out is not p.out:
        program.copy(p.out, out)
    if p.slots is not None and y is not p.slots:
        program.copy(p.slots, y)
