"""Compares loads, stores and asynchronous accesses of shared and global memory with the shadow (checks/shadow.py,
checks/byte_ranges.py). Compiled code writes findings to `races`, which checks/findings.py reads."""

from __future__ import annotations

import bisect
from typing import NamedTuple

import numpy as np

from softsm.checks import byte_ranges, global_shadow
from softsm.checks import shadow as sh
from softsm.checks.boxes import spans_of
from softsm.checks.clocks import WORDS
from softsm.checks.order import address_of
from softsm.checks.views import zeros
from softsm.engine import program as pg

REDUCTIONS = ("TMA reduction", "bulk reduction", "bulk reduction in a peer", "red.async")
COLLECTIVE = ("cp.async", "wgmma")  # operations that are not issued by one lane
LARGE = 1 << 26  # words of a shadow that are worth a mapping of their own
READ, WROTE = 16, 32  # flags of `touched_since`


class Touched(NamedTuple):
    """The accesses of a launch to global memory: shadows, and the address of the first word of each."""

    origins: list[int]
    shadows: list[np.ndarray]
    elsewhere: list[np.ndarray]  # `touched_since` of forked processes (engine/processes.py)

    def owners(self) -> list[np.ndarray]:
        """Returns, for each word, the clusters that accessed it, as uint32."""
        return [shadow[sh.OWNER :: sh.GLOBAL_RECORD].copy() for shadow in self.shadows]

    @staticmethod
    def meet(shares: list[np.ndarray]) -> bool:
        """Returns whether one process wrote a word that another accessed. shares: `touched_since` of each process."""
        touched = sum((flags != 0).astype(np.int32) for flags in shares)
        return any((touched[flags & WROTE != 0] > 1).any() for flags in shares)


