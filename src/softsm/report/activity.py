"""Who did what: instructions and asynchronous operations of each warp role, counted while launches run.

    with softsm.counting() as activity:
        kernel[grid](...)
    activity.roles["load_role"].operations["TMA load"]     # -> Amount(count, bytes)

A role is a function given to `warp_specialize`, or one whose name ends in `_role` (report/roles.py). A warp takes it
from the source locations that its instructions carry (their function is the kernel, into which all others are inlined,
so the source file is read).
Outside of `counting` nothing is counted and nothing is slower.
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from softsm.engine.asynchrony import AsyncEngine, AsyncOp
from softsm.engine.scheduler import Machine
from softsm.engine.warps import Warp
from softsm.report.roles import entry_at

TENSOR_ACCESS = re.compile(r"\.(\d+)x(\d+)b(?:x2)?\.x(\d+)")


@dataclass
class Amount:
    count: int = 0
    bytes: int = 0


@dataclass
class Role:
    """warps: of all CTAs. operations: by kind, 'TMA load', 'tcgen05.mma', 'tcgen05.ld', ..."""

    warps: int = 0
    instructions: int = 0
    operations: dict[str, Amount] = field(default_factory=lambda: defaultdict(Amount))


class Activity:
    def __init__(self) -> None:
        self._warps: dict[Warp, Role] = {}
        self._names: dict[Warp, str] = {}
        self.launches = 0

    def of(self, warp: Warp) -> Role:
        return self._warps.setdefault(warp, Role(1))

    def note_source(self, warp: Warp) -> None:
        """The role that the instruction under way belongs to, unless it is known already."""
        if warp in self._names:
            return
        name = entry_at(warp.instruction().loc)
        if name:
            self._names[warp] = name

    def note(self, op: AsyncOp) -> None:
        self.note_source(op.warp)
        amount = self.of(op.warp).operations[op.kind]
        amount.count += 1
        amount.bytes += size(op)

    @property
    def roles(self) -> dict[str, Role]:
        """By name; warps that never were in a role (they idle, or the kernel has none) are '-'."""
        found: dict[str, Role] = {}
        for warp, mine in self._warps.items():
            total = found.setdefault(self._names.get(warp, "-"), Role())
            total.warps += 1
            total.instructions += mine.instructions
            for kind, amount in mine.operations.items():
                total.operations[kind].count += amount.count
                total.operations[kind].bytes += amount.bytes
        return found


def size(op: AsyncOp) -> int:
    """Bytes moved by a copy into shared memory or by a tensor-memory access; 0 for anything else."""
    if op.kind in ("tcgen05.ld", "tcgen05.st"):
        found = TENSOR_ACCESS.search(op.warp.instruction().text)
        return int(found[1]) * int(found[2]) * int(found[3]) // 8 if found else 0
    return sum(r[3] - r[2] for r in op.writes if r[0] == "shared") if op.kind in ("TMA load", "cp.async") else 0


@contextlib.contextmanager
def counting() -> Iterator[Activity]:
    """Count the work of every launch inside."""
    activity = Activity()
    issue, run_warp, run = AsyncEngine.issue, Machine.run_warp, Machine.run

    def counted_issue(self, op):
        activity.note(op)
        return issue(self, op)

    def counted_run_warp(self, warp):
        before = self.steps
        run_warp(self, warp)
        activity.of(warp).instructions += self.steps - before
        if warp.fragments:
            activity.note_source(warp)  # where it waits says whose it is, also where the compiler merged its copies

    def counted_run(self):
        # A machine keeps its engine's method as an attribute of its own, for speed.
        self.issue = lambda op: counted_issue(self.engine, op)
        self.divisible = False  # what another process does is not counted
        activity.launches += 1
        run(self)

    Machine.run_warp, Machine.run = counted_run_warp, counted_run
    try:
        yield activity
    finally:
        Machine.run_warp, Machine.run = run_warp, run
