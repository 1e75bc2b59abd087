"""Straight-line code: runs of micro-operations that are executed often become one native function each.

The dispatch loop moves every operand through the register files. A block instead goes through its instructions for a
few lanes at a time, with their values in the CPU's registers, and writes each register that somebody may read later
once at the end. The interpreter
calls it when the whole warp runs together and the quantum leaves room for all of it; otherwise, and when a fragment
enters in the middle, the records are interpreted as ever. Results, steps and diagnostics are the same either way.
"""

from __future__ import annotations

import functools
import platform
import re
import threading
from dataclasses import replace

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir

from softsm.engine import native
from softsm.engine import program as pg
from softsm.engine.dispatch import BLOCK, KINDS, LETTERS, definition, evaluate, numbered
from softsm.engine.vec_ops import canonical
from softsm.engine.vec_rows import load_row, store_row
from softsm.engine.vec_types import (
    _I32,
    _I64,
    FULL,
    LANES,
    Bits,
    Mask,
    U,
    Vector,
    _declare,
    _splat,
    _suffix,
    as_vector,
    building,
    first_lane,
    here,
    sel,
)
from softsm.isa.registry import Micro

SHORTEST = 3  # records; a shorter run gains nothing over its dispatch
EXCHANGE = re.compile(r"\b(shfl_\w+|xor_lanes|warp_\w+|everywhere|any_lane)\b")  # operations on all lanes together
_compiling = threading.Lock()


# They make every NaN the same one in the end, whichever NaN they are given: between them that can wait.
ANY_NAN = {f"{name}.f32" for name in ("add", "sub", "mul", "fma", "div", "sqrt", "min", "max")}


def inside(expression: str) -> str:
    """canonical(x) -> x."""
    assert expression.startswith("canonical(") and expression.endswith(")"), expression
    return expression.removeprefix("canonical(")[:-1]


def lanes_at_a_time() -> int:
    """As many as one vector register of the CPU holds: the more values stay in registers."""
    if platform.machine() in ("x86_64", "AMD64"):
        return 16 if llvm.get_host_cpu_features().get("avx512f") else 8
    return 4


def jump_targets(program: pg.Program) -> np.ndarray:
    code = program.code
    return np.unique([*code[code[:, 0] == pg.OP_BRA, 5], *(x for table in program.branch_tables for x in table)])


def find(program: pg.Program, local: np.ndarray) -> list[tuple[int, int]]:
    """(first record, length) of the runs of micro-operations that nothing jumps into. local[op]: is it one?"""
    code = program.code
    starts = jump_targets(program)
    inside = local[np.minimum(code[:, 0], len(local) - 1)]
    cuts = np.flatnonzero(np.diff(inside.astype(np.int8), prepend=0, append=0))
    found = []
    for first, end in zip(cuts[::2].tolist(), cuts[1::2].tolist()):
        within = starts[np.searchsorted(starts, first, "right") : np.searchsorted(starts, end)]
        edges = [first, *within.astype(int).tolist(), end]
        found += [(a, b - a) for a, b in zip(edges, edges[1:]) if b - a >= SHORTEST]
    return found


def group_mask(bits: ir.Value) -> Mask:
    """i32 -> the bits of the lanes that vectors have here."""
    from_first = here().lshr(bits, here().trunc(first_lane(), _I32))
    return (Vector(_splat(here(), from_first, U.count), U) & places()) != 0


def places() -> Vector:
    """1, 2, 4, ..: the bit of each lane within its group."""
    return Vector(ir.Constant(U.ir, [1 << i for i in range(U.count)]), U)


class Blocks:
    """The blocks of one program, and its records with their heads replaced."""

    def __init__(self, program: pg.Program):
        hot, cold = numbered()
        self.micros: dict[int, Micro] = dict([*hot, *cold])
        local = np.zeros(max(self.micros) + 2, bool)
        local[[n for n, m in self.micros.items() if not EXCHANGE.search(m.expression)]] = True
        self.program = program
        self.found = find(program, local)
        self.code = program.code.copy()
        # Per block: address, executions so far, two spare ones, the record that stood at its head.
        self.table = np.zeros((max(len(self.found), 1), 8), np.int64)
        for i, (first, length) in enumerate(self.found):
            self.table[i, 4:] = program.code[first].view(np.int64)
            self.code[first] = [pg.OP_BLOCK, length, i, 0, 0, 0, 0, 0]

    def compile(self, index: int) -> None:
        """Called when the block has been executed dispatch.HOT times."""
        with _compiling:
            if self.table[index, 0]:
                return
            first, length = self.found[index]
            records = self.program.code[first : first + length]
            constants = {"R": self.program.constants_r, "Q": self.program.constants_q}
            text = "".join(definition(int(r[0]), self.micros[int(r[0])]) for r in records) + records.tobytes().hex()
            rows = {(bank, int(row)) for r in records for bank, row in _sources(self.micros[int(r[0])], r)}
            known = {key: constants[key[0]][key[1]] for key in sorted(rows) if key[1] in constants.get(key[0], ())}
            text += f" {sorted(known.items())} {lanes_at_a_time()}"
            text += native.source("blocks") + native.source("dispatch")
            unread = frozenset(self.program.private - self.read_first)
            text += f" {sorted(unread & {(_bank(self.micros[int(r[0])].dst), int(r[1])) for r in records})}"
            translation = Translation(records, self.micros, known, unread)
            self.table[index, 0] = native.functions("block", text, translation.build, ["block"])["block"]


    @functools.cached_property
    def read_first(self) -> set[tuple[str, int]]:
        """Rows that some run of micro-operations reads before it writes them. What a block leaves in others is read by
        nobody, unless something else than a micro-operation looks at them."""
        code, heads = self.program.code, {first for first, _ in self.found}
        heads |= {first + length for first, length in self.found} | set(jump_targets(self.program).tolist())
        found: set[tuple[str, int]] = set()
        written: set[tuple[str, int]] = set()
        for at, record in enumerate(code):
            m = self.micros.get(int(record[0]))
            if m is None or at in heads:
                written = set()
            if m is None:
                continue
            target, guard = (_bank(m.dst), int(record[1])), int(record[6])
            read = _sources(m, record) + ([("P", guard), target] if guard else [])
            found.update(row for row in read if row not in written)
            if not guard:
                written.add(target)
        return found


