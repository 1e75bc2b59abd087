"""Makes names and places of C++ programs readable in reports: demangled, short, and outside inlined libraries."""

from __future__ import annotations

import ctypes
import functools
import re

from softsm.ptx.ast import SourceLoc

LONGEST = 40  # characters of template arguments that are shown
# Headers, and Triton's own functions, whose lines are less useful than the place that uses them.
LIBRARIES = re.compile(
    r"(^|/)(include|cccl|libcudacxx)/(cute|cutlass|cub|thrust|cuda|cccl)/|/__clang_cuda|/doors/cuda/include/|/crt/sm_"
    r"|/include/(cooperative_groups|cuda_(awbarrier|pipeline|bf16|fp\d+)|curand|mma\.h)"  # headers of the toolkit
    r"|/include/(device_(atomic_|double_)?functions|sm_\d\d_(atomic_functions|intrinsics))\.h"
    r"|/include/ops/(thread|group)/"  # ThunderKittens
    r"|/triton/(language|experimental/gluon/language)/"
)


def outside(place: SourceLoc) -> SourceLoc:
    """Returns the innermost place that is not in a library, or the innermost of all if every place is."""
    at: SourceLoc | None = place
    while at is not None and LIBRARIES.search(at.file):
        at = at.caller
    return at or place


@functools.lru_cache(maxsize=4096)
def readable(name: str) -> str:
    """Shortens `void f<128, Config<...>>(int*)` to f<128, Config<...>>; leaves other names as they are."""
    if not name.startswith("_Z"):
        return name
    whole = demangled(name)
    if not whole:
        return spelled(name)
    start, depth = 0, 0
    for i, character in enumerate(whole):  # the name ends where its arguments begin
        depth += (character in "<") - (character in ">")
        if depth == 0 and character == " " and "(" not in whole[:i]:
            start = i + 1  # continue after the result type
        if depth == 0 and character == "(" and not whole.startswith("(anonymous", i):
            whole = whole[:i]
            break
    return shortened(whole[start:])


def spelled(name: str) -> str:
    """Reads the plain parts of a mangled name that the library rejects: _ZL11gemm_deviceI... is gemm_device<...>."""
    found = re.match(r"_Z(L|N[KVRO]*)?(?=\d)", name)
    at = found.end() if found else len(name)
    parts: list[str] = []
    while (length := re.compile(r"\d+").match(name, at)) and (not parts or name.startswith("_ZN")):
        end = length.end() + int(length[0])
        parts.append(name[length.end() : end])
        at = end
    return "::".join(parts) + "<...>" * (name[at : at + 1] == "I") if parts else name


@functools.lru_cache(maxsize=4096)
def variable(name: str) -> str:
    """Shortens a function's variable, _ZZ6kernelPfE4tile, to tile; leaves other names as they are."""
    for found in re.finditer(r"E(\d+)", name) if name.startswith("_ZZ") else ():
        end = found.end() + int(found[1])
        if re.fullmatch(r"(_\d+)?", name[end:]) and len(name) >= end:
            return name[found.end() : end]
    return name


def shortened(name: str) -> str:
    head, bracket, rest = name.partition("<")
    return name if len(rest) <= LONGEST or not bracket else f"{head}<{rest[: LONGEST - 3]}...>"


def demangled(name: str) -> str:
    library = _library()
    if library is None:
        return ""
    status = ctypes.c_int()
    at = library.__cxa_demangle(name.encode(), None, None, ctypes.byref(status))
    if status.value or not at:
        return ""
    text = ctypes.string_at(at).decode()
    ctypes.CDLL(None).free(ctypes.c_void_p(at))
    return text


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libstdc++.so.6")
        library.__cxa_demangle.restype = ctypes.c_void_p
    except (OSError, AttributeError):  # a machine without it shows names as they are
        return None
    return library
