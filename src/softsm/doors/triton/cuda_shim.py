"""CPU tensors that claim to be on the GPU, and a working torch.cuda, for programs with device="cuda".

Off by default. Moving a tensor between "cuda" and "cpu" copies it, as it would between two memories.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from softsm.doors.triton import cuda_graph, cuda_random
from softsm.doors.triton.in_use import ARCHITECTURES, InUse, Patches

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


def _is_cuda(x: object) -> bool:
    if isinstance(x, torch.device):
        return x.type == "cuda"
    return isinstance(x, str) and (x == "cuda" or x.startswith("cuda:"))


def _names_device(x: object) -> bool:
    return _is_cuda(x) or isinstance(x, torch.device) or x == "cpu"


def _on_cpu(x: Any) -> Any:
    return CPU if _is_cuda(x) else x


def _is_index(x: object) -> bool:
    """Returns whether a device is given by its number, as in x.to(0) or device=0."""
    return isinstance(x, int) and not isinstance(x, bool)


# Functions whose gradients are summed in the input's own type on a CPU, and in float32 on a GPU.
_SUMS_IN_HALF = (torch.nn.functional.layer_norm, torch.nn.functional.group_norm)
_MOVES = (torch.Tensor.cuda, torch.Tensor.cpu)
_IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]
_DEVICE = torch.Tensor.device.__get__
_GET_DEVICE = torch.Tensor.get_device


def do_on_cpu(func, *args, **kwargs):
    if func in _MOVES:
        return args[0].clone()
    if func in _SUMS_IN_HALF and args[0].dtype in (torch.float16, torch.bfloat16):
        wide = [x.float() if isinstance(x, torch.Tensor) else x for x in args]
        kwargs = {k: x.float() if isinstance(x, torch.Tensor) else x for k, x in kwargs.items()}
        return func(*wide, **kwargs).to(args[0].dtype)
    if func is torch.histc and not args[0].is_floating_point():  # the CPU's function accepts floats only
        return func(args[0].double(), *args[1:], **kwargs).to(args[0].dtype)
    kwargs = {k: _on_cpu(v) for k, v in kwargs.items() if k != "pin_memory"}
    if _is_index(kwargs.get("device")):
        kwargs["device"] = CPU
    if func is torch.Tensor.to and len(args) > 1 and _is_index(args[1]):
        args = (args[0], CPU, *args[2:])
    if func is torch.Tensor.to and any(_names_device(x) for x in (*args[1:], *kwargs.values())):
        args = tuple(_on_cpu(x) for x in args)
        return func(*args, **{**kwargs, "copy": True})
    return func(*map(_on_cpu, args), **kwargs)


class CudaToCpu(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func == _IS_CUDA:  # bound wrappers: equal, never identical
            return True
        if func == _DEVICE:
            real = func(*args)
            return GPU if real.type == "cpu" else real
        if func is _GET_DEVICE:
            return 0
        if func is torch.device:  # torch.device("cuda") itself works without CUDA, torch.device(0) does not
            return func("cuda", *args) if args and isinstance(args[0], int) else func(*args, **kwargs)
        if func is torch.Tensor.pin_memory:
            return args[0]
        if cuda_graph.capturing():
            return cuda_graph.call(functools.partial(do_on_cpu, func), args, kwargs)
        return do_on_cpu(func, *args, **kwargs)


def _empty(size, *, memory_format=None, device=None, pin_memory=None, **options):
    return torch.empty(size, device=CPU, memory_format=memory_format or torch.contiguous_format, **options)


def _empty_strided(size, stride, *, device=None, pin_memory=None, **options):
    return torch.empty_strided(size, stride, device=CPU, **options)


# Functions with which torch's own code allocates on "cuda" below every mode: torch.ops.aten, and operators in C++.
ALLOCATORS = {"empty.memory_format": _empty, "empty_strided": _empty_strided}


class Stream:
    """All work is done when it is issued, so there is nothing to order."""

    cuda_stream = 0
    device = GPU

    def __init__(self, *_, **__):
        pass

    def wait_stream(self, other) -> None:
        pass

    def wait_event(self, event) -> None:
        pass

    def record_event(self, event=None):
        from softsm.doors.triton.runtime import Event

        event = event or Event()
        event.record()
        return event

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


class Device(contextlib.nullcontext):
    """torch.cuda.device; a class, because torch itself checks for its instances."""


def properties_of(use: InUse) -> SimpleNamespace:
    """Returns what torch.cuda.get_device_properties returns."""
    number = ARCHITECTURES[use.arch]
    return SimpleNamespace(
        name=f"softsm {use.arch}",
        major=number // 10,
        minor=number % 10,
        multi_processor_count=use.sms,
        total_memory=1 << 37,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=232_448,
        shared_memory_per_multiprocessor=233_472,
        L2_cache_size=50 << 20,
        gcnArchName="",
        uuid="softsm",
    )


def answers(use: InUse) -> dict[str, Any]:
    """Returns the functions and classes that take the place of torch.cuda's."""
    from softsm.doors.triton.runtime import Event

    number = ARCHITECTURES[use.arch]
    properties = properties_of(use)
    stream = Stream()
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "device_count": lambda: use.ranks,
        "current_device": lambda: 0,
        "set_device": lambda *_: None,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "get_device_capability": lambda *_: divmod(number, 10),
        "get_device_name": lambda *_: properties.name,
        "get_device_properties": lambda *_: properties,
        "is_bf16_supported": lambda *_, **__: True,
        "get_arch_list": lambda: [f"sm_{number}"],
        "can_device_access_peer": lambda *_: False,
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "memory_reserved": lambda *_: 0,
        "max_memory_reserved": lambda *_: 0,
        "reset_peak_memory_stats": lambda *_: None,
        "reset_max_memory_allocated": lambda *_: None,
        "mem_get_info": lambda *_: (1 << 37, 1 << 37),
        "memory_stats": lambda *_: {},
        "memory_summary": lambda *_, **__: "",
        "ipc_collect": lambda: None,
        "_sleep": lambda *_: None,
        "set_sync_debug_mode": lambda *_: None,
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "set_stream": lambda *_: None,
        "stream": lambda *_: contextlib.nullcontext(),
        "device": Device,
        "device_of": lambda *_: contextlib.nullcontext(),
        "is_current_stream_capturing": cuda_graph.capturing,
        "CUDAGraph": cuda_graph.CUDAGraph,
        "graph": cuda_graph.graph,
        "graph_pool_handle": lambda: (0, 0),
        "Stream": Stream,
        "Event": Event,
        **cuda_random.answers(),
    }


