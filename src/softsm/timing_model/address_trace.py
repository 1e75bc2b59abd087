"""Records the addresses of memory instructions while the interpreter runs. The interpreter's function for memory
operations gets a few lines in front that copy the address register into a buffer; a return to Python for each of them
would cost more than the emulation. The dispatch loop itself records jumps.
"""

from __future__ import annotations

import functools

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir

from softsm.engine import interpreter, native
from softsm.engine import program as pg
from softsm.engine.vec_access import OPERATION, field
from softsm.engine.vec_ops import toq
from softsm.engine.vec_rows import load_row
from softsm.engine.vec_types import _I32, _I64, Q, U, building

IN_SHARED = (pg.OP_LDS, pg.OP_STS, pg.OP_ATOM_S)  # addresses of 32 bits
PLAIN = "softsm_unnoted"
# Columns of a row: the record, active lanes, the warp, the stride in bytes between lanes if it is uniform (else
# NO_STEP), 32 addresses.
RECORD, ACTIVE, WARP, STEP, LANES = range(5)
COLUMNS = LANES + 32
NO_STEP = 1 << 62
NEXT, LEFT = 0, 1  # control words: where the next row goes; the samples left for each record, negative if
# it is executed more often
ROOM = 1 << 14  # rows


def record_address(module: ir.Module) -> None:
    function = ir.Function(module, OPERATION, "record_address")
    plain = ir.Function(module, OPERATION, PLAIN)
    op, _, ra, _, _, _, m, S, pc = function.args
    with building(ir.IRBuilder(function.append_basic_block("entry"))) as b:

        def word(address: ir.Value) -> ir.Value:
            return b.inttoptr(address, _I64.as_pointer())

        control = field(S, pg.S_NOTES)
        left = word(b.add(b.load(word(b.add(control, _I64(8 * LEFT)))), b.shl(pc, _I64(3))))
        looks = b.load(left)
        b.store(b.sub(looks, _I64(1)), left)
        with b.if_then(b.icmp_signed(">", looks, _I64(0))):
            next_ = word(b.add(control, _I64(8 * NEXT)))
            row = b.load(next_)
            b.store(b.add(row, _I64(8 * COLUMNS)), next_)
            for column, value in ((RECORD, pc), (ACTIVE, b.zext(m, _I64)), (WARP, field(S, pg.S_NOTED))):
                b.store(value, word(b.add(row, _I64(8 * column))))
            lanes = b.inttoptr(b.add(row, _I64(8 * LANES)), Q.ir.as_pointer())
            shared = [b.icmp_unsigned("==", op, _I32(number)) for number in IN_SHARED]
            with b.if_else(functools.reduce(b.or_, shared)) as (narrow, wide):
                with narrow:
                    b.store(toq(load_row(field(S, pg.S_R), ra, U)).value, lanes, align=8)
                with wide:
                    b.store(load_row(field(S, pg.S_Q), ra, Q).value, lanes, align=8)
            b.store(_step(b, b.load(lanes, align=8)), word(b.add(row, _I64(8 * STEP))))
        b.ret(b.call(plain, function.args))


def _step(b: ir.IRBuilder, addresses: ir.Value) -> ir.Value:
    """Returns the stride in bytes between lanes, or NO_STEP."""

    def places(numbers) -> ir.Constant:
        return ir.Constant(ir.VectorType(_I32, 32), [_I32(n) for n in numbers])

    steps = b.sub(b.shuffle_vector(addresses, addresses, places([*range(1, 32), 0])), addresses)
    others = b.shuffle_vector(steps, steps, places([0] * 32))
    differ = b.bitcast(b.icmp_unsigned("!=", steps, others), _I32)
    alike = b.icmp_unsigned("==", b.and_(differ, _I32((1 << 31) - 1)), _I32(0))  # the last lane has no next
    return b.select(alike, b.extract_element(steps, _I32(0)), _I64(NO_STEP))


@functools.cache
def operation() -> int:
    """Returns the address of the function, for `engine.dispatch.runner`."""
    llvm.add_symbol(PLAIN, interpreter.lane_operation())
    return native.functions("record_address", record_address, ["record_address"])["record_address"]


class Notes:
    """The sampled addresses of one launch. Each warp has its own budget of `looks` samples per record: warps run one
    after the other, and a shared budget would miss the later ones."""

    def __init__(self, looks: np.ndarray):
        self.looks = looks
        self.left: list[np.ndarray] = []  # one array per warp
        self.lefts: list[int] = []  # addresses
        self.buffer = np.empty((ROOM, COLUMNS), np.int64)
        self.first = self.buffer.ctypes.data
        self.control = np.array([self.first, 0], np.int64)
        self.address = self.control.ctypes.data
        self.parts: list[np.ndarray] = []

    def warp(self) -> int:
        """Adds a warp and returns its number."""
        self.left.append(self.looks.copy())
        self.lefts.append(self.left[-1].ctypes.data)
        return len(self.left) - 1

    def turn_to(self, warp: int) -> None:
        self.control[LEFT] = self.lefts[warp]

    def room(self) -> int:
        """Returns how many rows can be recorded, at least half of the buffer."""
        used = self._used()
        if used > ROOM // 2:
            self.parts.append(self.buffer[:used].copy())
            self.control[NEXT] = self.first
            return ROOM
        return ROOM - used

    def _used(self) -> int:
        return (self.control.item(NEXT) - self.first) // (8 * COLUMNS)

    def rows(self) -> np.ndarray:
        last = self.buffer[: self._used()]
        return np.concatenate([*self.parts, last]) if self.parts else last


class Trail:
    """The jumps of one run of the interpreter, at most one per step."""

    def __init__(self, most: int):
        self.words = np.empty(2 * most + 1, np.int64)
        self.address = self.words.ctypes.data
        self.words[0] = self.address + 8

    def taken(self) -> np.ndarray | None:
        """Returns (from, to) of each jump since the last call; read it before the next run."""
        n = self.words.item(0) - self.address >> 3
        if n == 1:
            return None
        self.words[0] = self.address + 8
        return self.words[1:n].reshape(-1, 2)
