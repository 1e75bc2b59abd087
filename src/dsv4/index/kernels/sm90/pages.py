"""Index scores on Hopper where TMA copies the keys, BOX rows at a time: 64, the page of engines, or part of a page.

    score(n, s) = factor * scale[s] * sum_h weights[n, h] * relu(q[n, h] . k[s])

q and k are e4m3, k in the pages of dsv4.caches.index_keys; or both bf16 or fp16, without scales. One CTA has QUERIES
neighbouring queries, and a share of the rows that they see, a box at a time. All warps do the same::

    copy      box i + STAGES by TMA, one thread asks  | scales of box i + 2, page number of box i + STAGES + 1
    product   S = K_i [Q_0 .. Q_j]^T, one wgmma for   | keys are its rows, heads of the queries its columns
              128 columns
    sum       relu, times weights, over the heads     | while the tensor core makes the next S, or that of another CTA

It also writes the greatest score of every GROUP of neighbouring rows, which tells choose.py where to look.
GROUP rows are those of one warp in a product, so their maximum needs three shuffles.

Shared memory: Q [QUERIES * HEADS, 128], ring of K [STAGES][BOX, 128], with the 128-byte swizzle. `ready` of a slot: its
bytes have landed. A slot is free when all warps have met at a barrier behind its product. Scales go to
registers: ordinary reads of what TMA writes would need a fence in every step. For a page that does not exist TMA fills
zeros, and its scales are NaN, so its rows are chosen last.
"""

