"""Conversions and moves against integers and rational numbers."""

from fractions import Fraction

import exact
import numpy as np
from exact import BF16, F16, F32, FORMATS, flush, is_inf, is_nan
from silicon import Case, check
from values import floats, integers, random_bits, signed

INTEGERS = {f"{s}{w}": (s, w) for w in (8, 16, 32, 64) for s in "us"}
REGISTER = {8: "b16", 16: "b16", 32: "b32", 64: "b64"}


def limits(t):
    s, w = INTEGERS[t]
    return (-(1 << (w - 1)), (1 << (w - 1)) - 1) if s == "s" else (0, (1 << w) - 1)


def read(t, bits):
    s, w = INTEGERS[t]
    bits &= (1 << w) - 1
    return signed(bits, w) if s == "s" else bits


def clamp(t, x):
    low, high = limits(t)
    return max(low, min(high, x))


def write(t, x):
    """Return x as the destination register holds it: a type narrower than its register is extended."""
    s, w = INTEGERS[t]
    x &= (1 << w) - 1
    return signed(x, w) if s == "s" else x


def test_integers_are_cut_extended_and_saturated():
    for source in INTEGERS:
        w = INTEGERS[source][1]
        values = integers(max(w, 16), 1)[0]
        cases = []
        for target in INTEGERS:
            result = REGISTER[INTEGERS[target][1]]
            if source != target:
                cases.append(
                    Case(
                        f"cvt.{target}.{source} {{d}}, {{a}};",
                        result,
                        lambda a, t=target, s=source: write(t, read(s, a)),
                    )
                )
            (sl, sh), (tl, th) = limits(source), limits(target)
            if sl < tl or sh > th:
                cases.append(
                    Case(
                        f"cvt.sat.{target}.{source} {{d}}, {{a}};",
                        result,
                        lambda a, t=target, s=source: write(t, clamp(t, read(s, a))),
                    )
                )
        check({"a": (REGISTER[w], values)}, cases)


def test_narrow_types_in_wide_registers():
    (a,) = integers(32, 1)
    (b,) = integers(64, 1)
    n = min(len(a), len(b))
    check(
        {"a": ("b32", a[:n]), "b": ("b64", b[:n])},
        [
            Case("cvt.s8.s32 {d}, {a};", "b32", lambda a, b: write("s8", a)),
            Case("cvt.u8.u32 {d}, {a};", "b32", lambda a, b: write("u8", a)),
            Case("cvt.s16.s32 {d}, {a};", "b32", lambda a, b: write("s16", a)),
            Case("cvt.u32.u8 {d}, {a};", "b32", lambda a, b: a & 0xFF),
            Case("cvt.s64.s8 {d}, {a};", "b64", lambda a, b: read("s8", a)),
            Case("cvt.s32.s64 {d}, {b};", "b64", lambda a, b: write("s32", b)),
            Case("cvt.u64.u16 {d}, {b};", "b64", lambda a, b: b & 0xFFFF),
        ],
    )


def float_inputs(t):
    x = floats(t, 1)[0].tolist()
    if t == "f32":
        extra = (
            "0.5 1.5 2.5 -0.5 -1.5 126.5 127.5 128.0 255.5 32767.5 65535.5 2147483520.0 2147483648.0 "
            "4294967040.0 4294967296.0 -2147483648.0 -2147483904.0 9.2e18 9.3e18 1.8e19 1.9e19 -9.3e18"
        ).split()
        x += [int(v) for v in np.array(extra, np.float32).view(np.uint32)]
    if t == "f64":
        extra = (
            "0.5 1.5 -2.5 2147483647.5 4294967295.5 -2147483648.5 9223372036854775807.0 "
            "1.8446744073709552e19 -9223372036854775808.0 127.5 255.5"
        ).split()
        x += [int(v) for v in np.array(extra, np.float64).view(np.uint64)]
    return x


def to_integer(f, t, mode, bits):
    if is_nan(f, bits):
        return 0
    if is_inf(f, bits):
        return limits(t)[bits & f.sign == 0]
    return clamp(t, exact.to_integer(f, bits, mode))


def test_floats_become_integers_in_every_mode():
    for source in ("f16", "bf16", "f32", "f64"):
        f = FORMATS[source]
        values = [x for x in float_inputs(source) if not is_nan(f, x)]
        cases = []
        for target in INTEGERS:
            if source == "bf16" and INTEGERS[target][1] == 8:
                continue  # not in PTX
            for mode in ("rni", "rzi", "rmi", "rpi"):
                result = REGISTER[INTEGERS[target][1]]
                cases.append(
                    Case(
                        f"cvt.{mode}.{target}.{source} {{d}}, {{a}};",
                        result,
                        lambda a, f=f, t=target, m=mode: write(t, to_integer(f, t, m, a)),
                    )
                )
        check({"a": (REGISTER[f.width], values)}, cases, version="7.8")


