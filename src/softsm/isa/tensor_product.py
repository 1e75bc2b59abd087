"""The inner loop of the tensor core, 32 lanes at once: D = A*B + keep*D with fused multiply-adds in ascending k."""

from __future__ import annotations

import contextlib
import ctypes
import functools

import numpy as np
from llvmlite import ir

from softsm.engine import native
from softsm.engine.vec_ops import _AARCH64, canonical, fma
from softsm.engine.vec_rows import load_row, store_row
from softsm.engine.vec_types import _FLOAT, _I32, _I64, Bits, F, Vector, _splat, building

COLUMNS = 2  # columns of D at a time: their sums and one row of A fit into a CPU's 32 registers of 128 bits
STEPS = 4  # steps of k in one iteration of the loop
# cells, first row of D, plan, stride, a, b, k, keep
MULTIPLY = ir.FunctionType(ir.VoidType(), [_I64] * 7 + [_FLOAT])


@contextlib.contextmanager
def _loop(b: ir.IRBuilder, count: ir.Value, step: int = 1):
    """Builds `for i in range(0, count, step)`; yields i and a list to which (phi, next value) may be added."""
    before, head, body, out = b.block, *(b.append_basic_block(name) for name in ("head", "body", "out"))
    b.branch(head)
    b.position_at_end(head)
    i = b.phi(_I64)
    i.add_incoming(_I64(0), before)
    b.position_at_end(body)
    carried: list[tuple[ir.PhiInstr, ir.Value]] = []
    yield i, carried
    i.add_incoming(b.add(i, _I64(step)), b.block)
    for phi, value in carried:
        phi.add_incoming(value, b.block)
    b.branch(head)
    with b.goto_block(head):
        b.cbranch(b.icmp_signed("<", i, count), body, out)
    b.position_at_end(out)


def multiply(module: ir.Module) -> None:
    """Adds the function `multiply` to the module."""
    function = ir.Function(module, MULTIPLY, "multiply")
    cells, row, plan, stride, a, right, k, keep = function.args
    with building(ir.IRBuilder(function.append_basic_block("entry"))) as b:

        def element(base, index, type_):
            size = type_.width // 8 if isinstance(type_, ir.IntType) else 4
            return b.load(b.inttoptr(b.add(base, b.mul(index, _I64(size))), type_.as_pointer()))

        def spread(scalar) -> Vector:
            return Vector(_splat(b, scalar, F.count), F)

        def one_by_one(base, index) -> list[Vector]:
            """Returns STEPS elements, each broadcast to the lanes."""
            if not _AARCH64:
                return [spread(element(base, b.add(index, _I64(step)), _FLOAT)) for step in range(STEPS)]
            # AArch64 multiplies by an element of a register; a broadcast would cost another operation.
            whole = ir.VectorType(_FLOAT, STEPS)
            four = b.load(b.inttoptr(b.add(base, b.shl(index, _I64(2))), whole.as_pointer()), align=4)
            none = ir.Constant(whole, ir.Undefined)
            return [
                Vector(b.shuffle_vector(four, none, ir.Constant(ir.VectorType(_I32, F.count), [k] * F.count)), F)
                for k in range(STEPS)
            ]

        reads_d = b.fcmp_unordered("!=", keep, _FLOAT(0.0))
        scales_d = b.fcmp_unordered("!=", keep, _FLOAT(1.0))
        with _loop(b, stride) as (q, _):
            mask, first, count = (element(plan, b.add(b.mul(q, _I64(3)), _I64(i)), _I64) for i in range(3))
            mask = b.trunc(mask, _I32)
            with b.if_then(b.icmp_unsigned("!=", mask, _I32(0))), _loop(b, count, COLUMNS) as (n, _):
                columns = [b.add(n, _I64(c)) for c in range(COLUMNS)]
                rows = [b.add(b.add(row, q), b.mul(stride, c)) for c in columns]
                starts = []
                for r in rows:
                    slot = ir.Constant(F.ir, [0.0] * F.count)
                    before = b.block
                    with b.if_then(reads_d):
                        old = load_row(cells, r, F)
                        scaled = b.select(scales_d, (old * spread(keep)).value, old.value)
                        inside = b.block
                    start = b.phi(F.ir)
                    start.add_incoming(slot, before)
                    start.add_incoming(scaled, inside)
                    starts.append(start)
                of_b = [b.add(right, b.mul(b.add(first, c), b.shl(k, _I64(2)))) for c in columns]
                entry = b.block
                with _loop(b, k, STEPS) as (i, carried):
                    with b.goto_block(i.parent):
                        sums = [b.phi(F.ir) for _ in starts]
                    for total, start in zip(sums, starts):
                        total.add_incoming(start, entry)
                    latest = [Vector(total, F) for total in sums]
                    steps = [one_by_one(at, i) for at in of_b]
                    for step in range(STEPS):
                        v = load_row(a, b.add(b.mul(stride, b.add(i, _I64(step))), q), F)
                        latest = [fma(v, of_column[step], x) for of_column, x in zip(steps, latest)]
                    carried += [(total, value.value) for total, value in zip(sums, latest)]
                for r, total in zip(rows, sums):
                    store_row(cells, r, Bits(mask), canonical(Vector(total, F)))
        b.ret_void()


@functools.cache
def native_multiply():
    """Returns the compiled `multiply`, which receives addresses and checks nothing."""
    at = native.functions("product", multiply, ["multiply"])["multiply"]
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 7, ctypes.c_float)(at)


def multiply_into(cells: int, row: int, plan: np.ndarray, a: np.ndarray, b: np.ndarray, keep: float) -> None:
    """Does the same as `multiply_add`, with the address of the cells and without checks."""
    at = address
    native_multiply()(cells, row, at(plan), plan.shape[0], at(a), at(b), b.shape[1], keep)


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def multiply_add(cells: np.ndarray, row: int, plan: np.ndarray, a: np.ndarray, b: np.ndarray, keep: float) -> None:
    """Computes D = A*B + keep*D; keep = 0 does not read D. cells: uint32 [rows, 32]. plan, int64: plan[q] = (lane mask,
    first n, count of n) of the 32 lanes q; they are rows row + q + stride*i of cells for column i of D. The stride is
    the number of blocks q in the plan. Counts are even, k is a multiple of 4. a: uint32 [k*stride, 32] or longer, the
    operand row of each lane in its place. b: float32 [n, k]."""
    for array, dtype in ((cells, np.uint32), (plan, np.int64), (a, np.uint32), (b, np.float32)):
        assert array.dtype == dtype and array.flags.c_contiguous, (array.dtype, array.strides)
    assert b.shape[1] % STEPS == 0, b.shape
    multiply_into(cells.ctypes.data, row, plan, a, b, keep)
