"""What becomes of the rows of an item when its last block is done, for one CTA and for a pair."""

from dsv4.kernels.compat import Value, aggregate, gl, gluon
from dsv4.kernels.shared import softmax


@aggregate
class Result:
    factor: Value  # that normalises each row of O
    query: Value
    first_head: Value
    part_row: Value  # of the item's query in the partial results
    angles_ptr: Value  # its line of cos_sin


@gluon.jit
def finish_rows(m, l, query, first_head, part, output, split):
    """Write the LSE of an item's rows (heads), or of its split -> what is left to do with its O."""
    rope = output.rope
    head = first_head + gl.arange(0, m.shape[0], layout=m.type.layout)
    here = head < output.heads
    sink = softmax.sink_of(output.sink_ptr, head, here & (split == 0))
    factor, lse = softmax.finish(m, l, sink)
    part_row = (part.to(gl.int64) * output.queries + query) * output.heads
    if split != 0:  # normalised partial result and its LSE in base 2; the combine kernel applies the sink
        gl.store(output.part_lse_ptr + part_row + head, lse, mask=here)
    else:
        gl.store(output.lse_ptr + query.to(gl.int64) * output.stride_ln + head.to(gl.int64) * output.stride_lh,
                 lse * softmax.LN2, mask=here & (output.want_lse != 0))  # fmt: skip
    position = gl.load(rope.positions_ptr + query, mask=rope.width > 0, other=0).to(gl.int64)
    angles_ptr = rope.cos_sin_ptr + gl.minimum(gl.maximum(position, 0), rope.positions - 1) * rope.line
    return Result(factor, query, first_head, part_row, angles_ptr)
