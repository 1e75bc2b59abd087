"""A case of the timing model: what makes its inputs on a device and gives back the call that is timed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

Call = Callable[[], Any]


def values(*shape: int, device: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    if device == "cuda":
        return torch.randn(shape, device=device, dtype=dtype)
    n = 1
    for s in shape:
        n *= s
    part = torch.randn(min(n, 1 << 18)).to(dtype)
    out = torch.empty(n, dtype=dtype)
    for first in range(0, n, part.numel()):
        out[first : first + part.numel()] = part[: n - first]
    return out.view(shape)


def empty(*shape: int, device: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, device=device, dtype=dtype)


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    group: str  # for the table
    make: Callable[[str], Call]
    variants: str = ""  # cases with the same word here compute the same: their order counts
    values: bool = False  # whether products are computed: a later launch depends on them


def adding_to(cases: list[Case]) -> Callable[..., Any]:
    """A decorator (kernel, problem, variant): it adds the case whose call the decorated function makes on a device."""

    def case(kernel: str, problem: str, variant: str = "") -> Callable[[Callable[[str], Call]], None]:
        def add(make: Callable[[str], Call]) -> None:
            name = f"{kernel} {problem}"
            cases.append(Case(f"{name} {variant}".strip(), kernel, make, name))

        return add

    return case
