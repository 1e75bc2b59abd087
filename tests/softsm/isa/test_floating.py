"""f32 and f64 arithmetic against rational numbers (exact.py); approximate functions within their documented bounds."""

import math

import exact
import numpy as np
from exact import F32, F64, flush, is_nan
from silicon import Case, check
from values import NANS_F64, floats

MODES = ("rn", "rz", "rm", "rp")


def inputs(t, arity):
    kind = "b64" if t == "f64" else "b32"
    return {name: (kind, x) for name, x in zip("abc", floats(t, arity))}


def number(bits):
    return np.uint32(bits).view(np.float32)


def saturated(bits):
    x = number(bits)
    return 0 if not x > 0 else bits if x < 1 else 0x3F800000


def test_sums_and_products_round_in_every_mode():
    cases = []
    for m in MODES:
        cases += [
            Case(f"add.{m}.f32 {{d}}, {{a}}, {{b}};", "b32", lambda a, b, c, m=m: exact.add(F32, a, b, m)),
            Case(f"sub.{m}.f32 {{d}}, {{a}}, {{b}};", "b32", lambda a, b, c, m=m: exact.sub(F32, a, b, m)),
            Case(f"mul.{m}.f32 {{d}}, {{a}}, {{b}};", "b32", lambda a, b, c, m=m: exact.mul(F32, a, b, m)),
            Case(f"fma.{m}.f32 {{d}}, {{a}}, {{b}}, {{c}};", "b32", lambda a, b, c, m=m: exact.fma(F32, a, b, c, m)),
        ]
    check(inputs("f32", 3), cases)


def test_plain_names_round_to_nearest():
    check(
        inputs("f32", 3),
        [
            Case("add.f32 {d}, {a}, {b};", "b32", lambda a, b, c: exact.add(F32, a, b)),
            Case("sub.f32 {d}, {a}, {b};", "b32", lambda a, b, c: exact.sub(F32, a, b)),
            Case("mul.f32 {d}, {a}, {b};", "b32", lambda a, b, c: exact.mul(F32, a, b)),
            Case("mad.rn.f32 {d}, {a}, {b}, {c};", "b32", lambda a, b, c: exact.fma(F32, a, b, c)),
        ],
    )


def ftz(f):
    """Flush inputs and the result."""
    return lambda *v: flush(F32, f(*(flush(F32, x) for x in v)))


def test_flush_to_zero():
    cases = []
    for m in MODES:
        cases += [
            Case(f"add.{m}.ftz.f32 {{d}}, {{a}}, {{b}};", "b32", ftz(lambda a, b, c, m=m: exact.add(F32, a, b, m))),
            Case(f"sub.{m}.ftz.f32 {{d}}, {{a}}, {{b}};", "b32", ftz(lambda a, b, c, m=m: exact.sub(F32, a, b, m))),
            Case(f"mul.{m}.ftz.f32 {{d}}, {{a}}, {{b}};", "b32", ftz(lambda a, b, c, m=m: exact.mul(F32, a, b, m))),
            Case(
                f"fma.{m}.ftz.f32 {{d}}, {{a}}, {{b}}, {{c}};",
                "b32",
                ftz(lambda a, b, c, m=m: exact.fma(F32, a, b, c, m)),
            ),
        ]
    check(inputs("f32", 3), cases)


def test_saturation_to_the_unit_interval():
    check(
        inputs("f32", 3),
        [
            Case("add.sat.f32 {d}, {a}, {b};", "b32", lambda a, b, c: saturated(exact.add(F32, a, b))),
            Case(
                "mul.ftz.sat.f32 {d}, {a}, {b};",
                "b32",
                lambda a, b, c: saturated(ftz(lambda x, y: exact.mul(F32, x, y))(a, b)),
            ),
            Case("fma.rz.sat.f32 {d}, {a}, {b}, {c};", "b32", lambda a, b, c: saturated(exact.fma(F32, a, b, c, "rz"))),
        ],
    )


