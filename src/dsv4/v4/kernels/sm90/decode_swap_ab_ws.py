"""V4 attention on sm_90a for packed rows and few heads, 16 or 32 per CTA: keys are the rows of the scores, as in
decode_swap_ab.py.

With few heads the products are small, and the speed at which rows become bf16 counts. So two groups of four warps
gather blocks of 64 rows alternately, each into its own slot: while one waits for memory, the other converts. Four warps
compute, one block after the other::

    gather 0     rows of block 0 | -> kv 0 | rows of block 2 | wait free 0 | -> kv 0 ...
    gather 1     rows of block 1 |         -> kv 1 | rows of block 3 ...
    compute              wait 0 | S^T = K Q^T | softmax over keys -> P^T | O^T += V^T P^T | wait 1 ...

If the pools have two formats, each has its own loop, and one group of eight warps gathers all blocks: two groups with
two loops each are more code than the instruction cache holds (128 x 16 heads of DeepSeek-V4.1, 29.2 us with two, 27.3
with one). STAGED: it first loads the rows into shared memory, as they are (gather_staged.py), which pays if a CTA has
many blocks (27.9 -> 26.2).

Half a block, 256 columns, is handed over at a time: S^T begins with the first, and the first is free before the second.

P is made with the maxima as they are, and O^T is begun with it, before warps know what others saw: they read that while
the products run. Only where a score is far above its maximum, maxima move: then the products are waited for, O is
rescaled, and what P should have been less what it was, which is at most 2^8, is multiplied, too. Maxima begin with 0, a
guess; a first block with scores far from it, or without some of its rows, sets them.

shared memory   bytes               holds
q               4 x 256 HEADS       [HEADS, 128] each: columns of Q
kv              4 x 2 x 16384       [64, 128] each: columns of a block, by slot; at the end, of O
p               128 HEADS           [64, HEADS]: P^T
bias            2 x 256             fp32 per key: what is added to its scores, by slot
row_max            16 HEADS            fp32 per computing warp and head: maximum of its keys' scores
highest         16                  of each computing warp: how far a score is above its maximum, at most
barriers        8 each

barrier         arrives     count   waits       means
ready0[g]       gather g    1       compute     the first half of a block is in slot g, and its bias
ready1[g]       gather g    1       compute     the second half is, too
free0[g]        compute     1       gather g    the products with the first half of slot g are complete
free1[g]        compute     1       gather g    those with the second half are

(g: the slot; with one group of gathering warps it has both.)

Ordinary stores write converted rows. compute issues the fence before the tensor core reads them; with 32 heads, where
compute needs more time than gather, gather issues it.
"""

from dsv4.caches.kernels.unpack import has_small_rows, small_factor
from dsv4.kernels import dependent, softmax
from dsv4.kernels.compat import aggregate, async_copy, barrier, fence_async_shared, gl, gluon, warpgroup_mma_wait
from dsv4.kernels.opaque import zero
from dsv4.kernels.ring import Barriers, init_barriers, new_barriers
from dsv4.kernels.softmax_over_keys import maxima, output_layout, partial_sums, scores_layout
from dsv4.v4.kernels.pool_rows import entries, pool_in_units
from dsv4.v4.kernels.sm90.gather_staged import gather_staged_role, make_staging, stages
from dsv4.v4.kernels.sm90.row_numbers import Pools, numbers_of, pool_of
from dsv4.v4.kernels.sm90.smem_store import words
from dsv4.v4.kernels.sm90.swap_ab import (
    add,
    ask,
    copy_heads,
    cta_work,
    left_scores,
    make_memory,
    masked,
    prefetch_lists,
    right_scores,
    sink_of_heads,
    unpack_left,
    unpack_right,
    write_lse,
    write_out,
)
from dsv4.v4.kernels.tile_scheduler import NONE

GROUPS = gl.constexpr(2)  # groups of gathering warps, and slots


@aggregate
class HalfSlots:
    """Barriers by slot. Halves have their own: the compiler puts a barrier of warps between accesses to one array."""

    ready0: Barriers
    ready1: Barriers
    free0: Barriers
    free1: Barriers


@gluon.jit
def make_barriers():
    ready0 = new_barriers(GROUPS)
    ready1 = new_barriers(GROUPS)
    free0 = new_barriers(GROUPS)
    free1 = new_barriers(GROUPS)
    init_barriers((ready0, ready1, free0, free1))
    return HalfSlots(ready0, ready1, free0, free1)


@gluon.constexpr_function
def gather_fences(heads):
    return heads > 16


