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

    def run(checkpoint, requests: dict, plugin: bool | None, parts: str = "") -> dict:
        """plugin None: as the configuration says."""
        switches = {"DSV4_VLLM": "" if plugin is None else str(int(plugin)), "DSV4_VLLM_PARTS": parts}
        return in_a_process("vLLM", "vllm_run.py", tmp_path_factory.mktemp("engine"), checkpoint, requests, switches)

    return run


@pytest.fixture(scope="session")
def serve_sglang(tmp_path_factory):
    """Run requests through SGLang in processes of its own -> its result."""

    def run(checkpoint, requests: dict, plugin: bool, parts: str = "", v4: bool = False) -> dict:
        folder = tmp_path_factory.mktemp("engine")
        switches = {"DSV4_SGLANG": str(int(plugin)), "DSV4_SGLANG_PARTS": parts, "SGLANG_RUN_V4": "1" if v4 else ""}
        return in_a_process("SGLang", "sglang_run.py", folder, checkpoint, requests, switches)

    return run


def in_a_process(engine: str, script: str, folder: Path, checkpoint, requests: dict, switches: dict) -> dict:
    """The script's result and the log; a failure shows the end of the log."""
    (folder / "requests.json").write_text(json.dumps(requests))
    log = folder / "log"
    with log.open("w") as to:
        done = subprocess.run(
            [sys.executable, HERE / script, checkpoint, folder / "requests.json", folder / "result.json"],
            env=os.environ | switches, stdout=to, stderr=subprocess.STDOUT,
        )  # fmt: skip
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
