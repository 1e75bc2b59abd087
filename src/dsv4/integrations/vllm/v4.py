"""DeepSeek-V4's attention layer of vLLM with its attention on dsv4.

vLLM's layer keeps projections, norms and metadata. Decode reads the FP8 pages, for as many heads as the rank has.
Prefill reads the bf16 workspace that vLLM unpacks pages to: on an H200 faster than reading the pages
(benchmarks/vllm_replay.py).
The indexer is in indexer.py, the compressor in compressor.py, the way of queries and rows to attention in insertion.py.
"""

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import dsv4
from dsv4.caches.pages import PackedRows
from dsv4.integrations.engines import rows_of_prompts
from dsv4.integrations.flash_mla import CACHES
from dsv4.integrations.vllm import calls, choice, compressor, contract, logger, parts, refuse, say
from dsv4.integrations.vllm.insertion import insert

HEADS = 128  # heads of one rank, at most


class Served:
    """What layers of V4 and V4.1 whose attention is dsv4's have in common."""

    served_by_dsv4 = True
    writes_rows = False  # dsv4 does, into the window; set when the layer is built
    query_eps: float | None = None  # of the norm of the queries; None: without a norm
    compress_ratio: int
    scale: float
    attn_sink: Tensor
    prefix: str
    kv_cache: Tensor
    swa_cache_layer: Any
    topk_indices_buffer: Tensor | None
    rotary_emb: Any
    compressor: Any
    indexer: Any

    @classmethod
    def get_padded_num_q_heads(cls, num_heads: int) -> int:
        """Return the number unpadded: FlashMLA's kernels need 64 or 128 heads, these accept any number."""
        if not 1 <= num_heads <= HEADS:
            refuse("num_attention_heads", f"{num_heads} on one rank", f"1 to {HEADS}")
        return num_heads

    def _attend(
        self, q: Tensor, out: Tensor, swa: Any, compressed: Tensor | None, listed: tuple[Tensor, Tensor] | None
    ) -> None:
        """Write the attention of queries q [n, H, 512] in decode to out [n, H, 512]; each draft token is a query.
        listed: (slots [n, K] of compressed pages, how many [n]); None in layers without compressed rows."""
        more: dict[str, Any] = {}
        if listed is not None:
            assert compressed is not None
            more = dict(compressed=pool(compressed), compressed_indices=listed[0], compressed_lengths=listed[1])
        n = len(q)
        dsv4.v4_attention(
            q,
            pool(self.swa_cache_layer.kv_cache),
            swa.decode_swa_indices[:n, 0],
            window_lengths=swa.decode_swa_lens[:n],
            sink=self.attn_sink,
            softmax_scale=self.scale,
            out=out,
            **more,
        )
        calls["decode"] += 1

    def _fused_qnorm_rope_kv_insert(self, q: Tensor, kv: Tensor, positions: Tensor, attn_metadata: Any) -> Tensor:
        """Rotate queries [N, H, 512], after their norm if they have one; store the rows kv [N, 512] in the window's
        pages."""
        if not self.writes_rows or not isinstance(attn_metadata, dict):  # a profile run has no pages
            theirs = super()._fused_qnorm_rope_kv_insert  # type: ignore[misc]
            return theirs(q, kv, positions, attn_metadata)
        window = pool(self.swa_cache_layer.kv_cache)
        slots = attn_metadata[self.swa_cache_layer.prefix].slot_mapping
        calls["insert"] += 1
        return insert(q, kv, positions, window, slots, self.rotary_emb.cos_sin_cache, self.query_eps)


class Forward(Served):
    """The methods that replace vLLM's, for the classes below."""

    eps: float

    def forward_mqa(self, q: Tensor, kv: Tensor, positions: Tensor, output: Tensor) -> None:
        """Write the attention of q to output [N, H, 512]; the rows are in the caches already."""
        from vllm.forward_context import get_forward_context
        from vllm.models.deepseek_v4.nvidia.flashmla import DeepseekV4FlashMLAAttention as Theirs

        found = get_forward_context().attn_metadata
        if found is None:  # a profile run: vLLM reserves the workspace of prefill
            Theirs.forward_mqa(self, q, kv, positions, output)
            return
        swa = found[self.swa_cache_layer.prefix]
        attn = found.get(self.prefix)  # None in layers without compressed rows
        n = swa.num_decode_tokens
        if n:
            listed = None
            if self.compress_ratio == 4:
                listed = self._slots(n, swa, attn)
            elif self.compress_ratio > 1:  # the metadata builder makes the lists once for all layers
                listed = attn.c128a_global_decode_topk_indices[:, 0], attn.c128a_decode_topk_lens
            self._attend(q[:n], output[:n], swa, self.kv_cache, listed)
        if swa.num_prefills:
            copied(Theirs._forward_prefill, flash_mla_sparse_fwd=sparse_fwd)(
                self,
                q=q[n:],
                positions=positions[n:],
                swa_k_cache=self.swa_cache_layer.kv_cache,
                compressed_k_cache=self.kv_cache if self.compress_ratio > 1 else None,
                output=output[n:],
                attn_metadata=attn,
                swa_metadata=swa,
            )

    def _slots(self, n: int, swa: Any, attn: Any) -> tuple[Tensor, Tensor]:
        """Return the indexer's lists, in rows of the request -> (slots of the page pool [n, K], how many [n])."""
        from vllm.models.deepseek_v4.common.ops import compute_global_topk_indices_and_lens

        assert self.topk_indices_buffer is not None
        return compute_global_topk_indices_and_lens(
            self.topk_indices_buffer[:n],
            swa.token_to_req_indices[:n],
            attn.block_table,
            attn.block_size // self.compress_ratio,
            swa.is_valid_token[:n],
        )

    def _begin(self, vllm_config: Any, where: str, heads: int) -> None:
        """Run after vLLM's constructor."""
        self.writes_rows, self.query_eps = "insertion" in parts(), self.eps
        if "compressor" in parts():
            for made in (self.compressor, self.indexer and self.indexer.compressor):
                if made is not None:
                    made.__class__ = compressor.replacing(type(made))  # type: ignore[arg-type]
        say(choice.v4_line(vllm_config))
        logger.info("%s: dsv4%s, %d heads", self.prefix, where, heads)


