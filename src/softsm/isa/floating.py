"""f32 and f64 arithmetic: PTX ISA 9.7.3, and the packed .f32x2 forms.

A NaN result of an f32 operation is the canonical 0x7fffffff. `.ftz` flushes subnormal inputs and results to a zero of
the same sign; rare combinations are composed of `ftz.f32`, `sat.f32` and the plain operation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from softsm.engine import vec
from softsm.isa.registry import lowers, micro
from softsm.isa.typed import Modifiers, lowers_typed, needs_target, operands, unary
from softsm.ptx.ast import Imm

micro("add.f32", "f=ff", lambda a, b: a + b, canonical_nan=True, hot=True)
micro("sub.f32", "f=ff", lambda a, b: a - b, canonical_nan=True, hot=True)
micro("mul.f32", "f=ff", lambda a, b: a * b, canonical_nan=True, hot=True)
micro("fma.f32", "f=fff", vec.fma, canonical_nan=True, hot=True)
micro("div.f32", "f=ff", lambda a, b: a / b, canonical_nan=True, hot=True)
micro("add.ftz.f32", "f=ff", lambda a, b: vec.ftz(vec.canonical(vec.ftz(a) + vec.ftz(b))), hot=True)
micro("sub.ftz.f32", "f=ff", lambda a, b: vec.ftz(vec.canonical(vec.ftz(a) - vec.ftz(b))), hot=True)
micro("mul.ftz.f32", "f=ff", lambda a, b: vec.ftz(vec.canonical(vec.ftz(a) * vec.ftz(b))), hot=True)
micro("fma.ftz.f32", "f=fff", lambda *abc: vec.ftz(vec.canonical(vec.fma(*map(vec.ftz, abc)))), hot=True)
micro("neg.f32", "u=f", lambda a: vec.sel(a == a, vec.asU(a) ^ 0x80000000, 0x7FFFFFFF), hot=True)
micro("abs.f32", "u=f", lambda a: vec.sel(a == a, vec.asU(a) & 0x7FFFFFFF, 0x7FFFFFFF), hot=True)
micro("min.f32", "f=ff", vec.minnum, canonical_nan=True, hot=True)
micro("max.f32", "f=ff", vec.maxnum, canonical_nan=True, hot=True)
# .NaN: any NaN wins
micro("nan.f32", "f=fff", lambda a, b, c: vec.asF(vec.sel((b == b) & (c == c), vec.asU(a), 0x7FFFFFFF)), hot=True)
micro("ftz.f32", "f=f", vec.ftz, hot=True)
micro("sat.f32", "f=f", vec.saturate)
micro("canonical.f32", "f=f", vec.canonical)
micro("signs.f32", "u=uuu", lambda a, b, c: (a & 0x7FFFFFFF) | ((b ^ c) & 0x80000000))  # .xorsign, and copysign
micro("ex2.ftz.f32", "f=f", vec.ex2_ftz, hot=True)
micro("ex2.f32", "f=f", vec.ex2, hot=True)
micro("lg2.f32", "f=f", vec.log2, hot=True)
micro("rcp.f32", "f=f", vec.rcp, hot=True)
micro("rcp.ftz.f32", "f=f", lambda a: vec.ftz(vec.rcp(vec.ftz(a))), hot=True)
micro("rsqrt.f32", "f=f", vec.rsqrt, hot=True)
micro("sqrt.f32", "f=f", vec.vsqrt, canonical_nan=True, hot=True)
micro("sin.f32", "f=f", vec.sine)
micro("cos.f32", "f=f", vec.cosine)
micro("tanh.f32", "f=f", vec.tanh, hot=True)
micro("add.f32x2", "q=qq", lambda a, b: vec.asQ(vec.canonical(vec.asX(a) + vec.asX(b))), hot=True)
micro("sub.f32x2", "q=qq", lambda a, b: vec.asQ(vec.canonical(vec.asX(a) - vec.asX(b))), hot=True)
micro("mul.f32x2", "q=qq", lambda a, b: vec.asQ(vec.canonical(vec.asX(a) * vec.asX(b))), hot=True)
micro("fma.f32x2", "q=qqq", lambda *abc: vec.asQ(vec.canonical(vec.fma(*map(vec.asX, abc)))), hot=True)
micro("ftz.f32x2", "q=q", lambda a: vec.asQ(vec.ftz2(vec.asX(a))))
micro("neg.f32x2", "q=q", lambda a: a ^ 0x8000000080000000)

micro("add.f64", "d=dd", lambda a, b: vec.nan64(a + b, a, b), hot=True)
micro("mul.f64", "d=dd", lambda a, b: vec.nan64(a * b, a, b), hot=True)
micro("fma.f64", "d=ddd", lambda a, b, c: vec.nan64x3(vec.fma(a, b, c), a, b, c), hot=True)
micro("div.f64", "d=dd", lambda a, b: vec.nan64(a / b, a, b))
micro("sqrt.f64", "d=d", lambda a: vec.nan64(vec.vsqrt(a), a, a))
micro("neg.f64", "q=q", lambda a: a ^ 0x8000000000000000)
micro("abs.f64", "q=q", lambda a: a & 0x7FFFFFFFFFFFFFFF)
micro("min.f64", "d=dd", lambda a, b: vec.nan64(vec.minnum(a, b), a, b))
micro("max.f64", "d=dd", lambda a, b: vec.nan64(vec.maxnum(a, b), a, b))
micro("signs.f64", "q=qqq", lambda a, b, c: (a & 0x7FFFFFFFFFFFFFFF) | ((b ^ c) & 0x8000000000000000))
micro("rcp.approx.f64", "d=d", vec.rcp64_approx)
micro("rsqrt.approx.ftz.f64", "d=d", vec.rsqrt64_approx)
micro("rsqrt.f64", "d=d", lambda a: vec.nan64(1.0 / vec.vsqrt(a), a, a))

MODES = {"rz": vec.TO_ZERO, "rm": vec.DOWN, "rp": vec.UP}


def rounded_f64(operate, mode, *sources):
    value = operate(mode, *sources)
    return vec.nan64x3(value, *sources) if len(sources) == 3 else vec.nan64(value, sources[0], sources[-1])


def rounded_f32x2(operate, mode, *sources):
    return vec.asQ(vec.canonical(operate(mode, *(vec.asX(x) for x in sources))))


for _r, _mode in MODES.items():
    for _name, _count, _operate in (
        ("add", 2, vec.rounded_add),
        ("mul", 2, vec.rounded_mul),
        ("div", 2, vec.rounded_div),
        ("fma", 3, vec.rounded_fma),
        ("sqrt", 1, vec.rounded_sqrt),
    ):
        micro(f"{_name}.{_r}.f32", "f=" + "f" * _count, partial(_operate, _mode), canonical_nan=True)
        micro(f"{_name}.{_r}.f64", "d=" + "d" * _count, partial(rounded_f64, _operate, _mode))
        if _name in ("add", "mul", "fma"):
            micro(f"{_name}.{_r}.f32x2", "q=" + "q" * _count, partial(rounded_f32x2, _operate, _mode))


TESTS: dict[str, Callable] = {  # inf: the bits of infinity, magnitude: all but the sign
    "finite": lambda a, inf, magnitude: (a & inf) != inf,
    "infinite": lambda a, inf, magnitude: (a & magnitude) == inf,
    "number": lambda a, inf, magnitude: (a & magnitude) <= inf,
    "notanumber": lambda a, inf, magnitude: (a & magnitude) > inf,
    # zero counts
    "normal": lambda a, inf, magnitude: ((a & inf) != inf) & (((a & inf) != 0) | ((a & magnitude) == 0)),
    "subnormal": lambda a, inf, magnitude: ((a & inf) == 0) & ((a & magnitude) != 0),
}
for _name, _test in TESTS.items():
    micro(f"testp.{_name}.f32", "p=u", partial(_test, inf=0x7F800000, magnitude=0x7FFFFFFF))
    micro(f"testp.{_name}.f64", "p=q", partial(_test, inf=0x7FF0000000000000, magnitude=0x7FFFFFFFFFFFFFFF))

ROUNDINGS = ("rn", "rz", "rm", "rp")


def flushed(asm, rows: list[int], ftz: bool, t: str = "f32") -> list[int]:
    """Returns the sources, with subnormals flushed if .ftz is given."""
    if not ftz:
        return rows
    kind = "q" if t == "f32x2" else "f"
    return [unary(asm, f"ftz.{t}", kind, row) for row in rows]


def store(asm, operand, name: str, rows: list[int], *, kind: str = "f", ftz: bool = False, sat: bool = False) -> None:
    """Emits `name` into the destination, with .ftz and .sat applied to the result where given."""
    steps = [name, *(["ftz.f32x2" if kind == "q" else "ftz.f32"] if ftz else []), *(["sat.f32"] if sat else [])]
    for step in steps[:-1]:
        rows = [unary(asm, step, kind, *rows)]
    asm.emit(steps[-1], asm.dst(operand, kind), *rows)


@lowers_typed("add", "f32", "f64", "f32x2")
@lowers_typed("sub", "f32", "f64", "f32x2")
@lowers_typed("mul", "f32", "f64", "f32x2")
@lowers_typed("fma", "f32", "f64", "f32x2")
@lowers_typed("mad", "f32", "f64")
def arithmetic(asm, ins):
    t = ins.modifiers[-1]
    m = Modifiers(asm, ins)
    if m.left and m.left[0] == "f32" and t != "f32":
        asm.refuse(ins, f"no such combination of types: .f32.{t}")
    rounding = m.one_of(*ROUNDINGS)
    ftz, sat = m.flag("ftz"), m.flag("sat")
    m.done()
    op = "fma" if ins.opcode == "mad" else ins.opcode
    if op == "fma" and rounding is None and not (ins.opcode == "mad" and t == "f32"):
        asm.refuse(ins, f"{ins.opcode} needs a rounding: .rn, .rz, .rm or .rp")
    if t == "f64" and (ftz or sat):
        asm.refuse(ins, ".ftz and .sat are for .f32")
    if t == "f32x2":
        needs_target(asm, ins, 100)
        if sat:
            asm.refuse(ins, ".sat is not for .f32x2")
    kind = {"f32": "f", "f64": "d", "f32x2": "q"}[t]
    d, *sources = operands(asm, ins, 4 if op == "fma" else 3)
    if t == "f32x2" and any(isinstance(x, Imm) for x in sources):
        asm.refuse(ins, ".f32x2 needs registers, not numbers")
    rows = [asm.src(x, kind) for x in sources]
    rounding = rounding or "rn"
    if rounding == "rn" and t == "f32" and ftz:
        return store(asm, d, f"{op}.ftz.f32", rows, sat=sat)
    rows = flushed(asm, rows, ftz, t)
    if op == "sub" and (rounding != "rn" or t == "f64"):  # a - b = a + (-b), exactly
        op, rows = "add", [rows[0], unary(asm, f"neg.{t}", kind, rows[1])]
    name = f"{op}.{t}" if rounding == "rn" else f"{op}.{rounding}.{t}"
    store(asm, d, name, rows, kind=kind, ftz=ftz, sat=sat)


@lowers_typed("div", "f32", "f64")
def divide(asm, ins):
    t = ins.modifiers[-1]
    m = Modifiers(asm, ins)
    mode, ftz = m.one_of("approx", "full", *ROUNDINGS), m.flag("ftz")
    m.done()
    if mode is None:
        asm.refuse(ins, "needs .approx, .full, .rn, .rz, .rm or .rp")
    d, a, b = operands(asm, ins, 3)
    if t == "f64":
        if mode in ("approx", "full") or ftz:
            asm.refuse(ins, "div.f64 accepts a rounding and nothing else")
        name = "div.f64" if mode == "rn" else f"div.{mode}.f64"
        return asm.emit(name, asm.dst(d, "d"), asm.src(a, "d"), asm.src(b, "d"))
    rows = flushed(asm, [asm.src(a, "f"), asm.src(b, "f")], ftz)
    if mode == "approx":  # a * (1/b): a reciprocal below the normal range counts as zero
        inverse = unary(asm, "ftz.f32", "f", unary(asm, "rcp.f32", "f", rows[1]))
        return store(asm, d, "mul.f32", [rows[0], inverse], ftz=ftz)
    name = "div.f32" if mode in ("full", "rn") else f"div.{mode}.f32"
    store(asm, d, name, rows, ftz=ftz)


@lowers_typed("rcp", "f32", "f64")
@lowers_typed("sqrt", "f32", "f64")
def reciprocal_root(asm, ins):
    t = ins.modifiers[-1]
    m = Modifiers(asm, ins)
    mode, ftz = m.one_of("approx", *ROUNDINGS), m.flag("ftz")
    m.done()
    if mode is None:
        asm.refuse(ins, "needs .approx, .rn, .rz, .rm or .rp")
    d, a = operands(asm, ins, 2)
    if t == "f64":
        if mode == "approx":
            if ins.opcode != "rcp" or not ftz:
                asm.refuse(ins, "the approximate f64 form is rcp.approx.ftz.f64")
            return asm.emit("rcp.approx.f64", asm.dst(d, "d"), asm.src(a, "d"))
        if ftz:
            asm.refuse(ins, ".ftz is for .f32")
        rows, kind = [asm.src(a, "d")], "d"
        one = asm.const(0x3FF0000000000000, "d")
    else:
        if ins.opcode == "rcp" and ftz and mode in ("approx", "rn"):
            return asm.emit("rcp.ftz.f32", asm.dst(d, "f"), asm.src(a, "f"))
        rows, kind = flushed(asm, [asm.src(a, "f")], ftz), "f"
        one = asm.const(0x3F800000, "f")
    directed = "" if mode in ("approx", "rn") else f".{mode}"
    if ins.opcode == "rcp":
        if not directed and t == "f32":
            return store(asm, d, "rcp.f32", rows, ftz=ftz)
        return store(asm, d, f"div{directed}.{t}", [one, *rows], kind=kind, ftz=ftz)
    store(asm, d, f"sqrt{directed}.{t}", rows, kind=kind, ftz=ftz)


@lowers_typed("rsqrt", "f32", "f64")
@lowers_typed("sin", "f32")
@lowers_typed("cos", "f32")
@lowers_typed("lg2", "f32")
def approximate(asm, ins):
    t = ins.modifiers[-1]
    m = Modifiers(asm, ins)
    approx, ftz = m.flag("approx"), m.flag("ftz")
    m.done()
    if not approx:
        asm.refuse(ins, f"{ins.opcode} needs .approx")
    d, a = operands(asm, ins, 2)
    if t == "f64":
        return asm.emit(f"rsqrt.{'approx.ftz.' if ftz else ''}f64", asm.dst(d, "d"), asm.src(a, "d"))
    store(asm, d, f"{ins.opcode}.f32", flushed(asm, [asm.src(a, "f")], ftz), ftz=ftz)


@lowers_typed("ex2", "f32")
def ex2(asm, ins):
    m = Modifiers(asm, ins)
    approx, ftz = m.flag("approx"), m.flag("ftz")
    m.done()
    if not approx:
        asm.refuse(ins, "ex2 needs .approx")
    d, a = operands(asm, ins, 2)
    asm.emit("ex2.ftz.f32" if ftz else "ex2.f32", asm.dst(d, "f"), asm.src(a, "f"))


@lowers_typed("tanh", "f32")
def tanh(asm, ins):
    m = Modifiers(asm, ins)
    approx = m.flag("approx")
    m.done()
    if not approx:
        asm.refuse(ins, "tanh needs .approx")
    d, a = operands(asm, ins, 2)
    asm.emit("tanh.f32", asm.dst(d, "f"), asm.src(a, "f"))


@lowers_typed("neg", "f32", "f64")
@lowers_typed("abs", "f32", "f64")
def sign(asm, ins):
    t = ins.modifiers[-1]
    m = Modifiers(asm, ins)
    ftz = m.flag("ftz")
    m.done()
    if ftz and t == "f64":
        asm.refuse(ins, ".ftz is for .f32")
    d, a = operands(asm, ins, 2)
    kind = "d" if t == "f64" else "f"
    asm.emit(f"{ins.opcode}.{t}", asm.dst(d, kind), *flushed(asm, [asm.src(a, kind)], ftz))


@lowers_typed("min", "f32", "f64")
@lowers_typed("max", "f32", "f64")
def min_max(asm, ins):
    t = ins.modifiers[-1]
    m = Modifiers(asm, ins)
    ftz, nan, xorsign, magnitude = m.flag("ftz"), m.flag("NaN"), m.flag("xorsign"), m.flag("abs")
    m.done()
    d, *sources = operands(asm, ins, 3, 4)
    if t == "f64":
        if ftz or nan or xorsign or magnitude or len(sources) != 2:
            asm.refuse(ins, f"{ins.opcode}.f64 accepts two operands and no modifier")
        return asm.emit(f"{ins.opcode}.f64", asm.dst(d, "d"), *(asm.src(x, "d") for x in sources))
    if len(sources) == 3:
        needs_target(asm, ins, 100)
    if xorsign and (not magnitude or len(sources) == 3):
        asm.refuse(ins, ".xorsign goes with .abs and two operands")
    rows = flushed(asm, [asm.src(x, "f") for x in sources], ftz)
    if magnitude:
        sign_rows, rows = rows, [unary(asm, "abs.f32", "u", row) for row in rows]
    if len(rows) == 2 and not (nan or xorsign):
        return asm.emit(f"{ins.opcode}.f32", asm.dst(d, "f"), *rows)
    best = rows[0]
    for row in rows[1:]:
        inputs, best = (best, row), unary(asm, f"{ins.opcode}.f32", "f", best, row)
        if nan:
            best = unary(asm, "nan.f32", "f", best, *inputs)
    if xorsign:
        best = unary(asm, "signs.f32", "u", best, *sign_rows)
    asm.emit("canonical.f32" if xorsign else "mov.b32", asm.dst(d, "f"), best)


@lowers("testp")
def testp(asm, ins):
    if len(ins.modifiers) != 2 or ins.modifiers[0] not in TESTS or ins.modifiers[1] not in ("f32", "f64"):
        asm.refuse(ins, f"accepts one of {', '.join('.' + x for x in TESTS)} and .f32 or .f64")
    d, a = operands(asm, ins, 2)
    asm.emit(
        f"testp.{ins.modifiers[0]}.{ins.modifiers[1]}",
        asm.dst(d, "p"),
        asm.src(a, "d" if ins.modifiers[1] == "f64" else "f"),
    )


@lowers_typed("copysign", "f32", "f64")
def copysign(asm, ins):
    """Lowers copysign: the sign of a on the magnitude of b."""
    t = ins.modifiers[-1]
    Modifiers(asm, ins).done()
    d, a, b = operands(asm, ins, 3)
    kind = "d" if t == "f64" else "f"
    asm.emit(f"signs.{t}", asm.dst(d, kind), asm.src(b, kind), asm.src(a, kind), asm.const(0, kind))
