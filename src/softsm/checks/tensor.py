"""Tensor memory under the checkers: order of tcgen05 operations, cells nobody wrote, types, and work in flight.

Cells are followed in groups of 16 lanes by column: the last writer, the last two readers (numbers of operations), and
what the cell holds as far as the program says so (an accumulator, f32 values stored by a warp).
"""

from __future__ import annotations

import numpy as np

from softsm.report.diagnostics import Diagnostic

LANE_GROUPS, COLUMNS = 8, 512
UNKNOWN, ACCUMULATOR, STORED_F32, STORED_PACKED = range(4)
HELD = {ACCUMULATOR: "an accumulator wrote them", STORED_F32: "they were stored as f32 values"}
STORED = {"f32": STORED_F32, "packed": STORED_PACKED}
IN_ORDER = {("tcgen05.st", "tcgen05.ld"), ("tcgen05.st", "tcgen05.st"), ("tcgen05.ld", "tcgen05.st")}
PACKED = ("f16", "bf16", "e4m3", "e5m2", "e2m3", "e3m2", "e2m1", "s8", "u8")


class TensorShadow:
    def __init__(self) -> None:
        self.writer = np.zeros((LANE_GROUPS, COLUMNS), np.int64)
        self.readers = [np.zeros((LANE_GROUPS, COLUMNS), np.int64) for _ in range(2)]
        self.held = np.zeros((LANE_GROUPS, COLUMNS), np.uint8)


