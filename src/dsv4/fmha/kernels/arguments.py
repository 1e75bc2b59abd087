"""The arguments of FMHA by group, as kernels hand them to their roles."""

from dsv4.fmha.kernels.loads import Cells, Where
from dsv4.fmha.kernels.tiles import Pages
from dsv4.kernels.compat import Value, aggregate


@aggregate
class Tensors:
    """Of all sequences as arguments, of one in a Share."""

    q_ptr: Value
    out_ptr: Value
    lse_ptr: Value
    sink_ptr: Value
    part_ptr: Value  # of a split: its normalised rows and their LSE in base 2, in fp32 or short (combine.py)
    part_lse_ptr: Value


@aggregate
class Lists:
    """Which rows are whose."""

    cu_q_ptr: Value  # varlen
    cu_k_ptr: Value
    lengths_ptr: Value  # paged
    table_ptr: Value


@aggregate
class Sizes:
    total_q: Value  # query tokens in all
    total_k: Value  # key rows in all, or pages
    tokens: Value  # of a sequence, at most
    keys: Value
    kv_heads: Value
    group: Value  # query heads of a KV head
    page_size: Value
    table_stride: Value
    left: Value  # of the window
    right: Value
    num_splits: Value
    tiles_per_split: Value


@aggregate
class Strides:
    """Of q and out in units of 8 elements, and of the LSE: token, head, batch."""

    qt: Value
    qh: Value
    ot: Value
    oh: Value
    lt: Value
    lh: Value
    qb: Value
    ob: Value
    lb: Value


@aggregate
class Problem:
    """One sequence and KV head."""

    head: Value
    group: Value
    q_heads: Value
    rows: Value
    tokens: Value
    keys: Value
    left: Value
    right: Value
    scale: Value
    want_lse: Value


@aggregate
class Tiles:
    """The tiles of keys of a CTA: [begin, end), counted from key ``first``; its row of the partial results."""

    first: Value
    begin: Value
    end: Value
    part_row: Value


@aggregate
class Share:
    tensors: Tensors
    strides: Strides
    problem: Problem
    tiles: Tiles
    pages: Pages


@aggregate
class Source:
    """Where K and V come from: by TMA, or cell by cell."""

    k_desc: Value
    v_desc: Value
    k_cells: Cells
    v_cells: Cells
    where: Where
