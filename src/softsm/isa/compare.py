"""Comparison and selection: PTX ISA 9.7.6 and 9.7.7 (set, setp, selp, slct)."""

from __future__ import annotations

import operator

from softsm.engine import vec
from softsm.isa.floating import flushed
from softsm.isa.half import parts
from softsm.isa.half import source as half_source
from softsm.isa.registry import lowers, micro
from softsm.isa.typed import KIND, Modifiers, operands, signed16, src16, unary
from softsm.ptx.ast import Pair, Reg, Sink

for _t, _k in (("u32", "u"), ("s32", "i"), ("u64", "q"), ("s64", "l")):
    micro(f"setp.lt.{_t}", f"p={_k}{_k}", lambda a, b: a < b, hot=True)
    micro(f"setp.le.{_t}", f"p={_k}{_k}", lambda a, b: a <= b, hot=True)
    if _t[0] == "u":
        micro(f"setp.eq.{_t}", f"p={_k}{_k}", lambda a, b: a == b, hot=True)
        micro(f"setp.ne.{_t}", f"p={_k}{_k}", lambda a, b: a != b, hot=True)
for _t, _k in (("f32", "f"), ("f64", "d")):
    for _op, _compare in (("lt", operator.lt), ("le", operator.le), ("eq", operator.eq), ("neu", operator.ne)):
        micro(f"setp.{_op}.{_t}", f"p={_k}{_k}", _compare, hot=_t == "f32")
    micro(f"setp.num.{_t}", f"p={_k}{_k}", lambda a, b: (a == a) & (b == b), hot=_t == "f32")
    micro(f"setp.ne.{_t}", f"p={_k}{_k}", lambda a, b: (a < b) | (a > b), hot=_t == "f32")  # false for NaN
micro("selp.b32", "u=uup", lambda a, b, c: vec.sel(c, a, b), hot=True)
micro("selp.b64", "q=qqp", lambda a, b, c: vec.sel(c, a, b), hot=True)

# comparison -> (micro, operands swapped, result inverted)
INTEGER_OPS = {
    "eq": ("eq", False),
    "ne": ("ne", False),
    "lt": ("lt", False),
    "le": ("le", False),
    "gt": ("lt", True),
    "ge": ("le", True),
    "lo": ("lt", False),
    "ls": ("le", False),
    "hi": ("lt", True),
    "hs": ("le", True),
}
FLOAT_OPS = {
    "eq": ("eq", False, False),
    "ne": ("ne", False, False),
    "lt": ("lt", False, False),
    "le": ("le", False, False),
    "gt": ("lt", True, False),
    "ge": ("le", True, False),
    "equ": ("ne", False, True),
    "neu": ("neu", False, False),
    "ltu": ("le", True, True),
    "leu": ("lt", True, True),
    "gtu": ("le", False, True),
    "geu": ("lt", False, True),
    "num": ("num", False, False),
    "nan": ("num", False, True),
}
SOURCES = tuple("b16 b32 b64 u16 u32 u64 s16 s32 s64 f16 f16x2 bf16 bf16x2 f32 f64".split())


def compare(asm, ins, op: str, t: str, a, b, ftz: bool) -> list[int]:
    """Returns the predicate rows: one, or two for packed halves (low, high)."""
    if t[0] in "us" or t in ("b16", "b32", "b64"):
        if op not in INTEGER_OPS or t[0] == "s" and op in ("lo", "ls", "hi", "hs") or ftz:
            asm.refuse(ins, f"no comparison .{op}{'.ftz' if ftz else ''} of .{t}")
        if t[0] == "b" and op not in ("eq", "ne"):
            asm.refuse(ins, f".{t} is compared with .eq and .ne only")
        name, swap = INTEGER_OPS[op]
        if t == "s16":
            rows, wide = [signed16(asm, a), signed16(asm, b)], "s32"
        elif t.endswith("16"):
            rows, wide = [src16(asm, a), src16(asm, b)], "u32"
        else:
            rows, wide = [asm.src(a, KIND[t]), asm.src(b, KIND[t])], t
        if name in ("eq", "ne") or wide[0] == "b":
            wide = "u" + wide[1:]
        return [unary(asm, f"setp.{name}.{wide}", "p", *(reversed(rows) if swap else rows))]
    if op not in FLOAT_OPS:
        asm.refuse(ins, f"no comparison .{op} of .{t}")
    name, swap, invert = FLOAT_OPS[op]
    if t in ("f32", "f64"):
        if ftz and t == "f64":
            asm.refuse(ins, ".ftz is for .f32 and f16")
        pairs = [flushed(asm, [asm.src(x, KIND[t]) for x in (a, b)], ftz)]
    else:
        if ftz and t.startswith("bf16"):
            asm.refuse(ins, ".ftz is for .f32 and f16")
        rows = [half_source(asm, x, t) for x in (a, b)]
        if ftz:
            rows = [unary(asm, "ftz.f16x2", "u", r) for r in rows]
        pairs = [list(x) for x in zip(*(parts(asm, r, t) for r in rows))]
    wide, out = "f64" if t == "f64" else "f32", []
    for x, y in pairs:
        row = unary(asm, f"setp.{name}.{wide}", "p", *((y, x) if swap else (x, y)))
        out.append(unary(asm, "not.pred", "p", row) if invert else row)
    return out


