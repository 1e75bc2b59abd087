"""Every Hopper kernel through the front end of the Triton at hand: `python front_end.py MOST DTYPE ...` prints, as
JSON, which kernels were lowered and what failed; and the names of the files that hold Blackwell's.

The front end turns a kernel's Python into Triton's IR: it knows the language, and differs most between versions of
Triton. It takes a third of a second a kernel, the rest of the compiler ten times as long. `dsv4 compile` knows hundreds
of variants; of each kernel as many are lowered as it takes to meet every value of every compile-time constant and every
type of every argument once, not every combination; of sizes (head dims, keys of a tile) the least and the greatest. At
most MOST of each kernel, those first that differ most.
"""

# ruff: noqa: E402
import gc

if __name__ == "__main__":
    gc.disable()  # a tenth of the time: nothing here is garbage for long, and the process ends soon

import json
import math
import sys

import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.experimental.gluon.language._semantic import GluonSemantic

from dsv4.commands import variants
from dsv4.runtime import aot, dispatch
from dsv4.runtime.checks import HEAD_DIMS

TARGET = GPUTarget("cuda", 90, 32)
BACKEND = make_backend(TARGET)


def launches(dims, dtypes):
    for kinds, sizes in variants.EVERYTHING:
        for part in variants.wanted(kinds, dims, dtypes):
            yield from variants.launches(part, sizes, "sm_90a")


def lower(launch):
    """triton.compile up to its first IR."""
    source, _, options = aot.source_of(launch.kernel, launch.arguments, launch.constants)
    context = ir.context()
    ir.load_dialects(context)
    BACKEND.load_dialects(context)
    functions = BACKEND.get_codegen_implementation(options)
    source.make_ir(TARGET, options, functions, BACKEND.get_module_map(), context)


def names_for_blackwell():
    dispatch.use_aot("anywhere")  # an older Triton plans such launches for files alone
    try:
        found = [
            x
            for part in variants.wanted(("v4", "index", "compress"), (512,), ("bf16",))
            for x in variants.launches(part, variants.Sizes(), "sm_100a")
        ]
    finally:
        dispatch.use_aot(None)
    return sorted({aot.variant_of(x, "sm_100a") for x in found})


def whole_views_only():
    """A view of shared memory with another type has as many bytes, as Triton 3.8 alone demands."""
    view = GluonSemantic.memdesc_reinterpret

    def checked(self, memory, dtype, shape, layout):
        bits = [math.prod(memory.shape) * memory.dtype.primitive_bitwidth, math.prod(shape) * dtype.primitive_bitwidth]
        if bits[0] != bits[1]:
            raise ValueError(f"{memory.dtype} {memory.shape} seen as {dtype} {shape}: {bits[0]} and {bits[1]} bits")
        return view(self, memory, dtype, shape, layout)

    GluonSemantic.memdesc_reinterpret = checked


def cause(error):
    """The innermost error: where in which function, and why."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


def main():
    lowered, failed = set(), {}
    whole_views_only()
    most, *dtypes = sys.argv[1:]
    dims = HEAD_DIMS if int(most) > 1 else (min(HEAD_DIMS), max(HEAD_DIMS))  # the others add no kernel
    for x in variants.representative(launches(dims, dtypes), int(most)):
        try:
            lower(x)
        except Exception as error:  # whatever a compiler raises
            failed[f"{x.kernel.__name__} {x.constants}"] = cause(error)
        lowered.add(x.kernel.__name__)
    names = names_for_blackwell()
    print(json.dumps(dict(triton=triton.__version__, lowered=sorted(lowered), failed=failed, names=names)))


if __name__ == "__main__":
    main()
