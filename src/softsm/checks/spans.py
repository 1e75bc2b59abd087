"""Shadow memory, continued: whole spans of bytes, touched by asynchronous operations, by warps of other CTAs of the
cluster, and by a warp as a whole. And the join of two vector clocks.

The records are those of checks/shadow.py. Compiled by `interpreter.spans_module()`, which gives the compiled twin of
that module as `records`.
"""

from __future__ import annotations

import numpy as np

from softsm.checks import shadow
from softsm.checks.shadow import (
    ASYNC,
    CLUSTERS,
    FIXED,
    FRESH,
    GENERIC_COPY,
    GLOBAL_RECORD,
    LANE,
    LIVE,
    NOBODY,
    OVER_BARRIER,
    PC,
    RAW,
    READ_BYTES,
    STRONG,
    UNINITIALISED,
    WAR,
    WAW,
    WHOLE_WARP,
    WRITTEN,
)
from softsm.engine.lanes import i8, load8, load32, load64, store8, store32, store64, u4
from softsm.engine.program import S_CLOCK, S_KNOWN

compiled = globals().get("compiled") or (lambda signature: lambda function: function)
records = globals().get("records") or shadow


@compiled("void(i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8)")
def peer(shadow, warps, slot0, me, clock, known, low, high, write, flags, pc, newest, races, lane):
    """A warp (`me` = 1 + its slot) touches bytes [low, high) of the shared memory of another CTA."""
    now = i8(load32(clock + 4 * (me - 1)))
    for word in range(low >> 2, (high + 3) >> 2):
        at = shadow + word * 4 * (FIXED + 2 * warps)
        touched = (((i8(1) << min(high - word * 4, 4)) - 1) & ~((i8(1) << max(low - word * 4, 0)) - 1)) | flags
        agent, epoch, theirs = i8(load32(at)), i8(load32(at + 4)), i8(load32(at + 12))
        if agent == 0:
            if not write:
                records.report(races, UNINITIALISED, 0, word * 4, pc, 0, 0, 0, lane)
        elif records.unordered(at, touched, 36, pc, me, clock, known, newest):
            kind = records.behind_write(touched, write)
            records.report(races, kind, 0, word * 4, pc, agent, epoch, i8(load32(at + 8)), lane)
        if not write:
            store32(at + 24, u4(me))
            store32(at + 28, u4(now))
            store32(at + 32, u4(pc))
            continue
        if theirs & LIVE:
            records.report(races, OVER_BARRIER, 0, word * 4, pc, me, now, slot0, lane)
        if not touched & STRONG:
            for r in range(warps):
                seen = i8(load32(at + 4 * (FIXED + 2 * r)))
                place = i8(load32(at + 4 * (FIXED + 2 * r) + 4))
                ours = touched & (place >> READ_BYTES) & 15
                if seen and ours and i8(load32(clock + 4 * (slot0 + r))) < seen:
                    records.report(races, WAR, 0, word * 4, pc, slot0 + r + 1, seen, place & PC, lane)
            records.other_readers(at, word, pc, me, clock, known, newest, races, lane)
        records.written_by(at, me, now, pc, touched, theirs, agent, i8(NOBODY), 36)


@compiled("void(i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8)")
def asynchronous(
    shadow, warps, slot0, spans, count, write, number, agent_kind, clock, known, fenced, races, pc, me, lane
):
    """An asynchronous operation `number` reads or writes `count` spans of bytes (pairs low, high) of a shared memory.

    clock, known: what the issuer has seen, as far as the operation's proxy sees it; fenced: which cp.async are
    complete and visible to that proxy. agent_kind: ASYNC or GENERIC_COPY. me: 1 + slot of the issuer if the epoch that
    `clock` has of it is the present one, else 0; then writes of its other lanes are not before it."""
    newest = number
    stride = 4 * (FIXED + 2 * warps)
    for s in range(count):
        low, high = i8(load64(spans + 16 * s)), i8(load64(spans + 16 * s + 8))
        for word in range(low >> 2, (high + 3) >> 2):
            at = shadow + word * stride
            agent, epoch, theirs = i8(load32(at)), i8(load32(at + 4)), i8(load32(at + 12))
            if agent == 0:
                if not write:
                    records.report(races, UNINITIALISED, 0, word * 4, pc, 0, 0, 0, -1)
            elif agent >= ASYNC:
                if epoch != number and not records.complete(
                    fenced if agent == GENERIC_COPY else known, epoch, newest
                ):
                    records.report(
                        races, WAW if write else RAW, 0, word * 4, pc, agent, epoch, i8(load32(at + 8)), -1
                    )
            elif i8(load32(clock + 4 * (agent - 1))) < epoch:
                records.report(races, WAW if write else RAW, 0, word * 4, pc, agent, epoch, i8(load32(at + 8)), -1)
            elif agent == me:
                other = records.lanes_race(i8(15), theirs, epoch, i8(load32(clock + 4 * (me - 1))), lane, 0)
                if other >= 0:
                    records.report(
                        races,
                        WAW if write else RAW,
                        0,
                        word * 4,
                        pc,
                        agent,
                        epoch,
                        i8(load32(at + 8)),
                        records.both(lane, other),
                    )
            if not write:
                if i8(load32(at + 16)) != number:
                    store32(at + 20, load32(at + 16))
                    store32(at + 16, u4(number))
                continue
            if theirs & LIVE:
                records.report(races, OVER_BARRIER, 0, word * 4, pc, 0, 0, slot0, -1)
            for r in range(warps):
                seen = i8(load32(at + 4 * (FIXED + 2 * r)))
                if seen and i8(load32(clock + 4 * (slot0 + r))) < seen:
                    place = i8(load32(at + 4 * (FIXED + 2 * r) + 4))
                    records.report(races, WAR, 0, word * 4, pc, slot0 + r + 1, seen, place & PC, -1)
            records.other_readers(at, word, pc, 0, clock, known, newest, races, -1)
            store32(at, u4(agent_kind))
            store32(at + 4, u4(number))
            store32(at + 8, u4(pc))
            store32(at + 12, u4(15 | 15 << FRESH | NOBODY << LANE))


