"""Tensor maps that a kernel makes or changes itself: the copy engine reads them through a proxy of its own.

A map that was written (tensormap.replace, tensormap.cp_fenceproxy) is released by whoever wrote it (cp_fenceproxy does
so itself, else fence.proxy.tensormap::generic.release), and acquired with fence.proxy.tensormap::generic.acquire before
a copy uses it, by the thread that issues the copy or one it has synchronised with.
"""

from __future__ import annotations

from dataclasses import dataclass, field


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
        self.findings = checker.findings
        self.maps: dict[int, WrittenMap] = {}  # by address

    def written(self, w, address: int, released: bool) -> None:
        slot = w.view.slot
        self.maps[address] = WrittenMap(w, slot, w.view.epoch, w.pc, released)

    def fence(self, w, address: int | None) -> None:
        """fence.proxy.tensormap: acquire of the map at an address, or release (None) of what the warp knows of."""
        if address is None:
            for written in self.maps.values():
                written.released = written.released or self.has_seen(w, written.slot, written.epoch)
            return
        found = self.maps.get(address)
        if found is not None and self.has_seen(w, found.slot, found.epoch):
            slot = w.view.slot
            found.acquired.append((slot, w.view.epoch))

    def has_seen(self, w, slot: int, epoch: int) -> bool:
        return slot == w.view.slot or int(w.view.clock[slot]) >= epoch

    def used(self, w, address: int) -> None:
        """A copy with the map at this address is issued."""
        written = self.maps.get(address)
        if written is None:
            return
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
