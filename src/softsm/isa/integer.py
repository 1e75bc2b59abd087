"""Integer arithmetic: PTX ISA 9.7.1 and 9.7.2 (extended precision).

A 16-bit operation is done in 32 bits: `cvt.s32.s16` sign-extends its sources where needed, `lo16` truncates the result.
"""

from __future__ import annotations

import numpy as np

from softsm.engine import vec
from softsm.engine.emitter import Emitter
from softsm.isa.registry import lowers, micro
from softsm.isa.typed import KIND, Modifiers, lowers_typed, operands, signed16, src16, unary
from softsm.ptx.ast import Imm, Instruction

micro("mov.b32", "u=u", lambda a: a, hot=True)
micro("mov.b64", "q=q", lambda a: a, hot=True)
micro("lo16", "u=u", lambda a: a & 0xFFFF, hot=True)
micro("cvt.s32.s16", "i=i", lambda a: (a << 16) >> 16, hot=True)

for _bits, _u, _s in (("32", "u", "i"), ("64", "q", "l")):
    micro(f"add.u{_bits}", f"{_u}={_u}{_u}", lambda a, b: a + b, hot=True)
    micro(f"sub.u{_bits}", f"{_u}={_u}{_u}", lambda a, b: a - b, hot=True)
    micro(f"mul.lo.u{_bits}", f"{_u}={_u}{_u}", lambda a, b: a * b, hot=True)
    micro(f"mad.lo.u{_bits}", f"{_u}={_u}{_u}{_u}", lambda a, b, c: a * b + c, hot=True)
    micro(f"neg.s{_bits}", f"{_s}={_s}", lambda a: -a, hot=True)
    micro(f"min.s{_bits}", f"{_s}={_s}{_s}", vec.smin, hot=True)
    micro(f"max.s{_bits}", f"{_s}={_s}{_s}", vec.smax, hot=True)
    micro(f"min.u{_bits}", f"{_u}={_u}{_u}", vec.umin, hot=True)
    micro(f"max.u{_bits}", f"{_u}={_u}{_u}", vec.umax, hot=True)
    micro(f"div.s{_bits}", f"{_s}={_s}{_s}", vec.sdiv, hot=_bits == "32")
    micro(f"div.u{_bits}", f"{_u}={_u}{_u}", vec.udiv, hot=_bits == "32")
    micro(f"rem.s{_bits}", f"{_s}={_s}{_s}", vec.srem, hot=_bits == "32")
    micro(f"rem.u{_bits}", f"{_u}={_u}{_u}", vec.urem, hot=_bits == "32")
    micro(f"mul.hi.u{_bits}", f"{_u}={_u}{_u}", vec.mulhi, hot=_bits == "32")
    micro(f"mul.hi.s{_bits}", f"{_s}={_s}{_s}", vec.mulhi)
    micro(f"abs.s{_bits}", f"{_s}={_s}", lambda a: vec.sel(a < 0, -a, a))
    micro(f"sad.u{_bits}", f"{_u}={_u}{_u}{_u}", lambda a, b, c: c + (vec.umax(a, b) - vec.umin(a, b)))
    micro(f"sad.s{_bits}", f"{_s}={_s}{_s}{_s}", lambda a, b, c: c + (vec.smax(a, b) - vec.smin(a, b)))
    micro(f"addc.u{_bits}", f"{_u}={_u}{_u}p", lambda a, b, c: a + b + vec.sel(c, vec.as_vector(1, a.kind), 0))
    micro(f"carry.u{_bits}", f"p={_u}{_u}p", lambda a, b, c: (a + b < a) | ((a + b == -1) & c))
    micro(f"subc.u{_bits}", f"{_u}={_u}{_u}p", lambda a, b, c: a - b - vec.sel(c, vec.as_vector(1, a.kind), 0))
    micro(f"borrow.u{_bits}", f"p={_u}{_u}p", lambda a, b, c: (a < b) | ((a == b) & c))
    micro(f"brev.b{_bits}", f"{_u}={_u}", vec.bitreverse)

