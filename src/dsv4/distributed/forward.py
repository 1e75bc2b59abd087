"""Context parallelism: one sequence across the ranks of a torch.distributed group, merged by the log-sum-exp.

Attention over a set of keys is exactly the merge of attention over its parts (:func:`dsv4.merge_states`), so keys may
be on any rank. The sink is applied once, in the last merge.

    decode    all ranks have the same queries, every rank its own keys      decode(dsv4.fmha_paged, q, ...)
              (V4: lists of rows by local_rows, lengths by local_lengths)
    prefill   queries and keys are sharded along the sequence               prefill(shard(q), shard(k), shard(v))
              (V4: rows are few; unshard them and call v4_attention with lists for the positions of the rank)

Order of a sharded sequence. "zigzag": 2 R pieces; rank r has pieces r and 2 R - 1 - r, so that with a causal mask all
ranks do the same amount of work. "contiguous": R pieces; rank r has piece r.

Bits and tolerances:

* :func:`decode` gives the same bits on every rank, also with heads="mine": all merge the same partials, in the order
  of the ranks.
* :func:`prefill` with method="gather" gives, for each piece of queries, the bits of one dsv4.fmha call of that piece
  with all keys that it may see.
* :func:`prefill` with method="ring" merges fp32 partials and rounds once, as one call does.
* :func:`decode` differs from the unsharded call by rounding: every partial is rounded to q's dtype, their weighted
  average is computed in fp32, and the result is rounded once more. The weights are not negative and add up to 1, so
  merging adds at most half a unit in the last place of the largest partial. :func:`merge` accepts fp32 partials too.
* lse is fp32 throughout, and as exact as that of the partials: within 2^-12 of the largest (or of 1).
"""

from collections.abc import Callable
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from dsv4.distributed.attend import Setting, attend
from dsv4.distributed.backward import Prefill, Unshard
from dsv4.distributed.ranks import exchange, gather, gathered_whole, piece_numbers, pieces_of, rank_and_size
from dsv4.fmha.api import fmha, fmha_paged, fmha_varlen
from dsv4.merge import merge_states
from dsv4.runtime import checks
from dsv4.runtime.checks import Backend
from dsv4.v4.api import v4_attention

OPERATIONS = (fmha, fmha_paged, fmha_varlen, v4_attention)
METHODS = ("ring", "gather")
HEADS = ("all", "mine")

Both = tuple[Tensor, Tensor]  # out, lse


class PrefillKeywords(TypedDict, total=False):
    """The keyword arguments of prefill. return_lse is missing because the return type depends on it."""

    causal: bool
    window: tuple[int, int]
    sink: Tensor | None
    softmax_scale: float | None
    order: str
    method: str
    group: Any
    deterministic: bool
    backend: Backend


@overload
def decode(attention: Callable, *tensors: Any, return_lse: Literal[False] = ..., **options: Any) -> Tensor: ...
@overload
def decode(attention: Callable, *tensors: Any, return_lse: Literal[True], **options: Any) -> Both: ...
@overload
def decode(attention: Callable, *tensors: Any, return_lse: bool, **options: Any) -> Tensor | Both: ...
def decode(
    attention: Callable[..., Any],
    *tensors: Any,
    sink: Tensor | None = None,
    return_lse: bool = False,
    heads: str = "all",
    group: Any = None,
    **options: Any,
) -> Tensor | Both:
    """Compute ``attention(*tensors, **options)`` of the same queries on every rank, over the keys of all ranks.

    attention: dsv4.fmha, fmha_paged, fmha_varlen or v4_attention; tensors and options are this rank's: its keys, its
    lengths, its lists. A rank may have no keys. The result is that of one call with all keys: of all heads on every
    rank, or with heads="mine" of the rank's share of the heads (see :func:`merge`).

    causal and window would count the keys of one rank and are rejected. Use lengths to exclude keys that a query must
    not see (one sequence of the batch per query) or, for v4_attention, the lists. inverse_rope rotates each query's
    output, so it may be given.
    """
    if not any(attention is operation for operation in OPERATIONS):
        names = ", ".join(f"dsv4.{operation.__name__}" for operation in OPERATIONS)
        checks.fail("attention", checks.describe(attention), names)
    if attention is not v4_attention:  # the window of V4 attention is a pool of rows
        causal, window = options.get("causal", False), options.get("window", (-1, -1))
        for name, given in (
            ("causal", checks.flag("causal", causal)),
            ("window", checks.window(window, False) != (-1, -1)),
        ):
            if given:
                accepted = "nothing: a rank knows only its own keys; use lengths"
                checks.fail(name, checks.describe(options[name]), accepted)
    if "out" in options or "plan" in options:
        checks.fail("out" if "out" in options else "plan", "an argument", "none: decode allocates its results")
    checks.flag("return_lse", return_lse)
    out, lse = attention(*tensors, return_lse=True, **options)
    out, lse = merge(out, lse, sink=sink, heads=heads, group=group)
    return (out, lse) if return_lse else out


