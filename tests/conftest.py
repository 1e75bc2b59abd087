"""Shared by all tests: one thread per worker, compiled engines built before the workers start."""

import contextlib
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import settings

settings.register_profile("dsv4", deadline=None, max_examples=40, print_blob=True)
settings.load_profile("dsv4")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        # The workers are the parallelism; more threads than cores only get in each other's way.
        torch.set_num_threads(1)
        os.environ["OMP_NUM_THREADS"] = "1"


NOTHING = """
.version 8.7
.target sm_100a
.address_size 64
.visible .entry nothing() { ret; }
"""


HALF = """
from softsm.engine import interpreter
interpreter.lane_operation(True), interpreter.spans_module(), interpreter.lane_operation(False)
"""


def pytest_sessionstart(session: pytest.Session) -> None:
    """With parallel workers the emulator is compiled here, once, instead of in each of them; by two processes."""
    if not getattr(session.config.option, "numprocesses", None):
        return
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", HALF], env=env, stderr=subprocess.DEVNULL):
        with contextlib.suppress(Exception):  # a broken emulator is reported by its own tests
            import softsm

            softsm.load(NOTHING).launch(grid=1, block=32)
            with softsm.checking(races=True):
                softsm.load(NOTHING).launch(grid=1, block=32)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test marked gpu is skipped where there is none, so that a plain pytest is green everywhere."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
