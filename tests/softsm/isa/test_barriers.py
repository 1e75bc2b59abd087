"""mbarrier, bar, barrier, barrier.cluster, fences: one rule per test."""

import numpy as np
import pytest
from launching import ptx, run, store, wait, words

import softsm.engine.launch as engine
from softsm.errors import Deadlock, Fault, Unsupported

BARRIER = ".shared .align 8 .b8 bar[64];"
INIT = """mov.u32 %r2, bar;
@%p1 mbarrier.init.shared::cta.b64 [%r2], {count};
bar.sync 0;
"""


def init(count):
    return INIT.format(count=count)


def once(body, **options):
    """Only thread 0 executes `body`."""
    return ptx(f"@!%p1 bra END;\n{body}\nEND:", **options)


# -- mbarrier --------------------------------------------------------------------------------------------------------


def test_all_threads_arrive_then_all_go_on():
    text = ptx(
        init(128)
        + "mbarrier.arrive.shared::cta.b64 _, [%r2];\n"
        + wait("%r2", 0, "W")
        + "add.u32 %r3, %r1, 7;\n"
        + store("%r3"),
        shared=BARRIER,
    )
    np.testing.assert_array_equal(run(text, [words(128)], block=128), np.arange(128) + 7)


def test_data_written_before_the_arrival_is_seen_after_the_wait():
    """Each thread reads what its neighbour in the next warp wrote, three rounds long."""
    body = init(96) + "mov.u32 %r10, data;\nmov.u32 %r4, %r1;\nadd.u32 %r5, %r1, 32;\nrem.u32 %r5, %r5, 96;\n"
    body += "mad.lo.u32 %r6, %r1, 4, %r10;\nmad.lo.u32 %r7, %r5, 4, %r10;\n"
    for step in range(3):
        body += f"""st.shared.u32 [%r6], %r4;
mbarrier.arrive.shared::cta.b64 _, [%r2];
{wait("%r2", 2 * step % 2, f"A{step}")}
ld.shared.u32 %r4, [%r7];
mbarrier.arrive.shared::cta.b64 _, [%r2];
{wait("%r2", (2 * step + 1) % 2, f"B{step}")}
"""
    text = ptx(body + store("%r4"), shared=BARRIER + " .shared .align 4 .b8 data[384];")
    np.testing.assert_array_equal(run(text, [words(96)], block=96), np.arange(96))


def test_parity_of_a_fresh_barrier():
    """wait(1) passes at once, wait(0) does not."""
    body = """mov.u32 %r2, bar;
mbarrier.init.shared.b64 [%r2], 2;
mbarrier.test_wait.parity.shared.b64 %p2, [%r2], 0;
mbarrier.test_wait.parity.shared.b64 %p3, [%r2], 1;
mbarrier.try_wait.parity.shared.b64 %p4, [%r2], 1, 1000;
selp.u32 %r3, 1, 0, %p2;
selp.u32 %r4, 1, 0, %p3;
selp.u32 %r5, 1, 0, %p4;
st.global.u32 [%rd1], %r3;
st.global.u32 [%rd1+4], %r4;
st.global.u32 [%rd1+8], %r5;
"""
    np.testing.assert_array_equal(run(once(body, shared=BARRIER), [words(3, 9)]), [0, 1, 1])


def test_state_names_the_phase_and_the_pending_count():
    body = """mov.u32 %r2, bar;
mbarrier.init.shared::cta.b64 [%r2], 5;
mbarrier.arrive.shared::cta.b64 %rd4, [%r2], 2;
mbarrier.pending_count.b64 %r3, %rd4;
mbarrier.test_wait.shared::cta.b64 %p2, [%r2], %rd4;
mbarrier.arrive.noComplete.shared::cta.b64 %rd5, [%r2], 1;
mbarrier.pending_count.b64 %r4, %rd5;
mbarrier.arrive.shared::cta.b64 %rd6, [%r2], 2;
mbarrier.pending_count.b64 %r5, %rd6;
mbarrier.test_wait.shared::cta.b64 %p3, [%r2], %rd4;
mbarrier.try_wait.shared::cta.b64 %p4, [%r2], %rd6;
selp.u32 %r6, 1, 0, %p2;
selp.u32 %r7, 1, 0, %p3;
selp.u32 %r8, 1, 0, %p4;
st.global.v2.u32 [%rd1], {%r3, %r4};
st.global.v2.u32 [%rd1+8], {%r5, %r6};
st.global.v2.u32 [%rd1+16], {%r7, %r8};
"""
    np.testing.assert_array_equal(run(once(body, shared=BARRIER), [words(6)]), [5, 3, 2, 0, 1, 1])


