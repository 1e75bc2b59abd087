"""Gradients of v4_attention: from a request to launches. Each architecture has a backward_listed of its own.

1. query_rows         delta and the exponent of every (query, head), for fp16 what bounds dS, dO turned as q was
   number_rows        the lists of both pools as one
2. backward_listed    dQ, and every block's dKV: added to fp32 sums with atomics, or, deterministic, stored and
3. fold_rows          summed by row in the order of the lists, some queries at a time
"""

from typing import Any

import torch
from torch import Tensor

from dsv4.caches import kv as caches
from dsv4.fmha.kernels.backward import addressable, descriptor
from dsv4.fmha.kernels.prepare import is_aligned, row_strides
from dsv4.kernels.softmax import LOG2E
from dsv4.runtime import checks, launch
from dsv4.v4.backward import V4Backward
from dsv4.v4.kernels.backward_rows import fold_rows, number_rows, query_rows
from dsv4.v4.kernels.prepare import is_packed
from dsv4.v4.problem import V4Problem, requests_of

STORED_BYTES = 1 << 30  # contributions held at once, deterministic


def supports(b: V4Backward) -> str | None:
    """None, or why these kernels cannot run the problem."""
    p = b.forward
    if p.q.dtype not in checks.LOW_PRECISION:
        return f"q has dtype {p.q.dtype}; they take bfloat16 and float16"
    if p.head_dim != 512:
        return f"head dim {p.head_dim}; they take 512"
    if is_packed(p):
        return "packed rows"
    return None


