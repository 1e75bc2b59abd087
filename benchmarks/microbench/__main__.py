"""Microbenchmarks of a Hopper GPU: `python benchmarks/microbench --json FILE` (about two minutes on an H200).

    python benchmarks/microbench --json FILE [--groups copies,memory]
    python benchmarks/microbench --check            # no GPU: every kernel is assembled and run in softsm
    python benchmarks/microbench --predict [NAME ...]   # no GPU: what the timing model says of the rows of products

Every group runs in a process of its own: an error on the device loses one group at most, and each row is written as
soon as it is measured. A row has its value and unit, the nanoseconds of the measured part and the clock of the
multiprocessors during it (`mhz`, from %clock64 and %globaltimer of the same launch).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import device as devices
from cold import Cold
from copies import Copies
from crossbar import Crossbar
from dependents import Dependents
from everyday import Everyday
from memory import Memory
from neighbours import Neighbours
from overlap import Overlap
from products import Clock, Products
from rows import Rows
from shared_limits import SharedLimits
from strips import Strips
from sums import Gathers, Sums
from synchronisation import Synchronisation
from turns import Turns

from instructions import OPERATIONS, Instructions

GROUPS = {b.group: b for b in (Instructions, Products, Memory, Copies, Synchronisation, Clock, Overlap, Strips, Turns,
                               Dependents, Everyday, SharedLimits, Crossbar, Sums, Gathers, Cold,
                               Neighbours, Rows)}  # fmt: skip


def measure(group: str, path: Path) -> None:
    gpu = devices.Gpu()
    gpu.flush()
    with path.open("a") as file:

        def keep(row: dict) -> None:
            file.write(json.dumps(row) + "\n")
            file.flush()

        bench = GROUPS[group](gpu, keep)
        begin = time.time()
        devices.assemble_all([text for _, text in bench.kernels()])
        assembled = time.time()
        gpu.run(bench_warm(), 132, 128)
        bench.measure()
        keep({"group": group, "name": "seconds", "assembling": assembled - begin, "measuring": time.time() - assembled})


def bench_warm() -> str:
    from synchronisation import empty

    return empty()


def check(groups: list[str]) -> int:
    """Assemble, look for the instruction that is meant, run in softsm. -> failures"""
    softsm = devices.Softsm()
    failed, made = 0, 0
    for group, kind in ((g, GROUPS[g]) for g in groups):
        rows: list[dict] = []
        bench = kind(softsm, rows.append)
        devices.assemble_all([text for _, text in bench.kernels()], 2)
        for name, text in bench.kernels():
            made += 1
            try:
                sass = devices.disassembled(text)
                wanted = (
                    OPERATIONS[name.rpartition(" latency")[0] or name.partition(" interval")[0]][1]
                    if group == "instructions"
                    else ""
                )
                if wanted and wanted not in sass:
                    raise RuntimeError(f"no {wanted} in the SASS")
            except RuntimeError as why:
                failed += 1
                print(f"{group}: {name}: {why}")
        begin = time.time()
        bench.measure()
        errors = [r for r in rows if "error" in r]
        failed += len(errors)
        for r in errors:
            print(f"{group}: {r['name']}: {r['error']}")
        print(f"{group}: {len(rows)} rows in softsm, {len(errors)} errors, {time.time() - begin:.0f} s")
    print(f"{made} kernels, {failed} failures")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--groups", default=",".join(GROUPS))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--predict", nargs="*", help="rows whose names contain one of these")
    given = parser.parse_args()
    if given.check:
        return 1 if check(given.groups.split(",")) else 0
    if given.predict is not None:
        from model import table

        print(table(given.predict or [""]))
        return 0
    if given.json is None:
        parser.error("--json FILE is missing")
    lines = given.json.with_suffix(".jsonl")
    if given.one:
        measure(given.one, lines)
        return 0
    lines.unlink(missing_ok=True)
    for group in given.groups.split(","):
        command = [sys.executable, __file__, "--json", str(given.json), "--one", group]
        try:
            done = subprocess.run(command, timeout=75, capture_output=True, text=True)
            trouble = done.stderr.strip()[-400:] if done.returncode else ""
        except subprocess.TimeoutExpired:
            trouble = "longer than 75 s"
        rows = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
        if trouble:
            rows.append({"group": group, "name": "process", "error": trouble})
            with lines.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
        given.json.write_text(json.dumps({"device": device_name(), "rows": rows}, indent=0) + "\n")
        mine = [r for r in rows if r["group"] == group]
        print(f"{group}: {len(mine)} rows, {sum('error' in r for r in mine)} errors {trouble}", flush=True)
    return 0


def device_name() -> dict:
    import torch
    import triton

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"gpu": name, "torch": torch.__version__, "triton": triton.__version__}


if __name__ == "__main__":
    sys.exit(main())
