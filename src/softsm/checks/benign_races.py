"""Benign races, most of them of several warps that repeat the same work.

A Triton block smaller than the CTA is replicated: all warps load it and compute, and one stores the result. In
`tl.store(p, tl.load(p) + 1)` only the storing warp orders its load before the store. The other warps' loads race, but
their values only reach stores that the guard disables (`confined`; Findings.suspect checks the guard). An atomic under
a mask passes its old value to the other warps through shared memory, which is not written if the mask is false.

A loop of compare-and-swap (the CUDA guide's way to any atomic) begins with an ordinary load. A value that another
thread has replaced is noticed and read again (`compared`).

The default level does not report these races if the program proves it harmless. The strict level reports them.
"""

from __future__ import annotations

from softsm.ptx.ast import Instruction, Reg

# Instructions that move a value out of the warp or into control flow. All others compute registers from registers.
LEAVES = {
    "atom", "bar", "barrier", "bra", "brx", "call", "clusterlaunchcontrol", "cp", "discard", "exit", "fence",
    "griddepcontrol", "mbarrier", "multimem", "nanosleep", "prefetch", "red", "ret", "setmaxnreg", "st", "stmatrix",
    "tcgen05", "tensormap", "trap", "wgmma",
}  # fmt: skip


def in_shared(ins: Instruction) -> bool:
    return any(m.startswith("shared") for m in ins.modifiers) or ins.opcode in ("ldmatrix", "stmatrix")


def confined(program, load_pc: int, store_pc: int) -> bool:
    """Returns whether the loaded value reaches only the store, or others under the same guard."""
    load, store = program.instructions[load_pc], program.instructions[store_pc]
    if store.opcode != "st" or store.guard is None or load.opcode != "ld":
        return False
    for flow in program.flow.values():
        if any(ins is load for ins, _, _ in flow) and any(ins is store for ins, _, _ in flow):
            return ends_at(store, load, [x for x in flow if isinstance(x[0], Instruction)])
    return False  # the instructions are in two functions


def ends_at(store: Instruction, load: Instruction, flow: list[tuple]) -> bool:
    """Returns `confined` within one function. Calls pass values in registers or through st.param, so both count as
    leaving it."""
    reached: set[str] = set().union(*(written for ins, _, written in flow if ins is load))
    through_shared = False
    before = -1
    while before != len(reached):
        before = len(reached)
        for ins, read, written in flow:
            if through_shared and ins.opcode in ("ld", "ldmatrix") and in_shared(ins):
                reached |= written
            if ins is store or not reached & read:
                continue
            if ins.opcode == "st" and ins.guard == store.guard and not in_shared(ins):
                continue
            if ins.opcode in ("st", "stmatrix") and in_shared(ins):
                through_shared = True
            elif ins.opcode in LEAVES or ins.opcode == "ld":  # with another value the address may be invalid
                return False
            else:
                reached |= written
    return True


def masked_atomic(program, load_pc: int) -> bool:
    """Returns whether all warps fetch the result of one warp's guarded atomic with this load."""
    load = program.instructions[load_pc]
    before = [ins for ins in program.instructions[:load_pc] if ins is not None and ins is not load]
    stores = [ins for ins in before if ins.opcode == "st" and in_shared(ins)]
    if load.opcode != "ld" or not stores or stores[-1].guard is None:
        return False
    handed = stores[-1].operands[-1]
    return isinstance(handed, Reg) and any(
        ins.opcode == "atom" and ins.guard == stores[-1].guard and ins.operands[0] == handed for ins in before
    )


def compared(program, load_pc: int, atomic_pc: int) -> bool:
    """Returns whether a compare-and-swap at the address of the load compares the loaded value with what is there."""
    load, swap = program.instructions[load_pc], program.instructions[atomic_pc]
    if load.opcode != "ld" or swap.opcode != "atom" or "cas" not in swap.modifiers:
        return False
    for flow in program.flow.values():
        found = [x for x in flow if isinstance(x[0], Instruction)]
        if any(ins is load for ins, _, _ in found) and any(ins is swap for ins, _, _ in found):
            return load.operands[1] == swap.operands[1] and copied(load, swap.operands[2], found)
    return False


def copied(load: Instruction, register, flow: list[tuple]) -> bool:
    """Returns whether `mov` alone brings the loaded value to this register."""
    copies: set[str] = set().union(*(written for ins, _, written in flow if ins is load))
    before = -1
    while before != len(copies):
        before = len(copies)
        copies |= set().union(*(written for ins, read, written in flow if ins.opcode == "mov" and copies & read))
    return isinstance(register, Reg) and register.name in copies
