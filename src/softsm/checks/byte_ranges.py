"""Shadow memory: ranges of bytes that asynchronous operations, warps of other CTAs of the cluster, or whole warps
access.

The records are those of checks/shadow.py.
"""

from __future__ import annotations

import numpy as np

from softsm.checks import global_shadow
from softsm.checks import shadow as records
from softsm.checks.clocks import BEGIN, WORDS
from softsm.checks.shadow import (
    ASYNC,
    BLOCK,
    BLOCK_BITS,
    CHANGES,
    CLUSTERS,
    FRESH,
    GENERIC_COPY,
    GLOBAL_RECORD,
    LANE,
    LIVE,
    NOBODY,
    OVER_BARRIER,
    PC,
    QUIET,
    RAW,
    READ_BYTES,
    READ_LANE,
    READERS,
    RECORD,
    STRONG,
    UNINITIALISED,
    WAR,
    WAW,
    WHOLE_WARP,
    WRITTEN,
)
from softsm.engine.lanes import i8, load8, load32, load64, store8, store32, store64, u4
from softsm.engine.native import native
from softsm.engine.program import (
    CLOCKS,
    S_CLOCK,
    S_KNOWN,
    S_R,
    S_SHADOW,
    S_SHARED,
    S_SHARED_BASE,
    S_SHARED_SIZE,
    SHARED_START,
)


@native("void(i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8)")
def readers_of(at, reads, words, warps, slot0, word, touched, clock, pc, races, lane, me, begin):
    """Reports reads of these bytes by warps of the CTA that do not happen before a write by another agent with `clock`.
    If the warp `me` (or 0) issues the write, lane `lane` does, and all its lanes last synchronised in epoch `begin`."""
    readers = load32(at + 40)
    if readers == u4(0):
        return
    for r in range(warps):
        if (readers >> u4(r & 31)) & u4(1):
            mine = reads + (r * words + word) * 8
            seen, place = i8(load32(mine)), i8(load32(mine + 4))
            if not seen or not touched & (place >> READ_BYTES) & 15:
                continue
            if slot0 + r + 1 == me:
                found = records.reader(touched, place)
                if seen >= begin and found != NOBODY and lane != NOBODY and found != lane:
                    records.report(races, WAR, 0, word * 4, pc, me, seen, place & PC, records.both(lane, found & 63))
            else:
                found = records.unseen(clock, slot0 + r + 1, seen, records.reader(touched, place), races)
                if found:
                    lanes = records.lanes_of(i8(-1) if me else lane, found)
                    records.report(races, WAR, 0, word * 4, pc, slot0 + r + 1, seen, place & PC, lanes)


@native("i8(i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8)")
def behind_writer(at, word, write, number, clock, known, fenced, races, pc, me, begin, lane, flags):
    """Reports the last write of a word if it does not happen before the operation `number`. Returns 1 if all writes of
    that writer in its epoch happen before it, 0 if not or if the result may differ for another word."""
    agent, epoch, theirs = i8(load32(at)), i8(load32(at + 4)), i8(load32(at + 12))
    kind, place = WAW if write else RAW, i8(load32(at + 8))
    if agent == 0:
        if write and not flags & CHANGES:
            return 1
        records.report(races, UNINITIALISED, 0, word * 4, pc, 0, 0, 0, -1)
    elif flags & theirs & STRONG:
        return 0
    elif agent >= ASYNC:
        if epoch == number or records.complete(fenced if agent == GENERIC_COPY else known, epoch, number):
            return 1
        records.report(races, kind, 0, word * 4, pc, agent, epoch, place, -1)
    else:
        found = records.unseen(clock, agent, epoch, records.writer(i8(15), theirs), races)
        if found:
            records.report(races, kind, 0, word * 4, pc, agent, epoch, place, records.lanes_of(i8(-1), found))
        elif agent != me:
            return i8(load32(clock + 4 * (agent - 1))) & 1
        else:
            other = records.lanes_race(i8(15), theirs, epoch, begin, lane, 0, me, races)
            if other >= 0:
                records.report(races, kind, 0, word * 4, pc, agent, epoch, place, records.both(lane, other))
    return 0


