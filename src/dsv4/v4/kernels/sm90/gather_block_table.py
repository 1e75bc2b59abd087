"""The gathering warps of sparse.py if a block table names packed rows, and a block of 64 rows is whole pages.

Pages of HCA have two rows, so a block is 32 pages from anywhere. A thread reads the same part of its page in every
block. That leaves one product per pointer: 409 instructions a block; packed_blocks in gather.py, which reads rows from
anywhere, has 560. The assembler matters more than this number: a value that it spills for lack of a register,
or a wait for old loads after the issue of new ones, costs more than what is saved.
"""

from dsv4.caches.kernels.unpack import QUICKEST, half_scales
from dsv4.kernels.compat import async_copy, cp_async, gl, gluon, mbarrier
from dsv4.kernels.ring import Stage
from dsv4.v4.kernels.pool_rows import codes_layout, entries, page_of, scales_begin
from dsv4.v4.kernels.sm90.smem_store import arrivals, panels_in, panels_of, write_bias


@gluon.jit
def whole_pages(pool, UNIT: gl.constexpr):
    """Return whether there are rows, a block of them is whole pages, and pages are less than 2 GB apart."""
    per_block = 64 // pool.page_rows
    return (pool.rows > 0) & (per_block * pool.page_rows == 64) & (pool.page_stride < (1 << 31) // UNIT)


@gluon.jit
def panels_at(chunks_ptr, FIRST: gl.constexpr, PANELS: gl.constexpr, there=None):
    """Do load_codes by pointers [64, 4] to the 16-byte chunks of the first panel. there: which rows are read."""
    L: gl.constexpr = gl.BlockedLayout([1, PANELS, 1, 4], [8, 1, 4, 1], [gl.num_warps(), 1, 1, 1], [3, 2, 1, 0])
    panel = gl.arange(0, PANELS, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))
    words_ptr = chunks_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    words_ptr = gl.convert_layout(words_ptr, gl.SliceLayout(1, gl.SliceLayout(3, L)))[:, None, :, None]
    words_ptr = words_ptr + (FIRST + panel)[None, :, None, None] * 16 + word[None, None, None, :]
    if there is None:
        x = gl.load(words_ptr)
    else:
        there = gl.convert_layout(there, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L))))
        x = gl.load(words_ptr, mask=there[:, None, None, None], other=0)
    return gl.convert_layout(x.reshape([64, PANELS, 16]), codes_layout(gl.num_warps(), PANELS, 16))


