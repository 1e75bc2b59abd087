"""DeepSeek-V4's MXFP4 experts in vLLM on dsv4.moe: a method of quantisation that vLLM's layer of experts calls. It
uses the parameters that vLLM's own creates and loads, and chooses no kernel of vLLM."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4MoEMethod

from dsv4.integrations.engines import EngineExperts, unsupported_sizes
from dsv4.integrations.vllm import PARTS_SWITCH, calls, refuse

PARAMETERS = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")


class Method(Mxfp4MoEMethod):
    supports_pre_processed_weights = False
    supports_eplb = False
    skip_forward_padding = False
    has_unpadded_output = False
    is_monolithic = False

    def __init__(self, moe: Any, activation_key: Any = None) -> None:
        FusedMoEMethodBase.__init__(self, moe)
        self.weight_dtype, self.activation_key = "mxfp4", activation_key
        self.ours: EngineExperts | None = None

    def maybe_roundup_sizes(self, hidden_size: int, intermediate_size_per_partition: int, *_: Any, **__: Any) -> Any:
        if why := unsupported_sizes(hidden_size, intermediate_size_per_partition):
            refuse(PARTS_SWITCH, *why)
        return hidden_size, intermediate_size_per_partition

    def process_weights_after_loading(self, layer: Any) -> None:
        if getattr(layer, "w13_bias", None) is not None or getattr(layer, "apply_router_weight_on_input", False):
            refuse(PARTS_SWITCH, "experts with a bias or with weights on their input", "those of DeepSeek-V4")
        self.ours = EngineExperts(calls, getattr(layer, "swiglu_limit", None))
        self.ours.load(layer, PARAMETERS)

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        return None

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Any,
    ) -> Tensor:
        """Apply the experts. vLLM runs the shared expert itself, because this kernel overlaps none."""
        assert self.ours is not None
        return self.ours(x, topk_ids, topk_weights, layer.expert_map)
