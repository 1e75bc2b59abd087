"""Inputs worth trying: the corners of each type in all pairs, and random bits."""

from __future__ import annotations

import itertools

import numpy as np

INT = {
    16: [0, 1, 2, 3, 7, 15, 16, 17, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0xFFFE, 0x1234],
    32: [
        0,
        1,
        2,
        3,
        7,
        31,
        32,
        33,
        0x7FFF,
        0x8000,
        0xFFFF,
        0x10000,
        0x7FFFFFFF,
        0x80000000,
        0x80000001,
        0xFFFFFFFF,
        0xFFFFFFFE,
        0x12345678,
    ],
    64: [
        0,
        1,
        2,
        31,
        32,
        63,
        64,
        0xFFFFFFFF,
        0x100000000,
        0x7FFFFFFFFFFFFFFF,
        0x8000000000000000,
        0x8000000000000001,
        0xFFFFFFFFFFFFFFFF,
        0xFFFFFFFFFFFFFFFE,
        0x123456789ABCDEF0,
    ],
}
FLOAT = {
    "f16": [
        0,
        0x8000,
        1,
        0x8001,
        0x3FF,
        0x400,
        0x8400,
        0x3C00,
        0xBC00,
        0x3C01,
        0x3555,
        0x4248,
        0x7BFF,
        0xFBFF,
        0x7C00,
        0xFC00,
        0x7C01,
        0x7E00,
        0xFE00,
    ],
    "bf16": [
        0,
        0x8000,
        1,
        0x8001,
        0x7F,
        0x80,
        0x8080,
        0x3F80,
        0xBF80,
        0x3F81,
        0x3EAB,
        0x4049,
        0x7F7F,
        0xFF7F,
        0x7F80,
        0xFF80,
        0x7F81,
        0x7FC0,
        0xFFC0,
    ],
    "f32": [
        0,
        0x80000000,
        1,
        0x80000001,
        0x7FFFFF,
        0x800000,
        0x80800000,
        0x3F800000,
        0xBF800000,
        0x3F800001,
        0x3F000000,
        0x3EAAAAAB,
        0x40490FDB,
        0x4B800001,
        0x7F7FFFFF,
        0xFF7FFFFF,
        0x7F800000,
        0xFF800000,
        0x7F800001,
        0x7FC00000,
        0xFFC12345,
    ],
    "f64": [
        0,
        1 << 63,
        1,
        (1 << 63) | 1,
        0xFFFFFFFFFFFFF,
        0x10000000000000,
        0x3FF0000000000000,
        0xBFF0000000000000,
        0x3FF0000000000001,
        0x3FD5555555555555,
        0x400921FB54442D18,
        0x4340000000000001,
        0x7FEFFFFFFFFFFFFF,
        0xFFEFFFFFFFFFFFFF,
        0x7FF0000000000000,
        0xFFF0000000000000,
    ],
}
NANS_F64 = [0x7FF8000000000000, 0xFFF8000000000123, 0x7FF0000000000001]
WIDTH = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}


def random_bits(width: int, count: int, seed: int) -> list[int]:
    return [int(x) for x in np.random.default_rng(seed).integers(0, 1 << 64, count, np.uint64) >> np.uint64(64 - width)]


def ordinary_floats(name: str, count: int, seed: int) -> list[int]:
    """Numbers of nearby magnitudes, so that sums cancel and round."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(count) * 2.0 ** rng.integers(-6, 7, count)
    if name == "f64":
        return [int(v) for v in x.view(np.uint64)]
    bits = x.astype(np.float32).view(np.uint32)
    if name == "f32":
        return [int(v) for v in bits]
    return [int(v) for v in (bits >> 16 if name == "bf16" else x.astype(np.float16).view(np.uint16))]


def columns(rows: list[tuple]) -> list[np.ndarray]:
    return [np.array(c, np.uint64) for c in zip(*rows)]


def integers(width: int, arity: int, random: int = 96) -> list[np.ndarray]:
    """Return columns of inputs: all pairs of corners (the third operand runs through them), then random bits."""
    return _columns(INT[width], arity, lambda seed: random_bits(width, random, seed))


def floats(name: str, arity: int, random: int = 96, more: list[int] | None = None) -> list[np.ndarray]:
    def some(seed):
        half = random // 2
        return ordinary_floats(name, half, seed) + random_bits(WIDTH[name], random - half, seed + 100)

    return _columns(FLOAT[name] + (more or []), arity, some)


def _columns(corners: list[int], arity: int, some) -> list[np.ndarray]:
    if arity == 1:
        rows = [(x,) for x in corners]
    else:
        rows = list(itertools.product(corners, repeat=2))
        if arity == 3:
            n = len(corners)
            rows = [(a, b, corners[(5 * i + i // n) % n]) for i, (a, b) in enumerate(rows)]
    rows += list(zip(*(some(seed) for seed in range(arity))))
    return columns(rows)


def signed(x: int, width: int) -> int:
    x &= (1 << width) - 1
    return x - (1 << width) if x >> (width - 1) else x


ATOMICS = {  # what atomic operations and reductions store, of the old value and the operand
    "add": lambda a, b: a + b,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "inc": lambda a, b: np.where(a >= b, 0, a + 1).astype(a.dtype),
    "dec": lambda a, b: np.where((a == 0) | (a > b), b, a - 1).astype(a.dtype),
    "exch": lambda a, b: b,
}
