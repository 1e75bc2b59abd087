"""Turns a trace of PTX blocks into the stream of machine instructions that each warp issues.

ptxas forms its own basic blocks. Each belongs to the PTX block that most of its instructions come from and runs as
often as that PTX block did. Machine blocks that only repeat lines already present are slow paths (the second try of a
wait, a division of denormals), which are left out, or copies of an unrolled loop, which run iteration by iteration. A
block with the only memory access of a line is not a slow path: ptxas jumps over predicated loads. Events (trace.py)
are attached to the machine instruction that performs them, by PTX line, and by order where a line is off.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np

from softsm.timing_model import machine
from softsm.timing_model.blocks import Blocks
from softsm.timing_model.copies import Copies
from softsm.timing_model.loops import machine_depths
from softsm.timing_model.sass import Code
from softsm.timing_model.trace import ClusterTrace

ANCHORS = {
    machine.WAIT: ("SYNCS.PHASECHK",),
    machine.ARRIVAL: ("SYNCS.ARRIVE", "SYNCS.ATOMS"),
    machine.LOAD: ("UTMALDG", "UBLKCP", "UBLKRED"),
    machine.GATHER: ("UTMALDG",),
    machine.BULK_STORE: ("UTMASTG", "UTMAREDG", "UBLKCP", "UBLKRED"),
    machine.BULK_COMMIT: ("UTMACMDFLUSH",),
    machine.BULK_WAIT: ("DEPBAR",),
    machine.BAR: ("BAR",),
    machine.CP_ASYNC: ("LDGSTS",),
    machine.CP_COMMIT: ("LDGDEPBAR",),
    machine.CP_WAIT: ("DEPBAR",),
    machine.CP_ARRIVE: ("ARRIVES",),
    machine.MMA: ("UTCHMMA", "UTCQMMA", "UTCOMMA", "UTCIMMA", "UTCMXQMMA", "UTCCP", "UTCSHIFT", "UTC"),
    machine.MMA_COMMIT: ("UTCBAR",),
    machine.CLUSTER_ARRIVE: ("UCGABAR_ARV",),
    machine.CLUSTER_WAIT: ("UCGABAR_WAIT",),
}
LONG_CODE = 2304  # machine instructions, 36 KB: the first instruction cache (benchmarks/microbench, shared limits)
PEELED = 4  # ratio of instructions from a loop to instructions from before it
KEPT = 1 << 20  # machine instructions of the cached paths of a kernel
OTHERS = ("HGMMA", "QGMMA", "IGMMA", "WARPGROUP.DEPBAR")  # recognised from the machine code alone
ALL = tuple(sorted({op for ops in ANCHORS.values() for op in ops} | set(OTHERS)))


@dataclass
class Streams:
    """The work of a cluster's warps: the path and first event of each warp, and the events of all."""

    paths: list[Path] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    table: np.ndarray = field(default_factory=lambda: np.zeros((0, 4)))  # kind, a, b, c


def kinds_of(streams: list[Streams]) -> list[int]:
    """Maps each cluster to the first one that issues the same instructions and events of the same sizes."""

    def one_way(a: Path, b: Path) -> bool:
        return a is b or np.array_equal(a.instructions, b.instructions) and np.array_equal(a.events, b.events)

    def alike(one: Streams, other: Streams) -> bool:
        same = one.firsts == other.firsts and np.array_equal(one.table, other.table)
        return same and all(map(one_way, one.paths, other.paths))

    return [next(m for m in range(n + 1) if m == n or alike(streams[m], streams[n])) for n in range(len(streams))]


@dataclass
class Path:
    """The machine instructions of one path through the program."""

    instructions: np.ndarray
    events: np.ndarray  # the first event at each instruction, counted from the warp's first, or -1
    counts: np.ndarray  # number of events at each instruction
    order: np.ndarray  # the warp's events in the order of the instructions


def lowering_of(code: Code, blocks: Blocks) -> Lowering:
    if code.lowering is None:
        code.lowering = Lowering(code, blocks)
    return code.lowering


