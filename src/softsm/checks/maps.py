"""Tensor maps that a kernel makes or changes itself: the copy engine reads them through a proxy of its own.

A map that was written (tensormap.replace, tensormap.cp_fenceproxy) is released by whoever wrote it (cp_fenceproxy does
so itself, else fence.proxy.tensormap::generic.release), and acquired with fence.proxy.tensormap::generic.acquire before
a copy uses it, by the thread that issues the copy or one it has synchronised with. So is a map that ordinary stores
wrote, which are found in the shadow of global memory.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

import numpy as np

from softsm.checks import shadow as sh

WORDS = 32  # 32-bit words of a map


@dataclass
class WrittenMap:
    warp: object
    slot: int
    epoch: int
    pc: int
    released: bool
    acquired: list[tuple[int, int]] = field(default_factory=list)  # (slot, epoch) of fences that acquired it


class MapChecks:
    """The part of the checker that knows tensor maps in global memory."""

    def __init__(self, checker):
        self.checker, self.findings = checker, checker.findings
        self.maps: dict[int, WrittenMap] = {}  # by address of the map
        self.stored: dict[tuple[int, int, int], WrittenMap] = {}  # by address, slot and epoch

    def written(self, w, address: int, released: bool) -> None:
        slot = w.view.slot
        self.maps[address] = WrittenMap(w, slot, w.view.epoch, w.pc, released)

    def fence(self, w, address: int | None) -> None:
        """Handles fence.proxy.tensormap: acquire of the map at an address, or release (None) of what the warp knows."""
        if address is None:
            for written in self.maps.values():
                written.released = written.released or self.has_seen(w, written.slot, written.epoch)
            return
        for found in self.writes(address):
            if self.has_seen(w, found.slot, found.epoch):
                found.acquired.append((w.view.slot, w.view.epoch))

    def writes(self, address: int) -> list[WrittenMap]:
        """Returns what wrote the map: the last change of it, and ordinary stores."""
        known = [self.maps[address]] if address in self.maps else []
        touched, i = (
            self.checker.memory.touched,
            bisect.bisect_right(self.checker.machine.global_memory.starts, address),
        )
        first = (address - touched.origins[i - 1]) // 4 * sh.GLOBAL_RECORD if 0 < i <= len(touched.shadows) else -1
        if first < 0:
            return known
        records = touched.shadows[i - 1][first : first + WORDS * sh.GLOBAL_RECORD].reshape(-1, sh.GLOBAL_RECORD)
        records = records[(records[:, 0] > 0) & (records[:, 0] < sh.ASYNC)]
        for agent, epoch, pc in np.unique(records[:, :3], axis=0).tolist() if len(records) else ():
            key = address, agent - 1, epoch
            if key not in self.stored:  # whether it was released is not known
                self.stored[key] = WrittenMap(self.checker.agents[agent], agent - 1, epoch, pc, released=True)
            known.append(self.stored[key])
        return known

    def has_seen(self, w, slot: int, epoch: int) -> bool:
        return slot == w.view.slot or int(w.view.clock[slot]) >= epoch

    def used(self, w, address: int) -> None:
        """Checks a copy with the map at this address when it is issued."""
        for written in self.writes(address):
            self.check(w, address, written)

    def check(self, w, address: int, written: WrittenMap) -> None:
        fix = ""
        if not self.has_seen(w, written.slot, written.epoch):
            fix = "order them by a barrier, and put fence.proxy.tensormap::generic.acquire before the copy"
        elif not written.released:
            fix = "put fence.proxy.tensormap::generic.release after the change of the map"
        elif not any(self.has_seen(w, *fence) for fence in written.acquired):
            fix = "put fence.proxy.tensormap::generic.acquire with the map's address before the copy"
        if fix:
            where = f"the tensor map at {address:#x}"
            self.findings.add_race(
                self.findings.party(w, None, f"issues a copy with {where}"),
                self.findings.party(written.warp, None, f"wrote {where}", pc=written.pc),
                "a tensor map",
                None,
                fix,
            )
