"""CTAs whose number of turns depends on their place or on computed values are counted, by what decides their path."""

import numpy as np
import pytest

import softsm
from softsm.timing_model import report, scout
from softsm.timing_model.follow import branch_on_place
from softsm.timing_model.path_slice import deciding_lines
from softsm.timing_model.validated import band

pytest.importorskip("triton")  # its wheel holds ptxas and nvdisasm

HEAD = """
.version 8.3 .target sm_90a .address_size 64
.visible .entry k(.param .u64 x, .param .u32 n)
.reqntid 64, 1, 1
{
  .reg .b32 %r<12>, %f<8>; .reg .b64 %d<4>; .reg .pred %p<4>;
  .shared .align 8 .b64 box;
  ld.param.u64 %d1, [x]; ld.param.u32 %r4, [n]; mov.u32 %r1, %ctaid.x; mov.u32 %r6, %tid.x; mov.u32 %r3, 0;
"""
TURNS = """
  add.u32 %r2, %r2, 1; mov.f32 %f1, 0f3f800000;
TURN:
  add.f32 %f1, %f1, %f1;
  ex2.approx.f32 %f1, %f1;
  add.u32 %r3, %r3, 1; setp.lt.u32 %p1, %r3, %r2; @%p1 bra TURN;
  mul.wide.u32 %d2, %r6, 4;
  add.u64 %d2, %d2, %d1;
  st.global.f32 [%d2], %f1; ret;
}"""
TILES = HEAD + "  rem.u32 %r2, %r1, %r4; mul.lo.u32 %r2, %r2, 2;\n" + TURNS  # causal attention in one dimension
GROWS = HEAD + "  mul.lo.u32 %r2, %r1, %r4;\n" + TURNS
ALIGNED = HEAD + "  and.b32 %r2, %r1, -16;\n" + TURNS
WINDOW = HEAD + "  shr.u32 %r2, %r1, 3; min.u32 %r2, %r2, 64;\n" + TURNS
SECOND = HEAD + "  mov.u32 %r2, %ctaid.y;\n" + TURNS
ESCAPE = (
    HEAD
    + """
  rem.u32 %r2, %r1, 7; cvt.rn.f32.u32 %f2, %r2; mov.f32 %f1, %f2;
TURN:
  fma.rn.f32 %f1, %f1, 0f3f800000, 0f3f800000;
  add.u32 %r3, %r3, 1; setp.lt.f32 %p1, %f1, 0f42c80000;
  setp.lt.u32 %p2, %r3, %r4; and.pred %p1, %p1, %p2; @%p1 bra TURN;
  mul.wide.u32 %d2, %r6, 4; add.u64 %d2, %d2, %d1; st.global.f32 [%d2], %f1; ret;
}"""
)


def predicted(ptx: str, grid, n: int):
    with softsm.timing("h200") as timer:
        softsm.load(ptx).launch(grid, 64, [np.zeros(64, np.float32), n])
    return timer.predictions[0]


@pytest.mark.parametrize(
    ("ptx", "folds"), [(TILES, True), (GROWS, False), (ALIGNED, False), (SECOND, True), (ESCAPE, True)]
)
def test_a_place_that_decides_is_found(ptx, folds) -> None:
    assert branch_on_place(ptx, 0) == folds


def test_tiles_in_one_dimension_are_counted() -> None:
    """Numbers 0, 2800 and 4799 of 4800 in rows of 40 are tiles 0, 0 and 39."""
    p = predicted(TILES, 4800, 40)
    assert p.trace.lengths is not None and report.doubt(p) == "" and len(set(p.trace.lengths.tolist())) == 40
    assert p.trace.lengths[:40].tolist() == p.trace.lengths[4760:].tolist()


def test_grids_that_need_no_counts() -> None:
    assert predicted(TILES, 960, 40).trace.lengths is None  # all run at once: the longest is at an end
    assert not branch_on_place(SECOND, 1)  # the axis that is looked at


