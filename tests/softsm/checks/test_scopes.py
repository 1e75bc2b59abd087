"""Strong accesses of one word by CTAs that are not within each other's scope."""

import numpy as np
import pytest

import softsm

COUNT = """
.version 8.6 .target sm_90a .address_size 64
.visible .entry k(.param .u64 word)
{{
  .reg .b32 %r<3>; .reg .b64 %rd<2>; .reg .pred %p<2>;
  .shared .align 4 .b32 own;
  ld.param.u64 %rd1, [word];
  mov.u32 %r1, %ctaid.x;
  setp.eq.u32 %p1, %r1, 0;
  @%p1 {first};
  @!%p1 {others};
  ret;
}}"""


def codes(first, others, grid=2, cluster=1):
    kernel, word = softsm.load(COUNT.format(first=first, others=others)), np.zeros(64, np.uint32)
    found = []
    for order in ("latest", "eager"):
        with softsm.checking(order=order) as report:
            kernel.launch(grid, 1, [word], cluster=cluster)
        found.append(report)
    assert found[0].codes() == found[1].codes()
    return found[0]


def add(scope, at=0):
    return f"red.relaxed.{scope}.global.add.u32 [%rd1+{at}], 1"


@pytest.mark.parametrize(("first", "others"), [("cta", "cta"), ("gpu", "cta"), ("cta", "gpu"), ("cluster", "cluster")])
def test_atomics_of_several_ctas_need_gpu_scope(first, others):
    """PTX, memory consistency model: two such accesses race unless each one's scope has the other's thread in it."""
    report = codes(add(first), add(others))
    assert report.codes() == ["race"] and ".gpu scope" in report.diagnostics[0].fix, str(report)


def test_scopes_that_hold_both_are_enough():
    assert not codes(add("gpu"), add("gpu"), grid=4)
    assert not codes(add("cluster"), add("cluster"), cluster=2)
    assert not codes(add("cta"), add("cta", 4))  # each has a word of its own
    assert not codes("st.relaxed.cta.shared.u32 [own], 1", "st.relaxed.cta.shared.u32 [own], 2")


def test_loads_of_any_scope_do_not_race_with_each_other():
    assert not codes("ld.relaxed.cta.global.u32 %r2, [%rd1]", "ld.relaxed.cta.global.u32 %r2, [%rd1]")
    assert codes("st.relaxed.cta.global.u32 [%rd1], 1", "ld.relaxed.gpu.global.u32 %r2, [%rd1]").codes() == ["race"]
