"""The compiled inner loops of the tensor core against NumPy."""

import numpy as np

from softsm.isa import fragments, tensor_kernels

RNG = np.random.default_rng(9)


def small(*shape):
    return RNG.integers(-4, 5, shape).astype(np.float32)


def test_fragments_move_both_ways():
    registers = np.arange(16 * 32, dtype=np.uint32).reshape(16, 32)
    rows = np.arange(8)
    matrix = np.zeros((16 * 2, 32), np.uint32)  # 16 columns of 64 lanes
    tensor_kernels.fragments(matrix, 2, 16, registers, rows, 0)
    np.testing.assert_array_equal(matrix[0::2, 16:], fragments.accumulator(registers[:8], "f32"))
    assert not matrix[1::2].any() and not matrix[0::2, :16].any()
    back = np.zeros_like(registers)
    tensor_kernels.fragments(matrix, 2, 16, back, rows + 8, 1)
    np.testing.assert_array_equal(back[8:], registers[:8])


def test_a_warps_product():
    """m16n8k16 of bf16: A, B, C and D in registers of one warp."""
    values = small(10, 32)
    registers = np.zeros((16, 32), np.uint32)
    registers[:6] = (small(6, 32).view(np.uint32) >> 16) | (small(6, 32).view(np.uint32) & 0xFFFF0000)
    registers[6:10] = values[:4].view(np.uint32)
    rows = np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 14, 15])
    empty = np.zeros(0, np.uint32)
    tensor_kernels.warp_product(registers, rows, 4, 2, empty, empty)
    a, b = fragments.left(registers[:4], "bf16"), fragments.right(registers[4:6], "bf16")
    c = fragments.accumulator(registers[6:10], "f32").view(np.float32)
    d = fragments.accumulator(registers[12:16], "f32").view(np.float32)
    np.testing.assert_array_equal(d, b @ a.T + c)
