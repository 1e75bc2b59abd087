"""Judges an exhibit: softsm must name the bug, and the twin must be right and silent in every order."""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass

import numpy as np

from softsm.checks.checking import checking
from softsm.engine.launch import load
from softsm.errors import Fault, SoftsmError
from softsm.memory.tensor_map import TensorMapWarning
from softsm.museum.exhibits import EXHIBITS, WRONG_VALUES, Exhibit, Program, on_boundary
from softsm.report.diagnostics import Diagnostic, Report

ROOMS = ("operands", "attention", "tensor", "barriers", "memory", "upstream")
ORDERS = (("eager", 0), ("latest", 0), ("random", 1), ("random", 2))


def run(program: Program, order: str, seed: int = 0, strict: bool = True) -> Report:
    """Runs one launch. The report has what stopped it, wrong values, and warnings about tensor maps."""
    arrays = [on_boundary(a) if isinstance(a, np.ndarray) else a for a in program.args]
    with warnings.catch_warnings(record=True) as warned, checking(order=order, seed=seed, strict=strict) as report:
        warnings.simplefilter("always")
        given = [a(arrays) if callable(a) else a for a in arrays]
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
    for warning in warned:
        if issubclass(warning.category, TensorMapWarning):
            report.add(Diagnostic("tensor-map", str(warning.message)))
    if program.right is not None and not stopped and not program.right(arrays):
        report.add(Diagnostic(WRONG_VALUES, "the result is not the reference's"))
    return report


def result(made: Program | Report, order: str, seed: int, strict: bool = True) -> Report:
    return made if isinstance(made, Report) else run(made, order, seed, strict)


@dataclass(frozen=True)
class Verdict:
    exhibit: Exhibit
    problem: str  # empty if the exhibit passed
    shown: tuple[Diagnostic, ...]  # the finding of each bug
    level: str  # what names the bugs: 'default', 'strict', or 'values' if only a reference shows them

    @property
    def passed(self) -> bool:
        return not self.problem


def judge(item: Exhibit) -> Verdict:
    """Runs every bug and the twin under every order."""
    shown: dict[str, Diagnostic] = {}
    level = "default"
    for bug, codes in item.bugs.items():
        for order, seed in ORDERS:
            report = result(item.make(bug), order, seed)
            named = [d for d in report if d.code in codes]
            if named:
                shown.setdefault(bug, named[0])
            elif order != "random":
                problem = f"{order}: {bug} was not named, found {report.codes() or 'nothing'}"
                return Verdict(item, problem, tuple(shown.values()), level)
        found = result(item.make(bug), "latest", 0, strict=False).codes()
        if WRONG_VALUES in codes:
            level = "values"
        elif not set(found) & set(codes):
            level = "strict"
    for order, seed in ORDERS:
        clean = result(item.make(""), order, seed)
        if clean:
            problem = f"{order}: the twin is not clean: {next(iter(clean))}"
            return Verdict(item, problem, tuple(shown.values()), level)
    return Verdict(item, "", tuple(shown.values()), level)


def gather() -> dict[int, Exhibit]:
    """Returns all exhibits, by number."""
    for room in ROOMS:
        importlib.import_module(f"softsm.museum.{room}")
    return dict(sorted(EXHIBITS.items()))
