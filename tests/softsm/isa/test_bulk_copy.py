"""cp.async.bulk, cp.reduce.async.bulk, st.async, red.async: one rule per test, under every order."""

import ml_dtypes
import numpy as np
import pytest
from copy_texts import DATA, RNG, bulk_load, fails, read_back, source
from launching import ptx, run, store, wait, words
from values import ATOMICS

from softsm.engine.launch import load
from softsm.errors import Fault, Unsupported


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
        wait("%r20", 0, "W") + "ld.shared.u32 %r7, [%r3+1024];\nmad.lo.u32 %r8, %r10, 32, %r1;\n" + store("%r7", "%r8")
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
    body += wait("%r20", 0, "W") + "ld.shared.u32 %r7, [%r3];\nmad.lo.u32 %r8, %r10, 32, %r1;\n" + store("%r7", "%r8")
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
    np.testing.assert_array_equal(got.view(dtype), ATOMICS[form.split(".")[0]](old, new))


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


def clearing(size="256", address="%r2", form="st.bulk.weak.shared::cta"):
    """Thread 0 clears bytes of the shared array that all have written."""
    body = f"""mov.u32 %r2, data;
mov.b64 %rd5, {size};
cvt.u64.u32 %rd6, %r2;
cvta.shared.u64 %rd6, %rd6;
mad.lo.u32 %r3, %r1, 16, %r2;
st.shared.v4.u32 [%r3], {{7, 7, 7, 7}};
bar.sync 0;
@%p1 {form} [{address}], %rd5, 0;
bar.sync 0;
"""
    return ptx(body + read_back(128), "out", shared=DATA, target="sm_100a", version="8.6")


@pytest.mark.parametrize("form, address", [("st.bulk.weak.shared::cta", "%r2"), ("st.bulk", "%rd6")])
def test_st_bulk_clears_shared_memory(form, address):
    got = run(clearing("256", f"{address}+16", form), [words(128)])
    np.testing.assert_array_equal(got, [7] * 4 + [0] * 64 + [7] * 60)


def test_misuse_of_st_bulk():
    for text, code, match in (
        (clearing("12"), "copy-size", "12 bytes; multiples of 8"),
        (clearing("8", "%r2+4"), "misaligned", "multiple of 8"),
        (clearing("4096"), "out-of-bounds", "st.bulk of 4096 bytes"),
    ):
        with pytest.raises(Fault, match=match) as caught:
            load(text).launch(1, 32, [words(128)])
        assert caught.value.code == code
    for text, match in (
        (clearing().replace("%rd5, 0;", "%rd5, 1;"), "constant 0"),
        (clearing().replace("sm_100a", "sm_90a"), "sm_100"),
    ):
        with pytest.raises(Unsupported, match=match):
            load(text)
