"""The way from Python into the dispatch loop: one call of a compiled function of numbers. It costs
a microsecond; by ctypes it would be four.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils

from softsm.engine.lanes import load32
from softsm.engine.native import intrinsic, native


@intrinsic
def call(typingctx, loop, lane_operation, cold, S, pc, mask, stop, quantum, multi):
    """Returns the function `run` of engine/dispatch.py at the address `loop`, its results gathered."""

    def codegen(context, builder, signature, args):
        i64 = ir.IntType(64)
        results = cgutils.alloca_once(builder, i64, size=4)
        function = builder.inttoptr(args[0], ir.FunctionType(i64, [i64] * 9).as_pointer())
        status = builder.call(function, [*args[1:], builder.ptrtoint(results, i64)])
        others = [builder.load(builder.gep(results, [i64(k)])) for k in range(4)]
        return context.make_tuple(builder, signature.return_type, [status, *others])

    return types.UniTuple(types.int64, 5)(*[types.int64] * 9), codegen


@native("UniTuple(i8, 5)(i8, i8, i8, i8, i8, i8, i8, i8, i8)", python=True)
def enter(loop, lane_operation, cold, S, pc, mask, stop, quantum, multi):
    """Returns (status, pc, mask, lanes, steps)."""
    return call(loop, lane_operation, cold, S, pc, mask, stop, quantum, multi)


@native("i8(i8)", python=True)
def agreed(row):
    """Returns the value that the 32 lanes of a 32-bit register have at this address, if all, active or not, have the
    same; else
    -1."""
    first = load32(row)
    for lane in range(1, 32):
        if load32(row + 4 * lane) != first:
            return -1
    return first
