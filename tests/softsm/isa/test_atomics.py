"""atom and red: every operation and type, in global and shared memory, alone and many lanes on one word."""

import ml_dtypes
import numpy as np
import pytest
from launching import ptx, run, words
from values import ATOMICS

RNG = np.random.default_rng(21)
DATA = ".shared .align 16 .b8 data[1024];"
TYPES = {"u32": np.uint32, "s32": np.int32, "b32": np.uint32, "u64": np.uint64, "s64": np.int64, "b64": np.uint64,
         "f32": np.float32, "f64": np.float64}  # fmt: skip
FORMS = ["add.u32", "add.s32", "add.u64", "add.f32", "add.f64", "min.u32", "min.s32", "min.u64", "min.s64", "max.u32",
         "max.s32", "max.u64", "max.s64", "and.b32", "or.b32", "xor.b32", "and.b64", "or.b64", "xor.b64", "inc.u32",
         "dec.u32", "exch.b32", "exch.b64"]  # fmt: skip


def values(dtype, n=32, seed=0):
    rng = np.random.default_rng(seed)
    if np.dtype(dtype).kind == "f":
        return (rng.standard_normal(n) * 100).astype(dtype)
    info = np.iinfo(dtype)
    out = rng.integers(info.min, info.max, n, dtype=dtype, endpoint=True)
    out[:4] = [info.min, info.max, 0, 1]
    return out


def addresses(size):
    """%rd10: the lane's word in global memory, %rd11: its operand, %rd12: where the old value goes, %r3: shared."""
    body = f"mov.u32 %r2, data;\nmad.lo.u32 %r3, %r1, {size}, %r2;\nmul.wide.u32 %rd9, %r1, {size};\n"
    return body + "".join(f"add.s64 %rd{9 + i}, %rd{i}, %rd9;\n" for i in (1, 2, 3))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("space", ["global", "shared", ""])
def test_atomic_returns_the_old_value(form, space):
    op, kind = form.split(".")
    dtype = TYPES[kind]
    size = np.dtype(dtype).itemsize
    b, d = ("%rd20", "%rd21") if size == 8 else ("%r20", "%r21")
    body = addresses(size) + f"ld.global.b{8 * size} {b}, [%rd11];\n"
    place = "%rd10"
    if space == "shared":
        body += f"ld.global.b{8 * size} {d}, [%rd10];\nst.shared.b{8 * size} [%r3], {d};\n"
        place = "%r3"
    body += f"atom{'.' + space if space else ''}.{form} {d}, [{place}], {b};\nst.global.b{8 * size} [%rd12], {d};\n"
    if space == "shared":
        body += f"ld.shared.b{8 * size} {d}, [%r3];\nst.global.b{8 * size} [%rd10], {d};\n"
    cell, operand = values(dtype, seed=1), values(dtype, seed=2)
    text = ptx(body, "cell operand old", shared=DATA)
    got, _, old = run(text, [cell, operand, np.zeros_like(cell)])
    np.testing.assert_array_equal(old, cell)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(got, ATOMICS[op](cell, operand))


@pytest.mark.parametrize("form", [f for f in FORMS if not f.startswith(("exch", "inc", "dec"))])
def test_many_lanes_on_one_word(form):
    """64 lanes reduce into one word; floats are whole numbers, so that the order does not matter."""
    op, kind = form.split(".")
    dtype = TYPES[kind]
    size = np.dtype(dtype).itemsize
    b = "%rd20" if size == 8 else "%r20"
    body = f"mul.wide.u32 %rd9, %r1, {size};\nadd.s64 %rd10, %rd2, %rd9;\nld.global.b{8 * size} {b}, [%rd10];\n"
    body += f"red.relaxed.gpu.global.{form} [%rd1], {b};\nred.{form} [%rd1+{size}], {b};\n"
    operand = values(dtype, 64, seed=3)
    if kind[0] == "f":
        operand = np.rint(operand)
    cell = np.repeat(values(dtype, 5, seed=4)[4:], 2) if kind[0] != "f" else np.zeros(2, dtype)
    got = run(ptx(body, "cell operand"), [cell, operand], block=64)[0]
    wanted = cell[0]
    with np.errstate(over="ignore"):
        for x in operand:
            wanted = ATOMICS[op](np.array(wanted), x)
    np.testing.assert_array_equal(got, [wanted, wanted])


