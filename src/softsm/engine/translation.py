"""Translates a block of engine/blocks.py to LLVM.

    turns = block(R, Q, P, S, most)

executes the block once, or up to `most` times if it ends with a jump to its head that all lanes take, and returns how
often. It returns 0 and does nothing if a load is not plain.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir

from softsm.engine import program as pg
from softsm.engine.dispatch import BLOCK, KINDS, evaluate
from softsm.engine.vec_access import field
from softsm.engine.vec_ops import canonical
from softsm.engine.vec_rows import lane_get, lanes, load_row, store_row
from softsm.engine.vec_types import (
    _I32,
    _I64,
    FULL,
    LANES,
    Bits,
    Mask,
    U,
    Vector,
    _splat,
    any_bit,
    as_vector,
    building,
    first_lane,
    here,
    sel,
    spread,
)
from softsm.isa.registry import Micro


@dataclass(frozen=True)
class Load:
    """A load of one, two or four words of shared memory by every lane."""

    address: int  # row
    offset: int  # modulo 2^32
    rows: tuple[int, ...]


@dataclass(frozen=True)
class PlainLoad:
    """The addresses of a plain load."""

    run: ir.Value  # i1: whether the lanes' words are contiguous
    memory: ir.Value  # address of the CTA's shared memory
    shift: ir.Value  # i32, added to the lanes' addresses
    first: ir.Value  # i64: address of the first lane's words


def vector_registers() -> tuple[int, int]:
    """Returns (32-bit lanes of one vector register of the CPU, number of vector registers)."""
    if platform.machine() in ("x86_64", "AMD64"):
        return (16, 32) if llvm.get_host_cpu_features().get("avx512f") else (8, 16)
    return 4, 32


def bank_of(kind: str) -> str:
    return "P" if kind == "p" else "R" if kind in "uif" else "Q"


def sources(m: Micro, record: np.ndarray) -> list[tuple[str, int]]:
    """Returns the (register file, row) of each source of a record."""
    return [(bank_of(kind), int(row)) for kind, row in zip(m.srcs, record[2:6])]


def group_mask(bits: ir.Value) -> Mask:
    """Converts an i32 mask into a vector mask of the group's lanes."""
    from_first = here().lshr(bits, here().trunc(first_lane(), _I32))
    return (Vector(_splat(here(), from_first, U.count), U) & places()) != 0


def places() -> Vector:
    """Returns 1, 2, 4, ...: the bit of each lane within its group."""
    return Vector(ir.Constant(U.ir, [1 << i for i in range(U.count)]), U)


def translate(module: ir.Module, **what) -> None:
    """Adds the function `block` to the module (see Translation)."""
    Translation(**what).build(module)


