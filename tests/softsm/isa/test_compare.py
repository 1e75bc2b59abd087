"""Comparison and selection."""

import operator

import numpy as np
from exact import BF16, F16, F32, F64, flush, is_inf, is_nan, value
from silicon import Case, check
from values import floats, integers, signed

ORDER = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
UNSIGNED = {"lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge}


def test_integer_comparisons():
    for w in (16, 32, 64):
        a, b = integers(w, 2)
        cases = []
        for name, f in ORDER.items():
            cases.append(Case(f"setp.{name}.u{w} {{d}}, {{a}}, {{b}};", "pred", f))
            cases.append(
                Case(
                    f"setp.{name}.s{w} {{d}}, {{a}}, {{b}};",
                    "pred",
                    lambda a, b, f=f, w=w: f(signed(a, w), signed(b, w)),
                )
            )
        cases += [Case(f"setp.{name}.u{w} {{d}}, {{a}}, {{b}};", "pred", f) for name, f in UNSIGNED.items()]
        cases += [Case(f"setp.{name}.b{w} {{d}}, {{a}}, {{b}};", "pred", ORDER[name]) for name in ("eq", "ne")]
        check({"a": (f"b{w}", a), "b": (f"b{w}", b)}, cases)


def number(f, bits):
    if is_inf(f, bits):
        return float("-inf") if bits & f.sign else float("inf")
    return value(f, bits)


def float_comparison(f, name, flushes=False):
    """Ordered comparisons are false for NaN, those ending in u true."""

    def compare(a, b):
        nan = is_nan(f, a) or is_nan(f, b)
        if name in ("num", "nan"):
            return nan == (name == "nan")
        if nan:
            return name.endswith("u")
        a, b = (flush(f, x) if flushes else x for x in (a, b))
        return ORDER[name.removesuffix("u")](number(f, a), number(f, b))

    return compare


NAMES = [*ORDER, "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"]


def test_float_comparisons():
    for t, f in (("f32", F32), ("f64", F64)):
        a, b = floats(t, 2, more=[0x7FF8000000000000] if t == "f64" else None)
        kind = "b64" if t == "f64" else "b32"
        check(
            {"a": (kind, a), "b": (kind, b)},
            [Case(f"setp.{n}.{t} {{d}}, {{a}}, {{b}};", "pred", float_comparison(f, n)) for n in NAMES],
        )


def test_comparisons_with_flushed_operands():
    a, b = floats("f32", 2)
    check(
        {"a": ("b32", a), "b": ("b32", b)},
        [
            Case(f"setp.{n}.ftz.f32 {{d}}, {{a}}, {{b}};", "pred", float_comparison(F32, n, True))
            for n in ("eq", "lt", "geu", "ne")
        ],
    )


def test_half_comparisons():
    for t, f in (("f16", F16), ("bf16", BF16)):
        a, b = floats(t, 2)
        cases = [Case(f"setp.{n}.{t} {{d}}, {{a}}, {{b}};", "pred", float_comparison(f, n)) for n in NAMES]
        check({"a": ("b16", a), "b": ("b16", b)}, cases, version="7.8")


def test_packed_halves_give_two_predicates():
    a, b = floats("f16", 2)
    pack = lambda x: x.astype(np.uint64) | np.roll(x, 5).astype(np.uint64) << np.uint64(16)  # noqa: E731
    low = lambda n: lambda a, b: float_comparison(F16, n)(a & 0xFFFF, b & 0xFFFF)  # noqa: E731
    high = lambda n: lambda a, b: float_comparison(F16, n)(a >> 16, b >> 16)  # noqa: E731
    check(
        {"a": ("b32", pack(a)), "b": ("b32", pack(b))},
        [
            Case("{{ .reg .pred q; setp.lt.f16x2 {d}|q, {a}, {b}; }}", "pred", low("lt")),
            Case("{{ .reg .pred p; setp.lt.f16x2 p|{d}, {a}, {b}; }}", "pred", high("lt")),
            Case("{{ .reg .pred p; setp.neu.f16x2 p|{d}, {a}, {b}; }}", "pred", high("neu")),
        ],
    )


def test_combination_with_a_predicate_and_the_second_destination():
    a, b = integers(32, 2)
    less = lambda a, b: signed(a, 32) < signed(b, 32)  # noqa: E731
    odd = lambda a: a & 1 == 1  # noqa: E731
    start = "{{ .reg .pred p, q; .reg .b32 t; and.b32 t, {a}, 1; setp.eq.u32 q, t, 1; "
    check(
        {"a": ("b32", a), "b": ("b32", b)},
        [
            Case(start + "setp.lt.and.s32 {d}, {a}, {b}, q; }}", "pred", lambda a, b: less(a, b) and odd(a)),
            Case(start + "setp.lt.or.s32 {d}, {a}, {b}, !q; }}", "pred", lambda a, b: less(a, b) or not odd(a)),
            Case(start + "setp.lt.xor.s32 {d}, {a}, {b}, q; }}", "pred", lambda a, b: less(a, b) != odd(a)),
            Case(start + "setp.lt.and.s32 p|{d}, {a}, {b}, q; }}", "pred", lambda a, b: not less(a, b) and odd(a)),
            Case(start + "setp.lt.or.s32 {d}|p, {a}, {b}, q; }}", "pred", lambda a, b: less(a, b) or odd(a)),
            Case(start + "setp.lt.s32 p|{d}, {a}, {b}; }}", "pred", lambda a, b: not less(a, b)),
        ],
    )


def test_a_guard_may_be_overwritten():
    a, b = integers(32, 2)
    start = "{{ .reg .pred p, q; setp.lt.u32 p, {a}, {b}; setp.ne.u32 q, {a}, {a}; "
    check(
        {"a": ("b32", a), "b": ("b32", b)},
        [
            Case(start + "@p setp.lt.u32 p|q, {b}, {a}; mov.pred {d}, q; }}", "pred", lambda a, b: a < b),
            Case(start + "@p setp.lt.u32 q|p, {b}, {a}; mov.pred {d}, p; }}", "pred", lambda a, b: a < b),
            Case(start + "@!p setp.lt.u32 p, {b}, {a}; mov.pred {d}, p; }}", "pred", lambda a, b: a < b or b < a),
        ],
    )


def test_set_writes_a_number():
    a, b = floats("f32", 2)
    less, equal = float_comparison(F32, "lt"), float_comparison(F32, "equ")
    check(
        {"a": ("b32", a), "b": ("b32", b)},
        [
            Case("set.lt.u32.f32 {d}, {a}, {b};", "b32", lambda a, b: 0xFFFFFFFF * less(a, b)),
            Case("set.lt.f32.f32 {d}, {a}, {b};", "b32", lambda a, b: 0x3F800000 * less(a, b)),
            Case("set.equ.s32.f32 {d}, {a}, {b};", "b32", lambda a, b: 0xFFFFFFFF * equal(a, b)),
            Case("set.lt.f32.s32 {d}, {a}, {b};", "b32", lambda a, b: 0x3F800000 * (signed(a, 32) < signed(b, 32))),
            Case("set.hi.u32.u32 {d}, {a}, {b};", "b32", lambda a, b: 0xFFFFFFFF * (a > b)),
            Case(
                "{{ .reg .pred q; setp.ne.u32 q, {b}, 0; set.lt.and.u32.u32 {d}, {a}, {b}, q; }}",
                "b32",
                lambda a, b: 0xFFFFFFFF * (a < b and b != 0),
            ),
        ],
    )
    a, b = floats("f16", 2)
    half = float_comparison(F16, "ge")
    check(
        {"a": ("b16", a), "b": ("b16", b)},
        [
            Case("set.ge.f16.f16 {d}, {a}, {b};", "b16", lambda a, b: 0x3C00 * half(a, b)),
            Case("set.ge.u16.f16 {d}, {a}, {b};", "b16", lambda a, b: 0xFFFF * half(a, b)),
            Case("set.ge.u32.f16 {d}, {a}, {b};", "b32", lambda a, b: 0xFFFFFFFF * half(a, b)),
        ],
    )


def test_set_of_packed_halves():
    a, b = floats("bf16", 2)
    pack = lambda x: x.astype(np.uint64) | np.roll(x, 3).astype(np.uint64) << np.uint64(16)  # noqa: E731
    f = float_comparison(BF16, "le")
    both = lambda one: lambda a, b: one * f(a & 0xFFFF, b & 0xFFFF) | one * f(a >> 16, b >> 16) << 16  # noqa: E731
    check(
        {"a": ("b32", pack(a)), "b": ("b32", pack(b))},
        [
            Case("set.le.bf16x2.bf16x2 {d}, {a}, {b};", "b32", both(0x3F80)),
            Case("set.le.u32.bf16x2 {d}, {a}, {b};", "b32", both(0xFFFF)),
        ],
        version="7.8",
    )


def test_selection():
    a, b = integers(32, 2)
    wide = {"c": ("b64", a << np.uint64(7)), "d_": ("b64", b << np.uint64(9))}
    less = "{{ .reg .pred p; setp.lt.s32 p, {a}, {b}; "
    chosen = lambda a, b: signed(a, 32) < signed(b, 32)  # noqa: E731
    check(
        {"a": ("b32", a), "b": ("b32", b), **wide},
        [
            Case(less + "selp.b32 {d}, {a}, {b}, p; }}", "b32", lambda a, b, c, e: a if chosen(a, b) else b),
            Case(
                less + "selp.f32 {d}, 0f3F800000, {b}, p; }}",
                "b32",
                lambda a, b, c, e: 0x3F800000 if chosen(a, b) else b,
            ),
            Case(less + "selp.s32 {d}, -1, 0, !p; }}", "b32", lambda a, b, c, e: 0 if chosen(a, b) else 0xFFFFFFFF),
            Case(less + "selp.b64 {d}, {c}, {d_}, p; }}", "b64", lambda a, b, c, e: c if chosen(a, b) else e),
            Case(less + "selp.b16 {d}, -1, 5, p; }}", "b16", lambda a, b, c, e: 0xFFFF if chosen(a, b) else 5),
            Case("slct.u32.s32 {d}, {a}, {b}, {a};", "b32", lambda a, b, c, e: a if signed(a, 32) >= 0 else b),
            Case("slct.b64.s32 {d}, {c}, {d_}, {b};", "b64", lambda a, b, c, e: c if signed(b, 32) >= 0 else e),
        ],
    )


def test_selection_by_the_sign_of_a_float():
    (c,) = floats("f32", 1)
    positive = lambda c: not is_nan(F32, c) and (not c & 0x80000000 or c == 0x80000000)  # noqa: E731
    check(
        {"c": ("b32", c)},
        [
            Case("slct.u32.f32 {d}, 1, 2, {c};", "b32", lambda c: 1 if positive(c) else 2),
            Case("slct.ftz.u32.f32 {d}, 1, 2, {c};", "b32", lambda c: 1 if positive(flush(F32, c)) else 2),
        ],
    )
