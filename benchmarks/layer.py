"""Where the time of a DeepSeek-V4-Flash layer goes: decode on one GPU, layers of real size with random weights.

    PYTHONPATH=examples python benchmarks/layer.py [--requests 1,8,32,128] [--context 4096] [--layers 0] [--json file]

A layer is all of it: residual streams (mHC), norms, projections, compressor, indexer, attention over FP8 rows, router,
256 FP4 experts and the shared one. Linear maps are bf16 by cuBLAS, in the checkpoint FP8. As many layers as fit into
memory stand one after the other, sliding (SWA), sparse (CSA) and heavily compressed (HCA) by turns, and a step through
all of them is one CUDA graph: its time by the number of layers is what a layer costs. Then each part of one layer of a
kind alone, a graph with an empty L2 before it. Parts overlap in the step, and alone they have the launch of a graph in
their times, so their sum is more than the layer.

Where they can be imported (dsv4.bench.peers), peers take turns with these parts, on rows and keys at random: FlashMLA
attends, without the inverse rotation of its output, DeepGEMM and torch.topk choose rows by FP8 keys, Humming computes
the routed experts with scales per 128, its slots sorted beforehand.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
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
from dsv4.bench.timing import captured, time_turns
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
                fn=weight((2 + h) * h, width, device=device),
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
            at["mix"], at["x"] = parts.collapse(at["streams"], self.mixers[n])
            at["x"] = parts.norm(at["x"], self.norms[n])

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
    room = torch.cuda.mem_get_info()[0] - (16 << 30) if device.type == "cuda" else 0
    each = first.nbytes + (500 << 20)
    count = min(most or sum(KINDS.values()), 1 + max(room // each, 2))
    for n in range(1, count):
        copied = replace(first, **{k: v.clone() for k, v in vars(first).items() if isinstance(v, Tensor)})
        layers.append(Layer(s, kinds[n] if n < 3 else kinds[1 + n % 2], n, copied, device))
    return layers


@torch.no_grad()
def measured(s: Sizes, layers: list[Layer], requests: int, context: int, device: torch.device, repeats: int) -> dict:
    step = served(s, layers, requests, context, device, "auto")
    at = {"streams": torch.randn(requests, s.streams, s.hidden, device=device).bfloat16()}
    chains = [list(layer.parts(step, at)) for layer in layers]

    def whole() -> None:
        at["streams"] = start
        for chain in chains:
            for _, part in chain:
                part()

    start = at["streams"]
    whole()
    if device.type != "cuda":
        return {"finite": bool(at["streams"].isfinite().all())}
    runs = {"step": captured(whole).replay}
    alive: list = [dict(at)]  # a graph reads and writes what it was captured with
    for kind in KINDS:
        n = next(n for n, layer in enumerate(layers) if layer.kind == kind)
        at["streams"] = start
        for name, part in chains[n]:
            part()
            runs[f"{kind}|{name}"] = captured(repeatable(part, at, alive)).replay
        for name, call in peers_of(s, kind, context, at, layers[n].experts):
            runs[f"{kind} beside|{name}"] = captured(call).replay
            alive.append(call)  # and with it what its graph reads
    times = {name: x.microseconds for name, x in time_turns(runs, repeats).items()}
    return {"layer": times.pop("step") / len(layers), "parts": times, "layers": len(layers)}


def peers_of(s: Sizes, kind: str, context: int, at: dict[str, Any], experts: Any) -> Iterator[tuple[str, Callable]]:
    """(what a peer does, the call), for the parts of a layer that a peer has."""
    n, device = len(at["x"]), at["x"].device
    compressed = {SWA: 0, CSA: min(s.topk, context // RATIOS[CSA]), HCA: context // RATIOS[HCA]}[kind]
    if flash := peers.FlashMLA():
        caches = [pages_of(dsv4.Fp8Cache.pack(torch.randn(n * 1024, s.dim, device=device).bfloat16())) for _ in "wc"]
        lists = [
            torch.randint(0, n * 1024, (n, -(-rows // 64) * 64), dtype=torch.int32, device=device)
            for rows in (s.window, compressed)
        ]
        if compressed:
            lists[1][:, compressed:] = -1
        others = (caches[1], lists[1]) if compressed else (None, None)
        sink = torch.zeros(s.heads, device=device)
        yield "attention, FlashMLA", flash.decode(at["turned"].contiguous(), caches[0], lists[0], *others, sink)
    gemm = peers.DeepGEMM()
    if gemm and kind == CSA:
        pages = -(-context // RATIOS[CSA] // 64)
        keys = IndexCache.pack(torch.randn(n * pages * 64, s.index_dim, device=device).bfloat16())
        q, weights = quantize_queries(
            torch.randn(n, s.index_heads, s.index_dim, device=device), at["others"][4].float()
        )
        lengths = torch.full((n, 1), pages * 64, dtype=torch.int32, device=device)
        table = torch.randperm(n * pages, device=device).int().view(n, pages)
        scores = gemm.paged(q.unsqueeze(1), keys.page_view(), weights, lengths, table)
        yield "indexer, DeepGEMM and torch.topk", lambda: torch.topk(scores(), s.topk, -1).indices
    x, ids, weights = at["x"], at["ids"], at["weights"]
    if peers.module("Humming") is not None:
        from dsv4.bench.humming import Humming

        call = Humming(experts.unpack(), 128).call(x, ids, weights, "indexed")
        yield "routed experts, Humming", call
    yield "routed experts, dsv4", lambda: dsv4.moe(x, experts, ids, weights)


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


def main(
    requests: Annotated[str, typer.Option(help="batches of one token each, separated by commas")] = "1,8,32,128",
    context: Annotated[int, typer.Option(help="tokens that every request has behind it")] = 4096,
    layers: Annotated[int, typer.Option(help="how many; 0: as many as fit, up to the model's 43")] = 0,
    repeats: int = 15,
    to: Annotated[Path | None, typer.Option("--json", help="write the times here")] = None,
) -> None:
    if suites.gpu_arch() not in suites.ARCHS:
        raise SystemExit("benchmarks/layer.py needs a GPU that dsv4 has kernels for; dsv4 doctor says which")
    device, s = torch.device("cuda"), Sizes()
    torch.manual_seed(0)
    made = layers_that_fit(s, layers, device)
    found = {n: measured(s, made, n, context, device, repeats) for n in map(int, requests.split(","))}
    if to is not None:
        to.write_text(json.dumps(found, indent=1) + "\n")
    console = Console(width=120)
    for kind in KINDS:
        table = Table("us", *(f"{n} requests" for n in found), title=f"a layer {SHORT[kind]}, {context} tokens each")
        for group in (kind, f"{kind} beside"):
            names = [x for x in next(iter(found.values()))["parts"] if x.startswith(f"{group}|")]
            for name in names:
                table.add_row(name.split("|")[1], *(f"{found[n]['parts'][name]:.1f}" for n in found))
            if group == kind:
                table.add_row("sum", *(f"{sum(found[n]['parts'][x] for x in names):.0f}" for n in found))
        console.print(table)
    for n, one in found.items():
        console.print(f"{n} requests: {one['layer']:.1f} us a layer, of a step through {one['layers']} layers")


if __name__ == "__main__":
    typer.run(main)
