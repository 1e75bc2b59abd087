"""Generated LLVM code: made once per machine, kept on disk as object files, loaded by every process.

`functions(name, text, build)` gives the addresses of the functions that `build` adds to an empty LLVM module. `text`
must hold everything that decides what `build` makes, apart from the vector vocabulary: a hash of it and of the versions
and the CPU is the file's name.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pathlib
import platform
import sys
from collections.abc import Callable, Iterator

import llvmlite
import llvmlite.binding as llvm
from llvmlite import ir

_ENGINE = pathlib.Path(__file__).parent
VOCABULARY = (
    "native",
    "vec",
    "vec_types",
    "vec_rows",
    "vec_ops",
    "vec_math",
    "vec_round",
    "vec_access",
    "vec_small",
    "vec_lanes",
    "vec_tensor",
)
_kept: list = []  # engines own the code


def cache_folder() -> pathlib.Path:
    """$SOFTSM_CACHE, or a folder below the user's cache folder."""
    chosen = os.environ.get("SOFTSM_CACHE")
    if chosen:
        return pathlib.Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    if not base:
        base = pathlib.Path.home() / ("Library/Caches" if platform.system() == "Darwin" else ".cache")
    return pathlib.Path(base) / "softsm"


def made_cache_folder() -> pathlib.Path:
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        why = f"SOFTSM_CACHE: got {folder}, accepted is a folder to write to ({problem.strerror})"
        raise ValueError(why) from None
    return folder


@functools.cache
def _vocabulary() -> bytes:
    """A hash of the vector vocabulary, the versions and the CPU."""
    h = hashlib.sha256()
    for name in VOCABULARY:
        h.update((_ENGINE / f"{name}.py").read_bytes())
    h.update(f"{llvmlite.__version__} {sys.version_info[:2]} {llvm.get_host_cpu_name()}".encode())
    h.update(llvm.get_host_cpu_features().flatten().encode())
    return h.digest()


def source(name: str) -> str:
    """The text of a module of the engine, for `text` below."""
    return (_ENGINE / f"{name}.py").read_text()


def module_source(file: str) -> str:
    return pathlib.Path(file).read_text()


def fingerprint(text: str, *more: bytes) -> str:
    h = hashlib.sha256(_vocabulary())
    for part in (text.encode(), *more):
        h.update(part)
    return h.hexdigest()[:16]


@functools.cache
def target_machine() -> llvm.TargetMachine:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    features = llvm.get_host_cpu_features().flatten()
    reloc = "static" if target.name.startswith("x86") else "default"  # LLVM's JIT cannot relocate other code on x86
    return target.create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features, opt=2, reloc=reloc, codemodel="jitdefault", jit=True
    )


def object_code(build: Callable[[ir.Module], None], name: str) -> bytes:
    """The machine code of the module that `build` fills."""
    machine = target_machine()
    module = ir.Module(name)
    module.triple, module.data_layout = llvm.get_default_triple(), str(machine.target_data)
    build(module)
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=1)
    options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = False
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(parsed, passes)
    return machine.emit_object(parsed)


def functions(name: str, text: str, build: Callable[[ir.Module], None], names: list[str]) -> dict[str, int]:
    """Addresses of the functions `names` of the module that `build` fills; compiled if no process has done so."""
    path = cache_folder() / f"{name}_{fingerprint(text)}.o"
    if not path.exists():
        with compiling(name):
            if not path.exists():
                code = object_code(build, name)
                scratch = path.with_suffix(f".{os.getpid()}.tmp")
                scratch.write_bytes(code)
                scratch.replace(path)
    return addresses(path.read_bytes(), names)


def addresses(code: bytes, names: list[str]) -> dict[str, int]:
    """Load machine code; external names must be known to LLVM (`llvm.add_symbol`)."""
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine())
    engine.add_object_file(llvm.object_file.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _kept.append(engine)
    return {name: engine.get_function_address(name) for name in names}


@contextlib.contextmanager
def compiling(name: str) -> Iterator[None]:
    """One process compiles, the others wait for it; say so."""
    import fcntl

    from rich.console import Console

    folder = made_cache_folder()
    console = Console(stderr=True)
    text = f"softsm: compiling {name} for this CPU (once; kept in {folder})"
    with open(folder / f"{name}.lock", "w") as lock, console.status(text):
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)
