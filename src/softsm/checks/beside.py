"""Work of other streams: kernels, copies and sets of memory that nothing orders before a launch.

The emulator does all work in the order of the calls, so a missing event changes no value. A door to programs with
streams (doors/cuda/streams.py) knows which earlier work may still run beside a launch. The shadow of global memory
begins with the accesses of that work, as those of operations that never complete. Where the launch reads a flag that
such work has written, as kernels that wait for each other do, it knows what came before the flag.
"""

from __future__ import annotations

import numpy as np

from softsm.checks import shadow as sh
from softsm.checks.accesses import MemoryAccesses, Touched
from softsm.checks.grids import take_in
from softsm.checks.operations import Operations
from softsm.checks.order import Order
from softsm.checks.stream import READ, STRONG_READ, STRONG_WRITE, WROTE, Footprint, Part
from softsm.engine.in_flight import AsyncOp, nothing

FIX = (
    "nothing orders the two: put both into one stream, record an event behind the first and let the stream of the "
    "second wait for it (cudaEventRecord, cudaStreamWaitEvent), or let the host wait in between (cudaStreamSynchronize)"
)
WRITER, READER = 0, 4  # fields of a record of global memory (checks/shadow.py)


def of_range(start: int, size: int, write: bool) -> list[Part]:
    first, end = start & ~3, start + size
    value = np.uint16(WROTE if write else READ)
    if start % 4 == 0 and end % 4 == 0:
        return [Part(first, np.broadcast_to(value, size // 4))]
    flags = np.full((end + 3 - first) // 4, value)
    low = 0xF << start % 4
    flags[0] &= low & 0xF | (low & 0xF) << 4
    if end % 4:
        high = 0xF >> 4 - end % 4
        flags[-1] &= high | high << 4
    return [Part(first, flags)]


def of_launch(touched: Touched, inherited: int, own: list[bool]) -> list[Part]:
    """own: for each allocation, whether it belongs to the program. inherited: the number of operations with which the
    shadow began."""
    take_in(touched)
    parts = []
    for start, shadow, counts in zip(touched.origins, touched.shadows, own):
        of = shadow.reshape(-1, sh.GLOBAL_RECORD)
        wrote, read = (
            (of[:, k] != 0) & ((of[:, k] != sh.ASYNC) | (of[:, k + 1] > inherited)) for k in (WRITER, READER)
        )
        flags = np.where(wrote, of[:, 3] & 15 | np.where(of[:, 3] & sh.STRONG, STRONG_WRITE, 0), 0)
        several = of[:, READER + 2] & np.uint32(sh.READ_SEVERAL) != 0
        flags |= np.where(read, READ | np.where(several, STRONG_READ, 0), 0)
        there = np.flatnonzero(flags)
        if counts and len(there):
            parts.append(Part(start + 4 * int(there[0]), flags[there[0] : there[-1] + 1].astype(np.uint16)))
    return parts


class BesideChecks:
    """The part of the checker for work that this launch may run beside."""

    def __init__(self, order: Order, operations: Operations, memory: MemoryAccesses, beside: tuple[Footprint, ...]):
        self.order, self.work = order, []
        for footprint in beside:
            number = order.number()
            op = operations.by_number[number] = AsyncOp(
                footprint.who,
                None,  # type: ignore[arg-type]  # no warp of this launch
                0,
                0,
                nothing,
                footprint=footprint,
                number=number,
            )
            self.work.append(op)
            for part in footprint.parts:
                for start, shadow in zip(memory.touched.origins, memory.touched.shadows):
                    records = shadow.reshape(-1, sh.GLOBAL_RECORD)
                    low, high = part.meeting(start, len(records))
                    if low < high:
                        mark(records[(low - start) // 4 : (high - start) // 4], part.between(low, high), number)

    def strong(self, w, address: int, cta, order: str, scope: str, *, read: bool, write: bool) -> None:
        """Does what Order.strong does; a flag that other work has written tells what came before it."""
        if read and cta is None:
            for op in self.work:
                for part in op.footprint.parts:
                    at = (address - part.start) // 4
                    if 0 <= at < len(part.flags) and part.flags[at] & STRONG_WRITE:
                        self.order.observe(w, op)
        self.order.strong(w, address, cta, order, scope, read=read, write=write)


def mark(records: np.ndarray, flags: np.ndarray, number: int) -> None:
    """Turns accesses to words into accesses by the operation `number`."""
    wrote, read = np.flatnonzero(flags & WROTE), np.flatnonzero(flags & READ)
    touched = (flags[wrote] & WROTE).astype(np.uint32)
    strong = np.where(flags[wrote] & STRONG_WRITE, np.uint32(sh.STRONG), np.uint32(0))
    records[wrote, WRITER], records[wrote, WRITER + 1] = sh.ASYNC, number
    records[wrote, 3] = touched | strong | touched << np.uint32(sh.FRESH) | np.uint32(sh.NOBODY << sh.LANE)
    records[read, READER], records[read, READER + 1] = sh.ASYNC, number
    records[read, READER + 2] = np.where(flags[read] & STRONG_READ, np.uint32(sh.READ_SEVERAL), np.uint32(0))
