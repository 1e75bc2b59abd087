"""From a program to launches: every launch gets its compiled kernel, from Triton or from a file (aot.py).

One path for the GPU and for the emulator, up to the launch itself. On a GPU that is a call of the CUDA driver
(driver.py); in softsm, which is a Triton driver, it is Triton's own `compiled[grid](...)`, and so it is on a GPU where
somebody watches launches through Triton's hooks (`triton.knobs.runtime`; Proton has some; they see no kernels from
files). A pointer is a number on the GPU; softsm gets the tensor, so that it knows how far the memory reaches and what
its name is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from dsv4.runtime import aot, dispatch, structs
from dsv4.runtime.dispatch import Target
from dsv4.runtime.driver import DriverLaunch, Function
from dsv4.runtime.program import Launch, Null, Number, Program, Slot


class Ready:
    """run(tensors) allocates the workspace and takes the steps. Holds no tensor: any number of threads may run it."""

    def __init__(self, program: Program, target: Target):
        self.buffers = program.buffers
        self.device = program.device
        self.watched: list[Any] = []  # the steps where there are hooks
        self.steps: list[Any] = []
        for x in program.steps:
            watched, step = ready_launch(x, target) if isinstance(x, Launch) else (x, x)
            self.watched.append(watched)
            self.steps.append(step)

    def run(self, memory: list[Tensor | None], addresses: list[int]) -> None:
        """Both lists become longer by the workspace buffers."""
        for buffer in self.buffers:
            x = buffer.empty(self.device)
            memory.append(x)
            addresses.append(x.data_ptr())
        stream = driver.active.get_current_stream(self.device.index)
        for step in self.watched if _hooks() else self.steps:
            step.run(memory, addresses, stream)


class TritonLaunch:
    """A launch by Triton's own `compiled[grid](...)`. Arguments: as of DriverLaunch."""

    def __init__(self, name: str, compiled: Any, grid: tuple[int, ...], arguments: list[Any], by_address: bool):
        self.name, self.compiled, self.grid, self.by_address = name, compiled, grid, by_address
        self.template: list[Any] = []
        self.tensors: list[tuple[int, int, int]] = []  # (place, index into memory, bytes from its beginning)
        self.numbers: list[tuple[int, int]] = []  # (place, index into memory)
        self.descriptors: list[tuple[int, int]] = []  # (place, index into memory)
        self.like = arguments if any(isinstance(x, tuple) for x in arguments) else None  # structs, as Triton takes them
        for place, x in enumerate(structs.flat(arguments)):
            if isinstance(x, Slot):
                self.tensors.append((place, x.index, x.offset))
                x = None
            elif isinstance(x, Number):
                self.numbers.append((place, x.index))
            elif isinstance(x, Null):
                x = 0
            elif hasattr(x, "block_shape"):
                assert x.base.offset == 0
                self.descriptors.append((place, x.base.index))
            self.template.append(x)

    def run(self, memory: list, addresses: list, stream: int, grid: tuple[int, ...] | None = None) -> None:
        arguments = self.template.copy()
        for place, index, offset in self.tensors:
            arguments[place] = addresses[index] + offset if self.by_address else _from(memory[index], offset)
        for place, index in self.numbers:
            arguments[place] = memory[index]
        for place, index in self.descriptors:
            arguments[place] = copy(arguments[place])
            arguments[place].base = memory[index]
        if self.like is not None:
            arguments = structs.nested(iter(arguments), self.like)
        self.compiled[grid or self.grid](*arguments, stream=stream)


