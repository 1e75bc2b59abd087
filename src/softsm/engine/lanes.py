"""Lane-by-lane parts of the interpreter: loads, stores, atomics and votes.

Everything here is scalar code over raw addresses (R, Q, P, S, pool are addresses of the register files, the state
vector and the operand pool); a CPU without gather instructions would execute a vector gather in this way too. Bounds
are checked before anything is touched: an access outside the CTA's own shared memory and the known global allocations
returns SLOW, and Python does it or rejects it with a message.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from softsm.engine.native import intrinsic, native
from softsm.engine.program import (
    LOCAL_WINDOW,
    S_ALIVE,
    S_ALLOC,
    S_HIT,
    S_LOCAL,
    S_LOCAL_SIZE,
    S_NALLOC,
    S_SHARED,
    S_SHARED_BASE,
    S_SHARED_SIZE,
    S_WRITES,
    SHARED_START,
    SHARED_WINDOW,
)
from softsm.engine.program import S_SCRATCH as SCRATCH

GLOBAL, SHARED, GENERIC, LOCAL = 0, 1, 2, 3
OK, SLOW = 0, 1

# Access format: bits 0-1 log2 of the element size, 4-7 elements, 8 sign-extend, 9 rows are 64-bit.
SIGNED, WIDE = 1 << 8, 1 << 9


def _raw(width: int, name: str):
    llvm = ir.IntType(width)
    numba_type: Any = {8: types.uint8, 16: types.uint16, 32: types.uint32, 64: types.uint64}[width]

    def load(typingctx, address):
        def codegen(context, builder, signature, args):
            return builder.load(builder.inttoptr(args[0], llvm.as_pointer()), align=1 if width == 8 else None)

        return numba_type(types.int64), codegen

    def store(typingctx, address, value):
        def codegen(context, builder, signature, args):
            builder.store(args[1], builder.inttoptr(args[0], llvm.as_pointer()))
            return context.get_dummy_value()

        return types.void(types.int64, numba_type), codegen

    load.__name__, store.__name__ = f"load{name}", f"store{name}"
    return intrinsic(load), intrinsic(store)


load8, store8 = _raw(8, "8")
load16, store16 = _raw(16, "16")
load32, store32 = _raw(32, "32")
load64, store64 = _raw(64, "64")

u4, i8, u8 = np.uint32, np.int64, np.uint64


@native("u4(i8, i8, i8)")
def rget(R, row, lane):
    return load32(R + ((row << 5) + lane) * 4)


@native("void(i8, i8, i8, u4)")
def rput(R, row, lane, value):
    store32(R + ((row << 5) + lane) * 4, value)


@native("u8(i8, i8, i8)")
def qget(Q, row, lane):
    return load64(Q + ((row << 5) + lane) * 8)


@native("void(i8, i8, i8, u8)")
def qput(Q, row, lane, value):
    store64(Q + ((row << 5) + lane) * 8, value)


@native("i8(i8, i8)")
def sget(S, k):
    return i8(load64(S + 8 * k))


@native("void(i8, i8, i8)")
def sput(S, k, value):
    store64(S + 8 * k, u8(value))


@native("i8(i8, i8, i8, i8, i8, i8, i8)")
def matrices(R, S, rows, row, count, transpose, store):
    """Does ldmatrix and stmatrix of 8x8 matrices of 16-bit elements: moves matrix i between the register whose number
    is at rows + 4*i and the eight lines of 16 bytes that the register `row` names. Does nothing and returns SLOW when a
    line is not aligned or lies outside the CTA's shared memory."""
    base, size, shared = sget(S, S_SHARED_BASE), sget(S, S_SHARED_SIZE), sget(S, S_SHARED)
    for i in range(8 * count):  # check all before a register changes, which may hold the addresses
        at = i8(rget(R, row, i)) - base
        if at & 15 or at < SHARED_START or at + 16 > size:
            return SLOW
        sput(S, SCRATCH + i, shared + at)
    for i in range(8 * count):
        r, line, at = i8(load32(rows + 4 * (i >> 3))), i & 7, sget(S, SCRATCH + i)
        if not transpose:
            for k in range(4):
                if store:
                    store32(at + 4 * k, rget(R, r, 4 * line + k))
                else:
                    rput(R, r, 4 * line + k, load32(at + 4 * k))
            continue
        shift = u4(16 * (line & 1))
        for e in range(8):
            thread = 4 * e + (line >> 1)
            word = rget(R, r, thread)
            if store:
                store16(at + 2 * e, np.uint16((word >> shift) & u4(0xFFFF)))
            else:
                rput(R, r, thread, (word & ~(u4(0xFFFF) << shift)) | (u4(load16(at + 2 * e)) << shift))
    if store:
        sput(S, S_WRITES, sget(S, S_WRITES) + 1)
    return OK


