"""f16 and bf16 arithmetic, one or two per register: PTX ISA 9.7.4, and the mixed f32 forms of sm_100.

Halves are computed in f32 and rounded once more. For sums and products the second rounding is harmless (24 bits hold
more than 2 * 11 + 2); for fma, f32 is first rounded to odd. A NaN result is 0x7fff.
"""

from __future__ import annotations

import operator
from functools import partial

from softsm.engine import vec
from softsm.isa.floating import ROUNDINGS, store
from softsm.isa.registry import micro
from softsm.isa.typed import Modifiers, lowers_typed, needs_target, operands, src16, unary
from softsm.memory.box_copy import OOB_NAN

micro("cvt.f32.f16", "f=u", lambda a: vec.canonical(vec.half_to_float(a)), hot=True)
micro("cvt.f32.bf16", "f=u", vec.bf16_to_float, hot=True)
micro("cvt.rn.f16.f32", "u=f", vec.float_to_f16, hot=True)
micro("cvt.rn.bf16.f32", "u=f", vec.float_to_bf16, hot=True)
micro("cvt.rn.bf16x2.f32", "u=ff", vec.pack_bf16, hot=True)
micro("cvt.rn.f16x2.f32", "u=ff", lambda a, b: vec.float_to_f16(b) | (vec.float_to_f16(a) << 16), hot=True)
micro("hi16", "u=u", lambda a: a >> 16, hot=True)
micro("pack.b32", "u=uu", lambda a, b: a | (b << 16), hot=True)


def f16x2(operate, a, b):
    """Applies an operation on floats to both f16 of a register."""
    return vec.floats_to_halves(vec.canonical(operate(vec.halves_to_floats(a), vec.halves_to_floats(b))))


def bf16x2(operate, a, b):
    high = operate(vec.asF(a & 0xFFFF0000), vec.asF(b & 0xFFFF0000))
    return vec.pack_bf16(high, operate(vec.bf16_to_float(a), vec.bf16_to_float(b)))


for _op, _operate in (
    ("add", operator.add),
    ("sub", operator.sub),
    ("mul", operator.mul),
    ("min", vec.minnum),
    ("max", vec.maxnum),
):
    micro(f"{_op}.f16x2", "u=uu", partial(f16x2, _operate), hot=_op not in ("min", "max"))
    micro(f"{_op}.bf16x2", "u=uu", partial(bf16x2, _operate), hot=_op not in ("min", "max"))
micro("fma.odd.f32", "f=fff", vec.fma_to_odd, hot=True)  # a * b + c of halves; the rounding to 16 bits follows
micro("ftz.f16x2", "u=u", vec.ftz16)


def halves(t: str, inf: int) -> None:
    """Defines operations on one half of a register; infinity has the bits `inf`."""
    high = (inf << 16) | 0xFFFF  # compared with the whole register: the low half does not matter
    # The halves of a whose counterparts in b are NaN become 0x7fff.
    micro(f"nan.lo.{t}", "u=uu", lambda a, b: vec.sel((b & 0x7FFF) > inf, (a & 0xFFFF0000) | 0x7FFF, a))
    micro(f"nan.hi.{t}", "u=uu", lambda a, b: vec.sel((b & 0x7FFFFFFF) > high, (a & 0xFFFF) | 0x7FFF0000, a))
    # Negative halves become +0; NaN stays.
    micro(f"relu.lo.{t}", "u=u", lambda a: vec.sel(((a & 0x8000) != 0) & ((a & 0x7FFF) <= inf), a & 0xFFFF0000, a))
    micro(f"relu.hi.{t}", "u=u", lambda a: vec.sel((a > 0x7FFFFFFF) & ((a & 0x7FFFFFFF) <= high), a & 0xFFFF, a))
    # .satfinite of converted halves; the other half of the register is left alone.
    micro(f"finite.lo.{t}", "u=u", lambda a: vec.sel((a & 0x7FFF) == inf, a - 1, a))
    micro(f"finite.hi.{t}", "u=u", lambda a: vec.sel((a & 0x7FFF0000) == inf << 16, a - 0x10000, a))


halves("f16x2", 0x7C00)
halves("bf16x2", 0x7F80)

HALVES = ("f16", "f16x2", "bf16", "bf16x2")


def base(t: str) -> str:
    return "bf16" if t.startswith("bf16") else "f16"


def source(asm, operand, t: str) -> int:
    return asm.src(operand, "u") if t.endswith("x2") else src16(asm, operand)


