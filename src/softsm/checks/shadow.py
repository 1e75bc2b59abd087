"""Shadow memory: who touched each word of shared and global memory last, and was it before?

One record of uint32 per 4-byte word of shared memory:

    [writer, epoch, pc, bytes, async reader, async reader, peer reader, epoch, pc, (epoch, pc) of the last read by each
     warp of the CTA]

`writer` is 0 for nobody, 1 + slot for a warp, ASYNC or GENERIC_COPY for an asynchronous operation whose number is then
`epoch`.
`bytes` is the mask of the bytes written, plus STRONG for atomic and volatile accesses, which do not race with
each other. The peer reader is the warp of another CTA of the cluster that read the word last.
Global memory has records of 8: [writer, epoch, pc, bytes, reader, epoch, pc, 0]: the last writer and the last reader.

An access is ordered behind an earlier one iff the warp's vector clock has reached the other warp's epoch, or the
asynchronous operation's bit is set in what the warp knows to be complete. Races are appended to a small buffer (one
entry per pair of program places) that the scheduler empties. Compiled by `interpreter.checking_module()`.
"""

from __future__ import annotations

import numpy as np

from softsm.engine.lanes import i8, load8, load16, load32, load64, store32, store64, u4
from softsm.engine.program import (
    S_ALLOC,
    S_CLOCK,
    S_GLOBAL_SHADOW,
    S_HIT,
    S_INDEX,
    S_KNOWN,
    S_NEXT_OP,
    S_RACES,
    S_SCRATCH,
    S_SHADOW,
    S_SHARED,
    S_SHARED_SIZE,
    S_SLOT,
    S_SLOT0,
    S_WARPS,
)

compiled = globals().get("compiled") or (lambda signature: lambda function: function)

ASYNC = 0x40000000
GENERIC_COPY = 0x60000000  # cp.async: asynchronous, but of the generic proxy
STRONG = 16
LATER = 64  # not the first word of a vector: a compiler may load padding with it
QUIET = 32  # a store that changes no byte: several warps executing one store of one value do not race
FIXED = 9  # fields before the readers
GLOBAL_RECORD = 8
OPS = 16384  # asynchronous operations told apart; older ones count as complete
RAW, WAW, WAR, UNINITIALISED = 0, 1, 2, 3
MAX_RACES = 64
RACE_FIELDS = 8


@compiled("i8(i8, i8)")
def sget(S, k):
    return i8(load64(S + 8 * k))


@compiled("i8(i8, i8, i8)")
def complete(known, number, newest):
    """Is the asynchronous operation known to be complete?"""
    if newest - number >= OPS - 64:
        return 1
    k = number & (OPS - 1)
    return i8((load32(known + 4 * (k >> 5)) >> u4(k & 31)) & u4(1))


@compiled("void(i8, i8, i8, i8, i8, i8, i8, i8, i8)")
def report(races, kind, place, address, pc, agent, epoch, other_pc, lane):
    n = i8(load64(races))
    for k in range(n):
        at = races + 8 + k * 8 * RACE_FIELDS
        if i8(load64(at)) == kind and i8(load64(at + 24)) == pc and i8(load64(at + 48)) == other_pc:
            return
    if n < MAX_RACES:
        at = races + 8 + n * 8 * RACE_FIELDS
        store64(at, np.uint64(kind))
        store64(at + 8, np.uint64(place))
        store64(at + 16, np.uint64(address))
        store64(at + 24, np.uint64(pc))
        store64(at + 32, np.uint64(agent))
        store64(at + 40, np.uint64(epoch))
        store64(at + 48, np.uint64(other_pc))
        store64(at + 56, np.uint64(lane))
        store64(races, np.uint64(n + 1))


@compiled("i8(i8, i8, i8, i8, i8, i8)")
def ordered(agent, epoch, me, clock, known, newest):
    """Did the last writer (agent, epoch) happen before me?"""
    if agent == 0 or agent == me:
        return 1
    if agent >= ASYNC:
        return complete(known, epoch, newest)
    return 1 if i8(load32(clock + 4 * (agent - 1))) >= epoch else 0


@compiled("void(i8, i8, i8, i8, i8, i8, i8, i8, i8)")
def other_readers(at, word, pc, me, clock, known, newest, races, lane):
    """Are the reads of asynchronous operations and of peers over before `me` writes? (me = 0: an asynchronous write)"""
    for k in range(2):
        number = i8(load32(at + 16 + 4 * k))
        if number and not (me == 0 and number == newest) and not complete(known, number, newest):
            report(races, WAR, 0, word * 4, pc, ASYNC, number, 0, lane)
    reader = i8(load32(at + 24))
    if reader and reader != me and i8(load32(clock + 4 * (reader - 1))) < i8(load32(at + 28)):
        report(races, WAR, 0, word * 4, pc, reader, i8(load32(at + 28)), i8(load32(at + 32)), lane)


