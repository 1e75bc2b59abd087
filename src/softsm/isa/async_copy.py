"""cp.async, its groups and its arrival on an mbarrier."""

from __future__ import annotations

import numpy as np

from softsm.engine.in_flight import AsyncOp
from softsm.isa import copy_kernels
from softsm.isa.copying import global_view, start, waited
from softsm.isa.mbarriers import SHARED_SPACES, barrier_at
from softsm.isa.operands import Issuer, lanes, located, shared_address, shared_bytes, shared_operand
from softsm.memory.mbarrier import Mbarrier
from softsm.ptx.ast import Imm

_HINTS = ("L2::cache_hint", "L2::64B", "L2::128B", "L2::256B")


def group_count(asm, ins, operand) -> int:
    if not isinstance(operand, Imm):
        asm.refuse(ins, "the number of groups must be a constant")
    return int(operand.value)


def lower(asm, ins, mods):
    """Lowers cp.async; `mods` are the modifiers after .async."""
    if mods == ("commit_group",):
        return asm.macro(do_commit, ins)
    if mods == ("wait_group",):
        return asm.macro(do_wait, ins, newest=group_count(asm, ins, ins.operands[0]))
    if mods == ("wait_all",):
        return asm.macro(do_wait, ins, newest=None)
    if mods[:2] == ("mbarrier", "arrive"):
        flags = set(mods[2:]) - {"b64"}
        space = next((s for s in SHARED_SPACES[:2] if s in flags), None)
        if flags - {"noinc", space}:
            asm.refuse(ins, f"unknown modifiers {sorted(flags)}")
        at = shared_operand(asm, ins.operands[0], space)
        return asm.macro(do_copy_arrive, ins, at=at, increment="noinc" not in flags)
    if mods[:1] not in (("ca",), ("cg",)) or mods[1:3] not in (("shared", "global"), ("shared::cta", "global")):
        asm.refuse(ins, "expected cp.async.{ca,cg}.shared.global")
    if set(mods[3:]) - set(_HINTS):
        asm.refuse(ins, f"unknown modifiers {', '.join(mods[3:])}")
    target, source, size, *more = ins.operands
    policy = more.pop() if "L2::cache_hint" in mods else None
    if policy is not None:
        asm.src(policy, "q")
    nbytes = int(size.value) if isinstance(size, Imm) else 0
    if nbytes not in ((4, 8, 16) if mods[0] == "ca" else (16,)) or len(more) > 1:
        asm.refuse(ins, "cp-size is 4, 8 or 16 for .ca and 16 for .cg")
    ignore = more and asm.type_of(more[0]) == "pred"
    return asm.macro(
        do_cp_async,
        ins,
        dst=asm.address_row(target, "u"),
        src=asm.address_row(source, "q"),
        size=nbytes,
        ignore=asm.src(more[0], "p") if ignore else None,
        used=asm.src(more[0], "u") if more and not ignore else None,
    )


# -- cp.async ----------------------------------------------------------------------------------------------------------


def do_cp_async(w, mask, o):
    """Issues one operation for all lanes of the instruction. Lanes with nothing to read write zeros."""
    plan = np.empty((3, 32), np.int64)
    at = plan.ctypes.data
    used = -1 if o.used is None else o.used
    ignored = 0 if o.ignore is None else int(w.P[o.ignore])
    n = copy_kernels.plan_lanes(w.state, at, mask, o.dst, o.src, used, ignored, o.size)
    if n < 0:
        _explain(w, mask, o, ignored)
    machine, move, size = w.machine, copy_kernels.move_lanes, o.size

    def effects(plan=plan) -> None:  # the default keeps the plan alive
        move(at, n, size)

    reads: tuple = ()
    writes: tuple = ()
    if machine.kernel.checking:
        to = plan[0, :n] - w.cta.shared.ctypes.data
        writes = tuple(("shared", w.cta, int(x), int(x) + size) for x in to)
        reads = tuple(("global", int(x), int(x + k)) for x, k in zip(plan[1, :n], plan[2, :n]) if k)
    op = machine.issue(AsyncOp("cp.async", w, lanes(mask)[0], w.line(), effects, reads=reads, writes=writes))
    w.in_flight.cp_async.add(mask, op)


def _explain(w, mask: int, o, ignored: int) -> None:
    """Raises a fault that names the lane whose copy is illegal, and why."""
    for lane in lanes(mask):
        target, source = int(w.R[o.dst, lane]), int(w.Q[o.src, lane])
        nbytes = o.size if o.used is None else int(w.R[o.used, lane])
        nbytes = 0 if ignored >> lane & 1 else nbytes
        what = f"cp.async of lane {lane}"
        if nbytes > o.size:
            raise w.fault("copy-size", f"{what}: src-size {nbytes} is more than cp-size {o.size}")
        if target % o.size or (nbytes and source % o.size):
            raise w.fault("misaligned", f"{what}: addresses must be multiples of {o.size} bytes")
        if target >> 24 != w.cta.rank:
            raise w.fault("out-of-bounds", f"{what}: shared address {target:#x} is not in this CTA")
        shared_bytes(w, target, o.size, what, o.size)
        if nbytes:
            global_view(w, source, nbytes, what)
    raise w.fault("internal", "cp.async: no lane's copy is illegal")


def do_commit(w, mask, o):
    w.in_flight.cp_async.commit(mask)


def do_wait(w, mask, o):
    mine = w.in_flight.cp_async
    for op in mine.take_all(mask) if o.newest is None else mine.take(mask, o.newest):
        w.machine.require(op)
        waited(w, op)


def do_copy_arrive(w, mask, o):
    """Executes cp.async.mbarrier.arrive: arrives when the lane's earlier cp.async operations have completed."""
    mine = w.in_flight.cp_async
    at: dict[Mbarrier, int] = {}
    row, generic = o.at
    if not generic and (w.R[row] == w.R[row, 0]).all():
        at[barrier_at(w, int(w.R[row, 0]))] = mask
    else:
        for lane in lanes(mask):
            barrier = barrier_at(w, shared_address(w, o.at, lane))
            at[barrier] = at.get(barrier, 0) | 1 << lane
    for barrier, those in at.items():
        count = those.bit_count()
        who = Issuer(w, "cp.async")
        if o.increment:
            located(w, barrier.increment_pending, count, who)
        start(
            w,
            lanes(those)[0],
            "cp.async arrival",
            lambda barrier=barrier, count=count, who=who: barrier.arrive(count, who),
            mine.in_flight(those),
            (barrier,),
        )
