"""Arithmetic and conversions on 32-lane values that LLVM has as single operations."""

from __future__ import annotations

import platform

from llvmlite import ir
from numba.extending import intrinsic

from softsm.engine.vec_types import (
    _HALF,
    _I1,
    _I32,
    LANES,
    XU,
    D,
    F,
    I,
    L,
    Q,
    U,
    V,
    X,
    _as_vector,
    _constant,
    _declare,
    _function,
    _splat,
    _suffix,
    _table,
)

# ---------------------------------------------------------------- arithmetic LLVM has as intrinsics


def _make_llvm(name: str, arity: int):
    @intrinsic
    def one(typingctx, x):
        def codegen(context, b, sig, args):
            return b.call(_declare(b, f"llvm.{name}.{_suffix(x.ir)}", x.ir, [x.ir]), args)

        return x(x), codegen

    def _n(context, b, sig, args, v):
        values = [_as_vector(context, b, a, t, v) for a, t in zip(args, sig.args)]
        return b.call(_declare(b, f"llvm.{name}.{_suffix(v.ir)}", v.ir, [v.ir] * arity), values)

    @intrinsic
    def two(typingctx, x, y):
        v = x if isinstance(x, V) else y
        return v(x, y), lambda context, b, sig, args: _n(context, b, sig, args, v)

    @intrinsic
    def three(typingctx, x, y, z):
        v = next(t for t in (x, y, z) if isinstance(t, V))
        return v(x, y, z), lambda context, b, sig, args: _n(context, b, sig, args, v)

    return (one, two, three)[arity - 1]


fma = _make_llvm("fma", 3)  # one rounding
vsqrt, vabs = _make_llvm("sqrt", 1), _make_llvm("fabs", 1)
vfloor, vceil, vtrunc, vrint = (_make_llvm(n, 1) for n in ("floor", "ceil", "trunc", "roundeven"))
vcopysign = _make_llvm("copysign", 2)
popcount, bitreverse = _make_llvm("ctpop", 1), _make_llvm("bitreverse", 1)
smin, smax, umin, umax = (_make_llvm(n, 2) for n in ("smin", "smax", "umin", "umax"))
sadd_sat, ssub_sat = _make_llvm("sadd.sat", 2), _make_llvm("ssub.sat", 2)
minnum, maxnum = _make_llvm("minimumnum", 2), _make_llvm("maximumnum", 2)  # a NaN operand loses, -0 < +0


@intrinsic
def leading_zeros(typingctx, x):
    def codegen(context, b, sig, args):
        return b.call(_declare(b, f"llvm.ctlz.{_suffix(x.ir)}", x.ir, [x.ir, _I1]), [args[0], _I1(0)])

    return x(x), codegen


# ---------------------------------------------------------------- conversions


def _float_to_int(b, x, source: V, target: V):
    """Toward zero, saturating, NaN -> 0."""
    if platform.machine() == "aarch64":  # its conversions do exactly this; elsewhere LLVM would go lane by lane
        name = f"llvm.fpto{'s' if target.signed else 'u'}i.sat.{_suffix(target.ir)}.{_suffix(x.type)}"
        return b.call(_declare(b, name, target.ir, [x.type]), [x])
    width = target.element.bitwidth
    high = 2.0 ** (width - 1) if target.signed else 2.0**width
    low = -high if target.signed else 0.0
    top = (1 << (width - 1)) - 1 if target.signed else (1 << width) - 1
    bottom = -(1 << (width - 1)) if target.signed else 0
    r = (b.fptosi if target.signed else b.fptoui)(x, target.ir)
    r = b.select(b.fcmp_ordered(">=", x, _constant(source, high)), _constant(target, top), r)
    r = b.select(b.fcmp_ordered("<=", x, _constant(source, low)), _constant(target, bottom), r)
    return b.select(b.fcmp_unordered("uno", x, x), _constant(target, 0), r)


def _make_convert(target: V):
    @intrinsic
    def convert(typingctx, x):
        def codegen(context, b, sig, args):
            (v,) = args
            if not isinstance(x, V):
                return _as_vector(context, b, v, x, target)
            if x.floating and target.floating:
                if x.element == target.element:
                    return v
                return (b.fpext if target.element.bitwidth > x.element.bitwidth else b.fptrunc)(v, target.ir)
            if x.floating:
                return _float_to_int(b, v, x, target)
            if target.floating:
                return (b.sitofp if x.signed else b.uitofp)(v, target.ir)
            if x.element.bitwidth == target.element.bitwidth:
                return v
            if target.element.bitwidth < x.element.bitwidth:
                return b.trunc(v, target.ir)
            return (b.sext if x.signed else b.zext)(v, target.ir)

        return target(x), codegen

    return convert


