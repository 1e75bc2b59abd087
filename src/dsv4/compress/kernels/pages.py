"""Compressed rows of many requests whose states lie in an engine's pages, as one kernel: pooling, norm, RoPE, place.

The arithmetic is that of dsv4.compress.forward, in an order that depends on the row alone.
"""

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from dsv4.caches.kernels.pack import store_packed
from dsv4.caches.pages import PackedRows
from dsv4.compress.kernels.compress_rows import finished, pooled
from dsv4.runtime import calls
from dsv4.runtime.program import Launch


@triton.jit(do_not_specialize=[
    "m", "state_page", "state_stride", "state_line", "table_line", "rope_line", "rows", "page_rows", "page_stride",
])  # fmt: skip
def paged_rows(
    state_ptr,
    token_ptr,
    request_ptr,
    position_ptr,
    table_ptr,
    slot_ptr,
    norm_ptr,
    cos_sin_ptr,
    out_ptr,
    eps,
    m,
    state_page,
    state_stride,
    state_line,
    table_line,
    rope_line,
    rows,
    page_rows,
    page_stride,
    D: tl.constexpr,
    R: tl.constexpr,
    OVERLAP: tl.constexpr,
    FORMAT: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """One program: a token; it makes a row if it ends a window and has a place for it."""
    n = tl.program_id(0)
    position = tl.load(position_ptr + n)
    slot = tl.load(slot_ptr + n).to(tl.int64)
    if ((position + 1) % m == 0) & (tl.load(token_ptr + n) >= 0) & (slot >= 0) & (slot < rows):
        table_ptr += tl.load(request_ptr + n).to(tl.int64) * table_line
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
            page = tl.load(table_ptr + token // state_page, mask=there, other=0).to(tl.int64)
            at = state_ptr + page * state_stride + (token % state_page) * state_line + column[None, :]
            if OVERLAP:  # the first half of the window before, then the second half of this one
                at += tl.where(number >= m, D, 0)
            there = there & (column[None, :] >= 0)
            value = tl.load(at, mask=there, other=0.0)
            logit = tl.load(at + width, mask=there, other=-float("inf"))
            top, total, row = pooled(top, total, row, logit, value)
        row = finished(row / total, norm_ptr, cos_sin_ptr, position // m * m, rope_line, eps, column, D, R)
        row = tl.reshape(row, [1, D])
        row = row.to(tl.bfloat16).to(tl.float32)  # as it would be handed out, before it is packed
        one = tl.zeros([1], tl.int64) + slot
        store_packed(out_ptr, row, one, rows, page_rows, page_stride, column, FORMAT)


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
    """dsv4.compress.pages.compress_pages, checked."""
    d = norm_weight.shape[0]
    overlap = states.shape[2] == 4 * d
    arguments = [
        states, tokens, requests, positions, block_table, slots, norm_weight, cos_sin, out.storage, float(eps), ratio,
        states.shape[1], states.stride(0), states.stride(1), block_table.stride(0), cos_sin.stride(0), out.rows,
        out.rows_per_page, out.page_stride,
    ]  # fmt: skip
    constants = dict(
        D=d, R=cos_sin.shape[1], OVERLAP=overlap, FORMAT=out.format, SLOTS=8 if overlap else 16,
        num_warps=max(1, d * (8 if overlap else 16) // 512),  # 16 values to a thread
    )  # fmt: skip
    launch(Launch(paged_rows, (len(positions),), arguments, constants))
