"""A case of the timing model: what makes its inputs on a device and gives back the call that is timed.

On a CPU (for softsm) values are a short random pattern repeated: only what decides the path of a kernel has to be
right.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
import triton

BF16, FP16, FP32, FP8, INT8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int8
SHORT = {BF16: "bf16", FP16: "fp16", FP32: "fp32", FP8: "fp8", INT8: "int8"}
Call = Callable[[], Any]


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


def values(*shape: int, device: str, dtype: torch.dtype = BF16) -> torch.Tensor:
    if device == "cuda":
        return torch.randn(shape, device=device, dtype=dtype)
    n = math.prod(shape)
    part = torch.randn(min(n, 1 << 18)).to(dtype)
    out = torch.empty(n, dtype=dtype)
    for first in range(0, n, part.numel()):
        out[first : first + part.numel()] = part[: n - first]
    return out.view(shape)


def typed(*shape: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    if dtype in (FP8, INT8):
        return (values(*shape, device=device, dtype=FP16) * 8).to(dtype)
    return values(*shape, device=device, dtype=dtype)


def empty(*shape: int, device: str, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(*shape, device=device, dtype=dtype)


def numbers(n: int, below: int, device: str) -> torch.Tensor:
    return torch.randint(0, below, (n,), device=device, dtype=torch.int32)


def parts_of(total: int, many: int, device: str) -> torch.Tensor:
    """Where `many` parts of different sizes begin, and where the last ends."""
    cuts = torch.randint(0, total + 1, (many - 1,), generator=torch.Generator().manual_seed(many)).sort()[0]
    return torch.cat([torch.zeros(1), cuts, torch.full((1,), total)]).to(torch.int32).to(device)


def power(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << (n - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def sms() -> int:
    """Multiprocessors of the GPU, or of the emulator in use."""
    active = triton.runtime.driver.active
    return active.utils.get_device_properties(active.get_current_device())["multiprocessor_count"]