from dsv4.index.kernels.scores import BATCH, GROUP, ONE, clear_counts, owner, relu, visible_rows
from dsv4.index.kernels.sm90.scores import lanes, page_of, tile_layout
from dsv4.kernels.compat import (
    Value,
    aggregate,
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret_as,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from dsv4.kernels.dependent import launch_dependents

BOX = gl.constexpr(64)
DIMS = gl.constexpr(128)
STAGES = gl.constexpr(3)


@gluon.constexpr_function
def product_layout(warps, columns, dtype):
    """Return the layout of the product: rows over the four warps of a warpgroup, columns over warpgroups."""
    depth = 256 // dtype.primitive_bitwidth
    return gl.NVMMADistributedLayout([3, 0], [4, warps // 4], [16, columns // (warps // 4), depth])


@gluon.constexpr_function
def parts_of(queries, heads):
    """Return the products per box: the warps sum one over its heads while the tensor core computes the next."""
    return max(queries * heads // 128, 1)


@aggregate
class SequencePages:
    """Pages of a sequence, of which this share has the boxes before `stop`. Strides are in units of 16 bytes."""

    keys_desc: Value
    scales_ptr: Value
    line_ptr: Value  # line of the block table
    keys: Value  # arguments.IndexKeys
    stop: Value
    sequence: Value
    ALONE: gl.constexpr  # a page is one box
    OWNER: gl.constexpr
    DTYPE: gl.constexpr

    @gluon.jit
    def until(self, stop):
        return SequencePages(
            self.keys_desc,
            self.scales_ptr,
            self.line_ptr,
            self.keys,
            stop,
            self.sequence,
            self.ALONE,
            self.OWNER,
            self.DTYPE,
        )

    @gluon.jit
    def where(self, box):
        """Return (which page of the sequence, its first row)."""
        if self.ALONE:
            return box, box * 0
        page = page_of(box * BOX, self.keys.inverse, self.keys.shift)
        return page, box * BOX - page * self.keys.page_rows

    @gluon.jit
    def number(self, box):
        """Return the page number of a box, -1 past the share."""
        if self.OWNER == ONE or self.OWNER == BATCH:  # a page is a sequence
            return gl.where(box < self.stop, self.sequence, -1)
        page, place = self.where(box)
        return gl.load(self.line_ptr + page, mask=box < self.stop, other=-1)

    @gluon.jit
    def ask(self, keys, landed, box, number):
        """Start the copy of a box. An invalid page number gives zeros."""
        here = box < self.stop
        page, place = self.where(box)
        mbarrier.expect(landed, BOX * DIMS * self.DTYPE.primitive_bitwidth // 8, pred=here)
        number = gl.where(number < self.keys.pages, number, -1)
        tma_load(self.keys_desc, [number, place, 0], landed, keys, pred=here)

    @gluon.jit
    def scales(self, box, number, L: gl.constexpr):
        """Load scales, fp32 [BOX]; NaN where there is no page."""
        if self.DTYPE.primitive_bitwidth != 8:
            one = gl.full([BOX], 1.0, gl.float32, L)
            return gl.where((number >= 0) & (number < self.keys.pages), one, float("nan"))
        page, place = self.where(box)
        at = (
            number.to(gl.int64) * self.keys.page_stride * 4
            + self.keys.page_rows * 32
            + place
            + gl.arange(0, BOX, layout=L)
        )
        return gl.load(self.scales_ptr + at, mask=(number >= 0) & (number < self.keys.pages), other=float("nan"))


@gluon.jit
def sums(x, QUERIES: gl.constexpr, HEADS: gl.constexpr):
    """Sum [BOX, QUERIES * HEADS] over the heads -> [BOX, QUERIES]."""
    return gl.sum(gl.reshape(x, [BOX, QUERIES, HEADS]), 2)


@gluon.jit
def maxima(x):
    """Return the greatest of every GROUP rows of [BOX, QUERIES]."""
    return gl.max(gl.reshape(x, [BOX // GROUP, GROUP, x.shape[1]]), 1)


@gluon.jit
def score_boxes(
    slot,
    phase,
    first,
    last,
    begin,
    visible,
    w,
    factor,
    q,
    ring,
    ready,
    pages,
    queries,
    scores,
    QUERIES: gl.constexpr,
    HEADS: gl.constexpr,
):
    """Compute the scores of queries first .. last - 1, of one sequence; the CTA has begin .. begin + QUERIES - 1.
    visible [QUERIES]. -> where the ring stands afterwards, empty."""
    PARTS: gl.constexpr = parts_of(QUERIES, HEADS)
    EACH: gl.constexpr = QUERIES // PARTS
    ACC: gl.constexpr = product_layout(gl.num_warps(), EACH * HEADS, q.dtype)
    LINE: gl.constexpr = gl.SliceLayout(1, ACC)
    tile = reinterpret_as(ring, q.dtype, [STAGES, BOX, DIMS], tile_layout(q.dtype))
    most = gl.to_tensor(0)
    for i in gl.static_range(PARTS):
        query = begin + i * EACH + gl.arange(0, EACH, layout=visible[i].type.layout)
        most = gl.maximum(most, gl.max(gl.where((query >= first) & (query < last), visible[i], 0), 0))
    boxes = (most + BOX - 1) // BOX
    each = (boxes + gl.num_programs(1) - 1) // gl.num_programs(1)
    start = gl.program_id(1) * each
    stop = gl.minimum(start + each, boxes)
    pages = pages.until(stop)
    numbers = ()
    to = slot
    for i in gl.static_range(STAGES):
        numbers = numbers + (pages.number(start + i),)
    for i in gl.static_range(STAGES):
        pages.ask(ring.index(to), ready.index(to), start + i, numbers[i])
        to = gl.where(to == STAGES - 1, 0, to + 1)
    scale = pages.scales(start, numbers[0], LINE)
    next_scale = pages.scales(start + 1, numbers[1], LINE)
    number = numbers[2]  # number of box + 2
    ahead = pages.number(start + STAGES)
    # Values in the layouts of scores and of maxima that do not change from box to box.
    T: gl.constexpr = sums(gl.zeros([BOX, EACH * HEADS], gl.float32, ACC), EACH, HEADS).type.layout
    G: gl.constexpr = maxima(gl.zeros([BOX, EACH], gl.float32, T)).type.layout
    outputs = ()
    for i in gl.static_range(PARTS):
        query = begin + i * EACH + gl.arange(0, EACH, layout=visible[i].type.layout)
        mine = gl.where((query >= first) & (query < last), visible[i], 0)
        line = (query - queries.first).to(gl.int64)
        scores_ptrs = scores.ptr + gl.convert_layout(line, gl.SliceLayout(0, T))[None, :] * scores.line
        maxima_ptrs = scores.maxima_ptr + gl.convert_layout(line, gl.SliceLayout(0, G))[None, :] * scores.maxima_line
        limit = gl.convert_layout(mine, gl.SliceLayout(0, T))[None, :]
        group_limit = gl.convert_layout(mine, gl.SliceLayout(0, G))[None, :]
        outputs = outputs + ((scores_ptrs, maxima_ptrs, limit, (limit + GROUP - 1) // GROUP * GROUP, group_limit),)
    for box in range(start, stop):
        mbarrier.wait(ready.index(slot), phase)
        products = ()
        for i in gl.static_range(PARTS):
            zero = gl.zeros([BOX, EACH * HEADS], gl.float32, ACC)
            columns = q.index(i).permute((1, 0))
            products = products + (warpgroup_mma(tile.index(slot), columns, zero, use_acc=False, is_async=True),)
        later_scale = pages.scales(box + 2, number, LINE)
        later = pages.number(box + STAGES + 1)
        factors = gl.convert_layout(scale * factor, gl.SliceLayout(1, T))[:, None]
        row = box * BOX + gl.arange(0, BOX, layout=gl.SliceLayout(1, T))[:, None]
        group = box * (BOX // GROUP) + gl.arange(0, BOX // GROUP, layout=gl.SliceLayout(1, G))[:, None]
        for i in gl.static_range(PARTS):
            product = warpgroup_mma_wait(num_outstanding=PARTS - 1 - i, deps=(products[i],))
            if i == PARTS - 1:
                barrier()
                pages.ask(ring.index(slot), ready.index(slot), box + STAGES, ahead)
            scores_ptrs, maxima_ptrs, limit, written, group_limit = outputs[i]
            total = sums(relu(product) * w[i][None, :], EACH, HEADS) * factors
            total = gl.where(total == total, total, -float("inf")) + 0.0
            total = gl.where(row < limit, total, -float("inf"))
            gl.store(scores_ptrs + row, total, mask=row < written)
            gl.store(maxima_ptrs + group, maxima(total), mask=group * GROUP < group_limit)
        scale, next_scale = next_scale, later_scale
        number, ahead = ahead, later
        phase = gl.where(slot == STAGES - 1, phase ^ 1, phase)
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)
    return slot, phase


@gluon.jit
def index_scores_pages_sm90(
    queries,
    keys_desc,
    keys,
    owners,
    scores,
    factor,
    OWNER: gl.constexpr,
    QUERIES: gl.constexpr,
    HEADS: gl.constexpr,
    ALONE: gl.constexpr,
):
    """Compute scores. Line n of the scores is that of query first + n; only what a query sees is written, and -inf
    up to a whole group."""
    launch_dependents()
    clear_counts(queries, scores, QUERIES)
    PARTS: gl.constexpr = parts_of(QUERIES, HEADS)
    EACH: gl.constexpr = QUERIES // PARTS
    dtype: gl.constexpr = queries.ptr.dtype.element_ty
    VEC: gl.constexpr = 128 // dtype.primitive_bitwidth
    ACC: gl.constexpr = product_layout(gl.num_warps(), EACH * HEADS, dtype)
    L: gl.constexpr = lanes(gl.num_warps(), dtype)
    q = gl.allocate_shared_memory(dtype, [PARTS, EACH * HEADS, DIMS], tile_layout(dtype))
    ring = gl.allocate_shared_memory(keys_desc.dtype, [STAGES, 1, BOX, DIMS], keys_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    begin = queries.first + gl.program_id(0) * QUERIES
    end = gl.minimum(begin + QUERIES, queries.end)
    w = ()
    visible = ()
    for i in gl.static_range(PARTS):
        column = gl.arange(0, EACH * HEADS, layout=gl.SliceLayout(1, L))
        n = (begin + i * EACH + column // HEADS).to(gl.int64)
        head = column % HEADS
        offset = (n * queries.stride_qn + head * queries.stride_qh)[:, None] * VEC
        offset = offset + gl.arange(0, DIMS, layout=gl.SliceLayout(0, L))[None, :]
        q.index(i).store(gl.load(queries.ptr + offset, mask=((head < queries.heads) & (n < end))[:, None], other=0.0))
        column = gl.arange(0, EACH * HEADS, layout=gl.SliceLayout(0, ACC))
        n = (begin + i * EACH + column // HEADS).to(gl.int64)
        head = column % HEADS
        weight_ptr = queries.weights_ptr + n * queries.stride_wn + head * queries.stride_wh
        w = w + (gl.load(weight_ptr, mask=(head < queries.heads) & (n < end), other=0.0).to(gl.float32),)
        query = begin + i * EACH + gl.arange(0, EACH, layout=gl.BlockedLayout([EACH], [32], [gl.num_warps()], [0]))
        visible = visible + (visible_rows(query, owners, query < end),)
    fence_async_shared()  # Q by ordinary stores -> tensor-core reads, the barriers -> TMA
    barrier()
    scales_ptr = keys.ptr.to(gl.pointer_type(gl.float32), bitcast=True)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    first = begin
    while first < end:  # the queries of a CTA may belong to several sequences
        sequence, next_one = owner(first, owners, OWNER)
        last = gl.minimum(next_one, end)
        if sequence < owners.requests:
            line_ptr = owners.table_ptr + sequence.to(gl.int64) * owners.table_line
            pages = SequencePages(keys_desc, scales_ptr, line_ptr, keys, 0, sequence, ALONE, OWNER, dtype)
            slot, phase = score_boxes(slot, phase, first, last, begin, visible, w, factor, q, ring, ready, pages,
                                      queries, scores, QUERIES, HEADS)  # fmt: skip
        first = last
