"""Tiny random checkpoints on disk, as the engines load them, and what transformers says of prompts to them.

python tiny_checkpoints.py deepseek_v4|deepseek_v4_fp4|gemma3|gemma4|gemma4_512|gemma4_shared DIR
"""

import functools
import json
import re
import sys
from pathlib import Path

import index_values
import torch

VOCABULARY = 256
LENGTHS = (3, 40, 150, 129, 64, 5, 256, 300)  # of prompts: 8 requests at once
LONG = {
    "deepseek_v4": (2300,),  # more than 4 x 512: the indexer has to choose
    "gemma4": (1100,),  # vLLM's cache takes pages of 1024 tokens for this model
}
TOKENS = 4  # after each prompt
# Of prompts, by their length, after which tokens are certain; of 2300 at least the first. Others have their length as
# seed.
SEEDS = {"deepseek_v4": {3: 72003, 5: 38005, 40: 6040, 64: 5064, 150: 2150, 256: 3256, 2300: 4300}}
# All experts are taken: which of them are is a choice that a sum in another order changes.
V4 = dict(
    architectures=["DeepseekV4ForCausalLM"], model_type="deepseek_v4", torch_dtype="bfloat16", vocab_size=VOCABULARY,
    hidden_size=256, moe_intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=1,
    head_dim=512, qk_rope_head_dim=64, q_lora_rank=128, o_lora_rank=64, o_groups=2, sliding_window=128,
    compress_ratios=[0, 4, 128], compress_rope_theta=160000, rope_theta=10000, max_position_embeddings=8192,
    index_n_heads=64, index_head_dim=128, index_topk=512, n_routed_experts=8, n_shared_experts=1,
    num_experts_per_tok=8, norm_topk_prob=True, routed_scaling_factor=1.5, scoring_func="sqrtsoftplus",
    topk_method="noaux_tc", num_hash_layers=0, swiglu_limit=10.0, hidden_act="silu", hc_mult=4, hc_sinkhorn_iters=20,
    hc_eps=1e-6, rms_norm_eps=1e-6, expert_dtype="bf16", bos_token_id=0, eos_token_id=1, tie_word_embeddings=False,
    rope_scaling=dict(
        rope_type="yarn", factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=65536
    ),
)  # fmt: skip
# Linear maps stay bf16, by the names of vLLM and of SGLang: neither engine has FP8 products on any CPU.
FP4_EXPERTS = dict(
    expert_dtype="fp4",
    quantization_config=dict(
        quant_method="fp8", activation_scheme="dynamic", fmt="e4m3", scale_fmt="ue8m0", weight_block_size=[128, 128],
        ignored_layers=[
            *(f"model.layers.{n}.attn.{name}" for n in range(3)
              for name in ("wq_a", "wkv", "wq_b", "wo_a", "wo_b", "indexer.wq_b")),
            *(f"model.layers.{n}.ffn.shared_experts.{name}" for n in range(3) for name in ("w1", "w3", "down_proj")),
            "self_attn", "mlp.shared_experts",
        ],
    ),
)  # fmt: skip
# transformers' names -> DeepSeek's
NAMES = [
    (r"^model\.", ""), (r"^embed_tokens\.weight", "embed.weight"), (r"^lm_head\.weight", "head.weight"),
    (r"^hc_head\.hc_", "hc_head_"), (r"\.compressor\.indexer\.scorer\.weights_proj\.", ".indexer.weights_proj."),
    (r"\.compressor\.indexer\.q_b_proj\.", ".indexer.wq_b."), (r"\.compressor\.indexer\.", ".indexer.compressor."),
    (r"compressor\.kv_norm\.", "compressor.norm."), (r"\.position_bias", ".ape"), (r"\.q_a_proj\.", ".wq_a."),
    (r"\.q_b_proj\.", ".wq_b."), (r"\.kv_proj\.", ".wkv."), (r"compressor\.gate_proj\.", "compressor.wgate."),
    (r"\.o_a_proj\.", ".wo_a."), (r"\.o_b_proj\.", ".wo_b."), (r"\.q_a_norm\.", ".q_norm."),
    (r"\.sinks$", ".attn_sink"), (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."), (r"\.(attn|ffn)_hc\.(fn|base|scale)$", r".hc_\1_\2"),
    (r"\.self_attn\.", ".attn."), (r"\.mlp\.", ".ffn."), (r"gate\.e_score_correction_bias", "gate.bias"),
    (r"shared_experts\.gate_proj", "shared_experts.w1"), (r"shared_experts\.up_proj", "shared_experts.w3"),
    (r"shared_experts\.down_proj", "shared_experts.w2"),
]  # fmt: skip
LOUD = 30.0
FP32 = re.compile(r"hc_|ape$|sink|gate\.bias$")


def deepseek_v4(folder: Path) -> torch.nn.Module:
    """Three layers (window alone, CSA, HCA) under DeepSeek's names -> the model in fp32."""
    from safetensors.torch import save_file
    from transformers import AutoConfig, DeepseekV4ForCausalLM

    (folder / "config.json").write_text(json.dumps(V4))
    config = AutoConfig.from_pretrained(folder)
    config._attn_implementation = "eager"
    model = DeepseekV4ForCausalLM(config).float().eval()
    chance = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in [*model.named_parameters(), *model.named_buffers()]:
            noise = torch.randn(p.shape, generator=chance)
            if "inv_freq" in name:
                continue
            if name.endswith("norm.weight") or "layernorm" in name:
                p.copy_(1 + 0.1 * noise)
            elif p.ndim >= 2 and "position_bias" not in name:
                p.copy_(noise * (2.0 if "embed" in name or "lm_head" in name else 1.5 * p.shape[-1] ** -0.5))
            else:
                p.copy_(noise * (1.0 if "sinks" in name or "position_bias" in name else 0.1))
            p.copy_(p.bfloat16())
    saved = {}
    for name, x in model.state_dict().items():
        if "inv_freq" in name:
            continue
        for old, new in NAMES:
            name = re.sub(old, new, name)
        if name.endswith("experts.gate_up_proj"):
            for e, both in enumerate(x):
                for w, part in zip(("w1", "w3"), both.chunk(2, 0)):
                    saved[name.replace("gate_up_proj", f"{e}.{w}.weight")] = part.bfloat16().contiguous()
        elif name.endswith("experts.down_proj"):
            for e, one in enumerate(x):
                saved[name.replace("down_proj", f"{e}.w2.weight")] = one.bfloat16().contiguous()
        else:
            saved[name] = x.to(torch.float32 if FP32.search(name) else torch.bfloat16).clone().contiguous()
    save_file(saved, folder / "model.safetensors")
    return model


def deepseek_v4_fp4(folder: Path) -> None:
    """The same with MXFP4 experts, whose codes and scales are drawn. transformers is not asked: in a model this small
    the rounding of their activations decides every token."""
    from safetensors.torch import load_file, save_file

    deepseek_v4(folder)
    (folder / "config.json").write_text(json.dumps(V4 | FP4_EXPERTS))
    saved, chance = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(2)
    for name, x in list(saved.items()):
        if ".ffn.experts." in name:
            codes = torch.randint(0, 256, (x.shape[0], x.shape[1] // 2), dtype=torch.uint8, generator=chance)
            scales = torch.randint(121, 124, (x.shape[0], x.shape[1] // 32), dtype=torch.uint8, generator=chance)
            saved[name] = codes.view(torch.int8)
            saved[name.replace("weight", "scale")] = scales.view(torch.float8_e8m0fnu)
    save_file(saved, folder / "model.safetensors")


def gemma3(folder: Path) -> torch.nn.Module:
    """Two layers of head dim 512, with a window of 32 and without -> the model in fp32."""
    from transformers.models.gemma3 import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        num_hidden_layers=2, hidden_size=64, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
        head_dim=512, query_pre_attn_scalar=512, sliding_window=32, vocab_size=VOCABULARY,
        layer_types=["sliding_attention", "full_attention"], max_position_embeddings=4096, initializer_range=0.2,
        attn_implementation="eager", bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    model = loud_layers(Gemma3ForCausalLM(config).float().eval())
    model.save_pretrained(folder)
    return model


def gemma4_512(folder: Path) -> torch.nn.Module:
    """The same with head dim 512 in both layers, and one more name in the configuration: SGLang 0.5.23 reads no
    configuration of text alone with two head dims that transformers 5.19 has written."""
    model = gemma4(folder, window_head_dim=512)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"swa_num_key_value_heads": config["num_key_value_heads"]}))
    return model


def gemma4_shared(folder: Path) -> torch.nn.Module:
    """Four layers, of which the last two have no keys of their own: they read those of the first two."""
    return gemma4(folder, layers=4, shared=2)


def gemma4(folder: Path, window_head_dim: int = 64, layers: int = 2, shared: int = 0) -> torch.nn.Module:
    """Two layers, head dim 64 with a window of 32 and head dim 512 without -> the model in fp32."""
    from transformers.models.gemma4 import Gemma4ForCausalLM, Gemma4TextConfig

    torch.manual_seed(0)
    config = Gemma4TextConfig(
        num_hidden_layers=layers, hidden_size=64, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
        head_dim=window_head_dim, global_head_dim=512, sliding_window=32,
        layer_types=["sliding_attention", "full_attention"] * (layers // 2),
        vocab_size=VOCABULARY, vocab_size_per_layer_input=VOCABULARY, hidden_size_per_layer_input=8,
        num_kv_shared_layers=shared, max_position_embeddings=4096, attn_implementation="eager", initializer_range=0.2,
        bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    model = loud_layers(Gemma4ForCausalLM(config).float().eval())
    model.save_pretrained(folder)
    return model


def loud_layers(model: torch.nn.Module) -> torch.nn.Module:
    """With tied embeddings a random model says its last token again and again, unless its layers drown it out."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if re.search(r"post_(attention|feedforward)_layernorm", name):
                p.fill_(LOUD)
    return model


def prompt(tokens: int, seed: int) -> list[int]:
    return torch.randint(2, VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def logits(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """[tokens, vocabulary], in the model's dtype."""
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0]


def logits_in_fp64(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    import in_fp64

    return in_fp64.logits(model, torch.tensor([ids]))[0]


def rounded_like_an_engine(first: torch.dtype, packed_index, say, model: torch.nn.Module, *arguments):
    """What say(model, *arguments) gives of a DeepSeek-V4 that is rounded where an engine in fp32 is: rows of keys to
    the FP8 rows of the caches, the indexer's queries and keys to e4m3 (both in vLLM's CPU class to bf16 first), before
    and after the grouped projection to bf16."""
    from unittest import mock

    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

    from dsv4.caches.formats import FP8_584

    eager, grouped = modeling.eager_attention_forward, modeling.DeepseekV4GroupedLinear.forward
    scorer = modeling.DeepseekV4IndexerScorer.forward

    def attention(module, query, key, value, *rest, **options):
        packed = FP8_584.quantize(key.flatten(0, -2).to(first))
        rows = FP8_584.dequantize(*packed, key.dtype).view(key.shape)
        return eager(module, query, rows, rows, *rest, **options)

    def e4m3(x):
        values, scale = packed_index(x.to(first).to(x.dtype))
        return values.to(x.dtype) * scale[..., None]

    def scores(module, q, keys, hidden):
        return scorer(module, e4m3(q), e4m3(keys), hidden)

    def projection(module, x):
        return grouped(module, x.bfloat16().to(x.dtype)).bfloat16().to(x.dtype)

    with (
        mock.patch.object(modeling, "eager_attention_forward", attention),
        mock.patch.object(modeling.DeepseekV4IndexerScorer, "forward", scores),
        mock.patch.object(modeling.DeepseekV4GroupedLinear, "forward", projection),
    ):
        return say(model, *arguments)


def greedy(model: torch.nn.Module, ids: list[int], tokens: int) -> list[int]:
    """The most likely next tokens, one after the other."""
    said, cache = [], None
    for _ in range(tokens):
        with torch.no_grad():
            out = model(torch.tensor([said[-1:] or ids]), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        said.append(int(out.logits[0, -1].argmax()))
    return said


def certain(exact: torch.Tensor, rounded: list[torch.Tensor], tokens: list[int]) -> int:
    """How many of the first tokens an engine has to say, by logits [tokens, vocabulary] of transformers without the
    engine's roundings and with them: it may be off by twice what transformers is, in either direction, so the margin
    between the two most likely tokens has to be four times that."""
    off = torch.stack([(x - exact).abs().amax(-1) for x in rounded]).amax(0)
    best = exact.topk(2)
    sure = (best.values[:, 0] - best.values[:, 1] > 4 * off) & (best.indices[:, 0] == torch.tensor(tokens))
    return int(sure.cumprod(0).sum())


def of_prompt(scores: torch.Tensor, ids: list[int]) -> torch.Tensor:
    """Log-probabilities of each token after the first, given those before it."""
    return scores.double().log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def main(kind: str, directory: str) -> None:
    """transformers.json: "requests", and by the name of a way of rounding and the length of the prompt (300, and the
    long one of DeepSeek-V4) "logprobs" with what is "allowed": an engine in fp32 may be off by twice what transformers
    in fp32 is, so they differ by three times that."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    makers = (deepseek_v4, deepseek_v4_fp4, gemma3, gemma4, gemma4_512, gemma4_shared)
    model = {make.__name__: make for make in makers}[kind](folder)
    if model is None:
        return
    engines = {"vllm": (torch.bfloat16, index_values.vllm), "sglang": (torch.float32, index_values.sglang)}
    ways = {n: functools.partial(rounded_like_an_engine, *how) for n, how in engines.items() if kind == "deepseek_v4"}
    said: dict = {"requests": []}
    for length in LENGTHS + LONG.get(kind, ()):
        ids = prompt(length, seed=SEEDS.get(kind, {}).get(length, length))
        tokens = greedy(model, ids, TOKENS)
        whole, at = ids + tokens, slice(length - 1, -1)
        exact = (logits if ways else logits_in_fp64)(model, whole)[at]
        rounded = [way(logits, model, whole)[at] for way in ways.values()] or [logits(model, whole)[at]]
        said["requests"].append(dict(prompt=ids, tokens=tokens, certain=certain(exact, rounded, tokens)))
    prompts = {len(r["prompt"]): r["prompt"] for r in said["requests"]}
    for name, way in {"fp32": lambda say, *rest: say(*rest), **ways}.items():
        said[name] = {}
        for length in (300, *(LONG[kind] if ways else ())):
            ids = prompts[length]
            values, exact = (of_prompt(way(say, model, ids), ids) for say in (logits, logits_in_fp64))
            said[name][length] = dict(logprobs=values.tolist(), allowed=3 * float((values - exact).abs().max()))
    (folder / "transformers.json").write_text(json.dumps(said))


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1] / "dsv4"))
    main(*sys.argv[1:3])
