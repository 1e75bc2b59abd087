"""`with softsm.checking(...) as report:` - run launches with the checkers on; `softsm.expect_mma` inside it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from softsm import accepted
from softsm.checks.findings import add_failure
from softsm.checks.stream import Stream
from softsm.engine.observer import Observer
from softsm.engine.options import Session, current_options, observing, options
from softsm.report.diagnostics import Report

if TYPE_CHECKING:
    from softsm.checks.products import Expectation


@dataclass(frozen=True, eq=False)
class Checks(Session):
    needs_values = True

    report: Report
    races: bool = True
    strict: bool = False
    expectations: list[Expectation] = field(default_factory=list)
    stream: Stream = field(default_factory=Stream)

    def observer(self, machine) -> Observer:
        from softsm.checks.checker import Checker

        self.report.launches += 1
        if self.races:
            return Checker(machine, self.report, self.strict, self.expectations, self.stream)
        return FailureChecks(machine, self.report)


class FailureChecks(Observer):
    """Reports what stops a kernel, and nothing else."""

    def __init__(self, machine, report: Report):
        self.machine, self.report = machine, report

    def ended(self, failure: BaseException | None) -> None:
        add_failure(self.report, self.machine, failure)


@contextlib.contextmanager
def checking(
    *, races: bool = True, order: str = "latest", seed: int = 0, strict: bool = False, tap: bool = False
) -> Iterator[Report]:
    """Check every launch inside; the report collects the findings.

    Args:
        races: look for races.
        order: when asynchronous operations complete: 'eager', 'latest' or 'random'.
        seed: of the random order.
        strict: follow PTX 9.4 to the letter, and report NaN in operands and boxes outside their tensors.
        tap: record the operands and results of every matrix product in `report.tap.mma`.
    """
    for name, value in (("races", races), ("strict", strict), ("tap", tap)):
        accepted.flag(name, value)
    report = Report()
    if tap:
        from softsm.checks.products import Tap

        report.tap = Tap()
    checks = Checks(report, races, strict)
    with options(order=order, seed=seed), observing(checks):
        try:
            yield report
        finally:
            checks.stream.clear()  # the stream keeps the machine alive, whose options keep `checks` alive


def expect_mma(name: str, a=None, b=None, *, column: int | None = None) -> None:
    """Inside `checking`: declare what the matrix products of the following launches should read. Other elements are
    reported as `operand`.

    Args:
        name: of the product, for the report.
        a, b: expected operands by tile and step: [tiles, steps, rows, k], [tiles, rows, K] or [rows, K].
        column: only products whose accumulator starts this many columns into its allocation.
    """
    from softsm.checks.products import Expectation
    from softsm.memory.tensor_memory import COLUMNS

    checks = next((x for x in current_options().sessions if isinstance(x, Checks)), None)
    if checks is None:
        raise ValueError("expect_mma: got a call outside `with softsm.checking(...)`; accepted: calls inside it")
    if not isinstance(name, str):
        accepted.refuse("name", name, "the product's name")
    if a is None and b is None:
        raise ValueError("a, b: got None; accepted: the expected operands, at least one")
    if column is not None:
        accepted.whole("column", column, 0, COLUMNS - 1)
    checks.expectations.append(Expectation(name, _array(a, "a"), _array(b, "b"), column))


def _array(value, name: str) -> np.ndarray | None:
    if value is None:
        return None
    try:
        if hasattr(value, "detach"):
            value = value.detach().float().numpy()
        given = np.asarray(value)
        array = None if np.iscomplexobj(given) else given.astype(np.float32)
    except (TypeError, ValueError, RuntimeError):  # no numbers; a tensor that is sparse or on another device
        array = None
    if array is None or array.ndim not in (2, 3, 4):
        accepted.refuse(name, value, "numbers in 2 to 4 dimensions, on the CPU")
    return array
