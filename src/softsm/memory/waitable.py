"""What warps wait on: mbarriers, named barriers, tensor memory that is taken, a CTA whose warps have yet to exit."""

from __future__ import annotations

from typing import Any


class Waitable:
    """Something a warp can wait on."""

    __slots__ = ("clock", "waiters")

    def __init__(self) -> None:
        self.waiters: list = []  # blocked fragments
        self.clock: Any = None  # what it passes on to those that it wakes, when races are checked

    def wake(self) -> None:
        waiters, self.waiters = self.waiters, []
        for fragment in waiters:
            fragment.unblock()
