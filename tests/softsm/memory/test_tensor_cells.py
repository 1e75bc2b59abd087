"""Tensor memory: allocation rules, and the register maps of every load/store shape, one element at a time."""

import numpy as np
import pytest

from softsm.errors import Fault
from softsm.memory import tensor_memory as tm


def location(shape, t, r):
    """(lane, column) of register r of thread t, one element at a time."""
    if shape == "32x32b":
        return t, r
    if shape == "16x64b":
        return t // 4 + 8 * (t % 2), 2 * r + (t // 2) % 2
    if shape == "16x128b":
        return t // 4 + 8 * (r % 2), 4 * (r // 2) + t % 4
    if shape == "16x256b":
        return t // 4 + 8 * ((r // 2) % 2), 8 * (r // 4) + 2 * (t % 4) + r % 2
    return t % 16, r


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape", list(tm.REGISTERS))
@pytest.mark.parametrize("repeat", [1, 2, 8])
def test_load_and_store_maps(shape, repeat, packed):
    rng = np.random.default_rng(3)
    cells = rng.integers(0, 1 << 32, (512, 128), dtype=np.uint32)
    lane, column = (64, 8) if shape == "32x32b" else (80, 8)
    split = 300 if shape == "16x32bx2" else 0
    count = tm.REGISTERS[shape] * repeat
    want = np.zeros((count, 32), np.uint32)
    after = cells.copy()
    values = rng.integers(0, 1 << 32, (count, 32), dtype=np.uint32)
    for t in range(32):
        for r in range(count):
            ln, c = location(shape, t, r)
            c = c * 2 if packed else c
            c += split if shape == "16x32bx2" and t >= 16 else 0
            if packed:
                want[r, t] = cells[column + c, lane + ln] & 0xFFFF | (cells[column + c + 1, lane + ln] & 0xFFFF) << 16
                after[column + c, lane + ln] = values[r, t] & 0xFFFF
                after[column + c + 1, lane + ln] = values[r, t] >> 16
            else:
                want[r, t] = cells[column + c, lane + ln]
                after[column + c, lane + ln] = values[r, t]
    np.testing.assert_array_equal(tm.load(cells, shape, repeat, packed, lane, column, split), want)
    tm.store(cells, values, shape, repeat, packed, lane, column, split)
    np.testing.assert_array_equal(cells, after)


@pytest.mark.parametrize(
    ("shape", "multicast"),
    [("128x256b", ""), ("128x128b", ""), ("4x256b", ""), ("64x128b", "warpx2::02_13"), ("64x128b", "warpx2::01_23"),
     ("32x128b", "warpx4")],
)  # fmt: skip
def test_copy_shapes(shape, multicast):
    rows, chunks = tm.COPY_SHAPES[shape]
    data = np.arange(rows * chunks * 16, dtype=np.uint32).astype(np.uint8).reshape(rows, chunks * 16)
    words = data.view(np.uint32)
    cells = np.zeros((512, 128), np.uint32)
    tm.copy_in(cells, data, shape, multicast, 0, 16)
    want = np.zeros_like(cells)
    for i in range(rows):
        lanes = {
            "": [32 * i] if shape == "4x256b" else [i],
            "warpx4": [i + 32 * q for q in range(4)],
            "warpx2::02_13": [i, i + 64],
            "warpx2::01_23": [i // 32 * 64 + i % 32 + 32 * q for q in range(2)],
        }[multicast]
        for lane in lanes:
            want[16 : 16 + words.shape[1], lane] = words[i]
    np.testing.assert_array_equal(cells, want)


def test_shift_moves_31_lanes_and_8_columns():
    cells = np.arange(512 * 128, dtype=np.uint32).reshape(512, 128)
    before = cells.copy()
    tm.shift_down(cells, 32, 8)
    want = before.copy()
    want[8:16, 32:63] = before[8:16, 33:64]
    np.testing.assert_array_equal(cells, want)


def test_allocations_share_the_columns_of_an_sm():
    memory, a, b = tm.TensorMemory(), object(), object()
    assert memory.allocate(a, 256) == 0
    assert memory.allocate(b, 128) == 256
    assert memory.allocate(b, 256) is None  # has to wait
    memory.deallocate(a, 0, 256)
    assert memory.allocate(b, 256) == 0
    memory.check(b, 100, 284, "test")


def test_fresh_cells_read_as_nan():
    memory, a = tm.TensorMemory(), object()
    memory.allocate(a, 32)
    assert np.isnan(memory.cells[:32].view(np.float32)).all()


def fault(code, function, *args):
    with pytest.raises(Fault) as error:
        function(*args)
    assert error.value.code == code
    return str(error.value)


def test_misuse_has_a_name():
    memory, a, b = tm.TensorMemory(), "CTA (0, 0, 0)", "CTA (1, 0, 0)"
    fault("tmem-granularity", memory.allocate, a, 48)
    memory.allocate(a, 64, "PTX line 17")
    fault("tmem-dealloc", memory.deallocate, a, 32, 32)
    fault("tmem-dealloc", memory.deallocate, b, 0, 64)
    fault("tmem-dealloc", memory.deallocate, a, 0, 32)
    fault("tmem-unallocated", memory.check, a, 32, 64, "tcgen05.ld")
    fault("tmem-unallocated", memory.check, b, 0, 1, "tcgen05.ld")
    fault("tmem-bounds", memory.check, a, 500, 16, "tcgen05.ld")
    memory.relinquish(a)
    fault("tmem-relinquished", memory.allocate, a, 32)
    memory.check_group(a, 1)
    fault("tmem-cta-group", memory.check_group, a, 2)
    assert "line 17" in fault("tmem-leak", memory.at_exit, a)
    memory.at_exit(a)  # reported once


@pytest.mark.parametrize(("warp", "lane", "shape", "fine"), [
    (0, 0, "32x32b", True), (5, 32, "32x32b", True), (1, 0, "32x32b", False), (1, 48, "16x64b", True),
    (1, 40, "16x64b", False), (3, 112, "32x32b", False),
])  # fmt: skip
def test_lane_ownership(warp, lane, shape, fine):
    if fine:
        tm.check_lanes(warp, lane, shape, "tcgen05.ld")
    else:
        with pytest.raises(Fault, match="may access lanes|must start at one of"):
            tm.check_lanes(warp, lane, shape, "tcgen05.ld")


@pytest.mark.parametrize(
    ("m", "n", "folded", "where"),
    [
        (128, 64, False, lambda m, n: (m, n)),
        (64, 64, False, lambda m, n: (32 * (m // 16) + m % 16, n)),
        (64, 64, True, lambda m, n: (m + 64 * (n // 32), n % 32)),
        (32, 64, True, lambda m, n: (m + 32 * (n // 16), n % 16)),
    ],
)
def test_accumulator_layouts(m, n, folded, where):
    seen = {}
    for b in tm.accumulator_blocks(m, n, folded):
        for i in range(b.rows):
            for j in range(b.columns):
                seen[b.m + i, b.n + j] = (b.lane + i, b.column + j)
    assert seen == {(i, j): where(i, j) for i in range(m) for j in range(n)}