def parts(asm, row: int, t: str) -> list[int]:
    """Returns f32 rows of the low half and, for packed types, of the high half."""
    rows = [row, unary(asm, "hi16", "u", row)] if t.endswith("x2") else [row]
    return [unary(asm, f"cvt.f32.{base(t)}", "f", r) for r in rows]


def joined(asm, rows: list[int], t: str, rounding: str = "rn") -> int:
    """Rounds f32 rows (low, high) to halves and packs them."""
    if len(rows) == 1:
        return unary(asm, f"cvt.{rounding}.{base(t)}.f32", "u", rows[0])
    return unary(asm, f"cvt.{rounding}.{base(t)}x2.f32", "u", rows[1], rows[0])


def finish(asm, operand, t: str, row: int, *, ftz=False, sat=False, relu=False) -> None:
    packed = f"{base(t)}x2"
    if ftz:
        row = unary(asm, "ftz.f16x2", "u", row)
    if sat:
        row = joined(asm, [unary(asm, "sat.f32", "f", r) for r in parts(asm, row, t)], t)
    if relu:
        row = unary(asm, f"relu.hi.{packed}", "u", unary(asm, f"relu.lo.{packed}", "u", row))
    if t.endswith("x2"):
        asm.emit("mov.b32", asm.dst(operand, "u"), row)
    else:
        asm.emit("lo16", asm.dst(operand, "u"), row)


@lowers_typed("add", *HALVES)
@lowers_typed("sub", *HALVES)
@lowers_typed("mul", *HALVES)
def arithmetic(asm, ins):
    t = ins.modifiers[-1]
    m = Modifiers(asm, ins)
    if "f32" in m.left:
        return mixed(asm, ins)
    m.one_of("rn")
    ftz, sat = m.flag("ftz"), m.flag("sat")
    m.done()
    if base(t) == "bf16" and (ftz or sat):
        asm.refuse(ins, ".ftz and .sat are for f16")
    d, a, b = operands(asm, ins, 3)
    rows = [source(asm, x, t) for x in (a, b)]
    if ftz:
        rows = [unary(asm, "ftz.f16x2", "u", r) for r in rows]
    name = f"{ins.opcode}.{base(t)}x2"
    if t.endswith("x2") and not (ftz or sat):
        return asm.emit(name, asm.dst(d, "u"), *rows)
    finish(asm, d, t, unary(asm, name, "u", *rows), ftz=ftz, sat=sat)


def mixed(asm, ins):
    """Lowers add/sub/fma.f32.{f16,bf16}: widens the halves and adds in f32."""
    t = ins.modifiers[-1]
    m = Modifiers(asm, ins, 2)
    rounding, sat = m.one_of(*ROUNDINGS), m.flag("sat")
    m.done()
    needs_target(asm, ins, 100)
    if ins.modifiers[-2] != "f32" or t not in ("f16", "bf16") or ins.opcode == "mul":
        asm.refuse(ins, "mixed precision is add, sub or fma with .f32.f16 or .f32.bf16")
    d, *sources = operands(asm, ins, 4 if ins.opcode == "fma" else 3)
    rows = [unary(asm, f"cvt.f32.{t}", "f", src16(asm, x)) for x in sources[:-1]] + [asm.src(sources[-1], "f")]
    directed = "" if rounding in (None, "rn") else f".{rounding}"
    if ins.opcode == "sub" and directed:
        rows[1] = unary(asm, "neg.f32", "u", rows[1])
    op = "add" if ins.opcode == "sub" and directed else ins.opcode
    store(asm, d, f"{op}{directed}.f32", rows, sat=sat)


@lowers_typed("fma", *HALVES)
def fused(asm, ins):
    t = ins.modifiers[-1]
    m = Modifiers(asm, ins)
    if "f32" in m.left:
        return mixed(asm, ins)
    rounding, ftz, sat = m.one_of("rn"), m.flag("ftz"), m.flag("sat")
    relu = m.flag("relu")
    oob = m.flag("oob")
    m.done()
    if rounding is None:
        asm.refuse(ins, "fma of halves needs .rn")
    if base(t) == "bf16" and (ftz or sat):
        asm.refuse(ins, ".ftz and .sat are for f16")
    if sat and relu:
        asm.refuse(ins, ".sat excludes .relu")
    if oob and (ftz or sat):
        asm.refuse(ins, ".oob excludes .ftz and .sat")
    d, *sources = operands(asm, ins, 4)
    rows = [source(asm, x, t) for x in sources]
    if ftz:
        rows = [unary(asm, "ftz.f16x2", "u", r) for r in rows]
    columns = zip(*(parts(asm, r, t) for r in rows))
    row = joined(asm, [unary(asm, "fma.odd.f32", "f", *column) for column in columns], t)
    if oob:
        row = unary(asm, "and.b32", "u", row, unary(asm, "not.b32", "u", out_of_bounds(asm, rows[:2])))
    finish(asm, d, t, row, ftz=ftz, sat=sat, relu=relu)