def test_division_and_roots_round_in_every_mode():
    one = 0x3F800000
    cases = []
    for m in MODES:
        cases += [
            Case(f"div.{m}.f32 {{d}}, {{a}}, {{b}};", "b32", lambda a, b, m=m: exact.div(F32, a, b, m)),
            Case(f"rcp.{m}.f32 {{d}}, {{a}};", "b32", lambda a, b, m=m: exact.div(F32, one, a, m)),
            Case(f"sqrt.{m}.f32 {{d}}, {{a}};", "b32", lambda a, b, m=m: exact.sqrt(F32, a, m)),
        ]
    cases += [
        Case("div.rn.ftz.f32 {d}, {a}, {b};", "b32", ftz(lambda a, b: exact.div(F32, a, b))),
        Case("sqrt.rn.ftz.f32 {d}, {a};", "b32", ftz(lambda a, b: exact.sqrt(F32, a))),
        Case("rcp.rn.ftz.f32 {d}, {a};", "b32", ftz(lambda a, b: exact.div(F32, one, a))),
    ]
    check(inputs("f32", 2), cases)


def test_double_precision_rounds_in_every_mode():
    cases = []
    for m in MODES:
        cases += [
            Case(f"add.{m}.f64 {{d}}, {{a}}, {{b}};", "b64", lambda a, b, c, m=m: exact.add(F64, a, b, m)),
            Case(f"sub.{m}.f64 {{d}}, {{a}}, {{b}};", "b64", lambda a, b, c, m=m: exact.sub(F64, a, b, m)),
            Case(f"mul.{m}.f64 {{d}}, {{a}}, {{b}};", "b64", lambda a, b, c, m=m: exact.mul(F64, a, b, m)),
            Case(f"fma.{m}.f64 {{d}}, {{a}}, {{b}}, {{c}};", "b64", lambda a, b, c, m=m: exact.fma(F64, a, b, c, m)),
            Case(f"div.{m}.f64 {{d}}, {{a}}, {{b}};", "b64", lambda a, b, c, m=m: exact.div(F64, a, b, m)),
            Case(f"sqrt.{m}.f64 {{d}}, {{a}};", "b64", lambda a, b, c, m=m: exact.sqrt(F64, a, m)),
            Case(f"rcp.{m}.f64 {{d}}, {{a}};", "b64", lambda a, b, c, m=m: exact.div(F64, 0x3FF0000000000000, a, m)),
        ]
    columns = inputs("f64", 3)
    rows = zip(*(x for _, x in columns.values()))
    keep = [i for i, row in enumerate(rows) if not any(is_nan(F64, int(v)) for v in row)]
    check({k: (t, x[keep]) for k, (t, x) in columns.items()}, cases)


def test_a_double_nan_operand_is_passed_on():
    quiet = 0x8000000000000
    one = 0x3FF0000000000000
    check(
        {"a": ("b64", [*NANS_F64, one]), "b": ("b64", [one, one, one, NANS_F64[1]])},
        [
            Case("add.f64 {d}, {a}, {b};", "b64", lambda a, b: (a if is_nan(F64, a) else b) | quiet),
            Case("mul.f64 {d}, {a}, {b};", "b64", lambda a, b: (a if is_nan(F64, a) else b) | quiet),
            Case("fma.rn.f64 {d}, {a}, {b}, {b};", "b64", lambda a, b: (a if is_nan(F64, a) else b) | quiet),
        ],
    )


def key(f, bits):
    """Order of non-NaN numbers, -0 below +0."""
    return -(bits & ~f.sign) - 1 if bits & f.sign else bits


def least(f, a, b, choose=min):
    if is_nan(f, a) or is_nan(f, b):
        return f.nan if is_nan(f, a) and is_nan(f, b) else b if is_nan(f, a) else a
    return choose(a, b, key=lambda x: key(f, x))


