"""The gradients of fmha in torch: blocks of queries times blocks of keys, products in fp32 by the BLAS.

The CPU backend; a GPU runs it too for problems without a kernel.

The formulas are those of reference/backward.py. Extra memory is one block of scores and, for the KV heads that are
worked on at once, dK and dV of one sequence in fp32: no matrix of queries times keys.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from dsv4.fmha.backward import FmhaBackward
from dsv4.fmha.cpu import NEG_INF, scores, slope

INF = float("inf")
KEY_BLOCK = 512
QUERY_BLOCK = 256
SCORE_BYTES = 16 << 20  # bytes of the scores of one block
SUM_BYTES = 32 << 20  # bytes of dK and dV of the KV heads processed at once, unless one head needs more


def backward(b: FmhaBackward) -> None:
    """Fill b.dq, b.dk, b.dv and b.dsink, those that are not None."""
    p = b.forward
    dsink = None if b.dsink is None else torch.zeros(b.dsink.shape, dtype=torch.float64, device=b.dsink.device)
    if p.kind == "varlen":
        for x in (b.dq, b.dk, b.dv):
            if x is not None:
                x.zero_()  # rows of no sequence
    for rows, keys, lse, dlse in _sequences(b):
        per_head = 8 * max(keys(p.k).shape[0], 1) * p.head_dim
        heads = max(1, SUM_BYTES // per_head)
        for h in range(0, p.kv_heads, heads):
            kv = slice(h, min(h + heads, p.kv_heads))
            q_heads = slice(kv.start * p.group, kv.stop * p.group)

            def of_q(x: Tensor | None) -> Tensor | None:
                return None if x is None else rows(x)[:, q_heads]  # noqa: B023  called at once

            def of_k(x: Tensor | None) -> Tensor | None:
                return None if x is None else keys(x)[:, kv]  # noqa: B023

            one = _sequence(
                b,
                of_q(p.q),
                of_k(p.k),
                of_k(p.v),
                of_q(p.out),
                of_q(b.dout),
                lse[q_heads],
                None if dlse is None else dlse[q_heads],
                None if p.sink is None else p.sink[q_heads],
                of_q(b.dq),
                of_k(b.dk),
                of_k(b.dv),
            )
            if dsink is not None:
                dsink[q_heads] += one
    if b.dsink is not None:
        b.dsink.copy_(dsink)


def _sequences(b: FmhaBackward) -> Iterator[tuple]:
    """Yield (rows of q, rows of k as functions of a tensor; lse and dlse [Hq, T]) of each sequence."""
    p = b.forward
    if p.kind == "dense":
        for n in range(p.batch):
            one = lambda x, n=n: x[n]  # noqa: E731
            yield one, one, p.lse[n], None if b.dlse is None else b.dlse[n]
        return
    starts_q, starts_k = p.cu_seqlens_q.tolist(), p.cu_seqlens_k.tolist()
    for n in range(p.batch):
        rows, keys = slice(*starts_q[n : n + 2]), slice(*starts_k[n : n + 2])
        yield (
            lambda x, rows=rows: x[rows],
            lambda x, keys=keys: x[keys],
            p.lse[rows].T,
            None if b.dlse is None else b.dlse[rows].T,
        )


def softmax_terms(lse: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (L, L') of lse [H, ...]; both are +inf for a row that sees nothing, so e^(s - L) is 0 without a branch."""
    lse = torch.where(lse == NEG_INF, INF, lse)
    if sink is None:
        return lse, lse
    return lse, torch.logaddexp(lse, sink.to(lse.dtype).reshape(-1, *(1,) * (lse.ndim - 1)))


def live(dlse: Tensor, lse: Tensor) -> Tensor:
    """Return dlse with 0 where nothing is seen: the LSE there is -inf, for which a loss may give NaN."""
    return torch.where(lse == NEG_INF, 0, dlse)


def sink_terms(lse: Tensor, sink: Tensor, delta: Tensor) -> Tensor:
    """Return - sum sigmoid(sink - L) delta of lse and delta [H, ...], in fp64, by head."""
    logit = sink.double().reshape(-1, *(1,) * (lse.ndim - 1))
    share = torch.where(lse == NEG_INF, 0, torch.sigmoid(logit - lse.double()))
    return -(share * delta.double()).flatten(1).sum(1)


