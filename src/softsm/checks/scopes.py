"""Strong accesses of one word by several GPUs. Two of them race like plain ones unless both have .sys scope: one of
.gpu scope may be served by a cache of its own GPU (PTX, memory consistency model: morally strong operations)."""

from __future__ import annotations

from typing import NamedTuple

from softsm.engine.warps import Warp

FIX = "the two run on different GPUs: give both accesses .sys scope"


class Access(NamedTuple):
    warp: Warp
    slot: int
    epoch: int
    pc: int
    scope: str
    write: bool


class ScopeChecks:
    """The part of the checker that compares scopes; only launches of several GPUs have one."""

    def __init__(self, checker):
        self.findings, self.order = checker.findings, checker.order
        self.accesses: dict[int, dict[tuple[int, bool], Access]] = {}  # by address: the last ones of each GPU

    def strong(self, w, address: int, cta, order: str, scope: str, *, read: bool, write: bool) -> None:
        """Does what Order.strong does, and compares the access with those of other GPUs."""
        here = Access(w, w.view.slot, w.view.epoch, w.pc, scope, write)
        self.order.strong(w, address, cta, order, scope, read=read, write=write)
        if cta is not None:
            return
        there = self.accesses.setdefault(address, {})
        for (gpu, _), other in there.items():
            if (
                gpu != w.cta.gpu
                and (write or other.write)
                and (scope != "sys" or other.scope != "sys")
                and w.view.clock.item(other.slot) < other.epoch
            ):
                self.found(address, here, other)
        there[w.cta.gpu, write] = here

    def found(self, address: int, here: Access, other: Access) -> None:
        this, that = (
            self.findings.party(x.warp, None, f"accesses {address:#x} at .{x.scope} scope", x.pc) for x in (here, other)
        )
        self.findings.add_race(this, that, "global memory", None, FIX)
