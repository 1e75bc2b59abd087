"""Work that several warps repeat: accesses that look like races, and whether their values matter.

A block smaller than the CTA is held by several warps: all of them load it and compute, one stores the result. A load
and a store of one place (`tl.store(p, tl.load(p) + 1)`) are then ordered in the warp that stores, and in no other; but
what the others read ends at stores that their guard forbids (`confined`, and Findings.suspect for the guard). An atomic
operation under a mask hands its old value to the other warps through shared memory, where nothing was written when the
mask was false.

The default level stays silent about both as far as the program's text proves them harmless; the strict level does not.
"""

from __future__ import annotations

from softsm.ptx.ast import Instruction, Reg

# What takes a value out of the warp, or lets it steer the program. Everything else computes registers from registers.
LEAVES = {
    "atom", "bar", "barrier", "bra", "brx", "call", "clusterlaunchcontrol", "cp", "discard", "exit", "fence",
    "griddepcontrol", "mbarrier", "multimem", "nanosleep", "prefetch", "red", "ret", "setmaxnreg", "st", "stmatrix",
    "tcgen05", "tensormap", "trap", "wgmma",
}  # fmt: skip


def in_shared(ins: Instruction) -> bool:
    return any(m.startswith("shared") for m in ins.modifiers) or ins.opcode in ("ldmatrix", "stmatrix")


def confined(program, load_pc: int, store_pc: int) -> bool:
    """Does what the load brings end at the store, or at others under the same guard?"""
    load, store = program.instructions[load_pc], program.instructions[store_pc]
    if store.opcode != "st" or store.guard is None or load.opcode != "ld":
        return False
    for flow in program.flow.values():
        if any(ins is load for ins, _, _ in flow) and any(ins is store for ins, _, _ in flow):
            return ends_at(store, load, [x for x in flow if isinstance(x[0], Instruction)])
    return False  # in two functions


def ends_at(store: Instruction, load: Instruction, flow: list[tuple]) -> bool:
    """`confined`, in the function of both. Calls pass values in registers or through st.param: both leave it."""
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
            elif ins.opcode in LEAVES or ins.opcode == "ld":  # another value may be no address at all
                return False
            else:
                reached |= written
    return True


def masked_atomic(program, load_pc: int) -> bool:
    """Is this the load with which all warps fetch the result of an atomic operation of one of them, under a guard?"""
    load = program.instructions[load_pc]
    before = [ins for ins in program.instructions[:load_pc] if ins is not None and ins is not load]
    stores = [ins for ins in before if ins.opcode == "st" and in_shared(ins)]
    if load.opcode != "ld" or not stores or stores[-1].guard is None:
        return False
    handed = stores[-1].operands[-1]
    return isinstance(handed, Reg) and any(
        ins.opcode == "atom" and ins.guard == stores[-1].guard and ins.operands[0] == handed for ins in before
    )
