"""Times of cases on the GPU: CUDA graphs between events, the L2 emptied before each by reading 256 MB of other data."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from dsv4.bench.timing import captured
from softsm_time.case import Call, Case

MICROBENCH = Path(__file__).resolve().parents[1] / "microbench"
WORKERS, COMPILING = 14, 45  # processes that compile, seconds at most


def measure(path: Path, cases: list[Case], command: list[str], repeats: int, limit: float) -> None:
    """command: compiles the part of the cases that is put behind it; empty: all are compiled."""
    sys.path.append(str(MICROBENCH))
    import device as devices
    from synchronisation import spin

    begin = time.time()
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    workers = [subprocess.Popen([*command, f"{k}/{WORKERS}"], **quiet) for k in range(WORKERS if command else 0)]
    for w in workers:
        try:
            w.wait(max(1, COMPILING - (time.time() - begin)))
        except subprocess.TimeoutExpired:
            w.kill()
    print(f"compiled in {time.time() - begin:.0f} s", flush=True)
    gpu = devices.Gpu()
    flush = torch.zeros(64 << 20, dtype=torch.float32, device="cuda")
    probe = spin()
    found: dict[str, dict] = {}
    for n, case in enumerate([*cases, *cases]):  # twice, with other inputs elsewhere: how well a time is repeated
        row = found.setdefault(case.name, {})
        if "error" in row:
            continue
        if time.time() - begin > limit:
            row.update({} if row else {"error": "no time left"})
            continue
        try:
            made = one(gpu, flush, probe, case.make("cuda"), repeats)
            row.update({"again_us": made["us"], "again_warm_us": made["warm_us"]} if row else made)
        except Exception as why:  # one case must not lose the others
            row["error"] = f"{type(why).__name__}: {why}"[:200]
        torch.cuda.empty_cache()
        path.write_text(json.dumps({"device": gpu.device, "cases": found}, indent=0))
        if n < len(cases):
            print(
                f"{case.name:60s} {row.get('us', 0):10.1f} us  {row.get('mhz', 0):7.0f} MHz  {row.get('error', '')}",
                flush=True,
            )


def one(gpu, flush: torch.Tensor, probe: str, call: Call, repeats: int) -> dict:
    graph = captured(call)
    times, clocks = [], []
    for n in range(repeats + 2):
        flush.sum()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
        begin.record()
        graph.replay()
        end.record()
        gpu.stamps[: 32 * 4].zero_()
        gpu.launch(probe, 1, 32, 0, 0, 30000, 0, b"")
        if n >= 2:
            times.append((begin, end))
        torch.cuda.synchronize()
        stamps = gpu.stamps[:4].cpu().tolist()
        clocks.append((stamps[2] - stamps[0]) / max(stamps[3] - stamps[1], 1) * 1e3)
    us = sorted(b.elapsed_time(e) * 1e3 for b, e in times)
    hot = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
        begin.record()
        graph.replay()
        end.record()
        hot.append((begin, end))
    torch.cuda.synchronize()
    warm = statistics.median(b.elapsed_time(e) * 1e3 for b, e in hot)
    return {
        "us": statistics.median(us),
        "low": us[0],
        "high": us[-1],
        "mhz": statistics.median(clocks[2:]),
        "warm_us": warm,
    }


def compile_part(part: str, cases: list[Case]) -> None:
    k, n = map(int, part.split("/"))
    for case in cases[k::n]:
        try:
            case.make("cuda")()
        except Exception as why:  # the measuring process will say so
            print(case.name, why)
        torch.cuda.empty_cache()  # others compile beside this process
