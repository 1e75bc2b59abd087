"""A validated fmha problem: what every backend receives, whichever public operation it came from.

The three builders check shapes, dtypes, devices and strides, and the values of numbers, whose types are right by then:
the public functions see to that, and for operators torch does. They raise ValueError; they read no tensor values, so
they also serve the fake kernels that torch.compile traces. :func:`check_values` reads values and is called by the real
kernels of the ops, where `checks.values_checked` allows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from dsv4.fmha.options import FmhaOptions
from dsv4.runtime import checks

KV = ("k", "v")
BETWEEN = (64, 256)  # dense head dims between those of HEAD_DIMS, multiples of 8, that some kernels have


@dataclass(frozen=True, eq=False)
class FmhaProblem:
    """Shapes by kind (any strides but the last, which is 1); dense v and out may be wider or narrower than q and k:

    ======  ====================  =======================  ============  ================
    kind    q, out                k, v                     lse           how keys are found
    ======  ====================  =======================  ============  ================
    dense   [B, T, Hq, D]         [B, S, Hkv, D]           [B, Hq, T]    row j
    varlen  [total_q, Hq, D]      [total_k, Hkv, D]        [total_q, Hq] cu_seqlens_k[n] + j
    paged   [B, T, Hq, D]         [P, page, Hkv, D]        [B, Hq, T]    page block_table[n, j // page], row j % page
    ======  ====================  =======================  ============  ================

    Query i of a sequence with T queries and S keys sees key j iff i+S-T-left <= j <= i+S-T+right; -1 = no bound.
    Without value checks (on a GPU) lengths and cu_seqlens may be wrong: clamp them, treat a page number outside
    0 .. P-1 as unseen rows, read nothing out of bounds. Varlen rows past the last sequence: out 0, lse -inf.
    """

    operation: ClassVar[str] = "fmha"
    backward: ClassVar[bool] = False

    kind: Literal["dense", "varlen", "paged"]
    q: Tensor
    k: Tensor
    v: Tensor
    options: FmhaOptions  # resolved
    max_seqlen_q: int  # no sequence has more queries (a bound, not always the true maximum)
    max_seqlen_k: int
    sink: Tensor | None = None  # [Hq] fp32
    k_scale: Tensor | None = None  # k and v in e4m3: fp32 [], [1] or [Hkv]; None = 1
    v_scale: Tensor | None = None
    cu_seqlens_q: Tensor | None = None  # varlen: int32 [B + 1]
    cu_seqlens_k: Tensor | None = None  # varlen: int32 [B + 1]
    block_table: Tensor | None = None  # paged: int32 [B, max_pages]
    lengths: Tensor | None = None  # paged: int32 [B]
    out: Tensor | None = None  # filled in by the backend; set before a backend sees the problem
    lse: Tensor | None = None  # fp32, or None when not wanted
    num_splits: int = 0  # from a plan: KV splits to use; 0 = the kernel's choice
    scratch: Tensor | None = None  # from a plan: flat fp32, for the partial results of the splits
    same_kv: bool = False  # k and v lie in the same memory
    same_sequences: bool = False  # cu_seqlens_q and cu_seqlens_k lie in the same memory

    left = property(lambda self: self.options.window_left)
    right = property(lambda self: self.options.window_right)  # 0 when causal
    softmax_scale = property(lambda self: self.options.softmax_scale)
    deterministic = property(lambda self: self.options.deterministic)

    @property
    def batch(self) -> int:
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def q_heads(self) -> int:
        return self.q.shape[-2]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[-2]

    @property
    def group(self) -> int:
        """Query heads per KV head; query head h reads KV head h // group."""
        return self.q_heads // self.kv_heads

    @property
    def head_dim(self) -> int:
        """The head dim of the kernels' tiles; q, k and v may be narrower (head_dims.py)."""
        widest = max(self.q.shape[-1], self.v.shape[-1])
        return next(d for d in checks.HEAD_DIMS if d >= widest)

    @property
    def page_size(self) -> int:
        assert self.kind == "paged"
        return self.k.shape[1]

    @property
    def lse_shape(self) -> tuple[int, ...]:
        return lse_shape(self.q.shape)

    @property
    def e4m3(self) -> bool:
        """k and v are float8_e4m3fn."""
        return self.k.dtype == checks.E4M3

    empty_outputs: ClassVar[dict[str, float]] = {"out": 0.0, "lse": float("-inf")}

    def no_keys(self) -> bool:
        """Whether the shapes and bounds alone exclude a query that sees a key."""
        return 0 in (self.batch, self.q.numel(), self.k.numel(), self.max_seqlen_q, self.max_seqlen_k)


def lse_shape(q_shape: Sequence[int]) -> tuple[int, ...]:
    """Return [B, Hq, T] for q [B, T, Hq, D], [total_q, Hq] for q [total_q, Hq, D]."""
    return tuple(q_shape[:2]) if len(q_shape) == 3 else (q_shape[0], q_shape[2], q_shape[1])


def in_e4m3(x: Any) -> bool:
    return checks.is_tensor(x) and x.dtype == checks.E4M3


def is_between(d: int) -> bool:
    """Return whether dense kernels accept this head dim in addition to those of HEAD_DIMS."""
    return BETWEEN[0] <= d <= BETWEEN[1] and d % 8 == 0


def _common(q, k, v, sink, k_scale, v_scale, options: FmhaOptions, names=KV) -> dict:
    """Make the checks that do not depend on the kind; ranks are already right."""
    d, width = q.shape[-1], v.shape[-1]
    between = names == KV and (d != width or d not in checks.HEAD_DIMS) and is_between(d) and is_between(width)
    if not between:
        checks.head_dim("q", d)
    for name, x in zip(names, (k, v)):
        if x.shape[-1] != d and not (between and x is v):
            checks.fail(name, f"head dim {x.shape[-1]}", f"head dim {d}, as q")
        if x.dtype not in (q.dtype, checks.E4M3):
            checks.fail(name, f"dtype {x.dtype}", f"dtype {q.dtype}, as q, or {checks.E4M3}")
    if v.dtype != k.dtype:
        checks.fail(names[1], f"dtype {v.dtype}", f"dtype {k.dtype}, as {names[0]}")
    if v.shape[:-1] != k.shape[:-1]:
        checks.fail(names[1], f"shape {list(v.shape)}", f"shape {list(k.shape)}, as {names[0]}")
    checks.head_ratio(q.shape[-2], k.shape[-2])
    resolved = options.resolved(d)
    scales = {name: _scale(name, x, q, k) for name, x in (("k_scale", k_scale), ("v_scale", v_scale))}
    return dict(q=q, k=k, v=v, sink=checks.sink(sink, q.shape[-2], ("q", q)), options=resolved, **scales)


def _scale(name: str, x: Any, q: Tensor, k: Tensor) -> Tensor | None:
    """Check the scale of k or v: None, one number, or one for each KV head."""
    if x is None:
        return None
    if k.dtype != checks.E4M3:
        checks.fail(name, checks.describe(x), f"None with k and v in {k.dtype}; scales are of {checks.E4M3}")
    sizes = ((), (1,), (k.shape[-2],))
    if not checks.is_tensor(x) or x.shape not in sizes:
        checks.fail(name, checks.describe(x), f"None, or a tensor of one number or of {k.shape[-2]}, one for a KV head")
    return checks.tensor(name, x, tuple(x.shape), (torch.float32,), like=("q", q), unit_last=False)


# The builders accept an FmhaOptions, or its fields by name, with the window as a pair.


def dense(
    q, k, v, *, sink=None, k_scale=None, v_scale=None, options: FmhaOptions | None = None, **fields
) -> FmhaProblem:
    checks.tensor("q", q, ("B", "T", "Hq", "D"), checks.FLOATS)
    for name, x in (("k", k), ("v", v)):
        checks.tensor(name, x, ("B", "S", "Hkv", "D"), checks.CACHED, like=("q", q))
        if x.shape[0] != q.shape[0]:
            checks.fail(name, f"batch {x.shape[0]}", f"batch {q.shape[0]}, as q")
    common = _common(q, k, v, sink, k_scale, v_scale, options or FmhaOptions.of(**fields))
    return FmhaProblem("dense", max_seqlen_q=q.shape[1], max_seqlen_k=k.shape[1], **common)


def varlen(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    *,
    sink=None,
    k_scale=None,
    v_scale=None,
    options: FmhaOptions | None = None,
    **fields,
) -> FmhaProblem:
    checks.tensor("q", q, ("total_q", "Hq", "D"), checks.FLOATS)
    for name, x in (("k", k), ("v", v)):
        checks.tensor(name, x, ("total_k", "Hkv", "D"), checks.CACHED, like=("q", q))
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        checks.int32(name, x, ("B + 1",), ("q", q))
        if x.shape[0] == 0:
            checks.fail(name, "no entries", "B + 1 entries")
    if cu_seqlens_k.shape != cu_seqlens_q.shape:
        checks.fail("cu_seqlens_k", f"{cu_seqlens_k.shape[0]} entries", f"{cu_seqlens_q.shape[0]}, as cu_seqlens_q")
    options = options or FmhaOptions.of(**fields)
    common = _common(q, k, v, sink, k_scale, v_scale, options)
    return FmhaProblem(
        "varlen",
        max_seqlen_q=bound("max_seqlen_q", options.max_seqlen_q, q.shape[0]),
        max_seqlen_k=bound("max_seqlen_k", options.max_seqlen_k, k.shape[0]),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        **common,
    )


def paged(
    q,
    k_pages,
    v_pages,
    block_table,
    lengths,
    *,
    sink=None,
    k_scale=None,
    v_scale=None,
    options: FmhaOptions | None = None,
    **fields,
) -> FmhaProblem:
    checks.tensor("q", q, ("B", "T", "Hq", "D"), checks.FLOATS)
    for name, x in (("k_pages", k_pages), ("v_pages", v_pages)):
        checks.tensor(name, x, ("P", "page", "Hkv", "D"), checks.CACHED, like=("q", q))
    if k_pages.shape[1] == 0:
        checks.fail("k_pages", f"shape {list(k_pages.shape)}", "pages of at least one row")
    checks.int32("block_table", block_table, (q.shape[0], "max_pages"), ("q", q))
    checks.int32("lengths", lengths, (q.shape[0],), ("q", q))
    options = options or FmhaOptions.of(**fields)
    common = _common(q, k_pages, v_pages, sink, k_scale, v_scale, options, ("k_pages", "v_pages"))
    capacity = block_table.shape[1] * k_pages.shape[1]
    return FmhaProblem(
        "paged", max_seqlen_q=q.shape[1], max_seqlen_k=capacity, block_table=block_table, lengths=lengths, **common
    )


def bound(name: str, x: Any, total: int) -> int:
    """Return a bound on the longest sequence, never more than the number of rows."""
    if x is not None and x < 0:
        checks.fail(name, checks.describe(x), checks.BOUND)
    return total if x is None or x > total else x


def check_values(p: FmhaProblem) -> None:
    """Check values: lengths, page numbers, cu_seqlens and scales."""
    for name, scale in (("k_scale", p.k_scale), ("v_scale", p.v_scale)):
        if scale is not None and not bool(((scale > 0) & scale.isfinite()).all()):
            checks.fail(name, f"values from {scale.min().item()} to {scale.max().item()}", "finite numbers > 0")
    if p.cu_seqlens_q is not None and p.cu_seqlens_k is not None:
        for name, x, total, bound in (
            ("q", p.cu_seqlens_q, p.q.shape[0], p.max_seqlen_q),
            ("k", p.cu_seqlens_k, p.k.shape[0], p.max_seqlen_k),
        ):
            checks.cumulative(f"cu_seqlens_{name}", x, total, name)
            longest = int((x[1:] - x[:-1]).max()) if x.shape[0] > 1 else 0
            if longest > bound:
                checks.fail(
                    f"max_seqlen_{name}", bound, f"at least {longest}, the longest sequence in cu_seqlens_{name}"
                )
    elif p.lengths is not None and p.block_table is not None:
        checks.in_range("lengths", p.lengths, 0, p.max_seqlen_k)
        checks.page_numbers("block_table", p.block_table, p.page_size, p.lengths, p.k.shape[0], "lengths reaches")
