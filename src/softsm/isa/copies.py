"""cp: cp.async is in `async_copy`, bulk copies in `bulk_copy`, tensor copies in `tma`."""

from __future__ import annotations

from softsm.isa import async_copy, bulk_copy, tma
from softsm.isa.registry import lowers


@lowers("cp")
def cp(asm, ins):
    mods = ins.modifiers
    if mods[:1] == ("async",) and mods[1:2] != ("bulk",):
        return async_copy.lower(asm, ins, mods[1:])
    if mods[:2] == ("async", "bulk"):
        reduction, rest = False, mods[2:]
    elif mods[:3] == ("reduce", "async", "bulk"):
        reduction, rest = True, mods[3:]
    else:
        return asm.refuse(ins, "expected cp.async, cp.async.bulk or cp.reduce.async.bulk")
    if rest == ("commit_group",) and not reduction:
        return asm.macro(bulk_copy.do_bulk_commit, ins)
    if rest[:1] == ("wait_group",) and rest[1:] in ((), ("read",)) and not reduction:
        newest = async_copy.group_count(asm, ins, ins.operands[0])
        return asm.macro(bulk_copy.do_bulk_wait, ins, newest=newest, read="read" in rest)
    if "tensor" in rest[:2]:
        return tma.lower(asm, ins, reduction, [m for m in rest if m != "tensor"])
    return bulk_copy.lower(asm, ins, reduction, rest)
