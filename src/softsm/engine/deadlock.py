"""Detects deadlocks.

There are three kinds:

* Every warp is blocked, and nothing is in flight (`time_out`; a wait with a time limit may first return false).
* Every warp that can run polls alone: it uses whole quanta without a change of memory, and returns to the same pc with
  the same registers, but for those that decide nothing (`spinning`; engine/polling.py).
* Warps poll together: those of a CTA read a flag, meet at a bar.sync, and read it again (`turn`). No warp returns to
  its state without the others, and each round stores to shared memory, so the state of the whole machine is compared:
  registers, program counters and memory repeat after the same number of turns. The first comparison takes place after
  PATIENCE turns in which no asynchronous operation completes and no warp exits, each later one after twice as many.
  States are compared when a certain warp is next, so that a round may have any number of warps. Meanwhile the warps run
  in a fixed order, so a state that repeats once repeats for ever.

A loop may also end by a limit of time: DeepGEMM's barriers read the clock, and trap. If such loops, and waits with a
time limit, are all that runs, nothing but the clock changes, and it is put forward (`skip_time`), further each time.

Other endless loops, such as one that counts in memory, end when the launch runs out of patience (`out_of_patience`).
engine/deadlock_text.py describes a deadlock.
"""

from __future__ import annotations

import zlib
from typing import NoReturn

import numpy as np

from softsm.engine import program as pg
from softsm.engine.deadlock_text import POLLING, describe, going_on
from softsm.engine.polling import deciding
from softsm.errors import Deadlock, StepBudget

PATIENCE = 4096  # turns of warps
ROUND = 256  # the most turns of one warp in a round
OPERATION = 5000  # instructions of compiled code that take about as long as one that Python handles
FIRST_SKIP, LAST_SKIP = 1 << 12, 1 << 44  # nanoseconds by which the clock is put forward
ON, AGAIN, BY_TIME = range(3)  # what `comes_back` returns
AWAY = 8  # turns of all warps, times their number, after which another warp is compared


