"""The gradients of v4_attention in torch: blocks of queries, blocks of their rows, products in fp32 by the BLAS.

The CPU backend; a GPU runs it too for problems without a kernel.

The formulas are those of reference/backward.py. Extra memory is that of one block and, if a pool is not in fp32, the
sum of its gradient in fp32. Rows are added in the order of the lists, so every run gives the same bits.
"""

import torch
from torch import Tensor

from dsv4.caches import kv as caches
from dsv4.fmha.backward_cpu import NEG_INF, live, sink_terms, softmax_terms
from dsv4.v4 import cpu
from dsv4.v4.backward import V4Backward
from dsv4.v4.problem import requests_of

BLOCK_BYTES = 24 << 20  # gathered rows and their gradient, scores and sums of one step


def backward(b: V4Backward) -> None:
    """Fill b.dq, b.dwindow, b.dcompressed and b.dsink, those that are not None."""
    p = b.forward
    compute = torch.float64 if p.q.dtype == torch.float64 else torch.float32
    sums = {}
    for name, x in (("window", b.dwindow), ("compressed", b.dcompressed)):
        if x is not None:
            here = x.dtype == compute and x.is_contiguous()
            total = x.zero_() if here else torch.zeros(x.shape, dtype=compute, device=x.device)
            sums[name] = total.view(-1, x.shape[-1])
    dsink = torch.zeros(p.q_heads, dtype=torch.float64, device=p.q.device)
    rows = min(max(p.window_indices.shape[1], p.compressed_capacity, 1), cpu.ROW_BLOCK)
    per_query = 2 * rows * p.head_dim + p.q_heads * (3 * rows + 4 * p.head_dim)
    block = max(1, BLOCK_BYTES // (4 * per_query))
    owner = requests_of(p) if p.block_table is not None else None
    for begin in range(0, p.batch, block):
        dsink += _query_block(b, slice(begin, min(begin + block, p.batch)), owner, sums, compute)
    for name, x in (("window", b.dwindow), ("compressed", b.dcompressed)):
        if x is not None and x.data_ptr() != sums[name].data_ptr():
            x.copy_(sums[name].view(x.shape))
    if b.dsink is not None:
        b.dsink.copy_(dsink)


def _query_block(
    b: V4Backward, queries: slice, owner: Tensor | None, sums: dict[str, Tensor], compute: torch.dtype
) -> Tensor:
    """Fill dq of these queries and add to the sums of the rows -> their dsink [H]."""
    p = b.forward
    q = p.q[queries].to(compute) * p.softmax_scale  # [b, H, D]
    dout = b.dout[queries].to(compute)
    lse = p.lse[queries].to(compute)  # [b, H]
    delta = (dout * p.out[queries].to(compute)).sum(-1)
    dsink = torch.zeros(p.q_heads, dtype=torch.float64, device=p.q.device)
    if p.sink is not None:
        dsink = sink_terms(lse.T, p.sink, delta.T)
    alone, whole = (x.T[..., None] for x in softmax_terms(lse.T, p.sink))
    delta = delta[..., None]
    dlse = None if b.dlse is None else live(b.dlse[queries].to(compute), lse)[..., None]
    if dlse is not None and p.sink is None:  # P is e^(s - L): one term serves both
        delta, dlse = delta - dlse, None
    if p.cos_sin is not None:
        dout = _turned(dout, p.cos_sin, p.positions[queries])
    dq = torch.zeros_like(q)
    for pool, rows in cpu.row_blocks(p, queries, owner):
        there = rows >= 0
        kv = caches.gather_rows(pool, rows.clamp_min(0).flatten(), compute).view(*rows.shape, q.shape[-1])
        kv.masked_fill_(~there[..., None], 0)  # row 0 stands in for an absent one and may hold NaN
        score = torch.bmm(q, kv.mT).masked_fill_(~there[:, None], NEG_INF)  # [b, H, k]
        prob = (score - whole).exp_()
        ds = torch.bmm(dout, kv.mT).sub_(delta).mul_(prob)
        if dlse is not None:
            ds += score.sub_(alone).exp_().mul_(dlse)
        if b.dq is not None:
            dq.baddbmm_(ds, kv)
        total = sums.get("window" if pool is p.window else "compressed")
        if total is not None:
            drows = torch.bmm(prob.mT, dout, out=kv).baddbmm_(ds.mT, q)
            total.index_add_(0, rows[there], drows[there])
    if b.dq is not None:
        b.dq[queries] = dq.mul_(p.softmax_scale).to(b.dq.dtype)
    return dsink


def _turned(x: Tensor, cos_sin: Tensor, positions: Tensor) -> Tensor:
    """Rotate interleaved pairs of the last dims of x [b, H, D] by the angles of positions [b]."""
    r = cos_sin.shape[1]
    cos, sin = cos_sin[positions.long()].to(x.dtype)[:, None].chunk(2, -1)
    even, odd = x[..., -r::2], x[..., x.shape[-1] - r + 1 :: 2]
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
    return torch.cat([x[..., :-r], turned], -1)
