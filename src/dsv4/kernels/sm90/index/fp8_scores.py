"""Index scores of FP8 keys on Hopper: score(n, s) = factor * scale[s] * sum_h weights[n, h] * relu(q[n, h] . k[s]).

q and k are e4m3, k in the pages of dsv4.index.cache. One CTA: QUERIES neighbouring queries, and a share of the rows
that they see, ROWS at a time. All warps do the same::

    copy      rows of tile i + STAGES - 1 by cp.async | scales of tile i + 1 and page numbers to registers
    product   S_j = K_i Q_j^T, wgmma, one per query   | keys are its rows, heads its columns
    sum       relu, times weights, over the heads     | of S_j while the tensor core makes S_j+1

and, beside the scores, the greatest one of every GROUP of neighbouring rows, from which kernels/shared/index/choose.py
knows where to look. GROUP rows are those of one warp in a product, so their maximum takes three shuffles.

Shared memory: Q [QUERIES][HEADS, 128], ring of K [STAGES][ROWS, 128], e4m3 with the 128-byte swizzle. A tile is
complete when every thread has waited for its own copies, made them visible to the tensor core (fence), and the CTA has
met at a barrier; the same barrier says that the products of the tile before are done, so its slot is free.
"""

from dsv4.kernels.compat import (
    async_copy,
    barrier,
    cp_async,
    fence_async_shared,
    gl,
    gluon,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from dsv4.kernels.shared.index.scores import GROUP, owner, relu, rows_seen

DIMS = gl.constexpr(128)


@gluon.constexpr_function
def lanes(warps):
    """16 bytes per thread, 8 threads for a row."""
    return gl.BlockedLayout([1, 16], [4, 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def product_layout(warps, heads):
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, heads, 32])


@gluon.jit
def page_of(row, inverse, shift):
    """row // rows of a page, for 0 <= row < 2^31, by the inverse that the host knows."""
    wide = row.to(gl.uint32, bitcast=True).to(gl.uint64) * inverse.to(gl.uint32, bitcast=True).to(gl.uint64)
    return (wide >> shift.to(gl.uint64)).to(gl.int32)


@gluon.jit
def pages_of(tile, most, line_ptr, inverse, shift, ROWS: gl.constexpr, L: gl.constexpr):
    """Page numbers of the rows of a tile in a layout, -1 past those that are seen."""
    row = tile * ROWS + gl.arange(0, ROWS, layout=L)
    return gl.load(line_ptr + page_of(row, inverse, shift), mask=row < most, other=-1)


@gluon.jit
def copy_tile(slot, tile, page, k_ptr, pages, page_rows, page_stride, inverse, shift, ROWS: gl.constexpr):
    """Rows of a tile -> slot [ROWS, 128], one group of copies; rows that are not there become zeros."""
    L: gl.constexpr = lanes(gl.num_warps())
    row = tile * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    place = row - page_of(row, inverse, shift) * page_rows
    there = (page >= 0) & (page < pages)
    at = page.to(gl.int64) * page_stride + place * 8  # in units of 16 bytes
    column = gl.arange(0, DIMS, layout=gl.SliceLayout(0, L))
    cp_async(slot, k_ptr + at[:, None] * 16 + column[None, :], mask=there[:, None])
    async_copy.commit_group()


@gluon.jit
def scales_at(tile, page, k_ptr, pages, page_rows, page_stride, inverse, shift, ROWS: gl.constexpr, L: gl.constexpr):
    """fp32 [ROWS]; NaN for rows that are not there, which are then chosen last."""
    row = tile * ROWS + gl.arange(0, ROWS, layout=L)
    place = row - page_of(row, inverse, shift) * page_rows
    there = (page >= 0) & (page < pages)
    at = page.to(gl.int64) * page_stride * 4 + page_rows * 32 + place
    return gl.load(k_ptr.to(gl.pointer_type(gl.float32), bitcast=True) + at, mask=there, other=float("nan"))


@gluon.jit
def score_rows(first, last, base, begin, sequence, seen, w, factor, q, ring, k_ptr, table_ptr, scores_ptr, maxima_ptr,
               pages, page_rows, page_stride, inverse, shift, table_line, scores_line, maxima_line,
               QUERIES: gl.constexpr, HEADS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The scores of the queries first .. last - 1, of one sequence; the CTA's own are begin .. begin + QUERIES - 1."""
    ACC: gl.constexpr = product_layout(gl.num_warps(), HEADS)
    LINE: gl.constexpr = gl.SliceLayout(1, ACC)
    COPY: gl.constexpr = gl.SliceLayout(1, lanes(gl.num_warps()))
    most = gl.to_tensor(0)
    for j in gl.static_range(QUERIES):
        mine = (begin + j >= first) & (begin + j < last)
        most = gl.maximum(most, gl.where(mine, seen[j], 0))
    tiles = (most + ROWS - 1) // ROWS
    each = (tiles + gl.num_programs(1) - 1) // gl.num_programs(1)
    start = gl.program_id(1) * each
    stop = gl.minimum(start + each, tiles)
    most = gl.minimum(most, stop * ROWS)  # nothing past this share is read
    line_ptr = table_ptr + sequence.to(gl.int64) * table_line
    page = pages_of(start, most, line_ptr, inverse, shift, ROWS, LINE)
    scale = scales_at(start, page, k_ptr, pages, page_rows, page_stride, inverse, shift, ROWS, LINE)
    page = pages_of(start + 1, most, line_ptr, inverse, shift, ROWS, LINE)
    for i in gl.static_range(STAGES - 1):
        from_page = pages_of(start + i, most, line_ptr, inverse, shift, ROWS, COPY)
        copy_tile(ring.index(i), start + i, from_page, k_ptr, pages, page_rows, page_stride, inverse, shift, ROWS)
    from_page = pages_of(start + STAGES - 1, most, line_ptr, inverse, shift, ROWS, COPY)
    slot = gl.to_tensor(0)
    for tile in range(start, stop):
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        barrier()
        products = ()
        for j in gl.static_range(QUERIES):
            zero = gl.zeros([ROWS, HEADS], gl.float32, ACC)
            product = warpgroup_mma(ring.index(slot), q.index(j).permute((1, 0)), zero, use_acc=False, is_async=True)
            products = products + (product,)
        free = gl.where(slot == 0, STAGES - 1, slot - 1)
        ahead = tile + STAGES - 1
        copy_tile(ring.index(free), ahead, from_page, k_ptr, pages, page_rows, page_stride, inverse, shift, ROWS)
        from_page = pages_of(ahead + 1, most, line_ptr, inverse, shift, ROWS, COPY)
        next_scale = scales_at(tile + 1, page, k_ptr, pages, page_rows, page_stride, inverse, shift, ROWS, LINE)
        page = pages_of(tile + 2, most, line_ptr, inverse, shift, ROWS, LINE)
        row = tile * ROWS + gl.arange(0, ROWS, layout=LINE)
        for j in gl.static_range(QUERIES):
            product = warpgroup_mma_wait(num_outstanding=QUERIES - 1 - j, deps=(products[j],))
            total = gl.sum(relu(product) * w[j][None, :], 1) * (scale * factor)
            total = gl.where(total == total, total, -float("inf")) + 0.0
            mine = (begin + j >= first) & (begin + j < last)
            here = (row < seen[j]) & mine
            line = (begin - base + j).to(gl.int64)
            gl.store(scores_ptr + line * scores_line + row, total, mask=here)
            greatest = gl.max(gl.reshape(gl.where(here, total, -float("inf")), [ROWS // GROUP, GROUP]), 1)
            group = tile * (ROWS // GROUP) + gl.arange(0, ROWS // GROUP, layout=greatest.type.layout)
            gl.store(maxima_ptr + line * maxima_line + group, greatest, mask=(group * GROUP < seen[j]) & mine)
        scale = next_scale
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)
    async_copy.wait_group(0)
    barrier()


@gluon.jit(do_not_specialize=[
    "first_query", "queries", "heads", "capacity", "ratio", "tokens", "requests", "pages", "page_rows", "page_inverse",
    "page_shift", "page_stride", "table_line", "stride_qn", "stride_qh", "stride_wn", "stride_wh", "scores_line",
    "maxima_line",
])  # fmt: skip
def index_scores_fp8_sm90(q_ptr, k_ptr, weights_ptr, count_ptr, table_ptr, starts_ptr, scores_ptr, maxima_ptr, factor,
                          first_query, queries, heads, capacity, ratio, tokens, requests, pages, page_rows,
                          page_inverse, page_shift, page_stride, table_line, stride_qn, stride_qh, stride_wn,
                          stride_wh, scores_line, maxima_line, HOW: gl.constexpr, QUERIES: gl.constexpr,
                          HEADS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Strides of q and of pages are in units of 16 bytes. Line n of the scores is that of query first_query + n; only
    what a query sees is written."""
    ACC: gl.constexpr = product_layout(gl.num_warps(), HEADS)
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    L: gl.constexpr = lanes(gl.num_warps())
    q = gl.allocate_shared_memory(gl.float8e4nv, [QUERIES, HEADS, DIMS], TILE)
    ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, ROWS, DIMS], TILE)
    begin = first_query + gl.program_id(0) * QUERIES
    end = gl.minimum(begin + QUERIES, queries)
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, L))
    dim = gl.arange(0, DIMS, layout=gl.SliceLayout(0, L))
    acc_head = gl.arange(0, HEADS, layout=gl.SliceLayout(0, ACC))
    w = ()
    seen = ()
    for j in gl.static_range(QUERIES):
        n = (begin + j).to(gl.int64)
        there = (head < heads) & (n < end)
        offset = (n * stride_qn + head * stride_qh)[:, None] * 16 + dim[None, :]
        bytes_ptr = q_ptr.to(gl.pointer_type(gl.uint8), bitcast=True)
        some = gl.load(bytes_ptr + offset, mask=there[:, None], other=0)
        q.index(j).store(some.to(gl.float8e4nv, bitcast=True))
        weight_ptr = weights_ptr + n * stride_wn + acc_head * stride_wh
        w = w + (gl.load(weight_ptr, mask=(acc_head < heads) & (n < end), other=0.0).to(gl.float32),)
        seen = seen + (rows_seen(begin + j, count_ptr, ratio, capacity, n < end),)
    fence_async_shared()  # Q by ordinary stores -> tensor-core reads
    first = begin
    while first < end:  # the queries of a CTA may belong to several sequences
        sequence, next_one = owner(first, starts_ptr, requests, tokens, HOW)
        last = gl.minimum(next_one, end)
        if sequence < requests:
            score_rows(first, last, first_query, begin, sequence, seen, w, factor, q, ring, k_ptr, table_ptr,
                       scores_ptr, maxima_ptr, pages, page_rows, page_stride, page_inverse, page_shift, table_line,
                       scores_line, maxima_line, QUERIES, HEADS, ROWS, STAGES)  # fmt: skip
        first = last
