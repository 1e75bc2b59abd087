"""Kernel arguments written on a command line.

f32[1024]            an array of zeros          u32=7           a number
f32[4,256]=1.5       filled with a value        x.npy           an array from a file
f32[1024]=arange     0, 1, 2, ...               f32[1024]=random    normal (floats) or any bits (integers)
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import ml_dtypes
import numpy as np

TYPES = {
    "f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64,
    "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2,
    "u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64, "s8": np.int8,
    "s16": np.int16, "s32": np.int32, "s64": np.int64, "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64,
    "b8": np.uint8, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64,
}  # fmt: skip
MOST_BYTES = 1 << 34
_FORM = re.compile(r"(?P<type>[a-z]+\d+\w*)(?:\[(?P<shape>[\d,\s]+)\])?(?:=(?P<value>.+))?")


def parse_argument(text: str, seed: int = 0) -> np.ndarray | np.generic:
    """One argument: an array (passed as a pointer) or a NumPy scalar."""
    if text.endswith(".npy"):
        if not Path(text).is_file():
            raise ValueError(f"argument: there is no file {text}")
        return np.load(text)
    match = _FORM.fullmatch(text.strip())
    if match is None or match["type"] not in TYPES:
        raise ValueError(
            f"argument: got {text!r}, accepted are forms such as f32[1024]=random, u32=7 or x.npy; "
            f"types: {', '.join(TYPES)}"
        )
    dtype, value = np.dtype(TYPES[match["type"]]), match["value"]
    if match["shape"] is None:
        if value is None:
            raise ValueError(f"argument: {text!r} has neither a shape nor a value")
        return dtype.type(_number(value, text, dtype))
    shape = tuple(int(n) for n in match["shape"].split(",") if n.strip())
    if math.prod(shape) * dtype.itemsize > MOST_BYTES:
        raise ValueError(f"argument: got {text!r}, accepted are arrays of at most {MOST_BYTES >> 30} GiB")
    if value is None:
        return np.zeros(shape, dtype)
    if value == "arange":
        return np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    if value == "random":
        random = np.random.default_rng(seed)
        if dtype.kind in "iu":
            return random.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype).reshape(shape)
        return random.standard_normal(shape).astype(dtype)
    return np.full(shape, _number(value, text, dtype), dtype)


def _number(value: str, text: str, dtype: np.dtype) -> float | int:
    try:
        number = int(value, 0) if dtype.kind in "iu" else float(value)
    except ValueError:
        raise ValueError(f"argument: {value!r} in {text!r} is not a number, arange or random") from None
    if dtype.kind in "iu" and not np.iinfo(dtype).min <= number <= np.iinfo(dtype).max:
        limits = np.iinfo(dtype)
        raise ValueError(f"argument: got {text!r}, accepted are numbers from {limits.min} to {limits.max}")
    return number
