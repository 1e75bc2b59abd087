"""The driver object Triton talks to: target, launcher, timing. No CUDA anywhere."""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace

import torch
import triton.backends.nvidia.driver as nvidia  # the module, not its classes: see backend.py
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import _allocation

from softsm.doors.triton import cuda_graph, in_use, packing, pointers
from softsm.engine.launch import Kernel, load
from softsm.engine.options import current_options
from softsm.memory.global_memory import GlobalMemory

SHARED_PER_CTA = 232_448
DEVICE_BASE = 10_000  # softsm's device numbers, one per target: caches never mix with a real GPU's
REGISTERS = 64  # programs divide by a kernel's register count


class Launcher:
    """Launches a compiled kernel: built once per kernel, called for every launch."""

    def __init__(self, src, metadata):
        self.names = [str(n) for n in src.signature]
        self.types = list(src.signature.values())
        arguments = getattr(getattr(src, "fn", None), "arg_names", None)
        if arguments is not None and len(arguments) == len(self.names):
            self.names = list(arguments)
        self.metadata = metadata
        if "gsan" in str(getattr(metadata, "instrumentation_mode", "")):
            raise NotImplementedError("softsm does not run kernels instrumented with gsan")

    def __call__(self, gx, gy, gz, stream, kernel, packed_metadata, launch_metadata, enter_hook, exit_hook, *args):
        if enter_hook is not None:
            enter_hook(launch_metadata)
        if cuda_graph.capturing():
            cuda_graph.call(self._launch, (gx, gy, gz, stream, kernel, *args), {}, launch=True)
        else:
            self._launch(gx, gy, gz, stream, kernel, *args)
        if exit_hook is not None:
            exit_hook(launch_metadata)

    def _launch(self, gx, gy, gz, stream, kernel, *args) -> None:
        md = self.metadata
        memory = GlobalMemory()
        packer = packing.Packer(memory, getattr(md, "tensordesc_meta", None))
        for name, type_, value in zip(self.names, self.types, args):
            packer.add(type_, value, name)
        ctas = gx * gy * gz * md.num_ctas
        scratch = _scratch(md.global_scratch_size * ctas, md.global_scratch_align, _allocation._allocator.get(), stream)
        profile = _scratch(md.profile_scratch_size * ctas, md.profile_scratch_align, _zeros, stream)
        packer.add("*i8", scratch, "global scratch")
        packer.add("*i8", profile, "profile scratch")
        pointers.add_known(memory)
        if ctas:
            kernel.launch(
                (gx * md.num_ctas, gy, gz),
                (32 * md.num_warps, 1, 1),
                packer.params,
                shared=md.shared,
                cluster=(md.num_ctas, 1, 1),
                memory=memory,
                sms=_sms(),
                dependent=bool(getattr(md, "launch_pdl", False)),
            )


def _sms() -> int:
    state = in_use.current()
    return state.sms if state is not None else in_use.DEFAULT_SMS  # a compiled kernel may outlive the use of softsm


def _scratch(size: int, align: int, allocate, stream):
    """Returns what the program's allocator gives for exactly this request. CPU memory is aligned to 64 bytes only;
    where that is not enough the kernel gets memory of ours, which no program can tell from its own."""
    if size == 0:
        return None
    buffer = allocate(size, align, stream)
    if buffer.data_ptr() % align == 0:
        return buffer
    own = _zeros(size + align, align, stream)
    skip = -own.data_ptr() % align
    return own[skip : skip + size]


def _zeros(size: int, align: int, stream) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.int8)


class Event:
    """An event that measures host time, never 0, because Triton 3.6 divides by it."""

    def __init__(self, enable_timing: bool = False, **_):
        self.time = 0.0

    def record(self, *_):
        self.time = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return max((end.time - self.time) * 1e3, 1e-6)

    def synchronize(self):
        pass

    def wait(self, *_):
        pass

    def query(self) -> bool:
        return True


