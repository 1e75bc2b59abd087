"""Arithmetic and conversions on 32-lane values for which LLVM has single operations."""

from __future__ import annotations

import functools
import platform

from llvmlite import ir

from softsm.engine.vec_types import (
    _HALF,
    _I1,
    _I32,
    XU,
    D,
    F,
    I,
    Kind,
    L,
    Q,
    U,
    Vector,
    X,
    _constant,
    _declare,
    _function,
    _splat,
    _suffix,
    _table_number,
    as_vector,
    here,
    kind_of,
    sel,
    width,
)

_AARCH64 = platform.machine() in ("aarch64", "arm64")

# ---------------------------------------------------------------- arithmetic LLVM has as intrinsics


def _reinterpretation(target: Kind):
    return lambda x: Vector(here().bitcast(x.value, target.ir), target)


def _llvm(name: str):
    """Wraps the LLVM intrinsic `name` for vectors of one kind; all but one operand may be numbers."""

    def operation(*operands) -> Vector:
        kind = kind_of(*operands)
        values = [as_vector(x, kind).value for x in operands]
        fn = _declare(here(), f"llvm.{name}.{_suffix(kind.ir)}", kind.ir, [kind.ir] * len(values))
        return Vector(here().call(fn, values), kind)

    return operation


fma = _llvm("fma")  # one rounding
vsqrt, vabs = _llvm("sqrt"), _llvm("fabs")
vfloor, vceil, vtrunc, vrint = (_llvm(n) for n in ("floor", "ceil", "trunc", "roundeven"))
vcopysign = _llvm("copysign")
popcount, bitreverse = _llvm("ctpop"), _llvm("bitreverse")
smin, smax, umin, umax = (_llvm(n) for n in ("smin", "smax", "umin", "umax"))
sadd_sat, ssub_sat = _llvm("sadd.sat"), _llvm("ssub.sat")


def extreme(x: Vector, y: Vector, least: bool) -> Vector:
    """Returns the smaller or the larger: a number wins over NaN, and -0 < +0."""
    bits = _reinterpretation(Q if x.kind.bits == 64 else XU if x.kind.per_lane == 2 else U)
    back = _reinterpretation(x.kind)
    same = back(bits(x) | bits(y) if least else bits(x) & bits(y))  # equal numbers: zeros may differ in their sign
    chosen = sel(x < y if least else x > y, x, y)
    return sel(y == y, sel(x == y, same, chosen), x)


# llvm.minimumnum does the same, but LLVM 20 (numba 0.65) compiles it wrongly for x86. AArch64 has it as an instruction.
if _AARCH64:
    minnum, maxnum = _llvm("minimumnum"), _llvm("maximumnum")
else:
    minnum, maxnum = functools.partial(extreme, least=True), functools.partial(extreme, least=False)


def leading_zeros(x: Vector) -> Vector:
    t = x.value.type
    return Vector(here().call(_declare(here(), f"llvm.ctlz.{_suffix(t)}", t, [t, _I1]), [x.value, _I1(0)]), x.kind)


# ---------------------------------------------------------------- conversions


def _float_to_int(b, x, source: Kind, target: Kind):
    """Converts toward zero, saturating, NaN -> 0."""
    if _AARCH64:  # this CPU's conversions do exactly this; elsewhere LLVM would convert lane by lane
        name = f"llvm.fpto{'s' if target.signed else 'u'}i.sat.{_suffix(target.ir)}.{_suffix(x.type)}"
        return b.call(_declare(b, name, target.ir, [x.type]), [x])
    high = 2.0 ** (target.bits - 1) if target.signed else 2.0**target.bits
    low = -high if target.signed else 0.0
    top = (1 << (target.bits - 1)) - 1 if target.signed else (1 << target.bits) - 1
    bottom = -(1 << (target.bits - 1)) if target.signed else 0
    r = (b.fptosi if target.signed else b.fptoui)(x, target.ir)
    r = b.select(b.fcmp_ordered(">=", x, _constant(source, high)), _constant(target, top), r)
    r = b.select(b.fcmp_ordered("<=", x, _constant(source, low)), _constant(target, bottom), r)
    return b.select(b.fcmp_unordered("uno", x, x), _constant(target, 0), r)


