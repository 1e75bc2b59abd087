"""Checks barriers: initialisation, counts and phases of mbarriers, the cluster barrier, and the warps at a named
barrier."""

from __future__ import annotations

import numpy as np

from softsm.checks import clocks as cl
from softsm.checks import shadow as sh
from softsm.checks.findings import announcer
from softsm.report.diagnostics import Diagnostic

AGAIN = (
    "put a barrier between the last wait for the mbarrier by any warp and its mbarrier.inval or new mbarrier.init, and "
    "another one behind that"
)


class BarrierChecks:
    """The part of the checker for barriers."""

    def __init__(self, checker):
        self.checker, self.order = checker, checker.order
        self.report, self.strict, self.party = checker.report, checker.strict, checker.findings.party

    def initialised(self, w, barrier, old, cta, offset: int) -> None:
        if old is not None:
            self.initialised_again(w, old)
        count = barrier.expected
        self.order.clock_of(barrier).home = barrier.home = cta
        slot, epoch = w.view.slot, w.view.epoch
        barrier.origin = [slot, epoch, w.pc, w, 0]
        if offset in cta.view.initialised:
            cta.view.repeated.add(barrier)
        cta.view.initialised.add(offset)
        barrier.watched = cta.view.watch(offset, [barrier.clock.published.at, slot, epoch, 0, -1])
        w.view.initialised.append(barrier)
        memory = self.checker.memory
        memory.spans.barrier_word(w.state, offset, w.pc)
        if memory.races.item(0):
            self.checker.findings.collect(w)
        threads = cta.threads * len(cta.cluster)
        if count > threads:
            self.report.add(
                Diagnostic(
                    "barrier-count",
                    f"{barrier.name} expects {count} arrivals in each phase, but there are {threads} threads"
                    + ("; it looks like a number of bytes" if count % 16 == 0 else ""),
                    (self.party(w, None, f"initialises it with {count}"),),
                )
            )

    def invalidated(self, cta, offset: int) -> None:
        for word in (offset // 4, offset // 4 + 1):
            cta.view.shadow.word(word)[3] &= ~np.uint32(sh.LIVE)
        cta.view.waits[offset // 8] = 0

    def over_barrier(self, w, op, cta, offset: int, pc: int, lane: int) -> None:
        """Checks a store over an mbarrier. PTX requires mbarrier.inval first, even if the program no longer needs
        the mbarrier. The default level reports it only if the mbarrier is used again."""
        barrier = cta.barriers.get(offset)
        if barrier is None:
            return
        barrier.overwritten = self.party(w, op, f"writes over {barrier.name}", pc=pc, lane=lane)
        cta.view.waits[offset // 8] = 0
        text = f"{barrier.name} is overwritten without mbarrier.inval"
        said = Diagnostic("barrier-overwritten", text, (barrier.overwritten,))
        (self.report.add if self.strict else self.report.warn)(said)

    def initialised_again(self, w, barrier) -> None:
        """Checks a second initialisation. PTX requires mbarrier.inval before the word is used again, even for an
        mbarrier.
        """
        if barrier.origin is not None and (self.strict or barrier.overwritten is None):
            _, _, pc, creator, _ = barrier.origin
            text = f"{barrier.name} is initialised again without mbarrier.inval"
            parties = self.party(w, None, "initialises it again"), self.party(creator, None, "initialised it", pc=pc)
            (self.report.add if self.strict else self.report.warn)(Diagnostic("barrier-init", text, parties))

    def fence_init(self, w) -> None:
        """Handles fence.mbarrier_init, which makes the barriers that this warp initialised visible to the cluster
        and the copy engine."""
        passed = getattr(w.cta.cluster[0], "cluster_barrier", None)
        for barrier in w.view.initialised:
            barrier.origin[4] = 1 + (0 if passed is None else passed.generation)
        w.view.initialised = []

    def arrived(self, barrier, what: str, amount: int, relaxed: bool = False, scope: str = "") -> None:
        if what == "expect_tx":
            barrier.asked -= amount
        elif amount and what != "increment":
            barrier.clock.gather(relaxed, scope)

    def passed(self, w, barrier, relaxed: bool, scope: str) -> None:
        """Records that a wait on an mbarrier has succeeded."""
        if barrier.skipped is not None:
            self.waited_late(barrier)
        barrier.watched[cl.WAITED] = barrier.phase - 1
        if relaxed:
            self.order.waits_relaxed(w, barrier, scope)
        else:
            self.order.acquire(w, barrier, scope)

    def bar_arrived(self, w, barrier, count: int | None, waits: bool, stays: bool) -> None:
        if count is not None and count < 32 * len(barrier.cta.warps):
            self.joins(w, barrier, count, waits)
        barrier.clock.present.append((w, stays))
        if stays:
            barrier.clock.members.extend((w.view.at, w.view.slot))
        else:
            barrier.clock.gather()

    def bar_completed(self, barrier) -> None:
        clock = barrier.clock
        clock.complete()
        if not self.strict and any(w.view.released or w.view.acquirable for w, _ in clock.present):
            self.order.share_fences([w for w, _ in clock.present], [w for w, stays in clock.present if stays])
        clock.present.clear()
        barrier.group_before, barrier.group = barrier.group, {}

    def cluster_arrival(self, w, barrier, relaxed: bool) -> None:
        """Records an arrival at the cluster barrier. In PTX a relaxed arrival orders nothing. Triton emits one
        between the start of a kernel and the first copy to a peer; at the default level it orders such copies."""
        if barrier.loose is None:
            barrier.loose = np.zeros((2, self.order.slots), np.uint32)  # gathered, published
        np.maximum(barrier.loose[0], w.view.clock[: self.order.slots], out=barrier.loose[0])
        self.order.clock_of(barrier).gather(relaxed)
        if relaxed:
            self.order.tick(w)

    @staticmethod
    def cluster_completed(barrier) -> None:
        barrier.clock.complete()
        barrier.loose[1] = barrier.loose[0]

    def cluster_passed(self, w, barrier) -> None:
        self.order.acquire(w, barrier)
        np.maximum(w.view.loose, barrier.loose[1], out=w.view.loose)
        w.cta.view.met = True

    def uses_barrier(self, w, barrier, asynchronous: bool = False) -> None:
        """Checks that an mbarrier's initialisation happens before this use and is visible to the copy engine."""
        if barrier.overwritten is not None:
            parties = (self.party(w, None, "uses it"), barrier.overwritten)
            text = f"{barrier.name} is used, but it was overwritten"
            self.report.add(Diagnostic("barrier-overwritten", text, parties))
        if barrier.origin is None:
            return
        slot, epoch, pc, creator, fenced = barrier.origin
        seen = creator is w or w.view.clock.item(slot) >= epoch
        if fenced and not seen:  # after the fence even a relaxed arrival at the cluster barrier suffices
            passed = getattr(w.cta.cluster[0], "cluster_barrier", None)
            seen = passed is not None and passed.generation >= fenced
        if asynchronous and self.strict and not fenced:
            seen = seen and int(w.view.clock[self.order.slots + slot]) >= epoch
        if not seen:
            kind = "the copy engine may not see" if asynchronous else "another warp may not see"
            text, fix = f"{kind} that {barrier.name} is initialised", ""
            if barrier in creator.cta.view.repeated:
                text, fix = f"{text} again", AGAIN
            parties = self.party(w, None, "uses it"), self.party(creator, None, "initialises it", pc=pc)
            self.report.add(Diagnostic("barrier-init", text, parties, fix))

    def joins(self, w, barrier, count: int, waits: bool) -> None:
        """Checks an arrival at a named barrier for some warps of the CTA. It must be ordered after the previous
        phase, or else hardware may count it in that phase. A warp that waited in that phase is ordered."""
        view, found = w.view, None
        earlier = barrier.group_before
        if w in barrier.group:
            if w.index not in barrier.partial:  # otherwise other lanes of the warp have arrived
                found = w, barrier.group[w][1]
        elif w not in earlier or not earlier[w][2]:
            unseen = ((o, pc) for o, (epoch, pc, _) in earlier.items() if view.clock.item(o.view.slot) < epoch)
            found = next(unseen, None)
        barrier.group.setdefault(w, (view.epoch, w.pc, waits))
        if found is None:
            return
        text = (
            f"two groups of warps use barrier {barrier.number}, and warps of both may meet there; if they are one "
            f"group, its count of {count} threads is too small"
        )
        if w is found[0] or w in earlier:
            text = f"this warp may arrive at barrier {barrier.number} twice in one phase"
        other = self.party(found[0], None, "arrived there before, and that phase may not be over", pc=found[1])
        self.report.add(Diagnostic("barrier-groups", text, (self.party(w, None, "arrives there"), other)))

    def left(self, cta) -> None:
        """Reports transaction bytes that no expect_tx announced, at the end of the CTA."""
        for barrier in cta.barriers.values():
            if barrier.tx < 0:
                text = f"{barrier.name}: {-barrier.tx} bytes have arrived that no expect_tx announced"
                self.report.add(Diagnostic("barrier-tx", text, announcer(barrier)))

    def unannounced(self, barrier) -> None:
        engine = self.checker.machine.engine
        copies = [op for op in engine.pending.values() if op.nbytes and barrier in op.signals]
        text = (
            f"{barrier.name}: phase {barrier.phase} ends by the bytes that expect_tx announced, and copies of "
            f"{barrier.asked} more signal it"
        )
        op = copies[-1] if copies else engine.performing
        parties = (self.party(op.warp, op, f"brings {op.nbytes} bytes"),) if op is not None else ()
        self.report.add(Diagnostic("barrier-tx", text, (*parties, *announcer(barrier))))
        barrier.asked = 0

    def phase_over(self, barrier) -> None:
        """Checks a phase that completes. It must not be the second one in a row that no warp has waited for: a wait
        by parity would confuse the two. Kernels release slots at their end that are not filled again, so this is
        reported only when a warp waits. expect_tx must have announced all copies that signal the barrier, or a
        phase ends without them.
        """
        barrier.clock.complete()
        if barrier.asked > 0:
            self.unannounced(barrier)
        barrier.watched[cl.PHASE] = barrier.phase + 1
        if barrier.watched.item(cl.WAITED) >= barrier.phase - 1:
            return
        w = self.checker.machine.current
        text = f"{barrier.name}: phase {barrier.phase} ends, and no warp has waited for phase {barrier.phase - 1}"
        came = [(e.phase, e.who.warp) for e in barrier.history if e.what == "arrive" and hasattr(e.who, "warp")]
        last, one = ([warp for phase, warp in came if phase == n] for n in (barrier.phase - 1, barrier.phase))
        if last and one and not {*last} & {*one}:
            text += (
                f"; the two were ended by warps {last[-1]} and {one[-1]}: if both arrive for one phase, the count of "
                f"mbarrier.init, {barrier.expected}, is too small"
            )
        party = self.party(w, self.checker.machine.engine.performing, "ends the phase")
        barrier.skipped = Diagnostic("barrier-phase", text, (party,))
        if barrier.waiters:
            self.waited_late(barrier)
        elif barrier.home.view is not None:  # the CTA may have ended before all arrivals
            barrier.home.view.unwatch(barrier.clock)  # Python sees the next wait

    def waited_late(self, barrier) -> None:
        self.report.add(barrier.skipped)
        barrier.skipped = None
