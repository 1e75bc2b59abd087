"""From a few clusters to the whole grid."""

from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest

import softsm
from softsm.timing_model import grid, lower, model, scout

pytest.importorskip("triton")  # its wheel holds ptxas and nvdisasm

# If asked to, CTAs with an odd number make twice as many turns as their neighbours.
UNEVEN = """
.version 8.3 .target sm_90a .address_size 64
.visible .entry k(.param .u64 x, .param .u32 odd)
.reqntid 128, 1, 1
{
  .reg .b32 %r<8>, %f<4>; .reg .b64 %d<4>; .reg .pred %p<4>;
  ld.param.u64 %d1, [x]; ld.param.u32 %r5, [odd]; mov.u32 %r1, %tid.x; mov.u32 %r4, %ctaid.x; mov.u32 %r2, 0;
  cvt.rn.f32.u32 %f1, %r1; and.b32 %r4, %r4, %r5; shl.b32 %r4, %r4, 5; add.u32 %r4, %r4, 32;
LOOP:
  ex2.approx.ftz.f32 %f1, %f1;
  add.u32 %r2, %r2, 1; setp.lt.u32 %p1, %r2, %r4; @%p1 bra LOOP;
  mul.wide.u32 %d2, %r1, 4; add.u64 %d2, %d2, %d1; st.global.b32 [%d2], %f1; ret;
}"""


def one_after_another(durations: list[float], slots: int, more: float) -> float:
    ends = [0.0] * slots
    for n, d in enumerate(durations):
        place = ends.index(min(ends))
        ends[place] += d + (more if n < slots else 0.0)
    return max(ends)


@pytest.mark.parametrize(("ctas", "slots"), [(5, 8), (8, 8), (9, 8), (100, 8), (7, 1)])
@pytest.mark.parametrize("equal", [True, False])
def test_the_last_cta_ends_as_if_each_took_the_first_free_place(ctas, slots, equal) -> None:
    durations = np.full(ctas, 3.25) if equal else np.random.default_rng(ctas).uniform(1, 4, ctas)
    assert grid.makespan(durations, slots, 0.5) == pytest.approx(one_after_another(durations.tolist(), slots, 0.5))


@cache
def timed(odd: int) -> model.Model:
    with softsm.timing("h200") as timer:
        softsm.load(UNEVEN).launch(132 * 100 + 1 + odd, 128, [np.zeros(128, np.float32), odd])
    prediction = timer.predictions[0]
    return model.Model(prediction.trace, prediction.gpu)


def test_ctas_that_do_the_same_are_one_kind() -> None:
    assert timed(0).kinds == [0, 0, 0]
    assert timed(1).kinds == [0, 1]  # one of each length


def test_streams_differ_if_an_event_does() -> None:
    def streams(size: int) -> lower.Streams:
        one = np.zeros(3, np.int32)
        return lower.Streams([lower.Path(one, one - 1, one, one)], [0], np.array([[4.0, 0, size, 0]]))

    assert lower.kinds_of([streams(64), streams(32), streams(64), streams(32)]) == [0, 1, 0, 1]


@pytest.mark.parametrize("odd", [0, 1])
def test_a_replay_that_is_cut_short_begins_every_cta_when_the_whole_one_does(odd) -> None:
    m = timed(odd)
    queues = grid.queues_of(m.kinds, None, m.occupancy, 5)
    whole, short = (m.replay(queues, 1.98, 132, whole=x) for x in (True, False))
    assert whole.end.min() > 0 and short.end.min() < 0  # some have not ended
    assert whole.start.tolist() == short.start.tolist()


@pytest.mark.parametrize(
    ("durations", "wanted"),
    [
        ((1.0, 2.0, 3.0), [1.0, 1.5, 2.0, 3.0]),  # it grows all along, as under a causal mask
        ((1.0, 3.0, 3.0), [1.0, 3.0, 3.0, 3.0]),  # up to the length of a window
    ],
)
def test_what_grows_along_the_grid(durations, wanted) -> None:
    trace = SimpleNamespace(grid=(17, 1, 1), cluster=(1, 1, 1), total=17, lengths=None)
    found = grid.over_grid(trace, list(zip((0, 8, 16), durations)))
    assert found[[0, 4, 8, 16]].tolist() == wanted


def test_ends_of_a_grid_are_looked_at() -> None:
    """The longest CTA of a causal grid that runs at once is its last; an image may begin in the middle."""
    assert scout.first_samples([8, 16, 1], 128, sms=132, most=3) == [8 * 8, 8 * 8 + 7]
    assert scout.first_samples([512, 2, 1], 1024, sms=132, most=3) == [512, 512 + 298, 1023]


