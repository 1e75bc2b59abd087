"""Happens-before order, by vector clocks.

A warp has two vector clocks over all resident warps. The first holds the accesses that happen before its next one. The
second holds those that are also visible to the async proxy, which needs fence.proxy.async. A warp also has bit sets of
asynchronous operations: those it knows to be complete, and those of them that are visible to the async proxy. The
strict level adds two sets: the operations that precede the warp's next tcgen05 operation, and those that it passes on
when it synchronises. Barriers, fences and waits merge clocks and sets.

When only some lanes of a warp release, they publish their own accesses and those that all lanes had made when they last
synchronised (bar.warp.sync, a barrier, a release by all of them). Convergence, shfl.sync, vote.sync and elect.sync do
not order memory.

The default level is weaker than PTX in two points that Triton's output relies on. A bar.sync or an mbarrier wait
orders tensor-memory operations without tcgen05.fence, and a barrier alone makes an initialised mbarrier visible to the
copy engine. strict=True follows PTX 9.4 to the letter.
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
SHEET = 32  # clocks in one allocation


class Order:
    """The checker's clocks, and the rules by which synchronisation merges them."""

    def __init__(self, machine, strict: bool, slots: int, clocks: ModuleType):
        self.machine, self.strict = machine, strict
        self.slots = slots = slots + slots % 2  # compiled code merges four clocks at a time
        self.clocks = 2 * slots
        self.take_in, self.pass_on = clocks.join, clocks.publish
        self.hand_over, self.meet, self.commit = clocks.hand_over, clocks.meet, clocks.commit
        self.spare: list[Clock] = []  # clocks of completed operations, for reuse
        self.known = slice(2 * slots, 2 * slots + WORDS)
        self.fenced = slice(self.known.stop, self.known.stop + WORDS)
        self.tensor = slice(self.fenced.stop, self.fenced.stop + WORDS)  # this set and the next one: strict level only
        self.sent = slice(self.tensor.stop, self.tensor.stop + WORDS)
        self.sections = 4 if strict else 2
        self.words = WORDS * self.sections
        self.private = 2 if strict else -1  # the section that a warp does not publish: `tensor`
        self.engine = machine.engine
        self.used = 4  # words of a section with bits so far, a multiple of four
        # The number of the next asynchronous operation, and the layout of clocks for compiled code.
        self.newest = np.zeros(pg.LAYOUT, np.int64)
        self.newest[: pg.LOG] = 1, 2 * slots, self.sections, self.used
        self.newest_address = address_of(self.newest)
        self.sheets: list[Sheet] = []
        self.room: list[Clock] = []  # unused clocks of the last sheet
        self.sheet_of: dict[int, Sheet] = {}  # by the address of a clock that `drop` may free
        self.locations: dict[int, Location] = {}  # strong accesses of global memory, by address
        self.parts = np.zeros((slots, sh.PARTS_KEPT, 2), np.uint32)  # (begin, lanes): see shadow.released
        self.heard = np.zeros((slots, 32), np.uint32)  # see shadow.heard

    def new_clock(self) -> Clock:
        if not self.room:
            sheet = Sheet(HEAD + 2 * self.slots + self.words)
            self.sheets.append(sheet)
            first, step = address_of(sheet.rows) + 4 * HEAD, sheet.rows.strides[0]
            self.room = [Clock(row[HEAD:], first + k * step, row[:HEAD]) for k, row in enumerate(sheet.rows)]
            self.sheet_of.update((clock.at, sheet) for clock in self.room)
        return self.room.pop()

    def borrow(self) -> Clock:
        """Returns a clock with undefined contents, for an operation to publish until it completes."""
        return self.spare.pop() if self.spare else self.new_clock()

    def join(self, target: int, source: int) -> None:
        """Merges the clock at address `source` into the one at `target`."""
        self.take_in(target, source, self.clocks, self.sections, self.used)

    def drop(self, clocks: list[int]) -> None:
        """Frees clocks, given by address."""
        for at in clocks:
            sheet = self.sheet_of.pop(at, None)
            if sheet is not None:
                sheet.live -= 1
                if not sheet.live:
                    self.sheets.remove(sheet)

    def close(self) -> None:
        self.sheet_of, self.locations, self.sheets, self.spare, self.room = {}, {}, [], [], []

    def number(self) -> int:
        """Numbers an asynchronous operation. The bit of a number is used again after sh.OPS operations, so it is first
        cleared in all clocks: no warp knows the new operation to be complete."""
        number = self.newest.item(pg.NEWEST)
        self.newest[pg.NEWEST] = number + 1
        if not number & 31:
            self.used = self.newest[pg.USED] = min(number // 32 + 4 & ~3, WORDS)
            for sheet in self.sheets if number >= sh.OPS else ():
                sheet.rows[:, HEAD + 2 * self.slots + number % sh.OPS // 32 :: WORDS] = 0
        return number

    def tick(self, w) -> None:
        """Begins an epoch after the lanes of the warp have synchronised, or after all of them have released."""
        view = w.view
        self.new_epoch(view)
        view.head[:2] = view.clock.item(view.slot) - 1, 0

    @staticmethod
    def new_epoch(view) -> None:
        """Begins an epoch. A warp's clock holds the warp's own epoch plus one (checks/shadow.py)."""
        view.clock[view.slot] = view.clock.item(view.slot) + 2

    def snapshot(self, w) -> Snapshot:
        """Returns what the warp can publish now. The epoch that begins keeps its later accesses out of the snapshot."""
        view = w.view
        copy = view.clock.copy()
        if self.strict:
            copy[self.tensor] = 0
        self.new_epoch(view)
        return Snapshot(copy, address_of(copy), self.machine.active, view.begin, view.dirty)

    def parted(self, w, lanes: int, begin: int, dirty: int) -> bool:
        """Returns whether these lanes release without others that have accessed memory since the epoch `begin`, in
        which all lanes last synchronised. If so, `parts` records the lanes. Once every lane has released, it returns
        False.
        """
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
        """Returns the lanes of the warp that released without the others, for a report. `epoch` is that of an access by
        another lane."""
        table = self.parts[w.view.slot]
        at = int(np.where(table[:, 0] <= epoch, table[:, 0], 0).argmax())
        lanes = [lane for lane in range(32) if table.item(at, 1) >> lane & 1]
        return (
            f"lane{'s' if len(lanes) > 1 else ''} {', '.join(map(str, lanes[:4]))}{', ...' if len(lanes) > 4 else ''}"
        )

    def withhold(self, target: np.ndarray, slot: int, begin: int, before: tuple[int, int]) -> None:
        """Corrects `target` after a release by some lanes only. It was merged with the clock of the whole warp.
        `before` holds its two entries for the warp before the merge."""
        for at, old in zip((slot, self.slots + slot), before):
            new = target.item(at)
            target[at] = max(old, new & ~1 if new > begin else new)

    def send(self, target: Clock, w) -> None:
        """Merges what the running lanes of the warp can publish into `target`, and begins an epoch."""
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
        """Merges a snapshot into `target`: the part of those of its lanes that run now or have synchronised with them
        since. Returns whether that part covers the whole warp."""
        slot, (_, at, lanes, begin, dirty) = w.view.slot, snapshot
        if w.view.begin == begin:
            lanes &= self.machine.active
        before = target.values.item(slot), target.values.item(self.slots + slot)
        self.join(target.at, at)
        if not self.parted(w, lanes, begin, dirty):
            return True
        self.withhold(target.values, slot, begin, before)
        return False

    def hear(self, w, clock: np.ndarray) -> None:
        """Lets the running lanes acquire what other lanes of their warp have released since all last synchronised."""
        upto, row = clock.item(w.view.slot), self.heard[w.view.slot]
        if upto >= w.view.begin:
            for lane in range(32):
                if self.machine.active >> lane & 1:
                    row[lane] = max(row.item(lane), upto)

    def spans_cluster(self, scope: str) -> bool:
        """Returns whether an mbarrier operation of this scope reaches other CTAs. In PTX no scope means .cta, but
        Triton omits the scope when it arrives at a peer's barrier."""
        return scope == "cluster" or not (scope or self.strict)

    def publish(self, target: Clock, relaxed: bool = False, fences: tuple[str, ...] = SCOPES) -> None:
        """Merges what the current arrival publishes into `target`. The operation that is completing arrives, or else
        the running warp. A relaxed arrival publishes only what a fence of one of these scopes has released."""
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
        """Marks the operation complete in `clock`. At the default level a peer's st.async is then visible to the async
        proxy too, which FlashMLA's decode kernel for sm_90 relies on."""
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
        """Handles a relaxed wait, which acquires nothing itself. A later fence acquires what the barrier published,
        within the narrower of both scopes."""
        near, far = barrier.clock, barrier.clock.far
        for fenced in SCOPES:
            if fenced not in w.view.acquirable:
                w.view.acquirable[fenced] = np.zeros_like(w.view.clock)
            self.join(address_of(w.view.acquirable[fenced]), near.published.at)
            if far is not None and fenced != "cta" and self.spans_cluster(scope):
                self.join(address_of(w.view.acquirable[fenced]), far.published.at)

    def fence_async(self, w, wide: bool) -> None:
        """Handles fence.proxy.async, which makes all that happens before it visible to the async proxy, and nothing
        later. `wide`: in the shared memory of the cluster too. Triton then arrives at the cluster barrier relaxed."""
        n = self.slots
        np.maximum(w.view.clock[n : 2 * n], w.view.clock[:n], out=w.view.clock[n : 2 * n])
        w.view.clock[self.fenced] |= w.view.clock[self.known]
        if wide and not self.strict:
            w.view.released["cluster"] = self.snapshot(w)
        else:
            self.new_epoch(w.view)

    def fence(self, w, release: bool, acquire: bool, scope: str) -> None:
        """Handles fence.acq_rel and similar fences, which make relaxed accesses before and after them synchronise
        within their scope."""
        if acquire and scope in w.view.acquirable:
            self.join(w.view.at, address_of(w.view.acquirable[scope]))
            self.hear(w, w.view.acquirable[scope])
            w.view.flags |= w.view.acquirable_flags.get(scope, {})
        if release:
            w.view.released[scope] = self.snapshot(w)

    def share_fences(self, warps: list, members: list) -> None:
        """Shares the fences of the warps at a CTA barrier, at the default level. PyTorch's reductions need this: after
        `__threadfence(); __syncthreads();` one thread takes a ticket with a relaxed atomic. The atomic releases what
        each thread has fenced. After another barrier, a fence in any thread acquires what the ticket published. PTX
        guarantees this only for fence.sc (Fence-SC order)."""
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
        """Handles tcgen05.fence::before_thread_sync or ::after_thread_sync."""
        if self.strict:
            source, target = (self.tensor, self.sent) if before else (self.sent, self.tensor)
            w.view.clock[target] |= w.view.clock[source]

    def strong(self, w, address: int, cta, order: str, scope: str, *, read: bool, write: bool) -> None:
        """Handles an atomic, volatile or otherwise strong access of global memory (cta is None) or of a CTA's
        shared memory. A release publishes all that happens before it to acquires of the same address within its
        scope. Relaxed accesses do so only together with fences."""
        places = self.locations if cta is None else cta.view.locations
        place = places.get(address)
        if place is None:
            place = places[address] = Location()
        wide = scope  # scope of a release
        if order == "volatile":
            order, wide = self.volatile(w, cta, write)
        if read and order in ("acquire", "acq_rel"):
            for key in reached(w, scope):
                if key in place.clocks:
                    self.join(w.view.at, place.clocks[key].at)
                    self.hear(w, place.clocks[key].values)
                    w.view.flags |= place.writers[key]
        elif read:  # a later fence acquires it, within the narrower of both scopes
            for fenced in SCOPES:
                for key in reached(w, min(scope, fenced, key=rank)):
                    if key in place.clocks:
                        if fenced not in w.view.acquirable:
                            w.view.acquirable[fenced] = np.zeros_like(w.view.clock)
                        self.join(address_of(w.view.acquirable[fenced]), place.clocks[key].at)
                        w.view.acquirable_flags.setdefault(fenced, {}).update(place.writers[key])
        if write:
            sent = [(wide, self.snapshot(w))] if order in ("release", "acq_rel") else []
            whole = False
            for fenced, snapshot in sent + list(w.view.released.items()):
                for key in reached(w, min(scope, fenced, key=rank)):
                    if key not in place.clocks:
                        place.clocks[key], place.writers[key] = self.new_clock(), {}
                    whole = self.send_earlier(place.clocks[key], w, snapshot) or whole
                    if self.machine.active.bit_count() == 1:  # otherwise another lane may still write
                        place.writers[key][address, w.view.slot] = w.view.epoch
            if sent:  # this write belongs to the epoch that the snapshot began
                if whole:
                    w.view.head[:2] = w.view.epoch, 0
                w.view.head[2:] = w.view.epoch, address & ~3 & pg.ALL

    def volatile(self, w, cta, write: bool) -> tuple[str, str]:
        """Returns the memory order of a volatile access, and its scope. PTX defines it as relaxed. At the default level
        it is acq_rel in shared memory. In global memory a volatile write is a release if its warp has executed a fence,
        and
        reaches as far as that: every thread fences its stores, all meet at a barrier, and one thread sets a flag."""
        if self.strict:
            return "relaxed", "sys"
        if cta is not None:
            return "acq_rel", "sys"
        return ("release", max(w.view.released, key=rank)) if write and w.view.released else ("relaxed", "sys")

    def observe(self, w, op) -> None:
        """Notes that the issuing thread has waited for `op`, so the warp knows it to be complete."""
        number = op.number
        if number:
            clock, bit = w.view.clock, number % sh.OPS
            for section in (self.known, self.tensor) if self.strict else (self.known,):
                at = section.start + bit // 32
                clock[at] = clock.item(at) | 1 << bit % 32

    def knows(self, w, number: int) -> bool:
        if self.newest.item(0) - number >= sh.OPS - 64:
            return True
        bit = number % sh.OPS
        return bool(w.view.clock.item(self.known.start + bit // 32) >> bit % 32 & 1)

    def unknown(self, known: np.ndarray, numbers: np.ndarray) -> list[int]:
        """Returns the operations that are not in the set of those known to be complete."""
        bits = numbers % sh.OPS
        recent = self.newest.item(0) - numbers < sh.OPS - 64
        return numbers[recent & ((known[bits // 32] >> (bits % 32).astype(np.uint32)) & 1 == 0)].tolist()


class Clock(NamedTuple):
    """A row of a sheet, its address, and the header before it (checks/clocks.py)."""

    values: np.ndarray
    at: int
    head: np.ndarray


class Snapshot(NamedTuple):
    """A warp's clock at a fence or release, the lanes that executed it, and `begin` and `dirty` of the warp's
    view."""

    clock: np.ndarray
    at: int  # address of the clock
    lanes: int
    begin: int
    dirty: int


class Sheet:
    """Memory of SHEET clocks."""

    __slots__ = ("live", "rows")

    def __init__(self, length: int):
        self.rows = np.zeros((SHEET, length), np.uint32)
        self.live = SHEET  # clocks that are in use or not used yet


class SyncClock:
    """The clocks of a barrier. Arrivals merge into `gathering`; when a phase completes, waiters acquire `published`.
    `home` is the CTA of an mbarrier. `far` holds the arrivals from other CTAs, for waits of cluster scope."""

    __slots__ = ("far", "gathering", "home", "members", "order", "present", "published")

    def __init__(self, order: Order):
        self.order, self.home, self.far = order, None, None
        self.present: list = []  # (warp, whether it waits) at a CTA barrier
        self.members = array("q")  # clock address and slot of each whole warp that has arrived and waits
        self.gathering, self.published = order.new_clock(), order.new_clock()

    def gather(self, relaxed: bool = False, scope: str = "") -> None:
        """Gathers clocks. The barrier calls this for each arrival, by the operation that completes or by the
        running warp.
        """
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
            clocks = order.clocks, order.sections, order.private, order.used
            order.meet(self.published.at, self.gathering.at, at, count // 2, *clocks)
            del self.members[:]
        else:
            order.hand_over(self.published.at, self.gathering.at, order.clocks, order.sections, order.used)
        if self.far is not None:
            self.far.complete()

    def parts(self) -> list[int]:
        """Returns the addresses of all its clocks."""
        return [self.gathering.at, self.published.at, *(self.far.parts() if self.far is not None else ())]


class Location:
    """Releases at one address, for each scope that an acquire may have. An acquire also orders the releasing write
    itself: `writers` has its epoch, by address and slot."""

    __slots__ = ("clocks", "writers")

    def __init__(self) -> None:
        self.clocks: dict[object, Clock] = {}  # by key of `reached`
        self.writers: dict[object, dict[tuple[int, int], int]] = {}


def address_of(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def rank(scope: str) -> int:
    return SCOPES.index(scope)


def reached(w, scope: str) -> list:
    """Returns the keys of a Location that an access of this scope reads or writes."""
    cta, gpu = w.cta, w.cta.gpu
    return [(gpu, cta.ctaid), ("cluster", gpu, cta.cluster[0].ctaid), ("gpu", gpu), None][: rank(scope) + 1]
