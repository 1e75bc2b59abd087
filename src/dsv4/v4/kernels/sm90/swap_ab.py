"""Functions that decode_swap_ab.py and decode_swap_ab_ws.py share: attention of some heads, with operands swapped.

Keys are the rows of S^T = K Q^T and of P^T, dimensions those of O^T = V^T P^T; heads are the columns, 16 or 32, where
sparse.py pads them to the 64 rows of a wgmma.
"""

from dsv4.caches.kernels.unpack import EXACT, FEWER, SMALLER
from dsv4.kernels import softmax
from dsv4.kernels.compat import (
    Value,
    aggregate,
    async_copy,
    cp_async,
    gl,
    gluon,
    reinterpret,
    reinterpret_as,
    warpgroup_mma,
)
from dsv4.kernels.division import quotient
from dsv4.kernels.softmax_over_keys import scores_layout
from dsv4.v4.kernels.pool_rows import entries, load_codes, load_words, plain_rows, rows_and_scales
from dsv4.v4.kernels.sm90.smem_store import lanes
from dsv4.v4.kernels.tile_scheduler import LIST, index_lists


@aggregate
class Memory:
    # Not one array: the compiler puts a barrier between accesses that may touch the same allocation.
    q: Value
    kv0: Value
    kv1: Value
    kv2: Value
    kv3: Value
    p: Value
    bias: Value
    row_max: Value


@aggregate
class Work:
    """Work of a CTA: blocks [begin, end) of the rows of a query."""

    query: Value
    begin: Value
    end: Value


@gluon.jit
def cta_work(window, compressed, requests, sizes, KV_INDEX: gl.constexpr, KEYS: gl.constexpr):
    """Return (the lists of the query of this CTA, its Work). A block has KEYS rows."""
    query, split = gl.program_id(1), gl.program_id(2)
    lists = index_lists(query, window, compressed, requests, KV_INDEX, KEYS)
    blocks = lists.window_blocks + (lists.count + KEYS - 1) // KEYS
    # As evenly as possible, rather than the same number each until none are left: the fewer CTAs have the most blocks,
    # the less load on memory.
    begin = quotient(blocks * split, sizes.splits_inverse, sizes.splits_shift)
    return lists, Work(query, begin, quotient(blocks * (split + 1), sizes.splits_inverse, sizes.splits_shift))


@gluon.jit
def prefetch_lists(window, compressed, KV_INDEX: gl.constexpr):
    """Prefetch the lines of a query's lists into L2 during the setup of warps and barriers, up to 4096 entries each."""
    prefetch_lines(window)
    if KV_INDEX == LIST:
        prefetch_lines(compressed)


