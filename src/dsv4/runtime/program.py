"""What a call does on a GPU: the memory it allocates, its copies, fills and launches, and calls of torch functions.

`prepare` of an operation (<operation>/kernels/prepare.py) makes a Program from a problem whose tensors are Slots: names
with a layout and without an address. So a program cannot depend on addresses, and making it does no work. It depends
only on the key of the call (calls.py), and is reused for every call with that key.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor


def is_pages(x: Any) -> bool:
    """Return whether x is a cache (dsv4.caches), which keeps rows as bytes in one flat tensor, its `storage`."""
    return hasattr(x, "with_storage")


@dataclass(frozen=True, eq=False, slots=True)
class Slot:
    """Stands for a tensor of the call, or a part of one. It has the methods of a tensor and no memory."""

    index: int  # into the tensors of the call, followed by the program's workspace buffers
    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    misaligned: int = 0  # address modulo 16
    offset: int = 0  # bytes from the beginning of the tensor
    part: bool = False  # true: not the whole tensor with its own strides

    @classmethod
    def of(cls, index: int, name: str, x: Tensor) -> Slot:
        misaligned = 0 if x.device.type == "meta" else x.data_ptr() % 16
        return cls(index, name, tuple(x.shape), x.stride(), x.dtype, x.device, misaligned)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def stride(self, dim: int | None = None) -> Any:
        return self.strides if dim is None else self.strides[dim]

    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    def element_size(self) -> int:
        return self.dtype.itemsize

    def data_ptr(self) -> int:
        """Return the address modulo 16, on which Triton specialises; more is not known."""
        return (self.misaligned + self.offset) % 16

    def is_contiguous(self) -> bool:
        reach = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides)):
            if size != 1 and stride != reach:
                return self.numel() == 0
            reach *= size
        return True

    def view(self, shape: Sequence[int], strides: Sequence[int], skip: int = 0) -> Slot:
        """Return a part of the same tensor, which begins `skip` elements later."""
        offset = self.offset + skip * self.element_size()
        return replace(self, shape=tuple(shape), strides=tuple(strides), offset=offset, part=True)

    def seen_as(self, function: Callable[[Tensor], Tensor]) -> Slot:
        """Return the slot of the view that a function of torch makes of the tensor."""
        x = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")
        made = function(x)
        assert made.untyped_storage()._cdata == x.untyped_storage()._cdata, "not a view"
        offset = self.offset + int(made.storage_offset()) * made.element_size()
        return replace(self, shape=tuple(made.shape), strides=made.stride(), dtype=made.dtype, offset=offset, part=True)

    def __getitem__(self, place: Any) -> Slot:
        return self.seen_as(lambda x: x[place])

    def transpose(self, a: int, b: int) -> Slot:
        return self.seen_as(lambda x: x.transpose(a, b))

    def flatten(self, first: int, last: int) -> Slot:
        return self.seen_as(lambda x: x.flatten(first, last))

    def unflatten(self, dim: int, sizes: tuple[int, ...]) -> Slot:
        return self.seen_as(lambda x: x.unflatten(dim, sizes))

    def bytes_as(self, dtype: torch.dtype) -> Slot:
        return self.seen_as(lambda x: x.view(dtype))

    def tensor(self, memory: Sequence[Any]) -> Tensor:
        """Return the tensor, or the part of one, from the tensors of a call."""
        x = memory[self.index]
        if not self.part:
            return x
        if x.dtype != self.dtype:
            first = (x.storage_offset() * x.element_size() + self.offset) // self.dtype.itemsize
            made = torch.empty(0, dtype=self.dtype, device=x.device)
            return made.set_(x.untyped_storage(), first, self.shape, self.strides)
        return x.as_strided(self.shape, self.strides, x.storage_offset() + self.offset // x.element_size())

    def words(self, begin: int, size: int, dtype: torch.dtype) -> Slot:
        """Return flat memory from element `begin` as `size` elements of another dtype, which is not smaller."""
        assert dtype.itemsize % self.element_size() == 0
        return replace(self.view((size,), (1,), begin), dtype=dtype)

    def unsqueeze(self, dim: int) -> Slot:
        inner = self.strides[dim] * self.shape[dim] if dim < self.ndim else 1
        shape, strides = (*self.shape[:dim], 1, *self.shape[dim:]), (*self.strides[:dim], inner, *self.strides[dim:])
        return self.view(shape, strides)


class Layout(NamedTuple):
    """The layout of contiguous memory that a call allocates, by torch.empty_strided, which is twice as fast as
    torch.empty."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def contiguous(cls, shape: Sequence[int], dtype: torch.dtype) -> Layout:
        strides, reach = [], 1
        for size in reversed(shape):
            strides.append(reach)
            reach *= max(size, 1)
        return cls(tuple(shape), tuple(reversed(strides)), dtype)

    @classmethod
    def of(cls, x: Tensor) -> Layout:
        return cls(tuple(x.shape), x.stride(), x.dtype)

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Null:
    """A null pointer: the kernel does not read it for this problem, or checks for it."""

    dtype: torch.dtype

    def data_ptr(self) -> int:
        return 0


