"""Happens-before: who has seen what.

Every warp has a vector clock over all resident warps, twice: what it has seen, and what of that is visible to the
async proxy (after fence.proxy.async); and sets of asynchronous operations as bits: those it knows to be complete, those
of them that are visible to the async proxy, and at the strict level those that its tcgen05 operations come after, and
those it passes on to who synchronises with it. Barriers, fences and waits move these clocks.

A release by some lanes of a warp is theirs: it passes on what they did, and what all lanes had done when they last met
(bar.warp.sync, a barrier, a release by all of them). That lanes converge, exchange values (shfl.sync, vote.sync) or
elect one of them orders no memory.

Default level: a bar.sync or an mbarrier wait orders tensor-memory operations without tcgen05.fence, and an initialised
mbarrier reaches the copy engine by a barrier alone, as Triton's output relies on. strict=True takes PTX 9.4 to
the letter.
"""

from __future__ import annotations

from array import array
from types import ModuleType
from typing import NamedTuple

import numpy as np

from softsm.checks import shadow as sh
from softsm.checks.clocks import HEAD, WORDS
from softsm.engine import program as pg

SCOPES = ("cta", "cluster", "gpu", "sys")
PEER_STORES = ("st.async", "red.async")
SHEET = 32  # clocks that are made, and forget numbers, together


