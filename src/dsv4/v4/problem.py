"""A validated v4_attention problem: the input of every backend.

:func:`build` checks shapes, dtypes, devices and strides and reads no tensor values, so that it also serves the fake
kernels that torch.compile traces; :func:`check_values` reads values where `checks.values_checked` allows.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dsv4.caches import kv as caches
from dsv4.caches.kv import Pool
from dsv4.caches.pages import PackedRows
from dsv4.runtime import checks
from dsv4.v4.options import V4Options

CACHE_NAMES = ", ".join(cache.__name__ for cache in caches.CACHES)


@dataclass(frozen=True, eq=False)
class V4Problem:
    """q and out [N, H, D], lse [N, H]. Query n attends, in one softmax, to

    * window rows     window_indices[n, :window_lengths[n]]              (-1 = nothing there)
    * compressed rows compressed_indices[n, :compressed_lengths[n]], or, with a block table, the rows
      0 .. compressed_lengths[n]-1 of its request r: row j is row j % page of page block_table[r, j // page].

    Any strides but the last, which is 1. D is 64, 128, 256 or 512; packed rows have D values. Queries past the last
    request see no compressed rows. Without value checks (on a GPU) numbers may be wrong: treat a row or page number
    out of range as -1, clamp lengths and positions, read nothing out of bounds.
    """

    operation: ClassVar[str] = "v4"
    backward: ClassVar[bool] = False

    q: Tensor
    window: Pool
    window_indices: Tensor  # int32 [N, Kw]
    options: V4Options  # resolved
    window_lengths: Tensor | None = None  # int32 [N]
    compressed: Pool | None = None
    compressed_indices: Tensor | None = None  # int32 [N, Kc]
    compressed_lengths: Tensor | None = None  # int32 [N]; always there with a block table
    block_table: Tensor | None = None  # int32 [R, pages]
    request_starts: Tensor | None = None  # int32 [R + 1]; None = every query is its own request
    cos_sin: Tensor | None = None  # fp32 [positions, r]: rotate the last r dims of out back ...
    positions: Tensor | None = None  # int32 or int64 [N]: ... by the angle of this position
    sink: Tensor | None = None  # fp32 [H]
    out: Tensor | None = None  # filled in by the backend; set before a backend sees the problem
    lse: Tensor | None = None  # fp32, or None when not wanted
    num_splits: int = 0  # from a plan: KV splits to use; 0 = the kernel's choice
    scratch: Tensor | None = None  # from a plan: flat fp32, for the partial results of the splits
    same_pools: bool = False  # window and compressed rows lie in the same memory

    softmax_scale = property(lambda self: self.options.softmax_scale)
    deterministic = property(lambda self: self.options.deterministic)

    # The names below are those of FmhaProblem, so that a Plan fits both: N sequences of one query, one KV head.
    batch = property(lambda self: self.q.shape[0])
    q_heads = property(lambda self: self.q.shape[1])
    kv_heads = property(lambda self: 1)
    max_seqlen_q = property(lambda self: 1)

    @property
    def head_dim(self) -> int:
        return self.q.shape[2]

    @property
    def lse_shape(self) -> tuple[int, int]:
        return self.q.shape[0], self.q.shape[1]

    @property
    def max_seqlen_k(self) -> int:
        """The most rows that a query sees."""
        return self.window_indices.shape[1] + self.compressed_capacity

    @property
    def compressed_capacity(self) -> int:
        """The most compressed rows of a query."""
        if self.block_table is not None and self.compressed is not None:
            return self.block_table.shape[1] * caches.pool_page(self.compressed)
        return 0 if self.compressed_indices is None else self.compressed_indices.shape[1]

    empty_outputs: ClassVar[dict[str, float]] = {"out": 0.0, "lse": float("-inf")}

    def no_keys(self) -> bool:
        """Whether, by the shapes alone, there is no query or none sees a row."""
        window = caches.pool_size(self.window) and self.window_indices.shape[1]
        compressed = self.compressed is not None and caches.pool_size(self.compressed) and self.compressed_capacity
        return self.q.numel() == 0 or not window and not compressed


def build(
    q,
    window,
    window_indices,
    compressed=None,
    compressed_indices=None,
    *,
    window_lengths=None,
    compressed_lengths=None,
    compressed_block_table=None,
    request_starts=None,
    inverse_rope=None,
    sink=None,
    **fields,
) -> V4Problem:
    """Check the arguments of dsv4.v4_attention and return them as a problem. fields: of the options."""
    checks.tensor("q", q, ("N", "H", "D"), checks.FLOATS)
    n, heads, _ = q.shape
    d = checks.head_dim("q", q.shape[-1])
    like = ("q", q)
    _pool("window", window, q)
    checks.int32("window_indices", window_indices, (n, "Kw"), like)
    if window_lengths is not None:
        checks.int32("window_lengths", window_lengths, (n,), like)
    if compressed is None:
        for name, x in (
            ("compressed_indices", compressed_indices),
            ("compressed_lengths", compressed_lengths),
            ("compressed_block_table", compressed_block_table),
        ):
            if x is not None:
                checks.fail(name, checks.describe(x), "None when compressed is None")
    else:
        _pool("compressed", compressed, q)
        if (compressed_indices is None) == (compressed_block_table is None):
            came = "neither" if compressed_indices is None else "both"
            checks.fail("compressed_indices, compressed_block_table", came, "one of them, when compressed is given")
        if compressed_indices is not None:
            checks.int32("compressed_indices", compressed_indices, (n, "Kc"), like)
        else:
            checks.int32("compressed_block_table", compressed_block_table, ("R", "pages"), like)
            if compressed_lengths is None:
                checks.fail("compressed_lengths", None, f"int32 [{n}], needed with compressed_block_table")
            checks.request_starts(request_starts, compressed_block_table.shape[0], n, like)
        if compressed_lengths is not None:
            checks.int32("compressed_lengths", compressed_lengths, (n,), like)
    if request_starts is not None:
        checks.int32("request_starts", request_starts, ("R + 1",), like)
        if request_starts.shape[0] == 0:
            checks.fail("request_starts", "no entries", "R + 1 entries")
    cos_sin, positions = _rope(inverse_rope, n, d, like)
    return V4Problem(
        q=q,
        window=window,
        window_indices=window_indices,
        options=V4Options(**fields).resolved(d),
        window_lengths=window_lengths,
        compressed=compressed,
        compressed_indices=compressed_indices,
        compressed_lengths=compressed_lengths,
        block_table=compressed_block_table,
        request_starts=request_starts,
        cos_sin=cos_sin,
        positions=positions,
        sink=checks.sink(sink, heads, like),
    )


def _pool(name: str, x, q: Tensor) -> None:
    d = q.shape[-1]
    if isinstance(x, PackedRows):
        if d != x.format.values:
            checks.fail(name, f"packed rows of {x.format.values} values ({x.format.name})", f"rows of {d}, as q")
        if x.device != q.device:
            checks.fail(name, f"packed rows on {x.device}", f"the device of q, {q.device}")
        return
    if not checks.is_tensor(x):
        accepted = f"a tensor [rows, {d}] or [pages, rows per page, {d}], or an {CACHE_NAMES}"
        checks.fail(name, checks.describe(x), accepted)
    shape = ("pages", "rows per page", d) if x.ndim == 3 else ("rows", d)
    checks.tensor(name, x, shape, checks.FLOATS, like=("q", q))
    if x.dtype != q.dtype:
        checks.fail(name, f"dtype {x.dtype}", f"dtype {q.dtype}, as q, or an {CACHE_NAMES}")
    if x.ndim == 3 and x.shape[1] == 0:
        checks.fail(name, f"shape {list(x.shape)}", "pages of at least one row")


def _rope(x, n: int, d: int, like) -> tuple[Tensor | None, Tensor | None]:
    if x is None:
        return None, None
    if not isinstance(x, (tuple, list)) or len(x) != 2:
        checks.fail("inverse_rope", checks.describe(x), "None or (cos_sin, positions)")
    cos_sin, positions = x
    checks.tensor("inverse_rope[0] (cos_sin)", cos_sin, ("positions", "r"), (torch.float32,), like=like)
    r = cos_sin.shape[1]
    if r == 0 or r % 2 or r > d:
        checks.fail("inverse_rope[0] (cos_sin)", f"width {r}", f"an even width from 2 to {d}: cosines, then sines")
    integers = (torch.int32, torch.int64)
    checks.tensor("inverse_rope[1] (positions)", positions, (n,), integers, like=like, unit_last=False)
    return cos_sin, positions


def check_values(p: V4Problem) -> None:
    """Check by values that every number that will be used names a row, a page, a position that exists."""
    _listed("window", p.window_indices, p.window_lengths, caches.pool_size(p.window))
    if p.request_starts is not None:
        checks.cumulative("request_starts", p.request_starts, p.batch, "q")
    if p.compressed is None:
        pass
    elif p.compressed_indices is not None:
        _listed("compressed", p.compressed_indices, p.compressed_lengths, caches.pool_size(p.compressed))
    elif p.block_table is not None and p.compressed_lengths is not None:
        checks.in_range("compressed_lengths", p.compressed_lengths, 0, p.compressed_capacity)
        page = caches.pool_page(p.compressed)
        pages = caches.pool_size(p.compressed) // page
        longest = torch.zeros(p.block_table.shape[0] + 1, dtype=torch.int32, device=p.q.device)
        owner = requests_of(p)  # R, past the last request, is the spare place
        longest.scatter_reduce_(0, owner, p.compressed_lengths, "amax")
        seen = "compressed_lengths reaches"
        checks.page_numbers("compressed_block_table", p.block_table, page, longest[:-1], pages, seen)
    if p.positions is not None and p.cos_sin is not None:
        checks.in_range("inverse_rope[1] (positions)", p.positions, 0, p.cos_sin.shape[0] - 1)


def _listed(pool: str, indices: Tensor, lengths: Tensor | None, rows: int) -> None:
    if lengths is not None:
        checks.in_range(f"{pool}_lengths", lengths, 0, indices.shape[1])
        counted = torch.arange(indices.shape[1], device=indices.device) < lengths[:, None]
        indices = indices.masked_fill(~counted, -1)  # entries past the length may be anything
    if indices.numel():
        least, most = (int(e) for e in torch.aminmax(indices))
        if least < -1 or most >= rows:
            accepted = f"row numbers from 0 to {rows - 1}, the rows of {pool}, or -1 for nothing"
            accepted = accepted if rows else f"-1, because {pool} has no rows"
            checks.fail(f"{pool}_indices", f"values from {least} to {most}", accepted)


def requests_of(p: V4Problem) -> Tensor:
    """Return int64 [N], the request of each query; R for queries past the last one."""
    n = torch.arange(p.batch, device=p.q.device)
    if p.request_starts is None:
        return n
    # right=True: a query that starts a request belongs to it, and empty requests in between are skipped.
    return torch.searchsorted(p.request_starts, n.int(), right=True) - 1
