"""Warps, divergence, convergence, polling and deadlock: the rules of engine/scheduler.py, one test each."""

from contextlib import nullcontext

import numpy as np
import pytest

import softsm
from softsm.errors import Deadlock, Fault, StepBudget


def kernel(body: str, registers: str = "", params: str = ".param .u64 x, .param .u32 n", shared: str = "") -> str:
    return f"""
.version 8.0 .target sm_90a .address_size 64
.visible .entry k({params})
{{
  .reg .b32 %r<32>; .reg .b64 %rd<16>; .reg .pred %p<8>; .reg .b16 %h<4>; {registers}
  {shared}
  ld.param.u64 %rd1, [x];
  ld.param.u32 %r1, [n];
  mov.u32 %r2, %tid.x;
  mul.wide.u32 %rd2, %r2, 4;
  add.s64 %rd3, %rd1, %rd2;
  {body}
}}"""


def run(body: str, n: int = 0, block: int = 64, grid: int = 1, words: int = 64, shared: str = "", **options):
    x = np.zeros(words, np.uint32)
    softsm.load(kernel(body, shared=shared)).launch(grid, block, [x, n], **options)
    return x


def test_lanes_that_jump_back_wait_for_those_that_jump_later():
    """The compiler's `if` at the end of a loop, as behind erf(): without the wait each half of the warp makes its own
    turns, 300 instructions more."""
    x = np.zeros(32, np.uint32)
    machine = softsm.load(
        kernel("""
  mov.u32 %r3, 0; mov.u32 %r4, 0; bra.uni FIRST;
NEXT: add.u32 %r3, %r3, 1; setp.ge.u32 %p1, %r3, %r1; @%p1 bra DONE;
FIRST: add.u32 %r4, %r4, 1; add.u32 %r5, %r3, %r2; and.b32 %r5, %r5, 1; setp.eq.u32 %p2, %r5, 0;
  @%p2 bra NEXT;
  add.u32 %r4, %r4, 100;
  bra.uni NEXT;
DONE: st.global.u32 [%rd3], %r4; ret;""")
    ).launch(1, 32, [x, 40])
    assert (x == 40 + 20 * 100).all()
    assert 40 * 10 < machine.steps < 40 * 10 + 50


