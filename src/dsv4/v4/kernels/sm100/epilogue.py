"""Epilogue of a work tile's rows when its last block is done, for one CTA and for a pair."""

from dsv4.kernels import softmax
from dsv4.kernels.compat import Value, aggregate, gl, gluon


@aggregate
class TileRows:
    """Rows of a work tile, as known before they are done."""

    query: Value
    first_head: Value
    head: Value  # head of each row
    here: Value  # whether it is one
    sink: Value
    part_row: Value  # row of the work tile's query in the partial results


@gluon.jit
def tile_rows(query, first_head, part, output, split, ROWS: gl.constexpr, L: gl.constexpr):
    head = first_head + gl.arange(0, ROWS, layout=L)
    here = head < output.heads
    sink = softmax.sink_of(output.sink_ptr, head, here & (split == 0))
    part_row = (part.to(gl.int64) * output.queries + query) * output.heads
    return TileRows(query, first_head, head, here, sink, part_row)


@gluon.jit
def angles_of(query, rope):
    """Return the query's line of cos_sin."""
    position = gl.load(rope.positions_ptr + query, mask=rope.width > 0, other=0).to(gl.int64)
    return rope.cos_sin_ptr + gl.minimum(gl.maximum(position, 0), rope.positions - 1) * rope.line


@gluon.jit
def finish_rows(m, l, place, output, split):
    """Write the LSE of a work tile's rows, or of its split -> the factor that normalises each row of O."""
    factor, lse = softmax.finish(m, l, place.sink)
    if split != 0:  # normalised partial result and its LSE in base 2; the combine kernel applies the sink
        gl.store(output.part_lse_ptr + place.part_row + place.head, lse, mask=place.here)
    else:
        row = place.query.to(gl.int64) * output.stride_ln + place.head.to(gl.int64) * output.stride_lh
        gl.store(output.lse_ptr + row, lse * softmax.LN2, mask=place.here & (output.want_lse != 0))
    return factor
