"""`softsm check` runs a program under several orders of completion and shows each finding once, with its orders."""

from __future__ import annotations

import contextlib
import json
import os
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from softsm import __version__
from softsm.checks.checking import checking
from softsm.commands.copies import in_copies
from softsm.commands.program import OWN
from softsm.engine.options import options
from softsm.engine.processes import processes
from softsm.errors import SoftsmError
from softsm.report.codes import depth, fix
from softsm.report.diagnostics import Diagnostic, Party, launches

SCHEMA = "softsm.check/1"  # docs/reports.md; removing a field or changing its meaning needs another number
NO_LAUNCH = "no kernel was launched"
ALL = (("latest", 0), ("eager", 0), ("random", 0), ("random", 1))


@dataclass
class Found:
    diagnostic: Diagnostic
    orders: list[str]
    again: int  # occurrences at other PTX lines, between the same source lines


@dataclass
class Summary:
    """The findings of all runs. `failed`: there is a finding, the program itself failed, or nothing was checked."""

    seed: int
    strict: bool
    findings: dict[tuple, Found] = field(default_factory=dict)
    warnings: dict[tuple, Diagnostic] = field(default_factory=dict)
    failures: dict[str, list[str]] = field(default_factory=dict)  # text -> orders
    launches: int = 0  # launches of the first run
    orders: list[str] = field(default_factory=list)
    over: bool = False

    @property
    def failed(self) -> bool:
        return bool(self.findings or self.failures)

    def end(self) -> None:
        """Fails a program that launches no kernel, which would pass whatever its kernels do: the wrong file, a
        missing argument, or a library that took its path for CPUs."""
        if not (self.launches or self.findings or self.failures):
            self.failures[NO_LAUNCH] = list(self.orders)

    def runs(self, order: str) -> Iterator[tuple[str, int]]:
        for name, number in ALL if order == "all" else [(order, 0)]:
            if not self.over:
                yield name, self.seed + number

    def all(self, order: str, one: Callable[[str, int], None], apart: bool) -> None:
        """Executes all runs by `one`, which calls `run`. apart: the runs after the first, which may have ended them
        all, execute in copies of this process; their findings are merged in the order of the runs."""
        runs = self.runs(order)
        for run in runs:
            one(*run)
            if apart and processes() > 1 and hasattr(os, "fork"):
                break
        rest = list(runs)
        for run, found in zip(rest, in_copies([partial(self.apart, one, run) for run in rest], processes())):
            if found is None:
                one(*run)
            else:
                self.take(found)
        self.end()

    def apart(self, one: Callable[[str, int], None], run: tuple[str, int]) -> Summary:
        """Returns what one run finds; called in a copy of this process."""
        self.findings, self.warnings, self.failures = {}, {}, {}
        with options(processes=1):
            one(*run)
        return self

    def take(self, other: Summary) -> None:
        self.orders.append(other.orders[-1])
        self.launches = max(self.launches, other.launches)
        for key, found in other.findings.items():
            self.findings.setdefault(key, replace(found, orders=[])).orders.extend(found.orders)
        for text, orders in other.failures.items():
            self.failures.setdefault(text, []).extend(orders)
        for key, warning in other.warnings.items():
            self.warnings.setdefault(key, warning)

    @contextlib.contextmanager
    def run(self, order: str, seed: int, frames_of: str = "") -> Iterator[None]:
        """Runs the program once. Only the first run shows what it prints. An exception of the program ends the first
        run and all others; an error that stops a kernel is a finding, and the other orders go on."""
        name = f"{order} (seed {seed})" if order == "random" else order
        first = not self.orders
        self.orders.append(name)
        with contextlib.ExitStack() as stack:
            if not first:
                stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
            report = stack.enter_context(checking(order=order, seed=seed, strict=self.strict))
            try:
                yield
            except SoftsmError as problem:
                if not any(d.raised for d in report):  # raised while a kernel was loaded
                    self.fail(str(problem), name)
                    self.over = True
            except SystemExit as end:
                if end.code not in (None, 0):
                    self.fail(f"the program ended with status {end.code}", name)
            except OWN:
                raise
            except Exception as problem:
                self.fail(own_traceback(problem, frames_of), name)
                self.over = first
        self.launches = max(self.launches, report.launches)
        again = report.again()
        self.over |= "step-budget" in report.codes()  # another order would take as long
        for i, diagnostic in enumerate(report):
            found = self.findings.setdefault(diagnostic.key(), Found(diagnostic, [], again.get(i, 0)))
            if name not in found.orders:
                found.orders.append(name)
        for warning in report.warnings:
            self.warnings.setdefault(warning.key(), warning)

    def fail(self, text: str, order: str) -> None:
        self.failures.setdefault(text.rstrip(), []).append(order)

    def ordered(self) -> list[Found]:
        """Returns causes before their effects."""
        return sorted(self.findings.values(), key=lambda f: depth(f.diagnostic.code))

    def json(self, file: Path) -> str:
        data = {
            "schema": SCHEMA,
            "softsm": __version__,
            "file": str(file),
            "status": "failed" if self.failures else "findings" if self.findings else "clean",
            "level": "strict" if self.strict else "default",
            "orders": self.orders,
            "launches": self.launches,
            "findings": [{**as_data(f.diagnostic), "orders": f.orders, "again": f.again} for f in self.ordered()],
            "warnings": [as_data(warning) for warning in self.warnings.values()],
            "failures": [{"text": text, "orders": orders} for text, orders in self.failures.items()],
        }
        return json.dumps(data, indent=1)

    def __str__(self) -> str:
        lines = []
        for found in self.ordered():
            lines.append(str(found.diagnostic))
            if found.again:
                lines.append(f"  and {found.again} more between the same source lines")
            if len(found.orders) < len(self.orders):
                lines.append(f"  only under: {', '.join(found.orders)}")
        for text, orders in self.failures.items():
            if text != NO_LAUNCH:
                lines.append(f"the program failed under: {', '.join(orders)}\n{text}")
        lines += [f"warning: {w}" for w in self.warnings.values()]
        count = len(self.findings)
        total = "nothing found" if not count else "1 finding" if count == 1 else f"{count} findings"
        level = "strict level" if self.strict else "default level"
        if count or not self.failures:
            lines.append(f"{total} in {launches(self.launches)}; {level}; orders {', '.join(self.orders)}")
        if self.failures:
            lines.append(f"not checked: {NO_LAUNCH if NO_LAUNCH in self.failures else 'the program failed'}")
        return "\n".join(lines)


def own_traceback(problem: Exception, file: str) -> str:
    """Returns the traceback that `python file` would print, without the frames that led to the program."""
    frames = problem.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != file:
        frames = frames.tb_next
    return "".join(traceback.format_exception(problem.with_traceback(frames)))


def as_data(diagnostic: Diagnostic) -> dict[str, Any]:
    return {
        "code": diagnostic.code,
        "message": diagnostic.message,
        "fix": diagnostic.fix or fix(diagnostic.code),
        "stopped": diagnostic.raised,
        "parties": [party_as_data(party) for party in diagnostic.parties],
    }


def party_as_data(party: Party) -> dict[str, Any]:
    found = re.fullmatch(r"(.+?):(\d+)(?: in (.+?))?(?:, called at (.+))?", party.source)
    place: dict[str, Any] | None = None
    if found:
        callers = [x.rpartition(":") for x in (found[4] or "").split(", ") if x]
        called = [{"file": file, "line": int(line)} for file, _, line in callers]
        place = {"file": found[1], "line": int(found[2]), "function": found[3] or "", "called_at": called}
    return {
        "who": party.who,
        "what": party.what,
        "source": place,
        "ptx": {"line": party.ptx_line, "instruction": party.instruction} if party.ptx_line else None,
    }
