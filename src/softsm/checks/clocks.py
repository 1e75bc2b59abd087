"""What barriers and strong accesses pass on: vector clocks that gather at one place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from softsm.checks.races import Checker

SCOPES = ("cta", "cluster", "gpu")


class SyncClock:
    """What a barrier passes on: arrivals gather, a completed phase publishes them to who waits. `home` is the CTA of an
    mbarrier; what threads of other CTAs tell is kept apart, for waits of cluster scope."""

    __slots__ = ("checker", "far", "gathering", "home", "published")

    def __init__(self, checker: Checker):
        self.checker, self.home, self.far = checker, None, None
        self.gathering, self.published = checker.new_clock(), checker.new_clock()

    def gather(self, relaxed: bool = False, scope: str = "") -> None:
        """Called by the barrier for each arrival: by the operation that is completing, else by the running warp."""
        checker = self.checker
        if checker.performing is not None or self.home is None or checker.machine.current.cta is self.home:
            checker.join(self.gathering, checker.publisher(relaxed))
        elif checker.spans_cluster(scope):
            if self.far is None:
                self.far = SyncClock(checker)
            checker.join(self.far.gathering, checker.publisher(relaxed, SCOPES[1:]))

    def complete(self) -> None:
        self.checker.join(self.published, self.gathering)
        self.gathering[:] = 0
        if self.far is not None:
            self.far.complete()

    def parts(self) -> list[np.ndarray]:
        return [self.gathering, self.published, *(self.far.parts() if self.far is not None else ())]


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
