"""`softsm trace` records and checks a run and writes it as a Perfetto timeline and an HTML report.

with tracing("out") as trace:
    kernel[grid](...)
trace.report, trace.recorder
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from softsm.checks.checking import checking
from softsm.errors import SoftsmError
from softsm.report.diagnostics import Report
from softsm.report.launch_recorder import recording
from softsm.report.page import page
from softsm.report.recording import Recorder

PAGE, TIMELINE = "report.html", "timeline.perfetto-trace"


@dataclass
class Trace:
    folder: Path
    recorder: Recorder
    report: Report
    failure: str = ""
    files: list[Path] = field(default_factory=list)

    def write(self, title: str) -> None:
        """Writes both files; the timeline needs the package perfetto (the extra `trace`)."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.files = [self.folder / PAGE]
        self.files[0].write_text(page(self.recorder, self.report, title, self.failure))
        try:
            from softsm.report.timeline import perfetto_trace
        except ImportError:
            return
        self.files.append(self.folder / TIMELINE)
        self.files[1].write_bytes(perfetto_trace(self.recorder))


@contextlib.contextmanager
def tracing(
    folder: str | Path,
    *,
    title: str = "",
    order: str = "latest",
    seed: int = 0,
    strict: bool = False,
    check: bool = True,
) -> Iterator[Trace]:
    """Records and, unless check=False, checks the launches inside. The report also contains what softsm raises (a
    deadlock, a fault); it is raised again after the report has been written."""
    folder = Path(folder)
    checks = checking(order=order, seed=seed, strict=strict) if check else contextlib.nullcontext(Report())
    with checks as report, recording() as recorder:
        trace = Trace(folder, recorder, report)
        try:
            yield trace
        except SoftsmError as problem:
            trace.failure = str(problem)
            raise
        finally:
            trace.write(title or folder.name)