def test_where_lengths_stop_growing_they_are_counted() -> None:
    """A window of keys: from its length on all CTAs are as long, which three of them do not tell."""
    assert predicted(WINDOW, 4400, 0).trace.lengths is not None


def test_a_loop_until_a_value_is_reached() -> None:
    p = predicted(ESCAPE, 4000, 1000)
    assert p.trace.lengths is not None and "compares), and the longest executes" in report.doubt(p)
    assert band(p)[1] >= 1.3


def test_what_decides_nothing_is_not_executed() -> None:
    first = TILES.splitlines().index("TURN:") + 1
    lines = deciding_lines(TILES)
    assert lines is not None and first + 3 in lines and not lines & {first + 1, first + 2, first + 4, first + 5}


@pytest.mark.parametrize(
    "shared",
    [
        "ld.shared.u32 %r2, [box];",
        "atom.global.add.u32 %r2, [%d1], 1;",
        "mbarrier.try_wait.shared.b64 %p2, [box], %d2; @%p2 bra TURN;",
    ],
)
def test_a_path_that_other_threads_decide_is_not_cut(shared) -> None:
    assert deciding_lines(HEAD + shared + TURNS) is None


def test_counts_are_those_of_whole_ctas(monkeypatch) -> None:
    whole = predicted(TILES, 4300, 10).trace.lengths
    for name, number in {"COST": 1000, "CTA": 0, "NOTHING": 1000}.items():
        monkeypatch.setattr(scout, name, number)
    cut = predicted(TILES, 4300, 10).trace.lengths
    assert cut is not None and (cut == whole).all()
    monkeypatch.setattr(scout, "sliced", lambda kernel: None)
    assert predicted(TILES, 4300, 10).trace.lengths is None


STORES = (
    HEAD
    + """
  mul.wide.u32 %d2, %r1, 4; add.u64 %d2, %d2, %d1; ld.global.u32 %r2, [%d2]; setp.eq.u32 %p1, %r2, 0; @%p1 bra END;
  add.u32 %r2, %r2, %r4; st.global.u32 [%d2], %r2;
END: ret;
}"""
)


def test_a_grid_that_is_counted_whole_stores_what_later_launches_read() -> None:
    x = np.arange(64, dtype=np.uint32)
    with softsm.timing("h200"):
        softsm.load(STORES).launch(64, 64, [x, 1000])
    assert (x[1:] >= 1001).all()


DIVIDES = (
    HEAD
    + """
  mul.wide.u32 %d2, %r6, 4; add.u64 %d2, %d2, %d1; rem.u32 %r2, %r1, 7; mad.lo.u32 %r2, %r2, %r4, %r4;
TURN:
  add.u32 %r5, %r6, %r3; and.b32 %r5, %r5, 1; setp.eq.u32 %p1, %r5, 0;
  ld.global.f32 %f1, [%d2]; setp.gt.f32 %p2, %f1, 0f00000000; xor.pred %p1, %p1, %p2;
  @%p1 bra ODD;
  add.u32 %r7, %r7, 5;
ODD:
  add.u32 %r3, %r3, 1; setp.lt.u32 %p1, %r3, %r2; @%p1 bra TURN;
  ret;
}"""
)


def test_warps_that_divide_are_counted_for_a_limited_time(monkeypatch) -> None:
    """Python chooses which side of a branch runs, which takes the time of 70 instructions. gelu() of 4096 rows, whose
    erf() branches for each number, took 43 seconds."""
    monkeypatch.setattr(scout, "COST", 400_000)
    entries = []
    plain = scout.Scouts.ended

    def ended(self) -> bool:
        entries.append(self.machine.entries)
        return plain(self)

    monkeypatch.setattr(scout.Scouts, "ended", ended)
    p = predicted(DIVIDES, 2000, 16)
    assert p.us > 0 and 1000 < max(entries) < 20_000
