"""Shadow memory: the last accesses of each word of shared and global memory, with which new accesses may race.

Each 4-byte word of shared memory has a record of uint32 fields:

    [writer, epoch, pc, bytes, async reader, async reader, peer reader, epoch, pc, epoch of older bytes,
     warps of the CTA that have read it, async reader, peer reader, epoch, pc, peer reader, epoch, pc]

Blocks of BLOCK words have records too. An asynchronous operation accesses whole blocks, so all words of a block have
the same state: the block's record describes them until an access touches a single word (`split_block`). The memory
holds the records of all words, those of all blocks, and one byte per block, which is 0 while the block's record is
valid.

`writer` is 0 for none, 1 + slot for a warp, and ASYNC or GENERIC_COPY for an asynchronous operation, whose number is
then in `epoch`. `bytes` holds, from the low bits up:

    4 bits   the bytes written
    STRONG   the write was atomic or volatile; such accesses do not race with each other
    FRESH    4 bits: the bytes written in `epoch`; the others are older
    LANE     6 bits: the lane that wrote them, or NOBODY
    SEVERAL  several lanes wrote different bytes
    LIVE     the word belongs to an mbarrier; in global memory: discard.L2 wrote it

The set of warps that have read the word has 32 bits; warp i has bit i % 32. A separate array holds the last read of
each word by each warp of the CTA, as (epoch, pc), with the bytes read in that epoch (4 bits) and the lane above the pc.
The peer readers are three warps of other CTAs of the cluster, the last one among them (`peer_reader` in
checks/byte_ranges.py).

Global memory has records of 16 fields: [writer, epoch, pc, bytes, reader, epoch, pc, reader, epoch, pc, epoch of older
bytes, owner, reader, epoch, pc, 0]. The readers are three warps or operations, the last one among them
(`global_reader`). The owner is the number of the first cluster that accessed the word, with WRITTEN if a cluster wrote
it and SEVERAL_CLUSTERS if other clusters accessed it.

An earlier access by another warp happens before this one iff the vector clock has reached its epoch. An asynchronous
operation happens before it iff its bit is set in the operations that the warp knows to be complete. Lanes of one warp
are ordered if they have synchronised in between: at a barrier, at bar.warp.sync, in a release by all of them
(clocks.BEGIN), or by a release that the later lane has acquired (`heard`). Epochs are even numbers. A clock entry is
odd if all lanes of the warp have published their accesses up to that epoch. It is even if only some have, without
synchronising with the others; `released` tells which.

Functions that compare an access with earlier ones get its `accessor`: 1 + the warp's slot (0: an asynchronous
operation), its clock, the operations that it knows to be complete, the number of the newest operation, or its own if it
is one, and the address of the buffer of races.

Races go into a small buffer, one entry per pair of instructions, which the scheduler empties. This file has what all
records share, and shared memory. checks/global_shadow.py has global memory, checks/stored_values.py compares stored
values, and checks/byte_ranges.py has the rest.
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
LATER = 64  # set except for the first word of a vector; compilers may load padding in one
RELEASED = 128  # an acquire of this release also orders the write itself
QUIET = 32  # a store that changes no byte; it does not race with the same instruction in another warp
CHANGES = 256  # an atomic operation that also reads
FRESH = 8  # first bit of the bytes written in the record's epoch
LANE = 12  # first bit of the lane that wrote them
WHOLE_WARP = 32  # instead of a lane, for stmatrix and ldmatrix, which move registers of all lanes
STRONG_READER = 62  # a strong read of shared memory, with which no strong write races
NOBODY = 63  # accessed by more than a single lane
SEVERAL = 1 << 18
LIVE = 1 << 19
READ_BYTES = 21  # first bit of the bytes read, above the pc
READ_LANE = 25  # first bit of the reading lane
READ_SEVERAL = 1 << 31
PC = (1 << READ_BYTES) - 1
RECORD = 18  # fields of a word of shared memory
BLOCK_BITS = 3
BLOCK = 1 << BLOCK_BITS  # words: 32 bytes, the row of an MMA operand
GLOBAL_RECORD = 16
READERS = 3  # readers remembered for a word of global memory; peer readers for a word of shared memory
OWNER = 11  # where the owner is in the record
OPS = 32 * WORDS  # asynchronous operations that have a bit of their own; older ones count as complete
RAW, WAW, WAR, UNINITIALISED, OVER_BARRIER = 0, 1, 2, 3, 4
SAME = 5  # WAW with an equal value
MAX_RACES = 64
RACE_FIELDS = 8
CONTENDED = 1 + MAX_RACES * RACE_FIELDS  # after the findings: whether two clusters accessed a word and one wrote it
PARTS = CONTENDED + 1  # the address of the table of `released`, PARTS_KEPT words per slot
HEARD = PARTS + 1  # the address of the table of `heard`, a word for each lane of a slot
CLUSTERS = HEARD + 1  # then the cluster of each slot, counted from 1
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
    """Returns whether the asynchronous operation is known to be complete."""
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
    """Notes that some lanes of the warp of `slot` have published their accesses up to the epoch `upto`. Returns
    whether that includes an access by `lane` in `epoch`. It includes all accesses from before the lanes last
    synchronised. An entry of the table has the epoch of a synchronisation of the lanes, and above it the lanes that
    have released since.
    """
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
def heard(races, slot, lane, epoch, other):
    """Returns whether `lane` has acquired what `other`, of the same warp, released behind its access in `epoch`."""
    if lane < 0 or lane > 31:
        return 0
    upto = i8(load32(i8(load64(races + 8 * HEARD)) + 4 * (32 * slot + lane)))
    return i8(upto >= epoch and (upto & 1 != 0 or released(races, slot, upto, epoch, other) != 0))


@native("i8(i8, i8, i8, i8, i8)")
def unseen(clock, agent, epoch, lane, races):
    """Returns 0 if a warp's access happened before, according to `clock`; 1 if it did not; 2 + lane if other lanes
    of its warp have released, but not the one that made the access."""
    upto = i8(load32(clock + 4 * (agent - 1)))
    if upto < epoch:
        return 1
    if upto & 1 or released(races, agent - 1, upto, epoch, lane):
        return 0
    return 2 + (lane & 63)


@native("i8(i8, i8, i8, UniTuple(i8, 5))")
def not_before(agent, epoch, lane, accessor):
    """Returns the result of `unseen` for a writer or reader (agent, epoch) that may be an asynchronous operation, or
    the accessor itself.
    """
    me, clock, known, newest, races = accessor
    if agent == 0 or agent == me:
        return 0
    if agent >= ASYNC:
        return 1 - complete(known, epoch, newest)
    return unseen(clock, agent, epoch, lane, races)


@native("i8(i8, i8)")
def both(lane, other):
    """Packs two lanes into one field of a finding."""
    return (NOBODY if lane < 0 else lane) | (other + 1) << 6


@native("i8(i8, i8)")
def lanes_of(lane, found):
    """Packs the lane and the result of `unseen`."""
    return lane if found < 2 else both(lane, found - 2)


@native("i8(i8, i8)")
def writer(touched, theirs):
    """Returns the lane that wrote the touched bytes, or NOBODY. theirs: the record's `bytes`."""
    fresh = (theirs >> FRESH) & 15
    if touched & fresh == 0 or theirs & SEVERAL and touched & fresh != fresh:
        return i8(NOBODY)
    return (theirs >> LANE) & 63 | (MANY if theirs & SEVERAL else 0)


