"""V4 attention on sm_90a for FP8 rows and few heads per CTA: keys are the rows of the scores.

listed.py has 64 heads per CTA, roles and a ring: right where multiprocessors have more to do than they can. Where one
query or a few are all there is, latency counts. Here the warps of a CTA do one thing after the other for HEADS heads of
one query and one split of its rows, of which one block is best. Of 16 heads a block has 64 rows, for eight warps; of 32
heads 64 for four or 128 for eight, where blocks of 64 would be too many for one each::

    ask for rows | O^T += V^T P^T of the last block | e4m3 -> bf16 -> kv | S^T = K Q^T | softmax over keys -> P^T

Products are HEADS wide instead of padded to 64, less memory is written at the end, and a block passes through less than
half of the code: instructions that run once come from the L2 or from memory, as rows do.

shared memory   bytes               holds
q               4 x 256 HEADS       [HEADS, 128] each: columns of Q
kv              4 x 256 KEYS        [KEYS, 128] each: columns of a block; at the end, of O
p               2 KEYS HEADS        [KEYS, HEADS]: P^T
bias            4 KEYS              fp32 per key: what is added to its scores

Rows are asked for after the last fence of a block: the assembler makes a fence wait for loads under way.
"""

from dsv4.kernels.compat import (
    Value,
    aggregate,
    async_copy,
    barrier,
    cp_async,
    fence_async_shared,
    gl,
    gluon,
    reinterpret,
    reinterpret_as,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from dsv4.kernels.shared import dependent, softmax
from dsv4.kernels.shared.opaque import zero
from dsv4.kernels.shared.v4.arguments import Names, Output, Requests, Rope
from dsv4.kernels.shared.v4.items import NONE, lists_of
from dsv4.kernels.sm90.v4.gather import (
    Pool,
    Pools,
    Queries,
    entries,
    fp8_load,
    fp8_rows,
    fp8_to_bf16,
    numbers_of,
    pool_of,
    quotient,
    words,
    words_of,
)


@aggregate
class Memory:
    # Apart, not one array: the compiler puts a barrier between accesses that may touch the same allocation.
    q: Value
    kv0: Value
    kv1: Value
    kv2: Value
    kv3: Value
    p: Value
    bias: Value


@aggregate
class Splits:
    count: Value
    inverse: Value  # ceil(2^shift / count)
    shift: Value


@aggregate
class Rows:
    """A block on its way: 16 bytes per thread, four values to a word; the last 64 values of a row are bf16."""

    x0: Value
    x1: Value
    x2: Value
    x3: Value
    rest: Value
    scales: Value
    there: Value


@gluon.constexpr_function
def scores_layout(warps, heads, keys):
    """Warps go down the keys, 16 each, and what is left of them across the heads."""
    down = min(warps, keys // 16)
    return gl.NVMMADistributedLayout([3, 0], [down, warps // down], [16, heads * down // warps, 16])


@gluon.constexpr_function
def output_layout(warps, heads):
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, heads, 16])


@gluon.constexpr_function
def heads_layout(warps, heads):
    """16 bytes of bf16 per thread, for [heads, 512]."""
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
    return Memory(q, kv0, kv1, kv2, kv3, p, bias)


@gluon.jit
def copy_heads(q, query, first_head, heads, smem):
    """The heads of a query by cp.async; heads that are not there become zeros."""
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


@gluon.jit
def ask(pool, number, UNIT: gl.constexpr):
    """The rows of a block, by number."""
    ptr = pool.ptr
    data, there, scales = fp8_rows(pool, number, UNIT)
    x0 = fp8_load(ptr, data, there, 0, 2, UNIT)
    x1 = fp8_load(ptr, data, there, 2, 2, UNIT)
    x2 = fp8_load(ptr, data, there, 4, 2, UNIT)
    x3 = fp8_load(ptr, data, there, 6, 1, UNIT)
    rest = words_of(ptr, data, there, 112, 32, UNIT)
    return Rows(x0, x1, x2, x3, rest, scales, there)


@gluon.jit
def pairs_in(quarter, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """Panels of 64 columns of a quarter of a block as bf16 in pairs: [keys, COUNT, 32]."""
    PANEL: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=3)
    KEYS: gl.constexpr = quarter.shape[0]
    panels = reinterpret_as(quarter, gl.int32, [2 // COUNT, COUNT, KEYS, 32], PANEL).index(FIRST // COUNT)
    return panels.permute((1, 0, 2))


@gluon.jit
def unpack(rows, memory, slot):
    """e4m3 -> bf16 -> kv, and the bias."""
    LAST: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    KEYS: gl.constexpr = memory.kv3.shape[1]
    pairs_in(memory.kv0.index(slot), 0, 2).store(fp8_to_bf16(rows.x0, rows.scales, 0))
    pairs_in(memory.kv1.index(slot), 0, 2).store(fp8_to_bf16(rows.x1, rows.scales, 2))
    pairs_in(memory.kv2.index(slot), 0, 2).store(fp8_to_bf16(rows.x2, rows.scales, 4))
    pairs_in(memory.kv3.index(slot), 0, 1).store(fp8_to_bf16(rows.x3, rows.scales, 6))
    reinterpret_as(memory.kv3.index(slot), gl.int32, [2, KEYS, 32], LAST).index(1).store(rows.rest)
    memory.bias.index(slot).store(gl.where(rows.there, 0.0, -float("inf")))


@gluon.jit
def scores(memory, slot, at, HEADS: gl.constexpr):
    """S^T [keys, HEADS] = K Q^T: issued, not waited for. at: 0."""
    KEYS: gl.constexpr = memory.kv0.shape[1]
    s = gl.zeros([KEYS, HEADS], gl.float32, scores_layout(gl.num_warps(), HEADS, KEYS))
    s = warpgroup_mma(memory.kv0.index(slot), memory.q.index(at + 0).permute((1, 0)), s, use_acc=False, is_async=True)
    s = warpgroup_mma(memory.kv1.index(slot), memory.q.index(at + 1).permute((1, 0)), s, is_async=True)
    s = warpgroup_mma(memory.kv2.index(slot), memory.q.index(at + 2).permute((1, 0)), s, is_async=True)
    return warpgroup_mma(memory.kv3.index(slot), memory.q.index(at + 3).permute((1, 0)), s, is_async=True)


@gluon.jit
def partial_sums(p):
    """What each thread holds of the sums over keys: [16 n, HEADS] -> [n, 8, HEADS], no exchange between lanes."""
    return gl.sum(p.reshape([p.shape[0] // 16, 2, 8, p.shape[1]]), 1)


@gluon.jit
def over_keys(s, m, scale):
    """softmax.step with keys as rows: m per column."""
    m_new = gl.maximum(m, gl.max(s, 0) * scale)
    safe = gl.where(m_new == -float("inf"), 0.0, m_new)  # -inf - -inf would be NaN
    return gl.exp2(s * scale - safe[None, :]), m_new, gl.exp2(m - safe)


@gluon.jit
def add(o, quarter, p, factor):
    """O^T [128, HEADS] of a quarter of the columns, rescaled, += V^T P^T: issued, not waited for."""
    return warpgroup_mma(quarter.permute((1, 0)), p, o * factor[None, :], is_async=True)


@gluon.jit
def put(o, quarter, place, output, rope, COLUMN: gl.constexpr, SPLIT: gl.constexpr):
    """A quarter of O's columns by way of its quarter of kv, 16 bytes per thread. place: (query, first head, split)."""
    HEADS: gl.constexpr = o.shape[1]
    TURNED: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    L: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
    query, first_head, split = place
    smem = reinterpret_as(quarter, gl.float32, [HEADS, 128], TURNED)
    smem.permute((1, 0)).store(o)
    x = smem.load(L)
    if rope[1] > 0:
        x = softmax.turn_back(x, rope, COLUMN, 512)
    head = first_head + gl.arange(0, HEADS, layout=gl.SliceLayout(1, L))
    column = COLUMN + gl.arange(0, 128, layout=gl.SliceLayout(0, L))
    there = (head < output.heads)[:, None]
    if SPLIT:
        part = (split.to(gl.int64) * output.queries + query) * output.heads + head
        gl.store(output.part_ptr + part[:, None] * 512 + column[None, :], x, mask=there)
    else:
        offset = (query.to(gl.int64) * output.stride_on + head.to(gl.int64) * output.stride_oh) * 8
        gl.store(output.out_ptr + offset[:, None] + column[None, :], x.to(output.out_ptr.dtype.element_ty), mask=there)


@gluon.jit
def write_lse(m, l, place, output, SPLIT: gl.constexpr):
    """LSE of the heads -> what normalises O."""
    query, first_head, split = place
    head = first_head + gl.arange(0, m.shape[0], layout=m.type.layout)
    there = head < output.heads
    if SPLIT:  # in base 2; the combine kernel applies the sink
        factor, lse = softmax.finish(m, l, gl.full(m.shape, -float("inf"), gl.float32, m.type.layout))
        part = (split.to(gl.int64) * output.queries + query) * output.heads + head
        gl.store(output.part_lse_ptr + part, lse, mask=there)
    else:
        factor, lse = softmax.finish(m, l, softmax.sink_of(output.sink_ptr, head, there))
        gl.store(output.lse_ptr + query.to(gl.int64) * output.stride_ln + head.to(gl.int64) * output.stride_lh,
                 lse * softmax.LN2, mask=there & (output.want_lse != 0))  # fmt: skip
    return factor


@gluon.jit
def masked(s, bias, SIGN: gl.constexpr):
    """Scores of rows that are not there become -inf. SIGN: of the softmax scale."""
    if SIGN == 0:
        s = gl.zeros_like(s)
    elif SIGN < 0:
        s = -s
    return s + bias[:, None]


@gluon.jit
def attend(number, lists, begin, end, pools, memory, scale, HEADS: gl.constexpr, HOW: gl.constexpr,
           SIGN: gl.constexpr, UNIT: gl.constexpr):  # fmt: skip
    """Blocks [begin, end) -> quarters of O^T, maximum and sums of the heads. number: of the first block's rows."""
    WARPS: gl.constexpr = gl.num_warps()
    KEYS: gl.constexpr = memory.kv0.shape[1]
    LS: gl.constexpr = scores_layout(WARPS, HEADS, KEYS)
    LO: gl.constexpr = output_layout(WARPS, HEADS)
    LP: gl.constexpr = partial_sums(gl.zeros([KEYS, HEADS], gl.float32, LS)).type.layout
    entry = entries(words(WARPS), KEYS)
    o0 = gl.zeros([128, HEADS], gl.float32, LO)
    o1 = gl.zeros([128, HEADS], gl.float32, LO)
    o2 = gl.zeros([128, HEADS], gl.float32, LO)
    o3 = gl.zeros([128, HEADS], gl.float32, LO)
    m = gl.full([HEADS], -float("inf"), gl.float32, gl.SliceLayout(0, LS))
    factor = gl.full([HEADS], 0.0, gl.float32, gl.SliceLayout(0, LS))
    l = gl.zeros([KEYS // 16, 8, HEADS], gl.float32, LP)
    # A turn more than blocks: every part of the code is there once.
    for block in range(begin, end + 1):
        rows = ask(pool_of(pools, block < lists.window_blocks), number, UNIT)
        number = numbers_of(lists, block + 1, block + 1 < end, pools.compressed, entry, HOW)
        at = zero(block)  # else all wgmma descriptors would be kept in registers, and spilled
        if block > begin:
            by = gl.convert_layout(factor, gl.SliceLayout(0, LO))
            o0 = add(o0, memory.kv0.index(at), memory.p.index(at), by)
            o1 = add(o1, memory.kv1.index(at), memory.p.index(at), by)
            o2 = add(o2, memory.kv2.index(at), memory.p.index(at), by)
            o3 = add(o3, memory.kv3.index(at), memory.p.index(at), by)
            o0, o1, o2, o3 = warpgroup_mma_wait(num_outstanding=0, deps=(o0, o1, o2, o3))
            barrier()
        if block < end:
            unpack(rows, memory, 0)
            async_copy.wait_group(0)  # Q
            fence_async_shared()
            barrier()
            s = scores(memory, at, at, HEADS)
            bias = memory.bias.index(0).load(gl.SliceLayout(1, LS))
            s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
            p, m, factor = over_keys(masked(s, bias, SIGN), m, scale)
            l = l * gl.convert_layout(factor, gl.SliceLayout(0, gl.SliceLayout(1, LP)))[None, None, :] + partial_sums(p)
            memory.p.index(0).store(p.to(memory.p.dtype))
            fence_async_shared()
            barrier()
    # Without a block nobody has waited for Q, and what follows may use its memory.
    async_copy.wait_group(0)
    barrier()
    return o0, o1, o2, o3, m, l


@gluon.jit
def one_item(q, window, compressed, requests, pools, output, scale, splits, HEADS: gl.constexpr, KEYS: gl.constexpr,
             HOW: gl.constexpr, SIGN: gl.constexpr, UNIT: gl.constexpr, SPLIT: gl.constexpr):  # fmt: skip
    """Some heads of a query and some blocks of its rows."""
    first_head, query, split = gl.program_id(0) * HEADS, gl.program_id(1), gl.program_id(2)
    lists = lists_of(query, window, compressed, requests, HOW, KEYS)
    blocks = lists.window_blocks + (lists.count + KEYS - 1) // KEYS
    each = quotient(blocks + splits.count - 1, splits.inverse, splits.shift)
    begin = gl.minimum(split * each, blocks)
    end = gl.minimum(begin + each, blocks)
    # On its way while Q is asked for.
    number = numbers_of(lists, begin, begin < end, pools.compressed, entries(words(gl.num_warps()), KEYS), HOW)
    memory = make_memory(HEADS, KEYS)
    copy_heads(q, query, first_head, output.heads, memory.q)
    o0, o1, o2, o3, m, l = attend(number, lists, begin, end, pools, memory, scale, HEADS, HOW, SIGN, UNIT)
    finish((o0, o1, o2, o3), m, l, memory, (query, first_head, split), output, SPLIT)


@gluon.jit
def finish(o, m, l, memory, place, output, SPLIT: gl.constexpr):
    """Add up the sums, write the LSE and O^T, whose quarters o has. place: (query, first head, split)."""
    o0, o1, o2, o3 = o
    LO: gl.constexpr = o0.type.layout
    query, first_head, split = place
    l = gl.convert_layout(gl.sum(gl.sum(l, 0), 0), m.type.layout)
    factor = gl.convert_layout(write_lse(m, l, place, output, SPLIT), gl.SliceLayout(0, LO))[None, :]
    rope = output.rope
    line_ptr = rope.cos_sin_ptr
    if rope.width > 0:
        position = gl.load(rope.positions_ptr + query).to(gl.int64)
        line_ptr += gl.minimum(gl.maximum(position, 0), rope.positions - 1) * rope.line
    put(o0 * factor, memory.kv0.index(0), place, output, (line_ptr, rope.width), 0, SPLIT)
    put(o1 * factor, memory.kv1.index(0), place, output, (line_ptr, rope.width), 128, SPLIT)
    put(o2 * factor, memory.kv2.index(0), place, output, (line_ptr, rope.width), 256, SPLIT)
    put(o3 * factor, memory.kv3.index(0), place, output, (line_ptr, rope.width), 384, SPLIT)


@gluon.jit(do_not_specialize=[
    "want_lse", "queries", "heads", "window_rows", "window_page_rows", "window_page_stride", "window_inverse",
    "window_shift", "window_width", "window_line", "compressed_rows", "compressed_page_rows", "compressed_page_stride",
    "compressed_inverse", "compressed_shift", "compressed_width", "compressed_line", "window_lengths",
    "compressed_lengths", "starts", "requests", "rope_positions", "rope_width", "rope_line", "num_splits",
    "splits_inverse", "splits_shift", "stride_qn", "stride_qh", "stride_on", "stride_oh", "stride_ln", "stride_lh",
])  # fmt: skip
def v4_narrow(q_ptr, out_ptr, lse_ptr, sink_ptr, part_ptr, part_lse_ptr, window_ptr, window_list_ptr,
              window_lengths_ptr, compressed_ptr, compressed_list_ptr, compressed_lengths_ptr, starts_ptr, cos_sin_ptr,
              positions_ptr, scale, want_lse, queries, heads, window_rows, window_page_rows, window_page_stride,
              window_inverse, window_shift, window_width, window_line, compressed_rows, compressed_page_rows,
              compressed_page_stride, compressed_inverse, compressed_shift, compressed_width, compressed_line,
              window_lengths, compressed_lengths, starts, requests, rope_positions, rope_width, rope_line, num_splits,
              splits_inverse, splits_shift, stride_qn, stride_qh, stride_on, stride_oh, stride_ln, stride_lh,
              HOW: gl.constexpr, SIGN: gl.constexpr, WINDOW_UNIT: gl.constexpr, COMPRESSED_UNIT: gl.constexpr,
              SPLIT: gl.constexpr, HEADS: gl.constexpr, KEYS: gl.constexpr = 64,
              EARLY: gl.constexpr = False):  # fmt: skip
    if EARLY:
        dependent.let_next_begin()
    # Both pools are read in one way, that of the lesser unit.
    UNIT: gl.constexpr = min(WINDOW_UNIT, COMPRESSED_UNIT)
    window_page_stride *= WINDOW_UNIT // UNIT
    if HOW != NONE:
        compressed_page_stride *= COMPRESSED_UNIT // UNIT
    q = Queries(q_ptr, stride_qn, stride_qh)
    window = Names(window_list_ptr, window_line, window_lengths_ptr, window_lengths, window_width)
    compressed = Names(compressed_list_ptr, compressed_line, compressed_lengths_ptr, compressed_lengths,
                       compressed_width)  # fmt: skip
    pools = Pools(
        Pool(window_ptr, window_rows, window_page_rows, window_page_stride, 0, window_inverse, window_shift),
        Pool(compressed_ptr, compressed_rows, compressed_page_rows, compressed_page_stride, 0, compressed_inverse,
             compressed_shift),
    )  # fmt: skip
    rope = Rope(cos_sin_ptr, positions_ptr, rope_positions, rope_width, rope_line)
    output = Output(out_ptr, lse_ptr, sink_ptr, part_ptr, part_lse_ptr, stride_on, stride_oh, stride_ln, stride_lh,
                    queries, heads, rope, want_lse)  # fmt: skip
    splits = Splits(num_splits, splits_inverse, splits_shift)
    one_item(q, window, compressed, Requests(starts_ptr, starts, requests), pools, output, scale, splits, HEADS, KEYS,
             HOW, SIGN, UNIT, SPLIT)  # fmt: skip
