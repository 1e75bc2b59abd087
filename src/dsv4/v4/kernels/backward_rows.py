"""What the gradients of V4 attention need beside the products: small kernels, one pass over their inputs each.

query_rows      per query and head: lse2 and delta (shared/fmha/backward_rows.py), the sink's term; for fp16 what bounds
                dS and contributions to dKV (backward_scale.py); and the last columns of dO turned as q was, which is
                what the products made before the output was turned back
number_rows     the lists of both pools as one list of row numbers
fold_rows       deterministic: the contributions of all queries to a row, summed in the order of the lists
"""

from dsv4.fmha.kernels.backward_rows import row_layout, terms
from dsv4.kernels.compat import gl, gluon


@gluon.jit(do_not_specialize=[
    "heads", "has_sink", "has_dlse", "stride_on", "stride_oh", "stride_gn", "stride_gh", "stride_ln", "stride_lh",
    "stride_dn", "stride_dh", "positions", "rope_width", "rope_line", "scale", "stride_qn", "stride_qh",
])  # fmt: skip
def query_rows(out_ptr, dout_ptr, lse_ptr, dlse_ptr, sink_ptr, cos_sin_ptr, positions_ptr, lse2_ptr, delta_ptr,
               share_ptr, turned_ptr, heads, has_sink, has_dlse, stride_on, stride_oh, stride_gn, stride_gh, stride_ln,
               stride_lh, stride_dn, stride_dh, positions, rope_width, rope_line, longest_ptr, most_ptr, scale,
               q_ptr, sizes_ptr, stride_qn, stride_qh, D: gl.constexpr, ROWS: gl.constexpr, TURNED: gl.constexpr,
               SCALED: gl.constexpr, STORED: gl.constexpr):  # fmt: skip
    """Program (n, i): ROWS heads of query n. share: what dsink is the sum of. turned [N, H, TURNED]: the last TURNED
    columns of dO, the last rope_width of them turned. Strides of q, out and dout in units of 8 elements. SCALED
    (fp16): most is made, from the norm of the longest row and |scale|; STORED: and sizes, from q."""
    L: gl.constexpr = row_layout(D)
    R: gl.constexpr = gl.SliceLayout(1, L)
    query = gl.program_id(0).to(gl.int64)
    first = gl.program_id(1) * ROWS
    head = first + gl.arange(0, ROWS, layout=R)
    column = gl.arange(0, D, layout=gl.SliceLayout(0, L))
    there = head < heads
    at_out = (query * stride_on + head.to(gl.int64) * stride_oh) * 8
    at_dout = (query * stride_gn + head.to(gl.int64) * stride_gh) * 8
    o = gl.load(out_ptr + at_out[:, None] + column[None, :], mask=there[:, None], other=0.0)
    do = gl.load(dout_ptr + at_dout[:, None] + column[None, :], mask=there[:, None], other=0.0)
    dot = gl.sum(o.to(gl.float32) * do.to(gl.float32), 1)
    lse = gl.load(lse_ptr + query * stride_ln + head.to(gl.int64) * stride_lh, mask=there, other=-float("inf"))
    sink = gl.load(sink_ptr + head, mask=there & (has_sink != 0), other=-float("inf"))
    there_dlse = there & (has_dlse != 0)
    dlse = gl.load(dlse_ptr + query * stride_dn + head.to(gl.int64) * stride_dh, mask=there_dlse, other=0.0)
    lse2, delta, plain, share = terms(dot, lse, sink, dlse)
    place = query * heads + head
    gl.store(lse2_ptr + place, lse2, mask=there)
    gl.store(delta_ptr + place, delta, mask=there)
    gl.store(share_ptr + place, -share * plain, mask=there)
    if SCALED:
        norm = gl.sqrt(gl.sum(do.to(gl.float32) * do.to(gl.float32), 1))
        of_lse = gl.where(lse == -float("inf"), 0.0, gl.abs(dlse))
        most = scale * (2.0 * norm * gl.load(longest_ptr) + of_lse)
        gl.store(most_ptr + place, most, mask=there)
        if STORED:
            at_q = (query * stride_qn + head.to(gl.int64) * stride_qh) * 8
            q = gl.load(q_ptr + at_q[:, None] + column[None, :], mask=there[:, None], other=0.0)
            gl.store(sizes_ptr + place, norm + most * gl.max(gl.abs(q.to(gl.float32)), 1), mask=there)
    if TURNED > 0:
        T: gl.constexpr = row_layout(TURNED)
        head = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, T))
        there = head < heads
        column = gl.arange(0, TURNED, layout=gl.SliceLayout(0, T))
        at_dout = (query * stride_gn + head.to(gl.int64) * stride_gh) * 8 + (D - TURNED)
        x = gl.load(dout_ptr + at_dout[:, None] + column[None, :], mask=there[:, None], other=0.0).to(gl.float32)
        even, odd = gl.split(x.reshape([ROWS, TURNED // 2, 2]))
        pair = gl.arange(0, TURNED // 2, layout=gl.SliceLayout(0, even.type.layout)) - (TURNED - rope_width) // 2
        position = gl.load(positions_ptr + query).to(gl.int64)
        line_ptr = cos_sin_ptr + gl.minimum(gl.maximum(position, 0), positions - 1) * rope_line
        cos = gl.load(line_ptr + pair, mask=pair >= 0, other=1.0)[None, :]
        sin = gl.load(line_ptr + rope_width // 2 + pair, mask=pair >= 0, other=0.0)[None, :]
        x = gl.join(even * cos - odd * sin, odd * cos + even * sin).reshape([ROWS, TURNED])
        x = gl.convert_layout(x, T).to(turned_ptr.dtype.element_ty)
        at = (query * heads + head) * TURNED
        gl.store(turned_ptr + at[:, None] + column[None, :], x, mask=there[:, None])


@gluon.jit
def listed(list_ptr, lengths_ptr, query, entry, stride, entries, has_lengths, size, shift):
    """The numbers of some entries of a list; -1 where nothing is, or no row of the pool."""
    length = gl.load(lengths_ptr + query, mask=has_lengths != 0, other=entries)
    there = (entry >= 0) & (entry < gl.minimum(length, entries))
    row = gl.load(list_ptr + query * stride + entry, mask=there, other=-1)
    return gl.where((row >= 0) & (row < size), row + shift, -1)


@gluon.jit(do_not_specialize=[
    "window_stride", "window_entries", "window_padded", "has_window_lengths", "window_rows", "compressed_stride",
    "compressed_entries", "has_compressed_lengths", "compressed_rows",
])  # fmt: skip
def number_rows(window_list_ptr, window_lengths_ptr, compressed_list_ptr, compressed_lengths_ptr, rows_ptr, blocks_ptr,
                window_stride, window_entries, window_padded, has_window_lengths, window_rows, compressed_stride,
                compressed_entries, has_compressed_lengths, compressed_rows, CHUNK: gl.constexpr):  # fmt: skip
    """Program n: rows[n], window_padded entries of the window and then the compressed ones, numbered after the
    window's rows; -1 = nothing there. blocks[n]: how many blocks of 64 entries reach the last that is something."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    query = gl.program_id(0).to(gl.int64)
    width = window_padded + compressed_entries
    last = gl.zeros([CHUNK], gl.int32, L)
    for begin in range(0, width, CHUNK):
        entry = begin + gl.arange(0, CHUNK, layout=L)
        row = listed(window_list_ptr, window_lengths_ptr, query, entry, window_stride, window_entries,
                     has_window_lengths, window_rows, 0)  # fmt: skip
        more = listed(compressed_list_ptr, compressed_lengths_ptr, query, entry - window_padded, compressed_stride,
                      compressed_entries, has_compressed_lengths, compressed_rows, window_rows)  # fmt: skip
        row = gl.maximum(row, more)
        gl.store(rows_ptr + query * width + entry, row, mask=entry < width)
        last = gl.where(row >= 0, entry + 1, last)
    gl.store(blocks_ptr + query, (gl.max(last, 0) + 63) // 64)


@gluon.jit(do_not_specialize=["head_tiles", "per_tile"])
def fold_rows(
    parts_ptr, order_ptr, starts_ptr, sums_ptr, head_tiles, per_tile, undo_ptr, SOME: gl.constexpr, SCALED: gl.constexpr
):
    """dkv[row] += its contributions, in an order that the lists alone decide: one program per row, SOME contributions
    at a time. order: where they lie, by row; starts [rows + 1]: which of them are the row's. per_tile: contributions of
    one head tile. SCALED (fp16): 64 of them in a row are multiplied by one of undo."""
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
