"""The arithmetic of a tensor core: read and decode operands, multiply, accumulate. All are functions on arrays.

Products are exact in float32 for every 16-bit and smaller format; sums are float32 fused multiply-adds in ascending k,
one of the orders PTX allows ("at least single precision"). tf32 operands lose their 13 low bits. 8-bit integers are
exact: a sum of 32 products stays below 2**24.

Operands have two layouts, as isa/tensor_kernels.py needs them: B is float32 [n, k]; A is "by lanes", the bits of
float32 as uint32 [k * stride + 2, 32]: lane l of row stride*i + q holds element i of the operand row that lane
32*q + l of the accumulator needs; a row of zeros and one of NaNs follow. stride is 4 for tensor memory (128 lanes), 2
for a warpgroup.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np

from softsm import formats
from softsm.isa.tensor_kernels import gather8, gather16, gather32, halves
from softsm.memory import swizzle
from softsm.memory.swizzle import Descriptor

_WORD = {"f16": np.uint16, "bf16": np.uint16, "tf32": np.uint32}
_EMPTY = np.zeros(0, np.uint32)
CANONICAL_NAN = 0x7FFFFFFF


def element_bytes(name: str) -> int:
    """Returns the bytes of an operand element in shared memory (of its container for a sub-byte one of kind f8f6f4)."""
    return {"f16": 2, "bf16": 2, "tf32": 4}.get(name, 1)


def chunk_elements(name: str) -> int:
    """Returns the number of operand elements in 16 bytes of shared memory."""
    return 128 if name == "b1" else 16 // element_bytes(name)


@cache
def table_bits(name: str) -> np.ndarray:
    """Returns the float32 bits of every code of a 16-bit or 8-bit format."""
    if name == "f16":
        with np.errstate(invalid="ignore"):  # signalling NaNs become quiet ones
            return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
    return np.ascontiguousarray(formats.table(name)).view(np.uint32)


def decoding(name: str) -> np.ndarray:
    """Returns the table for the compiled kernels, empty for formats whose bits are those of a float32."""
    return _EMPTY if name in ("bf16", "tf32") else table_bits(name)


@cache
def _identity(count: int) -> np.ndarray:
    return np.arange(count)


def lane_rows(k: int, stride: int) -> np.ndarray:
    """Returns an empty A by lanes: uint32 [k * stride + 2, 32] of zeros, the last row NaNs."""
    rows = np.zeros((k * stride + 2, 32), np.uint32)
    rows[-1] = CANONICAL_NAN
    return rows


class Tile(NamedTuple):
    """An operand in shared memory, with everything precomputed that follows from its descriptor and type: element (row,
    i) goes to out[i, place[row]] (by lanes) or to out[row, place[i]]."""

    gather: Callable
    word: np.dtype
    base: int
    chunks: np.ndarray
    table: np.ndarray
    place: np.ndarray
    swap: int

    def read(self, shared: np.ndarray, out: np.ndarray) -> None:
        """Reads the tile, which the caller has checked to lie within `shared`."""
        view = shared[: shared.size & ~3].view(self.word)
        self.gather(view, self.base, self.chunks, self.table, self.place, out, self.swap)

    def numbers(self) -> bytes:
        """Returns the numbers for `gather_tiles`, valid as long as the tile lives."""
        table = self.table.ctypes.data if self.table.size else 0
        return np.array(
            [
                self.word.itemsize,
                self.base,
                self.chunks.ctypes.data,
                *self.chunks.shape,
                table,
                self.place.ctypes.data,
                self.swap,
            ]
        ).tobytes()


def tile(
    descriptor: Descriptor, k_major: bool, rows: int, k: int, name: str, place: np.ndarray, by_lanes: bool
) -> Tile:
    """Returns the tile of a descriptor whose elements have 8 bits or more."""
    per = chunk_elements(name)
    size = (rows, k // per) if k_major else (k, -(-rows // per))
    word = np.dtype(_WORD.get(name, np.uint8))
    gather = {2: gather16, 1: gather8, 4: gather32}[word.itemsize]
    table = decoding(name)
    chunks = swizzle.chunks(descriptor, k_major, *size)
    return Tile(gather, word, (descriptor.start & ~1023) >> 4, chunks.at, table, place, int(k_major == by_lanes))


def _gather(shared, floor, descriptor, k_major, rows, k, name, out, place, by_lanes, what) -> None:
    """Gathers element (row, i) of a shared-memory tile into out[i, place[row]] (by_lanes) or out[row, place[i]]."""
    per = chunk_elements(name)
    size = (rows, k // per) if k_major else (k, -(-rows // per))
    if formats.BITS[name] < 8:  # single bits, or packed with padding: rare, decoded in NumPy
        data = swizzle.read(shared, floor, descriptor, k_major, *size, what)
        if name == "b1":
            values = np.unpackbits(data, axis=1, bitorder="little").astype(np.float32).view(np.uint32)
        else:
            values = formats.decode(formats.unpack_padded(data, name), name).view(np.uint32)
        values = values if k_major else values.T[:rows]
        if by_lanes:
            out[:, place[:rows]] = values.T
        else:
            out[:rows, place[:k]] = values
        return
    swizzle.locate(shared, floor, descriptor, k_major, *size, what)
    tile(descriptor, k_major, rows, k, name, place, by_lanes).read(shared, out)


def shared_rows(
    shared: np.ndarray, floor: int, descriptor: Descriptor, k_major: bool, rows: int, k: int, name: str, what: str
) -> np.ndarray:
    """Returns the operand that a descriptor names, as float32 [rows, k]."""
    out = np.empty((-(-rows // 16) * 16, k), np.uint32)  # MN-major chunks may reach past the last row
    _gather(shared, floor, descriptor, k_major, rows, k, name, out, _identity(k), False, what)
    return out[:rows].view(np.float32)


def shared_lanes(
    shared: np.ndarray,
    floor: int,
    descriptor: Descriptor,
    k_major: bool,
    rows: int,
    k: int,
    name: str,
    place: np.ndarray,
    stride: int,
    what: str,
) -> np.ndarray:
    """Returns the operand that a descriptor names, by lanes: row r in lane place[r]."""
    out = lane_rows(k, stride)
    _gather(shared, floor, descriptor, k_major, rows, k, name, out[:-2].reshape(k, stride * 32), place, True, what)
    return out


def to_lanes(values: np.ndarray, place: np.ndarray, stride: int) -> np.ndarray:
    """Rearranges float32 [rows, k] by lanes."""
    rows, k = values.shape
    out = lane_rows(k, stride)
    out[:-2].reshape(k, stride * 32)[:, place[:rows]] = values.T.view(np.uint32)
    return out


def shared_fp4(shared: np.ndarray, floor: int, descriptor: Descriptor, rows: int, k: int, what: str) -> np.ndarray:
    """Returns an operand of kinds mxf4 and mxf4nvf4 (K-major e2m1, two in a byte, no padding) as float32 [rows, k]."""
    data = swizzle.read(shared, floor, descriptor, True, rows, k // 32, what)
    return formats.decode(formats.unpack_nibbles(data), "e2m1")


def tensor_lanes(cells: np.ndarray, name: str, packed_fp4: bool = False) -> np.ndarray:
    """Returns A from tensor memory, by lanes. cells: uint32 [8 columns, 128 lanes]; a lane has 32 bytes along k."""
    if name == "tf32":
        k = cells.shape[0]
        out = lane_rows(k, 4)
        out[:-2].reshape(k, 128)[:] = cells & 0xFFFFE000
        return out
    if name in ("f16", "bf16"):
        k = cells.shape[0] * 2
        out = lane_rows(k, 4)
        halves(cells, decoding(name), out)
        return out
    containers = np.ascontiguousarray(cells.T).view(np.uint8)  # [lanes, 32]
    if packed_fp4:
        values = formats.decode(formats.unpack_nibbles(containers), "e2m1")
    else:
        values = formats.decode_container(containers, name)
    return to_lanes(values, _identity(128), 4)


def tensor_numbers(column: int, name: str) -> bytes:
    """Describes A of 16-bit elements in tensor memory, for `gather_tiles`."""
    table = decoding(name)
    return np.array([0, column, 0, 0, 0, table.ctypes.data if table.size else 0, 0, 0]).tobytes()


def wide_rows(scales: np.ndarray) -> np.ndarray:
    """Finds rows of scales with which the product of two such operands may leave float32's range: bool [rows]."""
    return (np.isfinite(scales) & (scales != 0) & ((scales > 2.0**40) | (scales < 2.0**-40))).any(1)


