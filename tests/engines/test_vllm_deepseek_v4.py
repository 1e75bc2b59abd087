"""A tiny DeepSeek-V4 in vLLM on a CPU: scheduler, block tables, prefix cache, chunked prefill, metadata kernels and the
attention layer are vLLM's. With the plug-in attention, indexer, the compressor's last step and cache insertion are
dsv4's; without, they are torch's (vllm_cpu_operators)."""

import pytest
from agreement import FP32_BOUND
from engines_here import needs
from tiny_checkpoints import LENGTHS

pytestmark = [needs("vllm"), pytest.mark.slow, pytest.mark.timeout(3600)]

# vLLM's wheel for aarch64 has bf16 instructions that older cores lack. The rows of the caches are FP8 all the same.
DTYPE = "float32"
CHUNK = 256  # tokens of a step
LONG = 2300  # more than 4 x 512: the indexer has to choose
BATCHES = {  # lengths of prompts
    "logprobs": (300,),
    "eight": LENGTHS,  # the last one begins with cached pages
    "indexer": (LONG, 40, 150),
    "again": (LONG, 40, 150),  # with pages of the batch before, where they are kept
    "far": (LONG,),  # its log-probabilities
    **{f"of {n}": tuple(sorted(LENGTHS)[:n]) for n in range(1, 8)},
}
STEPS = {"logprobs": 1, "far": 1, "eight": 4, "indexer": 3, "again": 3}  # tokens; 2 of the others
UNCACHED = ("eight", "indexer", "of 3")  # batches that are also run without prefix caching
REPLACED = {
    "attention": ("flash_mla_with_kvcache_cpu",),
    "indexer": ("fp8_paged_mqa_logits_cpu", "topk_transform_512_cpu"),
    "insertion": ("fused_qnorm_rope_kv_insert_cpu",),
    # and its first step, because vLLM's own kernel for it runs then, in softsm
    "compressor": ("save_partial_states_cpu", "compress_norm_rope_store_cpu", "compress_norm_rope_store_indexer_cpu"),
}


@pytest.fixture(scope="module")
def wanted(checkpoints):
    """What transformers computes."""
    return checkpoints("deepseek_v4")[1]


@pytest.fixture(scope="module")
def run(checkpoints, serve, wanted):
    """(plug-in, prefix caching) -> the results, of an engine that is started once. With prefix caching DSV4_VLLM=1
    switches the plug-in on and all parts are dsv4's; without, the backend's name does, and the indexer alone is."""
    folder, done = checkpoints("deepseek_v4")[0], {}
    batches = {
        name: dict(prompts=wanted.prompts(*lengths), tokens=STEPS.get(name, 2), logprobs=name in ("logprobs", "far"))
        for name, lengths in BATCHES.items()
    }

    def get(plugin: bool, cached: bool = True) -> dict:
        if (plugin, cached) not in done:
            engine = dict(
                dtype=DTYPE,
                max_num_batched_tokens=CHUNK,
                enable_prefix_caching=cached,
                kv_cache_memory_bytes=1 << 25,  # small: the oracle unpacks all of it, call by call
            )
            asked = batches if cached else {name: batches[name] for name in UNCACHED}
            parts, on = "indexer,compressor,insertion" if cached else "indexer", plugin
            if plugin and not cached:  # switched on by the configuration
                on, engine["attention_backend"] = None, "DSV4_GLUON"
            got = serve(folder, dict(engine=engine, batches=list(asked.values())), on, parts)
            done[plugin, cached] = got | {"batches": dict(zip(asked, got["batches"]))}
        return done[plugin, cached]

    return get


def test_every_attention_of_the_model_is_dsv4s(run):
    """A prompt of 300 in chunks of 256 is two calls in each of three layers; eight requests with 691 tokens that are
    not cached take three steps, and then three more at least."""
    on = run(plugin=True)
    calls = {name: batch["calls"] for name, batch in on["batches"].items()}
    # a CSA layer compresses twice, an HCA layer once, where a row ends: in the first chunk alone
    assert calls["logprobs"] == {"prefill": 6, "compress": 5, "insert": 6}
    assert calls["eight"]["prefill"] >= 9 and calls["eight"]["decode"] >= 9 and calls["eight"]["decode"] % 3 == 0
    assert calls["indexer"]["index prefill"] >= 1 and calls["indexer"]["index decode"] >= 2  # one CSA layer
    assert not any(name in on["operators"] for names in REPLACED.values() for name in names)
    assert "dsv4 is on: DeepSeek-V4's attention, indexer, compressor, insertion" in on["log"]
    assert "dsv4 on a CPU" in on["log"]


