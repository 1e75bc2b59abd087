"""Rows of DeepSeek-V4.1 as bytes, in NumPy and ml_dtypes, from the description of the formats alone."""

import math

import ml_dtypes
import numpy as np
import torch

# data bytes, scale bytes, values per scale, what a page begins at multiples of unless it is interleaved
SIZES = {"mxfp8_528": (512, 16, 32, 512), "nvfp4_288": (256, 32, 16, 256)}


def row_bytes(row: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """fp32 [512] -> (data, scales), uint8."""
    codes, scales = [], []
    for group in row.reshape(-1, SIZES[kind][2]):
        amax = np.float32(np.abs(group).max())
        if kind == "mxfp8_528":
            # fp64: exact enough for the logarithm of an fp32 number
            e = math.ceil(math.log2(float(max(amax, np.float32(1e-4)) / np.float32(448))))
            scales.append(np.uint8(e + 127))
            codes.append((group / np.float32(2.0**e)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
        else:
            scale = np.float32(min(max(amax / np.float32(6), 2.0**-9), 448)).astype(ml_dtypes.float8_e4m3fn)
            scales.append(scale.view(np.uint8))
            x = np.clip(group / scale.astype(np.float32), -6, 6)
            nibbles = x.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
            codes.append(nibbles[0::2] | (nibbles[1::2] << 4))
    return np.concatenate(codes), np.array(scales, np.uint8)


def row_values(data: np.ndarray, scales: np.ndarray, kind: str) -> np.ndarray:
    """What a row means, fp32 [512]."""
    group = SIZES[kind][2]
    if kind == "mxfp8_528":
        values = data.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        factor = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    else:
        nibbles = np.stack([data & 15, data >> 4], -1).reshape(-1)
        values = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        factor = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return (values.reshape(-1, group) * factor[:, None]).reshape(-1)


def place_of(number: int, kind: str, interleaved: bool, per_page: int, stride: int) -> tuple[int, int]:
    """Where the data of a row begin, and its scales."""
    data, scales, *_ = SIZES[kind]
    page, place = divmod(number, per_page)
    if interleaved:
        at = page * stride + place * (data + scales)
        return at, at + data
    return page * stride + place * data, page * stride + per_page * data + place * scales


def image(rows: torch.Tensor, kind: str, interleaved: bool, per_page: int, stride: int) -> np.ndarray:
    """Pages of rows [n, 512] as bytes; what no row has is 0."""
    data, scales, *_ = SIZES[kind]
    out = np.zeros(-(-len(rows) // per_page) * stride, np.uint8)
    for i, row in enumerate(rows.float().numpy()):
        at, more = place_of(i, kind, interleaved, per_page, stride)
        out[at : at + data], out[more : more + scales] = row_bytes(row, kind)
    return out


def values(storage: np.ndarray, n: int, kind: str, interleaved: bool, per_page: int, stride: int) -> torch.Tensor:
    """The first n rows of pages, fp32 [n, 512]."""
    data, scales, *_ = SIZES[kind]
    places = (place_of(i, kind, interleaved, per_page, stride) for i in range(n))
    return torch.from_numpy(
        np.stack([row_values(storage[a : a + data], storage[b : b + scales], kind) for a, b in places])
    )
