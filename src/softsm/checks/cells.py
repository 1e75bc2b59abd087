"""Cells of tensor memory under the checkers, compiled: who touched them, and whole tcgen05.ld and st of shape 32x32b.

The shadow of an SM is a table of int64 of all cells (groups of 16 lanes by column) three times over, for the operation
that wrote each cell last and the last two that read it, and behind that a byte for each cell: what it holds
(checks/tensor.py). Compiled by `interpreter.cells_module()`, which gives the compiled twin of checks/shadow.py as
`records`.
"""

from __future__ import annotations

import numpy as np

from softsm.checks import shadow
from softsm.checks.clocks import WORDS
from softsm.checks.shadow import OPS
from softsm.engine.lanes import i8, load8, load32, load64, store8, store32, store64, u4
from softsm.engine.program import (
    CLOCKS,
    DISTANCE,
    FIRST_USE,
    FOUND,
    LOG,
    MACRO,
    NEWEST,
    S_ALIVE,
    S_CELLS,
    S_CLOCK,
    S_COLUMNS,
    S_ISSUER,
    S_LATEST,
    S_LOADS,
    S_NEXT_OP,
    S_OWED,
    S_PHASES,
    S_R,
    S_STORES,
    S_TENSOR,
    S_TENSOR_LANE,
    S_WRITES,
    SECTIONS,
    UNWAITED,
    WAIT_LOADS,
    WAIT_STORES,
)

compiled = globals().get("compiled") or (lambda signature: lambda function: function)
inner = globals().get("inner") or compiled  # for what only compiled code calls
records = globals().get("records") or shadow

LANE_GROUPS, COLUMNS = 8, 512
CELLS = LANE_GROUPS * COLUMNS
HELD_AT = 3 * 8 * CELLS  # where the bytes begin
COLUMN = 4 * 128  # bytes of tensor memory from one column to the next
STRICT = 4  # sections of a clock at the strict level


@compiled("void(i8, i8, i8, i8, i8, i8, i8, i8)")
def mark(table, held, groups, low, high, write, me, kind):
    """Operation `me` has written the cells, which now hold values of `kind`, or read them."""
    for g in range(LANE_GROUPS):
        if (groups >> g) & 1 == 0:
            continue
        for at in range(g * COLUMNS + low, g * COLUMNS + high):
            if write:
                store64(table + 8 * at, np.uint64(me))
                store8(held + at, np.uint8(kind))
            else:
                store64(table + 8 * (at + 2 * CELLS), load64(table + 8 * (at + CELLS)))
                store64(table + 8 * (at + CELLS), np.uint64(me))


@inner("i8(i8, i8, i8, i8, i8, i8, i8, i8, i8)")
def users(table, low, high, reader, me, before, known, newest, out):
    """One row of cells of one table: adds to `out` the operations that are neither `me` nor `before` nor known to be
    complete. Returns 1 when there is a cell that nobody used."""
    empty, last = i8(0), i8(-1)
    for at in range(low, high):
        number = i8(load64(table + 8 * at))
        if number == last:
            continue
        last = number
        if number == 0:
            empty = i8(1)
        elif number != me and number != before and not records.complete(known, number, newest):
            entry, n, there = 2 * number + reader, i8(load64(out)), False
            for i in range(1, n + 1):
                there = there or i8(load64(out + 8 * i)) == entry
            if not there:
                store64(out + 8 * (n + 1), np.uint64(entry))
                store64(out, np.uint64(n + 1))
    return empty


@compiled("i8(i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8, i8)")
def touch(table, held, groups, low, high, write, me, before, known, newest, out, kind, wrong):
    """Operation `me` touches the cells [low, high) of the lane groups of tensor memory. Which operations wrote them
    (and read them, for a write) and are neither `me`, nor known to be complete, nor as writers `before` it in order?
    And what do the cells hold: bit 0 when nobody wrote one, 2 << k when one holds kind k. When there is no such
    operation, and nothing that `wrong` names, they are marked as by `mark`, and the answer is -1. Else the
    number of operations; out[0] is what the cells hold, behind it the operations, 2 * number for a writer and one more
    for a reader."""
    flags = i8(0)
    store64(out, np.uint64(0))
    for g in range(LANE_GROUPS):
        if (groups >> g) & 1:
            first, end, last = g * COLUMNS + low, g * COLUMNS + high, i8(-1)
            flags |= users(table, first, end, 0, me, before, known, newest, out)
            if write:
                users(table + 8 * CELLS, first, end, 1, me, 0, known, newest, out)
                users(table + 16 * CELLS, first, end, 1, me, 0, known, newest, out)
            if wrong >> 1:
                for at in range(first, end):
                    one = i8(load8(held + at))
                    if one != last:
                        flags |= i8(2) << one
                        last = one
    n = i8(load64(out))
    store64(out, np.uint64(flags))
    if n or flags & wrong:
        return n
    mark(table, held, groups, low, high, write, me, kind)
    return i8(-1)


