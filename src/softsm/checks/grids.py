"""Programmatic dependent launch: accesses that a grid must not make before it has waited for the previous grid.

The emulator runs launches one after the other, so a missing griddepcontrol.wait changes no value. The shadow of global
memory treats the previous grid as one asynchronous operation with all its reads and writes, which griddepcontrol.wait
completes. A grid that never executes griddepcontrol.launch_dependents has ended before the next one begins (PTX,
griddepcontrol; FlashMLA's decode relies on it), so it is not checked.

A grid that waits for nobody may end before the one that it could overtake. That one is `loose`: a later dependent grid
waits for the grid between alone, so no wait of its own completes it. A launch that is not dependent follows all.
"""

from __future__ import annotations

import numpy as np

from softsm.checks import shadow as sh
from softsm.checks.accesses import READ, MemoryAccesses, Touched
from softsm.checks.operations import Operations
from softsm.checks.order import Order
from softsm.checks.stream import Grid, Stream
from softsm.engine import program as pg
from softsm.engine.in_flight import AsyncOp, nothing

KIND = "grid before this one"
LOOSE = "grid that the one between did not wait for"
FIXES = {
    KIND: "put griddepcontrol.wait (gdc_wait) before the first access of what the grid before it touches, or launch "
    "without programmatic dependent launch",
    LOOSE: "put griddepcontrol.wait (gdc_wait) into the grid before this one as well, even if it needs nothing of what "
    "it may overtake: a wait covers the grid before alone, which may have ended first",
}
KEPT = 3  # loose grids


class GridChecks:
    """The part of the checker for earlier launches that this one may overlap."""

    def __init__(self, order: Order, operations: Operations, memory: MemoryAccesses, stream: Stream, machine):
        self.order, self.stream = order, stream
        if not machine.options.dependent:
            stream.clear()
        self.earlier = stream.last
        self.before: AsyncOp | None = None
        kinds = [(x, LOOSE) for x in stream.loose] + ([(self.earlier, KIND)] if self.earlier else [])
        for grid, kind in kinds:
            number = order.number()
            self.before = operations.by_number[number] = AsyncOp(
                kind,
                None,  # type: ignore[arg-type]  # no warp of this launch
                0,
                0,
                nothing,
                number=number,
            )
            take_in(grid.touched)
            for start, mine in zip(memory.touched.origins, memory.touched.shadows):
                for other_start, theirs in zip(grid.touched.origins, grid.touched.shadows):
                    inherit(mine, start, theirs, other_start, number, grid.inherited)
        if self.earlier is not None:
            stream.loose = [*stream.loose, self.earlier][-KEPT:]  # loose until a thread waits for that grid
        else:
            self.before = None
        stream.last = Grid(memory.touched, len(kinds)) if machine.kernel.launches_dependents else None

    def over(self, w) -> None:
        """Handles griddepcontrol.wait: the previous grid has ended, and its writes are visible."""
        if self.before is not None:
            self.order.observe(w, self.before)
            self.waited()

    def waited(self) -> None:
        """Notes that a thread of this launch has waited, so the previous grid ends before this one."""
        self.stream.loose = [grid for grid in self.stream.loose if grid is not self.earlier]
        self.earlier = None


def take_in(grid: Touched) -> None:
    """Adds the accesses that forked processes made for that grid to the fields that `inherit` reads."""
    for flags in grid.elsewhere:
        first = 0
        for shadow in grid.shadows:
            records = shadow.reshape(-1, sh.GLOBAL_RECORD)
            of = flags[first : first + len(records)]
            wrote, read = np.flatnonzero(of & 15), np.flatnonzero(of & READ)
            records[wrote, 0], records[wrote, 1] = sh.ASYNC, pg.ALL
            records[wrote, 3] = of[wrote] & np.uint32(15)
            records[read, 4], records[read, 5] = sh.ASYNC, pg.ALL
            first += len(records)
    grid.elsewhere.clear()


def inherit(mine: np.ndarray, start: int, theirs: np.ndarray, other_start: int, number: int, inherited: int) -> None:
    """Turns the grid's own accesses to words of both shadows into accesses by the operation `number`."""
    size = 4 * sh.GLOBAL_RECORD
    low = max(start, other_start)
    high = min(start + mine.nbytes // size * 4, other_start + theirs.nbytes // size * 4)
    if low >= high:
        return
    to = mine.reshape(-1, sh.GLOBAL_RECORD)[(low - start) // 4 : (high - start) // 4]
    of = theirs.reshape(-1, sh.GLOBAL_RECORD)[(low - other_start) // 4 : (high - other_start) // 4]
    wrote, read = (
        np.flatnonzero((of[:, k] != 0) & ((of[:, k] != sh.ASYNC) | (of[:, k + 1] > inherited))) for k in (0, 4)
    )
    touched = of[wrote, 3] & np.uint32(15)
    to[wrote, 0], to[wrote, 1] = sh.ASYNC, number
    to[wrote, 3] = touched | touched << np.uint32(sh.FRESH) | np.uint32(sh.NOBODY << sh.LANE)
    to[read, 4], to[read, 5] = sh.ASYNC, number