@native("i8(i8, i8)")
def reader(touched, place):
    """Returns the lane that read the touched bytes, or NOBODY. place: the field with the pc of the read."""
    whole = (place >> READ_BYTES) & 15
    if place & READ_SEVERAL and touched & whole != whole or (place >> READ_LANE) & 63 == STRONG_READER:
        return i8(NOBODY)
    return (place >> READ_LANE) & 63 | (MANY if place & READ_SEVERAL else 0)


@native("i8(i8, i8, i8, i8, i8)")
def written(at, touched, theirs, epoch, older):
    """Returns the epoch in which the writer last wrote one of the touched bytes, or -1. older: the offset of the field
    with the epoch of older bytes."""
    if touched & (theirs >> FRESH) & 15:
        return epoch
    if touched & theirs & 15:
        return i8(load32(at + older))
    return -1


@native("i8(i8, i8, i8, i8, UniTuple(i8, 5))")
def unordered(at, touched, older, pc, accessor):
    """Returns the result of `unseen` for the last write of the touched bytes, which `accessor` accesses; 0 if there is
    none.
    """
    agent, epoch, theirs = i8(load32(at)), i8(load32(at + 4)), i8(load32(at + 12))
    when = written(at, touched, theirs, epoch, older)
    if when < 0 or touched & theirs & STRONG or touched & QUIET and i8(load32(at + 8)) == pc:
        return 0
    if theirs & RELEASED and when == epoch and (theirs >> LANE) & 63 != NOBODY:
        when -= 2  # the epoch that it released. With several lanes, one may write after another's value was read.
    return not_before(agent, when, writer(touched, theirs), accessor)


