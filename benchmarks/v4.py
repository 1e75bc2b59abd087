"""V4 attention on a GPU: CSA-like problems, rows picked at random from a pool larger than the L2 cache.

    python benchmarks/v4.py                 # needs a GPU that dsv4 has V4 kernels for

Median of CUDA-graph replays. FLOP = 4 x queries x heads x rows x 512; bytes = the rows that queries list, each counted
once per query, though the tiles of 64 heads of a query each read them.
"""

from __future__ import annotations

import statistics
import sys

import torch
from rich.console import Console
from rich.table import Table

import dsv4
from dsv4 import reference, suites

POOL = 200_000  # rows: 205 MB in bf16
WINDOW = 128
CASES = (  # queries, heads, compressed rows, Fp8Cache
    (1, 64, 512, False), (1, 64, 512, True), (128, 64, 512, False), (128, 64, 512, True), (128, 128, 1024, True),
    (4096, 64, 512, False), (4096, 64, 512, True), (4096, 128, 1024, False),
)  # fmt: skip


def seconds(call, repeats: int = 10) -> float:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return statistics.median(times)


def measure(queries: int, heads: int, picked: int, fp8: bool) -> tuple[float, float]:
    """(relative error of four queries against the oracle, seconds)"""
    rows = torch.randn(POOL, 512, device="cuda").bfloat16()
    pool = dsv4.Fp8Cache.pack(rows) if fp8 else rows
    plain = pool.unpack()[:POOL] if fp8 else rows
    q = torch.randn(queries, heads, 512, device="cuda").bfloat16()
    window = torch.randint(0, POOL, (queries, WINDOW), device="cuda").int()
    listed = torch.randint(0, POOL, (queries, picked), device="cuda").int()
    out = dsv4.v4_attention(q, pool, window, pool, listed)
    some = torch.arange(0, queries, max(1, queries // 4))
    want, _ = reference.v4_attention(q[some], plain, window[some], plain, listed[some])
    error = float((out[some].double() - want).norm() / want.norm())
    return error, seconds(lambda: dsv4.v4_attention(q, pool, window, pool, listed))


def main() -> int:
    if suites.gpu_arch() != "sm_90a":
        print("benchmarks/v4.py needs a Hopper GPU; dsv4 doctor says what this machine can run")
        return 1
    columns = ("queries", "heads", "rows", "pool", "error", "us", "TFLOP/s", "GB/s")
    table = Table(*columns, title=torch.cuda.get_device_name())
    worst = 0.0
    for queries, heads, picked, fp8 in CASES:
        error, time = measure(queries, heads, picked, fp8)
        worst = max(worst, error)
        seen = WINDOW + picked
        flop, size = 4 * queries * heads * seen * 512, queries * seen * (584 if fp8 else 1024)
        cells = [queries, heads, seen, "fp8" if fp8 else "bf16", f"{error:.1e}", f"{time * 1e6:.1f}"]
        table.add_row(*map(str, cells), f"{flop / time / 1e12:.0f}", f"{size / time / 1e9:.0f}")
    Console().print(table)
    return 0 if worst < 4e-3 else 1


if __name__ == "__main__":
    sys.exit(main())
