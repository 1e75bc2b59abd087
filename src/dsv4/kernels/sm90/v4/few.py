"""V4 attention on sm_90a for FP8 rows and few heads, 16 or 32 per CTA: keys are the rows of the scores (narrow.py too).

With few heads the products are small, and what counts is how fast rows become bf16. So two groups of four warps gather,
each into a slot of its own, blocks of 64 rows by turns: while one waits for memory, the other converts. Four warps
compute, one block after the other::

    gather 0     rows of block 0 | -> kv 0 | rows of block 2 | wait free 0 | -> kv 0 ...
    gather 1     rows of block 1 |         -> kv 1 | rows of block 3 ...
    compute              wait 0 | S^T = K Q^T | softmax over keys -> P^T | O^T += V^T P^T | wait 1 ...

Half a block, 256 columns, is handed over at a time: S^T begins with the first, and the first is free before the second.

P is made with the maxima as they are, and stored, before warps have told each other what they saw: the barrier that
says P is there says that, too. Only where a score is far above its maximum, in the first block and seldom later, maxima
move, P is made anew, and O is rescaled.

shared memory   bytes               holds
q               4 x 256 HEADS       [HEADS, 128] each: columns of Q
kv              4 x 2 x 16384       [64, 128] each: columns of a block, by slot; at the end, of O
p               128 HEADS           [64, HEADS]: P^T
bias            2 x 256             fp32 per key: what is added to its scores, by slot
tops            16 HEADS            fp32 per computing warp and head: maximum of its keys' scores
highest         16                  of each computing warp: how far a score is above its maximum, at most
barriers        8 each

barrier         arrives     count   waits       means
ready[2g + h]   gather g    1       compute     half h of a block is in slot g; if h = 0, its bias
free[2g + h]    compute     1       gather g    the products with half h of slot g are complete

Converted rows are written by ordinary stores. The fence before the tensor core reads them is put by compute; with 32
heads, where compute takes longer than gather, by gather.
"""

from dsv4.kernels.compat import (
    async_copy,
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma_wait,
)
from dsv4.kernels.shared import dependent, softmax
from dsv4.kernels.shared.opaque import zero
from dsv4.kernels.shared.v4.arguments import Names, Output, Requests, Rope
from dsv4.kernels.shared.v4.items import NONE
from dsv4.kernels.shared.v4.rows import Pool, entries
from dsv4.kernels.sm90.v4.gather import Pools, Queries, numbers_of, pool_of, words
from dsv4.kernels.sm90.v4.transposed import (
    Splits,
    add,
    ask,
    copy_heads,
    finish,
    left_scores,
    make_memory,
    masked,
    maxima,
    output_layout,
    partial_sums,
    prefetch_lists,
    right_scores,
    scores_layout,
    unpack_left,
    unpack_right,
    work_of,
)

GROUPS = gl.constexpr(2)  # of gathering warps, and slots


@gluon.constexpr_function
def gather_fences(heads):
    return heads > 16


@gluon.constexpr_function
def for_all():
    """A number of each computing warp: every thread has all of them."""
    return gl.DistributedLinearLayout(
        reg_bases=[[1], [2]], lane_bases=[[0]] * 5, warp_bases=[[0], [0]], block_bases=[], shape=[4]
    )


@gluon.jit
def highest_of_warps(x):
    """Of x [64, HEADS], as bits: those of positive numbers are in the order of the numbers. [4]"""
    return gl.max(x.to(gl.int32, bitcast=True).reshape([4, 16 * x.shape[1]]), 1)


