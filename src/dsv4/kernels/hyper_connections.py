"""The residual streams of DeepSeek-V4 (hyper-connections) around a block, as three kernels. In Triton itself.

    project    the streams of a token times a matrix, and the sum of their squares, by shares of the columns
    collapse   the weights of a token from these, and the streams as one, normed: the input of a block
    spread     the output of the block back into H streams, mixed with what was there

For one token with streams h [H, D], r = 1 / rms(h), and the projection m = fn h::

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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4.runtime import calls
from dsv4.runtime.program import Launch

COLUMNS = 1024  # columns of a stream that are processed at a time


class Form(NamedTuple):
    """Of project_streams: tokens of a program, columns that it multiplies at a time, most shares of the columns."""

    tokens: int
    depth: int
    shares: int


# The fastest of 24 forms on an H200 with 4 streams of 4096, for up to so many tokens.
FORMS = (64, Form(16, 64, 128)), (256, Form(64, 64, 64)), (1 << 62, Form(64, 32, 16))


class Projection(NamedTuple):
    """What the weights of the streams are computed from: projections and squares by shares, scale and base."""

    parts_ptr: Any
    base_ptr: Any
    scale_ptr: Any
    shares: Any


class Collapsed(NamedTuple):
    """The weights that spread needs, and the streams as one."""

    post_ptr: Any
    comb_ptr: Any
    out_ptr: Any


class StreamSizes(NamedTuple):
    tokens: Any
    dims: Any  # dims in units
    iterations: Any  # iterations of Sinkhorn
    norm_eps: Any
    eps: Any
    weight_eps: Any  # epsilon of the norm that follows


@triton.jit(do_not_specialize=["tokens", "units", "share"])
def project_streams(
    streams_ptr,
    fn_ptr,
    parts_ptr,
    tokens,
    units,
    share,
    OUT: tl.constexpr,
    WIDE: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Project one share of the columns of TOKENS tokens per program. streams [tokens, width], fn [OUT, width],
    `share` times DEPTH columns each -> parts fp32 [shares, tokens, WIDE]: OUT products, then the sum of squares.
    Three products in TF32 are as good as one in fp32, since a bf16 value has no more bits than TF32."""
    gdc_launch_dependents()
    width = units * UNIT
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    here = (token < tokens)[:, None]
    out = tl.arange(0, WIDE)
    total = tl.zeros([TOKENS, WIDE], tl.float32)
    squares = tl.zeros([TOKENS, DEPTH], tl.float32)
    begin = tl.program_id(1) * share * DEPTH
    for start in range(begin, tl.minimum(begin + share * DEPTH, width), DEPTH):
        column = start + tl.arange(0, DEPTH)
        inside = column < width
        h = tl.load(
            streams_ptr + token.to(tl.int64)[:, None] * width + column[None, :], mask=here & inside[None, :], other=0.0
        ).to(tl.float32)
        fn = tl.load(
            fn_ptr + out[None, :] * width + column[:, None], mask=(out < OUT)[None, :] & inside[:, None], other=0.0
        ).to(tl.float32)
        total = tl.dot(h, fn, total, input_precision="tf32x3")
        squares += h * h
    total = tl.where((out == OUT)[None, :], tl.sum(squares, 1)[:, None], total)
    to = parts_ptr + (tl.program_id(1).to(tl.int64) * tokens + token[:, None]) * WIDE + out[None, :]
    tl.store(to, total, mask=here & (out <= OUT)[None, :])


@triton.jit
def shares_of(projection, sizes, token, dims, H: tl.constexpr, WIDE: tl.constexpr, SHARES: tl.constexpr):
    """Wait for project_streams -> (the lines of a token's shares, which of them are there, 1 / rms of its streams)."""
    gdc_wait()
    tl.debug_barrier()  # the compiler moves no load across it, as it might across the line above
    share = tl.arange(0, SHARES)
    is_share = share < projection.shares
    parts_ptr = projection.parts_ptr + (share.to(tl.int64) * sizes.tokens + token) * WIDE
    squares = tl.sum(tl.load(parts_ptr + (2 + H) * H, mask=is_share, other=0.0), 0)
    return parts_ptr, is_share, tl.rsqrt(squares / (H * dims) + sizes.norm_eps)


