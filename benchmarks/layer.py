"""Where the time of a DeepSeek-V4-Flash layer goes: decode on one GPU, layers of real size with random weights.

    PYTHONPATH=examples python benchmarks/layer.py [--requests 1,8,32,128] [--context 4096] [--layers 0] [--json file]
    PYTHONPATH=examples python benchmarks/layer.py --from benchmarks/results/layer-h200.json

A layer is all of it: residual streams (mHC), norms, projections, compressor, indexer, attention over FP8 rows, router,
256 FP4 experts and the shared one. Linear maps are bf16 by cuBLAS, in the checkpoint FP8. As many layers as fit into
memory stand one after the other, sliding (SWA), sparse (CSA) and heavily compressed (HCA) by turns, and a step through
all of them is one CUDA graph: its time by the number of layers is what a layer costs. Then each part of one layer of a
kind alone, a graph with an empty L2 before it. Parts overlap in the step, and alone they have the launch of a graph in
their times, so their sum is more than the layer.

Where they can be imported (dsv4.bench.peers), peers then take turns with the same parts, on rows and keys at random:
FlashMLA attends, without the inverse rotation of its output, DeepGEMM and torch.topk choose rows by FP8 keys, Humming
computes the routed experts with scales per 128, its slots sorted beforehand. A peer that fails leaves its reason. The
file is written again after every batch; --from prints the tables of one, --markdown the one of the documents.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

import dsv4
from deepseek_v4 import paging
from deepseek_v4.paged_model import PagedModel
from deepseek_v4.step import CSA, HCA, Step, projections
from dsv4 import elementwise, suites
from dsv4.bench import peers
from dsv4.bench.timing import captured, in_one_line, time_turns
from dsv4.bench.v4 import pages_of
from dsv4.caches.index_keys import IndexCache, quantize_queries
from dsv4.reference import rope_table
from dsv4.runtime.plan import plan

SWA = "sliding_attention"
KINDS = {SWA: 2, CSA: 21, HCA: 20}  # layers of V4-Flash
RATIOS = {CSA: 4, HCA: 128}
SHORT = {SWA: "SWA", CSA: "CSA", HCA: "HCA"}


class Sizes(NamedTuple):
    hidden: int = 4096
    heads: int = 64
    dim: int = 512
    q_rank: int = 1024
    groups: int = 8  # of the output projection
    o_rank: int = 1024
    index_heads: int = 64
    index_dim: int = 128
    topk: int = 512
    window: int = 128
    rope: int = 64
    streams: int = 4
    experts: int = 256
    inner: int = 2048
    chosen: int = 6


def weight(*shape: int, device: torch.device) -> Tensor:
    return (torch.randn(shape, device=device) * shape[-1] ** -0.5).bfloat16()


def linear(outputs: int, inputs: int, device: torch.device) -> Callable[[Tensor], Tensor]:
    w = weight(outputs, inputs, device=device)
    return lambda x: torch.nn.functional.linear(x, w)


def norm(dim: int, device: torch.device) -> SimpleNamespace:
    return SimpleNamespace(weight=torch.ones(dim, device=device).bfloat16(), variance_epsilon=1e-6, eps=1e-6)


def compressor(s: Sizes, dim: int, ratio: int, device: torch.device) -> SimpleNamespace:
    width = dim * (2 if ratio == 4 else 1)
    return SimpleNamespace(
        kv_proj=linear(width, s.hidden, device),
        gate_proj=linear(width, s.hidden, device),
        head_dim=dim,
        position_bias=torch.zeros(ratio, width, device=device).bfloat16(),
        kv_norm=norm(dim, device),
        compress_rate=ratio,
    )


def attention(s: Sizes, kind: str, index: int, device: torch.device) -> SimpleNamespace:
    """What step.py reads of a DeepseekV4Attention."""
    made = None
    if kind != SWA:
        made = compressor(s, s.dim, RATIOS[kind], device)
    if kind == CSA and made is not None:
        made.indexer = compressor(s, s.index_dim, RATIOS[kind], device)
        made.indexer.scorer = SimpleNamespace(weights_proj=linear(s.index_heads, s.hidden, device))
        made.indexer.q_b_proj = linear(s.index_heads * s.index_dim, s.q_rank, device)
        made.indexer.num_heads, made.indexer.index_topk = s.index_heads, s.topk
    each = s.heads * s.dim // s.groups
    o_a = weight(s.groups, s.o_rank, each, device=device)
    return SimpleNamespace(
        layer_type=kind, layer_idx=index, num_heads=s.heads, head_dim=s.dim, scaling=s.dim**-0.5, compressor=made,
        rope_layer_type="main" if kind == SWA else "compress", config=SimpleNamespace(o_groups=s.groups),
        q_a_proj=linear(s.q_rank, s.hidden, device), q_a_norm=norm(s.q_rank, device), q_b_norm=norm(s.dim, device),
        q_b_proj=linear(s.heads * s.dim, s.q_rank, device), kv_proj=linear(s.dim, s.hidden, device),
        kv_norm=norm(s.dim, device), sinks=torch.zeros(s.heads, device=device),
        o_a_proj=lambda x: torch.bmm(x[0].transpose(0, 1), o_a.mT).transpose(0, 1)[None],
        o_b_proj=linear(s.hidden, s.groups * s.o_rank, device),
    )  # fmt: skip


def random_experts(s: Sizes, device: torch.device) -> dsv4.Fp4Experts:
    given = []
    for rows, columns in ((s.inner, s.hidden), (s.inner, s.hidden), (s.hidden, s.inner)):
        given.append(torch.randint(0, 256, (s.experts, rows, columns // 2), dtype=torch.uint8, device=device))
        given.append(torch.randint(116, 122, (s.experts, rows, columns // 32), dtype=torch.uint8, device=device))
    return dsv4.Fp4Experts.pack(*given)


class Layer:
    def __init__(self, s: Sizes, kind: str, index: int, experts: dsv4.Fp4Experts, device: torch.device) -> None:
        self.kind, self.experts, self.attention = kind, experts, attention(s, kind, index, device)
        self.norms = norm(s.hidden, device), norm(s.hidden, device)
        h, width = s.streams, s.streams * s.hidden
        self.mixers = [
            SimpleNamespace(
                fn=weight((2 + h) * h, width, device=device).float(),  # as in the checkpoint
                base=torch.zeros((2 + h) * h, device=device),
                scale=torch.ones(3, device=device),
                hc_sinkhorn_iters=20,
                hc_eps=1e-6,
                input_norm=SimpleNamespace(eps=1e-6),
            )
            for _ in range(2)
        ]
        self.gate, self.bias = weight(s.experts, s.hidden, device=device), torch.zeros(s.experts, device=device)
        self.shared = weight(2 * s.inner, s.hidden, device=device), weight(s.hidden, s.inner, device=device)
        self.chosen = s.chosen

    def parts(self, step: Step, at: dict[str, Any]) -> Iterator[tuple[str, Callable[[], Any]]]:
        """(name, what it does), in the order of the layer; tensors between them are in ``at``, streams among them."""
        parts, a = step.parts, self.attention
        pools, cos_sin = step.model.pools[a.layer_idx], step.model.tables[a.rope_layer_type]
        indexer = a.compressor.indexer if self.kind == CSA else None

        def collapse(n: int) -> None:
            at["mix"], at["x"] = parts.collapse(at["streams"], self.mixers[n], self.norms[n])

        def project() -> None:
            at["low"], at["row"], *at["others"] = (one(at["x"]) for one in projections(a))
            at["low"] = parts.norm(at["low"], a.q_a_norm)
            at["q"] = a.q_b_proj(at["low"]).view(len(at["x"]), a.num_heads, -1)
            if indexer is not None:
                at["index q"] = indexer.q_b_proj(at["low"]).view(len(at["x"]), indexer.num_heads, -1)

        def turn() -> None:
            at["turned"] = parts.turned(at["q"], cos_sin, step.positions, a.q_b_norm.eps)
            parts.store(pools["window"], step.window_slots, at["row"], a.kv_norm, cos_sin, step.positions)

        def compress() -> None:
            rows, others = step.rows[self.kind], at["others"]
            step._compress(a.compressor, rows, *others[:2], pools["compressed"], pools["compressed states"], cos_sin)
            if indexer is not None:
                step._compress(indexer, rows, *others[2:4], pools["index"], pools["index states"], cos_sin)

        def choose() -> None:
            q = parts.turned(at["index q"], cos_sin, step.positions)
            at["rows"] = dsv4.index_topk(
                q, pools["index"], at["others"][4], indexer.index_topk, positions=step.positions, ratio=RATIOS[CSA],
                block_table=step.table, request_starts=step.starts, backend=step.model.backend,
            )  # fmt: skip

        def attend() -> None:
            options: dict[str, Any] = {}
            if self.kind == CSA:
                options = dict(compressed=pools["compressed"], compressed_indices=at["rows"])
            elif self.kind == HCA:
                options = dict(
                    compressed=pools["compressed"],
                    compressed_block_table=step.table,
                    compressed_lengths=step.rows[HCA].visible,
                    request_starts=step.starts,
                )
            at["seen"] = dsv4.v4_attention(
                at["turned"], pools["window"], step.window_rows, sink=a.sinks, softmax_scale=a.scaling,
                inverse_rope=(cos_sin, step.positions), backend=step.model.backend, plan=step.plans.get(self.kind),
                **options,
            )  # fmt: skip

        def output() -> None:
            y = a.o_a_proj(at["seen"].reshape(1, len(at["x"]), a.config.o_groups, -1)).flatten(2)
            at["y"] = a.o_b_proj(y)[0]

        def spread() -> None:
            at["streams"] = parts.spread(at["streams"], at["y"], at["mix"])

        def route() -> None:
            at["ids"], at["weights"] = dsv4.moe_route(at["x"], self.gate, bias=self.bias, topk=self.chosen)

        def mixture(shared: Any) -> None:
            at["y"] = dsv4.moe(at["x"], self.experts, at["ids"], at["weights"], shared=shared)

        yield "streams and norm", lambda: collapse(0)
        yield "projections", project
        yield "rotation, window row", turn
        if self.kind != SWA:
            yield "compressor", compress
        if indexer is not None:
            yield "indexer", choose
        yield "attention", attend
        yield "output projection", output
        yield "streams back", spread
        yield "streams and norm, 2nd", lambda: collapse(1)
        yield "router", route
        yield "experts and shared expert", lambda: mixture(self.shared)
        yield "streams back, 2nd", spread


def served(s: Sizes, layers: list[Layer], requests: int, context: int, device: torch.device, backend: str) -> Step:
    """A step of one token of every request, each with so many behind it; rows are random."""
    page, window_page = 256, 64
    places = paging.Places(
        requests, requests * (context // page + 1), page, context // page + 1, s.window, window_page, 128
    )
    model: Any = SimpleNamespace(
        places=places,
        parts=elementwise.choose(backend, device),
        backend=backend,
        ratios=RATIOS,
        limit=requests,
        device=device,
        model=SimpleNamespace(config=SimpleNamespace(hc_mult=s.streams)),
    )
    for layer in layers:
        layer.attention.kv_proj.weight = layer.gate  # its dtype counts
    model.pools = [PagedModel._pools(model, layer.attention, s.dim == 512) for layer in layers]
    for pools in model.pools:
        if "index" in pools:
            pools["index"].normal_()  # equal scores would be a case of their own
    table = rope_table(context + page, s.rope, device=device)
    model.tables = {"main": table, "compress": table}
    lines = []
    for _ in range(requests):
        request = paging.Request(places.lines.take(1)[0])
        request.first = max(0, context - s.window + 1) // window_page
        places.extend(request, context)
        request.tokens = context
        places.extend(request, 1)
        lines.append(request.line)
    widths = {SWA: 0, CSA: s.topk, HCA: (context // page + 1) * (page // 128)}
    plans = {}
    if device.type == "cuda":
        plans = {
            kind: plan(dsv4.v4_attention, batch=requests, q_heads=s.heads, kv_heads=1, head_dim=s.dim,
                       max_seqlen_k=s.window + width, device=device, deterministic=False)
            for kind, width in widths.items()
        }  # fmt: skip
    at = np.array(lines)
    starts = torch.arange(requests + 1, dtype=torch.int32, device=device)
    return Step(
        model,
        torch.full((requests,), context, device=device),
        starts,
        torch.tensor(lines, device=device),
        torch.tensor(places.tables[at], device=device),
        torch.tensor(places.windows[at], device=device),
        plans=plans,
    )


def layers_that_fit(s: Sizes, most: int, device: torch.device) -> list[Layer]:
    """Each with experts of its own."""
    kinds = [SWA, CSA, HCA]
    first = random_experts(s, device)
    layers = [Layer(s, kinds[0], 0, first, device)]
    room = torch.cuda.mem_get_info()[0] - (28 << 30) if device.type == "cuda" else 0  # pools, and what peers unpack
    each = first.nbytes + (500 << 20)
    count = min(most or sum(KINDS.values()), 1 + max(room // each, 2))
    for n in range(1, count):
        copied = replace(first, **{k: v.clone() for k, v in vars(first).items() if isinstance(v, Tensor)})
        layers.append(Layer(s, kinds[n] if n < 3 else kinds[1 + n % 2], n, copied, device))
    return layers


class Batch:
    """So many requests before a token each: a step through all layers, which has filled what the parts read."""

    def __init__(
        self, s: Sizes, layers: list[Layer], requests: int, context: int, device: torch.device, backend: str = "auto"
    ) -> None:
        self.sizes, self.layers, self.requests, self.context, self.device = s, layers, requests, context, device
        self.start = torch.randn(requests, s.streams, s.hidden, device=device).bfloat16()
        self.at: dict[str, Any] = {}
        step = served(s, layers, requests, context, device, backend)
        self.chains = [list(layer.parts(step, self.at)) for layer in layers]
        self.alive: list = []  # a graph reads and writes what it was captured with
        with step.parts.running():
            self.whole()

    def whole(self) -> None:
        self.at["streams"] = self.start
        for chain in self.chains:
            for _, part in chain:
                part()

    def kinds(self) -> Iterator[tuple[str, dict[str, Callable[[], None]]]]:
        """(kind, its parts, each of which may be repeated), in the order of the layer; then ``at`` has its values."""
        for kind in KINDS:
            chain = self.chains[next(n for n, layer in enumerate(self.layers) if layer.kind == kind)]
            self.at["streams"], parts = self.start, {}
            for name, part in chain:
                part()
                parts[name] = repeatable(part, self.at, self.alive)
            yield kind, parts

    def parts(self, repeats: int) -> dict[str, Any]:
        runs = {"step": captured(self.whole).replay}
        self.alive.append(dict(self.at))
        finite = bool(self.at["streams"].isfinite().all())
        for kind, parts in self.kinds():
            runs |= {f"{kind}|{name}": captured(part).replay for name, part in parts.items()}
        times = {name: x.microseconds for name, x in time_turns(runs, repeats).items()}
        count = len(self.layers)
        return {"layer": times.pop("step") / count, "layers": count, "finite": finite, "parts": times}

    def beside(self, repeats: int, humming: Callable[[], Any]) -> dict[str, Any]:
        """Parts that peers have, theirs and ours by turns."""
        runs, refused = {}, {}
        for kind, parts in self.kinds():
            for name, make in self.contenders(kind, parts, humming):
                try:
                    call = make()
                    runs[name] = captured(call).replay
                    self.alive.append(call)
                except Exception as why:  # noqa: BLE001 (whatever a peer raises; its absence is an ImportError)
                    refused[name] = in_one_line(why)
        times = {name: x.microseconds for name, x in time_turns(runs, repeats).items()}
        return {"beside": times, "refused": refused}

    def contenders(
        self, kind: str, parts: dict[str, Callable], humming: Callable[[], Any]
    ) -> Iterator[tuple[str, Callable[[], Callable]]]:
        """(kind|part|who, what makes the call)"""
        yield f"{kind}|attention|dsv4", lambda: parts["attention"]
        yield f"{kind}|attention|FlashMLA", lambda: self.flash_mla(kind)
        if kind == CSA:
            for name, make in self.indexers():
                yield f"{kind}|indexer|{name}", make
            x, ids, weights = self.at["x"], self.at["ids"], self.at["weights"]
            experts = next(layer.experts for layer in self.layers if layer.kind == kind)
            yield "all|routed experts|dsv4", lambda: lambda: dsv4.moe(x, experts, ids, weights)
            yield "all|routed experts|Humming", lambda: humming().call(x, ids, weights, "indexed")

    def flash_mla(self, kind: str) -> Callable[[], Tensor]:
        s, n, device, flash = self.sizes, self.requests, self.device, peers.FlashMLA()
        if not flash:
            raise ImportError("not installed")
        compressed = {SWA: 0, CSA: min(s.topk, self.context // RATIOS[CSA]), HCA: self.context // RATIOS[HCA]}[kind]
        caches = [pages_of(dsv4.Fp8Cache.pack(torch.randn(n * 1024, s.dim, device=device).bfloat16())) for _ in "wc"]
        lists = [
            torch.randint(0, n * 1024, (n, -(-rows // 64) * 64), dtype=torch.int32, device=device)
            for rows in (s.window, compressed)
        ]
        lists[1][:, compressed:] = -1
        others = (caches[1], lists[1]) if compressed else (None, None)
        sink = torch.zeros(s.heads, device=device)
        return flash.decode(self.at["turned"].contiguous(), caches[0], lists[0], *others, sink)

    def indexers(self) -> Iterator[tuple[str, Callable[[], Callable]]]:
        """Calls that choose rows by the same FP8 keys, and the part of the layer, whose keys are bf16."""
        s, n, device = self.sizes, self.requests, self.device
        pages = -(-self.context // RATIOS[CSA] // 64)
        keys = IndexCache.pack(torch.randn(n * pages * 64, s.index_dim, device=device).bfloat16(), rows_per_page=64)
        q = torch.randn(n, s.index_heads, s.index_dim, device=device).bfloat16()
        codes, weights = quantize_queries(q, self.at["others"][4].float())
        lengths = torch.full((n,), pages * 64, dtype=torch.int32, device=device)
        table = torch.randperm(n * pages, device=device).int().view(n, pages)

        def ours() -> Callable[[], Tensor]:
            given = dict(lengths=lengths, block_table=table)
            return lambda: dsv4.index_topk(codes, keys, weights, s.topk, **given)

        def theirs() -> Callable[[], Tensor]:
            gemm = peers.DeepGEMM()
            if not gemm:
                raise ImportError("not installed")
            scores = gemm.paged(codes.unsqueeze(1), keys.page_view(), weights, lengths[:, None].contiguous(), table)
            return lambda: torch.topk(scores(), s.topk, -1).indices

        yield "dsv4", ours
        yield "DeepGEMM and torch.topk", theirs


def humming_of(experts: dsv4.Fp4Experts) -> Callable[[], Any]:
    """Return a function that gives the peer's layer of these experts, made once."""

    @cache
    def made() -> Any:
        from dsv4.bench.humming import Humming

        return Humming(experts.unpack(), 128)

    return made


