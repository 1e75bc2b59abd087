"""Arguments of the compressor's kernels, by group."""

from typing import Any, NamedTuple

Value = Any  # a number or a pointer, to the kernel


class NewTokens(NamedTuple):
    """The tokens of a call: kv and gate [batch, token, width] with their strides in elements, and the bias of a gate by
    its place in the window."""

    kv_ptr: Value
    gate_ptr: Value
    bias_ptr: Value
    kv_batch: Value
    kv_row: Value
    gate_batch: Value
    gate_row: Value


class TokenState(NamedTuple):
    """Tokens in fp32, gates with their bias; contiguous."""

    kv_ptr: Value
    gate_ptr: Value


class Finish(NamedTuple):
    """Norm weight and RoPE table of a pooled row."""

    norm_ptr: Value
    cos_sin_ptr: Value
    eps: Value


class Windows(NamedTuple):
    """Sizes of compress_rows."""

    tokens: Value  # new tokens of a sequence
    kept: Value  # old tokens
    base: Value  # number of the first token
    first: Value  # number of the first window that is finished
    count: Value
    drop: Value  # tokens that the new state drops
    m: Value  # tokens of a window
    d: Value  # columns of a row
    r: Value  # columns that are rotated
    rope_line: Value  # stride of the positions in cos_sin


class RingRows(NamedTuple):
    """Rows that ring_rows makes, with one number each: row, line of its request, first new token of the request and
    its place in the call, row of the pool."""

    number_ptr: Value
    line_ptr: Value
    begin_ptr: Value
    start_ptr: Value
    target_ptr: Value
    count: Value


class RingTokens(NamedTuple):
    """The position of each token, its place in the states; tokens per window and per line of a request."""

    position_ptr: Value
    place_ptr: Value
    m: Value
    ring: Value


class StatePages(NamedTuple):
    """An engine's pages of states: tokens per page, strides of pages, tokens and lines of the block table."""

    ptr: Value
    table_ptr: Value
    page: Value
    page_stride: Value
    line: Value
    table_line: Value


class PagedTokens(NamedTuple):
    """The number, request and position of each token, and the row of the pool that it finishes."""

    token_ptr: Value
    request_ptr: Value
    position_ptr: Value
    slot_ptr: Value