class Changing(int):
    """A 32-bit number that changes from call to call; the kernel is not specialised for it."""


@dataclass(frozen=True)
class Number:
    """Stands for a Changing number, which is at this index among the tensors of the call."""

    index: int


# Options of every compilation. From Triton 3.10 on, products and sums are fused only where this requests it.
COMPILED_WITH = {"enable_fp_fusion": True}


def compiled_for(x: Any) -> Any:
    """Replace a Number, for which a kernel is not specialised, by one that is neither 1 nor a multiple of 16."""
    return 2 if isinstance(x, Number) else x


@dataclass(frozen=True)
class Copy:
    to: Slot
    source: Slot

    def slots(self) -> Iterator[Slot]:
        yield from (self.to, self.source)

    def run(self, memory: list, *_: Any) -> None:
        self.to.tensor(memory).copy_(self.source.tensor(memory))


@dataclass(frozen=True)
class Fill:
    to: Slot
    value: float

    def slots(self) -> Iterator[Slot]:
        yield self.to

    def run(self, memory: list, *_: Any) -> None:
        self.to.tensor(memory).fill_(self.value)


@dataclass(frozen=True)
class Compute:
    """Calls function(*arguments), for work that torch does better or that depends on values. Arguments are Slots, None,
    and problems that hold Slots; the function gets tensors."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def slots(self) -> Iterator[Slot]:
        for x in self.arguments:
            yield from slots_in(x)

    def run(self, memory: list, *_: Any) -> None:
        self.function(*[with_tensors(x, memory) for x in self.arguments])


def slots_in(x: Any) -> Iterator[Slot]:
    """Yield the slot itself, or the slots in a problem."""
    if isinstance(x, Slot):
        yield x
    elif is_dataclass(x) and not isinstance(x, type):
        for f in fields(x):
            yield from slots_in(getattr(x, f.name))


def with_tensors(x: Any, memory: Sequence[Any]) -> Any:
    """Return the tensor of a slot, or the problem with tensors in place of slots."""
    if isinstance(x, Slot):
        return x.tensor(memory)
    if not is_dataclass(x) or isinstance(x, type):
        return x
    return replace(x, **{f.name: with_tensors(getattr(x, f.name), memory) for f in fields(x)})


@dataclass(frozen=True)
class Launch:
    """kernel[grid](*arguments, **constants). In a program arguments are numbers, Numbers, Slots, Nulls,
    TensorDescriptors of Slots, and NamedTuples of numbers, Slots and Nulls (structs.py); in a single launch
    (calls.launch) they are tensors, numbers and Changing numbers, and NamedTuples of these alone."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: list[Any]
    constants: dict[str, Any]


