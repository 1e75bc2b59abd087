"""index_topk, compress and rows into FP8 pages on a GPU, beside torch's own operations for the same.

    python benchmarks/index.py [text]          # needs a Hopper GPU; only cases whose name contains the text

The indexer has 64 heads of 128 dims; keys are bf16 in pages of 64 rows, every request has its own, and all are seen.
Median of CUDA-graph replays, the L2 emptied before each (dsv4.bench). FLOP = 2 x queries x keys x 64 x 128; bytes =
keys, each read once. torch: bmm in bf16, relu, weights, sum, topk of contiguous keys; its lists are others where
rounding to bf16 made other scores; for compress, the package's torch code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import dsv4
from dsv4 import suites
from dsv4.bench import time_call
from dsv4.compress import api as compressor
from dsv4.reference import rope_table
from dsv4.runtime import dispatch

HEADS, DIMS, PAGE = 64, 128, 64
# requests, queries of each, keys of each, topk
INDEX = (
    (1, 1, 16384, 512), (1, 1, 65536, 512), (32, 1, 16384, 512), (32, 1, 65536, 512), (128, 1, 16384, 512),
    (128, 1, 65536, 512), (128, 1, 16384, 1024), (32, 2, 16384, 512), (32, 4, 16384, 512), (1, 4096, 16384, 512),
    (1, 4096, 16384, 1024),
)  # fmt: skip
COMPRESS = (("csa", 512, 4, True), ("index keys", 128, 4, True), ("hca", 512, 128, False))


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def index_case(requests: int, each: int, keys: int, topk: int) -> tuple[float, float, float]:
    """Microseconds of dsv4, of torch, of torch.topk alone."""
    n, pages = requests * each, keys // PAGE
    q, weights, pool = bf16(n, HEADS, DIMS), bf16(n, HEADS), bf16(requests * pages, PAGE, DIMS)
    table = torch.randperm(requests * pages, device="cuda").int().view(requests, pages)
    lengths = torch.full((n,), keys, dtype=torch.int32, device="cuda")
    starts = torch.arange(0, n + 1, each, dtype=torch.int32, device="cuda") if each > 1 else None
    out = torch.empty(n, topk, dtype=torch.int32, device="cuda")
    plan = dsv4.plan(dsv4.index_topk, batch=n, q_heads=HEADS, kv_heads=1, head_dim=DIMS, max_seqlen_k=keys)
    ours = time_call(
        lambda: dsv4.index_topk(
            q, pool, weights, topk, lengths=lengths, block_table=table, request_starts=starts, out=out, plan=plan,
            backend="cuda",
        )
    )  # fmt: skip
    rows, heads = pool.view(requests, keys, DIMS), q.view(requests, each * HEADS, DIMS)
    w = weights.view(requests, each, HEADS, 1)

    def scores(some: slice) -> torch.Tensor:
        products = torch.bmm(heads[:, some.start * HEADS : some.stop * HEADS], rows.mT).relu_()
        return (products.view(requests, -1, HEADS, keys) * w[:, some]).sum(2)

    step = max(1, min(each, (4 << 30) // (requests * HEADS * keys * 2)))  # 4 GB of products at a time
    parts = [slice(begin, begin + step) for begin in range(0, each, step)]
    theirs = time_call(lambda: [torch.topk(scores(some), topk, -1) for some in parts], 5)
    made = torch.randn(n, keys, device="cuda")
    return ours, theirs, time_call(lambda: torch.topk(made, topk, -1), 5)


def compress_case(d: int, m: int, overlap: bool, tokens: int) -> tuple[float, float]:
    """Microseconds of the kernel and of the torch code: a prompt, or the token that finishes a row."""
    width = d * (1 + overlap)
    rest: dict[str, Any] = dict(
        position_bias=torch.randn(m, width, device="cuda"), norm_weight=torch.rand(d, device="cuda"),
        cos_sin=rope_table(8192, 64, 160000.0, factor=16.0).cuda(),
    )  # fmt: skip
    state = None
    if tokens == 1:
        _, state = dsv4.compress(bf16(4 * m - 1, width), bf16(4 * m - 1, width), **rest)
    kv, gate = bf16(tokens, width), bf16(tokens, width)
    given = (*rest.values(), 1e-6, kv.dtype)
    torch_code = time_call(lambda: compressor._in_torch(kv, gate, state, given), 5)
    return time_call(lambda: dsv4.compress(kv, gate, **rest, state=state)), torch_code


def write_case(rows: int) -> tuple[float, float]:
    """Microseconds of the kernel, and of what torch does of it without waiting for the device: the quantisation."""
    cache, x = dsv4.Fp8Cache.empty(200, 64, device="cuda"), bf16(rows, 512)
    slots = torch.randperm(cache.rows, device="cuda")[:rows]
    return time_call(lambda: cache.write(slots, x)), time_call(lambda: dsv4.caches.quantize_rows(x))


def table_of(title: str, names: tuple[str, ...]) -> Table:
    table = Table(title=title)
    for n, name in enumerate(names):
        table.add_column(name, justify="left" if n == 0 else "right")
    return table


def main() -> int:
    if suites.gpu_arch() != "sm_90a":
        print("benchmarks/index.py needs a Hopper GPU; dsv4 doctor says what this machine can run")
        return 1
    assert dispatch.module_here("index", torch.device("cuda")) is not None
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    console = Console(width=120)
    found = table_of(
        torch.cuda.get_device_name(), ("case", "us", "TFLOP/s", "GB/s", "torch us", "dsv4 is", "torch.topk us")
    )
    for case in INDEX:
        requests, each, keys, topk = case
        name = f"index {requests} x {each} queries x {keys} keys, topk {topk}"
        if wanted in name:
            ours, theirs, choice = index_case(*case)
            flops, size = 2.0 * requests * each * keys * HEADS * DIMS, 2.0 * requests * keys * DIMS
            found.add_row(name, f"{ours:.1f}", f"{flops / ours / 1e6:.0f}", f"{size / ours / 1e3:.0f}", f"{theirs:.1f}",
                          f"{theirs / ours:.1f}x", f"{choice:.1f}")  # fmt: skip
    console.print(found)
    small = table_of("compress, write", ("case", "us", "torch us", "dsv4 is"))
    calls: list[tuple[str, Callable[[], tuple[float, float]]]] = [
        (f"compress {kind} {tokens} tokens", lambda sizes=sizes, tokens=tokens: compress_case(*sizes, tokens))
        for kind, *sizes in COMPRESS
        for tokens in (1, 4096)
    ]
    calls += [(f"write {rows} FP8 rows", lambda rows=rows: write_case(rows)) for rows in (1, 128, 4096)]
    for name, call in calls:
        if wanted in name:
            ours, theirs = call()
            small.add_row(name, f"{ours:.1f}", f"{theirs:.1f}", f"{theirs / ours:.1f}x")
    console.print(small)
    return 0


if __name__ == "__main__":
    sys.exit(main())
