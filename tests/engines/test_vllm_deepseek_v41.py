"""Layers of DeepSeek-V4.1 in vLLM on a CPU: vllm_v41_layers.py says what is vLLM's and what is compared. vLLM has no
whole model of it for CPUs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from engines_here import needs

pytestmark = [needs("vllm"), pytest.mark.slow, pytest.mark.timeout(3600)]

# bytes of a row in the window, of a compressed row and of an index key, and what pages are a multiple of
ROWS = {
    "vllm": (584, 584, 132, 576),
    "hopper": (584, 584, 132, 576),
    "fp8": (528, 528, 68, 512),
    "own": (528, 288, 68, 512),
}


@pytest.mark.parametrize("kind", ROWS)
def test_prompts_and_decodes_of_six_layers(kind, tmp_path):
    """With the plug-in and without. Window alone, pairs, a row for each token, readers of another layer's rows, a
    choice among kept blocks: rows in the pages against fp64, outputs against the oracle. Two requests, three steps:
    prompts, both, decodes."""
    script, result = Path(__file__).with_name("vllm_v41_layers.py"), tmp_path / "result.json"
    done = subprocess.run([sys.executable, script, kind, result], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-6000:]
    found = json.loads(result.read_text())
    window, compressed, keys, alignment = ROWS[kind]
    wanted = {f"model.layers.{n}.attn.swa_cache": [window, 32, alignment] for n in range(6)}
    for n, rows in ((1, 32), (3, 64)):
        wanted[f"model.layers.{n}.attn"] = [compressed, rows, alignment]
        wanted[f"model.layers.{n}.attn.indexer.k_cache"] = [keys, rows, alignment]
    assert found["pages"] == wanted
    kernels, calls = {}, {"prefill": 12, "decode": 12, "insert": 18, "index prefill": 4, "index decode": 4}
    if kind == "vllm":  # without the plug-in
        kernels = {f"flash_mla_{name}": 12 for name in ("sparse_fwd", "with_kvcache")}
        kernels, calls = kernels | {"insert": 18, "prompt_scores": 4, "decode_scores": 4}, {}
    elif kind != "hopper":
        calls |= {"compress": 6, "index keys": 6}
    assert found["calls"] == calls and found["kernels"] == kernels
