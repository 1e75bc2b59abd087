"""32-lane values: one register of a whole warp as one LLVM vector.

The functions of the vector vocabulary (see vec.py) are ordinary Python. Called on `Vector`s they append LLVM
instructions to the function that is being built (`building`), so a function of `isa/registry.micro` is compiled by
calling it once. Nothing in it may branch on a lane's value.

Kinds: `U I F Q L D` are uint32, int32, float32, uint64, int64, float64 per lane; `X` and `XU` two float32 or uint32 per
lane (.f32x2, or both halves of .f16x2). A comparison gives a `Mask`, one bit per lane. A predicate register or an
active mask is a plain uint32, `Bits`. `sel` and `lane_mask` accept either form, `tomask` gives the uint32.

Arithmetic operators work lane by lane and never promote: U + U wraps at 32 bits; a Python number is converted to the
vector's kind and broadcast. Float arithmetic is IEEE, never contracted; `fma` rounds once.

Large code (masked store, gather, scatter, permute) is one out-of-line LLVM function per module, so that a dispatch
function with hundreds of operations stays small. Nothing here is specific to one CPU except the lines marked so.
"""

from __future__ import annotations

import contextlib
import platform
import threading
from dataclasses import dataclass

import numpy as np
from llvmlite import ir

LANES = 32
FULL = 0xFFFFFFFF

_I1, _I8, _I32, _I64 = (ir.IntType(n) for n in (1, 8, 32, 64))
_FLOAT, _DOUBLE, _HALF = ir.FloatType(), ir.DoubleType(), ir.HalfType()
# x86 turns a bitcast i32 -> <32 x i1> into one mask move; AArch64 would test 32 bits one by one.
_BITCAST_MASKS = platform.machine() in ("x86_64", "AMD64")


@dataclass(frozen=True)
class Kind:
    """The type of a vector's elements, with `per_lane` of them for each lane."""

    name: str
    bits: int
    floating: bool = False
    signed: bool = False
    per_lane: int = 1

    @property
    def element(self) -> ir.Type:
        if self.floating:
            return _FLOAT if self.bits == 32 else _DOUBLE
        return ir.IntType(self.bits)

    @property
    def count(self) -> int:
        return width() * self.per_lane

    @property
    def ir(self) -> ir.VectorType:
        return ir.VectorType(self.element, self.count)


U, I, F = Kind("U", 32), Kind("I", 32, signed=True), Kind("F", 32, floating=True)  # noqa: E741
Q, L, D = Kind("Q", 64), Kind("L", 64, signed=True), Kind("D", 64, floating=True)
X, XU = Kind("X", 32, floating=True, per_lane=2), Kind("XU", 32, per_lane=2)

# ---------------------------------------------------------------- the function that is being built

_where = threading.local()


@contextlib.contextmanager
def building(builder: ir.IRBuilder, lanes: int = LANES, first: ir.Value | None = None):
    """Makes vocabulary functions called inside append to `builder`; a vector there has `lanes` lanes, from number
    `first` (an i64) or 0 on."""
    before = getattr(_where, "now", None)
    _where.now = (builder, lanes, first)
    try:
        yield builder
    finally:
        _where.now = before


def here() -> ir.IRBuilder:
    return _where.now[0]


def width() -> int:
    return _where.now[1]


def first_lane() -> ir.Value | None:
    return _where.now[2]


# ---------------------------------------------------------------- values


def _operator(*arguments, method: str = "_binary", **options):
    """Makes a method of two operands that calls `method` with these arguments."""

    def apply(self, other):
        return getattr(self, method)(other, *arguments, **options)

    return apply


class _Lanes:
    """The base of values in all lanes; code for 32 lanes cannot branch on one."""

    __slots__ = ("value",)

    def __init__(self, value: ir.Value):
        self.value = value

    __and__, __or__, __xor__ = _operator("and_"), _operator("or_"), _operator("xor")
    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__

    def __invert__(self):
        return type(self)(here().not_(self.value))

    def __bool__(self):
        raise TypeError("the code for 32 lanes cannot branch on a lane's value")