@native("i8(i8, i8, i8)")
def known(S, lo, hi):
    """Tests whether [lo, hi) is inside one known global allocation. The table is sorted; S keeps the last hit."""
    table, n = sget(S, S_ALLOC), sget(S, S_NALLOC)
    hit = sget(S, S_HIT)
    if hit < n and i8(load64(table + 16 * hit)) <= lo and hi <= i8(load64(table + 16 * hit + 8)):
        return 1
    left, right = 0, n
    while left < right:
        middle = (left + right) >> 1
        if i8(load64(table + 16 * middle)) <= lo:
            left = middle + 1
        else:
            right = middle
    if left > 0 and hi <= i8(load64(table + 16 * (left - 1) + 8)):
        sput(S, S_HIT, left - 1)
        return 1
    return 0


@native("i8(i8, i8, i8, i8, i8, i8, i8, u4)")
def locate(R, Q, S, space, row, offset, size, m):
    """Fills S[SCRATCH:] with the checked host addresses of the active lanes; returns SLOW if one is not plain."""
    lo, hi = i8(0x7FFFFFFFFFFFFFFF), i8(-0x8000000000000000)
    bits = i8(0)
    if space == SHARED:
        for lane in range(32):
            if (m >> u4(lane)) & u4(1):
                a = i8(u4(i8(rget(R, row, lane)) + offset)) - sget(S, S_SHARED_BASE)
                sput(S, SCRATCH + lane, a)
                lo, hi, bits = min(lo, a), max(hi, a), bits | a
    else:
        for lane in range(32):
            if (m >> u4(lane)) & u4(1):
                a = i8(qget(Q, row, lane)) + offset
                sput(S, SCRATCH + lane, a)
                lo, hi, bits = min(lo, a), max(hi, a), bits | a
    if bits & (size - 1):
        return SLOW
    if space == GENERIC and lo >= SHARED_WINDOW and hi < LOCAL_WINDOW:
        space = SHARED
        shift = SHARED_WINDOW + sget(S, S_SHARED_BASE)
        lo, hi = lo - shift, hi - shift
        for lane in range(32):
            sput(S, SCRATCH + lane, sget(S, SCRATCH + lane) - shift)
    if space == SHARED:
        if lo < SHARED_START or hi + size > sget(S, S_SHARED_SIZE):
            return SLOW
        for lane in range(32):
            sput(S, SCRATCH + lane, sget(S, SCRATCH + lane) + sget(S, S_SHARED))
        return OK
    if space == LOCAL:
        if lo < 0 or hi + size > sget(S, S_LOCAL_SIZE):
            return SLOW
        for lane in range(32):
            sput(S, SCRATCH + lane, sget(S, SCRATCH + lane) + sget(S, S_LOCAL) + lane * sget(S, S_LOCAL_SIZE))
        return OK
    if known(S, lo, hi + size):
        return OK
    for lane in range(32):
        if (m >> u4(lane)) & u4(1) and not known(S, sget(S, SCRATCH + lane), sget(S, SCRATCH + lane) + size):
            return SLOW
    return OK


