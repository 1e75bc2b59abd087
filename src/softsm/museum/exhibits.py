"""The types of exhibits and of their programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from softsm.report.diagnostics import Report

WRONG_VALUES = "wrong values"  # the finding of exhibits that are wrong only compared with a reference


@dataclass
class Program:
    """A kernel with its data. Callables among the arguments get the arrays and return tensor maps."""

    text: str
    args: list = field(default_factory=list)
    grid: int = 1
    block: int = 128
    cluster: int = 1
    right: Callable[[list], bool] | None = None  # checks the arrays after the launch
    expect: Callable[[], None] | None = None  # declares what products should read


@dataclass(frozen=True)
class Exhibit:
    number: int
    title: str
    bugs: dict[str, tuple[str, ...]]  # name of each bug -> codes of which one must be found
    make: Callable[[str], Program | Report]  # called with the name of a bug, or '' for the corrected twin


EXHIBITS: dict[int, Exhibit] = {}


def exhibit(number: int, title: str, *codes: str, **bugs: tuple[str, ...]):
    """Registers make(bug). codes: for an exhibit with one bug; bugs: for one with several, by name."""

    def register(make):
        EXHIBITS[number] = Exhibit(number, title, bugs or {"bug": codes}, make)
        return make

    return register


def on_boundary(array: np.ndarray) -> np.ndarray:
    """Returns a copy that starts at a multiple of 128 bytes, as device memory does."""
    raw = np.empty(array.nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 128
    out = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    out[...] = array
    return out