def test_what_a_nan_becomes():
    """0 from f32 and halves to at most 32 bits; the sign bit alone from f64 or to 64 bits."""
    for source in ("f16", "bf16", "f32", "f64"):
        f = FORMATS[source]
        nan = f.inf | 1 << (f.mantissa - 1)
        cases = []
        for t, (_, w) in INTEGERS.items():
            if w >= {"bf16": 16, "f64": 32}.get(source, 8):
                want = 1 << (w - 1) if source == "f64" or w == 64 else 0
                cases.append(Case(f"cvt.rzi.{t}.{source} {{d}}, {{a}};", REGISTER[w], lambda a, x=want: x))
        check({"a": (REGISTER[f.width], [nan, nan | 1, f.sign | nan])}, cases)


def test_nans_between_floats():
    check(
        {"a": ("b32", [0x7FC00000, 0xFFC12345, 0x7F800001])},
        [Case("cvt.f64.f32 {d}, {a};", "b64", lambda a: (a >> 31) << 63 | 0x7FF8000000000000 | (a & 0x7FFFFF) << 29)],
    )
    check(
        {"a": ("b64", [0x7FF8000000000000, 0xFFF8000000000123, 0x7FF0000000000001])},
        [Case("cvt.rn.f32.f64 {d}, {a};", "b32", lambda a: (a >> 63) << 31 | 0x7FC00000 | a >> 29 & 0x7FFFFF)],
    )


def test_integers_become_floats_in_every_mode():
    for source in ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"):
        s, w = INTEGERS[source]
        values = integers(max(w, 16), 1)[0].tolist()
        if w == 64:
            near = (-1, 1, 1 << 36, (1 << 36) + 1)
            values += [(1 << k) + d & (1 << 64) - 1 for k in (24, 25, 53, 54, 60, 63) for d in near]
        cases = []
        for target, f in FORMATS.items():
            if target == "bf16" and w == 8:
                continue
            for mode in ("rn", "rz", "rm", "rp"):
                cases.append(
                    Case(
                        f"cvt.{mode}.{target}.{source} {{d}}, {{a}};",
                        REGISTER[f.width],
                        lambda a, f=f, s=source, m=mode: exact.rounded(f, Fraction(read(s, a)), m),
                    )
                )
        check({"a": (REGISTER[w], values)}, cases, version="7.8")


def test_floats_of_fewer_bits_in_every_mode():
    for source, targets in {
        "f64": ("f32", "f16", "bf16"),
        "f32": ("f16", "bf16"),
        "f16": ("bf16",),
        "bf16": ("f16",),
    }.items():
        f = FORMATS[source]
        values = float_inputs(source)
        if source == "f64":  # around f32's and f16's limits and ties
            near = [
                1 + 2.0**-24,
                1 + 2.0**-24 + 2.0**-50,
                2.0**-149,
                2.0**-150,
                1e-45,
                65519.999,
                65520.0,
                1 + 2.0**-11,
                1 + 2.0**-11 + 2.0**-45,
            ]
            values += [int(x) for x in np.array(near).view(np.uint64)]
        cases = []
        for target in targets:
            modes = ("rn", "rz") if source == "f32" and target == "bf16" else ("rn", "rz", "rm", "rp")
            for mode in modes:
                cases.append(
                    Case(
                        f"cvt.{mode}.{target}.{source} {{d}}, {{a}};",
                        REGISTER[FORMATS[target].width],
                        lambda a, f=f, g=FORMATS[target], m=mode: exact.convert(f, g, a, m),
                    )
                )
        check({"a": (REGISTER[f.width], values)}, cases, version="7.8")


def test_floats_of_more_bits_are_exact():
    for source, target in (("f16", "f32"), ("bf16", "f32"), ("f16", "f64"), ("bf16", "f64"), ("f32", "f64")):
        f, g = FORMATS[source], FORMATS[target]
        numbers = [x for x in float_inputs(source) if not is_nan(f, x)]
        check(
            {"a": (REGISTER[f.width], numbers)},
            [
                Case(
                    f"cvt.{target}.{source} {{d}}, {{a}};",
                    REGISTER[g.width],
                    lambda a, f=f, g=g: exact.convert(f, g, a),
                )
            ],
            version="7.8",
        )


def test_nans_of_halves_become_single_precision():
    check({"a": ("b16", [0x7E00, 0xFE01, 0x7C01])}, [Case("cvt.f32.f16 {d}, {a};", "b32", lambda a: 0x7FFFFFFF)])
    bf16 = {"a": ("b16", [0x7FC0, 0xFFC1, 0x7F81])}
    check(bf16, [Case("cvt.f32.bf16 {d}, {a};", "b32", lambda a: a << 16)], version="7.8")


