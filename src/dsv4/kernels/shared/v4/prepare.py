"""V4 attention from a validated problem to launches. Shared by all architectures.

A kernel is given the arguments that it names, of those that `forward_listed` makes.
"""

from functools import cache

import torch
from torch import Tensor

from dsv4 import caches
from dsv4.caches import Fp8Cache
from dsv4.kernels.compat import TensorDescriptor, gl
from dsv4.kernels.shared.fmha.prepare import (
    inverse_of,
    is_aligned,
    merge,
    multiprocessors,
    no_sink,
    partials,
    row_strides,
    rows_aligned,
    sign_and_scale,
    unread,
)
from dsv4.kernels.shared.v4.items import CELLS, FP8, TMA
from dsv4.runtime import aot, repeat
from dsv4.runtime.plan import choose_splits, deterministic_cut
from dsv4.v4.problem import V4Problem

HEADS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
LINE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
# For a pair of CTAs: each has half of the heads.
PAIR_HEADS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3, cga_layout=((0, 1, 0),))
PAIR_LINE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2, cga_layout=((1, 0),))


def supports(p: V4Problem) -> str | None:
    """None, or why these kernels cannot run the problem."""
    if p.head_dim != 512:
        return f"head dim {p.head_dim}; the GPU kernels take 512"
    if p.q.dtype != torch.bfloat16:
        return f"dtype {p.q.dtype}; the GPU kernels take torch.bfloat16"
    return None


