"""Index scores of FP4 keys on Hopper, of all rows that a query sees or of those in listed blocks. fp4_boxes.py has the
kernel for all rows in pages of whole boxes; this file has the one for all other cases.

    score(n, s) = factor * scale[s] * sum_h weights[n, h] * relu(q[n, h] . k[s])

One CTA: QUERIES neighbouring queries, and a share of their scores, ROWS at a time. Keys go through shared memory to
registers, where they become the left operand of the product. All warps do the same::

    copy      keys and scales of tile i + STAGES - 1 by cp.async | page numbers of the tile after it, blocks of the next
    unpack    e2m1 to e4m3, by a table for each row and group    | 9 instructions for 8 values
    product   S = K_i [Q_0 .. Q_j]^T, two wgmmas of 64 dims      | keys are its rows, heads of the queries its columns
    sum       relu, times weights, over the heads                | and the greatest one of every GROUP rows, and BLOCK

The order of the dims is free, if it is the same in q and k. A thread of the left operand has four bytes at columns 4 t,
16 + 4 t, 32 + 4 t and 48 + 4 t of its rows, t = lane % 4. So these columns are the 32 dims of group t: one scale, one
load of 16 bytes, one table::

    column 16 i + 4 t + b   is dim 32 t + 8 i + b in the first product, and dim 32 t + 8 i + 4 + b in the second

A table has the e4m3 codes of 0, 0.5, 1, 1.5, 2, 3, 4 and 6, times 2^shift; `prmt` looks four codes up at once. shift is
how far a group's scale is below the greatest of its key, plus HIGHEST; scores.py has what is exact. Eight neighbouring
rows lie one after the other in a page (`supports` ensures it), so a warp copies 512 bytes at a time.

Shared memory: Q [2 * PARTS][QUERIES * HEADS / PARTS, 64], with the 64-byte swizzle; rings of keys [STAGES][ROWS, 16
words] and of scales [STAGES][ROWS]. A tile is complete when every thread has waited for its own copies and the CTA has
met at a barrier; past the same barrier, the previous tile is in registers, so its slot is free. A row of a page that
does not exist, or that the one query of listed blocks does not see, has NaN as its scale and is chosen last.
"""

