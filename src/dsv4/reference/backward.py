"""The definition of every gradient: explicit formulas in plain torch, in fp64 (or fp32), no blocking and no tricks.

With s_ij = scale q_i.k_j, L_i the LSE (sink excluded) and L'_i = log(e^L_i + e^sink)::

    P_ij    = e^(s_ij - L'_i) where seen, else 0          delta_i = dO_i . O_i
    dV_j    = sum_i P_ij dO_i                             dS_ij   = P_ij (dO_i . v_j - delta_i) + e^(s_ij - L_i) dL_i
    dQ_i    = scale sum_j dS_ij k_j                       dK_j    = scale sum_i dS_ij q_i
    dsink   = - sum_i e^(sink - L'_i) delta_i             over all queries of the head
    softcap:  s_ij = softcap tanh(scale q_i.k_j / softcap), and dS_ij is multiplied by 1 - (s_ij / softcap)^2

They are not autograd through forward.py, which gives NaN for a row that sees nothing; tests compare the two where
both are defined. ``p_dtype`` rounds what a kernel of that dtype must round: O before delta, P and dS before their
products. Such an oracle, its results rounded too, is the error that a kernel cannot avoid: tolerances come from it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.reference import forward as reference
from dsv4.reference.forward import NEG_INF, in_groups, over_groups


class FmhaGradients(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None


class V4Gradients(NamedTuple):
    q: Tensor
    window: Tensor  # shape of its pool, as for compressed
    compressed: Tensor | None
    sink: Tensor | None


def rounded(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Round x as a kernel does: scaled by a power of two first, because fp16 has few exponents."""
    if dtype is None or x.numel() == 0:
        return x
    size = x.abs().max()
    scale = 2.0 ** (10 - torch.log2(torch.where(size == 0, 1, size)).floor())
    return (x * scale).to(dtype).to(x.dtype) / scale