def test_min_and_max_prefer_numbers_and_order_zeros():
    magnitude, sign = 0x7FFFFFFF, 0x80000000
    either = lambda a, b: is_nan(F32, a) or is_nan(F32, b)  # noqa: E731
    cases = []
    for name, choose in (("min", min), ("max", max)):
        f = lambda a, b, choose=choose: least(F32, a, b, choose)  # noqa: E731
        cases += [
            Case(f"{name}.f32 {{d}}, {{a}}, {{b}};", "b32", f),
            Case(f"{name}.ftz.f32 {{d}}, {{a}}, {{b}};", "b32", lambda a, b, f=f: f(flush(F32, a), flush(F32, b))),
            Case(f"{name}.NaN.f32 {{d}}, {{a}}, {{b}};", "b32", lambda a, b, f=f: F32.nan if either(a, b) else f(a, b)),
            Case(
                f"{name}.xorsign.abs.f32 {{d}}, {{a}}, {{b}};",
                "b32",
                lambda a, b, f=f: (
                    F32.nan if is_nan(F32, a) and is_nan(F32, b) else f(a & magnitude, b & magnitude) | (a ^ b) & sign
                ),
            ),
        ]
    check(inputs("f32", 2), cases)
    columns = inputs("f64", 2)
    check(
        columns,
        [
            Case("min.f64 {d}, {a}, {b};", "b64", lambda a, b: least(F64, a, b)),
            Case("max.f64 {d}, {a}, {b};", "b64", lambda a, b: least(F64, a, b, max)),
        ],
    )


def test_three_inputs_of_sm_100():
    f = lambda a, b, c: least(F32, least(F32, a, b), c)  # noqa: E731
    check(
        inputs("f32", 3),
        [
            Case("min.f32 {d}, {a}, {b}, {c};", "b32", f, target="sm_100"),
            Case(
                "max.NaN.f32 {d}, {a}, {b}, {c};",
                "b32",
                lambda a, b, c: (
                    F32.nan if any(is_nan(F32, x) for x in (a, b, c)) else least(F32, least(F32, a, b, max), c, max)
                ),
                target="sm_100",
            ),
        ],
        version="8.8",
    )


def test_signs():
    numbers = [x for x in floats("f32", 1)[0].tolist() if not is_nan(F32, x)]
    check(
        {"a": ("b32", numbers), "b": ("b32", numbers[::-1])},
        [
            Case("neg.f32 {d}, {a};", "b32", lambda a, b: a ^ 0x80000000),
            Case("abs.f32 {d}, {a};", "b32", lambda a, b: a & 0x7FFFFFFF),
            Case("neg.ftz.f32 {d}, {a};", "b32", lambda a, b: flush(F32, a) ^ 0x80000000),
            Case("abs.ftz.f32 {d}, {a};", "b32", lambda a, b: flush(F32, a) & 0x7FFFFFFF),
            Case("copysign.f32 {d}, {a}, {b};", "b32", lambda a, b: a & 0x80000000 | b & 0x7FFFFFFF),
        ],
    )
    nans = [0x7F800001, 0x7FC00000, 0xFFC12345]
    check(
        {"a": ("b32", nans)},
        [Case("neg.f32 {d}, {a};", "b32", lambda a: F32.nan), Case("abs.f32 {d}, {a};", "b32", lambda a: F32.nan)],
    )
    check(
        inputs("f64", 2),
        [
            Case("neg.f64 {d}, {a};", "b64", lambda a, b: a ^ 1 << 63),
            Case("abs.f64 {d}, {a};", "b64", lambda a, b: a & ~(1 << 63)),
            Case("copysign.f64 {d}, {a}, {b};", "b64", lambda a, b: a & 1 << 63 | b & ~(1 << 63)),
        ],
    )


def test_classes_of_numbers():
    def classes(f):
        exponent = lambda x: x & f.inf  # noqa: E731
        return {
            "finite": lambda x: exponent(x) != f.inf,
            "infinite": lambda x: x & ~f.sign == f.inf,
            "number": lambda x: not is_nan(f, x),
            "notanumber": lambda x: is_nan(f, x),
            "normal": lambda x: exponent(x) not in (0, f.inf) or x & ~f.sign == 0,  # zero counts
            "subnormal": lambda x: exponent(x) == 0 and x & ~f.sign != 0,
        }

    for t, f in (("f32", F32), ("f64", F64)):
        check(inputs(t, 1), [Case(f"testp.{name}.{t} {{d}}, {{a}};", "pred", g) for name, g in classes(f).items()])


# ---------------------------------------------------------------- packed pairs (sm_100)


def pairs(f):
    def apply(*v):
        low, high = (f(*(x >> k & 0xFFFFFFFF for x in v)) for k in (0, 32))
        return low | high << 32

    return apply