def out_of_bounds(asm, factors: list[int]) -> int:
    """Returns 0xffff in the halves where a factor is the NaN, of either sign, that TMA writes outside a tensor."""
    top, found = asm.const(0x80008000, "u"), []
    for row in factors:
        other = unary(asm, "and.b32", "u", row, asm.const(0x7FFF7FFF, "u"))
        other = unary(asm, "xor.b32", "u", other, asm.const(0x10001 * OOB_NAN, "u"))  # 0 in those halves
        found.append(unary(asm, "and.b32", "u", unary(asm, "sub.u32", "u", top, other), top))
    bits = unary(asm, "or.b32", "u", *found)
    low = unary(asm, "shr.b32", "u", bits, asm.const(15, "u"))
    return unary(asm, "or.b32", "u", bits, unary(asm, "sub.u32", "u", bits, low))


@lowers_typed("neg", *HALVES)
@lowers_typed("abs", *HALVES)
def sign(asm, ins):
    t = ins.modifiers[-1]
    m = Modifiers(asm, ins)
    ftz = m.flag("ftz")
    m.done()
    if ftz and base(t) == "bf16":
        asm.refuse(ins, ".ftz is accepted with f16 only")
    d, a = operands(asm, ins, 2)
    row = source(asm, a, t)
    if ftz:
        row = unary(asm, "ftz.f16x2", "u", row)
    bit = 0x80008000 if t.endswith("x2") else 0x8000
    if ins.opcode == "neg":
        asm.emit("xor.b32", asm.dst(d, "u"), row, asm.const(bit, "u"))
    else:
        asm.emit("and.b32", asm.dst(d, "u"), row, asm.const(~bit, "u"))


@lowers_typed("min", *HALVES)
@lowers_typed("max", *HALVES)
def min_max(asm, ins):
    t = ins.modifiers[-1]
    m = Modifiers(asm, ins)
    ftz, nan, xorsign, magnitude = m.flag("ftz"), m.flag("NaN"), m.flag("xorsign"), m.flag("abs")
    m.done()
    if ftz and base(t) == "bf16":
        asm.refuse(ins, ".ftz is for f16")
    if xorsign != magnitude:
        asm.refuse(ins, ".xorsign goes with .abs")
    d, a, b = operands(asm, ins, 3)
    rows = [source(asm, x, t) for x in (a, b)]
    if ftz:
        rows = [unary(asm, "ftz.f16x2", "u", r) for r in rows]
    signs = -1
    if xorsign:
        signs = unary(asm, "xor.b32", "u", *rows)
        rows = [unary(asm, "and.b32", "u", r, asm.const(0x7FFF7FFF, "u")) for r in rows]
    packed = f"{base(t)}x2"
    row = unary(asm, f"{ins.opcode}.{packed}", "u", *rows)
    for r in rows if nan else ():
        row = unary(asm, f"nan.lo.{packed}", "u", row, r)
        row = unary(asm, f"nan.hi.{packed}", "u", row, r)
    if xorsign:
        row = unary(asm, "mux.b32", "u", signs, row, asm.const(0x80008000, "u"))
        row = unary(asm, f"nan.hi.{packed}", "u", unary(asm, f"nan.lo.{packed}", "u", row, row), row)
    finish(asm, d, t, row)


@lowers_typed("ex2", *HALVES)
@lowers_typed("tanh", *HALVES)
def approximate(asm, ins):
    t = ins.modifiers[-1]
    m = Modifiers(asm, ins)
    approx, ftz = m.flag("approx"), m.flag("ftz")
    m.done()
    wants_ftz = ins.opcode == "ex2" and base(t) == "bf16"
    if not approx or ftz != wants_ftz:
        asm.refuse(ins, "needs .approx" + (" and .ftz" if wants_ftz else " and nothing else"))
    d, a = operands(asm, ins, 2)
    name = "tanh.f32" if ins.opcode == "tanh" else "ex2.ftz.f32" if ftz else "ex2.f32"
    rows = [unary(asm, name, "f", r) for r in parts(asm, source(asm, a, t), t)]
    finish(asm, d, t, joined(asm, rows, t))
