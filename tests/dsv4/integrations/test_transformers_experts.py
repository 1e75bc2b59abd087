"""A tiny DeepSeek-V4 with FP4 experts and FP8 linear maps, as safetensors under the names of DeepSeek's checkpoints."""

import pytest
import torch

from dsv4.moe import formats

transformers = pytest.importorskip("transformers", reason="the model is transformers'")
safetensors = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.slow


def config():
    kinds = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    return transformers.DeepseekV4Config(
        vocab_size=64, hidden_size=256, moe_intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        head_dim=64, q_lora_rank=128, qk_rope_head_dim=16, num_experts_per_tok=2, n_routed_experts=4, layer_types=kinds,
        mlp_layer_types=["hash_moe", "moe", "moe"], compress_rates={kinds[1]: 4, kinds[2]: 8}, sliding_window=8,
        o_groups=2, o_lora_rank=128, index_n_heads=2, index_head_dim=32, index_topk=4, attn_implementation="eager",
        experts_implementation="eager", max_position_embeddings=256,
    )  # fmt: skip


def as_in_checkpoints(name):
    """transformers saves a few names otherwise than DeepSeek."""
    name = name.removeprefix("model.").replace("embed_tokens.", "embed.")
    return name.replace("hc_head.hc_", "hc_head_")


def quantized(tensors):
    """Experts as MXFP4, projections of attention as e4m3 with one scale for 128 x 128; and what both are as numbers."""
    stored, numbers = {}, {}
    for name, x in tensors.items():
        scale = name.replace(".weight", ".scale")
        if ".ffn.experts." in name:
            codes = torch.randint(0, 256, (x.shape[0], x.shape[1] // 2), dtype=torch.uint8)
            bytes_ = torch.randint(118, 122, (x.shape[0], x.shape[1] // 32), dtype=torch.uint8)
            stored[name], stored[scale] = codes.view(torch.int8), bytes_.view(torch.float8_e8m0fnu)
            factors = formats.scale_values(bytes_).repeat_interleave(32, -1)
            numbers[name] = formats.fp4_values(codes) * factors
        elif ".attn.w" in name and x.ndim == 2 and not any(n % 128 for n in x.shape):
            blocks = torch.randint(118, 122, (x.shape[0] // 128, x.shape[1] // 128), dtype=torch.uint8)
            stored[name], stored[scale] = (x * 64).to(torch.float8_e4m3fn), blocks.view(torch.float8_e8m0fnu)
            factors = formats.scale_values(blocks).repeat_interleave(128, 0).repeat_interleave(128, 1)
            numbers[name] = stored[name].float() * factors
        else:
            stored[name] = numbers[name] = x
    return stored, numbers


def test_it_loads_and_generates_what_the_oracle_does(tmp_path):
    """In transformers, and with dsv4's caches in the reference runner."""
    from deepseek_v4.paged_model import PagedModel
    from dsv4.integrations.transformers_experts import Experts, use_fp4_experts

    torch.manual_seed(0)
    model = transformers.DeepseekV4ForCausalLM(config()).eval()
    with torch.no_grad():
        for name, x in model.named_buffers():
            if name.endswith("tid2eid"):
                x.random_(0, 4)
    model.save_pretrained(tmp_path / "plain")
    saved = safetensors.load_file(tmp_path / "plain" / "model.safetensors")
    plain = {as_in_checkpoints(name): x for name, x in saved.items()}
    assert {"layers.1.ffn.experts.3.w1.weight", "layers.0.attn.wq_a.weight", "embed.weight"} <= set(plain)
    stored, numbers = quantized(plain)
    assert any(x.dtype == torch.float8_e4m3fn for x in stored.values())
    safetensors.save_file(stored, tmp_path / "stored.safetensors")
    safetensors.save_file(numbers, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    prompt = torch.randint(1, 64, (1, 21))
    said = {}
    for way in ("oracle", "fp4"):
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "plain",
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
            output_loading_info=True,
        )
        assert not info["missing_keys"] and not info["unexpected_keys"]
        if way == "fp4":
            use_fp4_experts(model, safetensors.load_file(tmp_path / "stored.safetensors"), activations="bf16")
            assert all(isinstance(layer.mlp.experts, Experts) for layer in model.model.layers)
        said[way] = model.eval().generate(prompt, max_new_tokens=12, do_sample=False).tolist()
    assert said["fp4"] == said["oracle"] and len(said["fp4"][0]) == 33
    runner, tokens = (
        PagedModel(model, tokens=64, requests=1, chunk=32, page_tokens=32, window_page=8),
        prompt[0].tolist(),
    )
    new = tokens
    for _ in range(12):
        new = [int(runner.step({"a": new})["a"].argmax())]
        tokens = tokens + new
    assert [tokens] == said["oracle"]


def test_only_deepseek_v4():
    from dsv4.integrations.transformers_experts import use_fp4_experts

    with pytest.raises(ValueError, match="^model: got Linear; accepted: a DeepseekV4ForCausalLM"):
        use_fp4_experts(torch.nn.Linear(1, 1), {})
