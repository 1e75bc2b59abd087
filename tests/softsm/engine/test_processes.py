"""One launch in several processes gives what one process gives: values, steps, errors and findings."""

import contextlib
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

import softsm
from softsm.engine import processes
from softsm.errors import Fault, StepBudget

CTAS, THREADS = 24, 64
ARRAYS = [np.zeros(CTAS * THREADS, np.uint32) for _ in range(2)]  # the same ones each time: reports have addresses
HEAD = """
.version 8.0 .target sm_90a .address_size 64
.visible .entry k(.param .u64 x, .param .u64 y)
{
  .reg .b32 %r<16>; .reg .b64 %rd<8>; .reg .pred %p<4>; .shared .align 8 .b8 bar[8];
  .shared .align 16 .b8 buffer[16];
  ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [y]; mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mov.u32 %r3, %nctaid.x;
  mad.lo.u32 %r4, %r2, 64, %r1; mul.wide.u32 %rd3, %r4, 4; add.u64 %rd4, %rd1, %rd3; mov.u32 %r5, 0;
LOOP:
  add.u32 %r5, %r5, 1; setp.lt.u32 %p1, %r5, 50; @%p1 bra LOOP;
"""
SUM = "ld.global.u32 %r6, [%rd4]; add.u32 %r6, %r6, %r5; st.global.u32 [%rd4], %r6; ret; }"
# Bytes of one word by different CTAs: thread t of CTA c writes byte t * CTAs + c.
BYTES = """mad.lo.u32 %r6, %r1, %r3, %r2; cvt.u64.u32 %rd5, %r6; add.u64 %rd6, %rd2, %rd5; st.global.u8 [%rd6], %r2;
  ret; }"""
# The last CTA does something wrong.
LAST = "sub.u32 %r7, %r3, 1; setp.eq.u32 %p2, %r2, %r7; "
WILD = LAST + "@%p2 st.global.u32 [%rd1+1048576], %r5; ret; }"
STUCK = (
    LAST
    + """@!%p2 bra DONE; mov.u32 %r8, bar; setp.eq.u32 %p3, %r1, 0; @%p3 mbarrier.init.shared.b64 [%r8], 1;
  bar.sync 0;
WAIT: mbarrier.try_wait.parity.shared.b64 %p3, [%r8], 0; @!%p3 bra WAIT;
DONE: ret; }"""
)
RACE = (
    LAST
    + """setp.eq.u32 %p3, %r2, 0; or.pred %p2, %p2, %p3; add.u32 %r9, %r2, 1; setp.eq.u32 %p3, %r1, 0;
  and.pred %p2, %p2, %p3; @%p2 st.global.u32 [%rd2], %r9; ret; }"""
)
LOOK = (
    LAST
    + """setp.eq.u32 %p3, %r1, 0; and.pred %p2, %p2, %p3; @%p2 st.global.u32 [%rd2], %r5;
  setp.eq.u32 %p2, %r2, 0; and.pred %p2, %p2, %p3; @%p2 ld.global.u32 %r9, [%rd2]; ret; }"""
)
EQUAL = "setp.eq.u32 %p2, %r1, 0; @%p2 st.global.u32 [%rd2], %r5; ret; }"
# Every CTA adds to one word, and nothing orders them: the sum depends on who comes when.
ADD = """setp.eq.u32 %p2, %r1, 0; @%p2 ld.global.u32 %r6, [%rd2]; add.u32 %r6, %r6, %r5;
  @%p2 st.global.u32 [%rd2], %r6; ret; }"""
# 20 barriers: 40 turns and more of each CTA.
LONG = """mov.u32 %r9, 0;
AGAIN: bar.sync 0; add.u32 %r9, %r9, 1; setp.lt.u32 %p2, %r9, 20; @%p2 bra AGAIN; ret; }"""
POLL = """mov.u32 %r8, bar; setp.eq.u32 %p3, %r1, 0; @!%p3 bra DONE; mbarrier.init.shared.b64 [%r8], 1;
  mbarrier.arrive.expect_tx.shared.b64 _, [%r8], 16; mov.u32 %r7, buffer;
  cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r7], [%rd2], 16, [%r8];
WAIT: mbarrier.test_wait.parity.shared.b64 %p3, [%r8], 0; @!%p3 bra WAIT;
  ld.shared.u32 %r6, [%r7]; st.global.u32 [%rd4], %r6;
DONE: ret; }"""
COUNT = "atom.global.add.u32 %r6, [%rd2], 1; ret; }"


@pytest.fixture
def alone(monkeypatch):
    """No launch is divided while other threads run. Those that earlier tests left (a compiler's pool, a progress bar's)
    do not count here, and may end meanwhile."""
    count, left = threading.active_count, threading.active_count() - 1
    monkeypatch.setattr(processes.threading, "active_count", lambda: max(count() - left, 1))


