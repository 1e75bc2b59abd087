"""mbarrier: one rule per test, under every order of completion."""

import numpy as np
import pytest
from launching import fails, ptx, run, store, wait, words

import softsm.engine.launch as engine
from softsm.errors import Deadlock, Fault, Unsupported
from softsm.isa import mbarriers

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


ANSWER = "mbarrier.test_wait.parity.shared::cta.b64 %p2, [%r2], 1;\nselp.u32 %r3, 1, 0, %p2;\n" + store("%r3")


def test_arrivals_of_one_warp_may_end_two_phases():
    """Each of two instructions ends one."""
    half = "setp.lt.u32 %p3, %r1, 16;\n@%p3 mbarrier.arrive.shared::cta.b64 _, [%r2];\nbar.warp.sync -1;\n"
    half += "@!%p3 mbarrier.arrive.shared::cta.b64 _, [%r2];\nbar.warp.sync -1;\n"
    got = run(ptx(init(16) + half + ANSWER, shared=BARRIER), [words(32)])
    np.testing.assert_array_equal(got, 1)  # two phases on: the current one is 2


@pytest.mark.parametrize("form", ["arrive.shared::cta.b64 _, [%r2]", "arrive.shared::cta.b64 %rd5, [%r2]",
                                  "arrive.expect_tx.shared::cta.b64 _, [%r2], 0"])  # fmt: skip
def test_one_instruction_cannot_arrive_more_often_than_expected(form):
    """32 lanes on a barrier of 16: a GPU faults."""
    fails(ptx(init(16) + f"mbarrier.{form};\n" + ANSWER, shared=BARRIER), "barrier-count", "32 more arrival")


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


def test_uninitialised_barrier():
    text = fails(
        once("mov.u32 %r2, bar;\nmbarrier.arrive.shared::cta.b64 _, [%r2];", shared=BARRIER), "barrier-uninitialised"
    )
    assert "PTX line" in text and "warp 0" in text


def test_misaligned_barrier():
    fails(
        once("mov.u32 %r2, bar;\nmbarrier.init.shared::cta.b64 [%r2+4], 1;", shared=BARRIER),
        "misaligned",
        "multiple of 8",
    )


def test_barrier_outside_shared_memory():
    fails(once("mov.u32 %r2, 0x8000;\nmbarrier.init.shared::cta.b64 [%r2], 1;", shared=BARRIER), "out-of-bounds")


def test_more_arrivals_than_pending():
    body = "mov.u32 %r2, bar;\nmbarrier.init.shared::cta.b64 [%r2], 2;\nmbarrier.arrive.shared::cta.b64 _, [%r2], 3;"
    fails(once(body, shared=BARRIER), "barrier-count", "3 more arrival.*2 of 2")


def test_count_out_of_range():
    fails(once("mov.u32 %r2, bar;\nmbarrier.init.shared::cta.b64 [%r2], 0;", shared=BARRIER), "barrier-count")


def test_deadlock_says_what_is_missing():
    body = init(16384) + "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 4096;\n" + wait("%r2", 0, "W")
    text = fails(ptx(body, shared=BARRIER), "deadlock", error=Deadlock)
    assert "16383 of 16384 arrival(s) and 4096 byte(s)" in text and "bar+0" in text


@pytest.mark.parametrize(
    "instruction, why",
    [
        ("mbarrier.arrive.shared::cluster.b64 %rd4, [%r2];", "write _"),
        ("mbarrier.test_wait.parity.shared::cluster.b64 %p2, [%r2], 0;", "own CTA"),
        ("mbarrier.arrive.sideways.shared::cta.b64 _, [%r2];", "sideways"),
        ("mbarrier.leave.shared::cta.b64 [%r2];", "no such operation"),
    ],
)
def test_unknown_forms_are_refused_when_loaded(instruction, why):
    with pytest.raises(Unsupported, match=why):
        engine.load(ptx(instruction, shared=BARRIER))


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


def test_a_wait_that_is_over_needs_no_macro_operation(monkeypatch):
    """Lanes that ask for one phase are answered in the compiled loop, others by the macro-operation: alike."""
    asked = []
    answers = mbarriers._answers

    def counted(w, mask, o):
        asked.append(mask)
        return answers(w, mask, o)

    monkeypatch.setattr(mbarriers, "_answers", counted)
    body = (
        init(32)
        + """mbarrier.arrive.shared::cta.b64 _, [%r2];
and.b32 %r4, %r1, {parity};
mbarrier.test_wait.parity.shared::cta.b64 %p2, [%r2], %r4;
selp.u32 %r3, 1, 0, %p2;
"""
        + store("%r3")
    )
    one = ptx(body.format(parity=0), shared=BARRIER)
    np.testing.assert_array_equal(run(one, [words(32)], block=32), 1)
    assert not asked
    two = ptx(body.format(parity=1), shared=BARRIER)
    np.testing.assert_array_equal(run(two, [words(32)], block=32), 1 - np.arange(32) % 2)
    assert asked


def test_a_barrier_that_is_gone_answers_nobody():
    body = once(
        """mov.u32 %r2, bar;
mbarrier.init.shared.b64 [%r2], 1;
mbarrier.inval.shared.b64 [%r2];
mbarrier.test_wait.parity.shared.b64 %p2, [%r2], 1;""",
        shared=BARRIER,
    )
    with pytest.raises(Fault, match="is used after mbarrier.inval by warp 0"):
        run(body, [words(32)], block=32)
