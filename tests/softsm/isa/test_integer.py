"""Integer arithmetic against Python's integers."""

from silicon import Case, check
from values import integers, signed


def s(x, w):
    return signed(x, w)


def inputs(width, arity):
    return {name: (f"b{width}", x) for name, x in zip("abc", integers(width, arity))}


def both(width, operation):
    """The same lines for unsigned and signed, with the operands read accordingly."""
    result = f"b{width}"
    u = lambda f: lambda *v: f(*v)  # noqa: E731
    i = lambda f: lambda *v: f(*(s(x, width) for x in v))  # noqa: E731
    lines = []
    for t, read in (("u", u), ("s", i)):
        for text, f in operation(t):
            lines.append(Case(text, result, read(f)))
    return lines


def trunc_div(a, b):
    q = abs(a) // abs(b)
    return -q if (a < 0) != (b < 0) else q


def test_add_sub_mul_and_their_like_wrap():
    for w in (16, 32, 64):
        check(
            inputs(w, 3),
            both(
                w,
                lambda t, w=w: [
                    (f"add.{t}{w} {{d}}, {{a}}, {{b}};", lambda a, b, c: a + b),
                    (f"sub.{t}{w} {{d}}, {{a}}, {{b}};", lambda a, b, c: a - b),
                    (f"mul.lo.{t}{w} {{d}}, {{a}}, {{b}};", lambda a, b, c: a * b),
                    (f"mul.hi.{t}{w} {{d}}, {{a}}, {{b}};", lambda a, b, c: a * b >> w),
                    (f"mad.lo.{t}{w} {{d}}, {{a}}, {{b}}, {{c}};", lambda a, b, c: a * b + c),
                    (f"mad.hi.{t}{w} {{d}}, {{a}}, {{b}}, {{c}};", lambda a, b, c: (a * b >> w) + c),
                    (f"min.{t}{w} {{d}}, {{a}}, {{b}};", lambda a, b, c: min(a, b)),
                    (f"max.{t}{w} {{d}}, {{a}}, {{b}};", lambda a, b, c: max(a, b)),
                    (f"sad.{t}{w} {{d}}, {{a}}, {{b}}, {{c}};", lambda a, b, c: c + abs(a - b)),
                ],
            ),
        )


def test_wide_products():
    for w in (16, 32):
        a, b, c = integers(w, 3)
        cases = []
        for t in "us":
            r = (lambda x, w=w: s(x, w)) if t == "s" else (lambda x: x)
            cases += [
                Case(f"mul.wide.{t}{w} {{d}}, {{a}}, {{b}};", f"b{2 * w}", lambda a, b, c, r=r: r(a) * r(b)),
                Case(f"mad.wide.{t}{w} {{d}}, {{a}}, {{b}}, {{c}};", f"b{2 * w}", lambda a, b, c, r=r: r(a) * r(b) + c),
            ]
        check(
            {"a": (f"b{w}", a), "b": (f"b{w}", b), "c": (f"b{2 * w}", c * 3)},
            [Case(k.text, k.result, lambda a, b, c, f=k.expected: f(a, b, c)) for k in cases],
        )


def test_saturation_ends_at_the_limits():
    clamp = lambda x: max(-(1 << 31), min((1 << 31) - 1, x))  # noqa: E731
    check(
        inputs(32, 3),
        [
            Case("add.sat.s32 {d}, {a}, {b};", "b32", lambda a, b, c: clamp(s(a, 32) + s(b, 32))),
            Case("sub.sat.s32 {d}, {a}, {b};", "b32", lambda a, b, c: clamp(s(a, 32) - s(b, 32))),
            Case(
                "mad.hi.sat.s32 {d}, {a}, {b}, {c};",
                "b32",
                lambda a, b, c: clamp((s(a, 32) * s(b, 32) >> 32) + s(c, 32)),
            ),
        ],
    )


def test_division_truncates():
    for w in (16, 32, 64):
        a, b = integers(w, 2)
        keep = b != 0  # PTX leaves division by zero open
        least = 1 << (w - 1)
        keep &= ~((a == least) & (b == (1 << w) - 1))
        cases = []
        for t in "us":
            r = (lambda x, w=w: s(x, w)) if t == "s" else (lambda x: x)
            cases += [
                Case(f"div.{t}{w} {{d}}, {{a}}, {{b}};", f"b{w}", lambda a, b, r=r: trunc_div(r(a), r(b))),
                Case(
                    f"rem.{t}{w} {{d}}, {{a}}, {{b}};", f"b{w}", lambda a, b, r=r: r(a) - r(b) * trunc_div(r(a), r(b))
                ),
            ]
        check({"a": (f"b{w}", a[keep]), "b": (f"b{w}", b[keep])}, cases)


