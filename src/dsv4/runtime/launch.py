"""Turns a program into launches: each gets its compiled kernel, from Triton or from a file (aot.py).

GPU and emulator share one path up to the launch itself. On a GPU that is a call of the CUDA driver
(driver.py); in softsm, which is a Triton driver, it is Triton's own `compiled[grid](...)`, as on a GPU while
Triton's hooks watch launches (`triton.knobs.runtime`; Proton has some; they see no kernels from files). A pointer is a
number on the GPU; softsm gets the tensor, so that it knows the extent of the memory and its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from dsv4.runtime import aot, assembler, structs
from dsv4.runtime.dispatch import Target
from dsv4.runtime.driver import DriverLaunch, Function
from dsv4.runtime.program import COMPILED_WITH, Compute, Launch, Layout, Null, Number, Program, Slot, compiled_for


class Ready:
    """run(tensors) allocates the workspace and executes the steps. It holds no tensor, so threads may share it."""

    def __init__(self, program: Program, target: Target):
        self.device = program.device
        self.on_gpu = target.backend == "cuda"
        self.watched: list[Any] = []  # the steps where there are hooks
        self.steps: list[Any] = []
        self.computes = any(isinstance(x, Compute) for x in program.steps)
        for x in program.steps:
            watched, step = ready_launch(x, target) if isinstance(x, Launch) else (x, x)
            self.watched.append(watched)
            self.steps.append(step)
        self.separate = [(buffer, -1) for buffer in program.buffers]  # separate buffers, for launches with hooks
        tensors = {index - len(program.inputs) for x in self.steps for index in as_tensors(x)}
        self.buffers, size = together(program.buffers, tensors)  # (layout, offset in the shared memory or -1)
        self.shared = Layout.contiguous((size,), torch.uint8) if size else None

    def run(self, memory: list[Tensor | None], addresses: list[int]) -> None:
        """Run the steps. Both lists grow by the workspace buffers."""
        if self.computes and torch.is_autocast_enabled(self.device.type):
            with torch.autocast(self.device.type, enabled=False):  # products have the dtypes of their operands
                self.run(memory, addresses)
            return
        steps, buffers = (self.watched, self.separate) if _hooks() else (self.steps, self.buffers)
        shared, base = None, 0
        if self.shared is not None:
            shared = self.shared.empty(self.device)
            base = shared.data_ptr()
        for buffer, offset in buffers:
            if offset < 0:
                x = buffer.empty(self.device)
                memory.append(x)
                addresses.append(x.data_ptr())
            else:
                memory.append(shared)
                addresses.append(base + offset)
        stream = current_stream(self.device, self.on_gpu)
        for step in steps:
            step.run(memory, addresses, stream)


def current_stream(device: torch.device, on_gpu: bool) -> int:
    """Return the stream of a launch. Triton's driver has the same number for a GPU, but the first use of that driver
    runs a C compiler: that takes time in a new process, kernels from files do not need it, and many containers have
    none."""
    if on_gpu:
        return torch._C._cuda_getCurrentRawStream(device.index)
    return driver.active.get_current_stream(device.index)


ALIGNMENT = 512  # alignment of torch's allocations on a GPU


def together(buffers: list[Layout], tensors: set[int]) -> tuple[list[tuple[Layout, int]], int]:
    """Return (buffers with their offsets in one allocation, its size): every allocation costs microseconds.
    `tensors`: buffers that a step needs as tensors; they get -1, their own memory."""
    found, size = [], 0
    for n, buffer in enumerate(buffers):
        found.append((buffer, -1 if n in tensors else size))
        if n not in tensors:
            size += -(-buffer.bytes // ALIGNMENT) * ALIGNMENT
    return found, size


def as_tensors(step: Any) -> Iterator[int]:
    """Yield the indices of the memory that a step needs as tensors: a launch of the driver needs only addresses."""
    if not isinstance(step, DriverLaunch):
        yield from (slot.index for slot in step.slots())


class TritonLaunch:
    """A launch by Triton's own `compiled[grid](...)`. Arguments are those of DriverLaunch."""

    def __init__(self, name: str, compiled: Any, grid: tuple[int, ...], arguments: list[Any], by_address: bool):
        self.name, self.compiled, self.grid, self.by_address = name, compiled, grid, by_address
        self.template: list[Any] = []
        self.tensors: list[tuple[int, Slot]] = []  # (place, what stands there)
        self.numbers: list[tuple[int, int]] = []  # (place, index into memory)
        self.descriptors: list[tuple[int, Slot]] = []  # (place, its base)
        self.like = arguments if any(isinstance(x, tuple) for x in arguments) else None  # structs
        for place, x in enumerate(structs.flat(arguments)):
            if isinstance(x, Slot):
                self.tensors.append((place, x))
                x = None
            elif isinstance(x, Number):
                self.numbers.append((place, x.index))
            elif isinstance(x, Null):
                x = 0
            elif hasattr(x, "block_shape"):
                self.descriptors.append((place, x.base))
            self.template.append(x)

    def slots(self) -> Iterator[Slot]:
        """Yield the slots whose tensors it needs."""
        yield from (slot for _, slot in (self.descriptors if self.by_address else self.tensors + self.descriptors))

    def run(self, memory: list, addresses: list, stream: int) -> None:
        arguments = self.template.copy()
        for place, x in self.tensors:
            arguments[place] = addresses[x.index] + x.offset if self.by_address else x.tensor(memory)
        for place, index in self.numbers:
            arguments[place] = memory[index]
        for place, base in self.descriptors:
            arguments[place] = copy(arguments[place])
            arguments[place].base = base.tensor(memory)
        if self.like is not None:
            arguments = structs.nested(iter(arguments), self.like)
        self.compiled[self.grid](*arguments, stream=stream)


def ready_launch(launch: Launch, target: Target) -> tuple[Any, Any]:
    """Return (the step with hooks, the step without hooks).

    Triton launches a kernel that needs more than driver.py knows, and an empty grid, which it skips.
    """
    grid = (*launch.grid, 1, 1)[:3]
    kernel, arguments, constants = launch.kernel, launch.arguments, launch.constants
    found = aot.find(kernel, arguments, constants, target)
    if found is not None:
        from_file = DriverLaunch(found, grid, arguments)
        return from_file, from_file
    neutral = map(compiled_for, structs.neutral(arguments))
    compiled = kernel.warmup(*neutral, grid=launch.grid, **constants, **COMPILED_WITH)
    # Triton's own launch passes every parameter, including those fixed at compile time.
    fixed = [constants.get(p.name, p.default) for p in kernel.params[len(arguments) :]]
    everything = [*arguments, *fixed]
    if target.backend == "cuda" and compiled.module is None:
        compiled.kernel = assembler.cubin_of(compiled)
    compiled[grid]  # loads it
    by_triton = TritonLaunch(kernel.__name__, compiled, grid, everything, target.backend == "cuda")
    if target.backend != "cuda":
        return by_triton, by_triton
    function = Function.of(compiled, torch.cuda.current_device())
    return by_triton, by_triton if function is None or 0 in grid else DriverLaunch(function, grid, everything)


def _hooks() -> bool:
    """Return whether hooks watch launches: a hook is a chain of functions, or one that replaced it."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
