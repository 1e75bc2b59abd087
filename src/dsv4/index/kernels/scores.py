"""Index scores as a Triton kernel for every architecture, and what all kernels of the indexer share.

    score(n, s) = factor * scale[s] * sum_h weights[n, h] * relu(q[n, h] . k[s])   -> fp32 [queries, scores_line]

Keys are bf16 or fp16, without scales, or e4m3 or FP4 in the pages of caches/index_keys.py. The kernel also writes the
greatest score of every GROUP of neighbouring rows, for choose.py, and of every BLOCK, for blocks.py.

In the product, keys are the rows and heads the columns, so the sum over heads stays within few lanes of a warp.

FP4 becomes e4m3: a key's four scales are powers of two, and so are their quotients by 2^-6 times the greatest.
e2m1 times 2^-5 .. 2^6 is exact in e4m3, and never subnormal; below that, it becomes 0. Even and odd dims,
the low and the high halves of bytes, are two products.
"""

import triton
import triton.language as tl

from dsv4.index import sizes

# The keys that a query reads: those of the only sequence; of its sequence in a batch with equal token counts; pages by
# block table, one line per query; pages by block table, one line per request (starts).
ONE, BATCH, OWN, STARTS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
FOREVER = tl.constexpr(2**31 - 1)
GROUP, BLOCK = tl.constexpr(sizes.GROUP), tl.constexpr(sizes.BLOCK)
# Types of q and k: one type, in which they are multiplied; FP4 keys with e4m3 queries; both FP4.
SAME, FP4_KEYS, FP4_BOTH = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# Exponents of the powers of two by which codes are multiplied: under the greatest scale of a key, and the least one
HIGHEST, LOWEST_SHIFT = tl.constexpr(6), tl.constexpr(-5)


