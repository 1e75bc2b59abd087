"""Checks stored values: a store that changes no byte, and lanes of one store that write different values to one
address.

The host addresses of a store are in S[SCRATCH:], one for each lane. The records are those of checks/shadow.py.
"""

from __future__ import annotations

import numpy as np

from softsm.checks.shadow import QUIET, WAW, both, report, sget
from softsm.engine.lanes import i8, load8, load16, load32, load64, u4
from softsm.engine.native import native
from softsm.engine.program import S_RACES, S_SCRATCH, S_SHARED, S_SHARED_SIZE, S_SLOT


@native("i8(i8, i8, i8, i8, i8, i8, i8, i8)")
def there(R, Q, S, row, k, log, wide, lane):
    """Returns whether memory already holds element k of what a lane stores. The host addresses are in S[SCRATCH:]."""
    a = sget(S, S_SCRATCH + lane) + (k << log)
    if wide:
        new = load64(Q + (row * 32 + lane) * 8)
    else:
        new = np.uint64(load32(R + (row * 32 + lane) * 4))
    if log == 0:
        return i8(np.uint64(load8(a)) == new & np.uint64(0xFF))
    if log == 1:
        return i8(np.uint64(load16(a)) == new & np.uint64(0xFFFF))
    if log == 2:
        return i8(np.uint64(load32(a)) == new & np.uint64(0xFFFFFFFF))
    return i8(load64(a) == new)


@native("i8(i8, u4, i8)")
def overwriter(S, m, lane):
    """Returns the last lane after this one that stores to the same address, or -1."""
    for later in range(31, lane, -1):
        if (m >> u4(later)) & u4(1) and sget(S, S_SCRATCH + later) == sget(S, S_SCRATCH + lane):
            return i8(later)
    return i8(-1)


@native("i8(i8, i8, i8, i8, i8, i8, u4)")
def quiet(R, Q, pool, S, rows, fmt, m):
    """Returns whether the store whose host addresses are in S[SCRATCH:] would change no byte."""
    for k in range((fmt >> 4) & 15):
        row = i8(np.int32(load32(pool + 4 * (rows + k))))
        for lane in range(32):
            if (m >> u4(lane)) & u4(1) and not there(R, Q, S, row, k, fmt & 3, fmt & 512, lane):
                if overwriter(S, m, lane) < 0:  # the last lane's value remains
                    return 0
    return QUIET


@native("void(i8, i8, i8, i8, i8, i8, u4, i8)")
def collide(R, Q, pool, S, rows, fmt, m, pc):
    """Checks global memory after the store: if it does not hold a lane's value, another lane wrote a different value to
    the same address. Shared memory is not checked: Triton lets all lanes of a reduction store their sums to one word,
    and these may differ in the last bit."""
    if sget(S, S_RACES) == 0:
        return
    for k in range((fmt >> 4) & 15):
        row = i8(np.int32(load32(pool + 4 * (rows + k))))
        for lane in range(32):
            if (m >> u4(lane)) & u4(1) and not there(R, Q, S, row, k, fmt & 3, fmt & 512, lane):
                a = sget(S, S_SCRATCH + lane) + (i8(k) << (fmt & 3))
                at = a - sget(S, S_SHARED)
                if at < 0 or at >= sget(S, S_SHARED_SIZE):
                    lanes = both(overwriter(S, m, lane), lane)
                    report(sget(S, S_RACES), WAW, 1, a, pc, sget(S, S_SLOT) + 1, 0, pc, lanes)
                return
