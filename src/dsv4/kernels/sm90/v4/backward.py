"""Gradients of v4_attention on sm_90a: from a request to launches.

1. backward_rows      delta and the exponent of every (query, head)
2. backward_listed    dQ, and every block's dKV: added to fp32 sums with atomics, or, deterministic, stored and
3. fold_rows          summed by row in the order of the lists, some queries at a time
"""

import torch
from torch import Tensor

from dsv4 import caches
from dsv4.caches import Fp8Cache
from dsv4.kernels.compat import TensorDescriptor, gl
from dsv4.kernels.shared.fmha.backward_rows import backward_rows
from dsv4.kernels.shared.fmha.prepare import is_aligned, row_strides
from dsv4.kernels.shared.softmax import LOG2E
from dsv4.kernels.sm90.v4.backward_listed import backward_listed, fold_rows
from dsv4.v4.backward import V4Backward
from dsv4.v4.problem import V4Problem, requests_of

STORED_BYTES = 1 << 30  # contributions held at once, deterministic


def supports(b: V4Backward) -> str | None:
    """None, or why these kernels cannot run the problem."""
    p = b.forward
    if p.q.dtype != torch.bfloat16:
        return f"q has dtype {p.q.dtype}; they take bfloat16"
    if p.head_dim != 512:
        return f"head dim {p.head_dim}; they take 512"
    if isinstance(p.window, Fp8Cache) or isinstance(p.compressed, Fp8Cache):
        return "rows of an Fp8Cache"
    return None


