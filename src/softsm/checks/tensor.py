"""Checks tensor memory: the order of tcgen05 operations, reads of cells that were never written, types, and operations
in flight.

A cell is one column of 16 lanes. Its shadow holds the last writer, three readers (numbers of operations), and the kind
of its values, if the program reveals it (an accumulator, f32 values that a warp stored).
"""

from __future__ import annotations

import functools
import itertools

import numpy as np

from softsm.checks import tmem_shadow
from softsm.checks.advice import by_kind
from softsm.checks.order import address_of
from softsm.checks.shadow import OPS
from softsm.checks.tmem_shadow import (
    COLUMNS,
    COPY,
    COPY_4X256B,
    HELD_AT,
    LANE_GROUPS,
    LOAD,
    PRODUCT,
    REGION,
    SHADOW_CELLS,
    SHIFT,
    STORE,
    SUMS,
    TABLES,
)
from softsm.engine import program as pg
from softsm.engine.in_flight import AsyncOp
from softsm.memory.tensor_memory import ACCUMULATOR, STORED, STORED_F32, STORED_PACKED, UNKNOWN
from softsm.report.diagnostics import Diagnostic

HELD = {ACCUMULATOR: "an accumulator wrote them", STORED_F32: "they were stored as f32 values"}
KINDS = {"tcgen05.ld": LOAD, "tcgen05.st": STORE, "shift": SHIFT, "cp": COPY, "cp.4x256b": COPY_4X256B}
_accumulators = itertools.count()
PACKED = ("f16", "bf16", "e4m3", "e5m2", "e2m3", "e3m2", "e2m1", "s8", "u8")