def ready_launch(launch: Launch, target: Target, changing: Sequence[Any] = ()) -> tuple[Any, Any]:
    """(the step where there are hooks, the step where there are none).

    changing: the arguments as the steps get them, with Numbers among them; those of the launch say for which numbers
    it is compiled. A kernel that needs more than driver.py knows, and a grid of nothing, which Triton does not launch,
    are Triton's.
    """
    grid = (*launch.grid, 1, 1)[:3]
    kernel, arguments, constants = launch.kernel, launch.arguments, launch.constants
    found = aot.find(kernel, arguments, constants, target)
    if found is not None:
        from_file = DriverLaunch(found, grid, changing or arguments)
        return from_file, from_file
    compiled = kernel.warmup(*structs.neutral(arguments), grid=launch.grid, **constants)
    # What Triton's own launch passes: every parameter, those fixed at compile time too.
    fixed = [constants.get(p.name, p.default) for p in kernel.params[len(arguments) :]]
    everything = [*(changing or arguments), *fixed]
    compiled[grid]  # loads it
    by_triton = TritonLaunch(kernel.__name__, compiled, grid, everything, target.backend == "cuda")
    if target.backend != "cuda":
        return by_triton, by_triton
    function = Function.of(compiled, torch.cuda.current_device())
    return by_triton, by_triton if function is None or 0 in grid else DriverLaunch(function, grid, everything)


def _hooks() -> bool:
    """Whether somebody watches launches: a hook is a chain of functions, or one that was put in its place."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _from(x: Tensor, offset: int) -> Tensor:
    return x if offset == 0 else x[offset // x.element_size() :]


# Kernels that are launched one by one, outside of prepared calls: gradients, rows into pages, the compressor, the
# model's norms.

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


# What is prepared for a single launch, as calls.py has it for a call: (the step where there are hooks, ... are none).
_prepared: dict[tuple, tuple[Any, Any]] = {}
MOST = 4096  # the oldest goes first
WORD = 1 << 31


def now(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """kernel[grid](*arguments, **constants). Arguments: tensors on one device, numbers, TensorDescriptors.

    The key is what Triton compiles a kernel for: of a number its type, whether it is 1, and whether 16 divides it.
    Addresses, numbers and the grid change from launch to launch."""
    if _collected is not None:
        _collected.append(Launch(kernel, grid, list(arguments), constants))
        return
    memory: list[Any] = []
    addresses: list[Any] = []
    known: list[Any] = []
    structured = any(isinstance(x, tuple) for x in arguments)
    for x in structs.flat(arguments) if structured else arguments:
        if isinstance(x, (int, float)):
            if type(x) is not int:
                known.append(type(x))
            elif -WORD <= x < WORD:
                known.append(1 if x == 1 else 2 if x % 16 else 16)
            else:
                known.append((int, x))
            memory.append(x)
            addresses.append(x)
        elif isinstance(x, Tensor):
            address = x.data_ptr()
            known.append((x.dtype, address & 15))
            memory.append(x)
            addresses.append(address)
        else:
            known.append((x.base.dtype, *x.shape, *x.strides, *x.block_shape, x.layout, x.padding))
            memory.append(x.base)
            addresses.append(x.base.data_ptr())
    if 0 in grid:
        return
    grid = (*grid, 1, 1)[:3]
    device = memory[0].device
    target = dispatch.cuda_target(device) if device.type == "cuda" else dispatch.softsm_target()
    key = (kernel.fn, target, device, *known, *constants, *constants.values())
    steps = _prepared.get(key)
    if steps is None:
        steps = ready_launch(Launch(kernel, grid, slots(arguments), constants), target, slots(arguments, numbers=True))
        if len(_prepared) >= MOST:
            del _prepared[next(iter(_prepared))]
        _prepared[key] = steps
    steps[0 if _hooks() else 1].run(memory, addresses, driver.active.get_current_stream(device.index), grid)


def slots(arguments: Sequence[Any], numbers: bool = False) -> list[Any]:
    """With slots in place of tensors, counted in their order, with numbers; and Numbers in place of these."""
    found: list[Any] = []
    for index, x in enumerate(structs.flat(arguments)):
        if isinstance(x, Tensor):
            x = Slot.of(index, "", x)
        elif hasattr(x, "block_shape"):
            base, x = Slot.of(index, "", x.base), copy(x)
            x.base = base
        elif numbers:
            x = Number(index)
        found.append(x)
    return structs.nested(iter(found), arguments)
