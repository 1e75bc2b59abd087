"""The loading roles of sparse_pair.py, for two CTAs that share products: plan finds how many rows each work tile has
and loads its Q, gather loads rows picked by number.

K is split by rows over the pair and V by columns (pair_roles.py), so a row is loaded twice, as K and as V. TMA loads
rows of a plain tensor, four at a time; packed rows go through registers, where they become bf16. A row that is
not there (-1, out of range, past the length) is filled with zeros, and its bias is -inf: 0 * NaN would be NaN.
"""

from triton.experimental.gluon.language.nvidia.blackwell.tma import async_gather

from dsv4.caches.kernels.unpack import load_scales
from dsv4.fmha.kernels.sm100.pair_roles import (
    KEYS,
    SLOT_BYTES,
    SLOT_K,
    SLOT_V,
    job_of,
    last_scores,
    last_slots,
    place_of_k,
    place_of_v,
    tell,
)
from dsv4.fmha.kernels.tiles import split_range
from dsv4.kernels.compat import gl, gluon, mbarrier, reinterpret, tma_load
from dsv4.v4.kernels.arguments import Lists
from dsv4.v4.kernels.sm100.gather import (
    announce,
    numbers_at,
    panel_bytes,
    plain_panel,
    row_offsets,
    scales_of_panel,
    store_panel,
)
from dsv4.v4.kernels.tile_scheduler import NONE, TMA, named_rows, tile_coord

# Layouts over two CTAs: a basis of zeros gives both the same, a one halves that dimension.
ONE = gl.constexpr(gl.BlockedLayout([1, 1], [32, 1], [4, 1], [1, 0], cga_layout=[[0, 0]]))  # a row per thread
FOURS_K = gl.constexpr(gl.BlockedLayout([4, 1], [1, 32], [4, 1], [0, 1], cga_layout=[[1, 0]]))  # four rows per TMA
FOURS_V = gl.constexpr(gl.BlockedLayout([4, 1], [1, 32], [4, 1], [0, 1], cga_layout=[[0, 1]]))
LANES_K = gl.constexpr(gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0], cga_layout=[[1, 0]]))
LANES_V = gl.constexpr(gl.BlockedLayout([1, 1, 16], [8, 1, 4], [4, 1, 1], [2, 1, 0], cga_layout=[[0, 1, 0]]))


@gluon.jit
def lines_of(pool, number):
    """Return lines of the pool's descriptor; -1, which TMA fills with zeros, if there is no such row."""
    there = (number >= 0) & (number < pool.rows)
    line = number
    if pool.gap > 0:
        line += number // pool.page_rows * pool.gap
    return gl.where(there, line, -1)


@gluon.jit
def fetch(pool, number, memory, place, use, V: gl.constexpr):
    """Load rows as V, or as K."""
    FOURS: gl.constexpr = FOURS_V if V else FOURS_K
    ready = memory.v_ready if V else memory.k_ready
    line = gl.convert_layout(lines_of(pool, number), gl.SliceLayout(1, FOURS))
    for h in gl.static_range(2):
        slot = 2 * place + h
        memory.free.wait(slot, (use + 1) % 2)
        mbarrier.expect(ready.at(slot), SLOT_BYTES)
        to = memory.kv.index(slot)
        if V:
            to = reinterpret(to, [KEYS, 256], SLOT_V)
        async_gather(pool.desc, line, h * 256, ready.at(slot), to)


