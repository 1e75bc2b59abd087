"""cp.async, cp.async.bulk, cp.reduce.async.bulk, st.async, red.async: one rule per test, under every order."""

import ml_dtypes
import numpy as np
import pytest
from launching import ptx, run, store, wait, words

import softsm.engine.launch as engine
from softsm.engine.in_flight import Groups
from softsm.errors import Fault, Unsupported

DATA = ".shared .align 16 .b8 bar[16]; .shared .align 128 .b8 data[2048];"
RNG = np.random.default_rng(3)


def source(n=512):
    return RNG.integers(1, 1 << 32, n, dtype=np.uint32)


# -- cp.async --------------------------------------------------------------------------------------------------------

THREAD = """mov.u32 %r2, data;
mad.lo.u32 %r3, %r1, {size}, %r2;
mul.wide.u32 %rd4, %r1, {size};
add.s64 %rd4, %rd2, %rd4;
"""


def read_back(n):
    """Each thread stores word number tid of the shared array, n/32 times."""
    text = "mad.lo.u32 %r10, %r1, 4, %r2;\n"
    for i in range(n // 32):
        text += f"ld.shared.u32 %r11, [%r10+{128 * i}];\nadd.u32 %r12, %r1, {32 * i};\n" + store(
            "%r11", "%r12"
        )
    return text


@pytest.mark.parametrize("size, cache", [(4, "ca"), (8, "ca"), (16, "ca"), (16, "cg")])
@pytest.mark.parametrize("hint", ["", ".L2::128B"])
def test_each_lane_copies(size, cache, hint):
    body = THREAD.format(size=size) + f"cp.async.{cache}.shared.global{hint} [%r3], [%rd4], {size};\n"
    text = ptx(body + "cp.async.wait_all;\nbar.warp.sync -1;\n" + read_back(8 * size), "out src", shared=DATA)
    data = source()
    np.testing.assert_array_equal(run(text, [words(8 * size), data])[0], data[: 8 * size])


def test_short_source_is_padded_with_zeros():
    body = (
        THREAD.format(size=16) + "rem.u32 %r5, %r1, 17;\ncp.async.cg.shared.global [%r3], [%rd4], 16, %r5;\n"
    )
    text = ptx(body + "cp.async.wait_all;\nbar.warp.sync -1;\n" + read_back(128), "out src", shared=DATA)
    data = source()
    got = run(text, [words(128), data])[0].view(np.uint8).reshape(32, 16)
    wanted = data.view(np.uint8)[:512].reshape(32, 16).copy()
    for lane in range(32):
        wanted[lane, lane % 17 :] = 0
    np.testing.assert_array_equal(got, wanted)


def test_nothing_is_read_for_a_source_size_of_zero():
    """Masked lanes may point anywhere."""
    body = (
        THREAD.format(size=16)
        + "setp.lt.u32 %p2, %r1, 8;\nselp.u32 %r5, 16, 0, %p2;\nselp.b64 %rd4, %rd4, 0, %p2;\n"
    )
    body += "cp.async.cg.shared.global [ %r3 + 0 ], [ %rd4 + 0 ], 0x10, %r5;\ncp.async.wait_all;\nbar.warp.sync -1;\n"
    data = source()
    got = run(ptx(body + read_back(128), "out src", shared=DATA), [words(128), data])[0]
    np.testing.assert_array_equal(got, np.where(np.arange(128) < 32, data[:128], 0))


def test_ignored_source_reads_as_zero():
    body = THREAD.format(size=4) + "and.b32 %r5, %r1, 1;\nsetp.eq.u32 %p2, %r5, 1;\n"
    body += "cp.async.ca.shared.global [%r3], [%rd4], 4, %p2;\ncp.async.wait_all;\nbar.warp.sync -1;\n"
    data = source()
    got = run(ptx(body + read_back(32), "out src", shared=DATA), [words(32), data])[0]
    np.testing.assert_array_equal(got, np.where(np.arange(32) % 2, 0, data[:32]))


def two_groups(newest):
    body = THREAD.format(size=4) + "st.shared.u32 [%r3], 5;\nst.shared.u32 [%r3+128], 6;\n"
    body += "cp.async.ca.shared.global [%r3], [%rd4], 4;\ncp.async.commit_group;\n"
    body += "cp.async.ca.shared.global [%r3+128], [%rd4+128], 4;\ncp.async.commit_group;\n"
    return ptx(
        body + f"cp.async.wait_group {newest};\nbar.warp.sync -1;\n" + read_back(64), "out src", shared=DATA
    )


def test_wait_group_waits_for_all_but_the_newest():
    data = source()
    assert (run(two_groups(0), [words(64), data])[0] == data[:64]).all()
    late = run(two_groups(1), [words(64), data], orders=[("latest", 0)])[0]
    np.testing.assert_array_equal(
        late, np.concatenate([data[:32], np.full(32, 6)])
    )  # the second is still to come
    late = run(two_groups(2), [words(64), data], orders=[("latest", 0)])[0]
    np.testing.assert_array_equal(late, np.repeat([5, 6], 32))


@pytest.mark.parametrize("noinc, count", [(".noinc", 64), ("", 1)])
def test_copies_arrive_on_an_mbarrier(noinc, count):
    """With .noinc the barrier counts every thread; without it the copies bring their own count along."""
    body = f"""mov.u32 %r20, bar;
@%p1 mbarrier.init.shared.b64 [%r20], {count};
bar.sync 0;
{THREAD.format(size=16)}
cp.async.cg.shared.global [%r3], [%rd4], 16;
cp.async.mbarrier.arrive{noinc}.shared.b64 [%r20];
"""
    if not noinc:
        body += "bar.sync 0;\n@%p1 mbarrier.arrive.shared.b64 _, [%r20];\n"
    body += wait("%r20", 0, "W")
    body += "xor.b32 %r1, %r1, 32;\nmad.lo.u32 %r10, %r1, 16, %r2;\nld.shared.u32 %r11, [%r10+4];\n"
    text = ptx(body + store("%r11"), "out src", shared=DATA)
    data = source()
    np.testing.assert_array_equal(run(text, [words(64), data], block=64)[0], data[1:256:4])


def test_groups_count_lane_by_lane():
    mine = Groups()
    mine.add(0b01, "a")
    mine.add(0b11, "b")
    mine.commit(0b01)  # lane 0: a, b
    mine.add(0b11, "c")
    mine.commit(0b11)  # lane 0: c; lane 1: b, c
    assert mine.take(0b01, 1) == ["a", "b"]
    assert mine.take(0b10, 1) == []
    assert mine.take(0b10, 0) == ["b", "c"]
    assert "c" in mine.take_all(0b01)
    assert not mine.open and not mine.closed


def test_completed_copies_are_not_looked_at_again_where_nothing_commits_them():
    class Copy:
        looks = 0

        @property
        def done(self):
            self.looks += 1
            return True

    groups, copies = Groups(), [Copy() for _ in range(50)]
    for copy in copies:
        groups.add(1, copy)
        assert groups.in_flight(1) == ()
    assert max(copy.looks for copy in copies) == 1
    assert groups.take_all(1) == copies  # a wait still sees them all


# -- bulk ------------------------------------------------------------------------------------------------------------

LOAD = """mov.u32 %r2, data;
mov.u32 %r20, bar;
@%p1 mbarrier.init.shared::cta.b64 [%r20], 1;
bar.sync 0;
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], {size};
@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes{hint} [%r2], [%rd2], {size}, [%r20]{policy};
"""


def bulk_load(size, hint="", policy=""):
    return LOAD.format(size=size, hint=hint, policy=policy) + wait("%r20", 0, "W")


def test_bulk_load():
    data = source()
    text = ptx(bulk_load(512) + read_back(128), "out src", shared=DATA)
    np.testing.assert_array_equal(run(text, [words(128), data])[0], data[:128])


def test_bulk_load_with_a_cache_policy():
    data = source()
    body = "mov.b64 %rd5, 0x14f0000000000000;\n"
    text = ptx(body + bulk_load(256, ".L2::cache_hint", ", %rd5") + read_back(64), "out src", shared=DATA)
    np.testing.assert_array_equal(run(text, [words(64), data])[0], data[:64])


def test_bulk_store_and_its_two_waits():
    """After wait_group.read the source may be overwritten; after wait_group the data is in global memory."""
    body = """mov.u32 %r2, data;
mad.lo.u32 %r3, %r1, 16, %r2;
st.shared.v4.u32 [%r3], {%r1, %r1, %r1, %r1};
fence.proxy.async.shared::cta;
bar.sync 0;
@!%p1 bra END;
cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r2], 512;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group.read 0;
st.shared.u32 [%r2], 999;
cp.async.bulk.wait_group 0;
END:
"""
    np.testing.assert_array_equal(run(ptx(body, shared=DATA), [words(128)]), np.repeat(np.arange(32), 4))


def test_a_source_overwritten_too_early_is_seen():
    """Without the wait the store may read the new value: it does when completion is late."""
    body = """mov.u32 %r2, data;
st.shared.u32 [%r2], 1;
@!%p1 bra END;
cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r2], 16;
cp.async.bulk.commit_group;
st.shared.u32 [%r2], 999;
cp.async.bulk.wait_group 0;
END:
"""
    text = ptx(body, shared=DATA)
    assert run(text, [words(4)], orders=[("eager", 0)])[0] == 1
    assert run(text, [words(4)], orders=[("latest", 0)])[0] == 999


def test_bulk_store_of_chosen_bytes():
    body = """mov.u32 %r2, data;
st.shared.v4.u32 [%r2], {0x03020100, 0x07060504, 0x0b0a0908, 0x0f0e0d0c};
fence.proxy.async.shared::cta;
mov.b16 %rs1, 0x8421;
@!%p1 bra END;
cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%rd1], [%r2], 16, %rs1;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
END:
"""
    got = run(ptx(body, shared=DATA, target="sm_100a", version="8.6"), [words(4, 0xEEEEEEEE)]).view(np.uint8)
    wanted = np.full(16, 0xEE, np.uint8)
    wanted[[0, 5, 10, 15]] = [0, 5, 10, 15]
    np.testing.assert_array_equal(got, wanted)


def test_bulk_copy_to_a_peer():
    """Each CTA sends its 128 bytes to the other one, which waits on its own barrier."""
    body = """mov.u32 %r2, data;
mov.u32 %r20, bar;
mov.u32 %r10, %cluster_ctarank;
xor.b32 %r11, %r10, 1;
@%p1 mbarrier.init.shared::cta.b64 [%r20], 1;
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], 128;
mad.lo.u32 %r3, %r1, 4, %r2;
mad.lo.u32 %r4, %r10, 1000, %r1;
st.shared.u32 [%r3], %r4;
fence.proxy.async.shared::cta;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
mapa.shared::cluster.u32 %r5, %r2, %r11;
add.u32 %r5, %r5, 1024;
mapa.shared::cluster.u32 %r6, %r20, %r11;
@%p1 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r5], [%r2], 128, [%r6];
"""
    body += (
        wait("%r20", 0, "W")
        + "ld.shared.u32 %r7, [%r3+1024];\nmad.lo.u32 %r8, %r10, 32, %r1;\n"
        + store("%r7", "%r8")
    )
    body += "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"
    got = run(ptx(body, shared=DATA), [words(64)], grid=2, cluster=2)
    np.testing.assert_array_equal(got, np.concatenate([np.arange(32) + 1000, np.arange(32)]))


def test_multicast_lands_in_every_cta_of_the_mask():
    body = """mov.u32 %r2, data;
mov.u32 %r20, bar;
mov.u32 %r10, %cluster_ctarank;
setp.eq.u32 %p2, %r10, 1;
and.pred %p2, %p2, %p1;
mov.u32 %r4, 0;
mad.lo.u32 %r3, %r1, 4, %r2;
st.shared.u32 [%r3], %r4;
@%p1 mbarrier.init.shared::cta.b64 [%r20], 1;
setp.eq.u32 %p3, %r10, 0;
selp.u32 %r5, 0, 128, %p3;
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], %r5;
fence.proxy.async.shared::cta;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
mov.b16 %rs1, 14;
@%p2 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
    [%r2], [%rd2], 128, [%r20], %rs1;
"""
    body += (
        wait("%r20", 0, "W")
        + "ld.shared.u32 %r7, [%r3];\nmad.lo.u32 %r8, %r10, 32, %r1;\n"
        + store("%r7", "%r8")
    )
    body += "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"
    data = source()
    got = run(ptx(body, "out src", shared=DATA), [words(128), data], grid=4, cluster=4)[0].reshape(4, 32)
    np.testing.assert_array_equal(got, np.stack([np.zeros(32), data[:32], data[:32], data[:32]]))


REDUCTIONS = [
    ("add.u32", np.uint32), ("min.s32", np.int32), ("max.u64", np.uint64), ("add.u64", np.uint64),
    ("inc.u32", np.uint32), ("dec.u32", np.uint32), ("and.b32", np.uint32), ("or.b64", np.uint64),
    ("xor.b32", np.uint32), ("add.f32", np.float32), ("add.f64", np.float64), ("add.noftz.f16", np.float16),
    ("add.noftz.bf16", ml_dtypes.bfloat16), ("max.f16", np.float16), ("min.bf16", ml_dtypes.bfloat16),
]  # fmt: skip
MEANING = {
    "add": lambda a, b: a + b,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "inc": lambda a, b: np.where(a >= b, 0, a + 1).astype(a.dtype),
    "dec": lambda a, b: np.where((a == 0) | (a > b), b, a - 1).astype(a.dtype),
}


def values(dtype, nbytes):
    n = nbytes // np.dtype(dtype).itemsize
    if np.dtype(dtype).kind in "ui":
        return RNG.integers(0, 40, n).astype(dtype)
    return (RNG.standard_normal(n) * 8).astype(dtype)


@pytest.mark.parametrize("form, dtype", REDUCTIONS)
def test_bulk_reduction_into_global_memory(form, dtype):
    body = (
        bulk_load(128)
        + f"""@!%p1 bra END;
cp.reduce.async.bulk.global.shared::cta.bulk_group.{form} [%rd1], [%r2], 128;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
END:
"""
    )
    old, new = values(dtype, 128), values(dtype, 128)
    got = run(ptx(body, "out src", shared=DATA), [old.view(np.uint32), new.view(np.uint32)])[0]
    np.testing.assert_array_equal(got.view(dtype), MEANING[form.split(".")[0]](old, new))


def test_bulk_reduction_into_shared_memory():
    """Into the CTA's own shared memory, which a GPU does in a cluster alone."""
    body = """mov.u32 %r2, data;
mov.u32 %r20, bar;
mov.u32 %r10, %cluster_ctarank;
mad.lo.u32 %r3, %r1, 4, %r2;
st.shared.u32 [%r3], %r1;
mov.u32 %r7, 100;
st.shared.u32 [%r3+128], %r7;
@%p1 mbarrier.init.shared::cta.b64 [%r20], 1;
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], 128;
fence.proxy.async.shared::cta;
bar.sync 0;
add.u32 %r4, %r2, 128;
mapa.shared::cluster.u32 %r4, %r4, %r10;
mapa.shared::cluster.u32 %r8, %r20, %r10;
@%p1 cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.u32 [%r4], [%r2], 128, [%r8];
"""
    body += wait("%r20", 0, "W") + "ld.shared.u32 %r5, [%r3+128];\nmad.lo.u32 %r6, %r10, 32, %r1;\n"
    text = ptx(body + store("%r5", "%r6"), shared=DATA)
    got = run(text, [words(64)], grid=2, cluster=2)
    np.testing.assert_array_equal(got, np.tile(np.arange(32) + 100, 2))


def test_shared_to_shared_needs_a_cluster():
    body = "mov.u32 %r2, data;\nmov.u32 %r20, bar;\n@%p1 mbarrier.init.shared::cta.b64 [%r20], 1;\nbar.sync 0;\n"
    copy = "shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
    for form in (f"cp.async.bulk.{copy}", f"cp.reduce.async.bulk.{copy}.add.u32"):  # st.async is alike
        text = ptx(body + f"@%p1 {form} [%r2+128], [%r2], 128, [%r20];\n", "out src", shared=DATA)
        fails(text, "cluster-launch", "clusters")


def test_prefetch_changes_nothing():
    text = ptx("cp.async.bulk.prefetch.L2.global [%rd2], 64;\n" + store("%r1"), "out src")
    np.testing.assert_array_equal(run(text, [words(32), source()])[0], np.arange(32))


# -- st.async, red.async ---------------------------------------------------------------------------------------------


def test_asynchronous_stores_to_a_peer():
    body = """mov.u32 %r2, data;
mov.u32 %r20, bar;
mov.u32 %r10, %cluster_ctarank;
xor.b32 %r11, %r10, 1;
mad.lo.u32 %r3, %r1, 32, %r2;
st.shared.u32 [%r3+8], 7;
st.shared.u32 [%r3+12], %r1;
@%p1 mbarrier.init.shared::cta.b64 [%r20], 1;
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], 640;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
mapa.shared::cluster.u32 %r5, %r3, %r11;
mapa.shared::cluster.u32 %r6, %r20, %r11;
add.u32 %r7, %r1, 500;
st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r5], %r7, [%r6];
st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [%r5+16], {%r1, %r10}, [%r6];
cvt.u64.u32 %rd4, %r7;
red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r5+8], %r1, [%r6];
red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.max.s32 [%r5+12], 20, [%r6];
"""
    body += wait("%r20", 0, "W")
    body += "ld.shared.u32 %r12, [%r3];\nld.shared.v2.u32 {%r13, %r14}, [%r3+16];\n"
    body += "ld.shared.v2.u32 {%r15, %r18}, [%r3+8];\n"
    body += "mad.lo.u32 %r16, %r10, 32, %r1;\nmul.lo.u32 %r16, %r16, 5;\n"
    for i, row in enumerate((12, 13, 14, 15, 18)):
        body += f"add.u32 %r17, %r16, {i};\n" + store(f"%r{row}", "%r17")
    body += "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"
    text = ptx(body, shared=DATA, version="8.1")
    got = run(text, [words(320)], grid=2, cluster=2).reshape(2, 32, 5)
    lane = np.arange(32)
    for rank in range(2):
        np.testing.assert_array_equal(got[rank, :, 0], lane + 500)
        np.testing.assert_array_equal(got[rank, :, 1], lane)
        np.testing.assert_array_equal(got[rank, :, 2], 1 - rank)
        np.testing.assert_array_equal(got[rank, :, 3], lane + 7)
        np.testing.assert_array_equal(got[rank, :, 4], np.maximum(lane, 20))


# -- misuse ----------------------------------------------------------------------------------------------------------


def fails(text, code, match=None, order="eager"):
    with pytest.raises(Fault, match=match) as caught:
        engine.load(text).launch(1, 32, [words(64), source(64)], order=order)
    assert caught.value.code == code
    assert "PTX line" in str(caught.value)


@pytest.mark.parametrize("order", ["eager", "latest"])
def test_faults_name_the_instruction(order):
    fails(ptx(bulk_load(512), "out src", shared=DATA), "out-of-bounds", "cp.async.bulk", order)
    fails(ptx(bulk_load(24), "out src", shared=DATA), "copy-size", "multiple of 16", order)
    body = THREAD.format(size=16) + "add.s64 %rd4, %rd4, 4;\ncp.async.cg.shared.global [%r3], [%rd4], 16;"
    fails(ptx(body, "out src", shared=DATA), "misaligned", None, order)
    body = THREAD.format(size=16) + "cp.async.cg.shared.global [%r3], [%rd4], 16;"
    fails(ptx(body, "out src", shared=DATA), "out-of-bounds", None, order)
    body = THREAD.format(size=4) + "cp.async.ca.shared.global [%r3], [%rd4], 4, 5;"
    fails(ptx(body, "out src", shared=DATA), "copy-size", "src-size 5", order)


@pytest.mark.parametrize(
    "instruction, why",
    [
        ("cp.async.cg.shared.global [%r3], [%rd4], 8;", "cp-size"),
        ("cp.async.bulk.shared::cluster.global.bulk_group [%r3], [%rd4], 16;", "completes by"),
        ("cp.async.bulk.global.global.bulk_group [%rd4], [%rd4], 16;", "no copy from"),
        ("cp.reduce.async.bulk.global.shared::cta.bulk_group.min.f32 [%rd4], [%r3], 16;", "not defined"),
        ("cp.async.sideways;", "expected cp.async"),
    ],
)
def test_unknown_forms_are_refused_when_loaded(instruction, why):
    with pytest.raises(Unsupported, match=why):
        engine.load(ptx(instruction, shared=DATA))
