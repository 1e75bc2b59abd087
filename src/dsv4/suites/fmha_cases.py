"""Suite `fmha`: every feature of the dense, varlen and paged operations, at sizes an emulator can run.

T, S <= 300 and at most 8 query heads. A core set runs at every head dim and dtype; the many special cases alternate
through the head dims and dtypes, so that each of those meets a different mix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, product
from typing import Any

import torch
from torch import Tensor

from .calls import Call
from .case import Case, Draw
from .merge_cases import merge_specials
from .seed_cases import HEAD_DIMS

DTYPES = (torch.bfloat16, torch.float16)
SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16"}
NAN = float("nan")

Maker = Callable[..., Call]  # (draw, d, dtype) -> Call


def qkv(
    draw: Draw, d: int, dtype: torch.dtype, t: int, s: int, heads: int = 4, kv_heads: int = 4, batch: int = 1
) -> dict[str, Any]:
    """Draw q [B, T, Hq, D], k and v [B, S, Hkv, D]."""
    q = draw.normal(batch, t, heads, d, dtype=dtype)
    return {"q": q, **{name: draw.normal(batch, s, kv_heads, d, dtype=dtype) for name in "kv"}}


def dense(draw: Draw, d: int, dtype: torch.dtype, size: dict[str, int], **options: Any) -> Call:
    return Call("fmha", {**qkv(draw, d, dtype, **size), **options})


def with_sink(draw: Draw, d: int, dtype: torch.dtype, size: dict[str, int], sink: Any, **options: Any) -> Call:
    """Make a call; `sink` is one logit for all heads, a list of one per head, or "random"."""
    args = {**qkv(draw, d, dtype, **size), **options}
    heads = args["q"].shape[2]
    logits = draw.normal(heads, scale=2.0) if sink == "random" else torch.as_tensor(sink).expand(heads)
    args["sink"] = logits.to(torch.float32).to(draw.device).contiguous()
    return Call("fmha", args)


def unseen_nan(draw: Draw, d: int, dtype: torch.dtype) -> Call:
    """Put NaN into K and inf into V left of every query's window, and right of the last query."""
    args = qkv(draw, d, dtype, t=5, s=150, kv_heads=2)
    args["k"][:, : 150 - 5 - 20] = NAN
    args["v"][:, : 150 - 5 - 20] = float("inf")
    return Call("fmha", {**args, "causal": True, "window": (20, 0)})


def strided(draw: Draw, d: int, dtype: torch.dtype, how: str) -> Call:
    """Draw inputs as models hand them over: views whose strides are not those of a fresh tensor."""
    t, s, heads, batch = 37, 90, 4, 2
    if how == "heads-first":  # [B, H, S, D] tensors seen as [B, S, H, D]
        q, k, v = (draw.normal(batch, heads, n, d, dtype=dtype).transpose(1, 2) for n in (t, s, s))
    elif how == "packed-kv":  # K and V interleaved in one projection's output
        q = draw.normal(batch, t, heads, d, dtype=dtype)
        k, v = draw.normal(batch, s, 2, heads, d, dtype=dtype).unbind(2)
    elif how == "packed-qkv":
        q, k, v = draw.normal(batch, s, 3, heads, d, dtype=dtype).unbind(2)
    elif how == "padded-rows":  # rows longer than the head dim; the padding is NaN
        q, k, v = (padded(draw, (batch, n, heads), d, dtype) for n in (t, s, s))
    elif how == "sliced":  # a window of a longer cache, not at its start
        q = draw.normal(batch, t + 3, heads, d, dtype=dtype)[:, 3:]
        k, v = (draw.normal(batch + 1, s + 21, heads, d, dtype=dtype)[1:, 5 : 5 + s] for _ in "kv")
    elif how == "shared-keys":  # one key set for the whole batch: batch stride 0
        q = draw.normal(batch, t, heads, d, dtype=dtype)
        k, v = (draw.normal(1, s, heads, d, dtype=dtype).expand(batch, -1, -1, -1) for _ in "kv")
    else:
        raise ValueError(f"how is {how!r}")
    return Call("fmha", {"q": q, "k": k, "v": v, "causal": True})


def padded(draw: Draw, shape: tuple[int, ...], d: int, dtype: torch.dtype) -> Tensor:
    wide = torch.full((*shape, d + 8), NAN, dtype=dtype, device=draw.device)
    wide[..., :d] = draw.normal(*shape, d, dtype=dtype)
    return wide[..., :d]