@native("i8(i8, i8, i8, i8, i8, i8, i8, i8, i8, u4)")
def load(R, Q, pool, S, space, rows, row, offset, fmt, m):
    log, count = fmt & 3, (fmt >> 4) & 15
    status = locate(R, Q, S, space, row, offset, count << log, m)
    if status != OK:
        return status
    for k in range(count):
        rd, step = i8(np.int32(load32(pool + 4 * (rows + k)))), i8(k) << log
        if rd < 0:
            continue
        if log == 2 and not fmt & WIDE:
            for lane in range(32):
                if (m >> u4(lane)) & u4(1):
                    rput(R, rd, lane, load32(sget(S, SCRATCH + lane) + step))
        elif log == 3:
            for lane in range(32):
                if (m >> u4(lane)) & u4(1):
                    qput(Q, rd, lane, load64(sget(S, SCRATCH + lane) + step))
        else:
            for lane in range(32):
                if (m >> u4(lane)) & u4(1):
                    a = sget(S, SCRATCH + lane) + step
                    v = i8(load8(a)) if log == 0 else i8(load16(a)) if log == 1 else i8(load32(a))
                    if fmt & SIGNED:
                        shift = i8(64) - (i8(8) << log)
                        v = (v << shift) >> shift
                    if fmt & WIDE:
                        qput(Q, rd, lane, u8(v))
                    else:
                        rput(R, rd, lane, u4(v))
    return OK


@native("i8(i8, i8, i8, i8, i8, i8, i8, i8, i8, u4)")
def store(R, Q, pool, S, space, rows, row, offset, fmt, m):
    log, count = fmt & 3, (fmt >> 4) & 15
    status = locate(R, Q, S, space, row, offset, count << log, m)
    if status != OK:
        return status
    sput(S, S_WRITES, sget(S, S_WRITES) + 1)
    for k in range(count):
        rs, step = i8(np.int32(load32(pool + 4 * (rows + k)))), i8(k) << log
        for lane in range(32):
            if (m >> u4(lane)) & u4(1):
                a = sget(S, SCRATCH + lane) + step
                if log == 2:
                    store32(a, u4(qget(Q, rs, lane)) if fmt & WIDE else rget(R, rs, lane))
                elif log == 3:
                    store64(a, qget(Q, rs, lane))
                elif log == 1:
                    store16(a, np.uint16(qget(Q, rs, lane)) if fmt & WIDE else np.uint16(rget(R, rs, lane)))
                else:
                    store8(a, np.uint8(qget(Q, rs, lane)) if fmt & WIDE else np.uint8(rget(R, rs, lane)))
    return OK


# ---- atomics: result of `old op b (, c)` on raw bits ----------------------------------------------------------------

ADD, MIN, MAX, AND, OR, XOR, EXCH, CAS, INC, DEC = range(10)
T_U32, T_S32, T_U64, T_S64, T_F32, T_F64 = range(6)


@intrinsic
def _bits_f32(typingctx, x):
    return types.float32(types.uint32), lambda c, b, s, a: b.bitcast(a[0], ir.FloatType())


@intrinsic
def _f32_bits(typingctx, x):
    return types.uint32(types.float32), lambda c, b, s, a: b.bitcast(a[0], ir.IntType(32))


@intrinsic
def _bits_f64(typingctx, x):
    return types.float64(types.uint64), lambda c, b, s, a: b.bitcast(a[0], ir.DoubleType())


@intrinsic
def _f64_bits(typingctx, x):
    return types.uint64(types.float64), lambda c, b, s, a: b.bitcast(a[0], ir.IntType(64))


@native("u4(i8, i8, u4, u4, u4)", python=True)
def atomic32(op, t, old, b, c):
    if op == EXCH:
        return b
    if op == CAS:
        return c if old == b else old
    if op == ADD:
        return _f32_bits(np.float32(_bits_f32(old) + _bits_f32(b))) if t == T_F32 else u4(old + b)
    if op == AND:
        return old & b
    if op == OR:
        return old | b
    if op == XOR:
        return old ^ b
    if op == INC:
        return u4(0) if old >= b else u4(old + u4(1))
    if op == DEC:
        return b if old == u4(0) or old > b else u4(old - u4(1))
    less = np.int32(old) < np.int32(b) if t == T_S32 else old < b
    return old if less == (op == MIN) else b