micro("mul.wide.u32", "q=uu", lambda a, b: vec.toq(a) * vec.toq(b), hot=True)
micro("mul.wide.s32", "l=ii", lambda a, b: vec.tol(a) * vec.tol(b), hot=True)
micro("mad.wide.u32", "q=uuq", lambda a, b, c: vec.toq(a) * vec.toq(b) + c, hot=True)
micro("mad.wide.s32", "l=iil", lambda a, b, c: vec.tol(a) * vec.tol(b) + c, hot=True)
micro("add.sat.s32", "i=ii", vec.sadd_sat)
micro("sub.sat.s32", "i=ii", vec.ssub_sat)
micro("popc.b32", "u=u", vec.popcount, hot=True)
micro("popc.b64", "u=q", lambda a: vec.tou(vec.popcount(a)))
micro("clz.b32", "u=u", vec.leading_zeros, hot=True)
micro("clz.b64", "u=q", lambda a: vec.tou(vec.leading_zeros(a)))
micro("bfind.u32", "u=u", lambda a: 31 - vec.leading_zeros(a))  # 31 - 32 wraps to 0xffffffff: no bit found
micro("bfind.u64", "u=q", lambda a: 63 - vec.tou(vec.leading_zeros(a)))
micro("flip.s32", "i=i", lambda a: a ^ (a >> 31))  # ~a where negative
micro("flip.s64", "l=l", lambda a: a ^ (a >> 63))
micro("bfind.rest", "u=uu", lambda a, b: vec.sel(a == -1, a, b - a))  # shift that brings the found bit to the top
micro("bfe.u32", "u=uuu", vec.bfe_u32, hot=True)
micro("bfe.s32", "i=iuu", vec.bfe_s32, hot=True)
micro("bfe.u64", "q=quu", vec.bfe_u64)
micro("bfe.s64", "l=luu", vec.bfe_s64)
micro("field.u32", "u=uuu", lambda a, b, c: (a >> b) & c, hot=True)  # bfe with literals: shift and mask
micro("field.s32", "i=iii", lambda a, b, c: (a << b) >> c, hot=True)
micro("bfi.b32", "u=uuuu", vec.bfi32, hot=True)
micro("bfi.b64", "q=qquu", vec.bfi64)
micro("low.bits", "u=u", vec.low_bits)
micro("add.u16x2", "u=uu", lambda a, b: ((a & 0x7FFF7FFF) + (b & 0x7FFF7FFF)) ^ ((a ^ b) & 0x80008000))

INTEGERS = ("u16", "s16", "u32", "s32", "u64", "s64")


def width(t: str) -> int:
    return int(t[1:3])


def as32(t: str) -> str:
    """Returns the 32-bit type in which a 16-bit type is computed."""
    return t.replace("16", "32")


def source(asm, operand, t: str) -> int:
    """Returns the row of a source of integer type t; a 16-bit one is extended to 32 bits by its signedness."""
    if width(t) == 16:
        return signed16(asm, operand) if t[0] == "s" else src16(asm, operand)
    return asm.src(operand, KIND[t])


def finish(asm, operand, t: str, name: str, *rows: int) -> None:
    """Emits into the destination; truncates a 16-bit result."""
    if width(t) == 16:
        asm.emit("lo16", asm.dst(operand, "u"), unary(asm, name, "u", *rows))
    else:
        asm.emit(name, asm.dst(operand, KIND[t]), *rows)


def unsigned(t: str) -> str:
    """Returns the unsigned type, for which sign-independent operations are defined once."""
    return "u" + t[1:]


