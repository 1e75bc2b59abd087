"""Asynchronous operations and the order in which they complete.

Every copy, matrix product and tensor-memory access that PTX calls asynchronous is an `AsyncOp`. It holds the issuing
warp, the regions it reads and writes, the operations that must precede it, and `effects()`, which performs it at once.
The policy decides when that happens, never the instruction:

* eager: at issue;
* latest: only when no warp can run any more, and then an operation that a warp waits for (or when the wait of an
  instruction requires it);
* random: at scheduling points, by seed.
"""

from __future__ import annotations

import random

from softsm.engine.in_flight import AsyncOp, nothing
from softsm.engine.observer import Observer
from softsm.engine.warps import Warp


class AsyncEngine:
    def __init__(self, order: str, seed: int):
        self.order = order
        self.random = random.Random(seed)
        self.limits = random.Random(seed)  # time limits of waits
        self.pending: dict[int, AsyncOp] = {}  # operations by id, in order of issue
        self.signalling: dict[int, AsyncOp] = {}  # the pending operations that may wake a warp
        self.completed = 0
        self.observer: Observer | None = None
        self.performing: AsyncOp | None = None  # the operation whose effects are being applied, if there is an observer
        self.postponed = None  # effects that wait for more of their kind (isa/product_chain.py)
        self.growing = None  # the chain of the products that were issued last, while the next may join it

    def impatient(self, w: Warp) -> bool:
        """Returns whether the time limit of this wait expires at once. PTX leaves the limit to the system; a program
        that does not try again continues too early. Order 'random' draws it, but never twice in a row, so that loops
        end.
        """
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
        """Completes op now, after its prerequisites, which may be a long chain."""
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
        """Applies the effects of op, whose prerequisites are complete."""
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
        effects, op.effects = op.effects, nothing  # observers keep operations; this frees what the effects held
        effects()
        observer.performed(op)
        self.performing = outer

    def settle(self) -> None:
        """Applies postponed effects, before a warp could notice."""
        waiting, self.postponed = self.postponed, None
        if waiting is not None:
            waiting.perform()

    def require(self, op: AsyncOp) -> None:
        """Completes op now, because a warp waits for it."""
        self.perform(op)
        self.settle()

    def eligible(self) -> list[AsyncOp]:
        return [op for op in self.pending.values() if all(x.done for x in op.after)]

    def complete_random(self) -> None:
        ops = self.eligible()
        self.require(ops[self.random.randrange(len(ops))])

    def complete_awaited(self) -> None:
        """Completes, when no warp can run, the oldest operation that a warp waits for, or else the oldest of all."""
        if self.order == "random":
            return self.complete_random()
        for op in self.signalling.values():
            for waited in op.signals:
                if waited.waiters:
                    self.require(op)
                    return
        self.require(next(iter(self.pending.values())))

    def drain(self) -> None:
        """Completes all pending operations."""
        for op in list(self.pending.values()):
            self.require(op)