def merge(
    out: Tensor, lse: Tensor, *, sink: Tensor | None = None, heads: str = "all", group: Any = None
) -> tuple[Tensor, Tensor]:
    """Merge states across the ranks: this rank's partial (out, lse), made with sink=None -> the whole, on all ranks.

    sink: [H], of all heads. heads="mine": rank r of R gets only heads r H / R .. (r + 1) H / R - 1, with the same
    bits as with all heads; this is what tensor-parallel projections need, with 1 / R of the traffic.
    """
    rank, size = rank_and_size(group)
    checks.one_of("heads", heads, HEADS)
    if not checks.is_tensor(out) or out.ndim not in (3, 4):
        checks.fail("out", checks.describe(out), "[B, T, H, D] or [N, H, D]")
    count = out.shape[-2]
    checks.tensor("out", out, tuple(out.shape), checks.FLOATS, unit_last=False)
    shape = (*out.shape[:-3], count, out.shape[-3]) if out.ndim == 4 else tuple(out.shape[:2])
    checks.tensor("lse", lse, shape, (torch.float32,), like=("out", out), unit_last=False)
    checks.sink(sink, count, ("out", out))
    checks.forward_only(out=out, lse=lse, sink=sink)
    if heads == "mine":
        if count % size:
            checks.fail("out", f"{count} heads", f"a multiple of {size}, the ranks, with heads='mine'")
        if sink is not None:
            sink = sink.chunk(size)[rank]
    if size == 1:
        return merge_states([out], [lse], sink)
    if heads == "mine":
        return merge_states(exchange(out, -2, group, "out"), exchange(lse, 1, group, "lse"), sink)
    return merge_states(gather(out, group, "out"), gather(lse, group, "lse"), sink)