@compiled("void(i8, i8)")
def waited(S, those):
    """The warp of S has waited for its loads or stores (`those`: S_LOADS or S_STORES): it knows them to be complete, at
    the strict level for its tcgen05 operations as well."""
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


@inner("i8(i8, i8, u4)")
def wait(S, kind, m):
    """tcgen05.wait, or registers of a load are due: MACRO when Python has to look, else 0."""
    if load64(S + 8 * S_PHASES) == np.uint64(0) or load64(S + 8 * S_OWED) != np.uint64(0):
        return i8(MACRO)
    if kind == WAIT_LOADS or kind == WAIT_STORES:
        if load64(S + 8 * S_ALIVE) != np.uint64(m):
            return i8(MACRO)
        waited(S, S_LOADS if kind == WAIT_LOADS else S_STORES)
    elif kind == FIRST_USE:
        layout = i8(load64(S + 8 * S_NEXT_OP))
        if i8(load64(layout + 8 * SECTIONS)) == STRICT and load64(S + 8 * S_LOADS) != np.uint64(0):
            return i8(MACRO)
    return i8(0)


@inner("i8(i8, i8, i8, i8, i8, i8, i8)")
def access(S, rows, row, count, store, about, pc):
    """tcgen05.ld and st by a whole warp: `count` registers, whose numbers are at `rows`, and as many columns of its 32
    lanes from the address in register `row` on. 0 when nothing is out of the ordinary and it has been done, compared,
    marked and numbered; else MACRO, and nothing has changed."""
    columns, layout = i8(load64(S + 8 * S_COLUMNS)), i8(load64(S + 8 * S_NEXT_OP))
    those = i8(S_STORES if store else S_LOADS)
    number, unwaited = i8(load64(layout + 8 * NEWEST)), i8(load64(S + 8 * those))
    if columns == 0 or load64(S + 8 * S_PHASES) == np.uint64(0) or load64(S + 8 * S_OWED) != np.uint64(0):
        return i8(MACRO)
    if load64(S + 8 * S_LATEST) != np.uint64(0) and about >> DISTANCE == 0:
        return i8(MACRO)
    if unwaited == UNWAITED or number & 31 == 0:  # Order.number has more to do then
        return i8(MACRO)
    R = i8(load64(S + 8 * S_R))
    address = load32(R + row * 128)
    for lane in range(1, 32):
        if load32(R + row * 128 + 4 * lane) != address:
            return i8(MACRO)
    first, lanes = i8(address & u4(0xFFFF)), i8(load64(S + 8 * S_TENSOR_LANE))
    if i8(address) - first != lanes or first < i8(load64(columns)) or first + count > i8(load64(columns + 8)):
        return i8(MACRO)
    table, clocks = i8(load64(S + 8 * S_CELLS)), i8(load64(layout + 8 * CLOCKS))
    seen = i8(load64(S + 8 * S_CLOCK)) + 4 * clocks
    if i8(load64(layout + 8 * SECTIONS)) == STRICT:
        seen += 4 * 2 * WORDS
    kind = about & ((1 << DISTANCE) - 1) if store else i8(0)
    if touch(table, table + HELD_AT, i8(3) << (lanes >> 20), first, first + count, store, number, 0, seen, number + 1,
             i8(load64(layout + 8 * FOUND)), kind, i8(0) if store else i8(1)) >= 0:  # fmt: skip
        return i8(MACRO)
    store64(layout + 8 * NEWEST, np.uint64(number + 1))
    entry = i8(load64(layout + 8 * LOG)) + 16 * (number & (OPS - 1))
    store64(entry, np.uint64(number))
    store64(entry + 8, np.uint64(i8(load64(S + 8 * S_ISSUER)) << 32 | pc))
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