def pool(pages: Tensor) -> PackedRows:
    """Return pages [P, rows, bytes] of vLLM, whose format follows from the bytes of a row."""
    width = pages.shape[-1]
    if pages.dtype != torch.uint8 or width not in CACHES:
        refuse("--kv-cache-dtype", f"rows of {width} x {pages.dtype}", "rows of 584, 528 or 288 bytes")
    cache, planar, interleaved = CACHES[width]
    format = interleaved if interleaved is not None and contract.interleaved_rows() else planar
    found: PackedRows = cache.from_pages(pages, format=format)
    return found


def sparse_fwd(
    q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, attn_sink: Tensor, topk_length: Tensor, out: Tensor
) -> None:
    """Replace FlashMLA's flash_mla_sparse_fwd as vLLM's prefill calls it: q [n, H, 512], kv [rows, 1, 512], a bf16
    workspace, indices int32 [n, 1, W], what is past topk_length [n] undefined."""
    rows, lists = rows_of_prompts(q, kv[:, 0], indices[:, 0], topk_length)
    dsv4.v4_attention(q, rows, lists, window_lengths=topk_length, sink=attn_sink, softmax_scale=sm_scale, out=out)
    calls["prefill"] += 1


@functools.cache
def copied(theirs: Any, **names: Any) -> Callable[..., None]:
    """Return a copy of a vLLM method in which names are replaced: the one that gathers the rows of prompts into a
    workspace, with sparse_fwd under the name that it calls FlashMLA's function by. vLLM's own method stays as it
    is, for other engines of this process."""
    names = {**theirs.__globals__, **names}
    return types.FunctionType(theirs.__code__, names, theirs.__name__, theirs.__defaults__, theirs.__closure__)


def swa_backend(flashmla: Any) -> type:
    """Return the window backend of vLLM's module for V4 or V4.1, without the schedule that FlashMLA needs."""
    from vllm.v1.attention.backends.mla import sparse_swa

    kinds = [x for name, x in vars(sparse_swa).items() if name.startswith("_LAYER_TYPE_")]

    class Builder(flashmla.DeepseekSparseSWAFlashMLAMetadataBuilder):  # type: ignore[misc]
        def build_tile_scheduler(self, num_decode_tokens: int) -> dict[str, None]:
            return dict.fromkeys(kinds)

    class Backend(flashmla.DeepseekSparseSWAFlashMLABackend):  # type: ignore[misc]
        @staticmethod
        def get_builder_cls() -> type:
            return Builder

    return Backend


@functools.cache
def cuda_class() -> type:
    """Return the class for the NVIDIA model."""
    from vllm.models.deepseek_v4.nvidia import flashmla

    class Dsv4Attention(Forward, flashmla.DeepseekV4FlashMLAAttention):  # type: ignore[misc]
        swa_backend_cls = swa_backend(flashmla)

        def __init__(self, vllm_config: Any, *rest: Any, **options: Any) -> None:
            check_device()
            super().__init__(vllm_config, *rest, **options)
            self._begin(vllm_config, "", self.padded_heads)

    return Dsv4Attention


@functools.cache
def cpu_class() -> type:
    """Return the class for the CPU model: the NVIDIA model's backends, hence its metadata, on dsv4's CPU path."""
    from vllm.models.deepseek_v4.cpu.cpu_sparse import DeepseekV4CPUAttention
    from vllm.models.deepseek_v4.nvidia import flashmla

    class Dsv4Attention(Forward, DeepseekV4CPUAttention):  # type: ignore[misc]
        backend_cls = flashmla.DeepseekV4FlashMLAAttention.backend_cls
        swa_backend_cls = swa_backend(flashmla)

        def __init__(self, vllm_config: Any, *rest: Any, **options: Any) -> None:
            from vllm.v1.worker import workspace

            if not workspace.is_workspace_manager_initialized():  # vLLM's CPU worker does without
                workspace.init_workspace_manager(torch.device("cpu"))
            super().__init__(vllm_config, *rest, **options)
            self._begin(vllm_config, " on a CPU", self.padded_heads)

    return Dsv4Attention


def check_device() -> None:
    """Check, before a model is loaded, that dsv4 has kernels for this GPU and this Triton."""
    from dsv4.runtime import dispatch

    try:
        dispatch.kernel_module("v4", dispatch.capability_of())
    except RuntimeError as why:
        refuse("the GPU", why, "compute capability 9.0, or 10.0 and 10.3 with Triton 3.9 or DSV4_AOT")
