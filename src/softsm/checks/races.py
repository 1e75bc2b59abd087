"""Happens-before: who has seen what, and which accesses nobody ordered.

Every warp has a vector clock over all resident warps, twice: what it has seen, and what of that is visible to the
async proxy (after fence.proxy.async); and the set of asynchronous operations it knows to be complete. Barriers,
fences and waits move these clocks; loads, stores and asynchronous operations are compared with the shadow of the memory
they touch (checks/shadow.py). Asynchronous operations are checked when they are issued, so a race is found although
the values came out right.

Default level: a bar.sync or an mbarrier wait orders tensor-memory operations without tcgen05.fence, as Triton's output
relies on. strict=True takes PTX 9.4 to the letter.
"""

from __future__ import annotations

import numpy as np

from softsm.checks import shadow as sh
from softsm.engine import program as pg
from softsm.report.diagnostics import Diagnostic, Party, Report

WORDS = sh.OPS // 32
TENSOR = ("tcgen05.mma", "tcgen05.cp", "tcgen05.shift")
IN_ORDER = {("tcgen05.st", "tcgen05.ld"), ("tcgen05.st", "tcgen05.st"), ("tcgen05.ld", "tcgen05.st")}
LANE_GROUPS, COLUMNS = 8, 512  # tensor memory is followed in groups of 16 lanes


class SyncClock:
    """What a barrier passes on: arrivals gather, a completed phase publishes them to who waits."""

    __slots__ = ("checker", "gathering", "published")

    def __init__(self, checker: Checker):
        self.checker = checker
        self.gathering, self.published = checker.new_clock(), checker.new_clock()

    def gather(self) -> None:
        """Called by the barrier for each arrival: by the operation that is completing, else by the running warp."""
        self.checker.join(self.gathering, self.checker.publisher())

    def complete(self) -> None:
        self.checker.join(self.published, self.gathering)
        self.gathering[:] = 0


