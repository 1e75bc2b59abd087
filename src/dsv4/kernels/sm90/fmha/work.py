"""What the kernels of this folder share: a CTA's share of the problem, masks, and what becomes of a finished row.

Values travel together in tuples::

    tensors   q, out, lse of the sequence; sink; partial results and their LSE
    strides   of q, out (in units of 8 elements) and lse: token, head of each
    problem   KV head, group, query heads, rows, T, S, window left and right, scale, whether the LSE is wanted
    work      first key, its tile range [begin, end) counted from there, row of the partial results
    pages     row of the block table, page size, number of pages
    source    where K and V are: descriptors, (pointer, pages, strides) of each, and ``where`` of loads.fill
    common    tensors, strides, problem, work, pages
"""

from dsv4.kernels.compat import gl, gluon
from dsv4.kernels.shared import softmax
from dsv4.kernels.shared.fmha import loads
from dsv4.kernels.shared.fmha.tiles import (
    PAGES,
    ROWS,
    bad_pages,
    end_key,
    first_key,
    see_pages,
    sequence,
    split_range,
)

# Arguments of the kernels whose values must not make Triton compile again.
NOT_SPECIALIZED = [
    "want_lse", "total_q", "total_k", "tokens", "keys", "kv_heads", "group", "page_size", "table_stride", "left",
    "right", "num_splits", "tiles_per_split", "stride_qb", "stride_qt", "stride_qh", "stride_ob", "stride_ot",
    "stride_oh", "stride_lb", "stride_lt", "stride_lh", "stride_kp", "stride_kr", "stride_kh", "stride_vp", "stride_vr",
    "stride_vh",
]  # fmt: skip