def test_arrive_drop_lowers_the_next_phase():
    body = """mov.u32 %r2, bar;
mbarrier.init.shared::cta.b64 [%r2], 3;
mbarrier.arrive_drop.shared::cta.b64 _, [%r2];
mbarrier.arrive.shared::cta.b64 _, [%r2], 2;
mbarrier.arrive.shared::cta.b64 %rd4, [%r2];
mbarrier.pending_count.b64 %r3, %rd4;
mbarrier.arrive.shared::cta.b64 %rd4, [%r2];
mbarrier.test_wait.shared::cta.b64 %p2, [%r2], %rd4;
selp.u32 %r4, 1, 0, %p2;
st.global.v2.u32 [%rd1], {%r3, %r4};
"""
    np.testing.assert_array_equal(run(once(body, shared=BARRIER), [words(2)]), [2, 1])


def test_bytes_and_arrivals_both_end_a_phase():
    body = """mov.u32 %r2, bar;
mbarrier.init.shared::cta.b64 [%r2], 1;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 256;
mbarrier.test_wait.parity.shared::cta.b64 %p2, [%r2], 0;
mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r2], 256;
mbarrier.test_wait.parity.shared::cta.b64 %p3, [%r2], 0;
mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r2], 64;
mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 %rd4, [%r2], 128;
mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r2], 16;
mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r2], 80;
mbarrier.test_wait.acquire.cta.shared::cta.b64 %p4, [%r2], %rd4;
selp.u32 %r3, 1, 0, %p2;
selp.u32 %r4, 1, 0, %p3;
selp.u32 %r5, 1, 0, %p4;
st.global.v2.u32 [%rd1], {%r3, %r4};
st.global.u32 [%rd1+8], %r5;
"""
    np.testing.assert_array_equal(run(once(body, shared=BARRIER), [words(3)]), [0, 1, 1])


def test_generic_addresses_reach_the_barrier():
    body = """mov.u32 %r2, bar;
cvt.u64.u32 %rd4, %r2;
cvta.shared.u64 %rd4, %rd4;
mbarrier.init.b64 [%rd4], 1;
mbarrier.arrive.b64 %rd5, [%rd4];
mbarrier.test_wait.b64 %p2, [%rd4], %rd5;
selp.u32 %r3, 1, 0, %p2;
st.global.u32 [%rd1], %r3;
"""
    assert run(once(body, shared=BARRIER), [words(1)])[0] == 1


def test_arrivals_of_one_warp_may_end_two_phases():
    text = ptx(
        init(16) + "mbarrier.arrive.shared::cta.b64 _, [%r2];\n"
        "mbarrier.test_wait.parity.shared::cta.b64 %p2, [%r2], 1;\nselp.u32 %r3, 1, 0, %p2;\n" + store("%r3"),
        shared=BARRIER,
    )
    np.testing.assert_array_equal(run(text, [words(32)]), 1)  # two phases on: the current one is 2


def test_test_wait_polls_until_another_warp_arrives():
    text = ptx(
        init(1)
        + """setp.lt.u32 %p2, %r1, 32;
@%p2 bra WAIT;
setp.eq.u32 %p3, %r1, 32;
@%p3 mbarrier.arrive.shared::cta.b64 _, [%r2];
bra DONE;
WAIT:
mbarrier.test_wait.parity.shared::cta.b64 %p4, [%r2], 0;
@!%p4 bra WAIT;
DONE:
"""
        + store("%r1"),
        shared=BARRIER,
    )
    np.testing.assert_array_equal(run(text, [words(64)], block=64), np.arange(64))


def test_lanes_that_can_go_on_do_not_wait_for_those_that_cannot():
    """Lane 0's barrier is complete; only its next arrival lets the other lanes through. How a GPU's compiler
    lets the lanes reconverge after the loop is its own affair, so this is not compared with one."""
    text = ptx(
        """mov.u32 %r2, bar;
@%p1 mbarrier.init.shared::cta.b64 [%r2], 1;
@%p1 mbarrier.init.shared::cta.b64 [%r2+8], 1;
@%p1 mbarrier.arrive.shared::cta.b64 _, [%r2];
bar.sync 0;
selp.u32 %r3, 0, 8, %p1;
add.u32 %r3, %r3, %r2;
W:
mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], 0;
@!%p2 bra W;
@%p1 mbarrier.arrive.shared::cta.b64 _, [%r2+8];
"""
        + store("%r1"),
        shared=BARRIER,
    )
    np.testing.assert_array_equal(run(text, [words(32)], on_gpu=False), np.arange(32))