def test_lanes_that_leave_a_loop_early_wait_for_the_others():
    x = run("""
  mov.u32 %r3, 0; mov.u32 %r4, 0;
LOOP: add.u32 %r3, %r3, 1; add.u32 %r4, %r4, %r3;
  setp.lt.u32 %p1, %r3, %r2; @%p1 bra LOOP;
  st.global.u32 [%rd3], %r4; ret;""")
    i = np.arange(64)
    assert np.array_equal(x, np.where(i > 0, i * (i + 1) // 2, 1))


def test_both_sides_of_a_branch_meet_at_the_join():
    x = run("""
  and.b32 %r3, %r2, 1; setp.eq.u32 %p1, %r3, 0; @%p1 bra EVEN;
  mov.u32 %r4, 100; bra JOIN;
EVEN: mov.u32 %r4, 200;
JOIN: shfl.sync.bfly.b32 %r5, %r4, 1, 31, -1;
  st.global.u32 [%rd3], %r5; ret;""")
    assert np.array_equal(x, np.where(np.arange(64) % 2, 200, 100))


def test_exited_lanes_are_not_waited_for():
    x = run("""
  setp.lt.u32 %p1, %r2, 40; @!%p1 exit;
  bar.warp.sync -1; activemask.b32 %r3; st.global.u32 [%rd3], %r3; ret;""")
    assert x[0] == 0xFFFFFFFF and x[32] == 0xFF and x[40] == 0


def test_an_aligned_instruction_in_a_part_of_the_warp_is_named():
    with pytest.raises(Fault, match="divergent") as error:
        run("""
  setp.lt.u32 %p1, %r2, 5; @%p1 bra FEW;
  vote.sync.any.pred %p2, %p1, -1; ret;
FEW: vote.sync.any.pred %p3, %p1, -1; ret;""")
    assert "line" in str(error.value)


def test_brx_idx_sends_each_lane_to_its_target():
    x = run("""
  and.b32 %r3, %r2, 3;
TARGETS: .branchtargets A, B, C, D;
  brx.idx %r3, TARGETS;
A: mov.u32 %r4, 10; bra JOIN;
B: mov.u32 %r4, 11; bra JOIN;
C: mov.u32 %r4, 12; bra JOIN;
D: mov.u32 %r4, 13; bra JOIN;
JOIN: st.global.u32 [%rd3], %r4; ret;""")
    assert np.array_equal(x, 10 + np.arange(64) % 4)


def test_a_lane_may_spin_on_what_another_lane_of_its_warp_will_write():
    x = run(
        """
  setp.eq.u32 %p1, %r2, 0; @!%p1 bra WRITE;
SPIN: ld.volatile.global.u32 %r3, [%rd1+128]; setp.eq.u32 %p2, %r3, 0; @%p2 bra SPIN;
  bra DONE;
WRITE: mov.u32 %r4, 7; st.volatile.global.u32 [%rd1+128], %r4;
DONE: st.global.u32 [%rd3], %r2; ret;""",
        block=32,
    )
    assert x[32] == 7 and x[31] == 31


def test_ctas_can_wait_for_each_other_through_global_memory():
    """In a grid barrier every CTA adds one and spins until all have."""
    x = run(
        """
  setp.ne.u32 %p1, %r2, 0; @%p1 bra DONE;
  atom.global.add.u32 %r3, [%rd1], 1;
SPIN: ld.acquire.gpu.global.u32 %r4, [%rd1]; setp.lt.u32 %p2, %r4, %r1; @%p2 bra SPIN;
DONE: ret;""",
        n=8,
        grid=8,
    )
    assert x[0] == 8


def test_polling_for_what_nobody_writes_is_a_deadlock():
    with pytest.raises(Deadlock, match="only polls"):
        run("SPIN: ld.volatile.global.u32 %r3, [%rd1]; setp.eq.u32 %p2, %r3, 0; @%p2 bra SPIN; ret;")


COUNTS = "add.u32 %r5, %r5, 1; min.u32 %r6, %r5, 64; mov.u64 %rd5, %clock64; nanosleep.u32 %r6;"


@pytest.mark.parametrize("checked", [True, False])
def test_polling_that_counts_its_turns_is_a_deadlock(checked):
    """Nothing of the loop depends on the number of turns, or on the time."""
    loop = (
        f"mov.u32 %r5, 0; SPIN: {COUNTS} ld.volatile.global.u32 %r3, [%rd1]; setp.eq.u32 %p2, %r3, 0; @%p2 bra SPIN; "
    )
    with softsm.checking() if checked else nullcontext(), pytest.raises(Deadlock, match="only polls"):
        run(loop + "st.global.u32 [%rd1], %r5; ret;", budget=1_000_000)


def test_polling_that_gives_up_is_no_deadlock():
    """After a number of turns, or after some time."""
    poll = "ld.volatile.global.u32 %r3, [%rd1]; setp.ne.u32 %p2, %r3, 0; @%p2 bra DONE; bra SPIN; DONE: ret;"
    for limit in ("setp.gt.u32 %p1, %r5, 9000; @%p1 bra DONE;", "setp.gt.u64 %p1, %rd5, 200000; @%p1 ret;"):
        run(f"mov.u32 %r5, 0; SPIN: {COUNTS} {limit} {poll}")


def test_a_divergent_warp_that_only_polls_is_a_deadlock():
    """Two halves of a warp poll two words, each in a loop of its own."""
    body = """
  setp.lt.u32 %p1, %r2, 16; @%p1 bra LOW;
HIGH: ld.volatile.global.u32 %r3, [%rd1]; setp.eq.u32 %p2, %r3, 0; @%p2 bra HIGH; ret;
LOW: ld.volatile.global.u32 %r3, [%rd1+4]; setp.eq.u32 %p2, %r3, 0; @%p2 bra LOW; ret;"""
    with pytest.raises(Deadlock, match="only polls") as found:
        run(body)
    assert "warps 0, 1 of CTA (0, 0, 0) poll at PTX line" in str(found.value)
    assert "warp 0 of CTA (0, 0, 0) polls at PTX line" in str(found.value)


def test_polling_is_a_deadlock_under_the_checkers_too():
    with softsm.checking() as report, pytest.raises(Deadlock, match="only polls"):
        run("SPIN: ld.acquire.gpu.global.u32 %r3, [%rd1]; setp.eq.u32 %p2, %r3, 0; @%p2 bra SPIN; ret;")
    assert report.codes() == ["deadlock"]


POLL_AND_MEET = """
LOOP: setp.ne.u32 %p1, %r2, 0; @%p1 bra MEET;
  atom.global.add.u32 %r3, [%rd1], 0; st.shared.u32 [flag], %r3;
MEET: bar.sync 0; ld.shared.u32 %r3, [flag]; bar.sync 0;
  setp.eq.u32 %p2, %r3, 0; @%p2 bra LOOP; ret;"""


@pytest.mark.parametrize("order", ["eager", "latest", "random"])
def test_polling_that_goes_through_barriers_is_a_deadlock(order):
    """Triton polls like this: one thread reads, passes the value through shared memory, and all meet twice per
    round."""
    with pytest.raises(Deadlock, match="only polls"):
        run(POLL_AND_MEET, shared=".shared .u32 flag;", order=order)


@pytest.mark.parametrize("order", ["latest", "random"])
def test_polling_through_the_barriers_of_many_ctas_is_a_deadlock(order):
    """A round of 128 warps has more turns than are compared."""
    with pytest.raises(Deadlock, match="only polls"):
        run(POLL_AND_MEET, shared=".shared .u32 flag;", order=order, grid=32, block=128, sms=32)


def test_many_barriers_are_no_deadlock():
    x = run(
        """
  mov.u32 %r3, 0;
LOOP: bar.sync 0; add.u32 %r3, %r3, 1; setp.lt.u32 %p2, %r3, 6000; @%p2 bra LOOP;
  st.global.u32 [%rd1], %r3; ret;""",
        block=64,
    )
    assert x[0] == 6000


@pytest.mark.parametrize("loop", ["add.u32 %r3, %r3, 1;", "add.u32 %r3, %r3, 1; bar.sync 0;"])
def test_an_endless_loop_ends_at_the_budget(loop):
    """Also one whose warps wait for each other and never run for long."""
    with pytest.raises(StepBudget, match="budget 30000"):
        run(f"LOOP: {loop} bra LOOP;", budget=30_000, order="random")


BEATS = "BEAT: add.u32 %r3, %r3, 1; st.volatile.global.u32 [%rd1+4], %r3; ld.volatile.global.u32 %r4, [%rd1];"


def test_a_loop_that_changes_memory_for_ever_ends_with_patience():
    loop = f"{BEATS} setp.eq.u32 %p1, %r4, 0; @%p1 bra BEAT; ret;"
    with softsm.checking() as report, pytest.raises(StepBudget, match="completed in 5000 operations"):
        run(loop, patience=5_000)
    assert report.codes() == ["step-budget"], str(report)
    assert "warps 0, 1 of CTA (0, 0, 0) run at PTX line" in str(report), str(report)


def test_patience_begins_anew_with_progress():
    """Warp n stores 200 (n + 1) times, so that one ends after another."""
    last = "shr.u32 %r5, %r2, 5; mad.lo.u32 %r5, %r5, 200, 200; mov.u32 %r3, 0;"
    loop = f"{last} {BEATS} setp.lt.u32 %p1, %r3, %r5; @%p1 bra BEAT; ret;"
    with softsm.checking():
        run(loop, block=256, patience=6_000)
        with pytest.raises(StepBudget):
            run(loop, block=256, patience=600)


def test_polling_with_a_limit_of_time_does_not_hold_up_copies():
    """DeepGEMM's barriers of a grid read the clock in their loops. Operations in flight complete as soon as all warps
    only poll; a loop that waits for time to pass goes on."""
    body = """
  setp.ge.u32 %p1, %r2, 32; @%p1 bra POLL;
  setp.ne.u32 %p2, %r2, 0; @%p2 bra END;
  mbarrier.init.shared.b64 [bar], 1;
  mov.u32 %r5, 0;
AGAIN: mbarrier.arrive.expect_tx.shared.b64 _, [bar], 128;
  cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [tile], [%rd1], 128, [bar];
  and.b32 %r6, %r5, 1;
WAIT: mbarrier.test_wait.parity.shared.b64 %p3, [bar], %r6; @!%p3 bra WAIT;
  add.u32 %r5, %r5, 1; setp.lt.u32 %p4, %r5, 20; @%p4 bra AGAIN;
  st.release.gpu.global.u32 [%rd1+4], 1;
  bra END;
POLL: setp.ne.u32 %p2, %r2, 32; @%p2 bra END;
  mov.u64 %rd5, %clock64;
ASK: ld.acquire.gpu.global.u32 %r4, [%rd1+4];
  mov.u64 %rd6, %clock64; sub.u64 %rd6, %rd6, %rd5; setp.gt.u64 %p5, %rd6, 4000000000; @%p5 trap;
  setp.eq.u32 %p6, %r4, 0; @%p6 bra ASK;
  mov.u64 %rd5, %clock64;
LATER: mov.u64 %rd6, %clock64; sub.u64 %rd6, %rd6, %rd5; setp.lt.u64 %p5, %rd6, 100000; @%p5 bra LATER;
  st.global.u32 [%rd1+8], 7;
END: ret;"""
    shared = ".shared .align 128 .b8 tile[128]; .shared .b64 bar;"
    assert run(body, shared=shared, order="latest", budget=3_000_000)[2] == 7


LIMITS = {
    "a flag": """ASK: ld.acquire.gpu.global.u32 %r4, [%rd1]; setp.ne.u32 %p6, %r4, 0; @%p6 bra DONE;""",
    "an mbarrier": """setp.eq.u32 %p2, %r2, 0; @%p2 mbarrier.init.shared.b64 [bar], %r1; bar.warp.sync -1;
  mbarrier.arrive.shared.b64 _, [bar];
ASK: mbarrier.try_wait.parity.shared.b64 %p6, [bar], 0; @%p6 bra DONE;""",
}


@pytest.mark.parametrize("what", LIMITS)
@pytest.mark.parametrize("clock", ["clock64", "globaltimer"])
def test_a_limit_of_time_does_not_hide_a_deadlock(what, clock):
    """The loop would trap after 10 s, which are reached at once if nothing else can happen."""
    late = f"mov.u64 %rd6, %{clock}; sub.u64 %rd6, %rd6, %rd5; setp.gt.u64 %p5, %rd6, 10000000000; @%p5 trap; bra ASK;"
    body = f"mov.u64 %rd5, %{clock}; {LIMITS[what]} {late} DONE: st.global.u32 [%rd1+4], 1; ret;"
    shared = ".shared .b64 bar;"
    first = (
        "setp.eq.u32 %p1, %r2, 32; @%p1 st.release.gpu.global.u32 [%rd1], 1; @%p1 exit; " if what == "a flag" else ""
    )
    assert run(first + body, n=32, block=33 if first else 32, shared=shared, budget=10_000_000)[1] == 1
    with pytest.raises(Deadlock, match="limit of time .trap."):
        run(body, n=33, block=32, shared=shared, budget=10_000_000)


def test_a_delay_of_seconds_ends_at_once():
    body = """mov.u64 %rd5, %globaltimer;
LATER: mov.u64 %rd6, %globaltimer; sub.u64 %rd6, %rd6, %rd5; setp.lt.u64 %p5, %rd6, 3000000000; @%p5 bra LATER;
  st.global.u32 [%rd3], 7; ret;"""
    assert (run(body, block=32, words=32, budget=30_000_000) == 7).all()


def test_a_device_function_is_called_and_returns():
    ptx = """
.version 8.0 .target sm_90a .address_size 64
.func (.param .b32 out) twice(.param .b32 a)
{ .reg .b32 %r<4>; ld.param.u32 %r1, [a]; add.u32 %r2, %r1, %r1; st.param.b32 [out], %r2; ret; }
.visible .entry k(.param .u64 x)
{
  .reg .b32 %r<8>; .reg .b64 %rd<8>;
  ld.param.u64 %rd1, [x]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4; add.s64 %rd1, %rd1, %rd2;
  { .param .b32 p0; .param .b32 r0; st.param.b32 [p0], %r1; call.uni (r0), twice, (p0); ld.param.b32 %r2, [r0]; }
  st.global.u32 [%rd1], %r2; ret;
}"""
    x = np.zeros(32, np.uint32)
    softsm.load(ptx).launch(1, 32, [x])
    assert np.array_equal(x, 2 * np.arange(32))


def test_seeds_give_the_same_schedule_again():
    body = """
  atom.global.add.u32 %r3, [%rd1], 1; add.u32 %r4, %r3, 1; mul.wide.u32 %rd4, %r4, 4; add.s64 %rd5, %rd1, %rd4;
  st.global.u32 [%rd5], %r2; ret;"""
    first = run(body, block=256, words=512, order="random", seed=3)
    assert np.array_equal(first, run(body, block=256, words=512, order="random", seed=3))
    assert not np.array_equal(first, run(body, block=256, words=512, order="random", seed=4))
