"""A tiny random DeepSeek-V4.1: layers of every kind (window, both ratios, sources, two levels), FP8 and FP4 weights."""

import torch

import dsv4.integrations.deepseek_v41 as v41

VOCABULARY, WINDOW, TOPK, BLOCKS = 512, 8, 6, 2


def config(**changes):
    """Layer 3 keeps 2 blocks of 8 rows, in which layer 4 chooses; layers 2 and 5 read what the layers before chose."""
    options = dict(
        vocab_size=VOCABULARY, hidden_size=256, moe_intermediate_size=128, num_hidden_layers=6, num_attention_heads=4,
        q_lora_rank=64, o_groups=2, o_lora_rank=32, sliding_window=WINDOW,
        compress_ratios=[0, 2, 2, 1, 1, 1], kv_source_layer_ids=[1, 3], index_source_layer_ids=[1, 3, 4],
        candidate_source_layer_id=3, candidate_topk_blocks=BLOCKS, index_n_heads=32, index_topk=TOPK,
        n_routed_experts=4, num_experts_per_tok=2, hc_sinkhorn_iters=3, initializer_range=0.06,
        image_token_id=500, max_position_embeddings=4096,
        rope_parameters=dict(rope_type="yarn", factor=16.0, original_max_position_embeddings=256, beta_fast=32,
                             beta_slow=1),
    )  # fmt: skip
    return v41.DeepseekV41Config(**options | changes)


def build(dtype=torch.float32, **changes):
    torch.manual_seed(0)
    return v41.DeepseekV41ForCausalLM._from_config(config(**changes), dtype=dtype).eval()
