"""Wavefronts of shared memory and sectors of global memory."""

import numpy as np
import pytest

from softsm.clock import accesses

LANES = np.arange(32)


@pytest.mark.parametrize(
    ("stride", "size", "wanted"),
    [
        (4, 4, 1),  # 32 banks
        (0, 4, 1),  # one word for all
        (8, 4, 2),
        (128, 4, 32),
        (16, 16, 4),  # 512 bytes, 128 a cycle
        (8, 8, 2),
        (1024, 16, 32),  # rows of a tile that is not swizzled
    ],
)
def test_wavefronts(stride, size, wanted) -> None:
    assert accesses.wavefronts(LANES[None] * stride, size).tolist() == [wanted]


def test_a_sector_is_fetched_by_the_load_that_asks_first() -> None:
    sectors = np.array([[1, 2, 2, 3], [3, 4, 5, 5], [1, 2, 3, 4]])
    fresh = np.array([[True, True, False, True], [True, True, True, False], [True] * 4])
    assert accesses.first_asked(sectors, fresh).tolist() == [3, 2, 0]


def test_l1_begins_anew_when_it_is_full(monkeypatch) -> None:
    monkeypatch.setattr(accesses, "L1_BYTES", 3 * 32)
    sectors = np.array([[1, 2], [3, 4], [1, 2], [1, 2]])
    assert accesses.first_asked(sectors, np.ones((4, 2), bool)).tolist() == [2, 2, 2, 0]
