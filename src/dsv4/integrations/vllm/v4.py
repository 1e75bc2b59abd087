"""DeepSeek-V4's attention layer of vLLM with its attention on dsv4.

vLLM's layer keeps everything else: projections, norms, RoPE, cache insertion, compressor, indexer, metadata. What it
asks FlashMLA in two ways (decode reads the FP8 pages; prefill first unpacks pages to bf16, joins two lists and then
attends) is one call here, for both: the rows of two page pools, listed by slot. vLLM's metadata has those lists.

Prefill therefore needs no bf16 workspace, and no head is padded.
"""

import functools
from typing import Any

import torch
from torch import Tensor

import dsv4
from dsv4.integrations.vllm import calls, logger, refuse
from dsv4.integrations.vllm.install import check_choice

HEADS = 128  # of one rank, at most


class Forward:
    """The methods that take the place of vLLM's, for the classes below."""

    compress_ratio: int
    scale: float
    attn_sink: Tensor
    prefix: str
    kv_cache: Tensor
    swa_cache_layer: Any
    topk_indices_buffer: Tensor | None

    @classmethod
    def get_padded_num_q_heads(cls, num_heads: int) -> int:
        """As many as there are: FlashMLA's kernels take 64 or 128."""
        if not 1 <= num_heads <= HEADS:
            refuse("num_attention_heads", f"{num_heads} on one rank", f"1 to {HEADS}")
        return num_heads

    def forward_mqa(self, q: Tensor, kv: Tensor, positions: Tensor, output: Tensor) -> None:
        """output [N, H, 512] = attention of q; the rows are in the caches already."""
        from vllm.forward_context import get_forward_context

        found = get_forward_context().attn_metadata
        if found is None:  # a profile run; nothing to reserve
            output.zero_()
            return
        swa = found[self.swa_cache_layer.prefix]
        attn = found.get(self.prefix)  # None in layers without compressed rows
        decodes, prefills = swa.num_decode_tokens, swa.num_prefill_tokens
        if decodes:
            some = slice(0, decodes)
            listed = None
            if self.compress_ratio > 1:
                if self.compress_ratio == 4:
                    listed = self._slots(self.topk_indices_buffer, some, swa, attn)
                else:  # by the metadata builder, once for all layers
                    listed = attn.c128a_global_decode_topk_indices[:, 0], attn.c128a_decode_topk_lens
            self._attend(q[some], output[some], swa.decode_swa_indices[:, 0], swa.decode_swa_lens, listed)
            calls["decode"] += 1
        if prefills:
            some = slice(decodes, decodes + prefills)  # q may be longer: padding of a graph
            listed = None
            if self.compress_ratio == 4:
                listed = self._slots(self.topk_indices_buffer, some, swa, attn)
            elif self.compress_ratio > 1:
                listed = self._slots(attn.c128a_prefill_topk_indices, some, swa, attn, first=decodes)
            self._attend(q[some], output[some], swa.prefill_swa_indices[:, 0], swa.prefill_swa_lens, listed)
            calls["prefill"] += 1

    def _slots(self, rows: Any, some: slice, swa: Any, attn: Any, first: int = 0) -> tuple[Tensor, Tensor]:
        """Lists of row numbers of a request -> (slots of the page pool [n, K], how many [n]). rows[0] is of token
        `first`."""
        from vllm.models.deepseek_v4.common.ops import compute_global_topk_indices_and_lens

        return compute_global_topk_indices_and_lens(
            rows[some.start - first : some.stop - first],
            swa.token_to_req_indices[some],
            attn.block_table,
            attn.block_size // self.compress_ratio,
            swa.is_valid_token[some],
        )

    def _attend(
        self, q: Tensor, out: Tensor, window: Tensor, lengths: Tensor, listed: tuple[Tensor, Tensor] | None
    ) -> None:
        more: dict[str, Any] = {}
        if listed is not None:
            more = dict(
                compressed=dsv4.Fp8Cache.from_pages(self.kv_cache), compressed_indices=listed[0],
                compressed_lengths=listed[1],
            )  # fmt: skip
        dsv4.v4_attention(
            q, dsv4.Fp8Cache.from_pages(self.swa_cache_layer.kv_cache), window, window_lengths=lengths,
            sink=self.attn_sink, softmax_scale=self.scale, out=out, **more,
        )  # fmt: skip


def swa_backend() -> type:
    """vLLM's window backend without FlashMLA's schedule, which its build would ask for."""
    from vllm.models.deepseek_v4.nvidia.flashmla import (
        DeepseekSparseSWAFlashMLABackend,
        DeepseekSparseSWAFlashMLAMetadataBuilder,
    )
    from vllm.v1.attention.backends.mla import sparse_swa

    kinds = [x for name, x in vars(sparse_swa).items() if name.startswith("_LAYER_TYPE_")]

    class Builder(DeepseekSparseSWAFlashMLAMetadataBuilder):
        def build_tile_scheduler(self, num_decode_tokens: int) -> dict[str, None]:
            return dict.fromkeys(kinds)

    class Backend(DeepseekSparseSWAFlashMLABackend):
        @staticmethod
        def get_builder_cls() -> type:
            return Builder

    return Backend


@functools.cache
def cuda_class() -> type:
    """For the NVIDIA model."""
    from vllm.models.deepseek_v4.nvidia.flashmla import DeepseekV4FlashMLAAttention

    class Dsv4Attention(Forward, DeepseekV4FlashMLAAttention):  # type: ignore[misc]
        swa_backend_cls = swa_backend()

        def __init__(self, vllm_config: Any, *rest: Any, **options: Any) -> None:
            check_device()
            super().__init__(vllm_config, *rest, **options)
            logger.info("%s: dsv4, %d heads", self.prefix, self.padded_heads)

    return Dsv4Attention


@functools.cache
def cpu_class() -> type:
    """For the CPU model: the backends, and so the metadata, of the NVIDIA model, on dsv4's CPU path."""
    from vllm.models.deepseek_v4.cpu.cpu_sparse import DeepseekV4CPUAttention
    from vllm.models.deepseek_v4.nvidia.flashmla import DeepseekV4FlashMLAAttention

    class Dsv4Attention(Forward, DeepseekV4CPUAttention):  # type: ignore[misc]
        backend_cls = DeepseekV4FlashMLAAttention.backend_cls
        swa_backend_cls = swa_backend()

        def __init__(self, vllm_config: Any, *rest: Any, **options: Any) -> None:
            check_choice(vllm_config)
            super().__init__(vllm_config, *rest, **options)
            logger.info("%s: dsv4 on a CPU, %d heads", self.prefix, self.padded_heads)

    return Dsv4Attention


def check_device() -> None:
    """Before a model is loaded: whether dsv4 has kernels for this GPU and this Triton."""
    from dsv4.runtime import dispatch

    try:
        dispatch.kernel_module("v4", torch.cuda.get_device_capability())
    except RuntimeError as why:
        refuse("DSV4_VLLM", f"1, but {why}", "compute capability 9.0, or 10.0 with Triton 3.9 or DSV4_AOT")
