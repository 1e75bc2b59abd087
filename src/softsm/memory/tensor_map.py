"""Tensor maps: what cuTensorMapEncodeTiled, -Im2col and -Im2colWide take, their rules, and our 128-byte image.

The image is softsm's own (hardware's is not documented): programs treat it as opaque, pass it by value, copy it and
change it with tensormap.replace. A host program may bring maps in the form of the hardware, as far as it is known
(`from_hardware`). A zeroed image is a legal start for tensormap.replace, as it is on hardware.

Dimensions are listed innermost first throughout, as in the CUDA driver's interface. Those of an interleaved map are
W, [H, [D,]] C, N, where the unit of W is a slice of channels, 16 or 32 bytes, and C counts slices.
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import lru_cache
from typing import TypeVar

import numpy as np

NBYTES = 128
ALIGNMENT = 64  # of the image in memory
_MAGIC = 0x4D54_5353  # "SSTM"
_IMAGE = struct.Struct("<I8B4xQ5Q4Q5H5B3h3hHH")


class TensorMapWarning(UserWarning):
    """The driver accepts these arguments, but they are hardly what was meant."""


class DataType(IntEnum):
    """CUtensorMapDataType. tensormap.replace numbers three of them differently, see PTX_ELEMTYPE."""

    UINT8, UINT16, UINT32, INT32, UINT64, INT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16 = range(10)
    FLOAT32_FTZ, TFLOAT32, TFLOAT32_FTZ, U4_ALIGN8B, U4_ALIGN16B, U6_ALIGN16B = range(10, 16)

    @property
    def bits(self) -> int:
        return _BITS[self]

    @property
    def is_float(self) -> bool:
        return DataType.FLOAT16 <= self <= DataType.TFLOAT32_FTZ


_BITS = (8, 16, 32, 32, 64, 64, 16, 32, 64, 16, 32, 32, 32, 4, 4, 6)
# The .elemtype values of tensormap.replace, in order: u8 u16 u32 s32 u64 s64 f16 f32 f32.ftz f64 bf16 tf32 tf32.ftz
# b4x16 b4x16_p64 b6x16_p32.
PTX_ELEMTYPE = tuple(DataType(k) for k in (0, 1, 2, 3, 4, 5, 6, 7, 10, 8, 9, 11, 12, 13, 14, 15))
_PADDED = (DataType.U4_ALIGN16B, DataType.U6_ALIGN16B)


class Swizzle(IntEnum):
    """CUtensorMapSwizzle."""

    NONE, B32, B64, B128, B128_ATOM_32B, B128_ATOM_32B_FLIP_8B, B128_ATOM_64B = range(7)

    @property
    def span(self) -> int:
        """Bytes of a shared-memory row within which chunks are permuted; 0 without swizzle."""
        return (0, 32, 64, 128, 128, 128, 128)[self]


class Fill(IntEnum):
    """CUtensorMapFloatOOBfill: what out-of-bounds elements become."""

    ZERO, NAN = range(2)


_WIDE_SWIZZLES = (Swizzle.B64, Swizzle.B128, Swizzle.B128_ATOM_32B)


class Wide(IntEnum):
    """What cuTensorMapEncodeIm2colWide adds to im2col: CUtensorMapIm2ColWideMode + 1."""

    NO, W, W128 = range(3)


@dataclass(frozen=True, slots=True)
class Im2col:
    """The part of a map that only im2col has: corners of the pixel box per spatial dimension (W first; wide: W alone),
    box sizes."""

    lower: tuple[int, ...]
    upper: tuple[int, ...]
    channels: int
    pixels: int
    wide: Wide = Wide.NO


@dataclass(frozen=True, slots=True)
class TensorMap:
    data_type: DataType
    base: int
    dims: tuple[int, ...]  # elements
    strides: tuple[int, ...]  # bytes, of dimensions 1..rank-1
    box: tuple[int, ...]  # elements
    element_strides: tuple[int, ...]
    interleave: int = 0
    swizzle: Swizzle = Swizzle.NONE
    l2_promotion: int = 0
    oob_fill: Fill = Fill.ZERO
    im2col: Im2col | None = None
    # what follows from the above, once
    counts: tuple[int, ...] = field(init=False, repr=False, compare=False)
    packed_shape: tuple[int, ...] = field(init=False, repr=False, compare=False)
    rows: int = field(init=False, repr=False, compare=False)
    reach: tuple[int, ...] = field(init=False, repr=False, compare=False)
    box_bytes: int = field(init=False, repr=False, compare=False)
    tables: dict = field(init=False, repr=False, compare=False)  # of box_copy, by address of the image mod 1024

    def __post_init__(self) -> None:
        # A tiled box moves ceil(box / traversal stride) elements per dimension; dimension 0 has no such stride, unless
        # the tensor is interleaved: then its unit is a slice of channels, and a box has one slice of each pixel.
        steps = self.element_strides if self.interleave else (1, *self.element_strides[1:])
        counts = tuple(-(-extent // max(step, 1)) for extent, step in zip(self.box, steps))
        if self.interleave:
            counts = (*counts[:-2], 1, *counts[-1:])
        rows = 1
        for count in counts[1:]:
            rows *= count
        row_bytes = counts[0] * self.unit_bits // 8
        put = object.__setattr__
        put(self, "counts", counts)
        put(self, "packed_shape", (*reversed(counts[1:]), row_bytes))  # bytes, outermost first
        put(self, "rows", rows)
        put(self, "reach", tuple((count - 1) * step + 1 for count, step in zip(counts, steps)))  # elements
        put(self, "box_bytes", rows * row_bytes)  # what complete_tx counts, out-of-bounds elements included
        put(self, "tables", {})

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def unit_bits(self) -> int:
        """What a step along dimension 0 is in memory."""
        return 128 * self.interleave if self.interleave else self.data_type.bits

    def describe(self) -> str:
        return f"{self.data_type.name} {list(self.dims)} (box {list(self.box)}, swizzle {self.swizzle.name})"


def encode_tiled(
    data_type: int,
    rank: int,
    global_address: int,
    global_dim: Sequence[int],
    global_strides: Sequence[int],
    box_dim: Sequence[int],
    element_strides: Sequence[int] | None = None,
    interleave: int = 0,
    swizzle: int = 0,
    l2_promotion: int = 0,
    oob_fill: int = 0,
) -> bytes:
    """cuTensorMapEncodeTiled: the same arguments and rules; the 128-byte image, or a ValueError naming the field.

    Numbers are the driver's enums (CU_TENSOR_MAP_...). global_strides are bytes, rank-1 of them.
    """
    _check_rank(rank, 1)
    return _encode(
        (data_type, rank, global_address, global_dim, global_strides),
        _listed("box_dim", box_dim, rank),
        (element_strides, interleave, swizzle, l2_promotion, oob_fill),
    )


def encode_im2col(
    data_type: int,
    rank: int,
    global_address: int,
    global_dim: Sequence[int],
    global_strides: Sequence[int],
    pixel_box_lower_corner: Sequence[int],
    pixel_box_upper_corner: Sequence[int],
    channels_per_pixel: int,
    pixels_per_column: int,
    element_strides: Sequence[int] | None = None,
    interleave: int = 0,
    swizzle: int = 0,
    l2_promotion: int = 0,
    oob_fill: int = 0,
) -> bytes:
    """cuTensorMapEncodeIm2col: the same arguments and rules. Corners are listed W first, as the driver takes them."""
    _check_rank(rank, 3)
    corners = (
        _listed("pixel_box_lower_corner", pixel_box_lower_corner, rank - 2),
        _listed("pixel_box_upper_corner", pixel_box_upper_corner, rank - 2),
    )
    return _encode(
        (data_type, rank, global_address, global_dim, global_strides),
        (int(channels_per_pixel),) + (1,) * (rank - 1),
        (element_strides, interleave, swizzle, l2_promotion, oob_fill),
        Im2col(*corners, int(channels_per_pixel), int(pixels_per_column)),
    )


def encode_im2col_wide(
    data_type: int,
    rank: int,
    global_address: int,
    global_dim: Sequence[int],
    global_strides: Sequence[int],
    pixel_box_lower_corner_width: int,
    pixel_box_upper_corner_width: int,
    channels_per_pixel: int,
    pixels_per_column: int,
    element_strides: Sequence[int] | None = None,
    interleave: int = 0,
    mode: int = 0,
    swizzle: int = 0,
    l2_promotion: int = 0,
    oob_fill: int = 0,
) -> bytes:
    """cuTensorMapEncodeIm2colWide: the same arguments and rules; mode 0 is W, 1 is W128."""
    _check_rank(rank, 3)
    if mode not in (0, 1):
        raise ValueError(f"mode: got {mode}; 0 (W) and 1 (W128) are accepted")
    corners = (int(pixel_box_lower_corner_width),), (int(pixel_box_upper_corner_width),)
    return _encode(
        (data_type, rank, global_address, global_dim, global_strides),
        (int(channels_per_pixel),) + (1,) * (rank - 1),
        (element_strides, interleave, swizzle, l2_promotion, oob_fill),
        Im2col(*corners, int(channels_per_pixel), int(pixels_per_column), Wide(mode + 1)),
    )


def _encode(tensor: tuple, box: tuple[int, ...], options: tuple, im2col: Im2col | None = None) -> bytes:
    """The image of a map, its fields as the driver takes them, checked."""
    data_type, rank, global_address, global_dim, global_strides = tensor
    element_strides, interleave, swizzle, l2_promotion, oob_fill = options
    made = TensorMap(
        _enum(DataType, data_type, "data_type"),
        int(global_address),
        _listed("global_dim", global_dim, rank),
        _listed("global_strides", global_strides, rank - 1),
        box,
        _listed("element_strides", element_strides if element_strides is not None else (1,) * rank, rank),
        int(interleave),
        _enum(Swizzle, swizzle, "swizzle"),
        int(l2_promotion),
        _enum(Fill, oob_fill, "oob_fill"),
        im2col,
    )
    check(made)
    return to_image(made)


# -- rules -----------------------------------------------------------------------------------------------------------


def check(m: TensorMap) -> None:
    """The driver's rules, each ValueError naming the field, what it got and what is accepted."""
    kind = m.data_type
    padded = kind in _PADDED
    if m.interleave:
        _check_interleave(m)
    if not 0 <= m.l2_promotion <= 3:
        raise ValueError(f"l2_promotion: got {m.l2_promotion}; 0..3 is accepted")
    aligned = 32 if padded or m.interleave == 2 else 16
    if m.base % aligned:
        raise ValueError(f"global_address: {m.base:#x} is not a multiple of {aligned} bytes ({kind.name})")
    for i, dim in enumerate(m.dims):
        if not 1 <= dim <= 1 << 32:
            raise ValueError(f"global_dim[{i}]: got {dim}; 1..2^32 is accepted")
    if padded and m.dims[0] % 128:
        raise ValueError(f"global_dim[0]: got {m.dims[0]}; {kind.name} needs a multiple of 128")
    if kind is DataType.U4_ALIGN8B and m.dims[0] % 2:
        raise ValueError(f"global_dim[0]: got {m.dims[0]}; {kind.name} needs a multiple of 2")
    for i, stride in enumerate(m.strides):
        if stride % aligned or not 0 <= stride < 1 << 40:
            raise ValueError(
                f"global_strides[{i}]: got {stride} bytes; a multiple of {aligned} below 2^40 is accepted "
                "(strides are bytes, not elements)"
            )
    _check_box(m)
    for i, step in enumerate(m.element_strides):
        if not 1 <= step <= 8:
            raise ValueError(f"element_strides[{i}]: got {step}; 1..8 is accepted")
    if m.oob_fill is Fill.NAN and not kind.is_float:
        raise ValueError(f"oob_fill: NaN needs a floating-point data_type, got {kind.name}")
    if kind is DataType.U6_ALIGN16B and m.swizzle not in (0, 3, 4, 6):
        raise ValueError(f"swizzle: {m.swizzle.name} with {kind.name}; NONE, B128, B128_ATOM_32B and _64B are accepted")
    if kind is DataType.U4_ALIGN16B and m.swizzle not in (0, 3, 4):
        raise ValueError(f"swizzle: {m.swizzle.name} with {kind.name}; NONE, B128 and B128_ATOM_32B are accepted")
    if m.im2col is not None:
        _check_im2col(m, m.im2col)
    row = m.dims[0] * m.unit_bits // 8
    if m.rank > 1 and m.dims[1] > 1 and 0 < m.strides[0] < row:
        warnings.warn(
            f"global_strides[0]: {m.strides[0]} bytes is less than a row of {m.dims[0]} {kind.name} ({row} bytes): "
            "rows overlap. Strides are bytes, not elements",
            TensorMapWarning,
            stacklevel=3,
        )