@gluon.jit
def prefetch_lines(names):
    line = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    pointers = names.list_ptr + gl.program_id(1).to(gl.int64) * names.line + line * 32
    wanted = (line * 32 < names.width).to(gl.int32)
    gl.inline_asm_elementwise(
        "{ .reg .pred wanted; setp.ne.b32 wanted, $2, 0; @wanted prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
        "=r,l,r",
        [pointers.to(gl.int64), wanted],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@aggregate
class PackedBlock:
    """A block in flight: 16 bytes of the codes per thread; x3 and rest hold the last 128 values, of which rest is
    bf16."""

    x0: Value
    x1: Value
    x2: Value
    x3: Value
    rest: Value
    scales: Value
    there: Value


@gluon.constexpr_function
def heads_layout(warps, heads):
    """Return the layout of [heads, 512] with 16 bytes of bf16 per thread."""
    down = min(warps, heads // 4)
    return gl.BlockedLayout([1, 8], [4, 8], [down, warps // down], [1, 0])


@gluon.jit
def make_memory(HEADS: gl.constexpr, KEYS: gl.constexpr, SLOTS: gl.constexpr = 1):
    Q: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEADS, 128], gl.bfloat16)
    KV: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, 128], gl.bfloat16)
    P: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, HEADS], gl.bfloat16)
    q = gl.allocate_shared_memory(gl.bfloat16, [4, HEADS, 128], Q)
    kv0 = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, KEYS, 128], KV)
    kv1 = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, KEYS, 128], KV)
    kv2 = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, KEYS, 128], KV)
    kv3 = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, KEYS, 128], KV)
    p = gl.allocate_shared_memory(gl.bfloat16, [1, KEYS, HEADS], P)
    bias = gl.allocate_shared_memory(gl.float32, [SLOTS, KEYS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    row_max = gl.allocate_shared_memory(gl.float32, [KEYS // 16, HEADS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    return Memory(q, kv0, kv1, kv2, kv3, p, bias, row_max)


@gluon.jit
def copy_heads(q, query, first_head, heads, smem):
    """Copy the heads of a query by cp.async; absent heads become zeros."""
    HEADS: gl.constexpr = smem.shape[1]
    L: gl.constexpr = heads_layout(gl.num_warps(), HEADS)
    WHOLE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEADS, 512], gl.bfloat16)
    head = first_head + gl.arange(0, HEADS, layout=gl.SliceLayout(1, L))
    column = gl.arange(0, 512, layout=gl.SliceLayout(0, L))
    offset = query.to(gl.int64) * q.stride_n + head.to(gl.int64) * q.stride_h
    # Panels of 64 columns follow each other in quarters as in the whole. At once: no barriers between quarters.
    whole = reinterpret(smem, [HEADS, 512], WHOLE)
    cp_async(whole, q.ptr + offset[:, None] * 8 + column[None, :], mask=(head < heads)[:, None])
    async_copy.commit_group()


@gluon.constexpr_function
def exchanged():
    """Return the layout of [64, 32] words of a panel of 128 swizzled bytes a row, the halves of odd rows exchanged."""
    rows = [[1, 4 ^ 16], [2, 8], [4, 16], [8, 0], [16, 0], [32, 0]]
    return gl.SharedLinearLayout([[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], *rows], alignment=1024)


@gluon.jit
def ask(pool, number, UNIT: gl.constexpr, FORMAT: gl.constexpr, EXCHANGED: gl.constexpr = False):
    """Load the rows of a block, by number. EXCHANGED: odd rows begin with the second half of their last 64 values:
    otherwise two rows, of four threads each, would be stored to the same banks."""
    ptr = pool.ptr
    data, there, scales = rows_and_scales(pool, number, UNIT, FORMAT)
    x0 = load_codes(ptr, data, there, 0, 2, UNIT, FORMAT)
    x1 = load_codes(ptr, data, there, 2, 2, UNIT, FORMAT)
    x2 = load_codes(ptr, data, there, 4, 2, UNIT, FORMAT)
    x3 = load_codes(ptr, data, there, 6, FORMAT.coded_panels - 6, UNIT, FORMAT)
    PLAIN: gl.constexpr = FORMAT.code_bytes // 4
    if FORMAT.coded_panels == 8:
        rest = there  # not read
    elif EXCHANGED:
        L: gl.constexpr = number.type.layout.parent
        odd = (entries(L) & 1).to(gl.int64) * 64
        first = load_words(ptr, data + odd, there, PLAIN, 16, UNIT)
        second = load_words(ptr, data - odd, there, PLAIN + 16, 16, UNIT)
        rest = gl.join(first, second).permute((0, 2, 1)).reshape([64, 32])
    else:
        rest = load_words(ptr, data, there, PLAIN, 32, UNIT)
    return PackedBlock(x0, x1, x2, x3, rest, scales, there)


@gluon.jit
def copy_block(pool, number, memory, slot):
    """Copy the rows of a block of a plain tensor by cp.async to kv, and write the bias; absent rows become zeros."""
    L: gl.constexpr = lanes(gl.num_warps())
    offset, there = plain_rows(pool, number)
    memory.bias.index(slot).store(gl.where(there, 0.0, -float("inf")))
    offset = gl.convert_layout(offset, gl.SliceLayout(1, L))
    there = gl.convert_layout(there, gl.SliceLayout(1, L))[:, None]
    pointers = pool.ptr + offset[:, None] * 8 + gl.arange(0, 128, layout=gl.SliceLayout(0, L))[None, :]
    cp_async(memory.kv0.index(slot), pointers, mask=there)
    cp_async(memory.kv1.index(slot), pointers + 128, mask=there)
    cp_async(memory.kv2.index(slot), pointers + 256, mask=there)
    cp_async(memory.kv3.index(slot), pointers + 384, mask=there)
    async_copy.commit_group()


@gluon.jit
def pairs_in(quarter, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """View panels of 64 columns of a quarter of a block as bf16 in pairs: [keys, COUNT, 32]."""
    PANEL: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=3)
    KEYS: gl.constexpr = quarter.shape[0]
    panels = reinterpret_as(quarter, gl.int32, [2 // COUNT, COUNT, KEYS, 32], PANEL).index(FIRST // COUNT)
    return panels.permute((1, 0, 2))


@gluon.constexpr_function
def speed_of(format, small):
    """Return the SPEED of a format: signed bytes for rows that are only codes."""
    return SMALLER.value if small else FEWER.value if format.coded_panels == 8 else EXACT.value


@gluon.jit
def unpack_left(rows, memory, slot, FORMAT: gl.constexpr, SMALL: gl.constexpr):
    """Convert the first 256 columns of a block, codes -> bf16 -> kv, and write the bias: first, else it waits for a
    register that an earlier store has not read yet."""
    SPEED: gl.constexpr = speed_of(FORMAT, SMALL)
    memory.bias.index(slot).store(gl.where(rows.there, 0.0, -float("inf")))
    pairs_in(memory.kv0.index(slot), 0, 2).store(FORMAT.unpack(rows.x0, rows.scales, 0, SPEED, FORMAT))
    pairs_in(memory.kv1.index(slot), 0, 2).store(FORMAT.unpack(rows.x1, rows.scales, 2, SPEED, FORMAT))


@gluon.jit
def unpack_right(rows, memory, slot, FORMAT: gl.constexpr, SMALL: gl.constexpr, EXCHANGED: gl.constexpr = False):
    """Convert the last 256 columns of a block."""
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    LAST: gl.constexpr = exchanged() if EXCHANGED else SWIZZLED
    KEYS: gl.constexpr = memory.kv3.shape[1]
    SPEED: gl.constexpr = speed_of(FORMAT, SMALL)
    pairs_in(memory.kv2.index(slot), 0, 2).store(FORMAT.unpack(rows.x2, rows.scales, 4, SPEED, FORMAT))
    LAST_CODED: gl.constexpr = FORMAT.coded_panels - 6
    pairs_in(memory.kv3.index(slot), 0, LAST_CODED).store(FORMAT.unpack(rows.x3, rows.scales, 6, SPEED, FORMAT))
    if LAST_CODED == 1:
        reinterpret_as(memory.kv3.index(slot), gl.int32, [2, KEYS, 32], LAST).index(1).store(rows.rest)


@gluon.jit
def left_scores(memory, slot, at, HEADS: gl.constexpr):
    """Issue S^T [keys, HEADS] = K Q^T with the first 256 columns, without a wait. at: 0."""
    KEYS: gl.constexpr = memory.kv0.shape[1]
    s = gl.zeros([KEYS, HEADS], gl.float32, scores_layout(gl.num_warps(), HEADS, KEYS))
    s = warpgroup_mma(memory.kv0.index(slot), memory.q.index(at + 0).permute((1, 0)), s, use_acc=False, is_async=True)
    return warpgroup_mma(memory.kv1.index(slot), memory.q.index(at + 1).permute((1, 0)), s, is_async=True)


@gluon.jit
def right_scores(s, memory, slot, at):
    """Issue S^T += K Q^T with the last 256 columns."""
    s = warpgroup_mma(memory.kv2.index(slot), memory.q.index(at + 2).permute((1, 0)), s, is_async=True)
    return warpgroup_mma(memory.kv3.index(slot), memory.q.index(at + 3).permute((1, 0)), s, is_async=True)


@gluon.jit
def add(o, quarter, p):
    """Issue O^T [128, HEADS] of a quarter of the columns += V^T P^T, without a wait."""
    return warpgroup_mma(quarter.permute((1, 0)), p, o, is_async=True)


@gluon.jit
def turned(quarter, HEADS: gl.constexpr):
    """View a quarter of kv as a quarter of O's columns: fp32 [HEADS, 128]."""
    TURNED: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    # The view covers all of the quarter, as Triton 3.8 demands; only its first bytes are used.
    return reinterpret_as(quarter, gl.float32, [quarter.shape[0] // (2 * HEADS), HEADS, 128], TURNED).index(0)


@gluon.jit
def rounded(quarter, HEADS: gl.constexpr):
    """View the same in bf16, which the warps transpose as they store it: stmatrix."""
    L: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return reinterpret(quarter, [quarter.shape[0] // HEADS, HEADS, 128], L).index(0)


@gluon.jit
def lay(o, quarter, width, COLUMN: gl.constexpr, SPLIT: gl.constexpr):
    """Store a quarter of O^T, normalised, in shared memory, in fp32 if `put` has to compute with it, else in bf16.
    width: how many columns are rotated back, the last ones."""
    HEADS: gl.constexpr = o.shape[1]
    if SPLIT or COLUMN + 128 > 512 - width:
        turned(quarter, HEADS).permute((1, 0)).store(o)
    else:
        rounded(quarter, HEADS).permute((1, 0)).store(o.to(gl.bfloat16))


@gluon.jit
def put(quarter, place, output, rope, HEADS: gl.constexpr, COLUMN: gl.constexpr, SPLIT: gl.constexpr):
    """Write what `lay` stored to global memory, 16 bytes per thread. place: (query, first head, split)."""
    query, first_head, split = place
    L: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
    if SPLIT:
        x = turned(quarter, HEADS).load(L)
        if rope[1] > 0:
            x = softmax.inverse_rope(x, rope, COLUMN, 512)
        head = first_head + gl.arange(0, HEADS, layout=gl.SliceLayout(1, L))
        column = COLUMN + gl.arange(0, 128, layout=gl.SliceLayout(0, L))
        part = (split.to(gl.int64) * output.queries + query) * output.heads + head
        gl.store(output.part_ptr + part[:, None] * 512 + column[None, :], x, mask=(head < output.heads)[:, None])
    elif COLUMN + 128 > 512 - rope[1]:
        x = softmax.inverse_rope(turned(quarter, HEADS).load(L), rope, COLUMN, 512)
        put_rounded(x.to(output.out_ptr.dtype.element_ty), place, output, COLUMN)
    else:
        WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
        put_rounded(rounded(quarter, HEADS).load(WIDE), place, output, COLUMN)


@gluon.jit
def put_rounded(x, place, output, COLUMN: gl.constexpr):
    """Write [heads, 128] of the result."""
    query, first_head, _ = place
    L: gl.constexpr = x.type.layout
    head = first_head + gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, L))
    column = COLUMN + gl.arange(0, 128, layout=gl.SliceLayout(0, L))
    offset = (query.to(gl.int64) * output.stride_on + head.to(gl.int64) * output.stride_oh) * 8
    gl.store(output.out_ptr + offset[:, None] + column[None, :], x, mask=(head < output.heads)[:, None])


@gluon.jit
def sink_of_heads(output, first_head, SPLIT: gl.constexpr, HEADS: gl.constexpr, L: gl.constexpr):
    """Load the sinks of the heads; a split has none, since the combine kernel applies them."""
    if SPLIT:
        sink = gl.full([HEADS], -float("inf"), gl.float32, L)
    else:
        head = first_head + gl.arange(0, HEADS, layout=L)
        sink = softmax.sink_of(output.sink_ptr, head, head < output.heads)
    return sink


@gluon.jit
def write_lse(m, l, sink, place, output, SPLIT: gl.constexpr, UP: gl.constexpr):
    """Write the LSE of the heads -> the factor that normalises O, times UP."""
    query, first_head, split = place
    head = first_head + gl.arange(0, m.shape[0], layout=m.type.layout)
    there = head < output.heads
    factor, lse = softmax.finish(m, l, sink)
    if SPLIT:  # LSE in base 2
        part = (split.to(gl.int64) * output.queries + query) * output.heads + head
        gl.store(output.part_lse_ptr + part, lse, mask=there)
    else:
        gl.store(
            output.lse_ptr + query.to(gl.int64) * output.stride_ln + head.to(gl.int64) * output.stride_lh,
            lse * softmax.LN2,
            mask=there & (output.want_lse != 0),
        )
    return factor * UP


@gluon.jit
def masked(s, bias, SIGN: gl.constexpr):
    """Do softmax.biased with keys as rows."""
    return softmax.biased(s, bias[:, None], SIGN)


@gluon.jit
def finish(o, m, l, memory, place, output, scale, SPLIT: gl.constexpr, UP: gl.constexpr):
    """Add the sums, write the LSE and O^T, whose quarters are in o. place: (query, first head, split)."""
    HEADS: gl.constexpr = m.shape[0]
    # A head per lane: otherwise every thread would compute the logarithms of all its columns.
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    m, l = gl.convert_layout(m, L), gl.convert_layout(gl.sum(gl.sum(l, 0), 0), L)
    m = softmax.true_maximum(m, scale)
    sink = sink_of_heads(output, place[1], SPLIT, HEADS, L)
    write_out(o, write_lse(m, l, sink, place, output, SPLIT, UP), memory, place, output, SPLIT)


@gluon.jit
def write_out(o, factor, memory, place, output, SPLIT: gl.constexpr):
    """Write O^T, whose quarters are in o, times the factor that normalises it."""
    o0, o1, o2, o3 = o
    query, first_head, split = place
    factor = gl.convert_layout(factor, gl.SliceLayout(0, o0.type.layout))[None, :]
    rope = output.rope
    line_ptr = rope.cos_sin_ptr
    if rope.width > 0:
        position = gl.load(rope.positions_ptr + query).to(gl.int64)
        line_ptr += gl.minimum(gl.maximum(position, 0), rope.positions - 1) * rope.line
    HEADS: gl.constexpr = o0.shape[1]
    # All quarters are written before one is read: one barrier instead of four.
    lay(o0 * factor, memory.kv0.index(0), rope.width, 0, SPLIT)
    lay(o1 * factor, memory.kv1.index(0), rope.width, 128, SPLIT)
    lay(o2 * factor, memory.kv2.index(0), rope.width, 256, SPLIT)
    lay(o3 * factor, memory.kv3.index(0), rope.width, 384, SPLIT)
    put(memory.kv0.index(0), place, output, (line_ptr, rope.width), HEADS, 0, SPLIT)
    put(memory.kv1.index(0), place, output, (line_ptr, rope.width), HEADS, 128, SPLIT)
    put(memory.kv2.index(0), place, output, (line_ptr, rope.width), HEADS, 256, SPLIT)
    put(memory.kv3.index(0), place, output, (line_ptr, rope.width), HEADS, 384, SPLIT)
