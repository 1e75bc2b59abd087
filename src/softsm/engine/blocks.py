"""Compiles straight-line runs of micro-operations that are executed often, each to one native function.

The dispatch loop moves every operand through the register files. A block executes its instructions for a few lanes at a
time with the values in CPU registers, and writes each register that may be read later once at the end
(engine/translation.py). Without the race checker a block may contain loads from shared memory whose addresses it does
not compute itself, so that it is known at entry whether they are plain. A block that ends with a jump to its own head
loops as long as all lanes jump.

The interpreter calls a block if the whole warp runs together and the quantum is long enough. Otherwise, if a load is
not plain, or if a fragment enters in the middle, it interprets the records. Results, steps and diagnostics are the same
either way.
"""

from __future__ import annotations

import functools
import threading

import numpy as np

from softsm.engine import native
from softsm.engine import program as pg
from softsm.engine.dispatch import numbered
from softsm.engine.translation import Load, bank_of, sources, translate
from softsm.engine.vec_access import ELEMENT, WIDE, WORDS
from softsm.isa.registry import Micro

SHORTEST = 3  # records; a shorter run gains nothing
NO_LOOP = 1 << 40  # records per iteration if a block does not loop: more than any quantum
_compiling = threading.Lock()


def jump_targets(program: pg.Program) -> np.ndarray:
    code = program.code
    return np.unique([*code[code[:, 0] == pg.OP_BRA, 5], *(x for table in program.branch_tables for x in table)])


def plain_loads(program: pg.Program) -> dict[int, Load]:
    """Returns, by record, the loads of words from shared memory by the whole warp."""
    found = {}
    for at in np.flatnonzero((program.code[:, 0] == pg.OP_LDS) & (program.code[:, 6] == 0)).tolist():
        _, rd, ra, rb, rc, *_ = program.code[at].tolist()
        count = rc >> 4 & 15
        rows = tuple(program.pool[rd : rd + count].tolist())
        if rc & (ELEMENT | WIDE) == WORDS and count in (1, 2, 4) and min(rows) >= 0:
            found[at] = Load(ra, rb, rows)
    return found


def find(
    program: pg.Program, local: np.ndarray, loads: dict[int, Load], micros: dict[int, Micro]
) -> list[tuple[int, int]]:
    """Returns (first record, length) of each run of micro-operations and loads without a jump target inside, which does
    not compute an address that it loads from. local[op]: whether a run may contain the micro-operation."""
    code = program.code
    inside = local[np.minimum(code[:, 0], len(local) - 1)]
    inside[list(loads)] = True
    cuts = np.flatnonzero(np.diff(inside.astype(np.int8), prepend=0, append=0))
    heads = set(jump_targets(program).tolist())
    found = []
    for start, end in zip(cuts[::2].tolist(), cuts[1::2].tolist()):
        edges, written = [start], set[int]()
        for at in range(start, end):
            load = loads.get(at)
            if at in heads or load is not None and load.address in written:
                edges.append(at)
                written = set()
            if load is not None:
                written.update(load.rows)
            elif bank_of(micros[int(code[at, 0])].dst) == "R":
                written.add(int(code[at, 1]))
        edges.append(end)
        found += [(a, b - a) for a, b in zip(edges, edges[1:]) if b - a >= SHORTEST]
    return found


class Blocks:
    """The blocks of one program, and its records, in which OP_BLOCK replaces the head of each block."""

    def __init__(self, program: pg.Program, checking: bool = False):
        hot, cold = numbered()
        self.micros: dict[int, Micro] = dict([*hot, *cold])
        local = np.zeros(max(self.micros) + 2, bool)
        local[[n for n, m in self.micros.items() if not m.exchange]] = True
        self.program = program
        self.loads = {} if checking else plain_loads(program)
        self.found = find(program, local, self.loads, self.micros)
        self.code = program.code.copy()
        # Per block: address, executions so far, records per iteration, unused, and the original record of its head.
        self.table = np.zeros((max(len(self.found), 1), 8), np.int64)
        for i, (first, length) in enumerate(self.found):
            self.table[i, 2] = NO_LOOP if self.loop(first, length) is None else length + 1
            self.table[i, 4:] = program.code[first].view(np.int64)
            self.code[first] = [pg.OP_BLOCK, length, i, 0, 0, 0, 0, 0]

    def loop(self, first: int, length: int) -> tuple[int, int] | None:
        """Returns (guard, flip) of a jump after the block to its head, or None."""
        record = self.program.code[first + length] if first + length < len(self.program.code) else None
        if record is None or record[0] != pg.OP_BRA or record[5] != first:
            return None
        return int(record[6]), int(record[7])

    def compile(self, index: int) -> None:
        """Compiles a block that has been executed dispatch.HOT times."""
        with _compiling:
            if self.table[index, 0]:
                return
            first, length = self.found[index]
            records = self.program.code[first : first + length]
            steps = [self.loads.get(first + i) or self.micros[int(r[0])] for i, r in enumerate(records)]
            used = [(m, r) for m, r in zip(steps, records) if isinstance(m, Micro)]
            constants = {"R": self.program.constants_r, "Q": self.program.constants_q}
            rows = {(bank, int(row)) for m, r in used for bank, row in sources(m, r)}
            known = {key: constants[key[0]][key[1]] for key in sorted(rows) if key[1] in constants.get(key[0], ())}
            written = {(bank_of(m.dst), int(r[1])) for m, r in used}
            unread = frozenset(written & self.program.private - self.read_first)
            build = functools.partial(
                translate, records=records, steps=steps, known=known, unread=unread, loop=self.loop(first, length)
            )
            self.table[index, 0] = native.functions("block", build, ["block"])["block"]

    @functools.cached_property
    def read_first(self) -> set[tuple[str, int]]:
        """Returns the rows that some run of micro-operations reads before writing. Other rows are dead after a block
        unless something other than a micro-operation reads them."""
        code, heads = self.program.code, {first for first, _ in self.found}
        heads |= {first + length for first, length in self.found} | set(jump_targets(self.program).tolist())
        found: set[tuple[str, int]] = set()
        written: set[tuple[str, int]] = set()
        for at, record in enumerate(code):
            m = self.micros.get(int(record[0]))
            if at in heads or m is None and at not in self.loads:
                written = set()
            if m is None:
                continue
            target, guard = (bank_of(m.dst), int(record[1])), int(record[6])
            read = sources(m, record) + ([("P", guard), target] if guard else [])
            found.update(row for row in read if row not in written)
            if not guard:
                written.add(target)
        return found
