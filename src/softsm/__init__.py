"""A streaming multiprocessor in software: runs PTX on a CPU and reports what is wrong with it.

    with softsm.use("sm_100a"):            # Triton and Gluon programs run here, on CPU tensors
        kernel[grid](x, y, n)

    softsm.load_ptx(text)[4, 128](x, y, n)  # a kernel in PTX

Nothing heavy is imported until one of these names is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what __getattr__ finds, for type checkers
    from softsm import errors as errors
    from softsm.checks.checking import checking as checking
    from softsm.checks.checking import expect_mma as expect_mma
    from softsm.doors.driver.loading import driver as driver
    from softsm.doors.ptx import load_ptx as load_ptx
    from softsm.doors.triton.in_use import active_arch as active_arch
    from softsm.doors.triton.install import use as use
    from softsm.engine.launch import load as load
    from softsm.engine.ranks import ranks as ranks
    from softsm.memory.map_argument import tensor_map as tensor_map
    from softsm.memory.multicast import multicast as multicast
    from softsm.report.activity import counting as counting
    from softsm.timing_model.timer import timing as timing

__version__ = "0.2.0"

_HOME = {
    "use": "softsm.doors.triton.install",
    "active_arch": "softsm.doors.triton.in_use",
    "load": "softsm.engine.launch",
    "driver": "softsm.doors.driver.loading",
    "load_ptx": "softsm.doors.ptx",
    "tensor_map": "softsm.memory.map_argument",
    "ranks": "softsm.engine.ranks",
    "multicast": "softsm.memory.multicast",
    "checking": "softsm.checks.checking",
    "expect_mma": "softsm.checks.checking",
    "counting": "softsm.report.activity",
    "timing": "softsm.timing_model.timer",
    "errors": "softsm.errors",
}

__all__ = [
    "active_arch", "checking", "counting", "driver", "errors", "expect_mma", "load", "load_ptx", "multicast", "ranks",
    "tensor_map", "timing", "use",
]  # fmt: skip


if not TYPE_CHECKING:  # or type checkers would accept every name

    def __getattr__(name: str) -> Any:
        home = _HOME.get(name)
        if home is None:
            raise AttributeError(f"module 'softsm' has no attribute {name!r}")
        module = importlib.import_module(home)
        value = module if name == "errors" else getattr(module, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