class Order:
    """The part of the checker that keeps the clocks."""

    def __init__(self, machine, strict: bool, slots: int, clocks: ModuleType):
        self.machine, self.strict = machine, strict
        self.slots = slots = slots + slots % 2  # clocks are merged by four
        self.clocks = 2 * slots
        self.take_in, self.pass_on = clocks.join, clocks.publish
        self.hand_over, self.meet, self.commit = clocks.hand_over, clocks.meet, clocks.commit
        self.spare: list[Clock] = []  # of operations that are over
        self.known = slice(2 * slots, 2 * slots + WORDS)
        self.fenced = slice(self.known.stop, self.known.stop + WORDS)
        self.tensor = slice(self.fenced.stop, self.fenced.stop + WORDS)  # strict only, as is the next
        self.sent = slice(self.tensor.stop, self.tensor.stop + WORDS)
        self.sections = 4 if strict else 2
        self.words = WORDS * self.sections
        self.private = 2 if strict else -1  # the section that a warp does not pass on: `tensor`
        self.engine = machine.engine
        self.used = 4  # words of a section that hold bits so far; a multiple of four
        # The number of the next asynchronous operation, and what compiled code must know of clocks.
        self.newest = np.zeros(pg.LAYOUT, np.int64)
        self.newest[: pg.LOG] = 1, 2 * slots, self.sections, self.used
        self.newest_address = address_of(self.newest)
        self.sheets: list[Sheet] = []  # of clocks
        self.room: list[Clock] = []  # of the last sheet, not yet used
        self.sheet_of: dict[int, Sheet] = {}  # by the address of the clock: all that live long
        self.locations: dict[int, Location] = {}  # strong accesses of global memory, by address
        self.parts = np.zeros((slots, sh.PARTS_KEPT, 2), np.uint32)  # (begin, lanes): see shadow.released

    def new_clock(self) -> Clock:
        if not self.room:
            sheet = Sheet(HEAD + 2 * self.slots + self.words)
            self.sheets.append(sheet)
            first, step = address_of(sheet.rows) + 4 * HEAD, sheet.rows.strides[0]
            self.room = [Clock(row[HEAD:], first + k * step, row[:HEAD]) for k, row in enumerate(sheet.rows)]
            self.sheet_of.update((clock.at, sheet) for clock in self.room)
        return self.room.pop()

    def borrow(self) -> Clock:
        """A clock for what an operation publishes, until it is over; it holds anything."""
        return self.spare.pop() if self.spare else self.new_clock()

    def join(self, target: int, source: int) -> None:
        """Addresses of clocks: the first takes in the second."""
        self.take_in(target, source, self.clocks, self.sections, self.used)

    def drop(self, clocks: list[int]) -> None:
        """Clocks that are no longer read, by address."""
        for at in clocks:
            sheet = self.sheet_of.pop(at, None)
            if sheet is not None:
                sheet.live -= 1
                if not sheet.live:
                    self.sheets.remove(sheet)

    def close(self) -> None:
        self.sheet_of, self.locations, self.sheets, self.spare, self.room = {}, {}, [], [], []

    def number(self) -> int:
        """A number for an asynchronous operation. Numbers are used again after sh.OPS others: then no warp may seem to
        know the new one."""
        number = self.newest.item(pg.NEWEST)
        self.newest[pg.NEWEST] = number + 1
        if not number & 31:
            self.used = self.newest[pg.USED] = min(number // 32 + 4 & ~3, WORDS)
            for sheet in self.sheets if number >= sh.OPS else ():
                sheet.rows[:, HEAD + 2 * self.slots + number % sh.OPS // 32 :: WORDS] = 0
        return number

    def tick(self, w) -> None:
        """A new epoch: the lanes of the warp have met, or what all of them did before has been passed on."""
        view = w.view
        self.new_epoch(view)
        view.head[:2] = view.clock.item(view.slot) - 1, 0

    @staticmethod
    def new_epoch(view) -> None:
        """A warp's clock holds its own epoch plus one: see checks/shadow.py."""
        view.clock[view.slot] = view.clock.item(view.slot) + 2

    def snapshot(self, w) -> Snapshot:
        """What the warp can pass on now; its own later accesses are not part of it."""
        view = w.view
        copy = view.clock.copy()
        if self.strict:
            copy[self.tensor] = 0
        self.new_epoch(view)
        return Snapshot(copy, address_of(copy), self.machine.active, view.begin, view.dirty)

    def parted(self, w, lanes: int, begin: int, dirty: int) -> bool:
        """Do these lanes release without others, which have accessed memory since the lanes last met, in the epoch
        `begin`? Then they are written down. Lanes that have released one by one count as all of them."""
        if not dirty or not w.alive & ~lanes:
            return False
        table = self.parts[w.view.slot]
        row = int((table[:, 0] == begin).argmax())  # 0 when there is none
        if table.item(row, 0) != begin:
            row = int(table[:, 0].argmin())
            table[row] = begin, 0
        table[row, 1] = lanes = lanes | table.item(row, 1)
        return w.alive & ~lanes != 0

    def releasing(self, w, epoch: int) -> str:
        """The lanes of the warp that released without the others, in words; `epoch` is of something they left out."""
        table = self.parts[w.view.slot]
        at = int(np.where(table[:, 0] <= epoch, table[:, 0], 0).argmax())
        lanes = [lane for lane in range(32) if table.item(at, 1) >> lane & 1]
        return (
            f"lane{'s' if len(lanes) > 1 else ''} {', '.join(map(str, lanes[:4]))}{', ...' if len(lanes) > 4 else ''}"
        )

    def withhold(self, target: np.ndarray, slot: int, begin: int, before: tuple[int, int]) -> None:
        """`target`, which said `before` of the warp, has taken in its clock, but is told by some lanes only."""
        for at, old in zip((slot, self.slots + slot), before):
            new = target.item(at)
            target[at] = max(old, new & ~1 if new > begin else new)

    def send(self, target: Clock, w) -> None:
        """`target` takes in what the running lanes of the warp can pass on; a new epoch begins."""
        view, lanes = w.view, self.machine.active
        if w.alive & ~lanes and self.parted(w, lanes, view.begin, view.dirty):
            values, slot, begin, dirty = target.values, view.slot, view.begin, view.dirty
            before = values.item(slot), values.item(self.slots + slot)
            self.pass_on(target.at, view.at, slot, self.clocks, self.sections, self.private, self.used)
            self.withhold(values, slot, begin, before)
            view.head[:2] = begin, dirty
        else:
            self.pass_on(target.at, view.at, view.slot, self.clocks, self.sections, self.private, self.used)

    def send_earlier(self, target: Clock, w, snapshot: Snapshot) -> bool:
        """The same for what the lanes could pass on when the snapshot was made, those of them that run now or have met
        those since. Was it for all lanes?"""
        slot, (_, at, lanes, begin, dirty) = w.view.slot, snapshot
        if w.view.begin == begin:
            lanes &= self.machine.active
        before = target.values.item(slot), target.values.item(self.slots + slot)
        self.join(target.at, at)
        if not self.parted(w, lanes, begin, dirty):
            return True
        self.withhold(target.values, slot, begin, before)
        return False

    def spans_cluster(self, scope: str) -> bool:
        """Does an mbarrier operation of this scope reach other CTAs? '' is .cta by the letter; Triton means the cluster
        where it arrives at a peer."""
        return scope == "cluster" or not (scope or self.strict)

    def publish(self, target: Clock, relaxed: bool = False, fences: tuple[str, ...] = SCOPES) -> None:
        """`target` takes in what the current arrival tells: that of the operation that is completing, else of the
        running warp; a relaxed one only what a fence of these scopes released before."""
        op = self.engine.performing
        if op is not None:
            if op.publishes is None:
                self.tell(target.values, op)
            else:
                self.join(target.at, op.publishes.at)
            return
        w = self.machine.current
        if not relaxed:
            self.send(target, w)
            return
        for scope, snapshot in w.view.released.items():
            if scope in fences:
                self.send_earlier(target, w, snapshot)

    def tell(self, clock: np.ndarray, op) -> None:
        """What the completion of an operation tells: that it is complete. Default level: what a peer's st.async brought
        is visible to the async proxy, too, as FlashMLA's decode kernel for sm_90 relies on."""
        bit = op.number % sh.OPS
        sections = (self.known, self.sent) if self.strict else (self.known,)
        if op.kind in PEER_STORES and not self.strict:
            sections = (self.known, self.fenced)
        for section in sections:
            at = section.start + bit // 32
            clock[at] = clock.item(at) | 1 << bit % 32

    def clock_of(self, thing) -> SyncClock:
        clock = thing.clock
        if clock is None:
            clock = thing.clock = SyncClock(self)
        return clock

    def acquire(self, w, thing, scope: str = "cluster") -> None:
        clock = thing.clock
        if clock is not None:
            self.take_in(w.view.at, clock.published.at, self.clocks, self.sections, self.used)
            if clock.far is not None and self.spans_cluster(scope):
                self.join(w.view.at, clock.far.published.at)

    def waits_relaxed(self, w, barrier, scope: str) -> None:
        """A relaxed wait tells nothing, but a fence that follows takes in what it found, as far as both reach."""
        near, far = barrier.clock, barrier.clock.far
        for fenced in SCOPES:
            if fenced not in w.view.acquirable:
                w.view.acquirable[fenced] = np.zeros_like(w.view.clock)
            self.join(address_of(w.view.acquirable[fenced]), near.published.at)
            if far is not None and fenced != "cta" and self.spans_cluster(scope):
                self.join(address_of(w.view.acquirable[fenced]), far.published.at)

    def fence_async(self, w, wide: bool) -> None:
        """fence.proxy.async: what the warp has seen or done becomes visible to the async proxy; what it does from now
        on does not. `wide`: of the cluster's shared memory too; Triton arrives relaxed at the cluster barrier behind
        it."""
        n = self.slots
        np.maximum(w.view.clock[n : 2 * n], w.view.clock[:n], out=w.view.clock[n : 2 * n])
        w.view.clock[self.fenced] |= w.view.clock[self.known]
        if wide and not self.strict:
            w.view.released["cluster"] = self.snapshot(w)
        else:
            self.new_epoch(w.view)

    def fence(self, w, release: bool, acquire: bool, scope: str) -> None:
        """fence.acq_rel and the like: they make relaxed accesses beside them synchronise, within their scope."""
        if acquire and scope in w.view.acquirable:
            self.join(w.view.at, address_of(w.view.acquirable[scope]))
            w.view.flags |= w.view.acquirable_flags.get(scope, {})
        if release:
            w.view.released[scope] = self.snapshot(w)

    def share_fences(self, warps: list, members: list) -> None:
        """A barrier of a CTA at the default level. `__threadfence(); __syncthreads();`, and one thread takes a ticket
        by a relaxed atomic, as PyTorch's reductions do: what each thread has fenced is there before the atomic. Behind
        it another barrier, and a fence in each thread takes in what the ticket says. By the letter of PTX fences of
        other threads count where they are fence.sc (Fence-SC order)."""
        sent: dict[str, Clock] = {}
        found: dict[str, np.ndarray] = {}
        flags: dict[str, dict] = {}
        for w in warps:
            for scope, snapshot in w.view.released.items():
                if scope not in sent:
                    values = np.zeros_like(w.view.clock)
                    sent[scope] = Clock(values, address_of(values), values)
                self.send_earlier(sent[scope], w, snapshot)
            for scope, clock in w.view.acquirable.items():
                self.join(address_of(found.setdefault(scope, np.zeros_like(clock))), address_of(clock))
                flags.setdefault(scope, {}).update(w.view.acquirable_flags.get(scope, {}))
        for w in members:
            for scope, target in sent.items():
                w.view.released[scope] = Snapshot(target.values, target.at, w.alive, w.view.begin, 0)
            for scope, clock in found.items():
                w.view.acquirable[scope] = clock.copy()
                w.view.acquirable_flags[scope] = dict(flags[scope])

    def fence_tensor(self, w, before: bool) -> None:
        """tcgen05.fence::before_thread_sync, or ::after_thread_sync."""
        if self.strict:
            source, target = (self.tensor, self.sent) if before else (self.sent, self.tensor)
            w.view.clock[target] |= w.view.clock[source]

    def strong(self, w, address: int, cta, order: str, scope: str, *, read: bool, write: bool) -> None:
        """An atomic, volatile or otherwise strong access of global memory (cta is None) or of a CTA's shared memory: a
        release passes on what the warp has seen, to those whose acquire at the same place is within its scope; relaxed
        ones do so only beside fences."""
        places = self.locations if cta is None else cta.view.locations
        place = places.get(address)
        if place is None:
            place = places[address] = Location()
        if order == "volatile":
            order = self.volatile(w, cta, write)
        if read and order in ("acquire", "acq_rel"):
            for key in reached(w, scope):
                if key in place.clocks:
                    self.join(w.view.at, place.clocks[key].at)
                    w.view.flags |= place.writers[key]
        elif read:  # a fence that follows takes it in, as far as the narrower scope of the two reaches
            for fenced in SCOPES:
                for key in reached(w, min(scope, fenced, key=rank)):
                    if key in place.clocks:
                        if fenced not in w.view.acquirable:
                            w.view.acquirable[fenced] = np.zeros_like(w.view.clock)
                        self.join(address_of(w.view.acquirable[fenced]), place.clocks[key].at)
                        w.view.acquirable_flags.setdefault(fenced, {}).update(place.writers[key])
        if write:
            sent = [(scope, self.snapshot(w))] if order in ("release", "acq_rel") else []
            whole = False
            for wide, snapshot in sent + list(w.view.released.items()):
                for key in reached(w, min(scope, wide, key=rank)):
                    if key not in place.clocks:
                        place.clocks[key], place.writers[key] = self.new_clock(), {}
                    whole = self.send_earlier(place.clocks[key], w, snapshot) or whole
                    if self.machine.active.bit_count() == 1:  # else another lane may still write
                        place.writers[key][address, w.view.slot] = w.view.epoch
            if sent:  # the snapshot has begun an epoch, to which this write belongs
                if whole:
                    w.view.head[:2] = w.view.epoch, 0
                w.view.head[2:] = w.view.epoch, address & ~3 & pg.ALL

    def volatile(self, w, cta, write: bool) -> str:
        """PTX: relaxed. At the default level shared memory is in order, and a flag in global memory passes on all that
        its warp has seen if the warp has executed a fence before: where every thread fences its stores in front of
        a barrier and one raises the flag behind it, the stores are there."""
        if self.strict:
            return "relaxed"
        if cta is not None:
            return "acq_rel"
        return "release" if write and w.view.released else "relaxed"

    def observe(self, w, op) -> None:
        """A wait of the issuing thread says that op is complete."""
        number = op.number
        if number:
            clock, bit = w.view.clock, number % sh.OPS
            for section in (self.known, self.tensor) if self.strict else (self.known,):
                at = section.start + bit // 32
                clock[at] = clock.item(at) | 1 << bit % 32

    def knows(self, w, number: int, section: slice | None = None) -> bool:
        if self.newest.item(0) - number >= sh.OPS - 64:
            return True
        bit = number % sh.OPS
        return bool(w.view.clock.item((section or self.known).start + bit // 32) >> bit % 32 & 1)

    def unknown(self, known: np.ndarray, numbers: np.ndarray) -> list[int]:
        """Which of the operations are not in the set of those known to be complete?"""
        bits = numbers % sh.OPS
        recent = self.newest.item(0) - numbers < sh.OPS - 64
        return numbers[recent & ((known[bits // 32] >> (bits % 32).astype(np.uint32)) & 1 == 0)].tolist()


class Clock(NamedTuple):
    """A row of a sheet, its address, and what lies before it (checks/clocks.py)."""

    values: np.ndarray
    at: int
    head: np.ndarray


class Snapshot(NamedTuple):
    """A warp's clock as it was at a fence or a release, the lanes that came there, and `begin` and `dirty` of its
    view."""

    clock: np.ndarray
    at: int  # its address
    lanes: int
    begin: int
    dirty: int


class Sheet:
    """Memory of SHEET clocks."""

    __slots__ = ("live", "rows")

    def __init__(self, length: int):
        self.rows = np.zeros((SHEET, length), np.uint32)
        self.live = SHEET  # clocks that may still be read, or that are not used yet


class SyncClock:
    """What a barrier passes on: arrivals gather, a completed phase publishes them to who waits. `home` is the CTA of an
    mbarrier; `far` keeps what threads of other CTAs tell, for waits of cluster scope."""

    __slots__ = ("far", "gathering", "home", "members", "order", "present", "published")

    def __init__(self, order: Order):
        self.order, self.home, self.far = order, None, None
        self.present: list = []  # (warp, whether it waits), of a barrier of a CTA
        self.members = array("q")  # whole warps that have arrived and wait: their clocks' addresses, and slots
        self.gathering, self.published = order.new_clock(), order.new_clock()

    def gather(self, relaxed: bool = False, scope: str = "") -> None:
        """Called by the barrier for each arrival: by the operation that is completing, else by the running warp."""
        order = self.order
        performing = order.engine.performing
        if performing is None and not relaxed and (self.home is None or order.machine.current.cta is self.home):
            order.send(self.gathering, order.machine.current)
        elif performing is not None or self.home is None or order.machine.current.cta is self.home:
            order.publish(self.gathering, relaxed)
        elif order.spans_cluster(scope):
            if self.far is None:
                self.far = SyncClock(order)
                self.home.view.unwatch(self)
            order.publish(self.far.gathering, relaxed, SCOPES[1:])

    def complete(self) -> None:
        order = self.order
        if self.members:
            at, count = self.members.buffer_info()
            order.meet(self.published.at, self.gathering.at, at, count // 2, order.clocks, order.sections,
                       order.private, order.used)  # fmt: skip
            del self.members[:]
        else:
            order.hand_over(self.published.at, self.gathering.at, order.clocks, order.sections, order.used)
        if self.far is not None:
            self.far.complete()

    def parts(self) -> list[int]:
        """Addresses of its clocks."""
        return [self.gathering.at, self.published.at, *(self.far.parts() if self.far is not None else ())]


class Location:
    """Releases at one address: by everybody at sys scope, and what only a CTA, cluster or GPU may rely on. Who acquires
    one comes after the write that released, too: `writers` has the epoch of each, by address and slot."""

    __slots__ = ("clocks", "writers")

    def __init__(self) -> None:
        self.clocks: dict[object, Clock] = {}  # by key of `reached`
        self.writers: dict[object, dict[tuple[int, int], int]] = {}


def address_of(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def rank(scope: str) -> int:
    return SCOPES.index(scope)


def reached(w, scope: str) -> list:
    """Keys of a Location that an access of this scope writes, or reads."""
    cta, gpu = w.cta, w.cta.gpu
    return [(gpu, cta.ctaid), ("cluster", gpu, cta.cluster[0].ctaid), ("gpu", gpu), None][: rank(scope) + 1]
