"""What a plan for fmha, fmha_varlen and fmha_paged reserves, and the calls that warm it up."""

from collections.abc import Iterator

import torch
from torch import Tensor

from dsv4.runtime.plan import Capacities, Plan
from dsv4.runtime.splits import ROWS_PER_TILE, deterministic_cut, fmha_splits
from dsv4.runtime.warmup import Kinds

WHOLE = 128  # keys: a multiple of every kernel's tile


def splits_of(c: Capacities, num_sms: int) -> int:
    rows = c.max_seqlen_q * (c.q_heads // c.kv_heads)
    # The same as in kernels without a plan: two warpgroups share a tile of keys, where there are rows for both; two
    # tiles of 64 rows share a multiprocessor.
    large = rows > ROWS_PER_TILE and 64 < c.head_dim < 512
    of_tile = 2 * ROWS_PER_TILE if large else ROWS_PER_TILE
    shared = 1 if large or c.head_dim > 128 else 2
    many_rows = c.batch * c.max_seqlen_q * c.q_heads if rows > ROWS_PER_TILE else 0
    tiles = c.batch * c.kv_heads * -(-rows // of_tile)
    return fmha_splits(tiles, num_sms, c.max_seqlen_k, shared, many_rows)


def reserved_varlen(c: Capacities, num_sms: int, deterministic: bool) -> tuple[int, int]:
    """Return (splits, fp32 words of their partial results). Deterministic calls are not split."""
    splits = splits_of(c, num_sms)
    partials = 0 if splits == 1 else splits * c.batch * c.max_seqlen_q * c.q_heads
    return splits, partials * (c.head_dim + 1)


def reserved(c: Capacities, num_sms: int, deterministic: bool) -> tuple[int, int]:
    """Return the same of dense and paged problems: deterministic calls are cut by their rows and keys."""
    splits, words = reserved_varlen(c, num_sms, deterministic)
    for t in range(1, c.max_seqlen_q + 1) if deterministic else ():
        n, _ = deterministic_cut(t * c.q_heads // c.kv_heads, c.max_seqlen_k)
        if n == 0:
            break
        words = max(words, n * c.batch * t * c.q_heads * (c.head_dim + 1))
    return splits, words


def warmup_calls(made: Plan, q: Tensor, kinds: Kinds) -> Iterator[tuple[tuple, dict]]:
    """Yield (tensors, options) of a call with one key per sequence, for each kind; dense keys also in whole tiles."""
    scales = dict(k_scale=q.new_ones(1, dtype=torch.float32)) if _codes(kinds) else {}
    for tensors in _warmup_tensors(made, q, kinds):
        for causal in (False, True):
            for deterministic in kinds.deterministic:
                yield tensors, dict(causal=causal, deterministic=deterministic, **scales)


def _codes(kinds: Kinds) -> bool:
    """Return whether only FP8 caches are requested."""
    return kinds.fp8 == (True,)


def _warmup_tensors(made: Plan, q: Tensor, kinds: Kinds) -> Iterator[tuple]:
    dtype = torch.float8_e4m3fn if _codes(kinds) else q.dtype
    starts = torch.arange(made.batch + 1, dtype=torch.int32, device=q.device)
    for same in kinds.same_kv:
        if made.operation == "fmha_paged":
            k = q.new_zeros(1, kinds.page_size, made.kv_heads, made.head_dim).to(dtype)
            table = torch.zeros(made.batch, 1, dtype=torch.int32, device=q.device)
            yield q, k, k if same else k.clone(), table, torch.ones_like(table[:, 0])
            continue
        for keys in (1,) if made.operation == "fmha_varlen" or made.max_seqlen_k < WHOLE else (1, WHOLE):
            k = q.new_zeros(made.batch, keys, made.kv_heads, made.head_dim).to(dtype)
            v = k if same else k.clone()
            if made.operation == "fmha_varlen":
                yield q.flatten(0, 1), k[:, 0], v[:, 0], starts * made.max_seqlen_q, starts
            else:
                yield q, k, v