@native("i8(i8, i8)")
def behind_write(touched, write):
    """Returns the kind of race of an access that an earlier write does not happen before."""
    if not write:
        return RAW
    return SAME if touched & QUIET else WAW


@native("i8(i8, i8, i8, i8, i8, i8, i8, i8)")
def lanes_race(touched, theirs, epoch, begin, lane, write, me, races):
    """Returns the lane of the same warp that wrote these bytes without having synchronised since, or -1. If several
    lanes wrote
    them, only an access of all these bytes is a race: one lane must have written some of them."""
    fresh = (theirs >> FRESH) & 15
    if epoch < begin or lane == NOBODY or not touched & fresh or touched & STRONG and theirs & STRONG:
        return -1
    if write and touched & QUIET:
        return -1
    other = (theirs >> LANE) & 63
    if theirs & SEVERAL:
        return other if touched & fresh == fresh else -1
    if other == lane or other == NOBODY or heard(races, me - 1, lane, epoch, other):
        return -1
    return other


@native("i8(i8, i8, i8, i8)")
def releasing(clock, touched, now, address):
    """Returns `touched`, with RELEASED if this write is the warp's latest release."""
    if touched & STRONG and i8(load32(clock + RELEASING)) == now and load32(clock + PLACE) == u4(address & ~i8(3)):
        return touched | RELEASED
    return touched


@native("void(i8, i8, i8, i8, i8, i8, i8, i8, i8)")
def written_by(at, me, now, pc, touched, theirs, agent, lane, older):
    """Records a write by warp `me` in its epoch `now`."""
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
    """Returns the address of the three fields of peer reader k in the record at `at`."""
    return at + 24 if k == 0 else at + 36 + 12 * k


@native("void(i8, i8, i8, UniTuple(i8, 5), i8)")
def other_readers(at, word, pc, accessor, lane):
    """Reports reads by asynchronous operations and peers that do not happen before a write by `accessor`."""
    me, clock, known, newest, races = accessor
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
    """Gives each word of the block of `word` a record of its own."""
    block = word >> BLOCK_BITS
    flag = shadow + (BLOCK + 1) * blocks * 4 * RECORD + block
    if load8(flag):
        return
    store8(flag, np.uint8(1))
    of, to = shadow + (BLOCK * blocks + block) * 4 * RECORD, shadow + BLOCK * block * 4 * RECORD
    for field in range(0, 4 * RECORD, 8):  # no warp has read it
        value = load64(of + field)
        for k in range(BLOCK):
            store64(to + k * 4 * RECORD + field, value)


