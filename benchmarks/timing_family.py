"""What a family of kernels drawn at random is: problems and variants from a random number generator."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import torch
from timing_case import Call, values

BF16, FP16, FP32, FP8, INT8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int8
SHORT = {BF16: "bf16", FP16: "fp16", FP32: "fp32", FP8: "fp8", INT8: "int8"}
Drawn = tuple[str, str, Callable[[str], Call]]  # problem, variant, what makes the call on a device
Family = Callable[[random.Random], Iterator[Drawn]]
FAMILIES: dict[str, Family] = {}


def family(f: Family) -> Family:
    FAMILIES[f.__name__] = f
    return f


def numbers(n: int, below: int, device: str) -> torch.Tensor:
    return torch.randint(0, below, (n,), device=device, dtype=torch.int32)


def typed(*shape: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    if dtype in (FP8, INT8):
        return (values(*shape, device=device, dtype=FP16) * 8).to(dtype)
    return values(*shape, device=device, dtype=dtype)


def shuffled(r: random.Random, *options: tuple) -> Iterator[tuple]:
    """Every choice once, in a random order."""
    every: list[tuple] = [()]
    for o in options:
        every = [(*e, x) for e in every for x in o]
    yield from r.sample(every, len(every))


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
