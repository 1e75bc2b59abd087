"""Assembles a parsed function into bytecode.

The lowering registered for an instruction's base opcode calls `emit`, `macro`, ... (engine/emitter.py). The assembler
rejects every error that it can detect before the kernel runs: an instruction without a lowering, an unknown modifier,
a register of the wrong width.
"""

from __future__ import annotations

import difflib
import importlib
from types import SimpleNamespace

import numpy as np

from softsm.engine import program as pg
from softsm.engine.async_registers import AsyncRegisters, owners_of
from softsm.engine.shared_rows import shared_rows
from softsm.engine.tensor_loads import first_uses
from softsm.errors import PtxError
from softsm.isa.registry import LOWERERS, MICROS
from softsm.ptx.ast import Function, Instruction, Label

CHAPTERS = (
    "control memory atomics addresses cache_policy warp integer floating half compare convert moves logic barriers "
    "copies tensormap tensor_memory tcgen05 wgmma mma wmma matrix_moves multimem"
).split()


def load_chapters() -> None:
    """Imports all instruction chapters, which fill the registries."""
    for chapter in CHAPTERS:
        importlib.import_module(f"softsm.isa.{chapter}")


def micro_numbers() -> dict[str, int]:
    """Returns the opcode number of every micro-operation: hot ones first, then the banks, in order of definition."""
    hot = [m for m in MICROS.values() if m.hot]
    cold = [m for m in MICROS.values() if not m.hot]
    return {m.name: pg.FIRST_MICRO + i for i, m in enumerate(hot + cold)}


# PTX instructions that softsm does not implement
LACKING = dict.fromkeys("tex tld4 txq suld sust sured suq".split(), "there are no textures and surfaces")


class Assembler(AsyncRegisters):
    def lower(self, ins: Instruction) -> None:
        lowering = LOWERERS.get(ins.opcode)
        if lowering is None:
            if ins.opcode in LACKING:
                self.refuse(ins, f"softsm does not have it: {LACKING[ins.opcode]}")
            near = difflib.get_close_matches(ins.opcode, list(LOWERERS), 1)
            self.refuse(ins, "no such instruction" + (f"; did you mean {near[0]}?" if near else ""))
        self.ins, self.touched, self.read, self.written = ins, set(), set(), set()
        start = len(self.records)
        self.guard(ins)
        lowering(self, ins)
        self.named |= self.touched
        if any(record[0] < pg.FIRST_MICRO for record in self.records[start:]):
            self.exposed |= self.touched
        self.touches_registers(ins, start)

    def body(self, function: Function) -> None:
        self.registers, self.current_function = function.registers, function
        self.entries[function.name] = len(self.records)
        self.flow[function.name] = []
        saved, self.rows = self.rows, {name: row for name, (_, row) in self.passed.items()}
        self.wgmma_owners = owners_of(function) if self.checking else {}
        self.tensor_uses = first_uses(function) if self.checking else {}
        # The checker follows copies of a wgmma's registers by their rows.
        self.sharing = {} if self.wgmma_owners else shared_rows(function)
        for item in function.body:
            if isinstance(item, Label):
                self.wgmma_looked.clear()
                if self.tmem_pending:
                    self.flush_tensor_loads(len(self.records))
                self.labels[f"{function.name}:{item.name}"] = len(self.records)
                self.wgmma_busy |= self.wgmma_settled  # a jump to here skips the early use
                self.flow[function.name].append((item, (), ()))
                continue
            self.lower(item)
            if item.opcode in ("bra", "brx", "ret", "exit", "call") and self.tmem_pending:
                self.flush_tensor_loads(len(self.records) - 1)
        self.rows_of[function.name], self.rows = self.rows, saved
        self.kinds_of[function.name] = function.registers
        if self.ins is not None:  # running off the end is a return
            self.record(pg.OP_EXIT if function.entry else pg.OP_MACRO, 0, self.return_macro(function), ins=None)

    def return_macro(self, function: Function) -> int:
        if function.entry:
            return 0
        from softsm.isa.control import do_return

        self.macros.append(pg.MacroCall(do_return, SimpleNamespace(), self.ins, False))
        return len(self.macros) - 1

    def assemble(self) -> pg.Program:
        self.body(self.function)
        called = {name for m in self.macros if hasattr(m.operands, "callee") for name in (m.operands.callee,)}
        done: set[str] = set()
        while called - done:
            for name in sorted(called - done):
                done.add(name)
                target = self.module.functions.get(name)
                if target is not None and target.body:
                    self.body(target)
            called = {m.operands.callee for m in self.macros if hasattr(m.operands, "callee")}
        for record, label, ins in self.fixups:
            if label not in self.labels:
                raise PtxError(f"label {label.split(':', 1)[1]} is not defined", ins.line, ins.column)
            self.records[record][5] = self.labels[label]
        for m in self.macros:
            if hasattr(m.operands, "callee"):
                m.operands.entry = self.entries.get(m.operands.callee)
        tables = [[self.labels[name] for name in t] for t in self.branch_tables]
        code = np.array(self.records, np.uint32).reshape(-1, 8)
        pool = np.array(self.pool or [0], np.int32)
        symbol_rows = [(bank, row, name, offset) for (bank, name, offset), row in self.symbol_rows.items()]
        constants: dict[str, dict[int, int]] = {"R": {}, "Q": {}, "P": {}}
        for (bank, bits), row in self.const_rows.items():
            constants[bank][row] = bits
        return pg.Program(
            function=self.function,
            code=code,
            pool=pool,
            macros=self.macros,
            instructions=self.instructions,
            nr=self.count["R"],
            nq=self.count["Q"],
            np_=self.count["P"],
            constants_r=constants["R"],
            constants_q=constants["Q"],
            constants_p=constants["P"],
            specials=self.specials,
            parameters=self.parameters,
            symbol_rows=symbol_rows,
            shared_variables=self.shared_variables,
            shared_static=self.shared_static,
            local_variables=self.local_variables,
            local_bytes=self.local_bytes,
            param_offsets=self.param_offsets,
            param_bytes=self.param_bytes,
            branch_tables=tables,
            variables=self.variables,
            flow=self.flow,
            rows=self.rows_of,
            kinds=self.kinds_of,
            private=frozenset(self.named - self.exposed - set(self.passed.values())),
        )
