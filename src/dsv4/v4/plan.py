"""The memory that a plan for v4_attention reserves, and the calls that warm it up."""

from collections.abc import Iterator

import torch
from torch import Tensor

from dsv4.caches.formats import FP8_584
from dsv4.caches.kv import Fp8Cache
from dsv4.fmha.plan import splits_of
from dsv4.runtime.plan import Capacities, Plan
from dsv4.runtime.splits import DECODE_HEADS, DECODE_KEYS, decode_splits, deterministic_cut
from dsv4.runtime.warmup import Kinds


def reserved(c: Capacities, num_sms: int, deterministic: bool) -> tuple[int, int]:
    """Return (splits, fp32 words of their partial results)."""
    splits = splits_of(c, num_sms)
    partials = 0 if splits == 1 else splits * c.batch * c.max_seqlen_q * c.q_heads
    tiles, blocks = c.batch * -(-c.q_heads // DECODE_HEADS), -(-c.max_seqlen_k // DECODE_KEYS) + 2  # both lists
    partials = max(partials, decode_splits(tiles, num_sms, blocks) * c.batch * c.q_heads)
    if deterministic:
        partials = max(partials, max(deterministic_cut(c.q_heads, c.max_seqlen_k)[0], 1) * c.batch * c.q_heads)
    return splits, partials * (c.head_dim + 1)


def warmup_calls(made: Plan, q: Tensor, kinds: Kinds) -> Iterator[tuple[tuple, dict]]:
    """Yield (tensors, options) of a call with one listed row, for each kind of pool and of compressed rows that fit."""
    for tensors, options in _warmup_tensors(made, q[:, 0], kinds):
        for deterministic in kinds.deterministic:
            yield tensors, options | dict(deterministic=deterministic)


def _warmup_tensors(made: Plan, q: Tensor, kinds: Kinds) -> Iterator[tuple[tuple, dict]]:
    numbers, page = torch.zeros(made.batch, 1, dtype=torch.int32, device=q.device), kinds.page_size
    for packed in kinds.fp8:
        if packed and made.head_dim != FP8_584.values:
            continue
        rows = q.new_zeros(page, made.head_dim)
        pool = Fp8Cache.pack(rows, rows_per_page=page) if packed else rows
        yield (q, pool, numbers), {}
        if made.max_seqlen_k > 1:
            yield (q, pool, numbers, pool, numbers), {}
        if made.max_seqlen_k > page:
            paged = pool if packed else rows[None]
            yield (q, pool, numbers, paged), dict(compressed_block_table=numbers, compressed_lengths=numbers[:, 0] + 1)