def scaled(values: np.ndarray, scales: np.ndarray, dtype: type = np.float32) -> np.ndarray:
    """Multiplies values [rows, k] by block scales [rows, blocks], each for k/blocks neighbours. The product is exact in
    float64, and in float32 except for wide rows."""
    rows, k = values.shape
    blocks = scales.shape[1]
    with np.errstate(invalid="ignore", over="ignore"):
        product: np.ndarray = values.reshape(rows, blocks, k // blocks).astype(dtype)
        product = product * scales[:, :, None].astype(dtype)
    return product.reshape(rows, k)


def accumulate(
    cells: np.ndarray, product: np.ndarray, kind: str, add: bool, scale_exponent: int = 0, saturate: bool = False
) -> np.ndarray:
    """Returns the new D as uint32, for accumulators that the kernel does not support. cells: old D; kind: 'f32', 'f16'
    or 's32'; add: D = A*B + D*2^-s."""
    with np.errstate(invalid="ignore", over="ignore"):
        if kind == "s32":
            total = product.astype(np.int64)
            if add:
                total += cells.view(np.int32)
            if saturate:
                total = total.clip(-(1 << 31), (1 << 31) - 1)
            return total.astype(np.int32).view(np.uint32)
        if kind == "f16":
            if add:
                old = cells.astype(np.uint16).view(np.float16).astype(np.float32)
                product = product + np.ldexp(old, -scale_exponent)
            fresh = product.astype(np.float16)
            return np.where(np.isnan(fresh), 0x7FFF, fresh.view(np.uint16)).astype(np.uint32)
        if add:
            product = product + np.ldexp(cells.view(np.float32), -scale_exponent)
        fresh = product.astype(np.float32)
        return np.where(np.isnan(fresh), np.uint32(CANONICAL_NAN), fresh.view(np.uint32))
