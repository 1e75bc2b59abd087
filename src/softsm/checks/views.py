"""The state that the race checker keeps for each warp and each CTA (`warp.view`, `cta.view`)."""

from __future__ import annotations

import math
import mmap
import sys
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from softsm.checks import shadow as sh
from softsm.checks.clocks import FIELDS, PUBLISHED, WORDS
from softsm.engine.in_flight import AsyncOp

RECORDS = 16  # allocated at once
# The shadow of a large allocation may exceed the machine's memory: only the pages that are used count. Python 3.11 has
# no name for this flag.
NORESERVE = 0x4000 if sys.platform == "linux" else 0


def zeros(shape: tuple[int, ...]) -> np.ndarray:
    """Returns zeros of uint32 in separate pages; the system clears only the pages that are used."""
    size = 4 * math.prod(shape)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    return np.frombuffer(memory, np.uint32).reshape(shape)


class SharedShadow:
    """The shadow of a CTA's shared memory (checks/shadow.py): records of words and of blocks of words, flags that tell
    which of the two is valid, and the reads of each warp."""

    __slots__ = ("address", "of_blocks", "of_words", "reads", "reads_address", "size", "split")

    def __init__(self, words: int, warps: int):
        blocks = -(-words // sh.BLOCK)
        rows = zeros(((sh.BLOCK + 1) * blocks + -(-blocks // (4 * sh.RECORD)), sh.RECORD))
        self.size = words, warps
        self.address = rows.__array_interface__["data"][0]
        self.of_words, self.of_blocks, split = np.split(rows, [sh.BLOCK * blocks, (sh.BLOCK + 1) * blocks])
        self.split = split.view(np.uint8).reshape(-1)
        self.reads = zeros((warps, words, 2))
        self.reads_address = self.reads.__array_interface__["data"][0]

    def word(self, word: int) -> np.ndarray:
        """Returns the record of one word, which no longer shares that of its block."""
        block = word // sh.BLOCK
        if not self.split[block]:
            self.split[block] = 1
            self.of_words[sh.BLOCK * block : sh.BLOCK * (block + 1)] = self.of_blocks[block]
        return self.of_words[word]


class SpareShadows:
    """Keeps the shadows of finished CTAs for the next ones: new pages cost more than what is cleared here. Only records
    that a block refers to are ever read, and the reads of a word only if its record refers to them."""

    def __init__(self, most: int):
        self.most = most
        self.spare: list[SharedShadow] = []

    def take(self, words: int, warps: int) -> SharedShadow:
        try:  # no lock: another thread might hold it when the process forks
            found = self.spare.pop()
        except IndexError:
            found = None
        if found is None or found.size != (words, warps):
            return SharedShadow(words, warps)
        found.of_blocks.fill(0)
        found.split.fill(0)
        return found

    def give_back(self, shadow: SharedShadow) -> None:
        if len(self.spare) < self.most:
            self.spare.append(shadow)


shadows = SpareShadows(8)


class Issued(NamedTuple):
    bits: np.ndarray
    at: int  # address


@dataclass(slots=True, eq=False)
class WarpView:
    """What a warp has acquired, done and not waited for."""

    slot: int  # place in vector clocks
    clock: np.ndarray  # see checks/order.py
    at: int  # address
    head: np.ndarray  # `begin` and `dirty`, which compiled code keeps (checks/clocks.py)
    copies: np.ndarray  # bits of its cp.async, for their arrival on an mbarrier
    loose: np.ndarray  # what it has learnt from relaxed arrivals at the cluster barrier
    issued: dict[int, Issued] = field(default_factory=dict)  # lane -> its tcgen05 operations, for commit
    released: dict[str, tuple] = field(default_factory=dict)  # by scope: what fences release besides relaxed accesses
    acquirable: dict[str, np.ndarray] = field(
        default_factory=dict
    )  # pass on (Snapshot of checks/order.py), and take in
    suspected: list = field(default_factory=list)  # accesses that may be benign races (checks/benign_races.py)
    predicates: np.ndarray | None = None  # values of predicates when the warp exited
    initialised: list = field(default_factory=list)  # mbarriers since the last fence.mbarrier_init
    # flags that the warp has acquired, and those that a fence of a scope would: (address, writer's slot) -> its epoch
    flags: dict[tuple[int, int], int] = field(default_factory=dict)
    acquirable_flags: dict[str, dict[tuple[int, int], int]] = field(default_factory=dict)
    unwaited_loads: list[AsyncOp] = field(default_factory=list)  # tcgen05.ld and st without their wait
    unwaited_stores: list[AsyncOp] = field(default_factory=list)
    used_early: int = 0  # the last of these loads that has been reported

    @property
    def epoch(self) -> int:
        return self.clock.item(self.slot) - 1

    @property
    def begin(self) -> int:
        return self.head.item(0)

    @property
    def dirty(self) -> int:
        return self.head.item(1)

    def issued_by(self, lane: int) -> Issued:
        found = self.issued.get(lane)
        if found is None:
            bits = np.zeros(WORDS, np.uint32)
            found = self.issued[lane] = Issued(bits, bits.__array_interface__["data"][0])
        return found

    def forget(self) -> None:
        """Frees state when its cluster is over; clocks stay comparable, and operations may still be reported."""
        self.released, self.acquirable = {}, {}
        self.flags, self.acquirable_flags = {}, {}
        self.initialised, self.unwaited_loads, self.unwaited_stores = [], [], []


@dataclass(slots=True, eq=False)
class CtaView:
    slot0: int  # slot of the first warp
    shadow: SharedShadow | None
    site: int  # address of both, the numbers of words and warps, and the first slot, for compiled code
    kept: np.ndarray  # objects that the site points to
    waits: np.ndarray  # for each 8 bytes of shared memory the address of a record of checks/clocks.py, or 0
    outstanding: list[int] = field(default_factory=list)  # numbers of operations that must complete before it ends
    touched_by: dict[int, tuple] = field(default_factory=dict)  # accesses by peers: slot -> (epoch, pc, warp)
    used_by: list[int] = field(default_factory=list)  # numbers of operations by peers
    issuers: list[int] = field(default_factory=list)  # warps of the CTA, see checks/operations.py
    places: tuple[np.ndarray, int] | None = None  # places of the CTAs of its tcgen05.mma, see checks/tensor.py
    locations: dict[int, object] = field(default_factory=dict)  # strong accesses of its shared memory, by offset
    records: list[tuple[np.ndarray, int]] = field(default_factory=list)  # records of mbarriers, and their addresses
    room: list[tuple[np.ndarray, int]] = field(default_factory=list)
    initialised: set[int] = field(default_factory=set)  # offsets of mbarriers, and those that were initialised again
    repeated: set = field(default_factory=set)
    began: np.ndarray | int = 0  # entries of the warps in their clocks when they began
    met: bool = False  # all warps have passed a cluster barrier, so all CTAs of the cluster run

    def watch(self, offset: int, fields: list[int]) -> np.ndarray:
        """Makes a record for the mbarrier at this offset, with which the compiled loop handles waits on it."""
        if not self.room:  # allocate several: to get an address costs Python more than a record
            rows = np.zeros((RECORDS, FIELDS), np.int64)
            first = rows.__array_interface__["data"][0]
            self.room = [(row, first + k * rows.strides[0]) for k, row in enumerate(rows)][::-1]
        record, at = self.room.pop()
        record[:] = fields
        self.records.append((record, at))
        self.waits[offset // 8] = at
        return record

    def unwatch(self, clock) -> None:
        """Lets Python handle waits on the mbarrier of this clock from now on."""
        at = [where for record, where in self.records if record[PUBLISHED] == clock.published.at]
        self.waits[np.isin(self.waits, at)] = 0