@pytest.mark.parametrize("width", [16, 32, 64])
@pytest.mark.parametrize("space", ["global", "shared"])
def test_compare_and_swap(width, space):
    """Even lanes compare with what is there, odd ones with something else."""
    size = width // 8
    dtype = np.dtype(f"u{size}")
    c, b, d = {16: ("%rs1", "%rs2", "%rs3"), 32: ("%r20", "%r21", "%r22"), 64: ("%rd20", "%rd21", "%rd22")}[width]
    body = addresses(size) + f"ld.global.b{width} {c}, [%rd11];\nld.global.b{width} {b}, [%rd12];\n"
    place = "%rd10"
    if space == "shared":
        body += f"ld.global.b{width} {d}, [%rd10];\nst.shared.b{width} [%r3], {d};\n"
        place = "%r3"
    body += f"atom.{space}.cas.b{width} {d}, [{place}], {c}, {b};\nst.global.b{width} [%rd12], {d};\n"
    if space == "shared":
        body += f"ld.shared.b{width} {d}, [%r3];\nst.global.b{width} [%rd10], {d};\n"
    cell, new = values(dtype, seed=5), values(dtype, seed=6)
    expected = np.where(np.arange(32) % 2, ~cell, cell)
    got, _, old = run(ptx(body, "cell expected new", shared=DATA), [cell, expected, new])
    np.testing.assert_array_equal(old, cell)
    np.testing.assert_array_equal(got, np.where(np.arange(32) % 2, cell, new))


def test_a_lock_by_compare_and_swap():
    """One lane of each of eight warps adds to a counter that a lock protects."""
    body = """and.b32 %r2, %r1, 31;
setp.ne.u32 %p2, %r2, 0;
@%p2 bra END;
LOCK:
atom.acquire.gpu.global.cas.b32 %r3, [%rd1], 0, 1;
setp.ne.u32 %p3, %r3, 0;
@%p3 bra LOCK;
ld.relaxed.gpu.global.u32 %r4, [%rd1+4];
add.u32 %r4, %r4, 3;
st.relaxed.gpu.global.u32 [%rd1+4], %r4;
st.release.gpu.global.u32 [%rd1], 0;
END:
"""
    np.testing.assert_array_equal(run(ptx(body), [words(2)], block=256), [0, 24])


@pytest.mark.parametrize("op", ["exch", "cas"])
@pytest.mark.parametrize("space", ["global", "shared"])
def test_sixteen_bytes_at_once(op, space):
    body = addresses(16) + ".reg .b128 %a, %b, %c;\n"
    for name, place in (("%a", "%rd10"), ("%b", "%rd11"), ("%c", "%rd12")):
        body += f"ld.global.v2.b64 {{%rd20, %rd21}}, [{place}];\nmov.b128 {name}, {{%rd20, %rd21}};\n"
    target = "%rd10"
    if space == "shared":
        target = "%r3"
        body += "mov.b128 {%rd20, %rd21}, %a;\nst.shared.v2.b64 [%r3], {%rd20, %rd21};\n"
    operands = "%b, %c" if op == "cas" else "%c"
    body += f"atom.{space}.{op}.b128 %a, [{target}], {operands};\n"
    body += "mov.b128 {%rd20, %rd21}, %a;\nst.global.v2.b64 [%rd12], {%rd20, %rd21};\n"
    if space == "shared":
        body += "ld.shared.v2.b64 {%rd20, %rd21}, [%r3];\nst.global.v2.b64 [%rd10], {%rd20, %rd21};\n"
    cell, new = values(np.uint64, 64, seed=7).reshape(32, 2), values(np.uint64, 64, seed=8).reshape(32, 2)
    expected = cell.copy()
    expected[1::4, 0] ^= np.uint64(1)
    expected[2::4, 1] ^= np.uint64(1 << 63)
    got, _, old = run(ptx(body, "cell expected new", shared=DATA, version="8.3"), [cell, expected, new])
    np.testing.assert_array_equal(old, cell)
    swapped = np.ones(32, bool) if op == "exch" else (cell == expected).all(1)
    np.testing.assert_array_equal(got, np.where(swapped[:, None], new, cell))


