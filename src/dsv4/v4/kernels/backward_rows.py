"""Small kernels that the gradients of V4 attention need besides the products, with one pass over their inputs each.

query_rows      per query and head: lse2 and delta (fmha/kernels/backward_rows.py), the sink's term; for fp16 bounds of
                dS and of contributions to dKV (backward_scale.py); and the last columns of dO rotated as q was, which
                is the gradient of what the products computed before the output was rotated back. If the products'
                kernel computes dO . O, delta lacks it, and the sink's term has to be multiplied by it
number_rows     the lists of both pools as one list of row numbers
fold_rows       deterministic: the contributions of all queries to a row, summed in the order of the lists
"""

from typing import NamedTuple

from dsv4.fmha.kernels.backward_rows import row_layout, terms
from dsv4.kernels.compat import Value, gl, gluon


class QueryTensors(NamedTuple):
    any_alignment = ("lse_ptr", "dlse_ptr", "sink_ptr", "cos_sin_ptr", "positions_ptr")

    q_ptr: Value
    out_ptr: Value
    dout_ptr: Value
    lse_ptr: Value
    dlse_ptr: Value
    sink_ptr: Value
    cos_sin_ptr: Value
    positions_ptr: Value
    longest_ptr: Value
    lse2_ptr: Value  # outputs, from here on
    delta_ptr: Value
    share_ptr: Value
    turned_ptr: Value
    tail_ptr: Value
    most_ptr: Value
    sizes_ptr: Value


class QuerySizes(NamedTuple):
    heads: Value
    has_sink: Value
    has_dlse: Value
    positions: Value  # lines of cos_sin
    rope_width: Value
    rope_line: Value  # stride of lines of cos_sin
    scale: Value


class QueryStrides(NamedTuple):
    """The strides of queries and heads; those of q, out and dout are in units of 8 elements."""

    q_n: Value
    q_h: Value
    out_n: Value
    out_h: Value
    dout_n: Value
    dout_h: Value
    lse_n: Value
    lse_h: Value
    dlse_n: Value
    dlse_h: Value


