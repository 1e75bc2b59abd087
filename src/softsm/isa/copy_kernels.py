"""The compiled inner loops of cp.async: check the addresses of a warp's lanes, and move their bytes.

A plan is 3 x 32 int64: host address of the destination, host address of the source and bytes to read of each
participating lane, packed from the front.
"""

from __future__ import annotations

import numpy as np

from softsm.engine.lanes import i8, known, load8, load64, qget, rget, sget, store8, store64, u8
from softsm.engine.native import native
from softsm.engine.program import S_Q, S_R, S_SHARED, S_SHARED_BASE, S_SHARED_SIZE, SHARED_START


@native("i8(i8, i8, i8, i8, i8, i8, i8, i8)", python=True)
def plan_lanes(S, plan, mask, dst, src, used, ignored, size):
    """Fills in the plan; returns the number of lanes, or -1 if any lane's copy is not plain and legal.

    dst, src: rows of the addresses; used: row of the source sizes, or -1; ignored: lanes that read nothing."""
    R, Q = sget(S, S_R), sget(S, S_Q)
    shared, end, base = sget(S, S_SHARED), sget(S, S_SHARED_SIZE), sget(S, S_SHARED_BASE)
    n = 0
    for lane in range(32):
        if not mask >> lane & 1:
            continue
        offset = i8(rget(R, dst, lane)) - base
        address = i8(qget(Q, src, lane))
        nbytes = size
        if used >= 0:
            nbytes = i8(rget(R, used, lane))
        if ignored >> lane & 1:
            nbytes = 0
        if offset < SHARED_START or offset + size > end or offset % size or nbytes > size:
            return -1
        if nbytes > 0 and (address % size or not known(S, address, address + nbytes)):
            return -1
        store64(plan + 8 * n, u8(shared + offset))
        store64(plan + 256 + 8 * n, u8(address))
        store64(plan + 512 + 8 * n, u8(nbytes))
        n += 1
    return n


@native("void(i8, i8, i8)", python=True)
def move_lanes(plan, n, size):
    """Copies, and fills up with zeros after a short source."""
    for k in range(n):
        to = i8(load64(plan + 8 * k))
        source = i8(load64(plan + 256 + 8 * k))
        nbytes = i8(load64(plan + 512 + 8 * k))
        if nbytes == 16:
            store64(to, load64(source))
            store64(to + 8, load64(source + 8))
            continue
        for i in range(nbytes):
            store8(to + i, load8(source + i))
        for i in range(nbytes, size):
            store8(to + i, np.uint8(0))
