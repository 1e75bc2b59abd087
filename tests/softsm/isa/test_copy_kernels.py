"""The compiled inner loops of cp.async: which lanes' copies are legal, and how their bytes move."""

import numpy as np
import pytest

from softsm.engine import program as pg
from softsm.isa import copy_kernels

SIZE = 16


class Lanes:
    """The state vector of a warp, with two rows of addresses and one of source sizes."""

    def __init__(self) -> None:
        self.R, self.Q = np.zeros((4, 32), np.uint32), np.zeros((2, 32), np.uint64)
        self.shared = np.full(pg.SHARED_START + 1024, 0xAA, np.uint8)
        self.data = np.arange(512, dtype=np.uint8)
        self.table = np.array([[self.data.ctypes.data, self.data.ctypes.data + 512]], np.uint64)
        self.S = np.zeros(1, pg.WARP_STATE).view(np.int64)
        self.S[pg.S_R], self.S[pg.S_Q] = self.R.ctypes.data, self.Q.ctypes.data
        self.S[pg.S_SHARED], self.S[pg.S_SHARED_SIZE] = self.shared.ctypes.data, self.shared.size
        self.S[pg.S_ALLOC], self.S[pg.S_NALLOC] = self.table.ctypes.data, 1
        self.R[1] = pg.SHARED_START + SIZE * np.arange(32)
        self.R[2] = SIZE
        self.Q[1] = self.data.ctypes.data + SIZE * np.arange(32)
        self.plan = np.zeros((3, 32), np.int64)

    def run(self, mask=pg.ALL, used=-1, ignored=0):
        n = copy_kernels.plan_lanes(self.S.ctypes.data, self.plan.ctypes.data, mask, 1, 1, used, ignored, SIZE)
        if n >= 0:
            copy_kernels.move_lanes(self.plan.ctypes.data, n, SIZE)
        return n

    @property
    def landed(self):
        return self.shared[pg.SHARED_START : pg.SHARED_START + 512].reshape(32, SIZE)


@pytest.fixture
def lanes():
    """A source that begins on a boundary, as cp.async wants it."""
    made = Lanes()
    if made.data.ctypes.data % SIZE:
        raw = np.zeros(512 + SIZE, np.uint8)
        made.data = raw[-raw.ctypes.data % SIZE :][:512]
        made.data[:] = np.arange(512) & 255
        made.table[0] = made.data.ctypes.data, made.data.ctypes.data + 512
        made.Q[1] = made.data.ctypes.data + SIZE * np.arange(32)
    return made


def test_lanes_of_the_mask_copy(lanes):
    assert lanes.run(0x0000FF0F) == 12
    for lane in range(32):
        want = lanes.data[SIZE * lane :][:SIZE] if 0xFF0F >> lane & 1 else 0xAA
        np.testing.assert_array_equal(lanes.landed[lane], want)


def test_a_short_source_is_padded_and_an_ignored_one_is_not_read(lanes):
    lanes.R[2, 3] = 5
    lanes.Q[1, 4] = SIZE  # no address of anything, and not looked at
    assert lanes.run(used=2, ignored=1 << 4) == 32
    assert lanes.landed[3].tolist() == [*lanes.data[48:53].tolist(), *[0] * 11]
    assert not lanes.landed[4].any()


@pytest.mark.parametrize("wrong", ["target", "misaligned", "source", "long"])
def test_one_illegal_lane_stops_them_all(lanes, wrong):
    if wrong == "target":
        lanes.R[1, 7] = pg.SHARED_START + 1024
    elif wrong == "misaligned":
        lanes.R[1, 7] += 4
    elif wrong == "source":
        lanes.Q[1, 7] = lanes.data.ctypes.data + 512
    else:
        lanes.R[2, 7] = SIZE + 1
    assert lanes.run(used=2) == -1
    assert (lanes.landed == 0xAA).all()
