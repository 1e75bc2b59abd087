"""Kernels compiled ahead of time: cubins with JSON metadata, made without a GPU, launched without a compiler.

`dsv4 compile -o DIR` writes them. With ``DSV4_AOT=DIR`` in the environment (or `dispatch.use_aot`) every launch whose
variant is in DIR uses it from there; the others are compiled as usual. Without DSV4_AOT, DIR is the one of the wheel
`dsv4-cubins`, if that is installed (cubins.py). A variant is named by the kernel
and by everything that was fixed at compile time; its file also carries the hash of the kernel sources, and one over the
whole record with the cubin. A file that is incomplete, stale or changed since it was written is rejected by name. The
hash finds accidents; it does not protect against people who can write to the directory.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from dsv4.runtime import dispatch, driver, structs
from dsv4.runtime.cubins import source_hash
from dsv4.runtime.dispatch import ARCHITECTURES, Target
from dsv4.runtime.driver import Function
from dsv4.runtime.program import COMPILED_WITH, Launch, compiled_for

FORMAT = 4


def variant(name: str, arguments: list[str], constants: dict[str, Any], arch: str = "sm_90a") -> str:
    """Return the name of a variant: arguments are type names in order, constants what is fixed at compile time:
    numbers, texts, and formats of rows, whose repr is complete."""
    text = json.dumps([FORMAT, arch, name, arguments, constants], sort_keys=True, default=repr)
    return f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def argument_type(x: Any) -> str:
    """Return the type of a launch argument as it counts for a variant."""
    if hasattr(x, "block_shape"):
        return f"tensordesc {_dtype(x.base)} {list(x.block_shape)}"
    if x is None:
        return "constexpr"
    x = compiled_for(x)
    if isinstance(x, (bool, int)):
        if not -(1 << 31) <= x < 1 << 31:
            raise ValueError(f"an integer argument is {x}; compiled kernels accept integers of 32 bits")
        return "i32"
    if isinstance(x, float):
        return "f32"
    return f"*{_dtype(x)}" + ("" if x.data_ptr() % 16 == 0 else " unaligned")


def argument_types(arguments: Sequence[Any]) -> list[str]:
    """Return the types of all launch arguments, with the members of structs one by one."""
    return [argument_type(x) for x in structs.flat(structs.neutral(arguments))]


def variant_of(launch: Launch, arch: str) -> str:
    return variant(launch.kernel.__name__, argument_types(launch.arguments), launch.constants, arch)


def _dtype(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.")


# ---------------------------------------------------------------------------------------------------- compiling


def source_of(kernel: Any, arguments: list[Any], constants: dict[str, Any], capability: int = 90) -> tuple:
    """Return the arguments of triton.compile for a launch with these arguments: (source, backend, options)."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.runtime.jit import create_function_from_signature

    for param, x in zip(kernel.params, arguments):
        if isinstance(x, int) and not (param.is_constexpr or param.do_not_specialize):
            # Triton compiles one kernel for 1, one for multiples of 16, one for the rest; all would have one name here.
            raise TypeError(f"{kernel.__name__}: its argument {param.name} needs do_not_specialize")
    backend = make_backend(GPUTarget("cuda", capability, 32))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    constants = constants | COMPILED_WITH
    bound, specialization, options = bind(*map(compiled_for, structs.neutral(arguments)), **constants)
    options, signature, constexprs, attributes = kernel._pack_args(backend, constants, bound, specialization, options)
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constexprs, attributes)
    return source, backend, options


def compile_kernel(kernel: Any, arguments: list[Any], constants: dict[str, Any], capability: int = 90) -> Any:
    """Call triton.compile for a launch with these arguments, without a driver. Triton 3.6 and 3.9 accept the same."""
    import triton

    source, backend, options = source_of(kernel, arguments, constants, capability)
    return triton.compile(source, target=backend.target, options=options.__dict__)


