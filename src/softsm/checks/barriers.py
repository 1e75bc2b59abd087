"""mbarriers and TMA boxes under the checkers: initialisation, counts, phases, boxes outside their tensor."""

from __future__ import annotations

import numpy as np

from softsm.checks import shadow as sh
from softsm.memory.box_copy import ADDRESSES, Region, _row_region
from softsm.report.diagnostics import Diagnostic


class BarrierChecks:
    """The part of the checker that knows mbarriers."""

    def initialised(self, w, barrier, cta, offset: int, count: int) -> None:
        self.clock_of(barrier).home = barrier.home = cta
        slot = w.cta.slot0 + w.index
        barrier.origin = [slot, int(w.clock[slot]), w.pc, w, 0]
        w.initialised.append(barrier)
        self.access(w, cta, offset, offset + 8, True)
        self.mark_live(cta, offset, True)
        threads = cta.threads * len(cta.cluster)
        if count > threads:
            self.report.add(
                Diagnostic(
                    "barrier-count",
                    f"{barrier.name} expects {count} arrivals in each phase, but there are {threads} threads; "
                    "it looks like a number of bytes",
                    (self.party(w, None, f"initialises it with {count}"),),
                )
            )

    def mark_live(self, cta, offset: int, live: bool) -> None:
        """The word is an mbarrier from now on, or no longer."""
        bytes_of = cta.shadow.reshape(-1, sh.FIXED + 2 * self.warps)[offset // 4 : offset // 4 + 2, 3]
        if live:
            bytes_of |= np.uint32(sh.LIVE)
        else:
            bytes_of &= np.uint32(~sh.LIVE & 0xFFFFFFFF)

    def over_barrier(self, w, op, cta, offset: int, pc: int, lane: int) -> None:
        """Something else is written over an mbarrier. That counts when the mbarrier is used again: a program may be
        done with it, and only the letter of PTX asks for mbarrier.inval then."""
        barrier = cta.barriers.get(offset)
        if barrier is None:
            return
        barrier.overwritten = self.party(w, op, f"writes over {barrier.name}", pc=pc, lane=lane)
        if self.strict:
            text = f"{barrier.name} is overwritten without mbarrier.inval"
            self.report.add(Diagnostic("barrier-overwritten", text, (barrier.overwritten,)))

    def initialised_again(self, w, barrier) -> None:
        """PTX wants mbarrier.inval before the word is used again, also for another mbarrier."""
        if self.strict and barrier.origin is not None:
            _, _, pc, creator, _ = barrier.origin
            self.report.add(
                Diagnostic(
                    "barrier-init",
                    f"{barrier.name} is initialised again without mbarrier.inval",
                    (
                        self.party(w, None, "initialises it again"),
                        self.party(creator, None, "initialised it", pc=pc),
                    ),
                )
            )

    def fence_init(self, w) -> None:
        """fence.mbarrier_init: barriers this warp initialised are visible to the cluster and the copy engine."""
        passed = getattr(w.cta.cluster[0], "cluster_barrier", None)
        for barrier in w.initialised:
            barrier.origin[4] = 1 + (0 if passed is None else passed.generation)
        w.initialised = []

    def cluster_arrival(self, barrier, w, relaxed: bool) -> None:
        """Someone arrives at the cluster barrier. A relaxed arrival orders nothing by the letter. Triton puts one
        between the start of a kernel and the first copy into a peer: by default such copies come after what was before
        it."""
        if barrier.loose is None:
            barrier.loose = np.zeros((2, self.slots), np.uint32)  # gathered, published
        np.maximum(barrier.loose[0], w.clock[: self.slots], out=barrier.loose[0])
        self.clock_of(barrier).gather(relaxed)
        if relaxed:
            self.tick(w)

    def cluster_passed(self, barrier) -> None:
        if barrier.loose is not None:
            barrier.loose[1] = barrier.loose[0]

    def cluster_waited(self, barrier, w) -> None:
        self.acquire(w, barrier)
        np.maximum(w.loose, barrier.loose[1], out=w.loose)

    def uses_barrier(self, w, barrier, asynchronous: bool = False) -> None:
        """An mbarrier is touched: its initialisation must have happened before, and be visible to the copy engine."""
        if barrier.overwritten is not None:
            parties = (self.party(w, None, "uses it"), barrier.overwritten)
            text = f"{barrier.name} is used, but it was overwritten"
            self.report.add(Diagnostic("barrier-overwritten", text, parties))
        if barrier.origin is None:
            return
        slot, epoch, pc, creator, fenced = barrier.origin
        seen = int(w.clock[slot]) >= epoch or creator is w
        if fenced and not seen:  # behind the fence even a relaxed arrival at the cluster barrier is enough
            passed = getattr(w.cta.cluster[0], "cluster_barrier", None)
            seen = passed is not None and passed.generation >= fenced
        if asynchronous and self.strict and not fenced:
            seen = seen and int(w.clock[self.slots + slot]) >= epoch
        if not seen:
            kind = "the copy engine may not see" if asynchronous else "another warp may not see"
            self.report.add(
                Diagnostic(
                    "barrier-init",
                    f"{kind} that {barrier.name} is initialised",
                    (self.party(w, None, "uses it"), self.party(creator, None, "initialises it", pc=pc)),
                )
            )

    def phase_skipped(self, barrier) -> None:
        w = self.machine.current
        self.report.add(
            Diagnostic(
                "barrier-phase",
                f"{barrier.name}: phase {barrier.phase} ends, and nobody has waited for phase "
                f"{barrier.phase - 1}",
                (self.party(w, self.performing, "ends the phase"),),
            )
        )

    def filled(self, w, box) -> None:
        """A TMA load is issued: a box wholly outside its tensor brings nothing but fill."""
        if self.strict and not len(box_spans(box)):
            m = box.map
            outside = [
                f"{c} of dimension {i} (0 to {d - 1})"
                for i, (c, d) in enumerate(zip(box.coords, m.dims))
                if not -m.box[i] < c < d
            ]
            rows = len(box.rows) if box.rows is not None else m.rows
            self.report.add(
                Diagnostic(
                    "out-of-bounds-fill",
                    f"the box at {box.coords} of {m.describe()} lies outside the tensor: all {rows} rows are "
                    f"filled; coordinate {', '.join(outside) or 'of every row'}",
                    (self.party(w, None, "loads it"),),
                )
            )


def box_spans(box) -> np.ndarray:
    """The bytes of global memory that a TMA box covers: int64 [n, 2]."""
    if box.rows is not None:  # gather, scatter, im2col: addresses of rows, None outside the tensor
        _, first, length = _row_region(box.map, box.coords[0])
        rows = [r for r in box.rows if r is not None and length]
        starts = np.array([box.map.base + r + first & ADDRESSES for r in rows], np.int64)
    else:
        region = Region(box.map, box.coords)
        if not region.nbytes:
            return np.empty((0, 2), np.int64)
        starts, length = np.array([region.address], np.int64), region.shape[-1]
        for count, stride in zip(region.shape[:-1], region.strides[:-1]):
            starts = np.add.outer(starts, np.arange(count, dtype=np.int64) * stride).reshape(-1)
    return np.ascontiguousarray(np.stack([starts, starts + length], 1))
