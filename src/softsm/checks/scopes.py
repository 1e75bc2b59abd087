"""Strong accesses of one word by several CTAs or GPUs. Two of them race like plain ones unless the scope of each holds
the other's thread: one of .gpu scope may be served by a cache of its own GPU (PTX, memory consistency model: morally
strong operations). Nor may those of several GPUs overlap in part: of a signal that is written in halves a reader of
the whole may see one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from softsm.engine.warps import Cta, Warp
from softsm.ptx.ast import Instruction

FIX = "the two run on different {}: give both accesses .{} scope"
SCOPED = {"atom", "red", "ld", "st"}
TORN = "the two overlap in part, so a reader may see half of what is written: access the whole in one instruction"


class Access(NamedTuple):
    warp: Warp
    slot: int
    epoch: int
    pc: int
    scope: str
    write: bool
    size: int  # size in bytes; 0 for a vector, whose elements are accesses of their own


class ScopeChecks:
    """The part of the checker that compares scopes, for launches of several GPUs and programs with scopes that are
    narrower than a GPU."""

    def __init__(self, checker):
        self.findings, self.order, self.ranks = checker.findings, checker.order, checker.ranks
        # by address: the last ones of each GPU and scope
        self.accesses: dict[int, dict[tuple[int, str, bool], Access]] = {}

    def strong(self, w, address: int, cta, order: str, scope: str, *, read: bool, write: bool) -> None:
        """Does what Order.strong does, and compares the access with those of others."""
        if read and cta is None and self.ranks is not None:
            self.ranks.reads(w, address)
        here = Access(w, w.view.slot, w.view.epoch, w.pc, scope, write, size_of(w.instruction()))
        self.order.strong(w, address, cta, order, scope, read=read, write=write)
        if cta is not None:
            return
        for at in (address - 4, address + 4):
            for (gpu, *_), other in self.accesses.get(at, {}).items():
                met = at < address + here.size and address < at + other.size
                if gpu != w.cta.gpu and met and (write or other.write) and not self.ordered(w, other):
                    self.found(address, here, other, TORN)
        there = self.accesses.setdefault(address, {})
        for (gpu, *_), other in there.items():
            if w.cta is other.warp.cta or not (write or other.write) or self.ordered(w, other):
                continue
            if not (reaches(scope, w.cta, other.warp.cta) and reaches(other.scope, w.cta, other.warp.cta)):
                apart = ("CTAs", "gpu") if gpu == w.cta.gpu else ("GPUs", "sys")
                self.found(address, here, other, FIX.format(*apart))
            elif gpu != w.cta.gpu and here.size and other.size and here.size != other.size:
                self.found(address, here, other, TORN)
        there[w.cta.gpu, scope, write] = here

    @staticmethod
    def ordered(w, other: Access) -> bool:
        return w.view.clock.item(other.slot) >= other.epoch

    def found(self, address: int, here: Access, other: Access, fix: str) -> None:
        this, that = (
            self.findings.party(x.warp, None, f"accesses {address:#x} at .{x.scope} scope", x.pc) for x in (here, other)
        )
        self.findings.add_race(this, that, "global memory", None, fix)


def reaches(scope: str, one: Cta, other: Cta) -> bool:
    """Returns whether both are within this scope of each other."""
    if scope == "cluster":
        return one.cluster is other.cluster
    return scope == "sys" or (scope == "gpu" and one.gpu == other.gpu)


def narrow(instructions: Iterable[Instruction]) -> bool:
    """Returns whether there is a strong access of global or any memory within a CTA or cluster."""
    return any(
        ins.opcode in SCOPED
        and {"cta", "cluster"} & {*ins.modifiers}
        and not {"shared", "shared::cta"} & {*ins.modifiers}
        for ins in instructions
    )


def size_of(ins) -> int:
    kinds = [re.fullmatch(r"[bsuf](8|16|32|64|128)", m) for m in ins.modifiers]
    return 0 if {"v2", "v4", "v8"} & {*ins.modifiers} else next((int(k[1]) // 8 for k in kinds[::-1] if k), 0)
