"""Compile before the first real call: every kind of call within a plan's capacities is run once."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dsv4.caches.formats import FP8_584
from dsv4.caches.kv import Fp8Cache
from dsv4.runtime import checks
from dsv4.runtime.plan import Plan, plan

WHOLE = 128  # keys: a multiple of every kernel's tile


def warmup(
    operation: Callable,
    *,
    dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
    page_size: int = 64,
    same_kv: bool | None = None,
    fp8: bool | None = None,
    **capacities,
) -> Plan:
    """Make the plan for these capacities and run the operation with it, to compile what calls of that size need.

    Takes the arguments of :func:`plan`, and the dtype and backend of later calls. Which kernel a call uses depends on
    whether there is a causal mask, whether dense keys fill whole tiles, whether deterministic is set (if the plan has
    space for that), whether k is v and, for v4_attention, whether rows are FP8 (only with bf16) and how compressed rows
    are listed. Each combination is run once; same_kv and fp8 restrict this to one kind. page_size: rows per page
    (fmha_paged, index_topk and Fp8Cache). index_topk is run with pages, for lists of 512 and 1024. Returns the plan.
    """
    made = plan(operation, **capacities)
    checks.backend(backend)
    checks.dtype("dtype", dtype, checks.FLOATS)
    page = min(checks.at_least(1, "page_size", page_size), made.max_seqlen_k)
    if fp8 is None and dtype != torch.bfloat16:
        fp8 = False
    packed, same = _kinds("fp8", fp8), _kinds("same_kv", same_kv)
    q = torch.zeros(made.batch, made.max_seqlen_q, made.q_heads, made.head_dim, dtype=dtype, device=made.scratch.device)
    if made.operation == "index_topk":
        for tensors, options in _index_calls(made, q[:, 0], page):
            operation(*tensors, **options, plan=made, backend=backend)
        return made
    masks: list[dict[str, bool]]
    if made.operation == "v4_attention":
        calls, masks = _v4_calls(made, q[:, 0], page, packed), [{}]
    else:
        calls, masks = _fmha_calls(made, q, page, same), [dict(causal=False), dict(causal=True)]
    orders = (False, True) if capacities.get("deterministic", True) else (False,)
    for tensors, options in calls:
        for mask in masks:
            for deterministic in orders:
                operation(*tensors, **options, **mask, deterministic=deterministic, plan=made, backend=backend)
    return made


def _kinds(name: str, only: bool | None) -> tuple[bool, ...]:
    return (False, True) if only is None else (checks.flag(name, only),)


def _fmha_calls(made: Plan, q: Tensor, page_size: int, same_kv: tuple[bool, ...]) -> Iterator[tuple[tuple, dict]]:
    """(tensors, options) of a call with one key per sequence, for each kind; dense keys also in whole tiles."""
    starts = torch.arange(made.batch + 1, dtype=torch.int32, device=q.device)
    for same in same_kv:
        if made.operation == "fmha_paged":
            k = q.new_zeros(1, page_size, made.kv_heads, made.head_dim)
            table = torch.zeros(made.batch, 1, dtype=torch.int32, device=q.device)
            yield (q, k, k if same else k.clone(), table, torch.ones_like(table[:, 0])), {}
            continue
        for keys in (1,) if made.operation == "fmha_varlen" or made.max_seqlen_k < WHOLE else (1, WHOLE):
            k = q.new_zeros(made.batch, keys, made.kv_heads, made.head_dim)
            v = k if same else k.clone()
            if made.operation == "fmha_varlen":
                yield (q.flatten(0, 1), k[:, 0], v[:, 0], starts * made.max_seqlen_q, starts), {}
            else:
                yield (q, k, v), {}


def _v4_calls(made: Plan, q: Tensor, page_size: int, fp8: tuple[bool, ...]) -> Iterator[tuple[tuple, dict]]:
    """(tensors, options) of a call with one listed row, for each kind of pool and of compressed rows that fit."""
    numbers = torch.zeros(made.batch, 1, dtype=torch.int32, device=q.device)
    for packed in fp8:
        if packed and made.head_dim != FP8_584.values:
            continue
        rows = q.new_zeros(page_size, made.head_dim)
        pool = Fp8Cache.pack(rows, rows_per_page=page_size) if packed else rows
        yield (q, pool, numbers), {}
        if made.max_seqlen_k > 1:
            yield (q, pool, numbers, pool, numbers), {}
        if made.max_seqlen_k > page_size:
            paged = pool if packed else rows[None]
            yield (q, pool, numbers, paged), dict(compressed_block_table=numbers, compressed_lengths=numbers[:, 0] + 1)


def _index_calls(made: Plan, q: Tensor, page_size: int) -> Iterator[tuple[tuple, dict]]:
    """(tensors, options) of a call in which every query is its own request, and of one with one request."""
    k, weights = q.new_zeros(1, page_size, made.head_dim), q[..., 0]
    lengths = torch.ones(len(q), dtype=torch.int32, device=q.device)
    table = torch.zeros(len(q), made.max_seqlen_k // page_size, dtype=torch.int32, device=q.device)
    starts = torch.tensor([0, len(q)], dtype=torch.int32, device=q.device)
    for topk in (512, 1024):
        yield (q, k, weights, topk), dict(lengths=lengths, block_table=table)
        yield (q, k, weights, topk), dict(lengths=lengths, block_table=table[:1], request_starts=starts)
