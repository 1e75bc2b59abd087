"""The lightning indexer as two kernels, in Triton itself: one source for every architecture.

    index_scores   score(n, s) = factor * sum_h weights[n, h] * relu(q[n, h] . k[s])   -> fp32 [queries, capacity]
    index_select   the topk best of a piece of a query's scores; the last round gives them in falling order

A line of scores longer than one piece is selected in rounds: the best of every piece, then the best of those. Of equal
scores the lower row wins in every round, so in the end. There is no scan: tl.cumsum of 16384 items costs more than all
else here together.

In the product, keys are the rows and heads the columns: the sum over heads stays within few lanes of a warp.
"""

import triton
import triton.language as tl

# Whose keys a query reads: there is one sequence; a batch of sequences with so many tokens each; pages by block table,
# with a line for every query; pages by block table, with a line for every request (starts).
ONE, BATCH, OWN, STARTS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
FOREVER = tl.constexpr(2**31 - 1)
ABSENT = tl.constexpr(-(2**31))  # an ordered score below that of -inf


@triton.jit
def rows_seen(query, count_ptr, ratio, capacity, mask):
    """Rows that a query sees. ratio 0: the count itself is given, else the position of its token."""
    count = tl.load(count_ptr + query, mask=mask, other=-1).to(tl.int64)
    count = tl.where(ratio > 0, (count + 1) // tl.maximum(ratio, 1), count)
    return tl.minimum(tl.maximum(count, 0), capacity).to(tl.int32)


@triton.jit
def relu(x):
    """NaN stays NaN."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def owner(query, starts_ptr, requests, tokens, HOW: tl.constexpr):
    """(the sequence that a query belongs to, where the next one begins); `requests` past the last one."""
    if HOW == ONE:
        sequence = query * 0
        end = FOREVER + query * 0
    elif HOW == BATCH:
        sequence = query // tokens
        end = (sequence + 1) * tokens
    elif HOW == OWN:
        sequence = query
        end = query + 1
    else:
        low = query * 0
        high = requests + 1
        while low < high:  # how many start at or before the query
            middle = (low + high) // 2
            if tl.load(starts_ptr + middle) <= query:
                low = middle + 1
            else:
                high = middle
        inside = (low > 0) & (low <= requests)
        end = tl.load(starts_ptr + tl.minimum(low, requests), mask=low <= requests, other=FOREVER)
        # Starts that are not right must not stop the walk over the queries.
        end = tl.maximum(end, query + 1)
        sequence = tl.where(inside, low - 1, requests)
    return sequence, end


@triton.jit
def score_rows(first, last, at_once, sequence, query, seen, q, w, factor, split, splits, k_ptr, table_ptr, scores_ptr,
               dims, pages, page_rows, page_stride, row_stride, table_line, scores_line,
               HOW: tl.constexpr, QUERIES: tl.constexpr, HEADS: tl.constexpr, DIMS: tl.constexpr,
               WHOLE: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """The scores of the queries first .. last - 1, of one sequence; q [DIMS, QUERIES * HEADS]."""
    seen = tl.where((query >= first) & (query < last), seen, 0)
    most = tl.max(seen, 0)
    tiles = (most + ROWS - 1) // ROWS
    each = (tiles + splits - 1) // splits
    column = tl.arange(0, DIMS)
    for tile in range(split * each, tl.minimum((split + 1) * each, tiles)):
        row = tile * ROWS + tl.arange(0, ROWS)
        there = row < most
        if HOW == ONE or HOW == BATCH:
            at = sequence.to(tl.int64) * page_stride + row.to(tl.int64) * row_stride
        else:
            page = tl.load(table_ptr + sequence.to(tl.int64) * table_line + row // page_rows, mask=there, other=-1)
            there &= (page >= 0) & (page < pages)
            at = page.to(tl.int64) * page_stride + (row % page_rows).to(tl.int64) * row_stride
        here = there[:, None]
        if not WHOLE:
            here = here & (column < dims)[None, :]
        k = tl.load(k_ptr + at[:, None] * 8 + column[None, :], mask=here, other=0.0)
        each_head = relu(tl.dot(k, q)) * w[None, :]
        total = tl.sum(tl.reshape(each_head, [ROWS, QUERIES, HEADS]), 2)  # [ROWS, QUERIES]
        total = tl.where(there[:, None], total * factor, -float("inf"))
        to = scores_ptr + (query - at_once).to(tl.int64)[None, :] * scores_line + row[:, None]
        tl.store(to, total, mask=row[:, None] < seen[None, :])


@triton.jit(do_not_specialize=[
    "first_query", "queries", "heads", "dims", "capacity", "ratio", "tokens", "requests", "pages", "page_rows",
    "page_stride", "row_stride", "table_line", "stride_qn", "stride_qh", "stride_wn", "stride_wh", "scores_line",
])  # fmt: skip
def index_scores(q_ptr, k_ptr, weights_ptr, count_ptr, table_ptr, starts_ptr, scores_ptr, factor, first_query, queries,
                 heads, dims, capacity, ratio, tokens, requests, pages, page_rows, page_stride, row_stride, table_line,
                 stride_qn, stride_qh, stride_wn, stride_wh, scores_line, HOW: tl.constexpr, QUERIES: tl.constexpr,
                 HEADS: tl.constexpr, DIMS: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """One program: QUERIES neighbouring queries and a share of the rows that they see.

    Strides of q and k are in units of 8 elements. Line n of the scores is that of query first_query + n; only what a
    query sees is written.
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
    here = given[:, None]
    if not WHOLE:
        here = here & (dim < dims)[None, :]
    q = tl.load(q_ptr + (n * stride_qn + head * stride_qh)[:, None] * 8 + dim[None, :], mask=here, other=0.0)
    q = tl.trans(q)
    w = tl.load(weights_ptr + n * stride_wn + head * stride_wh, mask=given, other=0.0).to(tl.float32)
    query = begin + tl.arange(0, QUERIES)
    seen = rows_seen(query, count_ptr, ratio, capacity, query < stop)
    if QUERIES == 1:
        sequence, end = owner(begin, starts_ptr, requests, tokens, HOW)
        if (sequence < requests) & (begin < stop):
            score_rows(begin, stop, first_query, sequence, query, seen, q, w, factor, split, splits, k_ptr,
                       table_ptr, scores_ptr, dims, pages, page_rows, page_stride, row_stride, table_line, scores_line,
                       HOW, QUERIES, HEADS, DIMS, WHOLE, ROWS)  # fmt: skip
    else:
        first = begin
        while first < stop:  # a block may lie across sequences
            sequence, end = owner(first, starts_ptr, requests, tokens, HOW)
            last = tl.minimum(end, stop)
            if sequence < requests:
                score_rows(first, last, first_query, sequence, query, seen, q, w, factor, split, splits, k_ptr,
                           table_ptr, scores_ptr, dims, pages, page_rows, page_stride, row_stride, table_line,
                           scores_line, HOW, QUERIES, HEADS, DIMS, WHOLE, ROWS)  # fmt: skip
            first = last


@triton.jit
def threshold(ordered, wanted, present):
    """The least value that is chosen, of more than `wanted` values; of those equal to it there may be too many.

    By halving the interval of the values; the end is reached as soon as one parts exactly `wanted` from the rest.
    """
    low = tl.min(tl.where(ordered == ABSENT, FOREVER, ordered), 0)
    high = tl.max(ordered, 0) + 1
    at_least = present  # values >= low; there are fewer than `wanted` values >= high
    while (at_least != wanted) & (low + 1 != high):
        middle = (low & high) + ((low ^ high) >> 1)  # halfway, where the sum would not fit
        count = tl.sum((ordered >= middle).to(tl.int32), 0)
        enough = count >= wanted
        at_least = tl.where(enough, count, at_least)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def first_ones(equal, number, room):
    """The number up to which `room` of those that are `equal` are found; there are more."""
    low = -1
    high = tl.max(tl.where(equal, number, -1), 0)
    count = -1
    while (count != room) & (low + 1 < high):
        middle = low + (high - low) // 2
        count = tl.sum((equal & (number <= middle)).to(tl.int32), 0)
        enough = count >= room
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle)
    return high


