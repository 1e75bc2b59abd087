"""Index scores in Triton itself, for every architecture; and what all kernels of the indexer share.

    score(n, s) = factor * scale[s] * sum_h weights[n, h] * relu(q[n, h] . k[s])   -> fp32 [queries, scores_line]

Keys are bf16 or fp16, without scales, or e4m3 in the pages of caches/index_keys.py. And, with the scores, the greatest
one of every GROUP of neighbouring rows, for choose.py.

In the product, keys are the rows and heads the columns: the sum over heads stays within few lanes of a warp.
"""

import triton
import triton.language as tl

from dsv4.index import sizes

# Whose keys a query reads: there is one sequence; a batch of sequences with so many tokens each; pages by block table,
# with a line for every query; pages by block table, with a line for every request (starts).
ONE, BATCH, OWN, STARTS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
FOREVER = tl.constexpr(2**31 - 1)
GROUP = tl.constexpr(sizes.GROUP)


@triton.jit
def visible_rows(query, owners, mask):
    """Rows that a query sees. ratio 0: the count itself is given, else the position of its token."""
    count = tl.load(owners.count_ptr + query, mask=mask, other=-1).to(tl.int64)
    count = tl.where(owners.ratio > 0, (count + 1) // tl.maximum(owners.ratio, 1), count)
    return tl.minimum(tl.maximum(count, 0), owners.capacity).to(tl.int32)


@triton.jit
def relu(x):
    """NaN stays NaN."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def owner(query, owners, OWNER: tl.constexpr):
    """(the sequence that a query belongs to, where the next one begins); `requests` past the last one."""
    if OWNER == ONE:
        sequence = query * 0
        end = FOREVER + query * 0
    elif OWNER == BATCH:
        sequence = query // owners.tokens
        end = (sequence + 1) * owners.tokens
    elif OWNER == OWN:
        sequence = query
        end = query + 1
    else:
        low = query * 0
        high = owners.requests + 1
        while low < high:  # how many start at or before the query
            middle = (low + high) // 2
            if tl.load(owners.starts_ptr + middle) <= query:
                low = middle + 1
            else:
                high = middle
        inside = (low > 0) & (low <= owners.requests)
        end = tl.load(owners.starts_ptr + tl.minimum(low, owners.requests), mask=low <= owners.requests, other=FOREVER)
        # Starts that are not right must not stop the walk over the queries.
        end = tl.maximum(end, query + 1)
        sequence = tl.where(inside, low - 1, owners.requests)
    return sequence, end


@triton.jit
def score_rows(
    first,
    last,
    sequence,
    query,
    visible,
    q,
    w,
    factor,
    k_ptr,
    queries,
    keys,
    owners,
    scores,
    OWNER: tl.constexpr,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The scores of the queries first .. last - 1, of one sequence; q [DIMS, QUERIES * HEADS]."""
    visible = tl.where((query >= first) & (query < last), visible, 0)
    most = tl.max(visible, 0)
    tiles = (most + ROWS - 1) // ROWS
    split, splits = tl.program_id(1), tl.num_programs(1)
    each = (tiles + splits - 1) // splits
    column = tl.arange(0, DIMS)
    VEC: tl.constexpr = 128 // q.dtype.primitive_bitwidth
    for tile in range(split * each, tl.minimum((split + 1) * each, tiles)):
        row = tile * ROWS + tl.arange(0, ROWS)
        there = row < most
        if OWNER == ONE or OWNER == BATCH:
            at = sequence.to(tl.int64) * keys.page_stride + row.to(tl.int64) * keys.row_stride
        else:
            page = tl.load(
                owners.table_ptr + sequence.to(tl.int64) * owners.table_line + row // keys.page_rows,
                mask=there,
                other=-1,
            )
            there &= (page >= 0) & (page < keys.pages)
            at = page.to(tl.int64) * keys.page_stride + (row % keys.page_rows).to(tl.int64) * keys.row_stride
        here = there[:, None]
        if not WHOLE:
            here = here & (column < queries.dims)[None, :]
        # Of what is not there nothing is read: zeros, whose scale is NaN.
        k = tl.load(k_ptr + at[:, None] * VEC + column[None, :], mask=here, other=0.0)
        scale = tl.where(there, 1.0, float("nan"))
        if VEC == 16:
            scales_ptr = k_ptr.to(tl.pointer_type(tl.float32), bitcast=True)
            scale_at = page.to(tl.int64) * keys.page_stride * 4 + keys.page_rows * 32 + row % keys.page_rows
            scale = tl.load(scales_ptr + scale_at, mask=there, other=float("nan"))
        each_head = relu(tl.dot(k, q)) * w[None, :]
        total = tl.sum(tl.reshape(each_head, [ROWS, QUERIES, HEADS]), 2) * (scale * factor)[:, None]
        total = tl.where(total == total, total, -float("inf")) + 0.0  # [ROWS, QUERIES]
        here = row[:, None] < visible[None, :]
        line = (query - queries.first).to(tl.int64)[None, :]
        total = tl.where(here, total, -float("inf"))
        written = (visible + GROUP - 1) // GROUP * GROUP
        tl.store(scores.ptr + line * scores.line + row[:, None], total, mask=row[:, None] < written[None, :])
        greatest = tl.reshape(total, [ROWS // GROUP, GROUP, QUERIES])
        group = tile * (ROWS // GROUP) + tl.arange(0, ROWS // GROUP)[:, None]
        tl.store(
            scores.maxima_ptr + line * scores.maxima_line + group,
            tl.max(greatest, 1),
            mask=group * GROUP < visible[None, :],
        )


@triton.jit
def index_scores(
    queries,
    keys,
    owners,
    scores,
    factor,
    OWNER: tl.constexpr,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program: QUERIES neighbouring queries and a share of the rows that they see.

    Strides of q and k are in units of 16 bytes. Line n of the scores is that of query first + n; only what a
    query sees is written, and -inf up to a whole group.
    """
    VEC: tl.constexpr = 128 // queries.ptr.dtype.element_ty.primitive_bitwidth
    k_ptr = keys.ptr.to(queries.ptr.dtype, bitcast=True)
    begin = queries.first + tl.program_id(0) * QUERIES
    stop = tl.minimum(begin + QUERIES, queries.end)
    column = tl.arange(0, QUERIES * HEADS)
    dim = tl.arange(0, DIMS)
    n = (begin + column // HEADS).to(tl.int64)
    head = column % HEADS
    given = (n < stop) & (head < queries.heads)
    here = given[:, None]
    if not WHOLE:
        here = here & (dim < queries.dims)[None, :]
    line = n * queries.stride_qn + head * queries.stride_qh
    q = tl.load(queries.ptr + line[:, None] * VEC + dim[None, :], mask=here, other=0.0)
    q = tl.trans(q)
    weight_ptr = queries.weights_ptr + n * queries.stride_wn + head * queries.stride_wh
    w = tl.load(weight_ptr, mask=given, other=0.0).to(tl.float32)
    query = begin + tl.arange(0, QUERIES)
    visible = visible_rows(query, owners, query < stop)
    if QUERIES == 1:
        sequence, end = owner(begin, owners, OWNER)
        if (sequence < owners.requests) & (begin < stop):
            score_rows(begin, stop, sequence, query, visible, q, w, factor, k_ptr, queries, keys, owners, scores, OWNER,
                       QUERIES, HEADS, DIMS, WHOLE, ROWS)  # fmt: skip
    else:
        first = begin
        while first < stop:  # a block may lie across sequences
            sequence, end = owner(first, owners, OWNER)
            last = tl.minimum(end, stop)
            if sequence < owners.requests:
                score_rows(first, last, sequence, query, visible, q, w, factor, k_ptr, queries, keys, owners, scores,
                           OWNER, QUERIES, HEADS, DIMS, WHOLE, ROWS)  # fmt: skip
            first = last
