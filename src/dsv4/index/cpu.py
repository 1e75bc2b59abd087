"""index_topk and index_blocks in torch: the CPU backend, and the fallback of a GPU without a kernel for a problem."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsv4.caches import index_keys as cache
from dsv4.caches.mxfp4_keys import INDEX_68
from dsv4.index.problem import BLOCK, IndexProblem

BLOCK_BYTES = 32 << 20  # bytes of scores held at once


def forward(p: IndexProblem) -> None:
    """Fill p.out, p.scores and p.blocks."""
    if p.q.ndim == 3:
        _forward(p if p.k.ndim == 3 else replace(p, k=p.k[None]))
        return
    flat: dict[str, Any] = {name: _flat(getattr(p, name)) for name in ("q", "weights", "counts", "out", "scores")}
    _forward(replace(p, **flat))
    for name in ("out", "scores"):  # a batch whose lists are not lines of one tensor was copied
        x = getattr(p, name)
        if x is not None and flat[name].data_ptr() != x.data_ptr():
            x.copy_(flat[name].view(x.shape))


def _flat(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.flatten(0, 1)


def _forward(p: IndexProblem) -> None:
    assert p.out is not None
    p.out.fill_(-1)
    if p.scores is not None:
        p.scores.fill_(float("-inf"))
    if p.blocks is not None:
        p.blocks.fill_(-1)
    m, h = p.max_seqlen_k, p.q_heads
    compute = torch.float64 if p.q.dtype == torch.float64 else torch.float32
    step = max(1, BLOCK_BYTES // max(1, (h + 8) * m * 4))  # 8: sums, comparisons, counts
    visible = p.visible()
    for begin, end, keys, key_scales, names in _sequences(p, visible):
        m = len(keys)
        keys = keys.to(compute).T  # [D, M]
        for first in range(begin, end if m and p.topk else begin, step):
            some = slice(first, min(first + step, end))
            limit = visible[some]
            with torch.autocast(p.q.device.type, enabled=False):  # bf16 scores would choose other rows
                per_head = (_queries(p, some).to(compute).flatten(0, 1) @ keys).relu_().view(len(limit), h, m)
                w = p.weights[some].to(compute)  # [t', H]
                # The scale is applied last, so that scores of whole numbers are exact up to one factor.
                if p.options.bf16_scores:
                    total = (rounded(per_head) * rounded(w)[..., None]).bfloat16().to(compute).sum(1)
                    total = rounded(total)
                else:
                    total = torch.bmm(w[:, None], per_head)[:, 0]  # [t', M]
                total = total * (p.scale if key_scales is None else key_scales * p.scale)
            hidden = torch.arange(m, device=p.q.device) >= limit[:, None]
            # NaN, from an undefined query, would break the counting below.
            total = total.masked_fill_(hidden | total.isnan(), float("-inf"))
            if p.blocks is not None:
                kept = kept_blocks(total, limit, p.topk_blocks)
                p.blocks[some, : kept.shape[1]] = kept
            rows = None
            if p.among is not None:
                total, rows = _within(total, p.among[some])
            chosen, score = lowest_index_topk(total, min(p.topk, total.shape[1]))
            absent = torch.arange(chosen.shape[1], device=p.q.device) >= limit[:, None]
            if rows is not None:
                absent |= score == float("-inf")
                chosen = rows.gather(1, chosen)
            if names is not None:
                chosen = names[chosen]
                absent |= chosen < 0
            p.out[some, : chosen.shape[1]] = chosen.int().masked_fill_(absent, -1)
            if p.scores is not None:
                p.scores[some, : chosen.shape[1]] = score.float().masked_fill_(absent, float("-inf"))


def _sequences(p: IndexProblem, visible: Tensor) -> Iterator[tuple[int, int, Tensor, Tensor | None, Tensor | None]]:
    """Yield (first query, past the last one, keys [M, D], their scales, the names of their rows) of each sequence that
    has queries."""

    def needed(begin: int, end: int, rows: int) -> int:  # on a GPU this would need a synchronisation
        return rows if p.q.is_cuda or begin >= end else int(visible[begin:end].max())

    if p.block_table is None:
        for n, keys in enumerate(p.k):
            begin, end = n * p.tokens, (n + 1) * p.tokens
            yield begin, end, keys[: needed(begin, end, len(keys))], None, None
        return
    pages, page, _ = p.k.shape
    starts = list(range(p.batch + 1)) if p.request_starts is None else p.request_starts.tolist()
    for r, line in enumerate(p.block_table.long()):
        begin, end = min(starts[r], p.batch), min(starts[r + 1], p.batch)
        if begin >= end:
            continue
        line = line[: -(-needed(begin, end, p.max_seqlen_k) // page)]
        # Without value checks, a page may not exist: its rows are NaN, chosen last and named -1.
        bad = ((line < 0) | (line >= pages)).repeat_interleave(page)
        numbers = torch.arange(len(line), device=line.device) if p.options.request_rows else line
        names = (numbers[:, None] * page + torch.arange(page, device=line.device)).flatten().masked_fill(bad, -1)
        some = p.k[line.clamp(0, pages - 1)] if pages else p.k.new_zeros(len(line), page, p.k.shape[2])
        scales = None
        if p.fp8:
            some, scales = cache.unpacked(some)
            some, scales = some.float(), scales.flatten()
        elif p.fp4:
            pages_of = cache.IndexCache.from_pages(some.contiguous(), format=INDEX_68)
            some = pages_of.unpack(torch.float32).view(len(line), page, INDEX_68.values)
        yield begin, end, some.flatten(0, 1).masked_fill(bad[:, None], float("nan")), scales, names


def _queries(p: IndexProblem, some: slice) -> Tensor:
    if p.q_scales is None:
        return p.q[some]
    scales = p.q_scales[some].contiguous()[..., None].view(torch.uint8)
    return INDEX_68.dequantize(p.q[some], scales, torch.float32)


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


def kept_blocks(scores: Tensor, limit: Tensor, most: int) -> Tensor:
    """Return int32 [n, up to most]: for scores [n, m], -inf past what is seen, the blocks with the greatest, rising,
    then -1. The last visible block has precedence; of equal blocks the lower; one without a score is not kept."""
    n, m = scores.shape
    best = torch.nn.functional.pad(scores, (0, -m % BLOCK), value=float("-inf")).unflatten(1, (-1, BLOCK)).amax(-1)
    number = torch.arange(best.shape[1], device=scores.device)
    best = best.masked_fill(number == (limit[:, None] - 1).div(BLOCK, rounding_mode="floor"), float("inf"))
    kept, score = lowest_index_topk(best, min(most, best.shape[1]))
    kept = kept.masked_fill(score == float("-inf"), best.shape[1]).sort(-1).values
    return kept.masked_fill(kept == best.shape[1], -1).int()


def _within(scores: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return, of scores [n, m], (those of the rows in blocks [n, B], -inf for none; these rows), [n, B * BLOCK]."""
    m = scores.shape[1]
    rows = (blocks.long()[..., None] * BLOCK + torch.arange(BLOCK, device=scores.device)).flatten(1)
    there = (rows >= 0) & (rows < m)
    rows = rows.clamp(0, m - 1)
    return scores.gather(1, rows).masked_fill(~there, float("-inf")), rows


def lowest_index_topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return (columns, values) of the k largest of each row [n, m], falling; of equal values the lower column first.

    torch.topk does not define which of equal values it chooses. Its k-th value is certain, and decides the choice here.
    """
    bound = x.topk(k, dim=-1, sorted=True).values[:, -1:]  # [n, 1]
    above = x > bound
    equal = x == bound
    room = k - above.sum(-1, keepdim=True)
    taken = above | (equal & (equal.cumsum(-1) <= room))  # k per row
    columns = torch.nonzero_static(taken, size=x.shape[0] * k)[:, 1].view(-1, k)  # rising in each row; no sync
    values, order = x.gather(1, columns).sort(dim=-1, descending=True, stable=True)
    return columns.gather(1, order), values
