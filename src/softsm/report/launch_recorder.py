"""The observer (engine/observer.py) that records a launch: it turns events into slices, waits and arrivals.

    with recording() as recorder:
        kernel[grid](...)
    recorder.slices, recorder.flows, recorder.barriers, ...

report/recording.py describes the clocks and the cost of operations.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator

from softsm.engine.in_flight import AsyncOp
from softsm.engine.observer import Observer
from softsm.engine.options import Session, observing
from softsm.engine.scheduler import Machine
from softsm.engine.warps import Warp
from softsm.errors import Deadlock, Fault
from softsm.memory import swizzle
from softsm.memory.mbarrier import Mbarrier
from softsm.ptx.cplusplus import readable
from softsm.ptx.roles import role_of
from softsm.report.recording import (
    ENGINES,
    GAP,
    MAX_CTAS,
    MAX_SLICES,
    Barrier,
    Buffer,
    Clock,
    Launch,
    Recorder,
    Track,
    macs,
    place,
    volume,
)
from softsm.timing_model.engines import MACS, engines_of


class Recording(Session):
    """Records launches, all in one recorder."""

    one_gpu = needs_values = True

    def __init__(self) -> None:
        self.recorder = Recorder()

    def observer(self, machine: Machine) -> LaunchRecorder:
        return LaunchRecorder(machine, self.recorder)


class LaunchRecorder(Observer):
    follows = True

    def __init__(self, machine: Machine, recorder: Recorder):
        self.machine, self.recorder = machine, recorder
        self.engines = engines_of(machine.arch)
        self.recorder.model = str(self.engines)
        self.times: dict[int, tuple[int, int, AsyncOp]] = {}  # id(op) -> end, slice, op
        self.queues: dict[tuple[int, str], int] = {}
        self.lanes: dict[tuple[int, str], list[int]] = defaultdict(
            list
        )  # end of the last slice on each row of an engine
        self.clocks: dict[Warp, Clock] = {}
        self.numbers: dict[object, int] = {}
        self.free_at: dict[int, int] = {}  # SM -> when its last CTA ended
        self.arrivals: dict[object, int] = {}  # what warps wait for -> latest arrival
        self.known: dict[Mbarrier, Barrier] = {}
        self.over: Mbarrier | None = None  # the mbarrier whose phase the current instruction found complete
        self.mark = 0
        r, kernel = self.recorder, machine.kernel
        start = r.launches[-1].end + GAP if r.launches else 0
        sizes = {v.name: v.size for v in (*kernel.module.variables, *kernel.function.variables)}
        places = {n: (at, sizes.get(n, 0)) for n, at in machine.program.shared_variables.items()}
        self.record = Launch(
            readable(kernel.name),
            machine.arch,
            machine.grid,
            machine.block,
            machine.cluster_shape,
            machine.shared_limit,
            machine.options.order,
            kernel.module.source,
            start,
            start,
            variables=places,
        )
        self.index = len(r.launches)
        r.launches.append(self.record)

    # ---- clocks ------------------------------------------------------------------------------------------------

    def cta_began(self, cta) -> None:
        self.number(cta)

    def number(self, cta) -> int:
        found = self.numbers.get(cta)
        if found is None:
            found = self.numbers[cta] = len(self.numbers)
            self.record.ctas.append(cta.ctaid)
        return found

    def warp_clock(self, warp) -> Clock:
        found = self.clocks.get(warp)
        if found is None:
            track = Track(self.index, self.number(warp.cta), "warp", warp.index)
            start = self.free_at.get(warp.cta.sm.index, self.record.start)
            found = self.clocks[warp] = self.recorder.clocks[track] = Clock(track, start)
        return found

    def flush(self, warp) -> Clock:
        """Charges the instructions executed since the last call to this warp."""
        clock = self.warp_clock(warp)
        steps, self.mark = self.machine.steps - self.mark, self.machine.steps
        if steps:
            if clock.run_start < 0:
                clock.run_start = clock.time
                clock.run_steps = 0
                clock.run_place = place(warp.machine.program.instructions[warp.pc])
            clock.time += steps
            clock.run_steps += steps
            clock.instructions += steps
        return clock

    def draw(self, clock: Clock, name: str, start: int, end: int, kind: str, **details) -> int:
        """Adds a slice to a warp's track. Slices of one track never overlap, even if the warp's fragments alternate."""
        start = max(start, clock.drawn)
        if end <= start:
            return -1
        clock.drawn = end
        return self.recorder.add(clock.track, name, start, end, kind, **details)

    def close_run(self, clock: Clock) -> None:
        if clock.run_start >= 0:
            self.draw(clock, f"{clock.run_steps} instructions", clock.run_start, clock.time, "run", at=clock.run_place)
            clock.run_start = -1

    def turn_began(self, warp) -> None:
        self.mark = self.machine.steps

    def turn_ended(self, warp) -> None:
        self.flush(warp)

    def warp_ended(self, warp) -> None:
        clock = self.flush(warp)
        self.close_run(clock)
        sm = warp.cta.sm.index
        self.free_at[sm] = max(self.free_at.get(sm, 0), clock.time)
        self.record.end = max(self.record.end, clock.time)

    def ended(self, failure: BaseException | None) -> None:
        stuck = isinstance(failure, Deadlock)
        for clock in self.clocks.values():
            self.close_run(clock)
        times = [clock.time for clock in self.clocks.values()]
        self.record.end = max([self.record.end, *times, *self.queues.values()])
        if stuck or any(clock.waiting for clock in self.clocks.values()):
            self.record.end += 1 + self.record.end // 10  # room for operations that never ended
        for warp, clock in self.clocks.items():
            for start, ins, _, on in clock.waiting.values():
                self.draw(clock, f"waits forever: {on}", start, self.record.end, "wait", at=place(ins))
            if stuck and warp.fragments and not clock.waiting:
                ins = self.machine.program.instructions[warp.fragments[0].pc]
                self.draw(clock, "polls forever", clock.time, self.record.end, "wait", at=place(ins))
        self.record.steps = self.machine.steps
        for a in self.recorder.allocations:
            if a[0] == self.index and a[4] < 0:
                a[4] = self.record.end

    # ---- macro-operations --------------------------------------------------------------------------------------

    def executing(self, warp, fragment, call, lanes: int) -> None:
        clock = self.flush(warp)
        ins = call.instruction
        name = ins.name
        self.over = None
        if fragment in clock.waiting:  # this is a retry
            clock.run_start = -1
        if not clock.role:
            clock.role = role_of(ins)
            if clock.role:
                self.recorder.named.add(self.index)
        if name.startswith("wgmma.mma_async"):
            clock.macs += macs(ins.text)
        if name.startswith(("tcgen05.mma", "wgmma.mma_async")):
            self.note_operands(warp, call, lanes)

    def executed(self, warp, fragment, call, lanes: int) -> None:
        clock, ins = self.warp_clock(warp), call.instruction
        name = ins.name
        self.recorder.lines[self.index, ins.line] += 1
        blocked = fragment.blocked
        if blocked is not None:
            if fragment not in clock.waiting:
                self.close_run(clock)
                clock.waiting[fragment] = (clock.time, ins, blocked.on, str(blocked.text))
            self.arrivals[blocked.on] = max(self.arrivals.get(blocked.on, 0), clock.time)
            return
        if self.over is not None:
            self.passes(clock, fragment, ins, self.over)
        elif name.startswith(("tcgen05.alloc", "tcgen05.dealloc")):
            self.note_allocations(warp.cta, clock.time)
        elif name.startswith("wgmma.wait_group"):
            self.wait_group(clock, clock.groups, call.operands.keep, ins)
        elif name.startswith("cp.async.bulk.wait_group"):
            self.wait_group(clock, clock.stores, getattr(call.operands, "newest", 0) or 0, ins)

    def wait_group(self, clock: Clock, ends: list[int], keep: int, ins) -> None:
        if len(ends) > keep and ends[-1 - keep] > clock.time:
            self.close_run(clock)
            end = ends[-1 - keep]
            self.draw(clock, ins.name, clock.time, end, "wait", at=place(ins))
            clock.time = end

    def woken(self, warp) -> None:
        """Ends the waits of a warp that the performed operation or the running warp has woken."""
        clock = self.warp_clock(warp)
        for f in [f for f in clock.waiting if f.blocked is None]:
            start, ins, on, text = clock.waiting[f]
            if ins.opcode == "mbarrier":
                continue  # this is a retry; only now is it known that the phase has ended
            del clock.waiting[f]
            end = max(start, self.cause_time(), self.arrivals.get(on, 0), clock.time)
            running = self.machine.current
            if self.machine.engine.performing is None and running is not None and ins.opcode in ("bar", "barrier"):
                self.warp_clock(running).time = end  # the last to arrive in this run need not be the last in time
            self.draw(clock, f"{ins.name}", start, end, "wait", at=place(ins), wait=text)
            clock.time = max(clock.time, end)

    def cause_time(self) -> int:
        op, running = self.machine.engine.performing, self.machine.current
        if op is not None and id(op) in self.times:
            return self.times[id(op)][0]
        return self.warp_clock(running).time if running is not None else 0

    def passes(self, clock: Clock, fragment, ins, barrier: Mbarrier) -> None:
        info = self.known.get(barrier)
        start = clock.waiting.pop(fragment, (clock.time,))[0]
        if info is None:
            return
        end = max(start, clock.time, info.ended)
        info.waiters.add(clock.track)
        info.waited += end - start
        self.close_run(clock)
        number = self.draw(
            clock, f"wait {info.name}", start, max(end, start + 1), "wait", at=place(ins), phase=barrier.phase - 1
        )
        self.recorder.flow(info.ended_cause, number)
        clock.time = max(end, start + 1)

    # ---- mbarriers ---------------------------------------------------------------------------------------------

    def barrier_initialised(self, warp, barrier: Mbarrier, old: Mbarrier | None, cta, offset: int) -> None:
        name = barrier.name.removeprefix("mbarrier ")
        info = Barrier(self.index, self.number(cta), name, offset, barrier.expected, warp.line())
        self.known[barrier] = info
        self.recorder.barriers.append(info)

    def passed(self, warp, barrier: Mbarrier, relaxed: bool, scope: str) -> None:
        self.over = barrier

    def arrived(self, barrier: Mbarrier, what: str, amount: int, relaxed: bool = False, scope: str = "") -> None:
        info = self.known.get(barrier)
        if info is None:
            return
        op, running = self.machine.engine.performing, self.machine.current
        if op is not None and id(op) in self.times:
            time, cause, _ = self.times[id(op)]
            track = self.engine_track(op)
        else:
            assert running is not None
            clock = self.warp_clock(running)
            time, track = clock.time, clock.track
            self.close_run(clock)
            details = {"at": place(running.instruction()), "amount": amount}
            cause = self.draw(clock, f"{what} {info.name}", time, time + 1, "arrive", **details)
            clock.time += 1
        if what == "complete_tx":
            info.bytes += amount
        elif what in ("arrive", "drop"):
            info.arrivals += amount
        info.arrivers.add(track)
        if time >= info.time:
            info.time, info.cause = time, cause

    def phase_ended(self, barrier: Mbarrier) -> None:
        info = self.known.get(barrier)
        if info is not None:
            info.phases += 1
            info.ended, info.ended_cause = info.time, info.cause

    # ---- asynchronous operations -------------------------------------------------------------------------------

    def issued(self, op: AsyncOp) -> None:
        warp = op.warp
        clock = self.flush(warp) if warp is self.machine.current else self.warp_clock(warp)
        moved = volume(op)
        count = self.recorder.operations[clock.track, op.kind]
        count[0] += 1
        count[1] += moved
        clock.deeds.add("tmem" if op.kind in ("tcgen05.ld", "tcgen05.st") else op.kind)
        self.note_buffers(op)
        if op.kind in ("tcgen05.ld", "tcgen05.st"):
            self.close_run(clock)
            end = clock.time + self.engines.tensor_latency + round(moved / (self.engines.tensor_rate or 1))
            self.draw(clock, op.kind, clock.time, end, "tmem", at=place(warp.instruction()), bytes=moved)
            self.note_tensor(op, clock.time, end)
            clock.time = end
            return
        if op.kind == "wgmma result":
            return
        track = self.engine_track(op)
        key = (track.cta, track.kind)
        after = max((self.times[id(x)][0] for x in op.after if id(x) in self.times), default=0)
        ready = max(clock.time, after)
        start = max(ready, self.queues.get(key, 0))
        busy = self.busy(op, clock, moved)
        self.queues[key] = start + busy
        tail = self.engines.tails.get(op.kind.split(".")[0], 0)
        end = start + busy + (self.engines.copy_latency if track.kind != "tensor core" else tail)
        self.close_run(clock)
        ins = warp.instruction()
        cause = self.draw(clock, f"issue {op.kind}", clock.time, clock.time + 1, "issue", at=place(ins))
        kind = "mma" if track.kind == "tensor core" else "copy"
        if op.kind == "tcgen05.commit":
            number = cause
        else:
            details: dict[str, str | int] = {"at": place(ins), "by": self.recorder.track_name(clock.track)}
            if moved:
                details["bytes"] = moved
            end = max(end, start + 1)
            number = self.recorder.add(self.lane(track, start, end), op.kind, start, end, kind, **details)
            self.recorder.flow(cause, number)
        clock.time += 1
        self.note_tensor(op, start, end)
        self.times[id(op)] = (end, number, op)
        if op.kind == "wgmma":
            first = warp.index & ~3
            for w in warp.cta.warps[first : first + 4]:
                self.warp_clock(w).groups.append(end)
        elif "store" in op.kind or "reduction" in op.kind:
            if "(read)" not in op.kind:
                clock.stores.append(end)

    def performed(self, op: AsyncOp) -> None:
        self.times.pop(id(op), None)

    def engine_track(self, op: AsyncOp) -> Track:
        name = next((name for name, kinds in ENGINES.items() if op.kind.startswith(kinds)), "other")
        return Track(self.index, self.number(op.warp.cta), name, 0)

    def lane(self, track: Track, start: int, end: int) -> Track:
        """Returns the first free row, because operations of one engine overlap."""
        ends = self.lanes[track.cta, track.kind]
        index = next((i for i, e in enumerate(ends) if e <= start), len(ends))
        ends[index : index + 1] = [end]
        return track._replace(number=index)

    def busy(self, op: AsyncOp, clock: Clock, moved: int) -> int:
        """Returns the cycles during which the engine accepts no other operation."""
        if op.kind == "tcgen05.mma":
            return max(1, macs(op.warp.instruction().text, op.footprint) // MACS[op.kind])
        if op.kind == "wgmma":
            total, clock.macs = clock.macs, 0
            return max(1, total // MACS[op.kind])
        return round(moved / self.engines.copy_rate)

    def note_tensor(self, op: AsyncOp, start: int, end: int) -> None:
        done = set()
        for what, regions in (("write", op.writes), ("read", op.reads)):
            for region in regions:
                if region[0] == "tmem" and (what, *region[2:4]) not in done:
                    done.add((what, *region[2:4]))
                    kind = f"{op.kind} {what}"
                    number = self.number(region[1])
                    if number < MAX_CTAS and len(self.recorder.tensor) < MAX_SLICES:
                        self.recorder.tensor.append((self.index, number, start, end, region[2], region[3], kind))

    def note_allocations(self, cta, time: int) -> None:
        sm = cta.sm.index
        held = {(a.column, a.columns) for a in cta.tmem.allocations.values() if a.owner is cta}
        number = self.number(cta)
        for a in self.recorder.allocations:
            if a[0] == self.index and a[2] == number and a[4] < 0:
                if (a[5], a[6]) in held:
                    held.discard((a[5], a[6]))
                else:
                    a[4] = time
        for column, columns in held:
            self.recorder.allocations.append([self.index, sm, number, time, -1, column, columns])

    def buffer(self, low: int, high: int) -> Buffer:
        key = (self.index, low, high)
        found = self.recorder.buffers.get(key)
        if found is None:
            found = self.recorder.buffers[key] = Buffer(low, high)
        return found

    def note_buffers(self, op: AsyncOp) -> None:
        if op.kind == "tcgen05.mma" or op.kind == "wgmma":
            return  # note_operands records them more precisely
        mode = ""
        for region in (*op.reads, *op.writes):
            if region[0] == "tensor":
                mode = region[1].map.swizzle.name
        for regions, written in ((op.writes, True), (op.reads, False)):
            for region in regions:
                if region[0] == "shared":
                    b = self.buffer(region[2], region[3])
                    (b.written_by if written else b.read_by).add(op.kind)
                    b.bytes += region[3] - region[2]
                    if mode and mode != "NONE":
                        b.swizzles.add(f"{mode.removeprefix('B').replace('_', ' ')}B swizzle (TMA)")

    def note_operands(self, warp, call, lanes: int) -> None:
        """Records, from a product's descriptors, where its operands lie and how they are swizzled."""
        o, lane = call.operands, (lanes & -lanes).bit_length() - 1
        blackwell = call.instruction.opcode == "tcgen05"
        rows = [("B", o.b)]
        if blackwell and not o.a_tensor:
            rows.append(("A", o.a))
        for name, row in rows:
            try:
                d = swizzle.decode(int(warp.Q[row, lane]), blackwell)
            except Fault:  # the instruction itself reports what is wrong
                continue
            self.recorder.buffers.setdefault((self.index, d.start, d.start), Buffer(d.start, d.start))
            b = self.recorder.buffers[self.index, d.start, d.start]
            b.read_by.add(f"{call.instruction.opcode} {name}")
            if d.mode:
                b.swizzles.add(f"{swizzle.MODE_NAMES[d.mode]} ({name})")


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """Records the launches inside."""
    session = Recording()
    with observing(session):
        yield session.recorder