def test_rounding_to_integral_values():
    for t in ("f16", "f32", "f64"):
        f = FORMATS[t]
        numbers = [x for x in float_inputs(t) if not is_nan(f, x)]
        check(
            {"a": (REGISTER[f.width], numbers)},
            [
                Case(f"cvt.{m}.{t}.{t} {{d}}, {{a}};", REGISTER[f.width], lambda a, f=f, m=m: exact.integral(f, a, m))
                for m in ("rni", "rzi", "rmi", "rpi")
            ],
        )


def saturated(f, bits):
    one = exact.rounded(f, Fraction(1))
    return 0 if is_nan(f, bits) or bits & f.sign else min(bits, one)


def test_saturation_and_flushing():
    check(
        {"a": ("b32", float_inputs("f32"))},
        [
            Case("cvt.sat.f32.f32 {d}, {a};", "b32", lambda a: saturated(F32, a)),
            Case("cvt.ftz.f32.f32 {d}, {a};", "b32", lambda a: F32.nan if is_nan(F32, a) else flush(F32, a)),
            Case("cvt.rn.sat.f16.f32 {d}, {a};", "b16", lambda a: exact.convert(F32, F16, saturated(F32, a))),
            Case(
                "cvt.rpi.ftz.s32.f32 {d}, {a};",
                "b32",
                lambda a: 0 if is_nan(F32, a) else to_integer(F32, "s32", "rpi", flush(F32, a)),
            ),
        ],
    )
    numbers = [x for x in float_inputs("f32") if not is_nan(F32, x)]
    check(
        {"a": ("b32", numbers)},
        [Case("cvt.ftz.f64.f32 {d}, {a};", "b64", lambda a: exact.convert(F32, FORMATS["f64"], flush(F32, a)))],
    )
    check(
        {"a": ("b64", float_inputs("f64"))},
        [
            Case("cvt.rn.ftz.f32.f64 {d}, {a};", "b32", lambda a: flush(F32, exact.convert(FORMATS["f64"], F32, a))),
            Case(
                "cvt.rn.sat.f32.f64 {d}, {a};", "b32", lambda a: saturated(F32, exact.convert(FORMATS["f64"], F32, a))
            ),
        ],
    )


# ---------------------------------------------------------------- packed halves, tf32


def relu(f, bits):
    return 0 if bits & f.sign and not is_nan(f, bits) else bits


def finite(f, bits):
    return bits - 1 if is_inf(f, bits) else bits


def pair_inputs():
    a, b = floats("f32", 2)
    return {"a": ("b32", a), "b": ("b32", b)}


def test_two_floats_into_packed_halves():
    cases = []
    for t, f in (("f16", F16), ("bf16", BF16)):
        for m in ("rn", "rz"):
            c = lambda x, f=f, m=m: exact.convert(F32, f, x, m)  # noqa: E731
            cases += [
                Case(f"cvt.{m}.{t}x2.f32 {{d}}, {{a}}, {{b}};", "b32", lambda a, b, c=c: c(a) << 16 | c(b)),
                Case(
                    f"cvt.{m}.relu.{t}x2.f32 {{d}}, {{a}}, {{b}};",
                    "b32",
                    lambda a, b, c=c, f=f: relu(f, c(a)) << 16 | relu(f, c(b)),
                ),
                Case(f"cvt.{m}.relu.{t}.f32 {{d}}, {{a}};", "b16", lambda a, b, c=c, f=f: relu(f, c(a))),
            ]
    check(pair_inputs(), cases)


def test_finite_saturation_of_halves():
    cases = []
    for t, f in (("f16", F16), ("bf16", BF16)):
        c = lambda x, f=f: finite(f, exact.convert(F32, f, x, "rn"))  # noqa: E731
        cases += [
            Case(f"cvt.rn.satfinite.{t}x2.f32 {{d}}, {{a}}, {{b}};", "b32", lambda a, b, c=c: c(a) << 16 | c(b)),
            Case(f"cvt.rn.relu.satfinite.{t}.f32 {{d}}, {{a}};", "b16", lambda a, b, c=c, f=f: relu(f, c(a))),
        ]
    check(pair_inputs(), cases, version="8.1")


TF32 = exact.Format(8, 10, 0x3FFFF)


def tf32(mode):
    def apply(a):
        if is_nan(F32, a):
            return a & 0xFFFFE000 if mode == "rna" else F32.nan & 0xFFFFE000
        return exact.convert(F32, TF32, a, mode) << 13

    return apply


