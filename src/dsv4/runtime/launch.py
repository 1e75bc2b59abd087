"""From a program to launches: every launch gets its compiled kernel, from Triton or from a file (aot.py).

One path for the GPU and for the emulator, which is a Triton driver: they differ in what a pointer is. The GPU gets a
number; softsm gets the tensor, so that it knows how far the memory reaches and what its name is.

A launch is Triton's `CompiledKernel.run` with what Triton's own launch gives it; the stream is asked for once per call.
What Triton does before that is for hooks (`triton.knobs.runtime`; Proton has some), and takes 3 of a launch's 10
microseconds: where there are hooks, the launch is Triton's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from triton import knobs
from triton.runtime import driver

from dsv4.runtime import aot, dispatch
from dsv4.runtime.dispatch import Target
from dsv4.runtime.program import Launch, Null, Program, Slot


class Ready:
    """run(tensors) allocates the rooms and takes the steps. Holds no tensor: any number of threads may run it."""

    def __init__(self, program: Program, target: Target):
        self.rooms = program.rooms
        self.device = program.device
        self.by_address = target.backend == "cuda"
        self.steps = [ReadyLaunch(x, target) if isinstance(x, Launch) else x for x in program.steps]

    def run(self, tensors: list[Tensor | None]) -> None:
        memory = [*tensors, *[room.empty(self.device) for room in self.rooms]]
        pointers = [None if x is None else x.data_ptr() for x in memory] if self.by_address else memory
        stream = driver.active.get_current_stream(self.device.index)
        watched = _hooks()
        for step in self.steps:
            step.run(memory, pointers, stream, watched)


class ReadyLaunch:
    def __init__(self, launch: Launch, target: Target):
        self.name = launch.kernel.__name__
        self.by_address = target.backend == "cuda"
        grid = (*launch.grid, 1, 1)[:3]
        self.launch, self.with_hooks, rest, arguments = _compiled(launch, grid, target)
        # What `CompiledKernel.run` takes: grid, stream, ..., no metadata and no hooks, then the kernel's arguments.
        self.template: list[Any] = [*grid, None, *rest, None, None, None]
        self.pointers: list[tuple[int, int, int]] = []  # (place, index into memory, bytes from its beginning)
        self.descriptors: list[tuple[int, int]] = []  # (place, index into memory)
        for place, x in enumerate(arguments, HEAD):
            if isinstance(x, Slot):
                self.pointers.append((place, x.index, x.offset))
                x = None
            elif isinstance(x, Null):
                x = 0
            elif hasattr(x, "block_shape"):
                assert x.base.offset == 0
                self.descriptors.append((place, x.base.index))
                x = {name: value for name, value in vars(x).items() if name != "base"}
            self.template.append(x)

    def run(self, memory: list, pointers: list, stream: int, watched: bool) -> None:
        arguments = self.template.copy()
        arguments[STREAM] = stream
        if self.by_address:
            for place, index, offset in self.pointers:
                arguments[place] = pointers[index] + offset
        else:
            for place, index, offset in self.pointers:
                arguments[place] = _from(memory[index], offset)
        for place, index in self.descriptors:
            arguments[place] = SimpleNamespace(**arguments[place], base=memory[index])
        if watched and self.with_hooks is not None:
            self.with_hooks(*arguments[HEAD:])
        else:
            self.launch(*arguments)


STREAM, HEAD = 3, 9  # places among the arguments of `CompiledKernel.run`: the stream; the kernel's first argument


def _compiled(launch: Launch, grid: tuple[int, ...], target: Target) -> tuple[Callable, Any, tuple, list[Any]]:
    """(what to call, what to call where there are hooks, function and metadata for the former, arguments)."""
    kernel, arguments, constants = launch.kernel, launch.arguments, launch.constants
    found = aot.find(kernel, arguments, constants, target)
    if found is not None:
        return found.run, None, (None, None), arguments
    aot.check_clusters(kernel, constants)
    compiled = kernel.warmup(*arguments, grid=launch.grid, **constants)
    # What Triton's own launch passes: every parameter, those fixed at compile time too.
    rest = [constants.get(p.name, p.default) for p in kernel.params[len(arguments) :]]
    by_triton = compiled[grid]  # which loads it
    return compiled.run, by_triton, (compiled.function, compiled.packed_metadata), [*arguments, *rest]


def _hooks() -> bool:
    """Whether somebody watches launches: a hook is a chain of functions, or one that was put in its place."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _from(x: Tensor, offset: int) -> Tensor:
    return x if offset == 0 else x[offset // x.element_size() :]


# Kernels that are launched one by one, outside of prepared calls: rows into pages, the compressor, the model's norms.

_collected: list[Launch] | None = None


@contextmanager
def collecting() -> Iterator[list[Launch]]:
    """Within, `now` makes no launch: the list gets it instead, for a compiler."""
    global _collected
    launches: list[Launch] = []
    _collected = launches
    try:
        yield launches
    finally:
        _collected = None


def now(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """kernel[grid](*arguments, **constants), from a compiled file where there is one."""
    if _collected is not None:
        _collected.append(Launch(kernel, grid, list(arguments), constants))
        return
    if arguments[0].is_cuda:
        found = aot.find(kernel, arguments, constants, dispatch.cuda_target(arguments[0].device))
        if found is not None:
            found.launch(grid, arguments)
            return
    kernel[grid](*arguments, **constants)