def run(b: V4Backward, kernel: Any, registers: dict[str, int]) -> None:
    """Fill b.dq, b.dwindow, b.dcompressed and b.dsink, those that are not None. kernel: backward_listed of an
    architecture, and the registers of its roles."""
    p = b.forward
    window = _flat(p.window)
    compressed = window if p.compressed is None else _flat(p.compressed)
    fp16 = p.q.dtype == torch.float16
    lse2, delta, share, turned, most, sizes = _rows(b, _longest({window, compressed}) if fp16 else None)
    if b.dsink is not None:
        torch.sum(share, 0, out=b.dsink)
    rows, blocks, window_blocks = _listed(p)
    width = rows.shape[1]
    q, dout = (addressable(x) for x in (p.q, b.dout))
    aligned = b.dq is not None and is_aligned(b.dq)
    dq = b.dq if aligned else torch.empty(p.q.shape, dtype=p.q.dtype, device=p.q.device)
    total = caches.pool_size(p.window) + (0 if p.compressed is None else caches.pool_size(p.compressed))
    sums = torch.zeros(total, 512, dtype=torch.float32, device=p.q.device)
    tiles = -(-p.q_heads // 64)
    panels = 0 if p.cos_sin is None else turned.shape[-1] // 64

    def listed(target: Tensor, begin: int, count: int, atomic: bool) -> None:
        launch.now(
            kernel, (count, tiles), rows, blocks, lse2, delta, window, compressed, target,
            *(descriptor(x, [1, 64, 64]) for x in (q, dout, turned, dq)), p.softmax_scale * LOG2E.value,
            p.softmax_scale, p.q_heads, width, caches.pool_size(p.window), window.stride(0) // 8, window_blocks,
            compressed.stride(0) // 8, begin, count, most, sizes, undo,
            ATOMIC=atomic, TURNED=panels, SCALED=fp16, **registers, num_warps=4,
        )  # fmt: skip

    undo = lse2  # or unread
    if not b.deterministic:
        listed(sums, 0, p.batch, True)
    else:
        padded = -(-width // 64) * 64
        some = max(1, min(p.batch, STORED_BYTES // (tiles * padded * 1024)))
        parts = torch.empty(tiles * some * padded, 512, dtype=p.q.dtype, device=p.q.device)
        if fp16:
            undo = torch.empty(tiles * some * padded // 64, dtype=torch.float32, device=p.q.device)
        for begin in range(0, p.batch, some):
            count = min(some, p.batch - begin)
            listed(parts, begin, count, False)
            _fold(rows[begin : begin + count], parts, undo, sums, tiles, padded)
    if b.dq is not None and not aligned:
        b.dq.copy_(dq)
    split = caches.pool_size(p.window)
    for x, part in ((b.dwindow, sums[:split]), (b.dcompressed, sums[split:])):
        if x is not None:
            x.copy_(part.view(x.shape))


def _fold(rows: Tensor, parts: Tensor, undo: Tensor, sums: Tensor, tiles: int, padded: int) -> None:
    count, width = rows.shape
    place = torch.arange(count, device=rows.device)[:, None] * padded + torch.arange(width, device=rows.device)
    named, order = rows.flatten().sort(stable=True)  # -1 first: no row's
    starts = torch.searchsorted(named, torch.arange(len(sums) + 1, dtype=torch.int32, device=rows.device)).int()
    places = place.flatten()[order].int()
    scaled = parts.dtype == torch.float16
    launch.now(fold_rows, (len(sums),), parts, places, starts, sums, tiles, count * padded, undo, SOME=16,
               SCALED=scaled, num_warps=4)  # fmt: skip


def _longest(pools: set[Tensor]) -> Tensor:
    """The largest norm of a row, fp32 []. Rows that nobody lists may hold anything."""
    norms = (torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32) for x in pools)
    return torch.stack([torch.where(x.isfinite(), x, 0).amax() for x in norms if x.numel()]).amax()


def _rows(b: V4Backward, longest: Tensor | None) -> tuple[Tensor, ...]:
    """fp32 [N, H] each: the exponent to subtract (base 2), delta with the LSE's gradient in it, the terms of dsink.
    The last columns of dO turned as q was, where the output was turned back; else anything. And fp32 [N, H], where the
    norm of the longest row is given: what bounds dS, and if deterministic what a head adds to dKV; else anything."""
    p = b.forward
    q, out, dout = (addressable(x) for x in (p.q, p.out, b.dout))
    lse2, delta, share = (torch.empty(p.batch, p.q_heads, device=p.q.device) for _ in range(3))
    most = lse2 if longest is None else torch.empty_like(lse2)
    stored = longest is not None and b.deterministic
    sizes = torch.empty_like(lse2) if stored else lse2
    turned, columns = dout, 0
    if p.cos_sin is not None:
        columns = max(64, 1 << (p.cos_sin.shape[1] - 1).bit_length())
        turned = torch.empty(p.batch, p.q_heads, columns, dtype=p.q.dtype, device=p.q.device)
    sink, dlse, cos_sin, positions = (  # or unread
        p.lse if x is None else x for x in (p.sink, b.dlse, p.cos_sin, p.positions)
    )
    positions = positions.contiguous()
    launch.now(
        query_rows, (p.batch, -(-p.q_heads // 16)), out, dout, p.lse, dlse, sink, cos_sin, positions, lse2, delta,
        share, turned, p.q_heads,
        int(p.sink is not None), int(b.dlse is not None), *row_strides(out)[1:], *row_strides(dout)[1:],
        *p.lse.stride(), *dlse.stride(), cos_sin.shape[0], cos_sin.shape[1], cos_sin.stride(0),
        lse2 if longest is None else longest, most, abs(p.softmax_scale), q, sizes, *row_strides(q)[1:],
        D=512, ROWS=16, TURNED=columns, SCALED=longest is not None, STORED=stored, num_warps=4,
    )  # fmt: skip
    return lse2, delta, share, turned, most, sizes


def _flat(pool: Tensor) -> Tensor:
    """[rows, 512] with one stride for all rows; a copy where there is none."""
    flat = pool.reshape(-1, pool.shape[-1])
    return flat if is_aligned(flat) else flat.clone(memory_format=torch.contiguous_format)


def _listed(p: V4Problem) -> tuple[Tensor, Tensor, int]:
    """int32 [N, K]: the rows of both pools by one number, compressed ones after the window's; -1 = nothing there. Int32
    [N]: how many blocks of 64 entries to go through. And how many name window rows: no block names both."""
    window_blocks = -(-p.window_indices.shape[1] // 64)
    compressed, lengths, size = p.compressed_indices, p.compressed_lengths, 0
    if p.compressed is not None:
        size = caches.pool_size(p.compressed)
    if p.block_table is not None and len(p.block_table) and p.compressed is not None and lengths is not None:
        page, owner = caches.pool_page(p.compressed), requests_of(p)
        j = torch.arange(p.compressed_capacity, device=p.q.device)
        lines = p.block_table[owner.clamp_max(p.block_table.shape[0] - 1)]
        compressed = (lines[:, j // page].long() * page + j % page).int()
        lengths = lengths * (owner < p.block_table.shape[0])
    elif compressed is None:
        compressed = p.window_indices[:, :0]
    entries = compressed.shape[1]
    rows = torch.empty(p.batch, window_blocks * 64 + entries, dtype=torch.int32, device=p.q.device)
    blocks = torch.empty(p.batch, dtype=torch.int32, device=p.q.device)
    launch.now(
        number_rows, (p.batch,), p.window_indices, blocks if p.window_lengths is None else p.window_lengths, compressed,
        blocks if lengths is None else lengths, rows, blocks, p.window_indices.stride(0), p.window_indices.shape[1],
        window_blocks * 64, int(p.window_lengths is not None), caches.pool_size(p.window), compressed.stride(0),
        entries, int(lengths is not None), size, CHUNK=256, num_warps=4,
    )  # fmt: skip
    return rows, blocks, window_blocks