# Value conversions between vector types; toU.. of a scalar spreads it.
tou, toi, tof, toq, tol, tod = (_make_convert(v) for v in (U, I, F, Q, L, D))


def _make_bits(target: V):
    @intrinsic
    def reinterpret(typingctx, x):
        return target(x), lambda context, b, sig, args: b.bitcast(args[0], target.ir)

    return reinterpret


asU, asI, asF, asQ, asL, asD, asX, asXU = (_make_bits(v) for v in (U, I, F, Q, L, D, X, XU))


@intrinsic
def half_to_float(typingctx, x):
    """The f16 in the low half of each lane -> F; exact."""

    def codegen(context, b, sig, args):
        h = b.bitcast(b.trunc(args[0], ir.VectorType(ir.IntType(16), LANES)), ir.VectorType(_HALF, LANES))
        return b.fpext(h, F.ir)

    return F(x), codegen


@intrinsic
def float_to_half(typingctx, x):
    """F -> f16 bits in the low half of each lane, round to nearest even; NaN bits are the CPU's."""

    def codegen(context, b, sig, args):
        h = b.bitcast(b.fptrunc(args[0], ir.VectorType(_HALF, LANES)), ir.VectorType(ir.IntType(16), LANES))
        return b.zext(h, U.ir)

    return U(x), codegen


@intrinsic
def halves_to_floats(typingctx, x):
    """Both f16 of each lane -> X."""
    wide = ir.VectorType(_HALF, 2 * LANES)
    return X(x), lambda context, b, sig, args: b.fpext(b.bitcast(args[0], wide), X.ir)


@intrinsic
def floats_to_halves(typingctx, x):
    """X -> two f16 per lane, round to nearest even; NaN bits are the CPU's."""
    wide = ir.VectorType(_HALF, 2 * LANES)
    return U(x), lambda context, b, sig, args: b.bitcast(b.fptrunc(args[0], wide), U.ir)


# ---------------------------------------------------------------- NaNs and small composites


@intrinsic
def canonical(typingctx, x):
    """PTX's f32 NaN: every NaN result is 0x7fffffff. F or X."""
    bits = ir.VectorType(_I32, x.count)

    def codegen(context, b, sig, args):
        # The constant is loaded: LLVM would take a literal apart into more instructions than the select itself.
        nan = _splat(b, b.load(_table(b, "softsm_nan", [0x7FFFFFFF])), x.count)
        ordered = b.fcmp_ordered("ord", args[0], args[0])
        return b.bitcast(b.select(ordered, b.bitcast(args[0], bits), nan), x.ir)

    return x(x), codegen


def _make_divide(signed: bool, remainder: bool):
    """PTX leaves division by zero open; the device gives all ones, for the remainder too."""

    @intrinsic
    def divide(typingctx, x, y):
        def body(k, arguments):
            a, d = arguments
            zero = k.icmp_unsigned("==", d, _constant(x, 0))
            special = zero
            if signed:  # the most negative number / -1 traps on x86
                minus = k.icmp_unsigned("==", d, _constant(x, -1))
                special = k.or_(zero, minus)
            safe = k.select(special, _constant(x, 1), d)
            if remainder:
                r = (k.srem if signed else k.urem)(a, safe)
            else:
                r = (k.sdiv if signed else k.udiv)(a, safe)
                r = k.select(minus, k.neg(a), r) if signed else r
            k.ret(k.select(zero, _constant(x, -1), r))

        def codegen(context, b, sig, args):
            name = f"softsm_{'s' if signed else 'u'}{'rem' if remainder else 'div'}_{_suffix(x.ir)}"
            return b.call(_function(b, name, x.ir, [x.ir, x.ir], body), args)

        return x(x, x), codegen

    return divide


udiv, sdiv = _make_divide(False, False), _make_divide(True, False)
urem, srem = _make_divide(False, True), _make_divide(True, True)


@intrinsic
def mulhi(typingctx, x, y):
    """The upper half of the product, signed or unsigned by type; 32 or 64 bits."""
    width = x.element.bitwidth
    wide = ir.VectorType(ir.IntType(2 * width), LANES)

    def codegen(context, b, sig, args):
        extend = b.sext if x.signed else b.zext
        product = b.mul(extend(args[0], wide), extend(args[1], wide))
        return b.trunc(b.lshr(product, ir.Constant(wide, [width] * LANES)), x.ir)

    return x(x, x), codegen
