"""`with softsm.checking(...) as report:` - run launches with the checkers on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from softsm.engine.launch import options
from softsm.report.diagnostics import Report


@dataclass(frozen=True)
class Checks:
    report: Report
    races: bool = True
    strict: bool = False


@contextlib.contextmanager
def checking(*, races: bool = True, order: str = "latest", seed: int = 0, strict: bool = False) -> Iterator[Report]:
    """Launches inside are checked. `order` chooses when asynchronous operations complete ('eager', 'latest', 'random'),
    `seed` the random choices; strict=True takes PTX 9.4 to the letter. The report collects what was found."""
    report = Report()
    with options(order=order, seed=seed, checks=Checks(report, races, strict)):
        yield report