def _sequence(
    b: FmhaBackward,
    q: Tensor,  # [T, h * G, D]
    k: Tensor,  # [S, h, D]
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,  # [h * G, T]
    dlse: Tensor | None,
    sink: Tensor | None,  # [h * G]
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
) -> Tensor:
    """Fill dq, dk, dv -> dsink of these heads."""
    p = b.forward
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    (t, heads, d), (s, kv_heads) = q.shape, k.shape[:2]
    group, offset = heads // kv_heads, s - t
    block = max(16, min(QUERY_BLOCK, SCORE_BYTES // (4 * heads * KEY_BLOCK)))
    wanted = [name for name, x in (("k", dk), ("v", dv)) if x is not None]
    sums = {name: torch.zeros(kv_heads, s, d, dtype=compute, device=q.device) for name in wanted}
    dsink = torch.zeros(heads, dtype=torch.float64, device=q.device)

    def packed(x: Tensor) -> Tensor:
        """Reshape [tokens, h * G, D] -> [h, G * tokens, D]"""
        return x.to(compute).unflatten(1, (kv_heads, group)).permute(1, 2, 0, 3).flatten(1, 2)

    def by_row(x: Tensor) -> Tensor:
        """Reshape [h * G, tokens] -> [h, G * tokens, 1]"""
        return x.unflatten(0, (kv_heads, group)).flatten(1, 2)[..., None]

    for begin in range(0, t, block):
        some = slice(begin, min(begin + block, t))
        tokens = some.stop - begin
        first = 0 if p.left < 0 else max(0, begin + offset - p.left)
        last = s if p.right < 0 else min(s, some.stop + offset + p.right)
        q1, dout1 = packed(q[some]) * p.softmax_scale, packed(dout[some])
        delta = (dout1 * packed(out[some])).sum(-1)  # [h, G * tokens]
        if sink is not None:
            dsink += sink_terms(lse[:, some], sink, delta.unflatten(1, (group, tokens)).flatten(0, 1))
        alone, whole = (by_row(x) for x in softmax_terms(lse[:, some].to(compute), sink))
        delta = delta[..., None]
        dlse1 = None if dlse is None else by_row(live(dlse[:, some].to(compute), lse[:, some]))
        if dlse1 is not None and sink is None:  # P is e^(s - L): one term serves both
            delta, dlse1 = delta - dlse1, None
        sum_q = torch.zeros_like(q1) if dq is not None else None
        for at in range(first, last, KEY_BLOCK):
            keys = slice(at, min(at + KEY_BLOCK, last))
            k1, v1 = (x[keys].to(compute).transpose(0, 1) for x in (k, v))  # [h, keys, D]
            score = scores(torch.bmm(q1, k1.mT), p.options)
            by_product = slope(score, p.options)
            hidden = _hidden(begin + offset, tokens, keys, p.left, p.right, group, q.device)
            if hidden is not None:
                score.masked_fill_(hidden, NEG_INF)
            prob = (score - whole).exp_()
            if "v" in sums:
                sums["v"][:, keys].baddbmm_(prob.mT, dout1)
            if sum_q is None and "k" not in sums:
                continue
            ds = torch.bmm(dout1, v1.mT).sub_(delta).mul_(prob)
            if dlse1 is not None:
                ds += score.sub_(alone).exp_().mul_(dlse1)
            if by_product is not None:
                ds *= by_product
            if sum_q is not None:
                sum_q.baddbmm_(ds, k1)
            if "k" in sums:
                sums["k"][:, keys].baddbmm_(ds.mT, q1)
        if dq is not None:
            unpacked = sum_q.mul_(p.softmax_scale).unflatten(1, (group, tokens)).permute(2, 0, 1, 3)
            dq[some].copy_(unpacked.flatten(1, 2))
    for x, name in ((dk, "k"), (dv, "v")):
        if x is not None:
            x.copy_(sums[name].transpose(0, 1))
    return dsink


def _hidden(
    position: int, tokens: int, keys: slice, left: int, right: int, group: int, device: torch.device
) -> Tensor | None:
    """Return which keys are not seen, bool [1, G * tokens, keys], or None; the first query is at `position`."""
    if (left < 0 or keys.start >= position + tokens - 1 - left) and (right < 0 or keys.stop - 1 <= position + right):
        return None
    i = torch.arange(position, position + tokens, device=device)[:, None]
    j = torch.arange(keys.start, keys.stop, device=device)[None, :]
    hidden = torch.zeros(tokens, keys.stop - keys.start, dtype=torch.bool, device=device)
    if left >= 0:
        hidden |= j < i - left
    if right >= 0:
        hidden |= j > i + right
    return hidden.repeat(group, 1)[None]
