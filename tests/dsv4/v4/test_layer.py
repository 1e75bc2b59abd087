"""A whole DeepSeek-V4 layer from dsv4's parts (compress, index_topk, v4_attention, RoPE) against transformers' own."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

import dsv4  # noqa: E402
from dsv4.reference import apply_rope, rope_table  # noqa: E402

WINDOW, TOPK, HEADS, DIM, ROPE, INDEX_HEADS, INDEX_DIM = 16, 8, 4, 64, 16, 16, 32
KINDS = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.DeepseekV4Config(
        vocab_size=64, hidden_size=96, moe_intermediate_size=32, num_hidden_layers=3, num_attention_heads=HEADS,
        head_dim=DIM, q_lora_rank=48, qk_rope_head_dim=ROPE, num_experts_per_tok=1, n_routed_experts=2,
        max_position_embeddings=4096, layer_types=KINDS, sliding_window=WINDOW, o_groups=2, o_lora_rank=24,
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        index_n_heads=INDEX_HEADS, index_head_dim=INDEX_DIM, index_topk=TOPK, initializer_range=0.1,
        rope_parameters={
            "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 256,
            "beta_fast": 32, "beta_slow": 1,
        },
        attn_implementation="eager",
    )  # fmt: skip
    model = transformers.DeepseekV4ForCausalLM(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("sinks", "position_bias", "norm.weight")):
                p.normal_(1.0 if name.endswith("weight") else 0.0, 0.5)
    return model


def table(model, kind, positions=512):
    """dsv4's own table, from the numbers in the configuration."""
    p = model.config.rope_parameters["main" if kind == "sliding_attention" else "compress"]
    yarn = {}
    if p["rope_type"] == "yarn":
        yarn = dict(factor=p["factor"], original_positions=p["original_max_position_embeddings"])
        yarn |= dict(beta_fast=p["beta_fast"], beta_slow=p["beta_slow"])
    return rope_table(positions, ROPE, p["rope_theta"], **yarn)


def norm(x, weight=None):
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    return x if weight is None else x * weight


def pooled(compressor, x, cos_sin, cuts):
    """Compressed rows, the tokens cut into these calls."""
    state, rows = None, []
    for part in x.tensor_split(cuts):
        more, state = dsv4.compress(
            compressor.kv_proj(part),
            compressor.gate_proj(part),
            compressor.position_bias,
            compressor.kv_norm.weight,
            cos_sin=cos_sin,
            state=state,
        )
        rows.append(more)
    return torch.cat(rows)


def our_layer(model, a, x, cuts=()):
    """x [L, hidden] -> [L, hidden], with index lists, compressed rows and RoPE of dsv4."""
    positions = torch.arange(len(x))
    cos_sin = table(model, a.layer_type)
    low = norm(a.q_a_proj(x), a.q_a_norm.weight)
    q = apply_rope(norm(a.q_b_proj(low).view(len(x), HEADS, DIM)), cos_sin, positions)
    window = apply_rope(norm(a.kv_proj(x), a.kv_norm.weight), cos_sin, positions)
    lists = (positions[:, None] - torch.arange(WINDOW)).clamp_min(-1).int()
    options = {}
    if a.compressor is not None:
        options["compressed"] = pooled(a.compressor, x, cos_sin, cuts)
        visible = (positions + 1) // a.compressor.compress_rate
        if a.layer_type == "compressed_sparse_attention":
            indexer = a.compressor.indexer
            index_q = apply_rope(indexer.q_b_proj(low).view(len(x), INDEX_HEADS, INDEX_DIM), cos_sin, positions)
            index_k, weights = pooled(indexer, x, cos_sin, cuts), indexer.scorer.weights_proj(x)
            options["compressed_indices"] = dsv4.index_topk(index_q, index_k, weights, TOPK, positions=positions)
        else:
            rows = len(options["compressed"])
            options["compressed_block_table"] = torch.arange(rows, dtype=torch.int32)[None]
            options["compressed_lengths"] = visible.int()
            options["request_starts"] = torch.tensor([0, len(x)], dtype=torch.int32)
    out = dsv4.v4_attention(q, window, lists, sink=a.sinks, inverse_rope=(cos_sin, positions), **options)
    groups = out.reshape(len(x), a.config.o_groups, -1)
    return a.o_b_proj(a.o_a_proj(groups).flatten(1))


def their_layer(model, a, x):
    from transformers.masking_utils import create_sliding_window_causal_mask

    positions = torch.arange(len(x))[None]
    tables = {k: model.model.rotary_emb(x[None], positions, layer_type=k) for k in ("main", "compress")}
    mask = create_sliding_window_causal_mask(model.config, x[None], None, None, positions)
    return a(x[None], tables, positions, mask)[0][0]


@pytest.mark.parametrize("layer", range(3), ids=KINDS)
@pytest.mark.parametrize("tokens", [1, 3, 4, 15, 16, 17, 31, 32, 36, 101])
@torch.no_grad()
def test_layer(model, layer, tokens):
    a = model.model.layers[layer].self_attn
    x = torch.randn(tokens, 96, generator=torch.Generator().manual_seed(tokens))
    want = their_layer(model, a, x)
    for cuts in ((), (1, 2, 5, 9, 40)):
        got = our_layer(model, a, x, [c for c in cuts if c < tokens])
        # fp32: sums of 96 to 256 terms in a row of five products and norms, of which each errs by sqrt(256) roundings
        assert (got - want).abs().max() < 5 * 2**4 * 2.0**-22 * max(1.0, want.abs().max().item()), cuts


@torch.no_grad()
def test_rope_tables_are_those_of_transformers(model):
    x, positions = torch.zeros(1, 512, 1), torch.arange(512)[None]
    for kind, name in ((KINDS[0], "main"), (KINDS[1], "compress")):
        cos, sin = model.model.rotary_emb(x, positions, layer_type=name)
        error = table(model, kind) - torch.cat([cos, sin], -1)[0]
        assert error.abs().max() < 512 * 2.0**-23  # theirs: fp32 angles, a frequency and a product off by 2^-24
