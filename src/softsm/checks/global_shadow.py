"""The shadow of global memory (checks/shadow.py), and the accesses of a warp to shared and global memory."""

from __future__ import annotations

import numpy as np

from softsm.checks.clocks import BEGIN, DIRTY
from softsm.checks.shadow import (
    ASYNC,
    CHANGES,
    CLUSTER,
    CLUSTERS,
    CONTENDED,
    GLOBAL_RECORD,
    LANE,
    LATER,
    LIVE,
    PC,
    QUIET,
    RAW,
    READ_LANE,
    READ_SEVERAL,
    READERS,
    SEVERAL_CLUSTERS,
    STRONG,
    UNINITIALISED,
    WAR,
    WAW,
    WRITTEN,
    behind_write,
    both,
    lanes_of,
    lanes_race,
    not_before,
    releasing,
    report,
    sget,
    shared_word,
    unordered,
    written_by,
)
from softsm.engine.lanes import i8, load32, load64, store32, store64, u4
from softsm.engine.lanes import known as in_allocation
from softsm.engine.native import native
from softsm.engine.program import (
    S_ALLOC,
    S_CLOCK,
    S_GLOBAL_SHADOW,
    S_HIT,
    S_KNOWN,
    S_NEXT_OP,
    S_RACES,
    S_SCRATCH,
    S_SHARED,
    S_SHARED_SIZE,
    S_SLOT,
)


@native("i8(i8, i8)")
def reader_at(at, k):
    """Returns the address of the three fields of reader k in the record at `at`."""
    return at + 16 + 12 * k if k < 2 else at + 48


@native("i8(i8, i8, i8)")
def priority(agent, epoch, word):
    """Returns a hash of a reader and a word."""
    h = (epoch if agent >= ASYNC else agent) * 0x9E3779B1 + (word + 1) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ h >> 15) * 0x2C1B3C6D & 0xFFFFFFFF
    return h ^ h >> 12


@native("i8(i8, i8, UniTuple(i8, 5))")
def outlives(at, mark, accessor):
    """Returns whether the read at `at` must be kept when `accessor` reads. It need not if it happens before the new
    read: a write ordered after the new read is then ordered after both. A strong read does not replace another."""
    agent, place = i8(load32(at)), i8(load32(at + 8))
    if mark & READ_SEVERAL and not place & READ_SEVERAL:
        return i8(agent != 0)
    return not_before(agent, i8(load32(at + 4)), (place >> READ_LANE) & 63, accessor)


@native("void(i8, i8, i8, i8, i8, i8, UniTuple(i8, 5))")
def global_reader(at, agent, epoch, pc, mark, word, accessor):
    """Records a read, and keeps two earlier reads that are not ordered before it. The hash selects different ones in
    each word, so if many readers share many words, some word keeps each reader. word: its index in the allocation."""
    last = i8(load32(at + 16))
    if (last != agent or agent >= ASYNC and i8(load32(at + 20)) != epoch) and (
        last and outlives(at + 16, mark, accessor)
    ):
        least, to = priority(last, i8(load32(at + 20)), word), i8(0)
        for k in range(1, READERS):
            there = reader_at(at, k)
            other = i8(load32(there))
            if other == 0 or other == agent or not outlives(there, mark, accessor):
                least, to = i8(-1), there
            elif priority(other, i8(load32(there + 4)), word) < least:
                least, to = priority(other, i8(load32(there + 4)), word), there
        if to:
            store32(to, load32(at + 16))
            store32(to + 4, load32(at + 20))
            store32(to + 8, load32(at + 24))
    store32(at + 16, u4(agent))
    store32(at + 20, u4(epoch))
    store32(at + 24, u4(pc | mark))


@native("void(i8, i8, i8, i8, UniTuple(i8, 5), i8)")
def global_readers(at, address, touched, pc, accessor, lane):
    """Reports reads of a word that do not happen before a write by `accessor`."""
    me, newest, races = accessor[0], accessor[3], accessor[4]
    for k in range(READERS):
        there = reader_at(at, k)
        agent, seen, place = i8(load32(there)), i8(load32(there + 4)), i8(load32(there + 8))
        if (
            agent
            and not (me == 0 and agent >= ASYNC and seen == newest)
            and not (touched & STRONG and place & READ_SEVERAL)
        ):
            found = not_before(agent, seen, (place >> READ_LANE) & 63, accessor)
            if found:
                report(races, WAR, 1, address, pc, agent, seen, place & PC, lanes_of(lane, found))