class Translation:
    """The values of registers while a group of lanes executes the block."""

    def __init__(
        self,
        records: np.ndarray,
        steps: list[Micro | Load],
        known: dict[tuple[str, int], int],
        unread: frozenset[tuple[str, int]] = frozenset(),
        loop: tuple[int, int] | None = None,
    ):
        self.records, self.steps, self.known, self.unread, self.loop = records, steps, known, unread, loop
        self.loose: dict[tuple[str, int], Vector] = {}  # results whose NaNs are not canonical yet
        self.rows: dict[tuple[str, int], Vector] = {}  # values of the group so far
        self.masks: dict[int, Mask] = {}  # masks of predicates
        self.stale: dict[tuple[str, int], None] = {}  # registers to be written at the end
        self.places: dict[Load, PlainLoad] = {}
        width, registers = vector_registers()
        # Two vectors per value if they fit, for more independent instructions.
        self.lanes = 2 * width if 2 * self.pressure() <= registers - 8 else width

    # ---- what the block is -------------------------------------------------------------------------------------

    def micros(self) -> list[tuple[Micro, np.ndarray]]:
        return [(m, r) for m, r in zip(self.steps, self.records) if isinstance(m, Micro)]

    def loads(self) -> list[Load]:
        return list(dict.fromkeys(m for m in self.steps if isinstance(m, Load)))

    def predicates(self) -> set[int]:
        used = {int(r[6]) for r in self.records if r[6]}
        for m, r in self.micros():
            used |= {row for bank, row in sources(m, r) if bank == "P"}
            if m.dst == "p":
                used.add(int(r[1]))
        return used | ({self.loop[0]} if self.loop is not None else set())

    def written_predicates(self) -> list[int]:
        written = {int(r[1]) for m, r in self.micros() if m.dst == "p"}
        turning = self.loop[0] if self.loop is not None else None
        return sorted(row for row in written if row == turning or ("P", row) not in self.unread)

    def written_rows(self) -> set[int]:
        """Returns the 32-bit rows that the block writes."""
        rows = {int(r[1]) for m, r in self.micros() if bank_of(m.dst) == "R"}
        return rows | {row for load in self.loads() for row in load.rows}

    def pressure(self) -> int:
        """Estimates the largest number of live 32-bit values."""
        live: set[tuple[str, int]] = set()
        most = 0
        for m, r in zip(reversed(self.steps), reversed(self.records)):
            if isinstance(m, Load):
                live -= {("R", row) for row in m.rows}
                continue
            live.discard((bank_of(m.dst), int(r[1])))
            live |= {key for key in sources(m, r) if key not in self.known}
            most = max(most, sum({"R": 1, "Q": 2, "P": 1}[bank] for bank, _ in live))
        return most

    # ---- the function ------------------------------------------------------------------------------------------

    def build(self, module: ir.Module) -> None:
        function = ir.Function(module, BLOCK, "block")
        *files, self.S, most = function.args
        self.files = dict(zip("RQP", files))
        entry, turn, loop, after = (function.append_basic_block(n) for n in ("entry", "turn", "loop", "after"))
        b = ir.IRBuilder(entry)
        written = self.written_rows()
        with building(b):
            self.locate([load for load in self.loads() if load.address not in written], _I64(0))
        before = b.block
        b.branch(turn)
        b.position_at_end(turn)
        done = b.phi(_I64)
        done.add_incoming(_I64(0), before)
        with building(b):
            self.locate([load for load in self.loads() if load.address in written], done)
        at_predicate = {
            p: b.inttoptr(b.add(self.files["P"], _I64(4 * p)), _I32.as_pointer()) for p in sorted(self.predicates())
        }
        self.before = {p: b.load(at) for p, at in at_predicate.items()}
        turning = b.block
        b.branch(loop)

        b.position_at_end(loop)
        lane = b.phi(_I64)
        lane.add_incoming(_I64(0), turning)
        gathered = {}
        with building(b, self.lanes, lane):
            spots = b.phi(U.ir)
            spots.add_incoming(places().value, turning)
            for p in self.written_predicates():
                gathered[p] = b.phi(U.ir)
                gathered[p].add_incoming(ir.Constant(U.ir, None), turning)
            for m, record in zip(self.steps, self.records):
                if isinstance(m, Load):
                    self.load(m)
                else:
                    self.step(m, record)
            for bank, row in self.stale:
                if (bank, row) not in self.unread:
                    value = self.row(bank, row, "u" if bank == "R" else "q")
                    store_row(self.files[bank], _I32(row), Bits(_I32(FULL)), value)
            here_bits = Vector(spots, U)
            whole = {p: b.or_(phi, sel(self.masks[p], here_bits, 0).value) for p, phi in gathered.items()}
            for p, phi in gathered.items():
                phi.add_incoming(whole[p], b.block)
            spots.add_incoming((here_bits << as_vector(self.lanes % 32, U)).value, b.block)
        following = b.add(lane, _I64(self.lanes))
        lane.add_incoming(following, b.block)
        b.cbranch(b.icmp_unsigned("<", following, _I64(LANES)), loop, after)

        b.position_at_end(after)
        now = dict(self.before)
        for p, value in whole.items():
            with building(b):
                now[p] = any_bit(Vector(value, U))
            b.store(now[p], at_predicate[p])
        executed = b.add(done, _I64(1))
        if self.loop is not None:
            guard, flip = self.loop
            all_jump = b.icmp_unsigned("==", b.xor(now[guard], _I32(flip)), _I32(FULL))
            leave = function.append_basic_block("leave")
            done.add_incoming(executed, b.block)
            b.cbranch(b.and_(all_jump, b.icmp_unsigned("<", executed, most)), turn, leave)
            b.position_at_end(leave)
        b.ret(executed)

    # ---- loads from shared memory ------------------------------------------------------------------------------

    def locate(self, loads: list[Load], done: ir.Value) -> None:
        """Emits the check that all lanes are in bounds and aligned; if not, the function returns `done`."""
        b = here()
        if not loads:
            return
        base, size, memory = (field(self.S, k) for k in (pg.S_SHARED_BASE, pg.S_SHARED_SIZE, pg.S_SHARED))
        for load in loads:
            width = 4 * len(load.rows)
            shift = b.sub(_I32(load.offset), b.trunc(base, _I32))
            a = load_row(self.files["R"], _I32(load.address), U) + Vector(_splat(b, shift, LANES), U)
            room = b.trunc(b.sub(size, _I64(width + pg.SHARED_START)), _I32)
            outside = spread(a - pg.SHARED_START > Vector(_splat(b, room, LANES), U))
            with b.if_then(b.icmp_unsigned("!=", any_bit(outside | (a & (width - 1))), _I32(0)), likely=False):
                b.ret(done)
            first = lane_get(a, 0)
            away = a ^ (lanes() * width + Vector(_splat(b, first, LANES), U))
            run = b.icmp_unsigned("==", any_bit(away), _I32(0))
            self.places[load] = PlainLoad(run, memory, shift, b.add(memory, b.zext(first, _I64)))

    def load(self, load: Load) -> None:
        """Loads the words of the current group of lanes."""
        b, n, count, place = here(), U.count, len(load.rows), self.places[load]
        with b.if_else(place.run, likely=True) as (run, scattered):
            with run:
                whole = ir.VectorType(_I32, n * count)
                at = b.add(place.first, b.mul(first_lane(), _I64(4 * count)))
                words = b.load(b.inttoptr(at, whole.as_pointer()), align=4)
                orders = [ir.Constant(U.ir, list(range(k, n * count, count))) for k in range(count)]
                together = [b.shuffle_vector(words, ir.Constant(whole, ir.Undefined), x) for x in orders]
                after_run = b.block
            with scattered:
                a = load_row(self.files["R"], _I32(load.address), U) + Vector(_splat(b, place.shift, n), U)
                single = [ir.Constant(U.ir, ir.Undefined)] * count
                for i in range(n):
                    at = b.add(place.memory, b.zext(lane_get(a, i), _I64))
                    for k in range(count):
                        word = b.load(b.inttoptr(b.add(at, _I64(4 * k)), _I32.as_pointer()), align=4)
                        single[k] = b.insert_element(single[k], word, _I32(i))
                after_scattered = b.block
        for row, x, y in zip(load.rows, together, single):
            value = b.phi(U.ir)
            value.add_incoming(x, after_run)
            value.add_incoming(y, after_scattered)
            self.rows["R", row] = Vector(value, U)
            self.loose.pop(("R", row), None)
            self.stale["R", row] = None

    # ---- micro-operations --------------------------------------------------------------------------------------

    def step(self, m: Micro, record: np.ndarray) -> None:
        operands: list[Vector | Mask] = []
        for kind, (bank, row) in zip(m.srcs, sources(m, record)):
            if bank == "P":
                operands.append(self.mask(row))
            elif m.canonical_nan and (bank, row) in self.loose:
                operands.append(self.loose[bank, row])
            else:
                operands.append(self.row(bank, row, kind))
        rd, guard = int(record[1]), self.guard(record)
        if m.canonical_nan and guard is None:  # between such operations NaNs need not be canonical
            self.loose["R", rd] = m.function(*operands)
            self.rows.pop(("R", rd), None)
            self.stale["R", rd] = None
            return
        value = evaluate(m, operands, None)
        if m.dst == "p":
            if guard is not None:
                value = (self.mask(rd) & ~guard) | (value & guard)
            self.masks[rd] = value
            return
        bank = bank_of(m.dst)
        value = self.as_bits(value, bank)
        if guard is not None:
            value = sel(guard, value, self.row(bank, rd, "u" if bank == "R" else "q"))
        self.rows[bank, rd] = value
        self.loose.pop((bank, rd), None)
        self.stale[bank, rd] = None

    def guard(self, record: np.ndarray) -> Mask | None:
        if not record[6]:
            return None
        mask = self.mask(int(record[6]))
        return ~mask if record[7] else mask

    def row(self, bank: str, row: int, kind: str) -> Vector:
        """Returns a register as a vector of this kind."""
        plain = KINDS["u" if bank == "R" else "q"]
        if (bank, row) in self.known:
            value = as_vector(self.known[bank, row], plain)
        else:
            if (bank, row) in self.loose:
                self.rows[bank, row] = self.as_bits(canonical(self.loose.pop((bank, row))), bank)
            if (bank, row) not in self.rows:
                self.rows[bank, row] = load_row(self.files[bank], _I32(row), plain)
            value = self.rows[bank, row]
        b, want = here(), KINDS[kind]
        return value if want == plain else Vector(b.bitcast(value.value, want.ir), want)

    @staticmethod
    def as_bits(value: Vector, bank: str) -> Vector:
        plain = KINDS["u" if bank == "R" else "q"]
        return Vector(here().bitcast(value.value, plain.ir), plain)

    def mask(self, p: int) -> Mask:
        """Returns a predicate as a mask of the current lanes."""
        if p not in self.masks:
            self.masks[p] = group_mask(self.before[p])
        return self.masks[p]
