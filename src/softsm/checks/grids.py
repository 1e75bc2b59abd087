"""Programmatic dependent launch: accesses that a grid must not make before it has waited for the previous grid.

The emulator runs launches one after the other, so a missing griddepcontrol.wait changes no value. The shadow of global
memory treats the previous grid as one asynchronous operation with all its reads and writes, which griddepcontrol.wait
completes. A grid that never executes griddepcontrol.launch_dependents has ended before the next one begins (PTX,
griddepcontrol; FlashMLA's decode relies on it), so it is not checked.
"""

from __future__ import annotations

import numpy as np

from softsm.checks import shadow as sh
from softsm.checks.accesses import READ, MemoryAccesses, Touched
from softsm.checks.operations import Operations
from softsm.checks.order import Order
from softsm.engine.in_flight import AsyncOp, nothing

KIND = "grid before this one"
FIX = (
    "put griddepcontrol.wait (gdc_wait) before the first access of what the grid before it touches, or launch without "
    "programmatic dependent launch"
)


class GridChecks:
    """The part of the checker for a previous launch that this one may overlap."""

    def __init__(self, order: Order, operations: Operations, memory: MemoryAccesses, earlier: Touched | None):
        self.order = order
        self.before: AsyncOp | None = None
        if earlier is None:
            return
        number = order.number()
        self.before = operations.by_number[number] = AsyncOp(
            KIND,
            None,  # type: ignore[arg-type]  # no warp of this launch
            0,
            0,
            nothing,
            number=number,
        )
        take_in(earlier)
        for start, mine in zip(memory.touched.origins, memory.touched.shadows):
            for other_start, theirs in zip(earlier.origins, earlier.shadows):
                inherit(mine, start, theirs, other_start, number)

    def over(self, w) -> None:
        """griddepcontrol.wait: the previous grid has ended, and its writes are visible."""
        if self.before is not None:
            self.order.observe(w, self.before)


def take_in(grid: Touched) -> None:
    """Adds the accesses that forked processes made for that grid to the fields that `inherit` reads."""
    for flags in grid.elsewhere:
        first = 0
        for shadow in grid.shadows:
            records = shadow.reshape(-1, sh.GLOBAL_RECORD)
            of = flags[first : first + len(records)]
            wrote, read = np.flatnonzero(of & 15), np.flatnonzero(of & READ)
            records[wrote, 0] = sh.ASYNC
            records[wrote, 3] = of[wrote] & np.uint32(15)
            records[read, 4] = sh.ASYNC
            first += len(records)
    grid.elsewhere.clear()


def inherit(mine: np.ndarray, start: int, theirs: np.ndarray, other_start: int, number: int) -> None:
    """Turns the previous grid's accesses to words of both shadows into accesses by the operation `number`."""
    size = 4 * sh.GLOBAL_RECORD
    low = max(start, other_start)
    high = min(start + mine.nbytes // size * 4, other_start + theirs.nbytes // size * 4)
    if low >= high:
        return
    to = mine.reshape(-1, sh.GLOBAL_RECORD)[(low - start) // 4 : (high - start) // 4]
    of = theirs.reshape(-1, sh.GLOBAL_RECORD)[(low - other_start) // 4 : (high - other_start) // 4]
    wrote, read = np.flatnonzero(of[:, 0]), np.flatnonzero(of[:, 4])
    touched = of[wrote, 3] & np.uint32(15)
    to[wrote, 0], to[wrote, 1] = sh.ASYNC, number
    to[wrote, 3] = touched | touched << np.uint32(sh.FRESH) | np.uint32(sh.NOBODY << sh.LANE)
    to[read, 4], to[read, 5] = sh.ASYNC, number
