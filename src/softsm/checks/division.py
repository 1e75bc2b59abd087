"""Races between CTAs that ran in different processes (engine/division.py).

Each process checks its own CTAs against each other, and against all that was done before the launch was divided. What
is left are words of global memory that two processes have touched since: at the end the first process compares the
records that stand in both shadows.
"""

from __future__ import annotations

import numpy as np

from softsm.checks import shadow as sh
from softsm.checks.findings import BETWEEN_CTAS
from softsm.report.diagnostics import Diagnostic, Party

WRITER, READERS = 0, (4, 7)  # first fields of the accesses in a record: agent, epoch, pc
BYTES, READ = 15, 16  # flags of a word: bytes written, read
MOST = 1 << 20  # words that are compared; there are few pairs of places among them


class DividedAccesses:
    """The part of the checker that knows what happened since the launch was divided."""

    def __init__(self, checker):
        self.checker, self.memory = checker, checker.memory
        self.number = int(checker.order.newest[0])
        self.epochs = np.zeros(checker.order.slots, np.uint32)  # accesses up to these are older; 0: none of them is
        self.resident = {w.view.slot for cta in checker.machine.live for w in cta.warps}
        for agent, w in checker.agents.items():
            if agent - 1 not in self.resident:
                self.epochs[agent - 1] = w.view.clock[agent - 1]

    def abandon(self, cta) -> None:
        """The CTA goes on elsewhere."""
        for w in cta.warps:
            self.epochs[w.view.slot] = w.view.clock[w.view.slot]

    def touched(self) -> np.ndarray:
        """uint8 for each word of the shadows, one after the other: what this process did to it."""
        flags = [np.zeros(s.size // sh.GLOBAL_RECORD, np.uint8) for s in self.memory.touched.shadows]
        for shadow, out in zip(self.memory.touched.shadows, flags):
            self.memory.spans.touched_words(
                shadow.ctypes.data, out.size, self.epochs.ctypes.data, self.number, out.ctypes.data
            )
        return np.concatenate(flags) if flags else np.zeros(0, np.uint8)

    def records(self, words: np.ndarray) -> np.ndarray:
        """uint32 [words, GLOBAL_RECORD + 1]: the records, without accesses older than the division, and the word."""
        out = np.zeros((len(words), sh.GLOBAL_RECORD + 1), np.uint32)
        first = 0
        allocations = self.memory.global_memory.allocations
        for shadow, a in zip(self.memory.touched.shadows, allocations):
            table = shadow.reshape(-1, sh.GLOBAL_RECORD)
            here = np.flatnonzero((words >= first) & (words < first + len(table)))
            at = words[here] - first
            out[here, :-1] = table[at]
            for k in range(4):  # an allocation may begin and end within a word
                place = at * 4 + k - (a.start & 3)
                inside = (place >= 0) & (place < a.size)
                out[here[inside], -1] |= a.bytes[place[inside]].astype(np.uint32) << np.uint32(8 * k)
            first += len(table)
        for field in (WRITER, *READERS):
            agent, epoch = out[:, field].astype(np.int64), out[:, field + 1]
            old = np.where(agent >= sh.ASYNC, epoch < self.number, True)
            warps = (agent > 0) & (agent < sh.ASYNC)
            old[warps] = epoch[warps] <= self.epochs[agent[warps] - 1]
            out[old, field] = 0
        return out

    def answer(self, question):
        """What another process wants to know: records of words, or accesses in words."""
        if isinstance(question, np.ndarray):
            return self.records(question)
        return [self.party(*access) for access in question]

    def party(self, agent: int, epoch: int, pc: int, lane: int, what: str) -> Party:
        findings = self.checker.findings
        if agent < sh.ASYNC:
            return findings.party(self.checker.agents[agent], None, what, pc=pc, lane=lane)
        op = self.checker.operations.by_number.get(epoch)
        return Party("an earlier operation", what=what) if op is None else findings.party(op.warp, op, what)

    def compare(self, theirs: np.ndarray, child) -> None:
        """theirs: `touched` of a process. Every pair of places that met in a word becomes one finding."""
        mine = self.touched()
        self.memory.touched.elsewhere.append(theirs)
        either = (mine & BYTES & theirs) | (np.where(mine & BYTES, theirs, 0) & READ)
        either |= np.where(theirs & BYTES, mine, 0) & READ
        words = np.flatnonzero(either)[:MOST]
        if not len(words):
            return
        ours, others = self.records(words), child.ask(words)
        for a, b in ((WRITER, WRITER), *((WRITER, r) for r in READERS), *((r, WRITER) for r in READERS)):
            met = (ours[:, a] > 0) & (others[:, b] > 0)
            if a == b == WRITER:
                met &= (ours[:, 3] & others[:, 3] & BYTES) > 0
            where = np.flatnonzero(met)
            pcs = np.stack([ours[where, a + 2], others[where, b + 2]], 1) & np.uint32(~sh.READ_SEVERAL & 0xFFFFFFFF)
            if a == b == WRITER:  # of each pair of places one where the values differ, if there is one
                both = ours[where, 3] & others[where, 3] & BYTES
                differ = self.differ(ours[where, -1], others[where, -1], both)
                order = np.argsort(~differ, kind="stable")
                where, pcs, differ = where[order], pcs[order], differ[order]
            for k in np.unique(pcs, axis=0, return_index=True)[1]:
                if a == b == WRITER and not differ[k] and self.harmless(ours[where[k]], others[where[k]], *pcs[k]):
                    continue
                self.report(words[where[k]], ours[where[k]], a, others[where[k]], b, pcs[k].tolist(), child)

    @staticmethod
    def differ(a: np.ndarray, b: np.ndarray, touched: np.ndarray) -> np.ndarray:
        """Do the words differ in these bytes?"""
        mask = sum(((touched >> np.uint32(k) & np.uint32(1)) * np.uint32(255)) << np.uint32(8 * k) for k in range(4))
        return ((a ^ b) & mask) != 0

    def harmless(self, ours: np.ndarray, others: np.ndarray, pc: int, other: int) -> bool:
        """Warps that store equal values are no race worth an error; at the strict level, if one statement made them."""
        findings = self.checker.findings
        alike = pc == other or not findings.strict or findings.one_statement(pc, other)
        return alike and max(ours[WRITER], others[WRITER]) < sh.ASYNC

    def report(self, word: int, ours, a: int, others, b: int, pcs: list[int], child) -> None:
        place = f"global bytes {self.address(word):#x} to {self.address(word) + 3:#x}"
        this = self.party(*self.access(ours, a, pcs[0]), f"{'writes' if a == WRITER else 'reads'} {place}")
        other, = child.ask([(*self.access(others, b, pcs[1]), f"{'wrote' if b == WRITER else 'read'} {place}")])
        self.checker.report.add(
            Diagnostic("race", "two accesses of global memory are not ordered", (this, other), BETWEEN_CTAS)
        )

    @staticmethod
    def access(record, field: int, pc: int) -> tuple[int, int, int, int]:
        """(agent, epoch, pc, lane)."""
        several = field != WRITER or int(record[3]) & sh.SEVERAL
        lane = -1 if several else int(record[3]) >> sh.LANE & 63
        return int(record[field]), int(record[field + 1]), pc, lane if lane < 32 else -1

    def address(self, word: int) -> int:
        for start, shadow in zip(self.memory.touched.origins, self.memory.touched.shadows):
            words = shadow.size // sh.GLOBAL_RECORD
            if word < words:
                return start + 4 * int(word)
            word -= words
        raise IndexError(word)
