"""What barriers and strong accesses pass on: vector clocks that gather at one place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from softsm.checks.races import Checker

SCOPES = ("cta", "cluster", "gpu")


class SyncClock:
    """What a barrier passes on: arrivals gather, a completed phase publishes them to who waits."""

    __slots__ = ("checker", "gathering", "published")

    def __init__(self, checker: Checker):
        self.checker = checker
        self.gathering, self.published = checker.new_clock(), checker.new_clock()

    def gather(self, relaxed: bool = False) -> None:
        """Called by the barrier for each arrival: by the operation that is completing, else by the running warp."""
        self.checker.join(self.gathering, self.checker.publisher(relaxed))

    def complete(self) -> None:
        self.checker.join(self.published, self.gathering)
        self.gathering[:] = 0


class Location:
    """Releases at one address: by everybody at gpu scope, and what only a CTA or cluster may rely on."""

    __slots__ = ("clocks",)

    def __init__(self) -> None:
        self.clocks: dict[object, np.ndarray] = {}  # key of `reached` -> clock


def rank(scope: str) -> int:
    return SCOPES.index(scope) if scope in SCOPES else len(SCOPES)  # .sys


def reached(w, scope: str) -> list:
    """Keys of a Location that an access of this scope writes, or reads."""
    return [w.cta.ctaid, ("cluster", w.cta.cluster[0].ctaid), None][: rank(scope) + 1]
