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
scales          STAGES x 2048           those of 32 rows from the first of a block on, of which BLOCK count: copies go
                                        to multiples of 128 bytes
there           STAGES x 128            int32 [32]: rows of a block that count, twice

barrier         arrives     count   waits       means
ready[s]        TMA         1       compute     tile in slot s: load expects the bytes of its four copies
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
)
from dsv4.kernels.dependent import launch_dependents
from dsv4.kernels.ring import Barriers, consumer_stage, init_barriers, new_barriers, next_stage, producer_stage

HALVES = gl.constexpr(2)  # boxes of a tile
LOAD_REGS = gl.constexpr(40)  # where blocks are listed


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
    """Layout of int32 [2], with both in every thread."""
    return gl.DistributedLinearLayout(
        reg_bases=[[1]], lane_bases=[[0]] * 5, warp_bases=[[0]] * (warps.bit_length() - 1), block_bases=[], shape=[2]
    )


@gluon.jit
def box_coords(tile, work, keys):
    """Return the coordinates of the boxes of 16 tiles, one per lane."""
    row = tile * ROWS + gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0])) * BOX
    at = row_coords(row, row < work.columns, work.line_ptr, keys)
    return at.page, at.row


@gluon.jit
def load_role(keys_desc, scales_desc, boxes, keys, begin, end, to, OWNER: gl.constexpr):
    PARTS: gl.constexpr = parts_of(to.QUERIES, to.HEADS)
    EACH: gl.constexpr = to.QUERIES // PARTS
    STAGES: gl.constexpr = boxes.there.shape[0]
    half = gl.arange(0, 2, layout=pair_layout(gl.num_warps()))
    visible = ()
    for i in gl.static_range(PARTS):
        query = begin + i * EACH + gl.arange(0, EACH, layout=gl.BlockedLayout([EACH], [32], [gl.num_warps()], [0]))
        visible = visible + (visible_rows(query, to.owners, query < end),)
    stage = producer_stage()
    first = begin
    while first < end:
        sequence, next_one = owner(first, to.owners, OWNER)
        last = gl.minimum(next_one, end)
        if sequence < to.owners.requests:
            work = tile_range(sequence, visible, to.of(first, last))
            page, place = box_coords(work.start, work, keys)
            next_page, next_place = box_coords(work.start + 16, work, keys)
            lane = gl.arange(0, 32, layout=page.type.layout)
            at = gl.to_tensor(0)
            for tile in range(work.start, work.stop):
                if at == 32:
                    page, place = next_page, next_place
                    next_page, next_place = box_coords(tile + 16, work, keys)
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
                stage = next_stage(stage, STAGES)
        first = last


