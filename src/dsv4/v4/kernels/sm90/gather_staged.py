"""The gathering of packed rows of two formats in decode_swap_ab_ws.py: unconverted, into a staging ring, units ahead.

A unit is 256 bytes of the codes of 64 rows, with their scales: half of a window row of e4m3, or a whole compressed row
of e2m1. cp.async loads units in the order in which they are needed, whatever their format; so the units before hide the
latency of memory, whereas warps would have to wait idly for rows that are loaded into registers::

    copy      unit i + SLOTS - 1 | numbers of the rows of unit i + SLOTS + 1
    unpack    unit i -> registers -> bf16 -> half a block of kv, or all of it

Shared memory: codes [SLOTS][4][64 rows, 16 words], scales [SLOTS][64 rows, 8 words]. A unit is complete when every
thread has waited for its own copies and the gathering warps have met at a barrier; past the same barrier the previous
unit has been read, so its slot is free. A row that is not there becomes zeros.
"""

from dsv4.caches.kernels.unpack import has_small_rows
from dsv4.kernels.compat import Value, aggregate, async_copy, barrier, cp_async, fence_async_shared, gl, gluon
from dsv4.v4.kernels.pool_rows import codes_layout, entries, page_of, scales_begin
from dsv4.v4.kernels.sm90.row_numbers import numbers_of, pool_of
from dsv4.v4.kernels.sm90.smem_store import words
from dsv4.v4.kernels.sm90.swap_ab import cta_work, pairs_in, speed_of

SLOTS = gl.constexpr(4)  # as many slots as fit with 16 heads


@aggregate
class Staging:
    # Not one array: the compiler puts a barrier between accesses that may touch the same allocation.
    codes0: Value
    codes1: Value
    codes2: Value
    codes3: Value
    scales: Value


@gluon.constexpr_function
def stages(window, compressed, unit):
    """Return whether rows of these formats are units: window rows two, compressed rows one, at 16-byte boundaries."""
    sizes = (window.data_bytes, window.scale_bytes, compressed.data_bytes, compressed.scale_bytes)
    return unit >= 16 and sizes == (512, 16, 256, 32)


@gluon.jit
def make_staging():
    # Four rows of eight words each, the half of a warp that is read at once, lie in different banks.
    CODES: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 2, [1, 0])
    SCALES: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 1, [1, 0])
    return Staging(
        gl.allocate_shared_memory(gl.int32, [SLOTS, 64, 16], CODES),
        gl.allocate_shared_memory(gl.int32, [SLOTS, 64, 16], CODES),
        gl.allocate_shared_memory(gl.int32, [SLOTS, 64, 16], CODES),
        gl.allocate_shared_memory(gl.int32, [SLOTS, 64, 16], CODES),
        gl.allocate_shared_memory(gl.int32, [SLOTS, 64, 8], SCALES),
    )


@gluon.constexpr_function
def half_words(warps):
    """Return the layout of [64, 16] words, two panels of eight: a thread has two words of each."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 8]],
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8 << i, 0] for i in range(warps.bit_length() - 1)],
        block_bases=[],
        shape=[64, 16],
    )


@gluon.constexpr_function
def row_words(warps):
    """Return the layout of [64, 8] words: four threads have all of a row."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4]],
        lane_bases=[[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8 << i, 0] for i in range(warps.bit_length() - 1)],
        block_bases=[],
        shape=[64, 8],
    )