HALVES = [
    ("f16", np.float16, 1),
    ("bf16", ml_dtypes.bfloat16, 1),
    ("f16x2", np.float16, 2),
    ("bf16x2", ml_dtypes.bfloat16, 2),
]


@pytest.mark.parametrize("kind, dtype, count", HALVES)
@pytest.mark.parametrize("space", ["global", "shared"])
def test_halves_add(kind, dtype, count, space):
    size = 2 * count
    b, d = ("%rs1", "%rs2") if count == 1 else ("%r20", "%r21")
    body = addresses(size) + f"ld.global.b{8 * size} {b}, [%rd11];\n"
    place = "%rd10"
    if space == "shared":
        place = "%r3"
        body += f"ld.global.b{8 * size} {d}, [%rd10];\nst.shared.b{8 * size} [%r3], {d};\n"
    body += f"atom.{space}.add.noftz.{kind} {d}, [{place}], {b};\nst.global.b{8 * size} [%rd12], {d};\n"
    if space == "shared":
        body += f"ld.shared.b{8 * size} {d}, [%r3];\nst.global.b{8 * size} [%rd10], {d};\n"
    rng = np.random.default_rng(9)
    cell, operand = ((rng.standard_normal(32 * count) * 4).astype(dtype) for _ in range(2))
    cell[:2], operand[:2] = np.array([6e-8, -1], dtype), np.array([6e-8, 2e-3], dtype)  # denormals are kept
    got, _, old = run(
        ptx(body, "cell operand old", shared=DATA), [x.view(np.uint16) for x in (cell, operand, np.zeros_like(cell))]
    )
    np.testing.assert_array_equal(old, cell.view(np.uint16))
    wanted = (cell.astype(np.float64) + operand.astype(np.float64)).astype(np.float32).astype(dtype)
    np.testing.assert_array_equal(got.view(dtype), wanted)


REDUCED = [("v2.f32", np.float32, "add", 2), ("v4.f32", np.float32, "add", 4), ("v2.f16", np.float16, "min", 2),
           ("v4.f16", np.float16, "add", 4), ("v8.bf16", ml_dtypes.bfloat16, "max", 8),
           ("v4.bf16x2", ml_dtypes.bfloat16, "add", 8), ("v2.f16x2", np.float16, "max", 4)]  # fmt: skip


@pytest.mark.parametrize("kind, dtype, op, elements", REDUCED)
def test_vectors_are_reduced(kind, dtype, op, elements):
    vector, element = kind.split(".")
    size = np.dtype(dtype).itemsize * elements
    count = int(vector[1:])
    wide = element in ("f32", "f16x2", "bf16x2")
    names = [f"%r{20 + i}" if wide else f"%h{i}" for i in range(count)]
    body = addresses(size) + ".reg .b16 %h<8>;\n"
    for i, name in enumerate(names):
        body += f"ld.global.b{32 if wide else 16} {name}, [%rd11+{(4 if wide else 2) * i}];\n"
    noftz = "" if element == "f32" else ".noftz"
    body += f"red.global.{vector}.{element}.{op}{noftz} [%rd10], {{{', '.join(names)}}};\n"
    body = body.replace(f"{vector}.{element}.{op}{noftz}", f"{op}{noftz}.{vector}.{element}")
    rng = np.random.default_rng(10)
    cell, operand = ((rng.standard_normal(32 * elements) * 4).astype(dtype) for _ in range(2))
    raw = [x.view(np.uint8) for x in (cell, operand)]
    got = run(ptx(body, "cell operand spare", version="8.1", shared=DATA), [*raw, words(1)])[0].view(dtype)
    meaning = {"add": lambda a, b: a + b, "min": np.minimum, "max": np.maximum}[op]
    np.testing.assert_array_equal(got, meaning(cell, operand))
