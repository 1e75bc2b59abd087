"""The gathering warps of sparse.py, 4 or 8: they load Q of a query, then rows by number, block by block, into the ring.

A block is 64 entries of one list: of the query's window list, or of its compressed rows, which follow. cp.async loads
rows of plain tensors. Packed rows go through registers, where codes become bf16, except for what is already bf16.

A row that is not there (-1, out of range, past the length) is filled with zeros, or other finite numbers, and its bias
is -inf: 0 * NaN would be NaN.
"""

from dsv4.caches.kernels.unpack import EXACT, FEWER, QUICK, half_scales, load_scales
from dsv4.kernels import dependent
from dsv4.kernels.compat import Value, aggregate, async_copy, barrier, gl, gluon, mbarrier
from dsv4.kernels.ring import Stage
from dsv4.v4.kernels.pool_rows import entries, load_codes, load_codes_unmasked, plain_rows, row_addresses, row_offsets
from dsv4.v4.kernels.sm90.gather_block_table import block_table_blocks, whole_pages
from dsv4.v4.kernels.sm90.gather_codes import ask_codes, mixed_codes, reads_codes
from dsv4.v4.kernels.sm90.row_numbers import Pools, numbers_of, pool_of
from dsv4.v4.kernels.sm90.smem_store import (
    announce_once,
    arrivals,
    copy_plain,
    copy_rows,
    lanes,
    panels_in,
    plain_panel,
    words,
    write_bias,
)
from dsv4.v4.kernels.tile_scheduler import TABLE, index_lists, tile_coord, whole_first_coord

# Fields of the job of a work tile, in this order.
BLOCKS, QUERY, FIRST_HEAD, SPLIT_NUMBER = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2), gl.constexpr(3)


@gluon.jit
def plain_blocks(number, lists, pools, memory, first, end, phase, KV_INDEX: gl.constexpr):
    """Load blocks [first, end) of plain tensors, a half block as soon as it is free. number: of the first."""
    kv, bias = memory.kv, memory.bias
    entry = entries(lanes(gl.num_warps()))
    for block in range(first, end):
        slot = block % 2 * 2
        pool = pool_of(pools, block < lists.window_blocks)
        offset, there = plain_rows(pool, number)
        number = numbers_of(lists, block + 1, block + 1 < end, pools.compressed, entry, KV_INDEX)
        kv.acquire(Stage(slot, phase))
        copy_rows(pool.ptr, offset, there, kv.slots.index(slot), 0)
        async_copy.mbarrier_arrive(kv.ready.at(slot), increment_count=False)
        kv.ready.arrive(slot)
        kv.acquire(Stage(slot + 1, phase))
        copy_rows(pool.ptr, offset, there, kv.slots.index(slot + 1), 256)
        async_copy.mbarrier_arrive(kv.ready.at(slot + 1), increment_count=False)
        write_bias(bias.index(block % 2), there)
        kv.ready.arrive(slot + 1)
        phase = phase ^ (block % 2)
    return phase


