"""The definition: every operation of the package in plain torch, in fp64 (or fp32), with no blocking and no tricks.

Everything else (CPU backend, Hopper and Blackwell kernels) is compared with this file. Each attention function
returns ``(out, lse)`` in the ``compute`` dtype, unrounded; the caller rounds. ``p_dtype`` rounds the unnormalised
probabilities exp(s - max) before they meet V, as low-precision kernels do: an oracle run with ``p_dtype`` and its
output rounded to the same dtype is the error that a kernel of that dtype cannot avoid, and tolerances come from it.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

NEG_INF = float("-inf")


def attend(
    q: Tensor,  # [Hq, T, D]
    k: Tensor,  # [Hkv, S, D]
    v: Tensor,  # [Hkv, S, D]
    mask: Tensor,  # [T, S] bool: which key each query sees
    sink: Tensor | None,  # [Hq]
    scale: float,
    compute: torch.dtype,
    p_dtype: torch.dtype | None = None,
    **score,  # options of `scores`
) -> tuple[Tensor, Tensor]:
    """Compute softmax(q k^T * scale) v over the keys seen, one sequence -> out [Hq, T, D], lse [Hq, T] (sink
    excluded).
    """
    q, k, v = q.to(compute), k.to(compute), v.to(compute)
    # A row that no query sees may hold anything: 0 * NaN is NaN, so it leaves before the product.
    v = torch.where(mask.any(0)[:, None], v, 0)

    s = torch.where(mask, scores(over_groups(q, k.mT) * scale, **score), NEG_INF)  # [Hq, T, S]
    top = s.amax(-1) if s.shape[-1] else s.new_full(s.shape[:-1], NEG_INF)
    p = (s - torch.where(top == NEG_INF, 0, top)[..., None]).exp()
    p_sum = p.sum(-1)
    lse = top + p_sum.log()  # -inf where nothing is seen
    if p_dtype is not None:
        p = p.to(p_dtype).to(compute)
    out = over_groups(p, v) / torch.where(p_sum == 0, 1, p_sum)[..., None]
    return apply_sink(out, lse, sink[:, None] if sink is not None else None), lse


def scores(s: Tensor, softcap: float | None = None) -> Tensor:
    """Cap scaled products: scores are between -softcap and softcap. With 0 or None they stay as they are."""
    return softcap * torch.tanh(s / softcap) if softcap else s


def slope(s: Tensor, softcap: float | None = None) -> Tensor | float:
    """Return the derivative of `scores` by the scaled products, from the scores."""
    return 1 - (s / softcap) ** 2 if softcap else 1.0


def over_groups(x: Tensor, y: Tensor) -> Tensor:
    """Multiply x [Hq, T, A] by y [Hkv, A, B] -> [Hq, T, B]: query head h by KV head h // (Hq / Hkv)."""
    return (in_groups(x, y.shape[0]) @ y).reshape(*x.shape[:2], y.shape[2])


def in_groups(x: Tensor, kv_heads: int) -> Tensor:
    """Reshape [Hq, T, A] to [Hkv, (Hq / Hkv) T, A]: what one KV head multiplies, as rows of one matrix."""
    return x.reshape(kv_heads, x.shape[0] // max(kv_heads, 1) * x.shape[1], x.shape[2])


def apply_sink(out: Tensor, lse: Tensor, sink: Tensor | None) -> Tensor:
    """Return out * sum(e^s) / (sum(e^s) + e^sink). The sink is a logit with value 0; it is not scaled and not in
    the LSE.

    -inf leaves out as it is, +inf makes it 0; a row that sees no key is 0 whatever the sink.
    """
    if sink is None:
        return out
    keep = torch.sigmoid(lse - sink.to(lse.dtype))
    return out * torch.where(lse == NEG_INF, 0, keep)[..., None]


def visible(t: int, s: int, causal: bool, window: tuple[int, int], device=None) -> Tensor:
    """Return bool [T, S]: query i sees key j iff i+S-T-left <= j <= i+S-T+right; -1 = no bound; causal: right = 0."""
    left, right = window[0], 0 if causal else window[1]
    i = torch.arange(t, device=device)[:, None] + (s - t)
    j = torch.arange(s, device=device)[None, :]
    mask = torch.ones(t, s, dtype=torch.bool, device=device)
    if left >= 0:
        mask &= j >= i - left
    if right >= 0:
        mask &= j <= i + right
    return mask


def fmha(
    q: Tensor,  # [B, T, Hq, D]
    k: Tensor,  # [B, S, Hkv, D]
    v: Tensor,  # [B, S, Hkv, Dv]
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    sink: Tensor | None = None,  # [Hq]
    k_scale: Tensor | None = None,  # [] or [1] or [Hkv]: what k, in e4m3, is multiplied by
    v_scale: Tensor | None = None,
    softmax_scale: float | None = None,
    compute: torch.dtype = torch.float64,
    p_dtype: torch.dtype | None = None,
    **score,  # softcap: of `scores`
) -> tuple[Tensor, Tensor]:
    """Compute out [B, T, Hq, Dv], lse [B, Hq, T]."""
    b, t, hq, d = q.shape
    k, v = (
        x if by is None else x.to(compute) * by.to(compute).reshape(-1, 1) for x, by in ((k, k_scale), (v, v_scale))
    )
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    mask = visible(t, k.shape[1], causal, window, q.device)
    out = torch.zeros(b, t, hq, v.shape[3], dtype=compute, device=q.device)
    lse = torch.full((b, hq, t), NEG_INF, dtype=compute, device=q.device)
    for n in range(b):
        q1, k1, v1 = (x[n].transpose(0, 1) for x in (q, k, v))  # [H, tokens, D]
        o, lse[n] = attend(q1, k1, v1, mask, sink, scale, compute, p_dtype, **score)
        out[n] = o.transpose(0, 1)
    return out, lse


def fmha_varlen(
    q: Tensor,  # [total_q, Hq, D]
    k: Tensor,  # [total_k, Hkv, D]
    v: Tensor,  # [total_k, Hkv, Dv]
    cu_seqlens_q: Tensor,  # [B + 1]: sequence n owns rows cu[n] .. cu[n+1]
    cu_seqlens_k: Tensor,  # [B + 1]
    **options,
) -> tuple[Tensor, Tensor]:
    """Compute out [total_q, Hq, Dv], lse [total_q, Hq]. Rows past the last sequence: out 0, lse -inf."""
    compute = options.get("compute", torch.float64)
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=compute, device=q.device)
    lse = torch.full(q.shape[:2], NEG_INF, dtype=compute, device=q.device)
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for n in range(len(starts_q) - 1):
        rows, keys = slice(*starts_q[n : n + 2]), slice(*starts_k[n : n + 2])
        o, one_lse = fmha(q[None, rows], k[None, keys], v[None, keys], **options)
        out[rows], lse[rows] = o[0], one_lse[0].T
    return out, lse