@gluon.constexpr_function
def broadcast_layout():
    """Return the layout of one number per compute warp, with all of them in every thread."""
    return gl.DistributedLinearLayout(
        reg_bases=[[1], [2]], lane_bases=[[0]] * 5, warp_bases=[[0], [0]], block_bases=[], shape=[4]
    )


@gluon.constexpr_function
def per_lane(heads, rows=0):
    """Return the layout of [heads] or [rows, heads]: a head per lane, all rows; every warp has all of them."""
    n = heads.bit_length() - 1
    row = [0] * (rows > 0)
    return gl.DistributedLinearLayout(
        reg_bases=[[1 << i, 0] for i in range(rows.bit_length() - 1)],
        lane_bases=[[*row, 1 << i] for i in range(n)] + [[*row, 0]] * (5 - n),
        warp_bases=[[*row, 0]] * 2,
        block_bases=[],
        shape=[rows, heads] if rows else [heads],
    )


@gluon.jit
def highest_of_warps(x, mask):
    """Return the greatest x [64, HEADS] of each warp, as bits, [4]: bits of positive numbers order like the numbers."""
    return gl.max((x.to(gl.int32, bitcast=True) & mask).reshape([4, 16 * x.shape[1]]), 1)


@gluon.jit
def add_all(o, memory, slot, at):
    """Issue O^T += V^T P^T of all quarters, without a wait. at: 0."""
    o0, o1, o2, o3 = o
    p = memory.p.index(at)
    o0, o1 = add(o0, memory.kv0.index(slot), p), add(o1, memory.kv1.index(slot), p)
    return o0, o1, add(o2, memory.kv2.index(slot), p), add(o3, memory.kv3.index(slot), p)


@gluon.jit
def gather_role(
    window,
    compressed,
    requests,
    pools,
    memory,
    barriers,
    sizes,
    GROUP: gl.constexpr,
    KV_INDEX: gl.constexpr,
    UNIT: gl.constexpr,
    FORMAT: gl.constexpr,
    FENCE: gl.constexpr,
):
    """Gather every second block, from block GROUP on: rows of the next are requested as soon as one's are stored."""
    SMALL: gl.constexpr = has_small_rows(FORMAT, FORMAT)
    lists, work = cta_work(window, compressed, requests, sizes, KV_INDEX, 64)
    entry = entries(words(gl.num_warps()))
    first = work.begin + GROUP
    number = numbers_of(lists, first, first < work.end, pools.compressed, entry, KV_INDEX)
    phase = 1  # the first wait on an untouched barrier passes
    for block in range(first, work.end, GROUPS):
        rows = ask(pool_of(pools, block < lists.window_blocks), number, UNIT, FORMAT, EXCHANGED=True)
        number = numbers_of(lists, block + GROUPS, block + GROUPS < work.end, pools.compressed, entry, KV_INDEX)
        hand_over(rows, memory, barriers, GROUP, phase, FORMAT, FENCE, SMALL)
        phase = phase ^ 1


@gluon.jit
def hand_over(rows, memory, barriers, slot, phase, FORMAT: gl.constexpr, FENCE: gl.constexpr, SMALL: gl.constexpr):
    """Store rows of a block into a slot, each half as soon as it is free."""
    barriers.free0.wait(slot, phase)
    unpack_left(rows, memory, slot, FORMAT, SMALL)
    if FENCE:
        fence_async_shared()
    barriers.ready0.arrive(slot)
    barriers.free1.wait(slot, phase)
    unpack_right(rows, memory, slot, FORMAT, SMALL, EXCHANGED=True)
    if FENCE:
        fence_async_shared()
    barriers.ready1.arrive(slot)