@compiled("void(i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8)")
def asynchronous_global(
    shadow, origin, spans, count, write, number, agent_kind, clock, known, fenced, races, pc, flags, slot
):
    """The same for spans of one allocation of global memory whose shadow begins at the address `origin`. flags: STRONG
    for reductions, which do not race with each other. slot: of the issuer."""
    newest = number
    cluster = i8(load64(races + 8 * (CLUSTERS + slot)))
    for s in range(count):
        low, high = i8(load64(spans + 16 * s)) - origin, i8(load64(spans + 16 * s + 8)) - origin
        for word in range(low >> 2, (high + 3) >> 2):
            at = shadow + word * 4 * GLOBAL_RECORD
            records.global_owner(at, cluster, write, races)
            touched = (((i8(1) << min(high - word * 4, 4)) - 1) & ~((i8(1) << max(low - word * 4, 0)) - 1)) | flags
            agent, epoch, theirs = i8(load32(at)), i8(load32(at + 4)), i8(load32(at + 12))
            if agent and not touched & theirs & STRONG:
                when = records.written(at, touched, theirs, epoch, 40)
                if agent >= ASYNC:
                    bad = epoch != number and not records.complete(
                        fenced if agent == GENERIC_COPY else known, epoch, newest
                    )
                else:
                    bad = i8(load32(clock + 4 * (agent - 1))) < when
                if bad and when >= 0:
                    records.report(
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
                records.global_reader(at, agent_kind, number, pc, 0)
                continue
            records.global_readers(at, origin + word * 4, flags, pc, 0, clock, known, newest, races, -1)
            store32(at, u4(agent_kind))
            store32(at + 4, u4(number))
            store32(at + 8, u4(pc))
            store32(at + 12, u4((touched & 31) | (touched & 15) << FRESH | NOBODY << LANE))


@compiled("void(i8, i8, i8, i8, i8)")
def span(S, low, high, write, pc):
    """The warp of S itself reads or writes bytes [low, high) of its own shared memory."""
    for word in range(low >> 2, (high + 3) >> 2):
        records.shared_word(S, word, 15, write, pc, -1, records.sget(S, S_CLOCK), records.sget(S, S_KNOWN))


@compiled("void(i8, i8, i8, i8, i8, i8)")
def lines(S, offsets, count, write, pc, flags):
    """The warp of S itself reads or writes rows of 16 bytes of its own shared memory. flags: QUIET."""
    for k in range(count):
        first = i8(load64(offsets + 8 * k)) >> 2
        for word in range(first, first + 4):
            clock, known = records.sget(S, S_CLOCK), records.sget(S, S_KNOWN)
            records.shared_word(S, word, 15 | flags, write, pc, WHOLE_WARP, clock, known)


@compiled("i8(i8, i8, i8, i8, i8, i8, i8, i8, i8, i8)")
def tensor_survey(table, held, groups, low, high, write, me, known, newest, out):
    """Tensor memory, cells [low, high) of the lane groups: which operations wrote them (and read them, for a write) and
    are neither `me` nor known to be complete. out[0]: 1 when nobody wrote a cell, 2 << k when one holds kind k; behind
    it the operations, 2 * number for a writer and one more for a reader. Returns how many."""
    flags, n, tables = i8(0), i8(0), 3 if write else 1
    for g in range(8):
        if (groups >> g) & 1 == 0:
            continue
        for column in range(low, high):
            at = g * 512 + column
            flags |= i8(2) << i8(load8(held + at))
            for k in range(tables):
                number = i8(load64(table + 8 * (at + 4096 * k)))
                if number == 0:
                    if k == 0:
                        flags |= 1
                    continue
                entry = 2 * number + (1 if k else 0)
                if n and i8(load64(out + 8 * n)) == entry or number == me:
                    continue
                if records.complete(known, number, newest):
                    continue
                there = False
                for i in range(1, n + 1):
                    there = there or i8(load64(out + 8 * i)) == entry
                if not there:
                    n += 1
                    store64(out + 8 * n, np.uint64(entry))
    store64(out, np.uint64(flags))
    return n


@compiled("void(i8, i8, i8, i8, i8, i8, i8, i8)")
def tensor_mark(table, held, groups, low, high, write, me, kind):
    """Operation `me` has written the cells, which now hold values of `kind`, or read them."""
    for g in range(8):
        if (groups >> g) & 1 == 0:
            continue
        for column in range(low, high):
            at = g * 512 + column
            if write:
                store64(table + 8 * at, np.uint64(me))
                store8(held + at, np.uint8(kind))
            else:
                store64(table + 8 * (at + 8192), load64(table + 8 * (at + 4096)))
                store64(table + 8 * (at + 4096), np.uint64(me))


@compiled("void(i8, i8, i8, i8)")
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


@compiled("void(i8, i8, i8, i8)")
def join(target, source, clocks, words):
    """Vector clocks: the maximum of the first `clocks` entries, the union of the bits in the `words` that follow."""
    for k in range(clocks):
        b = load32(source + 4 * k)
        if b > load32(target + 4 * k):
            store32(target + 4 * k, b)
    # `clocks` and `words` are even: bits by pairs of words, most of which are zero
    for k in range(clocks, clocks + words, 2):
        pair = load64(source + 4 * k)
        if pair:
            store64(target + 4 * k, load64(target + 4 * k) | pair)
