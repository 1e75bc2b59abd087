"""Programs whose path depends on CTAs that a timing run does not execute get a message, not a number."""

import numpy as np
import pytest

import softsm
from softsm.errors import Deadlock
from softsm.timing_model import report, scout
from softsm.timing_model.follow import CannotFollow, branch_on_atomic
from softsm.timing_model.validated import band

pytest.importorskip("triton")  # its wheel holds ptxas and nvdisasm

HEAD = """
.version 8.3 .target sm_90a .address_size 64
.visible .entry k(.param .u64 x, .param .u32 n)
.reqntid 32, 1, 1
{
  .reg .b32 %r<8>; .reg .b64 %d<4>; .reg .pred %p<4>;
  .shared .b32 box;
  ld.param.u64 %d1, [x]; ld.param.u32 %r4, [n]; mov.u32 %r1, %ctaid.x; mov.u32 %r6, %tid.x;
"""
FLAG = (
    HEAD
    + """
  setp.eq.u32 %p1, %r1, 0; @%p1 bra WAIT;
  setp.eq.u32 %p2, %r1, 1; mov.u32 %r2, 1; @%p2 st.release.gpu.global.u32 [%d1], %r2; ret;
WAIT:
  ld.acquire.gpu.global.u32 %r3, [%d1]; setp.eq.u32 %p2, %r3, 0; @%p2 bra WAIT;
  ret;
}"""
)
COUNTER = (
    HEAD
    + """
NEXT:
  setp.eq.u32 %p3, %r6, 0;
  @%p3 atom.global.add.u32 %r1, [%d1], 1;
  @%p3 st.shared.b32 [box], %r1;
  bar.sync 0;
  ld.shared.b32 %r2, [box]; bar.sync 0;
  setp.lt.u32 %p2, %r2, %r4; @%p2 bra NEXT;
  ret;
}"""
)
PLACES = (
    HEAD
    + """
  atom.global.add.u32 %r2, [%d1], 1;
  and.b32 %r2, %r2, 0; mul.wide.u32 %d2, %r2, 4; add.u64 %d2, %d2, %d1; st.global.u32 [%d2+4], %r6;
  setp.eq.u32 %p2, %r1, 77; @%p2 bra END;
END: ret;
}"""
)


def timed(ptx: str, grid: int, n: int = 0):
    with softsm.timing("h200") as timer:
        softsm.load(ptx).launch(grid, 32, [np.zeros(64, np.uint32), n])
    return timer.predictions[0]


def test_a_wait_for_a_cta_that_does_not_run() -> None:
    with pytest.raises(CannotFollow, match=r"k: waits for CTAs that a timing run does not execute \(2 of 3 ran\)"):
        timed(FLAG, 3)


def test_a_deadlock_of_the_whole_grid_is_called_one() -> None:
    with pytest.raises(Deadlock):
        timed(FLAG, 1)


def test_work_from_a_counter() -> None:
    with pytest.raises(CannotFollow, match=r"k: the branch at PTX line \d+ depends on what the atomic operation"):
        timed(COUNTER, 132, 1320)


def test_a_grid_that_runs_whole_is_followed() -> None:
    assert timed(COUNTER, 1, 50).cycles > 50


def test_an_atomic_result_that_is_no_branch_is_followed() -> None:
    assert timed(PLACES, 132).us > 0
    assert branch_on_atomic(PLACES, range(1, 40)) is None


def test_lines_that_did_not_run_do_not_count() -> None:
    atomic = next(n for n, line in enumerate(COUNTER.splitlines(), 1) if "atom" in line)
    assert branch_on_atomic(COUNTER, range(1, 40)) == (atomic, atomic + 4)
    assert branch_on_atomic(COUNTER, set(range(1, 40)) - {atomic}) is None


@pytest.mark.parametrize("address", ["[ %r7 + 0 ]", "[%r5]", "[box + 0]"])
def test_a_shared_address_is_known_by_any_name(address) -> None:
    """Triton stores through a register and loads by the symbol."""
    by_register = COUNTER.replace("NEXT:", "mov.b32 %r7, box; add.s32 %r5, %r7, 0;\nNEXT:").replace(
        "st.shared.b32 [box]", f"st.shared.b32 {address}"
    )
    assert branch_on_atomic(by_register, range(1, 40)) is not None
    elsewhere = by_register.replace("ld.shared.b32 %r2, [box]", "ld.shared.b32 %r2, [box+4]")
    assert branch_on_atomic(elsewhere, range(1, 40)) is None