@gluon.jit
def gather_two_formats_role(
    window,
    compressed,
    requests,
    pools,
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
    lists, work = cta_work(window, compressed, requests, sizes, KV_INDEX, 64)
    begin, end = work.begin, work.end
    middle = gl.minimum(gl.maximum(lists.window_blocks, begin), end)
    blocks_of_format(lists, begin, pools, memory, barriers, begin, middle, KV_INDEX, UNIT, FORMATS[0], FENCE, SMALL)
    blocks_of_format(lists, begin, pools, memory, barriers, middle, end, KV_INDEX, UNIT, FORMATS[1], FENCE, SMALL)


@gluon.jit
def blocks_of_format(
    lists,
    begin,
    pools,
    memory,
    barriers,
    first,
    end,
    KV_INDEX: gl.constexpr,
    UNIT: gl.constexpr,
    FORMAT: gl.constexpr,
    FENCE: gl.constexpr,
    SMALL: gl.constexpr,
):
    """Gather blocks [first, end). begin: the first of all, from which slots and phases are counted."""
    entry = entries(words(gl.num_warps()))
    number = numbers_of(lists, first, first < end, pools.compressed, entry, KV_INDEX)
    for block in range(first, end):
        rows = ask(pool_of(pools, block < lists.window_blocks), number, UNIT, FORMAT, EXCHANGED=True)
        number = numbers_of(lists, block + 1, block + 1 < end, pools.compressed, entry, KV_INDEX)
        phase = ((block - begin) // GROUPS + 1) % 2  # the first wait on an untouched barrier passes
        hand_over(rows, memory, barriers, (block - begin) % GROUPS, phase, FORMAT, FENCE, SMALL)


@gluon.jit
def compute_role(
    q,
    window,
    compressed,
    requests,
    memory,
    highest,
    barriers,
    output,
    scale,
    sizes,
    HEADS: gl.constexpr,
    KV_INDEX: gl.constexpr,
    SIGN: gl.constexpr,
    SPLIT: gl.constexpr,
    UP: gl.constexpr,
):
    WARPS: gl.constexpr = gl.num_warps()
    LS: gl.constexpr = scores_layout(WARPS, HEADS, 64)
    LO: gl.constexpr = output_layout(WARPS, HEADS)
    LP: gl.constexpr = partial_sums(gl.zeros([64, HEADS], gl.float32, LS)).type.layout
    first_head = gl.program_id(0) * HEADS
    sink = sink_of_heads(output, first_head, SPLIT, HEADS, per_lane(HEADS))  # early, since it is in memory
    copy_heads(q, gl.program_id(1), first_head, output.heads, memory.q)
    lists, work = cta_work(window, compressed, requests, sizes, KV_INDEX, 64)
    o0 = gl.zeros([128, HEADS], gl.float32, LO)
    o1 = gl.zeros([128, HEADS], gl.float32, LO)
    o2 = gl.zeros([128, HEADS], gl.float32, LO)
    o3 = gl.zeros([128, HEADS], gl.float32, LO)
    m = gl.zeros([HEADS], gl.float32, gl.SliceLayout(0, LS))  # a guess
    l = gl.zeros([4, 8, HEADS], gl.float32, LP)
    async_copy.wait_group(0)  # Q; seen by all warps after the barrier
    fence_async_shared()  # seen by the tensor cores too; Triton 3.6 adds none
    barrier()
    slot = 0
    phase = 0
    for block in range(work.begin, work.end):
        # Opaque, otherwise all wgmma descriptors would stay in registers, and spill; two, else those of S until O.
        at = slot + zero(block)
        keys_at = slot + zero(block)
        barriers.ready0.wait(slot, phase)
        if not gather_fences(HEADS):
            fence_async_shared()
        s = left_scores(memory, keys_at, zero(block), HEADS)
        # Behind S: loads of shared memory wait for the stores of the gathering warps.
        bias = memory.bias.index(slot).load(gl.SliceLayout(1, LS))
        barriers.ready1.wait(slot, phase)
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
        p = gl.exp2(gl.minimum(above, softmax.RESCALE_ABOVE))
        memory.p.index(0).store(p.to(memory.p.dtype))
        sums = partial_sums(p)
        first = block == work.begin  # scores far below the guess then count like those far above
        highest.store(highest_of_warps(above, gl.where(first, 0x7FFFFFFF, -1)))
        fence_async_shared()
        barrier()
        o0, o1, o2, o3 = add_all((o0, o1, o2, o3), memory, at, at - here)
        again = here + zero(block)  # a new one: the descriptors of the products above would be kept
        if gl.max(highest.load(broadcast_layout()), 0).to(gl.float32, bitcast=True) > softmax.RESCALE_ABOVE:
            o0, o1, o2, o3 = warpgroup_mma_wait(num_outstanding=0, deps=(o0, o1, o2, o3))
            top = maxima(x, memory.row_max, m)
            moved = gl.where(top - m > softmax.RESCALE_ABOVE, top, m)
            moved = gl.where(first, gl.maximum(top, softmax.LOWEST), moved)
            factor = gl.where(first, 0.0, gl.exp2(m - moved))  # nothing before a first block is kept
            m = moved
            p = gl.exp2(x - m[None, :])
            sums = partial_sums(p)
            added = memory.p.index(0).load(LS).to(gl.float32) * factor[None, :]
            memory.p.index(0).store((p - added).to(memory.p.dtype))
            l = l * gl.convert_layout(factor, gl.SliceLayout(0, gl.SliceLayout(1, LP)))[None, None, :]
            by = gl.convert_layout(factor, gl.SliceLayout(0, LO))[None, :]
            fence_async_shared()
            barrier()
            o0, o1, o2, o3 = add_all((o0 * by, o1 * by, o2 * by, o3 * by), memory, again, again - here)
        l = l + sums
        o0, o1 = warpgroup_mma_wait(num_outstanding=2, deps=(o0, o1))
        barriers.free0.arrive(here)
        o0, o1, o2, o3 = warpgroup_mma_wait(num_outstanding=0, deps=(o0, o1, o2, o3))
        barriers.free1.arrive(here)
    # Add the warps' sums through shared memory once, then use a head per lane: otherwise every thread would compute the
    # logarithms of all its columns.
    memory.row_max.store(gl.sum(l, 1))
    m = gl.convert_layout(m, per_lane(HEADS))
    m = gl.where(work.begin < work.end, m, -float("inf"))  # if there is no block, m is still the guess
    l = gl.convert_layout(gl.sum(memory.row_max.load(per_lane(HEADS, 4)), 0), per_lane(HEADS))
    place = (work.query, first_head, gl.program_id(2))
    write_out((o0, o1, o2, o3), write_lse(m, l, sink, place, output, SPLIT, UP), memory, place, output, SPLIT)


@gluon.jit
def v4_decode_swap_ab_ws(
    q,
    window,
    window_names,
    compressed,
    compressed_names,
    requests,
    output,
    sizes,
    scale,
    KV_INDEX: gl.constexpr,
    SIGN: gl.constexpr,
    WINDOW_FORMAT: gl.constexpr,
    COMPRESSED_FORMAT: gl.constexpr,
    WINDOW_UNIT: gl.constexpr,
    COMPRESSED_UNIT: gl.constexpr,
    SPLIT: gl.constexpr,
    HEADS: gl.constexpr,
    GATHER_REGS: gl.constexpr,
    STAGED: gl.constexpr = False,
    PDL_LAUNCH: gl.constexpr = False,
    AFTER: gl.constexpr = False,
):
    if PDL_LAUNCH:
        dependent.launch_dependents()
    prefetch_lists(window_names, compressed_names, KV_INDEX)
    # Both pools are read in the same way, that of the smaller unit.
    UNIT: gl.constexpr = min(WINDOW_UNIT, COMPRESSED_UNIT)
    pools = Pools(
        pool_in_units(window, WINDOW_UNIT // UNIT),
        pool_in_units(compressed, COMPRESSED_UNIT // UNIT if KV_INDEX != NONE else 1),
    )
    memory = make_memory(HEADS, 64, GROUPS)
    highest = gl.allocate_shared_memory(gl.int32, [4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    barriers = make_barriers()
    FENCE: gl.constexpr = gather_fences(HEADS)
    FORMATS: gl.constexpr = (WINDOW_FORMAT, WINDOW_FORMAT if KV_INDEX == NONE else COMPRESSED_FORMAT)
    UP: gl.constexpr = small_factor(FORMATS[0], FORMATS[1])
    scale = scale * UP
    if FORMATS[0] == FORMATS[1]:
        gl.warp_specialize([
            (compute_role, (q, window_names, compressed_names, requests, memory, highest, barriers, output, scale,
                            sizes, HEADS, KV_INDEX, SIGN, SPLIT, UP)),
            (gather_role, (window_names, compressed_names, requests, pools, memory, barriers, sizes, 0, KV_INDEX, UNIT,
                           WINDOW_FORMAT, FENCE)),
            (gather_role, (window_names, compressed_names, requests, pools, memory, barriers, sizes, 1, KV_INDEX, UNIT,
                           WINDOW_FORMAT, FENCE)),
        ], [4, 4], [GATHER_REGS, GATHER_REGS])  # fmt: skip
    elif STAGED and stages(FORMATS[0], FORMATS[1], UNIT):
        staging = make_staging()
        gl.warp_specialize([
            (compute_role, (q, window_names, compressed_names, requests, memory, highest, barriers, output, scale,
                            sizes, HEADS, KV_INDEX, SIGN, SPLIT, UP)),
            (gather_staged_role, (window_names, compressed_names, requests, pools, staging, memory, barriers, sizes,
                                  KV_INDEX, UNIT, FORMATS, FENCE)),
        ], [8], [GATHER_REGS])  # fmt: skip
    else:
        gl.warp_specialize([
            (compute_role, (q, window_names, compressed_names, requests, memory, highest, barriers, output, scale,
                            sizes, HEADS, KV_INDEX, SIGN, SPLIT, UP)),
            (gather_two_formats_role, (window_names, compressed_names, requests, pools, memory, barriers, sizes,
                                       KV_INDEX, UNIT, FORMATS, FENCE)),
        ], [8], [GATHER_REGS])  # fmt: skip
    if AFTER:  # the next grid waits for this one, and so for the one before it, too
        dependent.wait_on_prior_grid()