class TensorChecks:
    """The part of the checker that knows tensor memory."""

    def __init__(self) -> None:
        self.tmem: dict[int, TensorShadow] = {}  # by SM

    def tensor_shadow(self, cta) -> TensorShadow:
        shadow = self.tmem.get(cta.sm.index)
        if shadow is None:
            shadow = self.tmem[cta.sm.index] = TensorShadow()
        return shadow

    def tensor_access(self, op, region, write: bool) -> None:
        """region: ('tmem', cta, first column, end column[, lanes as a mask of groups of 16[, note]]).

        note: 'accumulate' and the type when a product adds to what it overwrites, else the element type an operand A is
        read as or the kind of cell a store leaves behind."""
        _, cta, low, high, *more = region
        groups = more[0] if more else (1 << LANE_GROUPS) - 1
        note = more[1] if len(more) > 1 else ""
        shadow = self.tensor_shadow(cta)
        rows = [g for g in range(LANE_GROUPS) if groups >> g & 1]
        w = op.warp
        window = np.ix_(rows, range(low, high))
        where = f"tensor memory lanes {lanes_text(rows)}, columns {low} to {high - 1}"
        verb = "writes" if write else "reads"
        writers = np.unique(shadow.writer[window])
        if (not write or note.startswith("accumulate")) and writers[0] == 0:
            self.report.add(
                Diagnostic(
                    "uninitialised",
                    "tensor-memory cells are read, but nobody wrote them",
                    (self.party(w, op, f"reads {where}"),),
                )
            )
        others = {(int(n), "wrote") for n in writers if n}
        if write:
            for ring in shadow.readers:
                others |= {(int(n), "read") for n in np.unique(ring[window]) if n}
        for number, did in sorted(others):
            other = self.operations.get(number)
            if other is None or other is op or self.in_order(other, did, op, write):
                continue
            if write and did == "wrote" and self.read_between(shadow, window, other, op):
                continue
            if self.knows(w, number, self.tensor if self.strict else None):
                continue
            mend = ""
            if self.strict and self.knows(w, number):
                mend = (
                    "they are synchronised, but tcgen05.fence::before_thread_sync before the arrival, or "
                    "tcgen05.fence::after_thread_sync after the wait, is missing"
                )
            self.add_race(
                self.party(w, op, f"{verb} {where}"),
                self.party(other.warp, other, f"{did} {where}"),
                "tensor memory",
                other,
                mend,
            )
        if note == "accumulate f32":
            text = "the product adds to cells that were stored as packed values of 16 bits or less"
            self.check_held(op, shadow, window, STORED_PACKED, text, f"adds to {where}", where)
        if write:
            shadow.writer[window] = op.number
            shadow.held[window] = ACCUMULATOR if op.kind == "tcgen05.mma" else STORED.get(note, UNKNOWN)
            return
        if note in PACKED:
            for held, text in HELD.items():
                text = f"cells of operand A are read as packed {note}, but {text}"
                self.check_held(op, shadow, window, held, text, f"reads {where} as packed {note}", where)
        shadow.readers[1][window] = shadow.readers[0][window]
        shadow.readers[0][window] = op.number

    def check_held(self, op, shadow, window, wrong: int, text: str, what: str, where: str) -> None:
        """Cells that must not hold values of some kind."""
        found = shadow.held[window] == wrong
        if not found.any():
            return
        other = self.operations.get(int(shadow.writer[window][found][0]))
        parties = [self.party(op.warp, op, what)]
        if other is not None:
            parties.append(self.party(other.warp, other, f"wrote {where}"))
        self.report.add(Diagnostic("type", text, tuple(parties)))

    def in_order(self, old, did: str, new, write: bool) -> bool:
        """Pairs that one warp issues and the hardware keeps in order (PTX 9.4): `did` says what old did to the
        cells."""
        if old.warp is not new.warp:
            return False
        a, b = old.footprint, new.footprint
        if a is None or b is None:
            return (old.kind, new.kind) in IN_ORDER
        if a.what == "mma":
            if did == "read":
                return write
            return b.what == "mma" and write and a.accumulator == b.accumulator
        if a.what == "shift":
            return b.what in ("mma", "cp.4x256b")
        # a copy, and a product that uses what it brought: PTX 9.4 means A and scale factors, Triton the accumulator too
        return b.what == "mma" and not (write and self.strict)

    def read_between(self, shadow: TensorShadow, window, old, new) -> bool:
        """Did products read all of what `old` wrote there, in order behind it, and before `new` in order as well?"""
        cells = shadow.writer[window] == old.number
        between = np.zeros_like(cells)
        for ring in shadow.readers:
            for number in np.unique(ring[window][cells]):
                reader = self.operations.get(int(number))
                if reader is None or reader.number < old.number:
                    continue
                if self.in_order(old, "wrote", reader, False) and self.in_order(reader, "read", new, True):
                    between |= ring[window] == number
        return bool(between[cells].all())

    # ---- allocation --------------------------------------------------------------------------------------------

    def allocated(self, cta, column: int, columns: int) -> None:
        """Fresh cells: nobody wrote them yet."""
        shadow = self.tensor_shadow(cta)
        window = slice(None), slice(column, column + columns)
        for table in (shadow.writer, *shadow.readers, shadow.held):
            table[window] = 0

    def deallocated(self, w, cta, column: int, columns: int) -> None:
        shadow = self.tensor_shadow(cta)
        window = slice(None), slice(column, column + columns)
        for number in sorted(
            {int(n) for t in (shadow.writer, *shadow.readers) for n in np.unique(t[window]) if n}
        ):
            op = self.operations.get(number)
            if op is not None and not self.knows(w, number):
                where = f"tensor memory columns {column} to {column + columns - 1}"
                self.report.add(
                    Diagnostic(
                        "in-flight",
                        f"tensor memory is freed while this {op.kind} may still use it",
                        (
                            self.party(w, None, f"frees {where}"),
                            self.party(op.warp, op, "may still be in flight"),
                        ),
                    )
                )


def lanes_text(rows: list[int]) -> str:
    """Groups of 16 lanes as ranges."""
    parts, start = [], None
    for g in range(LANE_GROUPS + 1):
        if g in rows and start is None:
            start = g
        elif g not in rows and start is not None:
            parts.append(f"{16 * start} to {16 * g - 1}")
            start = None
    return " and ".join(parts)
