"""fp4.py where TMA copies the keys: BOX rows at a time, of all rows that a query sees, in pages of whole boxes; or
BLOCK rows at a time, of the blocks that one query looks into (AMONG).

Instructions limit these scores, so the compute warps do nothing else; one load warp looks up page numbers and issues
the copies of boxes, as far ahead as the ring allows::

    load      page numbers of 16 tiles, 16 tiles ahead | tile i: keys and scales of two boxes
    compute   PIECES of tile i, one after the other: keys -> registers | e2m1 -> e4m3 | product | sum, maxima

shared memory   bytes                   holds
q               128 QUERIES HEADS       e4m3 [2 PARTS][QUERIES HEADS / PARTS, 64], with the 64-byte swizzle
keys            STAGES x 8192           FP4 [2][BOX, 16 words], with the 64-byte swizzle
scales          STAGES x 512            four ue8m0 for each of 2 BOX rows
there           STAGES x 8              int32 [2]: rows of a box that count; 0 where there is no page
AMONG:
there           STAGES x 256            int32 [64]: rows of a block that count, twice; the least of them, 32 times

barrier         arrives     count   waits       means
ready[s]        TMA, lanes  1, 33   compute     tile in slot s: load expects the bytes of its copies. AMONG: each lane
                                                copies scales, and arrives when they are there
free[s]         compute     1       load        all of slot s is in registers

TMA fills zeros for a page that does not exist. Its rows, and those that the one query does not see, get NaN as their
scale when they are read, and are chosen last.
"""

from dsv4.index.kernels.scores import BLOCK, FOREVER, clear_counts, owner, visible_rows
from dsv4.index.kernels.sm90.fp4 import (
    DIMS,
    E4M3,
    ROWS,
    Outputs,
    codes_layout,
    multiply,
    prepare_queries,
    query_layout,
    row_coords,
    tile_range,
    words_layout,
    write_scores,
)
from dsv4.index.kernels.sm90.pages import BOX, parts_of
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
    mbarrier,
    reinterpret_as,
    tma_load,
)
from dsv4.kernels.dependent import launch_dependents
from dsv4.kernels.ring import Barriers, consumer_stage, init_barriers, new_barriers, next_stage, producer_stage

HALVES = gl.constexpr(2)  # boxes of a tile
LOAD_REGS = gl.constexpr(48)  # registers of the load role where blocks are listed


@aggregate
class Boxes:
    """The ring of boxes."""

    keys: Value
    scales: Value
    there: Value
    ready: Barriers
    free: Barriers


@gluon.constexpr_function
def box_layout(rank):
    return gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=32, rank=rank)


@gluon.constexpr_function
def pair_layout(warps):
    """Return the layout of int32 [2], with both in every thread."""
    return gl.DistributedLinearLayout(
        reg_bases=[[1]], lane_bases=[[0]] * 5, warp_bases=[[0]] * (warps.bit_length() - 1), block_bases=[], shape=[2]
    )


