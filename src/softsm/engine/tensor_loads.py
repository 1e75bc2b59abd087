"""Finds the first uses of registers of a tcgen05.ld by data-flow analysis of a function's blocks.

ptxas makes the first instruction that uses such a register wait for the load, so kernels omit tcgen05.wait::ld. A copy
(`mov`) becomes no instruction, so its destination belongs to the load as well. If a register is overwritten without
having been read, nothing follows about the load.
"""

from __future__ import annotations

from softsm.engine.shared_rows import WRITES_FIRST, registers
from softsm.ptx.ast import Function, Instruction, Label
from softsm.ptx.flow import blocks_of

Uses = dict[int, frozenset[int]]  # id of an instruction -> ids of the loads; empty: copied or overwritten
Item = Instruction | Label


class State:
    """Loads that may be in flight, as bits, and the registers that belong to them."""

    __slots__ = ("flying", "held")

    def __init__(self, flying: int = 0, held: dict[str, int] | None = None):
        self.flying, self.held = flying, held or {}

    def copy(self) -> State:
        return State(self.flying, {name: loads for name, loads in self.held.items() if loads & self.flying})

    def join(self, other: State) -> bool:
        """Merges the state of another predecessor. Returns whether this one has changed."""
        before = self.flying, sum(loads.bit_count() for loads in self.held.values())
        self.flying |= other.flying
        for name, loads in other.held.items():
            self.held[name] = self.held.get(name, 0) | loads
        return before != (self.flying, sum(loads.bit_count() for loads in self.held.values()))

    def step(self, item: Item, number: dict[int, int]) -> int | None:
        """Executes an item. Returns the loads whose registers it uses, 0 if it only copies or overwrites them, else
        None."""
        if isinstance(item, Label):
            return None
        if item.opcode == "tcgen05" and item.modifiers[:1] == ("wait::ld",):
            self.flying, self.held = 0, {}
            return None
        own = number.get(id(item), 0)
        if not self.flying and not own:
            return None
        first = item.operands[:1] if item.opcode in WRITES_FIRST or own else ()
        read = registers(item.operands[len(first) :])
        if item.guard is not None:
            read.append(item.guard.name)
        loads, lost = self.of(read), self.of(registers(first))
        copies = item.opcode == "mov" and item.guard is None
        if not copies:
            self.flying &= ~loads
        for name in registers(first):
            if own or loads and copies:
                self.held[name] = own or loads
            else:
                self.held.pop(name, None)
        self.flying |= own
        return loads if loads and not copies else 0 if loads or lost else None

    def of(self, names: list[str]) -> int:
        loads = 0
        for name in names:
            loads |= self.held.get(name, 0)
        return loads & self.flying


def first_uses(function: Function) -> Uses:
    body = function.body
    loads = [x for x in body if isinstance(x, Instruction) and x.opcode == "tcgen05" and x.modifiers[:1] == ("ld",)]
    if not loads:
        return {}
    number = {id(load): 1 << i for i, load in enumerate(loads)}
    blocks = blocks_of(body, function.branch_targets)
    before = {0: State()}  # state before each reachable block
    reached, work = {0}, [0]
    while work:
        at = work.pop()
        state = before[at].copy()
        for item in body[blocks[at].start : blocks[at].stop]:
            state.step(item, number)
        for following in blocks[at].follows:
            known = before.setdefault(following, State())
            if known.join(state) or following not in reached:
                reached.add(following)
                work.append(following)
    uses: Uses = {}
    for at, state in before.items():
        for item in body[blocks[at].start : blocks[at].stop]:
            used = state.step(item, number)
            if used is not None:
                uses[id(item)] = frozenset(id(loads[i]) for i in range(used.bit_length()) if used >> i & 1)
    return uses
