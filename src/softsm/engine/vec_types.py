"""32-lane values for Numba: one register of a whole warp as one LLVM vector.

Types: `U I F Q L D` are vectors of 32 uint32, int32, float32, uint64, int64, float64; `X` is 64 float32 (a pair per
lane: .f32x2, or both halves of .f16x2); `M` is a lane mask <32 x i1>, what a comparison gives. A predicate register
or an active mask is a plain uint32. `sel` and `lane_mask` take either form, `tomask` gives the uint32.

Arithmetic operators work lane by lane and never promote: U + U wraps at 32 bits; a scalar operand is cast to the
vector's element type and spread. Float arithmetic is IEEE, never contracted; `fma` rounds once.

Register files are passed as raw addresses (int64) or as arrays; rows are 32 elements. Functions whose code is large
(masked store, gather, scatter, permute) are one out-of-line LLVM function per module, so that a dispatch function
with hundreds of operations stays small. Nothing here is specific to one CPU except the two lines marked so.
"""

from __future__ import annotations

import operator
import platform

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, lower_builtin, models, register_model, type_callable
from numba.np.arrayobj import make_array

LANES = 32
FULL = np.uint32(0xFFFFFFFF)
ZERO = np.uint32(0)

_I1, _I8, _I32, _I64 = (ir.IntType(n) for n in (1, 8, 32, 64))
_FLOAT, _DOUBLE, _HALF = ir.FloatType(), ir.DoubleType(), ir.HalfType()
# x86 turns a bitcast i32 -> <32 x i1> into one mask move; AArch64 would test 32 bits one by one.
_BITCAST_MASKS = platform.machine() in ("x86_64", "AMD64")


class V(types.Type):
    """A vector of `count` elements of a Numba scalar type."""

    def __init__(self, element: types.Type, count: int = LANES):
        self.element, self.count = element, count
        super().__init__(name=f"V[{element} x {count}]")

    @property
    def floating(self) -> bool:
        return isinstance(self.element, types.Float)

    @property
    def signed(self) -> bool:
        return bool(getattr(self.element, "signed", False))

    @property
    def scalar_ir(self) -> ir.Type:
        if self.floating:
            return _FLOAT if self.element.bitwidth == 32 else _DOUBLE
        return ir.IntType(self.element.bitwidth)

    @property
    def ir(self) -> ir.VectorType:
        return ir.VectorType(self.scalar_ir, self.count)


class MaskType(types.Type):
    """<n x i1>: what comparing two vectors gives."""

    def __init__(self, count: int = LANES):
        self.count = count
        super().__init__(name=f"M[{count}]")


U, I, F = V(types.uint32), V(types.int32), V(types.float32)  # noqa: E741
Q, L, D = V(types.uint64), V(types.int64), V(types.float64)
X = V(types.float32, 2 * LANES)
XU = V(types.uint32, 2 * LANES)
M = MaskType()
_M_IR = ir.VectorType(_I1, LANES)
_U_IR, _Q_IR = U.ir, Q.ir


@register_model(V)
class _VModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, fe_type.ir)


@register_model(MaskType)
class _MModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, ir.VectorType(_I1, fe_type.count))


# ---------------------------------------------------------------- small IR helpers


def _suffix(t: ir.VectorType) -> str:
    e = t.element
    name = {_FLOAT: "f32", _DOUBLE: "f64", _HALF: "f16"}.get(e) or f"i{e.width}"
    return f"v{t.count}{name}"


def _declare(b, name, ret, args):
    return cgutils.get_or_insert_function(b.module, ir.FunctionType(ret, args), name)


def _splat(b, x, count=LANES):
    if isinstance(x, ir.Constant):
        return ir.Constant(ir.VectorType(x.type, count), [x.constant] * count)
    undef = ir.Constant(ir.VectorType(x.type, count), ir.Undefined)
    v = b.insert_element(undef, x, _I32(0))
    return b.shuffle_vector(v, undef, ir.Constant(ir.VectorType(_I32, count), [0] * count))


def _constant(v: V, value) -> ir.Constant:
    return ir.Constant(v.ir, [value] * v.count)


def _as_vector(context, b, value, ty, want: V):
    """A scalar operand becomes 32 copies of itself in the vector's element type."""
    if isinstance(ty, V):
        return value
    if isinstance(ty, types.Literal) and not want.floating:
        return _constant(want, int(ty.literal_value) & ((1 << want.element.bitwidth) - 1))
    return _splat(b, context.cast(b, value, types.unliteral(ty), want.element), want.count)


def _table(b, name: str, values: list[int], element=_I32):
    """A read-only table. linkonce_odr, not constant: LLVM must load it instead of building every value in code."""
    g = b.module.globals.get(name)
    if g is None:
        t = ir.ArrayType(element, len(values))
        g = ir.GlobalVariable(b.module, t, name)
        g.initializer = ir.Constant(t, [element(v) for v in values])
        g.linkage = "linkonce_odr"
        g.align = 16
    return b.bitcast(g, element.as_pointer())