def rounded(count: int) -> int:
    """Return the bytes that a plan reserves for a buffer of this size, so that every buffer is aligned."""
    return -(-count // 256) * 256


TRITON_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl")


class Program:
    """The steps of a call in order, and the workspace buffers that are allocated before them and freed after them."""

    def __init__(self, tensors: Mapping[str, Tensor | None], device: torch.device):
        self.device = device
        self.inputs = list(tensors)
        self.buffers: list[Layout] = []
        self.room: Slot | None = None  # flat memory of a plan, from which workspace is allocated
        self.taken = 0  # bytes of it in use
        self.steps: list[Copy | Fill | Compute | Launch] = []
        self.slots = [None if x is None else Slot.of(n, name, x) for n, (name, x) in enumerate(tensors.items())]
        self._by_tensor = {id(x): slot for x, slot in zip(tensors.values(), self.slots)}

    def slots_of(self, problem: Any) -> Any:
        """Return the problem with slots in place of its tensors, which must be tensors of the call."""
        changed: dict[str, Any] = {}
        for field in fields(problem):
            x = getattr(problem, field.name)
            if isinstance(x, Tensor):
                changed[field.name] = self._by_tensor[id(x)]
            elif is_pages(x):
                changed[field.name] = x.with_storage(self._by_tensor[id(x.storage)])
            elif is_dataclass(x):
                changed[field.name] = self.slots_of(x)
        return replace(problem, **changed)

    def stand_ins(self, arguments: Sequence[Any]) -> list[Any]:
        """Return Slots and Numbers in place of tensors and Changing numbers, which are those of the call, in order."""
        indices = itertools.count()

        def stand_in(x: Any) -> Any:
            if isinstance(x, tuple):
                return type(x)(*map(stand_in, x))
            if type(x) is Changing:
                return Number(next(indices))
            return self.slots[next(indices)] if isinstance(x, Tensor) else x

        return [stand_in(x) for x in arguments]

    def workspace(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Slot:
        layout = Layout.contiguous(shape, dtype)
        if self.room is not None and self.taken + layout.bytes <= self.room.numel() * self.room.element_size():
            part = replace(self.room, shape=layout.shape, strides=layout.strides, dtype=dtype, part=True)
            part = replace(part, name=name, offset=self.room.offset + self.taken)
            self.taken += rounded(layout.bytes)
            return part
        self.buffers.append(layout)
        return Slot(len(self.inputs) + len(self.buffers) - 1, name, *layout, self.device)

    def copied(self, x: Slot) -> Slot:
        """Return a contiguous copy of a tensor whose strides a kernel does not support."""
        made = self.workspace(f"copy of {x.name}", x.shape, x.dtype)
        self.copy(made, x)
        return made

    def flattened(self, x: Slot) -> Slot:
        """Merge the first two dimensions, in the same memory if the strides allow it, otherwise in a copy."""
        (a, b, *rest), (outer, inner, *strides) = x.shape, x.strides
        if a > 1 and b > 1 and outer != b * inner:
            return self.flattened(self.copied(x))
        return x.view((a * b, *rest), (inner if b > 1 else outer, *strides))

    def copy(self, to: Slot, source: Slot) -> None:
        self.steps.append(Copy(to, source))

    def fill(self, to: Slot, value: float) -> None:
        self.steps.append(Fill(to, value))

    def compute(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.steps.append(Compute(function, arguments))

    def launch(self, kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], **constants: Any) -> None:
        """Add a launch. Arguments and constants have the names of the kernel's parameters; those without a parameter
        are dropped, except Triton's options (num_warps, ...)."""
        own = set(kernel.arg_names)
        taken = [arguments[name] for name in kernel.arg_names if name in arguments]
        options = {name: x for name, x in constants.items() if name in own or name in TRITON_OPTIONS}
        self.steps.append(Launch(kernel, grid, taken, options))

    @property
    def launches(self) -> list[Launch]:
        return [step for step in self.steps if isinstance(step, Launch)]


def tensors_of(problem: Any) -> dict[str, Tensor]:
    """Return the tensors of a problem, and of the problem inside it, by field name."""
    found: dict[str, Tensor] = {}
    for field in fields(problem):
        x = getattr(problem, field.name)
        x = x.storage if is_pages(x) else x
        if isinstance(x, Tensor):
            found[field.name] = x
        elif is_dataclass(x):
            found |= tensors_of(x)
    return found