def _check_interleave(m: TensorMap) -> None:
    if m.interleave not in (1, 2):
        raise ValueError(f"interleave: got {m.interleave}; 0 (none), 1 (16 bytes) and 2 (32 bytes) are accepted")
    if m.rank < 3:
        raise ValueError(f"rank: got {m.rank}; interleaved tensors have 3 to 5 dimensions")
    if m.data_type in _PADDED:
        raise ValueError(f"interleave: {m.data_type.name} takes CU_TENSOR_MAP_INTERLEAVE_NONE")
    if m.im2col is not None and m.im2col.wide:
        raise ValueError("interleave: im2col::w takes CU_TENSOR_MAP_INTERLEAVE_NONE")
    if m.interleave == 2 and m.swizzle is not Swizzle.B32:  # a driver of CUDA 13.0 and an H200 take the others too
        warnings.warn(
            f"swizzle: {m.swizzle.name} with an interleave of 32 bytes; CUDA documents B32 alone", TensorMapWarning, 4
        )


def _check_box(m: TensorMap) -> None:
    kind = m.data_type
    name = "box_dim[0]" if m.im2col is None else "channels_per_pixel"
    for i, extent in enumerate(m.box):
        if not 1 <= extent <= 256:
            raise ValueError(f"{f'box_dim[{i}]' if i else name}: got {extent}; 1..256 is accepted")
    if kind in _PADDED:
        if m.box[0] != 128:
            raise ValueError(f"{name}: got {m.box[0]}; {kind.name} needs 128")
        return  # 128 elements fill a 128-byte row of shared memory, gaps included
    inner = m.box[0] * kind.bits // 8
    if m.box[0] * kind.bits % 128:
        raise ValueError(f"{name}: {m.box[0]} {kind.name} are {inner} bytes; a multiple of 16 bytes is accepted")
    if m.swizzle and inner > m.swizzle.span and not m.interleave:
        raise ValueError(
            f"{name}: {m.box[0]} {kind.name} are {inner} bytes; swizzle {m.swizzle.name} accepts at most "
            f"{m.swizzle.span}"
        )


