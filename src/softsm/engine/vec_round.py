"""Arithmetic in the directed rounding modes, by the CPU's own rounding control.

LLVM may move plain float arithmetic across a change of rounding mode. The operation therefore stands in a function of
its own between volatile accesses: load operands, operate, store the result, all after the mode is set and before it is
put back.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from softsm.engine.vec_types import _I32, D, F, V, _declare, _function, _suffix

# llvm.set.rounding's numbers.
TO_ZERO, TO_NEAREST, UP, DOWN = 0, 1, 2, 3


def _guarded(b, name, result: ir.Type, operands: list[ir.Type], operate):
    def body(k, arguments):
        mode, out, *sources = arguments
        set_rounding = _declare(k, "llvm.set.rounding", ir.VoidType(), [_I32])
        k.call(set_rounding, [mode])
        values = []
        for p in sources:
            value = k.load(p, align=8)
            value.volatile = True
            values.append(value)
        store = k.store(operate(k, values), out, align=8)
        store.volatile = True
        k.call(set_rounding, [_I32(TO_NEAREST)])
        k.ret_void()

    pointers = [result.as_pointer(), *(t.as_pointer() for t in operands)]
    return _function(b, name, ir.VoidType(), [_I32, *pointers], body)


def _call(b, fn, mode, out_type, values):
    out = cgutils.alloca_once(b, out_type)
    pointers = []
    for value in values:
        p = cgutils.alloca_once(b, value.type)
        b.store(value, p, align=8)
        pointers.append(p)
    b.call(fn, [b.trunc(mode, _I32) if mode.type.width > 32 else mode, out, *pointers])
    return b.load(out, align=8)


def _llvm_call(k, name, values):
    t = values[0].type
    return k.call(_declare(k, f"llvm.{name}.{_suffix(t)}", t, [t] * len(values)), values)


_OPERATIONS = {
    "add": lambda k, v: k.fadd(*v),
    "mul": lambda k, v: k.fmul(*v),
    "div": lambda k, v: k.fdiv(*v),
    "fma": lambda k, v: _llvm_call(k, "fma", v),
    "sqrt": lambda k, v: _llvm_call(k, "sqrt", v),
}


def _make(name: str, arity: int):
    operate = _OPERATIONS[name]

    def codegen(context, b, sig, args):
        v = sig.args[1]
        fn = _guarded(b, f"softsm_{name}_{_suffix(v.ir)}", v.ir, [v.ir] * arity, operate)
        return _call(b, fn, args[0], v.ir, args[1:])

    @intrinsic
    def one(typingctx, mode, x):
        return x(types.int32, x), codegen

    @intrinsic
    def two(typingctx, mode, x, y):
        return x(types.int32, x, y), codegen

    @intrinsic
    def three(typingctx, mode, x, y, z):
        return x(types.int32, x, y, z), codegen

    return (one, two, three)[arity - 1]


# (mode, operands) -> result in that mode; F and D.
rounded_add, rounded_mul, rounded_div = _make("add", 2), _make("mul", 2), _make("div", 2)
rounded_fma, rounded_sqrt = _make("fma", 3), _make("sqrt", 1)


def _make_convert(target: V):
    @intrinsic
    def convert(typingctx, mode, x):
        def operate(k, v):
            if x.floating:
                return k.fptrunc(v[0], target.ir)
            return (k.sitofp if x.signed else k.uitofp)(v[0], target.ir)

        def codegen(context, b, sig, args):
            name = f"softsm_to_{_suffix(target.ir)}_{'s' if x.signed else 'u'}{_suffix(x.ir)}"
            fn = _guarded(b, name, target.ir, [x.ir], operate)
            return _call(b, fn, args[0], target.ir, [args[1]])

        return target(types.int32, x), codegen

    return convert


# (mode, D or integer vector) -> F, (mode, integer vector) -> D.
rounded_tof, rounded_tod = _make_convert(F), _make_convert(D)
