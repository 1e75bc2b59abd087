"""Where softsm takes the place of the CUDA driver, of NVRTC and of libcudart: around a program, or when it imports a
package that asks for them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from importlib.abc import MetaPathFinder
from typing import Any

from softsm import accepted
from softsm.doors.driver import cudart, library
from softsm.doors.driver.functions import LINKED, Driver
from softsm.doors.triton.in_use import ARCHITECTURES, DEFAULT_SMS
from softsm.errors import SoftsmError

PACKAGES = ("cuda.bindings", "pycuda", "tilelang")


def loaded(state: Driver) -> Callable[[], None]:
    """Loads the libraries of a program: the driver, and the compiler. Returns what ends that."""
    served = Driver.functions()
    text = library.driver_source(served, LINKED)
    ends = [library.loaded(library.DRIVER, text, [*served, *LINKED], state.serve)]
    ends += [state.compiler.load(), cudart.load(state)]
    return library.all_of(ends)


class OnImport(MetaPathFinder):
    """Makes softsm the driver when a package is imported that asks for it."""

    def __init__(self, state: Driver):
        self.state = state
        self.end: Callable[[], None] = lambda: None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name in PACKAGES:
            sys.meta_path.remove(self)
            try:
                self.end = loaded(self.state)
            except SoftsmError as problem:
                raise ImportError(str(problem)) from None


@contextlib.contextmanager
def driver(arch: str, sms: int = DEFAULT_SMS, *, at_import: bool = False) -> Iterator[Driver]:
    """Give softsm to programs that load libcuda.so.1, through cuda-bindings, cuda.core or PyCUDA.

    Open it before they are imported; with `at_import` nothing is done until they are. What stopped a kernel is raised
    at the end of the block.
    """
    accepted.one_of("arch", arch, tuple(ARCHITECTURES))
    accepted.flag("at_import", at_import)
    state = Driver(arch, accepted.whole("sms", sms, 1, accepted.MOST_SMS))
    hook = OnImport(state)
    if at_import and not any(name in sys.modules for name in PACKAGES):
        sys.meta_path.insert(0, hook)
    else:
        hook.end = loaded(state)
    try:
        yield state
    except Exception as problem:
        if state.failure is not None:
            raise state.failure from problem
        raise
    finally:
        hook.end()
        if hook in sys.meta_path:
            sys.meta_path.remove(hook)
    if state.failure is not None:
        raise state.failure
