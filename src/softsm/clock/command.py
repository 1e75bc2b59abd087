"""What `softsm time` does with a program: run it under a timer, print, write timelines."""

from __future__ import annotations

import json
import os
from contextlib import AbstractContextManager
from pathlib import Path

from softsm.clock import report
from softsm.clock.parameters import GPUS, Gpu, gpu_for
from softsm.clock.timer import Timer, timing


def target(arch: str, gpu: str) -> tuple[str, Gpu]:
    """The architecture and the GPU of a command line."""
    if gpu and gpu not in GPUS:
        raise ValueError(f"gpu: got {gpu!r}, accepted are {', '.join(GPUS)}")
    chosen = arch or (GPUS[gpu].arch if gpu else os.environ.get("SOFTSM") or "sm_100a")
    return chosen, gpu_for(gpu or None, chosen)


def timed(gpu: Gpu, clock: float | None) -> AbstractContextManager[Timer]:
    return timing(next(key for key, value in GPUS.items() if value is gpu), clock)


def shown(timers: list[Timer], as_json: bool) -> str:
    if as_json:
        runs = [{"us": round(t.us, 2), "launches": [report.as_dict(p) for p in t.predictions]} for t in timers]
        return json.dumps(runs if len(runs) > 1 else runs[0], indent=1)
    lines = []
    for t in timers:
        lines += [report.text(p) for p in t.predictions] or ["no launches"]
        if len(t.predictions) > 1:
            lines.append(f"{len(t.predictions)} launches in a row: {t.us:.4g} us")
    if len(timers) == 2:
        lines.append(report.compare(timers[0].predictions, timers[1].predictions, timers[0].us, timers[1].us))
    lines.append(report.notice(timers[0].predictions))
    return "\n".join(lines)


def timelines(timer: Timer, folder: Path) -> list[Path]:
    """For each launch the page and the trace of `softsm trace`, with the model's times in nanoseconds."""
    from softsm.clock.timeline import recorded
    from softsm.report.diagnostics import Report
    from softsm.report.page import page

    folder.mkdir(parents=True, exist_ok=True)
    out = []
    for n, p in enumerate(timer.predictions):
        recorder = recorded(p)
        path = folder / f"{n}-{p.kernel}.html"
        title = f"{p.kernel} on {p.gpu.name}: predicted {p.us:.4g} us, in nanoseconds"
        path.write_text(page(recorder, Report(), title))
        out.append(path)
        try:
            from softsm.report.timeline import perfetto_trace
        except ImportError:  # the package perfetto is missing: pip install softsm[trace]
            continue
        if not recorder.slices:  # nothing waits for a barrier, a copy or a product
            continue
        path = path.with_suffix(".perfetto-trace")
        path.write_bytes(perfetto_trace(recorder))
        out.append(path)
    return out
