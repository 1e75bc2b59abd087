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
from collections import defaultdict

import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language._semantic import GluonSemantic
from triton.runtime.jit import create_function_from_signature

from dsv4.commands import variants
from dsv4.runtime import aot, dispatch
from dsv4.runtime.checks import HEAD_DIMS

TARGET = GPUTarget("cuda", 90, 32)
BACKEND = make_backend(TARGET)
PARTS = (
    (variants.KINDS, variants.Sizes()),
    (("paged", "index"), variants.Sizes(page_size=1, index_rows=2**20)),  # pages that no box of TMA fits, many rows
)


def launches(dtypes):
    for kinds, sizes in PARTS:
        for part in variants.wanted(kinds, HEAD_DIMS, dtypes):
            yield from variants.launches(part, sizes, "sm_90a")


def choices(launch):
    """What a launch fixes at compile time, but for numbers of registers and warps, which no line of a kernel reads, and
    descriptors, whose dtype a pointer has too and whose box is made of sizes."""
    types = [(i, t) for i, x in enumerate(launch.arguments) if not (t := aot.argument_type(x)).startswith("tensordesc")]
    constants = [x for x in launch.constants.items() if not x[0].endswith(("REGS", "reg", "warps"))]
    return frozenset((launch.kernel.__name__, *x) for x in (*types, *constants))


def sizes_between(choices):
    """Those that a smaller and a larger one of the same constant enclose. What is at most 8 is no size but a kind."""
    sizes = defaultdict(list)
    for kernel, name, value in choices:
        if isinstance(name, str) and type(value) is int and value > 8:
            sizes[kernel, name].append(value)
    return {(*key, x) for key, values in sizes.items() for x in values if min(values) < x < max(values)}


def chosen(found, most):
    """A few launches that have together the choices of all, those first that add most; so many of a kernel."""
    by_choices = {choices(x): x for x in found}
    missing, few = set().union(*by_choices), defaultdict(list)
    missing -= sizes_between(missing)
    while missing:
        best = max(by_choices, key=lambda x: len(x & missing))
        missing -= best
        few[by_choices[best].kernel.__name__].append(by_choices[best])
    return [x for of_kernel in few.values() for x in of_kernel[:most]]


def lower(kernel, arguments, constants):
    """triton.compile up to its first IR; aot.compile_kernel begins like this."""
    bind = create_function_from_signature(kernel.signature, kernel.params, BACKEND)
    bound, specialization, options = bind(*arguments, **constants)
    options, signature, constexprs, attributes = kernel._pack_args(BACKEND, constants, bound, specialization, options)
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constexprs, attributes)
    context = ir.context()
    ir.load_dialects(context)
    BACKEND.load_dialects(context)
    functions = BACKEND.get_codegen_implementation(options)
    source.make_ir(TARGET, options, functions, BACKEND.get_module_map(), context)


def names_for_blackwell():
    dispatch.use_aot("anywhere")  # an older Triton plans such launches for files alone
    try:
        found = [x for part in variants.wanted(("v4", "index", "compress"), (512,), ("bf16",))
                 for x in variants.launches(part, variants.Sizes(), "sm_100a")]  # fmt: skip
    finally:
        dispatch.use_aot(None)
    types = [[aot.argument_type(a) for a in x.arguments] for x in found]
    return sorted({aot.variant(x.kernel.__name__, t, x.constants, "sm_100a") for x, t in zip(found, types)})


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
    for x in chosen(launches(dtypes), int(most)):
        try:
            lower(x.kernel, x.arguments, x.constants)
        except Exception as error:  # whatever a compiler raises
            failed[f"{x.kernel.__name__} {x.constants}"] = cause(error)
        lowered.add(x.kernel.__name__)
    names = names_for_blackwell()
    print(json.dumps(dict(triton=triton.__version__, lowered=sorted(lowered), failed=failed, names=names)))


if __name__ == "__main__":
    main()
