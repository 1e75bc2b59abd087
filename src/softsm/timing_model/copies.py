"""The iterations of a loop in its machine code: ptxas unrolls loops and leaves copies for the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from softsm.timing_model.blocks import Blocks
from softsm.timing_model.costs import lane_bytes
from softsm.timing_model.loops import TARGET
from softsm.timing_model.sass import Code

SHORT = 4  # machine instructions of a block that tries a wait again
LEAST = 6  # instructions of a copy
MANY_PAIRS = 8  # (line, opcode) pairs: fewer are not significant
MANY_TURNS = 3  # the fewest iterations in a block: two may be the halves of a 64-bit value
ACCESSES = ("LDG.", "LD.", "STG", "ST.", "ATOMG", "ATOM.", "RED.", "REDG", "LDS", "STS", "ATOMS")


def bytes_of(opcode: str) -> int:
    """Returns the bytes that a load or store moves per lane, of less than a word too."""
    for size, names in ((1, (".U8", ".S8")), (2, (".U16", ".S16"))):
        if any(name in opcode for name in names):
            return size
    return lane_bytes(opcode)


class Copies:
    """asynchronous: opcodes of what ptxas does not unroll; depths: loops around each machine block."""

    def __init__(self, code: Code, blocks: Blocks, depths: list[int], asynchronous: tuple[str, ...]):
        self.code, self.blocks, self.depths, self.asynchronous = code, blocks, depths, asynchronous
        self.again = self._second_tries()

    def _second_tries(self) -> set[int]:
        """Returns short blocks after an EXIT that test a barrier which earlier code has tested, perhaps with the phase
        in another register."""

        def asks(block: range) -> set[str]:
            made = (self.code.instructions[i] for i in block)
            return {
                ins.text.partition("[")[2].partition("]")[0] for ins in made if ins.opcode.startswith("SYNCS.PHASECHK")
            }

        asked: set[str] = set()
        out: set[int] = set()
        behind = False
        for number, block in enumerate(self.code.blocks):
            asking = asks(block)
            if behind and len(block) <= SHORT and asking and asking <= asked:
                out.add(number)
            asked |= asking
            behind |= self.code.instructions[block[-1]].opcode == "EXIT"
        return out

    def _tried_again(self, numbers: list[int]) -> set[int]:
        """Returns blocks after all other code that only retry a wait. They have the line of the try_wait, the first try
        often a neighbour's; the wait belongs to the first try, or it would follow the code that depends on it."""
        again = self.again & set(numbers)
        tries = sum(
            self.code.instructions[i].opcode.startswith("SYNCS.PHASECHK")
            for number in numbers
            if number not in again
            for i in self.code.blocks[number]
        )
        return again if tries >= len(again) else set()

    def of(self, numbers: list[int]) -> dict[int, np.ndarray]:
        """Maps iteration counts to the instructions that perform them, most iterations first; 1 if not a loop."""
        kept: list[int] = []
        seen: Counter = Counter()
        accessed: set[int] = set()
        left_out: list[int] = []
        again = self._tried_again(numbers)
        if cut := self._cut_copies([n for n in numbers if n not in again]):
            return cut
        for number in (n for n in numbers if n not in again):
            made = [self.code.instructions[i] for i in self.code.blocks[number]]
            lines = Counter(ins.line for ins in made)
            accesses = self._accesses(number).keys()
            new = sum(n for line, n in lines.items() if line not in seen)
            if not kept or new * 4 >= sum(lines.values()) or new >= 12 or accesses - accessed:
                kept.append(number)
                seen.update(lines)
                accessed |= accesses
            else:
                left_out.append(number)
        best = max(kept, key=lambda k: len(self.code.blocks[k]))
        rest = [i for k in kept if k != best for i in self.code.blocks[k]]

        def made_of(block: Iterable[int]) -> np.ndarray:
            return np.array([*rest, *block], np.int32)

        whole = np.array([i for number in kept for i in self.code.blocks[number]], np.int32)
        longer = self.code.blocks[best]
        by_accesses = self._turns_by_accesses(best, left_out)
        if by_accesses:
            return {turns: made_of(block) for turns, block in sorted(by_accesses.items(), reverse=True)}
        copies = [longer]
        for block in (self.code.blocks[number] for number in left_out):
            lines = Counter(self.code.instructions[i].line for i in block)
            shared = sum((Counter(self.code.instructions[i].line for i in longer) & lines).values())
            if shared >= 0.7 * min(len(block), len(longer)) and self._alike(block, longer):
                copies.append(block)
        # ptxas unrolls by four and leaves copies for two iterations and for one: the smallest is one iteration.
        copies.sort(key=len, reverse=True)
        single, longer = copies[-1], copies[0]
        turns_of = [self._counted_turns(block) for block in copies if self.depths[best]]
        counted = {turns: block for turns, block in zip(turns_of, copies) if turns}
        if None not in turns_of and max(counted, default=1) > 1:
            one = {} if 1 in counted else {1: self._first_turn(single)}
            return {turns: made_of(block) for turns, block in sorted((counted | one).items(), reverse=True)}
        if len(longer) >= 1.7 * len(single) and set(turns_of) != {1}:
            return {self._turns(longer, single): made_of(longer), 1: made_of(single)}
        turns = self._copies(longer) if None in turns_of else 1
        if turns >= MANY_TURNS:
            return {turns: whole, 1: made_of(self._first_turn(longer))}
        return {1: whole}

    def _accesses(self, number: int) -> Counter:
        """Counts the memory accesses of a machine block by PTX line."""
        made = (self.code.instructions[i] for i in self.code.blocks[number])
        return Counter(ins.line for ins in made if ins.line and ins.opcode.startswith(ACCESSES))

    def _alike(self, block: range, longer: range) -> bool:
        """Returns whether two blocks do the same: both have some of the loop's accesses or, where it has none, of its
        operations. Tests between two copies have neither."""
        opcodes = [{self.code.instructions[i].opcode for i in some} for some in (block, longer)]
        accesses = [{op for op in some if op.startswith(ACCESSES)} for some in opcodes]
        both = accesses if accesses[1] else opcodes
        shared = both[0] & both[1]
        long = min(len(block), len(longer)) >= LEAST
        return bool(shared) and (long or any(op.startswith(self.asynchronous) for op in shared))

    def _cut_copies(self, numbers: list[int]) -> dict[int, np.ndarray]:
        """Maps iteration counts to copies of a loop, unrolled and not, each of which ptxas has cut into blocks where
        it jumps over a load. Such a jump meets the other way at a BSYNC; others lead to a copy or a turn."""
        first = self._copy_starts(numbers)
        copies: list[list[int]] = []
        for n in numbers:
            if n in first or not copies:
                copies.append([])
            copies[-1].append(n)
        made = [(c, sum((self._accesses(n) for n in c), Counter())) for c in copies]
        made = [(c, accesses) for c, accesses in made if accesses]
        least = {line: min(a[line] for _, a in made if a[line]) for line in {x for _, a in made for x in a}}
        found: dict[int, np.ndarray] = {}
        cut = False
        for number, (blocks, accesses) in enumerate(made, 1):
            turns = {accesses[line] / n for line, n in least.items()}
            if number == len(made) > 1 and turns == {0, 1}:  # its end is in a block with the code behind the loop
                turns = {1}
            inside = [i for n in blocks for i in self.code.blocks[n]]
            if len(turns) > 1 or any(self.code.instructions[i].opcode.startswith(self.asynchronous) for i in inside):
                return {}
            cut |= sum(bool(self._accesses(n)) for n in blocks) > 1 and max(turns) > 1
            found.setdefault(round(turns.pop()), np.array(inside, np.int32))
        return dict(sorted(found.items(), reverse=True)) if cut and 1 in found else {}

    def _copy_starts(self, numbers: list[int]) -> set[int]:
        """Returns the blocks at which a loop, or another copy of it, begins."""
        code, out = self.code, set()
        for n in numbers:
            last = code.instructions[code.blocks[n][-1]]
            name = TARGET.search(last.text) if last.opcode.startswith("BRA") else None
            to = code.labels.get(name[0], len(code.instructions)) if name else len(code.instructions)
            if to < len(code.instructions) and code.instructions[to].opcode != "BSYNC":
                target = code.instructions[to].block
                out |= {target} if target > n else {target, n + 1}
        return out

    def _turns_by_accesses(self, best: int, left_out: list[int]) -> dict[int, Iterable[int]]:
        """Maps iteration counts to blocks of an unrolled loop whose remainder ptxas has split where it jumps over a
        load. The remainder is then not a copy of the others, but the accesses tell how many iterations each has."""
        longer = self._accesses(best)
        least = {
            line: min([n, *filter(None, (self._accesses(k)[line] for k in left_out))]) for line, n in longer.items()
        }
        found: dict[int, Iterable[int]] = {}
        cut = False
        for number in (best, *left_out):
            accesses = self._accesses(number)
            turns = {accesses[line] / n for line, n in least.items()}
            if len(turns) == 1 and 0 not in turns and turns.copy().pop() >= 1:
                if len(self.code.blocks[number]) < 6:
                    cut = True
                else:
                    found.setdefault(round(turns.pop()), self.code.blocks[number])
        if not cut or not self.depths[best] or max(found, default=1) < 2:
            return {}
        return {1: self._first_turn(self.code.blocks[best])} | found

    def _copies(self, block: range) -> int:
        """Counts the iterations in a block without a separate copy of one iteration: ptxas unrolls so if it knows the
        trip count. Most lines occur that often with each of their opcodes, except lines with more than one PTX
        instruction (inline PTX). Products and copies have moves of a line for each of them; ptxas does not unroll
        loops with those in this way."""
        if any(self.code.instructions[i].opcode.startswith(self.asynchronous) for i in block):
            return 1
        made, crowded = [self.code.instructions[i] for i in block], self.blocks.crowded
        pairs = Counter((x.line, x.opcode) for x in made if x.line and x.line not in crowded)
        return round(float(np.median(list(pairs.values())))) if len(pairs) >= MANY_PAIRS else 1

    def _first_turn(self, block: range) -> list[int]:
        seen: set[tuple[int, str]] = set()
        out = []
        for i in block:
            key = self.code.instructions[i].line, self.code.instructions[i].opcode
            if key not in seen:
                seen.add(key)
                out.append(i)
        return out

    def _counted_turns(self, block: range) -> int | None:
        """Counts the iterations in a block by the bytes that it loads and stores; None: they do not tell. ptxas joins
        accesses of shared memory, but not those of global memory."""
        for spaces in (("LDG.", "LD.", "STG", "ST."), ("LDS", "STS")):
            moved: Counter = Counter()
            for ins in (self.code.instructions[i] for i in block):
                if ins.opcode.startswith(spaces) and ins.line in self.blocks.widths:
                    moved[ins.line] += bytes_of(ins.opcode)
            turns = {n / self.blocks.widths[line] for line, n in moved.items()}
            if len(turns) == 1 and min(turns) >= 1 and min(turns) % 1 == 0:
                return round(turns.pop())
        return None

    def _turns(self, longer: range, single: range) -> int:
        """Counts the iterations in an unrolled copy: most of its instructions occur that often (counters and branches,
        which iterations share, do not). Counts by opcode: ptxas gives products of later iterations other lines."""
        many, one = (Counter(self.code.instructions[i].opcode for i in block) for block in (longer, single))
        ratios = [many[op] / n for op, n in one.items() if op in many for _ in range(n)]
        return max(2, round(float(np.median(ratios))))