def _check_im2col(m: TensorMap, im2col: Im2col) -> None:
    low, high = {3: (-32768, 32767), 4: (-128, 127), 5: (-16, 15)}[3 if im2col.wide else m.rank]
    if im2col.wide and m.swizzle not in _WIDE_SWIZZLES:
        raise ValueError(f"swizzle: {m.swizzle.name} with im2col::w; B64, B128 and B128_ATOM_32B are accepted")
    for name, corner in (("lower", im2col.lower), ("upper", im2col.upper)):
        for i, offset in enumerate(corner):
            if not low <= offset <= high:
                raise ValueError(
                    f"pixel_box_{name}_corner[{i}]: got {offset}; {low}..{high} is accepted at rank {m.rank}"
                )
    for i, (lower, upper) in enumerate(zip(im2col.lower, im2col.upper, strict=True)):
        dim = m.dims[i if m.interleave else i + 1]
        if dim + upper <= lower:
            raise ValueError(f"pixel_box_upper_corner[{i}]: the box from {lower} to {dim}{upper:+} holds no pixel")
    if not 1 <= im2col.pixels <= 1024:
        raise ValueError(f"pixels_per_column: got {im2col.pixels}; 1..1024 is accepted")


def _check_rank(rank: int, least: int) -> None:
    if not least <= rank <= 5:
        raise ValueError(f"rank: got {rank}; {least}..5 is accepted")


