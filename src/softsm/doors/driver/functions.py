"""The CUDA driver interface, as far as programs need it that load PTX and launch its kernels: cuda-bindings, cuda.core,
PyCUDA.

Memory, copies and tensor maps are those of CUDA C++ programs (doors/cuda/runtime.py): device memory is host memory, and
everything is complete when a call returns. What a kernel does wrong is an error of the call (CUDA_ERROR_LAUNCH_FAILED);
`Driver.failure` keeps it.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
import sys
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, NamedTuple

import numpy as np

from softsm.doors.cuda.graphs import Refused
from softsm.doors.cuda.runtime import (
    AWAITED,
    AWAITED_EVENT,
    COOPERATIVE,
    CREATED,
    DEPENDENT,
    INVALID_CONFIGURATION,
    INVALID_FUNCTION,
    INVALID_SYMBOL,
    INVALID_VALUE,
    RECORDED,
    SUCCESS,
    WAITED,
    Runtime,
)
from softsm.doors.cuda.streams import APART, DEFAULT, IN_ORDER
from softsm.doors.driver.nvrtc import Nvrtc
from softsm.engine.launch import Kernel, load
from softsm.errors import SoftsmError
from softsm.memory.global_memory import GlobalMemory

INVALID_IMAGE, NOT_FOUND, FILE_NOT_FOUND, NOT_SUPPORTED = 200, 500, 301, 801
NAMES = {
    0: "SUCCESS", 1: "ERROR_INVALID_VALUE", 2: "ERROR_OUT_OF_MEMORY", 101: "ERROR_INVALID_DEVICE",
    200: "ERROR_INVALID_IMAGE", 301: "ERROR_FILE_NOT_FOUND", 400: "ERROR_INVALID_HANDLE", 500: "ERROR_NOT_FOUND",
    700: "ERROR_ILLEGAL_ADDRESS", 710: "ERROR_ASSERT", 716: "ERROR_MISALIGNED_ADDRESS", 719: "ERROR_LAUNCH_FAILED",
    720: "ERROR_COOPERATIVE_LAUNCH_TOO_LARGE", 801: "ERROR_NOT_SUPPORTED", 401: "ERROR_ILLEGAL_STATE",
    900: "ERROR_STREAM_CAPTURE_UNSUPPORTED", 901: "ERROR_STREAM_CAPTURE_INVALIDATED",
    902: "ERROR_STREAM_CAPTURE_MERGE", 903: "ERROR_STREAM_CAPTURE_UNMATCHED", 904: "ERROR_STREAM_CAPTURE_UNJOINED",
    905: "ERROR_STREAM_CAPTURE_ISOLATION", 906: "ERROR_STREAM_CAPTURE_IMPLICIT", 907: "ERROR_CAPTURED_EVENT",
    910: "ERROR_GRAPH_EXEC_UPDATE_FAILURE",
}  # fmt: skip
OWN = {INVALID_CONFIGURATION: 1, INVALID_SYMBOL: NOT_FOUND, INVALID_FUNCTION: 400}  # errors the runtime alone has
MAX_DYNAMIC_SHARED = 8  # attribute of a function
MAJOR, MINOR = 75, 76  # attributes of a device: its compute capability
CONTEXT, POOL = 0xC0, 0x90  # what handles are, where there is one of a kind
VERSION = 12080  # version of the driver
TOGETHER, CLUSTER, PROGRAMMATIC = 2, 4, 6  # attributes of a launch
ATTRIBUTE_BYTES = 72  # bytes of one attribute
EXTRA_END, EXTRA_BUFFER, EXTRA_SIZE = 0, 1, 2  # CU_LAUNCH_PARAM_...
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
GRAPH_RESULT, OTHER_TOPOLOGY = (
    16,
    2,
)  # place of the result of cuGraphInstantiateWithParams; a result of cuGraphExecUpdate
LIBRARIES = {"softsm", "cuda", "pycuda", "ctypes", "tilelang"}  # modules that call for the program
PITCH = 512  # bytes to which rows of pitched memory are padded
DONE = (
    "cuInit cuGraphUpload cuModuleUnload cuLibraryUnload cuDevicePrimaryCtxRelease "
    "cuDevicePrimaryCtxSetFlags "
    "cuCtxDestroy cuStreamDestroy cuEventDestroy cuMemPoolSetAttribute "
    "cuDeviceSetMemPool cuMemPoolDestroy cuMemPoolTrimTo cuProfilerStart cuProfilerStop cuFuncSetCacheConfig "
    "cuCtxSetLimit cuCtxSetCacheConfig cuCtxSetSharedMemConfig cuMemHostRegister cuMemHostUnregister cuCtxDetach "
    "cuFuncSetBlockShape cuFuncSetSharedSize"
).split()  # functions with nothing to do
# PyCUDA is linked against these and could not be imported without them. A call of one is an error that names it.
LINKED = (
    "cuArray3DCreate cuArray3DGetDescriptor cuArrayCreate cuArrayDestroy cuArrayGetDescriptor cuCtxDisablePeerAccess "
    "cuCtxEnablePeerAccess cuDeviceGetByPCIBusId cuIpcCloseMemHandle "
    "cuIpcGetEventHandle cuIpcGetMemHandle cuIpcOpenEventHandle cuIpcOpenMemHandle cuLaunch cuLaunchGrid "
    "cuLaunchGridAsync cuLinkAddData cuLinkAddFile cuLinkComplete cuLinkCreate cuLinkDestroy cuMemcpy2D "
    "cuMemcpy2DAsync cuMemcpy2DUnaligned cuMemcpy3D cuMemcpy3DAsync cuMemcpy3DPeer cuMemcpy3DPeerAsync cuMemcpyAtoA "
    "cuMemcpyAtoD cuMemcpyAtoH cuMemcpyDtoA cuMemcpyHtoA cuMemcpyPeer cuMemcpyPeerAsync cuMemHostGetFlags "
    "cuMemsetD2D16 cuMemsetD2D16Async cuMemsetD2D32 cuMemsetD2D32Async cuMemsetD2D8 cuMemsetD2D8Async "
    "cuModuleGetSurfRef cuModuleGetTexRef cuParamSetSize cuParamSetTexRef cuParamSetf cuParamSeti cuParamSetv "
    "cuProfilerInitialize cuStreamAttachMemAsync cuSurfRefGetArray cuSurfRefSetArray cuTexRefCreate cuTexRefDestroy "
    "cuTexRefGetAddress cuTexRefGetAddressMode cuTexRefGetArray cuTexRefGetFilterMode cuTexRefGetFlags "
    "cuTexRefGetFormat cuTexRefSetAddress cuTexRefSetAddress2D_v3 cuTexRefSetAddressMode cuTexRefSetArray "
    "cuTexRefSetFilterMode cuTexRefSetFlags cuTexRefSetFormat"
).split()
SAYS: dict[str, tuple[int, str, int]] = {  # (which argument points to the answer, its format, the answer)
    "cuDriverGetVersion": (0, "i", VERSION), "cuDeviceGetCount": (0, "i", 1), "cuDeviceGet": (0, "i", 0),
    "cuCtxGetDevice": (0, "i", 0), "cuStreamGetDevice": (1, "i", 0), "cuDeviceTotalMem": (0, "Q", 1 << 37),
    "cuStreamGetPriority": (1, "i", 0), "cuStreamGetFlags": (1, "I", 1),
    "cuStreamGetCtx": (1, "Q", CONTEXT), "cuStreamGetId": (1, "Q", 1), "cuCtxGetId": (1, "Q", 1),
    "cuEventElapsedTime": (0, "f", 0),
    "cuDeviceGetDefaultMemPool": (0, "Q", POOL), "cuDeviceGetMemPool": (0, "Q", POOL),
    "cuMemPoolCreate": (0, "Q", POOL), "cuMemPoolGetAttribute": (2, "Q", 0), "cuCtxGetApiVersion": (1, "I", VERSION),
    "cuDeviceCanAccessPeer": (0, "i", 0), "cuCtxAttach": (0, "Q", CONTEXT), "cuCtxGetLimit": (0, "Q", 0),
    "cuCtxGetCacheConfig": (0, "i", 0), "cuCtxGetSharedMemConfig": (0, "i", 0),
}  # fmt: skip
# name -> (kind of the copy, or bytes of an element; whether a stream is the fourth argument)
COPIES = {
    f"cuMemcpy{name}{late}": (kind, bool(late))
    for name, kind in {"": 4, "HtoD": 1, "DtoH": 2, "DtoD": 3}.items()
    for late in ("", "Async")
}
SETS = {
    f"cuMemset{name}{late}": (width, bool(late))
    for name, width in {"D8": 1, "D16": 2, "D32": 4}.items()
    for late in ("", "Async")
}


def read(at: int, form: str) -> tuple:
    return struct.unpack(f"<{form}", ctypes.string_at(at, struct.calcsize(f"<{form}")))


def write(at: int, form: str, *values: Any) -> int:
    ctypes.memmove(at, struct.pack(f"<{form}", *values), struct.calcsize(f"<{form}"))
    return SUCCESS


def number(slot: int) -> int:
    """Returns the number in a slot; the upper half of a 32-bit one is undefined."""
    return slot & 0xFFFFFFFF


def in_one_buffer(kernel: Kernel, extra: int) -> ctypes.Array:
    """Returns the addresses of arguments that a launch gives as one buffer (CU_LAUNCH_PARAM_BUFFER_POINTER)."""
    pairs: dict[int, int] = {}
    while (key := read(extra, "Q")[0]) != EXTRA_END:
        pairs[key], extra = read(extra + 8, "Q")[0], extra + 16
    (size,), needed = read(pairs[EXTRA_SIZE], "Q"), kernel.program.param_bytes
    if size < needed:
        raise SoftsmError(f"{kernel.name}: the arguments have {size} bytes; needed: {needed}")
    places = [pairs[EXTRA_BUFFER] + kernel.program.param_offsets[p.name] for p in kernel.function.params]
    return (ctypes.c_uint64 * len(places))(*places)


class Module(NamedTuple):
    text: str  # PTX
    entries: list[str]
    variables: dict[str, np.ndarray]


class Driver(Runtime):
    """The state of one program. Methods called cu... are the functions of the interface; a list has their arguments."""

    ASKING, ALLOCATES, FREES = "cuFuncSetAttribute", "cuMemAlloc", "cuMemFree"
    COPIES, SETS = "cuMemcpy", "cuMemset"
    # A program is run in several orders, and what it imports keeps its handles from one run to the next.
    modules: ClassVar[dict[int, Module]] = {}  # by handle
    loaded: ClassVar[dict[int, Kernel]] = {}  # kernels by handle

    def __init__(self, arch: str, sms: int, **options: Any):
        super().__init__(arch, sms, **options)
        self.compiler = Nvrtc(arch, self.note)
        self.context = 0
        self.handles = 0  # streams and events
        self.strings: list[ctypes.Array] = []  # kept because the program has their addresses

    @classmethod
    def functions(cls) -> list[str]:
        return sorted({*DONE, *SAYS, *COPIES, *SETS, *(name for name in dir(cls) if name.startswith("cu"))})

    def serve(self, name: str, a: list[int]) -> int:
        """Serves a call of the library: no exception leaves it."""
        try:
            if name in DONE:
                return SUCCESS
            if name in SAYS:
                which, form, answer = SAYS[name]
                return write(a[which], form, answer)
            if name in LINKED:
                self.failure = self.failure or SoftsmError(f"softsm's CUDA driver has no {name}")
                return NOT_SUPPORTED
            status = self.moved(name, a) if name in COPIES or name in SETS else getattr(self, name)(a)
            return OWN.get(status, status)
        except Refused as refused:
            if refused.args[0]:
                print(f"softsm: {refused}", file=sys.stderr)
            return refused.status
        except BaseException as problem:
            self.note(problem)
            return self.failed()

    def note(self, problem: BaseException) -> None:
        """Keeps what stopped the program, unless something did before."""
        self.failure = self.failure or problem

    # ---- contexts and devices ----------------------------------------------------------------------------------

    def cuDevicePrimaryCtxRetain(self, a: list[int]) -> int:
        return write(a[0], "Q", CONTEXT)

    def cuCtxCreate(self, a: list[int]) -> int:
        self.context = CONTEXT
        return write(a[0], "Q", CONTEXT)

    def cuCtxSetCurrent(self, a: list[int]) -> int:
        self.context = a[0]
        return SUCCESS

    cuCtxPushCurrent = cuCtxSetCurrent

    def cuCtxGetCurrent(self, a: list[int]) -> int:
        return write(a[0], "Q", self.context)

    def cuCtxPopCurrent(self, a: list[int]) -> int:
        status = write(a[0], "Q", self.context) if a[0] else SUCCESS
        self.context = 0
        return status

    def cuDevicePrimaryCtxGetState(self, a: list[int]) -> int:
        return write(a[1], "I", 0) or write(a[2], "i", 1)

    def cuCtxGetStreamPriorityRange(self, a: list[int]) -> int:
        return write(a[0], "i", 0) or write(a[1], "i", 0)

    def cuDeviceGetAttribute(self, a: list[int]) -> int:
        return write(a[0], "i", 0) if self.attribute(a[0], number(a[1])) else SUCCESS

    def cuDeviceGetName(self, a: list[int]) -> int:
        name = f"softsm {self.arch}".encode()[: number(a[1]) - 1] + b"\0"
        return write(a[0], f"{len(name)}s", name)

    def cuDeviceComputeCapability(self, a: list[int]) -> int:
        return self.attribute(a[0], MAJOR) or self.attribute(a[1], MINOR)

    def cuDeviceGetPCIBusId(self, a: list[int]) -> int:
        return write(a[0], f"{number(a[1])}s", b"0000:00:00.0")

    def cuDeviceGetUuid(self, a: list[int]) -> int:
        return write(a[0], "16s", b"softsm")

    def cuGetErrorString(self, a: list[int]) -> int:
        """Says what stopped a kernel in softsm's words."""
        status = number(a[0])
        if self.failure is not None and status == self.failed():
            return self.say(a[1], str(self.failure))
        return self.say(a[1], NAMES.get(status, f"error {status}").removeprefix("ERROR_").lower().replace("_", " "))

    def cuGetErrorName(self, a: list[int]) -> int:
        status = number(a[0])
        return self.say(a[1], f"CUDA_{NAMES[status]}") if status in NAMES else INVALID_VALUE

    def say(self, at: int, text: str) -> int:
        self.strings.append(ctypes.create_string_buffer(text.encode()))
        return write(at, "Q", ctypes.addressof(self.strings[-1]))

    # ---- modules -----------------------------------------------------------------------------------------------

    def cuModuleLoadData(self, a: list[int]) -> int:
        if ctypes.string_at(a[1], 4) in (b"\x7fELF", b"\x50\xed\x55\xba", b"\xb1\x43\x62\x46"):
            self.failure = self.failure or SoftsmError("a cubin or a fat binary was loaded; softsm runs PTX")
            return INVALID_IMAGE
        text, handle = ctypes.string_at(a[1]).decode(), 0x1000 + 16 * len(self.modules)
        entries = re.findall(r"\.entry\s+([\w$]+)", text)
        module = self.modules[handle] = Module(text, entries, {})
        if entries:
            kernel = load(text, entries[0])
            kernel.place_variables()  # fresh for this module
            module.variables.update(kernel.variables)
            self.variables.update((f"{handle} {name}", array) for name, array in kernel.variables.items())
        return write(a[0], "Q", handle)

    cuModuleLoadDataEx = cuLibraryLoadData = cuModuleLoadData

    def cuModuleLoad(self, a: list[int]) -> int:
        """Loads a module from a file."""
        try:
            image = ctypes.create_string_buffer(Path(os.fsdecode(ctypes.string_at(a[1]))).read_bytes())
        except FileNotFoundError:
            return FILE_NOT_FOUND
        return self.cuModuleLoadData([a[0], ctypes.addressof(image)])

    cuLibraryLoadFromFile = cuModuleLoad

    def cuModuleGetFunction(self, a: list[int]) -> int:
        name, module = ctypes.string_at(a[2]).decode(), self.modules.get(a[1])
        if module is None or name not in module.entries:
            return NOT_FOUND
        handle = 0x100000 + 16 * len(self.loaded)
        kernel = self.loaded[handle] = load(module.text, name)
        kernel.share(module.variables)
        return write(a[0], "Q", handle)

    cuLibraryGetKernel = cuModuleGetFunction

    def cuKernelGetFunction(self, a: list[int]) -> int:
        return write(a[0], "Q", a[1])

    def cuModuleGetGlobal(self, a: list[int]) -> int:
        module = self.modules.get(a[2])
        array = module.variables.get(ctypes.string_at(a[3]).decode()) if module is not None else None
        if array is None:
            return NOT_FOUND
        return (write(a[0], "Q", array.ctypes.data) if a[0] else 0) or (write(a[1], "Q", array.nbytes) if a[1] else 0)

    def cuFuncGetAttribute(self, a: list[int]) -> int:
        known = {0: 1024, 1: self.loaded[a[2]].program.shared_static, 4: 64}  # most threads, shared memory, registers
        return write(a[0], "i", known.get(number(a[1]), 0))

    cuKernelGetAttribute = cuFuncGetAttribute

    def cuFuncSetAttribute(self, a: list[int]) -> int:
        return self.may_use(self.loaded.get(a[0]), number(a[2])) if number(a[1]) == MAX_DYNAMIC_SHARED else SUCCESS

    def cuKernelSetAttribute(self, a: list[int]) -> int:
        return self.cuFuncSetAttribute([a[2], a[0], a[1]])

    # ---- memory ------------------------------------------------------------------------------------------------

    def cuMemAlloc(self, a: list[int]) -> int:
        return self.malloc(a[0], a[1], 0)

    cuMemAllocManaged = cuMemAllocHost = cuMemHostAlloc = cuMemAlloc

    def cuMemAllocAsync(self, a: list[int]) -> int:
        return self.malloc(a[0], a[1], 0, a[2])

    def cuMemAllocFromPoolAsync(self, a: list[int]) -> int:
        return self.malloc(a[0], a[1], 0, a[3])

    def cuMemFree(self, a: list[int]) -> int:
        return self.free(a[0])

    cuMemFreeHost = cuMemFree

    def cuMemFreeAsync(self, a: list[int]) -> int:
        return self.free(a[0], a[1])

    def moved(self, name: str, a: list[int]) -> int:
        """Copies, or sets."""
        what, late = COPIES[name] if name in COPIES else SETS[name]
        stream = a[3] if late else DEFAULT
        if name in COPIES:
            return self.copy(a[0], a[1], a[2], what, stream, not late)
        return self.set(a[0], number(a[1]), a[2], stream, what)

    def cuMemAllocPitch(self, a: list[int]) -> int:
        pitch = -(-a[2] // PITCH) * PITCH
        return write(a[1], "Q", pitch) or self.malloc(a[0], pitch * a[3], 0)

    def cuMemGetAddressRange(self, a: list[int]) -> int:
        found = next(((s, n) for s, (n, _) in self.live.items() if s <= a[2] < s + max(n, 1)), None)
        if found is None:
            return INVALID_VALUE
        return (write(a[0], "Q", found[0]) if a[0] else 0) or (write(a[1], "Q", found[1]) if a[1] else 0)

    def cuMemHostGetDevicePointer(self, a: list[int]) -> int:
        return write(a[0], "Q", a[1])

    def cuMemGetInfo(self, a: list[int]) -> int:
        return write(a[0], "Q", 1 << 36) or write(a[1], "Q", 1 << 37)

    def cuTensorMapEncodeTiled(self, a: list[int]) -> int:
        kind, rank, interleave, swizzle, promotion, fill = (number(a[k]) for k in (1, 2, 8, 9, 10, 11))
        address, dims, strides, box, steps = a[3:8]
        return self.encode(a[0], kind, rank, address, dims, strides, box, steps, interleave, swizzle, promotion, fill)

    def memory(self) -> GlobalMemory:
        """Adds the tensors whose addresses the program took, where softsm is in use (softsm.use)."""
        known = super().memory()
        if "softsm.doors.triton.pointers" in sys.modules:
            from softsm.doors.triton import pointers

            pointers.add_known(known)
        return known

    # ---- streams and events ------------------------------------------------------------------------------------

    def place(self) -> str:
        """Returns the line of the program that calls."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in LIBRARIES:
            frame = frame.f_back
        return str(self.given or (f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""))

    def cuStreamCreate(self, a: list[int]) -> int:
        self.handles += 1
        status = write(a[0], "Q", 16 * self.handles | (APART if a[1] & NON_BLOCKING else 0))
        return status or self.stream(CREATED, None, None)

    cuStreamCreateWithPriority = cuStreamCreate

    def cuEventCreate(self, a: list[int]) -> int:
        self.handles += 1
        return write(a[0], "Q", 16 * self.handles)

    def cuEventRecord(self, a: list[int]) -> int:
        return self.stream(RECORDED, a[1], a[0])

    cuEventRecordWithFlags = cuEventRecord

    def cuStreamWaitEvent(self, a: list[int]) -> int:
        return self.stream(WAITED, a[0], a[1])

    def cuCtxSynchronize(self, a: list[int]) -> int:
        return self.stream(AWAITED, IN_ORDER, None)

    def cuStreamSynchronize(self, a: list[int]) -> int:
        return self.stream(AWAITED, a[0], None)

    def cuEventSynchronize(self, a: list[int]) -> int:
        return self.stream(AWAITED_EVENT, None, a[0])

    cuStreamQuery, cuEventQuery = cuStreamSynchronize, cuEventSynchronize

    # ---- graphs ------------------------------------------------------------------------------------------------

    def cuStreamBeginCapture(self, a: list[int]) -> int:
        return self.graphs.begin(a[0], 0, number(a[1]))

    def cuStreamEndCapture(self, a: list[int]) -> int:
        return write(a[1], "Q", 0) or self.graphs.end(a[0], a[1], 0)

    def cuStreamIsCapturing(self, a: list[int]) -> int:
        return self.graphs.capturing(a[0], a[1], 0)

    def cuGraphInstantiate(self, a: list[int]) -> int:
        return self.graphs.instantiate(a[1], a[0], 0)

    cuGraphInstantiateWithFlags = cuGraphInstantiate

    def cuGraphInstantiateWithParams(self, a: list[int]) -> int:
        return self.cuGraphInstantiate(a) or write(a[2] + GRAPH_RESULT, "Qi", 0, SUCCESS)

    def cuGraphExecUpdate(self, a: list[int]) -> int:
        status = self.graphs.update(a[0], a[1], 0)
        return write(a[2], "i4xQQ", OTHER_TOPOLOGY if status else SUCCESS, 0, 0) or status

    def cuGraphLaunch(self, a: list[int]) -> int:
        return self.graphs.launch(a[0], 0, a[1])

    def cuGraphDestroy(self, a: list[int]) -> int:
        return self.graphs.forget(a[0], 0, 0)

    cuGraphExecDestroy = cuGraphDestroy

    # ---- launches ----------------------------------------------------------------------------------------------

    def cuLaunchKernel(self, a: list[int]) -> int:
        sides, kernel, args = [number(x) for x in a[1:7]], self.loaded.get(a[0]), a[9]
        if kernel is not None and not args and a[10]:
            table = in_one_buffer(kernel, a[10])
            args = ctypes.addressof(table)
        return self.start(kernel, sides[:3], sides[3:], (1, 1, 1), args, number(a[7]), 0, a[8])

    def cuLaunchKernelEx(self, a: list[int]) -> int:
        *sides, shared, stream, attributes, count = read(a[0], "7I4xQQI")
        cluster, how = (1, 1, 1), 0
        for at in range(attributes, attributes + ATTRIBUTE_BYTES * count, ATTRIBUTE_BYTES):
            which, *value = read(at, "I4x3I")
            cluster = tuple(value) if which == CLUSTER else cluster
            how |= {PROGRAMMATIC: DEPENDENT, TOGETHER: COOPERATIVE}.get(which, 0) if value[0] else 0
        return self.start(self.loaded.get(a[1]), sides[:3], sides[3:], cluster, a[2], shared, how, stream)

    def cuLaunchCooperativeKernel(self, a: list[int]) -> int:
        sides = [number(x) for x in a[1:7]]
        return self.start(self.loaded.get(a[0]), sides[:3], sides[3:], (1, 1, 1), a[9], number(a[7]), COOPERATIVE, a[8])

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, a: list[int]) -> int:
        return write(a[0], "i", self.resident(self.loaded.get(a[1]), number(a[2]), a[3]))
