"""Launches that begin before the grid before them has ended (griddepcontrol)."""

import numpy as np
import pytest

import softsm
from softsm.timing_model.parameters import GPUS

pytest.importorskip("triton")  # its wheel holds ptxas and nvdisasm

PTX = """
.version 8.3 .target sm_90a .address_size 64
.visible .entry k(.param .u64 x, .param .u32 n)
.reqntid 128, 1, 1
{
  .reg .b32 %r<4>, %f<2>; .reg .b64 %d<4>; .reg .pred %p<2>;
  ld.param.u64 %d1, [x]; ld.param.u32 %r3, [n]; mov.u32 %r1, %tid.x; mul.wide.u32 %d2, %r1, 4; add.u64 %d2, %d2, %d1;
  cvt.rn.f32.u32 %f1, %r1; mov.u32 %r2, 0;
%BEFORE%
LOOP:
  ex2.approx.ftz.f32 %f1, %f1; add.u32 %r2, %r2, 1; setp.lt.u32 %p1, %r2, %r3; @%p1 bra LOOP;
%BEHIND%
  st.global.b32 [%d2], %f1; ret;
}"""
PLAIN = PTX.replace("%BEFORE%", "").replace("%BEHIND%", "")
LETS_IN = PTX.replace("%BEFORE%", "  griddepcontrol.launch_dependents;").replace("%BEHIND%", "")
WAITS = PTX.replace("%BEFORE%", "").replace("%BEHIND%", "  bar.sync 0;\n  griddepcontrol.wait;")


x = np.zeros(128, np.float32)  # one for all: what it costs to write depends on where it lies


def us(first: str, rounds: int, dependent: bool) -> float:
    """Return the time of a launch with this many rounds, followed by one with 100 that waits for it."""
    with softsm.timing("h200") as timer:
        softsm.load(first).launch(132, 128, [x, rounds])
        softsm.load(WAITS).launch(132, 128, [x, 100], dependent=dependent)
    assert timer.predictions[0].body_us + timer.predictions[1].body_us < timer.us
    return timer.us


def test_what_comes_before_its_wait_is_over_when_the_grid_before_ends() -> None:
    g = GPUS["h200"]
    rounds = 100 * g["latency.mufu"] / g.clock * 1e-3
    saved = us(LETS_IN, 1000, False) - us(LETS_IN, 1000, True)
    assert saved > rounds + g["launch.next"] - g["launch.dependent"]


@pytest.mark.compile
def test_a_grid_that_lets_nobody_in_is_waited_for() -> None:
    assert us(PLAIN, 1000, True) == us(PLAIN, 1000, False)


def test_a_short_grid_ends_before_the_one_launched_early_waits() -> None:
    """Then the second begins after the launch alone, and takes all of its time."""
    g = GPUS["h200"]
    saved = us(LETS_IN, 1, False) - us(LETS_IN, 1, True)
    assert 0 < saved < g["launch.next"] + 1.0