Kind = TypeVar("Kind", bound=IntEnum)


def _enum(kind: type[Kind], value: int, name: str) -> Kind:
    try:
        return kind(int(value))
    except ValueError:
        raise ValueError(f"{name}: got {value}; 0..{max(kind)} is accepted") from None


def _listed(name: str, values: Sequence[int], length: int) -> tuple[int, ...]:
    # the driver reads `length` entries from a pointer; callers may hold more, never fewer
    if len(values) < length:
        raise ValueError(f"{name}: got {len(values)} entries; {length} are needed")
    return tuple(int(value) for value in values[:length])


# -- the image -------------------------------------------------------------------------------------------------------

_SPLIT_SWIZZLE = ((0, 0), (1, 0), (2, 0), (3, 0), (3, 1), (3, 2), (3, 3))  # driver's enum -> PTX (mode, atomicity)


def to_image(m: TensorMap) -> bytes:
    mode, atomicity = _SPLIT_SWIZZLE[m.swizzle]
    im2col = m.im2col

    def padded(values: tuple[int, ...], length: int) -> tuple[int, ...]:
        return values + (0,) * (length - len(values))

    corners = padded(im2col.lower, 3) + padded(im2col.upper, 3) if im2col else (0,) * 6
    walk = im2col.wide + 1 if im2col else 0
    flat = (
        (_MAGIC, m.data_type, m.rank - 1, m.interleave, mode, atomicity, m.l2_promotion, m.oob_fill, walk)
        + (m.base, *padded(m.dims, 5), *padded(m.strides, 4), *padded(m.box, 5), *padded(m.element_strides, 5))
        + (*corners, im2col.channels if im2col else 0, im2col.pixels if im2col else 0)
    )
    return _IMAGE.pack(*flat).ljust(NBYTES, b"\0")


