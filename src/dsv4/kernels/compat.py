"""One set of names for Triton 3.6 to 3.9, in which Gluon renamed calls one by one. Only what the kernels use."""

from typing import Any

import triton
from triton._C.libtriton import ir
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
from triton.language import core

__all__ = [
    "TRITON_VERSION", "TensorDescriptor", "Value", "aggregate", "async_copy", "barrier", "cp_async",
    "fence_async_shared", "gl", "gluon", "mbarrier", "reinterpret", "reinterpret_as", "store_wait", "tma_add",
    "tma_load", "tma_store", "to_operand", "warpgroup_mma", "warpgroup_mma_wait",
]  # fmt: skip

store_wait = tma.store_wait
TRITON_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])


def _first(namespace, *names: str):
    """Return the attribute with the first of these names that is there, the newest name first.

    By attribute, not by version: the renames came one at a time (3.7 has ``gl.barrier`` but not ``tma.async_load``).
    """
    for name in names:
        if hasattr(namespace, name):
            return getattr(namespace, name)
    raise ImportError(
        f"Triton {triton.__version__}: {namespace.__name__} has none of {', '.join(names)}, "
        "which dsv4's kernels need; tested with Triton 3.6 to 3.9"
    )


tma_load = _first(tma, "async_load", "async_copy_global_to_shared")
tma_store = _first(tma, "async_store", "async_copy_shared_to_global")
cp_async = _first(async_copy, "async_load", "async_copy_global_to_shared")
barrier = _first(gl, "barrier", "thread_barrier")

if hasattr(tma, "async_atomic_add"):
    tma_add = tma.async_atomic_add
else:  # 3.6 has the operation but no name for it

    @gl._core.builtin
    def tma_add(tensor_desc, coord, src, _semantic=None):
        """Add a tile of shared memory to global memory, element by element and in no order."""
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        add = ir.DESCRIPTOR_REDUCE_KIND.ADD
        _semantic.builder.create_async_tma_reduce(add, tensor_desc.handle, coord, src.handle)


# The type of a field that is not an aggregate itself: a number, pointer, descriptor, barrier, known when compiled or
# not. Every kernel has its own mixture of them.
Value: Any = core.base_value
_aggregate = gluon.aggregate if hasattr(gluon, "aggregate") else core._aggregate


def aggregate(cls: Any) -> Any:
    """Gluon's aggregate, with a constructor (which 3.6 requires and 3.9 makes) for fields in order or by name."""

    def __init__(self, *given, **named):
        if len(given) > len(cls.__annotations__):
            raise TypeError(f"{cls.__name__}: got {len(given)} values; accepted: {', '.join(cls.__annotations__)}")
        values = dict(zip(cls.__annotations__, given, strict=False)) | named
        for name, value in values.items():
            setattr(self, name, value if isinstance(value, core.base_value) else core.constexpr(value))

    __init__.__triton_builtin__ = True  # type: ignore[attr-defined]
    cls.__init__ = __init__
    return _aggregate(cls)


if TRITON_VERSION == (3, 8):

    @gluon.jit
    def to_operand(x, like):
        """Round x [.., pairs of columns] fp32 to the type of like, bf16 or fp16. This Triton rounds the values of an
        operand one by one, and ptxas joins them by a PRMT for each pair: 64 a step at head dim 64, with 420 other
        instructions."""
        if like.dtype == gl.bfloat16:
            PAIR: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
        else:
            PAIR: gl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"
        return gl.inline_asm_elementwise(PAIR, "=r,r,r", [x], dtype=like.dtype, is_pure=True, pack=2)
else:

    @gluon.jit
    def to_operand(x, like):
        """Round x fp32 to the type of like, bf16 or fp16."""
        return x.to(like.dtype)


if hasattr(gl.shared_memory_descriptor, "reinterpret"):

    @gluon.jit
    def reinterpret_as(smem, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        """Return the same shared-memory bytes seen with another type, shape and layout."""
        return smem.reinterpret(dtype, shape, layout)
else:  # before 3.9

    @gluon.jit
    def reinterpret_as(smem, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        """Return the same shared-memory bytes seen with another type, shape and layout."""
        return smem._reinterpret(dtype, shape, layout)


@gluon.jit
def reinterpret(smem, shape: gl.constexpr, layout: gl.constexpr):
    """Return the same shared-memory bytes seen with another shape and layout."""
    return reinterpret_as(smem, smem.dtype, shape, layout)