def test_division_by_zero_gives_ones():
    for w in (16, 32, 64):
        a = [0, 1, 5, (1 << (w - 1)) - 1, 1 << (w - 1), (1 << w) - 1]
        check(
            {"a": (f"b{w}", a), "b": (f"b{w}", [0] * 6)},
            [
                Case(f"{op}.{t}{w} {{d}}, {{a}}, {{b}};", f"b{w}", lambda a, b: -1)
                for op in ("div", "rem")
                for t in "us"
            ],
        )


def test_abs_and_neg_wrap_at_the_least_number():
    for w in (16, 32, 64):
        check(
            inputs(w, 1),
            [
                Case(f"abs.s{w} {{d}}, {{a}};", f"b{w}", lambda a, w=w: abs(s(a, w))),
                Case(f"neg.s{w} {{d}}, {{a}};", f"b{w}", lambda a, w=w: -s(a, w)),
            ],
        )


def test_multiplication_of_24_bits():
    u24, s24 = (lambda x: x & 0xFFFFFF), (lambda x: s(x, 24))
    clamp = lambda x: max(-(1 << 31), min((1 << 31) - 1, x))  # noqa: E731
    check(
        inputs(32, 3),
        [
            Case("mul24.lo.u32 {d}, {a}, {b};", "b32", lambda a, b, c: u24(a) * u24(b)),
            Case("mul24.hi.u32 {d}, {a}, {b};", "b32", lambda a, b, c: u24(a) * u24(b) >> 16),
            Case("mul24.lo.s32 {d}, {a}, {b};", "b32", lambda a, b, c: s24(a) * s24(b)),
            Case("mul24.hi.s32 {d}, {a}, {b};", "b32", lambda a, b, c: s24(a) * s24(b) >> 16),
            Case("mad24.lo.s32 {d}, {a}, {b}, {c};", "b32", lambda a, b, c: s24(a) * s24(b) + c),
            Case("mad24.hi.u32 {d}, {a}, {b}, {c};", "b32", lambda a, b, c: (u24(a) * u24(b) >> 16) + c),
            Case(
                "mad24.hi.sat.s32 {d}, {a}, {b}, {c};",
                "b32",
                lambda a, b, c: clamp(s(s24(a) * s24(b) >> 16, 32) + s(c, 32)),
            ),
        ],
    )


def test_counting_and_finding_bits():
    for w in (32, 64):
        find = lambda x: x.bit_length() - 1  # noqa: E731
        flip = lambda x, w=w: ~s(x, w) if s(x, w) < 0 else x  # noqa: E731
        rest = lambda p, w=w: 0xFFFFFFFF if p < 0 else w - 1 - p  # noqa: E731
        check(
            inputs(w, 1),
            [
                Case(f"popc.b{w} {{d}}, {{a}};", "b32", lambda a: bin(a).count("1")),
                Case(f"clz.b{w} {{d}}, {{a}};", "b32", lambda a, w=w: w - a.bit_length()),
                Case(f"brev.b{w} {{d}}, {{a}};", f"b{w}", lambda a, w=w: int(f"{a:0{w}b}"[::-1], 2)),
                Case(f"bfind.u{w} {{d}}, {{a}};", "b32", find),
                Case(f"bfind.s{w} {{d}}, {{a}};", "b32", lambda a, find=find, flip=flip: find(flip(a))),
                Case(f"bfind.shiftamt.u{w} {{d}}, {{a}};", "b32", lambda a, find=find, rest=rest: rest(find(a))),
                Case(
                    f"bfind.shiftamt.s{w} {{d}}, {{a}};",
                    "b32",
                    lambda a, find=find, flip=flip, rest=rest: rest(find(flip(a))),
                ),
            ],
        )


def bfe(a, pos, length, w, signed_):
    if w == 32:  # the 64-bit forms take both whole, on the device
        pos, length = pos & 255, length & 255
    sbit = 0 if not signed_ or length == 0 else a >> min(pos + length - 1, w - 1) & 1
    return sum((a >> (pos + i) & 1 if i < length and pos + i < w else sbit) << i for i in range(w))


def bfi(a, b, pos, length, w):
    if w == 32:
        pos, length = pos & 255, length & 255
    for i in range(min(length, w)):
        if pos + i < w:
            b = b & ~(1 << (pos + i)) | (a >> i & 1) << (pos + i)
    return b