@lru_cache(maxsize=1024)
def from_image(image: bytes) -> TensorMap:
    """The map an image stands for, checked. ValueError if it is none or breaks a rule."""
    magic, *f = _IMAGE.unpack_from(image)
    if magic != _MAGIC:
        made = from_hardware(image)
        if made is None:
            blank = "it is all zeros" if not any(image) else f"it starts {image[:8].hex()}"
            raise ValueError(f"the 128 bytes are not a tensor map ({blank})")
        check(made)
        return made
    kind, rank, interleave, mode, atomicity, promotion, fill, walk, base = *f[:8], f[8]
    rank += 1
    if (mode, atomicity) not in _SPLIT_SWIZZLE:
        raise ValueError(f"swizzle_atomicity: {atomicity} with swizzle_mode {mode}; only mode 3 (128 B) has atoms")
    dims, strides, box, steps = f[9:14], f[14:18], f[18:23], f[23:28]
    im2col = None
    if walk:  # 1 + what cuTensorMapEncodeIm2colWide adds
        wide = Wide(walk - 1)
        spatial = 1 if wide else rank - 2
        im2col = Im2col(tuple(f[28 : 28 + spatial]), tuple(f[31 : 31 + spatial]), f[34], f[35], wide)
    made = TensorMap(
        DataType(kind), base, tuple(dims[:rank]), tuple(strides[: rank - 1]), tuple(box[:rank]), tuple(steps[:rank]),
        interleave, Swizzle(_SPLIT_SWIZZLE.index((mode, atomicity))), promotion, Fill(fill), im2col,
    )  # fmt: skip
    check(made)
    return made


