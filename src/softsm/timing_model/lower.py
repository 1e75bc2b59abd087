"""Turns a trace of PTX blocks into the stream of machine instructions that each warp issues.

ptxas forms its own basic blocks. Each belongs to the PTX block that most of its instructions come from and runs as
often as that PTX block did. Machine blocks that only repeat lines already present are slow paths (the second try of a
wait, a division of denormals), which are left out, or copies of an unrolled loop, which run iteration by iteration. A
block with the only memory access of a line is not a slow path: ptxas jumps over predicated loads. Events (trace.py)
are attached to the machine instruction that performs them, by PTX line, and by order where a line is off.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from softsm.timing_model import machine
from softsm.timing_model.blocks import Blocks
from softsm.timing_model.loops import TARGET, machine_depths
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
SHORT = 4  # machine instructions of a block that tries a wait again
PEELED = 4  # ratio of instructions from a loop to instructions from before it
MANY_PAIRS = 8  # (line, opcode) pairs: fewer are not significant
MANY_TURNS = 3  # the fewest iterations in a block: two may be the halves of a 64-bit value
KEPT = 1 << 20  # machine instructions of the cached paths of a kernel
ACCESSES = ("LDG.", "LD.", "STG", "ST.", "ATOMG", "ATOM.", "RED.", "REDG", "LDS", "STS", "ATOMS")
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
        self.again = self._second_tries()
        self.once = self._unrolled(homes, part_of)
        self.parts = {home: self._kept(numbers) for home, numbers in homes.items()}
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
                if ins.line:
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

    def _around(self, home: int, homes: dict[int, list[int]]) -> int | None:
        """Returns the nearest block before `home` that is in fewer loops, all of which also enclose `home`."""
        least = self.blocks.loops[home]
        for b in range(home - 1, -1, -1):
            if self.blocks.loops[b] < least:
                least = self.blocks.loops[b]
                if b in homes:
                    return b
        return None

    def _second_tries(self) -> set[int]:
        """Returns short blocks after an EXIT that test a barrier which earlier code has tested, perhaps with the phase
        in another register."""

        def asks(block: range) -> set[str]:
            made = (self.code.instructions[i] for i in block)
            return {
                ins.text.partition("[")[2].partition("]")[0] for ins in made if ins.opcode.startswith("SYNCS.PHASECHK")
            }

        asked: set[str] = set()
        out: set[int] = set()
        behind = False
        for number, block in enumerate(self.code.blocks):
            asking = asks(block)
            if behind and len(block) <= SHORT and asking and asking <= asked:
                out.add(number)
            asked |= asking
            behind |= self.code.instructions[block[-1]].opcode == "EXIT"
        return out

    def _tried_again(self, numbers: list[int]) -> set[int]:
        """Returns blocks after all other code that only retry a wait. They have the line of the try_wait, the first try
        often a neighbour's; the wait belongs to the first try, or it would follow the code that depends on it."""
        again = self.again & set(numbers)
        tries = sum(
            self.code.instructions[i].opcode.startswith("SYNCS.PHASECHK")
            for number in numbers
            if number not in again
            for i in self.code.blocks[number]
        )
        return again if tries >= len(again) else set()

    def _kept(self, numbers: list[int]) -> dict[int, np.ndarray]:
        """Maps iteration counts to the instructions that perform them, most iterations first; 1 if not a loop."""
        kept: list[int] = []
        seen: Counter = Counter()
        accessed: set[int] = set()
        left_out: list[int] = []
        again = self._tried_again(numbers)
        if cut := self._cut_copies([n for n in numbers if n not in again]):
            return cut
        for number in (n for n in numbers if n not in again):
            made = [self.code.instructions[i] for i in self.code.blocks[number]]
            lines = Counter(ins.line for ins in made)
            accesses = self._accesses(number).keys()
            new = sum(n for line, n in lines.items() if line not in seen)
            if not kept or new * 4 >= sum(lines.values()) or new >= 12 or accesses - accessed:
                kept.append(number)
                seen.update(lines)
                accessed |= accesses
            else:
                left_out.append(number)
        best = max(kept, key=lambda k: len(self.code.blocks[k]))
        rest = [i for k in kept if k != best for i in self.code.blocks[k]]

        def made_of(block: Iterable[int]) -> np.ndarray:
            return np.array([*rest, *block], np.int32)

        whole = np.array([i for number in kept for i in self.code.blocks[number]], np.int32)
        longer = self.code.blocks[best]
        by_accesses = self._turns_by_accesses(best, left_out)
        if by_accesses:
            return {turns: made_of(block) for turns, block in sorted(by_accesses.items(), reverse=True)}
        copies = [longer]
        for block in (self.code.blocks[number] for number in left_out):
            lines = Counter(self.code.instructions[i].line for i in block)
            shared = sum((Counter(self.code.instructions[i].line for i in longer) & lines).values())
            if shared >= 0.7 * min(len(block), len(longer)) and min(len(block), len(longer)) >= 6:
                copies.append(block)
        # ptxas unrolls by four and leaves copies for two iterations and for one: the smallest is one iteration.
        *_, longer = blocks = sorted(copies, key=len)
        if len(longer) >= 1.7 * len(blocks[0]):
            return {self._turns(longer, blocks[0]): made_of(longer), 1: made_of(blocks[0])}
        turns = self._copies(longer) if self.depths[best] else 1
        if turns >= MANY_TURNS:
            return {turns: whole, 1: made_of(self._first_turn(longer))}
        return {1: whole}

    def _accesses(self, number: int) -> Counter:
        """Counts the memory accesses of a machine block by PTX line."""
        made = (self.code.instructions[i] for i in self.code.blocks[number])
        return Counter(ins.line for ins in made if ins.line and ins.opcode.startswith(ACCESSES))

    def _cut_copies(self, numbers: list[int]) -> dict[int, np.ndarray]:
        """Maps iteration counts to copies of a loop, unrolled and not, each of which ptxas has cut into blocks where
        it jumps over a load. Such a jump meets the other way at a BSYNC; others lead to a copy or a turn."""
        first = self._copy_starts(numbers)
        copies: list[list[int]] = []
        for n in numbers:
            if n in first or not copies:
                copies.append([])
            copies[-1].append(n)
        made = [(c, sum((self._accesses(n) for n in c), Counter())) for c in copies]
        made = [(c, accesses) for c, accesses in made if accesses]
        least = {line: min(a[line] for _, a in made if a[line]) for line in {x for _, a in made for x in a}}
        found: dict[int, np.ndarray] = {}
        cut = False
        for blocks, accesses in made:
            turns = {accesses[line] / n for line, n in least.items()}
            inside = [i for n in blocks for i in self.code.blocks[n]]
            if len(turns) > 1 or any(self.code.instructions[i].opcode.startswith(ALL) for i in inside):
                return {}
            cut |= sum(bool(self._accesses(n)) for n in blocks) > 1 and max(turns) > 1
            found.setdefault(round(turns.pop()), np.array(inside, np.int32))
        return dict(sorted(found.items(), reverse=True)) if cut and 1 in found else {}

    def _copy_starts(self, numbers: list[int]) -> set[int]:
        """Returns the blocks at which a loop, or another copy of it, begins."""
        code, out = self.code, set()
        for n in numbers:
            last = code.instructions[code.blocks[n][-1]]
            name = TARGET.search(last.text) if last.opcode.startswith("BRA") else None
            to = code.labels.get(name[0], len(code.instructions)) if name else len(code.instructions)
            if to < len(code.instructions) and code.instructions[to].opcode != "BSYNC":
                target = code.instructions[to].block
                out |= {target} if target > n else {target, n + 1}
        return out

    def _turns_by_accesses(self, best: int, left_out: list[int]) -> dict[int, Iterable[int]]:
        """Maps iteration counts to blocks of an unrolled loop whose remainder ptxas has split where it jumps over a
        load. The remainder is then not a copy of the others, but the accesses tell how many iterations each has."""
        longer = self._accesses(best)
        least = {
            line: min([n, *filter(None, (self._accesses(k)[line] for k in left_out))]) for line, n in longer.items()
        }
        found: dict[int, Iterable[int]] = {}
        cut = False
        for number in (best, *left_out):
            accesses = self._accesses(number)
            turns = {accesses[line] / n for line, n in least.items()}
            if len(turns) == 1 and 0 not in turns and turns.copy().pop() >= 1:
                if len(self.code.blocks[number]) < 6:
                    cut = True
                else:
                    found.setdefault(round(turns.pop()), self.code.blocks[number])
        if not cut or not self.depths[best] or max(found, default=1) < 2:
            return {}
        return {1: self._first_turn(self.code.blocks[best])} | found

    def _copies(self, block: range) -> int:
        """Counts the iterations in a block without a separate copy of one iteration: ptxas unrolls so if it knows the
        trip count. Most lines occur that often with each of their opcodes, except lines with more than one PTX
        instruction (inline PTX). Products and copies have moves of a line for each of them; ptxas does not unroll
        loops with those in this way."""
        if any(self.code.instructions[i].opcode.startswith(ALL) for i in block):
            return 1
        made, crowded = [self.code.instructions[i] for i in block], self.blocks.crowded
        pairs = Counter((x.line, x.opcode) for x in made if x.line and x.line not in crowded)
        return round(float(np.median(list(pairs.values())))) if len(pairs) >= MANY_PAIRS else 1

    def _first_turn(self, block: range) -> list[int]:
        seen: set[tuple[int, str]] = set()
        out = []
        for i in block:
            key = self.code.instructions[i].line, self.code.instructions[i].opcode
            if key not in seen:
                seen.add(key)
                out.append(i)
        return out

    def _turns(self, longer: range, single: range) -> int:
        """Counts the iterations in an unrolled copy: most of its instructions occur that often (counters and branches,
        which iterations share, do not). Counts by opcode: ptxas gives products of later iterations other lines."""
        many, one = (Counter(self.code.instructions[i].opcode for i in block) for block in (longer, single))
        ratios = [many[op] / n for op, n in one.items() if op in many for _ in range(n)]
        return max(2, round(float(np.median(ratios))))

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
        key = (home, turns, events)
        found = self.variants.get(key)
        if found is None:
            base = self.parts[home][turns] if home in self.parts else np.zeros(0, np.int32)
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
        while n < total:
            home = self.once.get(blocks[n], blocks[n])
            begin = marks[n]
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