def test_bit_fields():
    positions = (0, 1, 7, 16, 31, 32, 33, 63, 64, 200, 256, 0x1F0)
    places = [(p, n) for p in positions for n in (0, 1, 8, 31, 32, 33, 63, 64, 255, 0x101)]
    pos, length = ([x[k] for x in places] for k in (0, 1))
    for w in (32, 64):
        a = (integers(w, 1)[0].tolist() * 9)[: len(places)]
        b = a[::-1]
        check(
            {"a": (f"b{w}", a), "b": (f"b{w}", b), "p": ("b32", pos), "n": ("b32", length)},
            [
                Case(f"bfe.u{w} {{d}}, {{a}}, {{p}}, {{n}};", f"b{w}", lambda a, b, p, n, w=w: bfe(a, p, n, w, False)),
                Case(f"bfe.s{w} {{d}}, {{a}}, {{p}}, {{n}};", f"b{w}", lambda a, b, p, n, w=w: bfe(a, p, n, w, True)),
                Case(
                    f"bfi.b{w} {{d}}, {{a}}, {{b}}, {{p}}, {{n}};", f"b{w}", lambda a, b, p, n, w=w: bfi(a, b, p, n, w)
                ),
            ],
        )


def test_bit_fields_at_literal_places():
    places = [(0, 1), (0, 32), (7, 8), (31, 1), (16, 16), (5, 27), (5, 28), (3, 0), (0, 33)]
    check(
        inputs(32, 1),
        [
            Case(f"bfe.{t}32 {{d}}, {{a}}, {p}, {n};", "b32", lambda a, p=p, n=n, t=t: bfe(a, p, n, 32, t == "s"))
            for p, n in places
            for t in "us"
        ],
    )


def szext(a, b, clamp, signed_):
    n = b & 31
    large = b >= 32 and clamp
    mask = 0 if large else 0xFFFFFFFF << n & 0xFFFFFFFF
    sign = not (n == 0 or large or not signed_) and a >> ((n - 1) & 31) & 1
    return a & ~mask | (mask if sign else 0)


def bmsk(a, b, clamp):
    mask0 = 0xFFFFFFFF << (a & 31) & 0xFFFFFFFF
    total = (a & 31) + (b & 31)
    over = total >= 32 or clamp and (a >= 32 or b >= 32)
    if clamp and a >= 32:
        mask0 = 0
    mask1 = 0 if over else 0xFFFFFFFF if b & 31 == 0 else 0xFFFFFFFF << total & 0xFFFFFFFF
    if b & 31 == 0 and not over:
        mask1 = 0xFFFFFFFF
    return mask0 & ~mask1 & 0xFFFFFFFF


def test_masks_and_sign_extension():
    check(
        inputs(32, 2),
        [
            Case(
                f"szext.{m}.{t}32 {{d}}, {{a}}, {{b}};",
                "b32",
                lambda a, b, m=m, t=t: szext(a, b, m == "clamp", t == "s"),
            )
            for m in ("clamp", "wrap")
            for t in "us"
        ]
        + [
            Case(f"bmsk.{m}.b32 {{d}}, {{a}}, {{b}};", "b32", lambda a, b, m=m: bmsk(a, b, m == "clamp"))
            for m in ("clamp", "wrap")
        ],
    )


def fns(mask, base, offset):
    offset = s(offset, 32)
    if offset == 0:
        return base if mask >> base & 1 else 0xFFFFFFFF
    pos, count, step = base, abs(offset) - 1, 1 if offset > 0 else -1
    while 0 <= pos < 32:
        if mask >> pos & 1:
            if count == 0:
                return pos
            count -= 1
        pos += step
    return 0xFFFFFFFF


def test_finding_the_nth_bit():
    masks = integers(32, 1)[0].tolist()[:64]
    check(
        {
            "a": ("b32", masks),
            "b": ("b32", [i % 32 for i in range(64)]),
            "c": ("b32", [(i % 7 - 3) & 0xFFFFFFFF for i in range(64)]),
        },
        [Case("fns.b32 {d}, {a}, {b}, {c};", "b32", fns)],
    )