class DeadlockWatch:
    def __init__(self, machine) -> None:
        self.machine = machine
        self.timed_out_at, self.clock = -1, 0  # changes of memory, and the clock, when the last waits timed out
        self.skip = FIRST_SKIP
        self.seen_writes = -1  # changes of memory when a warp last used up several quanta
        self.turns, self.progress = 0, 0
        self.next = PATIENCE
        self.shuffle = machine.shuffle
        self.seen: dict[int, int] = {}  # fingerprint -> turn
        self.marker, self.met = None, 0  # states are compared when this warp is next; its last turn
        self.due = 0  # the turn that ends a round, when the state must repeat
        self.expected: tuple[int, int] = (0, 0)
        self.longest = 0  # turns without progress
        self.began = 0  # operations at the last progress
        self.pushes = 0  # number of times that blocked warps continued because of a timeout

    def found(self, why: str) -> NoReturn:
        raise Deadlock(describe(self.machine, why))

    # ---- everybody is blocked ----------------------------------------------------------------------------------

    def time_out(self) -> None:
        """Acts when no warp can run and nothing is in flight. A wait with a time limit (try_wait) may return false,
        after which the program may change something. If nothing has changed since the last timeout, this is a
        deadlock.
        """
        machine = self.machine
        changes = sum(int(w.S[pg.S_WRITES]) for c in machine.live for w in c.warps)
        changes += machine.writes + machine.engine.completed
        blocked = (f for c in machine.live for w in c.warps for f in w.fragments if f.blocked is not None)
        late = [f for f in blocked if f.blocked.limited]
        if changes != self.timed_out_at:
            self.skip = FIRST_SKIP
        elif machine.clock != self.clock:
            self.skip_time("no warp can make progress")
        else:
            late = []
        if not late:
            self.found("no warp can make progress")
        self.timed_out_at, self.clock = changes, machine.clock
        self.pushes += 1
        for f in late:
            f.blocked.on.waiters.remove(f)
            f.timed_out = True
            f.warp.S[pg.S_PHASES] = 0  # Python must handle its next wait
            f.unblock()

    def skip_time(self, why: str) -> None:
        """Nothing but the clock changes, on which the program depends."""
        if self.skip > LAST_SKIP:
            self.found(why)
        self.machine.clock += self.skip
        self.skip *= 8

    def given_up(self) -> None:
        """A warp executes trap. Reports a deadlock if its limit of time was all that could end its wait."""
        if self.skip > FIRST_SKIP:
            self.found("a wait ends by the kernel's own limit of time (trap), and nothing else would have ended it")

    # ---- warps that poll, each by itself -----------------------------------------------------------------------

    def quantum_used(self, warp) -> None:
        """Notes that a warp has run for a whole quantum."""
        changes = int(warp.S[pg.S_WRITES])
        if changes:
            self.machine.writes += changes
            warp.S[pg.S_WRITES] = 0
            warp.spins = 0
        else:
            warp.spins += 1
        self.machine.make_ready(warp)

    def spinning(self) -> None:
        """Checks whether all warps that can run have used whole quanta without a change of memory, like this one."""
        machine, engine = self.machine, self.machine.engine
        for w in machine.ready:
            machine.writes += int(w.S[pg.S_WRITES])
            w.S[pg.S_WRITES] = 0
        changes = machine.writes + engine.completed
        before, self.seen_writes = self.seen_writes, changes
        if changes != before:
            self.skip = FIRST_SKIP
        if changes != before or not all(w.spins > 1 for w in machine.ready):
            return
        self.pushes += 1
        if engine.pending:
            engine.complete_awaited()
        else:
            loops: set[int] = set()
            for w in machine.ready:
                loops.update(self.polls(w))
                if ON in loops:
                    break
            if loops == {AGAIN}:
                self.found(POLLING)
            if ON not in loops:
                self.skip_time(POLLING)
        for w in machine.ready:
            w.spins = 0

    def polls(self, warp) -> list[int]:
        """Returns how the loops of the warp's fragments go on, ON if there is none."""
        able = [f for f in warp.fragments if f.blocked is None and not f.parked]
        return [self.comes_back(warp, f) for f in able] or [ON]

    def comes_back(self, warp, f) -> int:
        """Runs one iteration of a fragment's loop and compares the state: AGAIN if it returns to the same pc with the
        same registers, BY_TIME if they differ and it has read the clock, else ON. The fragment continues from there."""
        machine = self.machine
        before = {"R": warp.R.copy(), "Q": warp.Q.copy(), "P": warp.P.copy()}
        start, changes, clock = f.pc, machine.writes, machine.clock
        first = last = start
        warp.fragment = f
        for _ in range(4096):
            status, pc, mask, lanes, steps = machine.run_code(warp.state, f.pc, f.mask, 1 << 30, 1, 0)
            machine.steps += steps
            first, last = min(first, f.pc), max(last, f.pc + max(steps, 1) - 1)
            if mask != f.mask:  # lanes would exit, which is not handled here
                f.pc = warp.pc = pc - 1 if status == pg.MERGE else pc
                return ON
            f.pc = warp.pc = pc
            if status == pg.MACRO:
                machine.execute(warp, f, pc, lanes)
                if f.blocked is not None or f.parked:
                    return ON
            elif status == pg.SLOW_MEMORY:
                warp.cta.kernel.memory_event(machine, warp, f, status, lanes)
            elif status != pg.QUANTUM:
                return ON
            if f.pc == start:
                if warp.S[pg.S_WRITES] or changes != machine.writes:
                    return ON
                now = {"R": warp.R, "Q": warp.Q, "P": warp.P}
                if clock == machine.clock and all(np.array_equal(before[file], now[file]) for file in now):
                    return AGAIN
                decide = deciding(warp.cta.program, first, last)
                if decide is not None and all(
                    np.array_equal(before[file][row], now[file][row]) for file, row in decide
                ):
                    return AGAIN
                return ON if clock == machine.clock else BY_TIME
        return ON

    # ---- warps that poll together ------------------------------------------------------------------------------

    def turn(self) -> None:
        """Called for each turn of a warp."""
        self.turns += 1
        engine = self.machine.engine
        progress = engine.completed + self.machine.exits
        if progress != self.progress:
            self.longest = max(self.longest, self.turns)
            self.turns, self.progress, self.began = 0, progress, self.operations()
            self.look_later(PATIENCE)
        elif 0 < self.machine.options.patience < self.operations() - self.began:
            self.out_of_patience()
        if self.turns < self.next:
            return
        if engine.pending:  # complete it now: warps have waited long enough
            engine.complete_awaited()
        else:
            self.look()

    def operations(self) -> int:
        """Returns a measure of the work so far that does not depend on the load of this computer."""
        return self.machine.entries + self.machine.steps // OPERATION

    def out_of_patience(self) -> NoReturn:
        """Ends a launch that goes on for long. Memory changes, so it may be no deadlock; options.patience is the
        limit.
        """
        why = (
            f"no warp has ended and no asynchronous operation has completed in {self.machine.options.patience} "
            "operations (--patience)"
        )
        raise StepBudget(going_on(self.machine, why))

    def look_later(self, turn: int) -> None:
        self.next, self.due = turn, 0
        self.marker = None
        self.seen.clear()
        self.machine.shuffle = self.shuffle

    def look(self) -> None:
        self.machine.shuffle = False
        following = next(iter(self.machine.ready), None)
        if self.marker is None or self.turns - self.met > AWAY * sum(len(c.warps) for c in self.machine.live):
            self.marker, self.due = following, 0
            self.seen.clear()
        if self.marker is not following:
            return
        self.met = self.turns
        if self.turns < self.due:
            return
        state = self.fingerprint()
        if self.due:
            late, self.due = self.turns > self.due, 0
            if late:
                return
            if (state, self.memory()) == self.expected:
                self.found(POLLING)
        elif state in self.seen:
            self.due = self.turns + self.turns - self.seen[state]
            self.expected = state, self.memory()
            self.seen.clear()
            return
        self.seen[state] = self.turns
        if len(self.seen) > ROUND:
            self.look_later(2 * self.turns)

    def fingerprint(self) -> int:
        """Hashes the registers, program counters and shared memory of all warps, and the warp to run next."""
        value = zlib.crc32(repr([id(w) for w in self.machine.ready]).encode())
        for cta in self.machine.live:
            value = zlib.crc32(cta.shared, value)
            for w in cta.warps:
                places = [(f.pc, f.mask, f.parked, f.blocked is not None) for f in w.fragments]
                value = zlib.crc32(repr(places).encode(), value)
                for registers in (w.R, w.Q, w.P):
                    value = zlib.crc32(registers, value)
        return value

    def memory(self) -> int:
        value = self.machine.left
        for allocation in self.machine.global_memory.allocations:
            value = zlib.crc32(allocation.bytes, value)
        for sm in self.machine.sms:
            if sm.tmem is not None:
                value = zlib.crc32(sm.tmem.cells, value)
        return value
