"""wmma: matrices through load, mma and store, from every layout and space, against a plain product."""

import layouts
import numpy as np
import ptx_texts as kn
import pytest

SHAPES = {"m16n16k16": (16, 16, 16), "m32n8k16": (32, 8, 16), "m8n32k16": (8, 32, 16)}
SIZES = {**SHAPES, "m16n16k8": (16, 16, 8), "m8n8k4": (8, 8, 4)}
CASES = [
    *((shape, "f16", d, c) for shape in SHAPES for d in ("f16", "f32") for c in ("f16", "f32")),
    *((shape, name, result, result) for shape in SHAPES for name, result in (("bf16", "f32"), ("s8", "s32"))),
    ("m16n16k16", "u8", "s32", "s32"),
    ("m16n16k8", "tf32", "f32", "f32"),
    ("m8n8k4", "f64", "f64", "f64"),
]
DTYPES = {"f16": np.float16, "f32": np.float32, "s32": np.int32, "f64": np.float64}


def stored(matrix, name, layout, pad):
    """The matrix in memory, its rows (or columns) `pad` elements longer than needed; and their stride."""
    matrix = np.ascontiguousarray(matrix if layout == "row" else matrix.T)
    wide = np.zeros((matrix.shape[0], matrix.shape[1] + pad), matrix.dtype)
    wide[:, : matrix.shape[1]] = matrix
    raw = wide.astype(DTYPES[name]) if name in DTYPES else layouts.bits(wide, name)
    return np.ascontiguousarray(raw).view(np.uint8).reshape(-1), wide.shape[1]


def names(part, shape, types):
    m, n, k = SIZES[shape]
    elements = {"a": m * k, "b": k * n}.get(part, m * n) // 32
    per = {"f16": 2, "bf16": 2, "s8": 4, "u8": 4}.get(types[part], 1)
    count = 8 if part in "ab" and types[part] == "f16" else elements // per
    first = {"a": 0, "b": 8, "c": 16, "d": 24}[part]
    return kn.braces(kn.names(first, count, "%fd") if types[part] == "f64" else kn.names(8 + first, count))


def texts(shape, types, where, strides, layout):
    """Three loads, a product and a store; `where`: the addresses of a, b, c and d."""
    lines = []
    space, places = where
    for part in "abc":
        stride = f", {strides[part]}" if strides[part] else ""
        form = f"wmma.load.{part}.sync.aligned.{layout[part]}.{shape}{space}.{types[part]}"
        lines.append(f"{form} {names(part, shape, types)}, [{places[part]}]{stride};")
    plain = types["a"] == "f16"
    kinds = [types[x] for x in ("dc" if plain else "dabc")]
    form = ".".join(["wmma.mma.sync.aligned", layout["a"], layout["b"], shape, *kinds])
    lines.append(f"{form} {', '.join(names(x, shape, types) for x in 'dabc')};")
    form = f"wmma.store.d.sync.aligned.{layout['d']}.{shape}{space}.{types['d']}"
    stride = f", {strides['d']}" if strides["d"] else ""
    lines.append(f"{form} [{places['d']}], {names('d', shape, types)}{stride};")
    return "\n".join(lines)


