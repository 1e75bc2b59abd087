"""bar, barrier, barrier.cluster, fences, clusterlaunchcontrol: one rule per test."""

import numpy as np
import pytest
from launching import fails, ptx, run, store, words

import softsm
import softsm.engine.launch as engine
from softsm.errors import Deadlock, Unsupported

BARRIER = ".shared .align 8 .b8 bar[64];"


@pytest.mark.parametrize(
    "instruction, why",
    [
        ("bar.red.max.u32 %r3, 0, %p1;", "expected"),
        ("fence.proxy.imaginary;", "no such fence"),
        ("barrier.cluster.arrive.acquire;", "expected barrier.cluster"),
        ("griddepcontrol.now;", "expected griddepcontrol"),
    ],
)
def test_unknown_forms_are_refused_when_loaded(instruction, why):
    with pytest.raises(Unsupported, match=why):
        engine.load(ptx(instruction, shared=BARRIER))


# -- named barriers --------------------------------------------------------------------------------------------------


def exchange(sync):
    """Warps write, synchronise, and read what the other warp wrote."""
    return f"""mov.u32 %r10, data;
mad.lo.u32 %r6, %r1, 4, %r10;
xor.b32 %r7, %r1, 32;
mad.lo.u32 %r7, %r7, 4, %r10;
st.shared.u32 [%r6], %r1;
{sync}
ld.shared.u32 %r4, [%r7];
""" + store("%r4")


@pytest.mark.parametrize(
    "sync",
    [
        "bar.sync 0;",
        "barrier.sync 3;",
        "barrier.sync.aligned 15;",
        "bar.cta.sync 1, 64;",
        "mov.u32 %r3, 2;\nbar.sync %r3, 64;",
    ],
)
def test_all_warps_meet(sync):
    text = ptx(exchange(sync), shared=".shared .align 4 .b8 data[256];")
    np.testing.assert_array_equal(run(text, [words(64)], block=64), np.arange(64) ^ 32)


def test_producer_arrives_consumer_syncs():
    """Warp 0 fills and only arrives; warp 1 waits; the others go their way."""
    text = ptx(
        """mov.u32 %r10, data;
shr.u32 %r3, %r1, 5;
and.b32 %r4, %r1, 31;
mad.lo.u32 %r6, %r4, 4, %r10;
mov.u32 %r8, 0;
setp.eq.u32 %p2, %r3, 1;
@%p2 bra CONSUMER;
setp.ne.u32 %p2, %r3, 0;
@%p2 bra DONE;
add.u32 %r7, %r1, 100;
st.shared.u32 [%r6], %r7;
bar.arrive 5, 64;
bra DONE;
CONSUMER:
bar.sync 5, 64;
ld.shared.u32 %r8, [%r6];
DONE:
"""
        + store("%r8"),
        shared=".shared .align 4 .b8 data[256];",
    )
    wanted = np.zeros(128)
    wanted[32:64] = np.arange(32) + 100
    np.testing.assert_array_equal(run(text, [words(128)], block=128), wanted)


def test_reductions_over_the_barrier():
    text = ptx(
        """rem.u32 %r3, %r1, 3;
setp.eq.u32 %p2, %r3, 0;
setp.lt.u32 %p3, %r1, 96;
setp.gt.u32 %p4, %r1, 95;
bar.red.popc.u32 %r4, 0, %p2;
bar.red.and.pred %p5, 0, %p3;
bar.red.or.pred %p6, 0, %p4;
barrier.red.popc.aligned.u32 %r5, 1, 96, !%p2;
bar.red.or.pred %p7, 2, 96, %p4;
selp.u32 %r6, 1, 0, %p5;
selp.u32 %r7, 2, 0, %p6;
selp.u32 %r8, 4, 0, %p7;
or.b32 %r6, %r6, %r7;
or.b32 %r6, %r6, %r8;
shl.b32 %r4, %r4, 16;
shl.b32 %r5, %r5, 8;
or.b32 %r6, %r6, %r4;
or.b32 %r6, %r6, %r5;
"""
        + store("%r6")
    )
    np.testing.assert_array_equal(run(text, [words(96)], block=96), 32 << 16 | 64 << 8 | 1)


def test_exited_warps_are_not_waited_for():
    text = ptx(
        "setp.ge.u32 %p2, %r1, 64;\n@%p2 ret;\n" + exchange("bar.sync 0;"), shared=".shared .align 4 .b8 data[256];"
    )
    wanted = np.concatenate([np.arange(64) ^ 32, np.zeros(64)])
    np.testing.assert_array_equal(run(text, [words(128)], block=128), wanted)


def test_exited_lanes_are_not_waited_for():
    text = ptx(
        "rem.u32 %r3, %r1, 2;\nsetp.eq.u32 %p2, %r3, 1;\n@%p2 exit;\n" + exchange("bar.sync 0;"),
        shared=".shared .align 4 .b8 data[256];",
    )
    wanted = np.where(np.arange(64) % 2 == 0, np.arange(64) ^ 32, 0)
    np.testing.assert_array_equal(run(text, [words(64)], block=64), wanted)


