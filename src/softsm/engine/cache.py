"""The cache of native code, which is compiled once per machine, kept on disk and loaded by every process.

The name of a file contains a hash of everything that decides its content: the CPU, the versions of the compilers, and
what the compiled function means (`key`). A lookup therefore never finds an outdated file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import pathlib
import platform
import sys
import threading
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir

OTHERS = {"numba", "llvmlite", "numpy", *sys.stdlib_module_names}  # packages whose versions stand for their code
# slice: a constant of Python 3.14's code
VALUES = (bool, int, float, str, bytes, slice, np.generic, ir.Type, type(None), type(Ellipsis))


def cache_folder() -> pathlib.Path:
    """Returns $SOFTSM_CACHE, or a folder below the user's cache folder."""
    chosen = os.environ.get("SOFTSM_CACHE")
    if chosen:
        return pathlib.Path(chosen)
    home = pathlib.Path.home() / ("Library/Caches" if platform.system() == "Darwin" else ".cache")
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or home) / "softsm"


def made_cache_folder() -> pathlib.Path:
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        why = f"SOFTSM_CACHE: got {folder}; accepted: a folder to write to ({problem.strerror})"
        raise ValueError(why) from None
    return folder


def write(path: pathlib.Path, data: bytes) -> None:
    """Writes a file atomically: a process that reads it finds all of it or nothing."""
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    scratch.write_bytes(data)
    scratch.replace(path)


@contextlib.contextmanager
def compiling(name: str) -> Iterator[None]:
    """Lets one process compile while the others wait for it; the terminal shows it."""
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


# ---------------------------------------------------------------- what a function means


@functools.cache
def _machine() -> bytes:
    """Returns the CPU and the versions of the compilers."""
    versions = f"{numba.__version__} {llvm.llvm_version_info} {np.__version__} {sys.version_info[:2]}"
    return f"{versions} {llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}".encode()


def key(*things: object) -> str:
    """Returns a hash of what these things mean: values by themselves, functions by their code and everything it names,
    through all functions that can be reached. Comments and line numbers do not count."""
    h = hashlib.sha256(_machine())
    seen: dict[int, tuple[int, object]] = {}  # id -> (number, the thing itself, so that its id is not reused)
    todo = list(things)[::-1]
    while todo:
        thing = todo.pop()
        if isinstance(thing, VALUES):
            said = repr(thing)
        elif id(thing) in seen:
            said = f"number {seen[id(thing)][0]}"
        else:
            seen[id(thing)] = len(seen), thing
            said, parts = _meaning(thing)
            todo.extend(list(parts)[::-1])
        h.update(said.encode() + b"\n")
    return h.hexdigest()[:16]


def _meaning(thing: object) -> tuple[str, Iterable[object]]:
    """Returns (the text of a thing itself, the other things on which its meaning depends)."""
    if isinstance(thing, (tuple, list)):
        return f"{len(thing)}", thing
    if isinstance(thing, dict):
        return f"{len(thing)}", [x for item in thing.items() for x in item]
    if isinstance(thing, (set, frozenset)):
        return repr(sorted(map(repr, thing))), ()
    if isinstance(thing, np.ndarray):
        return f"{thing.dtype} {thing.shape}", (thing.tobytes(),)
    if isinstance(thing, np.dtype):
        return repr(thing), ()
    if isinstance(thing, CodeType):
        return repr((thing.co_code, thing.co_names)), thing.co_consts
    if isinstance(thing, ModuleType):
        return thing.__name__, ()
    if isinstance(thing, functools.partial):
        return "partial", (thing.func, thing.args, thing.keywords)
    inner = getattr(thing, "py_func", None) or getattr(thing, "_defn", None)  # Numba's functions and intrinsics
    if inner is not None:
        return repr(getattr(thing, "declared", None)), (inner,)
    inner = getattr(thing, "__wrapped__", None) or getattr(thing, "fget", None)  # functools, staticmethod; property
    if inner is not None:
        return "wrapper", (inner,)
    kind = type(thing)
    home = getattr(thing, "__module__", None) or kind.__module__
    name = f"{home}.{getattr(thing, '__qualname__', kind.__qualname__)}"
    if home.partition(".")[0] in OTHERS:
        if isinstance(thing, numba.types.Type):
            return f"{name} {thing}", ()
        if callable(thing) or isinstance(thing, threading.local):
            return name, ()
    elif isinstance(thing, FunctionType):
        cells = [cell.cell_contents for cell in thing.__closure__ or ()]
        return "function", (thing.__code__, thing.__defaults__, thing.__kwdefaults__, cells, _named(thing))
    elif isinstance(thing, type):
        members = {k: v for k, v in vars(thing).items() if callable(v) or hasattr(v, "__func__") or hasattr(v, "fget")}
        return name, (list(members), list(members.values()), thing.__bases__)
    elif dataclasses.is_dataclass(thing):
        return name, [getattr(thing, field.name) for field in dataclasses.fields(thing)]
    raise TypeError(f"native code depends on {thing!r}: it has no meaning that could be compared")


def _named(function: FunctionType) -> list[object]:
    """Returns the values of the global names in a function, and the attributes that it may use of modules."""
    names: dict[str, None] = {}
    codes = [function.__code__]
    for code in codes:
        names.update(dict.fromkeys(code.co_names))
        codes += [x for x in code.co_consts if isinstance(x, CodeType)]
    found = [function.__globals__[name] for name in names if name in function.__globals__]
    modules = [m for m in found if isinstance(m, ModuleType) and m.__name__.partition(".")[0] not in OTHERS]
    return found + [vars(m)[name] for m in modules for name in names if name in vars(m)]
