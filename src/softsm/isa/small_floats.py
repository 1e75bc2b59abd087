"""Conversions to and from 8-, 6- and 4-bit floats and exponents: e4m3, e5m2, e2m3, e3m2, e2m1, ue8m0, two at a time.

cvt.rs converts four at a time with stochastic rounding. Each gets 16 random bits; |x| rounds away from zero where its
position between the two neighbours plus these bits / 2**16 reaches 1, subnormal results included. PTX defines which
bits of the word belong to which pair of operands. The first of a pair reads them in reverse: this was measured on B200s
with e4m3x4 and e2m1x4, and is assumed for the other formats, which share a figure of the PTX ISA with e4m3x4.
"""

from __future__ import annotations

from functools import partial

from softsm.engine import vec
from softsm.isa.registry import micro
from softsm.isa.typed import needs_target, operands, unary
from softsm.ptx.ast import Vector

SMALL = {"e4m3x2": 8, "e5m2x2": 8, "e2m3x2": 8, "e3m2x2": 8, "e2m1x2": 4, "ue8m0x2": 8}


def from_pair(decode, bits: int, a):
    """Decodes two codes of a register to two halves."""
    return decode(a) | (decode(a >> bits) << 16)


for _t, _bits, _to, _from in (
    ("e4m3", 8, vec.to_e4m3, vec.from_e4m3),
    ("e5m2", 8, vec.to_e5m2, vec.from_e5m2),
    ("e2m3", 8, vec.to_e2m3, vec.from_e2m3),
    ("e3m2", 8, vec.to_e3m2, vec.from_e3m2),
    ("e2m1", 4, vec.to_e2m1, vec.from_e2m1),
):
    micro(f"to.{_t}", "u=f", _to)
    micro(f"rs.{_t}", "u=fu", _to)
    micro(f"from.{_t}x2", "u=u", partial(from_pair, _from, _bits))
micro("to.ue8m0.rz", "u=f", lambda a: vec.to_ue8m0(a, 0, 255))
micro("to.ue8m0.rp", "u=f", lambda a: vec.to_ue8m0(a, 1, 255))
micro("from.ue8m0x2", "u=u", lambda a: vec.from_ue8m0(a & 255) | (vec.from_ue8m0((a >> 8) & 255) << 16))
micro("pack.b8", "u=uu", lambda a, b: a | (b << 8), hot=True)
micro("pack.b4", "u=uu", lambda a, b: a | (b << 4))
micro("even.b8", "u=u", lambda a: (a & 0xFF) | ((a >> 8) & 0xFF00))  # bytes 0 and 2
FOUR = {"e4m3x4": 8, "e5m2x4": 8, "e2m3x4": 8, "e3m2x4": 8, "e2m1x4": 4}


def convert_small(asm, ins, dtype: str, stype: str, rounding: str | None, flags: dict[str, bool]) -> None:
    if flags["ftz"] or flags["sat"]:
        asm.refuse(ins, ".ftz and .sat do not go with small floats")
    if not {dtype, stype} & {"e4m3x2", "e5m2x2"}:
        needs_target(asm, ins, 100)
    if dtype in FOUR:
        to_four(asm, ins, dtype, stype, rounding, flags)
    elif dtype in SMALL:
        to_small(asm, ins, dtype, stype, rounding, flags)
    else:
        from_small(asm, ins, dtype, stype, rounding, flags)