def test_tf32():
    (a,) = floats("f32", 1)
    ties = [0x3F801000, 0x3F803000, 0x3F801001, 0xBF801000, 0x7F7FF000, 0x7F7FFFFF, 0x00001000]
    ties += [0x7FFFFFFF, 0xFFFFFFFF, 0x7FC01000, 0x7F801000, 0x7F800FFF, 0xFFBFFFFF]
    check({"a": ("b32", a.tolist() + ties)}, [Case("cvt.rna.tf32.f32 {d}, {a};", "b32", tf32("rna"))])
    check(
        {"a": ("b32", a.tolist() + ties)},
        [
            Case("cvt.rn.tf32.f32 {d}, {a};", "b32", tf32("rn")),
            Case("cvt.rz.tf32.f32 {d}, {a};", "b32", tf32("rz")),
            Case("cvt.rn.relu.tf32.f32 {d}, {a};", "b32", lambda a: relu(F32, tf32("rn")(a))),
        ],
    )


def test_finite_tf32():
    (a,) = floats("f32", 1)
    numbers = [x for x in a.tolist() if not is_nan(F32, x)] + [0x7F7FF000, 0x7F7FFFFF, 0xFF7FF000]
    limit = lambda x: x - 0x2000 if is_inf(F32, x) else x  # noqa: E731
    check(
        {"a": ("b32", numbers)},
        [Case("cvt.rna.satfinite.tf32.f32 {d}, {a};", "b32", lambda a: limit(tf32("rna")(a)))],
        version="8.1",
    )


def test_stochastic_rounding_of_sm_100():
    a, b = floats("f32", 2)
    random = random_bits(32, len(a), 9)
    up = lambda x, r: 0x7FFF if is_nan(F32, x) else x + r >> 16  # noqa: E731
    check(
        {"a": ("b32", a), "b": ("b32", b), "r": ("b32", random)},
        [
            Case(
                "cvt.rs.bf16x2.f32 {d}, {a}, {b}, {r};",
                "b32",
                lambda a, b, r: up(a, r >> 16) << 16 | up(b, r & 0xFFFF),
                target="sm_100a",
            )
        ],
        version="8.7",
    )


def test_stochastic_rounding_to_f16():
    """13 random bits; a result between the largest number and 2**16 may carry to infinity, or stay."""
    a, b = floats("f32", 2)
    edge = [0x477FE001, 0x477FFFFF, 0xC77FF000, 0x47800000, 0x33800001, 0x387FFFFF, 0x36000000, 0x31000000]
    a, b = edge + a.tolist(), b.tolist() + edge
    random = [0x1FFF1FFF, 0, 0xE000E000, 0x10001000, *random_bits(32, len(a), 10)][: len(a)]

    def half(x, r, limit):
        if is_nan(F32, x):
            return 0x7FFF
        largest = Fraction(65504)
        v = Fraction(1 << 17) if is_inf(F32, x) else abs(exact.value(F32, x))
        low = exact.rounded(F16, min(v, largest), "rz")  # code of the neighbour towards zero
        if v >= 1 << 16:
            low = 0x7C00
        else:
            above = Fraction(1 << 16) if low == 0x7BFF else exact.value(F16, low + 1)
            low += (v - exact.value(F16, low)) / (above - exact.value(F16, low)) + Fraction(r & 0x1FFF, 1 << 13) >= 1
        low = min(low, 0x7BFF) if limit else low
        return low | (0x8000 if x & F32.sign else 0)

    cases = [Case(f"cvt.rs{flag}.f16x2.f32 {{d}}, {{a}}, {{b}}, {{r}};", "b32",
                  lambda a, b, r, limit=limit: half(a, r >> 16, limit) << 16 | half(b, r & 0xFFFF, limit),
                  target="sm_100a") for flag, limit in (("", False), (".satfinite", True))]  # fmt: skip
    check({"a": ("b32", a), "b": ("b32", b), "r": ("b32", random)}, cases, version="8.7")


# ---------------------------------------------------------------- cvt.pack, mov


def test_saturating_packs():
    a, b, c = integers(32, 3)
    cases = [
        Case(
            f"cvt.pack.sat.{t}.s32 {{d}}, {{a}}, {{b}};",
            "b32",
            lambda a, b, c, t=t: (clamp(t, signed(a, 32)) & 0xFFFF) << 16 | clamp(t, signed(b, 32)) & 0xFFFF,
        )
        for t in ("u16", "s16")
    ]
    cases += [
        Case(
            f"cvt.pack.sat.{t}.s32.b32 {{d}}, {{a}}, {{b}}, {{c}};",
            "b32",
            lambda a, b, c, t=t: c << 16 | (clamp(t, signed(a, 32)) & 255) << 8 | clamp(t, signed(b, 32)) & 255,
        )
        for t in ("u8", "s8")
    ]
    check({"a": ("b32", a), "b": ("b32", b), "c": ("b32", c)}, cases)
