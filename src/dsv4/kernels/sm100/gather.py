"""The gathering role of listed.py: for each item Q, then rows picked by number, block by block, into the ring.

A block is 64 entries of one list: of the query's window list, or of its compressed rows, which follow. Rows of a plain
tensor come by TMA, four at a time, if they are equally far apart, else by cp.async; rows of an Fp8Cache come through
registers, where they become bf16. A row that is not there (-1, out of range, past the length) is filled with zeros, and
its bias is -inf: 0 * NaN would be NaN.

Values travel together in tuples::

    names     the list (or block table), its stride, its width; lengths, and whether they are given
    pool      pointer, descriptor, rows, rows per page, page and row stride / 8 (FP8: / unit), lines between pages
    ring      slots, biases, and the barriers ready and free of the slots
"""

from triton.experimental.gluon.language.nvidia.blackwell.tma import async_gather

from dsv4.kernels.compat import async_copy, gl, gluon, mbarrier, reinterpret, tma_load
from dsv4.kernels.shared import loads
from dsv4.kernels.shared.gather import FP8, LIST, NONE, TMA, fill, numbers_of, share
from dsv4.kernels.shared.tiles import split_range

ONE = gl.constexpr(gl.BlockedLayout([1, 1], [32, 1], [4, 1], [1, 0]))  # a row number per thread
FOURS = gl.constexpr(gl.SliceLayout(1, gl.BlockedLayout([4, 1], [1, 32], [4, 1], [0, 1])))  # four per TMA, by warps
HALF_BYTES = gl.constexpr(64 * 256 * 2)


@gluon.jit
def place_of(item, queries, heads):
    """(query, first head, split) of an item; the head tiles of a query are neighbours: one finds in L2 what the other
    read."""
    head_tiles = (heads + 63) // 64
    rest = item // head_tiles
    split = rest // queries
    return rest - split * queries, (item - rest * head_tiles) * 64, split


@gluon.jit
def fetch_block(pool, line_ptr, first, count, ring, at, HOW: gl.constexpr):
    """One block by TMA, four rows at a time. Line -1 is out of bounds, which TMA fills with zeros."""
    kv, bias, ready, free = ring
    ptr, desc, rows, page_rows, page_stride, row_stride, gap = pool
    number = numbers_of((line_ptr, page_rows), first, count, rows // page_rows, HOW, ONE)
    there = (number >= 0) & (number < rows)
    line = number
    if gap > 0:
        line += number // page_rows * gap
    line = gl.convert_layout(gl.where(there, line, -1), FOURS)
    for h in gl.static_range(2):
        slot = 2 * (at % 2) + h
        mbarrier.wait(free.index(slot), (at // 2 + 1) % 2)
        if h == 0:
            bias.index(at % 2).store(gl.where(there, 0.0, -float("inf")))
        mbarrier.expect(ready.index(slot), HALF_BYTES)
        async_gather(desc, line, h * 256, ready.index(slot), kv.index(slot))


@gluon.jit
def fill_block(pool, line_ptr, first, count, ring, at, HOW: gl.constexpr, IS_FP8: gl.constexpr, UNIT: gl.constexpr):
    """One block by cp.async or through registers; its first half is announced while the second is under way."""
    kv, bias, ready, free = ring
    ptr, desc, rows, page_rows, page_stride, row_stride, gap = pool
    for h in gl.static_range(2):
        slot = 2 * (at % 2) + h
        mbarrier.wait(free.index(slot), (at // 2 + 1) % 2)
        # The bias goes with the first half; that of the second has a place of its own, which nobody reads.
        place = at % 2 if h == 0 else 2
        fill((ptr, rows, page_rows, page_stride, row_stride), (line_ptr, page_rows), first, count, kv.index(slot),
             bias.index(place), h, HOW, IS_FP8, UNIT)  # fmt: skip
        async_copy.commit_group()
        if h == 1:
            loads.announce(ready.index(slot - 1), 1)
            loads.announce(ready.index(slot), 0)


@gluon.jit
def gather_block(pool, line_ptr, first, count, ring, at, HOW: gl.constexpr, WAY: gl.constexpr, UNIT: gl.constexpr):
    if WAY == TMA:
        fetch_block(pool, line_ptr, first, count, ring, at, HOW)
    else:
        fill_block(pool, line_ptr, first, count, ring, at, HOW, WAY == FP8, UNIT)


@gluon.jit
def gather_role(q_desc, names, requests, pools, q, job, q_ready, q_free, ring, items, sizes, HOW: gl.constexpr,
                WAYS: gl.constexpr, UNITS: gl.constexpr):  # fmt: skip
    """The items of this CTA, one after the other: Q and the number of blocks, then blocks as the ring becomes free."""
    queries, heads, num_splits, tiles_per_split = sizes
    window_list, window_line, window_width, window_lengths, window_given = names[0]
    compressed_list, compressed_line, compressed_width, compressed_lengths, compressed_given = names[1]
    BOX: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    at = 0  # blocks so far
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        query, first_head, split = place_of(item, queries, heads)
        window_count, compressed_count, line = share(
            query, (window_lengths, window_given, window_width),
            (compressed_lengths, compressed_given, compressed_width), requests, HOW,
        )  # fmt: skip
        window_blocks = (window_count + 63) // 64
        blocks = window_blocks + (compressed_count + 63) // 64
        begin, end = split_range(blocks, split, num_splits, tiles_per_split)
        mbarrier.wait(q_free, (turn + 1) % 2)
        job.store(gl.full([1], end - begin, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
        mbarrier.expect(q_ready, 2 * HALF_BYTES)
        for h in gl.static_range(2):
            tma_load(q_desc, [query, first_head, h * 256], q_ready, reinterpret(q.index(h), [1, 64, 256], BOX))
        window_ptr = window_list + query.to(gl.int64) * window_line
        compressed_ptr = compressed_list + line * compressed_line
        for block in range(begin, end):
            if HOW == NONE:
                gather_block(pools[0], window_ptr, block * 64, window_count, ring, at, LIST, WAYS[0], UNITS[0])
            elif block < window_blocks:
                gather_block(pools[0], window_ptr, block * 64, window_count, ring, at, LIST, WAYS[0], UNITS[0])
            else:
                gather_block(pools[1], compressed_ptr, (block - window_blocks) * 64, compressed_count, ring, at, HOW,
                             WAYS[1], UNITS[1])  # fmt: skip
            at += 1
        turn += 1
