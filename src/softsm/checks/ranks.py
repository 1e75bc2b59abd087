"""Launches of several GPUs, one after the other: what a GPU touched in an earlier one, and another may not know of.

Launches follow each other on one GPU, not on two of them: while one GPU runs its second kernel, another may still be in
its first. The emulator runs them one after the other, so a missing flag changes no value. The shadow of global memory
begins with the earlier accesses that some GPU had not acquired when its own launch ended, as asynchronous operations:
one for each GPU and set of GPUs that do not know of it. The others know from the start that it is complete, and a
release passes this on. A GPU that reads a flag of an earlier launch knows what its writer knew.

Where the host waits between launches, or ranks meet in a collective, nothing is left (`Options.follows`).
"""

from __future__ import annotations

import numpy as np

from softsm.checks import shadow as sh
from softsm.checks.accesses import MemoryAccesses
from softsm.checks.operations import Operations
from softsm.checks.order import Order
from softsm.checks.stream import Ranks, Stream, Unknown
from softsm.engine.in_flight import AsyncOp, nothing

KIND = "launch before this one on another GPU"
FIX = (
    "launches follow each other on one GPU only: let each GPU wait, before its kernel ends, for a flag at .sys scope "
    "that the others raise behind their last access; or use other memory in the next launch; or put a collective, or a "
    "wait of the host for all GPUs, in between"
)
WRITER, READERS = 0, (4, 7, 12)  # fields of a record of global memory (checks/shadow.py)


class RankChecks:
    def __init__(self, order: Order, operations: Operations, memory: MemoryAccesses, stream: Stream, machine):
        self.order, self.operations, self.memory, self.machine = order, operations, memory, machine
        self.stream, self.gpus = stream, machine.gpus
        self.unknown: dict[int, Unknown] = {}  # by number of the operation
        self.flags: dict[int, int] = {}  # words that a GPU wrote by strong stores in an earlier launch
        self.tenants: list[tuple[int, int, int]] = []
        self.ends = np.zeros((self.gpus, order.slots), np.uint32)
        self.known = np.zeros((self.gpus, order.known.stop - order.known.start), np.uint32)
        before = stream.ranks if machine.options.follows else None
        stream.ranks = None
        if before is not None and not before.touched.elsewhere:
            self.take_over(before)

    def take_over(self, before: Ranks) -> None:
        """Turns accesses of the launch before into operations."""
        numbers: dict[Unknown, int] = {}
        places: dict[int, list[tuple[int, int]]] = {}
        for slot, epoch, gpu in before.tenants:
            places.setdefault(slot, []).append((epoch, gpu))

        def whose(agent: int, epoch: int) -> Unknown:
            if agent >= sh.ASYNC:
                return before.issuers.get(epoch, Unknown(0, 0))
            gpu = max((x for x in places.get(agent - 1, ()) if x[0] <= epoch), default=(0, 0))[1]
            late = [g for g in range(len(before.ends)) if g != gpu and before.ends[g, agent - 1] < epoch]
            return Unknown(gpu, sum(1 << g for g in late))

        for start, mine in zip(self.memory.touched.origins, self.memory.touched.shadows):
            for other_start, theirs in zip(before.touched.origins, before.touched.shadows):
                overlap = overlapping(mine, start, theirs, other_start)
                if overlap is None:
                    continue
                to, of, first = overlap
                for field in (WRITER, *READERS):
                    there = np.flatnonzero(of[:, field] != 0)
                    pairs, which = np.unique(of[there, field : field + 2], axis=0, return_inverse=True)
                    found = [whose(agent, epoch) for agent, epoch in pairs.tolist()]
                    for x in found:
                        if x.ignorant and x not in numbers:
                            numbers[x] = self.operation(x)
                    number = np.array([numbers.get(x, 0) for x in found], np.uint32)[which.ravel()]
                    there, number = there[number != 0], number[number != 0]
                    to[there, field], to[there, field + 1] = sh.ASYNC, number
                    if field == WRITER:
                        bytes_, strong = of[there, 3] & np.uint32(15), of[there, 3] & np.uint32(sh.STRONG)
                        to[there, 3] = bytes_ | strong | bytes_ << np.uint32(sh.FRESH)
                        to[there, 3] |= np.uint32(sh.NOBODY << sh.LANE)
                        for word, n in zip(there[strong != 0].tolist(), number[strong != 0].tolist()):
                            self.flags[first + 4 * word] = self.unknown[n].gpu
                    else:
                        to[there, field + 2] = of[there, field + 2] & np.uint32(sh.READ_SEVERAL)

    def operation(self, what: Unknown) -> int:
        number = self.order.number()
        self.unknown[number] = what
        self.operations.by_number[number] = AsyncOp(KIND, None, 0, 0, nothing, number=number)  # type: ignore[arg-type]
        return number

    def began(self, w) -> None:
        """Gives a new warp what its GPU knows."""
        self.tenants.append((w.view.slot, w.view.clock.item(w.view.slot) - 1, w.cta.gpu))
        self.learns(w, w.cta.gpu)

    def learns(self, w, gpu: int) -> None:
        for number, (_, ignorant) in self.unknown.items():
            if not ignorant >> gpu & 1:
                self.order.observe(w, self.operations.by_number[number])

    def reads(self, w, address: int) -> None:
        """Handles a strong read: if the word is a flag of an earlier launch, the read acquires."""
        gpu = self.flags.get(address & ~3)
        if gpu is not None:
            self.learns(w, gpu)

    def left(self, cta) -> None:
        for w in cta.warps:
            np.maximum(self.ends[cta.gpu], w.view.clock[: self.order.slots], out=self.ends[cta.gpu])
            self.known[cta.gpu] |= w.view.clock[self.order.known]

    def ended(self) -> None:
        """Ends the launch; the next one may follow."""
        newest = self.order.newest.item(0)
        issuers = {}
        for number, op in self.operations.by_number.items():
            if newest - number >= sh.OPS - 64:
                continue
            gpu, ignorant = self.unknown.get(number) or Unknown(op.warp.cta.gpu, (1 << self.gpus) - 1)
            word, bit = divmod(number % sh.OPS, 32)
            for g in range(self.gpus):
                if g == gpu or self.known.item(g, word) >> bit & 1:
                    ignorant &= ~(1 << g)
            issuers[number] = Unknown(gpu, ignorant)
        self.stream.ranks = Ranks(self.memory.touched, self.tenants, self.ends, issuers)


def overlapping(mine: np.ndarray, start: int, theirs: np.ndarray, other_start: int):
    """Returns the records of the words that both shadows have, and the address of the first; None if there are none."""
    size = 4 * sh.GLOBAL_RECORD
    low = max(start, other_start)
    high = min(start + mine.nbytes // size * 4, other_start + theirs.nbytes // size * 4)
    if low >= high:
        return None
    rows = (
        array.reshape(-1, sh.GLOBAL_RECORD)[(low - at) // 4 : (high - at) // 4]
        for array, at in ((mine, start), (theirs, other_start))
    )
    return (*rows, low)