@native("u8(i8, i8, u8, u8, u8)", python=True)
def atomic64(op, t, old, b, c):
    if op == EXCH:
        return b
    if op == CAS:
        return c if old == b else old
    if op == ADD:
        return _f64_bits(_bits_f64(old) + _bits_f64(b)) if t == T_F64 else u8(old + b)
    if op == AND:
        return old & b
    if op == OR:
        return old | b
    if op == XOR:
        return old ^ b
    less = i8(old) < i8(b) if t == T_S64 else old < b
    return old if less == (op == MIN) else b


@native("i8(i8, i8, i8, i8, i8, i8, i8, i8, i8, u4)")
def atomic(R, Q, pool, S, space, rows, row, offset, fmt, m):
    """Does an atomic, lanes in order. pool[rows:] = destination row (or -1), b row, c row; fmt = op | type << 8."""
    op, t = fmt & 255, fmt >> 8
    wide = t == T_U64 or t == T_S64 or t == T_F64
    status = locate(R, Q, S, space, row, offset, 8 if wide else 4, m)
    if status != OK:
        return status
    rd = i8(np.int32(load32(pool + 4 * rows)))
    rb = i8(load32(pool + 4 * (rows + 1)))
    rc = i8(load32(pool + 4 * (rows + 2)))
    for lane in range(32):
        if (m >> u4(lane)) & u4(1):
            a = sget(S, SCRATCH + lane)
            if wide:
                old = load64(a)
                new = atomic64(op, t, old, qget(Q, rb, lane), qget(Q, rc, lane))
                if rd >= 0:
                    qput(Q, rd, lane, old)
                if new != old:
                    store64(a, new)
                    sput(S, S_WRITES, sget(S, S_WRITES) + 1)
            else:
                old4 = load32(a)
                new4 = atomic32(op, t, old4, rget(R, rb, lane), rget(R, rc, lane))
                if rd >= 0:
                    rput(R, rd, lane, old4)
                if new4 != old4:
                    store32(a, new4)
                    sput(S, S_WRITES, sget(S, S_WRITES) + 1)
    return OK


# ---- between the lanes of a warp -------------------------------------------------------------------------------------

V_ANY, V_ALL, V_UNI, V_BALLOT = range(4)
R_ADD, R_MIN, R_MAX, R_AND, R_OR, R_XOR, R_SMIN, R_SMAX = range(8)


@native("u4(i8, i8, i8, u4)")
def reduce(R, ra, op, m):
    """Computes redux.sync over the lanes of m."""
    first = True
    acc = u4(0)
    for lane in range(32):
        if (m >> u4(lane)) & u4(1):
            v = rget(R, ra, lane)
            if first:
                acc, first = v, False
            elif op == R_ADD:
                acc = u4(acc + v)
            elif op == R_MIN:
                acc = min(acc, v)
            elif op == R_MAX:
                acc = max(acc, v)
            elif op == R_AND:
                acc = acc & v
            elif op == R_OR:
                acc = acc | v
            elif op == R_XOR:
                acc = acc ^ v
            elif op == R_SMIN:
                acc = v if np.int32(v) < np.int32(acc) else acc
            else:
                acc = v if np.int32(v) > np.int32(acc) else acc
    return acc


@native("i8(u4)")
def first_lane(m):
    for lane in range(32):
        if (m >> u4(lane)) & u4(1):
            return lane
    return 0


@native("u4(i8, i8, u4)")
def together(R, row, left):
    """Returns those of the lanes `left` that act with the first one: its membermask names them."""
    first = first_lane(left)
    return (rget(R, row, first) & left) | (u4(1) << u4(first))


@native("i8(i8, i8, i8, u4)")
def missing(R, S, row, m):
    """Returns the living lanes of the membermasks that have not arrived; they must arrive first."""
    left, named = m, u4(0)
    while left:
        named = named | rget(R, row, first_lane(left))
        left = left & ~together(R, row, left)
    need = i8(named) & sget(S, S_ALIVE)
    return need if need & ~i8(m) else i8(0)


@native("i8(i8, i8, u4)")
def exited(R, row, m):
    """Returns whether a membermask names lanes that do not execute the instruction, after all living ones have met."""
    for lane in range(32):
        if (m >> u4(lane)) & u4(1) and rget(R, row, lane) & ~m:
            return i8(1)
    return i8(0)