@native("void(i8, i8, i8, UniTuple(i8, 5))")
def keep_write(at, touched, word, accessor):
    """Keeps an ordinary write among the reads when an atomic follows it. Other atomics do not race with the atomic, but
    may race with that write."""
    agent, theirs = i8(load32(at)), i8(load32(at + 12))
    if agent and touched & STRONG and not theirs & STRONG:
        mark = ((theirs >> LANE) & 63) << READ_LANE
        global_reader(at, agent, i8(load32(at + 4)), i8(load32(at + 8)) & PC, mark, word, accessor)


@native("void(i8, i8, i8, i8)")
def global_owner(at, cluster, write, races):
    """Records an access by `cluster`, and sets CONTENDED if several clusters accessed the word and one wrote it."""
    owner = i8(load32(at + 44))
    now = owner if owner else cluster
    if write:
        now |= WRITTEN
    if now & CLUSTER != cluster:
        now |= SEVERAL_CLUSTERS
    if now != owner:
        store32(at + 44, u4(now))
    if now & WRITTEN and now & SEVERAL_CLUSTERS:
        store64(races + 8 * CONTENDED, np.uint64(1))


@native("void(i8, i8, i8, i8, i8, i8, i8, UniTuple(i8, 5))", python=True)
def global_record(at, address, word, touched, write, pc, lane, accessor):
    """Checks and records an access by a warp to some bytes of word `word` of an allocation; its record is at `at`."""
    me, clock, races = accessor[0], accessor[1], accessor[4]
    agent, epoch, theirs = i8(load32(at)), i8(load32(at + 4)), i8(load32(at + 12))
    now, begin = i8(load32(clock + 4 * (me - 1))) - 1, i8(load32(clock + BEGIN))
    global_owner(at, i8(load64(races + 8 * (CLUSTERS + me - 1))), write, races)
    if agent == me:
        other = lanes_race(touched, theirs, epoch, begin, lane, write, me, races)
        if other >= 0 and i8(load32(at + 8)) != pc:
            report(races, WAW if write else RAW, 1, address, pc, agent, epoch, i8(load32(at + 8)), both(lane, other))
    elif agent:
        found = unordered(at, touched, 40, pc, accessor)
        if found:
            lanes = lanes_of(lane, found)
            report(races, behind_write(touched, write), 1, address, pc, agent, epoch, i8(load32(at + 8)), lanes)
    if theirs & LIVE and (not write or touched & CHANGES):
        report(races, UNINITIALISED, 1, address, pc, agent, epoch, i8(load32(at + 8)), lane)
    if not write:
        mark = lane << READ_LANE | (READ_SEVERAL if touched & STRONG else 0)
        global_reader(at, me, now, pc, mark, word, accessor)
        return
    global_readers(at, address, touched, pc, accessor, lane)
    keep_write(at, touched, word, accessor)
    written_by(at, me, now, pc, releasing(clock, touched, now, address), theirs, agent, lane, 40)


@native("void(i8, i8, i8, i8, i8, i8, i8)")
def global_word(S, address, touched, write, pc, lane, clock):
    """Checks and records an access by a warp to some bytes of one word of global memory, in any allocation."""
    if not in_allocation(S, address, address + 1):
        return
    hit = sget(S, S_HIT)
    start = i8(load64(sget(S, S_ALLOC) + 16 * hit))
    shadow = i8(load64(sget(S, S_GLOBAL_SHADOW) + 8 * hit))
    word = (address - (start & ~i8(3))) >> 2
    accessor = sget(S, S_SLOT) + 1, clock, sget(S, S_KNOWN), i8(load64(sget(S, S_NEXT_OP))), sget(S, S_RACES)
    global_record(shadow + word * 4 * GLOBAL_RECORD, address, word, touched, write, pc, lane, accessor)


@native("void(i8, i8, u4, i8, i8, i8)")
def note(S, size, m, write, flags, pc):
    """Checks and records an access by the lanes of m, whose host addresses are in S[SCRATCH:]. flags: 1 = strong,
    2 = an atomic that also reads, QUIET."""
    if sget(S, S_RACES) == 0:
        return
    clock, known = sget(S, S_CLOCK), sget(S, S_KNOWN)
    store32(clock + DIRTY, load32(clock + DIRTY) | m)
    base = sget(S, S_SHARED)
    end = base + sget(S, S_SHARED_SIZE)
    flag = (STRONG if flags & 1 else 0) | (CHANGES if flags & 2 else 0) | (flags & QUIET)
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
                    global_word(S, a + done, touched, write, pc, lane, clock)
                done += n