def read_comparison(asm, ins, types: int):
    m = Modifiers(asm, ins, types)
    op = m.left.pop(0) if m.left else ""
    boolean, ftz = m.one_of("and", "or", "xor"), m.flag("ftz")
    m.done()
    t = ins.modifiers[-1]
    if t not in SOURCES:
        asm.refuse(ins, f".{t} cannot be compared")
    return op, boolean, ftz, t


@lowers("setp")
def setp(asm, ins):
    op, boolean, ftz, t = read_comparison(asm, ins, 1)
    d, a, b, *c = operands(asm, ins, 4 if boolean else 3)
    first, second = (d.first, d.second) if isinstance(d, Pair) else (d, None)
    start = len(asm.records)
    results = compare(asm, ins, op, t, a, b, ftz)
    if boolean is None and second is None and len(asm.records) > start and len(results) == 1:
        # The common case: the comparison writes the predicate itself.
        asm.records[-1][1] = asm.dst(first, "p")
        return
    condition = asm.src(c[0], "p") if boolean else None
    if t.endswith("x2"):  # p and q are the results of the two halves
        second = Sink() if second is None else second
    elif second is not None:
        results.append(unary(asm, "not.pred", "p", results[0]))
    written = list(zip((first, second), results))
    if ins.guard is not None and isinstance(first, Reg) and first.name == ins.guard.name:
        written.reverse()  # write the guard last, since both writes depend on it
    for target, row in written:
        if target is None or isinstance(target, Sink):
            continue
        if boolean:
            asm.emit(f"{boolean}.pred", asm.dst(target, "p"), row, condition)
        else:
            asm.emit("mov.pred", asm.dst(target, "p"), row)


ONE = {
    "u32": 0xFFFFFFFF,
    "s32": 0xFFFFFFFF,
    "f32": 0x3F800000,
    "u16": 0xFFFF,
    "s16": 0xFFFF,
    "f16": 0x3C00,
    "bf16": 0x3F80,
}


@lowers("set")
def set_(asm, ins):
    if len(ins.modifiers) < 3:
        asm.refuse(ins, "needs a comparison, a destination and a source type")
    op, boolean, ftz, t = read_comparison(asm, ins, 2)
    dtype = ins.modifiers[-2]
    packed = t.endswith("x2")
    if dtype.removesuffix("x2") not in ONE and not (packed and dtype in ("u32", "s32")):
        asm.refuse(ins, f"set does not write .{dtype}")
    d, a, b, *c = operands(asm, ins, 4 if boolean else 3)
    rows = compare(asm, ins, op, t, a, b, ftz)
    if boolean:
        condition = asm.src(c[0], "p")
        rows = [unary(asm, f"{boolean}.pred", "p", row, condition) for row in rows]
    zero = asm.const(0, "u")
    if not packed:
        return asm.emit("selp.b32", asm.dst(d, "u"), asm.const(ONE[dtype], "u"), zero, rows[0])
    one = 0xFFFF if dtype in ("u32", "s32") else ONE[dtype.removesuffix("x2")]
    low, high = (unary(asm, "selp.b32", "u", asm.const(one, "u"), zero, row) for row in rows)
    asm.emit("pack.b32", asm.dst(d, "u"), low, high)


SELECTED = ("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64", "f32", "f64")


@lowers("selp")
def selp(asm, ins):
    Modifiers(asm, ins).done()
    t = ins.modifiers[-1] if ins.modifiers else ""
    if t not in SELECTED:
        asm.refuse(ins, f"accepts {', '.join('.' + x for x in SELECTED)}")
    d, a, b, c = operands(asm, ins, 4)
    select(asm, t, d, a, b, asm.src(c, "p"))


def select(asm, t: str, d, a, b, row: int) -> None:
    if t.endswith("16"):
        return asm.emit("selp.b32", asm.dst(d, "u"), src16(asm, a), src16(asm, b), row)
    kind = KIND[t]
    asm.emit("selp.b64" if t.endswith("64") else "selp.b32", asm.dst(d, kind), asm.src(a, kind), asm.src(b, kind), row)


@lowers("slct")
def slct(asm, ins):
    """Lowers slct, d = c >= 0 ? a : b; NaN counts as negative."""
    m = Modifiers(asm, ins, 2)
    ftz = m.flag("ftz")
    m.done()
    dtype, ctype = ins.modifiers[-2:] if len(ins.modifiers) >= 2 else ("", "")
    if dtype not in SELECTED or ctype not in ("s32", "f32") or ftz and ctype != "f32":
        asm.refuse(ins, "accepts a type to select, then .s32 or .f32")
    d, a, b, c = operands(asm, ins, 4)
    kind = KIND[ctype]
    condition = flushed(asm, [asm.src(c, kind)], ftz)[0]
    row = unary(asm, f"setp.le.{ctype}", "p", asm.const(0, kind), condition)
    select(asm, dtype, d, a, b, row)