@lowers_typed("add", *INTEGERS, "u16x2", "s16x2")
@lowers_typed("sub", *INTEGERS)
def add_sub(asm, ins):
    t = ins.modifiers[-1]
    m = Modifiers(asm, ins)
    sat, cc = m.flag("sat"), m.flag("cc")
    m.done()
    d, a, b = operands(asm, ins, 3)
    if sat and t != "s32":
        asm.refuse(ins, ".sat is for .s32 only")
    if cc:
        return with_carry(asm, ins, d, source(asm, a, t), source(asm, b, t), asm.const(0, "p"), t, writes=True)
    if t.endswith("x2"):
        return asm.emit("add.u16x2", asm.dst(d, "u"), asm.src(a, "u"), asm.src(b, "u"))
    if sat:
        return asm.emit(f"{ins.opcode}.sat.s32", asm.dst(d, "i"), asm.src(a, "i"), asm.src(b, "i"))
    finish(asm, d, t, f"{ins.opcode}.{unsigned(as32(t))}", source(asm, a, t), source(asm, b, t))


def carry_row(asm) -> int:
    """Returns the row of the condition code CC.CF, one predicate for the whole function."""
    if asm.carry is None:
        asm.carry = asm.temp("p")
    return asm.carry


def with_carry(asm, ins, d, a: int, b: int, carry: int, t: str, *, writes: bool) -> None:
    """Emits d = a + b + carry (or a - b - borrow), and the carry out in CC.CF. Sources are read before d is written."""
    if width(t) == 16:
        asm.refuse(ins, "carries exist for 32 and 64 bits")
    down = ins.opcode in ("sub", "subc")
    bits = width(t)
    if writes:
        out = unary(asm, f"{'borrow' if down else 'carry'}.u{bits}", "p", a, b, carry)
    asm.emit(f"{'subc' if down else 'addc'}.u{bits}", asm.dst(d, "q" if bits == 64 else "u"), a, b, carry)
    if writes:
        asm.emit("mov.pred", carry_row(asm), out)


@lowers("addc", "subc")
def addc(asm, ins):
    t = ins.modifiers[-1]
    m = Modifiers(asm, ins)
    cc = m.flag("cc")
    m.done()
    if t not in INTEGERS[2:]:
        asm.refuse(ins, "accepts .u32, .s32, .u64 and .s64")
    d, a, b = operands(asm, ins, 3)
    with_carry(asm, ins, d, source(asm, a, t), source(asm, b, t), carry_row(asm), t, writes=cc)


@lowers_typed("mul", *INTEGERS)
@lowers_typed("mad", *INTEGERS)
@lowers_typed("madc", *INTEGERS[2:])
def mul_mad(asm: Emitter, ins: Instruction):
    t = ins.modifiers[-1]
    m = Modifiers(asm, ins)
    mode, sat, cc = m.one_of("lo", "hi", "wide"), m.flag("sat"), m.flag("cc")
    m.done()
    if mode is None:
        asm.refuse(ins, "needs .lo, .hi or .wide")
    plus = ins.opcode != "mul"
    if sat and not (plus and mode == "hi" and t == "s32"):
        asm.refuse(ins, ".sat is for mad.hi.s32 only")
    d, a, b, *c = operands(asm, ins, 4 if plus else 3)
    bits = width(t)
    ra, rb = source(asm, a, t), source(asm, b, t)
    if cc or ins.opcode == "madc":
        if mode == "wide" or not plus:
            asm.refuse(ins, "carries go with mad.lo and mad.hi")
        product = unary(asm, product_name(mode, t), KIND[t], ra, rb)
        carry = carry_row(asm) if ins.opcode == "madc" else asm.const(0, "p")
        return with_carry(asm, ins, d, product, asm.src(c[0], KIND[t]), carry, t, writes=cc)
    if bits == 64 and mode == "wide":
        asm.refuse(ins, ".wide accepts 16- and 32-bit operands")
    if bits == 32 and mode in ("lo", "wide") and plus:
        kind = {"lo": "u", "wide": "q"}[mode]
        name = "mad.lo.u32" if mode == "lo" else f"mad.wide.{t}"
        return asm.emit(name, asm.dst(d, kind), ra, rb, asm.src(c[0], kind))
    if bits == 64 and mode == "lo" and plus:
        return asm.emit("mad.lo.u64", asm.dst(d, "q"), ra, rb, asm.src(c[0], "q"))
    if bits == 16:
        product = unary(asm, "mul.lo.u32", "u", ra, rb)
        if mode == "wide":
            if plus:
                return asm.emit("add.u32", asm.dst(d, "u"), product, asm.src(c[0], "u"))
            return asm.emit("mov.b32", asm.dst(d, "u"), product)
        if mode == "hi":
            product = unary(asm, "shr.b32", "u", product, asm.const(16, "u"))
        if plus:
            product = unary(asm, "add.u32", "u", product, src16(asm, c[0]))
        return asm.emit("lo16", asm.dst(d, "u"), product)
    name = product_name(mode, t)
    if not plus:
        return asm.emit(name, asm.dst(d, "q" if mode == "wide" else KIND[t]), ra, rb)
    product = unary(asm, name, KIND[t], ra, rb)
    total = "add.sat.s32" if sat else f"add.u{bits}"
    asm.emit(total, asm.dst(d, KIND[t]), product, asm.src(c[0], KIND[t]))


