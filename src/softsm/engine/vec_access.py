"""Loads and stores of 32-bit elements, all lanes at once: the plain cases of what engine/lanes.py does lane by lane.

`plain_access` is the engine's function for memory operations when nothing is checked. It does plain accesses (all
lanes in bounds and aligned, 32-bit elements, the CTA's own memory or a known allocation), and moves consecutive
addresses of consecutive lanes as one vector. Otherwise it touches nothing and passes the operation on to the
lane-by-lane function.
"""

from __future__ import annotations

from llvmlite import ir

from softsm.engine import program as pg
from softsm.engine.vec_ops import toq
from softsm.engine.vec_rows import (
    gather32,
    lane_get,
    lanes,
    load_row,
    scatter32,
    store_row,
    strided_load,
    strided_store,
)
from softsm.engine.vec_types import (
    _I32,
    _I64,
    FULL,
    LANES,
    Bits,
    Q,
    U,
    Vector,
    _splat,
    any_lane,
    building,
    here,
    tomask,
)

# The access format of engine/lanes.py: bits 0-1 log2 of the element size, 4-7 elements, 9 rows are 64-bit.
ELEMENT, WIDE, WORDS = 3, 1 << 9, 2
OPERATION = ir.FunctionType(_I64, [_I32] * 7 + [_I64] * 2)  # op, rd, ra, rb, rc, rx, m, S, pc
FALLBACK = "softsm_lane_by_lane"


def field(S: ir.Value, k: int) -> ir.Value:
    """Loads field k of the state vector."""
    return here().load(_field(S, k))


def _field(S: ir.Value, k: int) -> ir.Value:
    return here().inttoptr(here().add(S, _I64(8 * k)), _I64.as_pointer())


def add_write(S: ir.Value) -> None:
    """Counts a change of memory."""
    at = _field(S, pg.S_WRITES)
    here().store(here().add(here().load(at), _I64(1)), at)


def _word(address: ir.Value) -> ir.Value:
    return here().load(here().inttoptr(address, _I32.as_pointer()))


def _splatted(scalar: ir.Value, kind) -> Vector:
    return Vector(_splat(here(), scalar, kind.count), kind)


class _Access:
    """One access: the operands of its record, and the block to branch to when it is not plain."""

    def __init__(self, function: ir.Function, count: int, decline: ir.Block):
        _, self.rd, self.ra, rb, _, _, m, self.S, _ = function.args
        self.m, self.offset = Bits(m), here().sext(rb, _I64)
        self.count, self.bytes, self.decline = count, 4 * count, decline
        self.R = field(self.S, pg.S_R)
        pool = here().add(field(self.S, pg.S_POOL), here().shl(here().zext(self.rd, _I64), _I64(2)))
        self.rows = [_word(here().add(pool, _I64(4 * k))) for k in range(count)]
        for row in self.rows:  # a load may drop parts, which then have no row
            self.unless(here().icmp_signed("<", row, _I32(0)))

    def unless(self, condition: ir.Value) -> None:
        """Declines the access if the condition holds."""
        b = here()
        go_on = b.append_basic_block("plain")
        b.cbranch(condition, self.decline, go_on)
        b.position_at_end(go_on)

    def move(self, at: ir.Value, write: bool) -> None:
        """Moves all lanes, which are consecutive in memory from `at` on."""
        if write:
            strided_store(at, [load_row(self.R, row, U) for row in self.rows])
            return
        values = [strided_load(at, self.count, k) for k in range(self.count)]
        for row, value in zip(self.rows, values):
            store_row(self.R, row, Bits(_I32(FULL)), value)

    def move_each(self, addresses: Vector, write: bool) -> None:
        for k, row in enumerate(self.rows):
            if write:
                scatter32(addresses + 4 * k, self.m, load_row(self.R, row, U))
            else:
                store_row(self.R, row, self.m, gather32(addresses + 4 * k, self.m))


def _shared(x: _Access, write: bool, done) -> None:
    b = here()
    base, size, memory = (field(x.S, k) for k in (pg.S_SHARED_BASE, pg.S_SHARED_SIZE, pg.S_SHARED))
    a = load_row(x.R, x.ra, U) + _splatted(b.trunc(b.sub(x.offset, base), _I32), U)
    with b.if_then(b.icmp_unsigned("==", x.m.value, _I32(FULL))):
        first = lane_get(a, 0)
        run = lanes() * x.bytes + _splatted(first, U)
        with b.if_then(b.not_(any_lane(a != run))):  # one run: only its two ends need checks
            at = b.zext(first, _I64)
            low, high = b.icmp_signed("<", at, _I64(pg.SHARED_START)), b.add(at, _I64(LANES * x.bytes))
            odd = b.icmp_unsigned("!=", b.and_(first, _I32(x.bytes - 1)), _I32(0))
            x.unless(b.or_(b.or_(low, b.icmp_signed(">", high, size)), odd))
            x.move(b.add(memory, at), write)
            done()
        # Not a run: the code below moves it lane by lane.
    last = _splatted(b.trunc(b.sub(size, _I64(x.bytes)), _I32), U)
    bad = (a < pg.SHARED_START) | (a > last) | ((a & (x.bytes - 1)) != 0)
    x.unless(b.icmp_unsigned("!=", b.and_(tomask(bad).value, x.m.value), _I32(0)))
    x.move_each(toq(a) + _splatted(memory, Q), write)
    done()


