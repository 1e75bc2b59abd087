"""Asynchronous operations and the order in which they complete.

Every copy, matrix product and tensor-memory access that PTX calls asynchronous is an `AsyncOp`: who issued it, what it
reads and writes, which operations must come before it, and `effects()`, which does it all at once. When that happens is
the policy's choice, never the instruction's:

* eager: at issue;
* latest: only when no warp can run any more, and then one that a warp waits for (or where an instruction's own
  wait requires it);
* random: at scheduling points, by seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from softsm.engine.observer import Observer
from softsm.memory.waitable import Waitable

if TYPE_CHECKING:
    from softsm.engine.warps import Warp


@dataclass(slots=True)
class Blocked:
    """Returned by a macro-operation that cannot go on: retry when `on` wakes (or, with `done`, go on behind it).
    `text` says what it waits for, if its string is wanted."""

    on: Waitable
    text: object
    done: bool = False
    told: bool = False  # `on` tells observers that the warp goes on
    limited: bool = False  # it has a time limit: when nothing else can happen, it is told so (Fragment.timed_out)


SEEN = object()  # returned by a macro-operation that changes registers at most, and may tell observers something
POLLED = object()  # returned by a macro-operation that asked whether something has happened, and it has not


@dataclass(slots=True, eq=False)
class AsyncOp:
    kind: str  # 'TMA load', 'tcgen05.mma', ...
    warp: Warp
    lane: int
    line: int  # PTX line of the issuing instruction
    effects: Callable[[], None]
    after: tuple[AsyncOp, ...] = ()
    signals: tuple[Waitable, ...] = ()  # what its completion may wake
    reads: tuple = ()  # regions, for observers
    writes: tuple = ()
    footprint: Any = None  # of a tcgen05 operation: decides what the hardware keeps in order
    done: bool = False
    product: tuple | None = None  # of a tcgen05.mma: its `Work` (isa/tcgen05.py) and its CTAs
    # for observers:
    nbytes: int = 0  # that it brings to each mbarrier it signals
    number: int = 0
    publishes: Any = None  # what its completion tells who waits for it
    instruction: Any = None
    seen: int = 0  # address of the clock that it is judged by, where that is not its warp's


def nothing() -> None:
    """The effects of an operation that has been performed."""


class AsyncEngine:
    def __init__(self, order: str, seed: int):
        self.order = order
        self.random = random.Random(seed)
        self.limits = random.Random(seed)  # of waits
        self.pending: dict[int, AsyncOp] = {}  # by id, in order of issue
        self.signalling: dict[int, AsyncOp] = {}  # those of them that may wake a warp
        self.completed = 0
        self.observer: Observer | None = None
        self.performing: AsyncOp | None = None  # whose effects are being applied, when there is an observer
        self.postponed = None  # effects that wait for more of their kind (isa/product_chain.py)
        self.growing = None  # the products that were issued last, when the next may go with them

    def impatient(self, w: Warp) -> bool:
        """Is the time limit of this wait over before it has waited? PTX leaves it to the system; a program that does
        not ask again goes on too early. Order 'random' draws it, but not twice in a row: loops come to rest."""
        fragment = w.fragment
        early = self.order == "random" and fragment.told_no != w.pc and self.limits.random() < 0.25
        fragment.told_no = w.pc if early else -1
        return early

    def issue(self, op: AsyncOp) -> AsyncOp:
        if self.growing is not None:
            self.growing.end()
        if self.observer is not None:
            self.observer.issued(op)
        if self.order == "eager":
            self.perform(op)
        else:
            self.pending[id(op)] = op
            if op.signals:
                self.signalling[id(op)] = op
        return op

    def perform(self, op: AsyncOp) -> None:
        """Complete op now, its prerequisites first. They may be a long chain."""
        if op.done:
            return
        if not op.after:
            self.complete(op)
            return
        waiting = [op]
        while waiting:
            for first in waiting[-1].after:
                if not first.done:
                    waiting.append(first)
                    break
            else:
                due = waiting.pop()
                if not due.done:
                    self.complete(due)

    def complete(self, op: AsyncOp) -> None:
        """Do what op does: nothing comes before it any more."""
        if self.postponed is not None and op.kind != self.postponed.kind:
            self.settle()
        op.done = True
        op.after = ()  # a long chain of finished operations would otherwise stay alive
        self.pending.pop(id(op), None)
        if op.signals:
            self.signalling.pop(id(op), None)
        self.completed += 1
        observer = self.observer
        if observer is None:
            op.effects()
            return
        outer, self.performing = self.performing, op
        observer.performing(op)
        effects, op.effects = op.effects, nothing  # observers remember operations; not what those held
        effects()
        observer.performed(op)
        self.performing = outer

    def settle(self) -> None:
        """Do what waits for more of its kind: before a warp could notice."""
        waiting, self.postponed = self.postponed, None
        if waiting is not None:
            waiting.perform()

    def require(self, op: AsyncOp) -> None:
        """A warp waits for op: complete it now."""
        self.perform(op)
        self.settle()

    def eligible(self) -> list[AsyncOp]:
        return [op for op in self.pending.values() if all(x.done for x in op.after)]

    def complete_random(self) -> None:
        ops = self.eligible()
        self.require(ops[self.random.randrange(len(ops))])

    def complete_awaited(self) -> None:
        """No warp can run: complete the oldest operation that a warp waits for, else the oldest of all."""
        if self.order == "random":
            return self.complete_random()
        for op in self.signalling.values():
            for waited in op.signals:
                if waited.waiters:
                    self.require(op)
                    return
        self.require(next(iter(self.pending.values())))

    def drain(self) -> None:
        """Complete everything that is left."""
        for op in list(self.pending.values()):
            self.require(op)