def scores(draw: Draw, d: int, dtype: torch.dtype, shape: str) -> Call:
    """Draw scores that stress the online softmax: the running maximum jumps, never moves, or is very far away."""
    args = qkv(draw, d, dtype, t=20, s=290, heads=4, kv_heads=1)
    direction = draw.normal(d)
    direction = direction / direction.norm()
    s = args["k"].shape[1]
    if shape == "rising":  # the maximum grows with every tile, so each tile rescales what came before
        size = torch.linspace(-3, 3, s, device=draw.device) * d**0.5
    elif shape == "falling":
        size = torch.linspace(3, -3, s, device=draw.device) * d**0.5
    elif shape == "spike":  # one late key takes almost all the weight
        size = torch.zeros(s, device=draw.device)
        size[s - 7] = 8 * d**0.5
    elif shape == "deep":  # all scores far below zero: exp must be taken against the maximum, not against 0
        size = torch.full((s,), -30 * d**0.5, device=draw.device)
    elif shape == "flat":  # all scores equal: the result is the mean of V
        args["q"].zero_()
        return Call("fmha", args)
    else:
        raise ValueError(f"shape is {shape!r}")
    push = size[:, None] * direction
    args["q"] = (args["q"].float() * 0.3 + 3 * direction).to(dtype)
    args["k"] = (args["k"].float() * 0.3 + push[None, :, None]).to(dtype)
    return Call("fmha", args)


def same_kv(draw: Draw, d: int, dtype: torch.dtype) -> Call:
    args = qkv(draw, d, dtype, t=3, s=200, heads=8, kv_heads=1)
    return Call("fmha", {**args, "v": args["k"]})


def varlen(
    draw: Draw,
    d: int,
    dtype: torch.dtype,
    lengths: list[tuple[int, int]],
    heads: int = 4,
    kv_heads: int = 2,
    bounds: bool = False,
    **options: Any,
) -> Call:
    """Make a call; `lengths` = (T, S) of each sequence. `bounds`: hand over max_seqlen_q/k as well."""
    t, s = [n for n, _ in lengths], [n for _, n in lengths]
    q = draw.normal(sum(t), heads, d, dtype=dtype)
    k, v = (draw.normal(sum(s), kv_heads, d, dtype=dtype) for _ in "kv")
    starts = {
        f"cu_seqlens_{x}": torch.tensor([0, *n]).cumsum(0).to(torch.int32).to(draw.device)
        for x, n in (("q", t), ("k", s))
    }
    if options.pop("sink", False):
        options["sink"] = draw.normal(heads, scale=2.0)
    extra = {"max_seqlen_q": max(t, default=0), "max_seqlen_k": max(s, default=0)} if bounds else {}
    return Call("fmha_varlen", {"q": q, "k": k, "v": v, **starts, **options}, extra=extra)


def varlen_nan(draw: Draw, d: int, dtype: torch.dtype) -> Call:
    """Make a call whose middle sequence has no queries and only NaN keys; its neighbours must not notice."""
    call = varlen(draw, d, dtype, [(33, 40), (0, 50), (20, 70)], causal=True)
    for name in "kv":
        call.args[name][40:90] = NAN
    return call


def varlen_tail(draw: Draw, d: int, dtype: torch.dtype) -> Call:
    """Make a call with buffers longer than the batch, as a serving engine keeps them: rows past the last sequence
    give 0 and -inf.
    """
    call = varlen(draw, d, dtype, [(20, 30), (9, 41), (8, 8)], causal=True)
    for x in "qk":
        call.args[f"cu_seqlens_{x}"] = call.args[f"cu_seqlens_{x}"][:-1].contiguous()
    for name, start in (("q", 29), ("k", 71), ("v", 71)):
        call.args[name][start:] = NAN
    return call


