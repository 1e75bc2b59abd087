"""Native code, compiled in one of two ways and kept in one cache (engine/cache.py).

With `@native(signature)` Numba compiles a Python function, mostly scalar code over raw addresses. `functions(name,
build, names)` returns the addresses of functions that `build` adds to an LLVM module: code for the 32 lanes of a warp
at once. Both compile at the first use.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import config as numba_config
from numba import extending
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import CPUDispatcher
from numba.core.runtime import rtsys
from numba.core.serialize import dumps

from softsm.engine import cache

config: Any = numba_config  # Any: its attributes are defined at run time
_kept: list = []  # engines own the code
intrinsic: Callable[[Callable], Any] = extending.intrinsic  # Any: the result is called without the typing context

# ---------------------------------------------------------------- by Numba


def native(signature: str | None, *, python: bool = False, c: bool = False, effort: int = 2) -> Callable[..., Native]:
    """Compiles a function at its first use, with one signature (None: for the types of its arguments).

    Other native functions can call it; with `python` Python can too; with `c` generated code can, at its `address`.
    Both need wrappers, which cost compile time. `effort` is LLVM's level of optimisation: 3 is for loops over arrays;
    code that only branches and moves is as fast with 2, and compiles in two thirds of the time."""
    kind = Native if python else Inner
    return lambda function: kind(function, signature, python, c, effort)


class Native(CPUDispatcher):
    """A Numba function that knows its signature before it is compiled."""

    __name__: str

    def __init__(self, function: Callable, signature: str | None, python: bool, c: bool, effort: int):
        options = {"nopython": True, "nogil": True, "error_model": "numpy"}
        super().__init__(
            function, targetoptions=options | {"no_cpython_wrapper": not python, "no_cfunc_wrapper": not c}
        )
        self.declared, self.effort, self.called = signature, effort, python or c
        self._cache = _Kept(self)

    def compile(self, signature):
        """Compiles or loads. Numba calls this when another function needs it; the types it passes do not matter."""
        signature = self.declared or signature
        known = self._cache.path(signature).exists()
        # Variants of a function share a name; their link names must differ, whichever process compiled them.
        self.py_func.__qualname__ = f"{self.__name__}_{self._cache.key}"
        # Take Numba's lock first: a thread that holds it may be about to wait for the other one.
        with global_compiler_lock, nullcontext() if known else cache.compiling(self.__name__), optimised(self.effort):
            if self.declared and self.overloads:  # another thread was first
                return self.made().entry_point
            entry = super().compile(signature)
            self.disable_compile(self.declared is not None)
            return entry

    def made(self) -> Any:
        """Returns Numba's CompileResult, whose fields have no types."""
        return next(iter(self.overloads.values()))

    def ready(self) -> None:
        if not self.overloads:
            self.compile(self.declared)

    @property
    def address(self) -> int:
        self.ready()
        made = self.made()
        return made.library.get_pointer_to_function(made.fndesc.llvm_cfunc_wrapper_name)


class Inner(Native):
    """A function without a wrapper for Python, without which Numba would jump to an address that is none."""

    def __call__(self, *_: Any) -> Any:
        raise TypeError(f"{self.__name__} is called from Python: it needs python=True")


def ready(*modules: ModuleType) -> None:
    """Compiles or loads the functions of these modules that callers outside native code use."""
    for module in modules:
        for thing in vars(module).values():
            if isinstance(thing, Native) and thing.called and thing.__module__ == module.__name__:
                thing.ready()


class _Kept(NullCache):
    """The cache from which Numba loads a compiled function and in which it saves it."""

    def __init__(self, function: Native):
        self.function = function

    @functools.cached_property
    def key(self) -> str:
        return cache.key(self.function, self.function.targetoptions, self.function.effort)

    def path(self, signature):
        home = self.function.__module__.rpartition(".")[2]
        return cache.cache_folder() / f"{home}.{self.function.__name__}_{cache.key(self.key, str(signature))}.nbc"

    def load_overload(self, signature, context):
        path = self.path(signature)
        if not path.exists():
            return None
        rtsys.initialize(context)  # loaded code needs only this; the setup for compiling would cost a third of a second
        return CompileResult._rebuild(context, *pickle.loads(path.read_bytes()))

    def save_overload(self, signature, made) -> None:
        cache.write(self.path(signature), dumps(made._reduce()))


@contextmanager
def optimised(effort: int) -> Iterator[None]:
    before = config.OPT
    config.OPT = type(before)(min(effort, before))
    try:
        yield
    finally:
        config.OPT = before


# ---------------------------------------------------------------- by LLVM alone


@functools.cache
def target_machine() -> llvm.TargetMachine:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    features = llvm.get_host_cpu_features().flatten()
    reloc = "static" if target.name.startswith("x86") else "default"  # on x86, LLVM's JIT cannot relocate other code
    return target.create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features, opt=2, reloc=reloc, codemodel="jitdefault", jit=True
    )


def object_code(build: Callable[[ir.Module], None], name: str) -> bytes:
    """Returns the machine code of the module that `build` fills."""
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


def functions(
    name: str, build: Callable[[ir.Module], None], names: list[str], test: Callable[[], None] | None = None
) -> dict[str, int]:
    """Returns the addresses of the functions `names` of the module that `build` fills; calls `test` and compiles if no
    process has done so. `build` is a function, or a partial one with everything that decides what it makes."""
    path = cache.cache_folder() / f"{name}_{cache.key(build, object_code)}.o"
    if not path.exists():
        with cache.compiling(name):
            if not path.exists():
                if test is not None:
                    test()
                cache.write(path, object_code(build, name))
    return addresses(path.read_bytes(), names)


def addresses(code: bytes, names: list[str]) -> dict[str, int]:
    """Loads machine code; LLVM must know its external names (`llvm.add_symbol`)."""
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine())
    engine.add_object_file(llvm.object_file.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _kept.append(engine)
    return {name: engine.get_function_address(name) for name in names}