@gluon.jit
def gather_role(window, compressed, requests, pools, memory, ready, free, splits, GROUP: gl.constexpr,
                HOW: gl.constexpr, UNIT: gl.constexpr, FENCE: gl.constexpr):  # fmt: skip
    """Every second block, from block GROUP on: rows of the next are asked for as soon as those of one are stored."""
    lists, work = work_of(window, compressed, requests, splits, HOW, 64)
    entry = entries(words(gl.num_warps()))
    first = work.begin + GROUP
    number = numbers_of(lists, first, first < work.end, pools.compressed, entry, HOW)
    phase = 1  # the first wait on an untouched barrier passes
    for block in range(first, work.end, GROUPS):
        rows = ask(pool_of(pools, block < lists.window_blocks), number, UNIT)
        number = numbers_of(lists, block + GROUPS, block + GROUPS < work.end, pools.compressed, entry, HOW)
        mbarrier.wait(free.index(2 * GROUP), phase)
        unpack_left(rows, memory, GROUP)
        if FENCE:
            fence_async_shared()
        mbarrier.arrive(ready.index(2 * GROUP), count=1)
        mbarrier.wait(free.index(2 * GROUP + 1), phase)
        unpack_right(rows, memory, GROUP)
        if FENCE:
            fence_async_shared()
        mbarrier.arrive(ready.index(2 * GROUP + 1), count=1)
        phase = phase ^ 1


@gluon.jit
def compute_role(q, window, compressed, requests, memory, highest, ready, free, output, scale, splits,
                 HEADS: gl.constexpr, HOW: gl.constexpr, SIGN: gl.constexpr, SPLIT: gl.constexpr):  # fmt: skip
    WARPS: gl.constexpr = gl.num_warps()
    LS: gl.constexpr = scores_layout(WARPS, HEADS, 64)
    LO: gl.constexpr = output_layout(WARPS, HEADS)
    LP: gl.constexpr = partial_sums(gl.zeros([64, HEADS], gl.float32, LS)).type.layout
    first_head = gl.program_id(0) * HEADS
    copy_heads(q, gl.program_id(1), first_head, output.heads, memory.q)
    lists, work = work_of(window, compressed, requests, splits, HOW, 64)
    o0 = gl.zeros([128, HEADS], gl.float32, LO)
    o1 = gl.zeros([128, HEADS], gl.float32, LO)
    o2 = gl.zeros([128, HEADS], gl.float32, LO)
    o3 = gl.zeros([128, HEADS], gl.float32, LO)
    m = gl.full([HEADS], softmax.LOWEST, gl.float32, gl.SliceLayout(0, LS))
    l = gl.zeros([4, 8, HEADS], gl.float32, LP)
    async_copy.wait_group(0)  # Q; seen by all warps after the barrier
    barrier()
    slot = 0
    phase = 0
    for block in range(work.begin, work.end):
        # Opaque, else all wgmma descriptors would be kept in registers, and spilled; apart, else those of S until O.
        at = slot + zero(block)
        keys_at = slot + zero(block)
        mbarrier.wait(ready.index(2 * slot), phase)
        if not gather_fences(HEADS):
            fence_async_shared()
        bias = memory.bias.index(slot).load(gl.SliceLayout(1, LS))
        s = left_scores(memory, keys_at, zero(block), HEADS)
        mbarrier.wait(ready.index(2 * slot + 1), phase)
        if not gather_fences(HEADS):
            fence_async_shared()
        s = right_scores(s, memory, keys_at, zero(block))
        s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
        here = slot
        slot += 1
        if slot == GROUPS:
            slot = 0
            phase = phase ^ 1
        x = masked(s, bias, SIGN) * scale
        above = x - m[None, :]
        p = gl.exp2(above)
        memory.p.index(0).store(p.to(memory.p.dtype))
        highest.store(highest_of_warps(above))
        fence_async_shared()
        barrier()
        if gl.max(highest.load(for_all()), 0).to(gl.float32, bitcast=True) > softmax.RESCALE_ABOVE:
            top = maxima(x, memory.tops, m)
            before = m
            m = gl.where(top - m > softmax.RESCALE_ABOVE, top, m)
            p = gl.exp2(x - m[None, :])
            memory.p.index(0).store(p.to(memory.p.dtype))
            factor = gl.exp2(before - m)
            l = l * gl.convert_layout(factor, gl.SliceLayout(0, gl.SliceLayout(1, LP)))[None, None, :]
            by = gl.convert_layout(factor, gl.SliceLayout(0, LO))[None, :]
            o0, o1, o2, o3 = o0 * by, o1 * by, o2 * by, o3 * by
            fence_async_shared()
            barrier()
        l = l + partial_sums(p)
        o0 = add(o0, memory.kv0.index(at), memory.p.index(at - here))
        o1 = add(o1, memory.kv1.index(at), memory.p.index(at - here))
        o2 = add(o2, memory.kv2.index(at), memory.p.index(at - here))
        o3 = add(o3, memory.kv3.index(at), memory.p.index(at - here))
        o0, o1 = warpgroup_mma_wait(num_outstanding=2, deps=(o0, o1))
        mbarrier.arrive(free.index(2 * here), count=1)
        o0, o1, o2, o3 = warpgroup_mma_wait(num_outstanding=0, deps=(o0, o1, o2, o3))
        mbarrier.arrive(free.index(2 * here + 1), count=1)
    finish((o0, o1, o2, o3), m, l, memory, (work.query, first_head, gl.program_id(2)), output, SPLIT)