@pytest.fixture
def divided(monkeypatch, alone):
    """Divide at the first turn; of each launch that was, how many processes there were and whether they counted."""
    launches = []
    monkeypatch.setattr(processes, "TURNS", 1)
    original = processes.Processes.outcomes

    def outcomes(self, shares):
        done = original(self, shares)
        launches.append((len(shares), done is not None and self.agree(done)))
        return done

    monkeypatch.setattr(processes.Processes, "outcomes", outcomes)
    return launches


def launch(body: str, processes: int, x=None, **options):
    """The arrays afterwards, and the steps. x: another array to be written."""
    x = ARRAYS[0] if x is None else x
    y = ARRAYS[1]
    x[:], y[:] = np.arange(CTAS * THREADS), 0x55555555
    machine = softsm.load(HEAD + body).launch(CTAS, THREADS, [x, y], processes=processes, **options)
    return x.copy(), y.copy(), machine.steps


def outcome(body: str, processes: int, order: str = "latest", checked: bool = False, strict: bool = False):
    """All that a program can see of a launch: memory, steps, error and report, addresses included."""
    with contextlib.ExitStack() as stack:
        report = stack.enter_context(softsm.checking(strict=strict)) if checked else None
        steps, error = 0, None
        try:
            steps = launch(body, processes, order=order)[2]
        except Fault as fault:
            error = str(fault)
    return ARRAYS[0].tobytes(), ARRAYS[1].tobytes(), steps, error, str(report)


@pytest.mark.parametrize("order", ["eager", "latest"])
@pytest.mark.parametrize("body", [SUM, BYTES], ids=["words", "bytes of one word"])
@pytest.mark.parametrize("processes", [2, 3])
def test_launches_in_which_nothing_happens_end_in_several_processes(divided, body, order, processes):
    for got, want in zip(launch(body, processes, order=order), launch(body, 1, order=order)):
        assert np.array_equal(got, want)
    assert divided == [(processes, True)]


def test_checked_launches_too(divided):
    assert outcome(SUM, 2, checked=True) == outcome(SUM, 1, checked=True)
    assert divided == [(2, True)]


@pytest.mark.parametrize("checked", [False, True], ids=["unchecked", "checked"])
@pytest.mark.parametrize(
    "body",
    [WILD, STUCK, RACE, EQUAL, ADD, BYTES],
    ids=["fault", "deadlock", "two stores", "equal values", "read, add, write", "bytes of one word"],
)
@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_everything_is_that_of_one_process(divided, body, checked, processes):
    """Memory, steps, errors, findings and their order, however many processes there are."""
    assert outcome(body, processes, checked=checked) == outcome(body, 1, checked=checked)
    assert [p for p, _ in divided] == [processes]


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.compile)])
@pytest.mark.parametrize("body", [LOOK, ADD, RACE, EQUAL], ids=["look", "add", "race", "equal"])
def test_a_word_that_two_clusters_touch_and_one_writes_is_judged_by_one_process(divided, body, strict):
    alone = outcome(body, 1, checked=True, strict=strict)
    assert outcome(body, 3, checked=True, strict=strict) == alone
    assert divided == [(3, False)]


@pytest.mark.parametrize("turns", [1, 2, 7, 30])
@pytest.mark.parametrize("checked", [False, True], ids=["unchecked", "checked"])
def test_a_race_looks_the_same_wherever_it_is_divided(monkeypatch, turns, checked):
    monkeypatch.setattr(processes, "TURNS", turns)
    assert outcome(ADD, 2, checked=checked) == outcome(ADD, 1, checked=checked)