def _spread(b, m):
    """i32 mask -> <32 x i32> of 0 and -1, by table: eight lanes per byte of the mask, no vector arithmetic."""
    table = _table(b, "softsm_mask_bytes", [-(byte >> lane & 1) for byte in range(256) for lane in range(8)])
    eight = ir.VectorType(_I32, 8)
    parts = []
    for k in range(4):
        byte = b.and_(b.lshr(m, _I32(8 * k)), _I32(255))
        p = b.gep(table, [b.shl(b.zext(byte, _I64), _I64(3))], inbounds=True)
        parts.append(b.load(b.bitcast(p, eight.as_pointer()), align=16))
    return _concat(b, _concat(b, parts[0], parts[1]), _concat(b, parts[2], parts[3]))


def _concat(b, x, y):
    n = x.type.count
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(_I32, 2 * n), list(range(2 * n))))


def _to_i1(b, m, ty):
    """uint32 or M -> <32 x i1>."""
    if isinstance(ty, MaskType):
        return m
    if m.type != _I32:
        m = b.trunc(m, _I32) if m.type.width > 32 else b.zext(m, _I32)
    if _BITCAST_MASKS:
        return b.bitcast(m, _M_IR)
    return b.icmp_signed("<", _spread(b, m), ir.Constant(_U_IR, None))


def _select(b, m, ty, x, y):
    """m ? x : y on integer or float vectors."""
    if isinstance(ty, MaskType) or _BITCAST_MASKS or x.type.count != LANES:
        return b.select(_to_i1(b, m, ty), x, y)
    # A bitwise select of a ready mask: one instruction per register on AArch64.
    bits = ir.VectorType(ir.IntType(64 if x.type.element in (_I64, _DOUBLE) else 32), LANES)
    k = _spread(b, m)
    k = b.sext(k, bits) if bits.element == _I64 else k
    x_bits, y_bits = b.bitcast(x, bits), b.bitcast(y, bits)
    return b.bitcast(b.or_(b.and_(x_bits, k), b.and_(y_bits, b.not_(k))), x.type)


def _to_i32(b, m, ty):
    """M or uint32 -> i32."""
    return b.bitcast(m, _I32) if isinstance(ty, MaskType) else m


def _base(context, b, ty, value, element_ir):
    """Register file (array or raw address) -> pointer to its elements."""
    if isinstance(ty, types.Array):
        return b.bitcast(make_array(ty)(context, b, value).data, element_ir.as_pointer())
    return b.inttoptr(value, element_ir.as_pointer())


def _row(context, b, ty, value, row, vector: V):
    """Pointer to a row as <n x T>*."""
    row = b.zext(row, _I64) if row.type.width < 64 else row
    per_row = LANES * (2 if vector.count == 2 * LANES else 1)
    p = b.gep(_base(context, b, ty, value, vector.scalar_ir), [b.mul(row, _I64(per_row))], inbounds=True)
    return b.bitcast(p, vector.ir.as_pointer())


def _function(b, name: str, ret, args, body):
    """An out-of-line helper, made once per module; `body(builder, arguments)` writes it."""
    fn = b.module.globals.get(name)
    if fn is None:
        fn = ir.Function(b.module, ir.FunctionType(ret, args), name)
        fn.linkage = "internal"
        fn.attributes.add("noinline")
        builder = ir.IRBuilder(fn.append_basic_block("entry"))
        body(builder, fn.args)
    return fn


# ---------------------------------------------------------------- operators


def _binary(op, on_float, on_int, *, compares=False, shifts=False):
    @type_callable(op)
    def typing(context):
        def typer(x, y):
            v = x if isinstance(x, V) else y if isinstance(y, V) else None
            if v is None or isinstance(x, MaskType) or isinstance(y, MaskType):
                return None
            if isinstance(x, V) and isinstance(y, V) and x != y and not (shifts and x.ir == y.ir):
                return None
            return MaskType(v.count) if compares else (x if shifts and isinstance(x, V) else v)

        return typer

    def lower(context, b, sig, args):
        v = next(t for t in sig.args if isinstance(t, V))
        x, y = (_as_vector(context, b, a, t, v) for a, t in zip(args, sig.args))
        return (on_float if v.floating else on_int)(b, x, y, v.signed)

    for signature in ((V, V), (V, types.Any), (types.Any, V)):
        lower_builtin(op, *signature)(lower)


