"""Which element of a matrix each register of a warp holds, for mma.sync and wgmma. Pure functions on arrays.

With g = t/4 and q = t%4 of thread t, and c elements in a 32-bit register:

    A (16 x K)   register i: row g + 8*(i%2), k = 4c*(i/2) + c*q + element      (8-row shapes: row g, k = 4c*i + ...)
    B (K x 8)    register i: column g,        k = 4c*i + c*q + element
    C, D         element v:  row g + 8*((v/2)%2), column 8*(v/4) + 2q + v%2     (16-bit: v and v+1 share a register)

64-bit elements follow the same rules with c = 1.
"""

from __future__ import annotations

import numpy as np

from softsm import formats

PER_REGISTER = {"tf32": 1, "f16": 2, "bf16": 2, "e4m3": 4, "e5m2": 4, "s8": 4, "u8": 4, "s4": 8, "u4": 8, "b1": 32}


def elements(registers: np.ndarray, name: str) -> np.ndarray:
    """Decodes the c elements of each register: [..., 32] -> float32 [..., 32, c]."""
    registers = np.ascontiguousarray(registers)
    if name == "tf32":
        return formats.decode(registers, name)[..., None]
    if name in ("f16", "bf16"):
        return formats.decode(registers.view(np.uint16).reshape(*registers.shape, 2), name)
    data = registers.view(np.uint8).reshape(*registers.shape, 4)
    if name == "b1":
        return np.unpackbits(data, axis=-1, bitorder="little").astype(np.float32)
    if name in ("s4", "u4"):
        codes = formats.unpack_nibbles(data)
        return (codes.astype(np.int8) - ((codes & 8) << 1 if name == "s4" else 0)).astype(np.float32)
    return formats.decode(data, name)


def left(registers: np.ndarray, name: str, rows: int = 16) -> np.ndarray:
    """Returns A as float32 [rows, k] from its registers [count, 32]."""
    values = elements(registers, name)
    return left_values(values, rows)


def left_values(values: np.ndarray, rows: int) -> np.ndarray:
    """Rearranges values [count, 32, c] to [rows, k]."""
    halves = rows // 8
    count, _, c = values.shape
    v = values.reshape(count // halves, halves, 8, 4, c)  # [k block, row half, g, q, element]
    return v.transpose(1, 2, 0, 3, 4).reshape(rows, -1)


def right(registers: np.ndarray, name: str) -> np.ndarray:
    """Returns B as float32 [8, k] from its registers [count, 32]."""
    return right_values(elements(registers, name))


def right_values(values: np.ndarray) -> np.ndarray:
    count, _, c = values.shape
    v = values.reshape(count, 8, 4, c)  # [k block, g, q, element]
    return v.transpose(1, 0, 2, 3).reshape(8, -1)


def accumulator(registers: np.ndarray, kind: str, rows: int = 16) -> np.ndarray:
    """Returns C or D from its registers: uint32 [n, rows], one element in each word (16-bit ones in the low half)."""
    registers = np.ascontiguousarray(registers)
    if kind == "f16":
        registers = np.stack([registers & 0xFFFF, registers >> 16], axis=1).reshape(-1, 32)
    halves = rows // 8
    v = registers.reshape(-1, halves, 2, 8, 4)  # [column group, row half, v%2, g, q]
    return v.transpose(0, 4, 2, 1, 3).reshape(-1, rows)


def accumulator_registers(matrix: np.ndarray, kind: str) -> np.ndarray:
    """Returns the inverse of `accumulator`."""
    n, rows = matrix.shape
    v = matrix.reshape(n // 8, 4, 2, rows // 8, 8)  # [column group, q, v%2, row half, g]
    registers = v.transpose(0, 3, 2, 4, 1).reshape(-1, 32)
    if kind == "f16":
        return registers[0::2] | registers[1::2] << 16
    return registers
