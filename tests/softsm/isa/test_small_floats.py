"""Floats of 8, 6 and 4 bits and exponents against rational numbers."""

import bisect
import functools
from fractions import Fraction

import exact
import numpy as np
from exact import BF16, F16, F32, is_inf, is_nan
from silicon import Case, check
from values import floats, ordinary_floats, random_bits


def relu(f, bits):
    return 0 if bits & f.sign and not is_nan(f, bits) else bits


blackwell = functools.partial(Case, target="sm_100a")
E4M3, E5M2 = exact.Format(4, 3, 0x7F), exact.Format(5, 2, 0x7F)
# exponent and mantissa bits, bias, largest code
SMALL = {"e2m3": (2, 3, 1, 0x1F), "e3m2": (3, 2, 3, 0x1F), "e2m1": (2, 1, 1, 7)}


@functools.cache
def small_values(name):
    """Value of every non-negative code of a format without infinities."""
    if name == "e4m3":
        e, m, bias, top = 4, 3, 7, 0x7E
    elif name == "e5m2":
        e, m, bias, top = 5, 2, 15, 0x7B
    else:
        e, m, bias, top = SMALL[name]
    out = []
    for code in range(top + 1):
        exponent, mantissa = code >> m, code & ((1 << m) - 1)
        significand = mantissa + ((1 << m) if exponent else 0)
        out.append(Fraction(significand) * Fraction(2) ** (max(exponent, 1) - bias - m))
    return out


def to_small(name, x):
    """Nearest code, ties to the even one; beyond the largest: the largest."""
    values, sign = small_values(name), sign_of(name)
    if is_nan(F32, x):
        return 0x7F if name in ("e4m3", "e5m2") else len(values) - 1
    s = sign if x & F32.sign else 0
    if is_inf(F32, x):
        return s | (len(values) - 1)
    v = abs(exact.value(F32, x))
    above = min(bisect.bisect_left(values, v), len(values) - 1)
    return s | min((max(above - 1, 0), above), key=lambda k: (abs(values[k] - v), k & 1))


def small_inputs():
    rng = np.random.default_rng(11)
    some = (rng.standard_normal(200) * 2.0 ** rng.integers(-12, 10, 200)).astype(np.float32)
    ties = np.array(
        [
            0.25,
            0.75,
            1.25,
            1.75,
            2.5,
            3.5,
            5.0,
            6.5,
            7.25,
            7.75,
            0.0625,
            0.03125,
            464.0,
            448.0,
            480.0,
            57344.0,
            61440.0,
            28.0,
            30.0,
            2.0**-10,
            2.0**-9,
            2.0**-17,
            1.5 * 2.0**-17,
        ],
        np.float32,
    )
    a = [int(v) for v in np.concatenate([some, ties, -ties]).view(np.uint32)] + floats("f32", 1)[0].tolist()
    return {"a": ("b32", a), "b": ("b32", a[::-1])}


def test_two_floats_into_eight_bits():
    cases = []
    for t in ("e4m3", "e5m2"):
        cases += [
            Case(
                f"cvt.rn.satfinite.{t}x2.f32 {{d}}, {{a}}, {{b}};",
                "b16",
                lambda a, b, t=t: to_small(t, a) << 8 | to_small(t, b),
            ),
            Case(
                f"cvt.rn.satfinite.relu.{t}x2.f32 {{d}}, {{a}}, {{b}};",
                "b16",
                lambda a, b, t=t: to_small(t, relu(F32, a)) << 8 | to_small(t, relu(F32, b)),
            ),
        ]
    check(small_inputs(), cases, version="8.1")


def test_packed_halves_into_eight_bits():
    halves = ordinary_floats("f16", 100, 3) + random_bits(16, 100, 4)
    wide = lambda h: exact.convert(F16, F32, h)  # noqa: E731
    check(
        {"a": ("b32", [x | y << 16 for x, y in zip(halves, halves[::-1])])},
        [
            Case(
                f"cvt.rn.satfinite.{t}x2.f16x2 {{d}}, {{a}};",
                "b16",
                lambda a, t=t: to_small(t, wide(a >> 16)) << 8 | to_small(t, wide(a & 0xFFFF)),
            )
            for t in ("e4m3", "e5m2")
        ],
        version="8.1",
    )


