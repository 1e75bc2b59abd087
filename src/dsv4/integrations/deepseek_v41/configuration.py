"""The configuration of DeepSeek-V4.1, with the names of its config.json."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from transformers import PreTrainedConfig

from dsv4.runtime import checks

# The checkpoint's description of its weights. The modules hold them as they are, so no quantizer of transformers is
# needed.
QUANTIZATION = {"quant_method": "fp8", "weight_block_size": [32, 32], "scale_fmt": "ue8m0", "expert_dtype": "fp4"}


class DeepseekV41Config(PreTrainedConfig):
    """Sizes of the text model; the defaults are those of DeepSeek-V4.1-Flash.

    compress_ratios            of every layer: tokens of a compressed row, 0 = the layer sees its window only
    kv_source_layer_ids        layers that make compressed rows and index keys; a layer reads those of the last of them
    index_source_layer_ids     layers that choose rows; a layer attends to what the last of them chose
    candidate_source_layer_id  the layer that also keeps blocks, for those that choose after it; -1 = none
    """

    model_type = "deepseek_v41"
    keys_to_ignore_at_inference = ["past_key_values"]

    vocab_size: int = 129280
    hidden_size: int = 5120
    moe_intermediate_size: int = 2304
    num_hidden_layers: int = 40
    num_attention_heads: int = 64
    num_key_value_heads: int = 1
    head_dim: int = 512
    qk_rope_head_dim: int = 64
    q_lora_rank: int = 1280
    o_groups: int = 8
    o_lora_rank: int = 1024
    sliding_window: int = 128
    compress_ratios: list[int] = field(default_factory=lambda: [0] * 2 + [2] * 18 + [1] * 20)
    kv_source_layer_ids: list[int] = field(default_factory=lambda: [2, 8, 14, 20])
    index_source_layer_ids: list[int] = field(default_factory=lambda: [2, 8, 14, 20, 24, 28, 32, 36])
    candidate_source_layer_id: int = 20
    candidate_topk_blocks: int = 2048
    candidate_block_size: int = 8
    index_n_heads: int = 32
    index_head_dim: int = 128
    index_topk: int = 512
    n_routed_experts: int = 384
    num_experts_per_tok: int = 6
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-20
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_parameters: dict | None = None  # YaRN of the layers with compressed rows; "rope_scaling" in config.json
    max_position_embeddings: int = 1048576
    engram_layer_ids: list[int] = field(default_factory=list)
    engram_num_embeddings: list[int] = field(default_factory=list)
    engram_max_ngram_size: int = 4
    engram_vocab_size: int = 16000000
    engram_compressed_vocab_size: int = 99092
    engram_n_heads: int = 8
    engram_head_dim: int = 256
    engram_pad_token_id: int = 2
    image_token_id: int = 129264
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 1
    pad_token_id: int | None = 2
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    use_cache: bool = True

    def __post_init__(self, **rest: Any) -> None:
        fixed = dict(n_shared_experts=1, scoring_func="sqrtsoftplus", norm_topk_prob=True, gate_temp=1.0)
        for name, value in fixed.items():
            if rest.pop(name, value) != value:
                checks.fail(name, "another value", repr(value))
        super().__post_init__(**rest)
        layers = self.num_hidden_layers
        if len(self.compress_ratios) < layers:
            checks.fail("compress_ratios", f"{len(self.compress_ratios)} of {layers} layers", "one for every layer")
        for layer, ratio in enumerate(self.compress_ratios[:layers]):
            if ratio and (self.source_of(layer) < 0 or self.chooser_of(layer) < 0):
                checks.fail(
                    "compress_ratios", f"{ratio} of layer {layer}", "0 before the first layers of both kinds of source"
                )
        if self.num_key_value_heads != 1:
            checks.fail("num_key_value_heads", self.num_key_value_heads, "1")

    def source_of(self, layer: int) -> int:
        """Return the layer whose compressed rows and index keys this layer reads, -1 = none."""
        return max((x for x in self.kv_source_layer_ids if x <= layer), default=-1)

    def chooser_of(self, layer: int) -> int:
        """Return the layer whose choice this layer attends to, -1 = none."""
        return max((x for x in self.index_source_layer_ids if x <= layer), default=-1)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> Any:
        """Read config.json. The checkpoint's own has the text model in "text_config"; other parts are left out."""
        given = {k: v for k, v in config_dict.items() if k not in ("text_config", "vision_config")}
        text = {k: v for k, v in (config_dict.get("text_config") or {}).items() if k not in ("model_type", "dtype")}
        given = {**text, **given}
        weights = given.pop("quantization_config", None) or QUANTIZATION
        for name, value in QUANTIZATION.items():
            if weights.get(name, value) != value:
                checks.fail(f"quantization_config[{name!r}]", weights[name], repr(value))
        return super().from_dict(given, **options)

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "quantization_config": dict(QUANTIZATION)}
