"""Tiny checkpoints, and an engine in a process of its own. `make test-engines` makes the environment."""

import subprocess
import sys
from pathlib import Path

import pytest
from engines_here import in_a_process
from wanted import Wanted

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """kind -> (folder of a tiny random checkpoint, what transformers says of prompts to it)."""
    made = {}

    def get(kind: str):
        if kind not in made:
            folder = written(kind, tmp_path_factory)
            made[kind] = folder, Wanted(folder)
        return made[kind]

    return get


@pytest.fixture(scope="session")
def fp4_checkpoint(tmp_path_factory) -> Path:
    """The folder of a tiny DeepSeek-V4 with MXFP4 experts."""
    return written("deepseek_v4_fp4", tmp_path_factory)


def written(kind: str, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp(kind)
    subprocess.run([sys.executable, HERE / "tiny_checkpoints.py", kind, folder], check=True)
    return folder


@pytest.fixture(scope="session")
def serve(tmp_path_factory):
    """Run requests through vLLM in a process of its own -> its result."""

    def run(checkpoint, requests: dict, plugin: bool | None, parts: str = "", fp4: bool = False) -> dict:
        """plugin None: as the configuration says. fp4: the experts are compared, too."""
        switches = {"DSV4_VLLM": "" if plugin is None else str(int(plugin)), "DSV4_VLLM_PARTS": parts}
        switches |= {"FP4_CHECKPOINT": str(checkpoint)} if fp4 else {}
        return in_a_process("vLLM", "vllm_run.py", tmp_path_factory.mktemp("engine"), checkpoint, requests, switches)

    return run


@pytest.fixture(scope="session")
def serve_sglang(tmp_path_factory):
    """Run requests through SGLang in processes of its own -> its result."""

    def run(checkpoint, requests: dict, plugin: bool, parts: str = "", v4: bool = False, fp4: bool = False) -> dict:
        """fp4: the experts are compared, too."""
        folder = tmp_path_factory.mktemp("engine")
        switches = {"DSV4_SGLANG": str(int(plugin)), "DSV4_SGLANG_PARTS": parts, "SGLANG_RUN_V4": "1" if v4 else ""}
        switches |= {"FP4_CHECKPOINT": str(checkpoint)} if fp4 else {}
        return in_a_process("SGLang", "sglang_run.py", folder, checkpoint, requests, switches)

    return run
