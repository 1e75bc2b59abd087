"""Autotuners while softsm is in use: choices of their own for each target, and every configuration run once.

Triton keeps an autotuner's choices by the kernel's arguments alone. What was fastest in softsm, or for another target,
says nothing about a GPU, so the two attributes below stand in front of the instance's own as long as softsm is in use.
"""

from __future__ import annotations

from softsm.doors.triton.runtime import bench_once


def choices(arch: str) -> property:
    """Returns `Autotuner.cache` for this target. It stays with the autotuner, for the next use of the same target."""
    name = f"softsm {arch}"

    def get(tuner) -> dict:
        return vars(tuner).setdefault(name, {})

    def put(tuner, cache: dict) -> None:
        vars(tuner).setdefault("cache", {})  # made here because it is also needed afterwards
        vars(tuner)[name] = cache

    return property(get, put)


def benchmark(tuner):
    """Replaces `Autotuner.do_bench`: uses the program's own function if it gave one. Triton remembers the driver's,
    be it a GPU's.
    """
    return bench_once if tuner._do_bench is None or tuner.use_cuda_graph else tuner._do_bench
