"""A tiny Gemma 3 (head dim 512, with a window and without) in SGLang on a CPU: scheduler, radix cache, pages, chunked
prefill are SGLang's. With the plug-in, attention is dsv4's; without it, SGLang's own on torch. And a tiny Gemma 4,
whose window layers have a pool of pages of their own, and which SGLang serves on no backend that runs here."""

import pytest
from engines_here import needs
from tiny_checkpoints import LENGTHS, TOKENS

pytestmark = [needs("sglang"), pytest.mark.slow, pytest.mark.timeout(3600)]

PAGE = 16
BATCHES = {  # lengths of prompts
    "logprobs": (300,),
    "eight": LENGTHS,  # the last one begins with cached pages
    "again": LENGTHS,
    **{f"of {n}": tuple(sorted(LENGTHS)[:n]) for n in range(1, 8)},
}


@pytest.fixture(scope="module")
def wanted(checkpoints):
    """What transformers computes."""
    return checkpoints("gemma3")[1]


@pytest.fixture(scope="module")
def run(checkpoints, serve_sglang, wanted):
    """(plug-in, prefix caching) -> the results, of an engine that is started once."""
    folder, done = checkpoints("gemma3")[0], {}
    batches = {
        name: dict(prompts=wanted.prompts(*lengths), tokens=TOKENS, logprobs=name == "logprobs")
        for name, lengths in BATCHES.items()
    }

    def get(plugin: bool, cached: bool = True) -> dict:
        if (plugin, cached) not in done:
            engine = dict(
                attention_backend="dsv4_gluon" if plugin else "torch_native",
                chunked_prefill_size=128,
                page_size=PAGE,
                disable_radix_cache=not cached,
            )
            got = serve_sglang(folder, dict(engine=engine, batches=list(batches.values())), plugin)
            done[plugin, cached] = got | {"batches": dict(zip(batches, got["batches"]))}
        return done[plugin, cached]

    return get


def test_every_attention_of_the_model_is_dsv4s(run):
    """A prompt of 300 in chunks of 128 is three calls in each of two layers, and three more tokens are three."""
    on = run(plugin=True)
    calls = {name: batch["calls"] for name, batch in on["batches"].items()}
    assert calls["logprobs"] == {"dense prefill": 6, "dense decode": 6}
    assert all(n % 2 == 0 for batch in calls.values() for n in batch.values())
    assert calls["eight"]["dense decode"] >= 2 * 3 and calls["eight"]["dense prefill"] >= 2 * 6
    assert "the dsv4 plug-in is on" in on["log"]


def test_without_the_plug_in_nothing_is_dsv4s(run):
    off = run(plugin=False)
    assert all(batch["calls"] == {} for batch in off["batches"].values())
    assert "the dsv4 plug-in is installed and off" in off["log"]


@pytest.mark.parametrize("name", BATCHES)
def test_tokens_and_cached_pages_are_those_of_sglangs_own_backend(run, wanted, name):
    with_dsv4, without = run(plugin=True)["batches"][name], run(plugin=False)["batches"][name]
    assert with_dsv4["cached"] == without["cached"]
    wanted.assert_tokens(without["tokens"], BATCHES[name])
    wanted.assert_tokens(with_dsv4["tokens"], BATCHES[name])


def test_a_request_does_not_say_one_token_again_and_again(run):
    """Tokens that depend on nothing would agree anyhow."""
    assert max(len(set(tokens)) for tokens in run(plugin=True)["batches"]["eight"]["tokens"]) > 2


@pytest.mark.parametrize("name", ["eight", "again"])
def test_tokens_are_the_same_without_prefix_caching(run, wanted, name):
    not_cached = run(plugin=True, cached=False)["batches"][name]
    wanted.assert_tokens(not_cached["tokens"], BATCHES[name])
    assert not any(not_cached["cached"])


def test_pages_of_the_prefix_cache_were_used(run):
    batches = run(plugin=True)["batches"]
    assert batches["eight"]["cached"][-1] == 299 // PAGE * PAGE  # a last token is always computed
    assert sum(batches["again"]["cached"]) > sum(batches["eight"]["cached"])


@pytest.mark.parametrize("plugin", [True, False])
def test_logprobs_are_those_of_transformers(run, wanted, plugin):
    """Both compute in fp32, so that only the order of sums differs."""
    wanted.assert_logprobs(run(plugin)["batches"]["logprobs"]["logprobs"][0])


def test_two_pools_of_pages(checkpoints, serve_sglang):
    """Tokens and log-probabilities of transformers, and the same tokens when the prompt's pages are cached. Rows that
    have left the window have no page in its pool any more."""
    folder, wanted = checkpoints("gemma4_512")
    engine = dict(attention_backend="dsv4_gluon", chunked_prefill_size=128, page_size=PAGE)
    first = dict(prompts=wanted.prompts(300), tokens=TOKENS, logprobs=True)
    again = dict(prompts=wanted.prompts(300, 150, 5), tokens=TOKENS)
    one, three = serve_sglang(folder, dict(engine=engine, batches=[first, again]), plugin=True)["batches"]
    wanted.assert_tokens(one["tokens"], (300,))
    wanted.assert_tokens(three["tokens"], (300, 150, 5))
    assert one["calls"] == {"dense prefill": 6, "dense decode": 6} and three["cached"][0] == 299 // PAGE * PAGE
    wanted.assert_logprobs(one["logprobs"][0])
