"""A launch through the CUDA driver: what is the same in every call is laid out once; a launch fills in addresses.

`cuLaunchKernelEx` expects pointers to the parameters of a kernel. A Block has both, and the tensor maps and the
configuration of the launch. Only the addresses of tensors and the stream change from call to call. So a launch
is one `pack_into`, one call of the driver for each tensor map whose address has changed, and one for the kernel.
(Triton's launcher reads every argument anew, also those that were fixed at compile time, and encodes tensor maps from
lists.)

A Block belongs to one launch at a time: a thread uses a spare one, or makes another, and puts it back.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import cache
from operator import itemgetter
from typing import Any, NamedTuple

from dsv4.runtime import structs
from dsv4.runtime.program import Null, Number, Slot

# Triton's types of numbers. No kernel here has one in fp16 or bf16.
NUMBERS: dict[str, Any] = {
    "i1": ctypes.c_int8, "i8": ctypes.c_int8, "i16": ctypes.c_int16, "i32": ctypes.c_int32, "i64": ctypes.c_int64,
    "u1": ctypes.c_uint8, "u8": ctypes.c_uint8, "u16": ctypes.c_uint16, "u32": ctypes.c_uint32, "u64": ctypes.c_uint64,
    "fp32": ctypes.c_float, "fp64": ctypes.c_double,
}  # fmt: skip
# Formats with which struct packs the same numbers, in 8 bytes each.
PACKED = {
    "i1": "b7x", "i8": "b7x", "i16": "h6x", "i32": "i4x", "i64": "q", "u1": "B7x", "u8": "B7x", "u16": "H6x",
    "u32": "I4x", "u64": "Q", "fp32": "f4x", "fp64": "d",
}  # fmt: skip
# Triton's element types of TMA descriptors -> CUtensorMapDataType, where they differ
TMA_TYPES = {8: 10, 9: 8, 10: 9}
MAP_BYTES, MAP_ALIGNMENT = 128, 64
L2_128B = 2  # CUtensorMapL2promotion, as Triton's launcher has it
CLUSTER_DIMENSION, CLUSTER_POLICY, PROGRAMMATIC = 4, 5, 6  # CUlaunchAttributeID
SPREAD = 1  # CUclusterSchedulingPolicy
INVALID_CONTEXT = 201  # CUresult
CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent of the most shared memory
# Sizes of shared memory, out of the 256 KB that it and the L1 share (CUDA programming guide, compute
# capabilities 9.0 and 10.0); sizes of 132 KB and less were not tried. The system reserves 1 KB of it per CTA.
SHARED_KB = 164, 196, 228
RESERVED = 1024
# Kernels that gather rows by ordinary loads, with one CTA per SM. Rows in flight occupy lines of L1, and further
# rows wait if it has too few: Triton loads kernels so that shared memory gets the most, and L1 28 KB.
GATHERING = {"v4_decode_swap_ab_ws", "v4_decode_swap_ab"}


class Configuration(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        *[(name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")],
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    ]


class Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = [("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16)]


class Function(NamedTuple):
    """A kernel that the driver has loaded."""

    name: str
    handle: int  # CUfunction
    device: int
    threads: int
    shared: int
    clusters: int  # CTAs per cluster
    dependent: bool  # launched while the previous grid still runs (kernels/dependent.py)
    types: tuple[str, ...]  # types of the parameters, in Triton's words; the compiled kernel has no "constexpr"
    descriptors: tuple[dict[str, Any], ...]  # the kernel's tensor maps, from Triton's metadata

    @classmethod
    def of(cls, compiled: Any, device: int) -> Function | None:
        """Read what Triton compiled and loaded. None if its launch needs something that this module does not know."""
        meta, types = compiled.metadata, tuple(structs.flat(compiled.src.signature.values()))
        descriptors = tuple(getattr(meta, "tensordesc_meta", None) or ())
        if meta.global_scratch_size or meta.profile_scratch_size or meta.launch_cooperative_grid or meta.num_ctas > 8:
            return None
        if any(not isinstance(x, str) or x[0] != "*" and x.split("<")[0] not in KINDS for x in types):
            return None
        if any(x["fp4_padded"] or x.get("is_im2col") for x in descriptors):
            return None
        if len(descriptors) != sum(x.startswith("tensordesc") for x in types):
            return None
        return cls(
            compiled.metadata.name,
            compiled.function,
            device,
            32 * meta.num_warps,
            meta.shared,
            meta.num_ctas,
            bool(meta.launch_pdl),
            types,
            descriptors,
        )


KINDS = {*NUMBERS, "constexpr", "tensordesc"}


class TensorMap:
    """The arguments of `cuTensorMapEncodeTiled` without the address. The innermost dimension is first."""

    def __init__(self, x: Any, meta: dict[str, Any]):
        rank = len(x.shape)
        assert x.strides[-1] == 1
        self.index, self.offset = x.base.index, x.base.offset  # into the memory of a call, bytes from its beginning
        self.type = ctypes.c_int(TMA_TYPES.get(meta["elem_type"], meta["elem_type"]))
        self.rank = ctypes.c_uint(rank)
        self.rest = (
            (ctypes.c_uint64 * rank)(*reversed(x.shape)),
            (ctypes.c_uint64 * (rank - 1))(*(s * meta["elem_size"] for s in reversed(x.strides[:-1]))),
            (ctypes.c_uint32 * rank)(*reversed(meta["block_size"])),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            ctypes.c_int(0),  # no interleave
            ctypes.c_int(meta["swizzle"]),
            ctypes.c_int(L2_128B),
            ctypes.c_int(x.padding == "nan"),
        )


class DriverLaunch:
    """One launch of a program. Arguments: numbers, Numbers, Slots, Nulls, TensorDescriptors of Slots, and structs of
    them."""

    def __init__(self, function: Function, grid: tuple[int, ...], arguments: Sequence[Any], driver: Any = None):
        self.name, self.function, self.grid = function.name, function, grid
        self.driver = driver or cuda()
        self.handle = ctypes.c_void_p(function.handle)
        self.places: list[tuple[int, int]] = []  # (index into the memory of a call, bytes from its beginning)
        packed = "="
        self.maps: list[TensorMap] = []
        self.parameters: list[tuple[Any, Any]] = []  # ("address" or "map", index into these), or (type, number)
        metas = iter(function.descriptors)
        for kind, x in zip(function.types, structs.flat(arguments), strict=True):
            if kind == "constexpr":
                continue
            if isinstance(x, (Slot, Number)):
                self.parameters.append(("address", len(self.places)))
                self.places.append((x.index, x.offset if isinstance(x, Slot) else 0))
                packed += "Q" if isinstance(x, Slot) else PACKED[kind]
            elif isinstance(x, Null):
                self.parameters.append((ctypes.c_uint64, 0))
            elif kind.startswith("tensordesc"):
                self.parameters.append(("map", len(self.maps)))
                self.maps.append(TensorMap(x, next(metas)))
                self.parameters += [(ctypes.c_int32, n) for n in x.shape]
                self.parameters += [(ctypes.c_int64, n) for n in x.strides]
            else:
                self.parameters.append((NUMBERS[kind], x))
        self.parameters += [(ctypes.c_uint64, 0)] * 2  # scratch memory, of which these kernels have none
        self.pack = struct.Struct(packed).pack_into
        self.taken = items_at([index for index, _ in self.places])
        self.moved = [(place, offset) for place, (_, offset) in enumerate(self.places) if offset]
        self.spare: list[Block] = []
        if function.name in GATHERING:
            asked = "cuFuncSetAttribute", self.handle, CARVEOUT, carveout(function.shared)
            call(self.driver, self.name, function.device, *asked)

    def run(self, memory: list, addresses: list, stream: int) -> None:
        """Launch. addresses: of the memory of a call, or the numbers in their place."""
        try:
            block = self.spare.pop()
        except IndexError:
            block = Block(self, addresses)
        values = self.taken(addresses)
        if self.moved:
            values = list(values)
            for n, offset in self.moved:
                values[n] += offset
        self.pack(block.memory, 0, *values)
        for n, (place, index, offset) in enumerate(block.maps):
            address = addresses[index] + offset
            if address != block.mapped[n]:
                pointer = ctypes.c_void_p(address)
                status = self.driver.cuTensorMapReplaceAddress(place, pointer)
                if status:
                    self.refused(status, "cuTensorMapReplaceAddress", place, pointer)
                block.mapped[n] = address
        block.configuration.stream = stream
        status = self.driver.cuLaunchKernelEx(block.reference, self.handle, block.parameters, None)
        if status:
            self.refused(status, "cuLaunchKernelEx", block.reference, self.handle, block.parameters, None)
        self.spare.append(block)

    def refused(self, status: int, name: str, *arguments: Any) -> None:
        refused(self.driver, self.name, self.function.device, status, name, *arguments)


def carveout(shared: int) -> int:
    """Return the percentage of shared memory that leaves L1 as much as a CTA with this many bytes allows. Rounded down:
    the driver uses the smallest size that is at least this."""
    size = next(kb for kb in SHARED_KB if 1024 * kb >= shared + RESERVED)
    return 100 * size // SHARED_KB[-1]


def items_at(indices: list[int]) -> Any:
    """Return a function: a list -> its items at these indices. (A loop in Python needs four times as long.)"""
    return itemgetter(*indices) if len(indices) > 1 else lambda items: [items[i] for i in indices]


class Block:
    """The memory of one launch: addresses, then numbers, then tensor maps; pointers to them, and the configuration."""

    def __init__(self, launch: DriverLaunch, addresses: list[int]):
        function = launch.function
        number, first_map = 8 * len(launch.places), 8 * len(launch.parameters)
        self.memory = ctypes.create_string_buffer(first_map + MAP_ALIGNMENT + MAP_BYTES * len(launch.maps))
        base = ctypes.addressof(self.memory)
        first_map += -(base + first_map) % MAP_ALIGNMENT
        pointers = []
        for kind, value in launch.parameters:
            if kind == "address":
                pointers.append(base + 8 * value)
            elif kind == "map":
                pointers.append(base + first_map + MAP_BYTES * value)
            else:
                kind.from_buffer(self.memory, number).value = value
                pointers.append(base + number)
                number += 8
        self.parameters = (ctypes.c_void_p * len(pointers))(*pointers)
        self.maps: list[tuple[ctypes.c_void_p, int, int]] = []  # (where it is, index and offset of its tensor)
        self.mapped: list[int] = []  # the address in each: an allocator often returns the one of the call before
        for n, x in enumerate(launch.maps):
            place = ctypes.c_void_p(base + first_map + MAP_BYTES * n)
            address = ctypes.c_void_p(addresses[x.index] + x.offset)
            status = launch.driver.cuTensorMapEncodeTiled(place, x.type, x.rank, address, *x.rest)
            if status:
                launch.refused(status, "cuTensorMapEncodeTiled", place, x.type, x.rank, address, *x.rest)
            self.maps.append((place, x.index, x.offset))
            self.mapped.append(addresses[x.index] + x.offset)
        attributes = [Attribute(PROGRAMMATIC, 0, (1,))] if function.dependent else []
        if function.clusters > 1:
            attributes.append(Attribute(CLUSTER_DIMENSION, 0, (function.clusters, 1, 1)))
            attributes.append(Attribute(CLUSTER_POLICY, 0, (SPREAD,)))
        self.attributes = (Attribute * len(attributes))(*attributes)
        gx, gy, gz = launch.grid  # the grid counts clusters
        self.configuration = Configuration(
            gx * function.clusters,
            gy,
            gz,
            function.threads,
            1,
            1,
            function.shared,
            None,
            ctypes.addressof(self.attributes),
            len(attributes),
        )
        self.reference = ctypes.byref(self.configuration)


@cache
def cuda() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def call(driver: Any, kernel: str, device: int, name: str, *arguments: Any) -> None:
    """Call a function of the driver, for a kernel on a device."""
    status = getattr(driver, name)(*arguments)
    if status:
        refused(driver, kernel, device, status, name, *arguments)


def refused(driver: Any, kernel: str, device: int, status: int, name: str, *arguments: Any) -> None:
    """Handle a call that the driver rejected. A thread that has not used the GPU yet has no context: it gets the
    device's, and the call is repeated. Anything else is an error."""
    if status == INVALID_CONTEXT:
        ordinal, context = ctypes.c_int(), ctypes.c_void_p()
        again = (
            ("cuDeviceGet", ctypes.byref(ordinal), ctypes.c_int(device)),
            ("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal),
            ("cuCtxSetCurrent", context),
            (name, *arguments),
        )
        for name, *given in again:
            status = getattr(driver, name)(*given)
            if status:
                break
    if status:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{kernel}: {name}: {(text.value or b'').decode()} (error {status})")