@triton.jit
def collapse_streams(
    streams_ptr,
    projection,
    result,
    weight_ptr,
    sizes,
    H: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    SHARES: tl.constexpr,
    UNIT: tl.constexpr,
    NORM: tl.constexpr,
):
    """Collapse the streams of a token by two programs: one makes the block's input, one what spread needs. streams
    [tokens, H, dims], contiguous like everything else. D: dims as a power of two. dims come by UNIT, so that the
    compiler knows a divisor, and moves more than one value at a time."""
    token = tl.program_id(0).to(tl.int64)
    dims, eps, base_ptr, scale_ptr = sizes.dims * UNIT, sizes.eps, projection.base_ptr, projection.scale_ptr
    stream = tl.arange(0, H)
    if tl.program_id(1) == 0:
        column = tl.arange(0, D)
        here = column < dims
        h = tl.load(
            streams_ptr + token * H * dims + stream[:, None] * dims + column[None, :], mask=here[None, :], other=0.0
        )
        parts_ptr, is_share, r = shares_of(projection, sizes, token, dims, H, WIDE, SHARES)  # overlaps the load
        pre = tl.sum(tl.load(parts_ptr[:, None] + stream[None, :], mask=is_share[:, None], other=0.0), 0)
        pre = pre * r * tl.load(scale_ptr).to(tl.float32) + tl.load(base_ptr + stream).to(tl.float32)
        x = tl.sum((tl.sigmoid(pre) + eps)[:, None] * h.to(tl.float32), 0).to(result.out_ptr.dtype.element_ty)
        if NORM:
            x = x.to(tl.float32)
            weight = tl.load(weight_ptr + column, mask=here, other=0.0).to(tl.float32)
            x = x * tl.rsqrt(tl.sum(x * x, 0) / dims + sizes.weight_eps) * weight
        tl.store(result.out_ptr + token * dims + column, x.to(result.out_ptr.dtype.element_ty), mask=here)
    else:
        parts_ptr, is_share, r = shares_of(projection, sizes, token, dims, H, WIDE, SHARES)
        post = tl.sum(tl.load(parts_ptr[:, None] + H + stream[None, :], mask=is_share[:, None], other=0.0), 0)
        post = post * r * tl.load(scale_ptr + 1).to(tl.float32)
        post = 2.0 * tl.sigmoid(post + tl.load(base_ptr + H + stream).to(tl.float32))
        tl.store(result.post_ptr + token * H + stream, post)
        cell = stream[:, None] * H + stream[None, :]
        comb = tl.load(parts_ptr[:, None] + 2 * H + tl.arange(0, H * H)[None, :], mask=is_share[:, None], other=0.0)
        comb = tl.reshape(tl.sum(comb, 0), [H, H]) * r * tl.load(scale_ptr + 2).to(tl.float32)
        comb += tl.load(base_ptr + 2 * H + cell).to(tl.float32)
        comb = tl.exp(comb - tl.max(comb, 1)[:, None])
        comb = comb * (1.0 / tl.sum(comb, 1))[:, None] + eps
        comb = comb * (1.0 / (tl.sum(comb, 0) + eps))[None, :]
        for _ in range(sizes.iterations - 1):
            comb = comb * (1.0 / (tl.sum(comb, 1) + eps))[:, None]
            comb = comb * (1.0 / (tl.sum(comb, 0) + eps))[None, :]
        tl.store(result.comb_ptr + token * H * H + cell, comb)


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
    """Spread COLUMNS columns of one token per program. block [tokens, dims] -> out [tokens, H, dims]."""
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
    """Return the unit in which a kernel gets a number of dims."""
    return 8 if dims % 8 == 0 else 1


def collapse(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    iterations: int,
    norm_eps: float,
    eps: float,
    weight: Tensor | None = None,
    weight_eps: float = 0.0,
    launch: Callable[[Launch], None] = calls.launch,
) -> tuple[Tensor, Tensor, Tensor]:
    """Collapse streams [N, H, D] by fn [(2 + H) H, H D] -> (post fp32 [N, H], comb fp32 [N, H, H], x [N, D]); x is
    normed if the norm's weight is given."""
    n, h, d = streams.shape
    outputs, unit = (2 + h) * h, unit_of(d)
    form = next(form for most, form in FORMS if n <= most)
    share = triton.cdiv(h * d, form.shares * form.depth)  # each share has a multiple of `depth` columns
    shares = triton.cdiv(h * d, share * form.depth)
    wide = max(16, triton.next_power_of_2(outputs + 1))
    parts = torch.empty(shares, n, wide, dtype=torch.float32, device=streams.device)
    post, comb, x = parts.new_empty(n, h), parts.new_empty(n, h, h), streams.new_empty(n, d)
    if n:
        grid = triton.cdiv(n, form.tokens), shares
        arguments: list[Any] = [streams, fn, parts, n, h * d // unit, share]
        sizes_known: dict[str, Any] = dict(WIDE=wide, UNIT=unit)
        constants = sizes_known | dict(OUT=outputs, TOKENS=form.tokens, DEPTH=form.depth, num_warps=4)
        launch(Launch(project_streams, grid, arguments, constants))
        sizes = StreamSizes(n, d // unit, iterations, float(norm_eps), float(eps), float(weight_eps))
        given, columns = x if weight is None else weight, triton.next_power_of_2(d)
        arguments = [streams, Projection(parts, base, scale, shares), Collapsed(post, comb, x), given, sizes]
        constants = sizes_known | dict(H=h, D=columns, SHARES=triton.next_power_of_2(shares), NORM=weight is not None)
        launch(
            Launch(
                collapse_streams, (n, 2), arguments, constants | dict(num_warps=_warps(h * columns), launch_pdl=True)
            )
        )
    return post, comb, x


def _warps(values: int) -> int:
    """Return the warps of a program that holds so many values, 64 in a thread."""
    return min(max(values // 2048, 4), 32)


def spread(
    streams: Tensor, block: Tensor, post: Tensor, comb: Tensor, launch: Callable[[Launch], None] = calls.launch
) -> Tensor:
    """Add block [N, D] to streams [N, H, D] -> streams [N, H, D]."""
    n, h, d = streams.shape
    out = torch.empty_like(streams)
    columns = min(COLUMNS, triton.next_power_of_2(d))
    if n:
        grid, unit = (n, triton.cdiv(d, columns)), unit_of(d)
        arguments = [streams, block, post, comb, out, d // unit]
        launch(Launch(spread_streams, grid, arguments, dict(H=h, COLUMNS=columns, UNIT=unit, num_warps=4)))
    return out