def test_parts_of_a_warp_meet_at_different_instructions():
    """barrier.sync without .aligned: the halves of each warp come from two branches."""
    sync = """and.b32 %r3, %r1, 1;
setp.eq.u32 %p2, %r3, 1;
@%p2 bra ODD;
barrier.sync 1;
bra.uni MET;
ODD:
barrier.sync 1;
MET:"""
    text = ptx(exchange(sync), shared=".shared .align 4 .b8 data[256];")
    np.testing.assert_array_equal(run(text, [words(64)], block=64), np.arange(64) ^ 32)


@pytest.mark.parametrize(
    "order",
    [
        "@%p2 bra WAIT;\nexit;\nWAIT:\nbarrier.sync 1;",  # the even lanes leave, then the odd ones come
        "@!%p2 bra GONE;\nbarrier.sync 1;\nbra MET;\nGONE:\nexit;\nMET:",  # the odd ones wait already
    ],
)
def test_lanes_that_exit_are_not_waited_for_without_aligned(order):
    sync = "and.b32 %r3, %r1, 1;\nsetp.eq.u32 %p2, %r3, 1;\n" + order
    text = ptx(exchange(sync), shared=".shared .align 4 .b8 data[256];")
    wanted = np.where(np.arange(64) % 2, np.arange(64) ^ 32, 0)
    np.testing.assert_array_equal(run(text, [words(64)], block=64), wanted)


def test_bar_warp_sync_brings_lanes_together():
    text = ptx(
        """mov.u32 %r10, data;
mad.lo.u32 %r6, %r1, 4, %r10;
@!%p1 bra REST;
st.shared.u32 [%r10], 77;
REST:
bar.warp.sync 0xffffffff;
ld.shared.u32 %r4, [%r10];
"""
        + store("%r4"),
        shared=".shared .align 4 .b8 data[256];",
    )
    np.testing.assert_array_equal(run(text, [words(32)]), 77)


def test_barrier_number_out_of_range():
    fails(ptx("mov.u32 %r2, 16;\nbar.sync %r2;"), "barrier-number")


def test_thread_count_not_in_warps():
    fails(ptx("bar.sync 1, 48;"), "barrier-count", "multiple of 32", block=64)


def test_warps_disagree_on_the_count():
    body = "setp.lt.u32 %p2, %r1, 32;\n@%p2 bra A;\nbar.sync 1, 64;\nbra B;\nA:\nbar.sync 1, 96;\nB:"
    fails(ptx(body), "barrier-count", "counts", block=64)


def test_missing_warp_is_named():
    body = "setp.lt.u32 %p2, %r1, 64;\n@%p2 bra A;\nbar.sync 1;\nA:\nbar.sync 0;"
    text = fails(ptx(body), "deadlock", error=Deadlock, block=96)
    assert "barrier 1: 32 of 96 threads" in text and "barrier 0: 64 of 96 threads" in text


def test_cluster_barrier_orders_peers_shared_memory():
    body = """mov.u32 %r2, bar;
mov.u32 %r10, %cluster_ctarank;
add.u32 %r3, %r10, 50;
@%p1 st.shared.u32 [%r2], %r3;
barrier.cluster.arrive.release;
barrier.cluster.wait.acquire;
xor.b32 %r4, %r10, 1;
mapa.shared::cluster.u32 %r5, %r2, %r4;
ld.shared::cluster.u32 %r6, [%r5];
barrier.cluster.arrive.relaxed.aligned;
barrier.cluster.wait.aligned;
mov.u32 %r7, %ctaid.x;
mad.lo.u32 %r7, %r7, 64, %r1;
"""
    text = ptx(body + store("%r6", "%r7"), shared=BARRIER)
    got = run(text, [words(256)], grid=4, block=64, cluster=2).reshape(4, 64)
    np.testing.assert_array_equal(got, np.repeat([[51], [50], [51], [50]], 64, 1))


def test_cluster_barrier_misuse():
    fails(ptx("barrier.cluster.wait.aligned;"), "barrier-phase", "without")
    fails(ptx("barrier.cluster.arrive.aligned;\nbarrier.cluster.arrive.aligned;"), "barrier-phase", "twice", block=64)


def test_fences_and_dependencies_change_nothing():
    body = "\n".join(
        f"{form};"
        for form in (
            "fence.acq_rel.cta", "fence.sc.gpu", "fence.acq_rel.sys", "fence.sc.cluster", "membar.cta", "membar.gl",
            "membar.sys",
            "fence.proxy.alias", "fence.proxy.async", "fence.proxy.async.global", "fence.proxy.async.shared::cta",
            "fence.proxy.async.shared::cluster", "fence.mbarrier_init.release.cluster", "griddepcontrol.wait",
            "griddepcontrol.launch_dependents",
        )
    )  # fmt: skip
    np.testing.assert_array_equal(run(ptx(body + store("%r1")), [words(32)]), np.arange(32))


def test_a_warp_meets_where_checks_are_on_but_races_are_not_looked_for():
    with softsm.checking(races=False):
        out = run(ptx("bar.warp.sync -1;\n" + store("%r1")), [words(32)])
    assert list(out) == list(range(32))