def backward(b: V4Backward) -> None:
    """Fill b.dq, b.dwindow, b.dcompressed and b.dsink, those that are not None."""
    p = b.forward
    lse2, delta, plain = _rows(b)
    if b.dsink is not None:
        share = torch.where(p.lse == float("-inf"), 0, torch.sigmoid(p.sink - p.lse))
        b.dsink.copy_(-(share * plain).sum(0))
    window = _flat(p.window)
    compressed = window if p.compressed is None else _flat(p.compressed)
    rows, window_blocks = _listed(p)
    width = rows.shape[1]
    entry = torch.arange(1, width + 1, dtype=torch.int32, device=rows.device)
    blocks = ((rows >= 0) * entry).amax(1).add_(63).div_(64, rounding_mode="floor").int()
    q, dout = (x if is_aligned(x) else x.contiguous() for x in (p.q, _turned(b)))
    aligned = b.dq is not None and is_aligned(b.dq)
    dq = b.dq if aligned else torch.empty(p.q.shape, dtype=p.q.dtype, device=p.q.device)
    total = caches.pool_size(p.window) + (0 if p.compressed is None else caches.pool_size(p.compressed))
    sums = torch.zeros(total, 512, dtype=torch.float32, device=p.q.device)
    tiles = -(-p.q_heads // 64)

    def launch(target: Tensor, begin: int, count: int, add: bool) -> None:
        backward_listed[(count, tiles)](
            _descriptor(q), _descriptor(dout), _descriptor(dq), rows, blocks, lse2, delta, window, compressed, target,
            p.softmax_scale * LOG2E.value, p.softmax_scale, p.q_heads, width, caches.pool_size(p.window),
            window.stride(0) // 8, window_blocks, compressed.stride(0) // 8, begin, count,
            ADD=add, RIGHT_REGS=232, GATHER_REGS=56, num_warps=4,
        )  # fmt: skip

    if not b.deterministic:
        launch(sums, 0, p.batch, True)
    else:
        padded = -(-width // 64) * 64
        some = max(1, min(p.batch, STORED_BYTES // (tiles * padded * 1024)))
        parts = torch.empty(tiles * some * padded, 512, dtype=torch.bfloat16, device=p.q.device)
        for begin in range(0, p.batch, some):
            count = min(some, p.batch - begin)
            launch(parts, begin, count, False)
            _fold(rows[begin : begin + count], parts, sums, tiles, padded)
    if b.dq is not None and not aligned:
        b.dq.copy_(dq)
    split = caches.pool_size(p.window)
    for x, part in ((b.dwindow, sums[:split]), (b.dcompressed, sums[split:])):
        if x is not None:
            x.copy_(part.view(x.shape))


def _fold(rows: Tensor, parts: Tensor, sums: Tensor, tiles: int, padded: int) -> None:
    count, width = rows.shape
    place = torch.arange(count, device=rows.device)[:, None] * padded + torch.arange(width, device=rows.device)
    named, order = rows.flatten().sort(stable=True)  # -1 first: no row's
    starts = torch.searchsorted(named, torch.arange(len(sums) + 1, dtype=torch.int32, device=rows.device)).int()
    places = place.flatten()[order].int()
    fold_rows[(len(sums),)](parts, places, starts, sums, tiles, count * width, count * padded, num_warps=4)


def _rows(b: V4Backward) -> tuple[Tensor, Tensor, Tensor]:
    """fp32 [N, H] each: the exponent to subtract (base 2), delta with the LSE's gradient in it, dO . O."""
    p = b.forward
    out, dout = (x if is_aligned(x) and x.stride(-1) == 1 else x.contiguous() for x in (p.out, b.dout))
    rows = p.batch * p.q_heads
    lse2, delta, plain = torch.empty(3, p.batch, p.q_heads, device=p.q.device).unbind(0)
    sink = p.lse if p.sink is None else p.sink  # or unread
    dlse = p.lse if b.dlse is None else b.dlse
    backward_rows[(-(-rows // 16),)](
        out, dout, p.lse, dlse, sink, lse2, delta, plain, rows, p.batch, p.q_heads, p.q_heads,
        int(p.sink is not None), int(b.dlse is not None), *row_strides(out), *row_strides(dout),
        0, *p.lse.stride(), 0, *dlse.stride(), D=512, ROWS=16, num_warps=4,
    )  # fmt: skip
    return lse2, delta, plain


def _flat(pool: Tensor) -> Tensor:
    """[rows, 512] with one stride for all rows; a copy where there is none."""
    flat = pool.reshape(-1, pool.shape[-1])
    return flat if is_aligned(flat) else flat.contiguous()


def _turned(b: V4Backward) -> Tensor:
    """dO of what the products made: rotated as q was, where the output was rotated back."""
    p = b.forward
    if p.cos_sin is None:
        return b.dout
    dout, r = b.dout.contiguous().clone(), p.cos_sin.shape[1]
    places = p.positions.long().clamp(0, p.cos_sin.shape[0] - 1)
    cos, sin = p.cos_sin[places][:, None].chunk(2, -1)
    even, odd = dout[..., -r::2].float(), dout[..., dout.shape[-1] - r + 1 :: 2].float()
    dout[..., -r:] = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2).to(dout.dtype)
    return dout


def _descriptor(x: Tensor) -> TensorDescriptor:
    strides = [s if n > 1 else 512 for s, n in zip(x.stride()[:-1], x.shape)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 64, 64], gl.NVMMASharedLayout(128, 16, rank=3))


def _listed(p: V4Problem) -> tuple[Tensor, int]:
    """int32 [N, K]: the rows of both pools by one number, compressed ones after the window's; -1 = nothing there. And
    how many blocks of 64 entries name window rows: no block names both."""

    def within(rows: Tensor, lengths: Tensor | None, size: int, shift: int) -> Tensor:
        bad = (rows < 0) | (rows >= size)
        if lengths is not None:
            bad |= torch.arange(rows.shape[1], device=rows.device) >= lengths[:, None]
        return (rows + shift).masked_fill_(bad, -1)

    size = caches.pool_size(p.window)
    blocks = -(-p.window_indices.shape[1] // 64)
    fill = (0, blocks * 64 - p.window_indices.shape[1])
    lists = [torch.nn.functional.pad(within(p.window_indices, p.window_lengths, size, 0), fill, value=-1)]
    if p.compressed_indices is not None and p.compressed is not None:
        more = caches.pool_size(p.compressed)
        lists.append(within(p.compressed_indices, p.compressed_lengths, more, size))
    elif p.block_table is not None and p.compressed is not None and p.compressed_lengths is not None:
        page, owner = caches.pool_page(p.compressed), requests_of(p)
        j = torch.arange(p.compressed_capacity, device=p.q.device)
        lines = p.block_table[owner.clamp_max(max(p.block_table.shape[0] - 1, 0))]
        rows = (lines[:, j // page].long() * page + j % page).int()
        lengths = p.compressed_lengths * (owner < p.block_table.shape[0])
        lists.append(within(rows, lengths, caches.pool_size(p.compressed), size))
    return torch.cat(lists, 1).int().contiguous(), blocks
