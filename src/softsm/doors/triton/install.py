"""`softsm.use(arch)`: install softsm as Triton's driver, and remove it again without a trace.

Triton has one driver for all threads. So the uses of one thread nest, and a use in another thread at that time is a
guest: it uses the driver that is installed, which stays until the last guest has left. A guest cannot choose another
architecture.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from softsm import accepted
from softsm.doors.triton import in_use
from softsm.doors.triton.in_use import ARCHITECTURES, DEFAULT_SMS, InUse, Patches, current
from softsm.engine.ranks import MOST, Result
from softsm.engine.ranks import ranks as run_ranks

if TYPE_CHECKING:
    from softsm.doors.triton.cuda_shim import CudaShim
    from softsm.doors.triton.inductor import BenchOnce

_guests: set[Use] = set()  # uses of the other threads
_ended: set[Use] = set()  # stopped while there were guests
_lock = threading.RLock()


class Use(InUse):
    """softsm in use. As a context manager it ends with the block, otherwise with `stop()` or the process."""

    def __init__(
        self, arch: str, *, cuda_shim: bool = False, sms: int = DEFAULT_SMS, ranks: int = 1, register: bool = True
    ):
        accepted.one_of("arch", arch, tuple(ARCHITECTURES))
        accepted.flag("cuda_shim", cuda_shim)
        self.ranks = accepted.whole("ranks", ranks, 1, MOST)
        super().__init__(arch, accepted.whole("sms", sms, 1, accepted.MOST_SMS))
        with _lock:
            self._begin(register, cuda_shim)

    def _begin(self, register: bool, cuda_shim: bool) -> None:
        self.thread = threading.get_ident()
        outer = current()
        guest = outer is not None and outer.thread != self.thread
        if outer is not None and outer.arch != self.arch and (guest or _guests):
            raise RuntimeError(
                f"softsm.use({self.arch!r}): another thread uses {outer.arch}; Triton has one driver for all threads"
            )
        if outer is not None and guest:
            if cuda_shim and not outer.shimmed:
                raise RuntimeError("softsm.use(cuda_shim=True): another thread uses softsm without the shim")
            self.shimmed = outer.shimmed
            _guests.add(self)
            return
        self.shimmed = cuda_shim or (outer is not None and outer.shimmed)
        self._patches = Patches()
        self._registry: tuple | None = None
        self._driver: tuple | None = None
        self._shim: CudaShim | None = None
        self._inductor: BenchOnce | None = None
        in_use.stack.append(self)
        try:
            self._install(register, cuda_shim and not (outer is not None and outer.shimmed))
        except BaseException:
            self._remove()
            raise

    def _install(self, register: bool, shim: bool) -> None:
        try:
            import torch
            import triton  # noqa: F401
        except ModuleNotFoundError as missing:
            if missing.name not in ("torch", "triton"):
                raise
            raise ImportError(
                f"softsm.use: {missing.name} is not installed; Triton programs need torch and Triton, on Linux: "
                "pip install './packages/softsm[triton]' in a clone"
            ) from None
        if shim:
            from softsm.doors.triton.cuda_shim import CudaShim

            self._shim = CudaShim(self)
        import triton.backends.nvidia.compiler as nvidia_compiler
        import triton.backends.nvidia.driver as nvidia_driver

        # exactly one backend and one driver may serve "cuda"
        self._patches.set(nvidia_compiler.CUDABackend, "supports_target", staticmethod(lambda target: False))
        self._patches.set(nvidia_driver.CudaDriver, "is_active", staticmethod(lambda: False))
        if len(in_use.stack) == 1:
            from softsm.doors.triton import pointers

            self._patches.set(torch.Tensor, "data_ptr", pointers.tracking(torch.Tensor.data_ptr))
        if self.ranks > 1:
            from softsm.doors.triton import distributed

            distributed.install(self._patches)
        if register:
            self._register()

    def _register(self) -> None:
        import triton.testing
        from triton.backends import Backend, backends
        from triton.runtime.driver import driver

        from softsm.doors.triton.backend import SoftsmBackend
        from softsm.doors.triton.runtime import SoftsmDriver

        self._registry = backends, backends.get("softsm")
        backends["softsm"] = Backend(SoftsmBackend, SoftsmDriver)
        self._driver = driver, driver._active
        driver.set_active(SoftsmDriver(self.arch, self.sms))
        self.patch_triton(triton.testing)

    def patch_triton(self, testing) -> None:
        """Replaces what a program uses of Triton besides launches. All of Triton is imported by now."""
        import triton
        from triton.compiler.compiler import AsmDict
        from triton.runtime import autotuner, cache
        from triton.runtime.autotuner import Autotuner

        from softsm.doors.triton import autotuning, compile_key
        from softsm.doors.triton.backend import on_demand
        from softsm.doors.triton.inductor import BenchOnce
        from softsm.doors.triton.runtime import bench_once

        for name in ("do_bench", "do_bench_cudagraph", "do_bench_proton", "do_bench_cudagraph_proton"):
            if hasattr(testing, name):
                self._patches.set(testing, name, bench_once)
        self._patches.set(Autotuner, "cache", autotuning.choices(self.arch))
        self._patches.set(Autotuner, "do_bench", property(autotuning.benchmark))
        self._patches.set(AsmDict, "__missing__", on_demand(AsmDict.__missing__))
        self._inductor = BenchOnce()
        keeper = compile_key.kept(cache.triton_key, Path(triton.__file__).parent)
        for module in (cache, autotuner):
            self._patches.set(module, "triton_key", keeper)

    def run(self, program: Callable[[int], Result]) -> list[Result]:
        """Call program(rank) for each of the ranks (`softsm.ranks`). There torch.distributed and its symmetric memory
        answer for the rank, and RANK and WORLD_SIZE are in the environment, as torchrun has them."""
        from softsm.doors.triton.cuda_shim import CudaToCpu
        from softsm.doors.triton.distributed import environment

        def of_rank(rank: int) -> Result:
            with CudaToCpu() if self.shimmed else nullcontext():  # torch has modes of each thread
                return program(rank)

        with environment(self.ranks) as turn:
            return run_ranks(self.ranks, of_rank, turn=turn)

    def stop(self) -> None:
        """Restores everything when the last guest has left. Uses end in the reverse order of their beginning."""
        with _lock:
            if self in _guests:
                _guests.remove(self)
            elif _guests and self in in_use.stack:
                _ended.add(self)
            else:
                self._remove()
            while not _guests and in_use.stack and in_use.stack[-1] in _ended:
                in_use.stack[-1]._remove()

    def _remove(self) -> None:
        if self not in in_use.stack:
            return
        while in_use.stack[-1] is not self:
            in_use.stack[-1]._remove()
        if self._driver is not None:
            driver, before = self._driver
            driver._active = before
        if self._registry is not None:
            backends, old = self._registry
            if old is None:
                backends.pop("softsm", None)
            else:
                backends["softsm"] = old
        self._patches.undo()
        if self._inductor is not None:
            self._inductor.remove()
        if self._shim is not None:
            self._shim.remove()
        in_use.stack.remove(self)
        _ended.discard(self)

    def __enter__(self) -> Use:
        return self

    def __exit__(self, *_) -> None:
        self.stop()


def use(arch: str, *, cuda_shim: bool = False, sms: int | None = None, ranks: int = 1) -> Use:
    """Run Triton and Gluon programs on this CPU from now on, compiled for `arch`: "sm_90a", "sm_100a" or "sm_103a".

    As a context manager it restores everything at the end of the block. `cuda_shim=True` turns device="cuda" into CPU
    tensors, for programs that require it; it raises an error if CUDA is available. `sms` is the number of SMs to
    emulate; None means as many as in the enclosing use, or 4. With `ranks`, `run(program)` of what this returns calls
    program(rank) for each rank: their launches run at the same time on GPUs that reach each other's memory, and
    torch.distributed answers for the rank. The use applies to all threads; RuntimeError if another thread is using
    another architecture.
    """
    if sms is None:
        sms = in_use.stack[-1].sms if in_use.stack else DEFAULT_SMS
    return Use(arch, cuda_shim=cuda_shim, sms=sms, ranks=ranks)
