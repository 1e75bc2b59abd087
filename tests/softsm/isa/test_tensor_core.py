"""Operands and accumulators of the tensor core as functions on arrays."""

import layouts
import numpy as np
import pytest

from softsm.isa import tensor_core
from softsm.memory import swizzle

RNG = np.random.default_rng(5)


@pytest.mark.parametrize(
    ("name", "k_major"),
    [(name, True) for name in ("bf16", "f16", "tf32", "e4m3", "e5m2", "s8", "u8")] + [("bf16", False), ("f16", False)],
)
@pytest.mark.parametrize("mode", [layouts.NONE, layouts.SW32, layouts.SW64, layouts.SW128])
def test_an_operand_is_read_where_the_layout_puts_it(name, mode, k_major):
    k = 32 // layouts.BYTES.get(name, 1)
    tile = layouts.values(RNG, (64, k), name)
    shared = np.zeros(65536, np.uint8)
    lbo, sbo = layouts.place(shared, tile, name, mode, k_major, 1024)
    descriptor = swizzle.decode(layouts.descriptor(1024, lbo, sbo, mode, True), True)
    rows = tensor_core.shared_rows(shared, 1024, descriptor, k_major, 64, k, name, "B")
    np.testing.assert_array_equal(rows, tile)
    place = np.arange(64)[::-1].copy()
    by_lanes = tensor_core.shared_lanes(shared, 1024, descriptor, k_major, 64, k, name, place, 2, "A")
    np.testing.assert_array_equal(by_lanes[:-2].reshape(k, 64).view(np.float32)[:, place].T, tile)
    assert not by_lanes[-2].any() and np.isnan(by_lanes[-1].view(np.float32)).all()


def test_tf32_loses_thirteen_bits():
    cells = RNG.integers(0, 1 << 32, (8, 128), dtype=np.uint32)
    assert not (tensor_core.tensor_lanes(cells, "tf32")[:-2] & 0x1FFF).any()


def test_scales_stay_exact_where_float32_has_no_room():
    values = np.array([[1.5, -2.0, 0.5, 1.0]], np.float32)
    near, far = np.array([[2.0, 0.25]], np.float32), np.array([[2.0**100, 2.0**-100]], np.float32)
    assert tensor_core.scaled(values, near).dtype == np.float32
    np.testing.assert_array_equal(tensor_core.scaled(values, near), [[3.0, -4.0, 0.125, 0.25]])
    assert tensor_core.wide_rows(np.concatenate([near, far])).tolist() == [False, True]
    wide = tensor_core.scaled(values, far, np.float64)
    assert wide.dtype == np.float64 and wide[0, 0] == 1.5 * 2.0**100 and wide[0, 3] == 2.0**-100


@pytest.mark.parametrize(("saturate", "want"), [(False, -(1 << 31)), (True, (1 << 31) - 1)])
def test_integer_sums_wrap_or_saturate(saturate, want):
    old = np.array([[(1 << 31) - 1]], np.uint32)
    new = tensor_core.accumulate(old, np.array([[1.0]], np.float32), "s32", True, saturate=saturate)
    assert new.view(np.int32)[0, 0] == want


def test_nans_of_accumulators_are_canonical():
    nan = np.array([[np.nan]], np.float32)
    assert tensor_core.accumulate(np.zeros((1, 1), np.uint32), nan, "f32", False)[0, 0] == 0x7FFFFFFF
    assert tensor_core.accumulate(np.zeros((1, 1), np.uint32), nan, "f16", False)[0, 0] == 0x7FFF