def test_dot_products_of_bytes():
    def parts(x, bits, signed_):
        items = [x >> i & ((1 << bits) - 1) for i in range(0, 32, bits)]
        return [s(v, bits) for v in items] if signed_ else items

    cases = []
    for ta in "us":
        for tb in "us":
            cases.append(
                Case(
                    f"dp4a.{ta}32.{tb}32 {{d}}, {{a}}, {{b}}, {{c}};",
                    "b32",
                    lambda a, b, c, ta=ta, tb=tb: (
                        c + sum(x * y for x, y in zip(parts(a, 8, ta == "s"), parts(b, 8, tb == "s")))
                    ),
                )
            )
            for k, mode in ((0, "lo"), (2, "hi")):
                cases.append(
                    Case(
                        f"dp2a.{mode}.{ta}32.{tb}32 {{d}}, {{a}}, {{b}}, {{c}};",
                        "b32",
                        lambda a, b, c, ta=ta, tb=tb, k=k: (
                            c + sum(x * y for x, y in zip(parts(a, 16, ta == "s"), parts(b, 8, tb == "s")[k:]))
                        ),
                    )
                )
    check(inputs(32, 3), cases)


def test_carries_travel_through_the_condition_code():
    """128-bit sums, differences and products by 32- and 64-bit pieces."""
    m32 = (1 << 32) - 1
    check(
        inputs(64, 3),
        [
            Case(
                "{{ .reg .b64 t; add.cc.u64 t, {a}, {b}; addc.u64 {d}, {c}, {c}; }}",
                "b64",
                lambda a, b, c: c + c + (a + b >> 64),
            ),
            Case(
                "{{ .reg .b64 t; sub.cc.u64 t, {a}, {b}; subc.u64 {d}, {c}, {a}; }}",
                "b64",
                lambda a, b, c: c - a - (a < b),
            ),
            Case(
                "{{ .reg .b64 t; add.cc.s64 t, {a}, {b}; addc.cc.s64 t, {c}, {b}; addc.s64 {d}, 0, 0; }}",
                "b64",
                lambda a, b, c: c + b + (a + b >> 64) >> 64,
            ),
            Case(
                "{{ .reg .b64 t; mad.lo.cc.u64 t, {a}, {b}, {c}; madc.hi.u64 {d}, {a}, {b}, 0; }}",
                "b64",
                lambda a, b, c: a * b + c >> 64,
            ),
        ],
    )
    check(
        inputs(32, 3),
        [
            Case(
                "{{ .reg .b32 t; add.cc.u32 t, {a}, {b}; addc.cc.u32 t, {c}, {a}; addc.u32 {d}, {b}, 0; }}",
                "b32",
                lambda a, b, c: b + (c + a + (a + b >> 32) >> 32),
            ),
            Case(
                "{{ .reg .b32 t; sub.cc.u32 t, {a}, {b}; subc.cc.u32 t, {c}, {a}; subc.u32 {d}, {b}, 0; }}",
                "b32",
                lambda a, b, c: b - (c - a - (a < b) < 0),
            ),
            Case(
                "{{ .reg .b32 t; mad.lo.cc.u32 t, {a}, {b}, {c}; madc.hi.cc.u32 t, {a}, {b}, {c}; "
                "addc.u32 {d}, 0, 0; }}",
                "b32",
                lambda a, b, c: (a * b >> 32) + c + ((a * b & m32) + c >> 32) >> 32,
            ),
        ],
    )


def test_pairs_of_16_bits():
    def lanewise(f, signed_=True):
        def apply(a, b):
            r = 0
            for k in (0, 16):
                x, y = a >> k & 0xFFFF, b >> k & 0xFFFF
                r |= (f(s(x, 16), s(y, 16)) if signed_ else f(x, y)) % 65536 << k
            return r

        return apply

    check(
        inputs(32, 2),
        [
            Case("add.u16x2 {d}, {a}, {b};", "b32", lanewise(lambda x, y: x + y)),
            Case("add.s16x2 {d}, {a}, {b};", "b32", lanewise(lambda x, y: x + y)),
            Case("min.s16x2 {d}, {a}, {b};", "b32", lanewise(min)),
            Case("max.u16x2 {d}, {a}, {b};", "b32", lanewise(max, False)),
            Case("min.u16x2 {d}, {a}, {b};", "b32", lanewise(min, False)),
            Case("max.relu.s16x2 {d}, {a}, {b};", "b32", lanewise(lambda x, y: max(x, y, 0))),
            Case("min.relu.s32 {d}, {a}, {b};", "b32", lambda a, b: max(min(s(a, 32), s(b, 32)), 0)),
            Case("max.relu.s32 {d}, {a}, {b};", "b32", lambda a, b: max(s(a, 32), s(b, 32), 0)),
        ],
    )
