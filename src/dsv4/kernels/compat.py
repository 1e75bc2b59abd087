"""One set of names for Triton 3.6 and for 3.9 and newer, where Gluon renamed calls. Only what the kernels use."""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = [
    "TRITON_VERSION", "TensorDescriptor", "async_copy", "barrier", "cp_async", "fence_async_shared", "gl", "gluon",
    "mbarrier",
    "reinterpret", "reinterpret_as", "tma_load", "warpgroup_mma", "warpgroup_mma_wait",
]  # fmt: skip

TRITON_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])

if TRITON_VERSION < (3, 9):
    tma_load = tma.async_copy_global_to_shared
    cp_async = async_copy.async_copy_global_to_shared
    barrier = gl.thread_barrier

    @gluon.jit
    def reinterpret_as(smem, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        """The same shared-memory bytes seen with another type, shape and layout."""
        return smem._reinterpret(dtype, shape, layout)
else:
    tma_load = tma.async_load
    cp_async = async_copy.async_load
    barrier = gl.barrier

    @gluon.jit
    def reinterpret_as(smem, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        """The same shared-memory bytes seen with another type, shape and layout."""
        return smem.reinterpret(dtype, shape, layout)


@gluon.jit
def reinterpret(smem, shape: gl.constexpr, layout: gl.constexpr):
    """The same shared-memory bytes seen with another shape and layout."""
    return reinterpret_as(smem, smem.dtype, shape, layout)
