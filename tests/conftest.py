"""Shared by all tests: one thread per worker, compiled engines built before the workers start."""

import os

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


def pytest_sessionstart(session: pytest.Session) -> None:
    """With parallel workers the emulator is compiled here, once, instead of in each of them."""
    if getattr(session.config.option, "numprocesses", None):
        import softsm

        prepare = getattr(softsm, "prepare", None)
        if prepare is not None:
            prepare()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test marked gpu is skipped where there is none, so that a plain pytest is green everywhere."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
