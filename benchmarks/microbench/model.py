"""What softsm's timing model says of the microbenchmarks of products and of turns, beside what the H200 did: its parts
are right only if it gives back the rows that its parameters come from. The others (copies, memory) need the whole GPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from products import TILE, Products, beside
from turns import Turns

from instructions import OPERATIONS

MEASURED = Path(__file__).resolve().parents[1] / "results" / "microbench-h200.json"
FEW, MANY = 10, 30  # rounds: the difference has no beginning and no end


def predicted(ptx: str, threads: int, n: int, m: int = 0):
    import softsm

    stamps = np.zeros(132 * 128, np.int64)
    with softsm.timing("h200", clock=1.98) as timer:
        softsm.load(ptx).launch(132, threads, [stamps, 0, n, m, b"\0" * 128], shared=TILE, sms=132)
    return timer.predictions[0]


def rows(wanted: list[str]) -> Iterator[tuple[str, float, float]]:
    """(name, measured, predicted), in cycles a product or a turn; of rows whose names contain one of these."""
    measured = {r["name"]: r["value"] for r in json.loads(MEASURED.read_text())["rows"] if "value" in r}
    bench = Products.__new__(Products)
    for name, text, counts in bench.points():
        if any(part in name for part in wanted):
            few, many = (predicted(text, 128 * counts["groups"], n).cycles for n in (FEW, MANY))
            yield name, measured[name], (many - few) / ((MANY - FEW) * counts["each"] * counts["groups"])
    others = [(op, 128, where) for op in bench.BESIDE for where in (False, True)]
    for op, n, where in others + Turns.besides():
        name = f"{op} beside N={n} {'RS' if where else 'SS'}"
        if any(part in name for part in wanted):
            m = 12 * 8 * 170 // (64 * OPERATIONS[op][2]) + 4  # the other work lasts longer than the products
            log = predicted(beside(op, n, where), 256, 12, m).run.log
            ends = log[log[:, 4] == 20, 3]
            yield name, measured[name], float((ends[-1] - ends[8]) / (len(ends) - 9))
    for name, text, groups in Turns.__new__(Turns).in_turn():
        name = f"{name}, {groups} warpgroups"
        if any(part in name for part in wanted):
            few, many = (predicted(text, 128 * groups, n).cycles for n in (FEW, MANY))
            yield name, measured[name], (many - few) / (MANY - FEW)


def table(wanted: list[str]) -> str:
    lines = [f"{'cycles a product, or a turn':64s} {'H200':>8s} {'model':>8s}"]
    lines += [f"{name:64s} {a:8.1f} {b:8.1f} {b / a - 1:+7.1%}" for name, a, b in rows(wanted)]
    return "\n".join(lines)
