"""V4 attention from a validated problem to a program. Shared by all architectures.

A kernel gets, by name, those of the arguments made here that its parameters name.
"""

from typing import Any

import torch

from dsv4.caches import kv as caches
from dsv4.caches.formats import format_of
from dsv4.caches.pages import PackedRows
from dsv4.fmha.kernels.prepare import (
    inverse_of,
    is_aligned,
    is_partial,
    merge_arguments,
    partials,
    prepare_fp16_merge,
    prepare_merge,
    row_strides,
    sign_and_scale,
    use_fp16_partials,
)
from dsv4.kernels.combine import MergeStrides
from dsv4.kernels.compat import TensorDescriptor, gl
from dsv4.runtime import checks
from dsv4.runtime.dispatch import Target
from dsv4.runtime.program import Null, Program, Slot
from dsv4.runtime.splits import choose_splits, deterministic_cut, uneven
from dsv4.v4.kernels.tile_scheduler import CP_ASYNC, LIST, NONE, TABLE, TMA
from dsv4.v4.problem import V4Problem

HEADS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
LINE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
# For a pair of CTAs: each has half of the heads.
PAIR_HEADS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4, cga_layout=((0, 0, 1, 0),))
PAIR_LINE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2, cga_layout=((1, 0),))


def supports(p: V4Problem) -> str | None:
    """None, or why these kernels cannot run the problem."""
    if p.head_dim != 512:
        return f"head dim {p.head_dim}; the GPU kernels take 512"
    if p.q.dtype not in checks.LOW_PRECISION:
        return f"dtype {p.q.dtype}; the GPU kernels take torch.bfloat16 and torch.float16"
    if p.q.dtype != torch.bfloat16 and is_packed(p):
        kind = next(type(pool).__name__ for pool in (p.window, p.compressed) if isinstance(pool, PackedRows))
        return f"q of dtype {p.q.dtype} with an {kind}; the GPU kernels take its rows with q of torch.bfloat16"
    return None


def lacks(p: V4Problem, function: str) -> str | None:
    """Which packed rows have no such function for kernels."""
    for pool in (p.window, p.compressed):
        if isinstance(pool, PackedRows) and not pool.format.has(function):
            return f"rows of format {pool.format.name}; it has no {function} function for kernels"
    return None


def is_packed(p: V4Problem) -> bool:
    """Whether one of the pools at least has packed rows."""
    return isinstance(p.window, PackedRows) or isinstance(p.compressed, PackedRows)