def fmha_paged(
    q: Tensor,  # [B, T, Hq, D]
    k_pages: Tensor,  # [P, page, Hkv, D]
    v_pages: Tensor,  # [P, page, Hkv, D]
    block_table: Tensor,  # [B, max_pages]: page numbers; only the first ceil(length / page) are read
    lengths: Tensor,  # [B]: keys of each sequence
    **options,
) -> tuple[Tensor, Tensor]:
    """Compute out [B, T, Hq, D], lse [B, Hq, T]."""
    page = k_pages.shape[1]
    outs, lses = [], []
    for n, length in enumerate(lengths.tolist()):
        pages = block_table[n, : -(-length // page)].long()
        k1, v1 = (x[pages].flatten(0, 1)[None, :length] for x in (k_pages, v_pages))
        o, one_lse = fmha(q[n : n + 1], k1, v1, **options)
        outs.append(o)
        lses.append(one_lse)
    if not outs:
        return fmha(q, q[:, :0], q[:, :0], **options)
    return torch.cat(outs), torch.cat(lses)


def v4_attention(
    q: Tensor,  # [N, H, 512]
    window,  # [rows, 512], [pages, rows per page, 512], or packed rows; each row is key and value
    window_indices: Tensor,  # [N, K] row numbers, -1 = nothing there
    compressed=None,  # the second pool of rows, same forms
    compressed_indices: Tensor | None = None,  # [N, K2]
    *,
    window_lengths: Tensor | None = None,  # [N]: how many entries of the list count, from the first on
    compressed_lengths: Tensor | None = None,  # [N]
    compressed_block_table: Tensor | None = None,  # [R, pages]: instead of a list, the first length rows of these pages
    request_starts: Tensor | None = None,  # [R + 1]: queries starts[r] .. starts[r+1] belong to request r
    inverse_rope: tuple[Tensor, Tensor] | None = None,  # (cos_sin [positions, 64], position of each query [N])
    sink: Tensor | None = None,  # [H]
    softmax_scale: float | None = None,
    compute: torch.dtype = torch.float64,
    p_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute one softmax over the rows listed in both pools, sink once -> out [N, H, 512], lse [N, H]."""
    n_queries, heads, d = q.shape
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    request = request_of(request_starts, n_queries)
    window_rows, compressed_rows = pool_rows(window), pool_rows(compressed)
    out = torch.zeros(n_queries, heads, d, dtype=compute, device=q.device)
    lse = torch.full((n_queries, heads), NEG_INF, dtype=compute, device=q.device)
    for n in range(n_queries):
        rows = [window_rows[listed(window_indices[n], window_lengths, n)]]
        if compressed_block_table is not None and request[n] >= 0:
            page = rows_per_page(compressed)
            j = torch.arange(int(compressed_lengths[n]), device=q.device)
            rows.append(compressed_rows[compressed_block_table[request[n], j // page].long() * page + j % page])
        elif compressed_indices is not None:
            rows.append(compressed_rows[listed(compressed_indices[n], compressed_lengths, n)])
        kv = torch.cat([r.to(compute) for r in rows])[None]  # [1, rows, 512]
        mask = torch.ones(1, kv.shape[1], dtype=torch.bool, device=q.device)
        o, one_lse = attend(q[n][:, None], kv, kv, mask, sink, scale, compute, p_dtype)
        out[n], lse[n] = o[:, 0], one_lse[:, 0]
    if inverse_rope is not None:
        out = apply_rope(out, *inverse_rope, inverse=True)
    return out, lse


def listed(indices: Tensor, lengths: Tensor | None, n: int) -> Tensor:
    """Return the row numbers that query n's list really names."""
    if lengths is not None:
        indices = indices[: int(lengths[n])]
    return indices[indices >= 0].long()


def request_of(request_starts: Tensor | None, n_queries: int) -> list[int]:
    """Request of each query; without request_starts every query is its own; -1 past the last request."""
    if request_starts is None:
        return list(range(n_queries))
    starts, owner = request_starts.tolist(), [-1] * n_queries
    for r in range(len(starts) - 1):
        owner[starts[r] : starts[r + 1]] = [r] * (starts[r + 1] - starts[r])
    return owner


def pool_rows(pool) -> Tensor | None:
    """Return all rows of a pool as [rows, 512]."""
    if pool is None:
        return None
    rows = pool if isinstance(pool, Tensor) else pool.unpack()
    return rows.reshape(-1, rows.shape[-1])


def rows_per_page(pool) -> int:
    """Return the rows of a page: the shape of a [pages, rows, 512] tensor has it, packed rows have an attribute; a
    plain [rows, 512] tensor has pages of one row."""
    if isinstance(pool, Tensor):
        return pool.shape[1] if pool.ndim == 3 else 1
    return pool.rows_per_page


def merge_states(
    outs: Sequence[Tensor],  # each [B, T, H, D] or [N, H, D], made with sink=None
    lses: Sequence[Tensor],  # each [B, H, T] or [N, H]
    sink: Tensor | None = None,  # [H]
    compute: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Attention over the union of disjoint key sets, from the attention over each; the sink enters once, here.

    An LSE of -inf, or of +inf as FlashMLA has it, is that of a row that saw nothing.
    """
    lses = [torch.where(x == -NEG_INF, NEG_INF, x) for x in lses]
    lse = torch.stack([x.to(compute) for x in lses]).logsumexp(0)
    total = torch.zeros(outs[0].shape, dtype=compute, device=outs[0].device)
    for o, part in zip(outs, lses, strict=True):
        weight = torch.where(part == NEG_INF, 0, (part.to(compute) - lse).exp())
        empty = _as_rows(part == NEG_INF, o)  # out of these rows is undefined
        total += torch.where(empty, 0, o.to(compute) * _as_rows(weight, o))
    if sink is not None:
        logit = sink.to(compute)[:, None] if lse.ndim == 3 else sink.to(compute)
        keep = torch.where(lse == NEG_INF, 0, torch.sigmoid(lse - logit))
        total = total * _as_rows(keep, total)
    return total, lse


def _as_rows(x: Tensor, like: Tensor) -> Tensor:
    """Reshape an LSE-shaped tensor to a factor of the output: [B, H, T] -> [B, T, H, 1], [N, H] -> [N, H, 1]."""
    return (x.transpose(1, 2) if like.ndim == 4 else x)[..., None]


def rope_table(
    positions: int,
    dim: int = 64,
    theta: float = 10000.0,
    *,
    factor: float = 1.0,
    original_positions: int = 65536,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    device=None,
) -> Tensor:
    """Return cos and sin of position * frequency, fp32 [positions, dim]: dim/2 cosines, then dim/2 sines.

    factor > 1 is YaRN: slow frequencies are divided by it, fast ones kept, a ramp between; no mscale.
    DeepSeek-V4: theta 10000 on window-only layers; theta 160000, factor 16 on layers with compressed rows.
    """
    freq = theta ** -(torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)
    if factor != 1.0:

        def pair_with(turns: float) -> float:  # the pair that makes this many turns in original_positions
            return dim * math.log(original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = max(math.floor(pair_with(beta_fast)), 0), min(math.ceil(pair_with(beta_slow)), dim - 1)
        pair = torch.arange(dim // 2, dtype=torch.float64, device=device)
        slow = ((pair - low) / max(high - low, 0.001)).clamp(0, 1)  # 0 = kept, 1 = divided
        freq = freq / factor * slow + freq * (1 - slow)
    angle = torch.arange(positions, dtype=torch.float64, device=device)[:, None] * freq
    return torch.cat([angle.cos(), angle.sin()], -1).float()


def apply_rope(x: Tensor, cos_sin: Tensor, positions: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate the interleaved pairs in the last dims of x [N, ..., D] by the angle of positions [N].

    (even, odd) -> (even cos - odd sin, odd cos + even sin); the inverse rotates by -position.
    """
    r = cos_sin.shape[-1]
    cos, sin = cos_sin[positions.long()].to(x.dtype).chunk(2, -1)  # [N, r / 2]
    between = (1,) * (x.ndim - 2)
    cos, sin = (c.reshape(c.shape[0], *between, r // 2) for c in (cos, -sin if inverse else sin))
    even, odd = x[..., -r::2], x[..., x.shape[-1] - r + 1 :: 2]
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
    return torch.cat([x[..., :-r], turned], -1)
