"""Stand-ins for libcuda.so.1 and libnvrtc: small libraries that pass every call on to one Python function.

One is made of the names that functions.py or nvrtc.py serves, by the machine's C compiler, and kept in softsm's cache.
Loaded under the name of the real library before a program asks for that name, it is what the program gets.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from softsm.engine.cache import cache_folder
from softsm.errors import SoftsmError

DRIVER = "libcuda.so.1"
SLOTS = 12  # slots of the longest argument list; a shorter one leaves the rest unread
HANDLER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_uint64))

# Arguments are integers and pointers: on x86-64 and aarch64 each has a register, or 8 bytes on the stack.
HEAD = """#include <stdint.h>
#include <stdio.h>
#include <string.h>
typedef uint64_t u64;
static int (*handler)(int, u64 *);
void softsm_serve(int (*h)(int, u64 *)) { handler = h; }
// Without a handler the program is over, and what it may still do is to clean up.
static int pass(int which, u64 *a, int behind) { return handler ? handler(which, a) : behind; }
"""
GONE = 4  # CUDA_ERROR_DEINITIALIZED
CLEANUP = ("Destroy", "Free", "FreeHost", "FreeAsync", "Unload", "PopCurrent", "PushCurrent", "Detach", "Synchronize")
LOOK_UP = """
static int found(const char *name, void **at) {
    *at = 0;
    for (int k = 0; table[k].name; k++) if (!strcmp(table[k].name, name)) *at = table[k].function;
    return *at ? 0 : 500;  // CUDA_ERROR_NOT_FOUND
}
int cuGetProcAddress_v2(const char *name, void **at, int version, u64 flags, int *status);
int cuGetProcAddress(const char *name, void **at, int version, u64 flags) {
    return cuGetProcAddress_v2(name, at, version, flags, 0);
}
int cuGetProcAddress_v2(const char *name, void **at, int version, u64 flags, int *status) {
    int missing = 0;
    if (!strcmp(name, "cuGetProcAddress"))
        *at = version < 12000 ? (void *)cuGetProcAddress : (void *)cuGetProcAddress_v2;
    else missing = found(name, at);
    if (status) *status = missing ? 1 : 0;
    return missing;
}
"""


def source(names: Sequence[str], tail: str = "", suffixes: Sequence[str] = ("",)) -> str:
    """Returns C with a function for each name, with each suffix; then the tail."""
    given = ", ".join(f"u64 a{k}" for k in range(SLOTS))
    listed = ", ".join(f"a{k}" for k in range(SLOTS))
    lines = [HEAD]
    for which, name in enumerate(names):
        behind = 0 if name.endswith(CLEANUP) else GONE
        for suffix in suffixes:
            lines.append(
                f"int {name}{suffix}({given}) {{ u64 a[] = {{{listed}}}; return pass({which}, a, {behind}); }}"
            )
    return "\n".join([*lines, tail])


def driver_source(names: Sequence[str], linked: Sequence[str]) -> str:
    """Returns the driver's library, also with the names that cuda.h makes of these (_v2). cuGetProcAddress finds those
    of `names` alone."""
    entries = ", ".join(f'{{"{name}", (void *){name}}}' for name in names)
    table = f"static struct {{ const char *name; void *function; }} table[] = {{{entries}, {{0, 0}}}};"
    return source([*names, *linked], table + LOOK_UP, ("", "_v2"))


def built(soname: str, text: str) -> Path:
    """Returns the library, building it if necessary."""
    folder = cache_folder() / "driver" / hashlib.sha256(text.encode()).hexdigest()[:32]
    if not (folder / soname).is_file():
        compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
        if compiler is None:
            raise SoftsmError("a program that uses the CUDA driver needs a C compiler on the PATH: cc, gcc or clang")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as made:
            at = Path(made)
            (at / "library.c").write_text(text)
            words = [compiler, "-O1", "-fPIC", "-shared", f"-Wl,-soname,{soname}", "-o", str(at / soname)]
            done = subprocess.run([*words, str(at / "library.c")], capture_output=True, text=True, check=False)
            if done.returncode:
                raise SoftsmError(f"{compiler} failed:\n{done.stderr.rstrip()}")
            folder.mkdir(exist_ok=True)
            os.replace(at / soname, folder / soname)
    return folder / soname


def loaded(soname: str, text: str, names: Sequence[str], serve: Callable[[str, list[int]], int]) -> Callable[[], None]:
    """Load the library under its name, and let it call serve(name, arguments). Returns what ends that: the library
    stays, and answers that the driver is gone."""
    library = ctypes.CDLL(str(built(soname, text)), mode=ctypes.RTLD_GLOBAL)
    if not hasattr(ctypes.CDLL(soname), "softsm_serve"):
        raise SoftsmError(f"another {soname} is loaded already")
    handler = HANDLER(lambda which, a: serve(names[which], a[:SLOTS]))
    library.softsm_serve(handler)

    def end(keep=handler) -> None:
        library.softsm_serve(None)

    return end


def is_another(soname: str) -> bool:
    """Returns whether the process has a library of this name that is not softsm's: torch for CUDA loads its own."""
    try:
        return not hasattr(ctypes.CDLL(soname, mode=os.RTLD_NOLOAD | os.RTLD_LAZY), "softsm_serve")
    except OSError:
        return False


def all_of(ends: Sequence[Callable[[], None]]) -> Callable[[], None]:
    """Returns one function that calls all."""

    def end() -> None:
        for one in ends:
            one()

    return end
