"""Arithmetic in the directed rounding modes, by the CPU's own rounding control.

LLVM may move plain float arithmetic across a change of rounding mode. The operation is therefore in a separate
function between volatile accesses: load operands, operate, store the result, all after the mode is set and before it
is restored.
"""

from __future__ import annotations

from llvmlite import ir

from softsm.engine.vec_types import _I32, D, F, Kind, Vector, _alloca, _declare, _function, _suffix, here

# llvm.set.rounding's numbers.
TO_ZERO, TO_NEAREST, UP, DOWN = 0, 1, 2, 3


def _guarded(name: str, mode: int, result: ir.Type, values: list[ir.Value], operate) -> ir.Value:
    """Calls operate(builder, values) in rounding mode `mode`, in the out-of-line function `name`."""
    b = here()

    def body(k, arguments):
        mode, out, *sources = arguments
        set_rounding = _declare(k, "llvm.set.rounding", ir.VoidType(), [_I32])
        k.call(set_rounding, [mode])
        operands = []
        for p in sources:
            operand = k.load(p, align=8)
            operand.volatile = True
            operands.append(operand)
        store = k.store(operate(k, operands), out, align=8)
        store.volatile = True
        k.call(set_rounding, [_I32(TO_NEAREST)])
        k.ret_void()

    out, pointers = _alloca(b, result), []
    for value in values:
        pointers.append(_alloca(b, value.type))
        b.store(value, pointers[-1], align=8)
    fn = _function(b, name, ir.VoidType(), [_I32, out.type, *(p.type for p in pointers)], body)
    b.call(fn, [_I32(mode), out, *pointers])
    return b.load(out, align=8)


def _llvm_call(k, name, values):
    t = values[0].type
    return k.call(_declare(k, f"llvm.{name}.{_suffix(t)}", t, [t] * len(values)), values)


def _operation(name: str, operate):
    def rounded(mode: int, *operands: Vector) -> Vector:
        t = operands[0].value.type
        value = _guarded(f"softsm_{name}_{_suffix(t)}", mode, t, [x.value for x in operands], operate)
        return Vector(value, operands[0].kind)

    return rounded


# (mode, operands) -> result in that mode; F, X and D.
rounded_add = _operation("add", lambda k, v: k.fadd(*v))
rounded_mul = _operation("mul", lambda k, v: k.fmul(*v))
rounded_div = _operation("div", lambda k, v: k.fdiv(*v))
rounded_fma = _operation("fma", lambda k, v: _llvm_call(k, "fma", v))
rounded_sqrt = _operation("sqrt", lambda k, v: _llvm_call(k, "sqrt", v))


def _conversion(target: Kind):
    def convert(mode: int, x: Vector) -> Vector:
        result = target.ir

        def operate(k, v):
            if x.kind.floating:
                return k.fptrunc(v[0], result)
            return (k.sitofp if x.kind.signed else k.uitofp)(v[0], result)

        name = f"softsm_to_{_suffix(result)}_{'s' if x.kind.signed else 'u'}{_suffix(x.value.type)}"
        value = _guarded(name, mode, result, [x.value], operate)
        if not x.kind.floating and not x.kind.signed:
            # AVX2 has no such conversion: LLVM subtracts two magic numbers, and rounding down a difference of 0 is -0.
            value = _llvm_call(here(), "fabs", [value])
        return Vector(value, target)

    return convert


# (mode, D or integer vector) -> F, (mode, integer vector) -> D.
rounded_tof, rounded_tod = _conversion(F), _conversion(D)
