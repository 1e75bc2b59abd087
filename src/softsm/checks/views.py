"""What the race checker keeps of each warp and each CTA (`warp.view`, `cta.view`)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from softsm.engine.asynchrony import AsyncOp


@dataclass(slots=True, eq=False)
class WarpView:
    """What a warp has seen, done and not waited for."""

    slot: int  # its place in vector clocks
    clock: np.ndarray  # see checks/order.py
    at: int  # its address
    copies: np.ndarray  # bits of its cp.async, for their arrival on an mbarrier
    loose: np.ndarray  # what relaxed arrivals at the cluster barrier have told it
    issued: dict[int, np.ndarray] = field(default_factory=dict)  # lane -> bits of its tcgen05 operations, for commit
    products: dict[tuple, tuple[int, int]] = field(default_factory=dict)  # accumulator -> its last two tcgen05.mma
    released: dict[str, np.ndarray] = field(default_factory=dict)  # by scope: what fences beside relaxed accesses
    acquirable: dict[str, np.ndarray] = field(default_factory=dict)  # pass on, and take in
    suspected: list = field(default_factory=list)  # races of it that may be none (checks/replicas.py)
    predicates: np.ndarray | None = None  # as they were when it exited
    initialised: list = field(default_factory=list)  # mbarriers since the last fence.mbarrier_init
    unwaited_loads: list[AsyncOp] = field(default_factory=list)  # tcgen05.ld and st without their wait
    unwaited_stores: list[AsyncOp] = field(default_factory=list)

    def forget(self) -> None:
        """Its cluster is over: clocks stay comparable, and operations may still be told of."""
        self.released, self.acquirable = {}, {}
        self.initialised, self.unwaited_loads, self.unwaited_stores = [], [], []


@dataclass(slots=True, eq=False)
class CtaView:
    slot0: int  # of its first warp
    shadow: np.ndarray | None  # of its shared memory, see checks/shadow.py
    reads: np.ndarray | None  # of its warps
    address: int  # of the shadow
    reads_address: int
    site: int  # address of both, and of how many words and warps there are and the first slot, for compiled code
    waits: np.ndarray  # for each 8 bytes of its shared memory the address of a record of checks/clocks.py, or 0
    outstanding: list[int] = field(default_factory=list)  # numbers of operations that must be over when it ends
    touched_by: dict[int, tuple] = field(default_factory=dict)  # by peers: slot -> (epoch, pc, warp)
    used_by: list[int] = field(default_factory=list)  # by operations of peers: their numbers
    issuers: list[int] = field(default_factory=list)  # its warps, see checks/operations.py
    products: dict[object, tuple] = field(default_factory=dict)  # regions of its tcgen05.mma, by what they do
    locations: dict[int, object] = field(default_factory=dict)  # strong accesses of its shared memory, by offset
    records: list[np.ndarray] = field(default_factory=list)  # what addresses above lead to

    def watch(self, offset: int, fields: list[int]) -> np.ndarray:
        """A record for the mbarrier at this offset: the compiled loop may answer waits on it."""
        record = np.array(fields, np.int64)
        self.records.append(record)
        self.waits[offset // 8] = record.__array_interface__["data"][0]
        return record

    def unwatch(self, clock) -> None:
        """Python answers waits on the mbarrier of this clock from now on."""
        at = [r.__array_interface__["data"][0] for r in self.records[1:] if r[0] == clock.published.at]
        self.waits[np.isin(self.waits, at)] = 0