def test_inval_frees_the_word_for_another_count():
    body = """mov.u32 %r2, bar;
mbarrier.init.shared::cta.b64 [%r2], 4;
mbarrier.inval.shared::cta.b64 [%r2];
mbarrier.init.shared::cta.b64 [%r2], 1;
mbarrier.arrive.shared::cta.b64 %rd4, [%r2];
mbarrier.test_wait.shared::cta.b64 %p2, [%r2], %rd4;
selp.u32 %r3, 1, 0, %p2;
st.global.u32 [%rd1], %r3;
"""
    assert run(once(body, shared=BARRIER), [words(1)])[0] == 1


def test_remote_arrivals_in_a_cluster():
    """Every CTA waits for one arrival from each CTA of the cluster."""
    body = """mov.u32 %r2, bar;
mov.u32 %r10, %cluster_ctarank;
mov.u32 %r11, %cluster_nctarank;
@%p1 mbarrier.init.shared::cta.b64 [%r2], %r11;
@%p1 fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
setp.lt.u32 %p2, %r1, %r11;
mapa.shared::cluster.u32 %r3, %r2, 0;
@%p2 mapa.shared::cluster.u32 %r3, %r2, %r1;
@%p2 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r3];
W:
mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p10, [%r2], 0;
@!%p10 bra W;
barrier.cluster.arrive.release.aligned;
barrier.cluster.wait.acquire.aligned;
mov.u32 %r12, %ctaid.x;
"""
    text = ptx(body + "@%p1 " + "bra S;\nbra E;\nS:\n" + store("%r10", "%r12") + "E:\n", shared=BARRIER)
    np.testing.assert_array_equal(run(text, [words(8)], grid=8, cluster=4), [0, 1, 2, 3] * 2)


def fails(text, code, match=None, *, block=32, cluster=1, grid=1, error=Fault, order="eager"):
    with pytest.raises(error, match=match) as caught:
        engine.load(text).launch(grid, block, [words(64)], cluster=cluster, order=order)
    assert caught.value.code == code
    return str(caught.value)


def test_uninitialised_barrier():
    text = fails(
        once("mov.u32 %r2, bar;\nmbarrier.arrive.shared::cta.b64 _, [%r2];", shared=BARRIER),
        "barrier-uninitialised",
    )
    assert "PTX line" in text and "warp 0" in text


def test_misaligned_barrier():
    fails(
        once("mov.u32 %r2, bar;\nmbarrier.init.shared::cta.b64 [%r2+4], 1;", shared=BARRIER),
        "misaligned",
        "multiple of 8",
    )


def test_barrier_outside_shared_memory():
    fails(
        once("mov.u32 %r2, 0x8000;\nmbarrier.init.shared::cta.b64 [%r2], 1;", shared=BARRIER), "out-of-bounds"
    )


def test_more_arrivals_than_pending():
    body = "mov.u32 %r2, bar;\nmbarrier.init.shared::cta.b64 [%r2], 2;\nmbarrier.arrive.shared::cta.b64 _, [%r2], 3;"
    fails(once(body, shared=BARRIER), "barrier-count", "3 more arrival.*2 of 2")


def test_count_out_of_range():
    fails(once("mov.u32 %r2, bar;\nmbarrier.init.shared::cta.b64 [%r2], 0;", shared=BARRIER), "barrier-count")


def test_deadlock_says_what_is_missing():
    body = (
        init(16384) + "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 4096;\n" + wait("%r2", 0, "W")
    )
    text = fails(ptx(body, shared=BARRIER), "deadlock", error=Deadlock)
    assert "16383 of 16384 arrival(s) and 4096 byte(s)" in text and "bar+0" in text


