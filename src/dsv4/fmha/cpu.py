"""The cpu backend: torch's own CPU flash kernel, called on the blocks where something is seen.

The flash kernel knows no window, no bottom-right causality, no sink, no pages and no row that sees nothing, so a
problem is cut until it fits. Rows and keys without a pair are sliced off, which also keeps out NaN in unseen rows (the
kernel computes 0 * NaN). The kernel gets a rectangle that is wholly seen as it is, a causal triangle with its own
top-left causality, and the rest in blocks of queries with a small additive mask. Pieces that share queries are merged
by their LSE in fp32.

A CPU without bf16 or fp16 products runs the kernel in those types some hundred times slower than in fp32 (measured on
a Neoverse-N1), so there the operands are widened block by block. Extra memory is O(block) whatever the lengths.

How the kernel and the BLAS under it divide their work depends on the batch and on the number of threads, and with that
the order of sums. deterministic=True: one sequence at a time, by one thread.
"""

import platform
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache, reduce

import torch
from torch import Tensor

from dsv4.fmha.options import FmhaOptions
from dsv4.fmha.problem import FmhaProblem
from dsv4.runtime.threads import one_thread

NEG_INF = float("-inf")
QUERY_BLOCK = 128  # queries per masked block
MASK_LIMIT = 1 << 20  # entries of one additive mask
BLOCK_BYTES = 32 << 20  # fp32 queries of one outer block; fp32 keys and values of one chunk
SPLIT_KEYS = 2048  # the fewest keys per thread when a lone product is spread over the threads
FLASH_ROWS = 32  # query rows that the flash kernel gives to one thread when there are few

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


@dataclass(frozen=True)
class Sequences:
    """X sequences alike in length."""

    q: Tensor  # [X, T, Hq, D]
    out: Tensor  # [X, T, Hq, D]
    lse: Tensor | None  # [X, Hq, T]
    keys: int
    chunk: int  # keys that are read at a time, at most
    read: Callable[[int, int], tuple[Tensor, Tensor]]  # keys lo .. hi -> k, v [X, hi - lo, Hkv, D]


def forward(p: FmhaProblem) -> None:
    with one_thread() if p.deterministic else nullcontext():
        _forward(p)