def ends_of_multiprocessors(work: list[float], sms: int, resident: int, alone: float) -> float:
    """Step by step: a hundredth of the time in which a multiprocessor does 1."""
    waiting, running = list(work), [[] for _ in range(sms)]
    for _ in range(resident):
        for mine in running:
            mine += [waiting.pop(0)] if waiting else []
    now = 0.0
    while any(running):
        now += 0.01
        for mine in running:
            mine[:] = [left - 0.01 * min(alone, 1 / len(mine)) for left in mine]
            ended = sum(left <= 1e-9 for left in mine)
            mine[:] = [left for left in mine if left > 1e-9] + [waiting.pop(0) for _ in range(min(ended, len(waiting)))]
    return now


@pytest.mark.parametrize("alone", [1.0, 0.25])
@pytest.mark.parametrize("ctas", [3, 12, 40])
def test_the_multiprocessor_with_most_work_ends_last(ctas, alone) -> None:
    work = np.random.default_rng(ctas).choice((0.2, 0.4, 5.0), ctas)
    found = grid.most_work(work, 4, 3, alone)
    assert found == pytest.approx(ends_of_multiprocessors(work.tolist(), 4, 3, alone), abs=0.3)
    assert found >= work.sum() / 4


def test_long_ctas_that_lie_together_are_not_spread_evenly() -> None:
    """The inside of a Mandelbrot set: 20 to 33 % too fast as if all multiprocessors had the same work."""
    work = np.where(np.arange(256) // 32 == 3, 10.0, 1.0)  # the fourth of eight waves is long
    assert grid.most_work(work, 32, 8, 1.0) == pytest.approx(work.sum() / 32)  # one for each
    work = np.where(np.arange(256) % 32 < 4, 10.0, 1.0)  # four multiprocessors get all of them
    assert grid.most_work(work, 32, 8, 1.0) == pytest.approx(80)


def test_clusters_count_while_others_run_beside_them() -> None:
    """Two slots: short clusters (0) leave them to the next ones; the last long one (1) runs alone, and faster."""
    kinds = np.array([1, 0, 0, 1, 0, 0, 1])
    start = np.array([0.0, 0.0, 12.0, 22.0, 110.0, 120.0, 125.0])
    end = np.array([110.0, 12.0, 22.0, 125.0, 120.0, 130.0, 185.0])
    took, more = grid.durations(start, end, kinds, 2)
    assert took == {0: 10.0, 1: 103.0}
    assert more == pytest.approx((2.0 + 7.0) / 2)


def test_long_warps_of_one_scheduler_take_longer() -> None:
    """CTAs of one warp, a quarter of them long; those of each multiprocessor come to its schedulers by turns."""
    turn = np.arange(4 * 64) // 4
    apart, together = (np.where(long, 10.0, 1.0) for long in (turn % 16 < 4, turn % 4 == 0))
    assert grid.unevenness(apart, 4, 64, 1.0, 4) == pytest.approx(1)
    assert grid.unevenness(together, 4, 64, 1.0, 4) == pytest.approx(160 / 52)
    assert grid.unevenness(together, 4, 64, 1.0, 1) == pytest.approx(1)  # CTAs of four warps


def test_of_the_longest_ctas_those_with_the_most_work_beside_them_are_replayed() -> None:
    lengths = np.array([9.0, 9.0, 1.0, 1.0, 1.0, 9.0, 1.0, 1.0])  # the second of four has two long ones
    clusters = [SimpleNamespace(number=0), SimpleNamespace(number=2)]
    trace = SimpleNamespace(lengths=lengths, clusters=clusters, total=8)
    assert grid.beside_longest(trace, 2, 4, 0) == [0, 0]


def test_kinds_of_clusters_run_beside_each_other_as_often_as_in_the_grid() -> None:
    queues = grid.queues_of([0, 1, 2], [0.1, 0.85, 0.05], 20, 9)
    every = [n for q in queues for n in q]
    assert 0.75 < every.count(1) / len(every) < 0.95
    assert {n for q in queues for n in q[1:-1]} == {0, 1, 2}
    assert {n for q in grid.queues_of([0, 1, 2], [0.1, 0.9, 0.0], 1, 9) for n in q[1:-1]} == {0, 1, 2}


@pytest.mark.parametrize(("resident", "waves"), [(1, 2), (2, 2), (1, 3), (2, 3), (3, 2)])
def test_every_kind_runs_where_few_places_are(resident, waves) -> None:
    """One CTA on a multiprocessor and two waves: the shortest stood for all, 73 % too fast."""
    queues = grid.queues_of([0, 1, 2], [0.25, 0.5, 0.25], resident, waves)
    assert {n for q in queues for n in q} == {0, 1, 2}


def test_a_huge_grid_is_scheduled_by_its_sum(monkeypatch) -> None:
    durations = np.random.default_rng(5).uniform(1, 4, 4000)
    exact = grid.makespan(durations, 8, 0.5)
    monkeypatch.setattr(grid, "MANY", 100)
    assert grid.makespan(durations, 8, 0.5) == pytest.approx(exact, rel=0.002)


def test_an_empty_grid_has_no_time() -> None:
    with softsm.timing("h200") as timer:
        softsm.load(UNEVEN).launch(0, 128, [np.zeros(128, np.float32), 0])
    assert timer.predictions == [] and timer.us == 0
