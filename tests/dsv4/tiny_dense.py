"""Tiny random decoders of transformers: Llama, gpt-oss (sinks, windows), Gemma 3 and 4 (windows, head dim 512)."""

import torch
import transformers

COMMON = dict(
    vocab_size=128, hidden_size=64, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=512, pad_token_id=0, eos_token_id=None, bos_token_id=None, attn_implementation="eager",
)  # fmt: skip
WINDOW = 8


def build(kind):
    torch.manual_seed(0)
    if kind == "llama":
        config = transformers.LlamaConfig(num_hidden_layers=2, head_dim=24, **COMMON)
        model = transformers.LlamaForCausalLM(config)
    elif kind == "gpt_oss":
        config = transformers.GptOssConfig(
            num_hidden_layers=2,
            head_dim=64,
            sliding_window=WINDOW,
            num_local_experts=2,
            num_experts_per_tok=2,
            **COMMON,
        )
        model = transformers.GptOssForCausalLM(config)
    elif kind == "gemma3":
        config = transformers.Gemma3TextConfig(
            num_hidden_layers=2,
            head_dim=512,
            query_pre_attn_scalar=512,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"],
            **COMMON,
        )
        model = transformers.Gemma3ForCausalLM(config)
    else:
        from transformers.models.gemma4 import Gemma4ForCausalLM, Gemma4TextConfig

        config = Gemma4TextConfig(
            num_hidden_layers=2,
            head_dim=64,
            global_head_dim=512,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"],
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=128,
            **COMMON,
        )
        model = Gemma4ForCausalLM(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1:
                p.normal_(0, p.shape[-1] ** -0.5)
            elif name.endswith("sinks"):
                p.normal_()
    return model.eval()


KINDS = ["llama", "gpt_oss", "gemma4"]
