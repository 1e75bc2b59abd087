"""Matrices as the registers of a warp, element by element, by the fragment rules of the PTX ISA for mma.sync."""

import layouts
import numpy as np

BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "s4": 4, "u4": 4, "b1": 1}


def codes(matrix, name):
    """The elements' bit patterns as Python integers."""
    if name in ("s4", "u4"):
        return matrix.astype(np.int64) & 15
    if name == "b1":
        return matrix.astype(np.int64)
    raw = layouts.bits(matrix, name)
    return sum(raw[..., i].astype(np.int64) << 8 * i for i in range(raw.shape[-1]))


def left_registers(a, name):
    """A [m, k] -> uint32 [32, registers]."""
    m, k = a.shape
    per, code = 32 // BITS[name], codes(a, name)
    out = np.zeros((32, m * k // 32 // per), np.uint32)
    halves = m // 8
    for t in range(32):
        for i in range(out.shape[1]):
            for e in range(per):
                row, column = t // 4 + 8 * (i % halves), 4 * per * (i // halves) + per * (t % 4) + e
                out[t, i] |= np.uint32(int(code[row, column]) << e * BITS[name])
    return out


def right_registers(b, name):
    """B [8, k] (column by column) -> uint32 [32, registers]."""
    per, code = 32 // BITS[name], codes(b, name)
    out = np.zeros((32, b.shape[1] * 8 // 32 // per), np.uint32)
    for t in range(32):
        for i in range(out.shape[1]):
            for e in range(per):
                out[t, i] |= np.uint32(int(code[t // 4, 4 * per * i + per * (t % 4) + e]) << e * BITS[name])
    return out


def accumulator_registers(c, dtype):
    """C or D [m, 8] -> [32, elements] of dtype."""
    out = np.zeros((32, c.shape[0] // 4), dtype)
    for t in range(32):
        for v in range(out.shape[1]):
            out[t, v] = c[t // 4 + 8 * (v // 2), 2 * (t % 4) + v % 2]
    return out
