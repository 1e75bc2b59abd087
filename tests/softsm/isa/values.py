"""Inputs worth trying: the corners of each type in all pairs, and random bits."""

from __future__ import annotations

import itertools

import numpy as np


def hexadecimal(words: str) -> list[int]:
    return [int(word, 16) for word in words.split()]


INT = {
    16: hexadecimal("0 1 2 3 7 f 10 11 7fff 8000 8001 ffff fffe 1234"),
    32: hexadecimal("0 1 2 3 7 1f 20 21 7fff 8000 ffff 10000 7fffffff 80000000 80000001 ffffffff fffffffe 12345678"),
    64: hexadecimal(
        "0 1 2 1f 20 3f 40 ffffffff 100000000 7fffffffffffffff 8000000000000000 8000000000000001 "
        "ffffffffffffffff fffffffffffffffe 123456789abcdef0"
    ),
}
FLOAT = {
    "f16": hexadecimal("0 8000 1 8001 3ff 400 8400 3c00 bc00 3c01 3555 4248 7bff fbff 7c00 fc00 7c01 7e00 fe00"),
    "bf16": hexadecimal("0 8000 1 8001 7f 80 8080 3f80 bf80 3f81 3eab 4049 7f7f ff7f 7f80 ff80 7f81 7fc0 ffc0"),
    "f32": hexadecimal(
        "0 80000000 1 80000001 7fffff 800000 80800000 3f800000 bf800000 3f800001 3f000000 3eaaaaab "
        "40490fdb 4b800001 7f7fffff ff7fffff 7f800000 ff800000 7f800001 7fc00000 ffc12345"
    ),
    "f64": hexadecimal(
        "0 8000000000000000 1 8000000000000001 fffffffffffff 10000000000000 3ff0000000000000 "
        "bff0000000000000 3ff0000000000001 3fd5555555555555 400921fb54442d18 4340000000000001 "
        "7fefffffffffffff ffefffffffffffff 7ff0000000000000 fff0000000000000"
    ),
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
