"""Conversions to and from 8-, 6- and 4-bit floats and exponents: e4m3, e5m2, e2m3, e3m2, e2m1, ue8m0, two at a time."""

from __future__ import annotations

from softsm.isa.registry import micro
from softsm.isa.typed import needs_target, operands, unary

SMALL = {"e4m3x2": 8, "e5m2x2": 8, "e2m3x2": 8, "e3m2x2": 8, "e2m1x2": 4, "ue8m0x2": 8}
for _name, _bits in SMALL.items():
    _t = _name.removesuffix("x2")
    if _t == "ue8m0":
        micro("to.ue8m0.rz", "u=f", "to_ue8m0(a, 0, 255)")
        micro("to.ue8m0.rp", "u=f", "to_ue8m0(a, 1, 255)")
        micro("from.ue8m0x2", "u=u", "from_ue8m0(a & 255) | (from_ue8m0((a >> 8) & 255) << 16)")
    else:
        micro(f"to.{_t}", "u=f", f"to_{_t}(a)")
        micro(f"from.{_name}", "u=u", f"from_{_t}(a) | (from_{_t}(a >> {_bits}) << 16)")
micro("pack.b8", "u=uu", "a | (b << 8)", hot=True)
micro("pack.b4", "u=uu", "a | (b << 4)")


def convert_small(asm, ins, dtype: str, stype: str, rounding: str | None, flags: dict[str, bool]) -> None:
    if flags["ftz"] or flags["sat"]:
        asm.refuse(ins, ".ftz and .sat do not go with small floats")
    if not {dtype, stype} & {"e4m3x2", "e5m2x2"}:
        needs_target(asm, ins, 100)
    if dtype in SMALL:
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
            if flags["satfinite"]:  # NaN stays NaN, everything else ends at the largest power of two
                ordered = unary(asm, "setp.num.f32", "p", row, row)
                largest = unary(asm, "min.u32", "u", code, asm.const(0xFE, "u"))
                code = unary(asm, "selp.b32", "u", largest, code, ordered)
        else:
            code = unary(asm, f"to.{dtype.removesuffix('x2')}", "u", row)
        codes.append(code)
    asm.emit("pack.b4" if SMALL[dtype] == 4 else "pack.b8", asm.dst(d, "u"), *codes)


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
