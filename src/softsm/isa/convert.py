"""Conversions between number types: cvt (PTX ISA 9.7.9). A conversion is a chain of small steps; the last one writes
the destination."""

from __future__ import annotations

from functools import partial

from softsm.engine import vec
from softsm.engine.emitter import WIDTH
from softsm.isa.floating import MODES, ROUNDINGS
from softsm.isa.registry import MICROS, lowers, micro
from softsm.isa.small_floats import FOUR, SMALL, convert_small
from softsm.isa.typed import Modifiers, needs_target, operands, unary
from softsm.ptx.ast import Imm

micro("cvt.u64.u32", "q=u", vec.toq, hot=True)
micro("cvt.s64.s32", "l=i", vec.tol, hot=True)
micro("cvt.u32.u64", "u=q", vec.tou, hot=True)
micro("lo8", "u=u", lambda a: a & 0xFF, hot=True)
micro("cvt.s32.s8", "i=i", lambda a: (a << 24) >> 24, hot=True)
micro("cvt.rn.f32.s32", "f=i", vec.tof, hot=True)
micro("cvt.rn.f32.u32", "f=u", vec.tof, hot=True)
micro("cvt.rn.f32.s64", "f=l", vec.tof)
micro("cvt.rn.f32.u64", "f=q", vec.tof)
micro("cvt.rn.f64.s64", "d=l", vec.tod)
micro("cvt.rn.f64.u64", "d=q", vec.tod)
micro("cvt.rn.f64.s32", "d=i", vec.tod)
micro("cvt.rn.f64.u32", "d=u", vec.tod)
micro("cvt.odd.f64.s64", "d=l", vec.odd_double)
micro("cvt.odd.f64.u64", "d=q", vec.odd_double)
micro("cvt.odd.f32.f64", "f=d", vec.narrow_to_odd)
micro("cvt.f64.f32", "d=f", vec.tod, hot=True)  # a NaN keeps its sign and payload, and becomes quiet
micro("cvt.rn.f32.f64", "f=d", vec.tof, hot=True)
micro("sat.f64", "d=d", vec.saturate)
micro("cvt.rz.f16.f32", "u=f", vec.float_to_f16_rz)
micro("cvt.rm.f16.f32", "u=f", vec.float_to_f16_rm)
micro("cvt.rp.f16.f32", "u=f", vec.float_to_f16_rp)
micro("cvt.rz.bf16.f32", "u=f", lambda a: vec.sel(a == a, vec.asU(a) >> 16, 0x7FFF))


@micro("cvt.rm.bf16.f32", "u=f")
def bf16_down(a):
    negative = vec.asU(a) >> 31
    return vec.sel(a == a, (vec.asU(a) + negative * 0xFFFF) >> 16, 0x7FFF)


@micro("cvt.rp.bf16.f32", "u=f")
def bf16_up(a):
    positive = 1 - (vec.asU(a) >> 31)
    return vec.sel(a == a, (vec.asU(a) + positive * 0xFFFF) >> 16, 0x7FFF)


@micro("cvt.rna.tf32.f32", "u=f", hot=True)
def tf32_away(a):
    return vec.sel(a == a, vec.asU(a) + 0x1000, vec.asU(a)) & 0xFFFFE000  # NaNs are truncated too


@micro("cvt.rn.tf32.f32", "u=f")
def tf32_nearest(a):
    odd = (vec.asU(a) >> 13) & 1
    return vec.sel(a == a, (vec.asU(a) + 0xFFF + odd) & 0xFFFFE000, 0x7FFFE000)


