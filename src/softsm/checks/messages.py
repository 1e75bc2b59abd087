"""Relaxed and volatile accesses of global memory that no fence orders.

They do not race: PTX calls them morally strong. But a thread that reads a flag, and then data that the other thread
wrote before the flag, may read old data if no fence is between the two writes. Where one warp does so, the read is
reported (`Messages.strong`).

A program may mean to read whatever is there, and then looks at what it got: it polls, or the data hold their own flag.
So only loads whose values reach no comparison count (`untested`). At the default level the reader needs no fence, as
in the CUDA guide, whose last block sums up volatile results behind a relaxed atomic. An atomic that leaves every value
as it is, `atomicAdd(p, 0)`, is a load here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from softsm.engine.program import Program
from softsm.ptx.ast import Imm, Instruction, Reg, Symbol

TESTS = {"setp", "set", "testp", "slct", "vote", "match", "redux", "call"}
KINDS = {"volatile", "relaxed", "mmio"}
ORDERED = {"acquire", "release", "acq_rel"}
NEUTRAL = {"add": (0,), "or": (0,), "xor": (0,), "and": (-1, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF)}
WRITER = (
    "the other warp wrote a flag behind it that this warp has read; put a fence (__threadfence()) between these two "
    "writes: relaxed and volatile accesses are not ordered by themselves"
)
READER = "put a fence (__threadfence()) between the read of the flag and this one: an earlier load does not order it"


class Written(NamedTuple):
    warp: object
    slot: int
    epoch: int
    pc: int


class Messages:
    """The part of the checker for kernels that have such loads."""

    def __init__(self, checker, inner: Callable, relaxed: Relaxed):
        self.order, self.findings, self.strict = checker.order, checker.findings, checker.strict
        self.inner, self.loads, self.changes, self.looks = inner, *relaxed
        self.written: dict[int, Written] = {}  # the last such write of an address
        self.before: dict[int, np.ndarray] = {}  # what had happened before it
        self.sending: dict[object, tuple[int, np.ndarray]] = {}  # a warp's last write: its pc, and the same
        self.heard: dict[object, np.ndarray] = {}  # what had happened before the flags that a warp has read

    def strong(self, w, address: int, cta, order: str, scope: str, *, read: bool, write: bool) -> None:
        """Does what Order.strong does, and compares a read with the last write of the address."""
        if cta is not None:
            self.inner(w, address, cta, order, scope, read=read, write=write)
            return
        if read and not write and w.pc in self.loads:
            self.compare(w, address)
        self.inner(w, address, cta, order, scope, read=read, write=write)
        slots = self.order.slots
        if read and address in self.before:
            heard = self.heard.setdefault(w, np.zeros(slots, np.uint32))
            np.maximum(heard, self.before[address], out=heard)
        if write and w.pc not in self.looks:
            if w not in self.sending or self.sending[w][0] != w.pc:  # otherwise another lane or iteration
                self.sending[w] = w.pc, w.view.clock[:slots].copy()
                self.order.new_epoch(w.view)
            sent = self.sending[w][1]
            also = w.pc in self.changes and address in self.before  # the word is passed on together with what was found
            self.before[address] = np.maximum(sent, self.before[address]) if also else sent
            self.written[address] = Written(w, w.view.slot, w.view.epoch, w.pc)

    def compare(self, w, address: int) -> None:
        last, heard = self.written.get(address), self.heard.get(w)
        if last is None or heard is None or last.warp is w:
            return
        if w.view.clock.item(last.slot) >= last.epoch or heard.item(last.slot) < last.epoch:
            return
        fenced = any(clock.item(last.slot) >= last.epoch for clock in w.view.acquirable.values())
        if fenced and not self.strict:
            return
        this = self.findings.party(w, None, f"reads global bytes at {address:#x}")
        that = self.findings.party(last.warp, None, f"wrote global bytes at {address:#x}", last.pc)
        self.findings.add_race(this, that, "global memory", None, READER if fenced else WRITER)


class Relaxed(NamedTuple):
    """The relaxed instructions of a kernel, as pcs."""

    loads: set[int]  # loads of global memory whose values reach no comparison, and atomics that only load
    changes: set[int]  # atomics
    looks: set[int]  # atomics that only load


known: WeakKeyDictionary[Any, Relaxed] = WeakKeyDictionary()  # by kernel


def relaxed_in(kernel) -> Relaxed:
    if kernel not in known:
        known[kernel] = find_relaxed(kernel.program)
    return known[kernel]


def find_relaxed(program: Program) -> Relaxed:
    untested, looks = set(), set()
    for flow in program.flow.values():
        inside = [x for x in flow if isinstance(x[0], Instruction)]
        looks |= {id(ins) for ins, _, _ in inside if is_look(ins, inside)}
        loads = [(ins, written) for ins, _, written in inside if is_relaxed_load(ins) or id(ins) in looks]
        variables = addressed(inside) if loads else {}
        untested |= {id(ins) for ins, written in loads if not tested(written, inside, variables)}
    numbered = [(pc, ins) for pc, ins in enumerate(program.instructions) if ins is not None]
    return Relaxed(
        {pc for pc, ins in numbered if id(ins) in untested},
        {pc for pc, ins in numbered if ins.opcode in ("atom", "red")},
        {pc for pc, ins in numbered if id(ins) in looks},
    )


def is_look(ins: Instruction, flow: list[tuple]) -> bool:
    """Returns whether this is a relaxed atomic of global memory that changes no value."""
    if ins.opcode != "atom" or not ORDERED.isdisjoint(ins.modifiers) or space_of(ins).startswith("shared"):
        return False
    if "cas" in ins.modifiers:
        return ins.operands[2] == ins.operands[3]
    neutral = next((NEUTRAL[m] for m in ins.modifiers if m in NEUTRAL), ())
    return bool(neutral) and constant(ins.operands[2], flow) in neutral


def constant(operand, flow: list[tuple]):
    """Returns the value of an operand, where it is a number or a register that holds only one."""
    values = {operand}
    if isinstance(operand, Reg):
        writers = [ins for ins, _, written in flow if operand.name in written]
        values = {ins.operands[1] if ins.opcode == "mov" else None for ins in writers}
    one = values.pop() if len(values) == 1 else None
    return one.value if isinstance(one, Imm) else None


def is_relaxed_load(ins: Instruction) -> bool:
    return ins.opcode == "ld" and not KINDS.isdisjoint(ins.modifiers) and not space_of(ins).startswith("shared")


def tested(written: set[str], flow: list[tuple], variables: dict[str, set[str]]) -> bool:
    """Returns whether a value in one of these registers, or one computed from it, may be compared with something."""
    reached = set(written)
    stored: dict[str, set[str]] = {}  # where, by space: the variables, or '' for any
    before = (-1, -1)
    while before != (len(reached), sum(map(len, stored.values()))):
        before = len(reached), sum(map(len, stored.values()))
        for ins, read, names in flow:
            if ins.opcode == "ld":
                places, of = stored.get(space_of(ins), set()), named(ins.operands[1], variables)
                if places and ("" in places | of or places & of):
                    reached |= names
            elif reached & read:
                if ins.opcode in TESTS:
                    return True
                if ins.opcode != "st":
                    reached |= names
                elif space_of(ins) != "global":
                    stored.setdefault(space_of(ins), set()).update(named(ins.operands[0], variables))
    return False


def addressed(flow: list[tuple]) -> dict[str, set[str]]:
    """Returns the variables whose addresses may be in a register."""
    found: dict[str, set[str]] = {}
    before = -1
    while before != sum(map(len, found.values())):
        before = sum(map(len, found.values()))
        for ins, read, names in flow:
            if ins.opcode not in ("ld", "atom"):
                of = {x.name for x in ins.operands if isinstance(x, Symbol)}.union(*(found.get(r, ()) for r in read))
                for name in names if of else ():
                    found.setdefault(name, set()).update(of)
    return found


def named(address, variables: dict[str, set[str]]) -> set[str]:
    """Returns the variables that an address may lie in; {''} if that is not known."""
    base = address.base
    return {base.name} if isinstance(base, Symbol) else variables.get(getattr(base, "name", ""), {""})


def space_of(ins: Instruction) -> str:
    named = next((m for m in ins.modifiers if m.split("::")[0] in ("shared", "local", "param", "global")), "global")
    return named.split("::")[0]
