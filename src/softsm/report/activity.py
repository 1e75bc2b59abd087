"""Counts the instructions and asynchronous operations of each warp role while launches run.

    with softsm.counting() as activity:
        kernel[grid](...)
    activity.roles["load_role"].operations["TMA load"]     # -> Amount(count, bytes)

A role is a function given to `warp_specialize`, or one whose name ends in `_role` (ptx/roles.py). The source locations
of a warp's instructions give its role; their function is the kernel, into which all others are inlined, so softsm reads
the source file.
Outside of `counting`, softsm counts nothing and runs at full speed.
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from softsm.engine.in_flight import AsyncOp
from softsm.engine.observer import Observer
from softsm.engine.options import Session, observing
from softsm.engine.scheduler import Machine
from softsm.engine.warps import Warp
from softsm.ptx.roles import entry_at, place_of

TENSOR_ACCESS = re.compile(r"\.(\d+)x(\d+)b(?:x2)?\.x(\d+)")


@dataclass
class Amount:
    count: int = 0
    bytes: int = 0


@dataclass
class Role:
    """The work of one role. warps: of all CTAs. operations: by kind, 'TMA load', 'tcgen05.mma', 'tcgen05.ld', ..."""

    warps: int = 0
    instructions: int = 0
    operations: dict[str, Amount] = field(default_factory=lambda: defaultdict(Amount))


class Activity(Session):
    def __init__(self) -> None:
        self._warps: dict[Warp, Role] = {}
        self._names: dict[Warp, str] = {}
        self.launches = 0

    def of(self, warp: Warp) -> Role:
        return self._warps.setdefault(warp, Role(1))

    def note_source(self, warp: Warp) -> None:
        """Sets the warp's role from its current instruction, unless the role is already known."""
        if warp in self._names:
            return
        name = entry_at(place_of(warp.instruction()))
        if name:
            self._names[warp] = name

    def note(self, op: AsyncOp) -> None:
        self.note_source(op.warp)
        amount = self.of(op.warp).operations[op.kind]
        amount.count += 1
        amount.bytes += size(op)

    def observer(self, machine: Machine) -> Counter:
        self.launches += 1
        return Counter(machine, self)

    @property
    def roles(self) -> dict[str, Role]:
        """The roles by name. Warps that were never in a role (they idle, or the kernel has no roles) are '-'."""
        found: dict[str, Role] = {}
        for warp, mine in self._warps.items():
            total = found.setdefault(self._names.get(warp, "-"), Role())
            total.warps += 1
            total.instructions += mine.instructions
            for kind, amount in mine.operations.items():
                total.operations[kind].count += amount.count
                total.operations[kind].bytes += amount.bytes
        return found


class Counter(Observer):
    """Counts the operations of one launch."""

    follows = True  # work of another process would not be counted

    def __init__(self, machine: Machine, activity: Activity):
        self.machine, self.activity = machine, activity
        self.steps = 0  # the machine's steps before this turn

    def issued(self, op: AsyncOp) -> None:
        self.activity.note(op)

    def turn_began(self, warp: Warp) -> None:
        self.steps = self.machine.steps

    def turn_ended(self, warp: Warp) -> None:
        self.activity.of(warp).instructions += self.machine.steps - self.steps
        if warp.fragments:
            # The place where a warp waits identifies its role, even where the compiler merged copies of the code.
            self.activity.note_source(warp)


def size(op: AsyncOp) -> int:
    """Returns the bytes moved by a copy into shared memory or by a tensor-memory access; 0 for anything else."""
    if op.kind in ("tcgen05.ld", "tcgen05.st"):
        found = TENSOR_ACCESS.search(op.warp.instruction().text)
        return int(found[1]) * int(found[2]) * int(found[3]) // 8 if found else 0
    return sum(r[3] - r[2] for r in op.writes if r[0] == "shared") if op.kind in ("TMA load", "cp.async") else 0


@contextlib.contextmanager
def counting() -> Iterator[Activity]:
    """Count the instructions, copies and matrix products of every launch inside, by role."""
    activity = Activity()
    with observing(activity):
        yield activity
