"""Registers that asynchronous instructions write after they are issued: tcgen05.ld and wgmma.

The assembler tracks these rows in program order. Before an instruction that uses one of them it inserts a
macro-operation, which delivers the result and informs the race checker. For the checkers it also records the types of
registers and the data flow.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from softsm.engine import program as pg
from softsm.engine.emitter import Emitter
from softsm.engine.tensor_loads import Uses
from softsm.ptx.ast import Function, Imm, Instruction, Reg, Vector


def owners_of(function: Function) -> dict[str, str]:
    """Maps each register of a wgmma's accumulator or A operand to the first register of that operand."""
    owners: dict[str, str] = {}
    for item in function.body:
        if isinstance(item, Instruction) and item.opcode == "wgmma" and item.modifiers[:1] == ("mma_async",):
            for operand in item.operands[:2]:
                names = [x.name for x in operand.items if isinstance(x, Reg)] if isinstance(operand, Vector) else []
                owners.update((name, owners.get(name, names[0])) for name in names)
    return owners


class AsyncRegisters(Emitter):
    """The part of the assembler that tracks registers of asynchronous operations."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.tensor_uses: Uses = {}  # checking: the first uses of registers of a tcgen05.ld
        self.wgmma_owners: dict[str, str] = {}  # checking: register of some wgmma -> first register of its operand
        # checking: those checked since the last label, jump or wgmma, and whether for a write
        self.wgmma_looked: set[tuple[str, bool]] = set()

    def touches_registers(self, ins: Instruction, start: int) -> None:
        """Called after the instruction has been lowered to the records from `start` on."""
        if ins.guard is not None:
            self.read.add(ins.guard.name)
        if ins.opcode == "ret":
            self.read |= {v.name for v in self.current_function.returns if v.space == "reg"}
        self.flow[self.current_function.name].append((ins, self.read, self.written))
        if not (ins.opcode == "tcgen05" and ins.modifiers[0] in ("ld", "st")):  # these two check before they are issued
            self.settle_tensor_loads(start)
        if self.wgmma_busy and ins.opcode != "wgmma":
            self.settle_products(start, ins.opcode == "mov")
        if self.checking:  # the last macro-operation inserted runs first: check before results are delivered
            self.follow_registers(ins, start)

    def settle_products(self, start: int, move: bool) -> None:
        """Handles a use of registers of a wgmma before its wait. ptxas inserts a wait there, once for all its
        registers."""
        for row in self.touched & self.wgmma_busy.keys():
            used = self.wgmma_busy.get(row)
            if used is None:
                continue
            from softsm.isa.wgmma import do_settle

            self.insert_macro(start, do_settle, rows=pg.row_set(number for _, number in used), move=move, known={})
            for settled in used & self.wgmma_busy.keys():
                self.wgmma_settled[settled] = self.wgmma_busy.pop(settled)

    def follow_registers(self, ins: Instruction, start: int) -> None:
        """Records the type of each written register, and uses of registers of wgmmas in flight, for the checkers."""
        operands = ins.operands
        if operands and isinstance(operands[0], Reg) and ("R", self.rows.get(operands[0].name, -1)) in self.touched:
            kind = ins.modifiers[-1] if ins.modifiers else ""
            if ins.opcode == "cvt" and len(ins.modifiers) > 1:
                kind = ins.modifiers[-2]
            elif ins.opcode == "mov" and kind == "b32" and len(operands) > 1:
                source = operands[1]
                if isinstance(source, Reg):
                    kind = self.produced.get(("R", self.rows.get(source.name, -1)), "")
                elif isinstance(source, Imm) and source.kind == "f32":
                    kind = "f32"
            self.produced["R", self.rows[operands[0].name]] = kind
        if ins.opcode in ("wgmma", "bra", "brx"):
            self.wgmma_looked.clear()
        if ins.opcode == "wgmma":
            return
        if self.wgmma_dirty is not None:
            sources = {("R", self.rows.get(name, -1)) for name in self.read}
            constant = ins.opcode == "mov" and sources <= self.wgmma_constants
            (self.wgmma_constants if constant else self.wgmma_dirty).update(self.touched)
        early = sorted({self.wgmma_pending[x] for x in self.touched & self.wgmma_pending.keys()})
        if early:
            from softsm.isa.wgmma import do_early_use

            sources = {("R", self.rows.get(name, -1)) for name in self.read}
            copy = ins.opcode == "mov" and bool(sources & self.wgmma_pending.keys())
            names = {("R", self.rows.get(name, -1)) for name in self.written} & self.wgmma_pending.keys()
            written = pg.row_set(row for kind, row in names if self.wgmma_pending[kind, row] == row)
            self.insert_macro(start, do_early_use, rows=pg.row_set(early), written=written, copy=copy)
            for name in self.written if copy else ():
                self.wgmma_pending.setdefault(("R", self.rows.get(name, -1)), early[0])
        elif self.wgmma_owners:
            self.look_back(ins, start)

    def look_back(self, ins: Instruction, start: int) -> None:
        """Handles registers of a wgmma that follows in the text but may precede in a loop: their first use in each
        basic block checks whether it is complete."""
        mine = (self.read | self.written) & self.wgmma_owners.keys()
        looks = {name: (self.wgmma_owners[name], name in self.written) for name in mine}
        fresh = {name for name in mine if looks[name] not in self.wgmma_looked}
        if fresh and not (ins.opcode == "mov" and self.read & mine):
            from softsm.isa.wgmma import do_early_use

            rows = pg.row_set(self.rows[name] for name in fresh)
            written = pg.row_set(self.rows[name] for name in fresh & self.written)
            self.insert_macro(start, do_early_use, rows=rows, written=written, copy=False)
            self.wgmma_looked |= {looks[name] for name in fresh}

    def insert_macro(self, at: int, function, record: tuple[int, int, int] = (pg.OP_MACRO, 0, 0), **operands) -> None:
        """Inserts a macro-operation. record: operation, rd and rc."""
        op, rd, rc = record
        self.macros.append(pg.MacroCall(function, SimpleNamespace(**operands), self.ins, False))
        self.records.insert(at, [op, rd, len(self.macros) - 1, 0, rc, 0, 0, 0])
        self.instructions.insert(at, self.ins)
        self.fixups = [(i + (i >= at), name, x) for i, name, x in self.fixups]

    def settle_tensor_loads(self, at: int) -> None:
        uses = self.tensor_uses.get(id(self.ins))
        if uses is not None or self.touched & self.tmem_pending:
            self.flush_tensor_loads(at, uses)

    def flush_tensor_loads(self, at: int, uses: frozenset[int] | None = None) -> None:
        """Makes each tcgen05.ld deliver its registers: at their first use, at wait::ld, or at a jump. uses: loads whose
        registers are used and which are then complete."""
        from softsm.isa.tensor_memory import flush_tmem_loads

        if self.checking:
            record = pg.OP_TENSOR_WAIT, 0, pg.FLUSH if uses is None else pg.FIRST_USE
            self.insert_macro(at, flush_tmem_loads, record, uses=uses)
        else:
            self.insert_macro(at, flush_tmem_loads, (pg.OP_MACRO, 1, 0), uses=None)
        self.tmem_pending.clear()
