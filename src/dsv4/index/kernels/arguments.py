"""Arguments of the indexer's kernels: NamedTuples that prepare.py makes, grouped by what they describe."""

from typing import Any, NamedTuple


class Owners(NamedTuple):
    """Whose keys a query reads, and how many of their rows it sees."""

    any_alignment = ("starts_ptr", "count_ptr", "table_ptr", "among_ptr")

    starts_ptr: Any  # first query of each request
    count_ptr: Any  # per query: rows, or with a ratio the position of its token
    table_ptr: Any  # the block table
    table_line: Any
    requests: Any  # requests or sequences
    tokens: Any  # queries of a sequence
    capacity: Any  # most rows that a query sees
    ratio: Any  # tokens per row; 0: counts are rows
    among_ptr: Any  # blocks that a query searches; `among` of them are listed
    among_line: Any
    among: Any


class IndexQueries(NamedTuple):
    """Queries [first, end) with their heads and weights. Strides of q are in units of 16 bytes."""

    any_alignment = ("weights_ptr", "scales_ptr")

    ptr: Any
    weights_ptr: Any
    scales_ptr: Any  # scales of FP4 queries
    first: Any
    end: Any
    heads: Any
    dims: Any
    stride_qn: Any
    stride_qh: Any
    stride_wn: Any
    stride_wh: Any
    stride_sn: Any
    stride_sh: Any
    spread: Any  # FP4 in boxes: whether the tiles of a CTA are as far apart as there are CTAs, or neighbours


class IndexKeys(NamedTuple):
    """Rows in pages, or one sequence after the other. Strides are in units of 16 bytes."""

    ptr: Any
    pages: Any
    page_rows: Any
    page_stride: Any
    row_stride: Any
    inverse: Any  # ceil(2^shift / page_rows)
    shift: Any


class IndexScores(NamedTuple):
    """fp32 scores, and the greatest of every GROUP of them, and of every BLOCK; line 0 is that of the first query."""

    ptr: Any
    line: Any
    maxima_ptr: Any
    maxima_line: Any
    blocks_ptr: Any
    blocks_line: Any
    counts_ptr: Any  # int32 [queries, 2]: 0 for KeyLists
    counted: Any  # whether there are KeyLists


class TablePages(NamedTuple):
    """Pages of the pool, to turn rows of a request into rows of the pool by a block table."""

    count: Any
    rows: Any


class TopKLists(NamedTuple):
    """Outputs for the chosen rows and their scores."""

    any_alignment = ("ptr", "scores_ptr")

    ptr: Any
    line: Any
    scores_ptr: Any
    scores_line: Any
    want_scores: Any
    topk: Any
    pages: TablePages


class BlockLists(NamedTuple):
    """Output for the kept blocks, and the most that are kept."""

    any_alignment = ("ptr",)

    ptr: Any
    line: Any
    most: Any


class KeyLists(NamedTuple):
    """Lists of row and block keys, for queries from `first` on; `counts` has their lengths. Also memory for the keys
    that each share keeps. topk rows and `most` blocks are wanted."""

    first: Any
    counts_ptr: Any
    rows_ptr: Any
    rows_line: Any
    blocks_ptr: Any
    blocks_line: Any
    keep_ptr: Any
    keep_blocks_ptr: Any
    topk: Any
    most: Any


class Chosen(NamedTuple):
    """Items that a round keeps, for queries from `first` on."""

    first: Any
    kept_ptr: Any
    kept_size: Any
    numbers_ptr: Any  # numbers of what is kept; in index_choose: numbers of groups, before


class ScoreSource(NamedTuple):
    """Scores to choose from; `line` leads from one query's to the next. For index_select: the items of a line and,
    after its first round, their numbers."""

    any_alignment = ("numbers_ptr",)

    ptr: Any
    line: Any
    maxima_ptr: Any
    items: Any
    numbers_ptr: Any
