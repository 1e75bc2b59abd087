"""The bytecode that the assembler produces and the interpreter runs.

A record is eight uint32: [op, rd, ra, rb, rc, rx, guard, guard_xor]. Operands are row numbers of the warp's register
files; immediates, special registers and kernel parameters are rows as well. guard is a predicate number (0 is always
true); guard_xor is 0 or 0xffffffff for a negated guard.

Control and memory operations have the fixed numbers below; arithmetic ones follow from FIRST_MICRO on.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from softsm.memory.waitable import Waitable
from softsm.ptx.ast import Function, Instruction, Variable

# Control and memory operations of the interpreter loop.
OP_EXIT, OP_BRA, OP_MACRO, OP_LDG, OP_STG, OP_LDS, OP_STS, OP_LD, OP_ST, OP_LDL, OP_STL = range(11)
OP_VOTE, OP_ELECT, OP_ACTIVEMASK, OP_CONVERGE, OP_ATOM_G, OP_ATOM_S, OP_REDUX, OP_BLOCK = range(11, 19)
OP_WAIT, OP_TENSOR_LD, OP_TENSOR_ST, OP_CHECKED_WAIT, OP_MEMBERS, OP_TICK = range(19, 25)
OP_LDMATRIX, OP_STMATRIX, OP_CHECKED_LD, OP_CHECKED_ST, OP_TENSOR_WAIT, OP_CHECKED_MMA, OP_SOURCES = range(25, 32)
FIRST_MICRO = 32
MACROS = (OP_MACRO, *range(OP_WAIT, OP_SOURCES + 1))  # Compiled code tries all but the first one itself.

# rx of OP_CHECKED_LD and ST: the kind that a store leaves in its cells, and from bit DISTANCE on the number of records
# until the result is needed, or 0 if something else may happen before (engine/tensor_waits.py).
# rc of OP_TENSOR_WAIT: its kind, one of the four below.
DISTANCE = 4
FLUSH, FIRST_USE, WAIT_LOADS, WAIT_STORES = range(4)

LEAVES, WAY = frozenset(("bra", "brx", "ret", "exit", "trap", "call")), 100  # Program.way_back: records at most

# The reasons for which the interpreter returns.
QUANTUM, EXITED, DIVERGED, MERGE, MACRO, CONVERGE, SLOW_MEMORY, UNKNOWN, HOT = range(9)

UNWAITED = 7  # the most operations in `loads` and in `stores`, after their count

# The state of a warp, which Python and compiled code share. Addresses are host addresses.
WARP_STATE = np.dtype([
    ("writes", np.int64),
    ("alive", np.int64),  # lanes that have not exited
    ("shared", np.int64), ("shared_size", np.int64),  # the CTA's shared memory on the host
    ("shared_base", np.int64),  # first shared address in the kernel
    ("local", np.int64), ("local_size", np.int64),
    ("alloc", np.int64), ("nalloc", np.int64),  # the table of global allocations
    ("hit", np.int64),  # the allocation found last
    ("r", np.int64), ("q", np.int64), ("p", np.int64),  # register files
    ("code", np.int64), ("pool", np.int64),
    ("blocks", np.int64),  # the table of engine/blocks.py
    ("phases", np.int64),  # Cta.phases, when races are checked the table of checks/clocks.py; 0: waits are macros
    ("idle", np.int64),  # nothing is ever in flight, so macro-operations that only wait are skipped
    ("tensor", np.int64),  # the warp's 32 lanes of tensor memory, column 0
    ("tensor_lane", np.int64),  # the first of them, as in a tensor-memory address
    ("columns", np.int64),  # Cta.columns, or 0: every access to tensor memory is a macro-operation
    ("scratch", np.int64, 32),  # lane addresses
    ("unwatched", np.int64),  # nothing observes single events
    # When races are checked:
    ("races", np.int64), ("shadow", np.int64), ("global_shadow", np.int64), ("clock", np.int64), ("known", np.int64),
    ("next_op", np.int64), ("slot", np.int64), ("slot0", np.int64), ("index", np.int64), ("warps", np.int64),
    ("reads", np.int64),  # the reads of warps, see checks/shadow.py
    # ... and tcgen05.ld and st (checks/tmem_shadow.py):
    ("cells", np.int64),  # the TensorShadow
    ("latest", np.int64),  # accesses complete at their wait; compiled code does only those without an event in between
    ("owed", np.int64),  # Python has issued accesses that the warp has not waited for
    ("issuer", np.int64),  # the warp's number in the log of operations
    ("loads", np.int64, 1 + UNWAITED), ("stores", np.int64, 1 + UNWAITED),  # accesses by compiled code without a wait
    # When a launch is timed:
    ("notes", np.int64),  # the control words of timing_model/address_trace.py
    ("noted", np.int64),  # the number of the warp there
])  # fmt: skip


def _word(name: str) -> int:
    """Returns the offset of a field of the state, in 64-bit words."""
    return WARP_STATE.fields[name][1] // 8  # type: ignore[index]


S_WRITES, S_ALIVE, S_HIT = _word("writes"), _word("alive"), _word("hit")
S_SHARED, S_SHARED_SIZE, S_SHARED_BASE = _word("shared"), _word("shared_size"), _word("shared_base")
S_LOCAL, S_LOCAL_SIZE, S_ALLOC, S_NALLOC = _word("local"), _word("local_size"), _word("alloc"), _word("nalloc")
S_R, S_Q, S_P, S_CODE, S_POOL, S_BLOCKS = map(_word, ("r", "q", "p", "code", "pool", "blocks"))
S_PHASES, S_IDLE, S_SCRATCH, S_UNWATCHED = _word("phases"), _word("idle"), _word("scratch"), _word("unwatched")
S_TENSOR, S_TENSOR_LANE, S_COLUMNS = _word("tensor"), _word("tensor_lane"), _word("columns")
S_RACES, S_SHADOW, S_GLOBAL_SHADOW, S_READS = _word("races"), _word("shadow"), _word("global_shadow"), _word("reads")
S_CLOCK, S_KNOWN, S_NEXT_OP, S_INDEX, S_WARPS = map(_word, ("clock", "known", "next_op", "index", "warps"))
S_SLOT, S_SLOT0, S_CELLS, S_LATEST, S_OWED = map(_word, ("slot", "slot0", "cells", "latest", "owed"))
S_ISSUER, S_LOADS, S_STORES, S_NOTES, S_NOTED = map(_word, ("issuer", "loads", "stores", "notes", "noted"))
# The table at S_NEXT_OP: the number of the next asynchronous operation, the layout of clocks, and the addresses of the
# log of operations (checks/operations.py), of buffers for cells (checks/tensor.py) and rows (checks/accesses.py), and
# of the chains of MMAs (engine/mma_chains.py).
NEWEST, CLOCKS, SECTIONS, USED, LOG, FOUND, KEPT, GROWING, PRODUCTS, LAYOUT = range(10)

SHARED_WINDOW = 1 << 56  # generic address of shared memory: SHARED_WINDOW + the 32-bit shared address
LOCAL_WINDOW = 1 << 57
PARAM_SPACE = "%param"  # symbol: the start of the kernel's parameters
SHARED_START = 1024  # the first KiB of a CTA's window belongs to the system, as on the device
RANK_SHIFT = 24  # shared::cluster address = rank << 24 | offset

ALL = 0xFFFFFFFF


def row_set(rows: Iterable[int]) -> int:
    """Returns rows of a register file as the bits of a number."""
    return functools.reduce(operator.or_, (1 << row for row in rows), 0)


@dataclass(slots=True)
class Blocked:
    """Returned by a macro-operation that cannot continue: it is tried again when `on` wakes (with `done`, the warp
    continues after it). str(text) describes what it waits for."""

    on: Waitable
    text: object
    done: bool = False
    told: bool = False  # `on` reports to observers that the warp continues
    limited: bool = False  # the wait has a time limit, which expires when nothing else can happen (Fragment.timed_out)


SEEN = object()  # returned by a macro-operation that changes only registers, and may call observers
POLLED = object()  # returned by a macro-operation that polled without success


@dataclass(slots=True)
class MacroCall:
    """A macro-operation in the code: the function, its resolved operands and the PTX instruction."""

    function: Callable
    operands: SimpleNamespace
    instruction: Instruction
    aligned: bool
    whole: bool = False  # all 32 threads must execute it: none may have exited


@dataclass(slots=True)
class Program:
    function: Function
    code: np.ndarray  # uint32 [n, 8]
    pool: np.ndarray  # int32: row lists of vector loads and stores
    macros: list[MacroCall]
    instructions: list[Instruction]  # per record, for messages
    nr: int  # 32-bit rows in all
    nq: int
    np_: int
    constants_r: dict[int, int]  # row -> value
    constants_q: dict[int, int]
    constants_p: dict[int, int]
    specials: dict[str, tuple[str, int]]  # name -> ('R' | 'Q' | 'P', row)
    parameters: dict[tuple[int, int, bool, bool], int]  # (byte offset, bytes, signed, in file Q) -> row
    symbol_rows: list[tuple[str, int, str, int]]  # (bank, row, symbol, offset)
    shared_variables: dict[str, int]  # name -> offset in the CTA's window
    shared_static: int  # bytes of statically declared shared memory
    local_variables: dict[str, int]  # name -> offset in each thread's local memory
    local_bytes: int
    param_offsets: dict[str, int]
    param_bytes: int
    branch_tables: list[list[int]] = field(default_factory=list)
    variables: dict[str, Variable] = field(default_factory=dict)
    # function -> [(item, names read, names written)]
    flow: dict[str, list[tuple]] = field(default_factory=dict)
    rows: dict[str, dict[str, int]] = field(default_factory=dict)  # function -> register -> row
    kinds: dict[str, dict[str, str]] = field(default_factory=dict)  # function -> register -> type
    arrivals: list | None = None  # result of engine/arrivals.py, computed when needed
    private: frozenset[tuple[str, int]] = frozenset()  # (register file, row) that only micro-operations use

    def way_back(self, pc: int) -> tuple[int, int] | None:
        """Returns the records of a straight way behind a branch to an earlier place, from the branch to a jump to the
        same place: `@%p bra NEXT; ...; bra NEXT`, an `if` at the end of a loop."""
        target = self.code.item(pc, 5)
        for i in range(pc + 1, min(pc + WAY, len(self.code)) if target <= pc else 0):
            ins = self.instructions[i]
            if ins.opcode in LEAVES:
                jumps = self.code.item(i, 0) == OP_BRA and ins.guard is None and self.code.item(i, 5) == target
                return (pc, i) if jumps else None
        return None