def from_small(name, code):
    sign = {"e4m3": 0x80, "e5m2": 0x80, "e2m1": 8}.get(name, 0x20)
    magnitude, negative = code & (sign - 1), bool(code & sign)
    values = small_values(name)
    if magnitude >= len(values):
        if name == "e5m2" and magnitude == 0x7C:
            return F16.inf | (0x8000 if negative else 0)
        return F16.nan
    v = values[magnitude]
    return exact.rounded(F16, -v if negative else v, "rn", negative)


def test_eight_bits_into_packed_halves():
    codes = {"a": ("b16", [x | (255 - x) << 8 for x in range(256)])}
    cases = []
    for t in ("e4m3", "e5m2"):
        g = lambda c, t=t: from_small(t, c)  # noqa: E731
        cases += [
            Case(f"cvt.rn.f16x2.{t}x2 {{d}}, {{a}};", "b32", lambda a, g=g: g(a >> 8) << 16 | g(a & 255)),
            Case(
                f"cvt.rn.relu.f16x2.{t}x2 {{d}}, {{a}};",
                "b32",
                lambda a, g=g: relu(F16, g(a >> 8)) << 16 | relu(F16, g(a & 255)),
            ),
        ]
    check(codes, cases, version="8.1")


def test_six_and_four_bits_of_sm_100():
    cases = []
    for t in ("e2m3", "e3m2"):
        cases.append(
            blackwell(
                f"cvt.rn.satfinite.{t}x2.f32 {{d}}, {{a}}, {{b}};",
                "b16",
                lambda a, b, t=t: to_small(t, a) << 8 | to_small(t, b),
            )
        )
    cases.append(
        blackwell(
            "{{ .reg .b8 t; cvt.rn.satfinite.e2m1x2.f32 t, {a}, {b}; cvt.u16.u8 {d}, t; }}",
            "b16",
            lambda a, b: to_small("e2m1", a) << 4 | to_small("e2m1", b),
        )
    )
    check(small_inputs(), cases, version="8.6")
    g = from_small
    check(
        {"a": ("b16", [x | (63 - x) << 8 for x in range(64)])},
        [
            blackwell(f"cvt.rn.f16x2.{t}x2 {{d}}, {{a}};", "b32", lambda a, t=t: g(t, a >> 8) << 16 | g(t, a & 63))
            for t in ("e2m3", "e3m2")
        ]
        + [
            blackwell(
                "{{ .reg .b8 t; cvt.u8.u16 t, {a}; cvt.rn.f16x2.e2m1x2 {d}, t; }}",
                "b32",
                lambda a: g("e2m1", a >> 4 & 15) << 16 | g("e2m1", a & 15),
            )
        ],
        version="8.6",
    )


def test_small_floats_and_bf16_of_sm_100():
    """What Triton 3.9 converts fp8 and fp4 with for Blackwell."""
    pairs = ordinary_floats("bf16", 100, 5) + random_bits(16, 100, 6)
    packed = {"a": ("b32", [x | y << 16 for x, y in zip(pairs, pairs[::-1])])}
    wide = lambda h: exact.convert(BF16, F32, h)  # noqa: E731
    check(
        packed,
        [
            blackwell(
                f"cvt.rn.satfinite.{t}x2.bf16x2 {{d}}, {{a}};",
                "b16",
                lambda a, t=t: to_small(t, wide(a >> 16)) << 8 | to_small(t, wide(a & 0xFFFF)),
            )
            for t in ("e4m3", "e5m2", "e2m3", "e3m2")
        ]
        + [
            blackwell(
                "{{ .reg .b8 t; cvt.rn.satfinite.relu.e2m1x2.bf16x2 t, {a}; cvt.u16.u8 {d}, t; }}",
                "b16",
                lambda a: (
                    to_small("e2m1", relu(F32, wide(a >> 16))) << 4 | to_small("e2m1", relu(F32, wide(a & 0xFFFF)))
                ),
            )
        ],
        version="9.1",
    )

    def back(name, code):
        return exact.convert(F16, BF16, from_small(name, code))

    codes = {"a": ("b16", [x | (255 - x) << 8 for x in range(256)])}
    check(
        codes,
        [
            blackwell(
                f"cvt.rn.bf16x2.{t}x2 {{d}}, {{a}};", "b32", lambda a, t=t: back(t, a >> 8) << 16 | back(t, a & 255)
            )
            for t in ("e4m3", "e5m2")
        ]
        + [
            blackwell(
                "{{ .reg .b8 t; cvt.u8.u16 t, {a}; cvt.rn.bf16x2.e2m1x2 {d}, t; }}",
                "b32",
                lambda a: back("e2m1", a >> 4 & 15) << 16 | back("e2m1", a & 15),
            ),
            blackwell(
                "cvt.rn.relu.bf16x2.e4m3x2 {d}, {a};",
                "b32",
                lambda a: relu(BF16, back("e4m3", a >> 8)) << 16 | relu(BF16, back("e4m3", a & 255)),
            ),
        ],
        version="9.1",
    )


