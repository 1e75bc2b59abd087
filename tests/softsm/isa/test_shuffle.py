"""shfl.sync in its four modes, with segments, clamps and the predicate that says whether the source is in range."""

import numpy as np
from silicon import Case, check


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
                    Case(f"shfl.sync.{mode}.b32 {{d}}, {{a}}, {b}, {c}, -1;", "b32",
                         lambda *row, read=read: int(values[read(*row)[0]])),
                    Case(f"{{{{ .reg .b32 t; shfl.sync.{mode}.b32 t|{{d}}, {{a}}, {b}, {c}, -1; }}}}", "pred",
                         lambda *row, read=read: read(*row)[1]),
                ]
        check(columns, cases)


def test_the_destination_may_be_an_operand():
    values = np.arange(32) * 3
    check({"a": ("b32", values), "lane": ("b32", range(32))}, [
        Case("{{ .reg .b32 t; mov.b32 t, {a}; shfl.sync.bfly.b32 t, t, 4, 31, -1; mov.b32 {d}, t; }}", "b32",
             lambda a, lane: (lane ^ 4) * 3),
        Case("{{ .reg .b32 t; xor.b32 t, {lane}, 1; shfl.sync.idx.b32 t, {a}, t, 31, -1; mov.b32 {d}, t; }}", "b32",
             lambda a, lane: (lane ^ 1) * 3),
    ])