def test_packed_pairs():
    a, b, c = floats("f32", 3)
    packed = {
        name: ("b64", x.astype(np.uint64) | np.roll(x, 7).astype(np.uint64) << np.uint64(32))
        for name, x in zip("abc", (a, b, c))
    }
    f = {
        "add": lambda m: lambda a, b, c: exact.add(F32, a, b, m),
        "sub": lambda m: lambda a, b, c: exact.sub(F32, a, b, m),
        "mul": lambda m: lambda a, b, c: exact.mul(F32, a, b, m),
    }
    cases = [
        Case(f"{op}.{m}.f32x2 {{d}}, {{a}}, {{b}};", "b64", pairs(g(m)), target="sm_100")
        for op, g in f.items()
        for m in MODES
    ]
    cases += [
        Case(
            f"fma.{m}.f32x2 {{d}}, {{a}}, {{b}}, {{c}};",
            "b64",
            pairs(lambda a, b, c, m=m: exact.fma(F32, a, b, c, m)),
            target="sm_100",
        )
        for m in MODES
    ]
    flushed = pairs(ftz(lambda a, b, c: exact.fma(F32, a, b, c)))
    cases.append(Case("fma.rn.ftz.f32x2 {d}, {a}, {b}, {c};", "b64", flushed, target="sm_100"))
    check(packed, cases, version="8.6")


# ---------------------------------------------------------------- approximate functions


def relative(bits_of_error, tiny=0.0):
    """Allowed: that relative error (2^-n), or an absolute one below `tiny`."""

    def bound(got, want, row):
        g, w = float(number(got)), float(number(want))
        if math.isnan(w) or math.isinf(w) or w == 0:
            return 0.0 if g == w or abs(g - w) <= tiny else math.inf
        return min(abs(g - w) / abs(w) * 2.0**bits_of_error, abs(g - w) / tiny if tiny else math.inf)

    return bound


def ulps(n):
    def bound(got, want, row):
        if is_nan(F32, want) or is_nan(F32, got):
            return 0.0 if got == want else math.inf
        return abs(key(F32, got) - key(F32, want)) / n

    return bound


def real(f):
    """The correctly rounded value of a function of doubles; canonical NaN."""

    def apply(*v):
        try:
            with np.errstate(over="ignore"):
                r = np.float32(f(*(float(number(x)) for x in v)))
        except (ValueError, ZeroDivisionError):
            return F32.nan
        except OverflowError:
            return F32.inf
        return F32.nan if np.isnan(r) else int(np.array(r, np.float32).view(np.uint32))

    return apply


def exp2(x):
    return math.nan if math.isnan(x) else math.inf if x >= 128 else 0.0 if x < -160 else 2.0**x


def log2(x):
    return -math.inf if x == 0 else math.log2(x)


def sine(f):
    return lambda x: math.nan if math.isinf(x) else f(x)


def near(low, high, count, seed):
    rng = np.random.default_rng(seed)
    return [int(v) for v in rng.uniform(low, high, count).astype(np.float32).view(np.uint32)]


def test_powers_of_two():
    a = floats("f32", 1)[0].tolist() + near(-150, 130, 300, 1) + near(-1, 1, 100, 2)
    check(
        {"a": ("b32", a)},
        [
            Case("ex2.approx.ftz.f32 {d}, {a};", "b32", lambda a: flush(F32, real(exp2)(flush(F32, a))), ulps(2)),
            Case("ex2.approx.f32 {d}, {a};", "b32", real(exp2), ulps(2)),
        ],
    )


def test_logarithms():
    a = floats("f32", 1)[0].tolist() + near(0.4, 2.1, 300, 3) + near(0, 1e6, 100, 4)
    check(
        {"a": ("b32", a)},
        [
            Case("lg2.approx.f32 {d}, {a};", "b32", real(log2), relative(21.5, 2.0**-21.5)),
            Case(
                "lg2.approx.ftz.f32 {d}, {a};", "b32", lambda a: real(log2)(flush(F32, a)), relative(21.5, 2.0**-21.5)
            ),
        ],
    )


def test_circular_functions_near_zero():
    a = near(-6.2, 6.2, 300, 5) + [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000]
    check(
        {"a": ("b32", a)},
        [
            Case("sin.approx.f32 {d}, {a};", "b32", real(sine(math.sin)), relative(20, 2.0**-20)),
            Case("cos.approx.f32 {d}, {a};", "b32", real(sine(math.cos)), relative(20, 2.0**-20)),
        ],
    )