@native("void(i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8)")
def global_word(at, address, word, touched, write, number, agent_kind, clock, known, fenced, races, pc):
    accessor = i8(0), clock, known, number, races
    agent, epoch, theirs = i8(load32(at)), i8(load32(at + 4)), i8(load32(at + 12))
    if agent and not touched & theirs & STRONG:
        when, found = records.written(at, touched, theirs, epoch, 40), i8(0)
        if agent < ASYNC:
            if when >= 0:
                found = records.unseen(clock, agent, when, records.writer(touched, theirs), races)
        elif when >= 0 and epoch != number:
            found = 1 - records.complete(fenced if agent == GENERIC_COPY else known, epoch, number)
        if found:
            kind, lanes = WAW if write else RAW, records.lanes_of(i8(-1), found)
            records.report(races, kind, 1, address, pc, agent, epoch, i8(load32(at + 8)), lanes)
    if theirs & LIVE and not write:
        records.report(races, UNINITIALISED, 1, address, pc, agent, epoch, i8(load32(at + 8)), -1)
    if not write:
        global_shadow.global_reader(at, agent_kind, number, pc, 0, word, accessor)
        return
    global_shadow.global_readers(at, address, touched & STRONG, pc, accessor, -1)
    global_shadow.keep_write(at, touched, word, accessor)
    store32(at, u4(agent_kind))
    store32(at + 4, u4(number))
    store32(at + 8, u4(pc))
    store32(at + 12, u4((touched & 31) | (touched & 15) << FRESH | NOBODY << LANE))


@native("void(i8, i8, i8, i8, UniTuple(i8, 5))")
def peer_reader(at, word, now, place, accessor):
    """Records a read by a warp of another CTA, and keeps two earlier reads that are not ordered before it, as
    `global_reader` does."""
    me = accessor[0]
    last = i8(load32(at + 24))
    if last and last != me and global_shadow.outlives(at + 24, 0, accessor):
        least, to = global_shadow.priority(last, i8(load32(at + 28)), word), i8(0)
        for k in range(1, READERS):
            there = records.peer_at(at, k)
            other = i8(load32(there))
            rank = i8(-1)
            if other and other != me and global_shadow.outlives(there, 0, accessor):
                rank = global_shadow.priority(other, i8(load32(there + 4)), word)
            if rank < least:
                least, to = rank, there
        if to:
            for field in range(0, 12, 4):
                store32(to + field, load32(at + 24 + field))
    store32(at + 24, u4(me))
    store32(at + 28, u4(now))
    store32(at + 32, u4(place))


@native("i8(i8, i8, i8)")
def bytes_of(word, low, high):
    """Returns the bytes of a word that [low, high) has, as a mask."""
    return ((i8(1) << min(high - word * 4, 4)) - 1) & ~((i8(1) << max(low - word * 4, 0)) - 1)


@native("void(i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8)", python=True)
def peer(shadow, reads, words, warps, slot0, me, clock, known, low, high, write, flags, pc, newest, races, lane):
    """Checks and records an access by a warp (`me` = 1 + its slot) to bytes [low, high) of another CTA's shared
    memory."""
    now, who = i8(load32(clock + 4 * (me - 1))) - 1, i8(NOBODY) if lane < 0 else lane
    accessor = me, clock, known, newest, races
    for word in range(low >> 2, (high + 3) >> 2):
        records.split_block(shadow, (words + BLOCK - 1) >> BLOCK_BITS, word)
        at = shadow + word * 4 * RECORD
        touched = bytes_of(word, low, high) | flags
        agent, epoch, theirs = i8(load32(at)), i8(load32(at + 4)), i8(load32(at + 12))
        found = i8(0)
        if agent:
            found = records.unordered(at, touched, 36, pc, accessor)
        elif not write:
            records.report(races, UNINITIALISED, 0, word * 4, pc, 0, 0, 0, lane)
        if found:
            kind, lanes = records.behind_write(touched, write), records.lanes_of(lane, found)
            records.report(races, kind, 0, word * 4, pc, agent, epoch, i8(load32(at + 8)), lanes)
        if not write:
            peer_reader(at, word, now, pc | who << READ_LANE, accessor)
            continue
        if theirs & LIVE:
            records.report(races, OVER_BARRIER, 0, word * 4, pc, me, now, slot0, lane)
        if not touched & STRONG:
            readers_of(at, reads, words, warps, slot0, word, touched, clock, pc, races, lane, i8(0), i8(0))
            records.other_readers(at, word, pc, accessor, lane)
        records.written_by(at, me, now, pc, touched, theirs, agent, who, 36)