def forward_listed(p: V4Problem, kernel, step: int, options: dict) -> None:
    """Launch the kernel and, where the rows of a query are split, the combine kernel.

    An item is 64 heads of a query and a split, 128 for a pair of CTAs (num_ctas 2). A kernel that names `items` loops
    over them, one CTA per multiprocessor; another has a CTA for each. step: rows that the kernel takes at a time, what
    splits are made of; options: further compile-time arguments.
    """
    assert p.out is not None
    ctas = options.get("num_ctas", 1)
    tiles = p.batch * -(-p.q_heads // (64 * ctas))
    splits, steps_per_split = _splits(p, tiles * ctas, step)
    # Deterministic: the way through the combine kernel rounds the sink differently, and how wide the lists are is no
    # property of a query; so all take that way.
    split = splits > 1 or p.deterministic
    sign, scale = sign_and_scale(p.softmax_scale)
    q = rows_aligned(p.q)
    out = p.out if is_aligned(p.out) else torch.empty_like(p.out, memory_format=torch.contiguous_format)
    sink = p.sink if p.sink is not None else no_sink(p.q_heads, p.q.device)
    nothing = unread(p.q.device)
    want_lse = int(p.lse is not None)
    lse = p.lse if p.lse is not None else sink
    stride_l = (lse.stride(0), lse.stride(1)) if p.lse is not None else (0, 0)
    part, part_lse = sink, sink  # unused
    if split:
        part, part_lse = partials(p, splits, p.batch * p.q_heads)
    window = _pool(p.window)
    if p.compressed is None:
        how, compressed, names = 0, (window[0], 0, 1, 0, 0), nothing
    else:
        how = 2 if p.block_table is not None else 1
        compressed = _pool(p.compressed)
        names = _lines(p.block_table if p.block_table is not None else p.compressed_indices)
    window_names = _lines(p.window_indices)
    requests = p.request_starts.shape[0] - 1 if p.request_starts is not None else p.batch
    cos_sin, rope = sink, (1, 0, 0)  # unused
    if p.cos_sin is not None:
        cos_sin = _lines(p.cos_sin)
        rope = (cos_sin.shape[0], cos_sin.shape[1], cos_sin.stride(0))
    _, stride_qn, stride_qh = row_strides(q)
    _, stride_on, stride_oh = row_strides(out)

    def given(x: Tensor | None) -> Tensor:
        return nothing if x is None else x.contiguous()

    arguments = dict(
        q_ptr=q, out_ptr=out, lse_ptr=lse, sink_ptr=sink, part_ptr=part, part_lse_ptr=part_lse,
        window_list_ptr=window_names, window_lengths_ptr=given(p.window_lengths), compressed_list_ptr=names,
        compressed_lengths_ptr=given(p.compressed_lengths), starts_ptr=given(p.request_starts), cos_sin_ptr=cos_sin,
        positions_ptr=given(p.positions), scale=scale, want_lse=want_lse, queries=p.batch, heads=p.q_heads,
        **_named("window", window), window_width=p.window_indices.shape[1], window_line=window_names.stride(0),
        **_named("compressed", compressed), compressed_width=p.compressed_capacity,
        compressed_line=names.stride(0) if how else 0, window_lengths=int(p.window_lengths is not None),
        compressed_lengths=int(p.compressed_lengths is not None), starts=int(p.request_starts is not None),
        requests=requests, rope_positions=rope[0], rope_width=rope[1], rope_line=rope[2], num_splits=splits,
        tiles_per_split=steps_per_split, stride_qn=stride_qn, stride_qh=stride_qh, stride_on=stride_on,
        stride_oh=stride_oh, stride_ln=stride_l[0], stride_lh=stride_l[1], sign=sign, split=int(split),
        signed_scale=sign * scale, items=tiles * splits,
    )  # fmt: skip
    known = {}
    if "window_desc" in kernel.arg_names:
        ways = _ways(p, window[0], compressed[0])
        arguments |= dict(q_desc=_heads(q, ctas))
        for name, way, rows in (("window", ways[0], window[0]), ("compressed", ways[1], compressed[0])):
            arguments |= _by_tma(name, way, rows, ctas)
        known = dict(WINDOW_WAY=ways[0], COMPRESSED_WAY=ways[1])
    known |= dict(
        HOW=how, SIGN=sign, WINDOW_FP8=isinstance(p.window, Fp8Cache), WINDOW_UNIT=_unit(p.window),
        COMPRESSED_FP8=isinstance(p.compressed, Fp8Cache), COMPRESSED_UNIT=_unit(p.compressed), SPLIT=split,
    )  # fmt: skip
    known = {name: value for name, value in known.items() if name in kernel.arg_names}
    taken = [arguments[name] for name in kernel.arg_names if name in arguments]
    grid: tuple[int, ...] = (tiles, splits)
    if "items" in kernel.arg_names:
        grid = (min(tiles * splits, multiprocessors(p.q.device) // ctas),)
    aot.launch(kernel, grid, taken, **known, num_warps=4, **options)
    if split:
        merge(p, part, part_lse, out, lse, sink, nothing, splits, p.batch, 1, (stride_on, 0, stride_oh),
              (stride_l[0], 0, stride_l[1]))  # fmt: skip
    if out is not p.out:
        p.out.copy_(out)


def _splits(p: V4Problem, tiles: int, step: int) -> tuple[int, int]:
    """(number of splits, least steps per split or 0 = as many as it takes to use all splits)."""
    if p.deterministic:  # nothing but a query's own rows may count
        splits, each = deterministic_cut(p.q_heads, p.max_seqlen_k)
        return max(splits, 1), each // step
    if p.num_splits > 0:
        return p.num_splits, 0
    return choose_splits(tiles, multiprocessors(p.q.device), p.max_seqlen_k), 0


def _pool(pool: Tensor | Fp8Cache) -> tuple[Tensor, int, int, int, int]:
    """(tensor, rows, rows per page, page stride, row stride); strides in units of 8 elements, or as `_unit` says."""
    if isinstance(pool, Fp8Cache):
        return pool.storage, caches.pool_size(pool), pool.rows_per_page, pool.page_stride // _unit(pool), 0
    if pool.ndim == 2:
        pool = pool[:, None]
    if not is_aligned(pool):
        pool = pool.clone(memory_format=torch.contiguous_format)
    page, row = (s // 8 if n > 1 else 0 for s, n in zip(pool.stride()[:-1], pool.shape))
    return pool, pool.shape[0] * pool.shape[1], pool.shape[1], page, row


def _named(name: str, pool: tuple) -> dict:
    """What `_pool` says, by the names of the kernels' arguments, and the inverse of the rows per page."""
    named = dict(zip((f"{name}_{x}" for x in ("ptr", "rows", "page_rows", "page_stride", "row_stride")), pool))
    inverse, shift = inverse_of(pool[2])
    return named | {f"{name}_inverse": inverse, f"{name}_shift": shift}


def _heads(q: Tensor, ctas: int) -> TensorDescriptor:
    """Boxes of 64 heads per CTA of one query and half of their columns; heads that are not there read zeros."""
    if any(s <= 0 for s, n in zip(q.stride(), q.shape) if n > 1):
        q = q.clone(memory_format=torch.contiguous_format)
    strides = [s if n > 1 else q.shape[-1] for s, n in zip(q.stride()[:-1], q.shape)]
    return TensorDescriptor(q, list(q.shape), [*strides, 1], [1, 64 * ctas, 256], HEADS if ctas == 1 else PAIR_HEADS)


def _lines_apart(rows: Tensor) -> tuple[int, int] | None:
    """(elements from a line to the next, lines of a page with what follows it) of a pool [pages, rows, D]; None if its
    rows are not equally far apart: TMA gathers lines of a two-dimensional tensor."""
    pages, page_rows, d = rows.shape
    page, row, _ = rows.stride()
    if pages == 1 or page_rows == 1:
        apart = row if page_rows > 1 else page if pages > 1 else d
        return (apart, page_rows) if apart > 0 else None
    return (row, page // row) if row > 0 and page % row == 0 and page >= page_rows * row else None


def comes_by_tma(pool: Tensor) -> bool:
    """Whether rows of a plain pool can be gathered by TMA, beside rows that can."""
    rows = pool if pool.ndim == 3 else pool[:, None]
    return not is_aligned(rows) or _lines_apart(rows) is not None  # what is not aligned gets copied


def _ways(p: V4Problem, window: Tensor, compressed: Tensor) -> list[int]:
    """How the rows of the two pools are read: see gather.py. Beside an Fp8Cache plain ones come by cp.async: with the
    code for TMA a role would not fit into its registers."""
    fp8 = isinstance(p.window, Fp8Cache) or isinstance(p.compressed, Fp8Cache)
    ways = []
    for pool, rows in ((p.window, window), (p.compressed, compressed)):
        by_tma = isinstance(pool, Tensor) and not fp8 and _lines_apart(rows) is not None
        ways.append(FP8.value if isinstance(pool, Fp8Cache) else TMA.value if by_tma else CELLS.value)
    return ways


def _by_tma(name: str, way: int, rows: Tensor, ctas: int) -> dict:
    """The descriptor of a pool's lines and the lines between its pages; of nothing where it is read in another way."""
    if way != TMA.value or rows.numel() == 0:
        rows = _no_rows(rows.device)
    apart = _lines_apart(rows)
    assert apart is not None
    pages, page_rows, d = rows.shape
    layout = LINE if ctas == 1 else PAIR_LINE
    desc = TensorDescriptor(rows, [(pages - 1) * apart[1] + page_rows, d], [apart[0], 1], [1, 256], layout)
    return {f"{name}_desc": desc, f"{name}_gap": apart[1] - page_rows}


@cache
def _no_rows(device: torch.device) -> Tensor:
    return repeat.constant(torch.zeros(1, 1, 512, dtype=torch.bfloat16, device=device))


def _unit(pool: Tensor | Fp8Cache | None) -> int:
    """Bytes that the page stride of an Fp8Cache is a multiple of: 16 where it can be, for 16-byte loads."""
    if not isinstance(pool, Fp8Cache):
        return 16
    return next(unit for unit in (16, 8, 2, 1) if pool.page_stride % unit == 0 and pool.storage.data_ptr() % unit == 0)


def _lines(x: Tensor | None) -> Tensor:
    """A 2-D tensor whose lines are contiguous."""
    assert x is not None
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()
