"""Compressed rows of many requests whose states lie in an engine's pages, as one kernel: pooling, norm, RoPE, place.

The arithmetic is that of dsv4.compress.forward, in an order that depends on the row alone.
"""

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from dsv4.caches.kernels.pack import PoolRows, store_packed
from dsv4.caches.pages import PackedRows
from dsv4.compress.kernels.arguments import Finish, PagedTokens, StatePages
from dsv4.compress.kernels.compress_rows import finished, pooled
from dsv4.runtime import calls
from dsv4.runtime.program import Launch


@triton.jit(do_not_specialize=["m", "rope_line"])
def paged_rows(
    states,
    tokens,
    finish,
    to,
    m,
    rope_line,
    D: tl.constexpr,
    R: tl.constexpr,
    OVERLAP: tl.constexpr,
    FORMAT: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Process a token; it makes a row if it ends a window and has a place for it."""
    n = tl.program_id(0)
    position = tl.load(tokens.position_ptr + n)
    slot = tl.load(tokens.slot_ptr + n).to(tl.int64)
    if ((position + 1) % m == 0) & (tl.load(tokens.token_ptr + n) >= 0) & (slot >= 0) & (slot < to.rows):
        table_ptr = states.table_ptr + tl.load(tokens.request_ptr + n).to(tl.int64) * states.table_line
        width = 2 * D if OVERLAP else D
        count = 2 * m if OVERLAP else m
        column = tl.arange(0, D)
        top = tl.full([D], -float("inf"), tl.float32)
        total = tl.zeros([D], tl.float32)
        row = tl.zeros([D], tl.float32)
        for first in range(0, count, SLOTS):
            number = first + tl.arange(0, SLOTS)[:, None]
            token = position + 1 - count + number
            there = (number < count) & (token >= 0)
            page = tl.load(table_ptr + token // states.page, mask=there, other=0).to(tl.int64)
            at = states.ptr + page * states.page_stride + (token % states.page) * states.line + column[None, :]
            if OVERLAP:  # the first half of the previous window, then the second half of this one
                at += tl.where(number >= m, D, 0)
            there = there & (column[None, :] >= 0)
            value = tl.load(at, mask=there, other=0.0)
            logit = tl.load(at + width, mask=there, other=-float("inf"))
            top, total, row = pooled(top, total, row, logit, value)
        row = finished(row / total, finish, position // m * m, rope_line, column, D, R)
        row = tl.reshape(row, [1, D])
        row = row.to(tl.bfloat16).to(tl.float32)  # rounded as a returned row would be, before it is packed
        one = tl.zeros([1], tl.int64) + slot
        store_packed(to, row, one, column, FORMAT)


def run(
    states: Tensor,
    tokens: Tensor,
    requests: Tensor,
    positions: Tensor,
    block_table: Tensor,
    slots: Tensor,
    norm_weight: Tensor,
    cos_sin: Tensor,
    out: PackedRows,
    ratio: int,
    eps: float,
    launch: Callable[[Launch], None] = calls.launch,
) -> None:
    """Run dsv4.compress.pages.compress_pages, whose arguments are checked."""
    d = norm_weight.shape[0]
    overlap = states.shape[2] == 4 * d
    arguments = [
        StatePages(states, block_table, states.shape[1], *states.stride()[:2], block_table.stride(0)),
        PagedTokens(tokens, requests, positions, slots),
        Finish(norm_weight, cos_sin, float(eps)),
        PoolRows.of(out),
        ratio,
        cos_sin.stride(0),
    ]
    constants = dict(
        D=d,
        R=cos_sin.shape[1],
        OVERLAP=overlap,
        FORMAT=out.format,
        SLOTS=8 if overlap else 16,
        num_warps=max(1, d * (8 if overlap else 16) // 512),  # 16 values per thread
    )
    launch(Launch(paged_rows, (len(positions),), arguments, constants))
