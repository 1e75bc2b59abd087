"""Gradients of v4_attention, from a request to launches. Each architecture has its own backward_sparse.

1. query_rows         delta and the exponent of every (query, head), for fp16 what bounds dS, dO turned as q was
   number_rows        the lists of both pools as one
2. backward_sparse    dO . O for delta (sm_90a), dQ, and every block's dKV: added to fp32 sums with atomics, or,
                      deterministic, stored and
3. fold_rows          summed by row in the order of the lists, some queries at a time
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsv4.caches import kv as caches
from dsv4.fmha.kernels.backward import addressable, descriptor
from dsv4.fmha.kernels.prepare import is_aligned, row_strides
from dsv4.kernels.softmax import LOG2E
from dsv4.runtime import checks
from dsv4.runtime.program import Program, Slot
from dsv4.v4.backward import V4Backward
from dsv4.v4.kernels.backward_arguments import Contributions, Outputs, PlainPools, RowLists, Terms
from dsv4.v4.kernels.backward_rows import (
    Numbered,
    QuerySizes,
    QueryStrides,
    QueryTensors,
    fold_rows,
    number_rows,
    query_rows,
)
from dsv4.v4.kernels.prepare import is_packed
from dsv4.v4.problem import V4Problem, requests_of

STORED_BYTES = 1 << 30  # bytes of contributions held at once, deterministic


def supports(b: V4Backward) -> str | None:
    """Return None, or why these kernels cannot run the problem."""
    p = b.forward
    if p.q.dtype not in checks.LOW_PRECISION:
        return f"q has dtype {p.q.dtype}; accepted: bfloat16 and float16"
    if p.head_dim != 512:
        return f"head dim {p.head_dim}; accepted: 512"
    if is_packed(p):
        return "packed rows"
    return None


def prepare_sparse(
    b: V4Backward,
    program: Program,
    kernel: Any,
    registers: dict[str, int],
    order_of_registers: bool = False,
    finds_dot: bool = False,
) -> None:
    """Fill b.dq, b.dwindow, b.dcompressed and b.dsink, those that are not None. kernel: backward_sparse of an
    architecture, and the registers of its roles. order_of_registers: it adds to dKV with columns in another order.
    finds_dot: it finds dO . O, but for fp16."""
    p = b.forward
    window = _flat(program, p.window)
    compressed = window if p.compressed is None else _flat(program, p.compressed)
    fp16 = p.q.dtype == torch.float16
    longest = None
    if fp16:
        longest = program.workspace("longest", (1,), torch.float32)
        program.compute(_find_longest, longest, window, None if p.compressed is None else compressed)
    lse2, delta, share, turned, tail, most, sizes = _rows(b, program, longest, not finds_dot or fp16)
    rows, blocks, window_blocks = _listed(p, program)
    width = rows.shape[1]
    q, out, dout = (addressable(program, x) for x in (p.q, p.out, b.dout))
    aligned = b.dq is not None and is_aligned(b.dq)
    dq = b.dq if aligned else program.workspace("dq", p.q.shape, p.q.dtype)
    split = caches.pool_size(p.window)
    total = split + (0 if p.compressed is None else caches.pool_size(p.compressed))
    sums = program.workspace("dkv", (total, 512), torch.float32)
    program.fill(sums, 0)
    tiles = -(-p.q_heads // 64)
    boxes = {
        name: descriptor(x, [1, 64, 64])
        for name, x in (("q_desc", q), ("dout_desc", dout), ("turned_desc", turned), ("dq_desc", dq))
    }
    common: dict[str, Any] = boxes | dict(
        pools=PlainPools(
            window_ptr=window,
            window_rows=split,
            window_stride=window.stride(0) // 8,
            window_blocks=window_blocks,
            compressed_ptr=compressed,
            compressed_stride=compressed.stride(0) // 8,
        ),
        terms=Terms(
            lse2_ptr=lse2,
            delta_ptr=delta,
            most_ptr=most,
            sizes_ptr=sizes,
            scale2=p.softmax_scale * LOG2E.value,
            scale=p.softmax_scale,
        ),
        outputs=Outputs(out, *row_strides(out)[1:], share, tail),
    )
    panels = 0 if p.cos_sin is None else turned.shape[-1] // 64
    options = dict(ATOMIC=not b.deterministic, TURNED=panels, SCALED=fp16, **registers, num_warps=4)

    def listed(target: Slot, undo: Slot, begin: int, count: int) -> None:
        lists = RowLists(rows, blocks, width, p.q_heads, begin, count)
        arguments = common | dict(lists=lists, contributions=Contributions(target, undo))
        program.launch(kernel, (count, tiles), arguments, **options)

    undo = lse2  # not read
    if not b.deterministic:
        listed(sums, undo, 0, p.batch)
    else:
        padded = -(-width // 64) * 64
        some = max(1, min(p.batch, STORED_BYTES // (tiles * padded * 1024)))
        parts = program.workspace("parts", (tiles * some * padded, 512), p.q.dtype)
        if fp16:
            undo = program.workspace("undo", (tiles * some * padded // 64,), torch.float32)
        places = program.workspace("places", (some * width,), torch.int32)
        starts = program.workspace("starts", (total + 1,), torch.int32)
        for begin in range(0, p.batch, some):
            count = min(some, p.batch - begin)
            listed(parts, undo, begin, count)
            program.compute(partial(_order, padded), places[: count * width], starts, rows[begin : begin + count])
            arguments = dict(
                parts_ptr=parts,
                order_ptr=places,
                starts_ptr=starts,
                sums_ptr=sums,
                head_tiles=tiles,
                per_tile=count * padded,
                undo_ptr=undo,
            )
            program.launch(fold_rows, (total,), arguments, SOME=16, SCALED=fp16, num_warps=4)
    if b.dsink is not None:
        program.compute(_sum_dsink, b.dsink, share)
    if b.dq is not None and not aligned:
        program.copy(b.dq, dq)
    for x, part in ((b.dwindow, sums[:split]), (b.dcompressed, sums[split:])):
        if x is not None and order_of_registers and not b.deterministic:
            program.compute(_reorder, x, part)
        elif x is not None:
            program.copy(x, part if x.ndim == 2 else part.unflatten(0, x.shape[:2]))


def _reorder(x: Tensor, sums: Tensor) -> None:
    """Fill x from the sums, whose columns are in the order of the tensor core's registers (add() of sm90's kernel)."""
    x.unflatten(-1, (32, 2, 4, 2)).copy_(sums.view(*x.shape[:-1], 32, 4, 2, 2).transpose(-3, -2))


def _order(padded: int, places: Tensor, starts: Tensor, rows: Tensor) -> None:
    """Find the contributions of each row: places, by row; starts [rows + 1], which of them are a row's."""
    count, width = rows.shape
    place = torch.arange(count, device=rows.device)[:, None] * padded + torch.arange(width, device=rows.device)
    found, order = rows.flatten().sort(stable=True)  # -1 first: no row's
    starts.copy_(torch.searchsorted(found, torch.arange(len(starts), dtype=torch.int32, device=rows.device)))
    places.copy_(place.flatten()[order])


