"""torch.compile while softsm is in use: Inductor's own benchmarks run each candidate once, as Triton's autotuner does.

Inductor times with CUDA events and hundreds of repetitions, which takes minutes in softsm and tells nothing about a
GPU. Its module is imported late, if ever, and its methods are replaced when it is.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import MetaPathFinder

from softsm.doors.triton.in_use import Patches
from softsm.doors.triton.runtime import bench_once

NAME = "torch._inductor.runtime.benchmarking"
METHODS = ("benchmark_gpu", "benchmark_gpu_with_cuda_graph")


def benchmark(self, call, *_, **__) -> float:
    return bench_once(call)


class BenchOnce(MetaPathFinder):
    """Patches the module, now or when it is imported, until `remove`."""

    def __init__(self) -> None:
        self.patches = Patches()
        if NAME in sys.modules:
            self.patch(sys.modules[NAME])
        else:
            sys.meta_path.insert(0, self)

    def patch(self, module) -> None:
        for kind in [x for x in vars(module).values() if isinstance(x, type)]:
            for method in METHODS:
                if method in vars(kind):
                    self.patches.set(kind, method, benchmark)

    def find_spec(self, name, path=None, target=None):
        if name != NAME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module) -> None:
                execute(module)
                self.patch(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self.patches.undo()