micro("cvt.rz.tf32.f32", "u=f", lambda a: vec.sel(a == a, vec.asU(a) & 0xFFFFE000, 0x7FFFE000))
# A NaN becomes 0 from f32 to 32 bits and less, the sign bit alone from f64 or to 64 bits.
micro("cvt.rzi.s32.f32", "i=f", vec.toi, hot=True)
micro("cvt.rzi.u32.f32", "u=f", vec.tou, hot=True)
micro("cvt.rzi.s32.f64", "i=d", lambda a: vec.sel(a == a, vec.toi(a), -0x80000000))
micro("cvt.rzi.u32.f64", "u=d", lambda a: vec.sel(a == a, vec.tou(a), 0x80000000))
micro("cvt.rzi.s64.f64", "l=d", lambda a: vec.sel(a == a, vec.tol(a), -0x8000000000000000))
micro("cvt.rzi.u64.f64", "q=d", lambda a: vec.sel(a == a, vec.toq(a), 0x8000000000000000))
for _k, _t in (("f", "f32"), ("d", "f64")):
    micro(f"rni.{_t}", f"{_k}={_k}", vec.vrint)
    micro(f"rzi.{_t}", f"{_k}={_k}", vec.vtrunc)
    micro(f"rmi.{_t}", f"{_k}={_k}", vec.vfloor)
    micro(f"rpi.{_t}", f"{_k}={_k}", vec.vceil)
for _r, _mode in MODES.items():
    micro(f"cvt.{_r}.f32.f64", "f=d", partial(vec.rounded_tof, _mode), canonical_nan=True)
    for _t, _k in (("s32", "i"), ("u32", "u"), ("s64", "l"), ("u64", "q")):
        micro(f"cvt.{_r}.f32.{_t}", f"f={_k}", partial(vec.rounded_tof, _mode))
        if _k in "lq":
            micro(f"cvt.{_r}.f64.{_t}", f"d={_k}", partial(vec.rounded_tod, _mode))
micro("finite.tf32", "u=u", lambda a: vec.sel((a & 0x7FFFFFFF) == 0x7F800000, a - 0x2000, a))
micro("relu.f32", "u=u", lambda a: vec.sel((a > 0x7FFFFFFF) & (a <= 0xFF800000), vec.tou(0), a))
micro("rs.f16", "u=fu", vec.to_f16_random)
micro("rs.bf16", "u=fu", lambda a, b: vec.sel(a == a, (vec.asU(a) + b) >> 16, 0x7FFF))  # random bits carry over

INTEGERS = {"u8": 8, "s8": 8, "u16": 16, "s16": 16, "u32": 32, "s32": 32, "u64": 64, "s64": 64}
FLOATS = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}


class Chain:
    """The steps from a source row to the destination register. Only the last step writes the register."""

    def __init__(self, asm, row: int, wide: bool):
        self.asm, self.row, self.wide = asm, row, wide
        self.steps: list[tuple] = []

    def then(self, name: str, *more: int, wide: bool | None = None) -> None:
        self.steps.append((name, more))
        self.wide = self.wide if wide is None else wide

    def into(self, operand) -> None:
        kind = "q" if self.wide else "u"
        steps = self.steps or [("mov.b64" if self.wide else "mov.b32", ())]
        for name, more in steps[:-1]:
            kind_of_step = "q" if _writes_wide(name) else "u"
            self.row = unary(self.asm, name, kind_of_step, self.row, *more)
        self.asm.emit(steps[-1][0], self.asm.dst(operand, kind), self.row, *steps[-1][1])


def _writes_wide(name: str) -> bool:
    return MICROS[name].dst in "qld"


def register_width(asm, operand) -> int:
    return WIDTH.get(asm.type_of(operand), 32)


def integer_source(asm, operand, t: str) -> Chain:
    """Extends the value to 32 or 64 bits by its type."""
    bits = INTEGERS[t]
    if isinstance(operand, Imm):
        value = int(operand.value) & ((1 << bits) - 1)
        if t[0] == "s" and value >> (bits - 1):
            value -= 1 << bits
        return Chain(asm, asm.const(value, "q" if bits == 64 else "u"), bits == 64)
    have = register_width(asm, operand)
    if bits == 64:
        return Chain(asm, asm.src(operand, "q"), True)
    chain = Chain(asm, asm.src(operand, "q" if have == 64 else "u"), have == 64)
    if have == 64:
        chain.then("cvt.u32.u64", wide=False)
    if bits < 32 and not (t[0] == "u" and have <= bits):
        chain.then({"u8": "lo8", "s8": "cvt.s32.s8", "u16": "lo16", "s16": "cvt.s32.s16"}[t])
    return chain


