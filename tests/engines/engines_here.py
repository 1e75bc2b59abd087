"""Which engines are installed, and one in a process of its own. `make test-engines` sets DSV4_ENGINES=1: there, a
missing engine is an error."""

import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def needs(engine: str) -> pytest.MarkDecorator:
    """A mark for tests of an engine that may not be installed."""
    found = importlib.util.find_spec(engine)  # without an origin: a folder of tests that has the name
    missing = (found is None or found.origin is None) and os.environ.get("DSV4_ENGINES") != "1"
    return pytest.mark.skipif(missing, reason=f"{engine} is not installed here; make test-engines installs it")


def in_a_process(engine: str, script: str, folder: Path, checkpoint, requests: dict, switches: dict) -> dict:
    """The script's result and the log; a failure shows the end of the log."""
    (folder / "requests.json").write_text(json.dumps(requests))
    log = folder / "log"
    with log.open("w") as to:
        done = subprocess.run(
            [sys.executable, HERE / script, checkpoint, folder / "requests.json", folder / "result.json"],
            env=os.environ | switches,
            stdout=to,
            stderr=subprocess.STDOUT,
        )
    said = log.read_text()
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        pytest.fail(
            f"{engine} was ended by {name} on {platform.machine()}, so the plug-in was not tested. SIGILL: its wheel "
            "has instructions that this CPU lacks; SIGKILL: memory, or a process of SGLang that failed.\n"
            f"{said[-6000:]}",
            pytrace=False,
        )
    assert done.returncode == 0, said[-6000:]
    return json.loads((folder / "result.json").read_text()) | {"log": said}
