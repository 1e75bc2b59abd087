"""shfl.sync in its four modes, also by literals, with segments, clamps and predicate; redux.sync of floats."""

import numpy as np
from exact import F32, is_nan
from silicon import Case, check
from values import floats


def source(mode, lane, b, c):
    """(lane read, in range), by PTX ISA 9.7.9.6."""
    b, clamp, segment = b & 31, c & 31, c >> 8 & 31
    bound = lane & segment | clamp & ~segment
    if mode == "up":
        j, inside = lane - b, lane - b >= bound
    elif mode == "down":
        j, inside = lane + b, lane + b <= bound
    elif mode == "bfly":
        j, inside = lane ^ b, lane ^ b <= bound
    else:
        j = lane & segment | b & ~segment
        inside = j <= bound
    return (j if inside else lane), inside


def test_shuffles():
    rng = np.random.default_rng(0)
    values = rng.integers(0, 1 << 32, 32)
    columns = {"a": ("b32", values), "lane": ("b32", range(32)), "b": ("b32", rng.integers(0, 32, 32))}
    for c in (0x1F, 0x0, 0x181F, 0x1C1F, 0x1807, 0x0F):
        cases = []
        for mode in ("up", "down", "bfly", "idx"):
            for b in ("{b}", "0", "1", "16"):
                amount = lambda own, b=b: own if b == "{b}" else int(b)  # noqa: E731
                read = lambda a, lane, own, m=mode, f=amount, c=c: source(m, lane, f(own), c)  # noqa: E731
                cases += [
                    Case(
                        f"shfl.sync.{mode}.b32 {{d}}, {{a}}, {b}, {c}, -1;",
                        "b32",
                        lambda *row, read=read: int(values[read(*row)[0]]),
                    ),
                    Case(
                        f"{{{{ .reg .b32 t; shfl.sync.{mode}.b32 t|{{d}}, {{a}}, {b}, {c}, -1; }}}}",
                        "pred",
                        lambda *row, read=read: read(*row)[1],
                    ),
                ]
        check(columns, cases)


def test_the_destination_may_be_an_operand():
    values = np.arange(32) * 3
    check(
        {"a": ("b32", values), "lane": ("b32", range(32))},
        [
            Case(
                "{{ .reg .b32 t; mov.b32 t, {a}; shfl.sync.bfly.b32 t, t, 4, 31, -1; mov.b32 {d}, t; }}",
                "b32",
                lambda a, lane: (lane ^ 4) * 3,
            ),
            Case(
                "{{ .reg .b32 t; xor.b32 t, {lane}, 1; shfl.sync.idx.b32 t, {a}, t, 31, -1; mov.b32 {d}, t; }}",
                "b32",
                lambda a, lane: (lane ^ 1) * 3,
            ),
        ],
    )


def test_float_reductions_of_sm_100():
    rows = floats("f32", 1)[0].tolist()[:64]
    for values in (rows[:32], rows[32:], [0x7FC00000] * 32, [0x80000000, 0] * 16, [0x7FC00001] + [0xC0000000] * 31):
        key = lambda x: -(x & ~F32.sign) - 1 if x & F32.sign else x  # noqa: E731

        def reduced(choose, change, nan, lanes, values=values, key=key):
            chosen = [change(v) for i, v in enumerate(values) if lanes >> i & 1]
            numbers = [x for x in chosen if not is_nan(F32, x)]
            if not numbers or nan and len(numbers) < len(chosen):
                return F32.nan
            return choose(numbers, key=key)

        cases = []
        for op, choose in (("min", min), ("max", max)):
            for name, change, nan in (
                ("", lambda x: x, False),
                (".abs", lambda x: x & 0x7FFFFFFF, False),
                (".NaN", lambda x: x, True),
                (".abs.NaN", lambda x: x & 0x7FFFFFFF, True),
            ):
                cases.append(
                    Case(
                        f"redux.sync.{op}{name}.f32 {{d}}, {{a}}, -1;",
                        "b32",
                        lambda a, lane, c=choose, f=change, n=nan: reduced(c, f, n, 0xFFFFFFFF),
                        target="sm_100a",
                    )
                )
            cases.append(
                Case(
                    "{{ .reg .pred p; setp.lt.u32 p, {lane}, 7; mov.b32 {d}, 9; "
                    f"@p redux.sync.{op}.f32 {{d}}, {{a}}, 0x7f; }}}}",
                    "b32",
                    lambda a, lane, c=choose: reduced(c, lambda x: x, False, 0x7F) if lane < 7 else 9,
                    target="sm_100a",
                )
            )
        check({"a": ("b32", values), "lane": ("b32", range(32))}, cases, version="8.6")