@compiled("void(i8, i8, i8, i8, i8, i8, i8, i8)")
def shared_word(S, word, touched, write, pc, lane, clock, known):
    """One warp touches some bytes of one word of its own shared memory."""
    warps, index, slot0 = sget(S, S_WARPS), sget(S, S_INDEX), sget(S, S_SLOT0)
    me, newest, races = sget(S, S_SLOT) + 1, i8(load64(sget(S, S_NEXT_OP))), sget(S, S_RACES)
    at = sget(S, S_SHADOW) + word * 4 * (FIXED + 2 * warps)
    agent, epoch, theirs = i8(load32(at)), i8(load32(at + 4)), i8(load32(at + 12))
    strong = touched & theirs & STRONG
    if agent == 0:
        if not write and not touched & LATER:
            report(races, UNINITIALISED, 0, word * 4, pc, 0, 0, 0, lane)
    elif (
        (touched & theirs & 15)
        and not strong
        and not ordered(agent, epoch, me, clock, known, newest)
        and not (touched & QUIET and i8(load32(at + 8)) == pc)
    ):
        report(races, WAW if write else RAW, 0, word * 4, pc, agent, epoch, i8(load32(at + 8)), lane)
    if not write:
        store32(at + 4 * (FIXED + 2 * index), u4(load32(clock + 4 * (me - 1))))
        store32(at + 4 * (FIXED + 2 * index) + 4, u4(pc))
        return
    for r in range(warps):
        seen = i8(load32(at + 4 * (FIXED + 2 * r)))
        if seen and r != index and i8(load32(clock + 4 * (slot0 + r))) < seen and not touched & STRONG:
            report(
                races,
                WAR,
                0,
                word * 4,
                pc,
                slot0 + r + 1,
                seen,
                i8(load32(at + 4 * (FIXED + 2 * r) + 4)),
                lane,
            )
    other_readers(at, word, pc, me, clock, known, newest, races, lane)
    store32(at, u4(me))
    store32(at + 4, load32(clock + 4 * (me - 1)))
    store32(at + 8, u4(pc))
    store32(at + 12, u4((touched & 31) | (theirs & 15 if agent == me else 0)))


@compiled("void(i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8)")
def peer(shadow, warps, slot0, me, clock, known, low, high, write, flags, pc, newest, races, lane):
    """A warp (`me` = 1 + its slot) touches bytes [low, high) of the shared memory of another CTA."""
    for word in range(low >> 2, (high + 3) >> 2):
        at = shadow + word * 4 * (FIXED + 2 * warps)
        agent, epoch, theirs = i8(load32(at)), i8(load32(at + 4)), i8(load32(at + 12))
        if agent == 0:
            if not write:
                report(races, UNINITIALISED, 0, word * 4, pc, 0, 0, 0, lane)
        elif not flags & theirs & STRONG and not ordered(agent, epoch, me, clock, known, newest):
            report(races, WAW if write else RAW, 0, word * 4, pc, agent, epoch, i8(load32(at + 8)), lane)
        if not write:
            store32(at + 24, u4(me))
            store32(at + 28, load32(clock + 4 * (me - 1)))
            store32(at + 32, u4(pc))
            continue
        for r in range(warps):
            seen = i8(load32(at + 4 * (FIXED + 2 * r)))
            if seen and i8(load32(clock + 4 * (slot0 + r))) < seen and not flags & STRONG:
                report(
                    races,
                    WAR,
                    0,
                    word * 4,
                    pc,
                    slot0 + r + 1,
                    seen,
                    i8(load32(at + 4 * (FIXED + 2 * r) + 4)),
                    lane,
                )
        if not flags & STRONG:
            other_readers(at, word, pc, me, clock, known, newest, races, lane)
        store32(at, u4(me))
        store32(at + 4, load32(clock + 4 * (me - 1)))
        store32(at + 8, u4(pc))
        store32(at + 12, u4(15 | flags & STRONG))