@aggregate
class Units:
    """The units of a CTA: two for each block of the window, one for each of the compressed rows."""

    lists: Value
    pools: Value
    staging: Value
    begin: Value  # the first block
    of_window: Value  # units
    count: Value  # units in all
    KV_INDEX: gl.constexpr
    UNIT: gl.constexpr
    WINDOW_FORMAT: gl.constexpr
    COMPRESSED_FORMAT: gl.constexpr

    @gluon.jit
    def numbers(self, unit):
        """Return the row numbers of a unit, -1 past the last."""
        entry = entries(words(gl.num_warps()))
        block = self.begin + gl.where(unit < self.of_window, unit // 2, unit - self.of_window // 2)
        return numbers_of(self.lists, block, unit < self.count, self.pools.compressed, entry, self.KV_INDEX)

    @gluon.jit
    def copy(self, unit, number, slot):
        """Start the copy of a unit, as one commit group -> 1 for absent rows."""
        W: gl.constexpr = self.WINDOW_FORMAT
        C: gl.constexpr = self.COMPRESSED_FORMAT
        L: gl.constexpr = words(gl.num_warps())
        in_window = unit < self.of_window
        pool = pool_of(self.pools, in_window)
        page = page_of(number, pool)
        place = number - page * pool.page_rows
        there = (number >= 0) & (number < pool.rows)
        start = page.to(gl.int64) * pool.page_stride * self.UNIT
        half = gl.where(in_window, unit % 2, 0) * 256
        data = start + (place * gl.where(in_window, W.data_step, C.data_step) + half)
        first = gl.where(in_window, scales_begin(pool.page_rows, W), scales_begin(pool.page_rows, C))
        at = start + (first + place * gl.where(in_window, W.scale_step, C.scale_step))
        words_ptr = pool.ptr.to(gl.pointer_type(gl.int32), bitcast=True)
        word = gl.arange(0, 16, layout=gl.SliceLayout(0, L))
        codes_ptr = words_ptr + (data // 4)[:, None] + word[None, :]
        staging = self.staging
        cp_async(staging.codes0.index(slot), codes_ptr, mask=there[:, None])
        cp_async(staging.codes1.index(slot), codes_ptr + 16, mask=there[:, None])
        cp_async(staging.codes2.index(slot), codes_ptr + 32, mask=there[:, None])
        cp_async(staging.codes3.index(slot), codes_ptr + 48, mask=there[:, None])
        word = gl.arange(0, 8, layout=gl.SliceLayout(0, L))
        wanted = there[:, None] & (word < gl.where(in_window, W.scale_bytes // 4, C.scale_bytes // 4))[None, :]
        cp_async(staging.scales.index(slot), words_ptr + (at // 4)[:, None] + word[None, :], mask=wanted)
        async_copy.commit_group()
        return 1 - there.to(gl.int32)


@aggregate
class Ahead:
    """Position in the walk over the units: the next one, its slot, absent rows of units, as bits, the last requested
    one first, and row numbers of the next two to be requested."""

    unit: Value
    slot: Value
    gone: Value
    number: Value
    later: Value


@aggregate
class Unit:
    """A unit in registers: codes of quarters, scales, which rows are there."""

    x0: Value
    x1: Value
    x2: Value
    x3: Value
    scales: Value
    there: Value


@gluon.jit
def next_unit(units, ahead, L: gl.constexpr):
    """Wait for a unit, and request another -> (the unit, codes in layout L; the next position)."""
    staging, at = units.staging, ahead.slot
    async_copy.wait_group(SLOTS - 2)
    barrier()
    x0, x1 = staging.codes0.index(at).load(L), staging.codes1.index(at).load(L)
    x2, x3 = staging.codes2.index(at).load(L), staging.codes3.index(at).load(L)
    scales = staging.scales.index(at).load(row_words(gl.num_warps()))
    free = gl.where(at == 0, SLOTS - 1, at - 1)
    gone = ahead.gone * 2 + units.copy(ahead.unit + SLOTS - 1, ahead.number, free)
    there = ((gone >> (SLOTS - 1)) & 1) == 0
    later = units.numbers(ahead.unit + SLOTS + 1)
    slot = gl.where(at == SLOTS - 1, 0, at + 1)
    return Unit(x0, x1, x2, x3, scales, there), Ahead(ahead.unit + 1, slot, gone, ahead.later, later)


@gluon.jit
def pairs_of_words(x):
    """Split [64, 8] into four [64, 2]: words 0 and 1, 2 and 3, ..."""
    low, high = gl.split(x.reshape([64, 2, 4]).permute((0, 2, 1)))
    a, b = gl.split(low.reshape([64, 2, 2]).permute((0, 2, 1)))
    c, d = gl.split(high.reshape([64, 2, 2]).permute((0, 2, 1)))
    return a, b, c, d


@gluon.jit
def window_panel(x, scale, SHIFT: gl.constexpr, SPEED: gl.constexpr, FORMAT: gl.constexpr):
    """Convert 64 e4m3 of each row to bf16. scale: words of four bytes, of which two count."""
    L: gl.constexpr = codes_layout(gl.num_warps(), 1, 16)
    x = gl.convert_layout(x.reshape([64, 1, 16]), L)
    scale = gl.convert_layout((scale >> SHIFT) & 0xFFFF, gl.SliceLayout(1, gl.SliceLayout(2, L)))
    return FORMAT.unpack(x, scale[:, None, None], 0, SPEED, FORMAT)


@gluon.jit
def compressed_panels(x, scales, SPEED: gl.constexpr, FORMAT: gl.constexpr):
    """Convert 128 e2m1 of each row to bf16. scales: two words of four bytes."""
    L: gl.constexpr = codes_layout(gl.num_warps(), 2, 8, 2)
    x = gl.convert_layout(x.reshape([64, 2, 8]), L)
    scales = gl.convert_layout(scales, gl.SliceLayout(2, L))
    return FORMAT.unpack(x, scales[:, :, None], 0, SPEED, FORMAT)


@gluon.jit
def window_half(unit, left, right, to, HALF: gl.constexpr, SPEED: gl.constexpr, FORMAT: gl.constexpr):
    """Convert a unit of the window -> two quarters of kv."""
    first, second = gl.split(pairs_of_words(unit.scales)[HALF])
    pairs_in(left.index(to), 0, 1).store(window_panel(unit.x0, first, 0, SPEED, FORMAT))
    pairs_in(left.index(to), 1, 1).store(window_panel(unit.x1, first, 16, SPEED, FORMAT))
    pairs_in(right.index(to), 0, 1).store(window_panel(unit.x2, second, 0, SPEED, FORMAT))
    pairs_in(right.index(to), 1, 1).store(window_panel(unit.x3, second, 16, SPEED, FORMAT))


@gluon.jit
def gather_staged_role(
    window,
    compressed,
    requests,
    pools,
    staging,
    memory,
    barriers,
    sizes,
    KV_INDEX: gl.constexpr,
    UNIT: gl.constexpr,
    FORMATS: gl.constexpr,
    FENCE: gl.constexpr,
):
    """Gather all blocks: those of the window, then those of compressed rows."""
    SMALL: gl.constexpr = has_small_rows(FORMATS[0], FORMATS[1])
    SPEED_W: gl.constexpr = speed_of(FORMATS[0], SMALL)
    SPEED_C: gl.constexpr = speed_of(FORMATS[1], SMALL)
    C: gl.constexpr = FORMATS[1]
    lists, work = cta_work(window, compressed, requests, sizes, KV_INDEX, 64)
    begin, end = work.begin, work.end
    middle = gl.minimum(gl.maximum(lists.window_blocks, begin), end)
    of_window = 2 * (middle - begin)
    count = of_window + end - middle
    units = Units(lists, pools, staging, begin, of_window, count, KV_INDEX, UNIT, FORMATS[0], FORMATS[1])
    gone = gl.zeros([64], gl.int32, gl.SliceLayout(1, words(gl.num_warps())))
    numbers = ()
    for i in gl.static_range(SLOTS + 1):
        numbers = numbers + (units.numbers(i),)
    for i in gl.static_range(SLOTS - 1):
        gone = gone * 2 + units.copy(i, numbers[i], i)
    ahead = Ahead(gl.to_tensor(0), gl.to_tensor(0), gone, numbers[SLOTS - 1], numbers[SLOTS])
    WORDS: gl.constexpr = words(gl.num_warps())
    for block in range(begin, middle):
        to = (block - begin) % 2
        phase = ((block - begin) // 2 + 1) % 2  # the first wait on an untouched barrier passes
        unit, ahead = next_unit(units, ahead, WORDS)
        barriers.free0.wait(to, phase)
        memory.bias.index(to).store(gl.where(unit.there, 0.0, -float("inf")))
        window_half(unit, memory.kv0, memory.kv1, to, 0, SPEED_W, FORMATS[0])
        if FENCE:
            fence_async_shared()
        barriers.ready0.arrive(to)
        unit, ahead = next_unit(units, ahead, WORDS)
        barriers.free1.wait(to, phase)
        window_half(unit, memory.kv2, memory.kv3, to, 1, SPEED_W, FORMATS[0])
        if FENCE:
            fence_async_shared()
        barriers.ready1.arrive(to)
    for block in range(middle, end):
        to = (block - begin) % 2
        phase = ((block - begin) // 2 + 1) % 2
        unit, ahead = next_unit(units, ahead, half_words(gl.num_warps()))
        a, b, c, d = pairs_of_words(unit.scales)
        barriers.free0.wait(to, phase)
        memory.bias.index(to).store(gl.where(unit.there, 0.0, -float("inf")))
        pairs_in(memory.kv0.index(to), 0, 2).store(compressed_panels(unit.x0, a, SPEED_C, C))
        pairs_in(memory.kv1.index(to), 0, 2).store(compressed_panels(unit.x1, b, SPEED_C, C))
        if FENCE:
            fence_async_shared()
        barriers.ready0.arrive(to)
        barriers.free1.wait(to, phase)
        pairs_in(memory.kv2.index(to), 0, 2).store(compressed_panels(unit.x2, c, SPEED_C, C))
        pairs_in(memory.kv3.index(to), 0, 2).store(compressed_panels(unit.x3, d, SPEED_C, C))
        if FENCE:
            fence_async_shared()
        barriers.ready1.arrive(to)