def integer_target(asm, chain: Chain, t: str, operand) -> None:
    """Truncates to the type and extends to the register."""
    bits, have = INTEGERS[t], register_width(asm, operand)
    if have < bits:
        raise asm.error(f"the destination has {have} bits, .{t} needs {bits}")
    if bits < 64 and chain.wide:
        chain.then("cvt.u32.u64", wide=False)
    if bits < 32:
        chain.then({"u8": "lo8", "s8": "cvt.s32.s8", "u16": "lo16", "s16": "cvt.s32.s16"}[t])
        if have == 16 and t[0] == "s":
            chain.then("lo16")  # 16-bit registers keep their upper half zero
    if bits < 64 and have == 64:
        chain.then("cvt.s64.s32" if t[0] == "s" else "cvt.u64.u32", wide=True)
    chain.into(operand)


def widen(chain: Chain, t: str) -> None:
    """Extends a 32-bit integer value to 64 bits, by the signedness of its type."""
    if not chain.wide:
        chain.then("cvt.s64.s32" if t[0] == "s" else "cvt.u64.u32", wide=True)


def integer_to_integer(asm, dtype, stype, sat, d, a):
    chain = integer_source(asm, a, stype)
    if sat:
        bits = INTEGERS[dtype]
        low = -(1 << (bits - 1)) if dtype[0] == "s" else 0
        high = (1 << (bits - (dtype[0] == "s"))) - 1
        widen(chain, stype)
        if stype == "u64":
            chain.then("min.u64", asm.const(high, "q"))
        else:
            chain.then("max.s64", asm.const(low, "q"))
            if high < 1 << 63:
                chain.then("min.s64", asm.const(high, "q"))
    elif INTEGERS[dtype] == 64:
        widen(chain, stype)
    integer_target(asm, chain, dtype, d)


def float_source(asm, operand, t: str, ftz: bool) -> Chain:
    """Converts the value to f32 (halves too) or f64."""
    if t == "f64":
        return Chain(asm, asm.src(operand, "d"), True)
    if t == "f32":
        chain = Chain(asm, asm.src(operand, "f"), False)
        if ftz:
            chain.then("ftz.f32")
        return chain
    chain = Chain(asm, asm.src(operand, "u"), False)
    chain.then(f"cvt.f32.{t}")
    return chain


def float_to_integer(asm, ins, dtype, stype, rounding, ftz, d, a):
    if rounding not in ("rni", "rzi", "rmi", "rpi"):
        asm.refuse(ins, "a float becomes an integer by .rni, .rzi, .rmi or .rpi")
    chain = float_source(asm, a, stype, ftz)
    wide = "f64" if stype == "f64" else "f32"
    if rounding != "rzi":
        chain.then(f"{rounding}.{wide}")
    bits, signed = INTEGERS[dtype], dtype[0] == "s"
    if bits == 64:
        if wide == "f32":
            chain.then("cvt.f64.f32", wide=True)
        chain.then(f"cvt.rzi.{dtype}.f64", wide=True)
    else:
        chain.then(f"cvt.rzi.{dtype[0]}32.{wide}", wide=False)
        if bits < 32 and signed:
            chain.then("max.s32", asm.const(-(1 << (bits - 1)), "i"))
            chain.then("min.s32", asm.const((1 << (bits - 1)) - 1, "i"))
        elif bits < 32:
            chain.then("min.u32", asm.const((1 << bits) - 1, "u"))
    integer_target(asm, chain, dtype, d)


def integer_to_float(asm, ins, dtype, stype, rounding, sat, d, a):
    if rounding not in ROUNDINGS:
        asm.refuse(ins, "an integer becomes a float by .rn, .rz, .rm or .rp")
    chain = integer_source(asm, a, stype)
    source = f"{stype[0]}{64 if chain.wide else 32}"
    if FLOATS[dtype] == 16:
        chain.then(f"cvt.{'odd' if chain.wide else 'rn'}.f64.{source}", wide=True)
        chain.then("cvt.odd.f32.f64", wide=False)
    elif dtype == "f64" and not chain.wide:
        chain.then(f"cvt.rn.f64.{source}", wide=True)  # exact
    else:
        chain.then(f"cvt.{rounding}.{dtype}.{source}", wide=dtype == "f64")
    if sat:
        chain.then("sat.f64" if dtype == "f64" else "sat.f32")
    if FLOATS[dtype] == 16:
        chain.then(f"cvt.{rounding}.{dtype}.f32")
    chain.into(d)


