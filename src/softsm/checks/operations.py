"""Asynchronous operations under the checkers: numbered and compared when they are issued, waited for before their CTA
ends. So a race is found although the values are right."""

from __future__ import annotations

import numpy as np

from softsm.checks import shadow as sh
from softsm.checks.clocks import WORDS
from softsm.engine.asynchrony import AsyncOp
from softsm.report.diagnostics import Diagnostic

TENSOR = {"tcgen05.mma", "tcgen05.cp", "tcgen05.shift"}
GENERIC = {"cp.async", "st.async", "red.async"}  # asynchronous, but of the generic proxy
MUST_END = {
    *TENSOR,
    "TMA load",
    "bulk load",
    "TMA store (read)",
    "TMA reduction (read)",
    "bulk store (read)",
    "bulk reduction (read)",
    "bulk copy to a peer",
}


class Operations:
    """The part of the checker that knows what is in flight."""

    def __init__(self, checker):
        self.checker, self.order = checker, checker.order
        self.by_number: dict[int, AsyncOp] = {}

    def issued(self, op) -> None:
        """Number the operation and compare what it touches with the shadow, from what its issuer has seen."""
        kind = op.kind
        if kind == "wgmma result":  # registers of one warp, which nobody else can touch
            return
        order, w = self.order, op.warp
        op.number = number = order.number()
        op.instruction = w.instruction()
        self.by_number[number] = op
        bit = number % sh.OPS
        word, mask = bit // 32, 1 << bit % 32
        if number >= sh.OPS:
            self.by_number.pop(number - sh.OPS, None)
            if number % 32 == 0:  # as in Order.number
                for warp in self.checker.agents.values():
                    warp.view.copies[word] = 0
                    for bits in warp.view.issued.values():
                        bits[word] = 0
        if len(w.cta.cluster) > 1:
            self.uses_peers(op)
        if kind in TENSOR or kind == "tcgen05.commit":
            if kind == "tcgen05.commit":
                self.committed(op)
                if self.checker.strict:
                    return
            # The commits of a thread arrive in order, as Triton's pairs of CTAs rely on.
            issued = w.view.issued.get(op.lane)
            if issued is None:
                issued = w.view.issued[op.lane] = np.zeros(WORDS, np.uint32)
            issued[word] = issued.item(word) | mask
            if kind == "tcgen05.commit":
                return
        elif kind == "cp.async arrival":
            op.publishes = np.zeros_like(w.view.clock)
            order.tell(op.publishes, op)
            op.publishes[order.known] |= w.view.copies
            return
        elif kind == "cp.async":
            w.view.copies[word] = w.view.copies.item(word) | mask
        if kind in MUST_END:
            w.cta.view.outstanding.append(number)
        generic = kind in GENERIC
        for region in op.reads:
            if region[0] == "tmem":
                self.checker.tensor.access(op, region, False)
            else:
                self.checker.memory.asynchronous(op, region, 0, generic)
        for region in op.writes:
            if region[0] == "tmem":
                self.checker.tensor.access(op, region, True)
            else:
                self.checker.memory.asynchronous(op, region, 1, generic)
        self.checker.findings.collect(w, op)

    def committed(self, op) -> None:
        """What tcgen05.commit tells; other operations tell of themselves alone, see Order.publish."""
        order, view, strict = self.order, op.warp.view, self.checker.strict
        op.publishes = order.snapshot(op.warp)
        order.tell(op.publishes, op)
        if strict:  # it tells of tcgen05 operations, and releases nothing else
            op.publishes[: 2 * order.slots] = 0
        for section in (order.known, order.sent) if strict else (order.known,):
            if op.lane in view.issued:
                op.publishes[section] |= view.issued[op.lane]

    def uses_peers(self, op) -> None:
        places = [r[1] for r in (*op.reads, *op.writes) if r[0] in ("shared", "spans")]
        homes = (x.home for x in op.signals if getattr(x, "home", None) is not None)
        for cta in {*places, *homes} - {op.warp.cta}:
            cta.view.used_by.append(op.number)

    def unfinished(self, cta) -> None:
        """The CTA ends: operations whose completion none of its cluster's warps has seen."""
        if not cta.view.outstanding:
            return
        known = np.zeros(WORDS, np.uint32)
        for member in cta.cluster:
            for w in member.warps:
                known |= w.view.clock[self.order.known]
        for number in self.order.unknown(known, np.array(cta.view.outstanding)):
            op = self.by_number.get(number)
            if op is not None:
                self.checker.report.add(
                    Diagnostic(
                        "in-flight",
                        f"{cta} ends, but nobody waited for this {op.kind}",
                        (self.checker.findings.party(op.warp, op, "may still be in flight"),),
                    )
                )
        cta.view.outstanding = []

    def touches_peer(self, w, cta) -> None:
        """The warp accesses the shared memory, or an mbarrier, of another CTA of its cluster."""
        slot = w.view.slot
        cta.view.touched_by[slot] = int(w.view.clock[slot]), w.pc, w

    def left_by_peers(self, cta) -> None:
        """Did the CTA know, when it ended, that its peers were done with its shared memory?"""
        if not cta.view.touched_by and not cta.view.used_by:
            return
        seen = np.maximum.reduce([np.maximum(w.view.clock[: self.order.slots], w.view.loose) for w in cta.warps])
        text = f"{cta} may have ended before this access of its shared memory"
        for slot, (epoch, pc, w) in cta.view.touched_by.items():
            if seen[slot] < epoch:
                party = self.checker.findings.party(w, None, "accesses the shared memory of a peer", pc=pc)
                self.checker.report.add(Diagnostic("peer-exit", text, (party,)))
        for number in cta.view.used_by:
            op = self.by_number.get(number)
            if op is not None and not any(self.order.knows(w, number) for w in cta.warps):
                party = self.checker.findings.party(op.warp, op, "accesses the shared memory of a peer")
                self.checker.report.add(Diagnostic("peer-exit", text, (party,)))