def test_a_busy_machine_changes_nothing(divided):
    """Other processes use all CPUs."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * processes.processes())]
    try:
        assert outcome(ADD, 2, checked=True) == outcome(ADD, 1, checked=True)
        assert outcome(SUM, 2) == outcome(SUM, 1)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert [p for p, _ in divided] == [2, 2]


def test_when_a_launch_is_divided_is_a_number_of_turns(monkeypatch, alone):
    """Not a time, whatever the machine."""
    turns = []

    def divide(self):
        turns.append(self.machine.watch.turns)

    monkeypatch.setattr(processes.Processes, "divide", divide)
    launch(LONG, 2)
    assert turns == [processes.TURNS - 1]  # the watch has not seen the present one


def test_a_warp_that_polls_for_its_copy_goes_on_alone(divided):
    """How often it polls until the copy completes depends on who else is there."""
    assert outcome(POLL, 2) == outcome(POLL, 1)
    assert divided == [(2, False)]


def test_budgets_are_those_of_one_process(divided):
    steps = launch(SUM, 1)[2]
    launch(SUM, 2, budget=steps)
    for count in (1, 2):
        with pytest.raises(StepBudget):
            launch(SUM, count, budget=steps - 1)
    assert divided == [(2, True), (2, False)]


@pytest.mark.parametrize("fails", [1, 2])
def test_without_processes_the_launch_goes_on_alone(divided, monkeypatch, fails):
    calls = []

    def fork():
        calls.append(1)
        if len(calls) == fails:
            raise BlockingIOError("Resource temporarily unavailable")
        return real()

    real = os.fork
    monkeypatch.setattr(os, "fork", fork)
    got = launch(SUM, 2)
    assert np.array_equal(got[0], launch(SUM, 1)[0]) and divided == [(2, False)]


def test_a_process_that_dies_costs_nothing_but_time(divided, monkeypatch):
    monkeypatch.setattr(processes.Processes, "work", lambda *_: os._exit(1))
    got = launch(SUM, 2)
    monkeypatch.undo()
    assert np.array_equal(got[0], launch(SUM, 1)[0])


def test_memory_that_processes_share_is_not_divided(divided, tmp_path):
    """Copies would write into it."""
    file = np.memmap(tmp_path / "x", np.uint32, "w+", shape=CTAS * THREADS)
    assert np.array_equal(launch(SUM, 2, file)[0], launch(SUM, 1)[0])
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(CTAS * THREADS, dtype=torch.int32).share_memory_()
    assert np.array_equal(launch(SUM, 2, tensor.numpy().view(np.uint32))[0], launch(SUM, 1)[0])
    assert not divided


def test_a_fault_is_a_finding_too(divided):
    with softsm.checking() as report, pytest.raises(Fault):
        launch(WILD, 2)
    assert report.codes() == ["out-of-bounds"] and divided == [(2, False)]


def test_a_dependent_grid_knows_what_the_processes_before_it_touched(divided):
    """Programmatic dependent launch without griddepcontrol.wait."""
    reports = []
    for count in (1, 2):
        with softsm.checking() as report:
            launch("griddepcontrol.launch_dependents; " + SUM, count)
            launch(SUM, count, dependent=True)
        reports.append(str(report))
    assert reports[0] == reports[1] and "the grid before this one" in reports[0]
    assert divided[0] == (2, True)


def test_atomics_stay_in_one_process(divided):
    y = launch(COUNT, 2)[1]
    assert y[0] == (0x55555555 + CTAS * THREADS) and not divided


def test_what_random_finds_does_not_depend_on_the_number_of_cores(divided):
    launch(SUM, 2, order="random")
    assert not divided


def test_launches_that_are_counted_stay_in_one_process(divided):
    with softsm.counting() as activity:
        steps = launch(SUM, 2)[2]
    assert sum(role.instructions for role in activity.roles.values()) == steps and not divided


def test_launches_that_are_recorded_stay_in_one_process(divided):
    from softsm.report.launch_recorder import recording

    with recording():
        launch(SUM, 2)
    assert not divided


def test_products_that_are_tapped_stay_in_one_process(divided):
    with softsm.checking(tap=True):
        launch(SUM, 2)
    assert not divided


def test_a_process_with_other_threads_is_not_copied(divided):
    over = threading.Event()
    other = threading.Thread(target=over.wait)
    other.start()
    try:
        launch(SUM, 2)
    finally:
        over.set()
        other.join()
    assert not divided


@pytest.mark.parametrize(("text", "expected"), [
    ("atom.shared.add.u32 %r1, [%r2], 1;", True), ("atom.global.add.u32 %r1, [%rd1], 1;", False),
    ("red.async.relaxed.cluster.global.add.u32 [%rd1], 1;", False), ("ld.volatile.global.u32 %r1, [%rd1];", False),
    ("ld.acquire.gpu.u32 %r1, [%rd1];", False), ("fence.acq_rel.gpu;", False), ("fence.proxy.async;", True),
    ("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;", True),
    (2 * "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;", False),
    ("membar.cta;", True), ("mov.u32 %r1, %smid;", False), ("ld.volatile.shared.u32 %r1, [%r2];", True),
])  # fmt: skip
def test_which_programs_keep_to_themselves(text, expected):
    from softsm.ptx import parse

    module = parse(HEAD + text + " ret; }")
    assert processes.independent(module, {"smid": ("R", 0)} if "smid" in text else {}) == expected


def test_a_wrong_number_of_processes_is_refused(monkeypatch):
    monkeypatch.setenv("SOFTSM_PROCESSES", "none")
    with pytest.raises(ValueError, match="SOFTSM_PROCESSES: got 'none'"):
        processes.processes()
