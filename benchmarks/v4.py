"""V4 attention on a GPU, beside FlashMLA's recorded time for the same shape on the same kind of GPU.

    python benchmarks/v4.py [text]          # needs a Hopper GPU; only cases whose name contains the text

Rows are picked at random from a pool: of 8192 rows for prefill, as FlashMLA was measured, else larger than the L2.
Median of CUDA-graph replays, the L2 emptied before each (dsv4.bench). FLOP = 4 x queries x heads x rows x 512; bytes =
the rows that queries list, each counted once per query, though the tiles of 64 heads of a query each read them.

FlashMLA: commit 15f13e5 on an H200 (CUDA 13.0, torch 2.11), not measured in this run: sparse decode with its combine
kernel, without its schedule, and sparse prefill; both with a sink.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

import dsv4
from dsv4 import reference, suites
from dsv4.bench import time_call

LARGE = 200_000  # rows: 205 MB in bf16, 117 MB in FP8


@dataclass(frozen=True)
class Case:
    queries: int
    heads: int
    window: int  # rows that a query picks
    compressed: int
    fp8: bool
    pool: int = LARGE
    flashmla: float | None = None  # us

    def __str__(self) -> str:
        kind = "prefill" if self.queries > 128 else "decode"
        rows = f"{self.window}+{self.compressed}" if self.compressed else f"{self.window}"
        return f"{kind} {'fp8' if self.fp8 else 'bf16'} {self.queries} x {self.heads} heads x {rows} of {self.pool}"


CASES = (
    Case(4096, 64, 512, 0, False, 8192, 560), Case(4096, 64, 1024, 0, False, 8192, 1004),
    Case(4096, 64, 2048, 0, False, 8192, 1863), Case(4096, 128, 512, 0, False, 8192, 1103),
    Case(4096, 128, 1024, 0, False, 8192, 2018), Case(4096, 128, 2048, 0, False, 8192, 3767),
    Case(1, 64, 128, 512, True, LARGE, 16.9), Case(32, 64, 128, 512, True, LARGE, 30.0),
    Case(128, 64, 128, 512, True, LARGE, 52.9), Case(1, 64, 128, 1024, True, LARGE, 19.3),
    Case(32, 64, 128, 1024, True, LARGE, 39.4), Case(128, 64, 128, 1024, True, LARGE, 80.7),
    Case(1, 128, 128, 1024, True, LARGE, 19.2), Case(32, 128, 128, 1024, True, LARGE, 50.2),
    Case(128, 128, 128, 1024, True, LARGE, 109.2),
    Case(1, 64, 128, 512, False), Case(128, 64, 128, 512, False), Case(4096, 64, 128, 512, False),
    Case(4096, 64, 128, 512, True), Case(4096, 128, 128, 1024, False),
)  # fmt: skip


def measure(case: Case) -> tuple[float, float]:
    """(relative error of four queries against the oracle, microseconds)"""
    rows = torch.randn(case.pool, 512, device="cuda").bfloat16()
    pool = dsv4.Fp8Cache.pack(rows) if case.fp8 else rows
    plain = pool.unpack()[: case.pool] if case.fp8 else rows
    q = torch.randn(case.queries, case.heads, 512, device="cuda").bfloat16()
    sink = torch.randn(case.heads, device="cuda")

    def pick(count: int) -> torch.Tensor:
        return torch.randint(0, case.pool, (case.queries, count), device="cuda", dtype=torch.int32)

    lists = (pick(case.window), pick(case.compressed)) if case.compressed else (pick(case.window),)
    out = torch.empty_like(q)

    def problem(queries, pool):
        given = [pool, lists[0][queries]] + ([pool, lists[1][queries]] if case.compressed else [])
        return q[queries], *given

    everything = problem(slice(None), pool)
    dsv4.v4_attention(*everything, sink=sink, out=out)
    some = torch.arange(0, case.queries, max(1, case.queries // 4), device="cuda")
    want, _ = reference.v4_attention(*problem(some, plain), sink=sink)
    error = float((out[some].double() - want).norm() / want.norm())
    return error, time_call(lambda: dsv4.v4_attention(*everything, sink=sink, out=out))


def main() -> int:
    if suites.gpu_arch() != "sm_90a":
        print("benchmarks/v4.py needs a Hopper GPU; dsv4 doctor says what this machine can run")
        return 1
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    columns = ("case", "error", "us", "TFLOP/s", "GB/s", "FlashMLA us", "dsv4 is")
    table = Table(*columns, title=torch.cuda.get_device_name())
    worst = 0.0
    for case in (c for c in CASES if wanted in str(c)):
        error, us = measure(case)
        worst = max(worst, error)
        seen = case.window + case.compressed
        flop = 4 * case.queries * case.heads * seen * 512
        size = case.queries * seen * (584 if case.fp8 else 1024)
        peer = ("", "") if case.flashmla is None else (f"{case.flashmla:g}", f"{case.flashmla / us:.2f}x")
        table.add_row(str(case), f"{error:.1e}", f"{us:.1f}", f"{flop / us / 1e6:.0f}", f"{size / us / 1e3:.0f}", *peer)
    Console(width=130).print(table)
    return 0 if worst < 4e-3 else 1


if __name__ == "__main__":
    sys.exit(main())