@native("i8(i8, i8, i8)")
def together(words, block, flag):
    """Merges the records of a block's words, at `words`, into the one at `block` if they are equal."""
    for k in range(BLOCK):
        at = words + k * 4 * RECORD
        if load32(at + 40):  # warps have read it
            return 0
        for field in range(0, 4 * RECORD, 8):
            if load64(at + field) != load64(words + field):
                return 0
    for field in range(0, 4 * RECORD, 8):
        store64(block + field, load64(words + field))
    store8(flag, np.uint8(0))
    return 1


@native("void(i8, i8, i8, u8, i8)")
def new_reader(at, word, number, readers, known):
    """Records that the operation `number` reads a word. Up to three readers that are not known to be complete are kept;
    if there are more, different ones in each word."""
    last, other, third = i8(readers & np.uint64(0xFFFFFFFF)), i8(readers >> np.uint64(32)), i8(load32(at + 44))
    if last and not records.complete(known, last, number):
        if other and not records.complete(known, other, number):
            rank = global_shadow.priority(i8(ASYNC), other, word)
            if (
                third == 0
                or records.complete(known, third, number)
                or rank > global_shadow.priority(i8(ASYNC), third, word)
            ):
                store32(at + 44, u4(other))
        store32(at + 20, u4(last))
    store32(at + 16, u4(number))


@native("void(i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8)", python=True)
def asynchronous(site, layout, races, spans, count, write, number, generic, at_clock, told, pc, slot, lane, how):
    """Checks and records an asynchronous operation `number` that reads or writes `count` ranges (pairs low, high) of
    the shared memory with this `site` (CtaView). layout: see checks/clocks.py. at_clock, slot: of the issuer. told:
    clock entries that replace those of the issuer, or 0. generic: the operation belongs to the generic proxy. how:
    STRONG and CHANGES for reductions, which do not race with each other and read what is there.

    Many words have the same writer, so its verdict is reused while nothing else matters. Fields are read in pairs."""
    shadow, reads, words = i8(load64(site)), i8(load64(site + 8)), i8(load64(site + 16))
    warps, slot0 = i8(load64(site + 24)), i8(load64(site + 32))
    blocks = (words + BLOCK - 1) >> BLOCK_BITS
    flags = shadow + (BLOCK + 1) * blocks * 4 * RECORD
    slots = i8(load64(layout + 8 * CLOCKS)) >> 1
    known = at_clock + 8 * slots
    # Which cp.async are complete, and visible to the operation's proxy.
    fenced = known if generic else known + 4 * WORDS
    # A write after a read needs no proxy fence: a read is complete when it is signalled.
    clock = at_clock if write or generic else at_clock + 4 * slots
    # Writes by other lanes of the issuer happen before it if the lanes have synchronised since, before a proxy fence.
    begin = i8(load32(at_clock + BEGIN))
    me = slot + 1 if i8(load32(clock + 4 * slot)) > begin else i8(0)
    agent_kind = i8(GENERIC_COPY) if generic else i8(ASYNC)
    if told:
        clock = told
    behind = w0 = w1 = ~np.uint64(0)  # a complete writer; the last verdict
    bytes_written = 15 | how & STRONG | 15 << FRESH | NOBODY << LANE
    new0, new1 = np.uint64(agent_kind | number << 32), np.uint64(pc | bytes_written << 32)
    for s in range(count):
        low, high = i8(load64(spans + 16 * s)), i8(load64(spans + 16 * s + 8))
        word, end = low >> 2, (high + 3) >> 2
        while word < end:
            block, here = word >> BLOCK_BITS, word
            flag, at, word = flags + block, shadow + word * 4 * RECORD, word + 1
            if here & (BLOCK - 1) == 0 and here + BLOCK <= end:
                whole = shadow + (BLOCK * blocks + block) * 4 * RECORD
                if load8(flag) == 0 or write and together(at, whole, flag):
                    at, word = whole, here + BLOCK
            elif load8(flag) == 0:
                records.split_block(shadow, blocks, here)
            writer, what = load64(at), load64(at + 8)
            if writer != behind and (writer != w0 or what != w1):
                w0, w1 = writer, what
                if behind_writer(at, here, write, number, clock, known, fenced, races, pc, me, begin, lane, how):
                    behind = writer
            readers = load64(at + 16)
            if not write:
                if readers & np.uint64(0xFFFFFFFF) != np.uint64(number):
                    new_reader(at, here, number, readers, known)
                continue
            if i8(what >> np.uint64(32)) & LIVE:
                records.report(races, OVER_BARRIER, 0, here * 4, pc, 0, 0, slot0, -1)
            readers_of(at, reads, words, warps, slot0, here, i8(15), clock, pc, races, lane, slot + 1, begin)
            if readers != np.uint64(0) or load32(at + 24) or load32(at + 44):
                records.other_readers(at, here, pc, (i8(0), clock, known, number, races), -1)
            store64(at, new0)
            store64(at + 8, new1)


