"""DeepSeek-V4's MXFP4 experts in SGLang on dsv4.moe: a method of quantisation that SGLang's FusedMoE calls, around the
one that makes and loads the parameters."""

from __future__ import annotations

from typing import Any

from dsv4.integrations.engines import EngineExperts, unsupported_sizes
from dsv4.integrations.sglang import PARTS_SWITCH, calls, refuse

PARAMETERS = ("w13_weight", "w13_weight_scale_inv", "w2_weight", "w2_weight_scale_inv")


class Method:
    def __init__(self, fp8_method: Any, prefix: str) -> None:
        self._fp8, self.prefix = fp8_method, prefix
        self.ours: EngineExperts | None = None

    def __getattr__(self, name: str) -> Any:
        """Forward to SGLang's own method what it needs besides the calls below."""
        return getattr(self.__dict__["_fp8"], name)

    @property
    def fuse_routed_scaling_factor_in_topk(self) -> bool:
        """Tell whether SGLang's router multiplies the weights by the factor of the routed experts. On CUDA nothing but
        a runner of SGLang would do it after the experts; elsewhere the model does."""
        from sglang.srt.utils import is_cuda

        return bool(is_cuda())

    def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
        """Create no runner of SGLang's: apply does all the work."""
        from sglang.srt.layers.moe.utils import get_moe_a2a_backend

        if not (exchange := get_moe_a2a_backend()).is_none():
            refuse("--moe-a2a-backend", exchange.value, "none, or no experts among the parts")
        if getattr(moe_runner_config, "apply_router_weight_on_input", False):
            refuse(PARTS_SWITCH, "experts with weights on their input", "those of DeepSeek-V4")
        self.ours = EngineExperts(calls, getattr(moe_runner_config, "swiglu_limit", None))

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: Any,
        **extra: Any,
    ) -> None:
        import torch

        if why := unsupported_sizes(hidden_size, intermediate_size_per_partition):
            refuse(PARTS_SWITCH, *why)
        self._fp8.create_weights(
            layer,
            num_experts,
            hidden_size,
            intermediate_size_per_partition,
            params_dtype,
            fp4_scale_dtype=torch.float8_e8m0fnu,
            **extra,
        )

    def process_weights_after_loading(self, layer: Any) -> None:
        assert self.ours is not None
        self.ours.load(layer, PARAMETERS)

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        """Apply the experts. The dispatcher has converted expert numbers to those of this rank."""
        from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput

        assert self.ours is not None
        chosen = dispatch_output.topk_output
        return StandardCombineInput(self.ours(dispatch_output.hidden_states, chosen.topk_ids, chosen.topk_weights))


def get_quant_method(theirs: Any, config: Any, layer: Any, prefix: str) -> Any:
    """Wrap Fp8Config.get_quant_method."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.quantization.fp8 import Fp8MoEMethod, UnquantizedFusedMoEMethod

    found = theirs(config, layer, prefix)
    fp4 = config.is_fp4_experts and not config.dequant_fp4_to_fp8 and not isinstance(found, UnquantizedFusedMoEMethod)
    return Method(Fp8MoEMethod(config), prefix) if fp4 and isinstance(layer, FusedMoE) else found