class CudaShim:
    """The shim, installed when it is created; `remove` uninstalls it."""

    def __init__(self, use: InUse):
        if torch.cuda.is_available():
            raise RuntimeError("cuda_shim: CUDA is available here, so device='cuda' means the GPU; use CPU tensors")
        self._patches = Patches()
        for attribute, answer in answers(use).items():
            self._patches.set(torch.cuda, attribute, answer)
        if hasattr(torch, "accelerator"):
            self._replace_accelerator()
        # torch puts a default device below every other mode, where it would be applied after ours
        set_default = torch.set_default_device
        self._patches.set(torch, "set_default_device", lambda d: set_default(None if _is_cuda(d) else d))
        self._patches.set(torch, "Generator", cuda_random.Generator)
        load = torch.load
        self._patches.set(torch, "load", lambda f, map_location=None, *a, **k: load(f, _on_cpu(map_location), *a, **k))
        self._patches.set(torch.Tensor, "record_stream", lambda *_: None)
        for attribute in ("range_push", "range_pop", "mark"):
            self._patches.set(torch.cuda.nvtx, attribute, lambda *_, **__: None)
        for attribute in ("start", "stop"):
            self._patches.set(torch.cuda.profiler, attribute, lambda *_, **__: None)
        self._replace_cublas()
        self._replace_autocast()
        self._allocators = torch.library.Library("aten", "IMPL")
        for operator, call in ALLOCATORS.items():
            self._allocators.impl(operator, call, "CUDA")
        self._replace_operators()
        self._mode = CudaToCpu()
        self._mode.__enter__()

    def _replace_accelerator(self) -> None:
        answers = {
            "is_available": lambda: True,
            "current_accelerator": lambda *_, **__: torch.device("cuda"),
            "device_count": torch.cuda.device_count,
            "current_device_index": lambda: 0,
            "current_stream": lambda *_: torch.cuda.current_stream(),
            "memory_allocated": lambda *_: 0,
            "max_memory_allocated": lambda *_: 0,
            "memory_reserved": lambda *_: 0,
            "max_memory_reserved": lambda *_: 0,
            "reset_peak_memory_stats": lambda *_: None,
            "empty_cache": lambda: None,
            "set_device_index": lambda *_: None,
            "synchronize": lambda *_: None,
        }
        for attribute, answer in answers.items():
            if hasattr(torch.accelerator, attribute):
                self._patches.set(torch.accelerator, attribute, answer)

    def _replace_cublas(self) -> None:
        from triton._C.libtriton import nvidia

        from softsm.doors.triton.cublas import CublasLt

        self._patches.set(nvidia.cublas, "CublasLt", CublasLt)

    def _replace_autocast(self) -> None:
        """Makes mixed precision of "cuda" that of the CPU, with the GPU's default type."""
        autocast = torch.amp.autocast_mode.autocast
        make, enabled, dtype = autocast.__init__, torch.is_autocast_enabled, torch.get_autocast_dtype

        def of_cpu(self, device_type: str, dtype: torch.dtype | None = None, *args, **kwargs) -> None:
            if _is_cuda(device_type):
                device_type, dtype = "cpu", dtype or torch.float16
            make(self, device_type, dtype, *args, **kwargs)

        self._patches.set(autocast, "__init__", of_cpu)
        self._patches.set(torch, "is_autocast_enabled", lambda device="cuda": enabled(str(_on_cpu(device))))
        self._patches.set(torch, "get_autocast_dtype", lambda device: dtype(str(_on_cpu(device))))
        self._patches.set(torch, "get_autocast_gpu_dtype", lambda: dtype("cpu"))

    def _replace_operators(self) -> None:
        """Uses what a package registers for CUDA with torch.library for the tensors here, which are the CPU's."""
        register = torch.library.Library.impl
        served = set()

        def impl(library, op_name, fn, dispatch_key="", **options) -> None:
            if dispatch_key != "CPU" or (library, op_name) not in served:
                register(library, op_name, fn, dispatch_key, **options)
            if dispatch_key == "CUDA":
                served.add((library, op_name))
                with warnings.catch_warnings(action="ignore"):  # the registration may replace a kernel for the CPU
                    register(library, op_name, fn, "CPU", **options)

        self._patches.set(torch.library.Library, "impl", impl)

    def remove(self) -> None:
        self._mode.__exit__(None, None, None)
        self._allocators._destroy()
        self._patches.undo()
