"""How well softsm's timing model predicts an H200.

    python benchmarks/timing.py --measure --json FILE     # on the GPU: the validation cases, with clocks
    python benchmarks/timing.py --predict --json FILE     # anywhere: the same cases in softsm
    python benchmarks/timing.py --table MEASURED PREDICTED

Measured: median of CUDA-graph replays between events, the L2 emptied before each (as dsv4 bench does). The clock of the
multiprocessors is read by a kernel that follows the replay on the same stream.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != HERE]  # benchmarks/softsm.py is not the package
sys.path.append(str(HERE))

WORKERS = 10  # processes that compile


def measure(path: Path, only: str, repeats: int, limit: float) -> None:
    import torch
    from timing_cases import CASES

    sys.path.append(str(HERE / "microbench"))
    import device as devices
    from synchronisation import spin

    begin = time.time()
    command = [sys.executable, __file__, "--only", only, "--compile"]
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    workers = [subprocess.Popen([*command, f"{k}/{WORKERS}"], **quiet) for k in range(WORKERS)]
    for w in workers:
        try:
            w.wait(max(1, 70 - (time.time() - begin)))
        except subprocess.TimeoutExpired:
            w.kill()
    print(f"compiled in {time.time() - begin:.0f} s", flush=True)
    gpu = devices.Gpu()
    flush = torch.zeros(64 << 20, dtype=torch.float32, device="cuda")
    probe = spin()
    found: dict[str, dict] = {}
    for case in (c for c in CASES if only in c.name):
        if time.time() - begin > limit:
            found[case.name] = {"error": "no time left"}
            continue
        try:
            found[case.name] = one(torch, gpu, flush, probe, case.make("cuda"), repeats)
        except Exception as why:  # one case must not lose the others
            found[case.name] = {"error": f"{type(why).__name__}: {why}"[:200]}
        torch.cuda.empty_cache()
        path.write_text(json.dumps({"device": gpu.device, "cases": found}, indent=0))
        print(f"{case.name:60s} {found[case.name].get('us', 0):10.1f} us  {found[case.name].get('mhz', 0):7.0f} MHz  "
              f"{found[case.name].get('error', '')}", flush=True)  # fmt: skip


def one(torch, gpu, flush, probe: str, call, repeats: int) -> dict:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
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


def compile_part(part: str, only: str) -> None:
    from timing_cases import CASES

    k, n = map(int, part.split("/"))
    for case in [c for c in CASES if only in c.name][k::n]:
        try:
            case.make("cuda")()
        except Exception as why:  # the measuring process will say so
            print(case.name, why)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, default=Path("timing.json"))
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--limit", type=float, default=120, help="seconds, for --measure")
    given = parser.parse_args()
    if given.compile:
        compile_part(given.compile, given.only)
    elif given.measure:
        measure(given.json, given.only, given.repeats, given.limit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
