"""`dsv4 hub`'s build as transformers takes it: loaded by the `kernels` package, with LOCAL_KERNELS in place of the hub;
continuous batching and `transformers serve` on a CPU with it, models with full and sliding layers among them. The calls
are counted, and the tokens are those of eager attention. Without `kernels`, the build itself is tested in
tests/dsv4/test_hub.py.

vLLM needs a transformers below 5.20. The oldest one that dsv4 supports and the newest are next to the environment, each
with what goes with it: make test-engines puts them there."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import served
import tiny_dense
import torch
from agreement import assert_right
from batches import PROMPTS, alone, generated
from engines_here import needs

from dsv4 import reference
from dsv4.commands import hub

pytestmark = [needs("kernels"), pytest.mark.slow]

NAME = "dsv4/dsv4-flash"
VERSIONS = ("5.17.0", "5.22.2")
TESTS = ("test_transformers_serving.py", "test_transformers_dense.py", "test_transformers.py", "test_deepseek_v41.py")
# gpt-oss takes names from a list of its own, without a word for others. LOCAL_KERNELS puts dsv4 behind one of them.
LISTED = "kernels-community/vllm-flash-attn3"


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """(the module name of the build, what LOCAL_KERNELS must say)."""
    out = tmp_path_factory.mktemp("hub")
    return hub.write(out)[0], f"{NAME}={out}:{LISTED}={out}"


@pytest.fixture
def kernel(build, monkeypatch):
    """The module that `kernels` loads."""
    from kernels import get_kernel
    from transformers import modeling_flash_attention_utils as utils

    monkeypatch.setenv("LOCAL_KERNELS", build[1])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(utils, "_loaded_implementation", None)  # functions are kept from call to call there
    return get_kernel(NAME, version=1, trust_remote_code=True)


def test_the_kernels_package_loads_the_build_under_its_own_name(kernel, build):
    assert kernel.__name__ == build[0] and "dsv4" not in kernel.__name__.split(".")
    q = torch.randn(40, 4, 512, generator=torch.Generator().manual_seed(0))
    starts = torch.tensor([0, 15, 40], dtype=torch.int32)
    out = kernel.flash_attn_varlen_func(q, q, q, starts, starts, 25, 25, causal=True)
    assert_right(out, reference.fmha_varlen(q, q, q, starts, starts, causal=True)[0])
    assert sys.modules[kernel.flash_attn_varlen_func.__module__].__name__.startswith(build[0] + ".")


@pytest.mark.parametrize("kind, name", [("llama", NAME), ("gemma3", NAME), ("gpt_oss", LISTED)])
def test_continuous_batching_gives_the_tokens_of_eager(kernel, monkeypatch, kind, name):
    model = tiny_dense.build(kind)
    wanted, varlen, calls = alone(model), kernel.flash_attn_varlen_func, []

    @functools.wraps(varlen)  # transformers looks at the signature
    def counted(*arguments, **options):
        calls.append(options.get("s_aux") is not None)
        return varlen(*arguments, **options)

    monkeypatch.setattr(kernel, "flash_attn_varlen_func", counted)
    model.set_attn_implementation(name, allow_all_kernels=True)
    assert generated(model) == wanted
    assert len(calls) >= 2 * 6 and all(has_sink == (kind == "gpt_oss") for has_sink in calls)


def with_transformers(version: str) -> dict[str, str]:
    """An environment in which Python imports that version."""
    folder = Path(sys.prefix) / "transformers" / version
    assert (folder / "transformers").is_dir(), f"{folder} is not there; make test-engines makes it"
    here = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(here)}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", VERSIONS)
def test_the_integrations_hold_with_the_oldest_and_the_newest_transformers(version):
    environment = with_transformers(version)
    asked = [sys.executable, "-c", "import transformers; print(transformers.__version__)"]
    assert subprocess.run(asked, env=environment, capture_output=True, text=True).stdout.strip() == version
    folder = Path(__file__).parents[1] / "dsv4" / "integrations"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow and not gpu", *(folder / name for name in TESTS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and " failed" not in done.stdout, done.stdout[-6000:]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind, name", [("gemma3", NAME), ("gpt_oss", LISTED)])
def test_transformers_serve_gives_the_tokens_of_eager(build, tmp_path, kind, name, version):
    """Models with full and sliding layers; the prompt is longer than the window."""
    model, folder = tiny_dense.build(kind), str(tmp_path / "model")
    model.save_pretrained(folder)
    served.tokenizer(model.config.vocab_size).save_pretrained(folder)
    command = [
        sys.executable, "-c", "from transformers.cli.transformers import main; main()", "serve", folder,
        "--continuous-batching", "--attn-implementation", name, "--device", "cpu", "--cb-num-blocks", "64",
        "--cb-max-batch-tokens", "64", "--log-level", "info",
    ]  # fmt: skip
    prompt = PROMPTS[1]
    assert len(prompt) > 2 * tiny_dense.WINDOW
    body = dict(
        model=folder,
        messages=[dict(role="user", content=" ".join(f"w{t}" for t in prompt))],
        max_tokens=6,
        temperature=0,
    )
    environment = with_transformers(version) | {"LOCAL_KERNELS": build[1], "HF_HUB_OFFLINE": "1"}
    said = served.answer(command, environment, tmp_path / "log", "/v1/chat/completions", body)
    assert said["choices"][0]["message"]["content"].split() == [f"w{t}" for t in alone(model, [prompt])[0]]