def _global(x: _Access, write: bool, done) -> None:
    b = here()
    x.unless(b.icmp_unsigned("!=", x.m.value, _I32(FULL)))
    a = load_row(field(x.S, pg.S_Q), x.ra, Q)
    first = lane_get(a, 0)
    for lane in (1, LANES - 1):  # a cheap test that mostly suffices
        x.unless(b.icmp_unsigned("!=", b.sub(lane_get(a, lane), first), _I64(lane * x.bytes)))
    x.unless(any_lane(a - _splatted(first, Q) != toq(lanes()) * x.bytes))
    at = b.add(first, x.offset)
    x.unless(b.icmp_unsigned("!=", b.and_(at, _I64(x.bytes - 1)), _I64(0)))
    x.unless(b.not_(_known(x.S, at, b.add(at, _I64(LANES * x.bytes)))))
    x.move(at, write)
    done()


def _known(S: ir.Value, low: ir.Value, high: ir.Value) -> ir.Value:
    """Tests whether [low, high) is inside one known global allocation. The table is sorted; S keeps the last hit."""
    b = here()
    table, n, hit = field(S, pg.S_ALLOC), field(S, pg.S_NALLOC), field(S, pg.S_HIT)

    def edge(i, which: int):
        at = b.add(b.add(table, b.shl(i, _I64(4))), _I64(8 * which))
        return b.load(b.inttoptr(at, _I64.as_pointer()))

    def holds(i):
        return b.and_(b.icmp_signed("<=", edge(i, 0), low), b.icmp_signed("<=", high, edge(i, 1)))

    remembered = b.and_(b.icmp_signed("<", hit, n), holds(hit))  # entry 0 always exists
    before, head = b.block, b.append_basic_block("search")
    body, found, out = (b.append_basic_block(name) for name in ("halve", "found", "out"))
    b.cbranch(remembered, out, head)
    b.position_at_end(head)
    left, right = b.phi(_I64), b.phi(_I64)
    b.cbranch(b.icmp_signed("<", left, right), body, found)
    b.position_at_end(body)
    middle = b.lshr(b.add(left, right), _I64(1))
    below = b.icmp_signed("<=", edge(middle, 0), low)
    left.add_incoming(_I64(0), before)
    right.add_incoming(n, before)
    left.add_incoming(b.select(below, b.add(middle, _I64(1)), left), body)
    right.add_incoming(b.select(below, right, middle), body)
    b.branch(head)
    b.position_at_end(found)
    candidate = b.select(b.icmp_signed(">", left, _I64(0)), b.sub(left, _I64(1)), _I64(0))
    inside = b.and_(b.icmp_signed(">", left, _I64(0)), holds(candidate))
    b.store(b.select(inside, candidate, hit), _field(S, pg.S_HIT))
    b.branch(out)
    b.position_at_end(out)
    answer = b.phi(ir.IntType(1))
    answer.add_incoming(remembered, before)
    answer.add_incoming(inside, found)
    return answer


def plain_access(module: ir.Module) -> None:
    """Adds the function `lane_operation`, of the type OPERATION, to the module."""
    function = ir.Function(module, OPERATION, "lane_operation")
    fallback = ir.Function(module, OPERATION, FALLBACK)
    b = ir.IRBuilder(function.append_basic_block("entry"))
    op, rd, _, _, rc, _, _, S, _ = function.args
    decline = function.append_basic_block("decline")
    with building(ir.IRBuilder(decline)) as tail:
        tail.ret(tail.call(fallback, function.args))
    cases = {
        pg.OP_LDS: (_shared, False),
        pg.OP_STS: (_shared, True),
        pg.OP_LDG: (_global, False),
        pg.OP_STG: (_global, True),
    }
    which = b.switch(op, decline)
    for number, (access, write) in cases.items():
        block = function.append_basic_block(f"op{number}")
        which.add_case(_I32(number), block)
        with building(ir.IRBuilder(block)) as inner:
            # One, two or four words in rows of 32 bits.
            key = inner.and_(rc, _I32(ELEMENT | WIDE | 15 << 4))
            counts = inner.switch(key, decline)
        for count in (1, 2, 4):
            part = function.append_basic_block(f"op{number}x{count}")
            counts.add_case(_I32(WORDS | count << 4), part)
            with building(ir.IRBuilder(part)) as inner:

                def done(write=write, inner=inner):
                    if write:
                        add_write(S)
                    inner.ret(_I64(0))

                access(_Access(function, count, decline), write, done)
