"""V4 attention on sm_90a: from a validated problem to launches. The kernel is in listed.py."""

import torch
from torch import Tensor

from dsv4 import caches
from dsv4.caches import Fp8Cache
from dsv4.kernels import aot
from dsv4.kernels.shared.launch import (
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
from dsv4.kernels.sm90.listed import v4_listed
from dsv4.plan import choose_splits, deterministic_cut
from dsv4.v4_problem import V4Problem

STEP = 128  # rows per step: two blocks of 64
REGISTERS = dict(RIGHT_REGS=216, GATHER_REGS=72)


def supports(p: V4Problem) -> str | None:
    """None, or why these kernels cannot run the problem."""
    if p.head_dim != 512:
        return f"head dim {p.head_dim}; the GPU kernels take 512"
    if p.q.dtype != torch.bfloat16:
        return f"dtype {p.q.dtype}; the GPU kernels take torch.bfloat16"
    return None


def forward(p: V4Problem) -> None:
    assert p.out is not None
    tiles = p.batch * -(-p.q_heads // 64)
    splits, steps_per_split = _splits(p, tiles)
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

    arguments = [
        q, out, lse, sink, part, part_lse, window[0], window_names, given(p.window_lengths), compressed[0], names,
        given(p.compressed_lengths), given(p.request_starts), cos_sin, given(p.positions),
        scale, want_lse, p.batch, p.q_heads, *window[1:],
        p.window_indices.shape[1], window_names.stride(0), *compressed[1:], p.compressed_capacity,
        names.stride(0) if how else 0, int(p.window_lengths is not None), int(p.compressed_lengths is not None),
        int(p.request_starts is not None), requests, *rope, splits, steps_per_split,
        stride_qn, stride_qh, stride_on, stride_oh, *stride_l,
    ]  # fmt: skip
    aot.launch(
        v4_listed, (tiles, splits), arguments, HOW=how, SIGN=sign, WINDOW_FP8=isinstance(p.window, Fp8Cache),
        COMPRESSED_FP8=isinstance(p.compressed, Fp8Cache), WINDOW_UNIT=_unit(p.window),
        COMPRESSED_UNIT=_unit(p.compressed), SPLIT=split, num_warps=4, **REGISTERS,
    )  # fmt: skip
    if split:
        merge(p, part, part_lse, out, lse, sink, nothing, splits, p.batch, 1, (stride_on, 0, stride_oh),
              (stride_l[0], 0, stride_l[1]))  # fmt: skip
    if out is not p.out:
        p.out.copy_(out)


def _splits(p: V4Problem, tiles: int) -> tuple[int, int]:
    """(number of splits, least steps per split or 0 = as many as it takes to use all splits)."""
    if p.deterministic:  # nothing but a query's own rows may count
        splits, each = deterministic_cut(p.q_heads, p.max_seqlen_k)
        return max(splits, 1), each // STEP
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


def _unit(pool: Tensor | Fp8Cache | None) -> int:
    """Bytes that the page stride of an Fp8Cache is a multiple of: 16 where it can be, for 16-byte loads."""
    if not isinstance(pool, Fp8Cache):
        return 16
    return next(unit for unit in (16, 8, 2, 1) if pool.page_stride % unit == 0 and pool.storage.data_ptr() % unit == 0)


def _lines(x: Tensor | None) -> Tensor:
    """A 2-D tensor whose lines are contiguous."""
    assert x is not None
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()
