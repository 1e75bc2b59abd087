"""The critical path of a replay: from the end back, what each role did until it released another.

The log of a replay has every wait of a warp with the instruction that ended it. The walk starts at the last warp and
goes back to the end of its last wait. An arrival of another warp, which ran until then, ended that wait, or a copy or
products in flight did. Links that recur (iterations of a loop) are summed.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from dataclasses import dataclass

from softsm.timing_model import machine
from softsm.timing_model.machine import LOG_COPY as COPY
from softsm.timing_model.machine import LOG_PRODUCT as PRODUCT
from softsm.timing_model.prediction import Prediction, Run


@dataclass
class Link:
    """`who` was busy for `cycles` before it released `to` through `barrier` ('' at the end of the path)."""

    who: str
    barrier: str
    to: str
    cycles: float
    times: int

    def __str__(self) -> str:
        way = f" -> {self.barrier} -> {self.to}" if self.barrier else ""
        return f"{self.who}{way}: {self.cycles:.0f} cycles, {'once' if self.times == 1 else f'{self.times} times'}"


class _Log:
    """Indexes the waits of each warp, and copies and warps by stream position."""

    def __init__(self, run: Run):
        self.waits: dict[int, list] = defaultdict(list)
        self.copies: dict[tuple[int, int], list] = defaultdict(list)
        for row in run.log.tolist():
            warp, pos, begin, end, kind, more = int(row[0]), int(row[1]), row[2], row[3], int(row[4]), row[5]
            if kind == COPY:
                self.copies[warp, pos].append((end, begin))
            elif kind != PRODUCT:
                self.waits[warp].append((end, begin, kind, int(more), pos))
        self.last = max((row[0] for rows in self.waits.values() for row in rows), default=0.0)


def critical_path(p: Prediction) -> tuple[float, list[Link]]:
    """Returns (cycles of the path through the last CTA, its links, the longest first); empty where nothing waits."""
    run = p.run
    if run is None or p.trace is None or not len(run.log):
        return 0.0, []
    log = _Log(run)
    if not log.waits:
        return 0.0, []
    end = log.last  # end of the time that the log covers
    warp = max(log.waits, key=lambda w: log.waits[w][-1][0])
    found: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0.0, 0])
    start = float(run.start[run.warps[warp][0]])
    time, barrier, to = end, "", ""

    def add(who: str, cycles: float) -> None:
        entry = found[who, barrier, to]
        entry[0] += max(0.0, cycles)
        entry[1] += 1

    for _ in range(4 * len(run.log)):
        waits = log.waits.get(warp, [])
        at = bisect.bisect_right(waits, (time + 0.5,)) - 1
        role = _role(p, run, warp)
        if at < 0 or waits[at][0] <= start:
            add(role, time - start)
            break
        ended, began, kind, cause, pos = waits[at]
        add(role, time - ended)
        to, barrier = role, _barrier(p, run, warp, pos)
        if machine.REASONS[kind] == "products":
            barrier = "products"
            add("tensor core", ended - began)
            time = began
        elif cause >= 0:
            other, pos = cause >> 32, cause & machine.LOW
            event = run.event(other, pos)
            what = -1 if event is None else int(event[0])
            flights = log.copies.get((other, pos), [])
            issued = [b for e, b in flights if e <= ended + 1 and b < ended]
            if what in (machine.LOAD, machine.GATHER) and issued:
                add("copy", ended - issued[-1])
                time, barrier, to = issued[-1], "issue", "copy"
            elif what == machine.MMA_COMMIT:
                add("tensor core", ended - began)
                time, barrier, to = min(began, ended - 1), "issue", "tensor core"
            else:
                time = ended - 1
            warp = other
        else:
            add(machine.REASONS[kind], ended - began)
            time = began
        if time <= start:
            break
    links = [Link(*key, cycles, int(times)) for key, (cycles, times) in found.items() if cycles >= 1]
    return end - start, sorted(links, key=lambda x: -x.cycles)


def _role(p: Prediction, run: Run, warp: int) -> str:
    assert p.trace is not None
    instance, k = run.warps[warp]
    w = p.trace.clusters[run.order[instance]].warps[k]
    return w.role or f"warp {w.index}"


def _barrier(p: Prediction, run: Run, warp: int, pos: int) -> str:
    assert p.trace is not None
    names = p.trace.clusters[run.order[run.warps[warp][0]]].names
    event = run.event(warp, pos)
    if event is not None and int(event[0]) == machine.WAIT and int(event[1]) < len(names):
        return names[int(event[1])].partition(" (")[0]
    return "a wait"
