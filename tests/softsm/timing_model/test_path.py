"""The critical path of a kernel whose roles hand work to each other through mbarriers."""

import numpy as np
import pytest

import softsm
from softsm.timing_model import report
from softsm.timing_model.path import critical_path

pytest.importorskip("triton")  # its wheel holds ptxas and nvdisasm

# Warp 0 works and arrives on `full`, warp 1 waits for it and answers on `free`: only one of them works at a time
# (each stores its result first, so that ptxas cannot move the arrival before the work).
RELAY = """
.version 8.3 .target sm_90a .address_size 64
.visible .entry relay(.param .u64 x, .param .u32 n)
.reqntid 64, 1, 1
{
  .reg .b32 %r<8>, %f<8>; .reg .b64 %d<8>; .reg .pred %p<4>;
  .shared .align 8 .b8 full[8]; .shared .align 8 .b8 free[8]; .shared .align 8 .b8 cell[256];
  ld.param.u64 %d1, [x]; ld.param.u32 %r3, [n]; mov.u32 %r1, %tid.x; mov.u32 %r4, full; mov.u32 %r5, free;
  mov.u32 %r7, cell; mad.lo.u32 %r7, %r1, 4, %r7;
  mov.u32 %r2, 0; cvt.rn.f32.u32 %f1, %r1; setp.ne.u32 %p0, %r1, 0;
  @!%p0 mbarrier.init.shared::cta.b64 [%r4], 32;
  @!%p0 mbarrier.init.shared::cta.b64 [%r5], 32;
  bar.sync 0;
  setp.ge.u32 %p1, %r1, 32; @%p1 bra SECOND;
FIRST:
%SLOW%
  st.shared.b32 [%r7], %f1; mbarrier.arrive.shared::cta.b64 _, [%r4];
  and.b32 %r6, %r2, 1;
W1: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r5], %r6; @!%p2 bra W1;
  add.u32 %r2, %r2, 1; setp.lt.u32 %p3, %r2, %r3; @%p3 bra FIRST;
  bra.uni END;
SECOND:
  and.b32 %r6, %r2, 1;
W2: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r4], %r6; @!%p2 bra W2;
%FAST%
  st.shared.b32 [%r7], %f1; mbarrier.arrive.shared::cta.b64 _, [%r5];
  add.u32 %r2, %r2, 1; setp.lt.u32 %p3, %r2, %r3; @%p3 bra SECOND;
END:
  mul.wide.u32 %d2, %r1, 4; add.u64 %d2, %d2, %d1; st.global.b32 [%d2], %f1; ret;
}""".replace("%SLOW%", "  ex2.approx.ftz.f32 %f1, %f1;\n" * 40).replace(
    "%FAST%", "  ex2.approx.ftz.f32 %f1, %f1;\n" * 20
)
ROUNDS = 10


@pytest.fixture(scope="module")
def prediction():
    with softsm.timing("h200") as timer:
        softsm.load(RELAY).launch(1, 64, [np.zeros(64, np.float32), ROUNDS])
    return timer.predictions[0]


def test_the_path_goes_from_one_role_to_the_other_and_adds_up(prediction) -> None:
    cycles, links = critical_path(prediction)
    assert cycles == pytest.approx(sum(x.cycles for x in links), rel=0.05)
    slow, fast = links[0], links[1]
    assert (slow.to, fast.to) == (fast.who, slow.who) and slow.barrier.startswith("full")
    assert fast.barrier.startswith("free")
    assert slow.cycles > 0.5 * cycles > fast.cycles > 0.2 * cycles and slow.times in (ROUNDS - 1, ROUNDS)


def test_the_report_names_it(prediction) -> None:
    text = report.text(prediction)
    assert "critical path of a CTA" in text and "-> full" in text
    assert report.as_dict(prediction)["critical_path"][0]["times"] >= ROUNDS - 1


# Warp 0 works; warps 1 and 2 wait for it, each in a copy of one statement.
COPIES = """
.version 8.3 .target sm_90a .address_size 64
.visible .entry copies(.param .u64 x, .param .u32 n)
.reqntid 96, 1, 1
{
  .reg .b32 %r<8>, %f<8>; .reg .b64 %d<8>; .reg .pred %p<4>;
  .shared .align 8 .b8 full[8]; .shared .align 8 .b8 free[8]; .shared .align 8 .b8 cell[512];
  ld.param.u64 %d1, [x]; ld.param.u32 %r3, [n]; mov.u32 %r1, %tid.x; mov.u32 %r4, full; mov.u32 %r5, free;
  mov.u32 %r7, cell; mad.lo.u32 %r7, %r1, 4, %r7;
  mov.u32 %r2, 0; cvt.rn.f32.u32 %f1, %r1; setp.ne.u32 %p0, %r1, 0;
  @!%p0 mbarrier.init.shared::cta.b64 [%r4], 32;
  @!%p0 mbarrier.init.shared::cta.b64 [%r5], 64;
  bar.sync 0;
  setp.ge.u32 %p1, %r1, 64; @%p1 bra THIRD; setp.ge.u32 %p1, %r1, 32; @%p1 bra SECOND;
FIRST:
%SLOW%
  st.shared.b32 [%r7], %f1; mbarrier.arrive.shared::cta.b64 _, [%r4];
  and.b32 %r6, %r2, 1;
W_FIRST: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r5], %r6; @!%p2 bra W_FIRST;
  add.u32 %r2, %r2, 1; setp.lt.u32 %p3, %r2, %r3; @%p3 bra FIRST;
  bra.uni END;
%WAIT%SECOND%END%
%WAIT%THIRD%END%
END:
  mul.wide.u32 %d2, %r1, 4; add.u64 %d2, %d2, %d1; st.global.b32 [%d2], %f1; ret;
}
.file 1 "kernel.py"
"""


@pytest.mark.compile
def test_the_main_wait_of_two_partitions_that_run_one_function_is_shown() -> None:
    wait = """NAME:
  .loc 1 7 3
  and.b32 %r6, %r2, 1;
W_NAME: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r4], %r6; @!%p2 bra W_NAME;
  add.f32 %f1, %f1, VALUE; mbarrier.arrive.shared::cta.b64 _, [%r5]; add.u32 %r2, %r2, 1;
  setp.lt.u32 %p3, %r2, %r3; @%p3 bra NAME;
  bra.uni END;
"""
    text = COPIES.replace("%SLOW%", "  ex2.approx.ftz.f32 %f1, %f1;\n" * 40)
    for name, value in (("SECOND", "0f3F800000"), ("THIRD", "0f40000000")):
        text = text.replace(f"%WAIT%{name}%END%", wait.replace("NAME", name).replace("VALUE", value))
    with softsm.timing("h200") as timer:
        softsm.load(text).launch(1, 96, [np.zeros(96, np.float32), ROUNDS])
    waits = [s for s in report.stalls(timer.predictions[0]) if s.what.startswith("full")]
    assert waits and 0.6 < waits[0].cycles / waits[0].total < 0.97, [str(s) for s in waits]
    assert waits[0].place.startswith("kernel.py:7"), waits[0].place
