"""What an exhibit is, and how one is judged: the bug must be named, the twin must be right and silent in every
order."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from softsm.errors import Fault, SoftsmError
from softsm.report.diagnostics import Diagnostic, Report

ORDERS = (("eager", 0), ("latest", 0), ("random", 1), ("random", 2))
WRONG_VALUES = "wrong values"  # the finding of exhibits that PTX cannot know to be wrong


@dataclass
class Program:
    """A kernel with its data. Callables among the arguments are made from the arrays: tensor maps."""

    text: str
    args: list = field(default_factory=list)
    grid: int = 1
    block: int = 128
    cluster: int = 1
    right: Callable[[list], bool] | None = None  # of the arrays after the launch
    expect: Callable[[], None] | None = None  # declares what products should read


@dataclass(frozen=True)
class Exhibit:
    number: int
    title: str
    codes: tuple[str, ...]
    make: Callable[[bool], Program]


EXHIBITS: dict[int, Exhibit] = {}


def exhibit(number: int, title: str, *codes: str):
    """Registers make(bug) -> Program (or a function that returns a Report)."""

    def register(make):
        EXHIBITS[number] = Exhibit(number, title, codes, make)
        return make

    return register


def on_boundary(array: np.ndarray) -> np.ndarray:
    """A copy that starts at a multiple of 128 bytes, as device memory does."""
    raw = np.empty(array.nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 128
    out = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    out[...] = array
    return out


def run(program: Program, order: str, seed: int = 0) -> Report:
    """One launch at the strict level; what stops it is in the report, and so are wrong values."""
    from softsm.checks.checking import checking
    from softsm.engine.launch import load

    arrays = [on_boundary(a) if isinstance(a, np.ndarray) else a for a in program.args]
    given = [a(arrays) if callable(a) else a for a in arrays]
    with checking(order=order, seed=seed, strict=True) as report:
        if program.expect is not None:
            program.expect()
        stopped = False
        try:
            load(program.text).launch(program.grid, program.block, given, cluster=program.cluster)
        except Fault:
            stopped = True
        except SoftsmError as error:
            report.add(Diagnostic("parse", str(error)))
            stopped = True
    if program.right is not None and not stopped and not program.right(arrays):
        report.add(Diagnostic(WRONG_VALUES, "the result is not the reference's"))
    return report


@dataclass(frozen=True)
class Verdict:
    exhibit: Exhibit
    problem: str  # empty when it passed
    shown: Diagnostic | None  # the bug's finding

    @property
    def passed(self) -> bool:
        return not self.problem


def judge(item: Exhibit) -> Verdict:
    """Run bug and twin under every order."""
    shown = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for order, seed in ORDERS:
            bug, twin = item.make(True), item.make(False)
            report = bug if isinstance(bug, Report) else run(bug, order, seed)
            named = [d for d in report if d.code in item.codes]
            if named and shown is None:
                shown = named[0]
            if not named and order != "random":
                return Verdict(
                    item, f"{order}: the bug was not named, found {report.codes() or 'nothing'}", shown
                )
            clean = twin if isinstance(twin, Report) else run(twin, order, seed)
            if clean:
                return Verdict(item, f"{order}: the twin is not clean: {next(iter(clean))}", shown)
    return Verdict(item, "", shown)


def gather() -> dict[int, Exhibit]:
    """All exhibits, by number."""
    from softsm.museum import attention, barriers, memory, operands, tensor

    assert attention and barriers and memory and operands and tensor
    return dict(sorted(EXHIBITS.items()))