def bench_once(call, *args, quantiles=None, return_mode="mean", **_):
    """Replaces `do_bench` while softsm is in use: one call, and its predicted time within `softsm.timing()`, else a
    microsecond for a thousand warp instructions. So an autotuner's choice, and with it the result of a program, does
    not depend on how busy the machine is."""
    if in_use.current() is None:  # an autotuner may keep this function after the use of softsm
        import triton.testing

        return triton.testing.do_bench(call, *args, quantiles=quantiles, return_mode=return_mode)
    from softsm.timing_model.timer import Timer

    timer = next((x for x in current_options().sessions if isinstance(x, Timer)), None)
    before = Kernel.executed if timer is None else len(timer.predictions)
    without = 0 if timer is None else len(timer.left_out)
    call()
    ms = (Kernel.executed - before) * 1e-6 if timer is None else timer.us_from(before) * 1e-3
    ms = max(ms, 1e-6) if timer is None or len(timer.left_out) == without else float("inf")
    if quantiles is not None:
        return [ms] * len(quantiles)
    return [ms] if return_mode == "all" else ms


class Utils:
    """Replaces Triton's generated module: loading, device properties."""

    def __init__(self, driver: SoftsmDriver):
        self.driver = driver

    def load_binary(self, name: str, binary: bytes, shared: int, device: int):
        """Returns (module, function, registers, spills, most threads); no module, because there is nothing to
        unload.
        """
        return None, load(binary.decode(), name), REGISTERS, 0, 1024

    def unload_module(self, module) -> None:
        pass

    def get_device_properties(self, device: int) -> dict:
        return dict(
            max_shared_mem=SHARED_PER_CTA,
            max_num_regs=65536,
            multiprocessor_count=self.driver.sms,
            warpSize=32,
            sm_clock_rate=1_000_000,
            mem_clock_rate=1_000_000,
            mem_bus_width=1024,
        )

    def set_printf_fifo_size(self, size: int) -> None:
        pass

    def cuOccupancyMaxActiveClusters(self, *_) -> int:
        return self.driver.sms

    def is_stream_capturing(self, stream) -> bool:
        return cuda_graph.capturing()


class SoftsmDriver(DriverBase):
    """The driver, derived from DriverBase because GPUDriver binds torch.cuda when it is made."""

    def __init__(self, arch: str | None = None, sms: int | None = None):
        self.arch = arch or in_use.active_arch() or in_use.DEFAULT_ARCH
        self.number = in_use.ARCHITECTURES[self.arch]
        self.sms = sms or _sms()
        self.utils = Utils(self)
        self.launcher_cls = Launcher

    @staticmethod
    def is_active() -> bool:
        return in_use.current() is not None

    def get_current_device(self) -> int:
        return DEVICE_BASE + self.number

    def set_current_device(self, device) -> None:
        pass

    def get_current_stream(self, device) -> int:
        return 0

    def get_device_capability(self, device=None) -> tuple[int, int]:
        return divmod(self.number, 10)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.number, 32)

    def get_active_torch_device(self) -> torch.device:
        state = in_use.current()
        return torch.device("cuda", 0) if state is not None and state.shimmed else torch.device("cpu")

    def get_device_interface(self):
        return SimpleNamespace(
            Event=Event,
            synchronize=lambda *_: None,
            current_device=lambda: 0,
            default_stream=lambda *_: None,
            stream=lambda *_: contextlib.nullcontext(),
        )

    def map_python_to_cpp_type(self, ty: str) -> str:
        return nvidia.ty_to_cpp(ty)

    def get_benchmarker(self):
        return bench_once

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        return _zeros(16, 1, 0)

    def clear_cache(self, cache) -> None:
        cache.zero_()

    def allocate_default_profile_scratch(self, size: int, alignment: int, stream) -> torch.Tensor:
        return _zeros(size, alignment, stream)
