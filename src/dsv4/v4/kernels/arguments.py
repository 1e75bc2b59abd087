"""Arguments of V4 attention, grouped by what they describe: NamedTuples that prepare.py makes, and that kernels of
every architecture accept and pass to their roles unchanged. Also the aggregates that kernels make of them."""

from typing import NamedTuple

from dsv4.kernels.compat import Value, aggregate


class Queries(NamedTuple):
    """Strides are in units of 8 elements."""

    ptr: Value
    stride_n: Value
    stride_h: Value


class PoolSizes(NamedTuple):
    """Rows by number. Strides are in units of 8 elements, of packed rows in units of UNIT bytes."""

    ptr: Value
    rows: Value
    page_rows: Value
    page_stride: Value
    row_stride: Value
    inverse: Value  # ceil(2^shift / page_rows)
    shift: Value
    gap: Value  # for TMA: lines between pages


class Names(NamedTuple):
    """How queries name rows of a pool: by a list of numbers each, or by a block table of their request."""

    any_alignment = ("list_ptr", "lengths_ptr")

    list_ptr: Value  # int32 lines of a query, or of a request
    line: Value  # stride of lines
    lengths_ptr: Value  # int32 per query
    given: Value  # whether there are lengths; a length that is not given is the width
    width: Value  # most rows that are named


class Requests(NamedTuple):
    """Which consecutive queries belong to one request."""

    any_alignment = ("starts_ptr",)

    starts_ptr: Value  # int32, one more than requests
    given: Value  # whether there are starts; else every query is its own request
    count: Value


class Rope(NamedTuple):
    """The angle by which the last ``width`` columns of an output row are rotated back; width 0: not at all."""

    any_alignment = ("cos_sin_ptr", "positions_ptr")

    cos_sin_ptr: Value
    positions_ptr: Value  # positions of the queries
    positions: Value  # lines of cos_sin
    width: Value
    line: Value  # stride of lines of cos_sin


class Output(NamedTuple):
    """Output tensors. Strides of out are in units of 8 elements."""

    any_alignment = ("lse_ptr", "sink_ptr", "part_lse_ptr")

    out_ptr: Value
    lse_ptr: Value
    sink_ptr: Value
    part_ptr: Value  # partial results of a split: normalised fp32 rows, and their LSE in base 2
    part_lse_ptr: Value
    stride_on: Value
    stride_oh: Value
    stride_ln: Value
    stride_lh: Value
    queries: Value
    heads: Value
    rope: Rope
    want_lse: Value
    split: Value  # whether to write partial results, if the kernel's constants do not determine it


class Sizes(NamedTuple):
    queries: Value
    heads: Value
    num_tiles: Value  # work tiles in all
    num_splits: Value
    tiles_per_split: Value
    splits_inverse: Value  # ceil(2^splits_shift / num_splits)
    splits_shift: Value
    alone: Value  # the first CTAs, which have one work tile each; uneven_from: see splits.uneven
    uneven_from: Value
    whole: Value  # the first queries, whose rows are not split (splits.whole_first), here or by the launch before


@aggregate
class Lists:
    """The rows that a query names: its line of the window list, then its line of the compressed list or block table."""

    window_ptr: Value
    window_count: Value
    window_blocks: Value
    line_ptr: Value
    count: Value
