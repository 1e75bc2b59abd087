"""FP4 experts in transformers' DeepSeek-V4, from the tensors of a checkpoint.

    from safetensors.torch import load_file
    from dsv4.integrations.transformers_experts import use_fp4_experts

    use_fp4_experts(model, load_file("model.safetensors"))     # layers.{l}.ffn.experts.{e}.w1.weight, ... .scale

transformers has experts in the model's dtype. Each layer's become an :class:`dsv4.Fp4Experts`, an eighth of fp32 and a
quarter of bf16, and run by dsv4.moe; the router and the shared expert stay transformers' own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from dsv4.moe.api import moe
from dsv4.moe.experts import Fp4Experts
from dsv4.moe.options import Activations
from dsv4.runtime import checks
from dsv4.runtime.checks import Backend


class Experts(nn.Module):
    """What stands in the place of DeepseekV4Experts."""

    def __init__(self, experts: Fp4Experts, limit: float, activations: Activations, backend: Backend) -> None:
        super().__init__()
        self.experts, self.limit, self.activations, self.backend = experts, limit, activations, backend

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return moe(
            hidden_states,
            self.experts,
            top_k_index,
            top_k_weights.float(),
            activations=self.activations,
            limit=self.limit,
            backend=self.backend,
        )


def use_fp4_experts(
    model: Any, tensors: Mapping[str, Tensor], *, activations: Activations = "fp8_128", backend: Backend = "auto"
) -> None:
    """Replace the experts of every layer of a DeepseekV4ForCausalLM.

    Args:
        tensors: by the names of DeepSeek's checkpoints, MXFP4.
        activations, backend: as in dsv4.moe.
    """
    from transformers import DeepseekV4ForCausalLM

    if not isinstance(model, DeepseekV4ForCausalLM):
        checks.fail("model", type(model).__name__, "a DeepseekV4ForCausalLM of transformers")
    checks.backend(backend)
    for n, layer in enumerate(model.model.layers):
        found = Fp4Experts.from_checkpoint(tensors, f"layers.{n}.ffn.experts.").to(model.device)
        layer.mlp.experts = Experts(found, model.config.swiglu_limit, activations, backend)