def test_parts_that_are_not_named_stay_vllms(run):
    on = run(plugin=True, cached=False)
    assert not any(name in on["operators"] for part in ("attention", "indexer") for name in REPLACED[part])
    assert all(on["operators"][name] > 0 for part in ("compressor", "insertion") for name in REPLACED[part])
    assert not any(name in batch["calls"] for batch in on["batches"].values() for name in ("compress", "insert"))


def test_without_the_plug_in_nothing_is_dsv4s(run):
    off = run(plugin=False)
    assert all(batch["calls"] == {} for batch in off["batches"].values())
    assert all(off["operators"][name] > 0 for names in REPLACED.values() for name in names)
    assert "dsv4 is installed and off" in off["log"] and "dsv4 on a CPU" not in off["log"]


@pytest.mark.parametrize("plugin", [True, False])
@pytest.mark.parametrize("name", BATCHES)
def test_tokens_are_those_of_transformers(run, wanted, name, plugin):
    wanted.assert_tokens(run(plugin)["batches"][name]["tokens"], BATCHES[name])


@pytest.mark.parametrize("name", BATCHES)
def test_cached_pages_are_those_of_the_engine_without_the_plug_in(run, name):
    assert run(plugin=True)["batches"][name]["cached"] == run(plugin=False)["batches"][name]["cached"]


def test_pages_of_the_prefix_cache_were_used(run):
    batches = run(plugin=True)["batches"]
    assert batches["eight"]["cached"] == [0] * 7 + [256]
    assert batches["again"]["cached"] == [2048, 0, 0]


@pytest.mark.parametrize("name", UNCACHED)
def test_tokens_are_those_of_transformers_without_prefix_caching(run, wanted, name):
    got = run(plugin=True, cached=False)["batches"][name]
    wanted.assert_tokens(got["tokens"], BATCHES[name])
    assert not any(got["cached"])


@pytest.mark.parametrize("cached", [True, False])
def test_every_call_agrees_with_the_oracle(run, cached):
    """The oracle computes in fp64, on the same rows."""
    on = run(plugin=True, cached=cached)
    calls = [batch["calls"] for batch in on["batches"].values()]
    assert len(on["errors"]) == sum(c.get("decode", 0) + c.get("prefill", 0) for c in calls)
    assert max(on["errors"]) <= FP32_BOUND
    assert len(on["choices"]) == sum(c.get("index decode", 0) + c.get("index prefill", 0) for c in calls) > 0
    assert max(on["choices"]) < (128 + 64) * 2**-24  # sums over dims and heads in fp32
    assert len(on["rows"]) == sum(c.get("compress", 0) for c in calls) and bool(on["rows"]) is cached
    assert max(on["rows"], default=0) <= 1


@pytest.mark.parametrize("plugin", [True, False])
@pytest.mark.parametrize("name", ["logprobs", "far"])
def test_logprobs_are_those_of_transformers_with_the_same_roundings(run, wanted, name, plugin):
    """fp32 on both sides, rounded in the same places (FP8 rows, bf16 around one projection): what is left are sums in
    another order, and what they move to the other side of a rounding, as in transformers itself from fp32 to fp64. In
    the long prompt the indexer chooses, and a choice is a rounding too."""
    wanted.assert_logprobs(run(plugin)["batches"][name]["logprobs"][0], "vllm", *BATCHES[name])


@pytest.mark.parametrize("length", [300, LONG])
def test_logprobs_without_the_same_roundings_would_fail(wanted, length):
    with pytest.raises(AssertionError, match="off by"):
        wanted.assert_logprobs(wanted.said["fp32"][str(length)]["logprobs"], "vllm", length)