@gluon.jit(do_not_specialize=[
    "want_lse", "queries", "heads", "window_rows", "window_page_rows", "window_page_stride", "window_inverse",
    "window_shift", "window_width", "window_line", "compressed_rows", "compressed_page_rows", "compressed_page_stride",
    "compressed_inverse", "compressed_shift", "compressed_width", "compressed_line", "window_lengths",
    "compressed_lengths", "starts", "requests", "rope_positions", "rope_width", "rope_line", "num_splits",
    "splits_inverse", "splits_shift", "stride_qn", "stride_qh", "stride_on", "stride_oh", "stride_ln", "stride_lh",
])  # fmt: skip
def v4_few(q_ptr, out_ptr, lse_ptr, sink_ptr, part_ptr, part_lse_ptr, window_ptr, window_list_ptr,
           window_lengths_ptr, compressed_ptr, compressed_list_ptr, compressed_lengths_ptr, starts_ptr, cos_sin_ptr,
           positions_ptr, scale, want_lse, queries, heads, window_rows, window_page_rows, window_page_stride,
           window_inverse, window_shift, window_width, window_line, compressed_rows, compressed_page_rows,
           compressed_page_stride, compressed_inverse, compressed_shift, compressed_width, compressed_line,
           window_lengths, compressed_lengths, starts, requests, rope_positions, rope_width, rope_line, num_splits,
           splits_inverse, splits_shift, stride_qn, stride_qh, stride_on, stride_oh, stride_ln, stride_lh,
           HOW: gl.constexpr, SIGN: gl.constexpr, WINDOW_UNIT: gl.constexpr, COMPRESSED_UNIT: gl.constexpr,
           SPLIT: gl.constexpr, HEADS: gl.constexpr, GATHER_REGS: gl.constexpr,
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
    prefetch_lists(window, compressed, HOW)
    pools = Pools(
        Pool(window_ptr, window_rows, window_page_rows, window_page_stride, 0, window_inverse, window_shift),
        Pool(compressed_ptr, compressed_rows, compressed_page_rows, compressed_page_stride, 0, compressed_inverse,
             compressed_shift),
    )  # fmt: skip
    rope = Rope(cos_sin_ptr, positions_ptr, rope_positions, rope_width, rope_line)
    output = Output(out_ptr, lse_ptr, sink_ptr, part_ptr, part_lse_ptr, stride_on, stride_oh, stride_ln, stride_lh,
                    queries, heads, rope, want_lse)  # fmt: skip
    splits = Splits(num_splits, splits_inverse, splits_shift)
    requests = Requests(starts_ptr, starts, requests)
    memory = make_memory(HEADS, 64, GROUPS)
    highest = gl.allocate_shared_memory(gl.int32, [4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    ready = gl.allocate_shared_memory(gl.int64, [2 * GROUPS, 1], BAR)
    free = gl.allocate_shared_memory(gl.int64, [2 * GROUPS, 1], BAR)
    for i in gl.static_range(2 * GROUPS):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    FENCE: gl.constexpr = gather_fences(HEADS)
    gl.warp_specialize([
        (compute_role, (q, window, compressed, requests, memory, highest, ready, free, output, scale, splits, HEADS,
                        HOW, SIGN, SPLIT)),
        (gather_role, (window, compressed, requests, pools, memory, ready, free, splits, 0, HOW, UNIT, FENCE)),
        (gather_role, (window, compressed, requests, pools, memory, ready, free, splits, 1, HOW, UNIT, FENCE)),
    ], [4, 4], [GATHER_REGS, GATHER_REGS])  # fmt: skip
