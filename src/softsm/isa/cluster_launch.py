"""clusterlaunchcontrol: a running cluster takes over one that has not started yet.

The 16-byte answer is softsm's own (PTX calls it opaque): ctaid x, y, z of that cluster's first CTA, then 1 if granted.
"""

from __future__ import annotations

import functools
import struct

import numpy as np

from softsm.isa.bulk_copy import COMPLETE_TX, destinations
from softsm.isa.copying import start
from softsm.isa.operands import Issuer, lanes, set_predicate, shared_address, shared_operand
from softsm.isa.registry import lowers
from softsm.isa.typed import needs_target
from softsm.ptx.ast import Sink, Vector

NBYTES = 16


@lowers("clusterlaunchcontrol")
def clusterlaunchcontrol(asm, ins):
    needs_target(asm, ins, 100)
    mods = list(ins.modifiers)
    if mods[:2] == ["try_cancel", "async"] and mods[-1] == "b128" and COMPLETE_TX in mods:
        left = set(mods[2:-1]) - {COMPLETE_TX, "multicast::cluster::all", "shared::cta"}
        if left:
            asm.refuse(ins, f"unknown modifiers {', '.join(sorted(left))}")
        space = "shared::cta" if "shared::cta" in mods else None
        return asm.macro(
            do_try_cancel,
            ins,
            at=shared_operand(asm, ins.operands[0], space),
            barrier=shared_operand(asm, ins.operands[1], space),
            everywhere="multicast::cluster::all" in mods,
        )
    if mods[:1] == ["query_cancel"] and mods[-1] == "b128":
        target, answer = ins.operands
        handle = asm.register(answer, "Q")
        if mods[1:-1] == ["is_canceled", "pred"]:
            return asm.macro(do_is_canceled, ins, dst=asm.dst(target, "p"), handle=handle)
        axes: dict[str, tuple[int, ...]] = {
            "get_first_ctaid::x": (0,),
            "get_first_ctaid::y": (1,),
            "get_first_ctaid::z": (2,),
        }
        axes["get_first_ctaid"] = (0, 1, 2, 3)
        if mods[1] in axes and mods[2:-1] in (["b32"], ["v4", "b32"]):
            items = target.items if isinstance(target, Vector) else (target,)
            rows = [None if isinstance(x, Sink) else asm.dst(x, "u") for x in items]
            if len(rows) == len(axes[mods[1]]):
                return asm.macro(do_first_ctaid, ins, rows=rows, axes=axes[mods[1]], handle=handle)
    return asm.refuse(ins, "expected .try_cancel.async, .query_cancel.is_canceled or .query_cancel.get_first_ctaid")


def do_try_cancel(w, mask, o):
    for lane in lanes(mask):
        everyone = (1 << len(w.cta.cluster)) - 1 if o.everywhere else None
        address = shared_address(w, o.at, lane)
        targets = destinations(w, address, NBYTES, o.barrier, lane, everyone, "clusterlaunchcontrol.try_cancel")
        who = Issuer(w, "clusterlaunchcontrol")
        start(
            w,
            lane,
            "clusterlaunchcontrol.try_cancel",
            functools.partial(_answer, w.machine, targets, who),
            signals=tuple(barrier for _, _, barrier in targets),
            writes=tuple(("shared", cta, at, at + NBYTES) for cta, at, _ in targets),
        )


def _answer(machine, targets, who) -> None:
    first = machine.try_cancel(targets[0][0].gpu)
    data = np.frombuffer(struct.pack("<4I", *(first or (0, 0, 0)), int(first is not None)), np.uint8)
    for cta, offset, barrier in targets:
        cta.shared[offset : offset + NBYTES] = data
        barrier.complete_tx(NBYTES, who)


def _words(w, handle: int, lane: int) -> tuple[int, int, int, int]:
    low, high = int(w.Q[handle, lane]), int(w.Q[handle + 1, lane])
    return low & 0xFFFFFFFF, low >> 32, high & 0xFFFFFFFF, high >> 32


def do_is_canceled(w, mask, o):
    set_predicate(w, o.dst, mask, sum(1 << lane for lane in lanes(mask) if _words(w, o.handle, lane)[3] == 1))


def do_first_ctaid(w, mask, o):
    for lane in lanes(mask):
        words = _words(w, o.handle, lane)
        if words[3] != 1:
            # Undefined in PTX, so a program cannot use the value; Triton queries it first and discards the answer.
            words = (0xFFFFFFFF,) * 4
        for row, axis in zip(o.rows, o.axes):
            if row is not None:
                w.R[row, lane] = words[axis] if axis < 3 else 0
