"""The arguments of V4's gradient kernels by group, as they hand them to their roles, and a CTA's share of them."""

from dsv4.kernels.compat import Value, aggregate, gl, gluon


@aggregate
class Operands:
    """TMA descriptors."""

    q_desc: Value
    dout_desc: Value
    turned_desc: Value  # the last columns of dO, turned as q was


@aggregate
class Pools:
    """Strides in units of 8 elements."""

    window_ptr: Value
    window_rows: Value
    window_stride: Value
    window_blocks: Value  # of a list: the first name window rows, the others compressed ones
    compressed_ptr: Value
    compressed_stride: Value


@aggregate
class Query:
    """What one CTA has to do: 64 heads of a query, from `head` on, with all rows that it lists."""

    number: Value
    head: Value
    heads: Value  # in all
    line: Value  # of row numbers: compressed rows after the window's, -1 = nothing there
    width: Value  # its entries
    blocks: Value  # of 64 entries that name something


@aggregate
class Terms:
    """Of all (query, head): the exponent to subtract, delta, and for fp16 what bounds dS and what is added to dKV.
    What S is multiplied by, in base 2, and dS."""

    lse2_ptr: Value
    delta_ptr: Value
    most_ptr: Value
    sizes_ptr: Value
    scale2: Value
    scale: Value


@aggregate
class Target:
    """Where dKV goes: fp32 rows to add to, or room for what this CTA contributes, `step` from block to block. For fp16
    room for what undoes their factor, one for each block."""

    ptr: Value
    step: Value
    undo_ptr: Value


@gluon.jit
def query_and_target(
    rows_ptr, blocks_ptr, target_ptr, undo_ptr, query_begin, queries, heads, width, ATOMIC: gl.constexpr
):
    """-> Query, Target of this CTA, by the grid (queries, tiles of 64 heads)"""
    number = query_begin + gl.program_id(0)
    head = gl.program_id(1) * 64
    blocks = gl.load(blocks_ptr + number)
    query = Query(number, head, heads, rows_ptr + number.to(gl.int64) * width, width, blocks)
    target = Target(target_ptr, 0, undo_ptr)
    if not ATOMIC:
        padded = (width + 63) // 64 * 64
        place = gl.program_id(1).to(gl.int64) * queries + gl.program_id(0)
        target = Target(target_ptr + place * padded * 512, 64 * 512, undo_ptr + place * (padded // 64))
    return query, target
