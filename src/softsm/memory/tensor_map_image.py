"""The 128 bytes of a tensor map: what cuTensorMapEncodeTiled, -Im2col and -Im2colWide make of their arguments.

The image is softsm's own (hardware's is not documented): programs treat it as opaque, pass it by value, copy it and
change it with tensormap.replace. A host program may bring maps in the form of the hardware, as far as it is known
(`from_hardware`). A zeroed image is a legal start for tensormap.replace, as it is on hardware.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from typing import TypeVar

import numpy as np

from softsm.memory.tensor_map import PTX_ELEMTYPE, DataType, Fill, Im2col, Swizzle, TensorMap, Wide, check

NBYTES = 128
ALIGNMENT = 64  # alignment of the image in memory
_MAGIC = 0x4D54_5353  # "SSTM"
_IMAGE = struct.Struct("<I8B4xQ5Q4Q5H5B3h3hHH")


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
    """Encodes as cuTensorMapEncodeTiled does -> the 128-byte image, or a ValueError naming the field.

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
    """Encodes as cuTensorMapEncodeIm2col does. Corners are listed W first, as the driver takes them."""
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
    """Encodes as cuTensorMapEncodeIm2colWide does; mode 0 is W, 1 is W128."""
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
    """Returns the image of a map, its fields as the driver takes them, checked."""
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
    """Returns the map an image stands for, checked. ValueError if it is none or breaks a rule."""
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
        DataType(kind),
        base,
        tuple(dims[:rank]),
        tuple(strides[: rank - 1]),
        tuple(box[:rank]),
        tuple(steps[:rank]),
        interleave,
        Swizzle(_SPLIT_SWIZZLE.index((mode, atomicity))),
        promotion,
        Fill(fill),
        im2col,
    )
    check(made)
    return made


def from_hardware(image: bytes) -> TensorMap | None:
    """Returns a tiled map in the form that an sm_100 GPU reads, which some host programs pack by themselves; else None.

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
    """Executes tensormap.replace.tile.<field> on uint8[128], in place; a ValueError names the field."""
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
