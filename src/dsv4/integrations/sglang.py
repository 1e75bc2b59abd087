"""The plug-in for SGLang: DeepSeek-V4's sparse attention, decode and prefill, on dsv4.

    pip install 'dsv4[sglang]'
    DSV4_SGLANG=1 python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V4-Flash --tp 8

SGLang finds it through the entry point ``sglang.srt.plugins`` and calls :func:`register` in every process. Without
``DSV4_SGLANG=1`` that does nothing but say so in the log. With it, SGLang's two FlashMLA functions are replaced by
those of :mod:`dsv4.integrations.flash_mla`; caches, lists, indexer, compressor and schedule stay SGLang's.

SGLang logs errors of a plug-in and continues without it. An untested version is therefore no exception here but the end
of the process, with the reason. Kernels of SGLang that would bypass dsv4 (fused "mega" attention, FP8 queries in
prefill) raise when they are reached.
"""

import logging
import os
from collections import Counter
from importlib import metadata
from typing import Any, NoReturn

from torch import Tensor

from dsv4.integrations import flash_mla
from dsv4.runtime import checks

SWITCH = "DSV4_SGLANG"
TESTED = "0.5.23"
INTERFACE = "sglang.kernels.ops.attention.flash_mla_interface"
# reached in place of the two functions below, with other layouts of queries or results
BYPASSES = {
    f"{INTERFACE}.flash_mla_mega_prefill": "fused norm and RoPE around attention",
    f"{INTERFACE}.flash_mla_mega_decode": "fused norm and RoPE around attention",
    "sglang.kernels.ops.attention.sparse_mla_q8kv8_prefill_sm90.cast_q_fp8_for_q8kv8_prefill": "FP8 queries in prefill",
}

calls: Counter[str] = Counter()  # "decode", "prefill": of this process
logger = logging.getLogger("sglang.dsv4")


def register() -> None:
    """What SGLang calls in each of its processes."""
    said = os.environ.get(SWITCH, "0")
    if said not in ("0", "1", ""):
        raise SystemExit(f"{SWITCH}: got {said!r}; accepted: 1 (on), 0 or unset (off)")
    if said != "1":
        logger.warning("dsv4 is installed and off; %s=1 switches its attention on", SWITCH)
        return
    if (found := metadata.version("sglang")) != TESTED:
        raise SystemExit(
            f"dsv4: got SGLang {found}; accepted: {TESTED}, whose calls the plug-in knows. "
            f"{SWITCH}=0 gives SGLang's own attention"
        )
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{INTERFACE}.flash_mla_with_kvcache", flash_mla_with_kvcache, HookType.REPLACE)
    HookRegistry.register(f"{INTERFACE}.flash_mla_sparse_fwd", flash_mla_sparse_fwd, HookType.REPLACE)
    for target, what in BYPASSES.items():
        HookRegistry.register(target, _refusing(what), HookType.REPLACE)
    logger.warning("dsv4 is on: DeepSeek-V4 attention, decode and prefill")


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
    """As SGLang's: DeepSeek-V4's rows of 584 bytes, others are refused by name."""
    for name, x in (("descale_q", descale_q), ("descale_k", descale_k), ("kv_format", kv_format)):
        if x is not None:
            checks.fail(name, checks.describe(x), "None: rows of DeepSeek-V4")
    if not use_legacy:
        checks.fail("use_legacy", False, "True: the interleaved rows of DeepSeek-V4.1 are not read here")
    calls["decode"] += 1
    return flash_mla.flash_mla_with_kvcache(
        q, k_cache, block_table, cache_seqlens, head_dim_v, None, None, softmax_scale, causal, is_fp8_kvcache, indices,
        attn_sink, extra_k_cache, extra_indices_in_kvcache, topk_length, extra_topk_length,
    )  # fmt: skip


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
    """As SGLang's, which looks at the first result alone."""
    calls["prefill"] += 1
    if kv.ndim == 2:
        kv = kv[:, None]
    return flash_mla.flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v, attn_sink, topk_length)


def _refusing(what: str) -> Any:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(f"{SWITCH}=1, but SGLang uses a kernel of its own with {what}: switch that off, or dsv4")

    return refuse
