"""A TMA box between global and shared memory: traversal, bounds, fill, swizzle. Pure functions on NumPy bytes.

The shared-memory image of a box is dense, dimension 0 fastest. With a swizzle a row (dimension 0) takes a whole span
of 32, 64 or 128 bytes, and address bits are XORed with the absolute shared address:

    32 B:            bit 4    ^= bit 7            128 B:                       bits 4-6 ^= bits 7-9
    64 B:            bits 4-5 ^= bits 7-8         128 B, 32-byte atoms:        bits 5-6 ^= bits 7-8
    128 B, 64-byte atoms:  bit 6 ^= bit 7         128 B, 32-byte atoms, flip:  bits 5-6 ^= bits 7-8, bit 3 ^= bit 7

All of these permute within one row, so a table per (rows, row bytes, swizzle, address mod 1024) is all a copy needs.
The image of an interleaved tensor is one such row: slices of 16 or 32 bytes, one of each pixel.
Global memory is reached through `view(address, nbytes) -> uint8 array` that aliases it and checks bounds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import ml_dtypes
import numpy as np

from softsm.memory.tensor_map import DataType, Fill, Swizzle, TensorMap, Wide

View = Callable[[int, int], np.ndarray]

ADDRESSES = (1 << 64) - 1  # addresses of a tensor wrap around; ragged descriptors rely on it
SHARED_ALIGNMENT = 128
OOB_NAN = 0x7FF7  # the NaN of out-of-bounds fill, repeated over the element: f32 reads 0x7ff77ff7

_XOR = {  # swizzle -> (shift right, mask, shift left), applied one after the other
    Swizzle.NONE: (),
    Swizzle.B32: ((7, 1, 4),),
    Swizzle.B64: ((7, 3, 4),),
    Swizzle.B128: ((7, 7, 4),),
    Swizzle.B128_ATOM_32B: ((7, 3, 5),),
    Swizzle.B128_ATOM_32B_FLIP_8B: ((7, 3, 5), (7, 1, 3)),
    Swizzle.B128_ATOM_64B: ((7, 1, 6),),
}


def swizzled(address: np.ndarray, swizzle: Swizzle) -> np.ndarray:
    """Returns where the byte meant for `address` really lies."""
    out = address
    for right, mask, left in _XOR[swizzle]:
        out = out ^ (((address >> right) & mask) << left)
    return out


# -- the shared-memory image -----------------------------------------------------------------------------------------


@lru_cache(maxsize=512)
def _placement(rows: int, row_bytes: int, swizzle: Swizzle, kind: DataType, phase: int):
    """Returns (unit dtype, forward, inverse, footprint) for a packed row image.

    forward[i] = unit of shared memory, counted from the destination, that holds packed unit i.
    inverse    = its inverse when the image is a permutation of the footprint, else None.
    Units are 16 bytes, smaller where gaps or the 8-byte flip ask for it.
    """
    unit, data, chunk = (16, 16, 16)  # bytes: granule, and `data` bytes of each `chunk` of shared memory are used
    if kind is DataType.U4_ALIGN16B:
        unit, data = 8, 8
    elif kind is DataType.U6_ALIGN16B:
        unit, data = 4, 12
    elif swizzle is Swizzle.B128_ATOM_32B_FLIP_8B:
        unit, data, chunk = 8, 8, 8
    spread = row_bytes // data * chunk  # bytes of a row before padding to the span
    pitch = -(-spread // swizzle.span) * swizzle.span if swizzle else spread  # several spans: interleaved alone
    within = (np.arange(spread // chunk)[:, None] * chunk + np.arange(0, data, unit)).ravel()
    address = phase + (np.arange(rows)[:, None] * pitch + within).ravel()
    places = (swizzled(address, swizzle) - phase) // unit
    forward: np.ndarray | None = places
    dense = pitch == spread and data == chunk
    inverse = np.argsort(places) if dense else None
    if inverse is not None and not swizzle:
        inverse = forward = None  # the image is the packed rows themselves
    dtype = {16: np.complex128, 8: np.uint64, 4: np.uint32}[unit]
    return np.dtype(dtype), forward, inverse, rows * pitch


def footprint(rows: int, row_bytes: int, m: TensorMap) -> int:
    """Returns the bytes of shared memory from the start of the image to its end, padding included."""
    found = m.tables.get(("footprint", rows))
    if found is None:
        shape = _image_shape(rows, row_bytes, m)
        found = m.tables["footprint", rows] = _placement(*shape, m.swizzle, m.data_type, 0)[3]
    return found


def _image_shape(rows: int, row_bytes: int, m: TensorMap) -> tuple[int, int]:
    return (1, rows * row_bytes) if m.interleave else (rows, row_bytes)


def put_image(packed: np.ndarray, rows: int, m: TensorMap, shared: np.ndarray, offset: int) -> None:
    """Writes packed rows (uint8, contiguous) to their places in shared memory at `offset` (also the XOR's address)."""
    shape = _image_shape(rows, packed.size // rows, m)
    dtype, forward, inverse, nbytes = _placement(*shape, m.swizzle, m.data_type, offset % 1024)
    target = shared[offset : offset + nbytes]
    if forward is None:
        target[:] = packed.reshape(-1)
    elif inverse is not None:
        np.take(packed.reshape(-1).view(dtype), inverse, out=target.view(dtype), mode="clip")
    else:
        target.view(dtype)[forward] = packed.reshape(-1).view(dtype)


def get_image(rows: int, row_bytes: int, m: TensorMap, shared: np.ndarray, offset: int) -> np.ndarray:
    """Returns the inverse of put_image: packed rows as uint8[rows, row_bytes] of their own."""
    shape = _image_shape(rows, row_bytes, m)
    dtype, forward, _, nbytes = _placement(*shape, m.swizzle, m.data_type, offset % 1024)
    source = shared[offset : offset + nbytes]
    if forward is None:
        return source.reshape(rows, row_bytes).copy()
    return source.view(dtype)[forward].view(np.uint8).reshape(rows, row_bytes)


# -- the global side of a tiled box ----------------------------------------------------------------------------------


class Region:
    """The part of a box that lies inside the tensor. Ranges are in box positions, outermost dimension first."""

    __slots__ = ("address", "inside", "nbytes", "shape", "strides", "total")

    def __init__(self, m: TensorMap, coords: Sequence[int]):
        bits = m.data_type.bits
        counts = m.counts
        steps = (1, *m.element_strides[1:])
        address, last, kept, total = m.base, 0, 1, 1
        inside, shape, strides = [], [], []
        for i, (count, step, start, dim) in enumerate(zip(counts, steps, coords, m.dims, strict=True)):
            low = max(0, -(start // step)) if start < 0 else 0
            high = min(count, -((start - dim) // step))  # ceil((dim - start) / step)
            if high < low:
                high = low
            total *= count
            kept *= high - low
            first = start + low * step
            if i == 0:
                begin, length = first * bits // 8, (high - low) * bits // 8
                inside.append(slice(low * bits // 8, low * bits // 8 + length))
                shape.append(length)
                strides.append(1)
                last += length
                address += begin
            else:
                stride = m.strides[i - 1]
                inside.append(slice(low, high))
                shape.append(high - low)
                strides.append(stride * step)
                last += stride * step * (high - low - 1)
                address += first * stride
        self.inside = tuple(reversed(inside))
        self.shape = tuple(reversed(shape))
        self.strides = tuple(reversed(strides))
        self.address, self.nbytes = address & ADDRESSES, last if kept else 0
        self.total = (total, kept)

    @property
    def filled(self) -> int:
        """Elements outside the tensor."""
        return self.total[0] - self.total[1]

    def bytes(self, view: View) -> np.ndarray:
        """Returns the elements inside, as an array that aliases global memory."""
        return np.ndarray(self.shape, np.uint8, view(self.address, self.nbytes), 0, self.strides)


def _empty(shape: tuple[int, ...], m: TensorMap) -> np.ndarray:
    """Returns the bytes of out-of-bounds elements."""
    if m.oob_fill is Fill.ZERO:
        return np.zeros(shape, np.uint8)
    # rows are multiples of 16 bytes, so the 2-byte pattern always fits
    return np.full((*shape[:-1], shape[-1] // 2), OOB_NAN, np.uint16).view(np.uint8)


@lru_cache(maxsize=512)
def _direct(shape: tuple[int, ...], strides: tuple[int, ...], swizzle: Swizzle, kind: DataType, phase: int):
    """Returns the 16-byte chunk of global memory, counted from the box's first byte, for each chunk of the image in
    order, if the box is wholly inside the tensor. None where the image has gaps or finer units."""
    rows = int(np.prod(shape[:-1], dtype=np.int64))
    dtype, _, inverse, nbytes = _placement(rows, shape[-1], swizzle, kind, phase)
    if dtype != np.complex128 or nbytes != rows * shape[-1]:
        return None
    at = np.arange(0, shape[-1], 16)
    for extent, stride in zip(reversed(shape[:-1]), reversed(strides)):
        at = (np.arange(extent)[:, None] * stride + at.ravel()[None, :]).ravel()
    chunks = at // 16
    return chunks if inverse is None else chunks[inverse]


def load_tile(m: TensorMap, coords: Sequence[int], view: View, shared: np.ndarray, offset: int) -> int:
    """Loads one tiled box at signed `coords` into shared memory; returns the number of elements that were filled."""
    shape = m.packed_shape
    address = m.base + coords[0] * m.data_type.bits // 8
    inside = 0 <= coords[0] <= m.dims[0] - m.reach[0]
    span = shape[-1]
    for i in range(1, len(shape)):
        inside = inside and 0 <= coords[i] <= m.dims[i] - m.reach[i]
        address += coords[i] * m.strides[i - 1]
        span += m.strides[i - 1] * (m.reach[i] - 1)
    address &= ADDRESSES
    if inside and not address % 16:
        table = m.tables.get(offset % 1024, False)
        if table is False:
            strides = tuple(s * e for s, e in zip(reversed(m.strides), reversed(m.element_strides)))
            key = shape, strides, m.swizzle, m.data_type, offset % 1024
            table = m.tables[offset % 1024] = None if _changes_bits(m) else _direct(*key)
        if table is not None:
            source = view(address, span).view(np.complex128)
            np.take(source, table, out=shared[offset : offset + m.box_bytes].view(np.complex128), mode="clip")
            return 0
    region = Region(m, coords)
    packed = _empty(shape, m) if region.filled else np.empty(shape, np.uint8)
    if region.nbytes:
        packed[region.inside] = region.bytes(view)
    put_image(_converted(packed, m), m.rows, m, shared, offset)
    return region.filled


def take_tile(m: TensorMap, shared: np.ndarray, offset: int) -> np.ndarray:
    """Returns the box a tiled store or reduction reads from shared memory, as packed bytes of its own."""
    return get_image(m.rows, m.packed_shape[-1], m, shared, offset)


def store_tile(m: TensorMap, coords: Sequence[int], view: View, box: np.ndarray, redop: str = "") -> int:
    """Stores a box (from take_tile); elements outside the tensor are not written. `redop` makes it a reduction.
    Returns the number of elements left out."""
    region = Region(m, coords)
    if region.nbytes:
        packed = box.reshape(m.packed_shape)[region.inside]
        target = region.bytes(view)
        target[...] = reduced(target, packed, redop, m.data_type) if redop else packed
    return region.filled


# -- rows at arbitrary places: gather4, scatter4, im2col, interleaved tensors ----------------------------------------


def row_bytes(m: TensorMap) -> int:
    return (m.unit_bits if m.interleave else m.box[0] * m.data_type.bits) // 8


def _row_region(m: TensorMap, column: int) -> tuple[int, int, int]:
    """Returns (bytes to skip in the packed row, byte offset in a global row, bytes) of the columns inside the
    tensor.
    """
    if m.interleave:  # rows are slices
        return 0, 0, row_bytes(m)
    bits = m.data_type.bits
    low = max(0, -column)
    high = max(low, min(m.box[0], m.dims[0] - column))
    return low * bits // 8, (column + low) * bits // 8, (high - low) * bits // 8


def load_rows(
    m: TensorMap, column: int, rows: Sequence[int | None], view: View, shared: np.ndarray, offset: int
) -> int:
    """Loads rows given by their byte offset from the tensor's base (None = outside the tensor) one after the other."""
    bits = m.data_type.bits
    packed = _empty((len(rows), row_bytes(m)), m)
    skip, begin, length = _row_region(m, column)
    filled = packed.size * 8 // bits
    if length:
        for i, at in enumerate(rows):
            if at is not None:
                packed[i, skip : skip + length] = view(m.base + at + begin & ADDRESSES, length)
                filled -= length * 8 // bits
    put_image(_converted(packed, m), len(rows), m, shared, offset)
    return filled


def take_rows(m: TensorMap, rows: int, shared: np.ndarray, offset: int) -> np.ndarray:
    """Returns the rows a scatter or im2col store reads from shared memory, uint8 [rows, row bytes] of its own."""
    return get_image(rows, row_bytes(m), m, shared, offset)


def store_rows(
    m: TensorMap, column: int, rows: Sequence[int | None], view: View, box: np.ndarray, redop: str = ""
) -> int:
    """Stores rows (from take_rows), the inverse of load_rows; returns the number of elements left out."""
    skip, begin, length = _row_region(m, column)
    left_out = box.size * 8 // m.data_type.bits
    for at, packed in zip(rows, box):
        if at is not None and length:
            target = view(m.base + at + begin & ADDRESSES, length)
            value = packed[skip : skip + length]
            target[...] = reduced(target, value, redop, m.data_type) if redop else value
            left_out -= length * 8 // m.data_type.bits
    return left_out


def gather_rows(m: TensorMap, numbers: Sequence[int]) -> list[int | None]:
    """Converts row numbers of gather4/scatter4 on a 2-D map to byte offsets."""
    return [number * m.strides[0] if 0 <= number < m.dims[1] else None for number in numbers]


def _place(m: TensorMap, at: Sequence[int]) -> int | None:
    """Returns the byte offset of a pixel, or of a slice of its channels if they are interleaved; None outside the
    tensor. Where dimension 0 is C its coordinate does not count."""
    first = 0 if m.interleave else 1
    if not all(0 <= x < dim for x, dim in zip(at[first:], m.dims[first:])):
        return None
    offset = sum(x * stride for x, stride in zip(at[1:], m.strides))
    return offset + at[0] * row_bytes(m) if m.interleave else offset


def interleaved_rows(m: TensorMap, coords: Sequence[int]) -> list[int | None]:
    """Returns the slices of a tiled box, W fastest; the coordinate of C chooses one of each pixel."""
    ranges = [range(x, x + count * step, step) for x, count, step in zip(coords, m.counts, m.element_strides)]
    return [_place(m, at[::-1]) for at in itertools.product(*reversed(ranges))]


def _walk(m: TensorMap, coords: Sequence[int], shift: int = 0) -> Iterator[list[int]]:
    """Yields the coordinates of pixel after pixel of im2col, without end: from `coords` through the pixel box, W
    fastest, then on to the next image. A wide map stays in its row; `shift` moves its box along W."""
    box = m.im2col
    assert box is not None
    first = 0 if m.interleave else 1
    axes = range(first, first + len(box.lower))
    lows = [low + shift for low in box.lower]
    highs = [m.dims[axis] + high + shift for axis, high in zip(axes, box.upper)]
    at = list(coords)
    at[first] += shift
    while True:
        yield list(at)
        for axis, low, high in zip(axes, lows, highs):
            at[axis] += m.element_strides[axis]
            if at[axis] < high:
                break
            at[axis] = low
        else:
            at[-1] += m.element_strides[-1]


def im2col_rows(m: TensorMap, coords: Sequence[int], offsets: Sequence[int]) -> list[int | None]:
    """Returns the pixels an im2col load visits; `offsets` (W first) shift the pixel that is read without moving the
    walk.
    """
    first, rows = 0 if m.interleave else 1, []
    for at in itertools.islice(_walk(m, coords), m.im2col.pixels):  # type: ignore[union-attr]
        for i, offset in enumerate(offsets):
            at[first + i] += offset
        rows.append(_place(m, at))
    return rows


def im2col_wide_rows(m: TensorMap, coords: Sequence[int], halo: int, shift: int) -> list[int | None]:
    """Returns the pixels of im2col::w, then `halo` more: the walk goes on. im2col::w::128 has 128 pixels and a halo
    after every 32 of them; the rows of its halo follow all pixels: the first pixel after each 32, then the second, and
    so on.
    """
    box = m.im2col
    assert box is not None
    pixels = 128 if box.wide is Wide.W128 else box.pixels
    rows = [_place(m, at) for at in itertools.islice(_walk(m, coords, shift), pixels + halo)]
    if box.wide is Wide.W:
        return rows
    return rows[:128] + [rows[32 * part + i] for i in range(halo) for part in (1, 2, 3, 4)]


# -- element values --------------------------------------------------------------------------------------------------


def _changes_bits(m: TensorMap) -> bool:
    return m.data_type in (DataType.TFLOAT32, DataType.TFLOAT32_FTZ)


def _converted(packed: np.ndarray, m: TensorMap) -> np.ndarray:
    """Converts values as a load does on an H200: tf32 types round to 10 mantissa bits (nearest, ties to even) and make
    NaN 0x7fffe000; denormals stay, under the ftz types too."""
    if not _changes_bits(m):
        return packed
    word = packed.view(np.uint32).copy()
    nan = (word & 0x7FFF_FFFF) > 0x7F80_0000
    word += 0xFFF + (word >> 13 & 1)
    word &= 0xFFFF_E000
    word[nan] = 0x7FFF_E000
    return word.view(np.uint8)


_VALUE = {
    DataType.UINT8: np.uint8,
    DataType.UINT16: np.uint16,
    DataType.UINT32: np.uint32,
    DataType.INT32: np.int32,
    DataType.UINT64: np.uint64,
    DataType.INT64: np.int64,
    DataType.FLOAT16: np.float16,
    DataType.FLOAT32: np.float32,
    DataType.FLOAT64: np.float64,
    DataType.BFLOAT16: ml_dtypes.bfloat16,
    DataType.FLOAT32_FTZ: np.float32,
}

_FLOAT_OPS = {
    np.float16: ("add", "min", "max"),
    ml_dtypes.bfloat16: ("add", "min", "max"),
    np.float32: ("add",),
    np.float64: ("add",),
}


def reduced(old: np.ndarray, new: np.ndarray, op: str, kind: DataType) -> np.ndarray:
    """Returns old (op) new element by element, on bytes; ValueError if the type has no such reduction."""
    dtype = _VALUE.get(kind)
    if dtype is None or dtype in (np.uint8, np.uint16):
        raise ValueError(f"{op}: no reduction on {kind.name}")
    a = np.ascontiguousarray(old).view(dtype)
    b = np.ascontiguousarray(new).view(dtype)
    return combine(a, b, op).view(np.uint8).reshape(old.shape)


def combine(a: np.ndarray, b: np.ndarray, op: str) -> np.ndarray:
    """Reduces a, which memory holds, and b, which arrives. Integers wrap; min/max of floats drop a NaN."""
    dtype = a.dtype.type
    allowed = _FLOAT_OPS.get(dtype)
    if allowed is not None:
        if op not in allowed:
            raise ValueError(f"{op}: no such reduction on {a.dtype}")
        if op == "add":
            with np.errstate(all="ignore"):
                if a.dtype.itemsize == 2:  # one rounding of the exact f32 sum
                    return (a.astype(np.float32) + b.astype(np.float32)).astype(a.dtype)
                return a + b
        pick = np.fmin if op == "min" else np.fmax
        return pick(a.astype(np.float32), b.astype(np.float32)).astype(a.dtype)
    if op == "add":
        return a + b
    if op in ("min", "max"):
        return (np.minimum if op == "min" else np.maximum)(a, b)
    if op in ("and", "or", "xor"):
        return {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[op](a, b)
    if op == "inc" and dtype is np.uint32:
        return np.where(a >= b, np.uint32(0), a + np.uint32(1))
    if op == "dec" and dtype is np.uint32:
        return np.where((a == 0) | (a > b), b, a - np.uint32(1))
    raise ValueError(f"{op}: no such reduction on {a.dtype}")
