"""Shadow memory: who touched each word of shared and global memory last, and was it before?

One record of uint32 per 4-byte word of shared memory:

    [writer, epoch, pc, bytes, async reader, async reader, peer reader, epoch, pc, epoch of older bytes,
     warps of the CTA that have read it, async reader, peer reader, epoch, pc, peer reader, epoch, pc]

Blocks of BLOCK words have such records too. Asynchronous operations touch whole blocks, whose words then stay alike:
one record stands for all of them until an access touches a single word (`split_block`). In memory: the records of all
words, those of all blocks, and a byte for each block: 0 while its own record counts.

`writer` is 0 if there is none, 1 + slot for a warp, ASYNC or GENERIC_COPY for an asynchronous operation whose number is
then `epoch`. `bytes` holds, from the low bits on: the bytes written (4 bits), STRONG for atomic and volatile accesses,
which do not race with each other, the bytes of them written in `epoch` itself (4 bits, from FRESH on; the others are
older), the lane that wrote them (6 bits, from LANE on; NOBODY when it is not one lane's doing), SEVERAL when lanes
wrote different bytes, and LIVE where an mbarrier lies. Warps are the bits of a word; of more than 32 several share one.
The last read of each word by each warp of the CTA has an array of its own, of (epoch, pc). Above the pc stand the bytes
read in that epoch (4 bits) and the lane. The peer readers are the warp of another CTA of the cluster that read the word
last and two others (`peer_reader` of checks/byte_ranges.py).

Global memory has records of 16: [writer, epoch, pc, bytes, reader, epoch, pc, reader, epoch, pc, epoch of older bytes,
owner, reader, epoch, pc, 0]: the last writer, the last warp or operation that read and two others (`global_reader`),
and which clusters touched the word at all: the first one's number, WRITTEN if one of them wrote, SEVERAL_CLUSTERS when
others came.

An access is ordered behind an earlier one iff the warp's vector clock has reached the other warp's epoch, or the
asynchronous operation's bit is set in what the warp knows to be complete. Lanes of one warp are ordered when they have
met in between: at a barrier, bar.warp.sync among them, or in a release by all of them (clocks.BEGIN). Epochs are even
numbers. What a clock says of a warp is odd where all its lanes have passed on what they did up to that epoch, even
where only some of them have, without having met the others: `released` tells which.

Races are appended to a small buffer (one entry per pair of program places) that the scheduler empties. Here is what
all records share, and shared memory; checks/global_shadow.py has global memory, checks/stored_values.py compares what
is stored, and checks/byte_ranges.py has the rest.
"""

from __future__ import annotations

import numpy as np

from softsm.checks.clocks import BEGIN, PLACE, RELEASING, WORDS
from softsm.engine.lanes import i8, load8, load32, load64, store8, store32, store64, u4
from softsm.engine.native import native
from softsm.engine.program import (
    S_INDEX,
    S_NEXT_OP,
    S_RACES,
    S_READS,
    S_SHADOW,
    S_SHARED_SIZE,
    S_SLOT,
    S_SLOT0,
    S_WARPS,
)

ASYNC = 0x40000000
GENERIC_COPY = 0x60000000  # cp.async: asynchronous, but of the generic proxy
STRONG = 16
LATER = 64  # not the first word of a vector: a compiler may load padding with it
RELEASED = 128  # who acquires what this write released comes after the write too
QUIET = 32  # a store that changes no byte: several warps executing one store of one value do not race
FRESH = 8  # first bit of the bytes written in the record's epoch
LANE = 12  # first bit of the lane that wrote them
WHOLE_WARP = 32  # in place of a lane: stmatrix and ldmatrix, which move registers of all lanes
NOBODY = 63  # no lane to hold responsible
SEVERAL = 1 << 18
LIVE = 1 << 19
READ_BYTES = 21  # first bit of the bytes read, above the pc
READ_LANE = 25  # first bit of the reading lane
READ_SEVERAL = 1 << 31
PC = (1 << READ_BYTES) - 1
RECORD = 18  # fields of a word of shared memory
BLOCK_BITS = 3
BLOCK = 1 << BLOCK_BITS  # words: 32 bytes, which a product reads of a row
GLOBAL_RECORD = 16
READERS = 3  # of a word of global memory, and of peers of one of shared memory, that are remembered
OWNER = 11  # its field
OPS = 32 * WORDS  # asynchronous operations that have a bit of their own; older ones count as complete
RAW, WAW, WAR, UNINITIALISED, OVER_BARRIER = 0, 1, 2, 3, 4
SAME = 5  # WAW, but the value was there already
MAX_RACES = 64
RACE_FIELDS = 8
CONTENDED = 1 + MAX_RACES * RACE_FIELDS  # behind the findings: has a word been touched by two clusters, written by one?
PARTS = CONTENDED + 1  # the address of a table: PARTS_KEPT words for each slot, see `released`
CLUSTERS = PARTS + 1  # and behind that the cluster of each slot, counted from 1
PARTS_KEPT = 8
MANY = 64  # added to a lane: others have touched the same bytes
WRITTEN = 1 << 30
SEVERAL_CLUSTERS = 1 << 31
CLUSTER = WRITTEN - 1


