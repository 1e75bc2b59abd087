"""What the chapters share: running a kernel in softsm with its checks on, operands, comparison, names."""

from __future__ import annotations

import os
import re

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns when it is unset

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    tcgen05_commit,
    tcgen05_mma,
)
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import softsm

__all__ = [
    "TensorDescriptor", "TensorMemoryLayout", "allocate_tensor_memory", "compare", "descriptor", "fence_async_shared",
    "gl", "gluon", "mbarrier", "normal", "put", "run", "say", "softmax", "tcgen05_commit", "tcgen05_mma", "tma",
    "torch", "warpgroup_mma", "warpgroup_mma_wait",
]  # fmt: skip


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).bfloat16()


def descriptor(x: Tensor, block: list[int], **layout) -> TensorDescriptor:
    """A tensor map whose boxes land in shared memory as the tensor core reads them: the widest swizzle that fits."""
    return TensorDescriptor.from_tensor(x, block, gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16, **layout))


def run(kernel, *arguments, order: str = "latest", grid: tuple[int, ...] = (1,), arch: str = "sm_100a", **constants):
    """Launch in softsm; copies and products complete as late as possible. -> what the checker found."""
    with softsm.use(arch), softsm.checking(order=order) as report:
        kernel[grid](*arguments, num_warps=4, **constants)
    return report


def compare(got: Tensor, want: Tensor, allowed: float = 2.0**-7) -> float:
    """Relative error of the whole result; AssertionError when it is more than allowed."""
    error = ((got.double() - want.double()).norm() / want.double().norm()).item()
    assert error <= allowed, f"relative error {error:.3g}, allowed {allowed:.3g}"
    return error


def softmax(q: Tensor, k: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) in fp64."""
    return torch.softmax(q.double() @ k.double().T * q.shape[1] ** -0.5, -1)


def say(text: str) -> None:
    """Print, with long register lists cut short and without folders."""
    text = re.sub(r"\{(%\w+, %\w+), [^}]*\}", r"{\1, ...}", text)
    print(re.sub(r"(?<=[ (])/\S*/", "", text))


@gluon.jit
def put(pointer, x):
    """A whole [rows, columns] tensor to contiguous global memory."""
    L: gl.constexpr = x.type.layout
    row = gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, L))
    column = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, L))
    gl.store(pointer + row[:, None] * x.shape[1] + column[None, :], x)
