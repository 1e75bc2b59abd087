"""A layer of transformers' DeepSeek-V4 by moe_route and moe, in fp32: both kinds of router, and the shared expert."""

import pytest
import torch

import dsv4

transformers = pytest.importorskip("transformers", reason="compares with transformers' own modules")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["moe", "hash_moe"])
def test_a_block_of_transformers(kind):
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs

    config = transformers.DeepseekV4Config(
        hidden_size=64, moe_intermediate_size=32, n_routed_experts=8, num_experts_per_tok=3, num_hidden_layers=1,
        mlp_layer_types=[kind], vocab_size=50, swiglu_limit=0.5,
    )  # fmt: skip
    block = theirs.DeepseekV4SparseMoeBlock(config, 0).eval()
    gate, experts, shared = block.gate, block.experts, block.shared_experts
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(0, 0.3)
        if kind == "moe":
            gate.e_score_correction_bias.normal_(0, 0.5)
        else:
            gate.tid2eid.random_(0, 8)
    x, tokens = torch.randn(1, 11, 64), torch.randint(0, 50, (1, 11))
    with torch.no_grad():
        want = block(x, input_ids=tokens)[0]
        hashed = dict(table=gate.tid2eid, token_ids=tokens[0]) if kind == "hash_moe" else {}
        bias = None if hashed else gate.e_score_correction_bias
        ids, weights = dsv4.moe_route(
            x[0], gate.weight, bias=bias, **hashed, topk=3, scale=config.routed_scaling_factor
        )
        gate_up = torch.cat([shared.gate_proj.weight, shared.up_proj.weight])
        out = dsv4.moe(
            x[0],
            (experts.gate_up_proj, experts.down_proj),
            ids,
            weights,
            activations="bf16",
            limit=0.5,
            shared=(gate_up, shared.down_proj.weight),
        )
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