@native("i8(i8, i8)")
def sget(S, k):
    return i8(load64(S + 8 * k))


@native("i8(i8, i8, i8)")
def complete(known, number, newest):
    """Is the asynchronous operation known to be complete?"""
    if newest - number >= OPS - 64:
        return 1
    k = number & (OPS - 1)
    return i8((load32(known + 4 * (k >> 5)) >> u4(k & 31)) & u4(1))


@native("void(i8, i8, i8, i8, i8, i8, i8, i8, i8)")
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


@native("i8(i8, i8, i8, i8, i8)")
def released(races, slot, upto, epoch, lane):
    """Some lanes of the warp of `slot` have passed on what they did up to the epoch `upto`. Is an access of `epoch` by
    `lane` part of that? What came before the lanes had met is. The table has, for each of the last times between two
    meetings that this happened in: the epoch it began with, and above that the lanes that have passed on something."""
    table = i8(load64(races + 8 * PARTS)) + 8 * PARTS_KEPT * slot
    begin, mask = i8(0), u4(0)
    for k in range(PARTS_KEPT):
        at = i8(load32(table + 8 * k))
        if begin < at and at <= upto:
            begin, mask = at, load32(table + 8 * k + 4)
    if begin == 0 or epoch < begin or lane & 63 == NOBODY:
        return 1
    if lane & 63 == WHOLE_WARP or not (mask >> u4(lane & 31)) & u4(1):
        return 0
    return 0 if lane & MANY and mask & (mask - u4(1)) == u4(0) else 1


@native("i8(i8, i8, i8, i8, i8)")
def unseen(clock, agent, epoch, lane, races):
    """An access by a warp: 0 when it happened before, as `clock` says, 1 when it did not, 2 + lane when other lanes of
    its warp have released what they did, and this one has not."""
    upto = i8(load32(clock + 4 * (agent - 1)))
    if upto < epoch:
        return 1
    if upto & 1 or released(races, agent - 1, upto, epoch, lane):
        return 0
    return 2 + (lane & 63)


@native("i8(i8, i8, i8, i8, i8, i8, i8, i8)")
def not_before(agent, epoch, lane, me, clock, known, newest, races):
    """Did the last writer or reader (agent, epoch) happen before me? As in `unseen`."""
    if agent == 0 or agent == me:
        return 0
    if agent >= ASYNC:
        return 1 - complete(known, epoch, newest)
    return unseen(clock, agent, epoch, lane, races)


@native("i8(i8, i8)")
def both(lane, other):
    """Two lanes as one number of a finding."""
    return (NOBODY if lane < 0 else lane) | (other + 1) << 6


@native("i8(i8, i8)")
def lanes_of(lane, found):
    """The same for what `unseen` has found."""
    return lane if found < 2 else both(lane, found - 2)


@native("i8(i8, i8)")
def writer(touched, theirs):
    """The lane that wrote the touched bytes, from what the record says of its bytes, or NOBODY."""
    fresh = (theirs >> FRESH) & 15
    if touched & fresh == 0 or theirs & SEVERAL and touched & fresh != fresh:
        return i8(NOBODY)
    return (theirs >> LANE) & 63 | (MANY if theirs & SEVERAL else 0)


@native("i8(i8, i8)")
def reader(touched, place):
    """The same for a read, by the field with its pc."""
    whole = (place >> READ_BYTES) & 15
    if place & READ_SEVERAL and touched & whole != whole:
        return i8(NOBODY)
    return (place >> READ_LANE) & 63 | (MANY if place & READ_SEVERAL else 0)


