"""Where what a launch reads comes from: device memory, L2, or the L1 that CTAs before it have filled."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from softsm.timing_model.follow import addressed_by
from softsm.timing_model.grid import over_grid
from softsm.timing_model.machine import CP_ASYNC, GATHER, LOAD
from softsm.timing_model.parameters import Gpu
from softsm.timing_model.trace import LaunchTrace

ROW = 2048  # bytes
SCATTERED = 40  # bytes of a line: below it, lanes read words here and there
MANY_LINES = 8  # ... of a CTA: fewer say nothing, they may be a number that all lanes read
WHOLE = 56  # bytes of 64, from which on a CTA asks for all of them
HELD = 0.8, 1.2  # bytes between two reads, of those that L2 holds: found again up to the first, gone from the second
FEW, MANY = 4096, 16384  # bytes that are waited for together: the slowest of many lines comes later than that of few
ALONE = -1.3  # ... and one line of an open page earlier: 330 ns (benchmarks/microbench), of load.hbm and hbm.slowest


@dataclass
class Source:
    """Where the reads of a tensor come from."""

    name: str
    size: int
    asked: float = 0.0  # bytes, whole grid
    again: float = 0.0  # ... of which a CTA had asked for them before
    lines: float = 0.0  # of 128 bytes that those are in, whole or not
    blocks: float = 0.0  # of 64 bytes, if words are read here and there
    written: float = 0.0
    atomic: float = 0.0  # bytes of sectors that atomic operations change
    device: float = 0.0  # share that comes from device memory
    random: bool = False
    boxes: bool = False  # read by TMA
    copied: bool = False  # ... or by cp.async, tile by tile
    parts: int = 1  # ... which CTAs read one after another, and do not come back to: of a head, of a matrix of a batch
    rows: float = 0.0  # bytes that a CTA writes in a turn, if CTAs go along rows of their own
    few: bool = False  # a cluster asks for few lines: for all lanes, it may be

    @property
    def piece(self) -> float:
        """Bytes of a line that are asked for together."""
        return min(128.0, self.asked / self.lines) if self.lines else 128.0

    @property
    def scattered(self) -> bool:
        return self.piece < SCATTERED and not self.few

    @property
    def block(self) -> float:
        """Bytes of 64 that a CTA asks for, if not by one instruction: device memory gives 64."""
        return min(64.0, self.asked / self.blocks) if self.blocks and self.scattered else self.piece

    @property
    def filled(self) -> float:
        """Of 64 bytes that device memory gives, the share that is asked for."""
        return min(1.0, self.asked / self.blocks / 64) if self.blocks else 1.0

    @property
    def granules(self) -> float:
        """What L2 does for what is asked for: it answers 64 bytes at a time."""
        return max(1.0, 64 / self.piece)

    @property
    def way_written(self) -> str:
        """The rate of device memory for what is written."""
        return "hbm.mixed" if not self.rows else "hbm.rows" if self.rows <= ROW else "hbm.rows.wide"

    @property
    def changed(self) -> float:
        """Bytes that leave L2 at last: sectors that are written in parts are whole there."""
        return min(self.size, self.written + self.atomic)


def shares(looked: int) -> list[float]:
    """The part of the grid that each of its clusters stands for that were looked at. Of three the ends stand for less:
    what grows along the grid is summed up rightly, and edges do not count too much."""
    return [1 / 6, 2 / 3, 1 / 6] if looked == 3 else [1 / looked] * looked


def shares_of(trace: LaunchTrace) -> list[float]:
    """The same, where their lengths are known: what lies between two of them is a bit of both."""
    numbers = [c.number for c in trace.clusters]
    if len(numbers) == 1 or trace.lengths is None:
        return shares(len(numbers))
    return [float(over_grid(trace, [(m, float(m == n)) for m in numbers]).mean()) for n in numbers]


def sources_of(trace: LaunchTrace, gpu: Gpu, recent: dict[str, float]) -> list[Source]:
    out = [Source(name, size) for name, size in trace.tensors]
    most = Counter[int]()  # lines that a cluster asks for
    for c, share in zip(trace.clusters, shares_of(trace)):
        scale = trace.total * share
        for (tensor, way), n in c.traffic.items():
            if 0 <= tensor < len(out):
                if way == "read":
                    out[tensor].asked += n * scale
                elif way == "read lines":
                    out[tensor].lines += n * scale
                    most[tensor] = max(most[tensor], n)
                elif way == "read blocks":
                    out[tensor].blocks += n * scale
                elif way == "write":
                    out[tensor].written += n * scale
                elif way == "atomic":
                    out[tensor].atomic += n * scale
        for tensor in {e[4] for w in c.warps for e in w.events if e[1] == LOAD}:
            if 0 <= tensor < len(out):
                out[tensor].boxes = out[tensor].copied = True
        for tensor in {e[2] for w in c.warps for e in w.events if e[1] == CP_ASYNC}:
            if 0 <= tensor < len(out):
                out[tensor].copied = True
        for tensor, starts in c.starts.items():
            if len(starts) > 24 and 0 <= tensor < len(out):
                steps = np.diff(np.array(starts))
                # What follows a rule has a few steps, whatever the number of its copies.
                out[tensor].random |= len(np.unique(steps[np.abs(steps) > ROW])) > 32
    for a in trace.access.values():
        if a.space == "store" and 2 * a.along > a.looks and a.tensors:
            tensor = max(a.tensors, key=lambda n: a.tensors[n])
            if 0 <= tensor < len(out):
                out[tensor].rows += a.bytes / a.looks * len(trace.clusters[0].warps)
    l2, held = gpu["l2.bytes"], gpu["l2.held"]
    if sum(s.size for s in out if s.copied) > HELD[0] * held:
        for tensor, parts in parts_of(trace).items():
            if 0 <= tensor < len(out):
                out[tensor].parts = parts
    for tensor, s in enumerate(out):
        s.few = most[tensor] < MANY_LINES
        if s.asked:
            s.random |= s.scattered and s.block < WHOLE
            s.device = min(1.0, s.size / s.asked)
            # A word brings the 64 bytes around it, of which it is asked for 32.
            there = s.size * max(0.5, min(1.0, s.block / 64))
            if s.random and s.size > held:
                unique = there * (1 - np.exp(-s.asked / there))
                s.device = max(min(1.0, unique / s.asked), 1 - held / s.size)
            elif s.random:
                s.device = min(1.0, there * (1 - np.exp(-s.asked / there)) / s.asked)
            if recent.get(s.name.split(" [")[0], 0):  # L2 keeps it, or a part of it
                s.device = 0.0 if s.size < l2 / 2 else s.device * min(1.0, s.size / l2)
    return out


def slowest(trace: LaunchTrace) -> float:
    """-1.3 to 1: how far a wait is for many lines. What a CTA asks for in a turn of its loop, or once, counts together.
    A wait for few is shorter only where loads stay in a page of device memory that is open."""
    cluster = trace.clusters[-1]
    asked, most = Counter[int](), Counter[int]()
    for w in cluster.warps:
        turns = Counter[int]()
        for line, kind, _, b, c in w.events:
            if kind == CP_ASYNC or (kind in (LOAD, GATHER) and c != -2):
                asked[line] += b
                turns[line] += 1
        most |= turns
    loads = [a for a in trace.access.values() if a.space == "load" and a.missed]
    burst = sum(n / most[line] for line, n in asked.items())
    burst += sum(32 * a.missed * len(cluster.warps) / a.looks for a in loads)
    near = 0.0 if asked else 1 - max((a.jumps / a.looks for a in loads), default=1.0)
    return float(np.clip(np.log(max(burst, 1.0) / FEW) / np.log(MANY / FEW), ALONE * near, 1.0))


def within(value: float, low: float, high: float) -> float:
    """1 up to low, 0 from high on."""
    return float(np.clip((high - value) / (high - low), 0.0, 1.0))


def gone(s: Source, sources: list[Source], together: float, held: float) -> float:
    """0 to 1: how far a tensor that is read tile by tile has left an L2 of `held` bytes when others come back to it.
    Between two passes over it lies all of it, and what is read and written of others meanwhile; L2 forgets what was
    used longest ago. together: multiprocessors that read the same at a time."""
    passes = (s.asked - s.again) / max(s.size, 1) / together
    if s.random or not s.copied or s.piece < WHOLE or passes <= 1:
        return 0.0
    others = sum((o.size if o.asked else o.changed) / o.parts for o in sources if o is not s)
    return 1 - within((s.size / s.parts + others / passes) / held, *HELD)


def parts_of(trace: LaunchTrace) -> dict[int, int]:
    """Tensor -> parts that CTAs read one after another: those of the last side of the grid, if its number is in the
    address, since CTAs begin in the order of their numbers."""
    sides = dict(zip(("%ctaid.x", "%ctaid.y", "%ctaid.z"), trace.grid))
    last = max(sides, key=lambda name: (sides[name] > 1, name))
    if last == "%ctaid.x":
        return {}
    on: dict[int, set[str]] = {}
    by = addressed_by(trace.source)
    for w in trace.clusters[0].warps:
        for line, kind, a, _, c in w.events:
            if kind in (LOAD, CP_ASYNC):
                on.setdefault(c if kind == LOAD else a, set()).update(by.get(line, ()))
    return {
        tensor: math.prod(n for name, n in sides.items() if name in axes - {"%ctaid.x"})
        for tensor, axes in on.items()
        if last in axes
    }


def absent_from_l1(s: Source, room: float, sms: int) -> float:
    """The share of words read here and there that an L1 of `room` bytes has to ask for: CTAs find what those before
    them on the multiprocessor have read of a small table."""
    if not s.asked or not s.scattered:
        return 1.0
    each = s.asked / sms
    first = s.size * (1 - np.exp(-each / s.size)) / each
    return float(1 - (1 - first) * min(1.0, room / s.size))
