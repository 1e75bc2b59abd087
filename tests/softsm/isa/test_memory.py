"""ld and st: widths, signs, vectors, state spaces, generic addresses; createpolicy; mapa, isspacep, getctarank."""

import numpy as np
import pytest
from launching import ptx, run, store, words

from softsm.engine.launch import load
from softsm.errors import Fault

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
    """By its sign, or with zeros."""
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
    text = ptx("mov.u64 %rd4, table;\n" + at("%rd4", 4) + "ld.const.u32 %r3, [%rd10];\nld.const.f32 %r4, [pi];\n"
               "mov.u64 %rd5, more;\nand.b32 %r5, %r1, 3;\nmul.wide.u32 %rd6, %r5, 2;\nadd.s64 %rd6, %rd5, %rd6;\n"
               "ld.global.s16 %r6, [%rd6];\nadd.u32 %r7, %r1, 32;\nadd.u32 %r8, %r1, 64;\n"
               + store("%r3") + store("%r4", "%r7") + store("%r6", "%r8"))  # fmt: skip
    numbers = ", ".join(str(3 * i + 1) for i in range(32))
    declared = f".const .align 4 .u32 table[32] = {{{numbers}}};\n.const .f32 pi = 0f40490FDB;\n"
    declared += ".global .align 2 .s16 more[4] = {-1, 2, -3};\n.visible .entry"
    got = run(text.replace(".visible .entry", declared), [words(96)]).reshape(3, 32)
    np.testing.assert_array_equal(got[0], 3 * LANES + 1)
    assert (got[1] == 0x40490FDB).all()
    np.testing.assert_array_equal(got[2].view(np.int32), np.array([-1, 2, -3, 0])[LANES % 4])


def test_generic_addresses_of_every_space():
    """A generic address knows its space; cvta.to leads back."""
    body = """mov.u32 %r2, data;
cvt.u64.u32 %rd4, %r2;
cvta.shared.u64 %rd4, %rd4;
mov.u64 %rd5, mine;
cvta.local.u64 %rd5, %rd5;
cvta.global.u64 %rd6, %rd2;
mul.wide.u32 %rd7, %r1, 4;
add.s64 %rd8, %rd4, %rd7;
st.u32 [%rd8], %r1;
ld.shared.u32 %r3, [data];
bar.warp.sync -1;
cvta.to.shared.u64 %rd9, %rd8;
cvt.u32.u64 %r4, %rd9;
ld.shared.u32 %r4, [%r4];
mov.u32 %r9, 40;
st.u32 [%rd5], %r9;
ld.local.u32 %r5, [mine];
add.s64 %rd10, %rd6, %rd7;
ld.u32 %r6, [%rd10];
isspacep.shared %p2, %rd4;
isspacep.local %p3, %rd5;
isspacep.global %p4, %rd6;
isspacep.global %p5, %rd4;
isspacep.shared %p6, %rd6;
isspacep.local %p7, %rd6;
isspacep.shared::cluster %p8, %rd8;
selp.u32 %r7, 1, 0, %p2;
"""
    for i in range(3, 9):
        body += f"selp.u32 %r8, {1 << i - 2}, 0, %p{i};\nor.b32 %r7, %r7, %r8;\n"
    body += "shl.b32 %r10, %r1, 2;\n"
    for i, r in enumerate((4, 5, 6, 7)):
        body += f"add.u32 %r11, %r10, {i};\n" + store(f"%r{r}", "%r11")
    data = RNG.integers(0, 1 << 32, 32, dtype=np.uint32)
    shared = DATA + ".local .align 4 .b8 mine[4];"
    got = run(ptx(body, "out src", shared=shared), [words(128), data])[0].reshape(32, 4)
    np.testing.assert_array_equal(got, np.stack([LANES, np.full(32, 40), data, np.full(32, 0b1000111)], 1))


def test_a_rank_that_the_cluster_does_not_have_is_a_mistake_where_it_is_used():
    """Kernels compute an address of rank = lane in all lanes, and use it in those that are below the cluster's size."""
    body = """mov.u32 %r2, data;
mov.u32 %r10, %cluster_ctarank;
st.shared.u32 [%r2], %r10;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
mapa.shared::cluster.u32 %r5, %r2, %r1;
mov.u32 %r6, 7;
setp.lt.u32 %p2, %r1, 2;
@%p2 ld.shared::cluster.u32 %r6, [%r5];
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
""" + store("%r6")
    text = ptx(body, shared=DATA)
    np.testing.assert_array_equal(run(text, [words(32)], grid=2, cluster=2), [0, 1] + [7] * 30)
    with pytest.raises(Fault, match="names CTA rank 2; the cluster has 2") as caught:
        load(text.replace("%r1, 2;\n@", "%r1, 3;\n@")).launch(2, 32, [words(32)], cluster=2)
    assert caught.value.code == "cluster-rank"


def test_addresses_of_peers():
    """mapa: the same place in another CTA; loads and stores reach it; getctarank says whose it is."""
    body = """mov.u32 %r2, data;
mov.u32 %r10, %cluster_ctarank;
mad.lo.u32 %r3, %r1, 4, %r2;
mad.lo.u32 %r4, %r10, 100, %r1;
st.shared.u32 [%r3], %r4;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
add.u32 %r11, %r10, 1;
and.b32 %r11, %r11, 3;
mapa.shared::cluster.u32 %r5, %r3, %r11;
ld.shared::cluster.u32 %r6, [%r5];
st.shared::cluster.u32 [%r5+128], %r4;
getctarank.shared::cluster.u32 %r7, %r5;
cvt.u64.u32 %rd4, %r3;
cvta.shared.u64 %rd4, %rd4;
mapa.u64 %rd5, %rd4, %r11;
ld.u32 %r8, [%rd5];
getctarank.u64 %r9, %rd5;
isspacep.shared::cta %p2, %rd5;
isspacep.shared::cluster %p3, %rd5;
selp.u32 %r12, 1, 0, %p2;
selp.u32 %r13, 2, 0, %p3;
or.b32 %r12, %r12, %r13;
mad.lo.u32 %r9, %r12, 16, %r9;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
ld.shared.u32 %r14, [%r3+128];
mad.lo.u32 %r15, %r10, 32, %r1;
mul.lo.u32 %r15, %r15, 5;
"""
    for i, r in enumerate((6, 7, 8, 9, 14)):
        body += f"add.u32 %r16, %r15, {i};\n" + store(f"%r{r}", "%r16")
    got = run(ptx(body, shared=DATA), [words(640)], grid=4, cluster=4).reshape(4, 32, 5)
    for rank in range(4):
        peer, before = (rank + 1) % 4, (rank - 1) % 4
        wanted = [100 * peer + LANES, peer + 0 * LANES, 100 * peer + LANES, peer + 32 + 0 * LANES, 100 * before + LANES]
        np.testing.assert_array_equal(got[rank], np.stack(wanted, 1))


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
