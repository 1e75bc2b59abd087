"""What all asynchronous copies share: how one is started, the groups it is committed to, and who has waited for it.

Registers are read when an instruction is issued, memory when the operation is performed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from softsm.engine.asynchrony import AsyncOp
from softsm.errors import Fault
from softsm.isa.mbarriers import lanes, located


class Groups:
    """Operations of a warp's threads, put into groups by commit and awaited by wait_group, lane by lane."""

    __slots__ = ("closed", "landed", "open")

    def __init__(self) -> None:
        self.open: list[tuple[int, tuple]] = []  # (lanes, operations) since their last commit
        self.closed: list[tuple[int, list]] = []  # (lanes, operations) oldest first
        self.landed = 0  # so many of the oldest of `open` have completed: a kernel may never commit

    def add(self, mask: int, *operations) -> None:
        self.open.append((mask, operations))

    def commit(self, mask: int) -> None:
        group = [op for those, ops in self.open if those & mask for op in ops]
        self._leave_open(mask)
        self.closed.append((mask, group))

    def _leave_open(self, mask: int) -> None:
        """All that is open but for those lanes."""
        self.open = [(those & ~mask, ops) for those, ops in self.open if those & ~mask]
        self.landed = 0

    def take(self, mask: int, newest: int) -> list:
        """Operations of all but the `newest` groups of each lane, which are then forgotten for those lanes."""
        if all(those == mask for those, _ in self.closed):  # the warp commits and waits as one
            cut = max(0, len(self.closed) - newest)
            due, self.closed = self.closed[:cut], self.closed[cut:]
            return [op for _, ops in due for op in ops]
        left = [newest] * 32
        due, kept = [], []
        on = lanes(mask)
        for those, ops in reversed(self.closed):
            late = 0
            for lane in on:
                if those >> lane & 1:
                    if left[lane]:
                        left[lane] -= 1
                    else:
                        late |= 1 << lane
            if late:
                due.append(ops)
            if those & ~late:
                kept.append((those & ~late, ops))
        self.closed = kept[::-1]
        return [op for ops in reversed(due) for op in ops]

    def take_all(self, mask: int) -> list:
        """Everything those lanes have in flight, committed or not."""
        due = self.take(mask, 0) + [op for those, ops in self.open if those & mask for op in ops]
        self._leave_open(mask)
        return due

    def in_flight(self, mask: int) -> tuple:
        while self.landed < len(self.open) and all(op.done for op in self.open[self.landed][1]):
            self.landed += 1
        both = (self.closed, self.open[self.landed :])
        return tuple(op for part in both for those, ops in part if those & mask for op in ops if not op.done)


def groups(w, kind: str) -> Groups:
    found = w.__dict__.get(kind)
    if found is None:
        found = w.__dict__[kind] = Groups()
    return found


def attributed(w, effects: Callable[[], None]) -> Callable[[], None]:
    """Effects run later, elsewhere: what goes wrong in them is still this instruction's fault."""
    ins = w.instruction()

    def run() -> None:
        try:
            effects()
        except (Fault, ValueError) as error:
            fault = error if isinstance(error, Fault) else Fault("copy", str(error))
            if fault.placed:
                raise
            issued = f"in the copy issued at PTX line {ins.line} (`{ins.text}`), {w}"
            raise Fault(fault.code, f"{fault.message}; {issued}", placed=True) from None

    return run


def start(w, lane: int, kind: str, effects, after=(), signals=(), reads=(), writes=()) -> AsyncOp:
    op = AsyncOp(kind, w, lane, w.line(), attributed(w, effects), after, signals, reads, writes)
    return w.machine.issue(op)


def observe(w, op: AsyncOp) -> None:
    """The issuing thread has waited for op."""
    if w.machine.checker is not None:
        w.machine.checker.observe(w, op)


def global_view(w, address: int, size: int, what: str) -> np.ndarray:
    """Bytes of global memory, checked when the copy is issued, so that a fault names the instruction."""
    return located(w, w.machine.global_memory.view, address, size, what)
