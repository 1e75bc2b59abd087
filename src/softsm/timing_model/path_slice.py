"""Keeps of a program only what decides its branches: CTAs that run it take the same path in a fraction of the time.

Other records stay in their places and do nothing, so that a CTA executes as many as before.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from softsm.engine import program as pg
from softsm.engine.launch import Kernel
from softsm.timing_model.follow import REGISTER, statements_of
from softsm.timing_model.sass import alone

# What other threads or earlier instructions must have done for the result to be right.
_SHARED = ("atom.", "cp.", "mbarrier.", "mma.", "wgmma.", "tcgen05.", "ldmatrix", "stmatrix", "mapa", "call", "brx")
_PLAIN_LOADS = ("ld.param", "ld.global", "ld.const")
_NOTHING = [pg.OP_MACRO, 0, 0, 0, 0, 0, 0, 0xFFFFFFFF]  # a guard that no lane has


def deciding_lines(source: str) -> set[int] | None:
    """Returns the PTX lines that branches depend on; None: one of them needs other threads, or a product."""
    statements = statements_of(source)
    if any(s.name.startswith(("call", "brx")) or "try_wait" in s.name or "test_wait" in s.name for s in statements):
        return None
    needed = {s.guard for s in statements if s.name.startswith(("bra", "ret", "exit")) and s.guard}
    lines: set[int] = set()
    before = -1
    while before != len(needed):
        before = len(needed)
        for s in reversed(statements):
            if s.name.startswith(("bra", "ret", "exit", "bar", "st.", "red.")):
                continue
            if not needed.isdisjoint(REGISTER.findall(s.target)):
                if s.name.startswith(_SHARED) or s.name.startswith("ld.") and not s.name.startswith(_PLAIN_LOADS):
                    return None
                lines.add(s.line)
                needed.update(REGISTER.findall(s.rest))
                needed.update([s.guard] if s.guard else [])
    return lines


class Path(NamedTuple):
    code: np.ndarray  # the program's records; those that decide nothing do nothing
    alike: bool  # all threads of a CTA take the same path
    end: int  # the number of a record that ends a thread


@functools.lru_cache(16)
def sliced(kernel: Kernel) -> Path | None:
    """Returns what decides the path of the kernel; None: anything may."""
    source = alone(kernel.module.source, kernel.name)
    lines = deciding_lines(source)
    ends = np.flatnonzero((kernel.program.code[:, [0, 6, 7]] == [pg.OP_EXIT, 0, 0]).all(1))
    if lines is None or not len(ends):
        return None
    code = kernel.program.code.copy()
    for at, (record, instruction) in enumerate(zip(code, kernel.program.instructions)):
        if record[0] not in (pg.OP_BRA, pg.OP_EXIT) and instruction.line not in lines:
            code[at] = _NOTHING
    text = source.splitlines()
    alike = not any(x in text[n - 1] for n in lines for x in ("%tid", "%laneid", "%warpid"))
    return Path(code, alike, int(ends[0]))
