"""Which engines are installed. `make test-engines` sets DSV4_ENGINES=1: there, a missing engine is an error."""

import importlib.util
import os

import pytest


def needs(engine: str) -> pytest.MarkDecorator:
    """A mark for tests of an engine that may not be installed."""
    missing = importlib.util.find_spec(engine) is None and os.environ.get("DSV4_ENGINES") != "1"
    return pytest.mark.skipif(missing, reason=f"{engine} is not installed here; make test-engines installs it")