class MemoryAccesses:
    """The part of the checker that owns the shadow of global memory and the buffer of findings."""

    def __init__(self, checker):
        self.checker, self.order = checker, checker.order
        self.global_memory, self.warps = checker.machine.global_memory, checker.warps
        self.module, self.spans = global_shadow, byte_ranges
        self.races = np.zeros(sh.CLUSTERS + self.order.slots, np.int64)
        self.races_address = self.races.ctypes.data
        self.races[sh.PARTS], self.races[sh.HEARD] = address_of(self.order.parts), address_of(self.order.heard)
        self.one_span = np.zeros(2, np.int64)
        self.one_span_address = address_of(self.one_span)
        self.kept = np.zeros((32, 16), np.uint8)  # contents of the rows before a stmatrix
        self.order.newest[pg.KEPT] = address_of(self.kept)
        self.clusters = self.races[sh.CLUSTERS :]
        self.inherited = 0  # number of the last operation of earlier launches
        self.touched = self.shadow_global()
        self.global_table = np.array([s.ctypes.data for s in self.touched.shadows] or [0], np.int64)
        self.global_table_address = self.global_table.ctypes.data

    def shadow_global(self) -> Touched:
        allocations = self.global_memory.allocations
        sizes = ((a.end + 3) // 4 - a.start // 4 for a in allocations)
        records = [size * sh.GLOBAL_RECORD for size in sizes]
        shadows = [zeros((size,)) if size > LARGE else np.zeros(size, np.uint32) for size in records]
        return Touched([a.start & ~3 for a in allocations], shadows, [])

    def read_only(self, w, lanes: list[int], addresses: np.ndarray) -> None:
        """Checks ld.global.nc: no write may change the bytes while the grid runs. Only the first lane's allocation is
        checked."""
        for start, shadow in zip(self.touched.origins, self.touched.shadows):
            at = addresses - start >> 2
            if 0 <= at[0] < len(shadow) // sh.GLOBAL_RECORD:
                inside = at.clip(0, len(shadow) // sh.GLOBAL_RECORD - 1)
                agent, number = (shadow[inside * sh.GLOBAL_RECORD + k] for k in (0, 1))
                own = (agent != 0) & ((agent != sh.ASYNC) | (number > self.inherited))
                written = np.flatnonzero(own & (inside == at))
                if len(written):
                    place = int(addresses[written[0]])
                    self.checker.findings.misused(
                        w,
                        "read-only",
                        "global bytes are read as read-only data, and this grid has written them",
                        f"reads global bytes {place:#x} and following through the non-coherent cache",
                        lanes[written[0]],
                    )
                return

    def contended(self) -> bool:
        """Returns whether a cluster wrote a word of global memory that another one accessed."""
        return bool(self.races[sh.CONTENDED])

    def touched_since(self, owners: list[np.ndarray]) -> np.ndarray:
        """Returns a uint8 for each word of the shadows, one after the other: 0 if the owners are unchanged, else the
        bytes written last (4 bits), READ and WROTE."""
        flags = [np.zeros(len(before), np.uint8) for before in owners]
        for shadow, before, here in zip(self.touched.shadows, owners, flags):
            self.spans.touched_words(shadow.ctypes.data, before.ctypes.data, len(before), here.ctypes.data)
        return np.concatenate(flags) if flags else np.zeros(0, np.uint8)

    def asynchronous(self, op, region, write: int, generic: bool) -> None:
        """Checks an asynchronous access. region: ('shared', cta, low, high), ('spans', cta, int64 [n, 2]),
        ('global', low, high) or ('tensor', box)."""
        w, place = op.warp, region[0]
        view = w.view
        if place == "shared" or place == "spans":
            cta, told = region[1], 0
            if place == "spans":
                spans = region[2]
                where, count = region[3] if len(region) > 3 else address_of(spans), len(spans)
            else:
                self.one_span[0], self.one_span[1] = region[2], region[3]
                where, count = self.one_span_address, 1
            if write and cta is not w.cta and not self.checker.strict:
                loose = np.maximum(view.clock[: self.order.slots], view.loose)
                told = address_of(loose)
            self.spans.asynchronous(
                cta.view.site,
                self.order.newest_address,
                self.races_address,
                where,
                count,
                write,
                op.number,
                generic,
                op.seen or view.at,
                told,
                w.pc,
                view.slot,
                sh.NOBODY if op.kind in COLLECTIVE else op.lane,
                sh.STRONG | sh.CHANGES if write and op.kind in REDUCTIONS else 0,
            )
            return
        number, base, slots = op.number, view.at, self.order.slots
        known = base + 8 * slots
        fenced = known if generic else known + 4 * WORDS
        seen = base if write or generic else base + 4 * slots  # see byte_ranges.asynchronous
        kind = sh.GENERIC_COPY if generic else sh.ASYNC
        if place == "tensor":
            spans = spans_of(region[1])
            if spans is None:
                return
            first, table, where, end = spans
            begin, count = first + table.item(0, 0), len(table)
        else:
            begin, end = region[1:3]
            self.one_span[0], self.one_span[1] = begin, end
            first, where, count = 0, self.one_span_address, 1
        memory = self.global_memory
        i = bisect.bisect_right(memory.starts, begin) - 1
        if i < 0 or i >= len(self.touched.shadows) or first + end > memory.allocations[i].end:
            return
        flags = sh.STRONG if op.kind in REDUCTIONS else 0
        self.spans.asynchronous_global(
            self.global_table.item(i),
            memory.allocations[i].start & ~3,
            first,
            where,
            count,
            write,
            number,
            kind,
            seen,
            known,
            fenced,
            self.races_address,
            w.pc,
            flags,
            w.view.slot,
        )

    def access(
        self, w, cta, low: int, high: int, write: bool, strong: bool = False, lane: int = -1, same: bool = False
    ) -> None:
        """Checks an access by an instruction executed in Python to bytes [low, high) of shared memory, generic proxy.
        same: the store changes no byte."""
        flags = (sh.STRONG if strong else 0) | (sh.QUIET if same else 0)
        if lane >= 0:
            w.view.head[1] |= np.uint32(1 << lane)
        if cta is w.cta:
            self.spans.span(w.state, low, high, write, flags, w.pc, lane)
        else:
            self.checker.operations.touches_peer(w, cta)
            base = w.view.at
            self.spans.peer(
                cta.view.shadow.address,
                cta.view.shadow.reads_address,
                cta.view.shadow.size[0],
                self.warps,
                cta.view.slot0,
                w.view.slot + 1,
                base,
                base + 8 * self.order.slots,
                low,
                high,
                write,
                flags,
                w.pc,
                int(self.order.newest[0]),
                self.races_address,
                lane,
            )
        self.checker.findings.collect(w)

    def global_access(self, w, low: int, high: int, write: bool, strong: bool, lane: int, same: bool) -> None:
        """Checks an access by an instruction executed in Python to bytes [low, high) of an allocation of global
        memory.
        """
        memory = self.global_memory
        i = bisect.bisect_right(memory.starts, low) - 1
        if i < 0 or i >= len(self.touched.shadows):
            return
        known, newest = w.view.at + 8 * self.order.slots, int(self.order.newest[0])
        accessor = w.view.slot + 1, w.view.at, known, newest, self.races_address
        w.view.head[1] |= np.uint32(1 << lane)
        for word in range(low & ~3, high, 4):
            touched = (1 << min(high - word, 4)) - 1 & ~((1 << max(low - word, 0)) - 1)
            self.module.global_record(
                self.touched.shadows[i].ctypes.data + (word - (memory.allocations[i].start & ~3)) * sh.GLOBAL_RECORD,
                word,
                (word - (memory.allocations[i].start & ~3)) // 4,
                touched | (sh.STRONG if strong else 0) | (sh.QUIET if same else 0),
                write,
                w.pc,
                lane,
                accessor,
            )
        self.checker.findings.collect(w)

    def discard(self, w, low: int, high: int, lane: int) -> None:
        """Records an ordinary write that leaves the words without a value."""
        self.global_access(w, low, high, True, False, lane, False)
        i = bisect.bisect_right(self.global_memory.starts, low) - 1
        words = self.touched.shadows[i].reshape(-1, sh.GLOBAL_RECORD)
        first = low - self.touched.origins[i] >> 2
        words[first : first + (high - low) // 4, 3] |= np.uint32(sh.LIVE)

    def lines(self, w, cta, offsets: np.ndarray, write: bool, same: bool = False) -> None:
        """Checks ldmatrix and stmatrix, which access rows of 16 bytes. same: the store changes no byte."""
        if cta is not w.cta:
            for at in offsets.tolist():
                self.access(w, cta, at, at + 16, write)
            return
        offsets = np.ascontiguousarray(offsets, np.int64)
        at = offsets.__array_interface__["data"][0]
        self.spans.lines(w.state, at, len(offsets), write, w.pc, sh.QUIET if same else 0)
        self.checker.findings.collect(w)