@pytest.mark.parametrize(
    "instruction, why",
    [
        ("mbarrier.arrive.shared::cluster.b64 %rd4, [%r2];", "write _"),
        ("mbarrier.test_wait.parity.shared::cluster.b64 %p2, [%r2], 0;", "own CTA"),
        ("mbarrier.arrive.sideways.shared::cta.b64 _, [%r2];", "sideways"),
        ("mbarrier.leave.shared::cta.b64 [%r2];", "no such operation"),
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
        "setp.ge.u32 %p2, %r1, 64;\n@%p2 ret;\n" + exchange("bar.sync 0;"),
        shared=".shared .align 4 .b8 data[256];",
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
    fails(ptx(body), "barrier-count", "says", block=96)


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
    fails(
        ptx("barrier.cluster.arrive.aligned;\nbarrier.cluster.arrive.aligned;"),
        "barrier-phase",
        "twice",
        block=64,
    )


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


# -- clusterlaunchcontrol --------------------------------------------------------------------------------------------


def test_running_ctas_take_over_the_rest_of_the_grid():
    """Persistent CTAs ask for more work until none is left; every ctaid is done exactly once."""
    body = """mov.u32 %r2, bar;
mov.u32 %r3, answer;
mov.u32 %r4, %ctaid.x;
mov.u32 %r5, 0;
@%p1 mbarrier.init.shared::cta.b64 [%r2], 1;
bar.sync 0;
LOOP:
mul.wide.u32 %rd4, %r4, 4;
add.s64 %rd4, %rd1, %rd4;
@%p1 red.global.add.u32 [%rd4], 1;
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 16;
@%p1 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r3], [%r2];
W:
mbarrier.try_wait.parity.shared::cta.b64 %p10, [%r2], %r5;
@!%p10 bra W;
ld.shared.b128 %answer, [%r3];
xor.b32 %r5, %r5, 1;
bar.sync 0;
clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p2, %answer;
@!%p2 bra DONE;
clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r4, %r6, %r7, _}, %answer;
clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r4, %answer;
bra LOOP;
DONE:
"""
    shared = BARRIER + " .shared .align 16 .b8 answer[16]; .reg .b128 %answer;"
    text = ptx(body, shared=shared, target="sm_100a", version="8.6")
    np.testing.assert_array_equal(run(text, [words(200)], grid=200), 1)


# -- waits that give up --------------------------------------------------------------------------------------------


def test_try_wait_answers_no_when_nothing_else_can_happen():
    """Warp 0 looks at barrier A first, then at B; only what it does after B completes A."""
    body = """mov.u32 %r2, bar;
@%p1 mbarrier.init.shared::cta.b64 [%r2], 1;
@%p1 mbarrier.init.shared::cta.b64 [%r2+8], 1;
bar.sync 0;
mov.u32 %r3, 0;
setp.ge.u32 %p2, %r1, 32;
@%p2 bra OTHER;
LOOK:
mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r2], 0;
@%p3 bra DONE;
mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r2+8], 0;
@!%p4 bra LOOK;
@%p1 mbarrier.arrive.shared::cta.b64 _, [%r2];
mov.u32 %r3, 1;
bra LOOK;
OTHER:
setp.eq.u32 %p5, %r1, 32;
@%p5 mbarrier.arrive.shared::cta.b64 _, [%r2+8];
DONE:
"""
    got = run(ptx(body + store("%r3"), shared=BARRIER), [words(64)], block=64)
    np.testing.assert_array_equal(got, np.repeat([1, 0], 32))


def test_polling_a_barrier_that_never_completes_is_a_deadlock():
    body = "mov.u32 %r2, bar;\n@%p1 mbarrier.init.shared::cta.b64 [%r2], 1;\nbar.sync 0;\n"
    body += "W:\nmbarrier.test_wait.parity.shared::cta.b64 %p2, [%r2], 0;\n@!%p2 bra W;\n"
    fails(ptx(body, shared=BARRIER), "deadlock", "only polls", error=Deadlock, block=64)


def test_polling_lets_late_copies_complete():
    body = """mov.u32 %r2, bar;
@%p1 mbarrier.init.shared::cta.b64 [%r2], 1;
bar.sync 0;
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 16;
@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2+16], [%rd2], 16, [%r2];
W:
mbarrier.test_wait.parity.shared::cta.b64 %p2, [%r2], 0;
@!%p2 bra W;
ld.shared.u32 %r3, [%r2+16];
"""
    text = ptx(body + store("%r3"), "out src", shared=BARRIER.replace("align 8", "align 16"))
    got = run(text, [words(32), words(4, 77)])[0]
    np.testing.assert_array_equal(got, 77)