class Checker:
    def __init__(self, machine, report: Report, strict: bool):
        from softsm.engine.interpreter import checking_module

        self.machine, self.report, self.strict = machine, report, strict
        self.module = checking_module()
        self.warps = -(-(machine.block[0] * machine.block[1] * machine.block[2]) // 32)  # per CTA
        ctas = max(len(machine.sms) * machine.per_sm, machine.cluster_size)
        self.slots = ctas * self.warps
        self.free = [k * self.warps for k in range(ctas)][::-1]
        self.races = np.zeros(1 + sh.MAX_RACES * sh.RACE_FIELDS, np.int64)
        self.counter = np.ones(1, np.int64)  # number of the next asynchronous operation
        self.operations: dict[int, object] = {}
        self.performing = None  # the asynchronous operation whose effects are being applied
        self.agents: dict[int, object] = {}  # 1 + slot -> warp that used it last
        self.clocks: list[np.ndarray] = []  # all that hold bits of operations
        self.global_shadows = self.shadow_global()
        self.locations: dict[int, SyncClock] = {}  # strong accesses of global memory, by address
        self.tmem: dict[int, TensorShadow] = {}

    # ---- clocks ------------------------------------------------------------------------------------------------

    def new_clock(self) -> np.ndarray:
        clock = np.zeros(2 * self.slots + 2 * WORDS, np.uint32)
        self.clocks.append(clock)
        return clock

    def join(self, target: np.ndarray, source: np.ndarray) -> None:
        self.module.join(target.ctypes.data, source.ctypes.data, 2 * self.slots, 2 * WORDS)

    def enter(self, cta) -> None:
        """A CTA starts: slots, clocks and the shadow of its shared memory."""
        cta.slot0 = self.free.pop()
        cta.shadow = np.zeros((len(cta.shared) + 3) // 4 * (sh.FIXED + 2 * self.warps), np.uint32)
        for w in cta.warps:
            slot = cta.slot0 + w.index
            w.clock = self.new_clock()
            before = self.agents.get(slot + 1)
            w.clock[slot] = before.clock[slot] + 1 if before is not None else 1
            w.clock[self.slots + slot] = 0
            w.issued = np.zeros(WORDS, np.uint32)  # its tcgen05 operations, for commit
            w.copies = np.zeros(WORDS, np.uint32)  # its cp.async, for their arrival on an mbarrier
            self.agents[slot + 1] = w
            S = w.S
            S[pg.S_RACES], S[pg.S_SHADOW] = self.races.ctypes.data, cta.shadow.ctypes.data
            S[pg.S_GLOBAL_SHADOW], S[pg.S_CLOCK] = self.global_table.ctypes.data, w.clock.ctypes.data
            S[pg.S_KNOWN], S[pg.S_NEXT_OP] = w.clock.ctypes.data + 8 * self.slots, self.counter.ctypes.data
            S[pg.S_SLOT], S[pg.S_SLOT0], S[pg.S_INDEX], S[pg.S_WARPS] = slot, cta.slot0, w.index, self.warps

    def leave(self, cta) -> None:
        self.free.append(cta.slot0)
        gone = {id(w.clock) for w in cta.warps}
        self.clocks = [c for c in self.clocks if id(c) not in gone]

    def shadow_global(self) -> list[np.ndarray]:
        allocations = self.machine.global_memory.allocations
        shadows = [np.zeros(((a.end + 3) // 4 - a.start // 4) * sh.GLOBAL_RECORD, np.uint32) for a in allocations]
        self.global_table = np.array([s.ctypes.data for s in shadows] or [0], np.int64)
        return shadows

    # ---- synchronisation ---------------------------------------------------------------------------------------

    def tick(self, w) -> None:
        w.clock[w.cta.slot0 + w.index] += 1

    def publisher(self) -> np.ndarray:
        """What the current arrival publishes; a warp's own later accesses are not part of it."""
        op = self.performing
        if op is not None:
            return op.publishes
        w = self.machine.current
        snapshot = w.clock.copy()
        self.tick(w)
        return snapshot

    def clock_of(self, thing) -> SyncClock:
        clock = thing.clock
        if clock is None:
            clock = thing.clock = SyncClock(self)
        return clock

    def acquire(self, w, thing) -> None:
        if thing.clock is not None:
            self.join(w.clock, thing.clock.published)

    def fence_async(self, w) -> None:
        """fence.proxy.async: what the warp has seen or done becomes visible to the async proxy."""
        n = self.slots
        np.maximum(w.clock[n : 2 * n], w.clock[:n], out=w.clock[n : 2 * n])
        w.clock[2 * n + WORDS :] |= w.clock[2 * n : 2 * n + WORDS]

    def strong(self, w, address: int) -> None:
        """An atomic, volatile or otherwise strong access of global memory: releases to and acquires from its location."""
        clock = self.locations.get(address)
        if clock is None:
            clock = self.locations[address] = SyncClock(self)
        self.join(w.clock, clock.published)
        self.join(clock.published, w.clock)
        self.tick(w)

    # ---- asynchronous operations -------------------------------------------------------------------------------

    def issued(self, op) -> None:
        """Number the operation and compare what it touches with the shadow, from what its issuer has seen."""
        number = int(self.counter[0])
        self.counter[0] = number + 1
        if number % 32 == 0:  # reuse of old numbers: nobody may seem to know the new ones
            k = number % sh.OPS // 32
            for clock in self.clocks:
                clock[2 * self.slots + k] = clock[2 * self.slots + WORDS + k] = 0
            for warp in self.agents.values():
                warp.issued[k] = warp.copies[k] = 0
        op.number, op.instruction = number, op.warp.instruction()
        self.operations[number] = op
        self.operations.pop(number - sh.OPS, None)
        w = op.warp
        bit = number % sh.OPS
        word, mask = bit // 32, np.uint32(1 << bit % 32)
        op.publishes = np.zeros(2 * self.slots + 2 * WORDS, np.uint32)
        bits = op.publishes[2 * self.slots : 2 * self.slots + WORDS]
        bits[word] = mask
        if op.kind == "tcgen05.commit":
            op.publishes[:] = w.clock
            bits |= w.issued
            self.tick(w)
            return
        if op.kind == "cp.async arrival":
            bits |= w.copies
            return
        if op.kind in TENSOR:
            w.issued[word] |= mask
        generic = op.kind == "cp.async"
        if generic:
            w.copies[word] |= mask
        base = w.clock.ctypes.data
        known = base + 8 * self.slots
        fenced = known if generic else known + 4 * WORDS
        pc = w.pc
        for write, regions in ((0, op.reads), (1, op.writes)):
            for region in regions:
                if region[0] == "shared":
                    _, cta, low, high = region
                    # The order of writes behind reads needs no proxy fence: the reads are over when they are signalled.
                    seen = base if write or generic else base + 4 * self.slots
                    self.module.asynchronous(cta.shadow.ctypes.data, self.warps, cta.slot0, low, high, write, number,
                                             sh.GENERIC_COPY if generic else sh.ASYNC, seen, known, fenced,
                                             self.races.ctypes.data, pc)
                elif region[0] == "tmem":
                    self.tensor_access(op, region, bool(write))
        if self.races[0]:
            self.collect(w, op)

    def observe(self, w, op) -> None:
        """A wait of the issuing thread says that op is complete."""
        number = op.number
        if number:
            bit = number % sh.OPS
            w.clock[2 * self.slots + bit // 32] |= np.uint32(1 << bit % 32)

    def knows(self, w, number: int) -> bool:
        if int(self.counter[0]) - number >= sh.OPS - 64:
            return True
        bit = number % sh.OPS
        return bool(w.clock[2 * self.slots + bit // 32] >> np.uint32(bit % 32) & 1)

    def access(self, w, cta, low: int, high: int, write: bool) -> None:
        """A macro-operation of the warp reads or writes bytes [low, high) of a shared memory, generic proxy."""
        if cta is w.cta:
            self.module.span(w.state, low, high, write, w.pc)
        elif write:  # into a peer: remember the writer; what it overwrote is not compared
            record = cta.shadow.reshape(-1, sh.FIXED + 2 * self.warps)[low // 4 : -(-high // 4)]
            slot = w.cta.slot0 + w.index
            record[:, 0], record[:, 1], record[:, 2], record[:, 3] = slot + 1, w.clock[slot], w.pc, 15
        if self.races[0]:
            self.collect(w)

    # ---- tensor memory -----------------------------------------------------------------------------------------

    def tensor_access(self, op, region, write: bool) -> None:
        """region: ('tmem', cta, first column, end column[, lanes as a mask of groups of 16])."""
        _, cta, low, high, *lanes = region
        groups = lanes[0] if lanes else (1 << LANE_GROUPS) - 1
        shadow = self.tmem.setdefault(id(cta.sm), TensorShadow())
        rows = [g for g in range(LANE_GROUPS) if groups >> g & 1]
        w = op.warp
        window = np.ix_(rows, range(low, high))
        others = {(int(n), "wrote") for n in np.unique(shadow.writer[window]) if n}
        if write:
            for ring in shadow.readers:
                others |= {(int(n), "read") for n in np.unique(ring[window]) if n}
        for number, did in sorted(others):
            other = self.operations.get(number)
            if other is None or other is op or self.knows(w, number) or self.in_order(other, op):
                continue
            where = f"tensor memory columns {low} to {high - 1}"
            self.add_race(self.party(w, op, f"{'writes' if write else 'reads'} {where}"),
                          self.party(other.warp, other, f"{did} {where}"), "tensor memory", other)
        if write:
            shadow.writer[window] = op.number
        else:
            shadow.readers[1][window] = shadow.readers[0][window]
            shadow.readers[0][window] = op.number

    def in_order(self, old, new) -> bool:
        """Pairs that one warp issues and the hardware keeps in order (PTX 9.4, facts of tcgen05 pipelines)."""
        if old.warp is not new.warp:
            return False
        if old.footprint is not None and new.footprint is not None:
            from softsm.isa.tensor_copy import pipelined

            return pipelined(old.footprint, new.footprint)
        return (old.kind, new.kind) in IN_ORDER

    # ---- findings ----------------------------------------------------------------------------------------------

    def collect(self, w, op=None) -> None:
        """Turn the compiled code's findings into diagnostics."""
        n = int(self.races[0])
        entries = self.races[1 : 1 + n * sh.RACE_FIELDS].reshape(n, sh.RACE_FIELDS).tolist()
        self.races[0] = 0
        for kind, place, address, pc, agent, epoch, other_pc, lane in entries:
            where = f"shared bytes {address:#x} to {address + 3:#x}" if place == 0 else f"global bytes {address:#x} to {address + 3:#x}"
            verb = "writes" if kind in (sh.WAW, sh.WAR) else "reads"
            this = self.party(w, op, f"{verb} {where}", pc=pc, lane=lane)
            if kind == sh.UNINITIALISED:
                self.report.add(Diagnostic("uninitialised", f"{where.split(' 0x')[0]} are read, but nobody wrote them", (this,),
                                           "write the bytes, or wait for the copy that brings them, before reading"))
                continue
            did = "read" if kind == sh.WAR else "wrote"
            if agent >= sh.ASYNC:
                other_op = self.operations.get(epoch)
                other = self.party(other_op.warp, other_op, f"{did} {where}") if other_op else Party("an earlier operation")
            else:
                other_op = None
                other = self.party(self.agents[agent], None, f"{did} {where}", pc=other_pc)
            self.add_race(this, other, "global memory" if place else "shared memory", other_op)

    def add_race(self, this: Party, other: Party, memory: str, other_op) -> None:
        if other_op is not None:
            mend = f"wait for the {other_op.kind} to complete (its mbarrier, group wait or tcgen05.wait) before this access"
        elif this.who.startswith("warp"):
            mend = "put a barrier, or an mbarrier arrive and wait, between the two"
        else:
            mend = "order them by a barrier, and put fence.proxy.async between the generic write and the asynchronous access"
        self.report.add(Diagnostic("race", f"two accesses of {memory} are not ordered", (this, other), mend))

    def party(self, w, op, what: str, pc: int | None = None, lane: int = -1) -> Party:
        program = self.machine.program
        ins = program.instructions[w.pc if pc is None else pc]
        if op is not None and pc is None:
            ins = op.instruction or ins
        loc = ins.loc
        source = f"{loc.file}:{loc.line}" + (f" in {loc.function}" if loc.function else "") if loc else ""
        who = f"{op.kind} issued by {w}" if op is not None else str(w) + (f", lane {lane}" if lane >= 0 else "")
        return Party(who, ins.line, ins.text, source, what)


class TensorShadow:
    """Last writer and last two readers of each column of each group of 16 lanes, as operation numbers."""

    def __init__(self) -> None:
        self.writer = np.zeros((LANE_GROUPS, COLUMNS), np.int64)
        self.readers = [np.zeros((LANE_GROUPS, COLUMNS), np.int64) for _ in range(2)]