def float_to_float(asm, ins, dtype, stype, rounding, flags, d, a):
    chain = float_source(asm, a, stype, flags["ftz"])
    narrows = FLOATS[dtype] < FLOATS[stype] or {dtype, stype} == {"f16", "bf16"}
    if {dtype, stype} == {"f16", "bf16"} and not rounding:
        rounding = "rn"  # Triton omits it; ptxas generates the same instruction for both spellings
    integral = rounding in ("rni", "rzi", "rmi", "rpi")
    if integral and dtype != stype:
        asm.refuse(ins, "rounding to an integral value keeps the type")
    if narrows and rounding not in ROUNDINGS:
        asm.refuse(ins, "a conversion to fewer bits needs .rn, .rz, .rm or .rp")
    if not narrows and rounding in ROUNDINGS and dtype == stype:
        asm.refuse(ins, f".{rounding} has no meaning for the same type")
    from_single = stype == "f32" and FLOATS[dtype] == 16 and rounding in ("rn", "rz")
    if (flags["relu"] or flags["satfinite"]) and not from_single:
        asm.refuse(ins, ".relu and .satfinite convert .f32 by .rn or .rz")
    if integral:
        chain.then(f"{rounding}.{'f64' if stype == 'f64' else 'f32'}")
    if dtype == "f64" and stype != "f64":
        chain.then("cvt.f64.f32", wide=True)
    if flags["sat"]:
        chain.then("sat.f64" if chain.wide else "sat.f32")
    if dtype == "f32" and stype == "f64":
        chain.then(f"cvt.{rounding}.f32.f64", wide=False)
    elif FLOATS[dtype] == 16:
        if stype == "f64":
            chain.then("cvt.odd.f32.f64", wide=False)
        if dtype == stype and not chain.steps[1:]:
            chain.steps.clear()  # nothing but a move
        else:
            chain.then(f"cvt.{rounding if rounding in ROUNDINGS else 'rn'}.{dtype}.f32")
    if dtype == stype == "f32":
        chain.then("canonical.f32")
    if dtype == "f32" and flags["ftz"]:
        chain.then("ftz.f32")
    if flags["relu"]:
        chain.then(f"relu.lo.{dtype}x2")
    if flags["satfinite"]:
        chain.then(f"finite.lo.{dtype}x2")
    chain.into(d)


def to_packed_halves(asm, ins, dtype, rounding, flags):
    """Lowers cvt.{f16x2,bf16x2}.f32 d, a, b; a goes into the upper half."""
    t = dtype.removesuffix("x2")
    if rounding not in ("rn", "rz", "rs"):
        asm.refuse(ins, "needs .rn, .rz or .rs")
    d, a, b, *bits = operands(asm, ins, 4 if rounding == "rs" else 3)
    ra, rb = asm.src(a, "f"), asm.src(b, "f")
    if rounding == "rs":
        needs_target(asm, ins, 100)
        random = asm.src(bits[0], "u")
        high = unary(asm, f"rs.{t}", "u", ra, unary(asm, "hi16", "u", random))
        low = unary(asm, f"rs.{t}", "u", rb, unary(asm, "lo16", "u", random))
    elif rounding == "rn":
        chain = Chain(asm, ra, False)
        chain.then(f"cvt.rn.{dtype}.f32", rb)
    else:
        high, low = (unary(asm, f"cvt.rz.{t}.f32", "u", row) for row in (ra, rb))
    if rounding != "rn":
        chain = Chain(asm, low, False)
        chain.then("pack.b32", high)
    for name in ("relu", "satfinite"):
        if flags[name]:
            part = "finite" if name == "satfinite" else name
            chain.then(f"{part}.lo.{dtype}")
            chain.then(f"{part}.hi.{dtype}")
    chain.into(d)


def to_tf32(asm, ins, rounding, flags):
    if rounding not in ("rna", "rn", "rz"):
        asm.refuse(ins, "needs .rna, .rn or .rz")
    if rounding != "rna":
        needs_target(asm, ins, 90)
    d, a = operands(asm, ins, 2)
    chain = Chain(asm, asm.src(a, "f"), False)
    if flags["relu"]:
        chain.then("relu.f32")
    chain.then(f"cvt.{rounding}.tf32.f32")
    if flags["satfinite"]:
        chain.then("finite.tf32")
    chain.into(d)


