"""Finds the instructions of a kernel that arrive at an mbarrier in its text, for reports on missing arrivals.

A barrier's address is a shared variable plus constants, plus, in a ring, an index that is known only at run time. An
instruction without an index arrives at one barrier. One with an index arrives at the barriers from its address up to
the next address that another instruction names, including waits.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from softsm.engine import program as pg
from softsm.ptx.ast import Address, Imm, Instruction, Reg, Symbol

ARRIVES = tuple(f"mbarrier.{kind}" for kind in ("arrive", "arrive_drop", "expect_tx", "complete_tx"))
ARRIVES += ("tcgen05.commit", "cp.async.mbarrier.arrive")
COPIES = ("cp.async.bulk", "cp.reduce.async.bulk", "st.async", "red.async", "clusterlaunchcontrol.try_cancel")
WAITS = ("mbarrier.test_wait", "mbarrier.try_wait")
MAX_DEPTH = 40


@dataclass(frozen=True)
class SharedAddress:
    """A shared address: its constant part, and whether an index is added."""

    offset: int
    indexed: bool


@dataclass(frozen=True)
class Arrival:
    pc: int
    instruction: Instruction
    place: SharedAddress

    @property
    def bytes(self) -> bool:
        """Whether it delivers bytes and is not an arrival."""
        return self.instruction.name.startswith(COPIES)

    @property
    def waits(self) -> bool:
        """Whether it waits at the barrier."""
        return self.instruction.name.startswith(WAITS)


class Addresses:
    """Values of registers that the text determines."""

    def __init__(self, program):
        self.program = program
        self.definitions: dict[str, list[Instruction]] = defaultdict(list)
        self.known: dict[str, tuple[int | None, int, bool]] = {}
        for ins in {id(x): x for x in program.instructions if x is not None}.values():
            if ins.operands and isinstance(ins.operands[0], Reg):
                self.definitions[ins.operands[0].name].append(ins)

    def of(self, operand, depth: int = 0) -> tuple[int | None, int, bool]:
        """Returns (offset of the shared variable or None, constant, whether an unknown value is added)."""
        unknown = (None, 0, True)
        if depth > MAX_DEPTH:
            return unknown
        if isinstance(operand, Imm):
            return (None, operand.value, False) if isinstance(operand.value, int) else unknown
        if isinstance(operand, Symbol):
            at = self.program.shared_variables.get(operand.name)
            return (at, operand.offset, False) if at is not None else unknown
        if isinstance(operand, Address):
            return add(self.of(operand.base, depth + 1), (None, operand.offset, False))
        if not isinstance(operand, Reg):
            return unknown
        if operand.name not in self.known:
            self.known[operand.name] = unknown  # also for a register that depends on itself
            definitions = self.definitions[operand.name]
            first = [x for x in definitions if len(definitions) == 1 or not self.moves_on(x, operand.name)]
            if len(first) == 1:
                base, constant, indexed = self.result(first[0], depth + 1)
                self.known[operand.name] = base, constant, indexed or len(definitions) > 1
        return self.known[operand.name]

    def moves_on(self, ins: Instruction, name: str) -> bool:
        """Returns whether the definition adds something to the register's own value, as each turn of a loop does."""
        sources = [x.name for x in ins.operands[1:] if isinstance(x, Reg)]
        if ins.opcode == "mov" and len(sources) == 1 and len(self.definitions[sources[0]]) == 1:
            ins = self.definitions[sources[0]][0]
            sources = [x.name for x in ins.operands[1:] if isinstance(x, Reg)]
        return ins.opcode in ("add", "sub") and name in sources

    def result(self, ins: Instruction, depth: int) -> tuple[int | None, int, bool]:
        sources = ins.operands[1:]
        if ins.opcode in ("mov", "cvta") and len(sources) == 1:
            return self.of(sources[0], depth)
        if ins.opcode in ("add", "or") and len(sources) == 2:  # `or` of disjoint bits
            return add(*(self.of(x, depth) for x in sources))
        if ins.opcode == "mad" and len(sources) == 3:
            return add((None, 0, True), self.of(sources[2], depth))
        return None, 0, True


def add(a, b) -> tuple[int | None, int, bool]:
    if a[0] is not None and b[0] is not None:
        return None, 0, True
    return (a[0] if a[0] is not None else b[0]), a[1] + b[1], a[2] or b[2]


def arrivals(program) -> list[Arrival]:
    """Returns all arrivals and waits whose barrier the text determines."""
    known = Addresses(program)
    out, seen = [], set()
    for pc, ins in enumerate(program.instructions):
        operand = barrier_operand(ins) if ins is not None and id(ins) not in seen else None
        if operand is None:
            continue
        seen.add(id(ins))
        base, constant, indexed = known.of(operand)
        if base is not None:
            out.append(Arrival(pc, ins, SharedAddress(base + constant, indexed)))
    return out


def silent(program) -> bool:
    """Returns whether the text does not determine the barrier of some arrival."""
    found = {a.instruction.line for a in arrivals(program)}
    return any(ins is not None and ins.line not in found and barrier_operand(ins) for ins in program.instructions)


def barrier_operand(ins: Instruction):
    """Returns the operand with the mbarrier at which this instruction arrives or waits, or to which it delivers
    bytes."""
    addresses = [x for x in ins.operands if isinstance(x, Address)]
    if not addresses:
        return None
    if ins.name.startswith(ARRIVES + WAITS):
        return addresses[0]
    if ins.name.startswith(COPIES) and any("complete_tx" in m for m in ins.modifiers):
        return addresses[-1]
    return None


def at_barrier(found: list[Arrival], offset: int) -> list[Arrival]:
    """Returns those that may arrive or wait at the barrier at this offset: with that address, or with an index from the
    nearest lower address."""
    exact = [a for a in found if a.place.offset == offset]
    if exact:
        return exact
    below = [a for a in found if a.place.indexed and a.place.offset < offset]
    nearest = max((a.place.offset for a in below), default=0)
    return [a for a in below if a.place.offset == nearest]


def reached(program, start: int) -> set[int]:
    """Returns the instructions that are reachable from `start`."""
    seen, work = set(), [start]
    while work:
        pc = work.pop()
        if pc in seen or pc >= len(program.code):
            continue
        seen.add(pc)
        op, guard = int(program.code[pc, 0]), int(program.code[pc, 6])
        always = guard == 0 and not int(program.code[pc, 7])
        if op == pg.OP_BRA:
            work.append(int(program.code[pc, 5]))
        if op == pg.OP_MACRO:
            operands = program.macros[int(program.code[pc, 2])].operands
            table = getattr(operands, "table", None)
            work += program.branch_tables[table] if isinstance(table, int) else []
            work += [operands.entry] if isinstance(getattr(operands, "entry", None), int) else []
        if not (always and op in (pg.OP_BRA, pg.OP_EXIT)):
            work.append(pc + 1)
    return seen
