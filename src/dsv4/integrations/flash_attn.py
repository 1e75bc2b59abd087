"""flash-attn's functions on dsv4: head dims up to 512, on every device that dsv4 supports.

    from dsv4.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

Names, argument positions and shapes are those of flash-attn 2. ``learnable_sink`` is from flash-attn 4; ``s_aux`` is
the same in vLLM's flash-attn 3, and is what transformers passes. Causal masks and ``window_size`` count from the
bottom right corner, as in flash-attn. softmax_lse is fp32 and natural log, [batch, heads, queries] or, varlen, [heads,
total queries].

Where the versions of flash-attn differ from each other, or from dsv4:

* A query that sees no key has out 0 and **lse -inf**, as in flash-attn 3 and 4; flash-attn 2 has +inf. -inf is what
  :func:`dsv4.merge_states` needs.
* lse does not include the sink; in flash-attn 4 it does.
* Head dims other than 64, 128, 256 and 512 (and values narrower than keys) are padded with columns of zeros, which is
  exact and costs a copy. Caches are not copied, so their head dim must be one of the four.
* Any page size works. dsv4 chooses ``num_splits`` itself and ignores the argument. With ``deterministic=True`` every
  result is the same on every run (in flash-attn the flag concerns the backward pass, so it is off by default).

``k_scale`` and ``v_scale`` are dsv4's own: the scales of k and v in float8_e4m3fn (flash-attn 3 has k_descale and
v_descale of another shape, and FP8 queries).

Rejected by name, because dsv4 does not support them: dropout_p, alibi_slopes, cache_leftpad, and gradients through
flash_attn_with_kvcache.
"""

import numbers
from typing import Any

import torch
from torch import Tensor

from dsv4.fmha import problem
from dsv4.fmha.api import fmha, fmha_paged, fmha_varlen
from dsv4.fmha.options import FmhaOptions
from dsv4.integrations.naming import named
from dsv4.runtime import checks
from dsv4.runtime.checks import Backend