@gluon.jit
def box_coords(tile, step, sequence, owners, keys):
    """Return the coordinates of the boxes of 16 tiles, one per lane."""
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    row = (tile + lane // 2 * step) * ROWS + lane % 2 * BOX
    line_ptr = owners.table_ptr + sequence.to(gl.int64) * owners.table_line
    there = (sequence < owners.requests) & (row >= 0) & (row < owners.capacity)
    at = row_coords(row, there, line_ptr, keys)
    return at.page, at.row


@gluon.jit
def load_role(keys_desc, scales_desc, boxes, keys, begin, end, to, OWNER: gl.constexpr):
    PARTS: gl.constexpr = parts_of(to.QUERIES, to.HEADS)
    EACH: gl.constexpr = to.QUERIES // PARTS
    owners, apart = to.owners, gl.num_programs(1)
    if to.QUERIES == 1:
        # If tiles are spread, their page numbers do not depend on how many rows the query sees: both are read at once.
        sequence, _ = owner(begin, owners, OWNER)
        at = box_coords(gl.program_id(1), apart, sequence, owners, keys)
        after = box_coords(gl.program_id(1) + 16 * apart, apart, sequence, owners, keys)
    visible = ()
    for i in gl.static_range(PARTS):
        query = begin + i * EACH + gl.arange(0, EACH, layout=gl.BlockedLayout([EACH], [32], [gl.num_warps()], [0]))
        visible = visible + (visible_rows(query, owners, query < end),)
    stage = producer_stage()
    if to.QUERIES == 1:
        if (begin < end) & (sequence < owners.requests):
            work = tile_range(visible, to.of(begin, end), to.queries.spread)
            if to.queries.spread == 0:
                at = box_coords(work.start, 1, sequence, owners, keys)
                after = box_coords(work.start + 16, 1, sequence, owners, keys)
            load_tiles(keys_desc, scales_desc, boxes, stage, at, after, work, sequence, owners, keys)
    else:
        first = begin
        while first < end:
            sequence, next_one = owner(first, owners, OWNER)
            last = gl.minimum(next_one, end)
            if sequence < owners.requests:
                work = tile_range(visible, to.of(first, last), False)
                at = box_coords(work.start, 1, sequence, owners, keys)
                after = box_coords(work.start + 16, 1, sequence, owners, keys)
                stage = load_tiles(keys_desc, scales_desc, boxes, stage, at, after, work, sequence, owners, keys)
            first = last


@gluon.jit
def load_tiles(keys_desc, scales_desc, boxes, stage, coords, after, work, sequence, owners, keys):
    """Request the tiles of a sequence -> the next stage. coords, after: of the first 16 tiles, and of the next 16."""
    STAGES: gl.constexpr = boxes.there.shape[0]
    page, place = coords
    next_page, next_place = after
    lane = gl.arange(0, 32, layout=page.type.layout)
    half = gl.arange(0, 2, layout=pair_layout(gl.num_warps()))
    at, tile = gl.to_tensor(0), work.start
    while tile < work.stop:
        if at == 32:
            page, place = next_page, next_place
            next_page, next_place = box_coords(tile + 16 * work.step, work.step, sequence, owners, keys)
            at = at * 0
        left, right = gl.sum(gl.where(lane == at, page, 0), 0), gl.sum(gl.where(lane == at + 1, page, 0), 0)
        boxes.free.wait(stage.index, stage.phase)
        rows = gl.minimum(work.most - tile * ROWS - half * BOX, BOX)
        boxes.there.index(stage.index).store(gl.where(gl.where(half == 0, left, right) < 0, 0, rows))
        ready = boxes.ready.at(stage.index)
        mbarrier.expect(ready, ROWS * (DIMS // 2 + 4))
        for i in gl.static_range(2):
            number = left if i == 0 else right
            row = gl.sum(gl.where(lane == at + i, place, 0), 0)
            slot = HALVES * stage.index + i
            tma_load(keys_desc, [number, row, 0], ready, boxes.keys.index(slot))
            tma_load(scales_desc, [number, row], ready, boxes.scales.index(slot))
        at += 2
        tile += work.step
        stage = next_stage(stage, STAGES)
    return stage


@gluon.jit
def listed_blocks(tile, query, owners):
    """Return the blocks of a tile, twice: lanes 0-15 and 16-31. Below 0 past the last one."""
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    place = tile * (ROWS // BLOCK) + lane % (ROWS // BLOCK)
    line = owners.among_ptr + query.to(gl.int64) * owners.among_line
    return gl.load(line + place, mask=place < owners.among, other=-1)


@gluon.jit
def first_rows(block):
    """Return the first row of each block; a number past all rows must not overflow."""
    return gl.minimum(block, FOREVER // BLOCK - 1) * BLOCK


@gluon.jit
def pages_of_blocks(block, most, line_ptr, keys):
    row = first_rows(block)
    return row_coords(gl.maximum(row, 0), (block >= 0) & (row < most), line_ptr, keys).page


@gluon.jit
def copy_scales(to, page, row, keys, ready):
    """Copy the scales of the blocks of a tile, 16 bytes by each lane; the barrier counts its lanes. Absent blocks are
    not read."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [16, 2], [1, 1], [0, 1])  # lanes l and l + 16 have block l
    page, row = blocks_of(page, L), blocks_of(row, L)
    words_ptr = keys.ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    first = (page.to(gl.int64) * keys.page_stride + keys.page_rows * 4) * 4 + row // BLOCK * BLOCK
    word = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, L))
    cp_async(to, words_ptr + (first[:, None] + word[None, :]), mask=(page >= 0)[:, None])
    async_copy.mbarrier_arrive(ready, increment_count=False)


@gluon.jit
def blocks_of(x, L: gl.constexpr):
    """Return one of each two lanes of x [32], l and l + 16, which are alike."""
    return gl.convert_layout(gl.max(gl.reshape(x, [2, 16]), 0), gl.SliceLayout(1, L))


@gluon.jit
def load_blocks_role(keys_desc, boxes, keys, begin, end, to, OWNER: gl.constexpr):
    """Load for one query: blocks of tile i + 2 and pages of tile i + 1 are in flight while tile i is requested."""
    STAGES: gl.constexpr = boxes.there.shape[0]
    COUNT: gl.constexpr = ROWS // BLOCK
    start, step = gl.program_id(1), gl.num_programs(1)
    sequence, _ = owner(begin, to.owners, OWNER)
    if (begin < end) & (sequence < to.owners.requests):
        block = listed_blocks(start, begin, to.owners)
        next_block = listed_blocks(start + step, begin, to.owners)
        query = begin + gl.arange(0, 1, layout=gl.BlockedLayout([1], [32], [1], [0]))
        work = tile_range((visible_rows(query, to.owners, query < end),), to.of(begin, end), True)
        line_ptr = to.owners.table_ptr + sequence.to(gl.int64) * to.owners.table_line
        stage = producer_stage()
        page = pages_of_blocks(block, work.most, line_ptr, keys)
        lane = gl.arange(0, 32, layout=block.type.layout)
        tile = start
        while tile < work.stop:
            row = first_rows(block)
            rows = gl.where(page < 0, 0, gl.minimum(work.most - row, BLOCK))
            place = row - page_of(row, keys.inverse, keys.shift) * keys.page_rows
            number = page
            block = next_block
            page = pages_of_blocks(block, work.most, line_ptr, keys)  # pages of the next tile
            next_block = listed_blocks(tile + 2 * step, begin, to.owners)
            boxes.free.wait(stage.index, stage.phase)
            there = boxes.there.index(stage.index)
            there.slice(0, 32).store(rows)
            there.slice(32, 32).store(gl.full([32], gl.min(rows, 0), gl.int32, lane.type.layout))
            ready = boxes.ready.at(stage.index)
            mbarrier.expect(ready, ROWS * (DIMS // 2))
            copy_scales(boxes.scales.index(stage.index), number, place, keys, ready)
            for i in gl.static_range(COUNT):
                at = [gl.sum(gl.where(lane == i, number, 0), 0), gl.sum(gl.where(lane == i, place, 0), 0), 0]
                tma_load(keys_desc, at, ready, boxes.keys.index(COUNT * stage.index + i))
            tile += step
            stage = next_stage(stage, STAGES)


@gluon.constexpr_function
def block_rows(blocks, warps):
    """Return the layout of [blocks, BLOCK], with the same rows per warp as in codes_layout."""
    more = [[1 << i, 0] for i in range((blocks - 1).bit_length())]
    across = more[1 : warps.bit_length()]
    return gl.DistributedLinearLayout(
        reg_bases=more[:1] + more[warps.bit_length() :],
        lane_bases=[[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]],
        warp_bases=across,
        block_bases=[],
        shape=[blocks, 8],
    )


@gluon.jit
def score_blocks_role(q, boxes, queries, begin, end, to, OWNER: gl.constexpr, FP4: gl.constexpr, PIECES: gl.constexpr):
    N: gl.constexpr = ROWS // PIECES
    CODES: gl.constexpr = gl.SliceLayout(3, codes_layout(N, gl.num_warps()))
    WORDS: gl.constexpr = words_layout(N, gl.num_warps())
    LINE: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, CODES))
    STAGES: gl.constexpr = boxes.there.shape[0]
    L: gl.constexpr = block_rows(N // BLOCK, gl.num_warps())
    tiles = reinterpret_as(boxes.keys, gl.int32, [PIECES * STAGES, N, DIMS // 8], box_layout(2))
    lines = reinterpret_as(boxes.scales, gl.int32, [PIECES * STAGES, N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    row = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, L))[None, :]
    w, visible = prepare_queries(q, begin, end, queries, to.owners, to.QUERIES, to.HEADS, FP4, to.BF16)
    fence_async_shared()  # Q by ordinary stores -> tensor-core reads
    barrier()
    sequence, _ = owner(begin, to.owners, OWNER)
    if (begin < end) & (sequence < to.owners.requests):
        part = to.of(begin, end)
        work = tile_range(visible, part, True)
        stage, tile = consumer_stage(), work.start
        while tile < work.stop:
            boxes.ready.wait(stage.index, stage.phase)
            there = boxes.there.index(stage.index)
            least = gl.min(there.slice(32, 2).load(pair_layout(gl.num_warps())), 0)
            for i in gl.static_range(PIECES):
                at = PIECES * stage.index + i
                words = gl.convert_layout(gl.reshape(tiles.index(at).load(WORDS), [N, 4, 4]), CODES)
                word = lines.index(at).load(LINE)
                if least < BLOCK:  # NaN for absent rows
                    rows = there.slice(i * (N // BLOCK), N // BLOCK).load(gl.SliceLayout(1, L))
                    absent = gl.reshape((row >= rows[:, None]).to(gl.int32), [N])
                    word = gl.where(gl.convert_layout(absent, LINE) == 0, word, -1)
                if i == PIECES - 1:
                    boxes.free.arrive(stage.index)
                products, highest = multiply(words, word, q, part)
                write_scores(tile * ROWS + i * N, products, highest, visible, w, part)
            tile += work.step
            stage = next_stage(stage, STAGES)


@gluon.jit
def score_role(q, boxes, queries, begin, end, to, OWNER: gl.constexpr, FP4: gl.constexpr, PIECES: gl.constexpr):
    N: gl.constexpr = ROWS // PIECES
    CODES: gl.constexpr = gl.SliceLayout(3, codes_layout(N, gl.num_warps()))
    WORDS: gl.constexpr = words_layout(N, gl.num_warps())
    STAGES: gl.constexpr = boxes.there.shape[0]
    tiles = reinterpret_as(boxes.keys, gl.int32, [PIECES * STAGES, N, DIMS // 8], box_layout(2))
    lines = reinterpret_as(boxes.scales, gl.int32, [PIECES * STAGES, N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    row = gl.arange(0, N, layout=gl.SliceLayout(1, gl.SliceLayout(2, CODES)))
    half = gl.arange(0, 2, layout=pair_layout(gl.num_warps()))
    w, visible = prepare_queries(q, begin, end, queries, to.owners, to.QUERIES, to.HEADS, FP4, to.BF16)
    fence_async_shared()  # Q by ordinary stores -> tensor-core reads
    barrier()
    stage = consumer_stage()
    first = begin
    while first < end:  # the queries of a CTA may belong to several sequences
        sequence, next_one = owner(first, to.owners, OWNER)
        last = gl.minimum(next_one, end)
        if sequence < to.owners.requests:
            part = to.of(first, last)
            work = tile_range(visible, part, queries.spread if to.QUERIES == 1 else False)
            tile = work.start
            while tile < work.stop:
                boxes.ready.wait(stage.index, stage.phase)
                there = boxes.there.index(stage.index).load(half.type.layout)
                left, right = gl.sum(gl.where(half == 0, there, 0), 0), gl.sum(gl.where(half == 1, there, 0), 0)
                for i in gl.static_range(PIECES):
                    at = PIECES * stage.index + i
                    words = gl.convert_layout(gl.reshape(tiles.index(at).load(WORDS), [N, 4, 4]), CODES)
                    word = lines.index(at).load(row.type.layout)
                    if i == PIECES - 1:
                        boxes.free.arrive(stage.index)
                    if gl.minimum(left, right) < BOX:  # NaN for absent rows
                        if PIECES == 1:
                            word = gl.where(row < gl.where(row < BOX, left, right + BOX), word, -1)
                        else:
                            word = gl.where(row < (left if i == 0 else right), word, -1)
                    products, highest = multiply(words, word, q, part)
                    write_scores(tile * ROWS + i * N, products, highest, visible, w, part)
                tile += work.step
                stage = next_stage(stage, STAGES)
        first = last


@gluon.jit
def index_scores_fp4_boxes_sm90(
    queries,
    keys_desc,
    scales_desc,
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
    PIECES: gl.constexpr,
):
    """Run index_scores_fp4_sm90 with boxes that TMA copies."""
    launch_dependents()
    clear_counts(queries, scores, QUERIES)
    PARTS: gl.constexpr = parts_of(QUERIES, HEADS)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q = gl.allocate_shared_memory(E4M3, [2 * PARTS, QUERIES // PARTS * HEADS, DIMS // 2], query_layout())
    N: gl.constexpr = BLOCK if AMONG else BOX  # rows of a copy, and how many to a tile
    COUNT: gl.constexpr = ROWS // N
    if AMONG:
        scales = gl.allocate_shared_memory(gl.int32, [STAGES, COUNT, N], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    else:
        scales = gl.allocate_shared_memory(gl.int32, [COUNT * STAGES, 1, N], scales_desc.layout)
    boxes = Boxes(
        gl.allocate_shared_memory(gl.int32, [COUNT * STAGES, 1, N, DIMS // 8], box_layout(3)),
        scales,
        gl.allocate_shared_memory(gl.int32, [STAGES, 64 if AMONG else HALVES], PLAIN),
        new_barriers(STAGES, 33 if AMONG else 1),
        new_barriers(STAGES),
    )
    init_barriers((boxes.ready, boxes.free))
    begin = queries.first + gl.program_id(0) * QUERIES
    end = gl.minimum(begin + QUERIES, queries.end)
    to = Outputs(scores, owners, queries, begin, end, begin, factor, QUERIES, HEADS, AMONG, BLOCKS, BF16)
    if AMONG:
        gl.warp_specialize(
            [
                (score_blocks_role, (q, boxes, queries, begin, end, to, OWNER, FP4, PIECES)),
                (load_blocks_role, (keys_desc, boxes, keys, begin, end, to, OWNER)),
            ],
            [1],
            [LOAD_REGS],
        )
    else:
        gl.warp_specialize(
            [
                (score_role, (q, boxes, queries, begin, end, to, OWNER, FP4, PIECES)),
                (load_role, (keys_desc, scales_desc, boxes, keys, begin, end, to, OWNER)),
            ],
            [1],
            [24],
        )