@gluon.jit
def packed_k(pool, number, memory, place, use, UNIT: gl.constexpr, FORMAT: gl.constexpr):
    """Load half of the rows, all columns. Most loads precede the first wait, the rest follow as registers free up."""
    kv, k_ready = memory.kv, memory.k_ready
    ptr = pool.ptr
    there, data, at = row_offsets(pool, gl.convert_layout(number, gl.SliceLayout(1, LANES_K)), UNIT, FORMAT)
    scales = load_scales(ptr, at, there, 0, 8, UNIT, FORMAT)
    x0 = panel_bytes(ptr, data, there, 0, FORMAT)
    x1 = panel_bytes(ptr, data, there, 1, FORMAT)
    x2 = panel_bytes(ptr, data, there, 2, FORMAT)
    x3 = panel_bytes(ptr, data, there, 3, FORMAT)
    slot = 2 * place
    panels = reinterpret(kv.index(slot), [4, KEYS, 64], SLOT_K)
    memory.free.wait(slot, (use + 1) % 2)
    store_panel(panels.index(0), x0, scales, 0, FORMAT)
    x4 = panel_bytes(ptr, data, there, 4, FORMAT)
    store_panel(panels.index(1), x1, scales, 1, FORMAT)
    x5 = panel_bytes(ptr, data, there, 5, FORMAT)
    store_panel(panels.index(2), x2, scales, 2, FORMAT)
    x6 = panel_bytes(ptr, data, there, 6, FORMAT)
    store_panel(panels.index(3), x3, scales, 3, FORMAT)
    rest = plain_panel(ptr, data, there, UNIT, FORMAT)
    announce(k_ready.at(slot))
    panels = reinterpret(kv.index(slot + 1), [4, KEYS, 64], SLOT_K)
    memory.free.wait(slot + 1, (use + 1) % 2)
    store_panel(panels.index(0), x4, scales, 4, FORMAT)
    store_panel(panels.index(1), x5, scales, 5, FORMAT)
    store_panel(panels.index(2), x6, scales, 6, FORMAT)
    panels.index(3).store(rest)
    announce(k_ready.at(slot + 1))


@gluon.jit
def v_columns(INDEX: gl.constexpr):
    """Return columns [1, 2, 64] of the two CTAs' panels INDEX: the second CTA's lie 128 after the first's."""
    second = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, LANES_V)))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(1, LANES_V)))
    return INDEX * 64 + 128 * second[None, :, None] + column[None, None, :]


@gluon.jit
def v_values(ptr, data, there, INDEX: gl.constexpr, FORMAT: gl.constexpr):
    """Load the codes of 64 values of each row and CTA, as bytes; the row's last columns are not codes."""
    column = v_columns(INDEX)
    return gl.load(ptr + data[:, :, None] + column, mask=there[:, :, None] & (column < FORMAT.coded), other=0)


@gluon.jit
def v_bf16(x, scales, INDEX: gl.constexpr, FORMAT: gl.constexpr):
    second = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, LANES_V)))
    return FORMAT.unpack_bytes(x, scales_of_panel(scales, (INDEX + 2 * second)[None, :], FORMAT), FORMAT)


