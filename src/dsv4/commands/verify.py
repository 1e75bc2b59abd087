"""`dsv4 verify` runs the suites and prints how many cases passed."""

from __future__ import annotations

import json
import math
import secrets
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import dsv4
from dsv4 import suites
from dsv4.runtime.checks import Backend
from dsv4.suites import Result, Where
from dsv4_command import usage

from . import show


def verify(
    suite: str,
    backend: str,
    arch: str | None,
    json_file: Path | None,
    seed: int | None,
    match: str,
    head_dim: int | None,
    check: bool,
    jobs: int,
    verbose: bool,
) -> None:
    try:
        cases = suites.select(suite, match, head_dim)
        where = Where(cast(Backend, backend), arch, checked=check).resolve()
    except (ValueError, suites.Unavailable) as problem:
        usage.refuse(str(problem))
    if not cases:
        usage.refuse(f"no case of suite {suite} matches {match!r}" + (f" at head dim {head_dim}" if head_dim else ""))
    to_stdout = json_file == Path("-")
    seed = secrets.randbits(31) if seed is None else seed
    out = show.console(stderr=to_stdout)
    checked = ", races checked" if where.backend == "softsm" and where.checked else ""
    out.print(f"{len(cases)} cases on {where}, seed {seed}{checked}")

    def each(result: Result) -> None:
        if verbose:
            out.print(line(result), soft_wrap=True)

    results = show.run_with_progress(cases, where, seed, "verify", jobs, each)
    out.print(summary(results))
    failures(out, results)
    if json_file is not None:
        text = json.dumps(report(results, where, seed, suite), indent=1) + "\n"
        print(text, end="") if to_stdout else json_file.write_text(text)
    raise typer.Exit(show.closing_line(results, stderr=to_stdout))


def line(result: Result) -> str:
    tight = result.tightest
    detail = result.why() if not result.ok else str(tight)
    return f"{show.mark(result.ok)} {escape(str(result.case))}  {escape(detail)}  {result.seconds * 1e3:.1f} ms"


def summary(results: list[Result]) -> Table:
    """Return one row per suite and head dim, with the worst of its cases."""
    table = Table(title="Error against the fp64 oracle, worst case of each group")
    for name in ("suite", "head dim", "cases", "passed", "relative error", "allowance used", "cosine", "seconds"):
        table.add_column(name, justify="left" if name == "suite" else "right")
    ordered = sorted(results, key=lambda r: (list(suites.SUITES).index(r.case.suite), r.case.head_dim))
    for (suite, head_dim), rows in groupby(ordered, key=lambda r: (r.case.suite, r.case.head_dim)):
        group = list(rows)
        passed = sum(result.ok for result in group)
        norms = [check.value for result in group for check in result.checks if check.name.endswith("norm")]
        cosines = [v for v in (result.value("cosine") for result in group) if v is not None]
        used = max((check.used for result in group for check in result.checks), default=math.nan)
        table.add_row(
            suite,
            str(head_dim),
            str(len(group)),
            f"{'[green]' if passed == len(group) else '[bold red]'}{passed}[/]",
            show.number(max(norms, default=None)),
            "-" if math.isnan(used) else f"{used:.0%}",
            f"{min(cosines):.7f}" if cosines else "-",
            f"{sum(result.seconds for result in group):.2f}",
        )
    return table


def failures(out: Console, results: list[Result]) -> None:
    """Return every failure; those with one reason (a kernel that is not there) are one line."""
    reasons: dict[str, list[str]] = {}
    for result in results:
        if not result.ok:
            reasons.setdefault(result.why(), []).append(str(result.case))
    for why, names in list(reasons.items())[:50]:
        cases = names[0] if len(names) == 1 else f"{len(names)} cases, {names[0]} to {names[-1]}"
        out.print(f"[bold red]FAILED[/] {escape(cases)}: {escape(why)}", soft_wrap=True)
    if len(reasons) > 50:
        out.print(f"... and {len(reasons) - 50} more; --json lists all")


def finite(value: float) -> float | None:
    """Replace NaN and infinity, which JSON does not have."""
    return value if math.isfinite(value) else None


def report(results: list[Result], where: Where, seed: int, suite: str) -> dict[str, Any]:
    """Return everything measured, as JSON; docs/verify.md describes it. A value that is not finite is null, and `ok` is
    False then."""
    return {
        "format": 1,
        "dsv4": dsv4.__version__,
        "suite": suite,
        "backend": where.backend,
        "arch": where.arch,
        "seed": seed,
        "torch": torch.__version__,
        "triton": show.version_of("triton"),
        "device": torch.cuda.get_device_name() if where.backend == "cuda" else "cpu",
        "passed": sum(result.ok for result in results),
        "failed": sum(not result.ok for result in results),
        "cases": [
            {
                "name": str(result.case),
                "head_dim": result.case.head_dim,
                "dtype": str(result.case.dtype).removeprefix("torch."),
                "features": sorted(result.case.features),
                "ok": result.ok,
                "error": result.error,
                "seconds": round(result.seconds, 6),
                "checks": [
                    {"name": c.name, "value": finite(c.value), "bound": finite(c.bound), "ok": c.ok}
                    for c in result.checks
                ],
            }
            for result in results
        ],
    }