@triton.jit
def falling(key, SIZE: tl.constexpr):
    """key [SIZE] sorted, the greatest first: a bitonic network as a loop. tl.sort, which unrolls it, takes 10 s to
    compile at 1024 keys."""
    place = tl.arange(0, SIZE)
    size = 2
    while size <= SIZE:
        apart = size // 2
        while apart > 0:
            other = tl.gather(key, place ^ apart, 0)
            first = ((place & apart) == 0) == ((place & size) == 0)
            key = tl.where(first == (key > other), key, other)
            apart = apart // 2
        size *= 2
    return key


@triton.jit(do_not_specialize=[
    "first_query", "items", "topk", "capacity", "ratio", "tokens", "requests", "pages", "page_rows", "table_line",
    "source_line", "out_line", "scores_line", "want_scores",
])  # fmt: skip
def index_select(source_ptr, numbers_ptr, count_ptr, kept_ptr, kept_numbers_ptr, used_ptr, out_ptr, scores_ptr,
                 table_ptr, starts_ptr, first_query, items, topk, capacity, ratio, tokens, requests, pages, page_rows,
                 table_line, source_line, out_line, scores_line, want_scores, HOW: tl.constexpr, FIRST: tl.constexpr,
                 LAST: tl.constexpr, SIZE: tl.constexpr, KEPT: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """One program: the best of SIZE items of a query.

    source  FIRST: fp32 scores [queries, source_line], an item's number is its place. Else: ordered scores with
            numbers beside them; ABSENT = nothing there.
    kept    [queries, pieces, KEPT]: ordered scores and numbers of the chosen ones, in any order; then ABSENT.
    out     LAST: [queries, topk], falling; row numbers of the pool where there is a block table.
    """
    n = tl.program_id(0)
    piece = tl.program_id(1)
    query = first_query + n
    sequence, end = owner(query, starts_ptr, requests, tokens, HOW)
    item = piece * SIZE + tl.arange(0, SIZE)
    source = n.to(tl.int64) * source_line + item
    if FIRST:
        seen = rows_seen(query, count_ptr, ratio, capacity, sequence < requests)
        x = tl.load(source_ptr + source, mask=item < seen, other=0.0)
        x = tl.where(x == x, x, -float("inf")) + 0.0  # NaN is the least; -0 is 0
        bits = x.to(tl.int32, bitcast=True)
        ordered = tl.where(item < seen, bits ^ ((bits >> 31) & 0x7FFFFFFF), ABSENT)
        number = item
    else:
        ordered = tl.load(source_ptr + source, mask=item < items, other=ABSENT)
        number = tl.load(numbers_ptr + source, mask=item < items, other=0)
    present = tl.sum((ordered != ABSENT).to(tl.int32), 0)
    wanted = tl.minimum(present, topk)
    low = ABSENT + 1  # all that are there
    if present > wanted:
        low = threshold(ordered, wanted, present)
    greater = ordered > low
    equal = ordered == low
    room = wanted - tl.sum(greater.to(tl.int32), 0)
    same = tl.sum(equal.to(tl.int32), 0)
    highest = FOREVER  # of those equal to the threshold the first ones, as many as there is room for
    if same > room:
        highest = first_ones(equal, number, room)
    taken = greater | (equal & (number <= highest))
    # Where they are kept is no matter: they are sorted in the end, and rounds go by their numbers.
    program = n.to(tl.int64) * tl.num_programs(1) + piece
    keep = program * KEPT
    tl.store(used_ptr + program, 0)
    tl.debug_barrier()
    one = taken.to(tl.int32)
    to = keep + tl.atomic_add(used_ptr + program + item * 0, one, mask=taken, sem="relaxed", scope="cta")
    tl.store(kept_ptr + to, ordered, mask=taken)
    tl.store(kept_numbers_ptr + to, number, mask=taken)
    place = tl.arange(0, KEPT)
    if not LAST:
        tl.store(kept_ptr + keep + place, place * 0 + ABSENT, mask=place >= wanted)
    else:
        tl.debug_barrier()  # the same CTA reads what it wrote
        chosen = place < wanted
        kept = tl.load(kept_ptr + keep + place, mask=chosen, other=ABSENT)
        number = tl.load(kept_numbers_ptr + keep + place, mask=chosen, other=0)
        key = falling((kept.to(tl.int64) << 32) | (FOREVER - number).to(tl.int64), KEPT)
        kept = (key >> 32).to(tl.int32)
        row = FOREVER - (key & 0x7FFFFFFF).to(tl.int32)
        if (HOW == OWN) | (HOW == STARTS):
            line = tl.minimum(sequence, requests - 1).to(tl.int64) * table_line
            page = tl.load(table_ptr + line + row // page_rows, mask=chosen, other=-1)
            row = tl.where((page >= 0) & (page < pages), page * page_rows + row % page_rows, -1)
        row = tl.where(chosen, row, -1)
        to = query.to(tl.int64) * out_line + place
        tl.store(out_ptr + to, row, mask=place < topk)
        score = (kept ^ ((kept >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        score = tl.where(row >= 0, score, -float("inf"))
        to_score = query.to(tl.int64) * scores_line + place
        tl.store(scores_ptr + to_score, score, mask=(place < topk) & (want_scores != 0))
        if WIDTH > KEPT:  # lists wider than there are rows
            rest = KEPT + tl.arange(0, WIDTH)
            there = rest < topk
            tl.store(out_ptr + query.to(tl.int64) * out_line + rest, rest * 0 - 1, mask=there)
            tl.store(scores_ptr + query.to(tl.int64) * scores_line + rest, rest * 0.0 - float("inf"),
                     mask=there & (want_scores != 0))  # fmt: skip