def _sum_dsink(dsink: Tensor, share: Tensor) -> None:
    torch.sum(share, 0, out=dsink)


def _find_longest(longest: Tensor, *pools: Tensor | None) -> None:
    """Find the largest norm of a row. Rows that no query lists may hold anything."""
    norms = (torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32) for x in pools if x is not None and x.numel())
    longest.copy_(torch.stack([torch.where(x.isfinite(), x, 0).amax() for x in norms]).amax())


def _rows(b: V4Backward, program: Program, longest: Slot | None, dot: bool) -> tuple[Slot, ...]:
    """Return fp32 [N, H] each: the exponent to subtract (base 2), delta including the LSE's gradient, the terms of
    dsink. The last columns of dO rotated as q was, if the output was rotated back; else anything. fp32 [N, H]: dO . O
    of these columns, without `dot`, which leaves dO . O to another kernel. And fp32 [N, H], if the norm of the longest
    row is given: a bound of dS, and if deterministic of what a head adds to dKV; else anything."""
    p = b.forward
    q, out, dout = (addressable(program, x) for x in (p.q, p.out, b.dout))
    stored = longest is not None and b.deterministic

    def per_head(name: str) -> Slot:
        return program.workspace(name, (p.batch, p.q_heads), torch.float32)

    lse2, delta, share = per_head("lse2"), per_head("delta"), per_head("share")
    most = lse2 if longest is None else per_head("most")
    sizes = per_head("sizes") if stored else lse2
    turned, columns, tail = dout, 0, lse2
    if p.cos_sin is not None:
        columns = max(64, 1 << (p.cos_sin.shape[1] - 1).bit_length())
        turned = program.workspace("turned", (p.batch, p.q_heads, columns), p.q.dtype)
        tail = lse2 if dot else per_head("tail")
    sink, dlse, cos_sin, positions = (  # not read if None
        p.lse if x is None else x for x in (p.sink, b.dlse, p.cos_sin, p.positions)
    )
    positions = positions if positions.is_contiguous() else program.copied(positions)
    arguments = dict(
        tensors=QueryTensors(
            q_ptr=q,
            out_ptr=out,
            dout_ptr=dout,
            lse_ptr=p.lse,
            dlse_ptr=dlse,
            sink_ptr=sink,
            cos_sin_ptr=cos_sin,
            positions_ptr=positions,
            longest_ptr=lse2 if longest is None else longest,
            lse2_ptr=lse2,
            delta_ptr=delta,
            share_ptr=share,
            turned_ptr=turned,
            tail_ptr=tail,
            most_ptr=most,
            sizes_ptr=sizes,
        ),
        sizes=QuerySizes(
            heads=p.q_heads,
            has_sink=int(p.sink is not None),
            has_dlse=int(b.dlse is not None),
            positions=cos_sin.shape[0],
            rope_width=cos_sin.shape[1],
            rope_line=cos_sin.stride(0),
            scale=abs(p.softmax_scale),
        ),
        strides=QueryStrides(
            *row_strides(q)[1:], *row_strides(out)[1:], *row_strides(dout)[1:], *p.lse.stride(), *dlse.stride()
        ),
    )
    program.launch(
        query_rows,
        (p.batch, -(-p.q_heads // 16)),
        arguments,
        D=512,
        ROWS=16,
        TURNED=columns,
        SCALED=longest is not None,
        STORED=stored,
        DOT=dot,
        num_warps=4,
    )
    return lse2, delta, share, turned, tail, most, sizes


def _flat(program: Program, pool: Slot) -> Slot:
    """Return [rows, 512] with one stride for all rows; a copy if there is none."""
    flat = pool if pool.ndim == 2 else program.flattened(pool)
    return flat if is_aligned(flat) else program.copied(flat)


def _listed(p: V4Problem, program: Program) -> tuple[Slot, Slot, int]:
    """Return int32 [N, K], the rows of both pools by one number, compressed ones after the window's, -1 = nothing;
    int32 [N], how many blocks of 64 entries to process; and how many of these name window rows: no block names both."""
    window_blocks = -(-p.window_indices.shape[1] // 64)
    compressed, lengths, size = p.compressed_indices, p.compressed_lengths, 0
    if p.compressed is not None:
        size = caches.pool_size(p.compressed)
    if p.block_table is not None and p.block_table.shape[0] and p.compressed is not None and lengths is not None:
        compressed = program.workspace("compressed rows", (p.batch, p.compressed_capacity), torch.int32)
        lengths = program.workspace("their number", (p.batch,), torch.int32)
        program.compute(_list_pages, p, compressed, lengths)
    elif compressed is None:
        compressed = p.window_indices[:, :0]
    entries = compressed.shape[1]
    rows = program.workspace("rows", (p.batch, window_blocks * 64 + entries), torch.int32)
    blocks = program.workspace("blocks", (p.batch,), torch.int32)
    arguments = dict(
        window=Numbered(
            list_ptr=p.window_indices,
            lengths_ptr=blocks if p.window_lengths is None else p.window_lengths,
            has_lengths=int(p.window_lengths is not None),
            stride=p.window_indices.stride(0),
            entries=p.window_indices.shape[1],
            rows=caches.pool_size(p.window),
        ),
        compressed=Numbered(
            list_ptr=compressed,
            lengths_ptr=blocks if lengths is None else lengths,
            has_lengths=int(lengths is not None),
            stride=compressed.stride(0),
            entries=entries,
            rows=size,
        ),
        rows_ptr=rows,
        blocks_ptr=blocks,
        window_padded=window_blocks * 64,
    )
    program.launch(number_rows, (p.batch,), arguments, CHUNK=256, num_warps=4)
    return rows, blocks, window_blocks


def _list_pages(p: V4Problem, compressed: Tensor, lengths: Tensor) -> None:
    """Fill the rows that a block table names, as lists, and how many of them a query sees."""
    page, owner = caches.pool_page(p.compressed), requests_of(p)
    j = torch.arange(compressed.shape[1], device=compressed.device)
    lines = p.block_table[owner.clamp_max(p.block_table.shape[0] - 1)]
    compressed.copy_(lines[:, j // page].long() * page + j % page)
    torch.mul(p.compressed_lengths, owner < p.block_table.shape[0], out=lengths)
