"""The same cases in several processes: an emulated kernel keeps one core busy for seconds."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

import torch

from .case import Case, Result, Where, run_case


def run_parallel(cases: list[Case], where: Where, seed: int, jobs: int) -> Iterator[Result]:
    """Yield results as they arrive, not in the order of the cases. Only cases of the named suites: others cannot be
    sent."""
    from . import SUITES

    known = {str(case) for suite in {case.suite for case in cases} for case in SUITES[suite]()}
    unknown = [str(case) for case in cases if str(case) not in known]
    if unknown:
        raise ValueError(f"cases: got {unknown[0]}; accepted in several processes: cases of a suite")
    by_name = {str(case): case for case in cases}
    # A process that has used torch's thread pool must not be forked.
    context = multiprocessing.get_context("spawn")
    threads = max(1, (os.cpu_count() or 1) // jobs)
    with ProcessPoolExecutor(jobs, context, initializer=begin, initargs=(threads,)) as pool:
        waiting = {pool.submit(work, case.suite, str(case), where, seed): str(case) for case in cases}
        for done in as_completed(waiting):
            case = by_name[waiting[done]]
            try:
                yield replace(done.result(), case=case)
            except BrokenProcessPool as died:  # a crash loses the cases that had not finished
                yield Result(case, [], f"its process died: {died}", 0.0)


def begin(threads: int) -> None:
    """Begin a process. The cores are shared out already: torch has its share, and softsm does not divide a launch
    further.
    """
    torch.set_num_threads(threads)
    os.environ.setdefault("SOFTSM_PROCESSES", str(threads))


def work(suite: str, name: str, where: Where, seed: int) -> Result:
    """Run in the other process. The case is found again by name; its maker does not travel."""
    from . import SUITES

    (case,) = [case for case in SUITES[suite]() if str(case) == name]
    result = run_case(case, where, seed)
    return replace(result, case=Case(case.suite, case.name, make=None))  # type: ignore[arg-type]