@triton.jit
def visible_rows(query, owners, mask, BRANCH: tl.constexpr = True):
    """Return how many rows a query sees. ratio 0: this count is given, else the position of the token. BRANCH: no
    division, which is slow, where it is given. But behind a branch Triton does not pipeline index_scores' loop."""
    count = tl.load(owners.count_ptr + query, mask=mask, other=-1).to(tl.int64)
    if not BRANCH:
        count = tl.where(owners.ratio > 0, (count + 1) // tl.maximum(owners.ratio, 1), count)
    elif owners.ratio > 0:
        count = (count + 1) // owners.ratio
    return tl.minimum(tl.maximum(count, 0), owners.capacity).to(tl.int32)


@triton.jit
def clear_counts(queries, scores, QUERIES: tl.constexpr):
    """Clear the counts of gather.py's lists, in the first CTA of the queries, so before that grid begins."""
    if (tl.program_id(1) == 0) & (scores.counted != 0):
        for i in tl.static_range(2 * QUERIES):
            at = tl.program_id(0) * 2 * QUERIES + i
            tl.store(scores.counts_ptr + at, 0, mask=at < 2 * (queries.end - queries.first))


@triton.jit
def visible_columns(visible, owners, AMONG: tl.constexpr):
    """Return the number of scores of a query that sees this many rows."""
    if AMONG:
        visible = tl.minimum((visible + BLOCK - 1) // BLOCK, owners.among) * BLOCK
    return visible


@triton.jit
def row_of(column, query, owners, mask, AMONG: tl.constexpr):
    """Return the row that a score belongs to; below 0 if there is none."""
    if AMONG:
        line = owners.among_ptr + query.to(tl.int64) * owners.among_line
        block = tl.load(line + column // BLOCK, mask=mask, other=-1)
        # The address of a number past all rows must not overflow.
        row = tl.minimum(block, FOREVER // BLOCK - 1) * BLOCK + column % BLOCK
    else:
        row = tl.where(mask, column, -1)
    return row


@triton.jit
def greatest_of_four(word):
    """Return the greatest of four ue8m0."""
    first = tl.maximum(word & 255, (word >> 8) & 255)
    return tl.maximum(first, tl.maximum((word >> 16) & 255, (word >> 24) & 255))


@triton.jit
def power_of_two(exponent):
    """Convert a ue8m0 to fp32."""
    bits = tl.where(exponent == 0, 0x400000, exponent << 23)
    return tl.where(exponent == 255, float("nan"), bits.to(tl.float32, bitcast=True))


@triton.jit
def aligned(code, word, highest, group):
    """Return e4m3 of e2m1 codes whose scale is number `group` of a word of four, relative to the greatest of them."""
    shift = ((word >> (group * 8)) & 255) - highest + HIGHEST
    size = code & 7
    bits = ((126 + (size >> 1)) << 23) | ((size & 1) << 22)
    value = tl.where(size < 2, size.to(tl.float32) * 0.5, bits.to(tl.float32, bitcast=True))
    value *= tl.where(shift < LOWEST_SHIFT, 0, (shift + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(code < 8, value, -value).to(tl.float8e4nv)


@triton.jit
def bf16(x):
    """Round to bf16."""
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def relu(x):
    """Return max(x, 0); NaN stays NaN."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def owner(query, owners, OWNER: tl.constexpr):
    """Return (the sequence of a query, where the next one begins); the sequence is `requests` past the last one."""
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
        # Wrong starts must not stop the loop over the queries.
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
    q_odd,
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
    FP4: tl.constexpr,
    AMONG: tl.constexpr,
    BLOCKS: tl.constexpr,
    BF16: tl.constexpr,
):
    """Compute the scores of the queries first .. last - 1, of one sequence; q [DIMS, QUERIES * HEADS]."""
    visible = tl.where((query >= first) & (query < last), visible, 0)
    most = tl.max(visible, 0)
    columns = visible_columns(most, owners, AMONG)
    tiles = (columns + ROWS - 1) // ROWS
    split, splits = tl.program_id(1), tl.num_programs(1)
    each = (tiles + splits - 1) // splits
    dim = tl.arange(0, DIMS)
    VEC: tl.constexpr = 128 // q.dtype.primitive_bitwidth
    for tile in range(split * each, tl.minimum((split + 1) * each, tiles)):
        column = tile * ROWS + tl.arange(0, ROWS)
        row = row_of(column, first, owners, column < columns, AMONG)
        there = (row >= 0) & (row < most)
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
        # Rows that do not exist are not read: they become zeros, and their scale NaN.
        if FP4 == SAME:
            if not WHOLE:
                here = here & (dim < queries.dims)[None, :]
            k = tl.load(k_ptr + at[:, None] * VEC + dim[None, :], mask=here, other=0.0)
            scale = tl.where(there, 1.0, float("nan"))
            if VEC == 16:
                scales_ptr = k_ptr.to(tl.pointer_type(tl.float32), bitcast=True)
                scale_at = page.to(tl.int64) * keys.page_stride * 4 + keys.page_rows * 32 + row % keys.page_rows
                scale = tl.load(scales_ptr + scale_at, mask=there, other=float("nan"))
            product = tl.dot(k, q)
        else:
            byte = tl.arange(0, DIMS // 2)
            k = tl.load(k_ptr + at[:, None] * VEC + byte[None, :], mask=here, other=0).to(tl.int32)
            scales_ptr = k_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
            scale_at = page.to(tl.int64) * keys.page_stride * 4 + keys.page_rows * 16 + row % keys.page_rows
            word = tl.load(scales_ptr + scale_at, mask=there, other=-1)  # NaN
            highest = greatest_of_four(word)
            low = aligned(k & 15, word[:, None], highest[:, None], byte[None, :] // 16)
            high = aligned(k >> 4, word[:, None], highest[:, None], byte[None, :] // 16)
            product = tl.dot(high, q_odd, tl.dot(low, q))
            scale = power_of_two(highest)
        if BF16:
            each_head = bf16(relu(bf16(product)) * w[None, :])
            total = bf16(tl.sum(tl.reshape(each_head, [ROWS, QUERIES, HEADS]), 2)) * (scale * factor)[:, None]
        else:
            each_head = relu(product) * w[None, :]
            total = tl.sum(tl.reshape(each_head, [ROWS, QUERIES, HEADS]), 2) * (scale * factor)[:, None]
        total = tl.where(total == total, total, -float("inf")) + 0.0  # [ROWS, QUERIES]
        total = tl.where((row >= 0)[:, None] & (row[:, None] < visible[None, :]), total, -float("inf"))
        line = (query - queries.first).to(tl.int64)[None, :]
        limit = visible_columns(visible, owners, AMONG)
        written = (limit + GROUP - 1) // GROUP * GROUP
        tl.store(scores.ptr + line * scores.line + column[:, None], total, mask=column[:, None] < written[None, :])
        greatest = tl.reshape(total, [ROWS // GROUP, GROUP, QUERIES])
        group = tile * (ROWS // GROUP) + tl.arange(0, ROWS // GROUP)[:, None]
        tl.store(
            scores.maxima_ptr + line * scores.maxima_line + group,
            tl.max(greatest, 1),
            mask=group * GROUP < limit[None, :],
        )
        if BLOCKS:
            block = tile * (ROWS // BLOCK) + tl.arange(0, ROWS // BLOCK)[:, None]
            tl.store(
                scores.blocks_ptr + line * scores.blocks_line + block,
                tl.max(tl.reshape(total, [ROWS // BLOCK, BLOCK, QUERIES]), 1),
                mask=block * BLOCK < limit[None, :],
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
    FP4: tl.constexpr,
    AMONG: tl.constexpr,
    BLOCKS: tl.constexpr,
    BF16: tl.constexpr,
):
    """Score a share of the rows that QUERIES neighbouring queries see.

    Strides of q and k are in units of 16 bytes. Line n of the scores is that of query first + n; only what a
    query sees is written, and -inf up to a whole group. AMONG: scores of the rows of listed blocks, in their order, of
    one query. BLOCKS: also write the greatest scores of blocks. BF16: round as the reference model does.
    """
    VEC: tl.constexpr = 128 // queries.ptr.dtype.element_ty.primitive_bitwidth
    clear_counts(queries, scores, QUERIES)
    k_ptr = keys.ptr
    if FP4 == SAME:
        k_ptr = keys.ptr.to(queries.ptr.dtype, bitcast=True)
    begin = queries.first + tl.program_id(0) * QUERIES
    stop = tl.minimum(begin + QUERIES, queries.end)
    column = tl.arange(0, QUERIES * HEADS)
    dim = tl.arange(0, DIMS)
    n = (begin + column // HEADS).to(tl.int64)
    head = column % HEADS
    given = (n < stop) & (head < queries.heads)
    here = given[:, None]
    line = n * queries.stride_qn + head * queries.stride_qh
    weight_ptr = queries.weights_ptr + n * queries.stride_wn + head * queries.stride_wh
    w = tl.load(weight_ptr, mask=given, other=0.0).to(tl.float32)
    if BF16:
        w = bf16(w)
    if FP4 == FP4_BOTH:
        byte = tl.arange(0, DIMS // 2)
        codes = tl.load(queries.ptr + line[:, None] * VEC + byte[None, :], mask=here, other=0).to(tl.int32)
        scale_ptr = queries.scales_ptr + n * queries.stride_sn + head * queries.stride_sh
        word = tl.load(scale_ptr, mask=given, other=0)
        highest = greatest_of_four(word)
        q = tl.trans(aligned(codes & 15, word[:, None], highest[:, None], byte[None, :] // 16))
        q_odd = tl.trans(aligned(codes >> 4, word[:, None], highest[:, None], byte[None, :] // 16))
        w *= power_of_two(highest) * 0.015625  # 2^-HIGHEST
    elif FP4 == FP4_KEYS:
        even = tl.arange(0, DIMS // 2) * 2
        q = tl.trans(tl.load(queries.ptr + line[:, None] * VEC + even[None, :], mask=here, other=0.0))
        q_odd = tl.trans(tl.load(queries.ptr + line[:, None] * VEC + even[None, :] + 1, mask=here, other=0.0))
    else:
        if not WHOLE:
            here = here & (dim < queries.dims)[None, :]
        q = tl.trans(tl.load(queries.ptr + line[:, None] * VEC + dim[None, :], mask=here, other=0.0))
        q_odd = q
    query = begin + tl.arange(0, QUERIES)
    visible = visible_rows(query, owners, query < stop, False)
    if QUERIES == 1:
        sequence, end = owner(begin, owners, OWNER)
        if (sequence < owners.requests) & (begin < stop):
            score_rows(begin, stop, sequence, query, visible, q, q_odd, w, factor, k_ptr, queries, keys, owners, scores,
                       OWNER, QUERIES, HEADS, DIMS, WHOLE, ROWS, FP4, AMONG, BLOCKS, BF16)  # fmt: skip
    else:
        first = begin
        while first < stop:  # a block may lie across sequences
            sequence, end = owner(first, owners, OWNER)
            last = tl.minimum(end, stop)
            if sequence < owners.requests:
                score_rows(first, last, sequence, query, visible, q, q_odd, w, factor, k_ptr, queries, keys, owners,
                           scores, OWNER, QUERIES, HEADS, DIMS, WHOLE, ROWS, FP4, AMONG, BLOCKS, BF16)  # fmt: skip
            first = last
