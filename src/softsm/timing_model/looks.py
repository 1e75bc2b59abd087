"""Counts what memory instructions request, by PTX line.

address_trace.py copies the address registers while a CTA runs; this module evaluates them when the CTA has ended,
all samples of an instruction at once."""

from __future__ import annotations

import numpy as np

from softsm.engine import program as pg
from softsm.timing_model import address_trace
from softsm.timing_model.accesses import (
    SECTOR,
    Access,
    comes_later,
    held_wavefronts,
    in_machine_order,
    joins,
    repeated,
    sectors_of,
    shifts,
    steps_of,
    turns_of,
    wavefronts,
)

SHARED_ACCESS = (pg.OP_LDS, pg.OP_STS, pg.OP_ATOM_S)
GLOBAL_ACCESS = (pg.OP_LDG, pg.OP_STG, pg.OP_ATOM_G, pg.OP_LD, pg.OP_ST)
STORES = (pg.OP_STG, pg.OP_ST)
WAYS, SPACES = ("read", "write", "atomic"), ("load", "store", "atomic")
LOOKS = 64  # executions of one instruction whose addresses are sampled, per warp
REPEATED = 1.3  # cost, in sectors, of an atomic operation whose word another lane has just changed
# ... and of one among many scattered ones, which load the slices of L2 unevenly
# (benchmarks/microbench, everyday: scattered atomics; counts by atomics of seeds 707 and 808)
UNEVEN, MANY_SECTORS = 1.25, 8
PARTS_OF_LINES = 2.5  # sectors of a line: below it, device memory may deliver more than was requested
ROW_STEP = 64 << 10  # bytes: a larger step leaves the row
DEVICE_PAGE = 1 << 10  # bytes of device memory that one bank holds open


class Instructions:
    """The memory instructions of a program, by record."""

    def __init__(self, program) -> None:
        code = program.code
        ops, forms, offsets = code[:, 0], code[:, 4].astype(np.int64), code[:, 3].astype(np.int64)
        self.shared = np.isin(ops, SHARED_ACCESS)
        self.there = self.shared | np.isin(ops, GLOBAL_ACCESS)
        self.generic = np.isin(ops, (pg.OP_LD, pg.OP_ST, pg.OP_ATOM_G))
        self.any_generic = bool(self.generic.any())
        self.store = np.isin(ops, STORES)
        self.atomic = np.isin(ops, (pg.OP_ATOM_G, pg.OP_ATOM_S))
        self.size = np.where(self.atomic, 4, np.maximum(1, forms >> 4 & 15) << (forms & 3))
        self.offset = np.where(offsets >> 31 != 0, offsets - (1 << 32), offsets)
        line = np.array([ins.line for ins in program.instructions])
        self.lines = np.unique(line[self.there])  # PTX lines with memory instructions
        self.of = np.searchsorted(self.lines, line) * self.there  # index into `lines`, by record


class Samples:
    """The sampled accesses of a run, one in an element of each array, and what they request."""

    def __init__(self, known: Instructions, rows: np.ndarray) -> None:
        self.known, self.rows = known, rows
        self.records, self.active, self.warps, self.steps, self.first = rows[:, : address_trace.LANES + 1].T.copy()
        self.of = known.of[self.records]
        self.sizes, self.offsets = known.size[self.records], known.offset[self.records]
        self.first += self.offsets
        self.bytes = 32 * self.sizes
        self.lanes = None
        if (self.active != pg.ALL).any():
            self.lanes = self.active[:, None] >> np.arange(32) & 1
            leader = address_trace.LANES + self.lanes.argmax(1)
            self.first = rows[np.arange(len(rows)), leader] + self.offsets
            self.bytes = self.sizes * self.lanes.sum(1)
        self.shared = known.shared[self.records]
        if known.any_generic:
            self.shared |= known.generic[self.records] & (self.first >= pg.SHARED_WINDOW)
        # See Access.
        self.units, self.lines, self.turns, self.missed, self.distant = np.zeros((5, len(rows)), np.int64)
        self.joined, self.later, self.along, self.jumps = np.zeros((4, len(rows)), np.int64)

    def addresses(self, those: np.ndarray) -> np.ndarray:
        """Gives inactive lanes the address of an active one."""
        found = self.rows[those, address_trace.LANES :] + self.offsets[those, None]
        return found if self.lanes is None else np.where(self.lanes[those] == 1, found, self.first[those, None])

    def count_shared(self) -> None:
        for size in set(self.sizes[self.shared].tolist()):
            those = (self.shared & (self.sizes == size)).nonzero()[0]
            self.units[those] = wavefronts(self.addresses(those), size)

    def sums(self) -> tuple[np.ndarray, ...]:
        """Returns what an Access adds up, in the order of its fields from `units` on."""
        fetches = (self.missed > 0) | (self.joined > 0)
        return (
            self.units, self.lines, self.turns, self.missed, self.distant, fetches, self.distant > 0,
            fetches & (self.later > 0), self.along, self.jumps, self.bytes,
        )  # fmt: skip


