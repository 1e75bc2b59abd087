"""Strong accesses of one word by several GPUs. Two of them race like plain ones unless both have .sys scope: one of
.gpu scope may be served by a cache of its own GPU (PTX, memory consistency model: morally strong operations). Nor may
they overlap in part: of a signal that is written in halves a reader of the whole may see one."""

from __future__ import annotations

import re
from typing import NamedTuple

from softsm.engine.warps import Warp

FIX = "the two run on different GPUs: give both accesses .sys scope"
TORN = "the two overlap in part, so a reader may see half of what is written: access the whole in one instruction"


class Access(NamedTuple):
    warp: Warp
    slot: int
    epoch: int
    pc: int
    scope: str
    write: bool
    size: int  # in bytes; 0 for a vector, whose elements are accesses of their own


class ScopeChecks:
    """The part of the checker that compares scopes; only launches of several GPUs have one."""

    def __init__(self, checker):
        self.findings, self.order = checker.findings, checker.order
        self.accesses: dict[int, dict[tuple[int, bool], Access]] = {}  # by address: the last ones of each GPU

    def strong(self, w, address: int, cta, order: str, scope: str, *, read: bool, write: bool) -> None:
        """Does what Order.strong does, and compares the access with those of other GPUs."""
        here = Access(w, w.view.slot, w.view.epoch, w.pc, scope, write, size_of(w.instruction()))
        self.order.strong(w, address, cta, order, scope, read=read, write=write)
        if cta is not None:
            return
        for at in (address - 4, address + 4):
            for (gpu, _), other in self.accesses.get(at, {}).items():
                met = at < address + here.size and address < at + other.size
                if gpu != w.cta.gpu and met and (write or other.write) and not self.ordered(w, other):
                    self.found(address, here, other, TORN)
        there = self.accesses.setdefault(address, {})
        for (gpu, _), other in there.items():
            if gpu == w.cta.gpu or not (write or other.write) or self.ordered(w, other):
                continue
            if scope != "sys" or other.scope != "sys":
                self.found(address, here, other, FIX)
            elif here.size and other.size and here.size != other.size:
                self.found(address, here, other, TORN)
        there[w.cta.gpu, write] = here

    @staticmethod
    def ordered(w, other: Access) -> bool:
        return w.view.clock.item(other.slot) >= other.epoch

    def found(self, address: int, here: Access, other: Access, fix: str) -> None:
        this, that = (
            self.findings.party(x.warp, None, f"accesses {address:#x} at .{x.scope} scope", x.pc) for x in (here, other)
        )
        self.findings.add_race(this, that, "global memory", None, fix)


def size_of(ins) -> int:
    kinds = [re.fullmatch(r"[bsuf](8|16|32|64|128)", m) for m in ins.modifiers]
    return 0 if {"v2", "v4", "v8"} & {*ins.modifiers} else next((int(k[1]) // 8 for k in kinds[::-1] if k), 0)
