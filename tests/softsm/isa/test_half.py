"""f16 and bf16 arithmetic, single and packed, against rational numbers."""

import functools
import math

import exact
import numpy as np
from exact import BF16, F16, F32, flush, is_inf, is_nan
from silicon import Case, check
from values import floats

FORMATS = {"f16": F16, "bf16": BF16}


def inputs(t, arity):
    return {name: ("b16", x) for name, x in zip("abc", floats(t, arity))}


def packed(t, arity):
    """Two different halves per register."""
    pack = lambda x: x.astype(np.uint64) | np.roll(x, 11).astype(np.uint64) << np.uint64(16)  # noqa: E731
    return {name: ("b32", pack(x)) for name, x in zip("abc", floats(t, arity))}


def halves(f):
    return lambda *v: f(*(x & 0xFFFF for x in v)) & 0xFFFF | (f(*(x >> 16 for x in v)) & 0xFFFF) << 16


def both(t, arity, lines, version="8.6"):
    """Each instruction for the single and the packed type; lines are (text with {t}, function)."""
    for inputs_, kind, suffix, lift in ((inputs, "b16", "", lambda f: f), (packed, "b32", "x2", halves)):
        cases = [Case(text.replace("{t}", t + suffix), kind, lift(f)) for text, f in lines]
        check(inputs_(t, arity), cases, version=version)


def test_sums_and_products():
    for t, f in FORMATS.items():
        both(
            t,
            3,
            [
                ("add.{t} {d}, {a}, {b};", lambda a, b, c, f=f: exact.add(f, a, b)),
                ("sub.{t} {d}, {a}, {b};", lambda a, b, c, f=f: exact.sub(f, a, b)),
                ("mul.{t} {d}, {a}, {b};", lambda a, b, c, f=f: exact.mul(f, a, b)),
                ("add.rn.{t} {d}, {a}, {b};", lambda a, b, c, f=f: exact.add(f, a, b)),
                ("fma.rn.{t} {d}, {a}, {b}, {c};", lambda a, b, c, f=f: exact.fma(f, a, b, c)),
            ],
        )


def ftz(f):
    return lambda *v: flush(F16, f(*(flush(F16, x) for x in v)))


def saturated(bits):
    if is_nan(F16, bits) or bits & 0x8000:
        return 0
    return min(bits, 0x3C00)


def relu(f, bits):
    return 0 if bits & f.sign and not is_nan(f, bits) else bits


def test_flush_saturate_and_relu():
    both(
        "f16",
        3,
        [
            ("add.ftz.{t} {d}, {a}, {b};", ftz(lambda a, b, c: exact.add(F16, a, b))),
            ("mul.ftz.sat.{t} {d}, {a}, {b};", lambda a, b, c: saturated(ftz(lambda x, y: exact.mul(F16, x, y))(a, b))),
            ("sub.sat.{t} {d}, {a}, {b};", lambda a, b, c: saturated(exact.sub(F16, a, b))),
            ("fma.rn.ftz.{t} {d}, {a}, {b}, {c};", ftz(lambda a, b, c: exact.fma(F16, a, b, c))),
            ("fma.rn.sat.{t} {d}, {a}, {b}, {c};", lambda a, b, c: saturated(exact.fma(F16, a, b, c))),
            ("fma.rn.relu.{t} {d}, {a}, {b}, {c};", lambda a, b, c: relu(F16, exact.fma(F16, a, b, c))),
        ],
    )
    both("bf16", 3, [("fma.rn.relu.{t} {d}, {a}, {b}, {c};", lambda a, b, c: relu(BF16, exact.fma(BF16, a, b, c)))])


def test_out_of_bounds_nan():
    """fma.oob: the NaN with which TMA fills what lies outside a tensor, of either sign, is a factor that makes 0."""
    for t, f in FORMATS.items():
        nans = [x for x in range(0x10000) if is_nan(f, x)]
        one = {"f16": 0x3C00, "bf16": 0x3F80}[t]
        text = f"{{{{ .reg .b16 one; mov.b16 one, {one}; fma.rn.oob.{t} {{d}}, {{a}}, one, one; }}}}"
        wanted = {x: 0 if x & 0x7FFF == 0x7FF7 else f.nan for x in nans}
        check({"a": ("b16", nans)}, [Case(text, "b16", wanted.__getitem__)], version="8.1")

        def product(a, b, c, f=f, after=lambda f, x: x):
            return 0 if 0x7FF7 in (a & 0x7FFF, b & 0x7FFF) else after(f, exact.fma(f, a, b, c))

        rows = [
            [x if i % 5 else 0x7FF7 | i % 2 << 15 for i, x in enumerate(row.tolist(), shift)]
            for shift, row in enumerate(floats(t, 3))
        ]
        lines = [
            ("fma.rn.oob.{t} {d}, {a}, {b}, {c};", product),
            ("fma.rn.oob.relu.{t} {d}, {a}, {b}, {c};", functools.partial(product, after=relu)),
        ]
        singles = {name: ("b16", row) for name, row in zip("abc", rows)}
        pairs = {k: ("b32", [x | y << 16 for x, y in zip(row, row[1:] + row[:1])]) for k, (_, row) in singles.items()}
        check(singles, [Case(line.replace("{t}", t), "b16", f) for line, f in lines], version="8.1")
        check(pairs, [Case(line.replace("{t}", t + "x2"), "b32", halves(f)) for line, f in lines], version="8.1")


