"""Which registers decide whether a loop that polls goes on.

A loop may count its tries, or read the clock, without using the result. Such registers differ in every
iteration, and the loop still never ends. A register decides if its value reaches a branch, a guard, an address or a
store of the loop: engine/deadlock.py compares only those.
"""

from __future__ import annotations

from softsm.engine.program import Program
from softsm.ptx.ast import Instruction

# What leads out of the registers of a thread. All other instructions compute registers from registers.
EFFECTS = {
    "atom", "bar", "barrier", "bra", "clusterlaunchcontrol", "cp", "discard", "elect", "exit", "fence",
    "griddepcontrol", "ld", "ldmatrix", "ldu", "mbarrier", "multimem", "prefetch", "red", "setmaxnreg", "st",
    "stmatrix", "tcgen05", "tensormap", "trap", "wgmma", "wmma",
}  # fmt: skip
ELSEWHERE = {"brx", "call", "ret"}  # the loop goes on where its own text does not show it


def deciding(program: Program, first: int, last: int) -> list[tuple[str, int]] | None:
    """Returns the registers, as (file, row), that decide what the instructions from pc `first` to `last` do; None if
    that is not known."""
    inside = {id(ins) for ins in program.instructions[first : last + 1] if ins is not None}
    for name, flow in program.flow.items():
        found = [x for x in flow if isinstance(x[0], Instruction) and id(x[0]) in inside]
        if len(found) == len(inside) and not any(ins.opcode in ELSEWHERE for ins, _, _ in found):
            rows, kinds = program.rows[name], program.kinds[name]
            return [place for x in closed(found) if x in rows for place in places(kinds.get(x, ""), rows[x])]
    return None


def closed(flow: list[tuple]) -> set[str]:
    """Returns the names that effects read, and what these are computed from. flow: (instruction, names read, names
    written)."""
    decide: set[str] = set().union(*(read for ins, read, _ in flow if ins.opcode in EFFECTS))
    before = -1
    while before != len(decide):
        before = len(decide)
        for _, read, written in flow:
            if decide & set(written):
                decide |= set(read)
    return decide


def places(kind: str, row: int) -> list[tuple[str, int]]:
    if kind == "pred":
        return [("P", row)]
    if kind == "b128":
        return [("Q", row), ("Q", row + 1)]
    return [("Q" if kind.endswith("64") else "R", row)]