def test_exponents_of_sm_100():
    def code(x, up):
        if is_nan(F32, x):
            return 0xFF
        if is_inf(F32, x):
            return 0xFE
        v = abs(exact.value(F32, x))
        k = 0
        while k < 254 and (Fraction(2) ** (k - 127) < v if up else Fraction(2) ** (k + 1 - 127) <= v):
            k += 1
        return k

    check(
        small_inputs(),
        [
            blackwell(
                f"cvt.{m}.satfinite.ue8m0x2.f32 {{d}}, {{a}}, {{b}};",
                "b16",
                lambda a, b, m=m: code(a, m == "rp") << 8 | code(b, m == "rp"),
            )
            for m in ("rz", "rp")
        ],
        version="8.6",
    )
    back = lambda k: 0x7FFF if k == 255 else exact.rounded(BF16, Fraction(2) ** (k - 127))  # noqa: E731
    check(
        {"a": ("b16", [x | (255 - x) << 8 for x in range(256)])},
        [blackwell("cvt.rn.bf16x2.ue8m0x2 {d}, {a};", "b32", lambda a: back(a >> 8) << 16 | back(a & 255))],
        version="8.6",
    )


# ---------------------------------------------------------------- stochastic rounding


def stochastic(name, x, random):
    """Away from zero where the place of |x| between its neighbours, plus random / 2**16, reaches 1."""
    if is_nan(F32, x) or is_inf(F32, x):
        return to_small(name, x)
    values, v = small_values(name), abs(exact.value(F32, x))
    i = bisect.bisect_right(values, v) - 1
    if i + 1 < len(values) and (v - values[i]) / (values[i + 1] - values[i]) + Fraction(random, 1 << 16) >= 1:
        i += 1
    return i | (sign_of(name) if x & F32.sign else 0)


def sign_of(name):
    return {"e4m3": 0x80, "e5m2": 0x80, "e2m1": 8}.get(name, 0x20)


def reverse16(x):
    return int(f"{x:016b}"[::-1], 2)


def slices(name, word):
    """Random bits of a, b, e and f. B200s read them so with e4m3x4 and e2m1x4."""
    if name == "e2m1":  # bytes 3 and 1 for a and b, 2 and 0 for e and f
        high, low = word >> 24 << 8 | word >> 8 & 0xFF, (word >> 16 & 0xFF) << 8 | word & 0xFF
    else:
        high, low = word >> 16, word & 0xFFFF
    return reverse16(high), high, reverse16(low), low


def test_four_stochastic_roundings():
    inputs = small_inputs()
    a = inputs["a"][1]
    count = len(a)
    names = {"a": a, "b": a[::-1], "e": a[7:] + a[:7], "f": a[count // 2 :] + a[: count // 2]}
    words = [0, 0xFFFFFFFF, 0x80000001, 0xFFFF0000, 0x00FF00FF, *random_bits(32, count, 21)][:count]
    cases = []
    for t in ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1"):
        bits = 4 if t == "e2m1" else 8
        for flag in ("", ".relu"):

            def want(a, b, e, f, r, t=t, bits=bits, flag=flag):
                values = [relu(F32, x) if flag else x for x in (a, b, e, f)]
                codes = [stochastic(t, x, random) for x, random in zip(values, slices(t, r))]
                return sum(code << bits * (3 - i) for i, code in enumerate(codes))

            text = f"cvt.rs{flag}.satfinite.{t}x4.f32 {{d}}, {{{{{{a}}, {{b}}, {{e}}, {{f}}}}}}, {{r}};"
            cases.append(blackwell(text, "b16" if bits == 4 else "b32", want))
    check({**{k: ("b32", v) for k, v in names.items()}, "r": ("b32", words)}, cases, version="8.7")