def repeatable(part: Callable[[], Any], at: dict[str, Any], alive: list) -> Callable[[], None]:
    """The part from what is there now, as often as it is called: a part that changes the streams would otherwise begin
    with what the call before made, which a graph reads when it is gone. What a capture makes has no values, so the
    next part begins with these, too."""
    values = dict(at)
    alive.append(values)

    def call() -> None:
        at.update(values)
        part()
        alive.append(dict(at))
        at.update(values)

    return call


# The table of the documents: its rows, and the parts of a layer that each adds up.
ROWS = {
    "streams and norms": ("streams and norm", "streams back", "streams and norm, 2nd", "streams back, 2nd"),
    "projections before and after attention": ("projections", "output projection"),
    "rotation, window row, compressor": ("rotation, window row", "compressor"),
    "indexer": ("indexer",),
    "attention": ("attention",),
    "router": ("router",),
    "experts and the shared one": ("experts and shared expert",),
}
PEERS = {"attention": "FlashMLA", "indexer": "DeepGEMM and torch.topk", "routed experts": "Humming"}


def mean(times: dict[str, float], part: str, by: str = "") -> float | None:
    """Of a part, over the layers of the model; None where a kind that has this part was not timed with it."""
    kinds = {kind for kind in KINDS if any(name.startswith(f"{kind}|{part}") for name in times)}
    names = {kind: f"{kind}|{part}" + (f"|{by}" if by else "") for kind in kinds}
    if not kinds or not all(name in times for name in names.values()):
        return None
    return sum(KINDS[kind] * times[name] for kind, name in names.items()) / sum(KINDS.values())


