"""Estimates which share of a launch's reads device memory, L2, and the L1 that earlier CTAs have filled deliver."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from softsm.timing_model.accesses import SECTOR
from softsm.timing_model.follow import addressed_by
from softsm.timing_model.grid import over_grid
from softsm.timing_model.machine import BULK_STORE, CP_ASYNC, GATHER, LOAD
from softsm.timing_model.parameters import Gpu
from softsm.timing_model.trace import LaunchTrace

ROW = 2048  # bytes
SCATTERED = 40  # bytes of a line: below it, lanes read scattered words
MANY_LINES = 8  # ... of a CTA: fewer are not significant, they may hold a number that all lanes read
WHOLE = 56  # bytes of 64, from which on a CTA counts as requesting all of them
HELD = 0.8, 1.2  # bytes between two reads, relative to L2's capacity: hit up to the first, miss from the second
FEW, MANY = 4096, 16384  # bytes of one wait: the slowest of many lines arrives later than that of few
PART = 1.1  # times the bytes of a part: its CTAs' words lie within that
ALONE = -1.3  # ... and one line of an open page earlier: 330 ns (benchmarks/microbench), of load.hbm and hbm.slowest


@dataclass
class Source:
    """The traffic of a tensor, and the share of its reads that device memory delivers."""

    name: str
    size: int
    asked: float = 0.0  # bytes, whole grid
    again: float = 0.0  # ... of them, those that a CTA had requested before
    lines: float = 0.0  # lines of 128 bytes that contain the requested bytes, whole or not
    blocks: float = 0.0  # blocks of 64 bytes, if the reads are scattered words
    written: float = 0.0
    sent: float = 0.0  # ... as bytes of L2's time: parts of lines take more of it
    atomic: float = 0.0  # bytes of sectors that atomic operations change
    device: float = 0.0  # share of `asked` that device memory delivers
    random: bool = False
    boxes: bool = False  # whether TMA reads it
    copied: bool = False  # ... or by cp.async, tile by tile
    parts: int = 1  # parts that CTAs read in turn and never again: heads, matrices of a batch, tables of a level
    rows: float = 0.0  # bytes that a CTA writes per iteration, if each CTA moves along its own rows
    few: bool = False  # a cluster requests few lines, perhaps the same one for all lanes

    @property
    def piece(self) -> float:
        """Bytes of a line that are requested together."""
        return min(128.0, self.asked / self.lines) if self.lines else 128.0

    @property
    def scattered(self) -> bool:
        return self.piece < SCATTERED and not self.few

    @property
    def block(self) -> float:
        """Bytes that a CTA requests, in one or more instructions, of the 64 that device memory delivers."""
        return min(64.0, self.asked / self.blocks) if self.blocks and self.scattered else self.piece

    @property
    def filled(self) -> float:
        """Requested share of the 64 bytes that device memory delivers."""
        return min(1.0, self.asked / self.blocks / 64) if self.blocks else 1.0

    @property
    def granules(self) -> float:
        """Work of L2 per requested byte: it answers 64 bytes at a time."""
        return max(1.0, 64 / self.piece)

    @property
    def way_written(self) -> str:
        """Name of the parameter with the rate at which device memory accepts the writes."""
        return "hbm.mixed" if not self.rows else "hbm.rows" if self.rows <= ROW else "hbm.rows.wide"

    @property
    def changed(self) -> float:
        """Bytes that L2 finally writes back: it merges partial writes into whole sectors."""
        return min(self.size, self.written + self.atomic)


def shares(looked: int) -> list[float]:
    """Returns the share of the grid that each sampled cluster represents. Of three, the ends represent less: values
    that grow along the grid then sum up correctly, and edges do not count too much."""
    return [1 / 6, 2 / 3, 1 / 6] if looked == 3 else [1 / looked] * looked


def shares_of(trace: LaunchTrace) -> list[float]:
    """Returns the same, by length where lengths are known: a cluster between two samples counts partly for each."""
    numbers = [c.number for c in trace.clusters]
    if len(numbers) == 1 or trace.lengths is None:
        return shares(len(numbers))
    return [float(over_grid(trace, [(m, float(m == n)) for m in numbers]).mean()) for n in numbers]


def sources_of(trace: LaunchTrace, gpu: Gpu, recent: dict[str, float], slots: int = 0) -> list[Source]:
    """Returns the traffic of each tensor. slots: clusters that run at the same time."""
    out = [Source(name, size) for name, size in trace.tensors]
    most = Counter[int]()  # lines that a cluster requests
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
                # A regular pattern has a few distinct steps, whatever the number of copies.
                out[tensor].random |= len(np.unique(steps[np.abs(steps) > ROW])) > 32
    stores: dict[int, list[float]] = {}  # of each tensor that threads write: bytes as L2 takes them, and of all sectors
    for a in trace.access.values():
        if a.space == "store" and a.tensors:
            tensor = max(a.tensors, key=lambda n: a.tensors[n])
            if 0 <= tensor < len(out):
                both = stores.setdefault(tensor, [0.0, 0.0])
                both[0] += a.sent(gpu["hbm.write"] / gpu["l2.parts"]) * a.times
                both[1] += SECTOR * a.units * a.times
                out[tensor].rows += a.bytes / a.looks * len(trace.clusters[0].warps) * (2 * a.along > a.looks)
    for n, s in enumerate(out):
        sent, sectors = stores.get(n, (1.0, 1.0))
        s.sent = s.written * sent / max(sectors, 1.0)
    l2, held = gpu["l2.bytes"], gpu["l2.held"]
    if sum(s.size for s in out if s.copied) > HELD[0] * held:
        for tensor, parts in parts_of(trace).items():
            if 0 <= tensor < len(out):
                out[tensor].parts = parts
    for tensor, s in enumerate(out):
        s.few = most[tensor] < MANY_LINES
        if s.scattered and trace.access:
            s.parts = tables_of(trace).get(tensor, 1)
        if trace.total <= slots and 0.9 * s.size <= s.asked <= 1.1 * s.size:
            # Other clusters request the rest of each block, at about the same time, and L2 has it.
            s.blocks = min(s.blocks, s.asked / 64)
        if s.asked:
            s.random |= s.scattered and s.block < WHOLE
            s.device = min(1.0, s.size / s.asked)
            # A word fetches the 64 bytes around it, of which 32 are requested.
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
    """Rates, from -1.3 to 1, whether waits are for few or for many lines. All requests of a CTA in one iteration, or
    outside a loop, count together. A wait for few is shorter only if loads stay in an open page of device memory."""
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
    often = max((a.ran for a in loads), default=0)
    loads = [a for a in loads if 2 * a.ran > often]  # of the innermost loop; those before it are waited for once
    burst = sum(n / most[line] for line, n in asked.items())
    burst += sum(32 * a.missed * len(cluster.warps) / a.looks for a in loads)
    near = 0.0 if asked else 1 - max((a.jumps / a.looks for a in loads), default=1.0)
    return float(np.clip(np.log(max(burst, 1.0) / FEW) / np.log(MANY / FEW), ALONE * near, 1.0))


def within(value: float, low: float, high: float) -> float:
    """Returns 1 up to low, 0 from high on, and a linear ramp between."""
    return float(np.clip((high - value) / (high - low), 0.0, 1.0))


def gone(s: Source, sources: list[Source], together: float, held: float) -> float:
    """Returns the share (0 to 1) of a tensor, read tile by tile, that an L2 of `held` bytes has evicted when others
    read it again. Between two passes L2 sees all of it and the traffic of the other tensors, and evicts the least
    recently used lines. together: multiprocessors that read the same lines at a time."""
    passes = (s.asked - s.again) / max(s.size, 1) / together
    if s.random or not s.copied or s.piece < WHOLE or passes <= 1:
        return 0.0
    others = sum((o.size if o.asked else o.changed) / o.parts for o in sources if o is not s)
    return 1 - within((s.size / s.parts + others / passes) / held, *HELD)


def tiles_of(trace: LaunchTrace) -> int:
    """Returns how often a CTA executes its rarest store, which is its number of tiles if it loops over them."""
    stores = {trace.blocks.of(line) for line, a in trace.access.items() if a.space == "store"}
    tiles = 1
    for w in trace.clusters[0].warps:
        visits = [n for n in map(w.blocks.count, stores) if n]
        bulk = Counter(e[0] for e in w.events if e[1] == BULK_STORE)
        for found in (visits, bulk.values()):
            tiles = max(tiles, min(found, default=1))
    return tiles


def parts_of(trace: LaunchTrace) -> dict[int, int]:
    """Maps tensors to the number of parts that CTAs read one after another: those along the grid's last dimension, if
    the address depends on its index, since CTAs start in the order of their numbers."""
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


def tables_of(trace: LaunchTrace) -> dict[int, int]:
    """Maps tensors to the number of parts of which CTAs that run together read words of one: their addresses depend on
    data and on the grid's last dimensions, but not on its first, and a CTA's words lie within one part."""
    sides = dict(zip(("%ctaid.x", "%ctaid.y", "%ctaid.z"), trace.grid))
    if sides["%ctaid.y"] == sides["%ctaid.z"] == 1:
        return {}
    by = addressed_by(trace.source, loads=True)
    on: dict[int, set[str]] = {}
    for line, a in trace.access.items():
        if a.space == "load" and a.tensors:
            on.setdefault(max(a.tensors, key=lambda n: a.tensors[n]), set()).update(by.get(line, ("%ctaid.x",)))
    out = {}
    for tensor, axes in on.items():
        if "data" in axes and "%ctaid.x" not in axes and 0 <= tensor < len(trace.tensors):
            parts = math.prod(n for name, n in sides.items() if name in axes)
            span = max(c.traffic.get((tensor, "read span"), 0) for c in trace.clusters)
            if 0 < span * parts <= PART * trace.tensors[tensor][1]:
                out[tensor] = parts
    return out


def absent_from_l1(s: Source, room: float, sms: int) -> float:
    """Returns the share of scattered words that miss an L1 of `room` bytes. CTAs hit the words of a small table, or of
    the part of one, that earlier CTAs of the multiprocessor have read."""
    if not s.asked or not s.scattered:
        return 1.0
    each = s.asked / sms
    first = s.size * (1 - np.exp(-each / s.size)) / each
    # How often L1 holds a line depends on its size, but it holds only the sectors requested since.
    there, same = min(1.0, room * s.parts / s.size), s.piece / 128
    return float(1 - (1 - first) * same * there / (1 - (1 - same) * there))