@native("void(i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8)", python=True)
def asynchronous_global(
    shadow, origin, start, spans, count, write, number, agent_kind, clock, known, fenced, races, pc, flags, slot
):
    """Does the same for ranges of one allocation of global memory whose shadow begins at the address `origin`. They are
    relative to `start`. flags: STRONG for reductions, which do not race with each other. slot: of the issuer. Fields
    are read in pairs: two for the writer, three for the readers, and the last one."""
    cluster = i8(load64(races + 8 * (CLUSTERS + slot)))
    last = i8(0)
    w0 = w1 = r0 = r1 = r2 = o0 = r3 = r4 = np.uint64(0)
    for s in range(count):
        low, high = i8(load64(spans + 16 * s)) + start - origin, i8(load64(spans + 16 * s + 8)) + start - origin
        for word in range(low >> 2, (high + 3) >> 2):
            at = shadow + word * 4 * GLOBAL_RECORD
            whole = low <= word * 4 and word * 4 + 4 <= high
            if (
                word & 31
                and last
                and whole
                and load64(at) == w0
                and load64(at + 8) == w1
                and load64(at + 16) == r0
                and load64(at + 24) == r1
                and load64(at + 32) == r2
                and load64(at + 40) == o0
                and load64(at + 48) == r3
                and load64(at + 56) == r4
            ):
                if write:
                    store64(at, load64(last))
                    store64(at + 8, load64(last + 8))
                else:
                    store64(at + 16, load64(last + 16))
                    store64(at + 24, load64(last + 24))
                    store64(at + 32, load64(last + 32))
                    store64(at + 48, load64(last + 48))
                    store64(at + 56, load64(last + 56))
                store64(at + 40, load64(last + 40))
                continue
            last = at if whole else i8(0)
            w0, w1, r0 = load64(at), load64(at + 8), load64(at + 16)
            r1, r2, o0 = load64(at + 24), load64(at + 32), load64(at + 40)
            r3, r4 = load64(at + 48), load64(at + 56)
            touched = (((i8(1) << min(high - word * 4, 4)) - 1) & ~((i8(1) << max(low - word * 4, 0)) - 1)) | flags
            global_shadow.global_owner(at, cluster, write, races)
            global_word(
                at, origin + word * 4, word, touched, write, number, agent_kind, clock, known, fenced, races, pc
            )