@gluon.jit
def listed_blocks(tile, work, query, owners):
    """Return the blocks of a tile, twice: lanes 0-15 and 16-31. Below 0 past the last one."""
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    place = tile * (ROWS // BLOCK) + lane % (ROWS // BLOCK)
    line = owners.among_ptr + query.to(gl.int64) * owners.among_line
    return gl.load(line + place, mask=place * BLOCK < work.columns, other=-1)


@gluon.jit
def block_coords(block, work, keys):
    """Return (page numbers in lanes 0-15 and rows there in lanes 16-31; rows of each block that count)"""
    lane = gl.arange(0, 32, layout=block.type.layout)
    row = gl.minimum(block, FOREVER // BLOCK - 1) * BLOCK  # a number past all rows must not overflow
    at = row_coords(gl.maximum(row, 0), (block >= 0) & (row < work.most), work.line_ptr, keys)
    rows = gl.where(at.page < 0, 0, gl.minimum(work.most - row, BLOCK))
    return gl.where(lane < ROWS // BLOCK, at.page, at.row), rows


@gluon.jit
def load_blocks_role(keys_desc, scales_desc, boxes, keys, begin, end, to, OWNER: gl.constexpr):
    """Load for one query: blocks of tile i + 2 and pages of tile i + 1 are in flight while tile i is requested."""
    STAGES: gl.constexpr = boxes.there.shape[0]
    COUNT: gl.constexpr = ROWS // BLOCK
    query = begin + gl.arange(0, 1, layout=gl.BlockedLayout([1], [32], [1], [0]))
    visible = (visible_rows(query, to.owners, query < end),)
    sequence, _ = owner(begin, to.owners, OWNER)
    if (begin < end) & (sequence < to.owners.requests):
        work = tile_range(sequence, visible, to.of(begin, end))
        stage = producer_stage()
        coords, rows = block_coords(listed_blocks(work.start, work, begin, to.owners), work, keys)
        block = listed_blocks(work.start + 1, work, begin, to.owners)
        lane = gl.arange(0, 32, layout=block.type.layout)
        for tile in range(work.start, work.stop):
            next_coords, next_rows = block_coords(block, work, keys)
            block = listed_blocks(tile + 2, work, begin, to.owners)
            boxes.free.wait(stage.index, stage.phase)
            boxes.there.index(stage.index).store(rows)
            ready = boxes.ready.at(stage.index)
            mbarrier.expect(ready, ROWS * (DIMS // 2) + COUNT * 128)
            for i in gl.static_range(COUNT):
                page = gl.sum(gl.where(lane == i, coords, 0), 0)
                place = gl.sum(gl.where(lane == COUNT + i, coords, 0), 0)
                slot = COUNT * stage.index + i
                tma_load(keys_desc, [page, place, 0], ready, boxes.keys.index(slot))
                tma_load(scales_desc, [page, place], ready, boxes.scales.index(slot))
            coords, rows = next_coords, next_rows
            stage = next_stage(stage, STAGES)


@gluon.constexpr_function
def block_rows(warps):
    """Layout of [8, BLOCK], in the order of the 64 rows of words_layout."""
    return gl.DistributedLinearLayout(
        reg_bases=[[1, 0]],
        lane_bases=[[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]],
        warp_bases=[[2, 0], [4, 0]],
        block_bases=[],
        shape=[8, 8],
    )


@gluon.jit
def score_blocks_role(q, boxes, queries, begin, end, to, OWNER: gl.constexpr, FP4: gl.constexpr, PIECES: gl.constexpr):
    N: gl.constexpr = ROWS // PIECES
    gl.static_assert(PIECES == 2)  # the load warp leaves no registers for a whole tile
    CODES: gl.constexpr = gl.SliceLayout(3, codes_layout(N, gl.num_warps()))
    WORDS: gl.constexpr = words_layout(N, gl.num_warps())
    LINE: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, CODES))
    STAGES: gl.constexpr = boxes.there.shape[0]
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    L: gl.constexpr = block_rows(gl.num_warps())
    tiles = reinterpret_as(boxes.keys, gl.int32, [PIECES * STAGES, N, DIMS // 8], box_layout(2))
    lines = reinterpret_as(boxes.scales, gl.int32, [PIECES * STAGES, N // BLOCK, 32], PLAIN)
    row = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, L))[None, :]
    w, visible = prepare_queries(q, begin, end, queries, to.owners, to.QUERIES, to.HEADS, FP4, to.BF16)
    fence_async_shared()  # Q by ordinary stores -> tensor-core reads
    barrier()
    sequence, _ = owner(begin, to.owners, OWNER)
    if (begin < end) & (sequence < to.owners.requests):
        part = to.of(begin, end)
        work = tile_range(sequence, visible, part)
        stage = consumer_stage()
        for tile in range(work.start, work.stop):
            boxes.ready.wait(stage.index, stage.phase)
            for i in gl.static_range(PIECES):
                at = PIECES * stage.index + i
                words = gl.convert_layout(gl.reshape(tiles.index(at).load(WORDS), [N, 4, 4]), CODES)
                word = lines.index(at).slice(0, BLOCK, dim=1).load(L)
                there = boxes.there.index(stage.index).slice(i * (N // BLOCK), N // BLOCK).load(gl.SliceLayout(1, L))
                if i == PIECES - 1:
                    boxes.free.arrive(stage.index)
                word = gl.where(row < there[:, None], word, -1)  # NaN for absent rows
                word = gl.convert_layout(gl.reshape(word, [N]), LINE)
                products, highest = multiply(words, word, q, part)
                write_scores(tile * ROWS + i * N, products, highest, visible, w, part)
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
            work = tile_range(sequence, visible, part)
            for tile in range(work.start, work.stop):
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
    q = gl.allocate_shared_memory(E4M3, [2 * PARTS, QUERIES // PARTS * HEADS, DIMS // 2], query_layout())
    N: gl.constexpr = BLOCK if AMONG else BOX  # rows of a copy, and how many to a tile
    COUNT: gl.constexpr = ROWS // N
    boxes = Boxes(
        gl.allocate_shared_memory(gl.int32, [COUNT * STAGES, 1, N, DIMS // 8], box_layout(3)),
        gl.allocate_shared_memory(gl.int32, [COUNT * STAGES, 1, max(N, 32)], scales_desc.layout),
        gl.allocate_shared_memory(gl.int32, [STAGES, 32 if AMONG else HALVES], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        new_barriers(STAGES),
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
                (load_blocks_role, (keys_desc, scales_desc, boxes, keys, begin, end, to, OWNER)),
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