def attend(
    q: Tensor,  # [Hq, T, D]
    k: Tensor,  # [Hkv, S, D]
    v: Tensor,  # [Hkv, S, D]
    mask: Tensor,  # [T, S] bool
    sink: Tensor | None,  # [Hq]
    scale: float,
    dout: Tensor,  # [Hq, T, D]
    dlse: Tensor | None,  # [Hq, T]
    compute: torch.dtype,
    p_dtype: torch.dtype | None = None,
    **score,  # options of reference.scores and reference.slope
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Compute the gradients of one sequence: dq [Hq, T, D], dk and dv [Hkv, S, D], dsink [Hq]."""
    out, _ = reference.attend(q, k, v, mask, sink, scale, compute, p_dtype, **score)
    if p_dtype is not None:
        out = out.to(p_dtype).to(compute)
    q, k, v, dout = (x.to(compute) for x in (q, k, v, dout))
    used = mask.any(0)[:, None]  # a row that no query sees may hold NaN
    k, v = torch.where(used, k, 0), torch.where(used, v, 0)

    found = reference.scores(over_groups(q, k.mT) * scale, **score)
    s = torch.where(mask, found, NEG_INF)
    lse = s.logsumexp(-1)
    empty = lse == NEG_INF
    alone = torch.where(mask & ~empty[..., None], (s - torch.where(empty, 0, lse)[..., None]).exp(), 0)
    keep = torch.ones_like(lse) if sink is None else torch.sigmoid(lse - sink.to(compute)[:, None])
    keep = torch.where(empty, 0, keep)
    p = alone * keep[..., None]
    delta = (dout * out).sum(-1)
    ds = p * (over_groups(dout, v.mT) - delta[..., None])
    if dlse is not None:
        ds = ds + alone * torch.where(empty, 0, dlse.to(compute))[..., None]
    ds = ds * reference.slope(found, **score)  # unseen: 0 times a finite number
    ds, p = rounded(ds, p_dtype), rounded(p, p_dtype)
    dq = over_groups(ds, k) * scale
    ds, q, p, dout = (in_groups(x, k.shape[0]) for x in (ds, q, p, dout))
    dk, dv = ds.mT @ q * scale, p.mT @ dout
    dsink = None if sink is None else -(torch.where(empty, 0, (1 - keep) * delta)).sum(-1)
    return dq, dk, dv, dsink


def fmha(
    q: Tensor,  # [B, T, Hq, D]
    k: Tensor,  # [B, S, Hkv, D]
    v: Tensor,
    dout: Tensor,  # [B, T, Hq, D]
    dlse: Tensor | None = None,  # [B, Hq, T]
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    sink: Tensor | None = None,
    softmax_scale: float | None = None,
    compute: torch.dtype = torch.float64,
    p_dtype: torch.dtype | None = None,
    **score,  # softcap: of reference.scores
) -> FmhaGradients:
    t, d = q.shape[1], q.shape[3]
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    mask = reference.visible(t, k.shape[1], causal, window, q.device)
    dq, dk, dv = (torch.zeros(x.shape, dtype=compute, device=q.device) for x in (q, k, v))
    dsink = None if sink is None else torch.zeros(sink.shape, dtype=compute, device=q.device)
    for n in range(q.shape[0]):
        q1, k1, v1, dout1 = (x[n].transpose(0, 1) for x in (q, k, v, dout))
        dlse1 = None if dlse is None else dlse[n]
        *grads, one_sink = attend(q1, k1, v1, mask, sink, scale, dout1, dlse1, compute, p_dtype, **score)
        for whole, one in zip((dq, dk, dv), grads, strict=True):
            whole[n] = one.transpose(0, 1)
        if dsink is not None:
            dsink += one_sink
    return FmhaGradients(dq, dk, dv, dsink)


def fmha_varlen(
    q: Tensor,  # [total_q, Hq, D]
    k: Tensor,  # [total_k, Hkv, D]
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    dout: Tensor,  # [total_q, Hq, D]
    dlse: Tensor | None = None,  # [total_q, Hq]
    **options,
) -> FmhaGradients:
    """Compute the gradients of fmha_varlen; rows of no sequence have gradient 0."""
    compute, sink = options.get("compute", torch.float64), options.get("sink")
    grads = [torch.zeros(x.shape, dtype=compute, device=q.device) for x in (q, k, v)]
    dsink = None if sink is None else torch.zeros(sink.shape, dtype=compute, device=q.device)
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for n in range(len(starts_q) - 1):
        rows, keys = slice(*starts_q[n : n + 2]), slice(*starts_k[n : n + 2])
        dlse1 = None if dlse is None else dlse[rows].T[None]
        *ones, one_sink = fmha(q[None, rows], k[None, keys], v[None, keys], dout[None, rows], dlse1, **options)
        for whole, one, where in zip(grads, ones, (rows, keys, keys), strict=True):
            whole[where] = one[0]
        if dsink is not None:
            dsink += one_sink
    return FmhaGradients(*grads, dsink)


def v4_attention(
    q: Tensor,  # [N, H, D]
    window: Tensor,
    window_indices: Tensor,
    compressed: Tensor | None = None,
    compressed_indices: Tensor | None = None,
    *,
    dout: Tensor,  # [N, H, D]
    dlse: Tensor | None = None,  # [N, H]
    window_lengths: Tensor | None = None,
    compressed_lengths: Tensor | None = None,
    compressed_block_table: Tensor | None = None,
    request_starts: Tensor | None = None,
    inverse_rope: tuple[Tensor, Tensor] | None = None,
    sink: Tensor | None = None,
    softmax_scale: float | None = None,
    compute: torch.dtype = torch.float64,
    p_dtype: torch.dtype | None = None,
) -> V4Gradients:
    """Compute the gradients of v4_attention. A row is key and value, so its gradient is dK + dV, once per listing."""
    n_queries, heads, d = q.shape
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    request = reference.request_of(request_starts, n_queries)
    window_rows, compressed_rows = reference.pool_rows(window), reference.pool_rows(compressed)
    dq = torch.zeros(q.shape, dtype=compute, device=q.device)
    dwindow, dcompressed = (
        None if rows is None else torch.zeros(rows.shape, dtype=compute, device=q.device)
        for rows in (window_rows, compressed_rows)
    )
    dsink = None if sink is None else torch.zeros(sink.shape, dtype=compute, device=q.device)
    # out = R(-t) o, so do = R(t) dout, as q was rotated.
    dout = dout.to(compute)
    turned = dout if inverse_rope is None else reference.apply_rope(dout, *inverse_rope)
    for n in range(n_queries):
        of_window = reference.listed(window_indices[n], window_lengths, n)
        of_compressed = of_window[:0]
        if compressed_block_table is not None and request[n] >= 0:
            page = reference.rows_per_page(compressed)
            j = torch.arange(int(compressed_lengths[n]), device=q.device)
            of_compressed = compressed_block_table[request[n], j // page].long() * page + j % page
        elif compressed_indices is not None:
            of_compressed = reference.listed(compressed_indices[n], compressed_lengths, n)
        rows = [window_rows[of_window]]
        if compressed_rows is not None:
            rows.append(compressed_rows[of_compressed])
        kv = torch.cat([r.to(compute) for r in rows])[None]
        mask = torch.ones(1, kv.shape[1], dtype=torch.bool, device=q.device)
        one, dk, dv, one_sink = attend(
            q[n][:, None],
            kv,
            kv,
            mask,
            sink,
            scale,
            turned[n][:, None],
            None if dlse is None else dlse[n][:, None],
            compute,
            p_dtype,
        )
        dq[n] = one[:, 0]
        drows = (dk + dv)[0]
        dwindow.index_add_(0, of_window, drows[: len(of_window)])
        if dcompressed is not None:
            dcompressed.index_add_(0, of_compressed, drows[len(of_window) :])
        if dsink is not None:
            dsink += one_sink
    return V4Gradients(
        dq, dwindow.view(window.shape), None if dcompressed is None else dcompressed.view(compressed.shape), dsink
    )


def merge_states(
    outs: list[Tensor],  # each [B, T, H, D] or [N, H, D]
    lses: list[Tensor],  # each [B, H, T] or [N, H]
    sink: Tensor | None,  # [H]
    dout: Tensor,
    dlse: Tensor | None = None,
    compute: torch.dtype = torch.float64,
) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
    """Compute douts, dlses, dsink of out = keep sum_n w_n o_n, w = softmax of the LSEs, keep = sigmoid(lse - sink)."""
    parts = torch.stack([x.to(compute) for x in lses])
    lse = parts.logsumexp(0)
    empty = lse == NEG_INF
    w = torch.where(parts == NEG_INF, 0, (parts - torch.where(empty, 0, lse)).exp())
    keep, lost = torch.ones_like(lse), torch.zeros_like(lse)
    if sink is not None:
        over = (sink.to(compute)[:, None] if lse.ndim == 3 else sink.to(compute)) - lse
        keep, lost = torch.sigmoid(-over), torch.sigmoid(over)
    keep = torch.where(empty, 0, keep)
    four = dout.ndim == 4
    dots = []
    for o, weight in zip(outs, w, strict=True):
        dot = (torch.where(reference._as_rows(weight == 0, o), 0, o.to(compute)) * dout.to(compute)).sum(-1)
        dots.append(dot.transpose(1, 2) if four else dot)
    g = torch.stack(dots)
    mean = (w * g).sum(0)
    dlses = w * (keep * (g - mean) + keep * lost * mean + (0 if dlse is None else dlse.to(compute)))
    douts = [dout.to(compute) * reference._as_rows(weight * keep, dout) for weight in w]
    dsink = None
    if sink is not None:
        dsink = -(keep * lost * mean).transpose(-1, -2 if four else -1).sum(tuple(range(lse.ndim - 1)))
    return douts, list(dlses), dsink


class CompressGradients(NamedTuple):
    kv: Tensor
    gate: Tensor
    position_bias: Tensor
    norm_weight: Tensor


def compress(
    kv: Tensor,  # [B, L, width]
    gate: Tensor,  # [B, L, width]
    position_bias: Tensor,  # [m, width]
    norm_weight: Tensor,  # [d]
    drows: Tensor,  # [B, L // m, d]
    *,
    cos_sin: Tensor | None = None,
    eps: float = 1e-6,
    compute: torch.dtype = torch.float64,
) -> CompressGradients:
    """Compute the gradients of a whole sequence. Per row: w = softmax(gate + bias), y = sum w c, y / rms * weight,
    RoPE.
    """
    d, m = norm_weight.shape[0], position_bias.shape[0]
    overlap = kv.shape[-1] == 2 * d
    grads = [torch.zeros(x.shape, dtype=compute) for x in (kv, gate, position_bias, norm_weight)]
    dkv, dgate, dbias, dweight = grads
    weight, bias = norm_weight.to(compute), position_bias.to(compute)
    for b in range(kv.shape[0]):
        for w in range(kv.shape[1] // m):
            here = [(j, slice(d, 2 * d) if overlap else slice(0, d)) for j in range(w * m, w * m + m)]
            if overlap and w:
                here = [(j, slice(0, d)) for j in range(w * m - m, w * m)] + here
            c = torch.stack([kv[b, j, half].to(compute) for j, half in here])  # [slots, d]
            logit = torch.stack([gate[b, j, half].to(compute) + bias[j % m, half] for j, half in here])
            p = logit.softmax(0)
            y = (p * c).sum(0)
            rms = (y.square().mean() + eps).sqrt()
            dn = drows[b, w].to(compute)
            if cos_sin is not None:
                at = torch.tensor([w * m])
                dn = reference.apply_rope(dn[None], cos_sin, at, inverse=True)[0]
            yhat = y / rms
            dweight += dn * yhat
            dy = (weight * dn - yhat * (weight * dn * yhat).mean()) / rms
            for (j, half), value, share in zip(here, c, p, strict=True):
                dkv[b, j, half] += share * dy
                dgate[b, j, half] += share * (value - y) * dy
                dbias[j % m, half] += share * (value - y) * dy
    return CompressGradients(*grads)


def index_loss(
    q: Tensor,  # [N, H, D] of the indexer
    k: Tensor,  # [M, D]
    weights: Tensor,  # [N, H]
    indices: Tensor,  # [N, K]: the compressed rows that count, -1 = nothing there
    target: Tensor,  # [N, K]: the attention's weight of each, summed over its heads; divided by its sum here
    *,
    scale: float | None = None,
    compute: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the mean over queries of KL(target || softmax of the index scores) -> loss, dq, dk, dweights."""
    n, h, d = q.shape
    scale = d**-0.5 * h**-0.5 if scale is None else scale
    loss = torch.zeros((), dtype=compute)
    dq, dk, dw = (torch.zeros(x.shape, dtype=compute) for x in (q, k, weights))
    for i in range(n):
        there = indices[i] >= 0
        rows = indices[i][there].long()
        p = target[i][there].to(compute)
        if len(rows) == 0 or p.sum() == 0:
            continue
        p = p / p.sum()
        keys, one_q, one_w = k[rows].to(compute), q[i].to(compute), weights[i].to(compute)
        dots = one_q @ keys.T  # [H, rows]
        score = scale * one_w @ dots.relu()
        loss += torch.xlogy(p, p).sum() - (p * score.log_softmax(-1)).sum()
        ds = scale * (score.softmax(-1) - p) / n
        dw[i] = dots.relu() @ ds
        ddots = torch.where(dots > 0, one_w[:, None] * ds, 0)
        dq[i] = ddots @ keys
        dk.index_add_(0, rows, ddots.T @ one_q)
    return loss / max(n, 1), dq, dk, dw
