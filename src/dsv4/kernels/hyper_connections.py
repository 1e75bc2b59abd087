"""The residual streams of DeepSeek-V4 (hyper-connections) around a block, as two kernels. In Triton itself.

    collapse   the weights of a token from its H streams, and the streams as one: the input of a block
    spread     the output of the block back into H streams, mixed with what was there

For one token with streams h [H, D], r = 1 / rms(h), and the projection m = fn h (by the caller, fp32, [(2 + H) H])::

    pre  = sigmoid(r m_pre scale_0 + base_pre) + eps              [H]      x = sum_i pre_i h_i
    post = 2 sigmoid(r m_post scale_1 + base_post)                [H]
    comb = softmax(r m_comb scale_2 + base_comb) + eps            [H, H]
    comb: columns and rows divided by their sums in turn (Sinkhorn), columns first and last
    h_k <- post_k y + sum_j comb_jk h_j                           y: the output of the block
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.runtime import calls
from dsv4.runtime.program import Launch

COLUMNS = 1024  # of a stream, at a time


class Projection(NamedTuple):
    """What the weights of the streams are computed from: the projection m, scale and base."""

    mixed_ptr: Any
    base_ptr: Any
    scale_ptr: Any


class Collapsed(NamedTuple):
    """The weights that spread needs, and the streams as one."""

    post_ptr: Any
    comb_ptr: Any
    out_ptr: Any


class StreamSizes(NamedTuple):
    dims: Any  # in units
    iterations: Any  # of Sinkhorn
    norm_eps: Any
    eps: Any


@triton.jit
def collapse_streams(
    streams_ptr, projection, result, sizes, H: tl.constexpr, COLUMNS: tl.constexpr, UNIT: tl.constexpr
):
    """One program: one token. streams [tokens, H, dims], contiguous like everything else. dims come by UNIT, so that
    the compiler knows a divisor, and moves more than one value at a time."""
    token = tl.program_id(0).to(tl.int64)
    dims, eps, base_ptr, scale_ptr = sizes.dims * UNIT, sizes.eps, projection.base_ptr, projection.scale_ptr
    stream = tl.arange(0, H)
    column = tl.arange(0, COLUMNS)
    streams_ptr += token * H * dims
    squares = tl.zeros([H, COLUMNS], tl.float32)
    for start in range(0, dims, COLUMNS):
        here = (start + column < dims)[None, :]
        h = tl.load(streams_ptr + stream[:, None] * dims + start + column[None, :], mask=here, other=0.0).to(tl.float32)
        squares += h * h
    r = tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / (H * dims) + sizes.norm_eps)
    mixed_ptr = projection.mixed_ptr + token * (2 + H) * H
    pre = tl.load(mixed_ptr + stream) * r * tl.load(scale_ptr).to(tl.float32)
    pre = tl.sigmoid(pre + tl.load(base_ptr + stream).to(tl.float32)) + eps
    post = tl.load(mixed_ptr + H + stream) * r * tl.load(scale_ptr + 1).to(tl.float32)
    post = 2.0 * tl.sigmoid(post + tl.load(base_ptr + H + stream).to(tl.float32))
    tl.store(result.post_ptr + token * H + stream, post)
    cell = stream[:, None] * H + stream[None, :]
    comb = tl.load(mixed_ptr + 2 * H + cell) * r * tl.load(scale_ptr + 2).to(tl.float32)
    comb += tl.load(base_ptr + 2 * H + cell).to(tl.float32)
    comb = tl.exp(comb - tl.max(comb, 1)[:, None])
    comb = comb / tl.sum(comb, 1)[:, None] + eps
    comb = comb / (tl.sum(comb, 0)[None, :] + eps)
    for _ in range(sizes.iterations - 1):
        comb = comb / (tl.sum(comb, 1)[:, None] + eps)
        comb = comb / (tl.sum(comb, 0)[None, :] + eps)
    tl.store(result.comb_ptr + token * H * H + cell, comb)
    for start in range(0, dims, COLUMNS):
        here = start + column < dims
        h = tl.load(streams_ptr + stream[:, None] * dims + start + column[None, :], mask=here[None, :], other=0.0)
        x = tl.sum(pre[:, None] * h.to(tl.float32), 0)
        tl.store(result.out_ptr + token * dims + start + column, x.to(result.out_ptr.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["units"])
def spread_streams(
    streams_ptr,
    block_ptr,
    post_ptr,
    comb_ptr,
    out_ptr,
    units,
    H: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNIT: tl.constexpr,
):
    """One program: COLUMNS of one token. block [tokens, dims] -> out [tokens, H, dims]."""
    dims = units * UNIT
    token = tl.program_id(0).to(tl.int64)
    stream = tl.arange(0, H)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = column < dims
    y = tl.load(block_ptr + token * dims + column, mask=here, other=0.0).to(tl.float32)
    out = tl.load(post_ptr + token * H + stream)[:, None] * y[None, :]
    for j in tl.static_range(H):
        h = tl.load(streams_ptr + (token * H + j) * dims + column, mask=here, other=0.0).to(tl.float32)
        out += tl.load(comb_ptr + (token * H + j) * H + stream)[:, None] * h[None, :]
    to = (token * H + stream)[:, None] * dims + column[None, :]
    tl.store(out_ptr + to, out.to(out_ptr.dtype.element_ty), mask=here[None, :])


def unit_of(dims: int) -> int:
    """The unit in which a kernel gets a number of dims."""
    return 8 if dims % 8 == 0 else 1


def collapse(
    streams: Tensor,
    mixed: Tensor,
    base: Tensor,
    scale: Tensor,
    iterations: int,
    norm_eps: float,
    eps: float,
    launch: Callable[[Launch], None] = calls.launch,
) -> tuple[Tensor, Tensor, Tensor]:
    """streams [N, H, D], mixed fp32 [N, (2 + H) H] -> (post fp32 [N, H], comb fp32 [N, H, H], x [N, D])."""
    n, h, d = streams.shape
    post, comb = mixed.new_empty(n, h), mixed.new_empty(n, h, h)
    x = streams.new_empty(n, d)
    if n:
        unit = unit_of(d)
        sizes = StreamSizes(d // unit, iterations, float(norm_eps), float(eps))
        arguments = [streams, Projection(mixed, base, scale), Collapsed(post, comb, x), sizes]
        constants = dict(H=h, COLUMNS=min(COLUMNS, triton.next_power_of_2(d)), UNIT=unit, num_warps=4)
        launch(Launch(collapse_streams, (n,), arguments, constants))
    return post, comb, x


def spread(
    streams: Tensor, block: Tensor, post: Tensor, comb: Tensor, launch: Callable[[Launch], None] = calls.launch
) -> Tensor:
    """streams [N, H, D], block [N, D] -> streams [N, H, D]"""
    n, h, d = streams.shape
    out = torch.empty_like(streams)
    columns = min(COLUMNS, triton.next_power_of_2(d))
    if n:
        grid, unit = (n, triton.cdiv(d, columns)), unit_of(d)
        arguments = [streams, block, post, comb, out, d // unit]
        launch(Launch(spread_streams, grid, arguments, dict(H=h, COLUMNS=columns, UNIT=unit, num_warps=4)))
    return out