from dsv4.index.kernels.scores import (
    BLOCK,
    FP4_BOTH,
    GROUP,
    HIGHEST,
    LOWEST_SHIFT,
    bf16,
    clear_counts,
    greatest_of_four,
    owner,
    power_of_two,
    relu,
    row_of,
    visible_columns,
    visible_rows,
)
from dsv4.index.kernels.sm90.pages import parts_of, product_layout
from dsv4.index.kernels.sm90.scores import page_of
from dsv4.kernels.compat import (
    Value,
    aggregate,
    async_copy,
    barrier,
    cp_async,
    fence_async_shared,
    gl,
    gluon,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from dsv4.kernels.dependent import launch_dependents

ROWS = gl.constexpr(128)
DIMS = gl.constexpr(128)
E4M3 = gl.constexpr(gl.float8e4nv)


@gluon.constexpr_function
def codes_layout(rows, warps):
    """Return the layout of [rows, 4 groups, 4 words, 4 bytes]: a group of a row per thread, rows r and r + 8 of every
    16.
    """
    down = [[8 << i, 0, 0, 0] for i in range((rows // 8).bit_length() - 1)]
    across = (down[1:] + [[0, 0, 0, 0]] * 2)[: warps.bit_length() - 1]
    rest = down[:1] + down[1 + len(across) :]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 1, 0], [0, 0, 2, 0], *rest],
        lane_bases=[[0, 1, 0, 0], [0, 2, 0, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        warp_bases=across,
        block_bases=[],
        shape=[rows, 4, 4, 4],
    )


@gluon.constexpr_function
def words_layout(rows, warps):
    """Return the layout of [rows, 16 words], with the same words per thread."""
    codes = codes_layout(rows, warps)

    def flat(bases):
        return [[row, 4 * group + word] for row, group, word, byte in bases if byte == 0]

    return gl.DistributedLinearLayout(
        reg_bases=flat(codes.reg_bases),
        lane_bases=flat(codes.lane_bases),
        warp_bases=flat(codes.warp_bases),
        block_bases=[],
        shape=[rows, 16],
    )


@gluon.constexpr_function
def query_layout():
    return gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2)


@gluon.jit
def bytes_of(word, L: gl.constexpr):
    """Split words [ROWS] into four bytes [ROWS, 4]."""
    zero = gl.zeros([word.shape[0], 4], gl.int32, L)
    selector = 0x4440 + gl.arange(0, 4, layout=gl.SliceLayout(0, L))[None, :]
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, 0, $2;",
        "=r,r,r",
        [word[:, None] + zero, selector + zero],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def tables(shift):
    """Return e4m3 of 0, 0.5, 1, 1.5, and of 2, 3, 4, 6, times 2^shift, four bytes each; 0 below 2^LOWEST_SHIFT."""
    some = shift >= LOWEST_SHIFT
    return gl.where(some, 0x3C383000 + shift * 0x08080800, 0), gl.where(some, 0x4C484440 + shift * 0x08080808, 0)


@gluon.jit
def unpacked(words, low, high, ROWS: gl.constexpr):
    """Decode words [ROWS, 4 groups, 4] of 8 codes by tables of the groups [ROWS, 4] -> (e4m3 [ROWS, 64] of the first
    four codes of every word, of the last four), columns in the order above."""
    zero = gl.zeros([ROWS, 4, 4, 4], gl.int32, codes_layout(ROWS, gl.num_warps()))
    words = words[:, :, :, None] + zero
    low = low[:, :, None, None] + zero
    high = high[:, :, None, None] + zero
    first, last = gl.inline_asm_elementwise(
        """{
        .reg .b32 codes, even, sign;
        and.b32 codes, $2, 0x77777777;
        shl.b32 even, $2, 4;
        prmt.b32 $0, $6, $10, codes;
        prmt.b32 sign, even, $2, 0x5140;
        lop3.b32 $0, sign, 0x80808080, $0, 0xEA;
        shr.u32 codes, codes, 16;
        prmt.b32 $1, $6, $10, codes;
        prmt.b32 sign, even, $2, 0x7362;
        lop3.b32 $1, sign, 0x80808080, $1, 0xEA;
        }""",
        "=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r",
        [words, low, high],
        dtype=(gl.uint8, gl.uint8),
        is_pure=True,
        pack=4,
    )
    return in_columns(first, ROWS), in_columns(last, ROWS)


@gluon.jit
def in_columns(codes, ROWS: gl.constexpr):
    return gl.reshape(gl.permute(codes, (0, 2, 1, 3)), [ROWS, 64]).to(E4M3, bitcast=True)


@aggregate
class RowCoords:
    """Coordinates of rows: page numbers, -1 where there is no page, and rows in the page."""

    page: Value
    row: Value


@gluon.jit
def row_coords(row, there, line_ptr, keys):
    page = page_of(row, keys.inverse, keys.shift)
    number = gl.load(line_ptr + page, mask=there, other=-1)
    return RowCoords(gl.where(number < keys.pages, number, -1), row - page * keys.page_rows)


@aggregate
class RowKeys:
    """Keys of a request, of which a query sees `most`; `columns` scores in all. A tile is copied row by row."""

    keys: Value  # arguments.IndexKeys
    owners: Value
    line_ptr: Value  # line of the block table
    query: Value
    most: Value
    columns: Value
    AMONG: gl.constexpr
    L: gl.constexpr  # layout of words [ROWS, 16]

    @gluon.jit
    def rows(self, tile):
        """Return the rows of a tile, below 0 where there is none."""
        column = tile * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, self.L))
        row = row_of(column, self.query, self.owners, column < self.columns, self.AMONG)
        return gl.where(row < self.most, row, -1)

    @gluon.jit
    def coords(self, row):
        return row_coords(row, row >= 0, self.line_ptr, self.keys)

    @gluon.jit
    def copy(self, slot, scales, coords):
        """Start the copy of a tile, as one commit group; absent rows are not read -> 1 for absent rows."""
        keys = self.keys
        words_ptr = keys.ptr.to(gl.pointer_type(gl.int32), bitcast=True)
        begin = coords.page.to(gl.int64) * keys.page_stride
        word = gl.arange(0, 16, layout=gl.SliceLayout(0, self.L))
        there = coords.page >= 0
        cp_async(slot, words_ptr + ((begin + coords.row * 4)[:, None] * 4 + word[None, :]), mask=there[:, None])
        cp_async(scales, words_ptr + (begin * 4 + keys.page_rows * 16 + coords.row), mask=there)
        async_copy.commit_group()
        return (coords.page < 0).to(gl.int32)


