"""The attention calls of a vLLM step for DeepSeek-V4-Flash, replayed: the plug-in beside vLLM's FlashMLA class.

    python benchmarks/vllm_replay.py [--json FILE] [--seconds 150]      # a Hopper GPU; FlashMLA where flash_mla imports
    python benchmarks/vllm_replay.py --small                            # a CPU: shapes and agreement alone

Shapes and layouts are those of calls recorded in vLLM 0.32 on a CPU (DSV4_RECORD of tests/engines/vllm_run.py; in
results/vllm-calls.json), with V4-Flash's sizes: pages of 64 window rows, 64 CSA rows and 2 HCA rows; the pages of all
layers side by side in one block, so that a layer's pages lie a block (about 1 MB) apart; lists int32 with the widths
of vLLM's metadata, unused entries -1.

One layer of each kind is measured: window alone (2 in the model), CSA (21), HCA (20); the step is their weighted sum.
Decode: both read the FP8 pages; FlashMLA pads the heads of a rank to 64, dsv4 does not. Prefill, one chunk of 2048
tokens: both read a bf16 workspace (vLLM's gathering into it is in neither time); dsv4 on the pages stands beside.
"its error" is FlashMLA's against fp32 on some queries, "apart" the distance between the two on all of them.
Times: median of CUDA-graph replays with the L2 emptied before each (dsv4.bench), the contenders in turns.
"""

from __future__ import annotations

import argparse
import inspect
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import dsv4
from dsv4.caches.formats import FP8_584
from dsv4.integrations.vllm.v4 import sparse_fwd

LAYERS = {"window": 2, "csa": 21, "hca": 20}
ROWS = {"window": 64, "csa": 64, "hca": 2}  # of a page
WINDOW, TOPK, HCA_ALIGNMENT = 128, 512, 128
PAGE_STEP = 576  # pages begin at multiples of it
SCALE = 512**-0.5


@dataclass(frozen=True)
class Step:
    kind: str  # decode, prefill
    requests: int
    tokens: int  # of each request
    context: int
    heads: int

    def __str__(self) -> str:
        return f"{self.kind} {self.requests} x {self.tokens} at {self.context}, {self.heads} heads"