def test_hyperbolic_tangent():
    a = floats("f32", 1)[0].tolist() + near(-5, 5, 300, 6)
    check({"a": ("b32", a)}, [Case("tanh.approx.f32 {d}, {a};", "b32", real(math.tanh), relative(10.5, 2.0**-126))])


def test_approximate_reciprocals_and_roots():
    a = floats("f32", 1)[0].tolist() + near(0, 1e4, 200, 7)
    inverse = lambda x: math.copysign(math.inf, x) if x == 0 else 1 / x  # noqa: E731
    root = lambda x: x if x == 0 else math.sqrt(x)  # noqa: E731
    inverse_root = lambda x: math.copysign(math.inf, x) if x == 0 else 0.0 if x == math.inf else 1 / math.sqrt(x)  # noqa: E731
    flushed = lambda f: lambda a: flush(F32, f(flush(F32, a)))  # noqa: E731
    check(
        {"a": ("b32", a)},
        [
            Case("rcp.approx.ftz.f32 {d}, {a};", "b32", flushed(real(inverse)), ulps(1)),
            Case("rcp.approx.f32 {d}, {a};", "b32", real(inverse), ulps(1)),
            Case("sqrt.approx.f32 {d}, {a};", "b32", real(root), relative(22)),
            Case("sqrt.approx.ftz.f32 {d}, {a};", "b32", flushed(real(root)), relative(22)),
            Case("rsqrt.approx.f32 {d}, {a};", "b32", real(inverse_root), relative(22)),
            Case("rsqrt.approx.ftz.f32 {d}, {a};", "b32", flushed(real(inverse_root)), relative(22)),
        ],
    )


def test_approximate_division():
    a, b = near(-100, 100, 300, 8), near(0.01, 100, 300, 9)
    quotient = lambda a, b: exact.div(F32, a, b)  # noqa: E731
    check(
        {"a": ("b32", a), "b": ("b32", b)},
        [
            Case("div.approx.f32 {d}, {a}, {b};", "b32", quotient, ulps(2)),
            Case("div.full.f32 {d}, {a}, {b};", "b32", quotient, ulps(2)),
            Case("div.full.ftz.f32 {d}, {a}, {b};", "b32", quotient, ulps(2)),
        ],
    )
    large = [0x7E800001, 0x7F000000, 0xFE900000]  # 2^126 < |b| < 2^128: the reciprocal counts as zero
    check(
        {"a": ("b32", [0x3F800000, 0x7F000000, 0x7F800000]), "b": ("b32", large)},
        [Case("div.approx.f32 {d}, {a}, {b};", "b32", lambda a, b: F32.nan if a == F32.inf else (a ^ b) & 0x80000000)],
    )


def test_approximate_double_reciprocals():
    a = [x for x in floats("f64", 1)[0].tolist() if 0x3000 << 48 < x & ~(1 << 63) < 0x5000 << 48]

    def bound(got, want, row):
        g, w = (float(np.uint64(x).view(np.float64)) for x in (got, want))
        return 0.0 if g == w or math.isnan(g) and math.isnan(w) else abs(g - w) / abs(w) * 2.0**19

    as_bits = lambda x: int(np.float64(x).view(np.uint64))  # noqa: E731
    as_number = lambda x: float(np.uint64(x).view(np.float64))  # noqa: E731
    check(
        {"a": ("b64", a)},
        [
            Case("rcp.approx.ftz.f64 {d}, {a};", "b64", lambda a: as_bits(1 / as_number(a)), bound),
            Case(
                "{{ .reg .b64 t; abs.f64 t, {a}; rsqrt.approx.f64 {d}, t; }}",
                "b64",
                lambda a: as_bits(1 / math.sqrt(abs(as_number(a)))),
                bound,
            ),
            Case(
                "{{ .reg .b64 t; abs.f64 t, {a}; rsqrt.approx.ftz.f64 {d}, t; }}",
                "b64",
                lambda a: as_bits(1 / math.sqrt(abs(as_number(a)))),
                bound,
            ),
        ],
    )
