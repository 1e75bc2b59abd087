"""Compiled vector clocks against NumPy, and waits that the compiled loop answers against those that Python does."""

import numpy as np
import pytest

import softsm
from softsm.checks import clocks
from softsm.checks.checker import Checker
from softsm.checks.clocks import HEAD, WORDS
from softsm.checks.order import address_of

SLOTS, SECTIONS, USED = 6, 4, 12
LENGTH = 2 * SLOTS + SECTIONS * WORDS


def clock(random: np.random.Generator) -> np.ndarray:
    """Bits lie in the first USED words of each section."""
    made = np.zeros(HEAD + LENGTH, np.uint32)[HEAD:]
    made[: 2 * SLOTS] = random.integers(0, 1 << 20, 2 * SLOTS)
    made[2 * SLOTS :].reshape(SECTIONS, WORDS)[:, :USED] = random.integers(0, 1 << 32, (SECTIONS, USED), np.uint32)
    return made


def joined(*clocks: np.ndarray) -> np.ndarray:
    numbers = np.maximum.reduce([c[: 2 * SLOTS] for c in clocks])
    return np.concatenate([numbers, np.bitwise_or.reduce([c[2 * SLOTS :] for c in clocks])])


def without(private: int, made: np.ndarray) -> np.ndarray:
    made = made.copy()
    if private >= 0:
        made[2 * SLOTS :].reshape(SECTIONS, WORDS)[private] = 0
    return made


@pytest.mark.parametrize("private", [-1, 2])
def test_warps_that_meet_know_what_each_of_them_knew(private):
    random = np.random.default_rng(private + 1)
    published, gathering, *warps = (clock(random) for _ in range(5))
    want_published = joined(published, gathering, *(without(private, w) for w in warps))
    want = [joined(w, want_published) for w in warps]
    for slot, (w, made) in enumerate(zip(warps, want)):
        made[slot] = max(int(w[slot]) + 2, int(want_published[slot]))  # a new epoch, and what others knew of it
    began = [int(w[slot]) for slot, w in enumerate(warps)]
    members = np.array([[address_of(w), slot] for slot, w in enumerate(warps)], np.int64)
    clocks.meet(address_of(published), address_of(gathering), address_of(members), len(warps), 2 * SLOTS,
                         SECTIONS, private, USED)  # fmt: skip
    assert not gathering.any()
    np.testing.assert_array_equal(published, want_published)
    for slot, (w, made) in enumerate(zip(warps, want)):
        np.testing.assert_array_equal(w, made)
        assert w.base[:2].tolist() == [began[slot] + 1, 0], "the epoch in which the lanes met, and no access since then"


# A copy into shared memory, a wait for it, and a load: by which parity decides whether the two are ordered.
COPY = """
.version 8.0 .target sm_90a .address_size 64
.visible .entry k(.param .u64 x)
{{
  .reg .b32 %r<9>; .reg .b64 %rd<4>; .reg .pred %p<4>; .shared .align 128 .b8 tile[256]; .shared .align 8 .b8 bar[8];
  ld.param.u64 %rd1, [x]; mov.u32 %r1, %tid.x; setp.eq.u32 %p1, %r1, 0; mov.u32 %r2, bar; mov.u32 %r3, tile;
  @%p1 mbarrier.init.shared.b64 [%r2], 1;
  @%p1 fence.mbarrier_init.release.cluster;
  bar.sync 0;
  @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 256;
  @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd1], 256, [%r2];
WAIT:
  mbarrier.try_wait.parity.shared.b64 %p2, [%r2], {parity};
  @!%p2 bra WAIT;
  shl.b32 %r4, %r1, 2; add.u32 %r5, %r3, %r4; ld.shared.b32 %r6, [%r5];
  mul.wide.u32 %rd2, %r1, 4; add.s64 %rd3, %rd1, %rd2; st.global.b32 [%rd3], %r6; ret;
}}"""


@pytest.mark.parametrize("parity", [0, 1])
def test_python_and_the_compiled_loop_answer_waits_alike(parity, monkeypatch):
    reports = []
    for follows in (False, True):  # True: each event is followed, so that Python answers
        monkeypatch.setattr(Checker, "follows", follows)
        x = np.arange(64, dtype=np.uint32)
        raw = np.zeros(64 + 32, np.uint32)
        start = -raw.ctypes.data % 128 // 4
        raw[start : start + 64] = x
        with softsm.checking() as report:
            softsm.load(COPY.format(parity=parity)).launch(1, 64, [raw[start : start + 64]])
        reports.append(report.codes())
    assert reports[0] == reports[1]
    assert ("race" in reports[0]) == (parity == 1)
