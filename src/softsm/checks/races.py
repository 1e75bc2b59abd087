"""Happens-before: who has seen what, and which accesses nobody ordered.

Every warp has a vector clock over all resident warps, twice: what it has seen, and what of that is visible to the
async proxy (after fence.proxy.async); and sets of asynchronous operations as bits: those it knows to be complete, those
of them that are visible to the async proxy, and at the strict level those that its tcgen05 operations come after, and
those it passes on to who synchronises with it. Barriers, fences and waits move these clocks; loads, stores and
asynchronous operations are compared with the shadow of the memory they touch (checks/shadow.py, checks/tensor.py).
Asynchronous operations are checked when they are issued, so a race is found although the values came out right.

Default level: a bar.sync or an mbarrier wait orders tensor-memory operations without tcgen05.fence, and an initialised
mbarrier reaches the copy engine by a barrier alone, as Triton's output relies on. strict=True takes PTX 9.4 to
the letter.
"""

from __future__ import annotations

import bisect

import numpy as np

from softsm.checks import shadow as sh
from softsm.checks.barriers import BarrierChecks, box_spans
from softsm.checks.clocks import SCOPES, Location, SyncClock, rank, reached
from softsm.checks.findings import Findings
from softsm.checks.grids import GridChecks
from softsm.checks.maps import MapChecks
from softsm.checks.tensor import TensorChecks
from softsm.engine import program as pg
from softsm.report.diagnostics import Diagnostic, Party, Report

WORDS = sh.OPS // 32
TENSOR = ("tcgen05.mma", "tcgen05.cp", "tcgen05.shift")
REDUCTIONS = ("TMA reduction", "bulk reduction")
GENERIC = ("cp.async", "st.async", "red.async")  # asynchronous, but of the generic proxy
COLLECTIVE = ("cp.async", "wgmma")  # not issued by one lane
MUST_END = (
    *TENSOR,
    "TMA load",
    "bulk load",
    "TMA store (read)",
    "TMA reduction (read)",
    "bulk store (read)",
    "bulk reduction (read)",
    "bulk copy to a peer",
)


