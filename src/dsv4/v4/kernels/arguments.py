"""The arguments of V4 attention by group, as kernels of every architecture hand them to their roles."""

from dsv4.kernels.compat import Value, aggregate


@aggregate
class Names:
    """How queries name rows of a pool: by a list of numbers each, or by a block table of their request."""

    list_ptr: Value  # int32 lines of a query, or of a request
    line: Value  # from a line to the next
    lengths_ptr: Value  # int32 per query
    given: Value  # whether there are lengths; a length that is not given is the width
    width: Value  # rows named at most


@aggregate
class Requests:
    """Which consecutive queries belong to one request."""

    starts_ptr: Value  # int32, one more than requests
    given: Value  # whether there are starts; else every query is a request of its own
    count: Value


@aggregate
class Rope:
    """The angle by which the last ``width`` columns of an output row are turned back; width 0: not at all."""

    cos_sin_ptr: Value
    positions_ptr: Value  # of the queries
    positions: Value  # lines of cos_sin
    width: Value
    line: Value  # from a line of cos_sin to the next


@aggregate
class Output:
    """Where results go. Strides of out are in units of 8 elements."""

    out_ptr: Value
    lse_ptr: Value
    sink_ptr: Value
    part_ptr: Value  # of a split: normalised fp32 rows, and their LSE in base 2
    part_lse_ptr: Value
    stride_on: Value
    stride_oh: Value
    stride_ln: Value
    stride_lh: Value
    queries: Value
    heads: Value
    rope: Rope
    want_lse: Value


@aggregate
class Sizes:
    queries: Value
    heads: Value
    num_splits: Value
    tiles_per_split: Value


@aggregate
class Lists:
    """What a query names: its line of the window list, then its line of the compressed list or of the block table."""

    window_ptr: Value
    window_count: Value
    window_blocks: Value
    line_ptr: Value
    count: Value