def _converted(b, v, source: Kind, target: Kind):
    if source.floating and target.floating:
        if source.bits == target.bits:
            return v
        return (b.fpext if target.bits > source.bits else b.fptrunc)(v, target.ir)
    if source.floating:
        return _float_to_int(b, v, source, target)
    if target.floating:
        return (b.sitofp if source.signed else b.uitofp)(v, target.ir)
    if source.bits == target.bits:
        return v
    if target.bits < source.bits:
        return b.trunc(v, target.ir)
    return (b.sext if source.signed else b.zext)(v, target.ir)


def _conversion(target: Kind):
    def convert(x) -> Vector:
        if not isinstance(x, Vector):
            return as_vector(x, target)
        return Vector(_converted(here(), x.value, x.kind, target), target)

    return convert


# Value conversions between kinds; tou.. of a number broadcasts it.
tou, toi, tof, toq, tol, tod = (_conversion(kind) for kind in (U, I, F, Q, L, D))


asU, asI, asF, asQ, asL, asD, asX, asXU = (_reinterpretation(kind) for kind in (U, I, F, Q, L, D, X, XU))


def half_to_float(x: Vector) -> Vector:
    """Converts the f16 in the low half of each lane to F, exactly."""
    b = here()
    h = b.bitcast(b.trunc(x.value, ir.VectorType(ir.IntType(16), width())), ir.VectorType(_HALF, width()))
    return Vector(b.fpext(h, F.ir), F)


def float_to_half(x: Vector) -> Vector:
    """Converts F to f16 bits in the low half of each lane, rounded to nearest even; NaN bits are the CPU's."""
    b = here()
    h = b.bitcast(b.fptrunc(x.value, ir.VectorType(_HALF, width())), ir.VectorType(ir.IntType(16), width()))
    return Vector(b.zext(h, U.ir), U)


def halves_to_floats(x: Vector) -> Vector:
    """Converts both f16 of each lane to X."""
    b = here()
    return Vector(b.fpext(b.bitcast(x.value, ir.VectorType(_HALF, 2 * width())), X.ir), X)


def floats_to_halves(x: Vector) -> Vector:
    """Converts X to two f16 per lane, rounded to nearest even; NaN bits are the CPU's."""
    b = here()
    return Vector(b.bitcast(b.fptrunc(x.value, ir.VectorType(_HALF, 2 * width())), U.ir), U)


# ---------------------------------------------------------------- NaNs and small composites


def canonical(x: Vector) -> Vector:
    """Replaces every NaN of F or X by PTX's f32 NaN, 0x7fffffff."""
    b, bits = here(), ir.VectorType(_I32, x.kind.count)
    nan = _splat(b, _table_number(b, "softsm_nan", 0x7FFFFFFF), x.kind.count)
    ordered = b.fcmp_ordered("ord", x.value, x.value)
    return Vector(b.bitcast(b.select(ordered, b.bitcast(x.value, bits), nan), x.kind.ir), x.kind)


def _division(signed: bool, remainder: bool):
    """Makes a division. PTX leaves division by zero open; the device gives all ones, for the remainder too."""

    def divide(x: Vector, y: Vector) -> Vector:
        kind = x.kind
        constant = {n: _constant(kind, n) for n in (0, 1, -1)}

        def body(k, arguments):
            a, d = arguments
            zero = k.icmp_unsigned("==", d, constant[0])
            special = zero
            if signed:  # the most negative number / -1 traps on x86
                minus = k.icmp_unsigned("==", d, constant[-1])
                special = k.or_(zero, minus)
            safe = k.select(special, constant[1], d)
            if remainder:
                r = (k.srem if signed else k.urem)(a, safe)
            else:
                r = (k.sdiv if signed else k.udiv)(a, safe)
                r = k.select(minus, k.neg(a), r) if signed else r
            k.ret(k.select(zero, constant[-1], r))

        name = f"softsm_{'s' if signed else 'u'}{'rem' if remainder else 'div'}_{_suffix(kind.ir)}"
        return Vector(here().call(_function(here(), name, kind.ir, [kind.ir] * 2, body), [x.value, y.value]), kind)

    return divide


udiv, sdiv = _division(False, False), _division(True, False)
urem, srem = _division(False, True), _division(True, True)


def mulhi(x: Vector, y: Vector) -> Vector:
    """Returns the upper half of the product, signed or unsigned by kind; 32 or 64 bits."""
    b, bits = here(), x.kind.bits
    wide = ir.VectorType(ir.IntType(2 * bits), width())
    extend = b.sext if x.kind.signed else b.zext
    product = b.mul(extend(x.value, wide), extend(y.value, wide))
    return Vector(b.trunc(b.lshr(product, ir.Constant(wide, [bits] * width())), x.kind.ir), x.kind)
