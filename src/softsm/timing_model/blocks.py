"""The basic blocks of a PTX program. The loop around a `try_wait` does not end a block, because its iteration count
depends on time and not on the program.
"""

from __future__ import annotations

import bisect
import re
import weakref
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from softsm.engine import program as pg
from softsm.engine.blocks import NO_LOOP
from softsm.engine.blocks import Blocks as NativeBlocks
from softsm.engine.launch import Kernel
from softsm.timing_model.looks import Instructions
from softsm.timing_model.loops import depths


@dataclass
class Blocks:
    """The blocks of a program."""

    starts: list[int]  # first record of each
    of_line: dict[int, int]  # PTX line -> block
    lines: list[int]  # sorted keys of of_line
    labels: list[int] = field(default_factory=list)  # PTX lines with a label
    loops: list[int] = field(default_factory=list)  # number of loops around each block
    crowded: set[int] = field(default_factory=set)  # PTX lines with more than one instruction
    widths: dict[int, int] = field(default_factory=dict)  # PTX lines with one load or store -> bytes of a lane

    def at(self, pc: int) -> int:
        return bisect.bisect_right(self.starts, pc) - 1

    def of(self, line: int) -> int:
        """Returns the block of a PTX line. A line without a record (wgmma.fence) belongs to the block of the nearest
        line before it, or after it if a label is between: ptxas gives products the line of their fence."""
        found = self.of_line.get(line)
        if found is None:
            i = bisect.bisect_right(self.lines, line) - 1
            before = self.lines[max(i, 0)]
            k = bisect.bisect_right(self.labels, line) - 1
            if k >= 0 and self.labels[k] > before and i + 1 < len(self.lines):
                before = self.lines[i + 1]
            found = self.of_line[before]
        return found


_LABEL = re.compile(r"^\s*[$%\w]+:")
_WIDTH = re.compile(r"(?:\.v(\d))?\.(?:bf|[bsuf])(\d+)\b")


def labels_of(source: str) -> list[int]:
    return [n for n, text in enumerate(source.splitlines(), 1) if _LABEL.match(text)]


def blocks_of(program, macro_at, source: str) -> Blocks:
    code = program.code
    leaders = {0}
    branches = [(i, int(code[i, 5])) for i in range(len(code)) if code[i, 0] == pg.OP_BRA]
    for i, target in branches:
        waits = target <= i <= target + 6 and any(
            j in macro_at and macro_at[j].instruction.name.startswith(("mbarrier.try_wait", "mbarrier.test_wait"))
            for j in range(target, i)
        )
        if not waits:
            leaders |= {target, i + 1}
    for table in program.branch_tables:
        leaders |= set(table)
    for i, call in macro_at.items():
        if call.instruction.opcode in ("call", "ret", "brx"):
            leaders.add(i + 1)
    starts = sorted(x for x in leaders if x < len(code))
    of_line: dict[int, int] = {}
    for i, ins in enumerate(program.instructions):
        of_line.setdefault(ins.line, bisect.bisect_right(starts, i) - 1)
    places = Counter(line for line, _ in {(ins.line, ins.column) for ins in program.instructions})
    crowded = {line for line, n in places.items() if n > 1}
    widths = {
        ins.line: int(found[1] or 1) * int(found[2]) // 8
        for ins in program.instructions
        if ins.opcode in ("ld", "st") and ins.line not in crowded and (found := _WIDTH.search(ins.name))
    }
    loops = _loops(program, starts, branches)
    return Blocks(starts, of_line, sorted(of_line), labels_of(source), loops, crowded, widths)


def _loops(program, starts: list[int], branches: list[tuple[int, int]]) -> list[int]:
    def at(pc: int) -> int:
        return bisect.bisect_right(starts, pc) - 1

    leaders = set(starts)
    edges = [(at(i), at(target)) for i, target in branches if target in leaders]
    tables = {t for table in program.branch_tables for t in table}
    for n, end in enumerate([x - 1 for x in starts[1:]]):
        last = program.instructions[end]
        if last.guard is not None or last.opcode not in ("bra", "ret", "exit", "brx"):
            edges.append((n, n + 1))
    return depths(len(starts), edges, {0, *map(at, tables)})


class Known:
    """The data that all timed launches of a kernel share."""

    def __init__(self, kernel: Kernel):
        program = kernel.program
        self.blocks = blocks_of(program, kernel.macro_at, kernel.module.source)
        self.instructions = Instructions(program)
        self.roles: dict[int, str] = {}  # roles by record
        self.products = any(c.instruction.opcode in ("wgmma", "tcgen05") for c in program.macros)
        n = len(program.code)
        stop = program.code[:, 0] == pg.OP_BRA
        stop[self.blocks.starts] = True
        at = np.where(stop, np.arange(n), n)
        self.stops = [*np.minimum.accumulate(at[::-1])[::-1].tolist(), n, n]  # next branch or block start, by record
        self.far_from = np.searchsorted(self.blocks.starts, np.arange(n + 2))  # the first block at or after each record
        self.block_from = self.far_from.tolist()
        self.code = quiet_code(program, kernel.blocks)


def quiet_code(program: pg.Program, native: NativeBlocks) -> np.ndarray:
    """Returns the records with the native blocks that need no recording: they have no loads and no loops."""
    code = program.code.copy()
    for n, (first, length) in enumerate(native.found):
        if native.table[n, 2] == NO_LOOP and not any(at in native.loads for at in range(first, first + length)):
            code[first] = native.code[first]
    return code


_known: weakref.WeakKeyDictionary[Kernel, Known] = weakref.WeakKeyDictionary()


def known_of(kernel: Kernel) -> Known:
    found = _known.get(kernel)
    if found is None:
        found = _known[kernel] = Known(kernel)
    return found
