"""Logic, shifts and byte permutation against Python's integers."""

from silicon import Case, check
from values import integers, signed


def inputs(width, arity):
    return {name: (f"b{width}", x) for name, x in zip("abc", integers(width, arity))}


def test_bitwise_operations():
    for w in (16, 32, 64):
        check(
            inputs(w, 2),
            [
                Case(f"and.b{w} {{d}}, {{a}}, {{b}};", f"b{w}", lambda a, b: a & b),
                Case(f"or.b{w} {{d}}, {{a}}, {{b}};", f"b{w}", lambda a, b: a | b),
                Case(f"xor.b{w} {{d}}, {{a}}, {{b}};", f"b{w}", lambda a, b: a ^ b),
                Case(f"not.b{w} {{d}}, {{a}};", f"b{w}", lambda a, b: ~a),
                Case(f"cnot.b{w} {{d}}, {{a}};", f"b{w}", lambda a, b: a == 0),
            ],
        )


def test_predicates():
    check(
        inputs(32, 2),
        [
            Case("{{ .reg .pred p, q; setp.lt.s32 p, {a}, {b}; setp.lt.u32 q, {a}, {b}; " + op + " }}", "pred", f)
            for op, f in (
                ("and.pred {d}, p, q;", lambda a, b: signed(a, 32) < signed(b, 32) and a < b),
                ("or.pred {d}, p, q;", lambda a, b: signed(a, 32) < signed(b, 32) or a < b),
                ("xor.pred {d}, p, q;", lambda a, b: (signed(a, 32) < signed(b, 32)) != (a < b)),
                ("not.pred {d}, p;", lambda a, b: not signed(a, 32) < signed(b, 32)),
                ("and.pred {d}, !p, q;", lambda a, b: not signed(a, 32) < signed(b, 32) and a < b),
                ("mov.pred {d}, p;", lambda a, b: signed(a, 32) < signed(b, 32)),
            )
        ],
    )


def test_shift_amounts_beyond_the_width_are_clamped():
    amounts = [0, 1, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 0x80000000, 0xFFFFFFFF]
    for w in (16, 32, 64):
        values = integers(w, 1)[0].tolist()[:24]
        rows = [(v, n) for v in values for n in amounts]
        mask = (1 << w) - 1
        check(
            {"a": (f"b{w}", [r[0] for r in rows]), "b": ("b32", [r[1] for r in rows])},
            [
                Case(f"shl.b{w} {{d}}, {{a}}, {{b}};", f"b{w}", lambda a, b, m=mask: a << min(b, 64) & m),
                Case(f"shr.u{w} {{d}}, {{a}}, {{b}};", f"b{w}", lambda a, b: a >> min(b, 64)),
                Case(f"shr.b{w} {{d}}, {{a}}, {{b}};", f"b{w}", lambda a, b: a >> min(b, 64)),
                Case(f"shr.s{w} {{d}}, {{a}}, {{b}};", f"b{w}", lambda a, b, w=w: signed(a, w) >> min(b, 64)),
            ],
        )


def test_shifts_by_literals():
    for w in (16, 32, 64):
        mask, cases = (1 << w) - 1, []
        for n in (0, 1, 5, w - 1, w, w + 1, 64):
            cases += [
                Case(f"shl.b{w} {{d}}, {{a}}, {n};", f"b{w}", lambda a, n=n, m=mask: a << n & m),
                Case(f"shr.u{w} {{d}}, {{a}}, {n};", f"b{w}", lambda a, n=n: a >> n),
                Case(f"shr.s{w} {{d}}, {{a}}, {n};", f"b{w}", lambda a, n=n, w=w: signed(a, w) >> n),
            ]
        check(inputs(w, 1), cases)


def funnel(a, b, c, side, mode):
    n = min(c, 32) if mode == "clamp" else c & 31
    both = b << 32 | a
    return (both << n) >> 32 if side == "l" else both >> n


def test_funnel_shifts():
    check(
        inputs(32, 3),
        [
            Case(
                f"shf.{side}.{mode}.b32 {{d}}, {{a}}, {{b}}, {{c}};",
                "b32",
                lambda a, b, c, side=side, mode=mode: funnel(a, b, c, side, mode),
            )
            for side in "lr"
            for mode in ("clamp", "wrap")
        ],
    )


def lop3(a, b, c, table):
    r = 0
    for i in range(8):
        if table >> i & 1:
            x, y, z = a if i & 4 else ~a, b if i & 2 else ~b, c if i & 1 else ~c
            r |= x & y & z
    return r


def test_every_function_of_three_inputs():
    rows = {
        "a": ("b32", [0xF0F0F0F0, 0x12345678]),
        "b": ("b32", [0xCCCCCCCC, 0x9ABCDEF0]),
        "c": ("b32", [0xAAAAAAAA, 0x0F1E2D3C]),
    }
    check(
        rows,
        [
            Case(f"lop3.b32 {{d}}, {{a}}, {{b}}, {{c}}, {t};", "b32", lambda a, b, c, t=t: lop3(a, b, c, t))
            for t in range(256)
        ],
    )


def test_lop3_also_writes_a_predicate():
    start = "{{ .reg .pred q; .reg .b32 t; setp.lt.u32 q, {a}, {b}; "
    check(
        inputs(32, 3),
        [
            Case(
                start + "lop3.or.b32 t|{d}, {a}, {b}, {c}, 0x80, q; }}", "pred", lambda a, b, c: a & b & c != 0 or a < b
            ),
            Case(
                start + "lop3.and.b32 t|{d}, {a}, {b}, {c}, 0x96, !q; }}",
                "pred",
                lambda a, b, c: a ^ b ^ c != 0 and not a < b,
            ),
        ],
        version="8.2",
    )


def prmt(a, b, selectors):
    eight, r = b << 32 | a, 0
    for i in range(4):
        n = selectors >> 4 * i & 15
        byte = eight >> 8 * (n & 7) & 255
        r |= (byte if n < 8 else 255 * (byte >> 7)) << 8 * i
    return r


def test_byte_permutation():
    modes = {
        "f4e": (0x3210, 0x4321, 0x5432, 0x6543),
        "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
        "rc8": (0, 0x1111, 0x2222, 0x3333),
        "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
        "ecr": (0, 0x1110, 0x2210, 0x3210),
        "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
    }
    cases = [Case("prmt.b32 {d}, {a}, {b}, {c};", "b32", prmt)]
    cases += [
        Case(f"prmt.b32 {{d}}, {{a}}, {{b}}, {t:#x};", "b32", lambda a, b, c, t=t: prmt(a, b, t))
        for t in (0x5410, 0x7632, 0x3210, 0x7531, 0xFEDC, 0x0123)
    ]
    cases += [
        Case(f"prmt.b32.{m} {{d}}, {{a}}, {{b}}, {{c}};", "b32", lambda a, b, c, t=t: prmt(a, b, t[c & 3]))
        for m, t in modes.items()
    ]
    check(inputs(32, 3), cases)