@gluon.jit
def share(lists, total_q, total_k, tokens, keys, kv_heads, group, left, right, num_splits, tiles_per_split,
          BOX_ROWS: gl.constexpr, M: gl.constexpr, BN: gl.constexpr, HOW: gl.constexpr):  # fmt: skip
    """This CTA's M rows and its tiles of keys, by the grid (row tiles, KV heads x splits, sequences).

    -> first row, rows, and the rest for ``gather``
    """
    cu_q_ptr, cu_k_ptr, lengths_ptr, table_ptr = lists
    VARLEN: gl.constexpr = HOW == ROWS
    seq = gl.program_id(2)
    head = gl.program_id(1) % kv_heads
    split = gl.program_id(1) // kv_heads
    q_start, tokens, k_start, keys = sequence(seq, VARLEN, tokens, keys, total_q, total_k, cu_q_ptr, cu_k_ptr,
                                              lengths_ptr, HOW)  # fmt: skip
    rows = tokens * group
    tile_row = (gl.num_programs(0) - 1 - gl.program_id(0)) * M  # causal: the longest tiles start first
    token_last = gl.minimum((tile_row + M - 1) // group, tokens - 1)
    first = first_key(tile_row // group, tokens, keys, left)
    end = end_key(token_last, tokens, keys, right)
    if HOW == PAGES:
        first = first // BOX_ROWS * BOX_ROWS  # a TMA box stays within one page
    tiles = (gl.maximum(end - first, 0) + BN - 1) // BN
    tile_begin, tile_end = split_range(tiles, split, num_splits, tiles_per_split)
    return tile_row, rows, (seq, head, split, q_start, tokens, k_start, keys, first, tile_begin, tile_end)


@gluon.jit
def gather(mine, tensors, descriptors, k_rows, v_rows, table_ptr, scale, want_lse, total_q, total_k, kv_heads, group,
           page_size, table_stride, left, right, strides_q, strides_o, strides_l, HOW: gl.constexpr):  # fmt: skip
    """The tuples of the roles -> common, source."""
    seq, head, split, q_start, tokens, k_start, keys, first, tile_begin, tile_end = mine
    q_ptr, out_ptr, lse_ptr, sink_ptr, part_ptr, part_lse_ptr = tensors
    # The tensors of this sequence. 64-bit: a batch may be larger than 2^31 elements.
    q_ptr += (seq.to(gl.int64) * strides_q[0] + q_start.to(gl.int64) * strides_q[1]) * 8
    out_ptr += (seq.to(gl.int64) * strides_o[0] + q_start.to(gl.int64) * strides_o[1]) * 8
    lse_ptr += seq.to(gl.int64) * strides_l[0] + q_start.to(gl.int64) * strides_l[1]
    table_ptr += seq.to(gl.int64) * table_stride
    # Row of the partial results: split-major, then as the rows of q (token, head).
    part_row = split.to(gl.int64) * total_q + q_start
    outer = 0
    if HOW != ROWS:
        part_row += seq.to(gl.int64) * tokens
        outer = seq
    here = (q_ptr, out_ptr, lse_ptr, sink_ptr, part_ptr, part_lse_ptr)
    strides = (strides_q[1], strides_q[2], strides_o[1], strides_o[2], strides_l[1], strides_l[2])
    problem = (head, group, kv_heads * group, tokens * group, tokens, keys, left, right, scale, want_lse)
    work = (first, tile_begin, tile_end, part_row)
    pages = (table_ptr, page_size, total_k)
    where = (outer, head, k_start, keys, first_key(0, tokens, keys, left), keys, table_ptr, page_size)
    return (here, strides, problem, work, pages), (descriptors[0], descriptors[1], k_rows, v_rows, where)


@gluon.jit
def sight(tile_row, problem, work, pages, M: gl.constexpr, BN: gl.constexpr, HOW: gl.constexpr,
          RS: gl.constexpr):  # fmt: skip
    """What the M rows from tile_row on see: each row's keys; the keys that all of them see, which need no mask; and
    whether the block table names pages that are none, whose keys nobody sees."""
    head, group, q_heads, rows, tokens, keys, left, right, scale, want_lse = problem
    first, tile_begin, tile_end, part_row = work
    row = tile_row + gl.arange(0, M, layout=RS)
    row_first = first_key(row // group, tokens, keys, left)
    row_end = end_key(row // group, tokens, keys, right)
    token_last = gl.minimum((tile_row + M - 1) // group, tokens - 1)
    full_first = first_key(token_last, tokens, keys, left)
    full_end = end_key(tile_row // group, tokens, keys, right)
    bad = False
    if HOW >= PAGES:
        bad = bad_pages(pages, first + tile_begin * BN, gl.minimum(first + tile_end * BN, keys))
    return row_first, row_end, full_first, full_end, bad


@gluon.jit
def mask(s, column, seen, problem, pages, HOW: gl.constexpr):
    """Scores [M, BN] of keys from ``column`` on: -inf where a row does not see one."""
    L: gl.constexpr = s.type.layout
    row_first, row_end, full_first, full_end, bad = seen
    if (column < full_first) | (column + s.shape[1] > full_end):
        s = softmax.see(s, column, row_first, row_end, L)
    if HOW >= PAGES:
        if bad:
            s = see_pages(s, column, problem[5], pages, L)
    return s


@gluon.jit
def write(o, m, l, smem, tile_row, common, COLUMN: gl.constexpr, D: gl.constexpr, SPLIT: gl.constexpr):
    """Normalise O [M, C], columns from COLUMN on of D, and write it by way of smem; with column 0 also the LSE."""
    tensors, strides, problem, work, pages = common
    q_ptr, out_ptr, lse_ptr, sink_ptr, part_ptr, part_lse_ptr = tensors
    stride_qt, stride_qh, stride_ot, stride_oh, stride_lt, stride_lh = strides
    head, group, q_heads, rows, tokens, keys, left, right, scale, want_lse = problem
    first, tile_begin, tile_end, part_row = work
    RS: gl.constexpr = m.type.layout
    LO: gl.constexpr = o.type.layout
    RO: gl.constexpr = gl.SliceLayout(1, LO)
    M: gl.constexpr = o.shape[0]
    C: gl.constexpr = o.shape[1]
    row = tile_row + gl.arange(0, M, layout=RS)
    q_head = head * group + row % group
    token = row // group
    if SPLIT:  # normalised partial result and its LSE in base 2; the combine kernel applies the sink
        factor, lse = softmax.finish(m, l, gl.full([M], -float("inf"), gl.float32, RS))
        part = (part_row + token.to(gl.int64)) * q_heads + q_head
        if COLUMN == 0:
            gl.store(part_lse_ptr + part, lse, mask=row < rows)
        if tile_begin < tile_end:
            o = o * gl.convert_layout(factor, RO)[:, None]
            column = COLUMN + gl.arange(0, C, layout=gl.SliceLayout(0, LO))
            gl.store(part_ptr + gl.convert_layout(part, RO)[:, None] * D + column[None, :], o,
                     mask=gl.convert_layout(row < rows, RO)[:, None])  # fmt: skip
    else:
        sink = gl.load(sink_ptr + q_head, mask=row < rows, other=-float("inf"))
        factor, lse = softmax.finish(m, l, sink)
        if COLUMN == 0:
            gl.store(lse_ptr + token.to(gl.int64) * stride_lt + q_head.to(gl.int64) * stride_lh, lse * softmax.LN2,
                     mask=(row < rows) & (want_lse != 0))  # fmt: skip
        o = o * gl.convert_layout(factor, RO)[:, None]
        smem.store(o.to(smem.dtype))
        loads.store_rows(out_ptr, smem, tile_row, rows, head, group, stride_ot, stride_oh, COLUMN, M, C)
