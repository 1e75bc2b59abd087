"""Vector clocks, compiled: what barriers do with them (checks/order.py has their layout), and instructions that need
Python only when something is wrong, waits on mbarriers above all.

A watched mbarrier has a record of int64, found through a table that has one address for every 8 bytes of its CTA's
shared memory: 0 where none lies, or where Python has to look (its word was overwritten, peers have arrived at it).
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types

from softsm.engine.lanes import i8, load32, load64, store32, store64, u4
from softsm.engine.native import intrinsic, native
from softsm.engine.program import (
    CLOCKS,
    MACRO,
    S_CLOCK,
    S_NEXT_OP,
    S_PHASES,
    S_RACES,
    S_SHARED_BASE,
    S_SHARED_SIZE,
    S_SLOT,
    SECTIONS,
    USED,
)

WORDS = 512  # of a set of asynchronous operations
HEAD = 4  # uint32 before each clock, which a warp's own uses. Where they lie:
BEGIN, DIRTY = -16, -12  # the epoch in which its lanes met last, and the lanes with accesses since then
RELEASING, PLACE = -8, -4  # the epoch in which it released something last, and the address, without its high bits
PUBLISHED, SLOT, EPOCH, PHASE, WAITED, FIELDS = range(6)  # of a watched mbarrier


def _four(name: str, merged):
    """Merges four entries of the clock at one address into those at another; Numba does not see that it could."""
    vector = ir.VectorType(ir.IntType(32), 4)

    def function(typingctx, target, source):
        def codegen(context, builder, signature, args):
            to, of = (builder.inttoptr(at, vector.as_pointer()) for at in args)
            old, new = (builder.load(at, align=4) for at in (to, of))
            builder.store(merged(builder, old, new), to, align=4)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    function.__name__ = name
    return intrinsic(function)


later = _four("later", lambda b, old, new: b.select(b.icmp_unsigned("<", old, new), new, old))
union = _four("union", lambda b, old, new: b.or_(old, new))


@native("void(i8, i8, i8, i8, i8)", python=True)
def join(target, source, clocks, sections, used):
    """The maximum of the first `clocks` entries; the union of the bits in each of the sections behind them, whose first
    `used` words may hold some. Both numbers are multiples of four."""
    for at in range(0, 4 * clocks, 16):
        later(target + at, source + at)
    for s in range(sections):
        first = 4 * (clocks + s * WORDS)
        for at in range(first, first + 4 * used, 16):
            union(target + at, source + at)


@native("void(i8, i8)")
def met(clock, slot):
    """The lanes of the warp of this slot have met, or all of them have passed on what they did: see Order.tick."""
    epoch = load32(clock + 4 * slot) + u4(2)
    store32(clock + 4 * slot, epoch)
    store32(clock + BEGIN, epoch - u4(1))
    store32(clock + DIRTY, u4(0))


@native("void(i8, i8, i8, i8, i8, i8, i8)", python=True)
def publish(target, clock, slot, clocks, sections, private, used):
    """A warp passes on what it has seen, all its lanes, and a new epoch of it begins (Order.tick). private: a section
    that it keeps to itself, or -1."""
    for at in range(0, 4 * clocks, 16):
        later(target + at, clock + at)
    for s in range(sections):
        if s != private:
            first = 4 * (clocks + s * WORDS)
            for at in range(first, first + 4 * used, 16):
                union(target + at, clock + at)
    met(clock, slot)


@native("void(i8, i8, i8, i8, i8, i8)", python=True)
def commit(target, clock, slot, issued, bit, layout):
    """What tcgen05.commit, operation `bit` of a set, tells when it completes: what the warp has seen, of which a new
    epoch begins, the operations `issued` by its thread (or 0) and itself. At the strict level it tells of operations
    alone."""
    clocks, sections = i8(load64(layout + 8 * CLOCKS)), i8(load64(layout + 8 * SECTIONS))
    used, strict = i8(load64(layout + 8 * USED)), sections == 4
    for k in range(clocks):
        store32(target + 4 * k, u4(0) if strict else load32(clock + 4 * k))
    for s in range(sections):
        first = 4 * (clocks + s * WORDS)
        for k in range(used):
            bits = u4(0) if strict and s == 2 else load32(clock + first + 4 * k)
            if s == 0 or s == 3:
                if issued:
                    bits |= load32(issued + 4 * k)
                if k == bit >> 5:
                    bits |= u4(1) << u4(bit & 31)
            store32(target + first + 4 * k, bits)
    met(clock, slot)


@native("void(i8, i8, i8, i8, i8)", python=True)
def hand_over(published, gathering, clocks, sections, used):
    """A phase ends: what was gathered is published, and the next phase begins with nothing."""
    join(published, gathering, clocks, sections, used)
    for k in range(clocks):
        store32(gathering + 4 * k, u4(0))
    for s in range(sections):
        first = 4 * (clocks + s * WORDS)
        for at in range(first, first + 4 * used, 8):
            store64(gathering + at, np.uint64(0))


@native("void(i8, i8, i8, i8, i8, i8, i8, i8)", python=True)
def meet(published, gathering, members, count, clocks, sections, private, used):
    """A phase ends at which warps have waited (pairs: the address of a clock, its slot): each passes on what it has
    seen, and takes in what all have."""
    for k in range(count):
        clock, slot = i8(load64(members + 16 * k)), i8(load64(members + 16 * k + 8))
        publish(gathering, clock, slot, clocks, sections, private, used)
    hand_over(published, gathering, clocks, sections, used)
    for k in range(count):
        join(i8(load64(members + 16 * k)), published, clocks, sections, used)


@native("i8(i8, i8, i8, i8, i8, i8, u4)")
def answer_wait(R, P, S, predicate, address_row, phase_row, m):
    """mbarrier.try_wait and test_wait by parity, of the lanes of m: 0 when the phase is over, nothing is wrong and the
    warp has taken in what the barrier publishes; else MACRO, and nothing has changed."""
    table = i8(load64(S + 8 * S_PHASES))
    if table == 0 or load64(S + 8 * S_RACES) == np.uint64(0):
        return i8(MACRO)
    first = i8(0)
    while (m >> u4(first)) & u4(1) == u4(0):
        first += 1
    address, parity = load32(R + (address_row * 32 + first) * 4), load32(R + (phase_row * 32 + first) * 4)
    for lane in range(first + 1, 32):
        if (m >> u4(lane)) & u4(1) and (
            load32(R + (address_row * 32 + lane) * 4) != address or load32(R + (phase_row * 32 + lane) * 4) != parity
        ):
            return i8(MACRO)
    offset = i8(address) - i8(load64(S + 8 * S_SHARED_BASE))
    if offset < 0 or offset & 7 or offset >= i8(load64(S + 8 * S_SHARED_SIZE)):
        return i8(MACRO)
    record = i8(load64(table + offset))
    if record == 0:
        return i8(MACRO)
    phase = i8(load64(record + 8 * PHASE))
    if phase & 1 == i8(parity) & 1:
        return i8(MACRO)
    clock, origin = i8(load64(S + 8 * S_CLOCK)), i8(load64(record + 8 * SLOT))
    if origin != i8(load64(S + 8 * S_SLOT)) and i8(load32(clock + 4 * origin)) < i8(load64(record + 8 * EPOCH)):
        return i8(MACRO)
    layout = i8(load64(S + 8 * S_NEXT_OP))
    join(
        clock,
        i8(load64(record + 8 * PUBLISHED)),
        i8(load64(layout + 8 * CLOCKS)),
        i8(load64(layout + 8 * SECTIONS)),
        i8(load64(layout + 8 * USED)),
    )
    store64(record + 8 * WAITED, np.uint64(phase - 1))
    store32(P + 4 * predicate, load32(P + 4 * predicate) | m)
    return i8(0)


@native("i8(i8, i8, i8, u4)")
def members(R, S, row, m):
    """A .sync instruction: 0 when the membermask of each lane of m names that lane, else MACRO."""
    if load64(S + 8 * S_PHASES) == np.uint64(0):  # an observer follows each event
        return i8(MACRO)
    for lane in range(32):
        if (m >> u4(lane)) & u4(1) and not (load32(R + (row * 32 + lane) * 4) >> u4(lane)) & u4(1):
            return i8(MACRO)
    return i8(0)


@native("i8(i8)")
def tick(S):
    """bar.warp.sync: Order.tick for the warp of S. MACRO when no clocks are kept here."""
    if load64(S + 8 * S_RACES) == np.uint64(0) or load64(S + 8 * S_PHASES) == np.uint64(0):
        return i8(MACRO)
    met(i8(load64(S + 8 * S_CLOCK)), i8(load64(S + 8 * S_SLOT)))
    return i8(0)
