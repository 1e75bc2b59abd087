"""Kernel arguments that are NamedTuples (tensors, sizes, strides, ...): Triton compiles them, and a launch passes their
members one by one. They are flattened when a launch is prepared; a kernel launched alone is flattened each time.

`do_not_specialize` does not reach members: Triton would compile a kernel again for a stride of 1, or of a multiple of
16. So kernels are compiled with `neutral` numbers in them. Kernels are compiled for the alignment of pointers, except
those that a struct names in its attribute `any_alignment`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from dsv4.runtime.program import Number

# Neither 1 nor a multiple of 16: 32 bits wide, or 64 in place of 64-bit numbers
NEUTRAL, NEUTRAL_64 = (1 << 31) - 1, (1 << 62) - 1


class Pointer:
    """A pointer to a type, without a known alignment."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    def data_ptr(self) -> int:
        return 1


def flat(arguments: Iterable[Any]) -> list[Any]:
    """Replace structs by their members."""
    found: list[Any] = []
    for x in arguments:
        if isinstance(x, tuple):
            found += flat(x)
        else:
            found.append(x)
    return found


def members(arguments: Iterable[Any]) -> list[Any]:
    """Do `flat` for structs without nested structs, in a third of the time."""
    found: list[Any] = []
    for x in arguments:
        if isinstance(x, tuple):
            found += x
        else:
            found.append(x)
    return found


def nested(values: Iterator[Any], like: Iterable[Any]) -> list[Any]:
    """Invert flat: put values into structs like these."""
    return [type(x)(*nested(values, x)) if isinstance(x, tuple) else next(values) for x in like]


def neutral(arguments: Iterable[Any]) -> list[Any]:
    """Return what to compile for, in place of the arguments of one launch."""
    return [_neutral(x) if isinstance(x, tuple) else x for x in arguments]


def _neutral(struct: Any) -> Any:
    any_alignment = getattr(struct, "any_alignment", ())
    return struct._make(_member(x, name in any_alignment) for name, x in zip(struct._fields, struct))


def _member(x: Any, any_alignment: bool) -> Any:
    if isinstance(x, tuple):
        return _neutral(x)
    if isinstance(x, Number):
        return NEUTRAL
    if type(x) is int:
        return NEUTRAL if -(1 << 31) <= x < 1 << 31 else NEUTRAL_64
    return Pointer(x.dtype) if any_alignment else x