def product_name(mode: str, t: str) -> str:
    return f"mul.lo.{unsigned(t)}" if mode == "lo" else f"mul.{mode}.{t}"


@lowers("mul24", "mad24")
def mul24(asm, ins):
    t = ins.modifiers[-1]
    m = Modifiers(asm, ins)
    mode, sat = m.one_of("lo", "hi"), m.flag("sat")
    m.done()
    plus = ins.opcode == "mad24"
    if t not in ("u32", "s32") or mode is None or sat and not (plus and mode == "hi" and t == "s32"):
        asm.refuse(ins, "accepts .lo or .hi with .u32 or .s32; .sat only with mad24.hi.s32")
    d, a, b, *c = operands(asm, ins, 4 if plus else 3)
    zero, n24 = asm.const(0, "u"), asm.const(24, "u")
    ra, rb = (unary(asm, f"bfe.{t}", "u", asm.src(x, "u"), zero, n24) for x in (a, b))
    if mode == "lo":
        product = unary(asm, "mul.lo.u32", "u", ra, rb)
    else:
        wide = unary(asm, f"mul.wide.{t}", "q", ra, rb)
        product = unary(asm, "cvt.u32.u64", "u", unary(asm, "shr.b64", "q", wide, asm.const(16, "u")))
    if plus:
        asm.emit("add.sat.s32" if sat else "add.u32", asm.dst(d, "u"), product, asm.src(c[0], "u"))
    else:
        asm.emit("mov.b32", asm.dst(d, "u"), product)


@lowers_typed("div", *INTEGERS)
@lowers_typed("rem", *INTEGERS)
def divide(asm, ins):
    t = ins.modifiers[-1]
    Modifiers(asm, ins).done()
    d, a, b = operands(asm, ins, 3)
    finish(asm, d, t, f"{ins.opcode}.{as32(t)}", source(asm, a, t), source(asm, b, t))


@lowers_typed("abs", "s16", "s32", "s64")
@lowers_typed("neg", "s16", "s32", "s64")
def negate(asm, ins):
    t = ins.modifiers[-1]
    Modifiers(asm, ins).done()
    d, a = operands(asm, ins, 2)
    finish(asm, d, t, f"{ins.opcode}.{as32(t)}", source(asm, a, t))


@lowers_typed("sad", *INTEGERS)
def sad(asm, ins):
    t = ins.modifiers[-1]
    Modifiers(asm, ins).done()
    d, a, b, c = operands(asm, ins, 4)
    finish(asm, d, t, f"sad.{as32(t)}", *(source(asm, x, t) for x in (a, b, c)))


@lowers_typed("min", *INTEGERS, "u16x2", "s16x2")
@lowers_typed("max", *INTEGERS, "u16x2", "s16x2")
def min_max(asm, ins):
    t = ins.modifiers[-1]
    m = Modifiers(asm, ins)
    relu = m.flag("relu")
    m.done()
    if relu and t not in ("s32", "s16x2"):
        asm.refuse(ins, ".relu is for .s32 and .s16x2")
    d, a, b = operands(asm, ins, 3)
    if t.endswith("x2"):
        return min_max_x2(asm, ins, t, relu, d, a, b)
    name = f"{ins.opcode}.{as32(t)}"
    if relu:
        best = unary(asm, name, "i", asm.src(a, "i"), asm.src(b, "i"))
        return asm.emit("max.s32", asm.dst(d, "i"), best, asm.const(0, "i"))
    finish(asm, d, t, name, source(asm, a, t), source(asm, b, t))


