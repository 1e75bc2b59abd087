"""Tiny checkpoints, and an engine in a process of its own. `make test-engines` makes the environment."""

import json
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """kind -> (folder of a tiny random checkpoint, what transformers says of its prompt)."""
    made = {}

    def get(kind: str):
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            subprocess.run([sys.executable, HERE / "tiny_checkpoints.py", kind, folder], check=True)
            made[kind] = folder, json.loads((folder / "transformers.json").read_text())
        return made[kind]

    return get


@pytest.fixture(scope="session")
def serve(tmp_path_factory):
    """Run requests through vLLM in a process of its own -> its result."""

    def run(checkpoint, requests: dict, plugin: bool, parts: str = "") -> dict:
        folder = tmp_path_factory.mktemp("engine")
        (folder / "requests.json").write_text(json.dumps(requests))
        environment = os.environ | {"DSV4_VLLM": "1" if plugin else "0", "DSV4_VLLM_PARTS": parts}
        log = folder / "log"
        with log.open("w") as to:
            done = subprocess.run(
                [sys.executable, HERE / "vllm_run.py", checkpoint, folder / "requests.json", folder / "result.json"],
                env=environment, stdout=to, stderr=subprocess.STDOUT,
            )  # fmt: skip
        if done.returncode < 0:
            name = signal.Signals(-done.returncode).name
            pytest.fail(
                f"vLLM was ended by {name} on {platform.machine()}, so the plug-in was not tested. SIGILL: its wheel "
                f"has instructions that this CPU lacks; SIGKILL: memory.\n{log.read_text()[-3000:]}",
                pytrace=False,
            )
        assert done.returncode == 0, log.read_text()[-6000:]
        return json.loads((folder / "result.json").read_text()) | {"log": log.read_text()}

    return run
