"""A tiny random DeepSeek-V4 of transformers: layers of each kind, two of CSA, real code."""

from functools import cache

import in_fp64
import torch
import transformers

WINDOW, CSA, HCA, TOPK = 16, 4, 16, 8


def build(head_dim=64, dtype=torch.float32, rope=16, **changes):
    """Sizes in proportion to V4; 16 index heads, because with few of them ReLU makes ties and ties have no order."""
    torch.manual_seed(0)
    options = dict(
        vocab_size=512, hidden_size=128, moe_intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, head_dim=head_dim, q_lora_rank=32, qk_rope_head_dim=rope,
        num_experts_per_tok=2, n_routed_experts=4, max_position_embeddings=4096,
        layer_types=["compressed_sparse_attention", "sliding_attention", "compressed_sparse_attention",
                     "heavily_compressed_attention"],
        compress_rates={"compressed_sparse_attention": CSA, "heavily_compressed_attention": HCA},
        sliding_window=WINDOW, o_groups=2, o_lora_rank=32, index_n_heads=16,
        index_head_dim=max(32, rope), index_topk=TOPK,
        rope_parameters={
            "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 256,
            "beta_fast": 32, "beta_slow": 1,
        },
        hc_sinkhorn_iters=2, initializer_range=0.08, attn_implementation="eager", experts_implementation="eager",
    )  # fmt: skip
    model = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**options | changes)).eval()
    with torch.no_grad():  # parts that start as zeros must count
        for name, p in model.named_parameters():
            if name.endswith(("sinks", "position_bias")):
                p.normal_(0, 1.0)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                buffer.random_(0, 4)
    return model.to(dtype)


@cache
def allowed():
    ids = torch.randint(0, 512, (2, 140), generator=torch.Generator().manual_seed(2))
    return in_fp64.allowed(build(), ids)


def same(a, b):
    """Logits of the model `build()`, by eager attention and by another."""
    difference = (a - b).abs().max().item()
    assert difference <= allowed(), difference