def local_rows(indices: Tensor, *, block: int = 1, group: Any = None) -> Tensor:
    """Convert lists of row numbers of the whole pool to this rank's row numbers, with -1 for rows of other ranks.

    Blocks of ``block`` rows are assigned round-robin: row r is, on rank ``r // block % size``, row
    ``r // (block * size) * block + r % block``. For a pool in pages, block is the page size (or a multiple). Any shape;
    -1 stays -1.
    """
    rank, size = rank_and_size(group)
    _whole("indices", indices)
    checks.at_least(1, "block", block)
    mine = (indices >= 0) & (indices // block % size == rank)
    return torch.where(mine, indices // (block * size) * block + indices % block, -1)


def local_lengths(lengths: Tensor, *, block: int = 1, group: Any = None) -> Tensor:
    """Return how many of the rows 0 .. length - 1 are this rank's, sharded as by :func:`local_rows`."""
    rank, size = rank_and_size(group)
    _whole("lengths", lengths)
    checks.at_least(1, "block", block)
    rounds = lengths // (block * size)
    return rounds * block + (lengths - rounds * (block * size) - rank * block).clamp(0, block)


def shard(x: Tensor, dim: int = 1, *, order: str = "zigzag", group: Any = None) -> Tensor:
    """Return this rank's part of a whole tensor, cut along dim (1: the tokens of q, k, v)."""
    length = _length(x, dim)
    return x.index_select(dim, _positions("x", f"{length} along dim {dim}", length, order, group, x.device))


def unshard(x: Tensor, dim: int = 1, *, order: str = "zigzag", group: Any = None) -> Tensor:
    """Return the whole tensor from every rank's part: the inverse of :func:`shard`, an all-gather.

    Differentiable: the gradient of a rank's part is the sum over the ranks of the gradients of their whole tensors.
    """
    _, size = rank_and_size(group)
    pieces_of(_length(x, dim), order)
    if not wants_gradient(x):
        return gathered_whole(x, dim, order, group)
    return Unshard.apply(x, dim, order, group)


def wants_gradient(*tensors: Tensor | None) -> bool:
    """Return whether autograd is to record; a tangent is rejected, because nothing here propagates it."""
    if not checks.derivatives():
        return False
    checks.no_tangents(**{f"input {n}": x for n, x in enumerate(tensors)})
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def positions(length: int, *, order: str = "zigzag", group: Any = None, device: Any = None) -> Tensor:
    """Return this rank's tokens' positions in the whole sequence, int64 [length / size], rising within a piece."""
    where = None if device is None else checks.device("device", device)
    return _positions("length", f"{length}", checks.at_least(0, "length", length), order, group, where)


def _positions(name: str, came: str, length: int, order: str, group: Any, device: torch.device | None) -> Tensor:
    rank, size = rank_and_size(group)
    pieces = pieces_of(None, order)
    if length % (pieces * size):
        checks.fail(name, came, f"a multiple of {pieces * size}, for {size} ranks in {order} order")
    piece = length // (pieces * size)
    return torch.cat([torch.arange(piece, device=device) + n * piece for n in piece_numbers(rank, size, order)])


@overload
def prefill(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = ..., **_: Unpack[PrefillKeywords]
) -> Tensor: ...
@overload
def prefill(q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **_: Unpack[PrefillKeywords]) -> Both: ...
@overload
def prefill(q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **_: Unpack[PrefillKeywords]) -> Tensor | Both: ...
def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: tuple[int, int] = (-1, -1),
    sink: Tensor | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    order: str = "zigzag",
    method: str = "ring",
    group: Any = None,
    deterministic: bool = False,
    backend: Backend = "auto",
) -> Tensor | Both:
    """Compute dsv4.fmha of a sharded sequence: this rank's q [B, T, Hq, D], k, v [B, T, Hkv, D] -> its out, lse.

    All ranks have the same number of tokens, sharded in the same order (see :func:`shard`). causal and window refer to
    the whole sequence. method="ring": keys travel around the ring while each rank computes with those it has; it holds
    three shards of keys at a time. "gather": all keys are gathered first, and each piece of queries is one fmha call.
    If k and v are the same tensor, it is sent once.

    Differentiable: every rank calls backward, and gets the gradients of its own q, k and v for the sum of the losses of
    all ranks. For sink, which all ranks have, it gets the part of its own queries.
    """
    rank, size = rank_and_size(group)
    left, right = checks.window(window, checks.flag("causal", causal))
    checks.flag("return_lse", return_lse)
    checks.one_of("method", method, METHODS)
    checks.tensor("q", q, ("B", "T", "Hq", "D"), checks.FLOATS)
    for name, x in (("k", k), ("v", v)):
        checks.tensor(name, x, (q.shape[0], q.shape[1], "Hkv", "D"), checks.FLOATS, like=("q", q))
    checks.sink(sink, q.shape[2], ("q", q))
    pieces_of(q.shape[1], order)
    setting = Setting(left, right, softmax_scale, order, method, group, deterministic, backend)
    if wants_gradient(q, k, v, sink):
        out, lse = Prefill.apply(q, k, v, sink, setting)
    else:
        out, lse = attend(q, k, v, sink, setting)
    return (out, lse) if return_lse else out


def _whole(name: str, x: Any) -> None:
    """Check that x is a tensor of whole numbers, of any shape."""
    if not checks.is_tensor(x):
        checks.fail(name, checks.describe(x), "an int32 or int64 tensor")
    checks.tensor(name, x, tuple(x.shape), (torch.int32, torch.int64), unit_last=False)


def _length(x: Any, dim: Any) -> int:
    """Return the size of a tensor along dim."""
    if not checks.is_tensor(x) or x.ndim == 0 or x.layout != torch.strided:
        checks.fail("x", checks.describe(x), "a dense tensor with at least one dimension")
    if checks.whole(dim) is None or not -x.ndim <= dim < x.ndim:
        checks.fail("dim", checks.describe(dim), f"an int from {-x.ndim} to {x.ndim - 1}")
    return x.shape[dim]
