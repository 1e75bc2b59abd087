"""Arguments of V4's gradient kernels (NamedTuples that backward.py makes), and what they pass to their roles."""

from typing import NamedTuple

from dsv4.kernels.compat import Value, aggregate, gl, gluon


@aggregate
class Operands:
    """TMA descriptors."""

    q_desc: Value
    dout_desc: Value
    turned_desc: Value  # the last columns of dO, rotated as q was


class PlainPools(NamedTuple):
    """Plain pools. Strides are in units of 8 elements."""

    window_ptr: Value
    window_rows: Value
    window_stride: Value
    window_blocks: Value  # blocks of a list: the first ones name window rows, the others compressed ones
    compressed_ptr: Value
    compressed_stride: Value


class RowLists(NamedTuple):
    """The rows that each query lists, of both pools by one number, compressed ones after the window's. The CTAs of a
    launch have `queries` queries, from query_begin on."""

    rows_ptr: Value  # [N, width], -1 = nothing there
    blocks_ptr: Value  # [N]: blocks of 64 entries that name something
    width: Value
    heads: Value
    query_begin: Value
    queries: Value


class Contributions(NamedTuple):
    """dKV: fp32 rows to add to, or the contributions of each CTA; for fp16 the factors that undo their scale."""

    ptr: Value
    undo_ptr: Value


@aggregate
class Query:
    """Work of one CTA: 64 heads of a query, from `head` on, with all rows that it lists."""

    number: Value
    head: Value
    heads: Value  # heads in all
    line: Value  # stride of lists of row numbers: compressed rows after the window's, -1 = nothing there
    width: Value  # entries of a list
    blocks: Value  # blocks of 64 entries that name something


class Terms(NamedTuple):
    """Per (query, head): the exponent to subtract, delta, and in fp16 bounds of dS and of what is added to dKV. Also
    the factors of S, in base 2, and of dS."""

    lse2_ptr: Value
    delta_ptr: Value
    most_ptr: Value
    sizes_ptr: Value
    scale2: Value
    scale: Value


class Outputs(NamedTuple):
    """Inputs of kernels that compute dO . O themselves: O, its strides in units of 8 elements; by (query, head) the
    sink's share, which becomes the term of dsink, and dO . O of the last columns if dO is rotated."""

    out_ptr: Value
    out_n: Value
    out_h: Value
    share_ptr: Value
    tail_ptr: Value


@aggregate
class DkvTarget:
    """Target of dKV: fp32 rows to add to, or room for the contributions of this CTA, `step` from block to block. For
    fp16 also room for the factor that undoes their scale, one per block."""

    ptr: Value
    step: Value
    undo_ptr: Value


@gluon.jit
def query_and_target(lists, contributions, ATOMIC: gl.constexpr):
    """Return the Query and DkvTarget of this CTA, by the grid (queries, tiles of 64 heads)."""
    number = lists.query_begin + gl.program_id(0)
    head = gl.program_id(1) * 64
    blocks = gl.load(lists.blocks_ptr + number)
    line = lists.rows_ptr + number.to(gl.int64) * lists.width
    query = Query(number, head, lists.heads, line, lists.width, blocks)
    target = DkvTarget(contributions.ptr, 0, contributions.undo_ptr)
    if not ATOMIC:
        padded = (lists.width + 63) // 64 * 64
        place = gl.program_id(1).to(gl.int64) * lists.queries + gl.program_id(0)
        undo_ptr = contributions.undo_ptr + place * (padded // 64)
        target = DkvTarget(contributions.ptr + place * padded * 512, 64 * 512, undo_ptr)
    return query, target
