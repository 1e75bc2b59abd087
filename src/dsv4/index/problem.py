"""A validated problem of index_topk or index_blocks: the input of every backend.

:func:`build` reads no tensor values; :func:`check_values` does, where `checks.values_checked` allows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dsv4.caches.formats import INDEX_132, RowFormat
from dsv4.caches.mxfp4_keys import INDEX_68
from dsv4.index.options import IndexOptions
from dsv4.index.sizes import BLOCK
from dsv4.runtime import checks

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)
PACKED = {x.row_bytes: x for x in (INDEX_132, INDEX_68)}  # keys as bytes; their widths differ


@dataclass(frozen=True, eq=False)
class IndexProblem:
    """Query n sees the first rows of its sequence: counts[n] of them, or by position those that are finished
    at position counts[n]. Its keys are

    * k [1, M, D]: those of the one sequence; k [B, M, D]: of sequence n // tokens
    * with a block table k [pages, page, D]: of request r, row j is row j % page of page block_table[r, j // page].

    With `among`, only rows of these blocks count; of `topk_blocks` blocks those with the greatest scores are kept.

    Without value checks (on a GPU) numbers may be wrong: clamp counts, treat rows of a page that does not exist as
    chosen last and named -1, read nothing out of bounds.
    """

    operation: ClassVar[str] = "index"
    backward: ClassVar[bool] = False

    q: Tensor  # [N, H, D], or [B, T, H, D] with N = B * T; likewise the first dimension of those marked *
    k: Tensor  # [M, D], or [sequences or pages, rows, D]
    weights: Tensor  # * [N, H]
    counts: Tensor  # * int32 or int64 [N]
    options: IndexOptions  # checked, with a scale
    tokens: int  # queries of a sequence, where k has the sequences one after the other
    block_table: Tensor | None = None  # int32 [R, pages]
    request_starts: Tensor | None = None  # int32 [R + 1]; None = every query is its own request
    out: Tensor | None = None  # * int32 [N, topk]; set before a backend sees the problem
    scores: Tensor | None = None  # * fp32 [N, topk], or None when not wanted
    q_scales: Tensor | None = None  # int32 [N, H]: q is FP4, uint8 [N, H, D / 2]
    among: Tensor | None = None  # int32 [N, blocks]: blocks of BLOCK rows of the request, -1 = nothing
    blocks: Tensor | None = None  # int32 [N, topk_blocks]
    by_position: bool = False  # counts are positions, else rows
    num_splits: int = 0  # from a plan; not used
    scratch: Tensor | None = None  # from a plan: flat fp32

    topk = property(lambda self: self.options.topk)
    topk_blocks = property(lambda self: self.options.topk_blocks)
    scale = property(lambda self: self.options.scale)
    ratio = property(lambda self: self.options.ratio if self.by_position else 0)

    # The names of FmhaProblem, so that a Plan fits both.
    batch = property(lambda self: self.q.shape[0] * (self.q.shape[1] if self.q.ndim == 4 else 1))
    q_heads = property(lambda self: self.q.shape[-2])
    kv_heads = property(lambda self: 1)
    head_dim = property(lambda self: self.q.shape[-1] if self.format is None else self.format.values)
    max_seqlen_q = property(lambda self: 1)
    fp8 = property(lambda self: self.format is INDEX_132)
    fp4 = property(lambda self: self.format is INDEX_68)

    @property
    def format(self) -> RowFormat | None:
        """The format of keys that are bytes, the pages of an IndexCache; q is e4m3 then, or FP4."""
        return PACKED[self.k.shape[-1]] if self.k.dtype == torch.uint8 else None

    @property
    def columns(self) -> int:
        """The most scores of a query: of the rows that it may see, or of those in blocks."""
        return self.max_seqlen_k if self.among is None else self.among.shape[1] * BLOCK

    @property
    def max_seqlen_k(self) -> int:
        """The most rows that a query sees."""
        return self.k.shape[-2] * (1 if self.block_table is None else self.block_table.shape[1])

    @property
    def sequences(self) -> int:
        if self.block_table is not None:
            return self.block_table.shape[0]
        return self.k.shape[0] if self.k.ndim == 3 else 1

    empty_outputs: ClassVar[dict[str, float]] = {"out": -1, "scores": float("-inf"), "blocks": -1}

    def no_keys(self) -> bool:
        """Return whether the shapes alone rule out a query that sees a row."""
        return self.batch * self.topk == 0 or self.max_seqlen_k * self.columns == 0 or self.k.numel() == 0

    def owners(self) -> Tensor:
        """Return int64 [N]: the sequence of each query; those past the last request have number `sequences`."""
        n = torch.arange(self.batch, device=self.q.device)
        if self.block_table is None:
            return n // max(self.tokens, 1)
        if self.request_starts is None:
            return n
        return torch.searchsorted(self.request_starts, n.int(), right=True) - 1

    def visible(self) -> Tensor:
        """Return int64 [N]: rows that each query sees."""
        counts = self.counts.long().flatten()
        counts = (counts + 1) // self.ratio if self.ratio else counts
        counts = counts.clamp(0, self.max_seqlen_k)
        return counts if self.request_starts is None else counts.masked_fill(self.owners() >= self.sequences, 0)


def build(
    q,
    k,
    weights,
    topk,
    topk_blocks=0,
    *,
    positions=None,
    lengths=None,
    block_table=None,
    request_starts=None,
    q_scales=None,
    blocks=None,
    **fields,
) -> IndexProblem:
    """Check the arguments of dsv4.index_topk, or of dsv4.index_blocks, and return them as a problem. fields: of the
    options."""
    if not checks.is_tensor(q) or q.ndim not in (3, 4):
        checks.fail("q", checks.describe(q), "a tensor [N, H, D] or [B, T, H, D]")
    lead, h, d = tuple(q.shape[:-2]), q.shape[-2], q.shape[-1]
    like = ("q", q)
    if not checks.is_tensor(k):
        checks.fail("k", checks.describe(k), "a tensor of keys or an IndexCache")
    packed = k.dtype == torch.uint8
    if q_scales is not None:
        checks.tensor("q", q, tuple(q.shape), (torch.uint8,), unit_last=False)
        if not packed or k.shape[-1] != INDEX_68.row_bytes:
            checks.fail("q_scales", checks.describe(q_scales), "None, unless the keys are FP4")
        checks.tensor("q_scales", q_scales, (*lead, h), (torch.int32,), like=like, unit_last=False)
        d = 2 * d
    else:
        checks.tensor("q", q, tuple(q.shape), (torch.float8_e4m3fn,) if packed else FLOATS, unit_last=False)
    if d == 0:
        checks.fail("q", f"shape {list(q.shape)}", "a head dim of at least 1")
    if packed:
        _check_pages(q, d, k, block_table)
        _check_table(block_table, request_starts, q)
    elif block_table is None:
        checks.tensor("k", k, (*lead[:-1], "M", d), FLOATS, like=like, unit_last=False)
        if request_starts is not None:
            checks.fail("request_starts", checks.describe(request_starts), "None without block_table")
    else:
        if q.ndim != 3:
            checks.fail("q", f"shape {list(q.shape)}", "shape [N, H, D] with block_table")
        checks.tensor("k", k, ("pages", "page", d), FLOATS, like=like, unit_last=False)
        if k.shape[1] == 0:
            checks.fail("k", f"shape {list(k.shape)}", "pages of at least one row")
        _check_table(block_table, request_starts, q)
    checks.tensor("weights", weights, (*lead, h), FLOATS, like=like, unit_last=False)
    options = IndexOptions.checked(topk, topk_blocks, **fields)
    if options.scale is None:
        options = options._replace(scale=d**-0.5 * max(h, 1) ** -0.5)
    if options.request_rows and block_table is None:
        checks.fail("request_rows", True, "False without block_table: the lists name rows of the sequence")
    if (positions is None) == (lengths is None):
        checks.fail("positions, lengths", "neither" if lengths is None else "both", "one of them")
    if blocks is not None:
        checks.tensor("blocks", blocks, (*lead, "B"), (torch.int32,), like=like, unit_last=False)
    if q.ndim == 4 and (blocks is not None or topk_blocks):
        checks.fail("q", f"shape {list(q.shape)}", "shape [N, H, D] with blocks")
    name, counts = ("positions", positions) if lengths is None else ("lengths", lengths)
    checks.tensor(name, counts, lead, INTEGERS, like=like, unit_last=False)
    return IndexProblem(
        q=q,
        k=k,
        weights=weights,
        counts=counts,
        options=options,
        tokens=lead[-1],
        block_table=block_table,
        request_starts=request_starts,
        q_scales=q_scales,
        among=blocks,
        by_position=positions is not None,
    )


def _check_pages(q: Tensor, d: int, k: Tensor, block_table) -> None:
    """Check the pages of an IndexCache: uint8 [pages, page, 132 or 68], with the bytes of a page contiguous."""
    if k.shape[-1] not in PACKED:
        checks.fail("k", f"shape {list(k.shape)}", f"keys of {' or '.join(str(x) for x in PACKED)} bytes")
    values, row_bytes = PACKED[k.shape[-1]].values, k.shape[-1]
    if q.ndim != 3 or d != values:
        accepted = f"shape [N, H, {values}] with an IndexCache, or [N, H, {values // 2}] with q_scales"
        checks.fail("q", f"shape {list(q.shape)}", accepted)
    checks.tensor("k", k, ("pages", "page", row_bytes), (torch.uint8,), like=("q", q), unit_last=False)
    if k.shape[1] == 0 or (k.stride(1), k.stride(2)) != (row_bytes, 1):
        got = f"shape {list(k.shape)}, strides {list(k.stride())}"
        checks.fail("k", got, f"pages of at least one row of {row_bytes} bytes, contiguous inside a page")
    if block_table is None:
        checks.fail("block_table", None, "int32 [R, pages] with an IndexCache")


def _check_table(block_table, request_starts, q: Tensor) -> None:
    checks.int32("block_table", block_table, ("R", "pages"), ("q", q))
    checks.request_starts(request_starts, block_table.shape[0], q.shape[0], ("q", q))


def check_values(p: IndexProblem) -> None:
    """Check by values that every query sees rows that exist, in pages that exist."""
    m = p.max_seqlen_k
    # For a position, the rows that end at or before it must exist.
    checks.in_range(*(("positions", p.counts, 0, (m + 1) * p.ratio - 2) if p.ratio else ("lengths", p.counts, 0, m)))
    if p.among is not None:
        checks.in_range("blocks", p.among, -1, -(-m // BLOCK) - 1)
    if p.request_starts is not None:
        checks.cumulative("request_starts", p.request_starts, p.batch, "q")
    if p.block_table is None:
        return
    longest = torch.zeros(p.sequences + 1, dtype=torch.int64, device=p.q.device)
    longest.scatter_reduce_(0, p.owners(), p.visible(), "amax")
    pages, page = p.k.shape[:2]
    checks.page_numbers("block_table", p.block_table, page, longest[:-1], pages, "some query sees")
