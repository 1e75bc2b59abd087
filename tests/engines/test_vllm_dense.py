"""A tiny Gemma 4 (head dim 64 with a window, head dim 512 without) in vLLM on a CPU, with dsv4's dense backend and with
vLLM's own."""

import pytest
import torch
from engines_here import needs
from tiny_checkpoints import prompt

pytestmark = [needs("vllm"), pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def runs(checkpoints, serve):
    folder, wanted = checkpoints("gemma4")
    many = [prompt(n, seed=n) for n in (3, 40, 150, 129, 64, 5, 256)] + [wanted["prompt"]]
    requests = dict(
        engine=dict(dtype="float32", max_num_batched_tokens=128, enable_prefix_caching=True),
        batches=[
            dict(prompts=[wanted["prompt"]], tokens=1, logprobs=True),
            dict(prompts=many, tokens=6),
            *(dict(prompts=many[:n], tokens=2) for n in (1, 3)),
        ],
    )
    named = requests | dict(engine=requests["engine"] | dict(attention_backend="DSV4"))
    return serve(folder, named, plugin=True), serve(folder, requests, plugin=False), wanted


def test_every_attention_of_the_model_is_dsv4s(runs):
    on, off, _ = runs
    assert on["calls"]["dense prefill"] > 0 and on["calls"]["dense decode"] > 0
    assert all(n % 2 == 0 for n in on["calls"].values())  # two layers
    assert off["calls"] == {}


def test_the_tokens_are_those_of_vllms_own_backend(runs):
    on, off, _ = runs
    for with_dsv4, without in zip(on["batches"], off["batches"]):
        assert with_dsv4["tokens"] == without["tokens"]


def test_logprobs_are_those_of_transformers(runs):
    """Both in fp32: what is left is the order of sums, far below the error of bf16."""
    on, off, wanted = runs
    exact, rounded = (torch.tensor(wanted[name]) for name in ("fp32", "bf16"))
    allowed = (rounded - exact).abs().median() / 16
    for run in (on, off):
        assert (torch.tensor(run["batches"][0]["logprobs"][0]) - exact).abs().median() <= allowed