def to_small(asm, ins, dtype, stype, rounding, flags):
    unsigned = dtype == "ue8m0x2"
    if stype not in ("f32", "bf16x2") and (stype != "f16x2" or unsigned):
        asm.refuse(ins, f"no conversion from .{stype} to .{dtype}")
    if stype == "bf16x2":
        needs_target(asm, ins, 100)
    if unsigned and rounding not in ("rz", "rp") or not unsigned and rounding != "rn":
        asm.refuse(ins, f".{dtype} is rounded by {'.rz or .rp' if unsigned else '.rn'}")
    if not unsigned and not flags["satfinite"]:
        asm.refuse(ins, "needs .satfinite")
    if unsigned and flags["relu"]:
        asm.refuse(ins, ".relu does not go with .ue8m0x2")
    if stype != "f32":
        d, a = operands(asm, ins, 2)
        row = asm.src(a, "u")
        half = stype.removesuffix("x2")
        low, high = (unary(asm, f"cvt.f32.{half}", "f", r) for r in (row, unary(asm, "hi16", "u", row)))
    else:
        d, a, b = operands(asm, ins, 3)
        high, low = asm.src(a, "f"), asm.src(b, "f")
    codes = []
    for row in (low, high):
        if flags["relu"]:
            row = unary(asm, "relu.f32", "u", row)
        if unsigned:
            code = unary(asm, f"to.ue8m0.{rounding}", "u", row)
            if flags["satfinite"]:  # NaN stays NaN, everything else saturates at the largest power of two
                ordered = unary(asm, "setp.num.f32", "p", row, row)
                largest = unary(asm, "min.u32", "u", code, asm.const(0xFE, "u"))
                code = unary(asm, "selp.b32", "u", largest, code, ordered)
        else:
            code = unary(asm, f"to.{dtype.removesuffix('x2')}", "u", row)
        codes.append(code)
    asm.emit("pack.b4" if SMALL[dtype] == 4 else "pack.b8", asm.dst(d, "u"), *codes)


def to_four(asm, ins, dtype, stype, rounding, flags):
    """Lowers cvt.rs.satfinite.e4m3x4.f32 d, {a, b, e, f}, rbits; a goes into the highest bits."""
    if (stype, rounding, flags["satfinite"]) != ("f32", "rs", True):
        asm.refuse(ins, f"the form is cvt.rs{{.relu}}.satfinite.{dtype}.f32")
    d, values, bits = operands(asm, ins, 3)
    if not isinstance(values, Vector) or len(values.items) != 4:
        raise asm.error("expected four values in braces")
    rows, word = asm.vector_rows(values, "f"), asm.src(bits, "u")
    if FOUR[dtype] == 4:
        shifted = unary(asm, "shr.b32", "u", word, asm.const(8, "u"))
        upper, lower = (unary(asm, "even.b8", "u", x) for x in (shifted, word))
    else:
        upper, lower = (unary(asm, f"{half}16", "u", word) for half in ("hi", "lo"))
    codes = []
    for i, row in enumerate(rows):
        if flags["relu"]:
            row = unary(asm, "relu.f32", "u", row)
        random = upper if i < 2 else lower
        if i % 2 == 0:
            random = unary(asm, "hi16", "u", unary(asm, "brev.b32", "u", random))
        codes.append(unary(asm, f"rs.{dtype.removesuffix('x4')}", "u", row, random))
    a, b, e, f = codes
    pack = "pack.b4" if FOUR[dtype] == 4 else "pack.b8"
    low, high = unary(asm, pack, "u", f, e), unary(asm, pack, "u", b, a)
    asm.emit("pack.b8" if FOUR[dtype] == 4 else "pack.b32", asm.dst(d, "u"), low, high)


def from_small(asm, ins, dtype, stype, rounding, flags):
    accepted = ("bf16x2",) if stype == "ue8m0x2" else ("f16x2", "bf16x2")
    if dtype not in accepted:
        asm.refuse(ins, f".{stype} becomes .{' or .'.join(accepted)}, not .{dtype}")
    if rounding != "rn" or flags["satfinite"] or flags["relu"] and stype == "ue8m0x2":
        asm.refuse(ins, "the form is cvt.rn" + ("" if stype == "ue8m0x2" else "{.relu}") + f".{dtype}.{stype}")
    if dtype == "bf16x2":
        needs_target(asm, ins, 100)
    d, a = operands(asm, ins, 2)
    row = unary(asm, f"from.{stype}", "u", asm.src(a, "u"))
    if flags["relu"]:
        row = unary(asm, "relu.hi.f16x2", "u", unary(asm, "relu.lo.f16x2", "u", row))
    if dtype == "f16x2" or stype == "ue8m0x2":
        return asm.emit("mov.b32", asm.dst(d, "u"), row)
    low, high = (unary(asm, "cvt.f32.f16", "f", r) for r in (row, unary(asm, "hi16", "u", row)))
    asm.emit("cvt.rn.bf16x2.f32", asm.dst(d, "u"), high, low)  # exact: bf16 holds every small float