@gluon.jit
def sums(x, QUERIES: gl.constexpr, HEADS: gl.constexpr):
    """Sum [rows, QUERIES * HEADS] over the heads -> [rows, QUERIES]."""
    return gl.sum(gl.reshape(x, [x.shape[0], QUERIES, HEADS]), 2)


@gluon.jit
def maxima(x, EACH: gl.constexpr):
    """Return the greatest of every EACH rows of [rows, QUERIES]."""
    return gl.max(gl.reshape(x, [x.shape[0] // EACH, EACH, x.shape[1]]), 1)


@aggregate
class Outputs:
    """Outputs for the scores of the CTA's queries, of which first .. last - 1 belong to the current sequence."""

    scores: Value
    owners: Value
    queries: Value
    first: Value
    last: Value
    begin: Value
    factor: Value
    QUERIES: gl.constexpr
    HEADS: gl.constexpr
    AMONG: gl.constexpr
    BLOCKS: gl.constexpr
    BF16: gl.constexpr

    @gluon.jit
    def of(self, first, last):
        """Return the same for other queries of the CTA."""
        return Outputs(
            self.scores,
            self.owners,
            self.queries,
            first,
            last,
            self.begin,
            self.factor,
            self.QUERIES,
            self.HEADS,
            self.AMONG,
            self.BLOCKS,
            self.BF16,
        )


@gluon.jit
def multiply(words, scales, q, to):
    """Multiply words of codes [rows, 4, 4] and scales of keys, four each, with all queries -> (products, by parts,
    issued, not waited for; the greatest scales)."""
    N: gl.constexpr = words.shape[0]
    PARTS: gl.constexpr = parts_of(to.QUERIES, to.HEADS)
    COLUMNS: gl.constexpr = to.QUERIES // PARTS * to.HEADS
    ACC: gl.constexpr = product_layout(gl.num_warps(), COLUMNS, E4M3)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 4)
    exponent = bytes_of(scales, gl.SliceLayout(2, words.type.layout))
    highest = gl.max(exponent, 1)
    low, high = tables(exponent - highest[:, None] + HIGHEST)
    some, others = unpacked(words, low, high, N)
    some, others = gl.convert_layout(some, LEFT), gl.convert_layout(others, LEFT)
    products = ()
    for i in gl.static_range(PARTS):
        zero = gl.zeros([N, COLUMNS], gl.float32, ACC)
        half = warpgroup_mma(some, q.index(2 * i).permute((1, 0)), zero, use_acc=False, is_async=True)
        products = products + (warpgroup_mma(others, q.index(2 * i + 1).permute((1, 0)), half, is_async=True),)
    return products, highest


@gluon.jit
def write_scores(first, products, highest, visible, w, to):
    """Write the scores of rows from `first` on, from the products of `multiply`."""
    N: gl.constexpr = highest.shape[0]
    HEADS: gl.constexpr = to.HEADS
    PARTS: gl.constexpr = parts_of(to.QUERIES, HEADS)
    EACH: gl.constexpr = to.QUERIES // PARTS
    ACC: gl.constexpr = product_layout(gl.num_warps(), EACH * HEADS, E4M3)
    # Layouts of scores and of maxima
    T: gl.constexpr = sums(gl.zeros([N, EACH * HEADS], gl.float32, ACC), EACH, HEADS).type.layout
    G: gl.constexpr = maxima(gl.zeros([N, EACH], gl.float32, T), GROUP).type.layout
    B: gl.constexpr = maxima(gl.zeros([N, EACH], gl.float32, T), BLOCK).type.layout
    # 2^(highest - 127), and 0, or NaN if that is NaN.
    power = gl.maximum(highest << 23, 0x400000).to(gl.float32, bitcast=True)
    factors = gl.convert_layout(power * to.factor, gl.SliceLayout(1, T))[:, None]
    nothing = gl.convert_layout(power * 0.0, gl.SliceLayout(1, T))[:, None]
    column = first + gl.arange(0, N, layout=gl.SliceLayout(1, T))[:, None]
    group = first // GROUP + gl.arange(0, N // GROUP, layout=gl.SliceLayout(1, G))[:, None]
    scores = to.scores
    for i in gl.static_range(PARTS):
        product = warpgroup_mma_wait(num_outstanding=2 * (PARTS - 1 - i), deps=(products[i],))
        if to.BF16:
            total = bf16(sums(bf16(relu(bf16(product)) * w[i][None, :]), EACH, HEADS)) * factors + nothing
        else:
            # This is twice the ReLU, which one addition computes faster than a maximum; the weights are halved.
            total = sums((product + gl.abs(product)) * w[i][None, :], EACH, HEADS) * factors + nothing
        query = to.begin + i * EACH + gl.arange(0, EACH, layout=visible[i].type.layout)
        mine = gl.where((query >= to.first) & (query < to.last), visible[i], 0)
        columns = visible_columns(mine, to.owners, to.AMONG)
        line = (query - to.queries.first).to(gl.int64)
        at = gl.convert_layout(line, gl.SliceLayout(0, T))[None, :]
        limit = gl.convert_layout(mine, gl.SliceLayout(0, T))[None, :]
        written = gl.convert_layout((columns + GROUP - 1) // GROUP * GROUP, gl.SliceLayout(0, T))[None, :]
        total = gl.maximum(total, -float("inf"))  # NaN becomes -inf
        if to.QUERIES > 1:  # with one query, rows that it does not see have no key
            total = gl.where(column < limit, total, -float("inf"))
        gl.store(scores.ptr + at * scores.line + column, total, mask=column < written)
        at = gl.convert_layout(line, gl.SliceLayout(0, G))[None, :]
        limit = gl.convert_layout(columns, gl.SliceLayout(0, G))[None, :]
        gl.store(scores.maxima_ptr + at * scores.maxima_line + group, maxima(total, GROUP), mask=group * GROUP < limit)
        if to.BLOCKS:
            block = first // BLOCK + gl.arange(0, N // BLOCK, layout=gl.SliceLayout(1, B))[:, None]
            at = gl.convert_layout(line, gl.SliceLayout(0, B))[None, :]
            limit = gl.convert_layout(columns, gl.SliceLayout(0, B))[None, :]
            gl.store(
                scores.blocks_ptr + at * scores.blocks_line + block, maxima(total, BLOCK), mask=block * BLOCK < limit
            )


@aggregate
class TileRange:
    """The tiles of the rows that queries of a sequence see, `most` of them."""

    most: Value
    columns: Value
    start: Value  # tiles of this CTA: start, start + step, ..., below stop
    step: Value
    stop: Value


@gluon.jit
def tile_range(visible, to, spread):
    """Return the tiles of this CTA for the queries to.first .. to.last - 1, neighbours or, if `spread`, as far apart as
    there are CTAs; visible [QUERIES]."""
    PARTS: gl.constexpr = parts_of(to.QUERIES, to.HEADS)
    EACH: gl.constexpr = to.QUERIES // PARTS
    most = gl.to_tensor(0)
    for i in gl.static_range(PARTS):
        query = to.begin + i * EACH + gl.arange(0, EACH, layout=visible[i].type.layout)
        most = gl.maximum(most, gl.max(gl.where((query >= to.first) & (query < to.last), visible[i], 0), 0))
    columns = visible_columns(most, to.owners, to.AMONG)
    tiles = (columns + ROWS - 1) // ROWS
    each = (tiles + gl.num_programs(1) - 1) // gl.num_programs(1)
    start, step, stop = gl.program_id(1), gl.num_programs(1), tiles
    if spread == 0:
        start, step, stop = start * each, gl.to_tensor(1), gl.minimum((start + 1) * each, tiles)
    return TileRange(most, columns, start, step, stop)


@gluon.jit
def score_rows(sequence, visible, w, q, ring, scales, keys, to, STAGES: gl.constexpr):
    """Compute the scores of the queries of one sequence; cp.async copies the keys."""
    CODES: gl.constexpr = gl.SliceLayout(3, codes_layout(ROWS, gl.num_warps()))
    WORDS: gl.constexpr = words_layout(ROWS, gl.num_warps())
    work = tile_range(visible, to, False)
    start, stop = work.start, work.stop
    line_ptr = to.owners.table_ptr + sequence.to(gl.int64) * to.owners.table_line
    columns = gl.minimum(work.columns, stop * ROWS)  # nothing past stop is read
    source = RowKeys(keys, to.owners, line_ptr, to.first, work.most, columns, to.AMONG, WORDS)
    gone = gl.zeros([ROWS], gl.int32, gl.SliceLayout(1, WORDS))  # bits: the last requested tile, and those before
    for i in gl.static_range(STAGES - 1):
        gone = gone * 2 + source.copy(ring.index(i), scales.index(i), source.coords(source.rows(start + i)))
    coords = source.coords(source.rows(start + STAGES - 1))
    ahead = source.rows(start + STAGES)
    slot = gl.to_tensor(0)
    for tile in range(start, stop):
        async_copy.wait_group(STAGES - 2)
        barrier()
        words = gl.convert_layout(gl.reshape(ring.index(slot).load(WORDS), [ROWS, 4, 4]), CODES)
        word = scales.index(slot).load(gl.SliceLayout(1, gl.SliceLayout(2, CODES)))
        free = gl.where(slot == 0, STAGES - 1, slot - 1)
        gone = gone * 2 + source.copy(ring.index(free), scales.index(free), coords)
        word = gl.where(gl.convert_layout((gone >> (STAGES - 1)) & 1, word.type.layout) == 0, word, -1)  # NaN
        coords = source.coords(ahead)
        ahead = source.rows(tile + STAGES + 1)
        products, highest = multiply(words, word, q, to)
        write_scores(tile * ROWS, products, highest, visible, w, to)
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)
    async_copy.wait_group(0)
    barrier()


@gluon.jit
def load_queries(low, high, begin, end, queries, QUERIES: gl.constexpr, HEADS: gl.constexpr, FP4: gl.constexpr):
    """Store queries begin .. begin + QUERIES - 1 in both halves of their memory, with dims in the order of the keys."""
    SIZE: gl.constexpr = QUERIES * HEADS
    if FP4 == FP4_BOTH:
        L: gl.constexpr = gl.SliceLayout(3, codes_layout(SIZE, gl.num_warps()))
        column = gl.arange(0, SIZE, layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))
        n = (begin + column // HEADS).to(gl.int64)
        head = column % HEADS
        there = (head < queries.heads) & (n < end)
        group = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))
        word = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))
        line = n * queries.stride_qn + head * queries.stride_qh
        at = line[:, None, None] * 4 + (group[None, :, None] * 4 + word[None, None, :])
        words_ptr = queries.ptr.to(gl.pointer_type(gl.int32), bitcast=True)
        words = gl.load(words_ptr + at, mask=there[:, None, None], other=0)
        scale_ptr = queries.scales_ptr + n * queries.stride_sn + head * queries.stride_sh
        scales = gl.load(scale_ptr, mask=there, other=0)
        shift = ((scales[:, None] >> (group[None, :] * 8)) & 255) - greatest_of_four(scales)[:, None] + HIGHEST
        few, many = tables(shift)
        first, last = unpacked(words, few, many, SIZE)
        low.store(first)
        high.store(last)
    else:
        B: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [gl.num_warps(), 1], [1, 0])
        column = gl.arange(0, SIZE, layout=gl.SliceLayout(1, B))
        n = (begin + column // HEADS).to(gl.int64)
        head = column % HEADS
        there = (head < queries.heads) & (n < end)
        at = gl.arange(0, 64, layout=gl.SliceLayout(0, B))
        dim = at // 4 % 4 * 32 + at // 16 * 8 + at % 4
        line = (n * queries.stride_qn + head * queries.stride_qh)[:, None] * 16 + dim[None, :]
        low.store(gl.load(queries.ptr + line, mask=there[:, None], other=0.0))
        high.store(gl.load(queries.ptr + line + 4, mask=there[:, None], other=0.0))


@gluon.jit
def prepare_queries(
    q, begin, end, queries, owners, QUERIES: gl.constexpr, HEADS: gl.constexpr, FP4: gl.constexpr, BF16: gl.constexpr
):
    """Store the queries in shared memory -> (weights of their heads, how many rows each sees), by parts."""
    PARTS: gl.constexpr = parts_of(QUERIES, HEADS)
    EACH: gl.constexpr = QUERIES // PARTS
    ACC: gl.constexpr = product_layout(gl.num_warps(), EACH * HEADS, E4M3)
    w = ()
    visible = ()
    for i in gl.static_range(PARTS):
        # Not q.slice(2 * i, 2): Triton 3.6 aborts at a slice of slots.
        load_queries(q.index(2 * i), q.index(2 * i + 1), begin + i * EACH, end, queries, EACH, HEADS, FP4)
        column = gl.arange(0, EACH * HEADS, layout=gl.SliceLayout(0, ACC))
        n = (begin + i * EACH + column // HEADS).to(gl.int64)
        head = column % HEADS
        there = (head < queries.heads) & (n < end)
        weight_ptr = queries.weights_ptr + n * queries.stride_wn + head * queries.stride_wh
        weight = gl.load(weight_ptr, mask=there, other=0.0).to(gl.float32)
        if BF16:
            weight = bf16(weight)
        if FP4 == FP4_BOTH:
            scale_ptr = queries.scales_ptr + n * queries.stride_sn + head * queries.stride_sh
            weight *= power_of_two(greatest_of_four(gl.load(scale_ptr, mask=there, other=0))) * 0.015625  # 2^-HIGHEST
        if not BF16:
            weight *= 0.5
        w = w + (weight,)
        query = begin + i * EACH + gl.arange(0, EACH, layout=gl.BlockedLayout([EACH], [32], [gl.num_warps()], [0]))
        visible = visible + (visible_rows(query, owners, query < end),)
    return w, visible


@gluon.jit
def index_scores_fp4_sm90(
    queries,
    keys,
    owners,
    scores,
    factor,
    OWNER: gl.constexpr,
    QUERIES: gl.constexpr,
    HEADS: gl.constexpr,
    FP4: gl.constexpr,
    AMONG: gl.constexpr,
    BLOCKS: gl.constexpr,
    BF16: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Compute scores. Line n of the scores is that of query first + n; only what a query sees is written, and -inf
    up to a whole group. AMONG: the scores of the rows of listed blocks, in their order, of one query. BLOCKS: the
    greatest scores of blocks, too. BF16: round as the reference model does."""
    launch_dependents()
    clear_counts(queries, scores, QUERIES)
    PARTS: gl.constexpr = parts_of(QUERIES, HEADS)
    EACH: gl.constexpr = QUERIES // PARTS
    q = gl.allocate_shared_memory(E4M3, [2 * PARTS, EACH * HEADS, DIMS // 2], query_layout())
    ring = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS, DIMS // 8], gl.SwizzledSharedLayout(4, 1, 1, [1, 0]))
    words = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    begin = queries.first + gl.program_id(0) * QUERIES
    end = gl.minimum(begin + QUERIES, queries.end)
    w, visible = prepare_queries(q, begin, end, queries, owners, QUERIES, HEADS, FP4, BF16)
    fence_async_shared()  # Q by ordinary stores -> tensor-core reads
    barrier()
    first = begin
    while first < end:  # the queries of a CTA may belong to several sequences
        sequence, next_one = owner(first, owners, OWNER)
        last = gl.minimum(next_one, end)
        if sequence < owners.requests:
            to = Outputs(scores, owners, queries, first, last, begin, factor, QUERIES, HEADS, AMONG, BLOCKS, BF16)
            score_rows(sequence, visible, w, q, ring, words, keys, to, STAGES)
        first = last
