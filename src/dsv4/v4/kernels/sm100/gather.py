"""The gathering role of sparse.py: for each work tile it loads Q, then rows by number, block by block, into the ring.

A block is 64 entries of one list: of the query's window list, or of its compressed rows, which follow. TMA loads rows
of a plain tensor, four at a time, if they are equally spaced, else cp.async does; packed rows go through registers,
where they become bf16. A row that is not there (-1, out of range, past the length) is filled with zeros, and its bias
is -inf: 0 * NaN would be NaN.

Row numbers are read a block ahead of their rows, and packed rows before their slots are free, so that the waits do not
add up.
"""

from triton.experimental.gluon.language.nvidia.blackwell.tma import async_gather

from dsv4.caches.kernels.unpack import load_scales, panel_scale_bytes
from dsv4.fmha.kernels import loads
from dsv4.fmha.kernels.tiles import split_range
from dsv4.kernels.compat import (
    Value,
    aggregate,
    async_copy,
    cp_async,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    tma_load,
)
from dsv4.kernels.ring import Stage
from dsv4.v4.kernels.pool_rows import scales_begin
from dsv4.v4.kernels.tile_scheduler import LIST, NONE, TMA, index_lists, tile_coord

ONE = gl.constexpr(gl.BlockedLayout([1, 1], [32, 1], [4, 1], [1, 0]))  # a row per thread
FOURS = gl.constexpr(gl.BlockedLayout([4, 1], [1, 32], [4, 1], [0, 1]))  # four rows per TMA, distributed over warps
LANES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # 16 bytes of bf16 per thread
LANES8 = gl.constexpr(gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0]))  # 16 bytes of codes per thread
LANES4 = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))  # the same number of 4-bit codes
PANEL = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
HALF_BYTES = gl.constexpr(64 * 256 * 2)


@aggregate
class TmaPool:
    """Rows by number. Strides are in units of 8 elements, of packed rows in units of UNIT bytes."""

    ptr: Value
    desc: Value  # TMA descriptor of the pool's lines
    rows: Value
    page_rows: Value
    page_stride: Value
    row_stride: Value
    gap: Value  # lines between pages


@aggregate
class TmaPools:
    window: TmaPool
    compressed: TmaPool


@gluon.jit
def pools_of(window, window_desc, compressed, compressed_desc):
    return TmaPools(pool_with(window, window_desc), pool_with(compressed, compressed_desc))


@gluon.jit
def pool_with(sizes, desc):
    return TmaPool(sizes.ptr, desc, sizes.rows, sizes.page_rows, sizes.page_stride, sizes.row_stride, sizes.gap)


