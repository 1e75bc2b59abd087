"""Launch arguments as Triton hands them over -> one bytes object per PTX parameter.

Order is the signature's; constexprs are dropped, tuples flattened. A host tensor descriptor becomes a 128-byte tensor
map, then its shape as i32 and its strides as i64. Two pointers to scratch memory come last.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator

import triton
import triton.backends.nvidia.driver as nvidia

from softsm.memory import tensor_map_image
from softsm.memory.global_memory import GlobalMemory

INTEGER_BYTES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "u1": 1, "u8": 1, "u16": 2, "u32": 4, "u64": 8}
TFLOAT32 = 11  # CU_TENSOR_MAP_DATA_TYPE_TFLOAT32
L2_128B = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B, as in Triton's own driver
TRITON_36 = triton.__version__.startswith("3.6.")


class Packer:
    """Collects the parameters of one launch, and in `memory` the storages they give access to."""

    def __init__(self, memory: GlobalMemory, descriptor_meta: list | None):
        self.memory = memory
        self.meta: Iterator | None = iter(descriptor_meta) if descriptor_meta else None
        self.params: list[bytes] = []

    def add(self, type_: object, value: object, name: str) -> None:
        if isinstance(type_, tuple):
            fields = getattr(value, "_fields", None)  # fields of a NamedTuple
            for i, (inner, item) in enumerate(zip(type_, value)):  # type: ignore[call-overload]
                self.add(inner, item, f"{name}.{fields[i]}" if fields else f"{name}[{i}]")
        elif type_ == "constexpr":
            return
        elif str(type_).startswith("tensordesc"):
            self._descriptor(value, name)
        else:
            self.params.append(self._scalar(str(type_), value, name))

    def _scalar(self, type_: str, value: object, name: str) -> bytes:
        if type_[0] == "*":
            return struct.pack("<Q", self.pointer(value, name))
        if type_ in ("fp32", "f32", "bf16"):  # c_float, as 1e40 must become inf; bf16 is truncated, as Triton does
            return bytes(ctypes.c_float(value))[2 if type_ == "bf16" else 0 :]  # type: ignore[arg-type]
        if type_ == "fp16":
            return struct.pack("<e", value)
        if type_ == "fp64":
            return struct.pack("<d", value)
        size = INTEGER_BYTES[type_]
        return (int(value) & (1 << 8 * size) - 1).to_bytes(size, "little")  # type: ignore[call-overload]

    def pointer(self, value: object, name: str) -> int:
        if value is None:
            return 0
        if isinstance(value, int):
            return value
        address = value.data_ptr()  # type: ignore[attr-defined]
        tensor = value
        while not hasattr(tensor, "untyped_storage") and hasattr(tensor, "base"):
            tensor = tensor.base  # triton.reinterpret(tensor, dtype)
        if hasattr(tensor, "untyped_storage"):
            storage = tensor.untyped_storage()
            if storage.device.type != "cpu":
                raise ValueError(f"{name}: got a tensor on {storage.device}; softsm runs on CPU tensors")
            shape = tuple(getattr(tensor, "shape", ()))
            self.memory.add(storage.data_ptr(), storage.nbytes(), f"argument {name} {list(shape)}", storage)
        return address

    def _descriptor(self, value: object, name: str) -> None:
        base, shape, strides = value.base, list(value.shape), list(value.strides)  # type: ignore[attr-defined]
        nan = value.padding == "nan"  # type: ignore[attr-defined]
        tf32 = getattr(value, "round_f32_to_tf32", False)
        if self.meta is None:  # compiled for a target without tensor maps
            self.params.append(struct.pack("<Q", self.pointer(base, name)))
            self.params += [struct.pack("<q", x) for x in (*shape, *strides)]
            self.params += [bytes([flag]) for flag in ([nan] if TRITON_36 else [nan, tf32])]
        else:
            meta = next(self.meta)
            mapped = [*shape[:-1], 2 * shape[-1]] if meta["fp4_padded"] else shape
            self.params.append(self._tensor_map(value, meta, mapped, nan, tf32, name))
            shape = mapped if TRITON_36 else shape
        self.params += [struct.pack("<i", x) for x in shape]
        self.params += [struct.pack("<q", x) for x in strides]

    def _tensor_map(self, value, meta: dict, shape: list[int], nan: bool, tf32: bool, name: str) -> bytes:
        type_ = TFLOAT32 if tf32 else nvidia.TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]
        strides = [s * meta["elem_size"] for s in value.strides[:-1]]
        common = dict(
            data_type=type_,
            rank=len(shape),
            global_address=self.pointer(value.base, name),
            global_dim=shape[::-1],
            global_strides=strides[::-1],
            swizzle=meta["swizzle"],
            l2_promotion=L2_128B,
            oob_fill=int(nan),
        )
        box = list(meta["block_size"])
        try:
            if not meta.get("is_im2col", False):
                return tensor_map_image.encode_tiled(box_dim=box[::-1], **common)
            return tensor_map_image.encode_im2col(
                pixel_box_lower_corner=list(value.pixel_box_lower_corner)[::-1],
                pixel_box_upper_corner=list(value.pixel_box_upper_corner)[::-1],
                channels_per_pixel=box[1],
                pixels_per_column=box[0],
                element_strides=list(value.element_strides or [1] * len(shape))[::-1],
                **common,
            )
        except ValueError as problem:
            raise ValueError(f"{name}: {problem}") from None
