"""Loads and stores of 32-bit elements, all lanes at once: the plain cases of what engine/lanes.py does lane by lane.

Every function says whether it did the access. It declines when anything is out of the ordinary (a lane out of bounds
or misaligned, another element size, a peer's memory), and then nothing has been touched. Addresses of consecutive
lanes that follow each other are moved as one vector.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from softsm.engine.vec_ops import toq
from softsm.engine.vec_rows import (
    gather32,
    lane_get,
    lanes,
    ldQ,
    ldU,
    pld,
    scatter32,
    strided_load,
    strided_store,
    vst,
)
from softsm.engine.vec_types import FULL, LANES, ZERO, tomask, vany

_fn = njit(error_model="numpy", forceinline=True)
u4, i4, i8, u8 = np.uint32, np.int32, np.int64, np.uint64

# The access format of engine/lanes.py: bits 0-1 log2 of the element size, 4-7 elements, 9 rows are 64-bit.
ELEMENT, WIDE, WORDS = 3, 1 << 9, 2


@_fn
def _row_of(pool, k):
    return i8(i4(pld(pool, k)))


@_fn
def _load_rows(R, pool, rows, count, addresses, m):
    for k in range(count):
        rd = _row_of(pool, rows + k)
        if rd >= 0:
            vst(R, rd, m, gather32(addresses + u8(4 * k), m))


@_fn
def _store_rows(R, pool, rows, count, addresses, m):
    for k in range(count):
        scatter32(addresses + u8(4 * k), m, ldU(R, _row_of(pool, rows + k)))


@_fn
def _load_run(R, pool, rows, count, p):
    """All lanes, one after the other in memory from p on."""
    if count == 1:
        vst(R, _row_of(pool, rows), FULL, ldU(p, 0))
    elif count == 2:
        vst(R, _row_of(pool, rows), FULL, strided_load(p, 2, 0))
        vst(R, _row_of(pool, rows + 1), FULL, strided_load(p, 2, 1))
    else:
        vst(R, _row_of(pool, rows), FULL, strided_load(p, 4, 0))
        vst(R, _row_of(pool, rows + 1), FULL, strided_load(p, 4, 1))
        vst(R, _row_of(pool, rows + 2), FULL, strided_load(p, 4, 2))
        vst(R, _row_of(pool, rows + 3), FULL, strided_load(p, 4, 3))


@_fn
def _store_run(R, pool, rows, count, p):
    a = ldU(R, _row_of(pool, rows))
    if count == 1:
        vst(p, 0, FULL, a)
    elif count == 2:
        strided_store(p, a, ldU(R, _row_of(pool, rows + 1)), a, a, 2)
    else:
        c, d = ldU(R, _row_of(pool, rows + 2)), ldU(R, _row_of(pool, rows + 3))
        strided_store(p, a, ldU(R, _row_of(pool, rows + 1)), c, d, 4)


@_fn
def move_run(R, pool, rows, fmt, p, write):
    if write:
        _store_run(R, pool, rows, (fmt >> 4) & 15, p)
    else:
        _load_run(R, pool, rows, (fmt >> 4) & 15, p)


@_fn
def _plain(pool, rows, fmt):
    """One, two or four words, each with a row (a load may drop parts: those have none)."""
    count = (fmt >> 4) & 15
    if (fmt & ELEMENT) != WORDS or fmt & WIDE or not (count == 1 or count == 2 or count == 4):
        return i8(0)
    for k in range(count):
        if _row_of(pool, rows + k) < 0:
            return i8(0)
    return count


@_fn
def _shared_offsets(R, row, offset, base):
    return ldU(R, row) + u4(offset - base)


@_fn
def quick_shared(R, pool, rows, row, offset, fmt, m, base, start, size, memory, write):
    """ld.shared or st.shared. base: of the CTA's window; start, size: its usable bytes; memory: their host address."""
    count = _plain(pool, rows, fmt)
    if count == 0:
        return i8(0)
    bytes_ = 4 * count
    a = _shared_offsets(R, row, offset, base)
    if m == FULL:
        first = i8(lane_get(a, 0))
        steps = lanes() << u4(2 if count == 1 else 3 if count == 2 else 4)
        if not vany(a != steps + u4(first)):  # one run: its two ends are all there is to check
            if first < start or first + LANES * bytes_ > size or first & (bytes_ - 1) != 0:
                return i8(0)
            move_run(R, pool, rows, fmt, memory + first, write)
            return i8(1)
    bad = (a < u4(start)) | (a > u4(size - bytes_)) | ((a & u4(bytes_ - 1)) != 0)
    if tomask(bad) & m != ZERO:
        return i8(0)
    addresses = toq(a) + u8(memory)
    if write:
        _store_rows(R, pool, rows, count, addresses, m)
    else:
        _load_rows(R, pool, rows, count, addresses, m)
    return i8(1)


@_fn
def global_run(Q, row, offset, pool, rows, fmt, m):
    """Host address where 32 consecutive lanes' words begin, or 0 when they are not one aligned run."""
    count = _plain(pool, rows, fmt)
    if count == 0 or m != FULL:
        return i8(0)
    a = ldQ(Q, row)
    first = lane_get(a, 0)
    bytes_ = u8(4 * count)
    if lane_get(a, 1) - first != bytes_ or lane_get(a, 31) - first != bytes_ * u8(31):  # cheap, mostly enough
        return i8(0)
    if vany(a - first != toq(lanes()) * bytes_):
        return i8(0)
    p = i8(first) + offset
    return p if p & (4 * count - 1) == 0 else i8(0)
