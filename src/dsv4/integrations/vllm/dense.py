"""vLLM's dense attention on dsv4.fmha_paged: ``--attention-backend DSV4_GLUON``.

Head dims 64, 128, 256 and 512, GQA, sliding windows, sinks, any page size, FP8 caches (e4m3, with vLLM's scales of
keys and values). vLLM puts single-token requests first; they are one call, and the prompts after them another, so that
a long prompt does not fill up the decodes. It rejects, by name, e5m2 caches, softcap, ALiBi, encoders, cross attention
and masks that are not causal.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

import dsv4
from dsv4.integrations.flash_attn import flash_attn_varlen_func
from dsv4.integrations.vllm import BACKEND, calls, choice, logger, refuse, say
from dsv4.runtime import checks

FP8 = ("fp8", "fp8_e4m3")  # vLLM's names of e4m3, whose bytes it keeps as uint8


class Backend(AttentionBackend):
    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "bfloat16", "float16", *FP8]

    @staticmethod
    def get_name() -> str:
        return BACKEND

    @staticmethod
    def get_impl_cls() -> type["Impl"]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type["Builder"]:
        return Builder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(checks.HEAD_DIMS)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability is None or (capability.major, capability.minor) in ((9, 0), (10, 0))


@dataclass
class Metadata:
    decodes: int  # requests, each with one token, before all others
    tokens: int
    starts: Tensor  # int32 [B + 1], of queries
    lengths: Tensor  # int32 [B], of keys
    block_table: Tensor  # int32 [B, pages]
    longest_query: int
    longest: int


class Builder(AttentionMetadataBuilder[Metadata]):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Metadata:
        m = common_attn_metadata
        if m.causal is not True:
            refuse("causal", m.causal, "causal attention")
        decodes, _, _, _ = split_decodes_and_prefills(m, decode_threshold=1)
        return Metadata(
            decodes,
            m.num_actual_tokens,
            m.query_start_loc,
            m.seq_lens,
            m.block_table_tensor,
            m.max_query_len,
            m.max_seq_len,
        )


class Impl(AttentionImpl[Metadata]):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if head_size not in checks.HEAD_DIMS:
            refuse("head_size", head_size, ", ".join(map(str, checks.HEAD_DIMS)))
        if kv_cache_dtype not in Backend.supported_kv_cache_dtypes:
            refuse("--kv-cache-dtype", kv_cache_dtype, ", ".join(Backend.supported_kv_cache_dtypes))
        if logits_soft_cap:
            refuse("logits_soft_cap", logits_soft_cap, "none")
        if alibi_slopes is not None:
            refuse("alibi_slopes", "slopes", "none")
        if attn_type != AttentionType.DECODER:
            refuse("attn_type", attn_type, "decoder")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.fp8 = kv_cache_dtype in FP8
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.window = (-1 if sliding_window is None else sliding_window - 1, 0)  # vLLM counts the query itself
        self.sinks = sinks
        say(choice.dense_line())
        logger.info("dense attention: dsv4, %d heads of %d", num_heads, head_size)

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Store key, value [>= N, Hkv, D] in the slots int64 [N]; -1 = nowhere."""
        k_pages, v_pages = self._pages(kv_cache)
        if current_platform.is_cuda():
            from vllm._custom_ops import reshape_and_cache_flash

            reshape_and_cache_flash(
                key, value, k_pages, v_pages, slot_mapping, self.kv_cache_dtype, layer._k_scale, layer._v_scale
            )
            return
        there = (slot_mapping >= 0).nonzero()[:, 0]
        page, row = slot_mapping[there] // k_pages.shape[1], slot_mapping[there] % k_pages.shape[1]
        if self.fp8:
            key, value = (_codes(x, by) for x, by in ((key, layer._k_scale), (value, layer._v_scale)))
        k_pages[page, row], v_pages[page, row] = key[there], value[there]

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write the attention of query to output [>= N, Hq, D]; key and value are in the cache already."""
        if output_scale is not None or output_block_scale is not None:
            refuse("output_scale", "a scale", "none: the output is not quantised here")
        if attn_metadata is None:  # a profile run
            return output.zero_()
        m, (k_pages, v_pages) = attn_metadata, self._pages(kv_cache)
        scales: dict[str, Any] = {}
        if self.fp8:
            k_pages, v_pages = (x.view(torch.float8_e4m3fn) for x in (k_pages, v_pages))
            scales = dict(k_scale=layer._k_scale, v_scale=layer._v_scale)
        sink = None if self.sinks is None else self.sinks.float()
        n = m.decodes
        if n:
            dsv4.fmha_paged(
                query[:n, None],
                k_pages,
                v_pages,
                m.block_table[:n],
                m.lengths[:n],
                causal=True,
                window=self.window,
                sink=sink,
                softmax_scale=self.scale,
                out=output[:n, None],
                **scales,
            )
            calls["dense decode"] += 1
        if m.tokens > n:
            ends = torch.nn.functional.pad(m.lengths[n:].cumsum(0, dtype=torch.int32), (1, 0))
            out = flash_attn_varlen_func(
                query[n : m.tokens],
                k_pages,
                v_pages,
                m.starts[n:] - n,
                ends,
                m.longest_query,
                m.longest,
                softmax_scale=self.scale,
                causal=True,
                window_size=self.window,
                block_table=m.block_table[n:],
                learnable_sink=sink,
                **scales,
            )
            assert isinstance(out, Tensor)
            output[n : m.tokens] = out
            calls["dense prefill"] += 1
        return output

    def _pages(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """View [blocks, Hkv, page, 2 D] as two of [blocks, page, Hkv, D], without a copy."""
        k, v = kv_cache.transpose(1, 2).split(self.head_size, -1)
        return k, v


def _codes(x: Tensor, scale: Tensor) -> Tensor:
    """Divide x by the scale and return the e4m3 codes as bytes."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    by = scale.view(-1, 1)  # one, or one for each KV head
    return (x.float() / by).clamp(-largest, largest).to(torch.float8_e4m3fn).view(torch.uint8)
