"""DeepSeek-V4's MXFP4 experts in vLLM on a CPU: vLLM's own class with dsv4.moe in it, and a whole engine."""

from types import SimpleNamespace

import moe_cases
import pytest
import torch
from engines_here import needs
from tiny_checkpoints import prompt

import dsv4
from dsv4.integrations import vllm as plugin

pytestmark = needs("vllm")


def method(layer, sizes=(256, 128)):
    from dsv4.integrations.vllm.experts import Method

    made = Method(SimpleNamespace(w13_num_shards=2, has_bias=False))
    assert made.maybe_roundup_sizes(*sizes) == sizes
    made.create_weights(layer, 4, *sizes, torch.bfloat16, weight_loader=lambda *_, **__: None)
    return made


def test_a_layer_gives_the_numbers_of_moe():
    layer = torch.nn.Module()
    layer.swiglu_limit, layer.expert_map = 7.0, None
    made, given = method(layer), moe_cases.layer().given
    for name, end in (("weight", ""), ("weight_scale", "_scale")):
        getattr(layer, f"w13_{name}").data.copy_(torch.cat([given[f"w1{end}"], given[f"w3{end}"]], 1))
        getattr(layer, f"w2_{name}").data.copy_(given[f"w2{end}"])
    made.process_weights_after_loading(layer)
    assert not made.is_monolithic and not made.supports_internal_mk and made.topk_indices_dtype is None
    tokens, before = moe_cases.tokens(5), plugin.calls["experts"]
    got = made.apply(layer, tokens["x"], tokens["weights"], tokens["ids"], None, None)
    assert torch.equal(got, dsv4.moe(**tokens, experts=dsv4.Fp4Experts.pack(**given), limit=7.0))
    assert plugin.calls["experts"] == before + 1


def test_sizes_that_no_kernel_has():
    with pytest.raises(ValueError, match="^DSV4_VLLM_PARTS: got experts of sizes 256 and 96 on a rank"):
        method(torch.nn.Module(), (256, 96))


@pytest.mark.parametrize("parts, ours", [("indexer", False), ("indexer,experts", True)])
def test_the_part_decides(parts, ours, monkeypatch):
    """Off by default."""
    import vllm.config
    from vllm.models.deepseek_v4 import quant_config

    from dsv4.integrations.vllm import choice, install

    monkeypatch.setenv("DSV4_VLLM_PARTS", parts)
    monkeypatch.setattr(quant_config, "Mxfp4MoEMethod", lambda moe: "theirs")
    monkeypatch.setattr(vllm.config, "get_current_vllm_config", lambda: None)
    monkeypatch.setattr(choice, "v4_is_ours", lambda _: True)
    install.the_experts()
    assert (quant_config.Mxfp4MoEMethod(SimpleNamespace()) != "theirs") == ours


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_whole_engine(fp4_checkpoint, serve):
    """Three layers, a prompt in two chunks, then two steps. compared_experts.py compares what was loaded with the
    checkpoint and every call with the oracle. vLLM itself has no MXFP4 experts for CPUs."""
    engine = dict(
        dtype="bfloat16", max_num_batched_tokens=256, enable_prefix_caching=False, kv_cache_memory_bytes=1 << 25
    )
    requests = dict(engine=engine, batches=[dict(prompts=[prompt(300, seed=300)], tokens=3)])
    got = serve(fp4_checkpoint, requests, plugin=True, parts="indexer,experts", fp4=True)
    assert got["batches"][0]["calls"] == {"experts": 12, "prefill": 6, "decode": 6}
    assert "dsv4 is on: DeepSeek-V4's attention, indexer, experts" in got["log"]
