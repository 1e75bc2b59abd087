"""The last step of vLLM's compressor for DeepSeek-V4 on dsv4: from the states in vLLM's pages to packed rows.

vLLM has two kernels for it, in CuTe DSL for rows of attention and in Triton for the indexer's keys; here both are
:func:`dsv4.compress.pages.compress_pages`. The step before, which writes the states, stays vLLM's.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from dsv4.caches.formats import FP8_584
from dsv4.caches.index_keys import IndexCache
from dsv4.caches.kv import Fp8Cache
from dsv4.compress.pages import compress_pages
from dsv4.integrations.vllm import calls, refuse


@functools.cache
def replacing(theirs: type) -> type:
    """Return a subclass of one of vLLM's classes of the compressor."""
    return type("Compressor", (theirs,), dict(forward=forward))


def forward(self: Any, kv_score: Tensor, positions: Tensor, rotary_emb: Any) -> None:
    """Compress kv_score fp32 [N, 2 width]: values, then gates, of tokens of many requests."""
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import get_forward_context
    from vllm.models.deepseek_v4.compressor import _SAVE_PARTIAL_STATES_KERNEL

    context = get_forward_context()
    found = context.attn_metadata
    if not isinstance(found, dict):  # a profile run
        return
    m, states = found[self.state_cache.prefix], self.state_cache.kv_cache
    kv, gate = kv_score.chunk(2, -1)
    _SAVE_PARTIAL_STATES_KERNEL(
        kv=kv,
        score=gate,
        ape=self.ape,
        positions=positions,
        state_cache=states,
        slot_mapping=m.slot_mapping,
        block_size=m.block_size,
        state_width=states.shape[-1] // 2,
        compress_ratio=self.compress_ratio,
        pdl_kwargs=dict(launch_pdl=False),
    )
    # A graph is replayed with tokens that do finish a row. None: vLLM does not know.
    if self.compress_ratio == 128 and m.c128_boundary is False and context.cudagraph_runtime_mode != CUDAGraphMode.FULL:
        return
    store(self, found, positions, rotary_emb.cos_sin_cache)


def store(compressor: Any, found: dict[str, Any], positions: Tensor, cos_sin: Tensor) -> None:
    """Store the rows that the tokens of this step finish. positions may be longer than the step."""
    pages = compressor._static_forward_context[compressor.k_cache_prefix].kv_cache
    if compressor.use_fp4_cache:
        refuse("indexer_kv_dtype", "mxfp4", "fp8")
    if pages.dtype != torch.uint8:
        refuse("--kv-cache-dtype", f"rows of {pages.dtype}", "fp8 (fp8_ds_mla)")
    m = found[compressor.state_cache.prefix]
    n = m.slot_mapping.shape[0]
    compress_pages(
        compressor.state_cache.kv_cache,
        m.slot_mapping,
        m.token_to_req_indices[:n],
        positions[:n],
        m.block_table,
        found[compressor.k_cache_prefix].slot_mapping[:n],
        compressor.norm.weight,
        cos_sin,
        (Fp8Cache if compressor.head_dim == FP8_584.values else IndexCache).from_pages(pages),
        ratio=compressor.compress_ratio,
        eps=compressor.rms_norm_eps,
    )
    calls["compress"] += 1