@gluon.jit
def v_plain(ptr, data, there, UNIT: gl.constexpr, FORMAT: gl.constexpr):
    """Load the last panel of the second CTA, which is bf16; nothing for the first."""
    column = v_columns(5) - FORMAT.coded
    mask = there[:, :, None] & (column >= 0)
    if UNIT >= 2:
        rest_ptr = ptr.to(gl.pointer_type(gl.bfloat16))
        return gl.load(rest_ptr + (data // 2)[:, :, None] + FORMAT.code_bytes // 2 + column, mask=mask, other=0.0)
    else:  # pages at odd addresses
        pointers = ptr + data[:, :, None] + FORMAT.code_bytes + 2 * column
        low = gl.load(pointers, mask=mask, other=0).to(gl.int16)
        high = gl.load(pointers + 1, mask=mask, other=0).to(gl.int16)
        return (low | (high << 8)).to(gl.bfloat16, bitcast=True)


@gluon.jit
def packed_v(pool, number, memory, place, use, UNIT: gl.constexpr, FORMAT: gl.constexpr):
    """Load all rows, half of the columns: of each 256, the first CTA's two panels and the second's."""
    kv, v_ready = memory.kv, memory.v_ready
    ptr = pool.ptr
    number = gl.convert_layout(number, gl.SliceLayout(1, gl.SliceLayout(2, LANES_V)))[:, None]
    number = number + gl.zeros([KEYS, 2], gl.int32, gl.SliceLayout(2, LANES_V))
    there, data, at = row_offsets(pool, number, UNIT, FORMAT)
    scales = load_scales(ptr, at, there, 0, 8, UNIT, FORMAT)
    x0 = v_values(ptr, data, there, 0, FORMAT)
    x1 = v_values(ptr, data, there, 1, FORMAT)
    slot = 2 * place
    panels = reinterpret(kv.index(slot), [2, KEYS, 128], SLOT_V)
    memory.free.wait(slot, (use + 1) % 2)
    panels.index(0).store(v_bf16(x0, scales, 0, FORMAT).reshape([KEYS, 128]))
    x4 = v_values(ptr, data, there, 4, FORMAT)
    panels.index(1).store(v_bf16(x1, scales, 1, FORMAT).reshape([KEYS, 128]))
    x5 = v_values(ptr, data, there, 5, FORMAT)
    announce(v_ready.at(slot))
    panels = reinterpret(kv.index(slot + 1), [2, KEYS, 128], SLOT_V)
    memory.free.wait(slot + 1, (use + 1) % 2)
    panels.index(0).store(v_bf16(x4, scales, 4, FORMAT).reshape([KEYS, 128]))
    y = v_bf16(x5, scales, 5, FORMAT)
    rest = v_plain(ptr, data, there, UNIT, FORMAT)
    panels.index(1).store(gl.where(v_columns(5) < FORMAT.coded, y, rest).reshape([KEYS, 128]))
    announce(v_ready.at(slot + 1))


@gluon.jit
def gather_from(
    pool, number, memory, place, use, V: gl.constexpr, LOAD: gl.constexpr, UNIT: gl.constexpr, FORMAT: gl.constexpr
):
    if LOAD == TMA:
        fetch(pool, number, memory, place, use, V)
    elif V:
        packed_v(pool, number, memory, place, use, UNIT, FORMAT)
    else:
        packed_k(pool, number, memory, place, use, UNIT, FORMAT)


@gluon.jit
def gather_block(
    lists,
    block,
    number,
    pools,
    memory,
    place,
    use,
    V: gl.constexpr,
    KV_INDEX: gl.constexpr,
    LOADS: gl.constexpr,
    UNITS: gl.constexpr,
    FORMATS: gl.constexpr,
):
    """Load a block of the lists as V, or as K."""
    if KV_INDEX == NONE or block < lists.window_blocks:
        gather_from(pools.window, number, memory, place, use, V, LOADS[0], UNITS[0], FORMATS[0])
    else:
        gather_from(pools.compressed, number, memory, place, use, V, LOADS[1], UNITS[1], FORMATS[1])


@gluon.jit
def block_v(
    lists,
    begin,
    i,
    n,
    number,
    pools,
    memory,
    at,
    KV_INDEX: gl.constexpr,
    LOADS: gl.constexpr,
    UNITS: gl.constexpr,
    FORMATS: gl.constexpr,
):
    """Load V of block i of a work tile of n, whose first is block `begin` of the lists."""
    place, use = place_of_v(i, n)
    gather_block(lists, begin + i, number, pools, memory, place, at + use, True, KV_INDEX, LOADS, UNITS, FORMATS)


@gluon.jit
def plan_role(q_desc, window, compressed, requests, memory, sizes, KV_INDEX: gl.constexpr):
    """Find the work of each work tile while the others process the one before; load Q as soon as that one's scores are
    complete. This is a separate warp: the loads that lead to the lengths would delay gathers."""
    BOX: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=4, cga_layout=[[0, 0, 1, 0]])
    full = 0  # work tiles so far that have blocks
    turn = 0
    for tile_id in range(gl.program_id(0), sizes.num_tiles, gl.num_programs(0)):
        query, first_head, split = tile_coord(tile_id, sizes.queries, sizes.heads, 128)
        count, more, line = named_rows(query, window, compressed, requests, KV_INDEX)
        begin, end = blocks_of(count, more, split, sizes)
        tell((end - begin, count, more, line.to(gl.int32)), turn, memory)
        if end > begin:
            memory.q_free.wait(0, (full + 1) % 2)
            mbarrier.expect(memory.q_ready.at(0), 2 * SLOT_BYTES)
            tma_load(
                q_desc, [query, 0, first_head, 0], memory.q_ready.at(0), reinterpret(memory.q, [1, 8, 128, 64], BOX)
            )
            full += 1
        turn += 1
    last_scores(full, memory)


@gluon.jit
def blocks_of(count, more, split, sizes):
    """Return (first, end) of the blocks of a work tile with these numbers of window rows and compressed rows."""
    blocks = (count + KEYS - 1) // KEYS + (more + KEYS - 1) // KEYS
    return split_range(blocks, split, sizes.num_splits, sizes.tiles_per_split)


@gluon.jit
def lists_at(tile_id, turn, window, compressed, memory, sizes):
    """Read what plan_role found for a work tile -> (its lists, first block, end)."""
    query, _first_head, split = tile_coord(tile_id, sizes.queries, sizes.heads, 128)
    _n, count, more, line = job_of(turn, 4, memory)
    begin, end = blocks_of(count, more, split, sizes)
    window_ptr = window.list_ptr + query.to(gl.int64) * window.line
    line_ptr = compressed.list_ptr + line.to(gl.int64) * compressed.line
    return Lists(window_ptr, count, (count + KEYS - 1) // KEYS, line_ptr, more), begin, end


@gluon.jit
def gather_role(
    window,
    compressed,
    pools,
    memory,
    sizes,
    KV_INDEX: gl.constexpr,
    LOADS: gl.constexpr,
    UNITS: gl.constexpr,
    FORMATS: gl.constexpr,
):
    """Process the work tiles of this pair in turn: K and V as places become free. Row numbers are read two blocks
    ahead, the next work tile's first before the last V of this one: there is no pause between work tiles."""
    at = 0  # blocks so far
    turn = 0
    lists, begin, end = lists_at(gl.program_id(0), turn, window, compressed, memory, sizes)
    number = numbers_at(lists, begin, end, pools.compressed, KV_INDEX, KEYS, ONE)
    following = numbers_at(lists, begin + 1, end, pools.compressed, KV_INDEX, KEYS, ONE)
    later = numbers_at(lists, begin + 2, end, pools.compressed, KV_INDEX, KEYS, ONE)
    for tile_id in range(gl.program_id(0), sizes.num_tiles, gl.num_programs(0)):
        n = end - begin
        # The numbers of the previous block. Not `number` at first: Triton would not see the change.
        before = gl.full([KEYS], -1, gl.int32, gl.SliceLayout(1, ONE))
        for i in range(0, n):
            rows = pools.window.rows
            if KV_INDEX != NONE:
                rows = gl.where(begin + i < lists.window_blocks, rows, pools.compressed.rows)
            there = (number >= 0) & (number < rows)
            memory.bias.index((at + i) % 3).store(gl.where(there, 0.0, -float("inf")).to(gl.bfloat16))
            memory.bias_ready.arrive((at + i) % 3)
            place, use = place_of_k(i)
            gather_block(
                lists, begin + i, number, pools, memory, place, at + use, False, KV_INDEX, LOADS, UNITS, FORMATS
            )
            # Load here, but not in the first turn: the wait for the next `number` also waits for these loads.
            if i > 0:
                later = numbers_at(lists, begin + i + 2, end, pools.compressed, KV_INDEX, KEYS, ONE)
            if i > 0:
                block_v(lists, begin, i - 1, n, before, pools, memory, at, KV_INDEX, LOADS, UNITS, FORMATS)
            before = number
            number = following
            following = later
        turn += 1
        next_lists, next_begin, next_end = lists, begin, begin
        if tile_id + gl.num_programs(0) < sizes.num_tiles:
            next_lists, next_begin, next_end = lists_at(
                tile_id + gl.num_programs(0), turn, window, compressed, memory, sizes
            )
        number = numbers_at(next_lists, next_begin, next_end, pools.compressed, KV_INDEX, KEYS, ONE)
        following = numbers_at(next_lists, next_begin + 1, next_end, pools.compressed, KV_INDEX, KEYS, ONE)
        later = numbers_at(next_lists, next_begin + 2, next_end, pools.compressed, KV_INDEX, KEYS, ONE)
        if n > 0:
            block_v(lists, begin, n - 1, n, before, pools, memory, at, KV_INDEX, LOADS, UNITS, FORMATS)
        at += n
        lists = next_lists
        begin = next_begin
        end = next_end
    last_slots(at, memory)