@pytest.mark.parametrize(("shape", "name", "d", "c"), CASES)
def test_a_product_of_matrices_in_memory(shape, name, d, c):
    m, n, k = SIZES[shape]
    types = {"a": name, "b": name, "c": c, "d": d}
    rng = np.random.default_rng(len(shape) + ord(name[-1]))
    if name in ("s8", "u8"):
        low, high = (-128, 128) if name == "s8" else (0, 256)
        a, b = (rng.integers(low, high, size).astype(np.float32) for size in ((m, k), (k, n)))
        before = rng.integers(-1000, 1000, (m, n)).astype(np.float64)
    elif name == "f64":
        a, b, before = (rng.integers(-8, 8, size).astype(np.float64) for size in ((m, k), (k, n), (m, n)))
    else:
        a, b = layouts.values(rng, (m, k), name), layouts.values(rng, (k, n), name)
        before = rng.choice(layouts.CHOICES, (m, n))
    for turn, (rows, pad) in enumerate((x, y) for x in ("row", "col") for y in (0, 16)):
        layout = {"a": rows, "b": "col" if turn % 2 else "row", "c": "row", "d": rows}
        inputs, strides = [], {}
        for part, matrix in (("a", a), ("b", b), ("c", before)):
            raw, strides[part] = stored(matrix, types[part], layout[part], pad)
            inputs.append(raw)
        want, strides["d"] = stored(a @ b + before, d, layout["d"], pad)
        if not pad:
            strides = dict.fromkeys("abcd", 0)
        body = texts(shape, types, (".global", dict(zip("abcd", ("%rd1", "%rd2", "%rd3", "%rd4")))), strides, layout)
        ptx = kn.text(body, ["a", "b", "c", "d"], doubles=32)
        kn.check(f"wmma.mma.{shape}.{name}", ptx, inputs, [np.zeros_like(want)], [want])


SHARED = """
mov.u32 %r2, %tid.x; shl.b32 %r3, %r2, 2; add.u32 %r4, %r1, %r3;
mul.wide.u32 %rd6, %r2, 4; add.u64 %rd7, %rd1, %rd6; ld.global.b32 %r5, [%rd7]; st.shared.b32 [%r4], %r5;
{barrier}
setp.ge.u32 %p1, %r2, 32; @%p1 bra END;
wmma.load.a.sync.aligned.row.m16n16k16.shared.f16 {a}, [%r1], 16;
wmma.load.b.sync.aligned.row.m16n16k16.global.f16 {b}, [%rd2], 16;
wmma.load.c.sync.aligned.row.m16n16k16.global.f32 {c}, [%rd3], 16;
wmma.mma.sync.aligned.row.row.m16n16k16.f32.f32 {c}, {a}, {b}, {c};
wmma.store.d.sync.aligned.row.m16n16k16.f32 [%rd4], {c}, 16;
END:
"""


@pytest.mark.parametrize(("barrier", "codes"), [("bar.sync 0;", []), ("", ["race", "uninitialised"])])
def test_a_load_of_what_other_warps_wrote_requires_a_barrier(barrier, codes):
    """The accumulator is C and D at once, and the address of the store is generic."""
    import softsm

    parts = {x: kn.braces(kn.names(8 + 8 * i, 8)) for i, x in enumerate("abc")}
    ptx = kn.text(SHARED.format(barrier=barrier, **parts), ["a", "b", "c", "d"], shared=512)
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-4, 4, (16, 16)).astype(np.float16) for _ in "ab")
    c, out = np.ones((16, 16), np.float32), np.zeros((16, 16), np.float32)
    with softsm.checking() as report:
        softsm.load_ptx(ptx)[1, 128](a, b, c, out)
    assert report.codes() == codes
    if not codes:
        np.testing.assert_array_equal(out, a.astype(np.float32) @ b.astype(np.float32) + 1)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("wmma.mma.sync.aligned.row.col.m8n8k32.s32.s4.s4.s32 {%r0}, {%r1}, {%r2}, {%r3};", "combination of types"),
        ("wmma.load.a.sync.aligned.row.m16n16k16.global.f16 {%r0, %r1}, [%rd1], 16;", "8 registers"),
        ("wmma.load.c.sync.aligned.row.m16n16k16.global.f64 {%fd0, %fd1}, [%rd1], 16;", "shape and type"),
        ("wmma.mma.sync.aligned.row.col.m16n16k16.f16.s32 {%r0}, {%r1}, {%r2}, {%r3};", "combination of types"),
    ],
)
def test_what_does_not_exist_is_refused(line, why):
    import softsm
    from softsm.errors import Unsupported

    with pytest.raises(Unsupported, match=why):
        softsm.load_ptx(kn.text(line, ["a"], doubles=4))[1, 32](np.zeros(4))
