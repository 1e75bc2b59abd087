"""One launch in several processes gives what one process gives: values, steps, errors and findings."""

import threading

import numpy as np
import pytest

import softsm
from softsm.engine import division
from softsm.errors import Deadlock, Fault

CTAS, THREADS = 24, 64
HEAD = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 x, .param .u64 y)
{
  .reg .b32 %r<16>; .reg .b64 %rd<8>; .reg .pred %p<4>; .shared .align 8 .b8 bar[8];
  ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [y]; mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mov.u32 %r3, %nctaid.x;
  mad.lo.u32 %r4, %r2, 64, %r1; mul.wide.u32 %rd3, %r4, 4; add.u64 %rd4, %rd1, %rd3; mov.u32 %r5, 0;
LOOP:
  add.u32 %r5, %r5, 1; setp.lt.u32 %p1, %r5, 50; @%p1 bra LOOP;
"""
SUM = "ld.global.u32 %r6, [%rd4]; add.u32 %r6, %r6, %r5; st.global.u32 [%rd4], %r6; ret; }"
# Bytes of one word by different CTAs: thread t of CTA c writes byte t * CTAs + c.
BYTES = """mad.lo.u32 %r6, %r1, %r3, %r2; cvt.u64.u32 %rd5, %r6; add.u64 %rd6, %rd2, %rd5; st.global.u8 [%rd6], %r2;
  ret; }"""
# The last CTA does something wrong; it never runs in the first process.
LAST = "sub.u32 %r7, %r3, 1; setp.eq.u32 %p2, %r2, %r7; "
WILD = LAST + "@%p2 st.global.u32 [%rd1+1048576], %r5; ret; }"
STUCK = LAST + """@!%p2 bra DONE; mov.u32 %r8, bar; setp.eq.u32 %p3, %r1, 0; @%p3 mbarrier.init.shared.b64 [%r8], 1;
  bar.sync 0;
WAIT: mbarrier.try_wait.parity.shared.b64 %p3, [%r8], 0; @!%p3 bra WAIT;
DONE: ret; }"""
RACE = LAST + """setp.eq.u32 %p3, %r2, 0; or.pred %p2, %p2, %p3; add.u32 %r9, %r2, 1; setp.eq.u32 %p3, %r1, 0;
  and.pred %p2, %p2, %p3; @%p2 st.global.u32 [%rd2], %r9; ret; }"""
LOOK = LAST + """setp.eq.u32 %p3, %r1, 0; and.pred %p2, %p2, %p3; @%p2 st.global.u32 [%rd2], %r5;
  setp.eq.u32 %p2, %r2, 0; and.pred %p2, %p2, %p3; @%p2 ld.global.u32 %r9, [%rd2]; ret; }"""
EQUAL = "setp.eq.u32 %p2, %r1, 0; @%p2 st.global.u32 [%rd2], %r5; ret; }"
COUNT = "atom.global.add.u32 %r6, [%rd2], 1; ret; }"


@pytest.fixture
def divided(monkeypatch):
    """Divide at once; the numbers of processes of the launches."""
    numbers = []
    monkeypatch.setattr(division, "WORTH", 0.0)
    original = division.Division.divide

    def divide(self):
        original(self)
        numbers.append(1 + len(self.children))

    monkeypatch.setattr(division.Division, "divide", divide)
    return numbers


def launch(body: str, processes: int, **options):
    x = np.arange(CTAS * THREADS, dtype=np.uint32)
    y = np.full(CTAS * THREADS, 0x55555555, np.uint32)
    machine = softsm.load(HEAD + body).launch(CTAS, THREADS, [x, y], processes=processes, **options)
    return x, y, machine.steps


@pytest.mark.parametrize("order", ["eager", "latest"])
@pytest.mark.parametrize("body", [SUM, BYTES], ids=["words", "bytes of one word"])
@pytest.mark.parametrize("processes", [2, 3])
def test_values_and_steps_are_those_of_one_process(divided, body, order, processes):
    for got, want in zip(launch(body, processes, order=order), launch(body, 1, order=order)):
        assert np.array_equal(got, want)
    assert divided == [processes]


@pytest.mark.parametrize(("body", "kind"), [(WILD, Fault), (STUCK, Deadlock)], ids=["fault", "deadlock"])
def test_an_error_of_another_process_is_raised_here(divided, body, kind):
    texts = []
    for processes in (2, 1):
        with pytest.raises(kind) as error:
            launch(body, processes)
        texts.append(str(error.value).split(" at global address")[0])
    assert texts[0] == texts[1] and str(CTAS - 1) in str(error.value)
    assert divided == [2]


def findings(body: str, processes: int, strict: bool = False) -> list:
    with softsm.checking(strict=strict) as report:
        launch(body, processes)
    return [(d.code, sorted((p.ptx_line, p.deed()) for p in d.parties), d.fix) for d in report]


@pytest.mark.parametrize("body", [RACE, LOOK], ids=["two stores", "store and load"])
def test_ctas_in_different_processes_race(divided, body):
    found = findings(body, 2)
    assert divided == [2]
    assert len(found) == 1 and found == findings(body, 1)


@pytest.mark.parametrize("strict", [False, True])
def test_equal_values_are_judged_as_in_one_process(divided, strict):
    assert findings(EQUAL, 2, strict) == findings(EQUAL, 1, strict)
    assert divided == [2]


def test_ctas_that_touch_different_bytes_do_not_race(divided):
    assert not findings(BYTES, 2) and divided == [2]


def test_a_fault_is_a_finding_too(divided):
    with softsm.checking() as report, pytest.raises(Fault):
        launch(WILD, 2)
    assert report.codes() == ["out-of-bounds"] and divided == [2]


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
    from softsm.report.recording_machine import recording

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
    ("membar.cta;", True), ("mov.u32 %r1, %smid;", False), ("ld.volatile.shared.u32 %r1, [%r2];", True),
])  # fmt: skip
def test_which_programs_keep_to_themselves(text, expected):
    from softsm.ptx import parse

    module = parse(HEAD + text + " ret; }")
    assert division.independent(module, {"smid": ("R", 0)} if "smid" in text else {}) == expected


def test_a_wrong_number_of_processes_is_refused(monkeypatch):
    monkeypatch.setenv("SOFTSM_PROCESSES", "none")
    with pytest.raises(ValueError, match="SOFTSM_PROCESSES: got 'none'"):
        division.processes()