_binary(operator.add, lambda b, x, y, s: b.fadd(x, y), lambda b, x, y, s: b.add(x, y))
_binary(operator.sub, lambda b, x, y, s: b.fsub(x, y), lambda b, x, y, s: b.sub(x, y))
_binary(operator.mul, lambda b, x, y, s: b.fmul(x, y), lambda b, x, y, s: b.mul(x, y))
_binary(operator.truediv, lambda b, x, y, s: b.fdiv(x, y), None)
_binary(operator.and_, None, lambda b, x, y, s: b.and_(x, y))
_binary(operator.or_, None, lambda b, x, y, s: b.or_(x, y))
_binary(operator.xor, None, lambda b, x, y, s: b.xor(x, y))
# Shift amounts must be below the width: see shl32 and friends for PTX's clamping shifts.
_binary(operator.lshift, None, lambda b, x, y, s: b.shl(x, y), shifts=True)
_binary(operator.rshift, None, lambda b, x, y, s: b.ashr(x, y) if s else b.lshr(x, y), shifts=True)


def _comparison(op, sign):
    compare_float = "fcmp_unordered" if sign == "!=" else "fcmp_ordered"
    _binary(
        op,
        lambda b, x, y, s: getattr(b, compare_float)(sign, x, y),
        lambda b, x, y, s: (b.icmp_signed if s else b.icmp_unsigned)(sign, x, y),
        compares=True,
    )


for _op, _sign in ((operator.lt, "<"), (operator.le, "<="), (operator.gt, ">"), (operator.ge, ">="),
                   (operator.eq, "=="), (operator.ne, "!=")):
    _comparison(_op, _sign)


def _unary(op, on_float, on_int):
    @type_callable(op)
    def typing(context):
        return lambda x: x if isinstance(x, (V, MaskType)) else None

    def lower(context, b, sig, args):
        ty = sig.args[0]
        return (on_float if isinstance(ty, V) and ty.floating else on_int)(b, args[0])

    lower_builtin(op, V)(lower)
    lower_builtin(op, MaskType)(lower)


_unary(operator.neg, lambda b, x: b.fneg(x), lambda b, x: b.neg(x))
_unary(operator.invert, None, lambda b, x: b.not_(x))


def _mask_binary(op, method):
    """M with M stays M; M with a uint32 mask is M."""

    @type_callable(op)
    def typing(context):
        def typer(x, y):
            masks = [t for t in (x, y) if isinstance(t, MaskType)]
            if masks and all(isinstance(t, (MaskType, types.Integer)) for t in (x, y)):
                return masks[0]
            return None

        return typer

    def lower(context, b, sig, args):
        x, y = (_to_i1(b, a, t) for a, t in zip(args, sig.args))
        return getattr(b, method)(x, y)

    for signature in ((MaskType, MaskType), (MaskType, types.Integer), (types.Integer, MaskType)):
        lower_builtin(op, *signature)(lower)


for _op, _method in ((operator.and_, "and_"), (operator.or_, "or_"), (operator.xor, "xor")):
    _mask_binary(_op, _method)


# ---------------------------------------------------------------- masks


@intrinsic
def tomask(typingctx, m):
    """M -> uint32 (a uint32 passes through)."""

    def codegen(context, b, sig, args):
        if isinstance(sig.args[0], MaskType):
            return b.bitcast(args[0], _I32)
        return context.cast(b, args[0], types.unliteral(sig.args[0]), types.uint32)

    return types.uint32(m), codegen


@intrinsic
def lane_mask(typingctx, m):
    """uint32 -> M."""
    return M(m), lambda context, b, sig, args: _to_i1(b, args[0], sig.args[0])


@intrinsic
def vany(typingctx, m):
    """Is any lane of M set? Cheaper than tomask(m) != 0."""

    def codegen(context, b, sig, args):
        t = args[0].type
        return b.call(_declare(b, f"llvm.vector.reduce.or.v{t.count}i1", _I1, [t]), args)

    return types.boolean(m), codegen


@intrinsic
def sel(typingctx, m, x, y):
    """Lane by lane: m ? x : y. m is M or uint32; one of x and y may be a scalar."""
    v = x if isinstance(x, V) else y

    def codegen(context, b, sig, args):
        _, tx, ty = sig.args
        x, y = _as_vector(context, b, args[1], tx, v), _as_vector(context, b, args[2], ty, v)
        return _select(b, args[0], sig.args[0], x, y)

    mask_type = m if isinstance(m, MaskType) else types.uint32
    return v(mask_type, x, y), codegen


@intrinsic
def spread(typingctx, m):
    """M -> U of all ones where set, 0 elsewhere."""
    return U(m), lambda context, b, sig, args: b.sext(args[0], _U_IR)


@intrinsic(prefer_literal=True)
def loaded(typingctx, bits):
    """A literal uint32 spread over 32 lanes, loaded from memory: for selects whose constant LLVM would otherwise
    take apart into more instructions than the select itself."""
    value = bits.literal_value

    def codegen(context, b, sig, args):
        return _splat(b, b.load(_table(b, f"softsm_constant_{value:x}", [value])))

    return U(bits), codegen