@native("i8(i8, i8, i8, i8, i8)")
def written(at, touched, theirs, epoch, older):
    """The epoch in which the writer last wrote one of the touched bytes; -1 when it wrote none of them. `older`: where
    the record keeps the epoch of bytes that are not of its own."""
    if touched & (theirs >> FRESH) & 15:
        return epoch
    if touched & theirs & 15:
        return i8(load32(at + older))
    return -1


@native("i8(i8, i8, i8, i8, i8, i8, i8, i8, i8)")
def unordered(at, touched, older, pc, me, clock, known, newest, races):
    """Does warp `me` touch bytes that another warp wrote, and nothing orders that write before? As in `unseen`."""
    agent, epoch, theirs = i8(load32(at)), i8(load32(at + 4)), i8(load32(at + 12))
    when = written(at, touched, theirs, epoch, older)
    if when < 0 or touched & theirs & STRONG or touched & QUIET and i8(load32(at + 8)) == pc:
        return 0
    if theirs & RELEASED and when == epoch and (theirs >> LANE) & 63 != NOBODY:
        when -= 2  # the epoch that it released; of several lanes one may still write when another's value is there
    return not_before(agent, when, writer(touched, theirs), me, clock, known, newest, races)


@native("i8(i8, i8)")
def behind_write(touched, write):
    """What an access that is not ordered behind a write is called."""
    if not write:
        return RAW
    return SAME if touched & QUIET else WAW


@native("i8(i8, i8, i8, i8, i8, i8)")
def lanes_race(touched, theirs, epoch, begin, lane, write):
    """One warp again, and its lanes have not met: did another lane of it write these bytes? Returns that lane, else -1.
    Bytes that several lanes wrote are held against an access of all of them only: then one was another's."""
    fresh = (theirs >> FRESH) & 15
    if epoch < begin or lane == NOBODY or not touched & fresh or touched & STRONG and theirs & STRONG:
        return -1
    if write and touched & QUIET:
        return -1
    other = (theirs >> LANE) & 63
    if theirs & SEVERAL:
        return other if touched & fresh == fresh else -1
    return other if other != lane and other != NOBODY else -1


@native("i8(i8, i8, i8, i8)")
def releasing(clock, touched, now, address):
    """What is touched, with RELEASED if this is the write by which the warp has just released."""
    if touched & STRONG and i8(load32(clock + RELEASING)) == now and load32(clock + PLACE) == u4(address & ~i8(3)):
        return touched | RELEASED
    return touched


@native("void(i8, i8, i8, i8, i8, i8, i8, i8, i8)")
def written_by(at, me, now, pc, touched, theirs, agent, lane, older):
    """The record of a write by warp `me`, in its epoch `now`."""
    fresh = touched & 15
    mask, who, several = fresh, lane, i8(0)
    if agent == me:
        epoch, before = i8(load32(at + 4)), (theirs >> FRESH) & 15
        mask |= theirs & 15
        if epoch == now:
            wrote = (theirs >> LANE) & 63
            several = theirs & SEVERAL
            if before & fresh and wrote != lane:
                who = i8(NOBODY)
            elif before and wrote != lane:
                several = i8(SEVERAL)
            fresh |= before
        else:
            store32(at + older, u4(epoch))
    store32(at, u4(me))
    store32(at + 4, u4(now))
    store32(at + 8, u4(pc))
    store32(at + 12, u4(mask | (touched & (STRONG | RELEASED)) | fresh << FRESH | who << LANE | several))


@native("i8(i8, i8)")
def peer_at(at, k):
    """Where the three fields of peer reader k lie in the record of a word."""
    return at + 24 if k == 0 else at + 36 + 12 * k


@native("void(i8, i8, i8, i8, i8, i8, i8, i8, i8)")
def other_readers(at, word, pc, me, clock, known, newest, races, lane):
    """Are the reads of asynchronous operations and of peers over before `me` writes? (me = 0: an asynchronous write)"""
    for k in range(3):
        number = i8(load32(at + 16 + 4 * k if k < 2 else at + 44))
        if number and not (me == 0 and number == newest) and not complete(known, number, newest):
            report(races, WAR, 0, word * 4, pc, ASYNC, number, 0, lane)
    for k in range(READERS):
        there = peer_at(at, k)
        peer, seen, place = i8(load32(there)), i8(load32(there + 4)), i8(load32(there + 8))
        if peer and peer != me:
            found = unseen(clock, peer, seen, (place >> READ_LANE) & 63, races)
            if found:
                report(races, WAR, 0, word * 4, pc, peer, seen, place & PC, lanes_of(lane, found))