class GlobalSamples:
    """Those of them that access global memory. starts: addresses of the tensors; cta: of each."""

    def __init__(self, samples: Samples, those: np.ndarray, starts: list[int], cta: np.ndarray) -> None:
        known = samples.known
        self.samples, self.those, self.cta, self.tensors = samples, those, cta, len(starts) + 1
        self.tensor = np.searchsorted(starts, samples.first[those], "right") - 1
        self.shift = shifts(starts)[self.tensor]
        self.atomic = known.atomic[samples.records[those]]
        self.store = known.store[samples.records[those]] | self.atomic
        self.at = samples.first[those] + self.shift  # where the first lane's access begins on a GPU

    def count(self) -> None:
        s, those, cta = self.samples, self.those, self.cta
        step, ends = s.steps[those], None
        if (s.active[those] == pg.ALL).all() and 0 <= step.min() and step.max() <= SECTOR:
            ends = self.at[:, None] + 31 * np.outer(step, (0, 1))
        order = turns_of(s.warps)[those]
        s.units[those], s.missed[those], s.distant[those], s.lines[those] = sectors_of(
            ends, lambda: s.addresses(those) + self.shift[:, None], self.store, cta, order
        )
        load = those[~self.store]
        even = (s.active[load] == pg.ALL) & (abs(s.steps[load]) < address_trace.NO_STEP >> 8)
        s.turns[load] = held_wavefronts(
            np.where(even, s.steps[load], 0), even, s.sizes[load], lambda k: s.addresses(load[k])
        )
        if self.atomic.any():
            self.count_atomics(those[self.atomic])
        every = len(s.known.of)
        which, same = s.warps[those] * every + s.records[those], cta * every + s.records[those]
        turn = turns_of(which)
        s.joined[those] = joins(same, turn, self.at >> 5, s.missed[those])
        later = comes_later(cta, turn, s.warps[those], order, self.at >> 6)
        s.later[those] = (s.lines[those] == 1) & ~self.store & later
        step = steps_of(which, s.first[those])
        s.along[those] = self.store & (step > 0) & (step <= ROW_STEP)
        s.jumps[those] = ~self.store & (abs(step) >= DEVICE_PAGE)

    def count_atomics(self, added: np.ndarray) -> None:
        s = self.samples
        on = s.lanes[added] == 1 if s.lanes is not None else np.ones((len(added), 32), bool)
        more = REPEATED * repeated(s.addresses(added) + self.shift[self.atomic, None], on)
        s.units[added] += np.rint(more).astype(np.int64)
        uneven = (s.units[added] > MANY_SECTORS) & (s.steps[added] == address_trace.NO_STEP)
        s.units[added] = np.rint(s.units[added] * np.where(uneven, UNEVEN, 1.0))
        s.missed[added] = s.units[added]

    def add_spans(self, traces: list, often: list[float]) -> None:
        """Adds to the traffic of each CTA where it reads parts of lines of a tensor."""
        s, those = self.samples, self.those
        lone = (~self.store & (s.units[those] < PARTS_OF_LINES * s.lines[those])).nonzero()[0]
        for key in np.unique(self.tensor[lone] * len(traces) + self.cta[lone]).tolist():
            at, k = divmod(key, len(traces))
            mine = lone[(self.tensor[lone] == at) & (self.cta[lone] == k)]
            times = np.mean([often[line] for line in s.of[those[mine]].tolist()])
            words = s.addresses(those[mine]) + self.shift[mine, None]
            traces[k].traffic[at, "read span"] = int(words.max() - words.min()) + 1
            traces[k].traffic[at, "read blocks"] += round(len(np.unique(words >> 6)) * float(times))

    def add_traffic(self, out: dict[int, Access], traces: list, often: list[float]) -> None:
        """Adds bytes and lines to the traffic of each CTA, by tensor and way, and sectors to each access."""
        s, those = self.samples, self.those
        keys = (s.of[those] * self.tensors + self.tensor + 1) * 3 + self.store + self.atomic
        keys = keys * len(traces) + self.cta
        asked = np.bincount(keys, s.units[those])
        found = asked.nonzero()[0]
        sums = found, asked[found], *(np.bincount(keys, x[those])[found] for x in (s.missed, s.lines))
        for key, all_, new, lines in zip(*(x.astype(int).tolist() for x in sums)):
            key, k = divmod(key, len(traces))
            line, at, way = key // 3 // self.tensors, key // 3 % self.tensors - 1, WAYS[key % 3]
            out[line].space = SPACES[key % 3]
            out[line].tensors[at] += all_
            traces[k].traffic[at, way] += round(32 * new * often[line])
            traces[k].traffic[at, f"{way} lines"] += round(lines * new / all_ * often[line])


