"""Runs tasks in copies of this process, as many at a time as there are CPUs."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any


def in_copies(tasks: list[Callable[[], Any]], most: int) -> list[Any]:
    """Returns the results of the tasks, each called in a copy of this process; None for a copy that did not finish."""
    results: list[Any] = [None] * len(tasks)
    running: dict[Connection, tuple[int, int]] = {}  # -> task, process
    waiting = list(enumerate(tasks))
    try:
        while waiting or running:
            while waiting and len(running) < most:
                number, task = waiting.pop(0)
                connection, process = start(task)
                running[connection] = number, process
            for connection in [x for x in wait(list(running)) if isinstance(x, Connection)]:
                number, process = running[connection]
                with contextlib.suppress(EOFError):
                    results[number] = connection.recv()
                del running[connection]
                connection.close()
                os.waitpid(process, 0)
    finally:
        for connection, (_, process) in running.items():
            connection.close()
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
    return results


def start(task: Callable[[], Any]) -> tuple[Connection, int]:
    here, there = Pipe(duplex=False)
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads, which the copy does not have
        process = os.fork()
    if process:
        there.close()
        return here, process
    try:
        here.close()
        there.send(task())
        sys.stderr.flush()
    finally:
        os._exit(0)