@compiled("void(i8, i8, i8, i8, i8, i8, i8, i8)")
def global_word(S, address, touched, write, pc, lane, clock, known):
    """One warp touches some bytes of one word of a known allocation (the one of S_HIT, else looked up)."""
    hit = sget(S, S_HIT)
    start = i8(load64(sget(S, S_ALLOC) + 16 * hit))
    end = i8(load64(sget(S, S_ALLOC) + 16 * hit + 8))
    if address < start or address >= end:
        return  # lanes in several allocations: only the last one found is followed
    shadow = i8(load64(sget(S, S_GLOBAL_SHADOW) + 8 * hit))
    at = shadow + ((address - (start & ~i8(3))) >> 2) * 4 * GLOBAL_RECORD
    me, newest, races = sget(S, S_SLOT) + 1, i8(load64(sget(S, S_NEXT_OP))), sget(S, S_RACES)
    agent, epoch, theirs = i8(load32(at)), i8(load32(at + 4)), i8(load32(at + 12))
    if agent and (touched & theirs & 15) and not touched & theirs & STRONG:
        if not ordered(agent, epoch, me, clock, known, newest) and not (
            touched & QUIET and i8(load32(at + 8)) == pc
        ):
            report(races, WAW if write else RAW, 1, address, pc, agent, epoch, i8(load32(at + 8)), lane)
    if not write:
        store32(at + 16, u4(me))
        store32(at + 20, load32(clock + 4 * (me - 1)))
        store32(at + 24, u4(pc | (0x80000000 if touched & STRONG else 0)))
        return
    reader, seen = i8(load32(at + 16)), i8(load32(at + 20))
    reader_pc = i8(load32(at + 24))
    if (
        reader
        and not (touched & STRONG and reader_pc & 0x80000000)
        and not ordered(reader, seen, me, clock, known, newest)
    ):
        report(races, WAR, 1, address, pc, reader, seen, reader_pc & 0x7FFFFFFF, lane)
    store32(at, u4(me))
    store32(at + 4, load32(clock + 4 * (me - 1)))
    store32(at + 8, u4(pc))
    store32(at + 12, u4((touched & 31) | (theirs & 15 if agent == me else 0)))


@compiled("i8(i8, i8, i8, i8, i8, i8, u4)")
def quiet(R, Q, pool, S, rows, fmt, m):
    """Would the store whose host addresses are in S[SCRATCH:] change nothing?"""
    log, count, wide = fmt & 3, (fmt >> 4) & 15, fmt & 512
    for k in range(count):
        row = i8(np.int32(load32(pool + 4 * (rows + k))))
        for lane in range(32):
            if (m >> u4(lane)) & u4(1):
                a = sget(S, S_SCRATCH + lane) + (i8(k) << log)
                new = (
                    load64(Q + (row * 32 + lane) * 8)
                    if wide
                    else np.uint64(load32(R + (row * 32 + lane) * 4))
                )
                if log == 0:
                    same = np.uint64(load8(a)) == new & np.uint64(0xFF)
                elif log == 1:
                    same = np.uint64(load16(a)) == new & np.uint64(0xFFFF)
                elif log == 2:
                    same = np.uint64(load32(a)) == new & np.uint64(0xFFFFFFFF)
                else:
                    same = load64(a) == new
                if not same:
                    return 0
    return QUIET


@compiled("void(i8, i8, u4, i8, i8, i8)")
def note(S, size, m, write, flags, pc):
    """The access whose host addresses are in S[SCRATCH:] is made by the lanes of m. flags: 1 = strong, QUIET."""
    if sget(S, S_RACES) == 0:
        return
    clock, known = sget(S, S_CLOCK), sget(S, S_KNOWN)
    base = sget(S, S_SHARED)
    end = base + sget(S, S_SHARED_SIZE)
    flag = (STRONG if flags & 1 else 0) | (flags & QUIET)
    for lane in range(32):
        if (m >> u4(lane)) & u4(1):
            a = sget(S, S_SCRATCH + lane)
            shared = a >= base and a < end
            if shared:
                a -= base
            done = i8(0)
            while done < size:
                inside = (a + done) & 3
                n = min(4 - inside, size - done)
                touched = (((i8(1) << n) - 1) << inside) | flag | (LATER if done else 0)
                if shared:
                    shared_word(S, (a + done) >> 2, touched, write, pc, lane, clock, known)
                else:
                    global_word(S, a + done, touched, write, pc, lane, clock, known)
                done += n