class TensorShadow:
    """The shadow of one SM's tensor memory. The compiled code of checks/tmem_shadow.py depends on its layout."""

    def __init__(self) -> None:
        raw = np.zeros(HELD_AT // 8 + SHADOW_CELLS // 8, np.int64)
        self.writer, *self.readers = raw[: HELD_AT // 8].reshape(TABLES, LANE_GROUPS, COLUMNS)
        self.held = raw[HELD_AT // 8 :].view(np.uint8).reshape(LANE_GROUPS, COLUMNS)
        self.address = address_of(raw)


@functools.lru_cache(maxsize=1 << LANE_GROUPS)
def rows_of(groups: int) -> list[int] | slice:
    """Returns groups of 16 lanes as an index: a slice if they are evenly spaced, so that tables give views."""
    rows = [g for g in range(LANE_GROUPS) if groups >> g & 1]
    step = rows[1] - rows[0] if len(rows) > 1 else 1
    even = slice(rows[0], rows[-1] + 1, step)
    return even if list(range(LANE_GROUPS))[even] == rows else rows


def cells(groups: int, low: int, high: int):
    """Returns the cells of a region as an index into the tables of a TensorShadow."""
    rows = rows_of(groups)
    return (rows, slice(low, high)) if isinstance(rows, slice) else np.ix_(rows, range(low, high))


class Where:
    """A place in tensor memory, which is formatted only for a report."""

    __slots__ = ("groups", "high", "low")

    def __init__(self, groups: int, low: int, high: int):
        self.groups, self.low, self.high = groups, low, high

    def __str__(self) -> str:
        rows = [g for g in range(LANE_GROUPS) if self.groups >> g & 1]
        return f"tensor memory lanes {lanes_text(rows)}, columns {self.low} to {self.high - 1}"


@functools.cache
def left_and_wrong(operation: str, note: str, write: bool) -> tuple[int, int]:
    """Returns the kind that an access leaves in its cells, and the kinds that they must not hold; see `look` of
    checks/tmem_shadow.py."""
    kind = UNKNOWN
    if write:
        kind = ACCUMULATOR if operation == "tcgen05.mma" else STORED.get(note, UNKNOWN)
    if note.startswith("accumulate"):
        return kind, 1 | 2 << STORED_PACKED if note == "accumulate f32" else 1
    if write:
        return kind, 0
    return kind, 1 | 2 << ACCUMULATOR | 2 << STORED_F32 if note in PACKED else 1


@functools.cache
def product(accumulator: tuple) -> int:
    """Returns the kind of the products on one accumulator; see checks/tmem_shadow.py."""
    return PRODUCT | next(_accumulators) << SUMS


def work(accumulator: tuple, ctas: list, reads: tuple, writes: tuple) -> tuple[np.ndarray, int]:
    """Returns the kind and regions of a product, in the form that `operation` of checks/tmem_shadow.py expects, and
    their address. They are the same for all CTAs that issue it."""
    regions: list[int] = []
    shared: list[int] = []
    for write, those in ((0, reads), (1, writes)):
        for place, cta, *rest in those:
            if place == "tmem":
                low, high, groups, note = rest
                regions += (ctas.index(cta), groups, low, high, write)
                regions += left_and_wrong("tcgen05.mma", note, bool(write))
            else:
                spans, at = rest
                shared += (ctas.index(cta), at, len(spans))
    fields = [product(accumulator), len(regions) // REGION, *regions, len(shared) // 3, *shared]
    made = np.array(fields, np.int64)
    return made, address_of(made)


class TensorChecks:
    """The part of the checker for tensor memory."""

    work = staticmethod(work)

    def __init__(self, checker):
        self.order, self.operations, self.findings = checker.order, checker.operations, checker.findings
        self.report, self.strict = checker.report, checker.strict
        self.by_sm: dict[int, TensorShadow] = {}
        self.touch, self.mark, self.busy = tmem_shadow.touch, tmem_shadow.mark, tmem_shadow.busy
        self.waited, self.in_order = tmem_shadow.waited, tmem_shadow.in_order
        self.found = np.zeros(1 + TABLES * SHADOW_CELLS, np.int64)
        checker.order.newest[pg.FOUND] = address_of(self.found)

    def shadow_of(self, cta) -> TensorShadow:
        shadow = self.by_sm.get(cta.sm.index)
        if shadow is None:
            shadow = self.by_sm[cta.sm.index] = TensorShadow()
        return shadow

    def access(self, op, region, write: bool) -> None:
        """Checks an access. region: ('tmem', cta, first column, end column, lanes as a mask of groups of 16, note).

        note: 'accumulate' and the type if a product adds to the cells that it overwrites; otherwise the element type of
        an operand A, or the kind of cell that a store leaves."""
        _, cta, low, high, groups, note = region
        shadow = self.by_sm.get(cta.sm.index) or self.shadow_of(cta)
        w, number = op.warp, op.number
        left, wrong = left_and_wrong(op.kind, note, write)
        n = self.touch(w.state, shadow.address, groups, low, high, write, number, w.pc, self.kind_of(op), left, wrong)
        if n < 0:  # nothing accessed the cells in between, and their kinds are right
            return
        flags, *entries = self.found[: n + 1].tolist()
        flags &= wrong
        where = Where(groups, low, high)
        if flags & 1:
            self.report.add(
                Diagnostic(
                    "uninitialised",
                    "tensor-memory cells are read, but nothing wrote them",
                    (self.findings.party(w, op, f"reads {where}"),),
                )
            )
        for entry in sorted(entries, key=lambda x: x ^ 1):
            number, did = entry >> 1, "read" if entry & 1 else "wrote"
            other = self.operations.get(number)
            if other is None:
                continue
            if write and did == "wrote" and self.read_between(shadow, cells(groups, low, high), other, op):
                continue
            fix = ""
            if self.strict and self.order.knows(w, number):
                fix = (
                    "they are synchronised, but tcgen05.fence::before_thread_sync before the arrival, or "
                    "tcgen05.fence::after_thread_sync after the wait, is missing"
                )
            self.findings.add_race(
                self.findings.party(w, op, f"{'writes' if write else 'reads'} {where}"),
                self.findings.party(other.warp, other, f"{did} {where}"),
                "tensor memory",
                other,
                fix,
            )
        if flags & ~1:
            self.held_wrongly(op, shadow, where, note, flags)
        self.mark(w.state, shadow.address, groups, low, high, write, op.number, left)

    def unwaited_load(self, w):
        """Returns the last tcgen05.ld that the warp has not waited for."""
        count = w.S.item(pg.S_LOADS)
        issued = self.operations.get(w.S.item(pg.S_LOADS + count)) if count else None
        loads = w.view.unwaited_loads
        return loads[-1] if loads and (issued is None or loads[-1].number > issued.number) else issued

    def loads_used(self, w, loads: frozenset[int]) -> None:
        """Handles an instruction that waits for these loads. At the default level they are complete for it and for
        all that it precedes."""
        if self.strict:
            last = self.unwaited_load(w)
            if last is not None and last.number > w.view.used_early:
                w.view.used_early = last.number
                self.findings.used_early(w, last)
            return
        w.view.unwaited_loads = [op for op in w.view.unwaited_loads if not self.used(w, op, loads)]
        numbers = [w.S.item(pg.S_LOADS + 1 + k) for k in range(w.S.item(pg.S_LOADS))]  # loads that compiled code issued
        left = [number for number in numbers if not self.used(w, self.operations.get(number), loads)]
        w.S[pg.S_LOADS + 1 : pg.S_LOADS + 1 + len(left)] = left
        w.S[pg.S_LOADS] = len(left)
        w.S[pg.S_OWED] = bool(w.view.unwaited_loads or w.view.unwaited_stores)

    def used(self, w, op: AsyncOp | None, loads: frozenset[int]) -> bool:
        if op is not None and id(op.instruction) in loads:
            self.order.observe(w, op)
            return True
        return op is None

    def loads_waited(self, w) -> None:
        self.complete(w, w.view.unwaited_loads, pg.S_LOADS)

    def stores_waited(self, w) -> None:
        self.complete(w, w.view.unwaited_stores, pg.S_STORES)

    def complete(self, w, operations: list, others: int) -> None:
        """Marks these operations of the warp as complete, and `others`, which compiled code has issued."""
        for op in operations:
            self.order.observe(w, op)
        operations.clear()
        self.waited(w.state, others)
        w.S[pg.S_OWED] = bool(w.view.unwaited_loads or w.view.unwaited_stores)

    def held_wrongly(self, op, shadow: TensorShadow, where: Where, note: str, flags: int) -> None:
        """Reports cells whose values have another kind than the operation expects."""
        window = cells(where.groups, where.low, where.high)
        if flags & 2 << STORED_PACKED:
            text = "the product adds to cells that were stored as packed values of 16 bits or less"
            self.check_held(op, shadow, window, STORED_PACKED, text, "adds to {}", where)
        for held, text in HELD.items():
            if flags & 2 << held:
                text = f"cells of operand A are read as packed {note}, but {text}"
                self.check_held(op, shadow, window, held, text, f"reads {{}} as packed {note}", where)

    def check_held(self, op, shadow, window, wrong: int, text: str, what: str, where: Where) -> None:
        """Reports cells that hold values of a wrong kind. what: words for what the operation does; {} is the place."""
        found = shadow.held[window] == wrong
        if not found.any():
            return
        other = self.operations.get(int(shadow.writer[window][found][0]))
        parties = [self.findings.party(op.warp, op, what.format(where))]
        if other is not None:
            parties.append(self.findings.party(other.warp, other, f"wrote {where}"))
        self.report.add(Diagnostic("type", text, tuple(parties)))

    def kind_of(self, op) -> int:
        """Returns the kind of an operation, on which its order depends; see `in_order` of checks/tmem_shadow.py."""
        footprint = op.footprint
        if footprint is None:
            return KINDS[op.kind]
        return product(footprint.accumulator) if footprint.what == "mma" else KINDS[footprint.what]

    def places(self, ctas: list) -> int:
        """Returns the address of the tables and sites of these CTAs."""
        view = ctas[0].view
        if view.places is None:
            pairs = [x for cta in ctas for x in (self.shadow_of(cta).address, cta.view.site)]
            made = np.array(pairs, np.int64)
            view.places = made, address_of(made)
        return view.places[1]

    def read_between(self, shadow: TensorShadow, window, old, new) -> bool:
        """Returns whether products, ordered after `old` and before `new`, read what `old` wrote there. By default it is
        enough that they read a part, because then the whole operation is over; at the strict level they must read all.
        """
        cells = shadow.writer[window] == old.number
        between = np.zeros_like(cells)
        for ring in shadow.readers:
            for number in np.unique(ring[window][cells]):
                reader = self.operations.get(int(number))
                if reader is None or reader.number < old.number:
                    continue
                if self.ordered(old, 0, reader, 0) and self.ordered(reader, 1, new, 1):
                    between |= ring[window] == number
        return bool(between[cells].all() if self.strict else between[cells].any())

    def ordered(self, old, read: int, new, write: int) -> int:
        if old.warp is not new.warp:
            return False
        kinds = (self.operations.log.item(op.number % OPS, 2) for op in (old, new))
        return self.in_order(next(kinds), read, next(kinds), write, self.strict)

    # ---- allocation --------------------------------------------------------------------------------------------

    def allocated(self, cta, column: int, columns: int) -> None:
        """Marks cells as never written."""
        shadow = self.shadow_of(cta)
        window = slice(None), slice(column, column + columns)
        tables: list[np.ndarray] = [shadow.writer, *shadow.readers, shadow.held]
        for table in tables:
            table[window] = 0

    def pair_allocates(self, w) -> None:
        """Checks that the peer runs, which tcgen05.alloc of a pair requires. Tutorials omit the barrier."""
        if not w.cta.view.met:
            text = "tensor memory of a pair of CTAs is allocated, and the peer may not have started"
            found = Diagnostic("peer-start", text, (self.findings.party(w, None, "allocates in both CTAs"),))
            self.report.add(found) if self.strict else self.report.warn(found)

    def deallocated(self, w, column: int, columns: int) -> None:
        shadow = self.shadow_of(w.cta)
        if not self.busy(w.state, shadow.address, column, column + columns):
            return
        window = slice(None), slice(column, column + columns)
        used = np.concatenate([t[window].reshape(-1) for t in (shadow.writer, *shadow.readers)])
        for number in sorted(set(self.order.unknown(w.view.clock[self.order.known], used[used > 0]))):
            op = self.operations.get(number)
            if op is not None:
                where = f"tensor memory columns {column} to {column + columns - 1}"
                self.report.add(
                    Diagnostic(
                        "in-flight",
                        f"tensor memory is freed while this {op.kind} may still use it",
                        (
                            self.findings.party(w, None, f"frees {where}"),
                            self.findings.party(op.warp, op, "may still be in flight"),
                        ),
                        f"before the dealloc: {by_kind(op, self.operations.by_number.values())}",
                    )
                )


def lanes_text(rows: list[int]) -> str:
    """Returns groups of 16 lanes as ranges."""
    parts, start = [], None
    for g in range(LANE_GROUPS + 1):
        if g in rows and start is None:
            start = g
        elif g not in rows and start is not None:
            parts.append(f"{16 * start} to {16 * g - 1}")
            start = None
    return " and ".join(parts)
