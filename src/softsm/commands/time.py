"""`softsm time` runs a program under a timer, prints the predictions and writes timelines."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from softsm import __version__
from softsm.commands.program import OWN
from softsm.errors import SoftsmError
from softsm.ptx.cplusplus import readable
from softsm.timing_model import compare, report
from softsm.timing_model.follow import CannotFollow
from softsm.timing_model.parameters import GPUS, Gpu, gpu_for
from softsm.timing_model.sass import ToolError
from softsm.timing_model.timer import Timer, timing

SCHEMA = "softsm.time/1"  # docs/reports.md; removing a field or changing its meaning needs another number

NO_LAUNCH = "no time: no kernel was launched"

STOPPED = """stopped with this error: launches after it have no time. If it was a check of results: while a program is
timed, some CTAs of each grid run and products are not computed, so leave the check out (--values computes products,
which helps where a grid has one CTA)."""

PARTLY = """If softsm check finds nothing: while a program is timed, some CTAs of each grid run and products are not
computed, so what a launch reads of an earlier one is incomplete. Time such a launch alone, with inputs of its own."""


def target(arch: str, gpu: str) -> tuple[str, Gpu]:
    """Returns the architecture and the GPU of a command line."""
    if gpu and gpu not in GPUS:
        raise ValueError(f"gpu: got {gpu!r}; accepted: {', '.join(GPUS)}")
    chosen = arch or (GPUS[gpu].arch if gpu else os.environ.get("SOFTSM") or "sm_100a")
    return chosen, gpu_for(gpu or None, chosen)


@contextmanager
def timed(gpu: Gpu, clock: float | None, values: bool) -> Iterator[Timer]:
    """Times a program, whose launches without a prediction are left out."""
    with timing(next(key for key, value in GPUS.items() if value is gpu), clock, values=values) as timer:
        timer.raises = False
        yield timer


@dataclass
class End:
    """How a program ended, in words."""

    words: str = ""
    failed: bool = False


@contextmanager
def ending(file: Path) -> Iterator[End]:
    """Catches whatever ends the program, so that the launches before it keep their times."""
    end = End()
    try:
        yield end
    except SystemExit as done:
        end.failed = bool(done.code)
        end.words = f"{file} ended with status {done.code}" if done.code else ""
    except SoftsmError as problem:
        why = "" if isinstance(problem, (CannotFollow, ToolError)) else f"\n{PARTLY}"
        end.words, end.failed = f"{file}: no time: {problem}{why}", True
    except OWN:
        raise
    except Exception as problem:
        frames = problem.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename != str(file):
            frames = frames.tb_next
        shown = "".join(traceback.format_exception(problem.with_traceback(frames)))
        end.words, end.failed = f"{shown}{file} {STOPPED}", True


def expect_launches(timer: Timer, end: End) -> None:
    """A program without launches has no time, whatever it was meant to launch."""
    if not (timer.predictions or timer.left_out or end.words):
        end.words, end.failed = NO_LAUNCH, True


def shown(timers: list[Timer], ends: list[End], as_json: bool) -> str:
    if as_json:
        runs = [
            {
                "us": round(t.us, 2),
                "launches": [report.as_dict(p) for p in t.predictions],
                "left_out": t.left_out,
                "failure": end.words or None,
            }
            for t, end in zip(timers, ends)
        ]
        data = {"runs": runs, **compare.as_dict(*_both(timers))} if len(timers) == 2 else runs[0]
        return json.dumps({"schema": SCHEMA, "softsm": __version__, **data}, indent=1)
    lines = []
    for t in timers:
        lines += launches([report.text(p) for p in t.predictions])
        lines += [f"no time: {why}" for why in dict.fromkeys(t.left_out)]
        if len(t.predictions) > 1:
            without = f" without {len(t.left_out)} that have no time" if t.left_out else ""
            lines.append(f"{len(t.predictions)} launches in a row{without}: {t.us:.4g} us")
    if len(timers) == 2:
        lines.append(compare.compare(*_both(timers)))
    lines.append(report.notice(timers[0].predictions))
    return "\n".join(lines)


def _both(timers: list[Timer]) -> tuple[list, list, float, float]:
    return timers[0].predictions, timers[1].predictions, timers[0].us, timers[1].us


def launches(texts: list[str]) -> list[str]:
    """Returns each text once, with the numbers of its launches where there are several."""
    if len(texts) < 2:
        return texts
    numbers: dict[str, list[int]] = {}
    for n, text in enumerate(texts, 1):
        numbers.setdefault(text, []).append(n)
    return [f"launch{'es' * (len(found) > 1)} {ranges(found)}: {text}" for text, found in numbers.items()]


def ranges(numbers: list[int]) -> str:
    """Formats numbers as `1, 3 to 5`."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in parts)


def timelines(timer: Timer, folder: Path) -> list[Path]:
    """Writes the page and the trace of `softsm trace` for each launch, with the model's times in nanoseconds."""
    from softsm.report.diagnostics import Report
    from softsm.report.page import page
    from softsm.report.predicted import recorded

    folder.mkdir(parents=True, exist_ok=True)
    out = []
    for n, p in enumerate(timer.predictions):
        recorder = recorded(p)
        path = folder / f"{n}-{p.kernel}.html"
        title = f"{readable(p.kernel)} on {p.gpu.name}: predicted {p.us:.4g} us, in nanoseconds"
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