def paged(
    draw: Draw,
    d: int,
    dtype: torch.dtype,
    page: int,
    lengths: list[int],
    t: int = 1,
    heads: int = 8,
    kv_heads: int = 1,
    page_pad: int = 0,
    same: bool = False,
    absent: int | None = None,
    kv_dtype: torch.dtype | None = None,
    **options: Any,
) -> Call:
    """Make a call with shuffled pages; rows past a length and unused pages are NaN. `page_pad`: rows between pages.

    `absent` fills the unused entries of the block table; None gives them the number of a page of NaN.
    """
    need = [-(-n // page) for n in lengths]
    count = sum(need) + 2  # the last two are never used
    width = max(need, default=0) + 1
    numbers = draw.permutation(count - 1)
    table = torch.full((len(lengths), width), count - 1 if absent is None else absent, dtype=torch.int32)
    table = table.to(draw.device)

    def pages() -> Tensor:
        buffer = torch.full((count, page + page_pad, kv_heads, d), NAN, dtype=kv_dtype or dtype, device=draw.device)
        return buffer[:, :page]

    k_pages = pages()
    v_pages = k_pages if same else pages()
    at = 0
    for b, length in enumerate(lengths):
        table[b, : need[b]] = numbers[at : at + need[b]]
        at += need[b]
        for target in [k_pages] if same else [k_pages, v_pages]:
            for i in range(need[b]):
                rows = min(page, length - i * page)
                target[int(table[b, i]), :rows] = draw.normal(rows, kv_heads, d, dtype=kv_dtype or dtype)
    q = draw.normal(len(lengths), t, heads, d, dtype=dtype)
    if options.pop("sink", False):
        options["sink"] = draw.normal(heads, scale=2.0)
    args = {"q": q, "k_pages": k_pages, "v_pages": v_pages, "block_table": table, "lengths": draw.int32(lengths)}
    return Call("fmha_paged", {**args, **options})


def replaced(maker: Maker, **change: Any) -> Maker:
    """Return the maker with attributes of its Call changed."""

    def make(draw: Draw, d: int, dtype: torch.dtype) -> Call:
        call = maker(draw, d, dtype)
        for name, value in change.items():
            setattr(call, name, value)
        return call

    return make


def core() -> Iterator[tuple[str, Maker, set[str]]]:
    """Run at every head dim and dtype."""
    yield "full", partial(dense, size={"t": 64, "s": 128}), {"dense"}
    yield ("causal-odd-gqa", partial(dense, size={"t": 77, "s": 133, "kv_heads": 2}, causal=True), {"causal", "gqa"})
    window = partial(with_sink, size={"t": 3, "s": 200, "heads": 8, "kv_heads": 1}, sink="random", window=(31, 0))
    yield "window-sink-mqa", window, {"window", "sink", "mqa"}
    yield ("varlen", partial(varlen, lengths=[(17, 40), (0, 9), (65, 130), (1, 0)], causal=True), {"varlen", "causal"})
    yield ("paged", partial(paged, page=16, lengths=[5, 150, 0, 64], t=2, causal=True, sink=True), {"paged", "sink"})


def masks() -> Iterator[tuple[str, Maker, set[str]]]:
    table: list[tuple[str, int, int, dict[str, Any]]] = [
        ("causal-square", 70, 70, {"causal": True}),
        ("causal-one-query", 1, 111, {"causal": True}),
        ("causal-more-queries", 50, 30, {"causal": True}),  # the first 20 queries see nothing
        ("causal-window", 120, 200, {"causal": True, "window": (40, -1)}),
        ("window-both", 66, 99, {"window": (10, 7)}),
        ("window-left", 40, 77, {"window": (12, -1)}),
        ("window-right", 40, 77, {"window": (-1, 5)}),
        ("window-self", 33, 64, {"window": (0, 0)}),
        ("window-128", 150, 290, {"window": (127, 0)}),  # DeepSeek-V4's
        ("window-wider-than-keys", 9, 31, {"window": (500, 500)}),
        ("window-more-queries", 64, 20, {"window": (5, 3)}),
    ]
    for name, t, s, options in table:
        yield (name, partial(dense, size={"t": t, "s": s}, **options), {"causal" if "causal" in options else "window"})
    yield "unseen-nan", unseen_nan, {"window", "nan"}


def sinks() -> Iterator[tuple[str, Maker, set[str]]]:
    size = {"t": 30, "s": 75, "heads": 4, "kv_heads": 2}
    for name, sink in [
        ("sink", "random"),
        ("sink-none", float("-inf")),
        ("sink-all", float("inf")),
        ("sink-large", 25.0),
        ("sink-small", -60.0),
        ("sink-mixed", [float("-inf"), 0.5, float("inf"), 3.0]),
    ]:
        yield name, partial(with_sink, size=size, sink=sink, causal=True), {"sink", "causal"}
    empty = {"t": 50, "s": 30, "heads": 4, "kv_heads": 2}
    yield "sink-nothing-seen", partial(with_sink, size=empty, sink="random", causal=True), {"sink", "causal"}


def sizes() -> Iterator[tuple[str, Maker, set[str]]]:
    for t, s in [(1, 1), (1, 2), (2, 1), (5, 7), (63, 65), (128, 128), (129, 257), (300, 31), (31, 300)]:
        yield f"t{t}-s{s}", partial(dense, size={"t": t, "s": s, "heads": 2, "kv_heads": 2}), {"sizes"}
    for name, size in [
        ("no-queries", {"t": 0, "s": 20}),
        ("no-keys", {"t": 20, "s": 0}),
        ("no-batch", {"t": 5, "s": 20, "batch": 0}),
        ("no-queries-no-keys", {"t": 0, "s": 0}),
    ]:
        yield name, partial(dense, size=size), {"sizes", "zero"}
    for heads, kv_heads in [(8, 8), (8, 2), (8, 1), (6, 2), (5, 1), (3, 3)]:
        size = {"t": 21, "s": 130, "heads": heads, "kv_heads": kv_heads}
        yield f"heads-{heads}-on-{kv_heads}", partial(dense, size=size, causal=True), {"gqa"}
    yield ("batch-3", partial(dense, size={"t": 19, "s": 67, "batch": 3, "kv_heads": 2}, causal=True), {"sizes"})


def layouts() -> Iterator[tuple[str, Maker, set[str]]]:
    for how in ("heads-first", "packed-kv", "packed-qkv", "padded-rows", "sliced", "shared-keys"):
        yield f"strided-{how}", partial(strided, how=how), {"strided"}
    plain = partial(dense, size={"t": 45, "s": 80}, causal=True)
    yield "strided-out", replaced(plain, out_pad=8), {"strided", "out"}
    yield "k-is-v", same_kv, {"mqa"}
    yield "no-lse", replaced(plain, lse=False), {"out"}
    yield (
        "repeatable",
        replaced(partial(dense, size={"t": 2, "s": 300, "heads": 8, "kv_heads": 1}), repeat=True),
        {"deterministic"},
    )
    yield "scale", partial(dense, size={"t": 25, "s": 60}, softmax_scale=0.3), {"scale"}
    yield "scale-negative", partial(dense, size={"t": 25, "s": 60}, softmax_scale=-0.1), {"scale"}
    for shape in ("rising", "falling", "spike", "deep", "flat"):
        yield f"scores-{shape}", partial(scores, shape=shape), {"softmax"}


def varlens() -> Iterator[tuple[str, Maker, set[str]]]:
    table: list[tuple[str, list[tuple[int, int]], dict[str, Any]]] = [
        ("one", [(90, 150)], {}),
        ("decode", [(1, 33), (1, 1), (1, 200), (1, 64)], {"causal": True}),
        ("mixed", [(1, 129), (50, 50), (3, 7), (0, 0), (64, 128)], {"causal": True, "bounds": True}),
        ("more-queries", [(40, 10), (7, 30)], {"causal": True}),
        ("window-sink", [(30, 60), (61, 61), (2, 250)], {"window": (31, 0), "sink": True}),
        ("all-empty", [(0, 5), (0, 0)], {}),
        ("no-sequences", [], {}),
        ("tiny-tails", [(n, n) for n in (1, 2, 3, 5, 8, 13)], {"causal": True}),
    ]
    for name, lengths, options in table:
        yield f"varlen-{name}", partial(varlen, lengths=lengths, **options), {"varlen"}
    yield "varlen-nan-neighbour", varlen_nan, {"varlen", "nan"}
    yield "varlen-rows-past-the-end", varlen_tail, {"varlen", "nan"}


def pageds() -> Iterator[tuple[str, Maker, set[str]]]:
    for page in (1, 8, 12, 64, 256):  # 12 is not a power of two: TMA cannot step through such pages
        yield f"paged-{page}", partial(paged, page=page, lengths=[page + 3, 200, 1]), {"paged"}
    table: list[tuple[str, int, list[int], dict[str, Any]]] = [
        ("gqa", 16, [40, 100], {"heads": 8, "kv_heads": 2}),
        ("padded-pages", 16, [40, 100], {"page_pad": 5}),
        ("absent-pages", 32, [33, 7], {"absent": -1}),
        ("k-is-v", 64, [70, 129], {"same": True}),
        ("window", 32, [140, 20, 97], {"t": 4, "window": (31, 0), "sink": True}),
        ("prefill", 64, [90, 200], {"t": 50, "heads": 4, "kv_heads": 2, "causal": True}),
        ("more-queries", 16, [3, 40], {"t": 8, "causal": True}),
        ("all-empty", 16, [0, 0], {"t": 2}),
    ]
    for name, page, lengths, options in table:
        yield f"paged-{name}", partial(paged, page=page, lengths=lengths, **options), {"paged"}
    split = partial(paged, page=32, lengths=[300, 17], heads=8)
    yield "paged-repeatable", replaced(split, repeat=True), {"paged", "deterministic"}


def softcaps() -> Iterator[tuple[str, Maker, set[str]]]:
    """Yield cases with caps close to most scores."""
    size, small = {"t": 77, "s": 133, "kv_heads": 2}, {"t": 1, "s": 300, "heads": 8, "kv_heads": 1}
    yield "softcap", partial(with_sink, size=size, sink="random", causal=True, softcap=0.7), {"softcap", "sink"}
    yield "softcap-decode", partial(dense, size=small, softcap=0.7), {"softcap", "mqa"}
    lengths = [(30, 60), (61, 61), (2, 250)]
    yield "softcap-varlen", partial(varlen, lengths=lengths, window=(31, 0), softcap=0.7), {"softcap", "varlen"}
    yield "softcap-paged", partial(paged, page=16, lengths=[40, 100], softcap=0.7), {"softcap", "paged"}
    yield "softcap-large", partial(dense, size=size, softcap=1e6), {"softcap"}


def in_e4m3(draw: Draw, d: int, dtype: torch.dtype, maker: Maker, per_head: bool = True) -> Call:
    """Convert k and v to codes, with a scale for each KV head or one for all; pages have theirs already."""
    call = maker(draw, d, dtype)
    for name in ("k", "v"):
        if name in call.args:
            call.args[name] = call.args[name].to(torch.float8_e4m3fn)
    keys = call.args["k_pages"] if "k_pages" in call.args else call.args["k"]
    shape = (keys.shape[-2],) if per_head else ()
    for name in ("k_scale", "v_scale"):
        call.args[name] = draw.normal(*shape).abs().add(0.25)
    return call


def e4m3s() -> Iterator[tuple[str, Maker, set[str]]]:
    """Yield cases of FP8 caches: few rows, many, varlen, in pages; more codes than a kernel has at a time."""
    codes = torch.float8_e4m3fn
    small, odd = {"t": 3, "s": 200, "heads": 8, "kv_heads": 2}, {"t": 77, "s": 133, "kv_heads": 2}
    table: list[tuple[str, Maker, set[str]]] = [
        ("paged", partial(paged, page=16, lengths=[5, 150, 0, 64], t=2, kv_heads=2, sink=True), {"paged", "sink"}),
        ("paged-12", partial(paged, page=12, lengths=[15, 200, 1], page_pad=1), {"paged"}),
        ("paged-prefill", partial(paged, page=64, lengths=[90, 200], t=50, kv_heads=2, causal=True), {"paged"}),
        ("paged-k-is-v", partial(paged, page=64, lengths=[70, 129], same=True), {"paged"}),
        ("paged-window", partial(paged, page=32, lengths=[140, 20, 97], t=4, window=(31, 0), softcap=0.7), {"paged"}),
        ("decode", partial(dense, size=small, window=(90, 0)), {"window", "gqa"}),
        ("full", partial(dense, size=odd, causal=True, softcap=0.7), {"causal", "softcap"}),
        ("varlen", partial(varlen, lengths=[(3, 40), (0, 9), (6, 130), (1, 0)], causal=True), {"varlen"}),
        ("varlen-prefill", partial(varlen, lengths=[(17, 40), (65, 130)], bounds=True, sink=True), {"varlen"}),
    ]
    for name, maker, features in table:
        if "paged" in features:
            maker = partial(maker, kv_dtype=codes)
        yield f"e4m3-{name}", partial(in_e4m3, maker=maker, per_head=name != "paged-12"), {"e4m3", *features}


def fmha() -> list[Case]:
    """Return the suite, in a fixed order."""
    cases = []

    def add(name: str, maker: Maker, features: set[str], d: int, dtype: torch.dtype) -> None:
        full_name = f"{name}-d{d}-{SHORT[dtype]}"
        cases.append(Case("fmha", full_name, partial(maker, d=d, dtype=dtype), d, dtype, frozenset(features)))

    for (d, dtype), (name, maker, features) in product(product(HEAD_DIMS, DTYPES), core()):
        add(name, maker, features, d, dtype)
    # Dtypes turn once per round of head dims, and the head dims shift, so no feature group sees only one pairing.
    turns = cycle([(HEAD_DIMS[(i + i // 8) % 4], DTYPES[(i // 4 + i) % 2]) for i in range(32)])
    for group in (masks, sinks, sizes, layouts, varlens, pageds, merge_specials, softcaps, e4m3s):
        for (name, maker, features), (d, dtype) in zip(group(), turns):
            add(name, maker, features, d, dtype)
    return cases
