"""The interpreter, compiled once per machine: the dispatch loop (engine/dispatch.py) and the functions that it calls
for memory and exchange between lanes. Numba compiles scalar code, LLVM directly compiles code for 32 lanes at once
(engine/native.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import llvmlite.binding as llvm
import numpy as np

from softsm.engine import dispatch, vec_access
from softsm.engine import program as pg
from softsm.engine.lanes import (
    EXCH,
    atomic,
    exited,
    first_lane,
    i8,
    load,
    load32,
    load64,
    locate,
    matrices,
    missing,
    reduce,
    rput,
    sget,
    store,
    store32,
    together,
    u4,
)
from softsm.engine.native import Native, functions, native


class Watch(NamedTuple):
    """The native functions of checks/ that observe accesses to memory, by their names there."""

    note: Native
    quiet: Native
    collide: Native
    keep_lines: Native
    register_lines: Native
    answer_wait: Native
    members: Native
    tick: Native
    access: Native
    wait: Native
    product: Native


def lane_by_lane(watch: Watch | None) -> Native:
    """Returns the native function for memory and exchange between lanes, one lane after the other. Its result is 0, or
    a status and, above it, the lanes that the status concerns (0 = the active ones)."""
    checking = watch is not None
    given: Any = watch or [None] * len(Watch._fields)
    note, quiet, collide, keep_lines, register_lines, answer_wait, members, tick, access, wait, product = given

    @native("i8(u4, u4, u4, u4, u4, u4, u4, i8, i8)", c=True, effort=2 if checking else 3)
    def lane_operation(op, rd, ra, rb, rc, rx, m, S, pc):
        op, rd, ra, rc, rx, offset, rb = i8(op), i8(rd), i8(ra), i8(rc), i8(rx), i8(np.int32(rb)), i8(rb)
        pool, R, Q, P = sget(S, pg.S_POOL), sget(S, pg.S_R), sget(S, pg.S_Q), sget(S, pg.S_P)
        if op <= pg.OP_STL:
            if checking:
                size = ((rc >> 4) & 15) << (rc & 3)
                if op == pg.OP_STG or op == pg.OP_STS or op == pg.OP_ST:
                    # Note it before the store is made: only then is it visible whether the store changes anything.
                    space = 0 if op == pg.OP_STG else 1 if op == pg.OP_STS else 2
                    if locate(R, Q, S, space, ra, offset, size, m) == 0:
                        note(S, size, m, 1, rx | quiet(R, Q, pool, S, rd, rc, m), pc)
            if op == pg.OP_LDG:
                bad = load(R, Q, pool, S, 0, rd, ra, offset, rc, m)
            elif op == pg.OP_STG:
                bad = store(R, Q, pool, S, 0, rd, ra, offset, rc, m)
            elif op == pg.OP_LDS:
                bad = load(R, Q, pool, S, 1, rd, ra, offset, rc, m)
            elif op == pg.OP_STS:
                bad = store(R, Q, pool, S, 1, rd, ra, offset, rc, m)
            elif op == pg.OP_LD:
                bad = load(R, Q, pool, S, 2, rd, ra, offset, rc, m)
            elif op == pg.OP_ST:
                bad = store(R, Q, pool, S, 2, rd, ra, offset, rc, m)
            elif op == pg.OP_LDL:
                bad = load(R, Q, pool, S, 3, rd, ra, offset, rc, m)
            else:
                bad = store(R, Q, pool, S, 3, rd, ra, offset, rc, m)
            if bad:
                return i8(pg.SLOW_MEMORY)
            if checking:
                if op == pg.OP_LDG or op == pg.OP_LDS or op == pg.OP_LD:
                    note(S, size, m, 0, rx, pc)
                # Where several lanes write one place, it is undefined whose value remains. rx & 1: atomic or volatile.
                if (op == pg.OP_STG or op == pg.OP_ST) and not rx & 1:
                    collide(R, Q, pool, S, rd, rc, m, pc)
        elif op == pg.OP_CONVERGE:
            need = missing(R, S, ra, m)
            if need:
                return i8(pg.CONVERGE) | (need << 8)
        elif op == pg.OP_VOTE:
            left, votes = m, load32(P + 4 * ra)
            while left:
                member = together(R, rb, left)
                yes = votes & member
                if rc == 3:
                    for lane in range(32):
                        if (member >> u4(lane)) & u4(1):
                            rput(R, rd, lane, yes)
                else:
                    answer = yes != 0 if rc == 0 else yes == member if rc == 1 else yes == member or yes == 0
                    old = load32(P + 4 * rd)
                    store32(P + 4 * rd, (old | member) if answer else (old & ~member))
                left = left & ~member
        elif op == pg.OP_ELECT:
            left = m
            while left:
                member = together(R, rb, left)
                leader = first_lane(member)
                if rd:
                    for lane in range(32):
                        if (member >> u4(lane)) & u4(1):
                            rput(R, rd, lane, u4(leader))
                if ra:
                    old = load32(P + 4 * ra)
                    store32(P + 4 * ra, (old & ~member) | (u4(1) << u4(leader)))
                left = left & ~member
        elif op == pg.OP_ACTIVEMASK:
            for lane in range(32):
                if (m >> u4(lane)) & u4(1):
                    rput(R, rd, lane, m)
        elif op == pg.OP_REDUX:
            left = m
            while left:
                member = together(R, rc, left)
                total = reduce(R, ra, rb, member)
                for lane in range(32):
                    if (member >> u4(lane)) & u4(1):
                        rput(R, rd, lane, total)
                left = left & ~member
        elif op == pg.OP_ATOM_G or op == pg.OP_ATOM_S:
            space = 1 if op == pg.OP_ATOM_S else 2 if rx else 0
            if atomic(R, Q, pool, S, space, rd, ra, offset, rc, m):
                return i8(pg.SLOW_MEMORY)
            if checking:
                wide = rc >> 8
                flags = 1 if rc & 255 == EXCH else 3  # an exchange does not depend on what was there
                note(S, 8 if wide == 2 or wide == 3 or wide == 5 else 4, m, 1, flags, pc)
        elif op == pg.OP_LDMATRIX or op == pg.OP_STMATRIX:
            # rb: addresses, rc: matrices, rx: transposed
            watched = sget(S, pg.S_PHASES) == 0 if checking else sget(S, pg.S_UNWATCHED) == 0
            if m != u4(pg.ALL) or watched:
                return i8(pg.MACRO)
            stores = i8(op == pg.OP_STMATRIX)
            if checking:  # Python does it if two lines are the same or one is not the CTA's own
                kept = i8(load64(sget(S, pg.S_NEXT_OP) + 8 * pg.KEPT))
                if keep_lines(S, rb, 8 * rc, kept):
                    return i8(pg.MACRO)
                if not stores:
                    register_lines(S, rb, 8 * rc, 0, pc, 0)
            if matrices(R, S, pool + 4 * rd, rb, rc, rx, stores):
                return i8(pg.MACRO)
            if checking:
                if stores:
                    register_lines(S, rb, 8 * rc, 1, pc, kept)
        elif checking:
            if op == pg.OP_CHECKED_WAIT:
                return answer_wait(R, P, S, rd, rb, rc, m)
            if op == pg.OP_MEMBERS:
                return members(R, S, rb, m)
            if op == pg.OP_SOURCES:
                return i8(pg.MACRO) if exited(R, rb, m) else i8(0)
            if op == pg.OP_TICK:
                return tick(S)
            if op == pg.OP_CHECKED_LD or op == pg.OP_CHECKED_ST:
                # rd: registers in the pool, rb: address, rc: their number
                return access(S, pool + 4 * rd, rb, rc, i8(op == pg.OP_CHECKED_ST), rx, pc)
            if op == pg.OP_TENSOR_WAIT:
                return wait(S, rc, m)
            if op == pg.OP_CHECKED_MMA:
                # rd: rows of its operands in the pool, rb: number of the instruction, rc: is A in tensor memory?
                return product(S, pool + 4 * rd, rb, rc, m, pc)
            return i8(pg.UNKNOWN)
        else:
            return i8(pg.UNKNOWN)
        return i8(0)

    return lane_operation


unchecked = lane_by_lane(None)


@functools.cache
def lane_operation() -> int:
    """Returns the address of the function that the dispatch loop calls. It does the plain cases for all lanes at once.
    The checking engine needs each lane's address anyway and has its own function (checks/lane_operation.py)."""
    llvm.add_symbol(vec_access.FALLBACK, unchecked.address)
    return functions("access", vec_access.plain_access, ["lane_operation"])["lane_operation"]


def interpreter(program: pg.Program) -> Callable:
    """Compiles what `program` needs and this machine has not compiled yet. Returns a function that gives a machine its
    `run` (see engine/dispatch.py)."""
    dispatch.cold_operations().prepare(program.code)
    return functools.partial(dispatch.runner, lane_operation())
