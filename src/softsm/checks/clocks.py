"""Compiled operations on vector clocks, whose layout checks/order.py defines, and instructions that call Python only
on an error or a rare case. Waits on mbarriers are the most frequent ones.

A watched mbarrier has a record of int64 fields. A table of the CTA has the record's address for every 8 bytes of shared
memory. The address is 0 where no mbarrier lies, and where Python must handle the wait: the word was overwritten, or
peers have arrived.
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

WORDS = 512  # words of a set of asynchronous operations
HEAD = 4  # uint32 words before each clock, used in a warp's own clock; their offsets in bytes:
BEGIN, DIRTY = -16, -12  # the epoch in which the lanes last synchronised, and the lanes with accesses since then
RELEASING, PLACE = -8, -4  # the epoch of the last release, and the low 32 bits of its address
PUBLISHED, SLOT, EPOCH, PHASE, WAITED, FIELDS = range(6)  # fields of a watched mbarrier's record


def _four(name: str, merged):
    """Merges four entries of one clock into another, as vectors. Numba does not vectorise this itself."""
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
    """Merges a clock into `target`: the maximum of each of the `clocks` entries, and the union of the sets in the
    sections after them, of which the first `used` words count. Both numbers are multiples of four."""
    for at in range(0, 4 * clocks, 16):
        later(target + at, source + at)
    for s in range(sections):
        first = 4 * (clocks + s * WORDS)
        for at in range(first, first + 4 * used, 16):
            union(target + at, source + at)


@native("void(i8, i8)")
def met(clock, slot):
    """Does what Order.tick does: the lanes of the warp have synchronised, or all of them have released."""
    epoch = load32(clock + 4 * slot) + u4(2)
    store32(clock + 4 * slot, epoch)
    store32(clock + BEGIN, epoch - u4(1))
    store32(clock + DIRTY, u4(0))


@native("void(i8, i8, i8, i8, i8, i8, i8)", python=True)
def publish(target, clock, slot, clocks, sections, private, used):
    """Merges the clock of a warp, all of whose lanes release, into `target`, and begins an epoch (Order.tick).
    private: a section that is not published, or -1."""
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
    """Fills `target` with what tcgen05.commit publishes when it completes: the warp's clock, the operations `issued` by
    its thread (an address, or 0) and the commit itself, operation `bit` of a set. At the strict level it publishes
    operations only. The warp begins an epoch."""
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
    """Ends a phase: publishes what was gathered, and clears it for the next phase."""
    join(published, gathering, clocks, sections, used)
    for k in range(clocks):
        store32(gathering + 4 * k, u4(0))
    for s in range(sections):
        first = 4 * (clocks + s * WORDS)
        for at in range(first, first + 4 * used, 8):
            store64(gathering + at, np.uint64(0))


@native("void(i8, i8, i8, i8, i8, i8, i8, i8)", python=True)
def meet(published, gathering, members, count, clocks, sections, private, used):
    """Ends a phase of a barrier at which `count` warps wait. Each publishes its clock and acquires those of all.
    members: pairs of a clock's address and a slot."""
    for k in range(count):
        clock, slot = i8(load64(members + 16 * k)), i8(load64(members + 16 * k + 8))
        publish(gathering, clock, slot, clocks, sections, private, used)
    hand_over(published, gathering, clocks, sections, used)
    for k in range(count):
        join(i8(load64(members + 16 * k)), published, clocks, sections, used)


@native("i8(i8, i8, i8, i8, i8, i8, u4)")
def answer_wait(R, P, S, predicate, address_row, phase_row, m):
    """Answers mbarrier.try_wait and test_wait by parity, by the lanes of m. Returns 0 if the phase is complete and
    the warp has acquired what the barrier published. Otherwise, or if there is something to report, it returns
    MACRO and changes nothing."""
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
    """Checks a .sync instruction: 0 if the membermask of each lane of m contains that lane, else MACRO."""
    if load64(S + 8 * S_PHASES) == np.uint64(0):  # an observer must see each event
        return i8(MACRO)
    for lane in range(32):
        if (m >> u4(lane)) & u4(1) and not (load32(R + (row * 32 + lane) * 4) >> u4(lane)) & u4(1):
            return i8(MACRO)
    return i8(0)


@native("i8(i8)")
def tick(S):
    """Executes bar.warp.sync: Order.tick for the warp of S, or MACRO if it has no compiled clock."""
    if load64(S + 8 * S_RACES) == np.uint64(0) or load64(S + 8 * S_PHASES) == np.uint64(0):
        return i8(MACRO)
    met(i8(load64(S + 8 * S_CLOCK)), i8(load64(S + 8 * S_SLOT)))
    return i8(0)