def write(directory: Path, kernel: Any, arguments: list[Any], constants: dict[str, Any], arch: str = "sm_90a") -> Path:
    """Compile one variant into DIRECTORY -> its JSON file."""
    from dsv4.runtime.assembler import cubin_of

    capability = next(10 * major + minor for (major, minor), entry in ARCHITECTURES.items() if entry.name == arch)
    compiled = compile_kernel(kernel, arguments, constants, capability)
    cubin = cubin_of(compiled)
    types = argument_types(arguments)
    name = variant(kernel.__name__, types, constants, arch)
    meta = compiled.metadata
    record = {
        "format": FORMAT, "kernel": kernel.__name__, "entry": meta.name, "arch": arch, "arguments": types,
        "constants": json.loads(json.dumps(constants, default=repr)), "threads": meta.num_warps * 32,
        "shared": meta.shared, "clusters": meta.num_ctas,
        "dependent": bool(meta.launch_pdl), "descriptors": [dict(d) for d in meta.tensordesc_meta],
        "triton": _triton_version(), "sources": source_hash(),
    }  # fmt: skip
    record["digest"] = digest(record, cubin)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{name}.cubin").write_bytes(cubin)
    path = directory / f"{name}.json"
    path.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    return path


def digest(record: dict[str, Any], cubin: bytes) -> str:
    """Hash everything that a launch uses: the fields of the record except the digest itself, and the cubin."""
    fields = {name: value for name, value in record.items() if name != "digest"}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode() + b"\0" + cubin).hexdigest()


def _triton_version() -> str:
    import triton

    return triton.__version__


# ---------------------------------------------------------------------------------------------------- loading


def find(kernel: Any, arguments: Sequence[Any], constants: dict[str, Any], target: Target) -> Function | None:
    """Return the compiled variant of a launch on the current device, if the target's directory has it. Raise
    RuntimeError if it does not and nothing else can be launched."""
    refused = dispatch.too_old(target.capability)
    if target.aot is None:
        if refused:
            raise RuntimeError(refused)
        return None
    import torch

    name = variant(kernel.__name__, argument_types(arguments), constants, target.arch)
    if (target.aot / f"{name}.json").exists():
        return loaded(str(target.aot), name, torch.cuda.current_device())
    if target.aot_only:
        raise RuntimeError(f"{target.aot}: has no {name}, and nothing else may be launched")
    if refused:
        raise RuntimeError(f"{target.aot}: has no {name}, and it cannot be compiled here: {refused}")
    return None


@cache
def loaded(directory: str, name: str, device: int) -> Function:
    """Check a variant and load it into the context of a device, where it stays."""
    path = Path(directory) / f"{name}.json"
    record = read(path)
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    cubin = path.with_suffix(".cubin").read_bytes()
    for call in (
        ("cuModuleLoadData", ctypes.byref(module), cubin),
        ("cuModuleGetFunction", ctypes.byref(function), module, record["entry"].encode()),
        ("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED, record["shared"]),
    ):
        driver.call(driver.cuda(), record["kernel"], device, *call)
    assert function.value is not None
    types = tuple("fp32" if kind == "f32" else kind for kind in record["arguments"])
    return Function(
        record["kernel"],
        function.value,
        device,
        record["threads"],
        record["shared"],
        record["clusters"],
        record["dependent"],
        types,
        tuple(record["descriptors"]),
    )


MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


FIELDS = {
    "format": int, "kernel": str, "entry": str, "arch": str, "arguments": list, "constants": dict, "threads": int,
    "shared": int, "clusters": int, "dependent": bool, "descriptors": list, "triton": str, "sources": str,
    "digest": str,
}  # fmt: skip


def read(path: Path) -> dict[str, Any]:
    """Read the record of a variant; a RuntimeError names the file and the error in it."""
    try:
        record = json.loads(path.read_text())
        cubin = path.with_suffix(".cubin").read_bytes()
    except (OSError, ValueError) as why:
        raise RuntimeError(f"{path}: not a compiled kernel of this package: {why}") from why
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise RuntimeError(f"{path}: not a compiled kernel of this package: no record of format {FORMAT}")
    wrong = [name for name, kind in FIELDS.items() if type(record.get(name)) is not kind]
    if wrong or record.keys() != FIELDS.keys():
        names = ", ".join(wrong or sorted(record.keys() - FIELDS.keys()))
        fault = f"missing, unknown or of a wrong type: {names}"
        raise RuntimeError(f"{path}: not a compiled kernel of this package: {fault}")
    named = variant(record["kernel"], record["arguments"], record["constants"], record["arch"])
    if named != path.stem:
        raise RuntimeError(f"{path}: its contents belong to {named}, not to this name")
    if record["sources"] != source_hash():
        raise RuntimeError(f"{path}: stale, compiled from other kernel sources; run dsv4 compile again")
    if record["digest"] != digest(record, cubin):
        raise RuntimeError(f"{path}: it or its cubin was changed after dsv4 compile wrote them")
    return record