class Checker(MapChecks, TensorChecks, BarrierChecks, GridChecks, Findings):
    def __init__(self, machine, report: Report, strict: bool):
        from softsm.engine.interpreter import checking_module, spans_module

        super().__init__()
        self.machine, self.report, self.strict = machine, report, strict
        self.module, self.spans = checking_module(), spans_module()
        self.join_clocks = self.spans.join
        self.warps = -(-(machine.block[0] * machine.block[1] * machine.block[2]) // 32)  # per CTA
        ctas = max(len(machine.sms) * machine.per_sm, machine.cluster_size)
        self.slots = ctas * self.warps
        self.known = slice(2 * self.slots, 2 * self.slots + WORDS)
        self.fenced = slice(self.known.stop, self.known.stop + WORDS)
        self.tensor = slice(self.fenced.stop, self.fenced.stop + WORDS)  # strict only, as is the next
        self.sent = slice(self.tensor.stop, self.tensor.stop + WORDS)
        self.words = WORDS * (4 if strict else 2)
        self.free = [k * self.warps for k in range(ctas)][::-1]
        self.races = np.zeros(1 + sh.MAX_RACES * sh.RACE_FIELDS, np.int64)
        self.counter = np.ones(1, np.int64)  # number of the next asynchronous operation
        self.operations: dict[int, object] = {}
        self.confined_pairs: dict[tuple[int, int], bool] = {}  # (load, store), see checks/replicas.py
        self.performing = None  # the asynchronous operation whose effects are being applied
        self.agents: dict[int, object] = {}  # 1 + slot -> warp that used it last
        self.clocks: dict[int, np.ndarray] = {}  # all that live long and hold bits of operations
        self.addresses: dict[int, int] = {}  # and where they are
        self.global_shadows = self.shadow_global()
        self.locations: dict[int, Location] = {}  # strong accesses of global memory, by address
        self.products = None  # where operands are looked at
        self.before = None  # the grid launched before, where this one may begin before that has ended
        checks = machine.options.checks
        if machine.options.dependent and checks.last:
            self.follow(checks.last[0])
        checks.last[:] = [self]
        if strict or checks.expectations or report.tap is not None:
            from softsm.checks.products import Products

            self.products = Products(self, report.tap, checks.expectations, strict)
        if strict:
            for ins, name in machine.kernel.undefined[:16]:
                source = f"{ins.loc.file}:{ins.loc.line}" if ins.loc else ""
                self.report.add(
                    Diagnostic(
                        "uninitialised",
                        f"register {name} is read, but nothing before it writes it",
                        (Party("every warp that comes here", ins.line, ins.text, source, f"reads {name}"),),
                    )
                )

    # ---- clocks ------------------------------------------------------------------------------------------------

    def new_clock(self) -> np.ndarray:
        clock = np.zeros(2 * self.slots + self.words, np.uint32)
        self.clocks[id(clock)] = clock
        self.addresses[id(clock)] = clock.ctypes.data
        return clock

    def join(self, target: np.ndarray, source: np.ndarray) -> None:
        where = self.addresses
        a, b = where.get(id(target)) or target.ctypes.data, where.get(id(source)) or source.ctypes.data
        self.join_clocks(a, b, 2 * self.slots, self.words)

    def enter(self, cta) -> None:
        """A CTA starts: slots, clocks and the shadow of its shared memory."""
        cta.slot0 = self.free.pop()
        cta.shadow = np.zeros((len(cta.shared) + 3) // 4 * (sh.FIXED + 2 * self.warps), np.uint32)
        cta.outstanding = []  # numbers of operations that must be over when it ends
        cta.exit_hooks.append(self.ended)
        cta.touched_by, cta.used_by = {}, []  # by peers: slot -> (epoch, pc, warp), and numbers of operations
        cta.locations = {}  # as self.locations, of its shared memory
        for w in cta.warps:
            slot = cta.slot0 + w.index
            w.clock = self.new_clock()
            before = self.agents.get(slot + 1)
            w.clock[slot] = before.clock[slot] if before is not None else 1
            self.tick(w)
            w.clock[self.slots + slot] = 0
            w.issued = {}  # lane -> its tcgen05 operations, for commit
            w.copies = np.zeros(WORDS, np.uint32)  # its cp.async, for their arrival on an mbarrier
            w.released, w.acquirable = {}, {}  # by scope: what fences beside relaxed accesses pass on and take in
            w.loose = np.zeros(self.slots, np.uint32)  # what relaxed arrivals at the cluster barrier have told it
            w.suspected, w.predicates = [], None  # races of it that may be none (checks/replicas.py)
            w.initialised = []  # mbarriers since the last fence.mbarrier_init
            self.agents[slot + 1] = w
            S = w.S
            S[pg.S_RACES], S[pg.S_SHADOW] = self.races.ctypes.data, cta.shadow.ctypes.data
            S[pg.S_GLOBAL_SHADOW], S[pg.S_CLOCK] = self.global_table.ctypes.data, w.clock.ctypes.data
            S[pg.S_KNOWN], S[pg.S_NEXT_OP] = w.clock.ctypes.data + 8 * self.slots, self.counter.ctypes.data
            S[pg.S_SLOT], S[pg.S_SLOT0], S[pg.S_INDEX], S[pg.S_WARPS] = slot, cta.slot0, w.index, self.warps

    def leave(self, cta) -> None:
        self.unfinished(cta)
        self.left_by_peers(cta)
        self.free.append(cta.slot0)
        cta.shadow = None  # megabytes; the CTA itself lives on in what is told of its operations
        things = [*cta.barriers.values(), *cta.named_barriers.values()]
        gone = [x for t in things if t.clock is not None for x in t.clock.parts()]
        gone += [clock for place in cta.locations.values() for clock in place.clocks.values()]
        for clock in [*gone, *(w.clock for w in cta.warps)]:
            self.clocks.pop(id(clock), None)
            self.addresses.pop(id(clock), None)

    def close(self) -> None:
        """The launch is over; a dependent one may still ask which global memory it touched."""
        self.clocks, self.addresses, self.agents, self.operations, self.locations = {}, {}, {}, {}, {}
        self.products = self.performing = self.before = None
        self.tmem.clear()

    def unfinished(self, cta) -> None:
        """The CTA ends: operations whose completion none of its cluster's warps has seen."""
        if not cta.outstanding:
            return
        known = np.zeros(WORDS, np.uint32)
        for member in cta.cluster:
            for w in member.warps:
                known |= w.clock[self.known]
        newest = int(self.counter[0])
        for number in cta.outstanding:
            bit = number % sh.OPS
            op = self.operations.get(number)
            if (
                newest - number < sh.OPS - 64
                and op is not None
                and not known[bit // 32] >> np.uint32(bit % 32) & 1
            ):
                self.report.add(
                    Diagnostic(
                        "in-flight",
                        f"{cta} ends, but nobody waited for this {op.kind}",
                        (self.party(op.warp, op, "may still be in flight"),),
                    )
                )
        cta.outstanding = []

    def touches_peer(self, w, cta) -> None:
        """The warp accesses the shared memory, or an mbarrier, of another CTA of its cluster."""
        slot = w.cta.slot0 + w.index
        cta.touched_by[slot] = int(w.clock[slot]), w.pc, w

    def left_by_peers(self, cta) -> None:
        """Did the CTA know, when it ended, that its peers were done with its shared memory?"""
        if not cta.touched_by and not cta.used_by:
            return
        seen = np.maximum.reduce([np.maximum(w.clock[: self.slots], w.loose) for w in cta.warps])
        text = f"{cta} may have ended before this access of its shared memory"
        for slot, (epoch, pc, w) in cta.touched_by.items():
            if seen[slot] < epoch:
                party = self.party(w, None, "accesses the shared memory of a peer", pc=pc)
                self.report.add(Diagnostic("peer-exit", text, (party,)))
        for number in cta.used_by:
            op = self.operations.get(number)
            if op is not None and not any(self.knows(w, number) for w in cta.warps):
                party = self.party(op.warp, op, "accesses the shared memory of a peer")
                self.report.add(Diagnostic("peer-exit", text, (party,)))

    def shadow_global(self) -> list[np.ndarray]:
        allocations = self.machine.global_memory.allocations
        shadows = [
            np.zeros(((a.end + 3) // 4 - a.start // 4) * sh.GLOBAL_RECORD, np.uint32) for a in allocations
        ]
        self.global_table = np.array([s.ctypes.data for s in shadows] or [0], np.int64)
        return shadows

    # ---- synchronisation ---------------------------------------------------------------------------------------

    def tick(self, w) -> None:
        """A new epoch, an even number: the lanes of the warp have met, or what was before has been passed on."""
        slot = w.cta.slot0 + w.index
        w.clock[slot] = (w.clock[slot] | np.uint32(1)) + np.uint32(1)

    def snapshot(self, w) -> np.ndarray:
        """What the warp can pass on now; its own later accesses are not part of it."""
        copy = w.clock.copy()
        if self.strict:
            copy[self.tensor] = 0
        self.tick(w)
        return copy

    def spans_cluster(self, scope: str) -> bool:
        """Does an mbarrier operation of this scope reach other CTAs? '' is .cta by the letter; Triton means the cluster
        where it arrives at a peer."""
        return scope == "cluster" or not (scope or self.strict)

    def publisher(self, relaxed: bool = False, fences: tuple[str, ...] = SCOPES) -> np.ndarray:
        """What the current arrival publishes; a relaxed one only what a fence of these scopes released before."""
        op = self.performing
        if op is not None:
            return op.publishes
        w = self.machine.current
        if not relaxed:
            return self.snapshot(w)
        sent = np.zeros_like(w.clock)
        for scope, clock in w.released.items():
            if scope in fences or scope not in SCOPES:  # .sys
                self.join(sent, clock)
        return sent

    def clock_of(self, thing) -> SyncClock:
        clock = thing.clock
        if clock is None:
            clock = thing.clock = SyncClock(self)
        return clock

    def acquire(self, w, thing, scope: str = "cluster") -> None:
        if thing.clock is not None:
            self.join(w.clock, thing.clock.published)
            if thing.clock.far is not None and self.spans_cluster(scope):
                self.join(w.clock, thing.clock.far.published)

    def waits_relaxed(self, w, barrier, scope: str) -> None:
        """A relaxed wait tells nothing, but a fence that follows takes in what it found, as far as both reach."""
        near, far = barrier.clock, barrier.clock.far
        for fenced in SCOPES:
            if fenced not in w.acquirable:
                w.acquirable[fenced] = np.zeros_like(w.clock)
            self.join(w.acquirable[fenced], near.published)
            if far is not None and fenced != "cta" and self.spans_cluster(scope):
                self.join(w.acquirable[fenced], far.published)

    def fence_async(self, w, wide: bool) -> None:
        """fence.proxy.async: what the warp has seen or done becomes visible to the async proxy; what it does from now
        on does not. The odd epoch that begins tells that apart, and is no new one for the order of lanes. `wide`: of
        the cluster's shared memory too; Triton arrives relaxed at the cluster barrier behind it."""
        n, slot = self.slots, w.cta.slot0 + w.index
        np.maximum(w.clock[n : 2 * n], w.clock[:n], out=w.clock[n : 2 * n])
        w.clock[self.fenced] |= w.clock[self.known]
        if wide and not self.strict:
            w.released["cluster"] = w.clock.copy()  # the epoch ends below
        if w.clock[slot] & 1:
            self.tick(w)
        else:
            w.clock[slot] += 1

    def fence(self, w, release: bool, acquire: bool, scope: str) -> None:
        """fence.acq_rel and the like: they make relaxed accesses beside them synchronise, within their scope."""
        if acquire and scope in w.acquirable:
            self.join(w.clock, w.acquirable[scope])
        if release:
            w.released[scope] = self.snapshot(w)

    def fence_tensor(self, w, before: bool) -> None:
        """tcgen05.fence::before_thread_sync, or ::after_thread_sync."""
        if self.strict:
            source, target = (self.tensor, self.sent) if before else (self.sent, self.tensor)
            w.clock[target] |= w.clock[source]

    def strong(self, w, address: int, cta, order: str, scope: str, *, read: bool, write: bool) -> None:
        """An atomic, volatile or otherwise strong access of global memory (cta is None) or of a CTA's shared memory: a
        release passes on what the warp has seen, to those whose acquire at the same place is within its scope; relaxed
        ones do so only beside fences."""
        places = self.locations if cta is None else cta.locations
        place = places.get(address)
        if place is None:
            place = places[address] = Location()
        if order == "volatile":
            order = "relaxed" if self.strict else "acq_rel"
        if read and order in ("acquire", "acq_rel"):
            for key in reached(w, scope):
                if key in place.clocks:
                    self.join(w.clock, place.clocks[key])
        elif read:  # a fence that follows takes it in, as far as the narrower scope of the two reaches
            for fenced in SCOPES:
                for key in reached(w, min(scope, fenced, key=rank)):
                    if key in place.clocks:
                        if fenced not in w.acquirable:
                            w.acquirable[fenced] = np.zeros_like(w.clock)
                        self.join(w.acquirable[fenced], place.clocks[key])
        if write:
            sent = [(scope, self.snapshot(w))] if order in ("release", "acq_rel") else []
            for wide, clock in sent + list(w.released.items()):
                for key in reached(w, min(scope, wide, key=rank)):
                    if key not in place.clocks:
                        place.clocks[key] = self.new_clock()
                    self.join(place.clocks[key], clock)

    # ---- asynchronous operations -------------------------------------------------------------------------------

    def issued(self, op) -> None:
        """Number the operation and compare what it touches with the shadow, from what its issuer has seen."""
        number = int(self.counter[0])
        self.counter[0] = number + 1
        bit = number % sh.OPS
        word, mask = bit // 32, np.uint32(1 << bit % 32)
        if number % 32 == 0:  # reuse of old numbers: nobody may seem to know the new ones
            for clock in self.clocks.values():
                clock[2 * self.slots + word :: WORDS] = 0
            for warp in self.agents.values():
                warp.copies[word] = 0
                for bits in warp.issued.values():
                    bits[word] = 0
        w = op.warp
        op.number, op.instruction = number, op.warp.instruction()
        self.operations[number] = op
        self.operations.pop(number - sh.OPS, None)
        op.publishes = np.zeros(2 * self.slots + self.words, np.uint32)
        sections = (self.known, self.sent) if self.strict else (self.known,)
        if op.kind == "tcgen05.commit":
            op.publishes[:] = self.snapshot(w)
            if self.strict:  # it tells of tcgen05 operations, and releases nothing else
                op.publishes[: 2 * self.slots] = 0
        for section in sections:
            op.publishes[section][word] |= mask
            if op.kind == "tcgen05.commit" and op.lane in w.issued:
                op.publishes[section] |= w.issued[op.lane]
        if len(w.cta.cluster) > 1:
            places = [r[1] for r in (*op.reads, *op.writes) if r[0] in ("shared", "spans")]
            for cta in {*places, *(x.home for x in op.signals if getattr(x, "home", None) is not None)} - {w.cta}:
                cta.used_by.append(number)
        if op.kind == "tcgen05.commit":
            if not self.strict:  # the commits of a thread arrive in order, as Triton's pairs of CTAs rely on
                w.issued.setdefault(op.lane, np.zeros(WORDS, np.uint32))[word] |= mask
            return
        if op.kind == "cp.async arrival":
            op.publishes[self.known] |= w.copies
            return
        if op.kind in TENSOR:
            w.issued.setdefault(op.lane, np.zeros(WORDS, np.uint32))[word] |= mask
        if op.kind in MUST_END:
            w.cta.outstanding.append(number)
        if op.kind == "cp.async":
            w.copies[word] |= mask
        generic = op.kind in GENERIC
        for write, regions in ((0, op.reads), (1, op.writes)):
            for region in regions:
                if region[0] == "tmem":
                    self.tensor_access(op, region, bool(write))
                else:
                    self.memory_access(op, region, write, generic)
        if self.races[0]:
            self.collect(w, op)

    def memory_access(self, op, region, write: int, generic: bool) -> None:
        """region: ('shared', cta, low, high), ('spans', cta, int64 [n, 2]), ('global', low, high) or
        ('tensor', box)."""
        w, number = op.warp, op.number
        base = w.clock.ctypes.data
        known = base + 8 * self.slots
        fenced = known if generic else known + 4 * WORDS
        # The order of writes behind reads needs no proxy fence: the reads are over when they are signalled.
        seen = base if write or generic else base + 4 * self.slots
        kind = sh.GENERIC_COPY if generic else sh.ASYNC
        place = region[0]
        if place in ("shared", "spans"):
            cta = region[1]
            spans = region[2] if place == "spans" else np.array([region[2:4]], np.int64)
            slot = w.cta.slot0 + w.index
            current = w.clock[slot if seen == base else self.slots + slot] >> 1 == w.clock[slot] >> 1
            lane = sh.NOBODY if op.kind in COLLECTIVE else op.lane
            if write and cta is not w.cta and not self.strict:
                told = np.maximum(w.clock[: self.slots], w.loose)
                seen = told.ctypes.data
            self.spans.asynchronous(
                cta.shadow.ctypes.data,
                self.warps,
                cta.slot0,
                spans.ctypes.data,
                len(spans),
                write,
                number,
                kind,
                seen,
                known,
                fenced,
                self.races.ctypes.data,
                w.pc,
                slot + 1 if current else 0,
                lane,
            )
            return
        spans = box_spans(region[1]) if place == "tensor" else np.array([region[1:3]], np.int64)
        if not len(spans):
            return
        memory = self.machine.global_memory
        i = bisect.bisect_right(memory.starts, int(spans[0, 0])) - 1
        if i < 0 or i >= len(self.global_shadows) or int(spans[:, 1].max()) > memory.allocations[i].end:
            return
        flags = sh.STRONG if op.kind in REDUCTIONS else 0
        self.spans.asynchronous_global(
            self.global_shadows[i].ctypes.data,
            memory.allocations[i].start & ~3,
            spans.ctypes.data,
            len(spans),
            write,
            number,
            kind,
            seen,
            known,
            fenced,
            self.races.ctypes.data,
            w.pc,
            flags,
        )

    def observe(self, w, op) -> None:
        """A wait of the issuing thread says that op is complete."""
        number = op.number
        if number:
            bit = number % sh.OPS
            mask = np.uint32(1 << bit % 32)
            w.clock[self.known][bit // 32] |= mask
            if self.strict:
                w.clock[self.tensor][bit // 32] |= mask

    def knows(self, w, number: int, section: slice | None = None) -> bool:
        if int(self.counter[0]) - number >= sh.OPS - 64:
            return True
        bit = number % sh.OPS
        return bool(w.clock[section or self.known][bit // 32] >> np.uint32(bit % 32) & 1)

    def access(
        self, w, cta, low: int, high: int, write: bool, strong: bool = False, lane: int = -1, same: bool = False
    ) -> None:
        """A macro-operation of the warp reads or writes bytes [low, high) of a shared memory, generic proxy; same: the
        store changes nothing."""
        if cta is w.cta:
            self.spans.span(w.state, low, high, write, w.pc)
        else:
            self.touches_peer(w, cta)
            base = w.clock.ctypes.data
            self.spans.peer(
                cta.shadow.ctypes.data,
                self.warps,
                cta.slot0,
                w.cta.slot0 + w.index + 1,
                base,
                base + 8 * self.slots,
                low,
                high,
                write,
                (sh.STRONG if strong else 0) | (sh.QUIET if same else 0),
                w.pc,
                int(self.counter[0]),
                self.races.ctypes.data,
                lane,
            )
        if self.races[0]:
            self.collect(w)

    def global_access(self, w, low: int, high: int, write: bool, strong: bool, lane: int, same: bool) -> None:
        """A macro-operation reads or writes bytes [low, high) of one allocation of global memory."""
        memory = self.machine.global_memory
        i = bisect.bisect_right(memory.starts, low) - 1
        if i < 0 or i >= len(self.global_shadows):
            return
        base = w.clock.ctypes.data
        for word in range(low & ~3, high, 4):
            touched = (1 << min(high - word, 4)) - 1 & ~((1 << max(low - word, 0)) - 1)
            self.module.global_record(
                self.global_shadows[i].ctypes.data + (word - (memory.allocations[i].start & ~3)) * sh.GLOBAL_RECORD,
                word,
                touched | (sh.STRONG if strong else 0) | (sh.QUIET if same else 0),
                write,
                w.pc,
                lane,
                base,
                base + 8 * self.slots,
                w.cta.slot0 + w.index + 1,
                int(self.counter[0]),
                self.races.ctypes.data,
            )
        if self.races[0]:
            self.collect(w)

    def lines(self, w, cta, offsets: np.ndarray, write: bool, same: bool = False) -> None:
        """ldmatrix and stmatrix: rows of 16 bytes; same: the store changes nothing."""
        if cta is not w.cta:
            for at in offsets.tolist():
                self.access(w, cta, at, at + 16, write)
            return
        offsets = np.ascontiguousarray(offsets, np.int64)
        self.spans.lines(w.state, offsets.ctypes.data, len(offsets), write, w.pc, sh.QUIET if same else 0)
        if self.races[0]:
            self.collect(w)