def min_max_x2(asm, ins, t, relu, d, a, b):
    """Computes each half in 32 bits: the lower one shifted up, the upper one in place with the lower cleared."""
    ra, rb = asm.src(a, "u"), asm.src(b, "u")
    name, upper = f"{ins.opcode}.{t[0]}32", asm.const(0xFFFF0000, "u")
    n16, halves = asm.const(16, "u"), []
    for prepare in (("shl.b32", n16), ("and.b32", upper)):
        x, y = (unary(asm, prepare[0], "u", r, prepare[1]) for r in (ra, rb))
        best = unary(asm, name, "u", x, y)
        halves.append(unary(asm, "max.s32", "i", best, asm.const(0, "i")) if relu else best)
    low = unary(asm, "shr.b32", "u", halves[0], n16)
    asm.emit("or.b32", asm.dst(d, "u"), low, halves[1])


@lowers("popc", "clz", "brev")
def count(asm, ins):
    t = ins.modifiers[-1] if ins.modifiers else ""
    Modifiers(asm, ins).done()
    if t not in ("b32", "b64"):
        asm.refuse(ins, "accepts .b32 or .b64")
    d, a = operands(asm, ins, 2)
    kind = KIND[t] if ins.opcode == "brev" else "u"
    asm.emit(f"{ins.opcode}.{t}", asm.dst(d, kind), asm.src(a, KIND[t]))


@lowers_typed("bfind", "u32", "s32", "u64", "s64")
def bfind(asm, ins):
    t = ins.modifiers[-1]
    m = Modifiers(asm, ins)
    shift = m.flag("shiftamt")
    m.done()
    d, a = operands(asm, ins, 2)
    row = asm.src(a, KIND[t])
    if t[0] == "s":
        row = unary(asm, f"flip.{t}", KIND[t], row)
    name = f"bfind.{unsigned(t)}"
    if not shift:
        return asm.emit(name, asm.dst(d, "u"), row)
    asm.emit("bfind.rest", asm.dst(d, "u"), unary(asm, name, "u", row), asm.const(width(t) - 1, "u"))


@lowers("fns")
def fns(asm, ins):
    if ins.modifiers != ("b32",):
        asm.refuse(ins, "only fns.b32 exists")
    d, mask, base, offset = operands(asm, ins, 4)
    asm.macro(
        do_fns,
        ins,
        aligned=False,
        d=asm.dst(d, "u"),
        bits=asm.src(mask, "u"),
        base=asm.src(base, "u"),
        offset=asm.src(offset, "i"),
    )


def do_fns(w, mask, o):
    """Finds the offset-th set bit from base, counted upwards or downwards."""
    result = w.R[o.d].copy()
    for lane in range(32):
        if mask >> lane & 1:
            offset = int(w.R[o.offset, lane].astype(np.int32))
            result[lane] = nth_set(int(w.R[o.bits, lane]), int(w.R[o.base, lane]), offset)
    w.R[o.d] = result


def nth_set(bits: int, base: int, offset: int) -> int:
    if offset == 0:
        return base if base < 32 and bits >> base & 1 else 0xFFFFFFFF
    left, step, at = abs(offset) - 1, 1 if offset > 0 else -1, base
    while 0 <= at < 32:
        if bits >> at & 1:
            if left == 0:
                return at
            left -= 1
        at += step
    return 0xFFFFFFFF


