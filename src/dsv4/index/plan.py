"""The memory that a plan for index_topk or index_blocks reserves, and the calls that warm it up."""

from collections.abc import Iterator

import torch
from torch import Tensor

from dsv4.index.sizes import (
    LEAST_SHARES,
    MAX_TOPK,
    MAX_TOPK_SHARED,
    block_words,
    index_block,
    index_list_words,
    index_words,
)
from dsv4.runtime.plan import Capacities, Plan
from dsv4.runtime.warmup import Kinds


def reserved(c: Capacities, num_sms: int, deterministic: bool) -> tuple[int, int]:
    """Return (1, fp32 words), for the scores of a block of queries and the keys that the shares of a query keep."""
    scores = index_block(c.batch, c.max_seqlen_k) * index_words(c.max_seqlen_k)
    return 1, scores + _shared(c, num_sms, 0)


def _shared(c: Capacities, num_sms: int, blocks: int) -> int:
    """Return the fp32 words for the queries that several CTAs share."""
    queries = min(c.batch, num_sms // LEAST_SHARES)
    return max(n * index_list_words(c.max_seqlen_k, num_sms // n, MAX_TOPK_SHARED, blocks) for n in {1, queries or 1})


def reserved_for_blocks(c: Capacities, num_sms: int, deterministic: bool) -> tuple[int, int]:
    """Return the same, plus what the choice of blocks needs."""
    splits, words = reserved(c, num_sms, deterministic)
    words += index_block(c.batch, c.max_seqlen_k) * block_words(c.max_seqlen_k, MAX_TOPK)
    return splits, words + _shared(c, num_sms, MAX_TOPK) - _shared(c, num_sms, 0)


def warmup_calls(made: Plan, q: Tensor, kinds: Kinds) -> Iterator[tuple[tuple, dict]]:
    """Yield (tensors, options) of a call in which every query is its own request, and of one with one request."""
    q = q[:, 0]
    k, weights = q.new_zeros(1, kinds.page_size, made.head_dim), q[..., 0]
    lengths = torch.ones(len(q), dtype=torch.int32, device=q.device)
    table = torch.zeros(len(q), made.max_seqlen_k // kinds.page_size, dtype=torch.int32, device=q.device)
    starts = torch.tensor([0, len(q)], dtype=torch.int32, device=q.device)
    for topk in (512, 1024):
        yield (q, k, weights, topk), dict(lengths=lengths, block_table=table)
        yield (q, k, weights, topk), dict(lengths=lengths, block_table=table[:1], request_starts=starts)
