"""Index scores of FP8 keys in Triton itself, for every architecture.

    score(n, s) = factor * scale[s] * sum_h weights[n, h] * relu(q[n, h] . k[s])   -> fp32 [queries, scores_line]

q and k are e4m3, k in the pages of dsv4.index.cache. Beside the scores, the greatest one of every GROUP of neighbouring
rows, for choose.py. In the product, keys are the rows and heads the columns, as in scores.py.
"""

import triton
import triton.language as tl

from dsv4.kernels.shared.index.scores import GROUP, owner, relu, rows_seen

DIMS = tl.constexpr(128)


@triton.jit
def score_rows(first, last, at_once, sequence, query, seen, q, w, factor, split, splits, k_ptr, table_ptr, scores_ptr,
               maxima_ptr, pages, page_rows, page_stride, table_line, scores_line, maxima_line,
               QUERIES: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """The scores of the queries first .. last - 1, of one sequence; q [DIMS, QUERIES * HEADS]."""
    seen = tl.where((query >= first) & (query < last), seen, 0)
    most = tl.max(seen, 0)
    tiles = (most + ROWS - 1) // ROWS
    each = (tiles + splits - 1) // splits
    column = tl.arange(0, DIMS)
    values_ptr = k_ptr.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    scales_ptr = k_ptr.to(tl.pointer_type(tl.float32), bitcast=True)
    for tile in range(split * each, tl.minimum((split + 1) * each, tiles)):
        row = tile * ROWS + tl.arange(0, ROWS)
        there = row < most
        page = tl.load(table_ptr + sequence.to(tl.int64) * table_line + row // page_rows, mask=there, other=-1)
        there &= (page >= 0) & (page < pages)
        place = row % page_rows
        at = page.to(tl.int64) * page_stride  # in units of 16 bytes
        # Of what is not there nothing is read: zeros, whose scale is NaN.
        k = tl.load(values_ptr + (at + place * 8)[:, None] * 16 + column[None, :], mask=there[:, None], other=0.0)
        scale = tl.load(scales_ptr + at * 4 + page_rows * 32 + place, mask=there, other=float("nan"))
        each_head = relu(tl.dot(k, q)) * w[None, :]
        total = tl.sum(tl.reshape(each_head, [ROWS, QUERIES, HEADS]), 2) * (scale * factor)[:, None]
        total = tl.where(total == total, total, -float("inf")) + 0.0  # [ROWS, QUERIES]
        here = row[:, None] < seen[None, :]
        line = (query - at_once).to(tl.int64)[None, :]
        tl.store(scores_ptr + line * scores_line + row[:, None], total, mask=here)
        greatest = tl.reshape(tl.where(here, total, -float("inf")), [ROWS // GROUP, GROUP, QUERIES])
        group = tile * (ROWS // GROUP) + tl.arange(0, ROWS // GROUP)[:, None]
        tl.store(maxima_ptr + line * maxima_line + group, tl.max(greatest, 1), mask=group * GROUP < seen[None, :])


@triton.jit(do_not_specialize=[
    "first_query", "queries", "heads", "capacity", "ratio", "tokens", "requests", "pages", "page_rows", "page_stride",
    "table_line", "stride_qn", "stride_qh", "stride_wn", "stride_wh", "scores_line", "maxima_line",
])  # fmt: skip
def index_scores_fp8(q_ptr, k_ptr, weights_ptr, count_ptr, table_ptr, starts_ptr, scores_ptr, maxima_ptr, factor,
                     first_query, queries, heads, capacity, ratio, tokens, requests, pages, page_rows, page_stride,
                     table_line, stride_qn, stride_qh, stride_wn, stride_wh, scores_line, maxima_line,
                     HOW: tl.constexpr, QUERIES: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """One program: QUERIES neighbouring queries and a share of the rows that they see.

    Strides of q and of pages are in units of 16 bytes. Line n of the scores is that of query first_query + n; only what
    a query sees is written.
    """
    begin = first_query + tl.program_id(0) * QUERIES
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    stop = tl.minimum(begin + QUERIES, queries)
    column = tl.arange(0, QUERIES * HEADS)
    dim = tl.arange(0, DIMS)
    n = (begin + column // HEADS).to(tl.int64)
    head = column % HEADS
    given = (n < stop) & (head < heads)
    q = tl.load(q_ptr + (n * stride_qn + head * stride_qh)[:, None] * 16 + dim[None, :], mask=given[:, None], other=0.0)
    q = tl.trans(q)
    w = tl.load(weights_ptr + n * stride_wn + head * stride_wh, mask=given, other=0.0).to(tl.float32)
    query = begin + tl.arange(0, QUERIES)
    seen = rows_seen(query, count_ptr, ratio, capacity, query < stop)
    first = begin
    while first < stop:  # a block may lie across sequences
        sequence, end = owner(first, starts_ptr, requests, tokens, HOW)
        last = tl.minimum(end, stop)
        if sequence < requests:
            score_rows(first, last, first_query, sequence, query, seen, q, w, factor, split, splits, k_ptr, table_ptr,
                       scores_ptr, maxima_ptr, pages, page_rows, page_stride, table_line, scores_line, maxima_line,
                       QUERIES, HEADS, ROWS)  # fmt: skip
        first = last
