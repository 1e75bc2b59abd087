"""Suite `v4`: the hybrid attention of DeepSeek-V4, layer kind by layer kind, on both sides of every boundary.

A layer sees the last 128 raw rows and at most one stream of compressed rows: every ratio-4 row chosen by the indexer
(CSA), or every ratio-128 row (HCA). A row of either stream completed by token t is visible to t: with ratio m, token
t sees n_c(t) = (t + 1) // m rows. The cases step through t and n_c where something changes, with 1 to 4 new tokens at
once (multi-token prediction), each token with lists of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import dsv4
from dsv4 import reference

from .calls import Call
from .case import Case, Draw
from .v4_layer_cases import layer_specials

WINDOW = 128
RATIO = {"csa": 4, "hca": 128}
TOPK = 16  # small, so that n_c passes it within a few dozen tokens; the rules do not depend on it
NAN = float("nan")
CACHES = {"fp8": dsv4.Fp8Cache, "mxfp8": dsv4.Mxfp8Cache, "nvfp4": dsv4.Nvfp4Cache}
# How the pools of a layer are stored: V4.1 has a format for each.
WINDOW_STORE, COMPRESSED_STORE = {"pages": "plain", "v4.1": "mxfp8"}, {"pages": "plain", "v4.1": "nvfp4"}
BF16, FP16 = torch.bfloat16, torch.float16


def pool(
    draw: Draw, count: int, store: str, rows_per_page: int, dtype: torch.dtype = BF16, spare: int = 5
) -> tuple[Any, Tensor]:
    """Put `count` rows at shuffled places of a pool, the other places NaN. Returns the pool and the places [count]."""
    pages = -(-(count + spare) // rows_per_page)
    places = draw.permutation(pages * rows_per_page)[:count]
    return filled(draw, places, store, pages, rows_per_page, dtype), places


def filled(draw: Draw, places: Tensor, store: str, pages: int, rows_per_page: int, dtype: torch.dtype) -> Any:
    """Return a pool with drawn rows at these places and NaN elsewhere. store: fp8, mxfp8 or nvfp4; or, for rows in
    the dtype, plain (rows side by side), padded or pages."""
    rows = draw.normal(len(places), 512, dtype=dtype)
    if store in CACHES:
        cache = CACHES[store].empty(pages, rows_per_page, device=draw.device)
        cache.storage.fill_(255)  # NaN as e4m3, as bf16 and as a scale
        cache.write(places, rows)
        return cache
    total = pages * rows_per_page
    if store == "padded":  # a pool whose rows are further apart than they are long
        wide = torch.full((total, 512 + 64), NAN, dtype=dtype, device=draw.device)
        data = wide[:, :512]
    else:
        data = torch.full((total, 512), NAN, dtype=dtype, device=draw.device)
    data[places.long()] = rows
    return data.view(pages, rows_per_page, 512) if store == "pages" else data


def lists(rows: list[Tensor], width: int, device: torch.device) -> Tensor:
    """Return the row numbers of each query, padded with -1, int32 [N, width]."""
    out = torch.full((len(rows), width), -1, dtype=torch.int32, device=device)
    for n, row in enumerate(rows):
        out[n, : len(row)] = row
    return out


def step(
    draw: Draw,
    kind: str,
    start: int,
    count: int = 1,
    heads: int = 8,
    store: str = "plain",
    table: bool = False,
    lengths: bool = False,
    sink: Any = "random",
    rope: bool = True,
    width: int | None = None,
    topk: int = TOPK,
    dtype: torch.dtype = BF16,
) -> Call:
    """Make a call for tokens start .. start+count-1 of one sequence, in a layer of this kind, after everything
    before them.

    `table`: HCA's rows by block table and length instead of by list. `lengths`: hand over the number of valid entries
    and garbage after them, instead of -1.
    """
    positions = range(start, start + count)
    window, slots = pool(draw, start + count, WINDOW_STORE.get(store, store), 64, dtype)
    seen = [slots[max(0, t - WINDOW + 1) : t + 1] for t in positions]
    args: dict[str, Any] = {"q": draw.normal(count, heads, 512, dtype=dtype), "window": window}
    args["window_indices"] = lists(seen, width or WINDOW, draw.device)
    if lengths:
        args["window_lengths"] = draw.int32([len(row) for row in seen])
        garble(args["window_indices"], args["window_lengths"], slots)
    if kind != "swa":
        visible = [(t + 1) // RATIO[kind] for t in positions]
        most = (start + count) // RATIO[kind]
        if table:
            add_table(draw, args, [most], store, rows_per_page=2)
            args["compressed_lengths"] = draw.int32(visible)
            args["request_starts"] = draw.int32([0, count])
        else:
            add_lists(draw, args, visible, most, store, lengths, topk if kind == "csa" else None)
    if rope:
        table_args: dict[str, Any] = {"theta": 10000.0} if kind == "swa" else {"theta": 160000.0, "factor": 16.0}
        cos_sin = reference.rope_table(start + count, **table_args).to(draw.device)
        args["inverse_rope"] = (cos_sin, draw.int32(list(positions)))
    args["sink"] = logits(draw, heads, sink)
    return Call("v4_attention", args)


def logits(draw: Draw, heads: int, sink: Any) -> Tensor | None:
    if sink is None:
        return None
    values = draw.normal(heads, scale=2.0) if sink == "random" else torch.as_tensor(sink).expand(heads)
    return values.to(torch.float32).to(draw.device).contiguous()


def garble(indices: Tensor, lengths: Tensor, numbers: Tensor) -> None:
    """Put valid row numbers past the end of each list: only the length excludes them."""
    if len(numbers):
        beyond = torch.arange(indices.shape[1], device=indices.device) >= lengths[:, None]
        indices[beyond] = numbers[0]


def add_lists(
    draw: Draw, args: dict[str, Any], visible: list[int], most: int, store: str, lengths: bool, topk: int | None
) -> None:
    """Add a list of compressed rows for every query: `topk` of the visible ones at random, or with None all of them."""
    rows_per_page = 2 if topk is None else 64
    compressed, slots = pool(draw, most, COMPRESSED_STORE.get(store, store), rows_per_page, args["q"].dtype)
    if topk is None:
        chosen, width = [slots[:n] for n in visible], max(most, 1)
    else:
        chosen, width = [slots[draw.permutation(n)[:topk].long()] for n in visible], topk
    args["compressed"], args["compressed_indices"] = compressed, lists(chosen, width, draw.device)
    if lengths:
        args["compressed_lengths"] = draw.int32([len(row) for row in chosen])
        garble(args["compressed_indices"], args["compressed_lengths"], slots)


def add_table(draw: Draw, args: dict[str, Any], counts: list[int], store: str, rows_per_page: int) -> None:
    """Put compressed rows of R requests in separate pages; rows past the end and spare pages are NaN."""
    need = [-(-n // rows_per_page) for n in counts]
    pages = sum(need) + 2
    numbers = draw.permutation(pages)
    table = torch.full((len(counts), max(need) + 1), -1, dtype=torch.int32, device=draw.device)
    places, at = [torch.empty(0, dtype=torch.int32, device=draw.device)], 0
    for r, n in enumerate(counts):
        table[r, : need[r]] = numbers[at : at + need[r]]
        at += need[r]
        j = torch.arange(n, device=draw.device)
        places.append(table[r, j // rows_per_page] * rows_per_page + (j % rows_per_page).to(torch.int32))
    store = "pages" if store == "plain" else store
    args["compressed"] = filled(draw, torch.cat(places), store, pages, rows_per_page, args["q"].dtype)
    args["compressed_block_table"] = table


def batch(
    draw: Draw, kind: str, steps: list[tuple[int, int]], store: str = "fp8", heads: int = 8, dtype: torch.dtype = BF16
) -> Call:
    """Make a call of several requests `(start, count)`: decode with drafts of 1 to 4 tokens. HCA by block table."""
    positions = [t for start, count in steps for t in range(start, start + count)]
    need = [start + count for start, count in steps]
    window, slots = pool(draw, sum(need), WINDOW_STORE.get(store, store), 64, dtype)
    own = [slots[end - n : end] for n, end in zip(need, torch.tensor(need).cumsum(0).tolist(), strict=True)]
    owner = [r for r, (_, count) in enumerate(steps) for _ in range(count)]
    rows = [own[r][max(0, t - WINDOW + 1) : t + 1] for r, t in zip(owner, positions, strict=True)]
    args: dict[str, Any] = {"q": draw.normal(len(positions), heads, 512, dtype=dtype), "window": window}
    args["window_indices"] = lists(rows, WINDOW, draw.device)
    if kind != "swa":
        visible = [(t + 1) // RATIO[kind] for t in positions]
        most = [n // RATIO[kind] for n in need]
        if kind == "hca":
            add_table(draw, args, most, store, rows_per_page=2)
            args["request_starts"] = draw.int32([0, *torch.tensor([c for _, c in steps]).cumsum(0).tolist()])
            args["compressed_lengths"] = draw.int32(visible)
        else:
            compressed, places = pool(draw, sum(most), COMPRESSED_STORE.get(store, store), 64, dtype)
            first = [0, *torch.tensor(most).cumsum(0).tolist()]
            chosen = [places[first[r] + draw.permutation(n)[:TOPK].long()] for r, n in zip(owner, visible, strict=True)]
            args["compressed"], args["compressed_indices"] = compressed, lists(chosen, TOPK, draw.device)
    args["sink"] = logits(draw, heads, "random")
    return Call("v4_attention", args)


def holes(draw: Draw, everywhere: bool, **options: Any) -> Call:
    """Put -1 anywhere in the lists, also first; with `everywhere` one query has nothing but -1 in both."""
    call = step(draw, "csa", start=200, count=3, **options)
    for name in ("window_indices", "compressed_indices"):
        ids = call.args[name]
        ids[draw.integers(0, 3, tuple(ids.shape)) == 0] = -1
        ids[:, 0] = -1
        if everywhere:
            ids[1] = -1
    return call


def draft_block(draw: Draw, start: int, count: int, **options: Any) -> Call:
    """Make a draft of V4.1 (DSpark): its queries see the window before the block, and all of the block, later ones
    too.
    """
    call = step(draw, "swa", start, count, width=WINDOW + count, **options)
    lists = call.args["window_indices"]
    block = torch.stack([lists[n, min(start + n + 1, WINDOW) - 1] for n in range(count)])  # each query's own row
    before = lists[0, : min(start, WINDOW - 1)]
    seen = torch.cat([before, block])
    lists[:] = -1
    lists[:, : len(seen)] = seen
    return call


def changed(maker: Callable[..., Call], **change: Any) -> Callable[[Draw], Call]:
    """Return the maker with attributes of its Call changed."""

    def make(draw: Draw) -> Call:
        call = maker(draw)
        for name, value in change.items():
            setattr(call, name, value)
        return call

    return make


def positions() -> Iterator[tuple[str, Callable[[Draw], Any], set[str]]]:
    for t in (0, 3, 126, 127, 128, 255):
        yield f"swa-t{t}", partial(step, kind="swa", start=t), {"swa"}
    # With top-k 16: n_c is 0 up to t=2, 15 at 62, 16 from 63 to 66, 17 from 67.
    for t in (0, 2, 3, 4, 62, 63, 66, 67, 126, 127, 128, 255):
        yield f"csa-t{t}", partial(step, kind="csa", start=t), {"csa"}
    for t in (0, 3, 126, 127, 128, 255, 256, 511):
        yield f"hca-t{t}", partial(step, kind="hca", start=t), {"hca"}
        yield f"hca-table-t{t}", partial(step, kind="hca", start=t, table=True), {"hca", "table"}


def drafts() -> Iterator[tuple[str, Callable[[Draw], Any], set[str]]]:
    """Yield 1 to 4 tokens at once; the starts make them cross a window, a ratio-4 and a ratio-128 boundary."""
    for count in (1, 2, 3, 4):
        for kind, starts in (("swa", (125,)), ("csa", (1, 61, 125)), ("hca", (125, 253))):
            for start in starts:
                name = f"{kind}-mtp{count}-t{start}"
                yield (name, partial(step, kind=kind, start=start, count=count, table=kind == "hca"), {kind, "mtp"})
    for kind in ("swa", "csa", "hca"):
        mixed = [(0, 1), (126, 4), (3, 2), (254, 3), (127, 1)]
        yield f"{kind}-batch", partial(batch, kind=kind, steps=mixed), {kind, "mtp", "batch", "fp8"}
        yield (f"{kind}-batch-bf16", partial(batch, kind=kind, steps=mixed[:3], store="plain"), {kind, "mtp", "batch"})


def forms() -> Iterator[tuple[str, Callable[[Draw], Any], set[str]]]:
    """Yield cases with all cache formats, head counts, forms of lists, sinks, forms of output."""
    for kind in ("swa", "csa", "hca"):
        yield f"{kind}-fp8", partial(step, kind=kind, start=300, store="fp8"), {kind, "fp8"}
        yield f"{kind}-lengths", partial(step, kind=kind, start=130, count=2, lengths=True), {kind, "lengths"}
        yield f"{kind}-prefill", partial(step, kind=kind, start=0, count=140, heads=2), {kind, "prefill"}
    yield ("hca-table-fp8", partial(step, kind="hca", start=400, store="fp8", table=True), {"hca", "fp8", "table"})
    yield "csa-padded-rows", partial(step, kind="csa", start=150, store="padded"), {"csa", "strided"}
    for heads in (1, 3, 16, 64, 128):
        yield f"csa-heads{heads}", partial(step, kind="csa", start=140, heads=heads), {"csa", "heads"}
    for kind, store in (("csa", "fp8"), ("hca", "plain"), ("hca", "fp8")):
        yield (
            f"{kind}-heads128-{store}",
            partial(step, kind=kind, start=300, heads=128, store=store, table=kind == "hca"),
            {kind, "heads"} | ({"fp8"} if store == "fp8" else set()),
        )
    yield "swa-wide-list", partial(step, kind="swa", start=140, width=133), {"swa"}
    for name, sink in [
        ("none", None),
        ("minus-inf", float("-inf")),
        ("plus-inf", float("inf")),
        ("large", 30.0),
        ("mixed", [float("-inf"), 0.0, 40.0, float("inf"), -40.0, 1.0, 2.0, 3.0]),
    ]:
        yield f"csa-sink-{name}", partial(step, kind="csa", start=90, sink=sink), {"csa", "sink"}
    yield "csa-no-rope", partial(step, kind="csa", start=90, rope=False), {"csa"}
    yield "csa-holes", partial(holes, everywhere=False), {"csa", "holes"}
    yield "csa-nothing-listed", partial(holes, everywhere=True), {"csa", "holes"}
    yield "no-queries", partial(step, kind="csa", start=100, count=0), {"csa", "zero"}
    plain = partial(step, kind="csa", start=120, count=2)
    yield "csa-strided-out", changed(plain, out_pad=64), {"csa", "strided", "out"}
    yield "csa-no-lse", changed(plain, lse=False), {"csa", "out"}
    yield "csa-repeatable", changed(plain, repeat=True), {"csa", "deterministic"}


def halves() -> Iterator[tuple[str, Callable[[Draw], Any], set[str]]]:
    """Yield cases with q and rows in fp16: every way in which rows come, heads on both sides of the tiles of 64 and
    128."""
    half = partial(step, dtype=FP16)
    yield "swa-fp16", partial(half, kind="swa", start=126, count=3), {"swa"}
    yield "csa-fp16", partial(half, kind="csa", start=140, count=2, heads=65), {"csa", "heads"}
    yield "csa-heads128-fp16", partial(half, kind="csa", start=140, heads=128), {"csa", "heads"}
    yield "csa-padded-rows-fp16", partial(half, kind="csa", start=150, store="padded"), {"csa", "strided"}
    yield "csa-nothing-listed-fp16", partial(holes, everywhere=True, dtype=FP16), {"csa", "holes"}
    yield "csa-prefill-fp16", partial(half, kind="csa", start=0, count=140, heads=2), {"csa", "prefill"}
    yield "csa-repeatable-fp16", changed(partial(half, kind="csa", start=120, count=2), repeat=True), {"deterministic"}
    mixed = [(0, 1), (126, 4), (3, 2)]
    several = partial(batch, kind="hca", steps=mixed, store="plain", dtype=FP16)
    yield "hca-batch-fp16", several, {"hca", "table", "batch"}


def v41() -> Iterator[tuple[str, Callable[[Draw], Any], set[str]]]:
    """Yield cases with rows of DeepSeek-V4.1: the window of 528 bytes each, the compressed ones of 288."""
    mine = partial(step, store="v4.1")
    yield "v4.1-swa", partial(mine, kind="swa", start=130), {"v4.1", "swa"}
    for heads in (8, 64):
        yield f"v4.1-csa-heads{heads}", partial(mine, kind="csa", start=300, heads=heads), {"v4.1", "csa"}
    yield "v4.1-csa-mtp8", partial(mine, kind="csa", start=121, count=8, heads=16), {"v4.1", "csa", "mtp"}
    yield "v4.1-csa-prefill", partial(mine, kind="csa", start=0, count=140, heads=2), {"v4.1", "csa", "prefill"}
    yield "v4.1-csa-holes", partial(holes, everywhere=True, store="v4.1"), {"v4.1", "csa", "holes"}
    mixed = [(0, 1), (126, 4), (3, 2), (254, 3), (127, 1)]
    yield "v4.1-csa-batch", partial(batch, kind="csa", steps=mixed, store="v4.1"), {"v4.1", "csa", "batch"}
    yield "v4.1-draft-block", partial(draft_block, start=200, count=5, store="v4.1"), {"v4.1", "swa", "mtp"}
    yield "v4.1-draft-block-early", partial(draft_block, start=60, count=5, store="v4.1"), {"v4.1", "swa", "mtp"}


def v4() -> list[Case]:
    """Return the suite, in a fixed order."""
    groups = (
        (positions(), BF16),
        (drafts(), BF16),
        (forms(), BF16),
        (halves(), FP16),
        (v41(), BF16),
        (layer_specials(), BF16),
    )
    return [
        Case("v4", name, maker, dtype=dtype, features=frozenset(features))
        for group, dtype in groups
        for name, maker, features in group
    ]
