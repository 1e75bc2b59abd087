"""Rows of DeepSeek-V4 on their way into SGLang's pages, on dsv4: norm, RoPE, packing, and the row's place.

Two kernels of SGLang are replaced by one of dsv4's: that of new rows of the window ("insertion"), and the last step of
the compressor ("compressor"). The compressor's first step, which keeps states in a ring of each request or next to the
window, stays SGLang's, and so do the indexer's keys: they carry a Hadamard rotation.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from dsv4 import elementwise
from dsv4.caches.formats import FP8_584
from dsv4.caches.kv import Fp8Cache
from dsv4.integrations.sglang import PARTS_SWITCH, calls, refuse

tables = WeakTensorKeyDictionary()  # SGLang's angles -> dsv4's, for as long as SGLang's live


def insert(
    self: Any,
    layer_id: int,
    swa_loc: Tensor,
    kv: Tensor,
    kv_weight: Tensor,
    eps: float,
    freqs_cis: Tensor,
    positions: Tensor,
    q: Tensor | None = None,
) -> None:
    """Write kv [N, 512] to the slots swa_loc of the window. It replaces
    DeepSeekV4TokenToKVPool.set_swa_key_buffer_radix_fused_norm_rope."""
    if q is not None:
        refuse("q", "queries that are rotated in the same launch", "none: CUDA or a CPU")
    if self.uniform_fp8:
        refuse("--dsv4-attn-backend", "trtllm", f"flashmla, or {PARTS_SWITCH} without insertion")
    _check_layout(self.kv_layout)
    store(kv, kv_weight, eps, freqs_cis, positions, swa_loc, self.get_swa_raw_buffer(layer_id), self.swa_page_size)
    calls["insert"] += 1


def compressed(
    theirs: Any,
    kv: Tensor,
    plan: Any,
    *,
    norm_weight: Tensor,
    norm_eps: float,
    freq_cis: Tensor,
    out_loc: Tensor,
    kvcache: Tensor,
    page_size: int,
    use_fp4: bool = False,
    bf16_store: bool = False,
    kvcache_scale: Tensor | None = None,
    rope_cache: tuple[Tensor, Tensor] | None = None,
    fp4_k_write_metadata: Any = None,
    layout: Any = "v4",
    fp8_2buff: bool = False,
    kvcache_rope: Tensor | None = None,
) -> None:
    """Replace compress_norm_rope_store: kv [n, 512], one line for each entry of SGLang's plan, to the compressed pages.
    An entry is 16 bytes: int32 tokens seen (-1: none), then in prefill the token of the step, 16 bits."""
    if kv.shape[-1] != FP8_584.values:  # keys of the indexer
        theirs(
            kv,
            plan,
            norm_weight=norm_weight,
            norm_eps=norm_eps,
            freq_cis=freq_cis,
            out_loc=out_loc,
            kvcache=kvcache,
            page_size=page_size,
            use_fp4=use_fp4,
            bf16_store=bf16_store,
            kvcache_scale=kvcache_scale,
            rope_cache=rope_cache,
            fp4_k_write_metadata=fp4_k_write_metadata,
            layout=layout,
            fp8_2buff=fp8_2buff,
            kvcache_rope=kvcache_rope,
        )
        return
    if bf16_store or fp8_2buff:
        refuse("the compressed cache", "rows of the unified layout", f"FP8 pages, or {PARTS_SWITCH} without compressor")
    _check_layout(layout)
    ratio, entry = plan.compress_ratio, plan[1].view(torch.int32)
    seen = entry[:, 0]
    slots = out_loc[: len(seen)] if plan.is_decode else out_loc[(entry[:, 1] & 0xFFFF).long()]
    ends = (seen > 0) & (seen % ratio == 0)
    store(
        kv,
        norm_weight,
        norm_eps,
        freq_cis,
        (seen - ratio).clamp_min(0),
        slots.masked_fill(~ends, -1),
        kvcache,
        page_size,
    )
    calls["compress"] += 1


def store(
    x: Tensor,
    weight: Tensor,
    eps: float,
    freqs_cis: Tensor,
    positions: Tensor,
    slots: Tensor,
    pages: Tensor,
    page: int,
    backend: str = "auto",
) -> None:
    """Store x [N, 512], normed by the weight and rotated at positions [N], in slots [N] of pages uint8 [P, bytes] of
    `page` rows; -1: nowhere. freqs_cis complex [positions, 32]."""
    pool = Fp8Cache.from_pages(pages[:, : page * FP8_584.row_bytes].unflatten(1, (page, FP8_584.row_bytes)))
    steps = elementwise.choose(backend, x.device)
    norm = SimpleNamespace(variance_epsilon=eps, weight=weight)
    with steps.running():
        steps.store(pool, slots.long(), x, norm, _cos_sin(freqs_cis), positions.long())


def _cos_sin(freqs_cis: Tensor) -> Tensor:
    """Return fp32 [positions, 64]: cosines, then sines. Cached, because SGLang always passes the same table."""
    if freqs_cis not in tables:
        tables[freqs_cis] = torch.cat([freqs_cis.real, freqs_cis.imag], -1).float().contiguous()
    return tables[freqs_cis]


def _check_layout(layout: Any) -> None:
    said = getattr(layout, "value", layout)
    if str(said).lower() != "v4":
        refuse("SGLANG_DSV4_KV_LAYOUT", said, "v4")