class Looks:
    """The sampled accesses of one run."""

    def __init__(self, instructions: Instructions) -> None:
        self.instructions = instructions
        self.notes = address_trace.Notes(np.where(instructions.there, LOOKS, 0))

    def accesses(
        self, starts: list[int], ctas: list[int], traces: list, places: dict[int, tuple[int, int]] | None = None
    ) -> dict[int, Access]:
        """Returns the accesses by PTX line. starts: addresses of the tensors; ctas: the CTA of each warp; traces: for
        each CTA, the trace that gets its traffic; places: the block and the number of the machine instruction that a
        PTX line became."""
        known = self.instructions
        samples = Samples(known, self._rows(places))
        if not len(samples.records):
            return {}
        samples.count_shared()
        looks = np.bincount(samples.of, minlength=len(known.lines)).tolist()
        out = {line: Access() for line, n in enumerate(looks) if n}
        often = self._executed()
        those = (~samples.shared).nonzero()[0]
        if len(those):
            found = GlobalSamples(samples, those, starts, np.array(ctas)[samples.warps[those]])
            found.count()
            found.add_spans(traces, often)
            found.add_traffic(out, traces, often)
        totals = [np.bincount(samples.of, x, len(looks)).astype(int).tolist() for x in samples.sums()]
        for n, a in out.items():
            a.looks, a.ran = looks[n], round(looks[n] * often[n])
            a.units, a.lines, a.wavefronts, a.missed, a.distant, a.missing, a.again, *rest = (x[n] for x in totals)
            a.later, a.along, a.jumps, a.bytes = rest
        return {known.lines.tolist()[n]: a for n, a in out.items()}

    def _rows(self, places: dict[int, tuple[int, int]] | None) -> np.ndarray:
        """Returns the samples in the order of the machine code, without accesses to local memory, which is private."""
        rows, known = self.notes.rows(), self.instructions
        if places and len(rows):
            blocks, numbers = np.array([places.get(line, (-1, 0)) for line in known.lines.tolist()]).T
            records = rows[:, address_trace.RECORD]
            of = known.of[records]
            rows = rows[in_machine_order(rows[:, address_trace.WARP], records, blocks[of], numbers[of])]
        if known.any_generic:
            local = rows[:, address_trace.LANES :].max(1) >= pg.LOCAL_WINDOW
            rows = rows[~(known.generic[rows[:, address_trace.RECORD]] & local)]
        return rows

    def _executed(self) -> list[float]:
        """Returns how many executions a look at each PTX line represents."""
        known = self.instructions
        left = np.array(self.notes.left)[:, known.there]
        if left.min(initial=0) >= 0:  # all were sampled
            return [1.0] * len(known.lines)
        ran, seen = (np.bincount(known.of[known.there], (LOOKS - x).sum(0)) for x in (left, np.maximum(left, 0)))
        return (ran / np.maximum(seen, 1)).tolist()
