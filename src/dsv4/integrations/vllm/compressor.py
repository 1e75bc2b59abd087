"""The last step of vLLM's compressor for DeepSeek-V4 on dsv4: from the states in vLLM's pages to packed rows.

vLLM has two kernels for it, in CuTe DSL for rows of attention and in Triton for the indexer's keys; here both are
:func:`dsv4.compress.pages.compress_pages`. The step before, which writes the states, stays vLLM's.
"""

from typing import Any

from torch import Tensor

from dsv4.caches.index_keys import IndexCache
from dsv4.caches.kv import HEAD_DIM, Fp8Cache
from dsv4.compress.pages import compress_pages
from dsv4.integrations.vllm import calls, refuse


def store(
    state_cache: Tensor,
    num_actual: int,
    token_to_req_indices: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    block_table: Tensor,
    block_size: int,
    state_width: int,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    k_cache_metadata: Any,
    pdl_kwargs: dict[str, Any],
    head_dim: int,
    rope_head_dim: int,
    compress_ratio: int,
    overlap: bool,
    use_fp4_cache: bool,
    rms_norm_weight: Tensor,
    rms_norm_eps: float,
    quant_block: int,
    token_stride: int,
    scale_dim: int,
    store_full_kv: bool = False,
    store_full_fp8: bool = False,
    fp8_scale: Tensor | None = None,
) -> None:
    """What vLLM passes to compress_norm_rope_store_triton, or to the CuTe DSL kernel: then the last three too."""
    if use_fp4_cache:
        refuse("indexer_kv_dtype", "mxfp4", "fp8")
    if store_full_kv:
        refuse("--kv-cache-dtype", "rows that are not packed", "fp8 (fp8_ds_mla)")
    n = num_actual
    compress_pages(
        state_cache, slot_mapping[:n], token_to_req_indices[:n], positions[:n], block_table,
        k_cache_metadata.slot_mapping[:n], rms_norm_weight, cos_sin_cache,
        (Fp8Cache if head_dim == HEAD_DIM else IndexCache).from_pages(kv_cache), ratio=compress_ratio,
        eps=rms_norm_eps,
    )  # fmt: skip
    calls["compress"] += 1
