"""Output of the commands: tables on stdout, progress on stderr, and the closing line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from importlib import metadata

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dsv4.suites import Case, Result, Where, run_cases, run_parallel

# Piped output has no width: give tables room instead of cutting names at 80 columns.
WIDE = 120


def console(stderr: bool = False) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else WIDE, highlight=False)


def progress() -> Progress:
    """Show a bar on stderr, or nothing when stderr is not a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )


def run_with_progress(
    cases: list[Case],
    where: Where,
    seed: int,
    label: str,
    jobs: int = 1,
    each: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Run the cases in `jobs` processes, call `each` with every result as it arrives, and return all in order."""
    found: dict[str, Result] = {}
    with progress() as bar:
        task = bar.add_task(label, total=len(cases))
        for result in run_cases(cases, where, seed) if jobs == 1 else run_parallel(cases, where, seed, jobs):
            bar.update(task, description=f"{label}  {result.case}", advance=1)
            found[str(result.case)] = result
            each(result)
    return [found[str(case)] for case in cases]


def version_of(package: str) -> str | None:
    """Return the version of the installed distribution."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2e}"


def mark(ok: bool) -> str:
    return "[green]ok[/]" if ok else "[bold red]FAILED[/]"


def closing_line(results: Iterable[Result], stderr: bool = False) -> int:
    """Print `N passed, N failed` alone on a line; return the exit status, 0 only if something ran and all passed."""
    verdicts = [result.ok for result in results]
    passed = sum(verdicts)
    sys.stdout.flush()
    print(f"{passed} passed, {len(verdicts) - passed} failed", file=sys.stderr if stderr else None, flush=True)
    return 0 if verdicts and all(verdicts) else 1