@lowers("bfe")
def bfe(asm, ins):
    t = ins.modifiers[-1] if ins.modifiers else ""
    Modifiers(asm, ins).done()
    if t not in INTEGERS[2:]:
        asm.refuse(ins, "accepts .u32, .s32, .u64 and .s64")
    d, a, b, c = operands(asm, ins, 4)
    if isinstance(b, Imm) and isinstance(c, Imm) and width(t) == 32:
        pos, length = int(b.value) & 255, int(c.value) & 255
        if 1 <= length and pos + length <= 32:
            x, y = (pos, (1 << length) - 1) if t == "u32" else (32 - pos - length, 32 - length)
            return asm.emit(f"field.{t}", asm.dst(d, "u"), asm.src(a, "u"), asm.const(x, "u"), asm.const(y, "u"))
    asm.emit(f"bfe.{t}", asm.dst(d, KIND[t]), asm.src(a, KIND[t]), asm.src(b, "u"), asm.src(c, "u"))


@lowers("bfi")
def bfi(asm, ins):
    t = ins.modifiers[-1] if ins.modifiers else ""
    Modifiers(asm, ins).done()
    if t not in ("b32", "b64"):
        asm.refuse(ins, "accepts .b32 and .b64")
    f, a, b, c, d = operands(asm, ins, 5)
    k = KIND[t]
    asm.emit(f"bfi.{t}", asm.dst(f, k), asm.src(a, k), asm.src(b, k), asm.src(c, "u"), asm.src(d, "u"))


@lowers("szext")
def szext(asm: Emitter, ins: Instruction):
    t = ins.modifiers[-1] if ins.modifiers else ""
    m = Modifiers(asm, ins)
    mode = m.one_of("clamp", "wrap")
    m.done()
    if t not in ("u32", "s32") or mode is None:
        asm.refuse(ins, "accepts .clamp or .wrap, and .u32 or .s32")
    d, a, b = operands(asm, ins, 3)
    n = clamped(asm, asm.src(b, "u"), mode)
    asm.emit(f"bfe.{t}", asm.dst(d, "u"), asm.src(a, "u"), asm.const(0, "u"), n)


def clamped(asm, row: int, mode: str) -> int:
    """Limits a width to 32 (.clamp) or takes it modulo 32 (.wrap)."""
    if mode == "wrap":
        return unary(asm, "and.b32", "u", row, asm.const(31, "u"))
    return unary(asm, "min.u32", "u", row, asm.const(32, "u"))


@lowers("bmsk")
def bmsk(asm: Emitter, ins: Instruction):
    m = Modifiers(asm, ins)
    mode = m.one_of("clamp", "wrap")
    m.done()
    if ins.modifiers[-1:] != ("b32",) or mode is None:
        asm.refuse(ins, "accepts .clamp or .wrap, and .b32")
    d, a, b = operands(asm, ins, 3)
    position, n = (clamped(asm, asm.src(x, "u"), mode) for x in (a, b))
    asm.emit("shl.b32", asm.dst(d, "u"), unary(asm, "low.bits", "u", n), position)


@lowers("dp4a", "dp2a")
def dot(asm, ins):
    m = Modifiers(asm, ins, 2)
    mode = m.one_of("lo", "hi") if ins.opcode == "dp2a" else "lo"
    m.done()
    types = ins.modifiers[-2:]
    if mode is None or len(types) != 2 or set(types) - {"u32", "s32"}:
        asm.refuse(ins, "accepts .u32 or .s32 twice" + (" after .lo or .hi" if ins.opcode == "dp2a" else ""))
    d, a, b, c = operands(asm, ins, 4)
    ra, rb, total = asm.src(a, "u"), asm.src(b, "u"), asm.src(c, "u")
    a_bits, terms = (8, 4) if ins.opcode == "dp4a" else (16, 2)
    first = 2 if mode == "hi" else 0
    for i in range(terms):
        x = unary(asm, f"bfe.{types[0]}", "u", ra, asm.const(i * a_bits, "u"), asm.const(a_bits, "u"))
        y = unary(asm, f"bfe.{types[1]}", "u", rb, asm.const((first + i) * 8, "u"), asm.const(8, "u"))
        total = unary(asm, "mad.lo.u32", "u", x, y, total)
    asm.emit("mov.b32", asm.dst(d, "u"), total)
