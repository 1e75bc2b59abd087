"""Attention for DeepSeek-V4-class and wide-head models: Hopper and Blackwell kernels in Python, and a CPU path."""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

# These modules are imported with the package, so that torch.ops.dsv4 is complete. Without torch, a name is imported
# only when it is used, so that a bare installation can still be inspected.
if TYPE_CHECKING or importlib.util.find_spec("torch") is not None:
    import torch

    import dsv4.fmha.training
    import dsv4.moe.training
    import dsv4.v4.training  # noqa: F401  these three register operators
    from dsv4.caches.index_keys import IndexCache
    from dsv4.caches.kv import Fp8Cache, Mxfp8Cache, Nvfp4Cache
    from dsv4.caches.quantize import quantize_mxfp8
    from dsv4.compress.api import compress
    from dsv4.compress.problem import CompressState
    from dsv4.flops import register as _register_flops
    from dsv4.fmha.api import fmha, fmha_paged, fmha_varlen
    from dsv4.index.api import index_blocks, index_topk
    from dsv4.index.loss import index_loss
    from dsv4.merge import merge_states
    from dsv4.moe.api import moe, moe_route
    from dsv4.moe.experts import Fp4Experts, Spread
    from dsv4.runtime.plan import Plan, plan
    from dsv4.runtime.warmup import warmup
    from dsv4.v4.api import v4_attention

    # Tensors and a few numbers: torch.load(..., weights_only=True) may create them.
    torch.serialization.add_safe_globals(
        [Fp4Experts, Fp8Cache, Mxfp8Cache, Nvfp4Cache, IndexCache, Plan, CompressState, Spread]
    )
    _register_flops()

__version__ = "0.2.0"
__all__ = [
    "CompressState",
    "Fp4Experts",
    "Fp8Cache",
    "IndexCache",
    "Mxfp8Cache",
    "Nvfp4Cache",
    "Plan",
    "compress",
    "fmha",
    "fmha_paged",
    "fmha_varlen",
    "index_blocks",
    "index_loss",
    "index_topk",
    "merge_states",
    "moe",
    "moe_route",
    "plan",
    "quantize_mxfp8",
    "v4_attention",
    "warmup",
]


_FOLDERS = ("distributed", "integrations", "reference")  # modules that docstrings name, imported where they are used


if TYPE_CHECKING:  # what __getattr__ finds; type checkers do not see that function, or they would accept every name
    from dsv4 import distributed as distributed
    from dsv4 import integrations as integrations
    from dsv4 import reference as reference
else:

    def __getattr__(name: str) -> Any:
        if name in _FOLDERS:
            return importlib.import_module(f"dsv4.{name}")
        if name in __all__:
            raise ImportError(f"dsv4.{name} needs torch, which is not installed")
        raise AttributeError(f"module 'dsv4' has no attribute {name!r}")
