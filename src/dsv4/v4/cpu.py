"""v4_attention on a CPU: query blocks, row blocks, online softmax in fp32.

For each block of queries it gathers the rows they list as fp32, runs two batched GEMMs, and goes on to the next rows.
The GEMMs use torch's threads and run at the speed of the BLAS; bf16 GEMMs are avoided because many CPUs have no
instruction for them. Extra memory is that of one block, whatever the number of queries and rows.

deterministic=True: one query at a time, by one thread, so that only its own rows decide the order of its sums.
"""

from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor

from dsv4.caches import kv as caches
from dsv4.caches.kv import Pool
from dsv4.runtime.threads import one_thread
from dsv4.v4.problem import V4Problem, requests_of

ROW_BLOCK = 512  # rows of one query in one step
BLOCK_BYTES = 24 << 20  # gathered rows, scores and sums (fp32) of one step, all its queries together
NEG_INF = float("-inf")


def forward(p: V4Problem) -> None:
    """Fill p.out and p.lse."""
    with one_thread() if p.deterministic else nullcontext():
        _forward(p)


def _forward(p: V4Problem) -> None:
    rows = min(max(p.window_indices.shape[1], p.compressed_capacity, 1), ROW_BLOCK)
    per_query = rows * p.head_dim + p.q_heads * (rows + 2 * p.head_dim)
    block = 1 if p.deterministic else max(1, BLOCK_BYTES // (4 * per_query))
    owner = requests_of(p) if p.block_table is not None else None
    for begin in range(0, p.batch, block):
        _query_block(p, slice(begin, min(begin + block, p.batch)), owner)


def _query_block(p: V4Problem, queries: slice, owner: Tensor | None) -> None:
    q = p.q[queries].float() * p.softmax_scale  # [b, H, D]
    b, heads, d = q.shape
    top = q.new_full((b, heads, 1), NEG_INF)
    total = q.new_zeros(b, heads, 1)  # sum of e^(s - top)
    acc = q.new_zeros(b, heads, d)  # sum of e^(s - top) * row
    any_visible = torch.zeros(b, 1, 1, dtype=torch.bool, device=q.device)
    for pool, rows in row_blocks(p, queries, owner):
        there = rows >= 0  # [b, k]
        whole = bool(there.all())
        any_visible |= there.any(1)[:, None, None]
        kv = caches.gather_rows(pool, rows.clamp_min(0).flatten(), torch.float32).view(b, -1, d)
        if not whole:
            # Row 0 stands in for an absent row and may hold NaN, which a probability of 0 would not remove.
            kv.masked_fill_(~there[..., None], 0)
        s = torch.bmm(q, kv.mT)  # [b, H, k]
        if not whole:
            s.masked_fill_(~there[:, None], NEG_INF)
        new_top = torch.maximum(top, s.amax(-1, keepdim=True))
        finite_top = new_top.masked_fill(new_top == NEG_INF, 0)  # -inf - -inf would be NaN
        prob = s.sub_(finite_top).exp_()
        decay = (top - finite_top).exp_()
        total = total.mul_(decay).add_(prob.sum(-1, keepdim=True))
        acc = torch.baddbmm(acc.mul_(decay), prob, kv, out=acc)
        top = new_top
    overflown = any_visible & (top == NEG_INF)  # rows are seen, and their scores are all -inf
    total = total.masked_fill_(overflown, float("nan"))
    _finish(p, queries, acc, total, top)


def _finish(p: V4Problem, queries: slice, acc: Tensor, total: Tensor, top: Tensor) -> None:
    empty = total == 0
    lse = top + total.log()  # [b, H, 1]; -inf where nothing was seen
    acc.div_(total.masked_fill(empty, 1))
    if p.sink is not None:
        acc.mul_(torch.sigmoid(lse - p.sink[:, None]).masked_fill_(empty, 0))
    if p.cos_sin is not None:
        r = p.cos_sin.shape[1]
        cos, sin = p.cos_sin[p.positions[queries].long()].chunk(2, -1)  # [b, r / 2]
        pairs = torch.view_as_complex(acc[..., -r:].reshape(*acc.shape[:-1], r // 2, 2))
        pairs = pairs * torch.complex(cos, -sin)[:, None]  # rotate back
        acc[..., -r:] = torch.view_as_real(pairs).flatten(-2)
    p.out[queries] = acc.to(p.out.dtype)
    if p.lse is not None:
        p.lse[queries] = lse[..., 0]


def row_blocks(p: V4Problem, queries: slice, owner: Tensor | None) -> Iterator[tuple[Pool, Tensor]]:
    """Yield (pool, row numbers int64 [b, k <= ROW_BLOCK], -1 = nothing there), without blocks that no query uses."""
    yield from _listed(p.window, p.window_indices[queries], _slice(p.window_lengths, queries))
    if p.compressed_indices is not None:
        yield from _listed(p.compressed, p.compressed_indices[queries], _slice(p.compressed_lengths, queries))
    elif p.block_table is not None:
        owner = owner[queries]
        # Queries past the last request have no table line: length 0, and any line stands in for theirs.
        lengths = p.compressed_lengths[queries].long() * (owner < p.block_table.shape[0])
        line = owner.clamp_max(max(p.block_table.shape[0] - 1, 0))[:, None]
        page = caches.pool_page(p.compressed)
        longest = int(lengths.max())
        for start in range(0, longest, ROW_BLOCK):
            j = torch.arange(start, min(start + ROW_BLOCK, longest), device=lengths.device)
            rows = p.block_table[line, j // page].long() * page + j % page
            yield p.compressed, rows.masked_fill_(j >= lengths[:, None], -1)


def _listed(pool: Pool, indices: Tensor, lengths: Tensor | None) -> Iterator[tuple[Pool, Tensor]]:
    if lengths is not None:
        indices = indices.masked_fill(torch.arange(indices.shape[1], device=indices.device) >= lengths[:, None], -1)
    used = (indices >= 0).any(0).nonzero()  # columns that some query of the block uses
    if used.numel():
        indices = indices[:, int(used[0]) : int(used[-1]) + 1]  # short lists are padded with -1
        for part in indices.split(ROW_BLOCK, 1):
            yield pool, part.long()


def _slice(x: Tensor | None, queries: slice) -> Tensor | None:
    return None if x is None else x[queries]
