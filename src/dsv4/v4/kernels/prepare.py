"""Turn a validated problem of V4 attention into a program. All architectures share this file.

A kernel gets, by name, the arguments made here that are among its parameters.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from dsv4.caches import kv as caches
from dsv4.caches.formats import format_of
from dsv4.caches.pages import PackedRows
from dsv4.fmha.kernels.prepare import (
    is_aligned,
    is_partial,
    merge_arguments,
    or_null,
    partials,
    prepare_fp16_merge,
    prepare_merge,
    row_strides,
    use_fp16_partials,
)
from dsv4.fmha.kernels.scores import sign_and_scale
from dsv4.kernels.combine import MergeStrides
from dsv4.kernels.compat import TensorDescriptor, gl
from dsv4.kernels.division import inverse_of
from dsv4.runtime import checks
from dsv4.runtime.dispatch import Target
from dsv4.runtime.program import Null, Program, Slot
from dsv4.runtime.splits import choose_splits, deterministic_cut, uneven, whole_first
from dsv4.v4.kernels.arguments import Names, Output, PoolSizes, Queries, Requests, Rope, Sizes
from dsv4.v4.kernels.tile_scheduler import CP_ASYNC, LIST, NONE, TABLE, TMA
from dsv4.v4.problem import V4Problem

HEADS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
LINE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
# For a pair of CTAs: each has half of the heads.
PAIR_HEADS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4, cga_layout=((0, 0, 1, 0),))
PAIR_LINE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2, cga_layout=((1, 0),))


def supports(p: V4Problem) -> str | None:
    """Return None, or why these kernels cannot run the problem."""
    if p.head_dim != 512:
        return f"head dim {p.head_dim}; the GPU kernels accept 512"
    if p.q.dtype not in checks.LOW_PRECISION:
        return f"dtype {p.q.dtype}; the GPU kernels accept torch.bfloat16 and torch.float16"
    if p.q.dtype != torch.bfloat16 and is_packed(p):
        kind = next(type(pool).__name__ for pool in (p.window, p.compressed) if isinstance(pool, PackedRows))
        return f"q of dtype {p.q.dtype} with an {kind}; the GPU kernels accept its rows with q of torch.bfloat16"
    return None


def lacks(p: V4Problem, function: str) -> str | None:
    """Return which packed rows have no such function for kernels, or None."""
    for pool in (p.window, p.compressed):
        if isinstance(pool, PackedRows) and not pool.format.has(function):
            return f"rows of format {pool.format.name}; it has no {function} function for kernels"
    return None


def is_packed(p: V4Problem) -> bool:
    """Return whether at least one of the pools has packed rows."""
    return isinstance(p.window, PackedRows) or isinstance(p.compressed, PackedRows)


class Division(NamedTuple):
    """How the work is divided; `splits.py` explains alone and uneven_from."""

    splits: int
    steps_per_split: int = 0  # at least; 0: enough to use all splits
    alone: int = 0
    uneven_from: int = 0x7FFFFFFF
    whole: int = 0  # queries whose work tiles have all rows


def prepare_sparse(
    p: V4Problem,
    target: Target,
    program: Program,
    kernel: Any,
    step: int,
    options: dict,
    splits: int = 0,
    *,
    can_be_uneven: bool = False,
    fp16_partials: bool = False,
    can_be_whole: bool = False,
    many_rows: int = 0,
    first: int = 0,
) -> None:
    """Add the kernel and, if the rows of a query are split, the combine kernel. The tensors of p are slots.

    A work tile is 64 heads of a query (or the option HEADS) and a split, twice as many for a pair of CTAs (num_ctas 2).
    Kernels loop over them, with one CTA per SM; those that get the number of splits have a CTA for each.
    step: rows that the kernel processes at a time, the unit of splits; options: further compile-time arguments;
    splits: how many, 0 = to be chosen here; can_be_uneven: see splits.uneven; fp16_partials: the kernel can write fp16
    partial results (combine.py); can_be_whole: it can process work tiles of all rows first (splits.whole_first);
    many_rows: see splits.choose_splits; first: the number of the first query as request_starts counts it.
    """
    ctas, persistent = options.get("num_ctas", 1), splits == 0
    head_tiles = -(-p.q_heads // (options.get("HEADS", 64) * ctas))
    tiles = p.batch * head_tiles
    cut = Division(splits)
    if persistent:
        cut = _divided(p, target, head_tiles, ctas, step, can_be_uneven, can_be_whole, many_rows)
    splits, whole = cut.splits, cut.whole
    split_queries = p.batch - whole
    # Deterministic: the combine kernel rounds the sink differently, and the width of the lists is not a property of a
    # query; so all queries go through the combine kernel.
    split = splits > 1 or p.deterministic or is_partial(p)
    sign, scale = sign_and_scale(p.softmax_scale)
    q = p.q if is_aligned(p.q) else program.copied(p.q)
    out = p.out if is_aligned(p.out) else program.workspace("out", p.out.shape, p.out.dtype)
    part: Any = Null(torch.float32)
    part_lse = part
    if split:
        fp16_partials = fp16_partials and use_fp16_partials(p, splits * split_queries)
        part, part_lse = partials(p, program, splits, split_queries * p.q_heads, fp16_partials)
    window = pool_sizes(program, p.window)
    compressed = no_rows(window) if p.compressed is None else pool_sizes(program, p.compressed)
    kv_index, names = _names(p, program)
    out_strides = row_strides(out)[1:]
    lse_strides = (0, 0) if p.lse is None else p.lse.stride()

    def given(x: Slot | None) -> Slot | Null:
        return Null(torch.int32) if x is None else x if x.is_contiguous() else program.copied(x)

    def named_by(lists: Slot | Null, lengths: Slot | None, width: int) -> Names:
        line = lists.stride(0) if isinstance(lists, Slot) else 0
        return Names(lists, line, given(lengths), int(lengths is not None), width)

    positions, width, line = (1, 0, 0) if p.cos_sin is None else (*p.cos_sin.shape, p.cos_sin.stride(0))
    rope = Rope(or_null(p.cos_sin, torch.float32), given(p.positions), positions, width, line)
    starts = p.request_starts
    arguments: dict[str, Any] = dict(
        q=Queries(q, *row_strides(q)[1:]),
        window_names=named_by(_lines(program, p.window_indices), p.window_lengths, p.window_indices.shape[1]),
        compressed_names=named_by(names, p.compressed_lengths, p.compressed_capacity),
        requests=Requests(given(starts), int(starts is not None), p.batch if starts is None else starts.shape[0] - 1),
        output=Output(
            out_ptr=Null(p.q.dtype) if is_partial(p) else out,
            lse_ptr=or_null(p.lse, torch.float32),
            sink_ptr=or_null(p.sink, torch.float32),
            part_ptr=part,
            part_lse_ptr=part_lse,
            stride_on=out_strides[0],
            stride_oh=out_strides[1],
            stride_ln=lse_strides[0],
            stride_lh=lse_strides[1],
            queries=split_queries,
            heads=p.q_heads,
            rope=rope,
            want_lse=int(p.lse is not None),
            split=int(split),
        ),
        sizes=Sizes(
            split_queries,
            p.q_heads,
            (whole + split_queries * splits) * head_tiles,
            splits - (cut.alone > 0),
            cut.steps_per_split,
            *inverse_of(splits),
            cut.alone,
            cut.uneven_from,
            whole or first,
        ),
        scale=scale,
        signed_scale=sign * scale,
    )
    loads = [CP_ASYNC, CP_ASYNC]
    if "window_desc" in kernel.arg_names:
        loads = _kv_loads(p, window, compressed)
        window_desc, window = _by_tma(loads[0], window, q, ctas)
        compressed_desc, compressed = _by_tma(loads[1], compressed, q, ctas)
        arguments |= dict(q_desc=_heads(program, q, ctas), window_desc=window_desc, compressed_desc=compressed_desc)
    arguments |= dict(window=window, compressed=compressed)
    if persistent:
        grid: tuple[int, ...] = (min(tiles * splits, target.num_sms // ctas),)
    else:
        grid = (tiles // p.batch, p.batch, splits)
    program.launch(
        kernel,
        grid,
        arguments,
        WINDOW_LOAD=loads[0].value,
        COMPRESSED_LOAD=loads[1].value,
        KV_INDEX=kv_index,
        SIGN=sign,
        WINDOW_FORMAT=format_of(p.window),
        WINDOW_UNIT=unit_of(p.window),
        COMPRESSED_FORMAT=format_of(p.compressed),
        COMPRESSED_UNIT=unit_of(p.compressed),
        SPLIT=2 if split and fp16_partials else split,
        WHOLE_FIRST=whole > 0,
        **dict(num_warps=4) | options,
    )
    if split:
        strides = MergeStrides(out_strides[0], 0, out_strides[1], lse_strides[0], 0, lse_strides[1])
        rest = replace(p, lse=p.lse[whole:]) if whole and p.lse is not None else p
        merge = merge_arguments(rest, out[whole:] if whole else out, part, part_lse, strides, splits, split_queries)
        if fp16_partials:
            prepare_fp16_merge(p, program, merge, splits)
        else:
            prepare_merge(p, program, merge, splits, early=options.get("PDL_LAUNCH", False))
    if out is not p.out:
        program.copy(p.out, out)


def _divided(
    p: V4Problem,
    target: Target,
    head_tiles: int,
    ctas: int,
    step: int,
    can_be_uneven: bool,
    can_be_whole: bool,
    many_rows: int,
) -> Division:
    tiles, steps = p.batch * head_tiles, -(-p.max_seqlen_k // step)
    if p.deterministic:  # the result may depend on a query's own rows only
        splits, each = deterministic_cut(p.q_heads, p.max_seqlen_k)
        return Division(max(splits, 1), each // step)
    if p.num_splits > 0:
        return Division(p.num_splits)
    splits = choose_splits(tiles * ctas, target.num_sms, p.max_seqlen_k, many_rows=many_rows)
    if not can_be_uneven:
        return Division(splits)
    splits, alone, uneven_from = uneven(tiles, target.num_sms, steps, splits)
    whole = 0
    if can_be_whole and not is_partial(p):
        # Steps of plain rows are short: merging, if nothing was merged before, takes one more.
        more = 1 if splits == 1 and not is_packed(p) else 0
        whole, splits = whole_first(p.batch, head_tiles, target.num_sms, steps, splits, more)
    return Division(splits, 0, alone, uneven_from, whole)


def pool_sizes(program: Program, pool: Any) -> PoolSizes:
    """Return a pool's kernel arguments; strides in units of 8 elements, or as `unit_of` determines."""
    if isinstance(pool, PackedRows):
        page_rows, page_stride = pool.rows_per_page, pool.page_stride // unit_of(pool)
        return PoolSizes(pool.storage, caches.pool_size(pool), page_rows, page_stride, 0, *inverse_of(page_rows), 0)
    if not is_aligned(pool if pool.ndim == 3 else pool.unsqueeze(1)):
        pool = program.copied(pool)
    if pool.ndim == 2:
        pool = pool.unsqueeze(1)
    page, row = (s // 8 if n > 1 else 0 for s, n in zip(pool.stride()[:-1], pool.shape))
    pages, page_rows, _ = pool.shape
    return PoolSizes(pool, pages * page_rows, page_rows, page, row, *inverse_of(page_rows), 0)


def no_rows(pool: PoolSizes) -> PoolSizes:
    return PoolSizes(pool.ptr, 0, 1, 0, 0, *inverse_of(1), 0)


def _names(p: V4Problem, program: Program) -> tuple[int, Slot | Null]:
    """Return how compressed rows are named, and the list or the block table that names them."""
    if p.compressed is None:
        return NONE.value, Null(torch.int32)
    if p.block_table is not None:
        return TABLE.value, _lines(program, p.block_table)
    return LIST.value, _lines(program, p.compressed_indices)


def _lines(program: Program, x: Any) -> Slot:
    """Return a 2-D tensor whose lines are contiguous."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else program.copied(x)


def _heads(program: Program, q: Slot, ctas: int) -> TensorDescriptor:
    """Describe the heads of one query, 64 per CTA; absent heads read zeros. One CTA: half of their columns at a time. A
    pair: all of them, as panels of 64 columns in one message, since each message delays the gathers behind it."""
    if any(s <= 0 for s, n in zip(q.stride(), q.shape) if n > 1):
        q = program.copied(q)
    queries, heads, d = q.shape
    stride_n, stride_h = (s if n > 1 else d for s, n in zip(q.stride(), q.shape[:2]))
    if ctas == 1:
        return TensorDescriptor(q, [queries, heads, d], [stride_n, stride_h, 1], [1, 64, 256], HEADS)
    shape, strides = [queries, d // 64, heads, 64], [stride_n, 64, stride_h, 1]
    return TensorDescriptor(q, shape, strides, [1, d // 64, 128, 64], PAIR_HEADS)


def _lines_apart(rows: Any) -> tuple[int, int] | None:
    """Return (elements from a line to the next, lines of a page and the gap after it) of a pool [pages, rows, D]; None
    if its rows are not equally spaced: TMA gathers lines of a two-dimensional tensor."""
    pages, page_rows, d = rows.shape
    page, row, _ = rows.stride()
    if pages == 1 or page_rows == 1:
        apart = row if page_rows > 1 else page if pages > 1 else d
        return (apart, page_rows) if apart > 0 else None
    return (row, page // row) if row > 0 and page % row == 0 and page >= page_rows * row else None


def comes_by_tma(pool: Any) -> bool:
    """Return whether TMA can gather rows of a plain pool, together with rows that it can gather."""
    rows = pool if pool.ndim == 3 else pool.unsqueeze(1)
    return not is_aligned(rows) or _lines_apart(rows) is not None  # unaligned rows are copied


def _kv_loads(p: V4Problem, window: PoolSizes, compressed: PoolSizes) -> list[Any]:
    """Return how plain rows of the two pools are loaded. Next to packed rows, cp.async loads them: with the code for
    TMA a role would not fit into its registers."""
    packed = is_packed(p)
    loads = []
    for pool, rows in ((p.window, window.ptr), (p.compressed, compressed.ptr)):
        by_tma = pool is not None and not packed and _lines_apart(rows) is not None
        loads.append(TMA if by_tma else CP_ASYNC)
    return loads


def _by_tma(load: Any, pool: PoolSizes, q: Slot, ctas: int) -> tuple[TensorDescriptor, PoolSizes]:
    """Return the descriptor of a pool's lines, and the pool with the lines between its pages; if the pool is read in
    another way, that of a line of q, which no kernel reads."""
    rows: Any = pool.ptr
    if load is not TMA or rows.numel() == 0:
        rows = q.view((1, 1, q.shape[-1]), (q.shape[-1], q.shape[-1], 1))
    apart = _lines_apart(rows)
    assert apart is not None
    pages, page_rows, d = rows.shape
    layout = LINE if ctas == 1 else PAIR_LINE
    desc = TensorDescriptor(rows, [(pages - 1) * apart[1] + page_rows, d], [apart[0], 1], [1, 256], layout)
    return desc, pool._replace(gap=apart[1] - page_rows)


def unit_of(pool: Any) -> int:
    """Return the alignment in bytes of pages of packed rows: 16 if possible, for 16-byte loads."""
    if not isinstance(pool, PackedRows):
        return 16
    return next(unit for unit in (16, 8, 2, 1) if pool.page_stride % unit == 0 and pool.storage.data_ptr() % unit == 0)