# A tensor, or a tuple with the lse. flash-attn has no types: programs written for it use the result as
# what they requested, and a type checker must accept them.
Result = Any


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    backend: Backend = "auto",
) -> Result:
    """Compute q [B, T, Hq, D], k [B, S, Hkv, D], v [B, S, Hkv, Dv] -> out [B, T, Hq, Dv], as :func:`dsv4.fmha` does.

    With return_attn_probs: (out, softmax_lse [B, Hq, T], an empty tensor); flash-attn fills the third only with
    dropout.
    """
    _refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    checks.flag("return_attn_probs", return_attn_probs)
    for name, x in (("q", q), ("k", k), ("v", v)):
        checks.tensor(name, x, ("batch", "seqlen", "heads", "headdim"), checks.CACHED)
    with named(sink="learnable_sink", window="window_size"):
        out, lse = fmha(
            q,
            k,
            v,
            causal=causal,
            window=_window(window_size),
            sink=_sink(learnable_sink, s_aux),
            k_scale=k_scale,
            v_scale=v_scale,
            softmax_scale=softmax_scale,
            softcap=softcap,
            return_lse=True,
            deterministic=deterministic,
            backend=backend,
        )
    return (out, lse, out.new_empty(0)) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    backend: Backend = "auto",
) -> Result:
    """Compute q [total_q, Hq, D], k, v [total_k, Hkv, D or Dv] -> out [total_q, Hq, Dv], as dsv4.fmha_varlen does.

    With block_table int32 [B, pages], k and v are pages [P, page, Hkv, D] and only the differences of cu_seqlens_k
    count: :func:`dsv4.fmha_paged` with every sequence's queries padded to max_seqlen_q. If all sequences have the same
    number of queries (decode), nothing is padded; if one has many and others few, the padding costs work too.

    With return_attn_probs: (out, softmax_lse [Hq, total_q], an empty tensor).
    """
    _refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    checks.flag("return_attn_probs", return_attn_probs)
    checks.tensor("q", q, ("total_q", "heads", "headdim"), checks.FLOATS)
    more: dict[str, Any] = dict(
        causal=causal,
        window=_window(window_size),
        sink=_sink(learnable_sink, s_aux),
        softcap=softcap,
        k_scale=k_scale,
        v_scale=v_scale,
        deterministic=deterministic,
        backend=backend,
    )
    if block_table is None:
        for name, x in (("k", k), ("v", v)):
            checks.tensor(name, x, ("total_k", "heads", "headdim"), checks.CACHED)
        with named(sink="learnable_sink", window="window_size"):
            out, lse = fmha_varlen(
                q,
                k,
                v,
                cu_seqlens_q,
                cu_seqlens_k,
                max_seqlen_q=max_seqlen_q,
                max_seqlen_k=max_seqlen_k,
                softmax_scale=softmax_scale,
                return_lse=True,
                **more,
            )
    else:
        if max_seqlen_k is not None:
            checks.at_least(0, "max_seqlen_k", max_seqlen_k, checks.BOUND)
        with named(sink="learnable_sink", window="window_size", k_pages="k", v_pages="v", lengths="cu_seqlens_k"):
            out, lse = _varlen_paged(
                q, k, v, block_table, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, softmax_scale=softmax_scale, **more
            )
    return (out, lse.T, out.new_empty(0)) if return_attn_probs else out


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    deterministic: bool = False,
    backend: Backend = "auto",
) -> Result:
    """Attend from q [B, T, Hq, D] to a cache, which may be extended first -> out [B, T, Hq, D], lse [B, Hq, T].

    k_cache, v_cache: [Bc, S, Hkv, D], where sequence n uses entry n, or cache_batch_idx[n]; with block_table
    int32 [B, pages]: pages [P, page, Hkv, D]. cache_seqlens (an int, or int32 [B]; None = all rows) are the keys there.

    k, v [B, new, Hkv, D] are written into the caches at cache_seqlens, then attended to. With rotary_cos and
    rotary_sin [positions, r / 2], k is rotated first, at its position in the sequence, and so is q, from position
    cache_seqlens on (all queries at that position if there is neither a causal mask nor a window); in fp32, rounded
    once. The caller must make sure that the cache has room; on a GPU, where dsv4 does not check values, a position
    outside it is a device error.
    """
    _refuse(alibi_slopes=alibi_slopes)
    if cache_leftpad is not None:
        checks.fail("cache_leftpad", checks.describe(cache_leftpad), "None; keys begin with the first row in dsv4")
    for name, flag in (("return_softmax_lse", return_softmax_lse), ("rotary_interleaved", rotary_interleaved)):
        checks.flag(name, flag)
    checks.at_least(0, "num_splits", num_splits)
    checks.tensor("q", q, ("batch", "seqlen", "heads", "headdim"), checks.FLOATS)
    batch, like = q.shape[0], ("q", q)
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        checks.tensor(
            name,
            x,
            ("pages" if block_table is not None else "batch", "rows", "heads", "headdim"),
            checks.CACHED,
            like=like,
        )
    table = _table(k_cache, batch, cache_batch_idx, block_table, like)
    capacity = table.shape[1] * k_cache.shape[1]
    lengths = _seqlens(cache_seqlens, batch, capacity, like)
    window = _window(window_size)
    options: dict[str, Any] = dict(
        causal=causal,
        window=window,
        sink=_sink(learnable_sink, s_aux),
        softmax_scale=softmax_scale,
        softcap=softcap,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    names = dict(
        sink="learnable_sink", window="window_size", k_pages="k_cache", v_pages="v_cache", lengths="cache_seqlens"
    )
    with named(**names):
        tensors = {name: options[name] for name in ("sink", "k_scale", "v_scale")}
        typed = FmhaOptions.checked(None, None, **{name: x for name, x in options.items() if name not in tensors})
        problem.paged(q, k_cache, v_cache, table, lengths, **tensors, options=typed)  # check before anything is written
    checks.backend(backend)
    checks.flag("deterministic", deterministic)
    checks.forward_only(q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, learnable_sink=learnable_sink, s_aux=s_aux)
    if k is not None or v is not None:
        if cache_seqlens is None:
            checks.fail("cache_seqlens", None, "an int or int32 [batch] with k and v: where they are written")
        rotary, local = (rotary_cos, rotary_sin, rotary_interleaved), causal or window != (-1, -1)
        q, lengths = _extended(q, k, v, k_cache, v_cache, table, lengths, rotary, local)
    else:
        for name, given in (("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin)):
            if given is not None:
                checks.fail(name, checks.describe(given), "None without k and v")
    with named(**names):
        out, lse = fmha_paged(
            q,
            k_cache,
            v_cache,
            table,
            lengths,
            return_lse=True,
            deterministic=deterministic,
            backend=backend,
            **options,
        )
    return (out, lse) if return_softmax_lse else out


def _refuse(**arguments: Any) -> None:
    """Reject what flash-attn has and dsv4 lacks; 0 and None switch it off in flash-attn too."""
    for name, x in arguments.items():
        if x is not None and not (isinstance(x, numbers.Real) and x == 0):
            checks.fail(name, checks.describe(x), "None" if name == "alibi_slopes" else "0.0: dsv4 has no " + name)


def _window(x: Any) -> Any:
    """Convert a window: flash-attn 4 writes None for no bound; 2 accepts whatever can be indexed, even a tensor."""
    if checks.is_tensor(x) and x.shape == (2,) and x.dtype in (torch.int32, torch.int64):
        x = x.tolist()
    return tuple(-1 if bound is None else bound for bound in x) if isinstance(x, (tuple, list)) else x


def _sink(x: Any, s_aux: Any) -> Any:
    """Return the sink, which flash-attn passes under either of two names."""
    if s_aux is not None and x is not None:
        checks.fail("s_aux", checks.describe(s_aux), "None together with learnable_sink")
    x = s_aux if x is None else x
    return x.float() if checks.is_tensor(x) and x.dtype in checks.LOW_PRECISION else x


def _varlen_paged(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, cu_q: Tensor, cu_k: Tensor, longest: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return (out [total_q, H, D], lse [total_q, H]) of queries packed end to end and keys in pages.

    The queries of a sequence go to the end of a line of `longest`: visibility counts from the bottom right, so they see
    there what they see alone.
    """
    longest = checks.at_least(0, "max_seqlen_q", longest)
    for name, x in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        checks.int32(name, x, ("B + 1",), ("q", q))
        if x.shape[0] == 0:
            checks.fail(name, "no entries", "B + 1 entries")
    total, batch = q.shape[0], cu_q.shape[0] - 1
    longest = min(longest, total)  # a generous bound must not cost memory
    counts = cu_q.diff()
    if checks.values_checked(cu_q):
        checks.cumulative("cu_seqlens_q", cu_q, total, "q")
        if batch and int(counts.max()) > longest:
            checks.fail("max_seqlen_q", longest, f"at least {int(counts.max())}, the longest sequence in cu_seqlens_q")
    row = torch.arange(total, device=q.device, dtype=torch.int32)
    sequence = torch.searchsorted(cu_q, row, right=True) - 1
    outside = sequence >= batch  # rows past the last sequence
    sequence = sequence.clamp(0, max(batch - 1, 0))
    spare = batch * longest
    place = row.new_full((total,), spare).long()
    if spare:
        place = sequence * longest + (row - cu_q[sequence] + longest - counts[sequence]).clamp(0, longest - 1)
        place = place.masked_fill(outside, spare)
    lines = q.new_zeros(spare + 1, *q.shape[1:]).index_copy(0, place, q)  # the spare row receives the others
    out, lse = fmha_paged(
        lines[:spare].view(batch, longest, *q.shape[1:]), k, v, table, cu_k.diff(), return_lse=True, **options
    )
    outs = torch.cat([out.flatten(0, 1), out.new_zeros(1, *out.shape[2:])])
    lses = torch.cat([lse.transpose(1, 2).flatten(0, 1), lse.new_full((1, lse.shape[1]), float("-inf"))])
    return outs.index_select(0, place), lses.index_select(0, place)


def _extended(
    q: Tensor,
    k: Any,
    v: Any,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    lengths: Tensor,
    rotary: tuple[Any, Any, bool],
    local: bool,
) -> tuple[Tensor, Tensor]:
    """Write k and v into the caches behind the keys there, rotated first if there are tables -> (q, rotated too, the
    lengths then). local: each query is at a position of its own."""
    batch, like, (cos, sin, interleaved) = q.shape[0], ("q", q), rotary
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        checks.writable(name, x)
    new: Any = k.shape[1] if checks.is_tensor(k) and k.ndim == 4 else "new"
    for name, given in (("k", k), ("v", v)):
        shape = (batch, new, *k_cache.shape[2:])
        checks.tensor(name, given, shape, (k_cache.dtype,), like=like, unit_last=False)
    if checks.values_checked(lengths):
        checks.in_range("cache_seqlens", lengths, 0, table.shape[1] * k_cache.shape[1] - new)
    places = lengths[:, None] + torch.arange(new, device=q.device, dtype=torch.int32)  # [B, new]
    if cos is not None or sin is not None:
        cos, sin = _rotary(cos, sin, q.shape[-1], lengths, max(q.shape[1], new), like)
        steps = torch.arange(q.shape[1], device=q.device, dtype=torch.int32) * int(local)
        q = _rotated(q, cos, sin, lengths[:, None] + steps, interleaved)
        k = _rotated(k, cos, sin, places, interleaved)
    _write(k_cache, v_cache, k, v, table, places)
    return q, lengths + new


def _table(cache: Tensor, batch: int, lines: Tensor | None, table: Tensor | None, like: tuple[str, Tensor]) -> Tensor:
    """Return a block table: a cache without one gets one whose pages are as long as its lines."""
    if table is not None:
        if lines is not None:
            checks.fail("cache_batch_idx", checks.describe(lines), "None with block_table")
        return checks.int32("block_table", table, (batch, "pages"), like)
    if lines is not None:
        checks.int32("cache_batch_idx", lines, (batch,), like)
        if checks.values_checked(lines):
            checks.in_range("cache_batch_idx", lines, 0, cache.shape[0] - 1)
        return lines[:, None]
    if cache.shape[0] < batch:
        checks.fail("k_cache", f"{cache.shape[0]} lines", f"at least {batch}, as q, or cache_batch_idx")
    return torch.arange(batch, dtype=torch.int32, device=cache.device)[:, None]


def _seqlens(x: Any, batch: int, capacity: int, like: tuple[str, Tensor]) -> Tensor:
    if checks.is_tensor(x):
        return checks.int32("cache_seqlens", x, (batch,), like)
    n = capacity if x is None else checks.at_least(0, "cache_seqlens", x, "None, an int >= 0 or int32 [batch]")
    return torch.full((batch,), n, dtype=torch.int32, device=like[1].device)


def _rotary(cos: Any, sin: Any, d: int, lengths: Tensor, steps: int, like: tuple[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Check and return both tables."""
    checks.tensor("rotary_cos", cos, ("positions", "r / 2"), checks.FLOATS, like=like, unit_last=False)
    checks.tensor("rotary_sin", sin, tuple(cos.shape), checks.FLOATS, like=like, unit_last=False)
    if not 0 < 2 * cos.shape[1] <= d:
        checks.fail("rotary_cos", f"width {cos.shape[1]}", f"a width from 1 to {d // 2}, half of the rotated dims")
    if checks.values_checked(lengths) and lengths.numel() and int(lengths.max()) + steps > cos.shape[0]:
        needed = int(lengths.max()) + steps
        checks.fail("rotary_cos", f"{cos.shape[0]} positions", f"at least {needed}, cache_seqlens and the new tokens")
    return cos, sin


def _rotated(x: Any, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Return the first r dims of x [B, T, H, D] turned by the angle of positions [B, T]: pairs (0, 1), (2, 3), .. if
    interleaved, else (0, r/2), (1, r/2 + 1), ..."""
    half = cos.shape[1]
    c, s = (table[positions.long()].float()[:, :, None] for table in (cos, sin))  # [B, T, 1, r / 2]
    turn = x[..., : 2 * half].float()
    pairs = turn.unflatten(-1, (half, 2)) if interleaved else turn.unflatten(-1, (2, half)).transpose(-1, -2)
    first, second = pairs.unbind(-1)
    turned = torch.stack([first * c - second * s, second * c + first * s], -1)
    turned = (turned if interleaved else turned.transpose(-1, -2)).flatten(-2)
    return torch.cat([turned.to(x.dtype), x[..., 2 * half :]], -1)


def _write(k_cache: Tensor, v_cache: Tensor, k: Any, v: Any, table: Tensor, places: Tensor) -> None:
    """Write k, v [B, new, Hkv, D] to the places [B, new] of each sequence."""
    size = k_cache.shape[1]
    page = table.long().gather(1, (places // size).long())
    if checks.values_checked(page):
        checks.in_range("block_table", page, 0, k_cache.shape[0] - 1)
    # Indexing counts negative numbers from the end: page -1 must not be the last page of another sequence.
    page = page.masked_fill(page < 0, k_cache.shape[0])
    row = (places % size).long()
    k_cache[page, row] = k
    v_cache[page, row] = v