@gluon.jit
def copy_half(pool, offset, there, memory, phase, SLOT: gl.constexpr, LAST: gl.constexpr):
    """Copy a half block into its slot, as soon as it is free. LAST: the other half is in flight, the bias follows."""
    kv = memory.kv
    kv.acquire(Stage(SLOT, phase))
    copy_rows(pool.ptr, offset, there, kv.slots.index(SLOT), 256 * (SLOT % 2))
    async_copy.mbarrier_arrive(kv.ready.at(SLOT), increment_count=False)
    if LAST:
        write_bias(memory.bias.index(SLOT // 2), there)
    kv.ready.arrive(SLOT)


@gluon.jit
def l2_resident_blocks(number, lists, pools, memory, first, end, phase, KV_INDEX: gl.constexpr):
    """Do plain_blocks for an even number of blocks, with slots in the order in which resident steps free them."""
    entry = entries(lanes(gl.num_warps()))
    odd = numbers_of(lists, first + 1, first + 1 < end, pools.compressed, entry, KV_INDEX)
    for block in range(first, end, 2):
        pool0 = pool_of(pools, block < lists.window_blocks)
        offset0, there0 = plain_rows(pool0, number)
        pool1 = pool_of(pools, block + 1 < lists.window_blocks)
        offset1, there1 = plain_rows(pool1, odd)
        number = numbers_of(lists, block + 2, block + 2 < end, pools.compressed, entry, KV_INDEX)
        odd = numbers_of(lists, block + 3, block + 3 < end, pools.compressed, entry, KV_INDEX)
        copy_half(pool0, offset0, there0, memory, phase, 0, False)
        copy_half(pool1, offset1, there1, memory, phase, 3, False)
        copy_half(pool0, offset0, there0, memory, phase, 1, True)
        copy_half(pool1, offset1, there1, memory, phase, 2, True)
        phase = phase ^ 1
    return phase


@gluon.jit
def prefetch_rows(pool, number, UNIT: gl.constexpr, FORMAT: gl.constexpr):
    """Prefetch packed rows into L2: the lines of 128 bytes of their data, and that of their scales."""
    LINES: gl.constexpr = (FORMAT.data_bytes + 127) // 128
    gl.static_assert(LINES < 8)
    L: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [gl.num_warps(), 1], [1, 0])
    R: gl.constexpr = gl.SliceLayout(1, L)
    data, there, at = row_offsets(pool, number, UNIT, FORMAT)
    line = gl.arange(0, 8, layout=gl.SliceLayout(0, L))
    offset = gl.minimum(line * 128, FORMAT.data_bytes - 128)  # the last line by its first byte that is surely the row's
    place = gl.where(
        (line < LINES)[None, :],
        gl.convert_layout(data, R)[:, None] + offset[None, :],
        gl.convert_layout(at, R)[:, None],
    )
    wanted = (gl.convert_layout(there, R)[:, None] & (line < LINES + 1)[None, :]).to(gl.int32)
    gl.inline_asm_elementwise(
        "{ .reg .pred wanted; setp.ne.b32 wanted, $2, 0; @wanted prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
        "=r,l,r",
        [pool.ptr.to(gl.int64) + place, wanted],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.constexpr_function
def has_aligned_panels(format):
    """Return whether rows begin at multiples of 16 bytes if pages do, with seven panels of 64 bytes with one byte of
    scale each, one of bf16, and planar pages: the rows that aligned_blocks and block_table_blocks read."""
    panels = (format.code_bits, format.coded_panels, format.group) == (8, 7, 64)
    return panels and format.data_step % 16 == 0 and not format.interleaved


@gluon.constexpr_function
def reads_aligned(window_format, compressed_format, unit, kv_index):
    """Return whether aligned_blocks reads the rows of both pools."""
    packed = window_format.coded > 0 and window_format == compressed_format
    return packed and kv_index != TABLE and unit >= 16 and has_aligned_panels(window_format)


@aggregate
class Asked:
    """Packed rows of a block, the first half in flight: their pool's memory, where they are, scales, codes."""

    ptr: Value
    data: Value
    there: Value
    at: Value
    low: Value
    x: Value
    y: Value


@gluon.jit
def ask(pool, number, UNIT: gl.constexpr, FORMAT: gl.constexpr):
    data, there, at = row_offsets(pool, number, UNIT, FORMAT)
    low = load_scales(pool.ptr, at, there, 0, 4, UNIT, FORMAT)
    x = load_codes(pool.ptr, data, there, 0, 2, UNIT, FORMAT)
    y = load_codes(pool.ptr, data, there, 2, 2, UNIT, FORMAT)
    return Asked(pool.ptr, data, there, at, low, x, y)


@gluon.jit
def packed_blocks(
    number,
    asked,
    lists,
    pools,
    memory,
    first,
    end,
    phase,
    KV_INDEX: gl.constexpr,
    UNIT: gl.constexpr,
    FORMAT: gl.constexpr,
    PAGES: gl.constexpr = False,
):
    """Load blocks [first, end) of packed rows, through registers. number, asked: of the first.

    The assembler gives one scoreboard to all loads whose values are used in a later basic block: a wait for one is a
    wait for all. So loads are issued right after such a wait, half a block before the next: the second half of a row
    as its first is stored, the first half of a row of the next block as the second is.

    By block table, rows are prefetched into L2 a block before that: pages of few rows load slowly from memory. There
    the cheaper scales (QUICK) would cost five reloads a block, too. Rows by list use aligned_blocks if possible;
    PAGES: those after the window block_table_blocks.
    """
    kv, bias = memory.kv, memory.bias
    AHEAD: gl.constexpr = 2 if KV_INDEX == TABLE else 1
    SPEED: gl.constexpr = QUICK if KV_INDEX != TABLE else FEWER if PAGES else EXACT
    LAST: gl.constexpr = FORMAT.coded_panels - 6  # panels of codes behind the first six; the rest of the row is bf16
    entry = entries(words(gl.num_warps()))
    following = number
    if KV_INDEX == TABLE:
        following = numbers_of(lists, first + 1, first + 1 < end, pools.compressed, entry, KV_INDEX)
        prefetch_rows(pool_of(pools, first + 1 < lists.window_blocks), following, UNIT, FORMAT)
    by_table = end
    if PAGES:
        of_window = gl.minimum(gl.maximum(first, lists.window_blocks), end)
        by_table = gl.where(whole_pages(pools.compressed, UNIT), of_window, end)
    for block in range(first, by_table):
        slot = block % 2 * 2
        # No fences here: they would wait for the loads in flight. The roles that wait for a half block issue them.
        kv.acquire(Stage(slot, phase))
        tile = kv.slots.index(slot)
        panels_in(tile, 0, 2).store(FORMAT.unpack(asked.x, asked.low, 0, SPEED, FORMAT))
        later = numbers_of(lists, block + AHEAD, block + AHEAD < end, pools.compressed, entry, KV_INDEX)
        high = load_scales(asked.ptr, asked.at, asked.there, 4, 4, UNIT, FORMAT)
        z = load_codes(asked.ptr, asked.data, asked.there, 4, 2, UNIT, FORMAT)
        u = load_codes(asked.ptr, asked.data, asked.there, 6, LAST, UNIT, FORMAT)
        panels_in(tile, 2, 2).store(FORMAT.unpack(asked.y, asked.low, 2, SPEED, FORMAT))
        mbarrier.arrive(kv.ready.at(slot), count=arrivals(gl.num_warps()))

        kv.acquire(Stage(slot + 1, phase))
        tile = kv.slots.index(slot + 1)
        if LAST == 1:
            plain_panel(asked.ptr, asked.data, asked.there, tile, kv.ready.at(slot + 1), UNIT, FORMAT)
        write_bias(bias.index(block % 2), asked.there)
        if KV_INDEX != TABLE:
            following = later
        asked = ask(pool_of(pools, block + 1 < lists.window_blocks), following, UNIT, FORMAT)
        if KV_INDEX == TABLE:
            following = later
            prefetch_rows(pool_of(pools, block + 2 < lists.window_blocks), following, UNIT, FORMAT)
        panels_in(tile, 0, 2).store(FORMAT.unpack(z, high, 0, SPEED, FORMAT))
        panels_in(tile, 2, LAST).store(FORMAT.unpack(u, high, 2, SPEED, FORMAT))
        mbarrier.arrive(kv.ready.at(slot + 1), count=1 if LAST == 1 else arrivals(gl.num_warps()))
        phase = phase ^ (block % 2)
    if PAGES:
        phase = block_table_blocks(asked, lists, pools.compressed, memory, by_table, end, phase, UNIT, FORMAT)
    return phase


@aggregate
class AlignedRows:
    """Packed rows of a block by list, the first half in flight: addresses, all scales, codes."""

    row: Value
    there: Value
    scales: Value
    x: Value
    y: Value


@gluon.jit
def load_first_half_aligned(pool, number, spare, UNIT: gl.constexpr, FORMAT: gl.constexpr):
    row, at, there = row_addresses(pool, number, spare, UNIT, FORMAT)
    scales = gl.load(at.to(gl.pointer_type(gl.int64), bitcast=True), mask=there, other=0)
    return AlignedRows(row, there, scales, load_codes_unmasked(row, 0, 2), load_codes_unmasked(row, 2, 2))


@gluon.jit
def announce(ready, COUNT: gl.constexpr, SPLIT_SLOTS: gl.constexpr):
    """Announce that all stores are done."""
    if SPLIT_SLOTS:
        announce_once(ready)
    else:
        mbarrier.arrive(ready, count=COUNT)


@gluon.jit
def keep_order(x):
    """Keep the assembler from moving a load or store across this point. x: any number."""
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def aligned_blocks(
    number,
    asked,
    spare,
    lists,
    pools,
    memory,
    first,
    end,
    phase,
    KV_INDEX: gl.constexpr,
    UNIT: gl.constexpr,
    FORMAT: gl.constexpr,
    SPLIT_SLOTS: gl.constexpr,
):
    """Do packed_blocks for rows by list at multiples of 16 bytes, with fewer instructions. An absent row is
    read at `spare`: any bytes are finite numbers with its scale of 0, and its bias masks them."""
    kv, right, bias = memory.kv, memory.kv_right, memory.bias
    RIGHT: gl.constexpr = 0 if SPLIT_SLOTS else 2  # first panel of the right half of a slot
    entry = entries(words(gl.num_warps()))
    for block in range(first, end):
        slot = block % 2 * 2
        low, high = half_scales(asked.scales, 0), half_scales(asked.scales, 1)
        kv.acquire(Stage(slot, phase))
        panels_in(kv.slots.index(slot), 0, 2).store(FORMAT.unpack(asked.x, low, 0, QUICK, FORMAT))
        z = load_codes_unmasked(asked.row, 4, 2)
        u = load_codes_unmasked(asked.row, 6, 1)
        number = numbers_of(lists, block + 1, block + 1 < end, pools.compressed, entry, KV_INDEX)
        if SPLIT_SLOTS:
            keep_order(block)
        panels_in(right.index(slot), RIGHT, 2).store(FORMAT.unpack(asked.y, low, 2, QUICK, FORMAT))
        announce(kv.ready.at(slot), arrivals(gl.num_warps()), SPLIT_SLOTS)

        kv.acquire(Stage(slot + 1, phase))
        rows = gl.multiple_of(asked.row.to(gl.pointer_type(gl.bfloat16), bitcast=True), 16)
        copy_plain(rows, asked.there, right.index(slot + 1), memory.odd_ready.at(slot + 1), FORMAT)
        write_bias(bias.index(block % 2), asked.there)
        asked = load_first_half_aligned(pool_of(pools, block + 1 < lists.window_blocks), number, spare, UNIT, FORMAT)
        if SPLIT_SLOTS:
            barrier()  # between the copies to the right half and the stores to it: loads are not issued later than here
        panels_in(kv.slots.index(slot + 1), 0, 2).store(FORMAT.unpack(z, high, 0, QUICK, FORMAT))
        panels_in(right.index(slot + 1), RIGHT, 1).store(FORMAT.unpack(u, high, 2, QUICK, FORMAT))
        announce(memory.odd_ready.at(slot + 1), 1, SPLIT_SLOTS)
        phase = phase ^ (block % 2)
    return phase


@gluon.jit
def blocks_of_pool(
    lists, pool, memory, first, end, phase, KV_INDEX: gl.constexpr, UNIT: gl.constexpr, FORMAT: gl.constexpr
):
    """Load blocks [first, end) of one pool, none of them ahead of time."""
    if FORMAT.coded > 0:
        number = numbers_of(lists, first, first < end, pool, entries(words(gl.num_warps())), KV_INDEX)
        asked = ask(pool, number, UNIT, FORMAT)
        return packed_blocks(number, asked, lists, Pools(pool, pool), memory, first, end, phase, KV_INDEX, UNIT, FORMAT)
    else:
        number = numbers_of(lists, first, first < end, pool, entries(lanes(gl.num_warps())), KV_INDEX)
        return plain_blocks(number, lists, Pools(pool, pool), memory, first, end, phase, KV_INDEX)


@gluon.jit
def mixed_blocks(
    lists, pools, memory, first, end, phase, KV_INDEX: gl.constexpr, FORMATS: gl.constexpr, UNIT: gl.constexpr
):
    """Load the window's blocks, then the others, if the rows of the two pools have two formats. Requests ahead of time
    end with a pool; slots are full then, and their readers busy."""
    middle = gl.minimum(gl.maximum(first, lists.window_blocks), end)
    phase = blocks_of_pool(lists, pools.window, memory, first, middle, phase, KV_INDEX, UNIT, FORMATS[0])
    return blocks_of_pool(lists, pools.compressed, memory, middle, end, phase, KV_INDEX, UNIT, FORMATS[1])


@gluon.jit
def write_job(job, turn, blocks, query, first_head, split):
    """Write what the other roles need to know of a work tile. There are two places: an epilogue may still read one."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    job.index(turn * 4 + BLOCKS).store(gl.full([1], blocks, gl.int32, L))
    job.index(turn * 4 + QUERY).store(gl.full([1], query, gl.int32, L))
    job.index(turn * 4 + FIRST_HEAD).store(gl.full([1], first_head, gl.int32, L))
    job.index(turn * 4 + SPLIT_NUMBER).store(gl.full([1], split, gl.int32, L))


@gluon.jit
def gather_role(
    q,
    window,
    compressed,
    requests,
    pools,
    memory,
    num_tiles,
    stride,
    sizes,
    KV_INDEX: gl.constexpr,
    FORMATS: gl.constexpr,
    UNIT: gl.constexpr,
    RESIDENT: gl.constexpr,
    PDL_WAIT: gl.constexpr,
    SPLIT: gl.constexpr,
    SPLIT_SLOTS: gl.constexpr,
    WHOLE_FIRST: gl.constexpr,
    AFTER: gl.constexpr,
):
    """Process the work tiles of this CTA in turn: Q and the number of blocks, then blocks as the ring becomes
    free. PDL_WAIT: the previous grid makes rows, and may still run. AFTER: sizes.whole queries are its own."""
    if PDL_WAIT:
        dependent.wait_on_prior_grid()
    LQ: gl.constexpr = lanes(gl.num_warps())
    phase = 1  # the first wait on an untouched barrier passes
    turn = 1
    for tile_id in range(gl.program_id(0), num_tiles, stride):
        if WHOLE_FIRST:
            query, first_head, split = whole_first_coord(tile_id, sizes.whole, sizes.queries, sizes.heads)
        else:
            query, first_head, split = tile_coord(tile_id, sizes.queries, sizes.heads)
        lists = index_lists(query, window, compressed, requests, KV_INDEX, 64, sizes.whole if AFTER else 0)
        steps = (lists.window_blocks + (lists.count + 63) // 64 + 1) // 2
        # From uneven_from steps on, a step that is left over does not lengthen a split: it becomes its own split.
        shared = steps - (steps >= sizes.uneven_from).to(gl.int32)
        each = gl.maximum((shared + sizes.num_splits - 1) // sizes.num_splits, sizes.tiles_per_split)
        if WHOLE_FIRST:
            each = gl.where(split < 0, steps, each)
        begin = gl.minimum(gl.maximum(split, 0) * each if WHOLE_FIRST else split * each, steps)
        end = gl.minimum(begin + each, steps)
        FORMAT: gl.constexpr = FORMATS[0]
        L: gl.constexpr = words(gl.num_warps()) if FORMAT.coded > 0 else LQ
        CODES: gl.constexpr = reads_codes(FORMAT, FORMATS[1], UNIT, KV_INDEX, SPLIT)
        if not CODES:
            number = numbers_of(lists, begin * 2, begin < end, pools.compressed, entries(L), KV_INDEX)
        ALIGNED: gl.constexpr = UNIT >= 16 and has_aligned_panels(FORMAT)
        READS_ALIGNED: gl.constexpr = reads_aligned(FORMAT, FORMATS[1], UNIT, KV_INDEX)
        # Rows are in flight while this role waits for the last work tile's scores, then for Q.
        if CODES:
            rows, left = ask_codes(lists, pools, q.ptr, begin * 2, end * 2, KV_INDEX, UNIT, FORMATS)
        elif FORMAT.coded > 0 and FORMAT == FORMATS[1]:
            pool = pool_of(pools, begin * 2 < lists.window_blocks)
            asked = (
                load_first_half_aligned(pool, number, q.ptr, UNIT, FORMAT)
                if READS_ALIGNED
                else ask(pool, number, UNIT, FORMAT)
            )
        memory.q_free.wait(0, turn)
        head = first_head + entries(LQ)
        offset = query.to(gl.int64) * q.stride_n + head.to(gl.int64) * q.stride_h
        for h in gl.static_range(2):
            copy_rows(q.ptr, offset, head < sizes.heads, memory.q.index(h), h * 256)
        async_copy.mbarrier_arrive(memory.q_ready.at(0), increment_count=False)
        write_job(memory.job, 1 - turn, (end - begin) * 2, query, first_head, split)
        announce(memory.q_ready.at(0), 1, SPLIT_SLOTS)
        turn = turn ^ 1
        if CODES:
            phase = mixed_codes(
                rows, left, q.ptr, lists, pools, memory, begin * 2, end * 2, phase, KV_INDEX, UNIT, FORMATS
            )
        elif FORMAT != FORMATS[1]:
            phase = mixed_blocks(lists, pools, memory, begin * 2, end * 2, phase, KV_INDEX, FORMATS, UNIT)
        elif READS_ALIGNED:
            phase = aligned_blocks(number, asked, q.ptr, lists, pools, memory, begin * 2, end * 2, phase, KV_INDEX,
                                   UNIT, FORMAT, SPLIT_SLOTS)  # fmt: skip
        elif FORMAT.coded > 0:
            # If rows are not split, the assembler would reload values in the loop.
            PAGES: gl.constexpr = KV_INDEX == TABLE and ALIGNED and SPLIT
            phase = packed_blocks(
                number, asked, lists, pools, memory, begin * 2, end * 2, phase, KV_INDEX, UNIT, FORMAT, PAGES
            )
        elif RESIDENT:
            phase = l2_resident_blocks(number, lists, pools, memory, begin * 2, end * 2, phase, KV_INDEX)
        else:
            phase = plain_blocks(number, lists, pools, memory, begin * 2, end * 2, phase, KV_INDEX)