STEPS = [
    *(Step("decode", b, 1, s, h) for s in (8192, 131072) for b in (1, 16, 128) for h in (8, 64)),
    *(Step("prefill", 1, 2048, s, h) for s in (2048, 32768) for h in (8, 64)),
]
SMALL = [Step("decode", 3, 1, 300, 4), Step("prefill", 1, 40, 300, 4)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--small", action="store_true")
    asked = parser.parse_args()
    device = torch.device("cpu" if asked.small else "cuda")
    begun, results = time.monotonic(), []
    theirs = flashmla() if not asked.small else None
    print("FlashMLA:", "not importable here" if theirs is None else theirs.__name__)
    print(
        f"{'step':44} {'layer':7} {'pages us':>9} {'workspace us':>13} {'FlashMLA us':>12} {'error':>9} {'graph':>6} "
        f"{'its error':>9} {'apart':>9}"
    )
    for step in SMALL if asked.small else STEPS:
        used = "pages" if step.kind == "decode" else "workspace"  # by the plug-in
        total = {used: 0.0, "flashmla": 0.0}
        for kind, count in LAYERS.items():
            if time.monotonic() - begun > asked.seconds:
                print("out of time")
                break
            one = measure(step, kind, device, theirs)
            results.append(asdict(step) | dict(layer=kind) | one)
            cells = [one.get(k) for k in ("pages", "workspace", "flashmla")]
            text = " ".join(f"{'-' if c is None else f'{c:.1f}':>{w}}" for c, w in zip(cells, (9, 13, 12)))
            both = " ".join(f"{one[k]:9.1e}" for k in ("their_error", "apart") if k in one)
            print(f"{step!s:44} {kind:7} {text} {one['error']:9.1e} {one['graph']!s:>6} {both}", flush=True)
            for name in total:
                total[name] += count * (one.get(name) or float("nan"))
            if asked.json:
                asked.json.write_text(json.dumps(results, indent=1))
        if not asked.small:
            print(f"{step!s:44} {'step':7} {f'{used} {total[used]:.0f}':>23} {total['flashmla']:12.0f}")
    # Each is rounded to bf16 at the end, and so are the weights of its rows before the second product.
    wrong = [r for r in results if not max(r["error"], r.get("apart", 0.0)) < 2**-6 or r["graph"] is False]
    print(f"{len(results) - len(wrong)} passed, {len(wrong)} failed")
    raise SystemExit(bool(wrong))


def flashmla():
    try:
        import flash_mla
    except Exception as why:  # a binary for another torch fails in many ways
        print(f"flash_mla: {type(why).__name__}: {why}")
        return None
    return flash_mla


def measure(step: Step, kind: str, device: torch.device, theirs) -> dict:
    """Microseconds of each contender, the error against the oracle, and whether a captured call gives the same."""
    torch.manual_seed(0)
    n = step.requests * step.tokens
    q = torch.randn(n, step.heads, 512, device=device, dtype=torch.bfloat16)
    sink = torch.randn(step.heads, device=device)
    pages = {"window": pool(step, "window", device)}
    lists = {"window": window_lists(step, device)}
    if kind != "window":
        pages[kind] = pool(step, kind, device)
        lists[kind] = compressed_lists(step, kind, device)
    out = torch.empty_like(q)

    def from_pages():
        more = {}
        if kind != "window":
            more = dict(
                compressed=dsv4.Fp8Cache.from_pages(pages[kind]),
                compressed_indices=lists[kind][0],
                compressed_lengths=lists[kind][1],
            )
        dsv4.v4_attention(
            q, dsv4.Fp8Cache.from_pages(pages["window"]), lists["window"][0], window_lengths=lists["window"][1],
            sink=sink, softmax_scale=SCALE, out=out, **more,
        )  # fmt: skip

    contenders = {"pages": from_pages}
    if step.kind == "prefill":
        kv, combined, lengths = workspace(pages, lists, kind)
        contenders["workspace"] = lambda: sparse_fwd(
            q=q, kv=kv, indices=combined, sm_scale=SCALE, attn_sink=sink, topk_length=lengths, out=out
        )
    found: dict = dict(error=0.0, graph=None)
    for call in contenders.values():
        out.zero_()
        call()
        found["error"] = max(found["error"], error(step, kind, q, sink, pages, lists, out))
        if device.type != "cpu":
            found["graph"] = found["graph"] is not False and captured(call, out)
    if device.type == "cpu":
        return found
    if theirs is not None:
        if step.kind == "decode":
            contenders["flashmla"] = padded_decode(theirs, q, sink, pages, lists, kind)
        else:
            wide, full = padded(q, sink)
            contenders["flashmla"] = lambda: theirs.flash_mla_sparse_fwd(
                wide, kv, combined, SCALE, 512, full, lengths, **legacy(theirs.flash_mla_sparse_fwd)
            )
        found |= compared(contenders["flashmla"], out, lambda x: error(step, kind, q, sink, pages, lists, x))
    from dsv4.bench import time_call

    for _ in range(2):  # in turns; the better of two medians
        for name, call in contenders.items():
            try:
                found[name] = min(found.get(name) or float("inf"), time_call(call))
            except Exception as why:
                print(f"{name}: {type(why).__name__}: {str(why)[:200]}")
                found[name] = None
    return found


def compared(flashmla, out: torch.Tensor, error_of) -> dict:
    """FlashMLA's own error, and its largest distance from dsv4's `out` relative to the largest value."""
    try:
        got = flashmla()[0].view(len(out), -1, 512)[:, : out.shape[1]]
    except Exception as why:
        print(f"flashmla: {type(why).__name__}: {str(why)[:200]}")
        return {}
    return dict(their_error=error_of(got), apart=float((got.float() - out.float()).abs().max() / out.abs().max()))


def rows_at(pages: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """bf16 rows [n, 512] of the slots [n]."""
    cache = dsv4.Fp8Cache.from_pages(pages)
    page, row = slots.long() // cache.rows_per_page, slots.long() % cache.rows_per_page
    return FP8_584.dequantize(cache.data_view()[page, row], cache.scale_view()[page, row], torch.bfloat16)


def pool(step: Step, kind: str, device: torch.device) -> torch.Tensor:
    """uint8 pages [blocks, rows, 584] whose stride is a block with the pages of all layers of its group."""
    rows, blocks = ROWS[kind], step.requests * pages_of(step, kind)
    page = -(-rows * 584 // PAGE_STEP) * PAGE_STEP
    stride = 43 * page if kind == "window" else 21 * (-(-64 * 584 // PAGE_STEP) * PAGE_STEP + 1152)
    if device.type == "cpu" or blocks * stride > 24 << 30:
        stride = 2 * page  # the same kind of layout, but it fits
    flat = torch.zeros(blocks * stride, dtype=torch.uint8, device=device)
    pages = flat.as_strided((blocks, rows, 584), (stride, 584, 1))
    cache, total = dsv4.Fp8Cache.from_pages(pages), blocks * rows
    for first in range(0, total, 1 << 16):
        slots = torch.arange(first, min(first + (1 << 16), total), device=device)
        cache.write(slots, torch.randn(len(slots), 512, device=device, dtype=torch.bfloat16))
    return pages


def pages_of(step: Step, kind: str) -> int:
    """The pages of one request. vLLM frees window pages that no query will see again; they are taken in turns here."""
    return (step.tokens + WINDOW - 2) // 64 + 2 if kind == "window" else -(-step.context // 256)


def positions(step: Step, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(request, place in its sequence) of every query."""
    request = torch.arange(step.requests, device=device).repeat_interleave(step.tokens)
    place = torch.arange(step.context - step.tokens, step.context, device=device).repeat(step.requests)
    return request, place


def slots(step: Step, kind: str, request: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Row numbers of a request -> slots of the pool, by a block table that is not in order; -1 stays."""
    rows, count = ROWS[kind], pages_of(step, kind)
    order = torch.randperm(step.requests * count, generator=torch.Generator().manual_seed(1))
    block = order.to(row.device).view(-1, count)[request[:, None], row.clamp_min(0) // rows % count]
    return torch.where(row >= 0, block * rows + row % rows, -1).int()


def window_lists(step: Step, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    request, place = positions(step, device)
    row = (place - WINDOW + 1).clamp_min(0)[:, None] + torch.arange(WINDOW, device=device)
    row = torch.where(row <= place[:, None], row, -1)
    return slots(step, "window", request, row), (place + 1).clamp_max(WINDOW).int()


def compressed_lists(step: Step, kind: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    request, place = positions(step, device)
    if kind == "csa":
        there = (place + 1) // 4
        scores = torch.rand(len(place), int(there.max()), device=device)
        scores.masked_fill_(torch.arange(scores.shape[1], device=device) >= there[:, None], -1.0)
        best = scores.topk(min(TOPK, scores.shape[1]), -1)
        row = torch.where(best.values >= 0, best.indices, -1)
        row = torch.nn.functional.pad(row, (0, TOPK - row.shape[1]), value=-1)
        return slots(step, kind, request, row), there.clamp_max(TOPK).int()
    there = (place + 1) // 128
    width = max(HCA_ALIGNMENT, -(-int(there.max()) // HCA_ALIGNMENT) * HCA_ALIGNMENT)
    row = torch.arange(width, device=device).expand(len(place), width)
    return slots(step, kind, request, torch.where(row < there[:, None], row, -1)), there.int()


def padded(q: torch.Tensor, sink: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """64 or 128 heads, as FlashMLA wants them and vLLM gives them."""
    heads = 64 if q.shape[1] <= 64 else 128
    more = heads - q.shape[1]
    return (
        torch.nn.functional.pad(q, (0, 0, 0, more)).contiguous(),
        torch.nn.functional.pad(sink, (0, more), value=float("-inf")),
    )


def padded_decode(theirs, q, sink, pages, lists, kind):
    wide, full = padded(q, sink)
    schedule = theirs.get_mla_metadata()[0]
    more = {}
    if kind != "window":
        more = dict(
            extra_k_cache=pages[kind].unsqueeze(2),
            extra_indices_in_kvcache=lists[kind][0][:, None].contiguous(),
            extra_topk_length=lists[kind][1],
        )

    def call():
        return theirs.flash_mla_with_kvcache(
            q=wide[:, None], k_cache=pages["window"].unsqueeze(2), block_table=None, cache_seqlens=None, head_dim_v=512,
            tile_scheduler_metadata=schedule, softmax_scale=SCALE, is_fp8_kvcache=True,
            indices=lists["window"][0][:, None].contiguous(), topk_length=lists["window"][1], attn_sink=full,
            **legacy(theirs.flash_mla_with_kvcache), **more,
        )  # fmt: skip

    return call


def legacy(function) -> dict:
    """SGLang's wheel of FlashMLA has the Hopper kernels behind a switch."""
    return dict(use_legacy=True) if "use_legacy" in inspect.signature(function).parameters else {}


def workspace(pages, lists, kind) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rows bf16 [rows, 1, 512], joined lists [n, 1, W], lengths): compressed rows first, as vLLM lays them."""
    kinds = [k for k in (kind, "window") if k in lists]
    kv, first, parts, lengths = [], 0, [], 0
    for k in dict.fromkeys(kinds):
        used, at = lists[k][0].unique(return_inverse=True)
        rows = rows_at(pages[k], used.clamp_min(0))
        kv.append(rows)
        parts.append(torch.where(lists[k][0] >= 0, at.int() + first, -1))
        lengths = lengths + (lists[k][0] >= 0).sum(1)
        first += len(used)
    joined = torch.cat(parts, 1)
    order = (joined < 0).int().argsort(dim=1, stable=True)  # entries first, -1 behind
    joined = joined.gather(1, order)
    joined = torch.nn.functional.pad(joined, (0, -joined.shape[1] % 128), value=-1)
    return torch.cat(kv)[:, None].contiguous(), joined[:, None].int().contiguous(), lengths.int()


def error(step, kind, q, sink, pages, lists, out) -> float:
    """The error of some queries against fp32, relative to the largest value; rows are gathered here."""
    worst = 0.0
    for n in {0, len(q) // 2, len(q) - 1}:
        rows = []
        for k, (indices, lengths) in lists.items():
            some = indices[n, : int(lengths[n])]
            rows.append(rows_at(pages[k], some[some >= 0]).float())
        keys = torch.cat(rows)
        scores = q[n].float() @ keys.T * SCALE
        weights = torch.softmax(torch.cat([scores, sink[:, None]], 1), -1)[:, :-1]
        wanted = weights @ keys
        worst = max(worst, float((out[n].float() - wanted).abs().max() / wanted.abs().max()))
    return worst


def captured(call, out: torch.Tensor) -> bool:
    """Whether the call in a CUDA graph writes what it writes outside."""
    wanted = out.clone()
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        call()
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    return bool(torch.equal(out, wanted))


if __name__ == "__main__":
    main()
