"""Kernel arguments written on a command line.

f32[1024]            an array of zeros          i32=5               a number
f32[4,256]:1.5       filled with a value        x.npy               an array from a file
f32[1024]:arange     0, 1, 2, ...               bf16[64,128]:x.npy  the same, of that shape, converted to that type
f32[1024]:rand       normal (floats), any bits (integers)
map[64,64]:bf16[256,128]:rand          a tensor map over an array, boxes of 64 x 64, outermost dimension first
map[64,64;swizzle=128]:arg0            the same over the array of argument 0, with a swizzle of 128 bytes

`=` may stand for the colon, and `random` for `rand`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

from softsm.memory.map_argument import SWIZZLES, TensorMapArgument, tensor_map

TYPES = {
    "f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64,
    "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2,
    "u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64, "s8": np.int8,
    "s16": np.int16, "s32": np.int32, "s64": np.int64, "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64,
    "b8": np.uint8, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64,
}  # fmt: skip
MOST_BYTES = 1 << 34
ALIGNED = 256  # bytes, as cudaMalloc aligns
_FORM = re.compile(r"(?P<type>[a-z]+\d+\w*)(?:\[(?P<shape>[\d,\s]+)\])?(?:[=:](?P<value>.+))?")
_MAP = re.compile(r"map\[(?P<box>[\d,\s]+)(?:;\s*swizzle=(?P<swizzle>\d+))?\][=:](?P<array>.+)")
Value = np.ndarray | np.generic | TensorMapArgument


def parse_argument(text: str, seed: int = 0, before: Sequence[Value] = ()) -> Value:
    """Parses an argument: an array (passed as a pointer), a NumPy scalar or a tensor map. before: those before it."""
    text = text.strip()
    if text.startswith("map"):
        return _map(text, seed, before)
    if text.endswith(".npy") and _FORM.fullmatch(text) is None:
        return _aligned(_file(text))
    match = _FORM.fullmatch(text)
    if match is None or match["type"] not in TYPES:
        raise ValueError(
            f"argument: got {text!r}; accepted: forms such as f32[1024]:rand, u32=7, x.npy or "
            f"map[64,64]:bf16[256,128]:rand; types: {', '.join(TYPES)}"
        )
    dtype, value = np.dtype(TYPES[match["type"]]), match["value"]
    if match["shape"] is None:
        if value is None:
            raise ValueError(f"argument: {text!r} has neither a shape nor a value")
        return dtype.type(_number(value, text, dtype))
    shape = tuple(int(n) for n in match["shape"].split(",") if n.strip())
    if math.prod(shape) * dtype.itemsize > MOST_BYTES:
        raise ValueError(f"argument: got {text!r}; accepted: arrays of at most {MOST_BYTES >> 30} GiB")
    return _aligned(_filled(text, shape, dtype, value, seed))


def _filled(text: str, shape: tuple[int, ...], dtype: np.dtype, value: str | None, seed: int) -> np.ndarray:
    if value is None:
        return np.zeros(shape, dtype)
    if value == "arange":
        return np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    if value in ("rand", "random"):
        random = np.random.default_rng(seed)
        if dtype.kind in "iu":
            return random.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype).reshape(shape)
        return random.standard_normal(shape).astype(dtype)
    if value.endswith(".npy"):
        array = _file(value)
        if array.shape != shape:
            raise ValueError(f"argument: got {text!r}; accepted: the shape of the file, {list(array.shape)}")
        if array.dtype.kind == "V" and array.dtype.itemsize == dtype.itemsize:  # how NumPy saves bf16 and fp8
            return array.view(dtype)
        return array.astype(dtype)
    return np.full(shape, _number(value, text, dtype), dtype)


def _file(path: str) -> np.ndarray:
    if not Path(path).is_file():
        raise ValueError(f"argument: there is no file {path}")
    try:
        return np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError) as problem:
        raise ValueError(f"argument: got {path}; accepted: arrays that numpy.save wrote ({problem})") from None


def _aligned(array: np.ndarray) -> np.ndarray:
    """Returns an aligned copy, as in device memory, that has no bytes but its own."""
    if not array.nbytes:
        return array
    raw = np.empty(array.nbytes + ALIGNED, np.uint8)
    start = -raw.ctypes.data % ALIGNED
    out = np.frombuffer(raw.data[start : start + array.nbytes], array.dtype).reshape(array.shape)
    out[...] = array
    return out


def _map(text: str, seed: int, before: Sequence[Value]) -> TensorMapArgument:
    match = _MAP.fullmatch(text)
    if match is None:
        raise ValueError(
            f"argument: got {text!r}; accepted: forms such as map[64,64]:bf16[256,128]:rand and "
            "map[64,64;swizzle=128]:arg0"
        )
    array: Value
    other = re.fullmatch(r"arg(\d+)", match["array"])
    if other is None:
        array = parse_argument(match["array"], seed)
    elif int(other[1]) < len(before):
        array = before[int(other[1])]
    else:
        raise ValueError(f"argument: got {text!r}; accepted: arg0 to arg{len(before) - 1} (arguments before it)")
    if not isinstance(array, np.ndarray):
        raise ValueError(f"argument: got {text!r}; accepted: maps over arrays")
    swizzle = int(match["swizzle"] or 0)
    if swizzle not in SWIZZLES:
        raise ValueError(f"argument: got {text!r}; accepted: swizzles of {', '.join(map(str, SWIZZLES))} bytes")
    try:
        return tensor_map(array, tuple(int(n) for n in match["box"].split(",") if n.strip()), swizzle=swizzle)
    except ValueError as problem:
        raise ValueError(f"argument: got {text!r}: {problem}") from None


def _number(value: str, text: str, dtype: np.dtype) -> float | int:
    try:
        number = int(value, 0) if dtype.kind in "iu" else float(value)
    except ValueError:
        raise ValueError(f"argument: {value!r} in {text!r} is not a number, arange, rand or a file x.npy") from None
    if dtype.kind in "iu" and not np.iinfo(dtype).min <= number <= np.iinfo(dtype).max:
        limits = np.iinfo(dtype)
        raise ValueError(f"argument: got {text!r}; accepted: numbers from {limits.min} to {limits.max}")
    return number
