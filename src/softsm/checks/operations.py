"""Checks asynchronous operations. Each gets a number when it is issued, and its accesses are compared with the shadow
at that time, so a race is found even if the values are right. It must be complete before its CTA ends."""

from __future__ import annotations

from collections import deque

import numpy as np

from softsm.checks import shadow as sh
from softsm.checks import tmem_shadow
from softsm.checks.advice import STORES, TENSOR, before_the_end
from softsm.checks.clocks import WORDS
from softsm.checks.order import address_of
from softsm.checks.tmem_shadow import ENTRY
from softsm.engine import program as pg
from softsm.engine.in_flight import AsyncOp, nothing
from softsm.engine.mma_chains import Growing
from softsm.engine.warps import Warp
from softsm.isa import product_chain
from softsm.isa.tcgen05 import Work, checked_regions
from softsm.report.diagnostics import Diagnostic

GENERIC = {"cp.async", "st.async", "red.async"}  # asynchronous operations of the generic proxy
MUST_END = {*TENSOR, *STORES, "TMA load", "bulk load", "bulk copy to a peer", "bulk reduction in a peer"}


class Operations:
    """The checker's table of asynchronous operations."""

    def __init__(self, checker):
        self.checker, self.order = checker, checker.order
        self.by_number: dict[int, AsyncOp] = {}  # issued by Python
        # tcgen05 operations, including those that compiled code issues (checks/tmem_shadow.py), by number: the number,
        # the issuing warp and its pc, and the kind. Warps have numbers here, from 1 on.
        self.log = np.zeros((sh.OPS, ENTRY // 8), np.int64)
        self.order.newest[pg.LOG] = address_of(self.log)
        self.issuers: dict[int, Warp] = {}
        self.entered = 0
        self.past: deque[tuple[int, list[int]]] = deque()  # (operations so far, numbers of a CTA's warps)
        self.operation = tmem_shadow.operation
        self.races: np.ndarray  # set by MemoryAccesses, which is created later

    def enter(self, w) -> int:
        """Returns a number for a new warp as an issuer."""
        self.entered += 1
        self.issuers[self.entered] = w
        return self.entered

    def leave(self, numbers: list[int]) -> None:
        """Handles the end of a CTA's warps. Their numbers are freed once no operation that they issued can be looked
        up."""
        newest = self.order.newest.item(pg.NEWEST)
        self.past.append((newest, numbers))
        while self.past[0][0] + sh.OPS <= newest:
            for number in self.past.popleft()[1]:
                del self.issuers[number]

    def get(self, number: int) -> AsyncOp | None:
        """Returns the operation of a number, or None if its entry has been reused."""
        op = self.by_number.get(number)
        if op is None and number > 0:
            issued, place, _ = self.log[number % sh.OPS].tolist()
            if issued == number:
                issuer = self.issuers[place >> 32]
                ins = issuer.cta.program.instructions[place & 0xFFFFFFFF]
                kind = ".".join(("tcgen05", ins.modifiers[0]))
                return AsyncOp(kind, issuer, 0, ins.line, nothing, done=True, number=number, instruction=ins)
        return op

    def issued(self, op) -> None:
        """Numbers the operation and compares its accesses with the shadow, by the clock of its issuer."""
        kind = op.kind
        if op.product is not None:
            self.product_issued(op)
            return
        if kind == "wgmma result":  # registers of one warp, which no other warp can access
            return
        w = op.warp
        view, cta = w.view, w.cta
        op.number = number = self.new_number()
        op.instruction = w.instruction()
        self.by_number[number] = op
        if len(cta.cluster) > 1:
            self.uses_peers(op)
        if op.nbytes:
            for barrier in op.signals:
                barrier.asked += op.nbytes
        if kind in TENSOR:
            self.mark(view, op)
        elif kind == "tcgen05.commit":
            self.committed(op)
            if not self.checker.strict:  # a thread's commits arrive in order; Triton's 2-CTA kernels need it
                self.mark(view, op)
            return
        elif kind == "cp.async arrival":
            op.publishes = clock = self.order.borrow()
            clock.values[:] = 0
            self.order.tell(clock.values, op)
            clock.values[self.order.known] |= view.copies
            if not self.checker.strict:
                # PTX requires fence.proxy.async before an MMA reads what cp.async wrote. CUTLASS's mainloops with
                # cp.async for sm_100 and FlashMLA's prefill kernels have none after this arrival.
                clock.values[self.order.fenced] |= view.copies
            return
        elif kind == "cp.async":
            word = number % sh.OPS // 32
            view.copies[word] = view.copies.item(word) | 1 << number % 32
        elif kind == "tcgen05.ld":
            view.unwaited_loads.append(op)
            w.S[pg.S_OWED] = 1
        elif kind == "tcgen05.st":
            view.unwaited_stores.append(op)
            w.S[pg.S_OWED] = 1
        if kind in MUST_END:
            cta.view.outstanding.append(number)
        generic, elsewhere = kind in GENERIC, False
        for write, regions in ((0, op.reads), (1, op.writes)):
            for region in regions:
                if region[0] == "tmem":
                    self.checker.tensor.access(op, region, write)
                else:
                    elsewhere = True
                    self.checker.memory.asynchronous(op, region, write, generic)
        if elsewhere:
            self.checker.findings.collect(w, op)

    def warpgroup_committed(self, w, batch) -> None:
        """Orders a wgmma. At the default level it follows the accesses of all four warps. On an H200 it read what
        one of them had just written, without a barrier between them (benchmarks/results/rules-h200.json), and
        FlashMLA's dense decode relies on this. At the strict level it comes after those of one warp: wgmma.fence
        orders registers and the accesses of its own warp."""
        seen = self.order.snapshot(w)
        if batch.seen is None:
            batch.seen = seen
        else:
            self.order.join(batch.seen.at, seen.at)

    def performed(self, op) -> None:
        if op.publishes is not None:
            self.order.spare.append(op.publishes)
            op.publishes = None

    def product_issued(self, op) -> None:
        """Numbers and checks a tcgen05.mma."""
        w, (work, ctas) = op.warp, op.product
        op.product = None
        op.number = number = self.new_number()
        op.instruction = w.instruction()
        self.by_number[number] = op
        if len(w.cta.cluster) > 1:
            self.uses_peers(op)
        self.product(w, op.lane, number, work, ctas, op)

    def product_joined(self, w, lane: int, work: Work, ctas: list) -> None:
        """Checks a tcgen05.mma that joins the one before it (isa/product_chain.py) and has an entry in the log."""
        self.product(w, lane, self.new_number(), work, ctas)

    def products_joinable(self, together, w, lane: int, work: Work, ctas: list) -> Growing:
        growing = self.checker.growing
        growing.begin(together, w, lane, work, self.checker.tensor.places(ctas), product_chain.LONGEST - 1)
        return growing

    def product(self, w, lane: int, number: int, work: Work, ctas: list, op: AsyncOp | None = None) -> None:
        w.cta.view.outstanding.append(number)
        tensor = self.checker.tensor
        if work.touched is None:
            work.touched = tensor.work(work.footprint.accumulator, ctas, *checked_regions(work, ctas))
        places, issued = tensor.places(ctas), w.view.issued_by(lane).at
        cells = self.operation(w.state, work.touched[1], places, number, w.pc, lane, issued)
        if not cells and not self.races.item(0):
            return
        if op is None:
            op = AsyncOp(
                "tcgen05.mma",
                w,
                lane,
                w.line(),
                nothing,
                footprint=work.footprint,
                number=number,
                instruction=w.instruction(),
            )
            self.by_number[number] = op
        if cells:
            for write, those in enumerate(checked_regions(work, ctas)):
                for region in those:
                    if region[0] == "tmem":
                        self.checker.tensor.access(op, region, write)
        self.checker.findings.collect(w, op)

    def new_number(self) -> int:
        number = self.order.number()
        if not number & 31 and number >= sh.OPS:
            self.forget(number)
        return number

    @staticmethod
    def mark(view, op) -> None:
        """Records that the thread has issued this tcgen05 operation."""
        bits = view.issued_by(op.lane).bits
        word = op.number % sh.OPS // 32
        bits[word] = bits.item(word) | 1 << op.number % 32

    def forget(self, number: int) -> None:
        """Clears the bits from this number to the next multiple of 32 for their new operations, as in Order.number."""
        for earlier in range(number - sh.OPS - 32, number - sh.OPS):
            self.by_number.pop(earlier, None)
        word = number % sh.OPS // 32
        for warp in self.checker.agents.values():
            warp.view.copies[word] = 0
            for issued in warp.view.issued.values():
                issued.bits[word] = 0

    def committed(self, op) -> None:
        """Sets what a tcgen05.commit publishes. Other operations publish only themselves (Order.publish)."""
        order, view = self.order, op.warp.view
        op.publishes = order.borrow()
        issued = view.issued[op.lane].at if op.lane in view.issued else 0
        begin, dirty = view.begin, view.dirty
        order.commit(op.publishes.at, view.at, view.slot, issued, op.number % sh.OPS, order.newest_address)
        if order.parted(op.warp, 1 << op.lane, begin, dirty):
            order.withhold(op.publishes.values, view.slot, begin, (0, 0))
            view.head[:2] = begin, dirty

    def uses_peers(self, op) -> None:
        places = [r[1] for r in (*op.reads, *op.writes) if r[0] in ("shared", "spans")]
        homes = (x.home for x in op.signals if getattr(x, "home", None) is not None)
        for cta in {*places, *homes} - {op.warp.cta}:
            cta.view.used_by.append(op.number)
            self.peer_runs(op.warp, cta, op)

    def unfinished(self, cta) -> None:
        """Reports operations that no warp of the cluster knows to be complete when the CTA ends."""
        self.checker.growing.flush()
        if not cta.view.outstanding:
            return
        known = np.zeros(WORDS, np.uint32)
        for member in cta.cluster:
            for w in member.warps:
                known |= w.view.clock[self.order.known]
        for number in self.order.unknown(known, np.array(cta.view.outstanding)):
            op = self.get(number)
            if op is None:
                continue
            party = self.checker.findings.party(op.warp, op, "may still be in flight")
            text = f"{cta} ends, but nothing waited for this {op.kind}"
            found = Diagnostic("in-flight", text, (party,), before_the_end(op))
            if op.kind in STORES and not self.checker.strict:  # production kernels do not wait for it
                self.checker.report.warn(found)
            else:
                self.checker.report.add(found)
        cta.view.outstanding = []

    def touches_peer(self, w, cta) -> None:
        """Records that the warp accesses the shared memory or an mbarrier of another CTA of its cluster."""
        slot = w.view.slot
        cta.view.touched_by[slot] = w.view.epoch, w.pc, w
        self.peer_runs(w, cta)

    def peer_runs(self, w, cta, op=None) -> None:
        """Checks that the warp can know that the other CTA of its cluster has started."""
        if w.cta.view.met:
            return
        first = cta.view.slot0
        slots = slice(first, first + self.checker.warps)
        if (np.maximum(w.view.clock[slots], w.view.loose[slots]) < cta.view.began).all():
            party = self.checker.findings.party(w, op, "accesses the shared memory of a peer")
            text = f"{cta} may not have started before this access of its shared memory"
            self.checker.report.add(Diagnostic("peer-start", text, (party,)))

    def left_by_peers(self, cta) -> None:
        """Reports peers' accesses to the CTA's shared memory that do not happen before its end."""
        if not cta.view.touched_by and not cta.view.used_by:
            return
        seen = np.maximum.reduce([np.maximum(w.view.clock[: self.order.slots], w.view.loose) for w in cta.warps])
        text = f"{cta} may have ended before this access of its shared memory"
        for slot, (epoch, pc, w) in cta.view.touched_by.items():
            if seen[slot] < epoch:
                party = self.checker.findings.party(w, None, "accesses the shared memory of a peer", pc=pc)
                self.checker.report.add(Diagnostic("peer-exit", text, (party,)))
        for number in cta.view.used_by:
            op = self.get(number)
            if op is not None and not any(self.order.knows(w, number) for w in cta.warps):
                party = self.checker.findings.party(op.warp, op, "accesses the shared memory of a peer")
                self.checker.report.add(Diagnostic("peer-exit", text, (party,)))