@gluon.jit
def query_rows(
    tensors,
    sizes,
    strides,
    D: gl.constexpr,
    ROWS: gl.constexpr,
    TURNED: gl.constexpr,
    SCALED: gl.constexpr,
    STORED: gl.constexpr,
    DOT: gl.constexpr,
):
    """Process the rows; program (n, i) has ROWS heads of query n. share: dsink is the sum of it. turned [N, H,
    TURNED]: the last TURNED columns of dO, the last rope_width of them rotated. Strides of q, out and dout are in
    units of 8 elements. SCALED (fp16): write most, from the norm of the longest row and |scale|; STORED: also
    sizes, from q. Without DOT, delta and share lack dO . O; that of the last TURNED columns goes to tail [N, H]."""
    L: gl.constexpr = row_layout(D)
    R: gl.constexpr = gl.SliceLayout(1, L)
    query = gl.program_id(0).to(gl.int64)
    first = gl.program_id(1) * ROWS
    head = first + gl.arange(0, ROWS, layout=R)
    column = gl.arange(0, D, layout=gl.SliceLayout(0, L))
    there = head < sizes.heads
    at_out = (query * strides.out_n + head.to(gl.int64) * strides.out_h) * 8
    at_dout = (query * strides.dout_n + head.to(gl.int64) * strides.dout_h) * 8
    dot = gl.zeros([ROWS], gl.float32, R)
    if DOT:
        o = gl.load(tensors.out_ptr + at_out[:, None] + column[None, :], mask=there[:, None], other=0.0)
        do = gl.load(tensors.dout_ptr + at_dout[:, None] + column[None, :], mask=there[:, None], other=0.0)
        dot = gl.sum(o.to(gl.float32) * do.to(gl.float32), 1)
    lse = gl.load(
        tensors.lse_ptr + query * strides.lse_n + head.to(gl.int64) * strides.lse_h, mask=there, other=-float("inf")
    )
    sink = gl.load(tensors.sink_ptr + head, mask=there & (sizes.has_sink != 0), other=-float("inf"))
    there_dlse = there & (sizes.has_dlse != 0)
    dlse = gl.load(
        tensors.dlse_ptr + query * strides.dlse_n + head.to(gl.int64) * strides.dlse_h, mask=there_dlse, other=0.0
    )
    lse2, delta, plain, share = terms(dot, lse, sink, dlse)
    place = query * sizes.heads + head
    gl.store(tensors.lse2_ptr + place, lse2, mask=there)
    gl.store(tensors.delta_ptr + place, delta, mask=there)
    if DOT:
        share = share * plain
    gl.store(tensors.share_ptr + place, -share, mask=there)
    if SCALED:
        norm = gl.sqrt(gl.sum(do.to(gl.float32) * do.to(gl.float32), 1))
        of_lse = gl.where(lse == -float("inf"), 0.0, gl.abs(dlse))
        most = sizes.scale * (2.0 * norm * gl.load(tensors.longest_ptr) + of_lse)
        gl.store(tensors.most_ptr + place, most, mask=there)
        if STORED:
            at_q = (query * strides.q_n + head.to(gl.int64) * strides.q_h) * 8
            q = gl.load(tensors.q_ptr + at_q[:, None] + column[None, :], mask=there[:, None], other=0.0)
            gl.store(tensors.sizes_ptr + place, norm + most * gl.max(gl.abs(q.to(gl.float32)), 1), mask=there)
    if TURNED > 0:
        T: gl.constexpr = row_layout(TURNED)
        head = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, T))
        there = head < sizes.heads
        column = gl.arange(0, TURNED, layout=gl.SliceLayout(0, T))
        at_dout = (query * strides.dout_n + head.to(gl.int64) * strides.dout_h) * 8 + (D - TURNED)
        x = gl.load(tensors.dout_ptr + at_dout[:, None] + column[None, :], mask=there[:, None], other=0.0).to(
            gl.float32
        )
        if not DOT:
            at_out = (query * strides.out_n + head.to(gl.int64) * strides.out_h) * 8 + (D - TURNED)
            o = gl.load(tensors.out_ptr + at_out[:, None] + column[None, :], mask=there[:, None], other=0.0)
            gl.store(tensors.tail_ptr + query * sizes.heads + head, gl.sum(x * o.to(gl.float32), 1), mask=there)
        even, odd = gl.split(x.reshape([ROWS, TURNED // 2, 2]))
        pair = gl.arange(0, TURNED // 2, layout=gl.SliceLayout(0, even.type.layout)) - (TURNED - sizes.rope_width) // 2
        position = gl.load(tensors.positions_ptr + query).to(gl.int64)
        line_ptr = tensors.cos_sin_ptr + gl.minimum(gl.maximum(position, 0), sizes.positions - 1) * sizes.rope_line
        cos = gl.load(line_ptr + pair, mask=pair >= 0, other=1.0)[None, :]
        sin = gl.load(line_ptr + sizes.rope_width // 2 + pair, mask=pair >= 0, other=0.0)[None, :]
        x = gl.join(even * cos - odd * sin, odd * cos + even * sin).reshape([ROWS, TURNED])
        x = gl.convert_layout(x, T).to(tensors.turned_ptr.dtype.element_ty)
        at = (query * sizes.heads + head) * TURNED
        gl.store(tensors.turned_ptr + at[:, None] + column[None, :], x, mask=there[:, None])


class Numbered(NamedTuple):
    """The lists of a pool."""

    any_alignment = ("list_ptr", "lengths_ptr")

    list_ptr: Value
    lengths_ptr: Value
    has_lengths: Value
    stride: Value
    entries: Value
    rows: Value  # rows of the pool


@gluon.jit
def listed(lists, query, entry, shift):
    """Return the numbers of some entries of a list; -1 for an empty entry, or one that is not a row of the pool."""
    length = gl.load(lists.lengths_ptr + query, mask=lists.has_lengths != 0, other=lists.entries)
    there = (entry >= 0) & (entry < gl.minimum(length, lists.entries))
    row = gl.load(lists.list_ptr + query * lists.stride + entry, mask=there, other=-1)
    return gl.where((row >= 0) & (row < lists.rows), row + shift, -1)


@gluon.jit(do_not_specialize=["window_padded"])
def number_rows(window, compressed, rows_ptr, blocks_ptr, window_padded, CHUNK: gl.constexpr):
    """Number the rows; program n writes rows[n]: window_padded entries of the window, then the compressed ones,
    numbered after the window's rows; -1 = nothing there. blocks[n]: how many blocks of 64 entries reach the last
    that names a row.
    """
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    query = gl.program_id(0).to(gl.int64)
    width = window_padded + compressed.entries
    last = gl.zeros([CHUNK], gl.int32, L)
    for begin in range(0, width, CHUNK):
        entry = begin + gl.arange(0, CHUNK, layout=L)
        row = listed(window, query, entry, 0)
        row = gl.maximum(row, listed(compressed, query, entry - window_padded, window.rows))
        gl.store(rows_ptr + query * width + entry, row, mask=entry < width)
        last = gl.where(row >= 0, entry + 1, last)
    gl.store(blocks_ptr + query, (gl.max(last, 0) + 63) // 64)


@gluon.jit(do_not_specialize=["head_tiles", "per_tile"])
def fold_rows(
    parts_ptr, order_ptr, starts_ptr, sums_ptr, head_tiles, per_tile, undo_ptr, SOME: gl.constexpr, SCALED: gl.constexpr
):
    """Add its contributions to dkv[row], in an order that only the lists determine: one program per row, SOME
    contributions at a time. order: their places, by row; starts [rows + 1]: which are the row's. per_tile:
    contributions of one head tile. SCALED (fp16): 64 consecutive ones are multiplied by one of undo."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [2, 2], [1, 0])
    row = gl.program_id(0).to(gl.int64)
    column = gl.arange(0, 512, layout=gl.SliceLayout(0, L))[None, :]
    begin = gl.load(starts_ptr + row)
    end_ = gl.load(starts_ptr + row + 1)
    some = gl.arange(0, SOME, layout=gl.SliceLayout(1, L))
    total = gl.zeros([SOME, 512], gl.float32, L)
    for entry in range(begin, end_, SOME):
        there = entry + some < end_
        found = gl.load(order_ptr + entry + some, mask=there, other=0)
        at = found.to(gl.int64)
        for tile in range(0, head_tiles):
            place = (tile.to(gl.int64) * per_tile + at)[:, None] * 512 + column
            part = gl.load(parts_ptr + place, mask=there[:, None], other=0.0).to(gl.float32)
            if SCALED:
                block = tile * (per_tile // 64) + (found >> 6)
                part = part * gl.load(undo_ptr + block, mask=there, other=0.0)[:, None]
            total += part
    total = gl.sum(total, 0).reshape([16, 4, 4, 2]).permute((0, 2, 1, 3)).reshape([512])  # keep()'s order undone
    total = gl.convert_layout(total, gl.BlockedLayout([4], [32], [4], [0]))
    column = gl.arange(0, 512, layout=gl.BlockedLayout([4], [32], [4], [0]))
    place = sums_ptr + row * 512 + column
    gl.store(place, gl.load(place) + total)
