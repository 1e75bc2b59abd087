"""`with softsm.checking(...) as report:` - run launches with the checkers on; `softsm.expect_mma` inside it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from softsm.engine.launch import current_options, options
from softsm.report.diagnostics import Report

if TYPE_CHECKING:
    from softsm.checks.products import Expectation


@dataclass(frozen=True)
class Checks:
    report: Report
    races: bool = True
    strict: bool = False
    expectations: list[Expectation] = field(default_factory=list)
    last: list = field(default_factory=list)  # the checker of the last launch


@contextlib.contextmanager
def checking(
    *, races: bool = True, order: str = "latest", seed: int = 0, strict: bool = False, tap: bool = False
) -> Iterator[Report]:
    """Launches inside are checked. `order` chooses when asynchronous operations complete ('eager', 'latest', 'random'),
    `seed` the random choices; strict=True takes PTX 9.4 to the letter, and looks for NaN in operands and for
    boxes outside
    their tensors; tap=True keeps the operands and results of every tcgen05.mma in `report.tap.mma`. The report
    collects what was found."""
    report = Report()
    if tap:
        from softsm.checks.products import Tap

        report.tap = Tap()
    checks = Checks(report, races, strict)
    with options(order=order, seed=seed, checks=checks):
        try:
            yield report
        finally:
            checks.last.clear()  # it knows a machine, which knows its options, which know `checks`


def expect_mma(name: str, a=None, b=None, *, column: int | None = None) -> None:
    """Inside `checking`: what the products of the following launches should read, by tile and step. Arrays (or tensors)
    [tiles, steps, rows, k], [tiles, rows, K] or [rows, K]; column: only products on the accumulator that starts so many
    columns into its allocation. Other elements are reported as `operand`."""
    from softsm.checks.products import Expectation

    checks = current_options().checks
    if checks is None:
        raise ValueError("expect_mma: it belongs inside `with softsm.checking(...)`")
    checks.expectations.append(Expectation(name, _array(a, "a"), _array(b, "b"), column))


def _array(value, name: str) -> np.ndarray | None:
    if value is None:
        return None
    if hasattr(value, "detach"):
        value = value.detach().float().numpy()
    array = np.asarray(value).astype(np.float32)
    if array.ndim not in (2, 3, 4):
        raise ValueError(f"{name}: got {array.ndim} dimensions, accepted are 2 to 4")
    return array