def prepare_sparse(
    p: V4Problem, target: Target, program: Program, kernel: Any, step: int, options: dict, splits: int = 0,
    fp16_partials: bool = False,
) -> None:  # fmt: skip
    """The kernel and, where the rows of a query are split, the combine kernel. The tensors of p are slots.

    A work tile is 64 heads of a query (or the option HEADS) and a split, twice as many for a pair of CTAs (num_ctas 2).
    A kernel that names `num_tiles` loops over them, one CTA per multiprocessor; another has a CTA for each. step: rows
    that the kernel takes at a time, what splits are made of; options: further compile-time arguments; splits: how many,
    0 = to be chosen here; fp16_partials: the kernel can write fp16 partial results (combine.py).
    """
    ctas = options.get("num_ctas", 1)
    tiles = p.batch * -(-p.q_heads // (options.get("HEADS", 64) * ctas))
    steps_per_split, alone, uneven_from = 0, 0, 0x7FFFFFFF
    if splits == 0:
        splits, steps_per_split = _splits(p, target, tiles * ctas, step)
        if "uneven_from" in kernel.arg_names and not p.deterministic and p.num_splits == 0:
            splits, alone, uneven_from = uneven(tiles, target.num_sms, -(-p.max_seqlen_k // step), splits)
    # Deterministic: the way through the combine kernel rounds the sink differently, and how wide the lists are is no
    # property of a query; so all take that way.
    split = splits > 1 or p.deterministic or is_partial(p)
    sign, scale = sign_and_scale(p.softmax_scale)
    q = p.q if is_aligned(p.q) else program.copied(p.q)
    out = p.out if is_aligned(p.out) else program.workspace("out", p.out.shape, p.out.dtype)
    part: Any = Null(torch.float32)
    part_lse = part
    if split:
        fp16_partials = fp16_partials and use_fp16_partials(p, splits * p.batch)
        part, part_lse = partials(p, program, splits, p.batch * p.q_heads, fp16_partials)
    window = PoolArguments.of(program, p.window)
    compressed = window.without_rows() if p.compressed is None else PoolArguments.of(program, p.compressed)
    how, names = _names(p, program)
    window_names = _lines(program, p.window_indices)
    positions, angles, angle_line = (1, 0, 0) if p.cos_sin is None else (*p.cos_sin.shape, p.cos_sin.stride(0))
    _, stride_qn, stride_qh = row_strides(q)
    _, stride_on, stride_oh = row_strides(out)
    stride_ln, stride_lh = (0, 0) if p.lse is None else p.lse.stride()

    inverse, shift = inverse_of(splits)

    def given(x: Slot | None, dtype: torch.dtype = torch.int32) -> Slot | Null:
        return Null(dtype) if x is None else x if x.is_contiguous() else program.copied(x)

    arguments: dict[str, Any] = dict(
        q_ptr=q, out_ptr=Null(p.q.dtype) if is_partial(p) else out, lse_ptr=given_as(p.lse),
        sink_ptr=given_as(p.sink), part_ptr=part, part_lse_ptr=part_lse,
        window_list_ptr=window_names, window_lengths_ptr=given(p.window_lengths), compressed_list_ptr=names,
        compressed_lengths_ptr=given(p.compressed_lengths), starts_ptr=given(p.request_starts),
        cos_sin_ptr=given_as(p.cos_sin), positions_ptr=given(p.positions), scale=scale,
        want_lse=int(p.lse is not None), queries=p.batch, heads=p.q_heads, **window.named("window"),
        window_width=p.window_indices.shape[1], window_line=window_names.stride(0), **compressed.named("compressed"),
        compressed_width=p.compressed_capacity, compressed_line=names.stride(0) if isinstance(names, Slot) else 0,
        window_lengths=int(p.window_lengths is not None), compressed_lengths=int(p.compressed_lengths is not None),
        starts=int(p.request_starts is not None),
        requests=p.batch if p.request_starts is None else p.request_starts.shape[0] - 1,
        rope_positions=positions, rope_width=angles, rope_line=angle_line, num_splits=splits,
        tiles_per_split=steps_per_split, stride_qn=stride_qn, stride_qh=stride_qh, stride_on=stride_on,
        stride_oh=stride_oh, stride_ln=stride_ln, stride_lh=stride_lh, sign=sign, split=int(split),
        signed_scale=sign * scale, num_tiles=tiles * splits, alone=alone, uneven_from=uneven_from,
        splits_inverse=inverse, splits_shift=shift,
    )  # fmt: skip
    loads = [CP_ASYNC, CP_ASYNC]
    if "window_desc" in kernel.arg_names:
        loads = _kv_loads(p, window, compressed)
        arguments |= dict(q_desc=_heads(program, q, ctas))
        for name, load, pool in zip(("window", "compressed"), loads, (window, compressed)):
            arguments |= _by_tma(name, load, pool.tensor, q, ctas)
    grid: tuple[int, ...] = (tiles, splits)
    if "splits_inverse" in kernel.arg_names:
        grid = (tiles // p.batch, p.batch, splits)
    if "num_tiles" in kernel.arg_names:
        grid = (min(tiles * splits, target.num_sms // ctas),)
    equal = dict(num_splits=splits - (alone > 0))
    program.launch(
        kernel, grid, arguments | equal, WINDOW_LOAD=loads[0].value, COMPRESSED_LOAD=loads[1].value, KV_INDEX=how,
        SIGN=sign, WINDOW_FORMAT=format_of(p.window), WINDOW_UNIT=unit_of(p.window),
        COMPRESSED_FORMAT=format_of(p.compressed), COMPRESSED_UNIT=unit_of(p.compressed),
        SPLIT=2 if split and fp16_partials else split,
        **dict(num_warps=4) | options,
    )  # fmt: skip
    if split:
        strides = MergeStrides(stride_on, 0, stride_oh, stride_ln, 0, stride_lh)
        merge = merge_arguments(p, out, part, part_lse, strides, splits, p.batch)
        if fp16_partials:
            prepare_fp16_merge(p, program, merge, splits)
        else:
            prepare_merge(p, program, merge, splits, early=options.get("PDL_LAUNCH", False))
    if out is not p.out:
        program.copy(p.out, out)


def given_as(x: Slot | None, dtype: torch.dtype = torch.float32) -> Slot | Null:
    return Null(dtype) if x is None else x


def _splits(p: V4Problem, target: Target, tiles: int, step: int) -> tuple[int, int]:
    """(number of splits, least steps per split or 0 = as many as it takes to use all splits)."""
    if p.deterministic:  # nothing but a query's own rows may count
        splits, each = deterministic_cut(p.q_heads, p.max_seqlen_k)
        return max(splits, 1), each // step
    if p.num_splits > 0:
        return p.num_splits, 0
    return choose_splits(tiles, target.num_sms, p.max_seqlen_k), 0


class PoolArguments:
    """A pool of rows as a kernel is told of it; strides in units of 8 elements, or as `unit_of` says."""

    def __init__(self, tensor: Slot, rows: int, page_rows: int, page_stride: int, row_stride: int):
        self.tensor = tensor
        self.sizes = dict(rows=rows, page_rows=page_rows, page_stride=page_stride, row_stride=row_stride)

    @classmethod
    def of(cls, program: Program, pool: Any) -> "PoolArguments":
        if isinstance(pool, PackedRows):
            return cls(pool.storage, caches.pool_size(pool), pool.rows_per_page, pool.page_stride // unit_of(pool), 0)
        if not is_aligned(pool if pool.ndim == 3 else pool.unsqueeze(1)):
            pool = program.copied(pool)
        if pool.ndim == 2:
            pool = pool.unsqueeze(1)
        page, row = (s // 8 if n > 1 else 0 for s, n in zip(pool.stride()[:-1], pool.shape))
        return cls(pool, pool.shape[0] * pool.shape[1], pool.shape[1], page, row)

    def without_rows(self) -> "PoolArguments":
        return PoolArguments(self.tensor, 0, 1, 0, 0)

    def named(self, name: str) -> dict[str, Any]:
        """By the names of the kernels' parameters, with the inverse of the rows per page."""
        inverse, shift = inverse_of(self.sizes["page_rows"])
        sizes = {f"{name}_{key}": size for key, size in self.sizes.items()}
        return sizes | {f"{name}_ptr": self.tensor, f"{name}_inverse": inverse, f"{name}_shift": shift}


def _names(p: V4Problem, program: Program) -> tuple[int, Slot | Null]:
    """How compressed rows are named, and the list or the block table that names them."""
    if p.compressed is None:
        return NONE.value, Null(torch.int32)
    if p.block_table is not None:
        return TABLE.value, _lines(program, p.block_table)
    return LIST.value, _lines(program, p.compressed_indices)


def _lines(program: Program, x: Any) -> Slot:
    """A 2-D tensor whose lines are contiguous."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else program.copied(x)


def _heads(program: Program, q: Slot, ctas: int) -> TensorDescriptor:
    """Of one query, 64 heads per CTA; heads that are not there read zeros. One CTA: half of their columns at a time. A
    pair: all of them, as panels of 64 columns in one message, as messages hold up the gathers behind them."""
    if any(s <= 0 for s, n in zip(q.stride(), q.shape) if n > 1):
        q = program.copied(q)
    queries, heads, d = q.shape
    stride_n, stride_h = (s if n > 1 else d for s, n in zip(q.stride(), q.shape[:2]))
    if ctas == 1:
        return TensorDescriptor(q, [queries, heads, d], [stride_n, stride_h, 1], [1, 64, 256], HEADS)
    shape, strides = [queries, d // 64, heads, 64], [stride_n, 64, stride_h, 1]
    return TensorDescriptor(q, shape, strides, [1, d // 64, 128, 64], PAIR_HEADS)


def _lines_apart(rows: Any) -> tuple[int, int] | None:
    """(elements from a line to the next, lines of a page with what follows it) of a pool [pages, rows, D]; None if its
    rows are not equally far apart: TMA gathers lines of a two-dimensional tensor."""
    pages, page_rows, d = rows.shape
    page, row, _ = rows.stride()
    if pages == 1 or page_rows == 1:
        apart = row if page_rows > 1 else page if pages > 1 else d
        return (apart, page_rows) if apart > 0 else None
    return (row, page // row) if row > 0 and page % row == 0 and page >= page_rows * row else None


def comes_by_tma(pool: Any) -> bool:
    """Whether rows of a plain pool can be gathered by TMA, beside rows that can."""
    rows = pool if pool.ndim == 3 else pool.unsqueeze(1)
    return not is_aligned(rows) or _lines_apart(rows) is not None  # what is not aligned gets copied


def _kv_loads(p: V4Problem, window: PoolArguments, compressed: PoolArguments) -> list[Any]:
    """How plain rows of the two pools are loaded. Beside packed rows they come by cp.async: with the code for TMA a
    role would not fit into its registers."""
    packed = is_packed(p)
    loads = []
    for pool, rows in ((p.window, window.tensor), (p.compressed, compressed.tensor)):
        by_tma = pool is not None and not packed and _lines_apart(rows) is not None
        loads.append(TMA if by_tma else CP_ASYNC)
    return loads


def _by_tma(name: str, load: Any, rows: Slot, q: Slot, ctas: int) -> dict:
    """The descriptor of a pool's lines and the lines between its pages; where the pool is read in another way, that of
    a line of q, which nobody reads."""
    if load is not TMA or rows.numel() == 0:
        rows = q.view((1, 1, q.shape[-1]), (q.shape[-1], q.shape[-1], 1))
    apart = _lines_apart(rows)
    assert apart is not None
    pages, page_rows, d = rows.shape
    layout = LINE if ctas == 1 else PAIR_LINE
    desc = TensorDescriptor(rows, [(pages - 1) * apart[1] + page_rows, d], [apart[0], 1], [1, 256], layout)
    return {f"{name}_desc": desc, f"{name}_gap": apart[1] - page_rows}


def unit_of(pool: Any) -> int:
    """Bytes that pages of packed rows begin at multiples of: 16 where it can be, for 16-byte loads."""
    if not isinstance(pool, PackedRows):
        return 16
    return next(unit for unit in (16, 8, 2, 1) if pool.page_stride % unit == 0 and pool.storage.data_ptr() % unit == 0)
