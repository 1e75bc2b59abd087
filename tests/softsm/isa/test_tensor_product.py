"""The inner loop of the tensor core against NumPy."""

import numpy as np
import pytest

from softsm.isa import tensor_core
from softsm.isa.tensor_product import multiply_add

RNG = np.random.default_rng(9)


def small(*shape):
    return RNG.integers(-4, 5, shape).astype(np.float32)


@pytest.mark.parametrize("keep", [0.0, 1.0, 0.5])
def test_multiply_add_respects_lane_masks(keep):
    a, b, d = small(32, 16), small(8, 16), small(8, 32)
    lanes = tensor_core.to_lanes(a, np.arange(32), 1)
    cells = d.view(np.uint32).copy()
    mask = 0x0F0F00FF
    multiply_add(cells, 0, np.array([[mask, 0, 8]]), lanes, b, keep)
    on = np.array([bool(mask >> lane & 1) for lane in range(32)])
    want = np.where(on, b @ a.T + np.float32(keep) * d, d)
    np.testing.assert_array_equal(cells.view(np.float32), want)


def test_what_is_not_kept_is_not_read():
    cells = np.full((2, 32), np.nan, np.float32).view(np.uint32)
    lanes = tensor_core.to_lanes(small(32, 4), np.arange(32), 1)
    multiply_add(cells, 0, np.array([[0xFFFFFFFF, 0, 2]]), lanes, small(2, 4), 0.0)
    assert not np.isnan(cells.view(np.float32)).any()
