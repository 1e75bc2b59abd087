"""vLLM's sparse indexer of DeepSeek-V4 and V4.1 on dsv4.index_topk: FP8 keys in vLLM's pages, or V4.1's own FP4 keys
that v41.py writes, and lists in rows of the request.

vLLM gathers the keys of a prompt into a workspace, has DeepGEMM write all scores, and chooses from them; in decode the
same with another kernel. Here both are one call that reads the pages. Queries and keys are quantised by vLLM's kernels,
the lists go to vLLM's buffer: nothing around it changes.

V4.1 chooses in two levels. One layer also writes the best blocks of 8 rows to a second buffer; for the layers after it
vLLM masks scores of all rows, here no other rows are scored.
"""

from typing import Any

import torch
from torch import Tensor

import dsv4
from dsv4.caches.mxfp4_keys import INDEX_68
from dsv4.index.sizes import BLOCK, INDEX_BYTES
from dsv4.integrations.vllm import calls, refuse


class Indexer(torch.nn.Module):
    """Replaces SparseAttnIndexer of vLLM's layers, with the same constructor and the same call."""

    def __init__(
        self,
        k_cache: Any,
        quant_block_size: int,
        scale_fmt: str,
        topk_tokens: int,
        head_dim: int,
        max_model_len: int,
        max_total_seq_len: int,
        topk_indices_buffer: Tensor,
        skip_k_cache_insert: bool = False,
        use_fp4_cache: bool = False,
        compress_ratio: int = 1,
        candidate_blocks: Tensor | None = None,
        candidate_block_size: int = 0,
        candidate_write: bool = False,
    ) -> None:
        super().__init__()
        from vllm.config import get_current_vllm_config

        if use_fp4_cache:
            refuse("indexer_kv_dtype", "mxfp4", "fp8")
        if candidate_blocks is not None and candidate_block_size != BLOCK:
            refuse("candidate_block_size", candidate_block_size, str(BLOCK))
        if not skip_k_cache_insert:
            refuse("skip_k_cache_insert", False, "True: the compressor writes the keys")
        parallel = get_current_vllm_config().parallel_config
        for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
            if getattr(parallel, name) > 1:
                refuse(name, getattr(parallel, name), "1")
        self.k_cache = k_cache
        self.topk = topk_tokens
        self.ratio = compress_ratio
        self.buffer = topk_indices_buffer
        self.blocks, self.writes_blocks = candidate_blocks, candidate_write

    def forward(self, hidden_states: Tensor, q_quant: Tensor, k: None, weights: Tensor) -> Tensor:
        """Choose rows: q_quant e4m3 [N, H, 128]; weights fp32 [N, H] with the scales of q -> int32 [.., topk]."""
        from vllm.forward_context import get_forward_context

        found = get_forward_context().attn_metadata
        if not isinstance(found, dict):  # a profile run: the scores that are held at once
            torch.empty(INDEX_BYTES, dtype=torch.uint8, device=hidden_states.device)
            return self.buffer
        m = found[self.k_cache.prefix]
        self.buffer[: hidden_states.shape[0]] = -1  # tokens that see no row are in no chunk
        if m.num_prefills:
            self._prefill(m, q_quant, weights)
        if m.num_decode_tokens:
            self._decode(m, q_quant, weights)
        return self.buffer

    def _prefill(self, m: Any, q: Tensor, weights: Tensor) -> None:
        from vllm.model_executor.layers.sparse_attn_indexer import PrefillRowShard

        # For very many tokens a rank chooses for its part only; blocks are not exchanged, so with them it chooses for
        # all.
        shard = None if self.blocks is not None else PrefillRowShard.from_metadata(m.prefill, m.num_decode_tokens)
        for chunk in m.prefill.chunks:
            part = chunk.token_start, chunk.token_end, chunk.cu_seqlen_ks, chunk.cu_seqlen_ke
            if shard is not None:
                part = shard.narrow(chunk)
                if part is None:
                    continue
            first, end, begins, ends = part
            # vLLM counts rows through all requests of the chunk; `begins` identifies the request of a query. A request
            # without a row shares its number with the next one: its queries see nothing in either.
            owner = torch.searchsorted(chunk.cu_seq_lens, begins, right=True) - 1
            requests = torch.arange(chunk.num_reqs + 1, device=owner.device)
            starts = torch.searchsorted(owner, requests).int()
            self._choose(q, weights, slice(first, end), ends - begins, chunk.block_table, starts, m.max_seq_len)
            calls["index prefill"] += 1
        if shard is not None:
            shard.exchange_topk(self.buffer, self.topk)

    def _decode(self, m: Any, q: Tensor, weights: Tensor) -> None:
        d, n = m.decode, m.num_decode_tokens
        requests, width = d.seq_lens.shape
        lengths, starts = d.seq_lens.reshape(-1), None
        if width > 1:  # draft tokens: d.seq_lens[r, -1] is of the last token of request r
            starts = torch.nn.functional.pad(d.decode_lens[:requests].cumsum(0, dtype=torch.int32), (1, 0))
            token = torch.arange(n, device=q.device, dtype=torch.int32)
            owner = (torch.searchsorted(starts, token, right=True) - 1).clamp_max(requests - 1)
            back = starts[owner + 1] - token  # 1 for the last token; less for what fills a graph up
            lengths = d.seq_lens[owner, (width - back).clamp(0, width - 1)]
        self._choose(q, weights, slice(0, n), lengths[:n], d.block_table, starts, m.max_seq_len)
        calls["index decode"] += 1

    def _choose(
        self,
        q: Tensor,
        weights: Tensor,
        some: slice,
        lengths: Tensor,
        table: Tensor,
        starts: Tensor | None,
        longest: int,
    ) -> None:
        keys = self.k_cache.kv_cache
        cache = dsv4.IndexCache.from_pages(keys, format=INDEX_68 if keys.shape[-1] == INDEX_68.row_bytes else None)
        # Memory and time are proportional to the width of the table; kernels are compiled for its powers of two.
        pages = 1 << (-(-longest // (self.ratio * cache.rows_per_page)) - 1).bit_length() if longest else 1
        given = q[some], cache, weights[some], self.topk
        options: dict[str, Any] = dict(
            lengths=lengths,
            block_table=table[:, :pages],
            request_starts=starts,
            scale=1.0,
            request_rows=True,
            out=self.buffer[some, : self.topk],
        )
        if self.blocks is None:
            dsv4.index_topk(*given, **options)
        elif self.writes_blocks:
            self.blocks[some] = dsv4.index_blocks(*given, self.blocks.shape[1], **options)[1]
        else:
            dsv4.index_topk(*given, blocks=self.blocks[some], **options)
