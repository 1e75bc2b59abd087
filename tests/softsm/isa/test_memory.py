"""ld and st: widths, signs, vectors, state spaces, createpolicy."""

import numpy as np
import pytest
from launching import ptx, run, store, words

import softsm
from softsm.errors import Fault, Unsupported

LANES = np.arange(32)
RNG = np.random.default_rng(3)
WIDTHS = {"u8": 1, "s8": 1, "b8": 1, "u16": 2, "s16": 2, "b16": 2, "u32": 4, "s32": 4, "b32": 4, "f32": 4, "u64": 8,
          "s64": 8, "b64": 8, "f64": 8}  # fmt: skip
DATA = ".shared .align 16 .b8 data[2048];"


def bytes_of(n, seed=0):
    return np.random.default_rng(seed).integers(0, 256, n, dtype=np.uint8)


def at(base, step, to="%rd10"):
    return f"mul.wide.u32 {to}, %r1, {step};\nadd.s64 {to}, {base}, {to};\n"


@pytest.mark.parametrize("kind", ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"])
def test_a_narrow_load_extends_into_a_wide_register(kind):
    """It extends by its sign, or with zeros."""
    size, data = WIDTHS[kind], bytes_of(256)
    body = at("%rd2", size) + f"ld.global.{kind} %rd4, [%rd10];\n"
    got = run(ptx(body + store("%rd4", kind="u64"), "out src"), [np.zeros(32, np.uint64), data])[0]
    typed = data.view(f"{'i' if kind[0] == 's' else 'u'}{size}")[:32]
    np.testing.assert_array_equal(got, typed.astype(np.int64 if kind[0] == "s" else np.uint64).view(np.uint64))


@pytest.mark.parametrize("kind", ["u8", "s8", "u16", "s16", "b8", "b16"])
def test_a_narrow_load_into_a_word(kind):
    size, data = WIDTHS[kind], bytes_of(64, 1)
    body = at("%rd2", size) + f"ld.global.{kind} %r4, [%rd10];\n"
    got = run(ptx(body + store("%r4"), "out src"), [words(32), data])[0]
    typed = data.view(f"{'i' if kind[0] == 's' else 'u'}{size}")[:32]
    np.testing.assert_array_equal(got, typed.astype(np.int64).astype(np.uint32))


@pytest.mark.parametrize("kind", ["u8", "s16", "b32", "b64"])
def test_a_store_writes_its_width_alone(kind):
    size = WIDTHS[kind]
    body = "mov.b64 %rd5, 0x8877665544332211;\ncvt.u64.u32 %rd6, %r1;\nadd.s64 %rd5, %rd5, %rd6;\n"
    body += at("%rd1", 8) + f"st.global.{kind} [%rd10], %rd5;\n"
    got = run(ptx(body), [np.full(32, 0xEEEEEEEEEEEEEEEE, np.uint64)])
    mask = np.uint64((1 << 8 * size) - 1)
    value = np.uint64(0x8877665544332211) + LANES.astype(np.uint64)
    np.testing.assert_array_equal(got, (value & mask) | (np.uint64(0xEEEEEEEEEEEEEEEE) & ~mask))


VECTORS = [("v2", "u8"), ("v4", "u8"), ("v2", "s16"), ("v4", "b16"), ("v2", "b32"), ("v4", "f32"), ("v2", "b64"),
           ("v2", "f64")]  # fmt: skip


@pytest.mark.parametrize("vector, kind", VECTORS)
@pytest.mark.parametrize("space", ["global", "shared"])
def test_vectors(vector, kind, space):
    """Loaded, the elements turned round, stored."""
    count, size = int(vector[1]), WIDTHS[kind]
    names = [f"%rd{16 + i}" for i in range(count)] if size == 8 else [f"%r{16 + i}" for i in range(count)]
    data, step = bytes_of(32 * count * size, 2), count * size
    body = at("%rd2", step) + at("%rd1", step, "%rd11")
    body += f"ld.global.{vector}.{kind} {{{', '.join(names)}}}, [%rd10];\n"
    if space == "shared":
        body += f"mov.u32 %r2, data;\nmad.lo.u32 %r3, %r1, {step}, %r2;\n"
        body += f"st.shared.{vector}.{kind} [%r3], {{{', '.join(reversed(names))}}};\nbar.sync 0;\n"
        body += f"ld.shared.{vector}.{kind} {{{', '.join(reversed(names))}}}, [%r3];\n"
    body += f"st.global.{vector}.{kind} [%rd11], {{{', '.join(reversed(names))}}};\n"
    got = run(ptx(body, "out src", shared=DATA), [np.zeros_like(data), data])[0]
    np.testing.assert_array_equal(got.reshape(32, count, size), data.reshape(32, count, size)[:, ::-1])


@pytest.mark.parametrize("form", ["ld.global.ca.u32", "ld.global.cg.u32", "ld.global.cs.u32", "ld.global.lu.u32",
                                  "ld.global.cv.u32", "ld.global.nc.u32", "ld.weak.global.u32", "ldu.global.u32",
                                  "ld.volatile.global.u32", "ld.relaxed.gpu.global.u32", "ld.acquire.sys.global.u32",
                                  "ld.acquire.cta.u32", "ld.u32", "ld.global.L1::no_allocate.u32",
                                  "ld.global.L1::evict_last.L2::128B.u32"])  # fmt: skip
def test_hints_and_orders_change_no_loaded_value(form):
    data = RNG.integers(0, 1 << 32, 32, dtype=np.uint32)
    body = at("%rd2", 4) + f"{form} %r3, [%rd10];\n"
    np.testing.assert_array_equal(run(ptx(body + store("%r3"), "out src"), [words(32), data])[0], data)


@pytest.mark.parametrize("form", ["st.global.wb.u32", "st.global.cg.u32", "st.global.cs.u32", "st.global.wt.u32",
                                  "st.weak.global.u32", "st.volatile.global.u32", "st.relaxed.gpu.global.u32",
                                  "st.release.sys.global.u32", "st.release.cta.u32", "st.u32",
                                  "st.global.L1::no_allocate.u32"])  # fmt: skip
def test_hints_and_orders_change_no_stored_value(form):
    body = at("%rd1", 4) + f"mul.lo.u32 %r3, %r1, 77;\n{form} [%rd10], %r3;\n"
    np.testing.assert_array_equal(run(ptx(body), [words(32)]), LANES * 77)


def test_local_memory_is_each_thread_its_own():
    body = """mov.u64 %rd4, mine;
cvta.local.u64 %rd5, %rd4;
st.local.u32 [mine+8], %r1;
mov.u32 %r8, 5;
st.local.v2.u32 [mine], {%r1, %r8};
mul.lo.u32 %r3, %r1, 3;
st.u32 [%rd5+12], %r3;
ld.local.v4.u32 {%r4, %r5, %r6, %r7}, [%rd4];
shl.b32 %r10, %r1, 2;
"""
    for i in range(4):
        body += f"add.u32 %r11, %r10, {i};\n" + store(f"%r{4 + i}", "%r11")
    got = run(ptx(body, shared=".local .align 16 .b8 mine[16];"), [words(128)]).reshape(32, 4)
    np.testing.assert_array_equal(got, np.stack([LANES, np.full(32, 5), LANES, 3 * LANES], 1))


def test_constants_and_initial_values():
    text = ptx(
        "mov.u64 %rd4, table;\n" + at("%rd4", 4) + "ld.const.u32 %r3, [%rd10];\nld.const.f32 %r4, [pi];\n"
        "mov.u64 %rd5, more;\nand.b32 %r5, %r1, 3;\nmul.wide.u32 %rd6, %r5, 2;\nadd.s64 %rd6, %rd5, %rd6;\n"
        "ld.global.s16 %r6, [%rd6];\nadd.u32 %r7, %r1, 32;\nadd.u32 %r8, %r1, 64;\n"
        + store("%r3")
        + store("%r4", "%r7")
        + store("%r6", "%r8")
    )
    numbers = ", ".join(str(3 * i + 1) for i in range(32))
    declared = f".const .align 4 .u32 table[32] = {{{numbers}}};\n.const .f32 pi = 0f40490FDB;\n"
    declared += ".global .align 2 .s16 more[4] = {-1, 2, -3};\n.visible .entry"
    got = run(text.replace(".visible .entry", declared), [words(96)]).reshape(3, 32)
    np.testing.assert_array_equal(got[0], 3 * LANES + 1)
    assert (got[1] == 0x40490FDB).all()
    np.testing.assert_array_equal(got[2].view(np.int32), np.array([-1, 2, -3, 0])[LANES % 4])


def test_parameters_at_offsets_and_through_registers():
    """A pointer parameter read in parts: every part agrees with the whole."""
    body = """mov.b64 %rd4, src;
ld.param.v2.u32 {%r3, %r4}, [src];
mov.b64 %rd6, {%r3, %r4};
xor.b64 %rd6, %rd6, %rd2;
ld.param.u16 %r5, [src+2];
shr.u32 %r6, %r3, 16;
xor.b32 %r5, %r5, %r6;
ld.param.s8 %r6, [src+1];
cvt.s32.s16 %r7, %r3;
shr.s32 %r7, %r7, 8;
xor.b32 %r6, %r6, %r7;
cvta.param.u64 %rd5, %rd4;
ld.u32 %r7, [%rd5+4];
xor.b32 %r7, %r7, %r4;
cvt.u32.u64 %r8, %rd6;
shl.b32 %r10, %r1, 2;
"""
    for i in range(4):
        body += f"add.u32 %r11, %r10, {i};\n" + store(f"%r{5 + i}", "%r11")
    assert not run(ptx(body, "out src"), [words(128, 9), words(1)])[0].any()


@pytest.mark.parametrize("form", ["discard.global.L2", "discard.L2"])
def test_a_discard_takes_the_values_of_128_bytes_alone(form):
    data = np.arange(256, dtype=np.uint32)
    first = -data.ctypes.data % 128 // 4 + 32
    body = f"add.u64 %rd3, %rd1, {4 * first};\n@%p1 {form} [%rd3], 128;\n"
    softsm.load(ptx(body)).launch(1, 32, [data])
    assert (data[first : first + 32] != np.arange(first, first + 32)).all()
    np.testing.assert_array_equal(data[:first], np.arange(first))
    np.testing.assert_array_equal(data[first + 32 :], np.arange(first + 32, 256))


def test_a_discard_is_of_whole_lines():
    data = np.zeros(256, np.uint32)
    body = f"add.u64 %rd3, %rd1, {-data.ctypes.data % 128 + 64};\ndiscard.global.L2 [%rd3], 128;\n"
    with pytest.raises(Fault, match="multiple of 128"):
        softsm.load(ptx(body)).launch(1, 32, [data])
    with pytest.raises(Unsupported, match="128"):
        softsm.load(ptx("discard.global.L2 [%rd1], 64;\n"))