def markdown(batches: dict[str, Any]) -> str:
    """The mean layer of the model: its parts, those that peers have, and a layer of the step."""
    lines = [["us, a layer of the model", *(f"{n}" for n in batches)], ["---"] * (1 + len(batches))]

    def row(name: str, values: list[float | None]) -> None:
        lines.append([name, *("-" if x is None else f"{x:.0f}" if x >= 100 else f"{x:.1f}" for x in values)])

    parts = [one["parts"] for one in batches.values()]
    for name, members in ROWS.items():
        row(name, [sum(mean(times, part) or 0 for part in members) for times in parts])
    row("sum", [sum(mean(times, part) or 0 for members in ROWS.values() for part in members) for times in parts])
    row("a layer in the graph of a step", [one["layer"] for one in batches.values()])
    others = [one.get("beside", {}) for one in batches.values()]
    sums: dict[str, list] = {"dsv4": [], "peers": []}
    for part, peer in PEERS.items():
        for by in ("dsv4", peer):
            where = "all|" if part == "routed experts" else ""
            found = [times.get(f"{where}{part}|{by}") if where else mean(times, part, by) for times in others]
            row(f"{part} alone, {by}", found)
            sums["dsv4" if by == "dsv4" else "peers"].append(found)
    for by, rows in sums.items():
        row(f"these three, {by}", [None if None in column else sum(column) for column in zip(*rows)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def show(record: dict[str, Any]) -> None:
    console, batches = Console(width=120), record["batches"]
    for kind in KINDS:
        table = Table("us", *(f"{n} requests" for n in batches), title=f"a layer {SHORT[kind]}")
        names = [x for x in next(iter(batches.values()))["parts"] if x.startswith(f"{kind}|")]
        for name in names:
            table.add_row(name.split("|")[1], *(f"{one['parts'][name]:.1f}" for one in batches.values()))
        table.add_row("sum", *(f"{sum(one['parts'][x] for x in names):.0f}" for one in batches.values()))
        console.print(table)
    table = Table("us", *(f"{n} requests" for n in batches), title="parts that peers have, by turns")
    for name in dict.fromkeys(x for one in batches.values() for x in (*one.get("beside", {}), *one.get("refused", {}))):
        cells = [one.get("beside", {}).get(name) for one in batches.values()]
        table.add_row(name.replace("|", ", "), *("-" if x is None else f"{x:.1f}" for x in cells))
    console.print(table)
    for n, one in batches.items():
        console.print(f"{n} requests: {one['layer']:.1f} us a layer, of a step through {one['layers']} layers")
        for name, why in one.get("refused", {}).items():
            console.print(f"{n} requests, {name.replace('|', ', ')}: {why}", style="yellow")


def main(
    requests: Annotated[str, typer.Option(help="batches of one token each, separated by commas")] = "1,8,32,128",
    context: Annotated[int, typer.Option(help="tokens that every request has behind it")] = 4096,
    layers: Annotated[int, typer.Option(help="how many; 0: as many as fit, up to the model's 43")] = 0,
    repeats: int = 15,
    to: Annotated[Path | None, typer.Option("--json", help="write the times here")] = None,
    source: Annotated[Path | None, typer.Option("--from", help="print the tables of this file")] = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="with --from: the table of the documents")] = False,
) -> None:
    if source is not None:
        record = json.loads(source.read_text())
        print(markdown(record["batches"])) if as_markdown else show(record)
        return
    if suites.gpu_arch() not in suites.ARCHS:
        raise SystemExit("benchmarks/layer.py needs a GPU that dsv4 has kernels for; dsv4 doctor says which")
    device, s = torch.device("cuda"), Sizes()
    torch.manual_seed(0)
    made = layers_that_fit(s, layers, device)
    record = {"device": torch.cuda.get_device_name(), "context": context, "versions": peers.here(), "batches": {}}
    humming = humming_of(made[0].experts)
    steps: list[Callable[[Batch], dict]] = [lambda b: b.parts(repeats), lambda b: b.beside(repeats, humming)]
    for step in steps:  # first what needs no peer
        for n in requests.split(","):
            begin = time.perf_counter()
            with torch.no_grad():
                found = step(Batch(s, made, int(n), context, device))
            record["batches"].setdefault(n, {}).update(found)
            print(f"{n} requests: {time.perf_counter() - begin:.0f} s", flush=True)
            if to is not None:
                to.write_text(json.dumps(record, indent=1) + "\n")
    show(record)


if __name__ == "__main__":
    typer.run(main)
