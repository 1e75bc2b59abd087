"""A tiny DeepSeek-V4 in SGLang on a CPU: scheduler, radix cache, memory pools, chunked prefill, model, attention
backend and its metadata are SGLang's. With the plug-in attention, indexer, the compressor's last step and cache
insertion are dsv4's; without, they are torch's (sglang_cuda_kernels)."""

import pytest
from engines_here import needs
from tiny_checkpoints import LENGTHS

pytestmark = [needs("sglang"), pytest.mark.slow, pytest.mark.timeout(3600)]

CHUNK = 256  # tokens of a step
LONG = 2300  # more than 4 x 512: the indexer has to choose
BATCHES = {"logprobs": (300,), "eight": LENGTHS, "indexer": (LONG, 40), "three": LENGTHS[:3]}  # lengths of prompts
UNCACHED = ("eight", "indexer")  # batches that are also run without the radix cache, where parts stay SGLang's
REPLACED = {
    "attention": ("flash_mla_with_kvcache", "flash_mla_sparse_fwd"),
    "insertion": ("main_k_norm_rope_flashmla.forward",),
    "indexer": ("index_scores",),
}
COMPRESSED = "fused_norm_rope_v2.forward"  # rows of both compressors, and keys of the indexer


@pytest.fixture(scope="module")
def wanted(checkpoints):
    """What transformers computes."""
    return checkpoints("deepseek_v4")[1]


@pytest.fixture(scope="module")
def run(checkpoints, serve_sglang, wanted):
    """(plug-in, radix cache) -> the results, of an engine that is started once."""
    folder, done = checkpoints("deepseek_v4")[0], {}
    batches = {
        name: dict(prompts=wanted.prompts(*lengths), tokens=4, logprobs=name == "logprobs")
        for name, lengths in BATCHES.items()
    }  # the prompt of 300 is asked twice: the second time it begins with a cached page

    def get(plugin: bool, cached: bool = True) -> dict:
        if (plugin, cached) not in done:
            engine = dict(
                chunked_prefill_size=CHUNK,
                dsa_topk_backend="torch",
                swa_full_tokens_ratio=0.9,
                disable_radix_cache=not cached,
            )
            asked = batches if cached else {name: batches[name] for name in UNCACHED}
            parts = "indexer,compressor,insertion" if cached else ""
            requests = dict(engine=engine, batches=list(asked.values()))
            got = serve_sglang(folder, requests, plugin, parts, v4=True)
            done[plugin, cached] = got | {"batches": dict(zip(asked, got["batches"]))}
        return done[plugin, cached]

    return get


def test_every_attention_of_the_model_is_dsv4s(run):
    """A prompt of 300 in chunks of 256 is two calls in each of three layers, and three more tokens are three each."""
    on = run(plugin=True)
    calls = {name: batch["calls"] for name, batch in on["batches"].items()}
    layers, steps, chunks = 3, 3, 2
    assert calls["logprobs"]["prefill"] == layers * chunks and calls["logprobs"]["decode"] == layers * steps
    assert calls["logprobs"]["insert"] == layers * (chunks + steps)
    # A CSA layer and an HCA layer compress; keys of the indexer stay SGLang's.
    assert calls["logprobs"]["compress"] == 2 * (chunks + steps)
    assert calls["logprobs"]["index"] == chunks + steps and calls["indexer"]["index"] >= -(-LONG // CHUNK)
    assert not any(name in on["kernels"] for names in REPLACED.values() for name in names)
    assert "the dsv4 plug-in is on: DeepSeek-V4's and V4.1's attention, indexer, compressor, insertion" in on["log"]


def test_without_the_plug_in_nothing_is_dsv4s(run):
    off = run(plugin=False)
    assert all(batch["calls"] == {} for batch in off["batches"].values())
    assert all(off["kernels"][name] > 0 for names in REPLACED.values() for name in names)
    assert off["kernels"][COMPRESSED] == 3 * run(plugin=True)["kernels"][COMPRESSED]
    assert "the dsv4 plug-in is installed and off" in off["log"]


def test_parts_that_are_not_named_stay_sglangs(run):
    on = run(plugin=True, cached=False)
    assert not any(name in on["kernels"] for name in REPLACED["attention"])
    assert all(on["kernels"][name] > 0 for part in ("insertion", "indexer") for name in REPLACED[part])
    assert {name for batch in on["batches"].values() for name in batch["calls"]} == {"decode", "prefill"}


@pytest.mark.parametrize("plugin", [True, False])
@pytest.mark.parametrize("name", BATCHES)
def test_tokens_are_those_of_transformers(run, wanted, name, plugin):
    wanted.assert_tokens(run(plugin)["batches"][name]["tokens"], BATCHES[name])


@pytest.mark.parametrize("name", BATCHES)
def test_cached_pages_are_those_of_the_engine_without_the_plug_in(run, name):
    assert run(plugin=True)["batches"][name]["cached"] == run(plugin=False)["batches"][name]["cached"]


@pytest.mark.parametrize("name", UNCACHED)
def test_tokens_are_those_of_transformers_without_the_radix_cache(run, wanted, name):
    got = run(plugin=True, cached=False)["batches"][name]
    wanted.assert_tokens(got["tokens"], BATCHES[name])
    assert not any(got["cached"])


def test_pages_of_the_radix_cache_were_used(run):
    assert run(plugin=True)["batches"]["eight"]["cached"] == [0] * 7 + [256]


@pytest.mark.parametrize("plugin", [True, False])
def test_logprobs_are_those_of_transformers_with_the_same_roundings(run, wanted, plugin):
    """fp32 on both sides, rounded in the same places (FP8 rows, bf16 around one projection): what is left are sums in
    another order, and what they move to the other side of a rounding, as in transformers itself from fp32 to fp64."""
    wanted.assert_logprobs(run(plugin)["batches"]["logprobs"]["logprobs"][0], "sglang")


def test_logprobs_without_the_same_roundings_would_fail(wanted):
    with pytest.raises(AssertionError, match="off by"):
        wanted.assert_logprobs(wanted.said["fp32"]["300"]["logprobs"], "sglang")
