"""Numba modules: text compiled once per machine.

The text is written to the cache folder under a name hashed from everything that decides its meaning, and compiled by
Numba with explicit signatures and a cache on disk; the second process loads it in a fraction of a second.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pathlib
import sys
from collections.abc import Iterator
from types import ModuleType

from softsm.engine.native import compiling, fingerprint, made_cache_folder


def load(name: str, source: str, depends: tuple[pathlib.Path, ...] = (), effort: int = 3, **names) -> ModuleType:
    """Import generated text as a module, compiling it if this machine has not done so before.

    Numba's cache looks only at the file it compiles, so the file name carries a hash of all that goes in: the text,
    `depends` (further source files), the versions and the CPU. `names` are put into the module before it runs
    (functions of other generated modules, or such modules; the names of these are hashed in). `effort` is LLVM's level
    of optimisation: code that only branches and moves is as quick with 2, and compiled in two thirds of the time."""
    import numba

    used = "".join(f"# {key} from {_home(value)}\n" for key, value in sorted(names.items()))
    stem = f"{name}_{fingerprint(source + used, numba.__version__.encode(), *(p.read_bytes() for p in depends))}"
    folder = made_cache_folder()
    path = folder / f"{stem}.py"
    ready = any((folder / "__pycache__").glob(f"{stem}*.nbi"))
    with contextlib.nullcontext() if ready else compiling(name), optimised(effort):
        if not path.exists():
            scratch = path.with_suffix(f".{os.getpid()}.tmp")
            scratch.write_text(source)
            scratch.replace(path)
        spec = importlib.util.spec_from_file_location(f"softsm_generated.{stem}", path)
        module = importlib.util.module_from_spec(spec)
        module.__dict__.update(names)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def optimised(effort: int) -> Iterator[None]:
    from numba import config

    before = config.OPT
    config.OPT = type(before)(min(effort, before))
    try:
        yield
    finally:
        config.OPT = before


def compiler(signature: str, called: bool = True):
    """Numba with one explicit signature. `called`: from Python too, which takes wrappers that take time to compile."""
    from numba import njit

    return njit(
        signature, cache=True, nogil=True, error_model="numpy", no_cpython_wrapper=not called, no_cfunc_wrapper=True
    )


def _home(value) -> str:
    """The module of a function, or the module itself."""
    return value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
