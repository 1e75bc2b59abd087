"""Tensor maps: what they hold, and the driver's rules. memory/tensor_map_image.py has the 128 bytes of one.

Dimensions are listed innermost first throughout, as in the CUDA driver's interface. Those of an interleaved map are
W, [H, [D,]] C, N, where the unit of W is a slice of channels, 16 or 32 bytes, and C counts slices.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from enum import IntEnum


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
    tables: dict = field(init=False, repr=False, compare=False)  # tables of box_copy, by address of the image mod 1024

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


# -- rules -----------------------------------------------------------------------------------------------------------


def check(m: TensorMap) -> None:
    """Checks the driver's rules, each ValueError naming the field, what it got and what is accepted."""
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
        raise ValueError(f"interleave: {m.data_type.name} accepts CU_TENSOR_MAP_INTERLEAVE_NONE")
    if m.im2col is not None and m.im2col.wide:
        raise ValueError("interleave: im2col::w accepts CU_TENSOR_MAP_INTERLEAVE_NONE")
    if m.interleave == 2 and m.swizzle is not Swizzle.B32:  # a driver of CUDA 13.0 and an H200 accept the others too
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
