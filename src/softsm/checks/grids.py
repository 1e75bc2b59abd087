"""Programmatic dependent launch: what a grid may not touch before it has waited for the grid before it.

Launches run one after the other here, so a forgotten griddepcontrol.wait changes no value. The grid before stands in
the shadow of global memory as one asynchronous operation, which wrote and read what that grid did, and which
griddepcontrol.wait completes.
"""

from __future__ import annotations

import numpy as np

from softsm.checks import shadow as sh
from softsm.engine.asynchrony import AsyncOp

KIND = "grid before this one"
MEND = (
    "put griddepcontrol.wait (gdc_wait) before the first access of what the grid before it touches, or launch without "
    "programmatic dependent launch"
)


class GridChecks:
    """The part of the checker that knows the launch before."""

    def follow(self, earlier) -> None:
        """earlier: the checker of the launch before."""
        number = int(self.counter[0])
        self.counter[0] = number + 1
        self.before = self.operations[number] = AsyncOp(KIND, None, 0, 0, lambda: None, number=number)
        for start, mine in zip(self.origins(), self.global_shadows):
            for other_start, theirs in zip(earlier.origins(), earlier.global_shadows):
                inherit(mine, start, theirs, other_start, number)

    def origins(self) -> list[int]:
        """The address of the first word of each shadow of global memory."""
        return [a.start & ~3 for a in self.machine.global_memory.allocations]

    def grid_over(self, w) -> None:
        """griddepcontrol.wait: the grid before has ended, and what it wrote is visible."""
        if self.before is not None:
            self.observe(w, self.before)


def inherit(mine: np.ndarray, start: int, theirs: np.ndarray, other_start: int, number: int) -> None:
    """Words of both shadows that the grid before touched become accesses of the operation `number`."""
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
