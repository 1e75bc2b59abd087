"""Compiled checks of tensor memory, and tcgen05.ld and st of shape 32x32b by a whole warp.

The shadow of an SM has four int64 tables over all cells (groups of 16 lanes by column): the operation that wrote each
cell last, and three that read it (`new_readers`). After them a byte per cell has the kind of its values
(checks/tensor.py).
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types

from softsm.checks import shadow as records
from softsm.checks.byte_ranges import asynchronous
from softsm.checks.clocks import WORDS
from softsm.checks.global_shadow import priority
from softsm.checks.shadow import ASYNC, OPS
from softsm.engine.lanes import i8, load8, load32, load64, store8, store32, store64, u4
from softsm.engine.mma_chains import (
    E_A,
    E_ADD,
    E_B,
    E_CHAIN,
    E_COLUMN,
    E_D,
    E_IDESC,
    E_PAST_COLUMN,
    E_PAST_SHARED,
    E_SHARED,
    E_WORK,
    G_CHAIN,
    G_COUNT,
    G_FIELDS,
    G_FIRST,
    G_ISSUED,
    G_LANE,
    G_OWNER,
    G_PLACES,
    G_ROOM,
    TABLE,
)
from softsm.engine.mma_chains import ENTRY as ENTRY_FIELDS
from softsm.engine.native import intrinsic, native
from softsm.engine.program import (
    CLOCKS,
    DISTANCE,
    FIRST_USE,
    FOUND,
    GROWING,
    LOG,
    MACRO,
    NEWEST,
    PRODUCTS,
    S_ALIVE,
    S_CELLS,
    S_CLOCK,
    S_COLUMNS,
    S_ISSUER,
    S_LATEST,
    S_LOADS,
    S_NEXT_OP,
    S_OWED,
    S_P,
    S_PHASES,
    S_Q,
    S_R,
    S_RACES,
    S_SHARED_SIZE,
    S_SLOT,
    S_STORES,
    S_TENSOR,
    S_TENSOR_LANE,
    S_WRITES,
    SECTIONS,
    SHARED_START,
    UNWAITED,
    WAIT_LOADS,
    WAIT_STORES,
)

LANE_GROUPS, COLUMNS = 8, 512
SHADOW_CELLS = LANE_GROUPS * COLUMNS
TABLES = 4  # one for the writer, three for readers
HELD_AT = TABLES * 8 * SHADOW_CELLS  # offset of the bytes
COLUMN = 4 * 128  # bytes of tensor memory from one column to the next
STRICT = 4  # sections of a clock at the strict level
ENTRY = 24  # bytes of an operation in the log: its number, the issuing warp and pc, its kind
NO_KIND, LOAD, STORE, PRODUCT, SHIFT, COPY, COPY_4X256B = range(7)
SUMS = 8  # first bit of the accumulator's number in the kind of an MMA
REGION = 7  # fields of a region


FOUR = ir.VectorType(ir.IntType(64), 4)  # four cells at once: Numba does not vectorise this itself


def _splat(builder, value):
    one = builder.insert_element(ir.Constant(FOUR, ir.Undefined), value, ir.IntType(32)(0))
    first = ir.Constant(ir.VectorType(ir.IntType(32), 4), [0] * 4)
    return builder.shuffle_vector(one, ir.Constant(FOUR, ir.Undefined), first)


def _cells(builder, at):
    return builder.inttoptr(at, FOUR.as_pointer())


@intrinsic
def four_are(typingctx, at, value):
    """Returns whether four cells hold this value."""

    def codegen(context, builder, signature, args):
        same = builder.icmp_unsigned("==", builder.load(_cells(builder, args[0]), align=8), _splat(builder, args[1]))
        return builder.icmp_unsigned("==", builder.bitcast(same, ir.IntType(4)), ir.IntType(4)(15))

    return types.boolean(types.int64, types.int64), codegen


@intrinsic
def store_four(typingctx, at, value):
    def codegen(context, builder, signature, args):
        builder.store(_splat(builder, args[1]), _cells(builder, args[0]), align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@native("void(i8, i8, i8, i8)")
def note(S, number, pc, kind):
    """Logs operation `number`, which the warp of S issues."""
    entry = i8(load64(i8(load64(S + 8 * S_NEXT_OP)) + 8 * LOG)) + ENTRY * (number & (OPS - 1))
    store64(entry, np.uint64(number))
    store64(entry + 8, np.uint64(i8(load64(S + 8 * S_ISSUER)) << 32 | pc))
    store64(entry + 16, np.uint64(kind))


@native("i8(i8, i8, i8, i8, i8)", python=True)
def in_order(old, read, new, write, strict):
    """Returns whether the hardware keeps two operations of one warp in order (PTX 9.4): one of kind `old` that read or
    wrote cells, and a later one of kind `new` that reads or writes them."""
    was, now = old & ((1 << SUMS) - 1), new & ((1 << SUMS) - 1)
    if was == LOAD or was == STORE or now == LOAD or now == STORE:
        return i8((was == STORE and now == LOAD) or (was <= STORE and now == STORE))
    if was == PRODUCT:
        return write if read else i8(write and old == new)
    if was == SHIFT:
        return i8(now == PRODUCT or now == COPY_4X256B)
    # A copy and an MMA that reads its data. PTX 9.4 names A and scale factors, Triton relies on the accumulator too.
    return i8(now == PRODUCT and not (write and strict))


@native("void(i8, i8, i8, i8, i8, i8)")
def unordered(S, number, reader, me, write, out):
    """Adds operation `number` to `out` unless the hardware orders it before `me`. It wrote cells that `me` accesses, or
    read cells that `me` writes, and is not known to be complete."""
    layout = i8(load64(S + 8 * S_NEXT_OP))
    log = i8(load64(layout + 8 * LOG))
    old, new = log + ENTRY * (number & (OPS - 1)), log + ENTRY * (me & (OPS - 1))
    if i8(load64(old)) == number and load32(old + 12) == load32(new + 12):
        strict = i8(load64(layout + 8 * SECTIONS)) == STRICT
        if in_order(i8(load64(old + 16)), reader, i8(load64(new + 16)), write, i8(strict)):
            return
    entry, n = 2 * number + reader, i8(load64(out))
    for i in range(1, n + 1):
        if i8(load64(out + 8 * i)) == entry:
            return
    store64(out + 8 * (n + 1), np.uint64(entry))
    store64(out, np.uint64(n + 1))


@native("i8(i8, i8, i8, i8, i8, i8, i8, i8, i8)")
def users(S, table, low, high, reader, me, write, known, out):
    """Adds the operations of one row of cells of one table to `out` that are not `me`, not known to be complete and not
    in order. Returns 1 if a cell is unused."""
    empty, last, at = i8(0), i8(-1), low
    while at < high:
        if at + 4 <= high and four_are(table + 8 * at, last):
            at += 4
            continue
        number = i8(load64(table + 8 * at))
        at += 1
        if number == last:
            continue
        last = number
        if number == 0:
            empty = i8(1)
        elif number != me and not records.complete(known, number, me + 1):
            unordered(S, number, reader, me, write, out)
    return empty


@native("i8(i8)")
def known_complete(S):
    """Returns the address of the set of operations that precede the tcgen05 operations of the warp of S."""
    layout = i8(load64(S + 8 * S_NEXT_OP))
    known = i8(load64(S + 8 * S_CLOCK)) + 4 * i8(load64(layout + 8 * CLOCKS))
    return known + 4 * 2 * WORDS if i8(load64(layout + 8 * SECTIONS)) == STRICT else known


@native("i8(i8, i8, i8, i8, i8, i8, i8, i8)")
def look(S, table, groups, low, high, write, me, wrong):
    """Finds conflicts of the logged operation `me` of the warp of S with the cells [low, high) of the lane groups. A
    conflict is an operation that wrote them, or for a write also one that read them, and is not `me`, not known to be
    complete and not in order. The kinds of the cells are bits: bit 0 if one was never written, 2 << k if one holds kind
    k. Returns -1 if there is no conflict and no kind of `wrong`, else the number of conflicts. found[0] then has the
    kinds, and the operations follow: 2 * number for a writer, 2 * number + 1 for a reader."""
    layout, flags = i8(load64(S + 8 * S_NEXT_OP)), i8(0)
    out = i8(load64(layout + 8 * FOUND))
    known = known_complete(S)
    store64(out, np.uint64(0))
    for g in range(LANE_GROUPS):
        if (groups >> g) & 1:
            first, end, last = g * COLUMNS + low, g * COLUMNS + high, i8(-1)
            flags |= users(S, table, first, end, 0, me, write, known, out)
            if write:
                for k in range(1, TABLES):
                    users(S, table + 8 * k * SHADOW_CELLS, first, end, 1, me, write, known, out)
            if wrong >> 1:
                for at in range(first, end):
                    one = i8(load8(table + HELD_AT + at))
                    if one != last:
                        flags |= i8(2) << one
                        last = one
    n = i8(load64(out))
    store64(out, np.uint64(flags))
    return n if n or flags & wrong else i8(-1)


@native("i8(i8, i8, i8, i8)")
def stands_for(layout, known, me, number):
    """Returns whether an operation ordered after the read of `me` is also ordered after that of `number`: it is
    complete, or both are MMAs of one warp. One thread issues these, and its commits cover all earlier ones."""
    if number == 0 or records.complete(known, number, me + 1):
        return i8(1)
    log, kinds = i8(load64(layout + 8 * LOG)), (1 << SUMS) - 1
    old, new = log + ENTRY * (number & (OPS - 1)), log + ENTRY * (me & (OPS - 1))
    if i8(load64(old)) != number or load32(old + 12) != load32(new + 12):
        return i8(0)
    return i8(i8(load64(old + 16)) & kinds == PRODUCT and i8(load64(new + 16)) & kinds == PRODUCT)


@native("void(i8, i8, i8, i8, i8)")
def new_readers(S, table, at, end, me):
    """Records that operation `me` has read a row of cells. Two earlier readers that it does not replace are kept; if
    there are more, different ones in each cell."""
    layout, last, keep = i8(load64(S + 8 * S_NEXT_OP)), i8(0), i8(0)
    known = known_complete(S)
    while at < end:
        first = table + 8 * (at + SHADOW_CELLS)
        number = i8(load64(first))
        if number != last:
            last, keep = number, i8(number != me and not stands_for(layout, known, me, number))
        if keep == 0 and at + 4 <= end and four_are(first, number):
            store_four(first, me)
            at += 4
            continue
        if keep:
            second, third = first + 8 * SHADOW_CELLS, first + 16 * SHADOW_CELLS
            other, oldest = i8(load64(second)), i8(load64(third))
            if not stands_for(layout, known, me, other) and (
                stands_for(layout, known, me, oldest)
                or priority(i8(ASYNC), other, at) > priority(i8(ASYNC), oldest, at)
            ):
                store64(third, np.uint64(other))
            store64(second, np.uint64(number))
        store64(first, np.uint64(me))
        at += 1


@native("void(i8, i8, i8, i8, i8, i8, i8, i8)", python=True)
def mark(S, table, groups, low, high, write, me, kind):
    """Records that operation `me` of the warp of S has read the cells, or has written values of `kind`."""
    for g in range(LANE_GROUPS):
        if (groups >> g) & 1 == 0:
            continue
        at, end = g * COLUMNS + low, g * COLUMNS + high
        if not write:
            new_readers(S, table, at, end, me)
            continue
        while at + 4 <= end:
            store_four(table + 8 * at, me)
            store32(table + HELD_AT + at, u4(0x01010101 * kind))
            at += 4
        for last in range(at, end):
            store64(table + 8 * last, np.uint64(me))
            store8(table + HELD_AT + last, np.uint8(kind))


@native("i8(i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8)", python=True)
def touch(S, table, groups, low, high, write, me, pc, kind, left, wrong):
    """Logs an operation of this kind on a region, calls `look`, and `mark` if that returns -1. left: the kind of the
    cells afterwards."""
    note(S, me, pc, kind)
    n = look(S, table, groups, low, high, write, me, wrong)
    if n < 0:
        mark(S, table, groups, low, high, write, me, left)
    return n


@native("i8(i8, i8, i8, i8, i8, i8, i8, i8)")
def compare(S, work, places, me, pc, lane, issued, silent):
    """Does the work of `operation`. silent: on an error it reports nothing, and repeating the call is safe."""
    layout, slot, races = i8(load64(S + 8 * S_NEXT_OP)), i8(load64(S + 8 * S_SLOT)), i8(load64(S + 8 * S_RACES))
    note(S, me, pc, i8(load64(work)))
    regions, count = work + 16, i8(load64(work + 8))
    wrong = i8(0)
    for k in range(count):
        r = regions + 8 * REGION * k
        table = i8(load64(places + 16 * i8(load64(r))))
        groups, low, high, write = i8(load64(r + 8)), i8(load64(r + 16)), i8(load64(r + 24)), i8(load64(r + 32))
        if look(S, table, groups, low, high, write, me, i8(load64(r + 48))) >= 0:
            wrong = i8(1)
            break
    if wrong and silent:
        return wrong
    at = issued + 4 * ((me & (OPS - 1)) >> 5)
    store32(at, load32(at) | u4(1) << u4(me & 31))
    shared = regions + 8 * REGION * count
    for k in range(i8(load64(shared))):
        read = shared + 8 + 24 * k
        shadow, clock = i8(load64(places + 16 * i8(load64(read)) + 8)), i8(load64(S + 8 * S_CLOCK))
        low, high = i8(load64(read + 8)), i8(load64(read + 16))
        asynchronous(shadow, layout, races, low, high, 0, me, 0, clock, 0, pc, slot, lane, 0)
    if silent and load64(races) != np.uint64(0):
        store64(races, np.uint64(0))
        return i8(1)
    if wrong == 0:  # compare all regions before marking one
        for k in range(count):
            r = regions + 8 * REGION * k
            table = i8(load64(places + 16 * i8(load64(r))))
            groups, low, high, write = i8(load64(r + 8)), i8(load64(r + 16)), i8(load64(r + 24)), i8(load64(r + 32))
            mark(S, table, groups, low, high, write, me, i8(load64(r + 40)))
    return wrong


@native("i8(i8, i8, i8, i8, i8, i8, i8)", python=True)
def operation(S, work, places, me, pc, lane, issued):
    """Checks and records an MMA issued by one lane of the warp of S. Returns 1 if Python must compare the regions of
    tensor memory, which are then unchanged.

    work: the kind; the number of regions of tensor memory and the regions (CTA, lane groups, first and end column,
    write, kind afterwards, wrong kinds); the number of reads of shared memory and the reads (CTA, spans, their number).
    places: for each CTA the table of its tensor memory and the site of its shared memory. issued: the set of operations
    to which it is added."""
    return compare(S, work, places, me, pc, lane, issued, 0)


@native("i8(i8, i8, i8, i8, i8, i8)")
def known_product(S, rows, table, a_tensor, lane, chain):
    """Returns the entry of the MMA with the operands in the registers `rows` of a lane, or 0 (engine/mma_chains.py)."""
    R, Q, P = i8(load64(S + 8 * S_R)), i8(load64(S + 8 * S_Q)), i8(load64(S + 8 * S_P))
    idesc = i8(load32(R + (i8(load32(rows)) * 32 + lane) * 4))
    d = i8(load32(R + (i8(load32(rows + 4)) * 32 + lane) * 4))
    if a_tensor:
        a = i8(load32(R + (i8(load32(rows + 8)) * 32 + lane) * 4))
    else:
        a = i8(load64(Q + (i8(load32(rows + 8)) * 32 + lane) * 8))
    b = i8(load64(Q + (i8(load32(rows + 12)) * 32 + lane) * 8))
    add = i8((load32(P + 4 * i8(load32(rows + 16))) >> u4(lane)) & u4(1))
    for k in range(i8(load64(table))):
        e = table + 8 + 8 * ENTRY_FIELDS * k
        if (
            i8(load64(e + 8 * E_D)) == d
            and i8(load64(e + 8 * E_A)) == a
            and i8(load64(e + 8 * E_B)) == b
            and i8(load64(e + 8 * E_IDESC)) == idesc
            and i8(load64(e + 8 * E_ADD)) == add
        ):
            return e if i8(load64(e + 8 * E_CHAIN)) == chain else i8(0)
    return i8(0)


@native("i8(i8, i8, i8, i8, u4, i8)")
def product(S, rows, which, a_tensor, m, pc):
    """Issues MMA instruction `which`, which joins the one before it. Returns 0 if it has been checked, recorded,
    numbered and added to its chain (engine/mma_chains.py). Otherwise it returns MACRO, and Python can still issue
    it."""
    layout, columns = i8(load64(S + 8 * S_NEXT_OP)), i8(load64(S + 8 * S_COLUMNS))
    growing, number = i8(load64(layout + 8 * GROWING)), i8(load64(layout + 8 * NEWEST))
    if load64(S + 8 * S_PHASES) == np.uint64(0) or i8(load64(growing + 8 * G_OWNER)) != S or columns == 0:
        return i8(MACRO)
    lane, count = i8(load64(growing + 8 * G_LANE)), i8(load64(growing + 8 * G_COUNT))
    if m != u4(1) << u4(lane) or count >= i8(load64(growing + 8 * G_ROOM)) or number & 31 == 0:
        return i8(MACRO)
    if load64(i8(load64(S + 8 * S_RACES))) != np.uint64(0):
        return i8(MACRO)
    table = i8(load64(layout + 8 * PRODUCTS)) + 8 * TABLE * which
    e = known_product(S, rows, table, a_tensor, lane, i8(load64(growing + 8 * G_CHAIN)))
    if e == 0:
        return i8(MACRO)
    low, high = i8(load64(e + 8 * E_COLUMN)), i8(load64(e + 8 * E_PAST_COLUMN))
    if low < i8(load64(columns)) or high > i8(load64(columns + 8)):
        return i8(MACRO)
    low, high = i8(load64(e + 8 * E_SHARED)), i8(load64(e + 8 * E_PAST_SHARED))
    if low < SHARED_START or high > i8(load64(S + 8 * S_SHARED_SIZE)):
        return i8(MACRO)
    places, issued = i8(load64(growing + 8 * G_PLACES)), i8(load64(growing + 8 * G_ISSUED))
    if compare(S, i8(load64(e + 8 * E_WORK)), places, number, pc, lane, issued, 1):
        return i8(MACRO)
    store64(layout + 8 * NEWEST, np.uint64(number + 1))
    at = growing + 8 * (G_FIRST + G_FIELDS * count)
    store64(at, np.uint64(which << 32 | (e - table) // (8 * ENTRY_FIELDS)))
    store64(at + 8, np.uint64(number))
    store64(growing + 8 * G_COUNT, np.uint64(count + 1))
    return i8(0)


@native("i8(i8, i8, i8, i8)", python=True)
def busy(S, table, low, high):
    """Returns whether an operation on these columns is not known to the warp of S to be complete."""
    layout = i8(load64(S + 8 * S_NEXT_OP))
    known = i8(load64(S + 8 * S_CLOCK)) + 4 * i8(load64(layout + 8 * CLOCKS))
    newest = i8(load64(layout + 8 * NEWEST))
    for row in range(TABLES * LANE_GROUPS):
        last = i8(0)
        for at in range(row * COLUMNS + low, row * COLUMNS + high):
            number = i8(load64(table + 8 * at))
            if number != last:
                last = number
                if number and not records.complete(known, number, newest):
                    return i8(1)
    return i8(0)


@native("void(i8, i8)", python=True)
def waited(S, those):
    """Notes that the warp of S has waited for its loads or stores (`those`: S_LOADS or S_STORES) and knows them to
    be complete. At the strict level they also precede its tcgen05 operations."""
    layout = i8(load64(S + 8 * S_NEXT_OP))
    known = i8(load64(S + 8 * S_CLOCK)) + 4 * i8(load64(layout + 8 * CLOCKS))
    for k in range(i8(load64(S + 8 * those))):
        bit = i8(load64(S + 8 * (those + 1 + k))) & (OPS - 1)
        at = known + 4 * (bit >> 5)
        store32(at, load32(at) | u4(1) << u4(bit & 31))
        if i8(load64(layout + 8 * SECTIONS)) == STRICT:
            at += 4 * 2 * WORDS
            store32(at, load32(at) | u4(1) << u4(bit & 31))
    store64(S + 8 * those, np.uint64(0))


@native("i8(i8, i8, u4)")
def wait(S, kind, m):
    """Executes tcgen05.wait, or the first use of loaded registers: MACRO if Python must handle it, else 0."""
    if load64(S + 8 * S_PHASES) == np.uint64(0) or load64(S + 8 * S_OWED) != np.uint64(0):
        return i8(MACRO)
    if kind == WAIT_LOADS or kind == WAIT_STORES:
        if load64(S + 8 * S_ALIVE) != np.uint64(m):
            return i8(MACRO)
        waited(S, S_LOADS if kind == WAIT_LOADS else S_STORES)
    elif kind == FIRST_USE:
        if load64(S + 8 * S_LOADS) != np.uint64(0):
            return i8(MACRO)
    return i8(0)


@native("i8(i8, i8, i8, i8, i8, i8, i8)")
def access(S, rows, row, count, store, about, pc):
    """Checks tcgen05.ld and st by a whole warp: `count` registers, whose numbers are at `rows`, and as many columns
    of its 32 lanes, from the address in register `row`. Returns 0 if the access has been made, checked and
    recorded. Otherwise it returns MACRO and changes nothing."""
    columns, layout = i8(load64(S + 8 * S_COLUMNS)), i8(load64(S + 8 * S_NEXT_OP))
    those = i8(S_STORES if store else S_LOADS)
    number, unwaited = i8(load64(layout + 8 * NEWEST)), i8(load64(S + 8 * those))
    if columns == 0 or load64(S + 8 * S_PHASES) == np.uint64(0) or load64(S + 8 * S_OWED) != np.uint64(0):
        return i8(MACRO)
    if load64(S + 8 * S_LATEST) != np.uint64(0) and about >> DISTANCE == 0:
        return i8(MACRO)
    if unwaited == UNWAITED or number & 31 == 0:  # Order.number must then clear bits
        return i8(MACRO)
    R = i8(load64(S + 8 * S_R))
    address = load32(R + row * 128)
    for lane in range(1, 32):
        if load32(R + row * 128 + 4 * lane) != address:
            return i8(MACRO)
    first, lanes = i8(address & u4(0xFFFF)), i8(load64(S + 8 * S_TENSOR_LANE))
    named = i8(address) - first
    if named == 0 and i8(load64(layout + 8 * SECTIONS)) != STRICT:  # no lanes given: those of the warp
        named = lanes
    if named != lanes or first < i8(load64(columns)) or first + count > i8(load64(columns + 8)):
        return i8(MACRO)
    table = i8(load64(S + 8 * S_CELLS))
    kind, left, wrong = i8(LOAD), i8(0), i8(1)
    if store:
        kind, left, wrong = i8(STORE), about & ((1 << DISTANCE) - 1), i8(0)
    if touch(S, table, i8(3) << (lanes >> 20), first, first + count, store, number, pc, kind, left, wrong) >= 0:
        return i8(MACRO)
    store64(layout + 8 * NEWEST, np.uint64(number + 1))
    store64(S + 8 * (those + 1 + unwaited), np.uint64(number))
    store64(S + 8 * those, np.uint64(unwaited + 1))
    cells = i8(load64(S + 8 * S_TENSOR)) + first * COLUMN
    for k in range(count):
        register, cell = R + i8(load32(rows + 4 * k)) * 128, cells + k * COLUMN
        for at in range(0, 128, 8):
            if store:
                store64(cell + at, load64(register + at))
            else:
                store64(register + at, load64(cell + at))
    if store:
        store64(S + 8 * S_WRITES, load64(S + 8 * S_WRITES) + np.uint64(1))
    return i8(0)