def test_signs():
    for t, f in FORMATS.items():
        a = [x for x in floats(t, 1)[0].tolist() if not is_nan(f, x)]
        lines = [(f"neg.{t} {{d}}, {{a}};", lambda a: a ^ 0x8000), (f"abs.{t} {{d}}, {{a}};", lambda a: a & 0x7FFF)]
        if t == "f16":
            lines += [("neg.ftz.f16 {d}, {a};", lambda a: flush(F16, a) ^ 0x8000)]
        check({"a": ("b16", a)}, [Case(text, "b16", g) for text, g in lines])
        pairs = [x | y << 16 for x, y in zip(a, a[::-1])]
        check(
            {"a": ("b32", pairs)},
            [
                Case(f"neg.{t}x2 {{d}}, {{a}};", "b32", lambda a: a ^ 0x80008000),
                Case(f"abs.{t}x2 {{d}}, {{a}};", "b32", lambda a: a & 0x7FFF7FFF),
            ],
        )


def key(f, bits):
    return -(bits & ~f.sign) - 1 if bits & f.sign else bits


def least(f, a, b, choose):
    if is_nan(f, a) or is_nan(f, b):
        return f.nan if is_nan(f, a) and is_nan(f, b) else b if is_nan(f, a) else a
    return choose(a, b, key=lambda x: key(f, x))


def test_min_and_max():
    for t, f in FORMATS.items():
        lines = []
        for name, choose in (("min", min), ("max", max)):
            g = lambda a, b, f=f, choose=choose: least(f, a, b, choose)  # noqa: E731
            either = lambda a, b, f=f: is_nan(f, a) or is_nan(f, b)  # noqa: E731
            lines += [
                (f"{name}.{{t}} {{d}}, {{a}}, {{b}};", g),
                (f"{name}.NaN.{{t}} {{d}}, {{a}}, {{b}};", lambda a, b, g=g, e=either: 0x7FFF if e(a, b) else g(a, b)),
                (
                    f"{name}.xorsign.abs.{{t}} {{d}}, {{a}}, {{b}};",
                    lambda a, b, g=g, f=f: (
                        f.nan if is_nan(f, a) and is_nan(f, b) else g(a & 0x7FFF, b & 0x7FFF) | (a ^ b) & 0x8000
                    ),
                ),
            ]
            if t == "f16":
                flushed = lambda a, b, g=g: g(flush(F16, a), flush(F16, b))  # noqa: E731
                lines.append((f"{name}.ftz.{{t}} {{d}}, {{a}}, {{b}};", flushed))
        both(t, 2, lines)


def number(f, bits):
    if is_nan(f, bits):
        return math.nan
    if is_inf(f, bits):
        return -math.inf if bits & f.sign else math.inf
    return float(exact.value(f, bits))


def of_real(f, g):
    """The function's value rounded to the format."""

    def apply(a):
        x = g(number(f, a))
        if math.isnan(x):
            return f.nan
        if math.isinf(x):
            return f.inf | (f.sign if x < 0 else 0)
        return exact.rounded(f, exact.Fraction(x), "rn", math.copysign(1, x) < 0)

    return apply


def exp2(x):
    return math.nan if math.isnan(x) else math.inf if x > 200 else 0.0 if x < -300 else 2.0**x


def within(f, relative, tiny):
    def bound(got, want, row):
        g, w = number(f, got), number(f, want)
        if math.isnan(w) or math.isinf(w):
            return 0.0 if got == want else math.inf
        return min(abs(g - w) / abs(w) / relative if w else math.inf, abs(g - w) / tiny)

    return bound


def test_approximate_functions():
    """ex2: relative 2^-9.9 (f16), 2^-7 (bf16); tanh: 2^-10.987 absolute (f16), 2^-8 (bf16)."""
    f16 = {"a": ("b16", floats("f16", 1)[0])}
    check(
        f16,
        [
            Case("ex2.approx.f16 {d}, {a};", "b16", of_real(F16, exp2), within(F16, 2.0**-9.9, 2.0**-24)),
            Case("tanh.approx.f16 {d}, {a};", "b16", of_real(F16, math.tanh), within(F16, 2.0**-9.9, 2.0**-10.9)),
        ],
    )
    bf16 = {"a": ("b16", floats("bf16", 1)[0])}
    check(
        bf16,
        [
            Case(
                "ex2.approx.ftz.bf16 {d}, {a};",
                "b16",
                lambda a: flush(BF16, of_real(BF16, exp2)(flush(BF16, a))),
                within(BF16, 2.0**-7, 2.0**-126),
            ),
            Case("tanh.approx.bf16 {d}, {a};", "b16", of_real(BF16, math.tanh), within(BF16, 2.0**-7, 2.0**-133)),
        ],
        version="7.8",
    )


def test_mixed_precision_of_sm_100():
    (a,), (c,) = floats("f16", 1), floats("f32", 1)
    n = min(len(a), len(c))
    widen = lambda x: exact.convert(F16, F32, x)  # noqa: E731
    check(
        {"a": ("b16", a[:n]), "c": ("b32", c[:n])},
        [
            Case("add.f32.f16 {d}, {a}, {c};", "b32", lambda a, c: exact.add(F32, widen(a), c), target="sm_100"),
            Case(
                "sub.rz.f32.f16 {d}, {a}, {c};", "b32", lambda a, c: exact.sub(F32, widen(a), c, "rz"), target="sm_100"
            ),
            Case(
                "fma.rn.f32.f16 {d}, {a}, {a}, {c};",
                "b32",
                lambda a, c: exact.fma(F32, widen(a), widen(a), c),
                target="sm_100",
            ),
        ],
        version="8.6",
    )
