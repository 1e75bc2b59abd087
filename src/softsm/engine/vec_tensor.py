"""tcgen05.ld and st of shape 32x32b: a register is a column of the warp's 32 lanes of tensor memory.

The dispatch loop calls the function of `tensor_access` where nothing is ever in flight. It moves the registers in the
plain case (one address, the warp's own lanes, columns that the CTA allocated last). Otherwise it touches nothing, and
the macro-operation does the access or reports what is wrong.
"""

from __future__ import annotations

from llvmlite import ir

from softsm.engine import program as pg
from softsm.engine.vec_access import add_write, field
from softsm.engine.vec_rows import lane_get, load_row, store_row
from softsm.engine.vec_types import _I32, _I64, FULL, LANES, Bits, U, Vector, _splat, any_bit, building

COLUMN = 4 * 128  # bytes from one column to the next


def tensor_access(module: ir.Module, write: bool) -> ir.Function:
    """Adds the function done = access(S, index of the registers in the pool, row of the address, registers)."""
    name = "softsm_tensor_store" if write else "softsm_tensor_load"
    function = ir.Function(module, ir.FunctionType(_I32, [_I64, _I32, _I32, _I32]), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    S, rd, row, count = function.args
    with building(ir.IRBuilder(function.append_basic_block("entry"))) as b:
        decline, allocated, loop, over = (
            function.append_basic_block(name) for name in ("decline", "allocated", "loop", "over")
        )
        columns = field(S, pg.S_COLUMNS)
        b.cbranch(b.icmp_unsigned("==", columns, _I64(0)), decline, allocated)

        b.position_at_end(allocated)
        R = field(S, pg.S_R)
        addresses = load_row(R, row, U)
        address = lane_get(addresses, 0)
        differ = any_bit(addresses ^ Vector(_splat(b, address, LANES), U))
        lanes = b.zext(b.and_(address, _I32(0xFFFF0000)), _I64)  # 0: the warp's own, see isa/tensor_memory.py
        foreign = b.icmp_unsigned("!=", lanes, field(S, pg.S_TENSOR_LANE))
        elsewhere = b.and_(foreign, b.icmp_unsigned("!=", lanes, _I64(0)))
        first, number = b.zext(b.and_(address, _I32(0xFFFF)), _I64), b.zext(count, _I64)
        low, high = (b.load(b.inttoptr(b.add(columns, _I64(8 * k)), _I64.as_pointer())) for k in range(2))
        outside = b.or_(b.icmp_unsigned("<", first, low), b.icmp_unsigned(">", b.add(first, number), high))
        begin = b.add(field(S, pg.S_TENSOR), b.mul(first, _I64(COLUMN)))
        pool = b.add(field(S, pg.S_POOL), b.shl(b.zext(rd, _I64), _I64(2)))
        b.cbranch(b.or_(b.or_(b.icmp_unsigned("!=", differ, _I32(0)), elsewhere), outside), decline, loop)

        b.position_at_end(loop)
        i = b.phi(_I64)
        i.add_incoming(_I64(0), allocated)
        register = b.load(b.inttoptr(b.add(pool, b.shl(i, _I64(2))), _I32.as_pointer()))
        cells = b.inttoptr(b.add(begin, b.mul(i, _I64(COLUMN))), U.ir.as_pointer())
        if write:
            b.store(load_row(R, register, U).value, cells, align=16)
        else:
            store_row(R, register, Bits(_I32(FULL)), Vector(b.load(cells, align=16), U))
        following = b.add(i, _I64(1))
        i.add_incoming(following, b.block)
        b.cbranch(b.icmp_unsigned("<", following, number), loop, over)

        b.position_at_end(over)
        if write:
            add_write(S)
        b.ret(_I32(1))

        b.position_at_end(decline)
        b.ret(_I32(0))
    return function
