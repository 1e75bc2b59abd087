"""Number formats of the tensor cores: bits in, float32 out. Every format here fits into float32 without loss.

The small formats are table lookups; the tables come from ml_dtypes. Names are PTX's: e4m3, e5m2, e2m3, e3m2, e2m1,
ue8m0, ue4m3, f16, bf16, tf32, and s8/u8 (whose products a float32 sum of up to 64 terms still holds exactly).
"""

from __future__ import annotations

from functools import cache

import ml_dtypes
import numpy as np

BITS = {
    "f16": 16, "bf16": 16, "tf32": 32, "f32": 32, "f64": 64, "s8": 8, "u8": 8, "b1": 1,
    "e4m3": 8, "e5m2": 8, "e2m3": 6, "e3m2": 6, "e2m1": 4, "ue8m0": 8, "ue4m3": 8,
}  # fmt: skip

_ML_DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "ue8m0": ml_dtypes.float8_e8m0fnu,
}


@cache
def table(name: str) -> np.ndarray:
    """Returns the float32 value of every byte; for formats of fewer bits the upper bits are ignored."""
    codes = np.arange(256, dtype=np.uint8)
    if name == "s8":
        return codes.view(np.int8).astype(np.float32)
    if name == "u8":
        return codes.astype(np.float32)
    if name == "ue4m3":  # seven bits, no sign
        return (codes & 0x7F).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    codes &= (1 << BITS[name]) - 1
    with np.errstate(invalid="ignore", over="ignore"):
        return codes.view(_ML_DTYPES[name]).astype(np.float32)


def decode(bits: np.ndarray, name: str) -> np.ndarray:
    """Decodes bit patterns to float32: uint16 for f16/bf16, uint32 for tf32/f32, bytes for the others."""
    if name == "bf16":
        wide = np.empty(bits.shape, np.uint32)
        np.left_shift(bits, 16, out=wide, dtype=np.uint32)
        return wide.view(np.float32)
    if name == "f16":
        return bits.view(np.float16).astype(np.float32)
    if name == "tf32":  # the tensor core reads the upper 19 bits of the word
        return (bits & np.uint32(0xFFFFE000)).view(np.float32)
    if name == "f32":
        return bits.view(np.float32)
    return table(name)[bits]


def decode_container(data: np.ndarray, name: str) -> np.ndarray:
    """Decodes 8-bit containers of tensor memory (kind f8f6f4): 4-bit values are in bits 2-5, 6-bit ones in bits 0-5."""
    return table(name)[data >> 2 if name == "e2m1" else data]


def unpack_nibbles(data: np.ndarray) -> np.ndarray:
    """Unpacks bytes [..., n] to 4-bit codes [..., 2n], low nibble first."""
    out = np.empty((*data.shape[:-1], data.shape[-1] * 2), np.uint8)
    np.bitwise_and(data, 15, out=out[..., 0::2])
    np.right_shift(data, 4, out=out[..., 1::2])
    return out


def unpack_sixes(data: np.ndarray) -> np.ndarray:
    """Unpacks bytes [..., 3n] to 6-bit codes [..., 4n], lowest bits first."""
    triple = data.reshape(*data.shape[:-1], -1, 3).astype(np.uint32)
    word = triple[..., 0] | triple[..., 1] << 8 | triple[..., 2] << 16
    codes = (word[..., None] >> np.array([0, 6, 12, 18], np.uint32)) & 63
    return codes.astype(np.uint8).reshape(*data.shape[:-1], -1)


def padded_bytes(name: str) -> int:
    """Returns the bytes of a 16-byte unit that `unpack_padded` reads; 16 for types without padding."""
    return 2 * BITS[name] if BITS[name] in (4, 6) else 16


def unpack_padded(data: np.ndarray, name: str) -> np.ndarray:
    """Unpacks 16-byte units holding 16 packed 4- or 6-bit codes followed by padding (kind f8f6f4 in shared memory;
    sources of tcgen05.cp and ldmatrix with decompression): [..., 16u] bytes -> [..., 16u] codes."""
    units = data.reshape(*data.shape[:-1], -1, 16)
    codes = unpack_nibbles(units[..., :8]) if BITS[name] == 4 else unpack_sixes(units[..., :12])
    return codes.reshape(data.shape)
