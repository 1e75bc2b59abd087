"""Polling that goes through barriers: the warps of a CTA ask for a flag, meet at a bar.sync, and ask again.

No single warp of them comes back to where it was without the others, and each round stores to shared memory, so this is
looked for in the machine as a whole: registers, program counters and memory, after the same number of turns the same as
before. The first look comes after PATIENCE turns in which no asynchronous operation completes and no warp exits, each
later one after twice as many.
While it lasts warps have their turns in order, so that a state that comes back comes back for ever.
"""

from __future__ import annotations

import zlib

PATIENCE = 4096  # turns of warps
ROUND = 256  # at most so many turns make a round


class StallWatch:
    def __init__(self, machine) -> None:
        self.machine = machine
        self.turns, self.progress = 0, 0
        self.next = PATIENCE
        self.shuffle = machine.shuffle
        self.seen: dict[int, int] = {}  # fingerprint -> turn
        self.due = 0  # the turn at which a round is over, and the machine must look as it did
        self.expected: tuple[int, int] = (0, 0)

    def turn(self) -> bool:
        """One warp has its turn. True: nothing will ever change."""
        self.turns += 1
        engine = self.machine.engine
        progress = engine.completed + self.machine.exits
        if progress != self.progress:
            self.turns, self.progress = 0, progress
            self.look_later(PATIENCE)
        if self.turns < self.next:
            return False
        if engine.pending:  # whoever waits for it has waited long enough
            engine.complete_awaited(self.machine.awaited())
            return False
        return self.look()

    def look_later(self, turn: int) -> None:
        self.next, self.due = turn, 0
        self.seen.clear()
        self.machine.shuffle = self.shuffle

    def look(self) -> bool:
        self.machine.shuffle = False
        state = self.fingerprint()
        if self.due:
            if self.turns < self.due:
                return False
            self.due = 0
            if (state, self.memory()) == self.expected:
                return True
        elif state in self.seen:
            self.due = self.turns + self.turns - self.seen[state]
            self.expected = state, self.memory()
            self.seen.clear()
            return False
        self.seen[state] = self.turns
        if len(self.seen) > ROUND:
            self.look_later(2 * self.turns)
        return False

    def fingerprint(self) -> int:
        """Registers, program counters and shared memory of everybody, and whose turn it is."""
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
        return value
