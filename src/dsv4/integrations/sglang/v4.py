"""SGLang's two FlashMLA functions for DeepSeek-V4 and V4.1, decode and prefill, on dsv4."""

from typing import Any

from torch import Tensor

from dsv4.integrations import flash_mla
from dsv4.integrations.engines import rows_of_prompts
from dsv4.integrations.sglang import calls
from dsv4.runtime import checks


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Any,
    num_splits: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    descale_q: Tensor | None = None,
    descale_k: Tensor | None = None,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    kv_format: str | None = None,
    *,
    use_legacy: bool = True,
) -> tuple[Tensor, Tensor]:
    """Replace SGLang's function for rows of 584, 528 and 288 bytes; others are rejected by name."""
    for name, x in (("descale_q", descale_q), ("descale_k", descale_k), ("kv_format", kv_format)):
        if x is not None:
            checks.fail(name, checks.describe(x), "None: rows of DeepSeek-V4 or V4.1")
    calls["decode"] += 1
    return flash_mla.flash_mla_with_kvcache(
        q,
        k_cache,
        block_table,
        cache_seqlens,
        head_dim_v,
        None,
        None,
        softmax_scale,
        causal,
        is_fp8_kvcache,
        indices,
        attn_sink,
        extra_k_cache,
        extra_indices_in_kvcache,
        topk_length,
        extra_topk_length,
        use_legacy=use_legacy,
    )


def no_other_kernel(*_: Any, **__: Any) -> bool:
    """Return False: SGLang must not take a decode of V4.1 away from FlashMLA's function."""
    return False


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    *,
    use_legacy: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Replace SGLang's function, whose first result alone is used. kv is a bf16 workspace; what is past topk_length in
    indices is undefined."""
    calls["prefill"] += 1
    if kv.ndim == 2:
        kv = kv[:, None]
    kv, indices = rows_of_prompts(q, kv, indices, topk_length)
    return flash_mla.flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v, attn_sink, topk_length)