@native("void(i8, i8, i8, i8, i8, i8, i8)", python=True)
def span(S, low, high, write, flags, pc, lane):
    """Checks and records an access by the warp of S to bytes [low, high) of its CTA's shared memory. flags: STRONG,
    QUIET; lane: -1 for the whole warp."""
    clock, known = records.sget(S, S_CLOCK), records.sget(S, S_KNOWN)
    for word in range(low >> 2, (high + 3) >> 2):
        records.shared_word(S, word, bytes_of(word, low, high) | flags, write, pc, lane, clock, known)


@native("void(i8, i8, i8)", python=True)
def barrier_word(S, low, pc):
    """Records that the warp of S initialises an mbarrier in the 8 bytes at `low`."""
    span(S, low, low + 8, 1, 0, pc, -1)
    for word in range(low >> 2, (low >> 2) + 2):
        at = records.sget(S, S_SHADOW) + word * 4 * RECORD + 12
        store32(at, load32(at) | u4(LIVE))


@native("void(i8, i8, i8, i8, i8, i8)", python=True)
def lines(S, offsets, count, write, pc, flags):
    """Checks and records an access by the warp of S to rows of 16 bytes of its CTA's shared memory. flags: QUIET."""
    for k in range(count):
        first = i8(load64(offsets + 8 * k)) >> 2
        for word in range(first, first + 4):
            clock, known = records.sget(S, S_CLOCK), records.sget(S, S_KNOWN)
            records.shared_word(S, word, 15 | flags, write, pc, WHOLE_WARP, clock, known)


@native("i8(i8, i8, i8, i8)")
def keep_lines(S, row, count, to):
    """Copies the rows of 16 bytes of shared memory whose addresses the first `count` lanes have in register `row`.
    Returns 1 and copies nothing if one is misaligned or out of bounds, or two are equal."""
    addresses, base = records.sget(S, S_R) + row * 128, records.sget(S, S_SHARED_BASE)
    memory, end = records.sget(S, S_SHARED), records.sget(S, S_SHARED_SIZE) & ~15
    for k in range(count):
        at = i8(load32(addresses + 4 * k)) - base
        if at & 15 or at < SHARED_START or at + 16 > end:
            return 1
        for earlier in range(k):
            if i8(load32(addresses + 4 * earlier)) - base == at:
                return 1
    for k in range(count):
        at = memory + i8(load32(addresses + 4 * k)) - base
        store64(to + 16 * k, load64(at))
        store64(to + 16 * k + 8, load64(at + 8))
    return 0


@native("void(i8, i8, i8, i8, i8, i8)")
def register_lines(S, row, count, write, pc, kept):
    """Checks and records that the warp of S reads or has written those rows. kept: their contents before a store."""
    addresses, base = records.sget(S, S_R) + row * 128, records.sget(S, S_SHARED_BASE)
    memory, flags = records.sget(S, S_SHARED), i8(QUIET)
    if write:
        for k in range(count):
            at = memory + i8(load32(addresses + 4 * k)) - base
            if load64(at) != load64(kept + 16 * k) or load64(at + 8) != load64(kept + 16 * k + 8):
                flags = i8(0)
    else:
        flags = i8(0)
    clock, known = records.sget(S, S_CLOCK), records.sget(S, S_KNOWN)
    for k in range(count):
        first = (i8(load32(addresses + 4 * k)) - base) >> 2
        for word in range(first, first + 4):
            records.shared_word(S, word, 15 | flags, write, pc, WHOLE_WARP, clock, known)


@native("void(i8, i8, i8, i8)", python=True)
def touched_words(shadow, owners, words, out):
    """See MemoryAccesses.touched_since."""
    for word in range(words):
        at = shadow + word * 4 * GLOBAL_RECORD
        owner = load32(at + 44)
        if owner != load32(owners + 4 * word):
            flags = i8(load32(at + 12)) & 15 if load32(at) else i8(0)
            if load32(at + 16):
                flags |= 16
            if i8(owner) & WRITTEN:
                flags |= 32
            store8(out + word, np.uint8(flags))
