"""mov: packing, unpacking, constants."""

from silicon import Case, check
from values import integers


def test_moves_pack_and_unpack():
    a, b = integers(32, 2)
    (q,) = integers(64, 1)
    n = min(len(a), len(q))
    check(
        {"a": ("b32", a[:n]), "b": ("b32", b[:n]), "q": ("b64", q[:n])},
        [
            Case("mov.b64 {d}, {{ {a}, {b} }};", "b64", lambda a, b, q: a | b << 32),
            Case("{{ .reg .b32 t; mov.b64 {{ t, {d} }}, {q}; }}", "b32", lambda a, b, q: q >> 32),
            Case("{{ .reg .b32 t; mov.b64 {{ {d}, t }}, {q}; }}", "b32", lambda a, b, q: q),
            Case("mov.b64 {{ {d}, _ }}, {q};", "b32", lambda a, b, q: q),
            Case(
                "{{ .reg .b16 x, y; mov.b32 {{ x, y }}, {a}; mov.b32 {d}, {{ y, x }}; }}",
                "b32",
                lambda a, b, q: a >> 16 | a << 16,
            ),
            Case(
                "{{ .reg .b16 w, x, y, z; mov.b64 {{ w, x, y, z }}, {q}; mov.b64 {d}, {{ z, y, x, w }}; }}",
                "b64",
                lambda a, b, q: sum((q >> 16 * k & 0xFFFF) << 48 - 16 * k for k in range(4)),
            ),
            Case("mov.u32 {d}, 0xdeadbeef;", "b32", lambda a, b, q: 0xDEADBEEF),
            Case("mov.s64 {d}, -5;", "b64", lambda a, b, q: -5),
            Case("mov.f32 {d}, 0f3F800000;", "b32", lambda a, b, q: 0x3F800000),
            Case("mov.f64 {d}, 0d3FF8000000000000;", "b64", lambda a, b, q: 0x3FF8000000000000),
            Case("mov.f32 {d}, 1.5;", "b32", lambda a, b, q: 0x3FC00000),
            Case("mov.b16 {d}, -2;", "b16", lambda a, b, q: 0xFFFE),
            Case("mov.u32 {d}, WARP_SZ;", "b32", lambda a, b, q: 32),
        ],
    )


def test_pairs_of_128_bits():
    (q,) = integers(64, 1)
    check(
        {"a": ("b64", q), "b": ("b64", q[::-1])},
        [
            Case(
                "{{ .reg .b128 t, u; .reg .b64 x; mov.b128 t, {{ {a}, {b} }}; mov.b128 u, t; "
                "mov.b128 {{ x, {d} }}, u; }}",
                "b64",
                lambda a, b: b,
            ),
            Case(
                "{{ .reg .b128 t; .reg .b64 x; mov.b128 t, {{ {a}, {b} }}; mov.b128 {{ {d}, x }}, t; }}",
                "b64",
                lambda a, b: a,
            ),
        ],
        version="8.3",
    )
