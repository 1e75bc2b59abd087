"""The operands and results of MMAs: the operand tap, expectations, and the origin of NaNs.

    with softsm.checking(tap=True) as report:
        softsm.expect_mma("qk", b=k_tiles, column=0)     # K by tile: [tiles, n, head dim]
        kernel[grid](...)
    report.tap.mma[3].b                                   # float32 [n, k], with .tile and .step

A tile begins with an MMA that does not accumulate. Steps count the following MMAs on the same accumulator.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from softsm.checks import shadow as sh
from softsm.engine import program as pg
from softsm.isa import tensor_core
from softsm.memory import swizzle
from softsm.memory import tensor_memory as tm
from softsm.ptx.ast import Reg, Vector
from softsm.report.diagnostics import Diagnostic, Party


@dataclass(frozen=True)
class Mma:
    """One tcgen05.mma, wgmma or mma.sync: its logical operands and the accumulator after it. Only the last wgmma of a
    group that is computed together has the accumulator."""

    a: np.ndarray  # float32 [m, k]
    b: np.ndarray  # float32 [n, k]
    d: np.ndarray  # float32 [m, n]
    tile: int
    step: int
    column: int  # column of the accumulator, relative to its allocation; -1 for wgmma and mma.sync
    line: int  # PTX line
    who: str
    cta: tuple[int, int, int]


@dataclass
class Tap:
    mma: list[Mma] = field(default_factory=list)


@dataclass(frozen=True)
class Expectation:
    """Operands that MMAs should read: arrays [tiles, steps, rows, k], [tiles, rows, K] or [rows, K]."""

    name: str
    a: np.ndarray | None
    b: np.ndarray | None
    column: int | None

    def part(self, operand: str, tile: int, step: int, k: int) -> np.ndarray | None:
        """Returns the operand [rows, k] of that tile and step, or None if nothing is expected."""
        whole = self.a if operand == "a" else self.b
        if whole is None:
            return None
        if whole.ndim == 4:
            return whole[tile, step] if tile < len(whole) and step < whole.shape[1] else None
        if whole.ndim == 3:
            if tile >= len(whole):
                return None
            whole = whole[tile]
        return whole[:, step * k : step * k + k] if (step + 1) * k <= whole.shape[1] else None

    def find(self, operand: str, values: np.ndarray) -> str:
        """Returns the position of these neighbours along k in the expected operand, if they occur exactly once."""
        whole = self.a if operand == "a" else self.b
        assert whole is not None
        places = np.argwhere(whole == values[0])
        for i, value in enumerate(values[1:], 1):
            if len(places) > 1:
                there = [p[-1] + i < whole.shape[-1] and whole[(*p[:-1], p[-1] + i)] == value for p in places]
                places = places[there]
        if len(places) != 1:
            return ""
        return f"{operand.upper()}[{', '.join(map(str, places[0]))}]"


class Products:
    """Inspects every MMA when it is performed."""

    def __init__(self, checker, tap: Tap | None, expectations: list[Expectation], nan: bool):
        self.checker, self.tap, self.expectations, self.nan = checker, tap, expectations, nan
        self.places: dict[tuple, list[int]] = {}  # accumulator -> [tile, step]

    def perform(self, w, p, ctas: list, effects) -> None:
        from softsm.isa import tcgen05_product as tcgen05

        a = np.concatenate([logical_a(tcgen05, p, cta) for cta in ctas])
        b = tcgen05.operand_b(p, ctas)
        effects()
        place = self.places.setdefault((ctas[0].ctaid, p.column, p.lane), [-1, 0])
        if not p.add or place[0] < 0:
            place[0], place[1] = place[0] + 1, 0
        else:
            place[1] += 1
        first = min(
            (
                x.column
                for x in ctas[0].tmem.allocations.values()
                if x.owner is ctas[0] and x.column <= p.column < x.column + x.columns
            ),
            default=0,
        )
        op = self.checker.machine.engine.performing
        if self.tap is not None:
            tile, step = place
            d = np.concatenate([logical_d(p, cta, tcgen05.rows_of(p)) for cta in ctas])
            self.tap.mma.append(Mma(a.copy(), b.copy(), d, tile, step, p.column - first, op.line, str(w), w.cta.ctaid))
        for e in self.expectations:
            if e.column is None or e.column == p.column - first:
                self.compare(e, "a", a, p, ctas, op, place)
                self.compare(e, "b", b, p, ctas, op, place)
        if self.nan:
            for operand, values in (("a", a), ("b", b)):
                if np.isnan(values).any():
                    self.report_nan(operand, values, p, ctas, op)
                    break

    def warpgroup(self, w, chain: list, results: list) -> None:
        """Records consecutive wgmmas on one accumulator, which has the last one's result."""
        from softsm.isa import wgmma_product

        cta = w.cta
        for i, parts in enumerate(chain):
            part = parts[0]
            s = part.shape
            a = wgmma_product.operand_a(parts, cta).reshape(s.k, 64).view(np.float32).T
            b = tensor_core.shared_rows(
                cta.shared, pg.SHARED_START, part.b, s.b_k_major, s.n, s.k, s.b, "operand B of wgmma"
            )
            place = self.places.setdefault((cta.ctaid, part.warp.index, tuple(part.d_rows)), [-1, 0])
            if not part.add or place[0] < 0:
                place[0], place[1] = place[0] + 1, 0
            else:
                place[1] += 1
            if self.tap is not None:
                tile, step = place
                last = i == len(chain) - 1 and s.d == "f32"
                d = results[0].view(np.float32).reshape(s.n, 64).T.copy() if last else np.empty((0, 0), np.float32)
                self.tap.mma.append(Mma(a.copy(), b.copy(), d, tile, step, -1, part.line, str(part.warp), cta.ctaid))
            for e in self.expectations:
                if e.column is None:
                    self.compare(e, "a", a, part, [cta], self.checker.machine.engine.performing, place)
                    self.compare(e, "b", b, part, [cta], self.checker.machine.engine.performing, place)
            if self.nan:
                for operand, values in (("a", a), ("b", b)):
                    if np.isnan(values).any():
                        self.report_nan(operand, values, part, [cta], self.checker.machine.engine.performing)
                        break

    def warp(self, w, a: np.ndarray, b: np.ndarray, d: np.ndarray, add: bool, rows: tuple) -> None:
        """Records an mma.sync, which is synchronous. A tile begins where all of C is zero."""
        place = self.places.setdefault((w.cta.ctaid, w.index, rows), [-1, 0])
        if not add or place[0] < 0:
            place[0], place[1] = place[0] + 1, 0
        else:
            place[1] += 1
        if self.tap is not None:
            tile, step = place
            self.tap.mma.append(Mma(a.copy(), b.copy(), d.copy(), tile, step, -1, w.line(), str(w), w.cta.ctaid))

    def compare(self, e: Expectation, operand: str, got: np.ndarray, p, ctas, op, place) -> None:
        tile, step = place
        want = e.part(operand, tile, step, got.shape[1])
        if want is None or want.shape != got.shape:
            return
        wrong = ~((got == want) | (np.isnan(got) & np.isnan(want)))
        if not wrong.any():
            return
        row, k = (int(x) for x in np.argwhere(wrong)[0])
        found = e.find(operand, got[row, k : k + 4])
        name = operand.upper()
        message = (
            f"{e.name}: element ({row}, {k}) of {name} in tile {tile}, step {step} is {float(got[row, k]):g}, expected "
            f"{float(want[row, k]):g}"
            + (f"; it is {found} of what was expected" if found else "")
            + f"; {int(wrong.sum())} of {wrong.size} elements differ"
        )
        self.add("operand", message, operand, row, k, p, ctas, op)

    def report_nan(self, operand: str, values: np.ndarray, p, ctas, op) -> None:
        row, k = (int(x) for x in np.argwhere(np.isnan(values))[0])
        self.add(
            "nan",
            f"element ({row}, {k}) of {operand.upper()} is NaN, so is every sum it enters, even times 0",
            operand,
            row,
            k,
            p,
            ctas,
            op,
        )

    def add(self, code: str, message: str, operand: str, row: int, k: int, p, ctas, op) -> None:
        parties = [self.checker.findings.party(op.warp, op, f"reads {operand.upper()}")]
        parties += self.provenance(operand, row, k, p, ctas)
        self.checker.report.add(Diagnostic(code, message, tuple(parties)))

    def provenance(self, operand: str, row: int, k: int, p, ctas) -> list[Party]:
        """Returns the last writer of the element."""
        from softsm.isa import tcgen05_product as tcgen05

        s = p.shape
        if operand == "a" and s.sparse:  # k is not the element's position
            return []
        if not hasattr(p, "pair"):  # a wgmma
            if operand == "a" and isinstance(p.a, np.ndarray):
                return []
            rows, descriptor, k_major, element = (
                (64, p.a, s.a_k_major, s.a) if operand == "a" else (s.n, p.b, s.b_k_major, s.b)
            )
        elif operand == "a":
            rows, descriptor, k_major, element = tcgen05.rows_of(p), p.a, s.a_k_major, s.a
        else:
            rows, descriptor, k_major, element = s.n // len(ctas), p.b, s.b_k_major, s.b
        cta, row = ctas[row // rows], row % rows
        if descriptor is None:
            number = self.checker.tensor.shadow_of(cta).writer[
                tcgen05.lane_plan(rows, s.n, p.folded, p.lane).lanes[row] // 16, p.a_column
            ]
            return self.by_number(int(number), f"wrote row {row} of A")
        size = tensor_core.element_bytes(element)
        per = 16 // size
        chunks = (rows, max(s.k // per, 1)) if k_major else (s.k, -(-rows // per))
        table = swizzle.addresses(descriptor, k_major, *chunks)
        at, inside = (table[row, k // per], k % per) if k_major else (table[k, row // per], row % per)
        return self.writer(cta, int(at) + inside * size)

    def writer(self, cta, address: int) -> list[Party]:
        checker = self.checker
        record = cta.view.shadow.word(address // 4).tolist()
        what = f"wrote shared byte {address:#x}"
        if record[0] == 0:
            return [Party("no operation", what=what)]
        if record[0] >= sh.ASYNC:
            return self.by_number(record[1], what)
        w = checker.agents[record[0]]
        fed = feeding_load(w.cta.program.instructions, record[2])
        return [
            checker.findings.party(w, None, what, pc=record[2]),
            *([] if fed is None else [checker.findings.party(w, None, "loaded it", pc=fed)]),
        ]

    def by_number(self, number: int, what: str) -> list[Party]:
        op = self.checker.operations.get(number)
        if op is None:
            return []
        for region in op.reads:
            if region[0] == "tensor":
                what += f" from coordinates {region[1].coords} of {region[1].map.describe()}"
            elif region[0] == "global":
                what += f" from global address {region[1]:#x}"
                break
        return [self.checker.findings.party(op.warp, op, what)]


def feeding_load(instructions: list, pc: int) -> int | None:
    """Returns the load whose value the store at `pc` wrote: the nearest one along the registers' definitions."""

    def registers(operand) -> list[str]:
        items = operand.items if isinstance(operand, Vector) else (operand,)
        return [x.name for x in items if isinstance(x, Reg)]

    wanted = {name for operand in instructions[pc].operands[1:] for name in registers(operand)}
    for at in range(pc - 1, max(pc - 400, -1), -1):
        ins = instructions[at]
        if not ins.operands or not wanted & set(registers(ins.operands[0])) or ins.opcode in ("st", "setp"):
            continue
        if ins.opcode == "ld":
            return at
        wanted = {name for operand in ins.operands[1:] for name in registers(operand)}
        if not wanted:
            return None
    return None


def logical_a(tcgen05, p, cta) -> np.ndarray:
    """Returns the rows of A that this CTA multiplies: float32 [rows, k]."""
    rows = tcgen05.rows_of(p)
    plan = tcgen05.lane_plan(rows, p.shape.n, p.folded, p.lane)
    by_lane = tcgen05.operand_a(p, cta, plan)[:-2].reshape(p.shape.k, 128).view(np.float32)
    return by_lane.T[plan.lanes]


def logical_d(p, cta, rows: int) -> np.ndarray:
    """Returns the accumulator of this CTA: [rows, n]."""
    d = np.empty((rows, p.shape.n), np.uint32)
    for x in blocks(rows, p.shape.n, p.folded):
        column, lane = p.column + x.column, p.lane + x.lane
        d[x.m : x.m + x.rows, x.n : x.n + x.columns] = cta.tmem.cells[
            column : column + x.columns, lane : lane + x.rows
        ].T
    if p.shape.d == "s32":
        return d.view(np.int32)
    if p.shape.d == "f16":
        return d.astype(np.uint16).view(np.float16).astype(np.float32)
    return d.view(np.float32)


blocks = lru_cache(tm.accumulator_blocks)
