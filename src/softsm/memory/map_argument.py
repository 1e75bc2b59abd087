"""`softsm.tensor_map(array, box)`: the tensor map of an array or a CPU tensor, as an argument of a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from softsm import accepted
from softsm.memory.tensor_map import DataType, Fill, Swizzle
from softsm.memory.tensor_map_image import encode_tiled

SWIZZLES = {0: Swizzle.NONE, 32: Swizzle.B32, 64: Swizzle.B64, 128: Swizzle.B128}
_TYPES = {
    "float16": DataType.FLOAT16, "bfloat16": DataType.BFLOAT16, "float32": DataType.FLOAT32,
    "float64": DataType.FLOAT64, "uint8": DataType.UINT8, "int8": DataType.UINT8, "uint16": DataType.UINT16,
    "int16": DataType.UINT16, "uint32": DataType.UINT32, "int32": DataType.INT32, "uint64": DataType.UINT64,
    "int64": DataType.INT64, "float8_e4m3fn": DataType.UINT8, "float8_e5m2": DataType.UINT8,
}  # fmt: skip


class TensorMapArgument:
    """128 bytes for a parameter, and the array that they point into."""

    def __init__(self, array: Any, image: bytes):
        self.array, self.image = array, image

    def __bytes__(self) -> bytes:
        return self.image


def tensor_map(
    array: Any,
    box: Sequence[int],
    *,
    swizzle: int = 0,
    element_strides: Sequence[int] | None = None,
    fill_nan: bool = False,
) -> TensorMapArgument:
    """Make a tiled tensor map (CUtensorMap) over a NumPy array or a CPU tensor, for a `.param .align 64 .b8 map[128]`.

    Args:
        array: up to 5 dimensions, the last one contiguous.
        box: what one copy moves, in elements, in the order of the array's dimensions.
        swizzle: 0, 32, 64 or 128 bytes.
        element_strides: a box takes every n-th element of a dimension, in the order of the array's dimensions.
        fill_nan: elements outside the array are NaN; default 0.
    """
    shape = tuple(int(n) for n in getattr(array, "shape", ()))
    kind = _TYPES.get(str(getattr(array, "dtype", "")).removeprefix("torch."))
    if kind is None or not shape:
        accepted.refuse("array", array, f"arrays and CPU tensors of {', '.join(_TYPES)}")
    for name, value in (("box", box), ("element_strides", element_strides)):
        if value is not None and len(value) != len(shape):
            accepted.refuse(name, value, f"{len(shape)} numbers, one for each dimension of the array")
    if swizzle not in SWIZZLES:
        accepted.refuse("swizzle", swizzle, f"{', '.join(map(str, SWIZZLES))} bytes")
    if hasattr(array, "untyped_storage"):
        address, strides = array.data_ptr(), [n * array.element_size() for n in array.stride()]
    else:
        address, strides = array.ctypes.data, list(array.strides)
    if strides[-1] != kind.bits // 8 and shape[-1] > 1:
        accepted.refuse("array", array, "arrays whose last dimension is contiguous")
    image = encode_tiled(
        kind,
        len(shape),
        address,
        shape[::-1],
        strides[-2::-1],
        tuple(box)[::-1],
        tuple(element_strides)[::-1] if element_strides is not None else None,
        swizzle=SWIZZLES[swizzle],
        oob_fill=Fill.NAN if fill_nan else Fill.ZERO,
    )
    return TensorMapArgument(array, image)