@gluon.jit
def plain_at(chunks_ptr, there, tile, ready, FORMAT: gl.constexpr):
    """Do copy_plain by pointers to the chunks of the first panel."""
    L: gl.constexpr = gl.BlockedLayout([1, 2, 1, 8], [8, 1, 4, 1], [gl.num_warps(), 1, 1, 1], [3, 2, 1, 0])
    LR: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [gl.num_warps(), 1], [1, 0])
    half = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    value = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))
    rest_ptr = chunks_ptr.to(gl.pointer_type(gl.bfloat16), bitcast=True)
    rest_ptr = gl.convert_layout(rest_ptr, gl.SliceLayout(1, gl.SliceLayout(3, L)))[:, None, :, None]
    rest_ptr = rest_ptr + (FORMAT.code_bytes // 2 + half * 32)[None, :, None, None] + value[None, None, None, :]
    rest_ptr = gl.convert_layout(rest_ptr.reshape([64, 64]), LR)
    rest_ptr = gl.max_contiguous(gl.multiple_of(rest_ptr, [1, 16]), [1, 8])
    there = gl.convert_layout(there, gl.SliceLayout(1, LR))
    cp_async(panels_of(tile).index(3), rest_ptr, mask=there[:, None])
    async_copy.mbarrier_arrive(ready, increment_count=False)


@gluon.jit
def bytes_to(page, pages, pool, UNIT: gl.constexpr):
    """Return offsets of pages in a pool, as one product of 32-bit numbers; an absent page has that of the last."""
    page = gl.minimum(page.to(gl.uint32), pages - 1)
    offset = gl.inline_asm_elementwise(
        "mul.wide.u32 $0, $1, $2;", "=l,r,r", [page, pool.page_stride * UNIT], dtype=gl.int64, is_pure=True, pack=1
    )
    return gl.multiple_of(offset, 16)


@gluon.jit
def to_scales(pool, within, FORMAT: gl.constexpr):
    """Return the offset of a row's scales from its first byte."""
    return (pool.page_rows - within) * FORMAT.data_bytes + within * FORMAT.scale_bytes


@gluon.jit
def prefetch(pointers, wanted):
    """Prefetch lines into L2."""
    pointers, wanted = gl.broadcast(pointers, wanted.to(gl.int32))
    gl.inline_asm_elementwise(
        "{ .reg .pred wanted; setp.ne.b32 wanted, $2, 0; @wanted prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
        "=r,l,r",
        [pointers, wanted],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def block_table_blocks(asked, lists, pool, memory, first, end, phase, UNIT: gl.constexpr, FORMAT: gl.constexpr):
    """Load blocks [first, end) of packed rows by block table, if a block is whole pages: packed_blocks with fewer
    instructions. asked: of the first.

    A thread reads the same place of a page in every block: only the page's number changes, and one product gives a
    pointer. Absent rows of a block may be read in the last page, which many CTAs would do at once after their last
    block: so the first half of a row is requested, and prefetched into L2, only if the row exists.
    """
    kv, bias = memory.kv, memory.bias
    L: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [gl.num_warps(), 1], [1, 0])  # the rows of words()
    R: gl.constexpr = gl.SliceLayout(1, L)
    entry = entries(L)
    chunk = gl.arange(0, 4, layout=gl.SliceLayout(0, L))[None, :]
    per_block = 64 // pool.page_rows
    pages = (pool.rows // pool.page_rows).to(gl.uint32)
    turn = page_of(entry, pool)
    within = entry - turn * pool.page_rows
    chunks_ptr = pool.ptr + ((within * FORMAT.data_step)[:, None] + chunk * 16)
    scales_ptr = pool.ptr + (scales_begin(pool.page_rows, FORMAT) + within * FORMAT.scale_step)
    # Prefetched into L2 a block earlier: four lines of 128 bytes of a row; its last one, by its first byte that is
    # surely the row's, and that of its scales.
    line_at = chunk * (128 - 16)
    last_at = gl.where(chunk == 0, FORMAT.data_bytes - 128, to_scales(pool, within, FORMAT)[:, None] - chunk * 16)

    place = (first - lists.window_blocks) * 64
    left = gl.minimum(lists.count, (end - lists.window_blocks) * 64) - place - entry
    line_ptr = lists.line_ptr + ((first - lists.window_blocks) * per_block + turn)
    page = gl.load(line_ptr, mask=left > 0, other=-1)
    following = gl.load(line_ptr + per_block, mask=left > 64, other=-1)
    line_ptr += 2 * per_block
    low, x, y = gl.convert_layout(asked.low, R), asked.x, asked.y
    high = gl.load((asked.ptr + asked.at + 4).to(gl.pointer_type(gl.int32), bitcast=True), mask=asked.there, other=0)
    high = gl.convert_layout(high, R)
    for block in range(first, end):
        slot = block % 2 * 2
        kv.acquire(Stage(slot, phase))
        tile = kv.slots.index(slot)
        there = page.to(gl.uint32) < pages
        panels_in(tile, 0, 2).store(FORMAT.unpack(x, low, 0, QUICKEST, FORMAT))
        later = gl.load(line_ptr, mask=left > 128, other=-1)
        line_ptr += per_block
        left -= 64
        now = chunks_ptr + bytes_to(page, pages, pool, UNIT)[:, None]
        z = panels_at(now, 4, 2)
        u = panels_at(now, 6, 1)
        panels_in(tile, 2, 2).store(FORMAT.unpack(y, low, 2, QUICKEST, FORMAT))
        mbarrier.arrive(kv.ready.at(slot), count=arrivals(gl.num_warps()))

        kv.acquire(Stage(slot + 1, phase))
        tile = kv.slots.index(slot + 1)
        plain_at(now, there, tile, kv.ready.at(slot + 1), FORMAT)
        write_bias(bias.index(block % 2), there)
        before, page, following = high, following, later
        # Before the loads: it waits for `later`, and so for z and u, which have the same scoreboard.
        soon = chunks_ptr + bytes_to(following, pages, pool, UNIT)[:, None]
        wanted = (following.to(gl.uint32) < pages)[:, None]
        prefetch(soon + line_at, wanted)
        prefetch(soon + last_at, wanted)
        there = page.to(gl.uint32) < pages
        offset = bytes_to(page, pages, pool, UNIT)
        now = chunks_ptr + offset[:, None]
        scales = gl.load((scales_ptr + offset).to(gl.pointer_type(gl.int64), bitcast=True), mask=there, other=0)
        low, high = half_scales(scales, 0), half_scales(scales, 1)
        x = panels_at(now, 0, 2, there)
        y = panels_at(now, 2, 2, there)
        panels_in(tile, 0, 2).store(FORMAT.unpack(z, before, 0, QUICKEST, FORMAT))
        panels_in(tile, 2, 1).store(FORMAT.unpack(u, before, 2, QUICKEST, FORMAT))
        kv.ready.arrive(slot + 1)
        phase = phase ^ (block % 2)
    return phase