def _forward(p: FmhaProblem) -> None:
    # an fp32 output of 16-bit inputs is a partial result, which is to be rounded once, after it is merged
    # e4m3 times its scale does not fit into 16 bits
    exact = p.k.dtype == p.q.dtype and p.out.dtype == p.q.dtype
    work = p.q.dtype if exact and native(p.q.dtype) else torch.float32
    if p.kind == "varlen":
        p.out.zero_()  # rows of no sequence
        if p.lse is not None:
            p.lse.fill_(NEG_INF)
    for some in _sequences(p, work):
        tokens = some.q.shape[1]
        block = max(QUERY_BLOCK, BLOCK_BYTES // max(4 * some.q[:, :1].numel(), 1))
        for i in range(0, tokens, block):
            _attend_block(p, some, i, min(i + block, tokens), work)


@cache
def native(dtype: torch.dtype) -> bool:
    """Return whether this CPU multiplies matrices of this dtype faster than by way of fp32."""
    if dtype == torch.float32:
        return True
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    # On Arm oneDNN claims fp16, but the flash kernel's products do not use it there.
    return platform.machine() in ("x86_64", "AMD64") and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def sink_last(dtype: torch.dtype) -> bool:
    """Return whether a result is rounded twice: by the flash kernel, and once more when the sink is applied to it."""
    return dtype != torch.float32 and native(dtype)


def _sequences(p: FmhaProblem, work: torch.dtype) -> Iterator[Sequences]:
    """Return the problem as batches of sequences of one length."""
    row_bytes = 2 * 4 * p.kv_heads * p.head_dim  # K and V of one key in fp32
    chunk = max(QUERY_BLOCK, BLOCK_BYTES // row_bytes)

    def lse_of(n: slice) -> Tensor | None:
        return None if p.lse is None else p.lse[n]

    def slices(k: Tensor, v: Tensor) -> Callable[[int, int], tuple[Tensor, Tensor]]:
        return lambda lo, hi: scaled(k[:, lo:hi].to(work), v[:, lo:hi].to(work), p)

    if p.kind == "dense":
        keys = p.k.shape[1]
        if not p.deterministic and (work == p.k.dtype or p.batch * keys <= chunk):
            yield Sequences(p.q, p.out, p.lse, keys, keys, slices(p.k, p.v))
        else:
            chunked = keys if work == p.k.dtype else chunk
            for n in (slice(n, n + 1) for n in range(p.batch)):
                yield Sequences(p.q[n], p.out[n], lse_of(n), keys, chunked, slices(p.k[n], p.v[n]))
    elif p.kind == "varlen":
        starts_q, starts_k = p.cu_seqlens_q.tolist(), p.cu_seqlens_k.tolist()
        for n in range(p.batch):
            rows, own = slice(*starts_q[n : n + 2]), slice(*starts_k[n : n + 2])
            keys = own.stop - own.start
            lse = None if p.lse is None else p.lse[rows].T[None]
            chunked = keys if work == p.k.dtype else chunk
            yield Sequences(
                p.q[None, rows], p.out[None, rows], lse, keys, chunked, slices(p.k[None, own], p.v[None, own])
            )
    else:
        for n, keys in enumerate(p.lengths.tolist()):
            one = slice(n, n + 1)
            yield Sequences(p.q[one], p.out[one], lse_of(one), keys, chunk, _page_reader(p, n, work))


def scaled(k: Tensor, v: Tensor, p: FmhaProblem) -> tuple[Tensor, Tensor]:
    """Multiply k, v [X, S, Hkv, D], which were e4m3, by their scales."""
    k, v = (x if by is None else x.mul_(by.view(-1, 1)) for x, by in ((k, p.k_scale), (v, p.v_scale)))
    return k, v


def _page_reader(p: FmhaProblem, n: int, work: torch.dtype) -> Callable[[int, int], tuple[Tensor, Tensor]]:
    """Gather the pages that hold keys lo .. hi of sequence n."""
    page = p.page_size

    def read(lo: int, hi: int) -> tuple[Tensor, Tensor]:
        ids = p.block_table[n, lo // page : -(-hi // page)].long()
        base = lo // page * page
        k, v = (x[ids].flatten(0, 1)[None, lo - base : hi - base].to(work) for x in (p.k, p.v))
        return scaled(k, v, p)

    return read


def _attend_block(p: FmhaProblem, some: Sequences, begin: int, end: int, work: torch.dtype) -> None:
    """Attend from queries begin .. end to all keys they see, apply the sink, and write the result."""
    rows, group = slice(begin, end), p.group
    offset = some.keys - some.q.shape[1] + begin  # query i of the block stands at key i + offset
    first = 0 if p.left < 0 else max(0, offset - p.left)
    last = some.keys if p.right < 0 else min(some.keys, end - begin + offset + p.right)
    queries = _by_kv_head(some.q[:, rows].to(work), group)
    results: list[tuple[Tensor, Tensor]] | None = None
    for lo in range(first, last, max(some.chunk, 1)):
        k, v = some.read(lo, min(lo + some.chunk, last))
        part = [
            attend(q, k1, v1, offset - lo, p.options)
            for q, k1, v1 in zip(queries, _keys(k, group), _keys(v, group), strict=True)
        ]
        results = part if results is None else [merge(a, b) for a, b in zip(results, part, strict=True)]

    out_block = some.out[:, rows]
    lse_block = None if some.lse is None else some.lse[:, :, rows]
    if results is None:  # nothing is seen
        out_block.zero_()
        if lse_block is not None:
            lse_block.fill_(NEG_INF)
        return
    outs = _by_kv_head(out_block, group)
    lses = [None] * len(outs) if lse_block is None else _by_kv_head(lse_block.transpose(1, 2)[..., None], group)
    sinks = [None] * len(outs)
    if p.sink is not None:
        sinks = _by_kv_head(p.sink[None, None, :, None].expand(some.q.shape[0], -1, -1, -1), group)  # [A, G, 1, 1]
    for (o, lse), out_view, lse_view, sink in zip(results, outs, lses, sinks, strict=True):
        if sink is not None:
            # in fp64: the difference of an LSE and a large sink loses bits that the exponential multiplies
            keep = torch.where(lse == NEG_INF, 0, torch.sigmoid(lse.double() - sink[..., 0]))
            o = o * keep[..., None].to(lse.dtype)
        out_view.copy_(o)
        if lse_view is not None:
            lse_view.copy_(lse[..., None])


def _by_kv_head(x: Tensor, group: int) -> list[Tensor]:
    """View [X, T, Hq, D] as [A, G, T, D]; all heads of an entry a read the same keys if G > 1.

    Three dimensions (X, Hkv, G) do not fit into two without a copy unless one of them is 1, so X is walked otherwise.
    """
    if group == 1 or group == x.shape[2]:
        return [x.transpose(1, 2)]
    return [one.unflatten(1, (-1, group)).permute(1, 2, 0, 3) for one in x]


def _keys(x: Tensor, group: int) -> list[Tensor]:
    """View [X, S, Hkv, D] as [A, G, S, D] to match :func:`_by_kv_head`; G has stride 0."""
    if group == 1:
        return [x.transpose(1, 2)]
    if x.shape[2] == 1:
        return [x.transpose(1, 2).expand(-1, group, -1, -1)]
    return [one.transpose(0, 1)[:, None].expand(-1, group, -1, -1) for one in x]


def scores(products: Tensor, options: FmhaOptions) -> Tensor:
    """Compute scores, in place, of products q . k that are multiplied by softmax_scale."""
    if options.softcap is not None:
        products.div_(options.softcap).tanh_().mul_(options.softcap)
    return products


def slope(scores: Tensor, options: FmhaOptions) -> Tensor | None:
    """Return the derivative of `scores` by the products, from the scores; None: 1."""
    return None if options.softcap is None else 1 - (scores / options.softcap).square_()


def attend(
    q: Tensor,  # [A, G, T, D]
    k: Tensor,  # [A, G, S, D]
    v: Tensor,  # [A, G, S, D]
    offset: int,
    options: FmhaOptions,
) -> tuple[Tensor, Tensor]:
    """Compute attention -> out [A, G, T, D], lse [A, G, T] fp32. Query i sees key j iff i+offset-left <= j <=
    i+offset+right.
    """
    left, right, scale = options.window_left, options.window_right, options.softmax_scale
    t, s = q.shape[2], k.shape[2]
    begin = 0 if right < 0 else max(0, -offset - right)  # the first query that sees a key here
    end = t if left < 0 else min(t, s - offset + left)  # one past the last
    if begin >= end or s == 0:
        return _nothing_visible(q)
    if end - begin < t:
        out, lse = _nothing_visible(q)
        some = slice(begin, end)
        out[:, :, some], lse[:, :, some] = attend(q[:, :, some], k, v, offset + begin, options)
        return out, lse
    # Every query sees at least one key from here on; keys that none sees are dropped.
    first = 0 if left < 0 else max(0, offset - left)
    last = s if right < 0 else min(s, t + offset + right)
    k, v, offset, s = k[:, :, first:last], v[:, :, first:last], offset - first, last - first
    if options.softcap is not None:
        return _attend_in_blocks(q, k, v, offset, options)
    open_left = left < 0 or t - 1 + offset - left <= 0
    open_right = right < 0 or offset + right >= s - 1
    if open_left and open_right:
        return _attend_all(q, k, v, scale)
    if t * s <= MASK_LIMIT and (t <= QUERY_BLOCK or not open_left):
        return _call_flash(q, k, v, scale, mask=_mask(t, s, offset, left, right, q.dtype, q.device))
    if open_left:
        # Keys below the triangle's corner are seen by all; the rest is the kernel's own causality.
        corner = offset + right
        triangle = _call_flash(q, k[:, :, corner:], v[:, :, corner:], scale, causal=True)
        return triangle if corner == 0 else merge(_attend_all(q, k[:, :, :corner], v[:, :, :corner], scale), triangle)
    if t <= QUERY_BLOCK:
        halves = [(0, s // 2), (s // 2, s)]
        a, b = (attend(q, k[:, :, lo:hi], v[:, :, lo:hi], offset - lo, options) for lo, hi in halves)
        return merge(a, b)
    out, lse = _nothing_visible(q)
    for i in range(0, t, QUERY_BLOCK):
        rows = slice(i, i + QUERY_BLOCK)
        out[:, :, rows], lse[:, :, rows] = attend(q[:, :, rows], k, v, offset + i, options)
    return out, lse


def _nothing_visible(q: Tensor) -> tuple[Tensor, Tensor]:
    # dtype and device are named because the caller may have set other defaults.
    return torch.zeros_like(q), torch.full(q.shape[:3], NEG_INF, dtype=torch.float32, device=q.device)


def _attend_all(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Compute attention in which every query sees every key."""
    a, g, t, _ = q.shape
    if t == 1 and k.stride(1) == v.stride(1) == 0:  # one token, shared rows: the heads are the rows of one product
        out, lse = _attend_all(q.transpose(1, 2), k[:, :1], v[:, :1], scale)
        return out.transpose(1, 2), lse.transpose(1, 2)
    # With a single product, parts of the keys become a batch, so that every thread has one.
    splits = min(torch.get_num_threads() // -(-t // FLASH_ROWS), k.shape[2] // SPLIT_KEYS) if a * g == 1 else 1
    if splits < 2:
        return _call_flash(q, k, v, scale)
    part = k.shape[2] // splits
    k0, v0 = (x[:, :, : splits * part].unflatten(2, (splits, part))[0].transpose(0, 1) for x in (k, v))
    out, lse = _call_flash(q.expand(splits, -1, -1, -1), k0, v0, scale)  # [splits, 1, T, D]
    pieces = [(out[n : n + 1], lse[n : n + 1]) for n in range(splits)]
    if splits * part < k.shape[2]:
        pieces.append(_call_flash(q, k[:, :, splits * part :], v[:, :, splits * part :], scale))
    return reduce(merge, pieces)


def _attend_in_blocks(q: Tensor, k: Tensor, v: Tensor, offset: int, options: FmhaOptions) -> tuple[Tensor, Tensor]:
    """Compute attention with a softcap, which the flash kernel lacks, by fp32 products of a block of scores at a
    time.
    """
    out, lse = _nothing_visible(q)
    out = out.float()
    left, right = options.window_left, options.window_right
    heads = q.shape[0] * q.shape[1]
    block = max(QUERY_BLOCK, MASK_LIMIT // (QUERY_BLOCK * heads))  # keys
    for i in range(0, q.shape[2], QUERY_BLOCK):
        rows = slice(i, i + QUERY_BLOCK)
        q1, found = q[:, :, rows].float() * options.softmax_scale, (out[:, :, rows], lse[:, :, rows])
        for j in range(0, k.shape[2], block):
            k1, v1 = (x[:, :, j : j + block].float() for x in (k, v))
            s = scores(q1 @ k1.mT, options)
            s += _mask(s.shape[2], s.shape[3], offset + i - j, left, right, s.dtype, s.device)
            top = s.amax(-1, keepdim=True)
            top = torch.where(top == NEG_INF, 0, top)
            p = s.sub_(top).exp_()
            total = p.sum(-1, keepdim=True)
            part = (p @ v1 / torch.where(total == 0, 1, total), (top + total.log())[..., 0])
            found = merge(found, part)
        out[:, :, rows], lse[:, :, rows] = found
    return out, lse


def _call_flash(q, k, v, scale, *, causal=False, mask=None) -> tuple[Tensor, Tensor]:
    if causal and scale <= 0:  # the kernel masks with -inf before it scales
        q, scale = (-q, -scale) if scale < 0 else (torch.zeros_like(q), 1.0)
    out, lse = _flash(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    # The kernel gives 0 and an LSE of 0 if all scores are -inf. Every row sees a key here, so they overflowed.
    suspect = lse == 0
    if bool(suspect.any()) and k.numel():
        largest = q.abs().amax(-1).double() * k.abs().amax().double() * q.shape[-1]
        overflown = suspect & (largest > torch.finfo(torch.float32).max) & ~out.any(-1)
        lse = lse.masked_fill(overflown, float("nan"))
        out = out.masked_fill(overflown[..., None], float("nan"))
    return out, lse


@lru_cache(maxsize=4)
def _mask(
    t: int, s: int, offset: int, left: int, right: int, dtype: torch.dtype, device: torch.device
) -> Tensor:  # fmt: skip
    """Return an additive mask [1, 1, T, S]: 0 where seen, -inf elsewhere. Blocks inside a window share theirs."""
    i = torch.arange(t, device=device)[:, None] + offset
    j = torch.arange(s, device=device)[None, :]
    mask = torch.ones(t, s, dtype=torch.bool, device=device)
    if left >= 0:
        mask &= j >= i - left
    if right >= 0:
        mask &= j <= i + right
    return torch.where(mask, 0.0, NEG_INF).to(dtype)[None, None]


def merge(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Merge two partial results (out [..., D], lse [...]) over disjoint keys; out is in fp32."""
    top = torch.maximum(a[1], b[1])
    top = torch.where(top == NEG_INF, 0, top)  # both empty: the weights are exp(-inf) = 0
    weights = [(part - top).exp() for _, part in (a, b)]
    total = weights[0] + weights[1]
    # The weights are not relative to the merged LSE, in which a large LSE leaves no room for log 2.
    shares = [(x / torch.where(total == 0, 1, total))[..., None] for x in weights]
    return a[0] * shares[0] + b[0] * shares[1], top + total.log()
