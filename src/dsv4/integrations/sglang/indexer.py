"""SGLang's sparse indexer of DeepSeek-V4 on dsv4.index_topk: FP8 keys in SGLang's pages, lists of slots.

SGLang has DeepGEMM write all scores and chooses from them with a second kernel. Here both are one call that reads the
pages. The compressor, and the kernel that rotates and quantises queries, stay SGLang's; keys and queries carry its
Hadamard rotation alike, which changes no score.
"""

from typing import Any

import torch
from torch import Tensor

import dsv4
from dsv4.integrations.sglang import PARTS_SWITCH, calls, refuse


def forward_c4_indexer(
    self: Any,
    x: Tensor,
    q_lora: Tensor,
    c4_indexer: Any,
    forward_batch: Any,
    alt_streams: list[Any] | None = None,
    enable_multi_stream: bool = False,
    q_lora_ready: Any = None,
    skip_compressor: bool = False,
    q_lora_quant: Any = None,
) -> None:
    """Fill core_metadata.c4_sparse_page_indices. It replaces the method of C4IndexerBackendMixin."""
    if forward_batch.forward_mode.is_idle():
        return
    index, core = self.forward_metadata.indexer_metadata, self.forward_metadata.core_metadata
    _refuse_modes(self, c4_indexer)
    n = min(x.shape[0], q_lora.shape[0], core.positions.shape[0])
    given: dict[str, Any] = dict(
        x=x[:n], q_lora=q_lora[:n], c4_indexer=c4_indexer, positions=core.positions[:n], forward_batch=forward_batch
    )
    if enable_multi_stream:
        q, weights = self._forward_prepare_multi_stream(**given, alt_streams=alt_streams, q_lora_ready=q_lora_ready)
    else:
        quantised = q_lora_quant if q_lora.shape[0] == n else None
        q, weights = self._forward_prepare_normal(**given, skip_compressor=skip_compressor, q_lora_quant=quantised)
    if self.debug_use_external_c4_sparse_indices:
        return
    pages = self.token_to_kv_pool.get_index_k_with_scale_buffer(layer_id=c4_indexer.layer_id)
    cache = dsv4.IndexCache.from_pages(pages.view(pages.shape[0], index.compressed_page_size, -1))
    n = min(q.shape[0], index.compressed_seq_lens.shape[0])
    table, starts = _by_request(index.page_table[:n], forward_batch, index, n)
    slots, rows = core.c4_sparse_page_indices[:n], core.c4_sparse_raw_indices  # rows: for prefill alone
    dsv4.index_topk(
        q[:n],
        cache,
        weights[:n, :, 0],
        slots.shape[1],
        lengths=index.compressed_seq_lens[:n].reshape(-1),
        block_table=table,
        request_starts=starts,
        scale=1.0,
        request_rows=rows is not None,
        out=slots if rows is None else rows[:n],
    )
    if rows is not None:
        _slots(rows[:n], index.page_table[:n], cache.rows_per_page, slots)
    calls["index"] += 1


def _slots(rows: Tensor, table: Tensor, page: int, out: Tensor) -> None:
    """Convert rows of the request [n, K] to slots of the pool by its pages [n, pages]; -1 stays."""
    found = table.gather(1, rows.clamp_min(0).long() // page) * page + rows % page
    out.copy_(torch.where(rows >= 0, found, -1))


def _by_request(table: Tensor, batch: Any, index: Any, n: int) -> tuple[Tensor, Tensor | None]:
    """Return arguments by request: SGLang repeats a request's pages for each of its queries. Where all queries of
    the step are here in the order of the requests, one line of pages for each request is enough, and queries share
    what is read of the keys.
    """
    whole = (
        batch.forward_mode.is_extend_or_draft_extend_or_mixed()
        and batch._original_forward_mode is None
        and batch.tbo_parent_token_range is None
        and not index.use_prefill_cuda_graph
        and batch.extend_seq_lens is not None
        and batch.extend_num_tokens == n
    )
    if not whole:
        return table, None
    starts = torch.nn.functional.pad(batch.extend_seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
    return table[starts[:-1].clamp_max(n - 1).long()], starts


def _refuse_modes(backend: Any, c4_indexer: Any) -> None:
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.state_capturer.indexer_topk import get_global_indexer_capturer

    accepted = f"none, or {PARTS_SWITCH}= for SGLang's own indexer"
    if c4_indexer.use_fp4_indexer:
        refuse("--enable-deepseek-v4-fp4-indexer", "FP4 keys", accepted)
    if backend.hisparse_coordinator is not None:
        refuse("HiSparse", "a coordinator", accepted)
    if get_global_indexer_capturer() is not None:
        refuse("lists that are kept", "a capturer", accepted)
    if get_parallel().attn_cp_size != 1:
        refuse("attention context parallel", get_parallel().attn_cp_size, "1")