@native("void(i8, i8, i8, i8, i8, i8, i8, i8)")
def shared_word(S, word, touched, write, pc, lane, clock, known):
    """Checks and records an access by a warp to some bytes of one word of its CTA's shared memory."""
    index = sget(S, S_INDEX)
    me, newest, races = sget(S, S_SLOT) + 1, i8(load64(sget(S, S_NEXT_OP))), sget(S, S_RACES)
    words = (sget(S, S_SHARED_SIZE) + 3) >> 2
    split_block(sget(S, S_SHADOW), (words + BLOCK - 1) >> BLOCK_BITS, word)
    at = sget(S, S_SHADOW) + word * 4 * RECORD
    agent, epoch, theirs = i8(load32(at)), i8(load32(at + 4)), i8(load32(at + 12))
    now, begin = i8(load32(clock + 4 * (me - 1))) - 1, i8(load32(clock + BEGIN))
    who = i8(NOBODY) if lane < 0 else lane
    if agent == 0:
        if (not write or touched & CHANGES) and not touched & LATER:
            report(races, UNINITIALISED, 0, word * 4, pc, 0, 0, 0, lane)
    elif agent == me:
        other = lanes_race(touched, theirs, epoch, begin, who, write, me, races)
        if other >= 0 and i8(load32(at + 8)) != pc:
            report(races, WAW if write else RAW, 0, word * 4, pc, agent, epoch, i8(load32(at + 8)), both(lane, other))
    else:
        found = unordered(at, touched, 36, pc, (me, clock, known, newest, races))
        if found:
            lanes = lanes_of(lane, found)
            report(races, behind_write(touched, write), 0, word * 4, pc, agent, epoch, i8(load32(at + 8)), lanes)
    reads = sget(S, S_READS) + word * 8
    if not write:
        mine = reads + index * words * 8
        before, readers = i8(load32(mine + 4)), load32(at + 40)
        several, bytes_read = i8(0), touched & 15
        # Otherwise the entry is of an earlier CTA (SpareShadows).
        if (readers >> u4(index & 31)) & u4(1) and i8(load32(mine)) >= begin:
            bytes_read |= (before >> READ_BYTES) & 15
            others = (before >> READ_LANE) & 63 | (MANY if before & READ_SEVERAL else 0)
            if others != who and not heard(races, me - 1, who, i8(load32(mine)), others):
                several = i8(READ_SEVERAL)
        if touched & STRONG:
            who = i8(STRONG_READER)
        store32(mine, u4(now))
        store32(mine + 4, u4(pc & PC | bytes_read << READ_BYTES | who << READ_LANE | several))
        store32(at + 40, readers | u4(1) << u4(index & 31))
        return
    slot0 = sget(S, S_SLOT0)
    if theirs & LIVE and lane >= 0:
        report(races, OVER_BARRIER, 0, word * 4, pc, me, now, slot0, lane)
    readers = load32(at + 40)
    if readers:
        for r in range(sget(S, S_WARPS)):
            if not (readers >> u4(r & 31)) & u4(1):
                continue
            seen, place = i8(load32(reads + r * words * 8)), i8(load32(reads + r * words * 8 + 4))
            if not seen or not touched & (place >> READ_BYTES) & 15:
                continue
            if touched & STRONG and (r == index or (place >> READ_LANE) & 63 == STRONG_READER):
                continue
            if r != index:
                found = unseen(clock, slot0 + r + 1, seen, reader(touched, place), races)
                if found:
                    report(races, WAR, 0, word * 4, pc, slot0 + r + 1, seen, place & PC, lanes_of(lane, found))
            elif seen >= begin and who != NOBODY and not touched & QUIET:
                found = reader(touched, place)
                if found != NOBODY and found != who and not heard(races, me - 1, who, seen, found):
                    report(races, WAR, 0, word * 4, pc, me, seen, place & PC, both(lane, found & 63))
    other_readers(at, word, pc, (me, clock, known, newest, races), lane)
    written_by(at, me, now, pc, releasing(clock, touched, now, word * 4), theirs, agent, who, 36)
