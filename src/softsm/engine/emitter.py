"""What an instruction becomes: rows for its operands, and records of bytecode.

The chapters of `isa` call these methods to lower an instruction. engine/assemble.py goes through a whole kernel.
"""

from __future__ import annotations

import difflib
import struct
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np

from softsm.engine import program as pg
from softsm.errors import PtxError, Unsupported
from softsm.isa.registry import MICROS
from softsm.ptx.ast import (
    Address,
    Function,
    Imm,
    Instruction,
    Module,
    Reg,
    Sink,
    Special,
    Symbol,
    Vector,
    referenced,
    spelled,
)
from softsm.ptx.declarations import TYPE_BYTES

WIDTH = {"pred": 1} | {name: 8 * size for name, size in TYPE_BYTES.items()}  # bits
SPECIAL_64 = {"clock64", "globaltimer", "gridid", "current_graph_exec"}
# PTX: undefined if any thread of the warp has exited
WHOLE_WARP = frozenset("mma wmma ldmatrix stmatrix movmatrix".split())


class Emitter:
    def __init__(self, module: Module, function: Function, numbers: dict[str, int], checking: bool = False):
        self.module, self.function, self.numbers = module, function, numbers
        self.checking = checking  # the program is for the race checker
        self.records: list[list[int]] = []
        self.instructions: list[Instruction] = []
        self.macros: list[pg.MacroCall] = []
        self.pool: list[int] = []
        self.carry: int | None = None  # row of the condition code CC.CF, if used
        self.count = {"R": 1, "Q": 1, "P": 1}  # row 0 of R and Q is zero; predicate 0 is true
        self.rows: dict[str, int] = {}
        self.sharing: dict[str, tuple[str, int]] = {}  # see engine/shared_rows.py
        self.shared_rows: dict[tuple[str, int], int] = {}
        self.const_rows: dict[tuple[str, int], int] = {}
        self.specials: dict[str, tuple[str, int]] = {}
        self.parameters: dict[tuple[int, int, bool, bool], int] = {}
        self.symbol_rows: dict[tuple[str, str, int], int] = {}
        self.labels: dict[str, int] = {}
        self.fixups: list[tuple[int, str, Instruction]] = []
        self.branch_tables: list[list[str]] = []
        self.current_function = function  # the function whose body is being lowered
        self.registers = function.registers  # registers of that function: name -> type
        self.ins: Any = None  # the current instruction
        self.touched: set[tuple[str, int]] = set()  # rows that the current instruction reads or writes
        self.named: set[tuple[str, int]] = set()  # rows of registers, and rows used by more than arithmetic
        self.exposed: set[tuple[str, int]] = set()
        self.entries: dict[str, int] = {}  # .func name -> pc
        # checking: function -> (instruction or label, registers read, registers written)
        self.flow: dict[str, list[tuple]] = {}
        self.rows_of: dict[str, dict[str, int]] = {}  # function -> register -> row
        self.kinds_of: dict[str, dict[str, str]] = {}  # function -> register -> type
        self.read: set[str] = set()  # register names that the current instruction reads
        self.written: set[str] = set()
        # Registers that asynchronous instructions write after they are issued (engine/async_registers.py):
        self.tmem_pending: set[tuple[str, int]] = set()  # destinations of tcgen05.ld without a wait so far
        self.produced: dict[tuple[str, int], str] = {}  # checking: the type with which a register was last written
        # checking: registers of wgmmas without a wait so far, and copies of them -> row of the wgmma
        self.wgmma_pending: dict[tuple[str, int], int] = {}
        self.wgmma_busy: dict[tuple[str, int], frozenset] = {}  # row -> rows of the wgmma that uses it
        self.wgmma_settled: dict[tuple[str, int], frozenset] = {}  # the same, after an early use
        self.wgmma_dirty: set[tuple[str, int]] | None = None  # checking: registers used since the last wgmma.fence
        self.wgmma_constants: set[tuple[str, int]] = set()  # those that were only set to a constant
        self.layout()

    # ---- where variables and parameters live -------------------------------------------------------------------

    def layout(self) -> None:
        self.variables = {v.name: v for v in self.module.variables}
        self.shared_variables: dict[str, int] = {}
        self.local_variables: dict[str, int] = {}
        self.param_offsets: dict[str, int] = {}
        self.passed: dict[str, tuple[str, int]] = {}  # parameters of device functions in .reg -> bank, row
        offset = 0
        for p in self.function.params:
            offset = -(-offset // p.align) * p.align
            self.param_offsets[p.name] = offset
            offset += p.size
        self.param_bytes = offset
        self.local_bytes = 0
        shared = pg.SHARED_START
        dynamic = []
        reached = referenced(self.module, self.function)
        functions = [self.function, *(f for f in self.module.functions.values() if not f.entry and f.name in reached)]
        ours = [v for v in self.module.variables if v.space != "shared" or v.name in reached]  # as ptxas chooses
        for v in [*ours, *(v for f in functions for v in f.variables)]:
            self.variables[v.name] = v
            if v.space == "shared":
                if v.size == 0:
                    dynamic.append(v)
                    continue
                shared = -(-shared // max(v.align, 1)) * max(v.align, 1)
                self.shared_variables[v.name] = shared
                shared += v.size
            elif v.space in ("local", "param"):
                self.place_local(v)
        for f in functions[1:]:
            for v in [*f.params, *f.returns]:
                self.variables[v.name] = v
                if v.space == "reg":
                    width = WIDTH[v.type]
                    bank = "P" if width == 1 else "Q" if width >= 64 else "R"
                    self.passed[v.name] = bank, self.fresh(bank, 2 if width == 128 else 1)
                else:
                    self.place_local(v)
        for v in dynamic:  # all extern arrays start at the end of the static ones
            shared = -(-shared // max(v.align, 16)) * max(v.align, 16)
        for v in dynamic:
            self.shared_variables[v.name] = shared
        self.shared_static = shared - pg.SHARED_START

    def place_local(self, v) -> None:
        """Places a local variable, or a parameter of a device function in the caller's local memory."""
        self.local_bytes = -(-self.local_bytes // max(v.align, 1)) * max(v.align, 1)
        self.local_variables[v.name] = self.local_bytes
        self.local_bytes += max(v.size, 1)

    # ---- operands ----------------------------------------------------------------------------------------------

    @staticmethod
    def bank(kind: str) -> str:
        return "P" if kind == "p" else "Q" if kind in "qld" else "R"

    def type_of(self, operand) -> str:
        if isinstance(operand, Reg):
            return self.registers[operand.name]
        if isinstance(operand, Special):
            return "u64" if operand.name.lstrip("%") in SPECIAL_64 else "u32"
        return ""

    def register(self, reg: Reg, bank: str) -> int:
        t = self.registers[reg.name]
        width = WIDTH[t]
        have = "P" if width == 1 else "Q" if width >= 64 else "R"
        if have != bank:
            wanted = {"P": "a predicate", "Q": "a 64-bit register", "R": "a register of at most 32 bits"}[bank]
            raise self.error(f"{reg.name} is .{t}, expected {wanted}")
        row = self.rows.get(reg.name)
        if row is None:
            row = self.rows[reg.name] = self.row_for(reg.name, bank, 2 if width == 128 else 1)
        self.touched.add((bank, row))
        if width == 128:
            self.touched.add((bank, row + 1))
        return row

    def row_for(self, name: str, bank: str, n: int) -> int:
        """Returns the register's own row, or one that it shares."""
        shared = self.sharing.get(name)
        if shared is None:
            return self.fresh(bank, n)
        if shared not in self.shared_rows:
            self.shared_rows[shared] = self.fresh(bank)
        return self.shared_rows[shared]

    def fresh(self, bank: str, n: int = 1) -> int:
        row = self.count[bank]
        self.count[bank] += n
        return row

    def temp(self, kind: str) -> int:
        return self.fresh(self.bank(kind))

    def const(self, bits: int, kind: str) -> int:
        bank = self.bank(kind)
        bits &= (1 << 64) - 1 if bank == "Q" else pg.ALL
        if bank != "P" and bits == 0:
            return 0
        key = (bank, bits)
        if key not in self.const_rows:
            self.const_rows[key] = self.fresh(bank)
        return self.const_rows[key]

    def literal(self, imm: Imm, kind: str) -> int:
        """Returns the bits of a literal operand of this kind."""
        if imm.kind == "int" and not isinstance(imm.value, float):
            if kind == "f":
                return struct.unpack("<I", struct.pack("<f", float(imm.value)))[0] if imm.bits == 0 else imm.bits
            if kind == "d":
                return struct.unpack("<Q", struct.pack("<d", float(imm.value)))[0] if imm.bits == 0 else imm.bits
            return int(imm.value)
        if imm.kind == "f32" and kind in "uif":
            return imm.bits
        if imm.kind == "f64" and kind in "qld":
            return imm.bits
        if kind in "dlq":
            return struct.unpack("<Q", struct.pack("<d", float(imm.value)))[0]
        return struct.unpack("<I", np.float32(imm.value).tobytes())[0]

    def src(self, operand, kind: str) -> int:
        bank = self.bank(kind)
        if isinstance(operand, Reg):
            if operand.negated:
                row = self.temp("p")
                self.read.add(operand.name)
                self.emit("not.pred", row, self.register(Reg(operand.name), "P"), guard=None)
                return row
            self.read.add(operand.name)
            return self.register(operand, bank)
        if isinstance(operand, Imm):
            if bank == "P":
                return self.const(pg.ALL if operand.value else 0, "p")
            return self.const(self.literal(operand, kind), kind)
        if isinstance(operand, Special):
            return self.special(operand.name, bank)
        if isinstance(operand, Symbol):
            if operand.name in self.param_offsets:  # address in the param space; cvta.param makes it generic
                return self.const(self.param_offsets[operand.name] + operand.offset, kind)
            return self.symbol(operand.name, operand.offset, bank)
        if isinstance(operand, Vector) and len(operand.items) == 1:
            return self.src(operand.items[0], kind)
        raise self.error(f"operand {spelled(operand)} cannot be read here")

    def dst(self, operand, kind: str) -> int:
        if isinstance(operand, Sink):
            return self.temp(kind)
        if isinstance(operand, Vector) and len(operand.items) == 1:
            return self.dst(operand.items[0], kind)
        if not isinstance(operand, Reg):
            raise self.error(f"destination must be a register, got {spelled(operand)}")
        self.written.add(operand.name)
        return self.register(operand, self.bank(kind))

    def vector_rows(self, operand, kind: str, *, write: bool = False) -> list[int]:
        items = operand.items if isinstance(operand, Vector) else (operand,)
        return [self.dst(x, kind) if write else self.src(x, kind) for x in items]

    def special(self, name: str, bank: str) -> int:
        name = name.lstrip("%")
        if name == "WARP_SZ":
            return self.const(32, "q" if bank == "Q" else "u")
        if name not in self.specials:
            wide = "Q" if name in SPECIAL_64 else "P" if name == "is_explicit_cluster" else "R"
            self.specials[name] = (wide, self.fresh(wide))
        have, row = self.specials[name]
        if have != bank:
            raise self.error(f"%{name} is {dict(Q='64 bits wide', R='32 bits wide', P='a predicate')[have]}")
        return row

    def symbol(self, name: str, offset: int, bank: str) -> int:
        """Returns the row with the address of a variable in its own space."""
        if name in self.shared_variables or name in self.local_variables:
            key = (bank, name, offset)
        elif name in self.param_offsets or name in self.variables or name in self.module.functions:
            if bank != "Q":
                raise self.error(f"the address of {name} needs a 64-bit register")
            key = (bank, name, offset)
        else:
            near = difflib.get_close_matches(name, [*self.variables, *self.param_offsets], 1)
            raise self.error(f"unknown name {name}" + (f"; did you mean {near[0]}?" if near else ""))
        if key not in self.symbol_rows:
            self.symbol_rows[key] = self.fresh(bank)
        return self.symbol_rows[key]

    def param_base(self) -> int:
        """Returns the row with the generic address of the param space."""
        key = ("Q", pg.PARAM_SPACE, 0)
        if key not in self.symbol_rows:
            self.symbol_rows[key] = self.fresh("Q")
        return self.symbol_rows[key]

    def address(self, operand) -> tuple[str, int, int]:
        """Resolves `[base + offset]` -> (bank of the base row, row, byte offset)."""
        if not isinstance(operand, Address):
            raise self.error(f"expected an address in brackets, got {spelled(operand)}")
        base = operand.base
        if isinstance(base, Reg):
            bank = "Q" if WIDTH[self.registers[base.name]] == 64 else "R"
            self.read.add(base.name)
            return bank, self.register(base, bank), operand.offset
        if isinstance(base, Imm):
            return "Q", self.const(int(base.value), "q"), operand.offset
        space = self.variables[base.name].space if base.name in self.variables else ""
        bank = "R" if space == "shared" else "Q"
        return bank, self.symbol(base.name, base.offset, bank), operand.offset

    def address_row(self, operand, kind: str) -> int:
        """Returns the row with base + offset for macro-operations. kind: 'u' for a shared or tensor-memory address, 'q'
        for a generic or global one."""
        bank, row, offset = self.address(operand)
        want = self.bank(kind)
        if bank != want:
            wide = self.temp(kind)
            self.emit("cvt.u64.u32" if want == "Q" else "cvt.u32.u64", wide, row, guard=None)
            row = wide
        if offset:
            total = self.temp(kind)
            self.emit("add.u64" if want == "Q" else "add.u32", total, row, self.const(offset, kind), guard=None)
            row = total
        return row

    # ---- emission ----------------------------------------------------------------------------------------------

    def guard(self, ins: Instruction | None) -> tuple[int, int]:
        if ins is None or ins.guard is None:
            return 0, 0
        return self.register(Reg(ins.guard.name), "P"), pg.ALL if ins.guard.negated else 0

    def record(self, op: int, rd=0, ra=0, rb=0, rc=0, rx=0, *, ins: Instruction | None) -> int:
        g, x = self.guard(ins)
        self.records.append([op, rd, ra, rb & pg.ALL, rc, rx, g, x])
        self.instructions.append(self.ins)
        return len(self.records) - 1

    _UNSET = object()

    def emit(self, name: str, dst: int, *srcs: int, guard=_UNSET) -> None:
        """Emits a micro-operation with the guard of the current instruction, or with this one (None: no guard)."""
        m = MICROS[name]
        assert len(srcs) == len(m.srcs), f"{name} takes {len(m.srcs)} sources, got {len(srcs)}"
        ins = self.ins if guard is self._UNSET else guard
        self.record(self.numbers[name], dst, *srcs, *([0] * (4 - len(srcs))), ins=ins)

    def macro(self, function, ins: Instruction, *, aligned: bool | None = None, waits=False, **operands) -> None:
        """Emits a macro-operation, which calls `function(warp, mask, operands)` at run time. waits: it only waits for
        operations of the warp that are in flight."""
        is_aligned = "aligned" in ins.modifiers if aligned is None else aligned
        whole = ins.opcode in WHOLE_WARP
        self.macros.append(pg.MacroCall(function, SimpleNamespace(**operands), ins, is_aligned, whole))
        self.record(pg.OP_MACRO, int(waits), len(self.macros) - 1, ins=ins)

    def answered(self, op: int, rd: int = 0, rb: int = 0, rc: int = 0) -> None:
        """Turns the last macro-operation into one of pg.MACROS, which compiled code executes except in rare cases."""
        _, _, number, _, _, _, *guard = self.records[-1]
        self.records[-1] = [op, rd, number, rb, rc, 0, *guard]

    def branch_target(self, record: int, label: str, ins: Instruction) -> None:
        self.fixups.append((record, f"{self.current_function.name}:{label}", ins))

    def table(self, labels: tuple[str, ...]) -> int:
        self.branch_tables.append([f"{self.current_function.name}:{name}" for name in labels])
        return len(self.branch_tables) - 1

    def settle_tensor_loads(self, at: int) -> None:
        """Makes a tcgen05.ld deliver its registers before the current instruction uses them."""
        raise NotImplementedError  # engine/async_registers.py

    def pooled(self, rows: list[int]) -> int:
        self.pool.extend(rows)
        return len(self.pool) - len(rows)

    def error(self, message: str) -> PtxError:
        return PtxError(f"{message} (in `{self.ins.text}`)", self.ins.line, self.ins.column)

    def refuse(self, ins: Instruction, why: str) -> NoReturn:
        raise Unsupported(f"{ins.name}: {why} (in `{ins.text}`)", ins.line, ins.column)