class Vector(_Lanes):
    """One value per lane."""

    __slots__ = ("kind",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: ir.Value, kind: Kind):
        self.value, self.kind = value, kind

    def _binary(self, other, on_int: str, on_float: str | None = None, *, swap: bool = False) -> Vector:
        x, y = self, as_vector(other, self.kind)
        if swap:
            x, y = y, x
        name = on_float if self.kind.floating else on_int
        if name is None:
            raise TypeError(f"{on_int} of floats")
        return Vector(getattr(here(), name)(x.value, y.value), self.kind)

    __add__, __sub__, __mul__ = _operator("add", "fadd"), _operator("sub", "fsub"), _operator("mul", "fmul")
    __truediv__, __rtruediv__ = _operator("none", "fdiv"), _operator("none", "fdiv", swap=True)
    __radd__, __rsub__, __rmul__ = __add__, _operator("sub", "fsub", swap=True), __mul__

    # Shift amounts must be below the width: see vec_math.shl and friends for PTX's clamping shifts.
    def __lshift__(self, other):
        return self._shift(other, "shl")

    def __rshift__(self, other):
        return self._shift(other, "ashr" if self.kind.signed else "lshr")

    def _shift(self, other, name: str) -> Vector:
        amount = other.value if isinstance(other, Vector) else _constant(self.kind, other)
        if amount.type != self.value.type:
            raise TypeError(f"{self.kind.name} shifted by {other.kind.name}")
        return Vector(getattr(here(), name)(self.value, amount), self.kind)

    def __neg__(self):
        return Vector((here().fneg if self.kind.floating else here().neg)(self.value), self.kind)

    def __invert__(self):
        return Vector(here().not_(self.value), self.kind)

    def _compare(self, other, sign: str) -> Mask:
        y = as_vector(other, self.kind).value
        if self.kind.floating:
            method = here().fcmp_unordered if sign == "!=" else here().fcmp_ordered
        else:
            method = here().icmp_signed if self.kind.signed else here().icmp_unsigned
        return Mask(method(sign, self.value, y))

    __lt__, __le__, __gt__, __ge__, __eq__, __ne__ = (  # type: ignore[assignment]
        _operator(sign, method="_compare") for sign in ("<", "<=", ">", ">=", "==", "!=")
    )


class Mask(_Lanes):
    """One bit per element, <n x i1>: the result of comparing two vectors."""

    __slots__ = ()

    def _binary(self, other, name: str) -> Mask:
        return Mask(getattr(here(), name)(self.value, lane_mask(other).value))


class Bits(_Lanes):
    """A plain uint32: bit i belongs to lane i."""

    __slots__ = ()

    def _binary(self, other, name: str) -> Bits | Mask:
        if isinstance(other, Mask):
            return other._binary(self, name)
        y = other.value if isinstance(other, Bits) else _I32(other)
        return Bits(getattr(here(), name)(self.value, y))


def as_vector(x, kind: Kind) -> Vector:
    """Broadcasts a Python number to all elements."""
    if isinstance(x, Vector):
        if x.kind != kind:
            raise TypeError(f"{x.kind.name} where {kind.name} is needed: kinds do not mix")
        return x
    return Vector(_constant(kind, x), kind)


def kind_of(*values) -> Kind:
    """Returns the kind of the first vector among the values."""
    return next(v.kind for v in values if isinstance(v, Vector))


# ---------------------------------------------------------------- small IR helpers


def _suffix(t: ir.VectorType) -> str:
    e = t.element
    name = {_FLOAT: "f32", _DOUBLE: "f64", _HALF: "f16"}.get(e) or f"i{e.width}"
    return f"v{t.count}{name}"


def _declare(b, name, ret, args):
    fn = b.module.globals.get(name)
    return fn if fn is not None else ir.Function(b.module, ir.FunctionType(ret, args), name)


def _splat(b, x, count):
    undef = ir.Constant(ir.VectorType(x.type, count), ir.Undefined)
    v = b.insert_element(undef, x, _I32(0))
    return b.shuffle_vector(v, undef, ir.Constant(ir.VectorType(_I32, count), [0] * count))


def _constant(kind: Kind, value) -> ir.Constant:
    if kind.floating:
        value = float(np.float32(value)) if kind.bits == 32 else float(value)
    else:
        value = int(value) & ((1 << kind.bits) - 1)
    return ir.Constant(kind.ir, [value] * kind.count)


def _table(b, name: str, values: list[int], element=_I32):
    """Adds a read-only table. It is linkonce_odr, not constant: LLVM must load it, not build every value in code."""
    g = b.module.globals.get(name)
    if g is None:
        t = ir.ArrayType(element, len(values))
        g = ir.GlobalVariable(b.module, t, name)
        g.initializer = ir.Constant(t, [element(v) for v in values])
        g.linkage = "linkonce_odr"
        g.align = 16
    return b.bitcast(g, element.as_pointer())


