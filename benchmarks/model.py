"""DeepSeek-V4 end to end on a GPU: a random model with the attention of V4-Flash, few layers and small experts.

    PYTHONPATH=examples python benchmarks/model.py [text]          # only parts whose name contains the text

Decode: batches of requests, each with tokens behind it, one token each per step. Their rows are random and were
never computed: nothing here depends on what they hold. Three ways through the same model:

    graph      deepseek_v4.paged_model, a step is one CUDA graph
    no graph   the same step, launched operation by operation
    eager      transformers' own attention and cache

Time of a step: median of events around it, tokens fed from the host as a server does. Attention of a layer (the whole
DeepseekV4Attention: projections, norms, window, compressor, indexer, attention): a CUDA graph of that layer alone, with
an empty L2; for eager, events around the layer within a step. Prefill: one prompt in chunks.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator

import torch
from rich.console import Console
from rich.table import Table

from deepseek_v4 import paging
from deepseek_v4.paged_model import PagedModel
from deepseek_v4.step import CSA, HCA
from dsv4 import suites
from dsv4.bench import time_call

SWA = "sliding_attention"
LAYERS = [SWA, CSA, HCA, CSA, HCA]  # V4-Flash has 2 + 21 + 20
DECODE = [(batch, tokens) for tokens in (4096, 65536) for batch in (1, 32, 128)]
PROMPT, CHUNKS = 16384, (2048, 8192)


def build():
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV4Config(
        vocab_size=8192, hidden_size=4096, moe_intermediate_size=256, num_hidden_layers=len(LAYERS),
        num_attention_heads=64, head_dim=512, q_lora_rank=1024, qk_rope_head_dim=64, num_experts_per_tok=2,
        n_routed_experts=8, max_position_embeddings=1 << 20, layer_types=LAYERS,
        compress_rates={CSA: 4, HCA: 128}, sliding_window=128, o_groups=8, o_lora_rank=1024, index_n_heads=64,
        index_head_dim=128, index_topk=512, attn_implementation="eager", experts_implementation="grouped_mm",
        rope_parameters={"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 65536,
                         "beta_fast": 32, "beta_slow": 1},
    )  # fmt: skip
    with torch.device("cuda"):
        model = DeepseekV4ForCausalLM(config).eval()
    with torch.no_grad():
        for name, x in model.named_buffers():
            if name.endswith("tid2eid"):
                x.random_(0, 8)
    return model.bfloat16()


def resumed(model, batch: int, tokens: int, graphs: bool) -> PagedModel:
    """An engine whose requests have this many tokens behind them."""
    room = batch * (tokens + 512)
    served = PagedModel(
        model, tokens=room, requests=batch, chunk=max(batch, 128), context=tokens + 512, rows="fp8", graphs=graphs
    )
    for pools in served.pools:
        if "index" in pools:  # equal scores would be a case of their own
            pools["index"].normal_()
    for r in range(batch):
        request = paging.Request(served.places.lines.take(1)[0])
        # Pages of the window that the next token sees, and all token pages.
        request.first = max(0, tokens - served.places.window + 1) // served.places.window_page
        served.places.extend(request, tokens)
        request.tokens = tokens
        served.requests[r] = request
    return served


def median_ms(step: Callable[[], object], repeats: int = 12) -> float:
    times = []
    for n in range(repeats + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        step()
        end.record()
        end.synchronize()
        if n >= 3:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


@torch.no_grad()
def paged(model, batch: int, tokens: int, graphs: bool) -> tuple[float, dict[str, float]]:
    """(ms of a step, us of the attention of a layer by kind)"""
    served = resumed(model, batch, tokens, graphs)
    ms = median_ms(lambda: served.step({r: [1] for r in range(batch)}), 12 if graphs else 5)
    if not graphs:
        return ms, {}
    step = next(iter(served.decoders.values())).step()
    hidden = torch.randn(1, batch, 4096, device="cuda", dtype=torch.bfloat16)
    layers = {kind: model.model.layers[LAYERS.index(kind)].self_attn for kind in (SWA, CSA, HCA)}
    return ms, {
        kind: time_call(lambda layer=layer: step.dsv4_attention(layer, hidden), 15) for kind, layer in layers.items()
    }


@torch.no_grad()
def eager(model, batch: int, tokens: int) -> tuple[float, dict[str, float]]:
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    for layer, kind in zip(cache.layers, LAYERS):
        fill(layer, kind, batch, tokens)
    ids = torch.ones(batch, 1, dtype=torch.long, device="cuda")
    seen: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
    hooks = []
    for layer, kind in zip(model.model.layers, LAYERS):

        def before(*_, kind=kind, **__):
            seen.append((kind, torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
            seen[-1][1].record()

        hooks.append(layer.self_attn.register_forward_pre_hook(before))
        hooks.append(layer.self_attn.register_forward_hook(lambda *_: seen[-1][2].record()))
    try:
        ms = median_ms(lambda: model(ids, past_key_values=cache, use_cache=True), 3)
    finally:
        for hook in hooks:
            hook.remove()
    recent = seen[-len(LAYERS) :]
    return ms, {kind: 1e3 * begin.elapsed_time(end) for kind, begin, end in recent}


def fill(layer, kind: str, batch: int, tokens: int) -> None:
    """The state of a cache layer of transformers after this many tokens, a multiple of 128."""

    def rows(n, width):
        return torch.randn(batch, n, width, device="cuda", dtype=torch.bfloat16)

    keys = rows(127, 512)[:, None]
    layer.lazy_initialization(keys, keys)
    layer.keys = layer.values = keys
    layer.cumulative_length = tokens
    if kind == SWA:
        return
    rate = 4 if kind == CSA else 128
    for name in layer.compressed_kv:
        width = 512 if name == "compressor" else 128
        layer.compressed_kv[name], layer.entry_count[name] = rows(tokens // rate, width), tokens // rate
        if kind == CSA:
            layer.overlap_kv[name], layer.overlap_gate[name] = rows(4, width), rows(4, width)


@torch.no_grad()
def prefill(model, chunk: int) -> Iterator[tuple[str, float]]:
    """(way, seconds for a prompt)"""
    from transformers import DynamicCache

    prompt = torch.randint(0, 8192, (PROMPT,))
    served = PagedModel(model, tokens=PROMPT, requests=1, chunk=chunk, rows="fp8")

    def ours():
        for some in prompt.split(chunk):
            served.step({"a": some})
        served.drop("a")

    yield "dsv4", median_ms(ours, 3) / 1e3

    def theirs():
        cache = DynamicCache(config=model.config)
        for some in prompt.cuda().split(chunk):
            model(some[None], past_key_values=cache, use_cache=True, logits_to_keep=1)

    try:
        yield "eager", median_ms(theirs, 1) / 1e3
    except torch.OutOfMemoryError:
        yield "eager", float("nan")


def main() -> int:
    if suites.gpu_arch() not in suites.ARCHS:
        print("benchmarks/model.py needs a GPU that dsv4 has kernels for; dsv4 doctor says what this machine can run")
        return 1
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    model = build()
    console = Console(width=110)
    ways = {
        "graph": lambda batch, tokens: paged(model, batch, tokens, True),
        "no graph": lambda batch, tokens: paged(model, batch, tokens, False),
        "eager": lambda batch, tokens: eager(model, batch, tokens),
    }
    rows = []
    for way, measure in ways.items():
        for batch, tokens in DECODE:
            name = f"decode {batch} x {tokens}, {way}"
            if wanted not in name:
                continue
            try:
                ms, layers = measure(batch, tokens)
            except torch.OutOfMemoryError:
                row = [way, "out of memory"]
            else:
                each = [f"{layers[kind]:.0f}" if kind in layers else "" for kind in (SWA, CSA, HCA)]
                row = [way, f"{ms:.2f}", f"{1e3 * batch / ms:.0f}", *each]
            finally:
                torch.cuda.empty_cache()
            console.print(name, *row[1:], highlight=False)
            rows.append(((tokens, batch), [f"{batch} x {tokens}", *row]))
    title = f"{torch.cuda.get_device_name()}, {len(LAYERS)} layers, FP8 rows"
    table = Table("decode", "way", "ms / step", "tokens / s", "us / layer: SWA", "CSA", "HCA", title=title)
    for _, row in sorted(rows, key=lambda row: row[0]):
        table.add_row(*row)
    if rows:
        console.print(table)
    if wanted in "prefill":
        table = Table(f"prefill {PROMPT}, chunks of", "way", "s", "tokens / s")
        for chunk in CHUNKS:
            for way, seconds in prefill(model, chunk):
                table.add_row(str(chunk), way, f"{seconds:.3f}", f"{PROMPT / seconds:.0f}")
        console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