@compiled("void(i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8)")
def asynchronous(
    shadow, warps, slot0, spans, count, write, number, agent_kind, clock, known, fenced, races, pc
):
    """An asynchronous operation `number` reads or writes `count` spans of bytes (pairs low, high) of a shared memory.

    clock, known: what the issuer has seen, as far as the operation's proxy sees it; fenced: which cp.async are
    complete and visible to that proxy. agent_kind: ASYNC or GENERIC_COPY."""
    newest = number
    stride = 4 * (FIXED + 2 * warps)
    for s in range(count):
        low, high = i8(load64(spans + 16 * s)), i8(load64(spans + 16 * s + 8))
        for word in range(low >> 2, (high + 3) >> 2):
            at = shadow + word * stride
            agent, epoch = i8(load32(at)), i8(load32(at + 4))
            if agent == 0:
                if not write:
                    report(races, UNINITIALISED, 0, word * 4, pc, 0, 0, 0, -1)
            elif agent >= ASYNC:
                if epoch != number and not complete(
                    fenced if agent == GENERIC_COPY else known, epoch, newest
                ):
                    report(
                        races, WAW if write else RAW, 0, word * 4, pc, agent, epoch, i8(load32(at + 8)), -1
                    )
            elif i8(load32(clock + 4 * (agent - 1))) < epoch:
                report(races, WAW if write else RAW, 0, word * 4, pc, agent, epoch, i8(load32(at + 8)), -1)
            if not write:
                if i8(load32(at + 16)) != number:
                    store32(at + 20, load32(at + 16))
                    store32(at + 16, u4(number))
                continue
            for r in range(warps):
                seen = i8(load32(at + 4 * (FIXED + 2 * r)))
                if seen and i8(load32(clock + 4 * (slot0 + r))) < seen:
                    report(
                        races,
                        WAR,
                        0,
                        word * 4,
                        pc,
                        slot0 + r + 1,
                        seen,
                        i8(load32(at + 4 * (FIXED + 2 * r) + 4)),
                        -1,
                    )
            other_readers(at, word, pc, 0, clock, known, newest, races, -1)
            store32(at, u4(agent_kind))
            store32(at + 4, u4(number))
            store32(at + 8, u4(pc))
            store32(at + 12, u4(15))


@compiled("void(i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8)")
def asynchronous_global(
    shadow, origin, spans, count, write, number, agent_kind, clock, known, fenced, races, pc, flags
):
    """The same for spans of one allocation of global memory whose shadow begins at the address `origin`. flags: STRONG
    for reductions, which do not race with each other."""
    newest = number
    for s in range(count):
        low, high = i8(load64(spans + 16 * s)), i8(load64(spans + 16 * s + 8))
        for word in range((low - origin) >> 2, (high - origin + 3) >> 2):
            at = shadow + word * 4 * GLOBAL_RECORD
            agent, epoch = i8(load32(at)), i8(load32(at + 4))
            if agent and not flags & i8(load32(at + 12)) & STRONG:
                if agent >= ASYNC:
                    bad = epoch != number and not complete(
                        fenced if agent == GENERIC_COPY else known, epoch, newest
                    )
                else:
                    bad = i8(load32(clock + 4 * (agent - 1))) < epoch
                if bad:
                    report(
                        races,
                        WAW if write else RAW,
                        1,
                        origin + word * 4,
                        pc,
                        agent,
                        epoch,
                        i8(load32(at + 8)),
                        -1,
                    )
            if not write:
                store32(at + 16, u4(agent_kind))
                store32(at + 20, u4(number))
                store32(at + 24, u4(pc))
                continue
            reader, seen = i8(load32(at + 16)), i8(load32(at + 20))
            if (
                reader
                and not (reader >= ASYNC and seen == number)
                and not ordered(reader, seen, 0, clock, known, newest)
            ):
                report(
                    races, WAR, 1, origin + word * 4, pc, reader, seen, i8(load32(at + 24)) & 0x7FFFFFFF, -1
                )
            store32(at, u4(agent_kind))
            store32(at + 4, u4(number))
            store32(at + 8, u4(pc))
            store32(at + 12, u4(15 | flags & STRONG))


@compiled("void(i8, i8, i8, i8, i8)")
def span(S, low, high, write, pc):
    """The warp of S itself reads or writes bytes [low, high) of its own shared memory."""
    for word in range(low >> 2, (high + 3) >> 2):
        shared_word(S, word, 15, write, pc, -1, sget(S, S_CLOCK), sget(S, S_KNOWN))


@compiled("void(i8, i8, i8, i8, i8, i8)")
def lines(S, offsets, count, write, pc, flags):
    """The warp of S itself reads or writes rows of 16 bytes of its own shared memory. flags: QUIET."""
    for k in range(count):
        first = i8(load64(offsets + 8 * k)) >> 2
        for word in range(first, first + 4):
            shared_word(S, word, 15 | flags, write, pc, -1, sget(S, S_CLOCK), sget(S, S_KNOWN))


@compiled("void(i8, i8, i8, i8)")
def join(target, source, clocks, words):
    """Vector clocks: the maximum of the first `clocks` entries, the union of the bits in the `words` that follow."""
    for k in range(clocks):
        b = load32(source + 4 * k)
        if b > load32(target + 4 * k):
            store32(target + 4 * k, b)
    for k in range(clocks, clocks + words):
        b = load32(source + 4 * k)
        if b:
            store32(target + 4 * k, load32(target + 4 * k) | b)
