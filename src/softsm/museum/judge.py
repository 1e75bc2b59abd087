"""How an exhibit is judged: the bug must be named, the twin must be right and silent in every order."""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass

import numpy as np

from softsm.checks.checking import checking
from softsm.engine.launch import load
from softsm.errors import Fault, SoftsmError
from softsm.museum.exhibits import EXHIBITS, WRONG_VALUES, Exhibit, Program, on_boundary
from softsm.report.diagnostics import Diagnostic, Report

ROOMS = ("operands", "attention", "tensor", "barriers", "memory")
ORDERS = (("eager", 0), ("latest", 0), ("random", 1), ("random", 2))


def run(program: Program, order: str, seed: int = 0) -> Report:
    """One launch at the strict level; what stops it is in the report, and so are wrong values."""
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
    for room in ROOMS:
        importlib.import_module(f"softsm.museum.{room}")
    return dict(sorted(EXHIBITS.items()))
