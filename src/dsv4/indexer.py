"""The lightning indexer of CSA layers: which compressed rows a query attends to."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4 import checks

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
BLOCK_BYTES = 32 << 20  # scores held at once


def index_topk(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    topk: int,
    *,
    positions: Tensor | None = None,
    ratio: int = 4,
    lengths: Tensor | None = None,
    scale: float | None = None,
    return_scores: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The topk compressed rows with the highest index scores, for each query -> int32 [N, topk], -1 = nothing there.

    ::

        score(n, s) = scale * sum_h weights[n, h] * relu(q[n, h] . k[s])      s < visible(n)
        visible(n)  = floor((positions[n] + 1) / ratio)                       row s ends with token ratio * (s + 1) - 1

    The entries of a list fall in score; of equal scores (ReLU makes exact zeros) the lower row comes first, and only it
    is taken when there is room for one. A query that sees fewer than topk rows gets them all, then -1.

    Args:
        q: [N, H, D] with k [M, D] and weights [N, H]: one sequence; or [B, T, H, D] with [B, M, D] and [B, T, H]: a
            batch, which gives [B, T, topk]. RoPE is already applied. weights may be negative.
        topk: width of the lists (512 for V4-Flash, 1024 for V4-Pro).
        positions: int32 or int64 [N] (or [B, T]), the token position of each query. Or
        lengths: int32 or int64 [N] (or [B, T]), the number of rows that each query sees, in place of positions.
        scale: default D ** -0.5 * H ** -0.5, as in the model; it does not change the choice.
        return_scores: also return the scores of the chosen rows, fp32 [N, topk], -inf where the index is -1.

    Rows of k that no query sees may hold NaN or inf. Scores are computed in fp32 (fp64 for fp64 q). Memory is that of
    one block of queries.
    """
    visible = _check(q, k, weights, topk, positions, ratio, lengths)
    checks.flag("return_scores", return_scores)
    batched = q.ndim == 4
    if not batched:
        q, k, weights, visible = q[None], k[None], weights[None], visible[None]
    b, t, h, d = q.shape
    m = k.shape[1]
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    factor = d**-0.5 * max(h, 1) ** -0.5 if scale is None else checks.number("scale", scale)
    indices = torch.full((b, t, topk), -1, dtype=torch.int32, device=q.device)
    scores = torch.full((b, t, topk), float("-inf"), dtype=torch.float32, device=q.device)
    step = max(1, BLOCK_BYTES // max(1, (h + 8) * m * 4))  # 8: sums, comparisons, counts
    for n in range(b if m and topk else 0):
        keys = k[n].to(compute).T  # [D, M]
        for begin in range(0, t, step):
            some = slice(begin, begin + step)
            seen = visible[n, some]
            with torch.autocast(q.device.type, enabled=False):  # bf16 scores would choose other rows
                per_head = (q[n, some].to(compute).flatten(0, 1) @ keys).relu_().view(len(seen), h, m)
                w = weights[n, some].to(compute) * factor  # [t', H]
                total = torch.bmm(w[:, None], per_head)[:, 0]  # [t', M]
            hidden = torch.arange(m, device=q.device) >= seen[:, None]
            # NaN, from a query that means nothing, would break the counting below.
            total = total.masked_fill_(hidden | total.isnan(), float("-inf"))
            chosen, score = _lowest_index_topk(total, min(topk, m))
            absent = torch.arange(chosen.shape[1], device=q.device) >= seen[:, None]
            indices[n, some, : chosen.shape[1]] = chosen.int().masked_fill_(absent, -1)
            scores[n, some, : chosen.shape[1]] = score.float().masked_fill_(absent, float("-inf"))
    if not batched:
        indices, scores = indices[0], scores[0]
    return (indices, scores) if return_scores else indices


def _lowest_index_topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(columns, values) of the k largest of each row [n, m], falling; of equal values the lower column first.

    torch.topk leaves open which of equal values it takes; its k-th value is certain, and from that the choice is made.
    """
    bound = x.topk(k, dim=-1, sorted=True).values[:, -1:]  # [n, 1]
    above = x > bound
    equal = x == bound
    room = k - above.sum(-1, keepdim=True)
    taken = above | (equal & (equal.cumsum(-1) <= room))  # k per row
    # rising in each row; the static form needs no sync on a GPU and can be traced
    columns = torch.nonzero_static(taken, size=x.shape[0] * k)[:, 1].view(-1, k)
    values, order = x.gather(1, columns).sort(dim=-1, descending=True, stable=True)
    return columns.gather(1, order), values


def _check(q, k, weights, topk, positions, ratio, lengths) -> Tensor:
    """Rows visible to each query, after looking at everything."""
    if not checks.is_tensor(q) or q.ndim not in (3, 4):
        checks.fail("q", checks.describe(q), "a tensor [N, H, D] or [B, T, H, D]")
    lead, h, d = tuple(q.shape[:-2]), q.shape[-2], q.shape[-1]
    like = ("q", q)
    checks.tensor("q", q, tuple(q.shape), FLOATS, unit_last=False)
    if d == 0:
        checks.fail("q", f"shape {list(q.shape)}", "a head dim of at least 1")
    checks.tensor("k", k, (*lead[:-1], "M", d), FLOATS, like=like, unit_last=False)
    checks.tensor("weights", weights, (*lead, h), FLOATS, like=like, unit_last=False)
    checks.forward_only(q=q, k=k, weights=weights)
    checks.at_least(0, "topk", topk)
    checks.at_least(1, "ratio", ratio)
    if (positions is None) == (lengths is None):
        checks.fail("positions, lengths", "neither" if lengths is None else "both", "one of them")
    name, x = ("positions", positions) if lengths is None else ("lengths", lengths)
    checks.tensor(name, x, lead, (torch.int32, torch.int64), like=like, unit_last=False)
    m = k.shape[-2]
    if checks.values_checked(q):
        # A position needs the rows that end at or before it to be there.
        checks.in_range(name, x, 0, m if lengths is not None else (m + 1) * ratio - 2)
    visible = x.long() if lengths is not None else (x.long() + 1) // ratio
    return visible.clamp(0, m)
