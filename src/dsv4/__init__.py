"""Attention for DeepSeek-V4-class and wide-head models: Hopper and Blackwell kernels in Python, and a CPU path."""

from typing import TYPE_CHECKING

from dsv4.fmha import fmha, fmha_paged, fmha_varlen
from dsv4.merge import merge_states
from dsv4.plan import Plan, plan, warmup

if TYPE_CHECKING:
    from dsv4.caches import Fp8Cache
    from dsv4.compressor import compress
    from dsv4.indexer import index_topk
    from dsv4.v4 import v4_attention

__version__ = "0.1.0"
__all__ = [
    "Fp8Cache",
    "Plan",
    "compress",
    "fmha",
    "fmha_paged",
    "fmha_varlen",
    "index_topk",
    "merge_states",
    "plan",
    "v4_attention",
    "warmup",
]

_LATER = {"Fp8Cache": "caches", "compress": "compressor", "index_topk": "indexer", "v4_attention": "v4"}


def __getattr__(name: str):
    """The V4 parts are imported when first used."""
    if name not in _LATER:
        raise AttributeError(f"module 'dsv4' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"dsv4.{_LATER[name]}"), name)
    globals()[name] = value
    return value
