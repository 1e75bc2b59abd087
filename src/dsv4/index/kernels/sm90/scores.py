"""Index scores on Hopper: score(n, s) = factor * scale[s] * sum_h weights[n, h] * relu(q[n, h] . k[s]).

Keys are bf16 or fp16, without scales, or e4m3 in the pages of caches/index_keys.py; pages.py is faster for most.
One CTA has QUERIES neighbouring queries and a share of the rows that they see, ROWS at a time. All warps do the same::

    copy      rows of tile i + STAGES - 1 by cp.async | page numbers of tile i + STAGES   (no warp waits for either)
    product   S_j = K_i Q_j^T, wgmma, one per query   | keys are its rows, heads its columns
    sum       relu, times weights, over the heads     | of S_j while the tensor core makes S_j+1

It also writes the greatest score of every GROUP of neighbouring rows, for choose.py.

Shared memory: Q [QUERIES][HEADS, DIMS], ring of K [STAGES][ROWS, DIMS], with the 128-byte swizzle. A tile is complete
when every thread has waited for its own copies, made them visible to the tensor core (fence), and the CTA has met at a
barrier. Past the same barrier the products of the previous tile are done, so its slot is free. A row of a page that
does not exist has NaN as its scale and is chosen last.
"""

from dsv4.index.kernels.scores import BATCH, GROUP, ONE, clear_counts, owner, relu, visible_rows
from dsv4.kernels.compat import (
    Value,
    aggregate,
    async_copy,
    barrier,
    cp_async,
    fence_async_shared,
    gl,
    gluon,
    reinterpret,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from dsv4.kernels.dependent import launch_dependents


@aggregate
class KeyRows:
    """Keys with the pointer of their type, of one sequence where there is no block table."""

    ptr: Value
    pages: Value
    page_rows: Value
    page_stride: Value
    row_stride: Value
    inverse: Value
    shift: Value


@gluon.jit
def rows_at(ptr, keys):
    return KeyRows(ptr, keys.pages, keys.page_rows, keys.page_stride, keys.row_stride, keys.inverse, keys.shift)


@gluon.constexpr_function
def lanes(warps, dtype):
    """Return a layout with 16 bytes, a cell, per thread, and 8 threads per 128 bytes of a row."""
    return gl.BlockedLayout([1, 128 // dtype.primitive_bitwidth], [4, 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def product_layout(warps, heads, dtype):
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, heads, 256 // dtype.primitive_bitwidth])


@gluon.constexpr_function
def tile_layout(dtype):
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=dtype.primitive_bitwidth, rank=2)


@gluon.jit
def page_of(row, inverse, shift):
    """Return row // rows of a page, for 0 <= row < 2^31, by the inverse that the host computes."""
    wide = row.to(gl.uint32, bitcast=True).to(gl.uint64) * inverse.to(gl.uint32, bitcast=True).to(gl.uint64)
    return (wide >> shift.to(gl.uint64)).to(gl.int32)


@gluon.jit
def numbers_of(tile, most, line_ptr, keys, ROWS: gl.constexpr, OWNER: gl.constexpr, L: gl.constexpr):
    """Return the page numbers of the rows of a tile in a layout, -1 past the visible ones."""
    row = tile * ROWS + gl.arange(0, ROWS, layout=L)
    if OWNER == ONE or OWNER == BATCH:
        return gl.where(row < most, 0, -1)
    return gl.load(line_ptr + page_of(row, keys.inverse, keys.shift), mask=row < most, other=-1)


@gluon.jit
def place_in_page(tile, keys, ROWS: gl.constexpr, OWNER: gl.constexpr, L: gl.constexpr):
    """Return the places of the rows of a tile in their pages."""
    row = tile * ROWS + gl.arange(0, ROWS, layout=L)
    if OWNER == ONE or OWNER == BATCH:
        return row
    return row - page_of(row, keys.inverse, keys.shift) * keys.page_rows


@gluon.jit
def copy_tile(
    slot, tile, page, keys, dims, ROWS: gl.constexpr, DIMS: gl.constexpr, WHOLE: gl.constexpr, OWNER: gl.constexpr
):
    """Copy the rows of a tile to slot [ROWS, DIMS], as one commit group; absent rows become zeros."""
    L: gl.constexpr = lanes(gl.num_warps(), slot.dtype)
    VEC: gl.constexpr = 128 // slot.dtype.primitive_bitwidth
    WIDTH: gl.constexpr = 8 * VEC
    panels = reinterpret(slot, [DIMS // WIDTH, ROWS, WIDTH], tile_layout(slot.dtype))
    place = place_in_page(tile, keys, ROWS, OWNER, gl.SliceLayout(1, L))
    there = (page >= 0) & (page < keys.pages)
    at = page.to(gl.int64) * keys.page_stride + place.to(gl.int64) * keys.row_stride
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, L))
    pointers = keys.ptr + at[:, None] * VEC + column[None, :]
    for panel in gl.static_range(DIMS // WIDTH):
        if WHOLE:
            cp_async(panels.index(panel), pointers + panel * WIDTH, mask=there[:, None])
        else:  # in units of 16 bytes, so that 16-byte copies stay possible
            inside = (column // VEC + panel * 8) < dims // VEC
            cp_async(panels.index(panel), pointers + panel * WIDTH, mask=there[:, None] & inside[None, :])
    async_copy.commit_group()


@gluon.jit
def scales_of(tile, page, keys, ROWS: gl.constexpr, OWNER: gl.constexpr, L: gl.constexpr):
    """Return fp32 [ROWS], the factors of a tile's scores; NaN for absent rows."""
    there = (page >= 0) & (page < keys.pages)
    if keys.ptr.dtype.element_ty.primitive_bitwidth == 8:
        place = place_in_page(tile, keys, ROWS, OWNER, L)
        at = page.to(gl.int64) * keys.page_stride * 4 + keys.page_rows * 32 + place
        return gl.load(keys.ptr.to(gl.pointer_type(gl.float32), bitcast=True) + at, mask=there, other=float("nan"))
    return gl.where(there, 1.0, float("nan"))


@gluon.jit
def score_rows(
    first,
    last,
    begin,
    sequence,
    visible,
    w,
    factor,
    q,
    ring,
    keys,
    queries,
    owners,
    scores,
    QUERIES: gl.constexpr,
    HEADS: gl.constexpr,
    DIMS: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    WHOLE: gl.constexpr,
    OWNER: gl.constexpr,
):
    """Compute the scores of queries first .. last - 1, of one sequence; the CTA has begin .. begin + QUERIES - 1."""
    ACC: gl.constexpr = product_layout(gl.num_warps(), HEADS, q.dtype)
    LINE: gl.constexpr = gl.SliceLayout(1, ACC)
    COPY: gl.constexpr = gl.SliceLayout(1, lanes(gl.num_warps(), q.dtype))
    most = gl.to_tensor(0)
    for j in gl.static_range(QUERIES):
        mine = (begin + j >= first) & (begin + j < last)
        most = gl.maximum(most, gl.where(mine, visible[j], 0))
    tiles = (most + ROWS - 1) // ROWS
    each = (tiles + gl.num_programs(1) - 1) // gl.num_programs(1)
    start = gl.program_id(1) * each
    stop = gl.minimum(start + each, tiles)
    line_ptr = owners.table_ptr + sequence.to(gl.int64) * owners.table_line
    if OWNER == BATCH:
        start_ptr = keys.ptr + sequence.to(gl.int64) * keys.page_stride * 8  # address of 16-bit values
        keys = rows_at(start_ptr, keys)
    most = gl.minimum(most, stop * ROWS)  # nothing past this share is read
    page = numbers_of(start, most, line_ptr, keys, ROWS, OWNER, LINE)
    scale = scales_of(start, page, keys, ROWS, OWNER, LINE)
    page = numbers_of(start + 1, most, line_ptr, keys, ROWS, OWNER, LINE)
    for i in gl.static_range(STAGES - 1):
        from_page = numbers_of(start + i, most, line_ptr, keys, ROWS, OWNER, COPY)
        copy_tile(ring.index(i), start + i, from_page, keys, queries.dims, ROWS, DIMS, WHOLE, OWNER)
    from_page = numbers_of(start + STAGES - 1, most, line_ptr, keys, ROWS, OWNER, COPY)
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
        ahead = tile + STAGES - 1
        free = gl.where(slot == 0, STAGES - 1, slot - 1)
        copy_tile(ring.index(free), ahead, from_page, keys, queries.dims, ROWS, DIMS, WHOLE, OWNER)
        from_page = numbers_of(ahead + 1, most, line_ptr, keys, ROWS, OWNER, COPY)
        next_scale = scales_of(tile + 1, page, keys, ROWS, OWNER, LINE)
        page = numbers_of(tile + 2, most, line_ptr, keys, ROWS, OWNER, LINE)
        row = tile * ROWS + gl.arange(0, ROWS, layout=LINE)
        for j in gl.static_range(QUERIES):
            product = warpgroup_mma_wait(num_outstanding=QUERIES - 1 - j, deps=(products[j],))
            total = gl.sum(relu(product) * w[j][None, :], 1) * (scale * factor)
            total = gl.where(total == total, total, -float("inf")) + 0.0
            mine = (begin + j >= first) & (begin + j < last)
            here = (row < visible[j]) & mine
            line = (begin - queries.first + j).to(gl.int64)
            total = gl.where(here, total, -float("inf"))
            written = (visible[j] + GROUP - 1) // GROUP * GROUP
            gl.store(scores.ptr + line * scores.line + row, total, mask=(row < written) & mine)
            greatest = gl.max(gl.reshape(total, [ROWS // GROUP, GROUP]), 1)
            group = tile * (ROWS // GROUP) + gl.arange(0, ROWS // GROUP, layout=greatest.type.layout)
            gl.store(
                scores.maxima_ptr + line * scores.maxima_line + group,
                greatest,
                mask=(group * GROUP < visible[j]) & mine,
            )
        scale = next_scale
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)
    async_copy.wait_group(0)
    barrier()


@gluon.jit
def index_scores_sm90(
    queries,
    keys,
    owners,
    scores,
    factor,
    OWNER: gl.constexpr,
    QUERIES: gl.constexpr,
    HEADS: gl.constexpr,
    DIMS: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    WHOLE: gl.constexpr,
):
    """Compute scores. Line n of the scores is that of query first + n; only what a query sees is written, and -inf
    up to a whole group."""
    launch_dependents()
    clear_counts(queries, scores, QUERIES)
    dtype: gl.constexpr = queries.ptr.dtype.element_ty
    VEC: gl.constexpr = 128 // dtype.primitive_bitwidth
    ACC: gl.constexpr = product_layout(gl.num_warps(), HEADS, dtype)
    L: gl.constexpr = lanes(gl.num_warps(), dtype)
    rows = rows_at(keys.ptr.to(gl.pointer_type(dtype), bitcast=True), keys)
    heads, dims = queries.heads, queries.dims
    q = gl.allocate_shared_memory(dtype, [QUERIES, HEADS, DIMS], tile_layout(dtype))
    ring = gl.allocate_shared_memory(dtype, [STAGES, ROWS, DIMS], tile_layout(dtype))
    begin = queries.first + gl.program_id(0) * QUERIES
    end = gl.minimum(begin + QUERIES, queries.end)
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, L))
    dim = gl.arange(0, DIMS, layout=gl.SliceLayout(0, L))
    acc_head = gl.arange(0, HEADS, layout=gl.SliceLayout(0, ACC))
    w = ()
    visible = ()
    for j in gl.static_range(QUERIES):
        n = (begin + j).to(gl.int64)
        there = ((head < heads) & (n < end))[:, None] & (dim // VEC < dims // VEC)[None, :]
        offset = (n * queries.stride_qn + head * queries.stride_qh)[:, None] * VEC + dim[None, :]
        q.index(j).store(gl.load(queries.ptr + offset, mask=there, other=0.0))
        weight_ptr = queries.weights_ptr + n * queries.stride_wn + acc_head * queries.stride_wh
        w = w + (gl.load(weight_ptr, mask=(acc_head < heads) & (n < end), other=0.0).to(gl.float32),)
        visible = visible + (visible_rows(begin + j, owners, n < end),)
    fence_async_shared()  # Q by ordinary stores -> tensor-core reads
    first = begin
    while first < end:  # the queries of a CTA may belong to several sequences
        sequence, next_one = owner(first, owners, OWNER)
        last = gl.minimum(next_one, end)
        if sequence < owners.requests:
            score_rows(first, last, begin, sequence, visible, w, factor, q, ring, rows, queries, owners, scores,
                       QUERIES, HEADS, DIMS, ROWS, STAGES, WHOLE, OWNER)  # fmt: skip
        first = last