def from_hardware(image: bytes) -> TensorMap | None:
    """A tiled map in the form that an sm_100 GPU reads, which some host programs pack by themselves; else None.

    Read off maps that such programs made; out-of-bounds fill, interleave and im2col are not known. 64 bytes as words:
    0-1 address; 2 version 2 (bits 0-3), rank - 1 (4-6), element type (7-10), swizzle mode (13-14), tf32 (16), promotion
    (17-18), swizzle atomicity (19-20), a flag (21); 3-6 strides / 16, with their high bits in 7; 8-12 dimensions - 1;
    13 element strides - 1 (3 bits each); bytes 55-59 box - 1. Signed integers have the type of unsigned ones."""
    words = struct.unpack_from("<16I", image)
    about = words[2]
    rank, kind = (about >> 4 & 7) + 1, about >> 7 & 15
    swizzle = about >> 13 & 3, about >> 19 & 3
    if about & 15 != 2 or rank > 5 or about >> 22 or kind not in _HARDWARE_TYPES or swizzle not in _SPLIT_SWIZZLE:
        return None
    return TensorMap(
        DataType.TFLOAT32 if about >> 16 & 1 else _HARDWARE_TYPES[kind],
        words[0] | words[1] << 32,
        tuple(extent + 1 for extent in words[8 : 8 + rank]),
        tuple((words[3 + i] | (words[7] >> 4 * i & 15) << 32) << 4 for i in range(rank - 1)),
        tuple(extent + 1 for extent in image[55 : 55 + rank]),
        tuple((words[13] >> 3 * i & 7) + 1 for i in range(rank)),
        swizzle=Swizzle(_SPLIT_SWIZZLE.index(swizzle)),
        l2_promotion=about >> 17 & 3,
    )


_HARDWARE_TYPES = {
    0: DataType.UINT8, 1: DataType.UINT16, 2: DataType.UINT32, 4: DataType.UINT64, 6: DataType.FLOAT16,
    7: DataType.FLOAT32, 9: DataType.FLOAT64, 10: DataType.BFLOAT16, 11: DataType.U4_ALIGN8B,
    12: DataType.U4_ALIGN16B, 13: DataType.U6_ALIGN16B,
}  # fmt: skip


# field of tensormap.replace -> (byte offset, struct format, entries, largest value); rank is stored and given as rank-1
_FIELDS = {
    "elemtype": (4, "B", 1, 15),
    "rank": (5, "B", 1, 4),
    "interleave_layout": (6, "B", 1, 2),
    "swizzle_mode": (7, "B", 1, 3),
    "swizzle_atomicity": (8, "B", 1, 3),
    "fill_mode": (10, "B", 1, 1),
    "global_address": (16, "Q", 1, (1 << 64) - 1),
    "global_dim": (24, "Q", 5, 1 << 32),
    "global_stride": (64, "Q", 4, (1 << 40) - 1),
    "box_dim": (96, "H", 5, 256),
    "element_stride": (106, "B", 5, 8),
}


def replace_field(image: np.ndarray, field: str, ordinal: int, value: int) -> None:
    """tensormap.replace.tile.<field> on uint8[128], in place. ValueError names the field."""
    offset, form, entries, largest = _FIELDS[field]
    if not 0 <= ordinal < entries:
        raise ValueError(f"{field}: ordinal {ordinal}; 0..{entries - 1} is accepted")
    if not 0 <= value <= largest:
        raise ValueError(f"{field}: got {value}; 0..{largest} is accepted")
    magic = int.from_bytes(image[:4].tobytes(), "little")
    if magic != _MAGIC:
        made = from_hardware(image.tobytes())
        if made is None and image.any():
            raise ValueError("the 128 bytes are neither a tensor map nor all zeros")
        if made is not None:
            image[:] = np.frombuffer(to_image(made), np.uint8)
        image[:4] = np.frombuffer(_MAGIC.to_bytes(4, "little"), np.uint8)
    if field == "elemtype":
        value = PTX_ELEMTYPE[value]
    size = struct.calcsize(form)
    start = offset + ordinal * size
    image[start : start + size] = np.frombuffer(struct.pack("<" + form, value), np.uint8)


def replace_address(image: bytes, global_address: int) -> bytes:
    """cuTensorMapReplaceAddress."""
    made = replace(from_image(bytes(image)), base=int(global_address))
    check(made)
    return to_image(made)