@gluon.jit
def numbers_at(lists, block, end, compressed, KV_INDEX: gl.constexpr, KEYS: gl.constexpr = 64, L: gl.constexpr = ONE):
    """Load row numbers of the entries of a block, -1 past the end of its list, or everywhere from block `end` on."""
    in_window = block < lists.window_blocks
    start = gl.where(in_window, 0, lists.window_blocks)
    place = (block - start) * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(1, L))
    listed = in_window & (place < lists.window_count) & (block < end)
    further = (block >= lists.window_blocks) & (place < lists.count) & (block < end)
    if KV_INDEX == NONE:
        number = gl.load(lists.window_ptr + place, mask=listed, other=-1)
    elif KV_INDEX == LIST:
        list_ptr = gl.where(in_window, lists.window_ptr, lists.line_ptr)
        number = gl.load(list_ptr + place, mask=listed | further, other=-1)
    else:
        page_rows = compressed.page_rows
        number = gl.load(lists.window_ptr + place, mask=listed, other=-1)
        page = gl.load(lists.line_ptr + place // page_rows, mask=further, other=-1)
        page = gl.where(page < compressed.rows // page_rows, page, -1)  # clamped before the product, which may overflow
        number = gl.where(page >= 0, page * page_rows + place % page_rows, number)
    return number


@gluon.jit
def write_bias(bias, there):
    """Write the bias of a block's scores. The last one has been read: its slots were freed after that."""
    bias.store(gl.where(there, 0.0, -float("inf")))


@gluon.jit
def fetch_block(pool, number, memory, at):
    """Load one block by TMA, four rows at a time. Line -1 is out of bounds, which TMA fills with zeros."""
    kv, bias = memory.kv, memory.bias
    there = (number >= 0) & (number < pool.rows)
    line = number
    if pool.gap > 0:
        line += number // pool.page_rows * pool.gap
    line = gl.convert_layout(gl.where(there, line, -1), gl.SliceLayout(1, FOURS))
    for h in gl.static_range(2):
        slot = 2 * (at % 2) + h
        kv.acquire(Stage(slot, (at // 2 + 1) % 2))
        if h == 0:
            write_bias(bias.index(at % 2), there)
        mbarrier.expect(kv.ready.at(slot), HALF_BYTES)
        async_gather(pool.desc, line, h * 256, kv.ready.at(slot), kv.slots.index(slot))


@gluon.jit
def copy_block(pool, number, memory, at):
    """Load one block by cp.async; its first half is announced while the second is in flight."""
    kv, bias = memory.kv, memory.bias
    number = gl.convert_layout(number, gl.SliceLayout(1, LANES))
    there = (number >= 0) & (number < pool.rows)
    page = number // pool.page_rows
    offset = page.to(gl.int64) * pool.page_stride + (number - page * pool.page_rows).to(gl.int64) * pool.row_stride
    pointers = pool.ptr + offset[:, None] * 8 + gl.arange(0, 64, layout=gl.SliceLayout(0, LANES))[None, :]
    for h in gl.static_range(2):
        slot = 2 * (at % 2) + h
        panels = reinterpret(kv.slots.index(slot), [4, 64, 64], PANEL)
        kv.acquire(Stage(slot, (at // 2 + 1) % 2))
        if h == 0:
            write_bias(bias.index(at % 2), there)
        for i in gl.static_range(4):
            cp_async(panels.index(i), pointers + (h * 256 + i * 64), mask=there[:, None])
        async_copy.commit_group()
        if h == 1:
            loads.announce(kv.ready.at(slot - 1), 1)
            loads.announce(kv.ready.at(slot), 0)


@gluon.jit
def panel_bytes(ptr, data, there, INDEX: gl.constexpr, FORMAT: gl.constexpr):
    """Load the codes of a panel of 64 values of each row, as bytes."""
    BYTES: gl.constexpr = FORMAT.panel_words * 4
    if FORMAT.code_bits == 4:
        data = gl.convert_layout(data, gl.SliceLayout(1, LANES4), assert_trivial=True)
        there = gl.convert_layout(there, gl.SliceLayout(1, LANES4), assert_trivial=True)
    column = INDEX * BYTES + gl.arange(0, BYTES, layout=gl.SliceLayout(0, data.type.layout.parent))
    return gl.load(ptr + data[:, None] + column[None, :], mask=there[:, None], other=0)


@gluon.jit
def plain_panel(ptr, data, there, UNIT: gl.constexpr, FORMAT: gl.constexpr):
    """Load the last 64 values of each row, which are bf16."""
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, data.type.layout.parent))
    if UNIT >= 2:
        rest_ptr = ptr.to(gl.pointer_type(gl.bfloat16))
        return gl.load(
            rest_ptr + (data // 2)[:, None] + (FORMAT.code_bytes // 2 + column)[None, :], mask=there[:, None], other=0.0
        )
    else:  # pages at odd addresses
        pointers = ptr + data[:, None] + (FORMAT.code_bytes + 2 * column)[None, :]
        low = gl.load(pointers, mask=there[:, None], other=0).to(gl.int16)
        high = gl.load(pointers + 1, mask=there[:, None], other=0).to(gl.int16)
        return (low | (high << 8)).to(gl.bfloat16, bitcast=True)


@gluon.jit
def store_panel(panel, x, scales, INDEX: gl.constexpr, FORMAT: gl.constexpr):
    """Store 64 values of each row as bf16."""
    panel.store(FORMAT.unpack_bytes(x, scales_of_panel(scales, INDEX, FORMAT), FORMAT))


@gluon.jit
def scales_of_panel(scales, panel, FORMAT: gl.constexpr):
    """Return the scales of a panel of each row, the first in the lowest byte: int32."""
    EACH: gl.constexpr = panel_scale_bytes(FORMAT)
    if isinstance(scales, gl.tuple):
        return (scales[panel * EACH // 8] >> (panel * EACH % 8 * 8)).to(gl.int32)
    else:
        return (scales >> (8 * EACH * panel)).to(gl.int32)


@gluon.jit
def announce(ready):
    fence_async_shared()  # ordinary stores -> tensor-core reads
    mbarrier.arrive(ready, count=1)


@gluon.jit
def row_offsets(pool, number, UNIT: gl.constexpr, FORMAT: gl.constexpr):
    """Return (whether packed rows are there, the first byte of their data, the first byte of their scales)"""
    there = (number >= 0) & (number < pool.rows)
    page = number // pool.page_rows
    place = (number - page * pool.page_rows).to(gl.int64)
    start = page.to(gl.int64) * pool.page_stride * UNIT
    data = start + place * FORMAT.data_step
    return there, data, start + scales_begin(pool.page_rows.to(gl.int64), FORMAT) + place * FORMAT.scale_step


@gluon.jit
def packed_block(pool, number, memory, at, UNIT: gl.constexpr, FORMAT: gl.constexpr):
    """Load one block of packed rows. Most loads are issued before the first wait, so that they run while slots are
    busy; the last ones as the first leave the registers."""
    kv, bias = memory.kv, memory.bias
    ptr = pool.ptr
    number = gl.convert_layout(number, gl.SliceLayout(1, LANES8))
    there, data, at_scales = row_offsets(pool, number, UNIT, FORMAT)
    scales = load_scales(ptr, at_scales, there, 0, 8, UNIT, FORMAT)
    x0 = panel_bytes(ptr, data, there, 0, FORMAT)
    x1 = panel_bytes(ptr, data, there, 1, FORMAT)
    x2 = panel_bytes(ptr, data, there, 2, FORMAT)
    x3 = panel_bytes(ptr, data, there, 3, FORMAT)
    x4 = panel_bytes(ptr, data, there, 4, FORMAT)
    slot = 2 * (at % 2)
    phase = (at // 2 + 1) % 2
    panels = reinterpret(kv.slots.index(slot), [4, 64, 64], PANEL)
    kv.acquire(Stage(slot, phase))
    write_bias(bias.index(at % 2), there)
    store_panel(panels.index(0), x0, scales, 0, FORMAT)
    x5 = panel_bytes(ptr, data, there, 5, FORMAT)
    store_panel(panels.index(1), x1, scales, 1, FORMAT)
    x6 = panel_bytes(ptr, data, there, 6, FORMAT)
    store_panel(panels.index(2), x2, scales, 2, FORMAT)
    if FORMAT.coded_panels == 7:
        x7 = plain_panel(ptr, data, there, UNIT, FORMAT)
    else:
        x7 = panel_bytes(ptr, data, there, 7, FORMAT)
    store_panel(panels.index(3), x3, scales, 3, FORMAT)
    announce(kv.ready.at(slot))
    panels = reinterpret(kv.slots.index(slot + 1), [4, 64, 64], PANEL)
    kv.acquire(Stage(slot + 1, phase))
    store_panel(panels.index(0), x4, scales, 4, FORMAT)
    store_panel(panels.index(1), x5, scales, 5, FORMAT)
    store_panel(panels.index(2), x6, scales, 6, FORMAT)
    if FORMAT.coded_panels == 7:
        panels.index(3).store(x7)
    else:
        store_panel(panels.index(3), x7, scales, 7, FORMAT)
    announce(kv.ready.at(slot + 1))


@gluon.jit
def gather_block(pool, number, memory, at, LOAD: gl.constexpr, UNIT: gl.constexpr, FORMAT: gl.constexpr):
    if LOAD == TMA:
        fetch_block(pool, number, memory, at)
    elif FORMAT.coded > 0:
        packed_block(pool, number, memory, at, UNIT, FORMAT)
    else:
        copy_block(pool, number, memory, at)


@gluon.jit
def gather_role(
    q_desc,
    window,
    compressed,
    requests,
    pools,
    memory,
    sizes,
    KV_INDEX: gl.constexpr,
    LOADS: gl.constexpr,
    UNITS: gl.constexpr,
    FORMATS: gl.constexpr,
):
    """Process the work tiles of this CTA in turn: Q and the number of blocks, then blocks as the ring becomes
    free."""
    BOX: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    at = 0  # blocks so far
    turn = 0
    for tile_id in range(gl.program_id(0), sizes.num_tiles, gl.num_programs(0)):
        query, first_head, split = tile_coord(tile_id, sizes.queries, sizes.heads)
        lists = index_lists(query, window, compressed, requests, KV_INDEX)
        blocks = lists.window_blocks + (lists.count + 63) // 64
        begin, end = split_range(blocks, split, sizes.num_splits, sizes.tiles_per_split)
        number = numbers_at(lists, begin, end, pools.compressed, KV_INDEX)
        memory.q_free.wait(0, (turn + 1) % 2)
        memory.job.store(gl.full([1], end - begin, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
        mbarrier.expect(memory.q_ready.at(0), 2 * HALF_BYTES)
        for h in gl.static_range(2):
            tma_load(
                q_desc,
                [query, first_head, h * 256],
                memory.q_ready.at(0),
                reinterpret(memory.q.index(h), [1, 64, 256], BOX),
            )
        for block in range(begin, end):
            following = numbers_at(lists, block + 1, end, pools.compressed, KV_INDEX)
            if KV_INDEX == NONE or block < lists.window_blocks:
                gather_block(pools.window, number, memory, at, LOADS[0], UNITS[0], FORMATS[0])
            else:
                gather_block(pools.compressed, number, memory, at, LOADS[1], UNITS[1], FORMATS[1])
            number = following
            at += 1
        turn += 1
