"""Atomic operations on global memory: which lines they change together."""

from collections import Counter
from types import SimpleNamespace

import pytest

from softsm.timing_model.accesses import Access
from softsm.timing_model.atomics import changed_together, in_step
from softsm.timing_model.follow import addressed_by
from softsm.timing_model.trace import ClusterTrace, WarpTrace

HEAD = """
.version 8.3 .target sm_90a .address_size 64
.visible .entry k(.param .u64 x)
.reqntid 32, 1, 1
{
  .reg .b32 %r<8>; .reg .b64 %d<4>;
  ld.param.u64 %d1, [x]; mov.u32 %r1, %ctaid.x; mov.u32 %r6, %tid.x;
"""


def test_what_the_address_of_an_atomic_depends_on() -> None:
    text = (
        HEAD
        + """
  mov.u32 %r2, %ctaid.y; mul.wide.u32 %d2, %r2, 4; add.u64 %d2, %d2, %d1;
  red.global.add.u32 [%d2], %r6;
  ld.global.u32 %r3, [%d1]; mul.wide.u32 %d3, %r3, 4; add.u64 %d3, %d3, %d2;
  atom.global.add.u32 %r5, [%d3], %r6;
  red.global.add.u32 [%d1], %r1;
}"""
    )
    assert list(addressed_by(text).values()) == [{"%ctaid.y"}, {"%ctaid.y", "data"}, frozenset()]


@pytest.mark.parametrize(
    ("on", "lines"),
    ((frozenset(), 8), ({"%ctaid.x"}, 800), ({"%ctaid.y"}, 8 * 11), ({"%ctaid.x", "%ctaid.y"}, 8800), ({"data"}, 1e9)),
)
def test_neighbours_in_the_grid_change_lines_together(on, lines):
    """1000 CTAs of a grid 100 x 50 run: ten rows and parts of another, each CTA changes eight lines."""
    access = {7: Access(looks=1, ran=1, space="atomic", tensors=Counter({0: 32}))}
    cluster = ClusterTrace((0, 0, 0), 0, [WarpTrace(0, 0)], traffic=Counter({(0, "atomic"): 1024}))
    trace = SimpleNamespace(access=access, grid=(100, 50, 1), cluster=(1, 1, 1), clusters=[cluster])
    assert min(1e9, changed_together(trace, 0, 1000, {7: frozenset(on)})) == lines


@pytest.mark.parametrize(
    ("sharers", "lines", "share"), [(1, 1000, 1.0), (8, 1000, 0.82), (500, 1000, 0.65), (500, 4, 1.0)]
)
def test_ctas_that_change_the_same_lines_in_step_hold_each_other_up(sharers, lines, share):
    """Measured with 132 CTAs: 7.2, 5.9 and 4.5 reductions of 512 bytes in a ns (benchmarks/microbench, sums)."""
    assert in_step(sharers, lines) == pytest.approx(share, abs=0.02)