@native("void(i8, i8, i8)")
def split_block(shadow, blocks, word):
    """Each word of the block of `word` has a record of its own from now on."""
    block = word >> BLOCK_BITS
    flag = shadow + (BLOCK + 1) * blocks * 4 * RECORD + block
    if load8(flag):
        return
    store8(flag, np.uint8(1))
    of, to = shadow + (BLOCK * blocks + block) * 4 * RECORD, shadow + BLOCK * block * 4 * RECORD
    for field in range(0, 4 * RECORD, 8):  # warps have not read it
        value = load64(of + field)
        for k in range(BLOCK):
            store64(to + k * 4 * RECORD + field, value)


@native("void(i8, i8, i8, i8, i8, i8, i8, i8)")
def shared_word(S, word, touched, write, pc, lane, clock, known):
    """One warp touches some bytes of one word of its own shared memory."""
    index = sget(S, S_INDEX)
    me, newest, races = sget(S, S_SLOT) + 1, i8(load64(sget(S, S_NEXT_OP))), sget(S, S_RACES)
    words = (sget(S, S_SHARED_SIZE) + 3) >> 2
    split_block(sget(S, S_SHADOW), (words + BLOCK - 1) >> BLOCK_BITS, word)
    at = sget(S, S_SHADOW) + word * 4 * RECORD
    agent, epoch, theirs = i8(load32(at)), i8(load32(at + 4)), i8(load32(at + 12))
    now, begin = i8(load32(clock + 4 * (me - 1))) - 1, i8(load32(clock + BEGIN))
    who = i8(NOBODY) if lane < 0 else lane
    if agent == 0:
        if not write and not touched & LATER:
            report(races, UNINITIALISED, 0, word * 4, pc, 0, 0, 0, lane)
    elif agent == me:
        other = lanes_race(touched, theirs, epoch, begin, who, write)
        if other >= 0 and i8(load32(at + 8)) != pc:
            report(races, WAW if write else RAW, 0, word * 4, pc, agent, epoch, i8(load32(at + 8)), both(lane, other))
    else:
        found = unordered(at, touched, 36, pc, me, clock, known, newest, races)
        if found:
            lanes = lanes_of(lane, found)
            report(races, behind_write(touched, write), 0, word * 4, pc, agent, epoch, i8(load32(at + 8)), lanes)
    reads = sget(S, S_READS) + word * 8
    if not write:
        mine = reads + index * words * 8
        before, readers = i8(load32(mine + 4)), load32(at + 40)
        several, bytes_read = i8(0), touched & 15
        # Else what is there is of a CTA that is over (SpareShadows).
        if (readers >> u4(index & 31)) & u4(1) and i8(load32(mine)) >= begin:
            bytes_read |= (before >> READ_BYTES) & 15
            if before & READ_SEVERAL or (before >> READ_LANE) & 63 != who:
                several = i8(READ_SEVERAL)
        store32(mine, u4(now))
        store32(mine + 4, u4(pc & PC | bytes_read << READ_BYTES | who << READ_LANE | several))
        store32(at + 40, readers | u4(1) << u4(index & 31))
        return
    slot0 = sget(S, S_SLOT0)
    if theirs & LIVE and lane >= 0:
        report(races, OVER_BARRIER, 0, word * 4, pc, me, now, slot0, lane)
    readers = load32(at + 40)
    if readers and not touched & STRONG:
        for r in range(sget(S, S_WARPS)):
            if not (readers >> u4(r & 31)) & u4(1):
                continue
            seen, place = i8(load32(reads + r * words * 8)), i8(load32(reads + r * words * 8 + 4))
            if not seen or not touched & (place >> READ_BYTES) & 15:
                continue
            if r != index:
                found = unseen(clock, slot0 + r + 1, seen, reader(touched, place), races)
                if found:
                    report(races, WAR, 0, word * 4, pc, slot0 + r + 1, seen, place & PC, lanes_of(lane, found))
            elif seen >= begin and who != NOBODY and not touched & QUIET:
                found = reader(touched, place)
                if found != NOBODY and found != who:
                    report(races, WAR, 0, word * 4, pc, me, seen, place & PC, both(lane, found & 63))
    other_readers(at, word, pc, me, clock, known, newest, races, lane)
    written_by(at, me, now, pc, releasing(clock, touched, now, word * 4), theirs, agent, who, 36)