class Lowering:
    def __init__(self, code: Code, blocks: Blocks):
        self.code, self.blocks = code, blocks
        self.pseudo = len(code.instructions)  # stands for an event without an instruction
        self.depths = machine_depths(code)
        homes: dict[int, list[int]] = defaultdict(list)
        part_of: dict[int, Counter] = defaultdict(Counter)  # PTX block -> homes of the machine code with its lines
        for number, (votes, home) in self._homes().items():
            homes[home].append(number)
            for b, n in votes.items():
                part_of[b][home] += n
        copies = Copies(code, blocks, self.depths, ALL)
        self.once = self._unrolled(homes, part_of)
        before = {home: self._before_loop(home, numbers) for home, numbers in homes.items() if home not in self.once}
        self.entries = {
            home: (np.array([i for n in found for i in code.blocks[n]], np.int32), self._is_turn(home, found, numbers))
            for home, numbers in homes.items()
            if (found := before.get(home))
        }
        self.parts = {
            home: copies.of([n for n in numbers if n not in before.get(home, ())]) for home, numbers in homes.items()
        }
        self.variants: dict[tuple, Path] = {}
        self.paths: dict[tuple, Path] = {}

    def _homes(self) -> dict[int, tuple[Counter, int]]:
        """Maps each machine block to its instruction count by PTX block and to the PTX block it belongs to. A block
        before a loop may contain the loop's first iteration; it still belongs to the code before the loop."""
        found: dict[int, tuple[Counter, int]] = {}
        deepest: Counter = Counter()
        for number, block in enumerate(self.code.blocks):
            votes: Counter = Counter()
            for i in block:
                ins = self.code.instructions[i]
                if ins.line and (ins.opcode != "EXIT" or not votes):
                    votes[self.blocks.of(ins.line)] += 20 if ins.opcode.startswith(ALL) else 1
            if votes:
                home = max(votes, key=lambda b: (votes[b], -b))
                found[number] = votes, home
                deepest[home] = max(deepest[home], self.depths[number])
        for number, (votes, home) in found.items():
            if self.depths[number] < deepest[home]:
                outer = [b for b in votes if self.blocks.loops[b] < self.blocks.loops[home]]
                other = max(outer, key=lambda b: votes[b], default=home)
                if PEELED * votes[other] >= votes[home]:
                    found[number] = votes, other
        return found

    def _unrolled(self, homes: dict[int, list[int]], part_of: dict[int, Counter]) -> dict[int, int]:
        """Maps PTX blocks whose loop ptxas has unrolled completely to the block that contains all iterations. That one
        is in fewer loops than the PTX block. It may also contain the code before and after the loop."""
        machine = self.depths
        largest = {home: max(len(self.code.blocks[n]) for n in numbers) for home, numbers in homes.items()}
        deepest = {
            home: max(machine[n] for n in numbers if 4 * len(self.code.blocks[n]) >= largest[home])
            for home, numbers in homes.items()
        }
        out: dict[int, int] = {}
        for home in homes:
            around = self._around(home, homes)
            # Loops around both may have become one, so compare the block's depth with that of the code around it.
            outer, depth = (0, 0) if around is None else (self.blocks.loops[around], deepest[around])
            if deepest[home] - depth < self.blocks.loops[home] - outer and largest[home] >= 16:
                out[home] = home
        for b, votes in part_of.items():
            home = max(votes, key=lambda h: votes[h])
            if home in out:
                out[b] = home
        return out

    def _before_loop(self, home: int, numbers: list[int]) -> list[int]:
        """Returns the machine blocks before the loop of a PTX block, which run once for all its iterations."""
        largest = max(len(self.code.blocks[n]) for n in numbers)
        deepest = max(self.depths[n] for n in numbers if 4 * len(self.code.blocks[n]) >= largest)
        first = next(n for n in numbers if self.depths[n] == deepest)
        if not self.blocks.loops[home]:
            return []
        return [n for n in numbers if n < first and self.depths[n] < deepest]

    def _is_turn(self, home: int, before: list[int], numbers: list[int]) -> bool:
        """Returns whether the blocks before a loop contain an iteration: ptxas tests before the loop whether it begins,
        and at the end of an iteration whether another one follows."""
        of_home = [
            {
                (ins.line, ins.opcode)
                for n in some
                for i in self.code.blocks[n]
                if (ins := self.code.instructions[i]).line and self.blocks.of(ins.line) == home
            }
            for some in (before, [n for n in numbers if n not in before])
        ]
        return 2 * len(of_home[0] & of_home[1]) >= len(of_home[1])

    def _around(self, home: int, homes: dict[int, list[int]]) -> int | None:
        """Returns the nearest block before `home` that is in fewer loops, all of which also enclose `home`."""
        least = self.blocks.loops[home]
        for b in range(home - 1, -1, -1):
            if self.blocks.loops[b] < least:
                least = self.blocks.loops[b]
                if b in homes:
                    return b
        return None

    def _anchors(self, part: np.ndarray, events: tuple) -> tuple[np.ndarray, list[int]]:
        """Places the events of one run through a block. -> (instructions, positions)"""
        places: dict[tuple, list[int]] = defaultdict(list)
        for at, i in enumerate(part.tolist()):
            if i < self.pseudo:
                places[self.code.instructions[i].opcode.split(".")[0]].append(at)
        taken: set[int] = set()
        found = [-1] * len(events)

        def candidates(kind: int) -> list[int]:
            return [
                at
                for at in range(len(part))
                if part[at] < self.pseudo
                and self.code.instructions[part[at]].opcode.startswith(ANCHORS.get(kind, ("?",)))
            ]

        by_kind = {kind: candidates(kind) for kind in {k for _, k in events}}
        for n, (line, kind) in enumerate(events):  # by line
            for at in by_kind[kind]:
                if at not in taken and self.code.instructions[part[at]].line == line:
                    found[n] = at
                    taken.add(at)
                    break
        last: dict[int, int] = {}
        for n, (line, kind) in enumerate(events):  # by order; several events of one instruction share it
            if found[n] < 0:
                before = [found[m] for m in range(n) if found[m] >= 0]
                same = next((found[m] for m in range(n - 1, -1, -1) if events[m] == (line, kind) and found[m] >= 0), -1)
                if same >= 0 and kind != machine.BAR:  # a warp that waits at a barrier cannot reach it again
                    found[n] = same
                else:
                    free = [at for at in by_kind[kind] if at not in taken]
                    later = [at for at in free if not before or at > before[-1]]
                    if later or free:
                        found[n] = (later or free)[0]
                        taken.add(found[n])
            if found[n] >= 0:
                last[kind] = found[n]
        if -1 in found:  # events without an instruction get one that does nothing
            extra = [n for n, at in enumerate(found) if at < 0]
            out, moved = part.tolist(), dict(enumerate(found))
            for n in extra:
                before = [moved[m] for m in range(n) if moved[m] >= 0]
                at = (max(before) + 1) if before else (len(out) if not out else 0)
                out.insert(at, self.pseudo)
                for m in moved:
                    if m != n and moved[m] >= at:
                        moved[m] += 1
                moved[n] = at
            return np.array(out, np.int32), [moved[n] for n in range(len(events))]
        return part, found

    def _variant(self, home: int, turns: int, events: tuple) -> Path:
        base = self.parts[home][turns] if home in self.parts else np.zeros(0, np.int32)
        return self._placed((home, turns), base, events)

    def _placed(self, which: tuple[int, int], base: np.ndarray, events: tuple) -> Path:
        """Returns the instructions `base` with the events that they perform."""
        key = (*which, events)
        found = self.variants.get(key)
        if found is None:
            base, places = self._anchors(base, events) if events else (base, [])
            at, count = np.full(len(base), -1, np.int32), np.zeros(len(base), np.int32)
            order = sorted(range(len(events)), key=lambda k: places[k])
            for n, k in enumerate(order):
                if at[places[k]] < 0:
                    at[places[k]] = n
                count[places[k]] += 1
            found = self.variants[key] = Path(base, at, count, np.array(order, np.int64))
        return found

    def _path(self, blocks: list[int], marks: list[int], events: list[tuple[int, int]]) -> Path:
        """events: (PTX line, kind)"""
        parts: list[Path] = []
        begins: list[int] = []  # first event of each part
        ends = [*marks[1:], len(events)]
        n, total = 0, len(blocks)
        outside = [0] * (1 + max(self.blocks.loops, default=0))  # by depth: the last block in fewer loops
        visited: dict[int, int] = {}
        while n < total:
            home = self.once.get(blocks[n], blocks[n])
            begin = marks[n]
            if self.entries:
                depth = self.blocks.loops[home]
                outside[depth + 1 :] = [n] * (len(outside) - depth - 1)
                if home in self.entries:
                    enters = visited.get(home, -1) < outside[depth]
                    visited[home] = n
                    if enters:
                        instructions, is_turn = self.entries[home]
                        n += is_turn
                        performed = tuple(events[begin : ends[n - 1]]) if is_turn else ()
                        parts.append(self._placed((home, 0), instructions, performed))
                        begins.append(begin)
                        continue
            options = self.parts.get(home, {1: None})
            turns = max(options)
            if home in self.once:
                while n < total and self.once.get(blocks[n]) == home:
                    n += 1
            else:
                turns = next(t for t in options if t == 1 or blocks[n : n + t] == [home] * t)
                n += turns
            parts.append(self._variant(home, turns, tuple(events[begin : ends[n - 1]])))
            begins.append(begin)
        if not parts:
            none = np.zeros(0, np.int32)
            return Path(none, none, none, np.zeros(0, np.int64))
        first = np.repeat(begins, [len(x.instructions) for x in parts])
        at = np.concatenate([x.events for x in parts])
        return Path(
            np.concatenate([x.instructions for x in parts]),
            np.where(at >= 0, at + first, -1).astype(np.int32),
            np.concatenate([x.counts for x in parts]),
            np.concatenate([x.order + b for x, b in zip(parts, begins)]),
        )

    def streams(self, cluster: ClusterTrace) -> Streams:
        """Returns the streams of a cluster. Warps of a role mostly share one path in all CTAs, so paths are cached."""
        out = Streams()
        tables: list[np.ndarray] = [np.zeros((0, 4))]
        first = 0
        if sum(len(x.instructions) for x in self.paths.values()) > KEPT:
            self.paths.clear()
        for warp in cluster.warps:
            kinds = [e[:2] for e in warp.events]
            key = (tuple(warp.blocks), tuple(warp.marks), tuple(kinds))
            path = self.paths.get(key)
            if path is None:
                path = self.paths[key] = self._path(warp.blocks, warp.marks, kinds)
            out.paths.append(path)
            out.firsts.append(first)
            if warp.events:
                tables.append(np.array(warp.events, np.float64)[path.order, 1:])
                first += len(warp.events)
        out.table = np.concatenate(tables)
        return out
