"""Compressed rows of many requests at different places, as one kernel: pooling, norm, RoPE, place, and the states.

The rows and their arithmetic are those of dsv4.compress.forward. The state of a request is a ring: its last tokens in
fp32, gates with their bias; token t lies at place t % ring of the request's line. A row is made of tokens of the state
and of this call, in an order that depends on nothing else: how tokens are divided into calls changes no bit.
"""

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from dsv4.caches.formats import format_of
from dsv4.caches.kernels.pack import PoolRows
from dsv4.caches.pages import PackedRows
from dsv4.compress.kernels.arguments import Finish, NewTokens, RingRows, RingTokens, TokenState
from dsv4.compress.kernels.compress_rows import finished, pooled
from dsv4.runtime import calls
from dsv4.runtime.program import Launch


@triton.jit
def ring_rows(
    tokens,
    state,
    made,
    places,
    finish,
    to,
    D: tl.constexpr,
    R: tl.constexpr,
    OVERLAP: tl.constexpr,
    FORMAT: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Make a row, or store a token in its state (programs `made.count` and up).

    Row i is row number[i] of a request whose tokens from begin[i] on are tokens start[i] .. of this call; it goes to
    row target[i] of the pool, and is not made if there is no such row. Token n, at position[n], goes to place[n] of the
    states.
    """
    i = tl.program_id(0)
    m, ring = places.m, places.ring
    width = 2 * D if OVERLAP else D
    column = tl.arange(0, D)
    if i < made.count:
        target = tl.load(made.target_ptr + i)
        if (target >= 0) & (target < to.rows):
            number, line = tl.load(made.number_ptr + i), tl.load(made.line_ptr + i)
            begin, start = tl.load(made.begin_ptr + i), tl.load(made.start_ptr + i)
            top = tl.full([D], -float("inf"), tl.float32)
            total = tl.zeros([D], tl.float32)
            row = tl.zeros([D], tl.float32)
            for first in range(0, ring, SLOTS):
                slot = first + tl.arange(0, SLOTS)[:, None]
                at = column[None, :] + slot * 0
                token = number * m + slot
                if OVERLAP:  # the first half of the previous window, then the second half of this one
                    token -= m
                    at += tl.where(slot >= m, D, 0)
                there = (slot < ring) & (token >= 0)
                old = there & (token < begin)
                new = there & (token >= begin)
                place = (line * ring + token % ring) * width + at
                value = tl.load(state.kv_ptr + place, mask=old, other=0.0)
                logit = tl.load(state.gate_ptr + place, mask=old, other=0.0)
                n = start + token - begin
                fresh = tl.load(tokens.kv_ptr + n * tokens.kv_row + at, mask=new, other=0.0).to(tl.float32)
                gate = tl.load(tokens.gate_ptr + n * tokens.gate_row + at, mask=new, other=0.0).to(tl.float32)
                gate += tl.load(tokens.bias_ptr + (slot % m) * width + at, mask=new, other=0.0).to(tl.float32)
                # One of the two is 0. With a select instead, the compiler would wait for every load in turn.
                value += fresh
                logit = tl.where(there, logit + gate, -float("inf"))
                top, total, row = pooled(top, total, row, logit, value)
            row = finished(row / total, finish, number * m, R, column, D, R)
            page = (target // to.page_rows) * to.page_stride
            place = target % to.page_rows
            if FORMAT.coded > 0:
                zero = tl.zeros([1], tl.int64)
                row = tl.reshape(row, [1, D])
                FORMAT.store(to.ptr, row, zero + page, zero + place, to.page_rows, column, zero == 0, FORMAT)
            else:
                tl.store(to.ptr + page + place * to.row_stride + column, row.to(to.ptr.dtype.element_ty))
    else:
        n = (i - made.count).to(tl.int64)
        slot = tl.load(places.position_ptr + n) % m
        place = tl.load(places.place_ptr + n) * width
        for half in tl.static_range(2 if OVERLAP else 1):
            at = half * D + column
            value = tl.load(tokens.kv_ptr + n * tokens.kv_row + at).to(tl.float32)
            logit = tl.load(tokens.gate_ptr + n * tokens.gate_row + at).to(tl.float32)
            logit += tl.load(tokens.bias_ptr + slot * width + at).to(tl.float32)
            tl.store(state.kv_ptr + place + at, value)
            tl.store(state.gate_ptr + place + at, logit)


def compress_rings(
    kv: Tensor,
    gate: Tensor,
    bias: Tensor,
    norm_weight: Tensor,
    eps: float,
    cos_sin: Tensor,
    states: tuple[Tensor, Tensor],
    rows: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    out: Tensor | PackedRows,
    positions: Tensor,
    places: Tensor | None,
    launch: Callable[[Launch], None] = calls.launch,
) -> None:
    """Make rows of kv, gate [N, width]; states fp32 [lines * ring, width]; rows: (number, line, begin, start,
    target), int64 [W].

    places int64 [N]: where the tokens go in the states, for a call in which no request has more than one (then no row
    is made of the tokens that they replace); None: the states stay as they are.
    """
    m, width = bias.shape
    d, count = norm_weight.shape[0], rows[0].shape[0]
    overlap = width == 2 * d
    programs = count + (0 if places is None else kv.shape[0])
    if programs:
        arguments = [
            NewTokens(kv, gate, bias, 0, kv.stride(0), 0, gate.stride(0)),
            TokenState(*states),
            RingRows(*rows, count),
            RingTokens(positions, rows[0] if places is None else places, m, m * (1 + overlap)),
            Finish(norm_weight, cos_sin, float(eps)),
            PoolRows.of(out),
        ]
        constants = dict(
            D=d,
            R=cos_sin.shape[1],
            OVERLAP=overlap,
            FORMAT=format_of(out),
            SLOTS=8 if overlap else 16,
            num_warps=8 if overlap else 16,  # 16 values per thread: registers for all loads of a tile at once
        )
        launch(Launch(ring_rows, (programs,), arguments, constants))
