"""Registers of mma.sync and wgmma as matrices, element by element, from the formulas of the PTX manual."""

import numpy as np
import pytest

from softsm.isa import fragments

TYPES = {"bf16": 2, "f16": 2, "s8": 4, "u8": 4, "tf32": 1}


def packed(name: str, per: int, registers: int) -> tuple[np.ndarray, np.ndarray]:
    """Registers whose elements are small integers, and those integers [registers, 32, per]."""
    values = np.arange(registers * 32 * per).reshape(registers, 32, per) % 100
    if name == "tf32":
        words = values.astype(np.float32).view(np.uint32)
    elif name == "f16":
        words = values.astype(np.float16).view(np.uint16)
    elif name == "bf16":
        words = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    else:
        words = values.astype(np.uint8)
    return np.ascontiguousarray(words).view(np.uint32).reshape(registers, 32), values


@pytest.mark.parametrize(("name", "c"), TYPES.items())
def test_left_operand(name, c):
    registers, values = packed(name, c, 4)
    matrix = fragments.left(registers, name)
    assert matrix.shape == (16, 8 * c)
    for i in range(4):
        for t in range(32):
            for e in range(c):
                assert matrix[t // 4 + 8 * (i % 2), 4 * c * (i // 2) + c * (t % 4) + e] == values[i, t, e]


@pytest.mark.parametrize(("name", "c"), TYPES.items())
def test_right_operand(name, c):
    registers, values = packed(name, c, 2)
    matrix = fragments.right(registers, name)
    for i in range(2):
        for t in range(32):
            for e in range(c):
                assert matrix[t // 4, 4 * c * i + c * (t % 4) + e] == values[i, t, e]


def test_accumulator_and_back():
    registers = np.arange(8 * 32, dtype=np.uint32).reshape(8, 32)
    matrix = fragments.accumulator(registers, "f32")  # [n, rows]
    for v in range(8):
        for t in range(32):
            assert matrix[8 * (v // 4) + 2 * (t % 4) + v % 2, t // 4 + 8 * (v // 2 % 2)] == registers[v, t]
    np.testing.assert_array_equal(fragments.accumulator_registers(matrix, "f32"), registers)


def test_two_halves_in_a_register():
    registers = np.arange(4 * 32, dtype=np.uint32).reshape(4, 32) * 0x00020001 + 0x80000000
    matrix = fragments.accumulator(registers, "f16")
    assert matrix[0, 0] == registers[0, 0] & 0xFFFF and matrix[1, 0] == registers[0, 0] >> 16
    np.testing.assert_array_equal(fragments.accumulator_registers(matrix, "f16"), registers)