ROWS = (
    HEAD
    + """
  mul.wide.u32 %d2, %r1, 4; add.u64 %d2, %d2, %d1; ld.global.u32 %r2, [%d2]; mov.u32 %r3, 0;
TURN:
  add.u32 %r3, %r3, 1; st.volatile.shared.b32 [box], %r3; setp.lt.u32 %p1, %r3, %r2; @%p1 bra TURN;
  ret;
}"""
)


def of_rows(lengths: np.ndarray):
    with softsm.timing("h200") as timer:
        softsm.load(ROWS).launch(len(lengths), 32, [lengths, 0])
    return timer.predictions[0]


def test_lengths_that_are_loaded_are_counted_where_ctas_differ() -> None:
    alike = of_rows(np.full(400, 7, np.uint32))
    assert report.doubt(alike) == "" and band(alike)[1] < 1.3 and alike.trace.lengths is None
    growing = of_rows(np.arange(400, dtype=np.uint32))
    assert "the longest executes 2.0 times as much as the average" in report.doubt(growing)


FILL = (
    HEAD
    + """
  mul.wide.u32 %d2, %r1, 4; add.u64 %d2, %d2, %d1; mov.u32 %r2, 50; st.global.u32 [%d2], %r2;
  ret;
}"""
)


def test_lengths_that_an_earlier_launch_wrote_in_part_are_doubted() -> None:
    """Three of its CTAs ran, so that all others' rows are empty."""
    lengths, own = np.zeros(4000, np.uint32), np.full(4000, 50, np.uint32)
    with softsm.timing("h200") as timer:
        softsm.load(FILL).launch(4000, 32, [lengths, 0])
        softsm.load(ROWS).launch(4000, 32, [lengths, 0])
        softsm.load(ROWS).launch(4000, 32, [own, 0])
    words = "what an earlier launch writes, of which only some CTAs ran: time this launch alone"
    assert [words in report.text(p) for p in timer.predictions] == [False, True, False]
    assert band(timer.predictions[1])[1] == 2.0


def test_the_longest_of_many_ctas_decides() -> None:
    """It is none of those at the ends or in the middle of the grid."""
    lengths = np.full(400, 7, np.uint32)
    without = of_rows(lengths).cycles
    lengths[123] = 5000
    assert of_rows(lengths).cycles > 20 * without
    lengths[77] = 20
    assert of_rows(lengths).trace.samples[-1] in (123, 399)


def test_ctas_that_are_too_many_to_count_are_a_guess(monkeypatch) -> None:
    monkeypatch.setattr(scout, "COST", 10_000)
    p = of_rows(np.arange(400, dtype=np.uint32))
    assert p.trace.lengths is None and band(p)[1] == 1.6
    assert "the 3 of 400 that were looked at differ" in report.doubt(p)


def test_many_ctas_that_are_alike_are_enough(monkeypatch) -> None:
    monkeypatch.setattr(scout, "MANY_ALIKE", 20)
    begun: list[int] = []
    plain = scout.Scouts.began
    monkeypatch.setattr(scout.Scouts, "began", lambda self, cta: begun.append(1) or plain(self, cta))
    assert of_rows(np.full(400, 7, np.uint32)).trace.lengths is None and len(begun) == 20
    of_rows(np.arange(400, dtype=np.uint32))
    assert len(begun) == 420


PADDED = """
.version 8.3 .target sm_90a .address_size 64
.visible .entry k(.param .u64 lengths, .param .u64 x)
.reqntid 128, 1, 1
{
  .reg .b32 %r<8>; .reg .b64 %d<8>; .reg .pred %p<2>;
  ld.param.u64 %d1, [lengths]; ld.param.u64 %d2, [x]; mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x;
  mul.wide.u32 %d3, %r2, 4; add.u64 %d3, %d3, %d1; ld.global.u32 %r3, [%d3];
  mad.lo.u32 %r4, %r2, 128, %r1; mul.wide.u32 %d4, %r4, 4; add.u64 %d4, %d4, %d2;
  setp.lt.u32 %p1, %r1, %r3;
  @%p1 ld.global.u32 %r5, [%d4];
  @%p1 st.global.u32 [%d4], %r5;
  ret;
}"""


@pytest.mark.compile
def test_masks_that_depend_on_data_are_looked_at_all_over_the_grid() -> None:
    """Every third row is full, the others have eight numbers; the rows at the ends of the grid are short."""
    rows = 3000
    lengths = np.where(np.arange(rows) % 3 == 1, 128, 8).astype(np.uint32)
    with softsm.timing("h200") as timer:
        softsm.load(PADDED).launch(rows, 128, [lengths, np.zeros((rows, 128), np.float32)])
    read = max(s.asked for s in timer.predictions[0].sources if s.written)
    assert abs(read / (4.0 * lengths.sum()) - 1) < 0.25
