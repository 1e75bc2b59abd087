"""One set of names for the Gluon calls that changed between Triton 3.6 and 3.9. sm_100 programs need 3.9 for some."""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    TensorMemoryScalesLayout,
    allocate_tensor_memory,
    tcgen05_commit,
    tcgen05_copy,
    tcgen05_mma,
    tcgen05_mma_scaled,
)
from triton.experimental.gluon.language.nvidia.blackwell import tma as blackwell_tma
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

V36 = triton.__version__.startswith("3.6.")

if V36:
    from triton.experimental.gluon.language.nvidia.blackwell import get_tmem_reg_layout

    tma_load, tma_store = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global
    cp_async = async_copy.async_copy_global_to_shared

    @gluon.constexpr_function
    def register_layout(dtype, shape, layout, warps):
        return get_tmem_reg_layout(dtype, tuple(shape), layout, warps)

    @gluon.jit
    def tmem_load(t):
        L: gl.constexpr = register_layout(t.dtype, t.shape, t.layout, gl.num_warps())
        return t.load(L)

    @gluon.jit
    def tmem_reinterpret(t, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        return t._reinterpret(dtype, shape, layout)
else:
    tma_load, tma_store = tma.async_load, tma.async_store
    cp_async = async_copy.async_load

    @gluon.jit
    def tmem_load(t):
        return t.load()

    @gluon.jit
    def tmem_reinterpret(t, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        return t.reinterpret(dtype, shape, layout)


@gluon.jit
def barriers(N: gl.constexpr):
    """N mbarriers in shared memory."""
    return gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())


@gluon.jit
def put(out_ptr, x):
    """Store a 2-D register tensor, row-major."""
    L: gl.constexpr = x.type.layout
    rows = gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, L))
    columns = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, L))
    gl.store(out_ptr + rows[:, None] * x.shape[1] + columns[None, :], x)


def descriptor(tensor, block, layout=None):
    """Host tensor descriptor with the layout Gluon gives such a block by default."""
    element = {
        "torch.float16": gl.float16,
        "torch.bfloat16": gl.bfloat16,
        "torch.float32": gl.float32,
        "torch.uint8": gl.uint8,
        "torch.float8_e4m3fn": gl.float8e4nv,
    }[str(tensor.dtype)]
    layout = layout or gl.NVMMASharedLayout.get_default_for(list(block), element)
    return TensorDescriptor.from_tensor(tensor, list(block), layout)


__all__ = [
    "V36", "TensorMemoryLayout", "TensorMemoryScalesLayout", "allocate_tensor_memory", "async_copy", "barriers",
    "blackwell_tma", "cp_async", "descriptor", "fence_async_shared", "gl", "gluon", "mbarrier", "put", "tcgen05_commit",
    "tcgen05_copy", "tcgen05_mma", "tcgen05_mma_scaled", "tma", "tma_load", "tma_store", "tmem_load",
    "tmem_reinterpret", "warpgroup_mma", "warpgroup_mma_wait",
]  # fmt: skip