def _table_number(b, name: str, value: int):
    """Loads an i32 that LLVM does not see: it would split a literal into more instructions than a select of it."""
    number = b.load(_table(b, name, [value]))
    if first_lane() is not None:  # a loop over lanes may keep it in a register
        number.set_metadata("invariant.load", b.module.add_metadata([]))
    return number


def _spread(b, m):
    """Expands an i32 mask to <32 x i32> of 0 and -1, by table: eight lanes per byte of mask, no vector arithmetic."""
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


def _i1_of_bits(b, m):
    """Converts i32 to <lanes x i1>."""
    if _BITCAST_MASKS:
        return b.bitcast(m, ir.VectorType(_I1, LANES))
    return b.icmp_signed("<", _spread(b, m), ir.Constant(ir.VectorType(_I32, LANES), None))


def _select_bits(b, m, x, y):
    """Selects m ? x : y, by the bits of the i32 m, on vectors of 32 elements."""
    if _BITCAST_MASKS:
        return b.select(_i1_of_bits(b, m), x, y)
    # A bitwise select by an expanded mask is one instruction per register on AArch64.
    bits = ir.VectorType(ir.IntType(64 if x.type.element in (_I64, _DOUBLE) else 32), LANES)
    k = _spread(b, m)
    k = b.sext(k, bits) if bits.element == _I64 else k
    x_bits, y_bits = b.bitcast(x, bits), b.bitcast(y, bits)
    return b.bitcast(b.or_(b.and_(x_bits, k), b.and_(y_bits, b.not_(k))), x.type)


def _function(b, name: str, ret, args, body):
    """Returns an out-of-line helper, made once per module; `body(builder, arguments)` builds it."""
    fn = b.module.globals.get(name)
    if fn is None:
        fn = ir.Function(b.module, ir.FunctionType(ret, args), name)
        fn.linkage = "internal"
        fn.attributes.add("noinline")
        builder = ir.IRBuilder(fn.append_basic_block("entry"))
        body(builder, fn.args)
    return fn


def _alloca(b, t):
    """Makes a stack slot on entry of the function."""
    with b.goto_entry_block():
        return b.alloca(t)


# ---------------------------------------------------------------- masks


def tomask(m) -> Bits:
    """Converts Mask or Bits to Bits."""
    return Bits(here().bitcast(m.value, _I32)) if isinstance(m, Mask) else m


def lane_mask(m) -> Mask:
    """Converts Bits or Mask to Mask."""
    return m if isinstance(m, Mask) else Mask(_i1_of_bits(here(), m.value))


def any_lane(m: Mask) -> ir.Value:
    """Tests whether any lane of the mask is set; gives i1, and is cheaper than tomask(m) != 0."""
    t = m.value.type
    return here().call(_declare(here(), f"llvm.vector.reduce.or.v{t.count}i1", _I1, [t]), [m.value])


def any_bit(x: Vector) -> ir.Value:
    """Returns as i32 the bits that are set in some lane."""
    kind = x.value.type
    return here().call(_declare(here(), f"llvm.vector.reduce.or.{_suffix(kind)}", _I32, [kind]), [x.value])


def everywhere(condition: ir.Value) -> Bits:
    """Broadcasts i1 to all lanes."""
    return Bits(here().select(condition, _I32(FULL), _I32(0)))


def sel(m, x, y) -> Vector:
    """Selects m ? x : y lane by lane. m is Mask or Bits; one of x and y may be a number."""
    kind = kind_of(x, y)
    a, c = as_vector(x, kind).value, as_vector(y, kind).value
    if isinstance(m, Bits) and kind.per_lane == 1:
        return Vector(_select_bits(here(), m.value, a, c), kind)
    return Vector(here().select(m.value, a, c), kind)


def spread(m: Mask) -> Vector:
    """Converts a Mask to U: all ones where set, 0 elsewhere."""
    return Vector(here().sext(m.value, U.ir), U)


def loaded(bits: int) -> Vector:
    """Broadcasts a number to the lanes, for selects."""
    b = here()
    return Vector(_splat(b, _table_number(b, f"softsm_constant_{bits:x}", bits), U.count), U)
