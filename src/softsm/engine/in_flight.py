"""An asynchronous operation, and those that a warp has issued and not yet waited for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from softsm.memory.waitable import Waitable


@dataclass(slots=True, eq=False)
class AsyncOp:
    kind: str  # 'TMA load', 'tcgen05.mma', ...
    warp: Any  # engine/warps.py
    lane: int
    line: int  # PTX line of the issuing instruction
    effects: Callable[[], None]
    after: tuple[AsyncOp, ...] = ()
    signals: tuple[Waitable, ...] = ()  # objects that its completion may wake
    reads: tuple = ()  # regions, for observers
    writes: tuple = ()
    footprint: Any = None  # set for a tcgen05 operation; decides which others the hardware keeps in order
    done: bool = False
    product: tuple | None = None  # set for a tcgen05.mma: its `Work` (isa/tcgen05.py) and its CTAs
    # for observers:
    nbytes: int = 0  # bytes that count for each mbarrier it signals
    number: int = 0
    publishes: Any = None  # what a wait for it acquires
    instruction: Any = None
    seen: int = 0  # address of the clock that orders it, if that is not its warp's


def nothing() -> None:
    """Replaces the effects of an operation that has been performed."""


class Groups:
    """Operations of a warp's threads in commit groups, which wait_group awaits lane by lane."""

    __slots__ = ("closed", "landed", "open")

    def __init__(self) -> None:
        self.open: list[tuple[int, tuple]] = []  # (lanes, operations) since their last commit
        self.closed: list[tuple[int, list]] = []  # (lanes, operations) oldest first
        self.landed = 0  # number of the oldest in `open` that have completed: a kernel may never commit

    def add(self, mask: int, *operations) -> None:
        self.open.append((mask, operations))

    def commit(self, mask: int) -> None:
        group = [op for those, ops in self.open if those & mask for op in ops]
        self._leave_open(mask)
        self.closed.append((mask, group))

    def _leave_open(self, mask: int) -> None:
        """Removes those lanes from the open group."""
        self.open = [(those & ~mask, ops) for those, ops in self.open if those & ~mask]
        self.landed = 0

    def take(self, mask: int, newest: int) -> list:
        """Removes and returns the operations of all but the `newest` groups of each of these lanes."""
        if all(those == mask for those, _ in self.closed):  # the warp commits and waits as one
            cut = max(0, len(self.closed) - newest)
            due, self.closed = self.closed[:cut], self.closed[cut:]
            return [op for _, ops in due for op in ops]
        left = [newest] * 32
        due, kept = [], []
        on = [lane for lane in range(32) if mask >> lane & 1]
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
        """Removes and returns all operations of those lanes, committed or not."""
        due = self.take(mask, 0) + [op for those, ops in self.open if those & mask for op in ops]
        self._leave_open(mask)
        return due

    def in_flight(self, mask: int) -> tuple:
        while self.landed < len(self.open) and all(op.done for op in self.open[self.landed][1]):
            self.landed += 1
        both = (self.closed, self.open[self.landed :])
        return tuple(op for part in both for those, ops in part if those & mask for op in ops if not op.done)


class Warpgroup(Waitable):
    """Four warps and the groups of wgmmas that they have committed."""

    __slots__ = ("batches", "first", "warps")

    def __init__(self, warps: list):
        super().__init__()
        self.warps = warps
        self.first = warps[0].index
        self.batches: dict[int, Batch] = {}


class Batch:
    """One commit group. It has the wgmmas of each warp and, after all four warps have committed, the operations: the
    wgmmas, and for each warp (by index) those that write the results to its registers."""

    __slots__ = ("ops", "parts", "results", "seen", "waited")

    def __init__(self) -> None:
        self.parts: dict[int, list] = {}
        self.ops: list[AsyncOp] | None = None
        self.results: dict[int, list[AsyncOp]] = {}
        self.waited = 0
        self.seen: Any = None  # for observers: clocks of the warps when they committed


class GroupSequence:
    """A warp's position in the sequence of groups."""

    __slots__ = ("committed", "group", "open", "waited")

    def __init__(self, group: Warpgroup):
        self.group = group
        self.open: list = []
        self.committed = 0
        self.waited = 0


@dataclass(slots=True)
class InFlight:
    """The operations of one warp in flight, by the instructions that wait for them."""

    cp_async: Groups = field(default_factory=Groups)
    bulk: Groups = field(default_factory=Groups)
    wgmma: GroupSequence | None = None
    tensor_loads: list[AsyncOp] = field(default_factory=list)  # tcgen05.ld whose registers have not been delivered
    tensor_stores: list[AsyncOp] = field(default_factory=list)
    tensor_ops: list[tuple[AsyncOp, int, object]] = field(default_factory=list)  # operations with lane and footprint
    products: int = 0  # the number of MMAs among them
    commits: dict[int, AsyncOp] = field(default_factory=dict)  # the last tcgen05.commit of each lane
