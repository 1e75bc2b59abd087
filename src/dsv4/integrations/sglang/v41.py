"""SGLang's indexer of DeepSeek-V4.1 on dsv4, in decode: FP4 keys of 68 bytes in SGLang's pages, lists of slots.

SGLang has three kinds of layers with an indexer: those that choose among all rows, one that also keeps the best blocks
of 8, and those that choose among these. On Hopper a Triton kernel scores all rows of each of them, masked for the last
kind; here these score no row outside the blocks. Scores are rounded as in DeepSeek's reference, and in SGLang. Queries
come from SGLang with values of e2m1, so packing them changes none. Prompts, and the writing of keys, stay SGLang's.
"""

from typing import Any

from torch import Tensor

import dsv4
from dsv4.caches.index_keys import quantize_queries_fp4
from dsv4.caches.mxfp4_keys import INDEX_68
from dsv4.index.sizes import BLOCK
from dsv4.integrations.sglang import PARTS_SWITCH, calls, refuse


def topk_decode(self: Any, inputs: Any) -> None:
    """Replace the method of FullTopKIndexer."""
    if call := _call(self, inputs):
        dsv4.index_topk(*call[0], **call[1])


def publish_decode(self: Any, inputs: Any) -> Any:
    """Replace the method of DenseBlocksBackend -> SGLang's record of the kept blocks, int32 [n, blocks]."""
    from sglang.srt.layers.attention.dsv4.v41_indexer.dense_blocks import BlockIds

    if self.block_size != BLOCK:
        refuse("candidate_block_size", self.block_size, f"{BLOCK}, or {PARTS_SWITCH} without indexer")
    call = _call(self, inputs)
    return BlockIds(blocks=dsv4.index_blocks(*call[0], self.topk_blocks, **call[1])[1]) if call else None


def consume_decode(self: Any, inputs: Any, published: Any) -> None:
    """Replace the method of DenseBlocksBackend."""
    if call := _call(self, inputs):
        dsv4.index_topk(*call[0], blocks=published.blocks, **call[1])


def _call(backend: Any, inputs: Any) -> tuple[tuple[Tensor, dsv4.IndexCache, Tensor, int], dict[str, Any]] | None:
    """Return the arguments for one query of each row, which may be a draft; None where there is no row."""
    m, indexer, n = inputs.paged_metadata, inputs.indexer, inputs.req_rows.shape[0]
    if n == 0:
        inputs.reset_outputs()
        return None
    pages = backend.token_to_kv_pool.get_index_k_with_scale_buffer(inputs.layer_id)
    rows, bytes_ = m.compressed_page_size, INDEX_68.row_bytes
    if pages.shape[1] < rows * bytes_:
        refuse("index keys", f"{rows} rows in {pages.shape[1]} bytes", f"rows of {bytes_}: FP4 keys")
    cache = dsv4.IndexCache.from_pages(pages[:, : rows * bytes_].unflatten(1, (rows, bytes_)), format=INDEX_68)
    q, scales = quantize_queries_fp4(indexer.queries(inputs.q_lora, inputs.freqs_cis[inputs.positions]))
    options = dict(
        q_scales=scales,
        lengths=((inputs.positions + 1) // inputs.compress_ratio).int(),
        block_table=m.page_table[:n],
        scale=1.0,
        bf16_scores=True,
        out=inputs.out_page_indices[:n, : indexer.index_topk],
    )
    calls["index"] += 1
    return (q, cache, indexer.head_weights(inputs.x).float(), indexer.index_topk), options