def _bank(kind: str) -> str:
    return "P" if kind == "p" else "R" if kind in "uif" else "Q"


def _sources(m: Micro, record: np.ndarray) -> list[tuple[str, int]]:
    """(register file, row) of what a record reads."""
    return [(_bank(kind), int(row)) for kind, row in zip(m.srcs, record[2:6])]


class Translation:
    """One block on its way to LLVM: which registers are where while a group of lanes goes through it."""

    def __init__(self, records: np.ndarray, micros: dict[int, Micro], known: dict[tuple[str, int], int],
                 unread: frozenset[tuple[str, int]] = frozenset()):  # fmt: skip
        self.records, self.micros, self.known, self.unread = records, micros, known, unread
        self.loose: dict[tuple[str, int], Vector] = {}  # results whose NaNs may be any NaN, before `rows` has them
        self.rows: dict[tuple[str, int], Vector] = {}  # values of the group so far
        self.masks: dict[int, Mask] = {}  # of predicates
        self.stale: dict[tuple[str, int], None] = {}  # registers to be written at the end
        self.set: dict[int, None] = {}  # predicates to be written at the end

    def build(self, module: ir.Module) -> None:
        function = ir.Function(module, BLOCK, "block")
        self.files = dict(zip("RQP", function.args))
        lanes = lanes_at_a_time()
        entry, loop, after = (function.append_basic_block(name) for name in ("entry", "loop", "after"))
        b = ir.IRBuilder(entry)
        self.before: dict[int, ir.Value] = {}  # predicates as they are on entry
        for p in sorted(self.predicates()):
            self.before[p] = b.load(b.inttoptr(b.add(self.files["P"], _I64(4 * p)), _I32.as_pointer()))
        b.branch(loop)
        b.position_at_end(loop)
        lane = b.phi(_I64)
        lane.add_incoming(_I64(0), entry)
        gathered = {p: b.phi(_I32) for p in self.written_predicates()}
        with building(b, lanes, lane):
            for record in self.records:
                self.step(self.micros[int(record[0])], record)
            for bank, row in self.stale:
                if (bank, row) not in self.unread:
                    value = self.row(bank, row, "u" if bank == "R" else "q")
                    store_row(self.files[bank], _I32(row), Bits(_I32(FULL)), value)
            for p, phi in gathered.items():
                phi.add_incoming(_I32(0), entry)
                phi.add_incoming(b.or_(phi, self.bits(self.masks[p], lane)), b.block)
        following = b.add(lane, _I64(lanes))
        lane.add_incoming(following, b.block)
        b.cbranch(b.icmp_unsigned("<", following, _I64(LANES)), loop, after)
        last = b.block
        b.position_at_end(after)
        for p, phi in gathered.items():
            whole = phi.incomings[1][0]
            assert phi.incomings[1][1] is last
            b.store(whole, b.inttoptr(b.add(self.files["P"], _I64(4 * p)), _I32.as_pointer()))
        b.ret_void()

    def predicates(self) -> set[int]:
        used = {int(r[6]) for r in self.records if r[6]}
        for r in self.records:
            m = self.micros[int(r[0])]
            used |= {row for bank, row in _sources(m, r) if bank == "P"}
            if m.dst == "p":
                used.add(int(r[1]))
        return used

    def written_predicates(self) -> list[int]:
        written = {int(r[1]) for r in self.records if self.micros[int(r[0])].dst == "p"}
        return sorted(row for row in written if ("P", row) not in self.unread)

    def step(self, m: Micro, record: np.ndarray) -> None:
        names: dict[str, Vector | Mask] = {}
        any_nan = m.name in ANY_NAN
        for letter, kind, (bank, row) in zip(LETTERS, m.srcs, _sources(m, record)):
            if bank == "P":
                names[letter] = self.mask(row)
            elif any_nan and (bank, row) in self.loose:
                names[letter] = self.loose[bank, row]
            else:
                names[letter] = self.row(bank, row, kind)
        rd, guard = int(record[1]), self.guard(record)
        if any_nan and m.dst == "f" and guard is None:
            self.loose["R", rd] = evaluate(replace(m, expression=inside(m.expression)), names, None)
            self.rows.pop(("R", rd), None)
            self.stale["R", rd] = None
            return
        value = evaluate(m, names, None)
        if m.dst == "p":
            if guard is not None:
                value = (self.mask(rd) & ~guard) | (value & guard)
            self.masks[rd] = value
            return
        bank = "R" if m.dst in "uif" else "Q"
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
        """A register as a vector of this kind."""
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
        """A predicate's bits of the lanes at hand."""
        if p not in self.masks:
            self.masks[p] = group_mask(self.before[p])
        return self.masks[p]

    @staticmethod
    def bits(mask: Mask, lane: ir.Value) -> ir.Value:
        """i32 with the group's bits in their places."""
        b = here()
        ones = sel(mask, places(), 0)
        whole = b.call(_declare(b, f"llvm.vector.reduce.or.{_suffix(U.ir)}", _I32, [U.ir]), [ones.value])
        return b.shl(whole, b.trunc(lane, _I32))