def pack(asm, ins):
    """Lowers cvt.pack.sat.type.s32{.b32} d, a, b{, c}: saturates a and b to the type and packs them, c above them."""
    target, third = ins.modifiers[2] if len(ins.modifiers) > 2 else "", len(ins.modifiers) == 5
    bits = int(target[1:]) if target[:1] in ("u", "s") and target[1:].isdigit() else 0
    if ins.modifiers[1:2] != ("sat",) or ins.modifiers[3:] not in ((("s32", "b32")) if third else ("s32",),):
        asm.refuse(ins, "the form is cvt.pack.sat.type.s32 or cvt.pack.sat.type.s32.b32")
    if bits not in ((2, 4, 8) if third else (16,)):
        asm.refuse(ins, f".{target} cannot be packed {'with' if third else 'without'} a third operand")
    d, a, b, *c = operands(asm, ins, 4 if third else 3)
    signed = target[0] == "s"
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    rows = []
    for x in (a, b):
        row = unary(asm, "max.s32", "i", asm.src(x, "i"), asm.const(low, "i"))
        row = unary(asm, "min.s32", "i", row, asm.const(high, "i"))
        rows.append(unary(asm, "and.b32", "u", row, asm.const((1 << bits) - 1, "u")))
    row = unary(asm, "shl.b32", "u", rows[0], asm.const(bits, "u"))
    row = unary(asm, "or.b32", "u", row, rows[1])
    if third:
        above = unary(asm, "shl.b32", "u", asm.src(c[0], "u"), asm.const(2 * bits, "u"))
        row = unary(asm, "or.b32", "u", row, above)
    asm.emit("mov.b32", asm.dst(d, "u"), row)


@lowers("cvt")
def cvt(asm, ins):
    if ins.modifiers[:1] == ("pack",):
        return pack(asm, ins)
    if len(ins.modifiers) < 2:
        asm.refuse(ins, "needs a destination and a source type")
    m = Modifiers(asm, ins, 2)
    dtype, stype = ins.modifiers[-2:]
    rounding = m.one_of("rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi", "rna", "rs")
    flags = {name: m.flag(name) for name in ("ftz", "sat", "relu", "satfinite")}
    m.done()
    if dtype in SMALL or stype in SMALL or dtype in FOUR:
        return convert_small(asm, ins, dtype, stype, rounding, flags)
    if dtype in ("f16x2", "bf16x2") and stype == "f32" and not (flags["ftz"] or flags["sat"]):
        return to_packed_halves(asm, ins, dtype, rounding, flags)
    if dtype == "tf32" and stype == "f32" and not (flags["ftz"] or flags["sat"]):
        return to_tf32(asm, ins, rounding, flags)
    known = {**INTEGERS, **FLOATS}
    if dtype not in known or stype not in known:
        asm.refuse(ins, f"no conversion from .{stype} to .{dtype}")
    if flags["ftz"] and "f32" not in (dtype, stype):
        asm.refuse(ins, ".ftz is for .f32")
    if {dtype, stype} & {"u8", "s8"} and "bf16" in (dtype, stype):
        asm.refuse(ins, "there is no conversion between .bf16 and 8-bit integers")
    d, a = operands(asm, ins, 2)
    if dtype in FLOATS and stype in FLOATS:
        return float_to_float(asm, ins, dtype, stype, rounding, flags, d, a)
    if flags["relu"] or flags["satfinite"]:
        asm.refuse(ins, ".relu and .satfinite are for conversions between floats")
    if dtype in INTEGERS and stype in INTEGERS:
        if rounding:
            asm.refuse(ins, f".{rounding} has no meaning between integers")
        return integer_to_integer(asm, dtype, stype, flags["sat"], d, a)
    if dtype in INTEGERS:
        return float_to_integer(asm, ins, dtype, stype, rounding, flags["ftz"], d, a)
    integer_to_float(asm, ins, dtype, stype, rounding, flags["sat"], d, a)
