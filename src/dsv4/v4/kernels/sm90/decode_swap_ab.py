"""V4 attention on sm_90a for few heads per CTA: keys are the rows of the scores.

sparse.py has 64 heads per CTA, roles and a ring, which is right if SMs have plenty of work. With one or a few queries,
latency counts. Here the warps of a CTA do one thing after the other for HEADS heads of one query and one split of its
rows, ideally one block. With 16 heads a block has 64 rows, for eight warps; with 32 heads 64 for four or 128 for eight,
if there would be too many blocks of 64 for one each::

    ask for rows | O^T += V^T P^T of the last block | codes -> bf16 -> kv | S^T = K Q^T | softmax over keys -> P^T

Packed rows go through registers; cp.async loads those of a plain tensor, when the last block's are no longer
read.

Products are HEADS wide instead of padded to 64, less memory is written at the end, and a block runs less than half of
the code: instructions that run once are fetched from L2 or from memory, as rows are.

shared memory   bytes               holds
q               4 x 256 HEADS       [HEADS, 128] each: columns of Q
kv              4 x 256 KEYS        [KEYS, 128] each: columns of a block; at the end, of O
p               2 KEYS HEADS        [KEYS, HEADS]: P^T
bias            4 KEYS              fp32 per key: what is added to its scores
row_max            HEADS KEYS / 4      fp32 per 16 keys and head: maximum of their scores

Rows are requested after the last fence of a block: the assembler makes a fence wait for loads in flight.
"""

from dsv4.caches.kernels.unpack import has_small_rows, small_factor
from dsv4.kernels import dependent, softmax
from dsv4.kernels.compat import async_copy, barrier, fence_async_shared, gl, gluon, warpgroup_mma_wait
from dsv4.kernels.opaque import zero
from dsv4.kernels.softmax_over_keys import output_layout, partial_sums, scores_layout, softmax_over_keys
from dsv4.v4.kernels.pool_rows import entries, pool_in_units
from dsv4.v4.kernels.sm90.row_numbers import Pools, numbers_of, pool_of
from dsv4.v4.kernels.sm90.smem_store import words
from dsv4.v4.kernels.sm90.swap_ab import (
    add,
    ask,
    copy_block,
    copy_heads,
    cta_work,
    finish,
    left_scores,
    make_memory,
    masked,
    prefetch_lists,
    right_scores,
    unpack_left,
    unpack_right,
)
from dsv4.v4.kernels.tile_scheduler import NONE


@gluon.jit
def unpack(rows, memory, FORMAT: gl.constexpr, SMALL: gl.constexpr):
    unpack_left(rows, memory, 0, FORMAT, SMALL)
    unpack_right(rows, memory, 0, FORMAT, SMALL)


@gluon.jit
def attend(
    number,
    lists,
    begin,
    end,
    pools,
    memory,
    scale,
    HEADS: gl.constexpr,
    KV_INDEX: gl.constexpr,
    SIGN: gl.constexpr,
    UNIT: gl.constexpr,
    FORMATS: gl.constexpr,
):
    """Process blocks [begin, end) -> quarters of O^T, maximum and sums of the heads. number: of the first block's rows.
    If the pools have two formats, rows are requested when there is room for them: registers have a type."""
    FORMAT: gl.constexpr = FORMATS[0]
    ONE: gl.constexpr = FORMAT == FORMATS[1]
    SMALL: gl.constexpr = has_small_rows(FORMATS[0], FORMATS[1])
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
    m = gl.full([HEADS], softmax.LOWEST, gl.float32, gl.SliceLayout(0, LS))
    factor = gl.full([HEADS], 0.0, gl.float32, gl.SliceLayout(0, LS))
    l = gl.zeros([KEYS // 16, 8, HEADS], gl.float32, LP)
    # The loop has one iteration more than there are blocks, so that every part of the code exists once.
    for block in range(begin, end + 1):
        pool, wanted = pool_of(pools, block < lists.window_blocks), number
        if FORMAT.coded > 0 and ONE:
            rows = ask(pool, wanted, UNIT, FORMAT)
        number = numbers_of(lists, block + 1, block + 1 < end, pools.compressed, entry, KV_INDEX)
        at = zero(block)  # otherwise all wgmma descriptors would be kept in registers, and spilled
        if block > begin:
            by = gl.convert_layout(factor, gl.SliceLayout(0, LO))[None, :]
            o0 = add(o0 * by, memory.kv0.index(at), memory.p.index(at))
            o1 = add(o1 * by, memory.kv1.index(at), memory.p.index(at))
            o2 = add(o2 * by, memory.kv2.index(at), memory.p.index(at))
            o3 = add(o3 * by, memory.kv3.index(at), memory.p.index(at))
            o0, o1, o2, o3 = warpgroup_mma_wait(num_outstanding=0, deps=(o0, o1, o2, o3))
            barrier()
        if block < end:
            if not ONE:
                if block < lists.window_blocks:
                    unpack(ask(pools.window, wanted, UNIT, FORMAT), memory, FORMAT, SMALL)
                else:
                    unpack(ask(pools.compressed, wanted, UNIT, FORMATS[1]), memory, FORMATS[1], SMALL)
            elif FORMAT.coded > 0:
                unpack(rows, memory, FORMAT, SMALL)
            else:
                copy_block(pool, wanted, memory, 0)
            async_copy.wait_group(0)  # Q, plain rows
            fence_async_shared()
            barrier()
            s = right_scores(left_scores(memory, at, at, HEADS), memory, at, at)
            bias = memory.bias.index(0).load(gl.SliceLayout(1, LS))
            s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
            p, m, factor = softmax_over_keys(masked(s, bias, SIGN), m, scale, memory.row_max)
            l = l * gl.convert_layout(factor, gl.SliceLayout(0, gl.SliceLayout(1, LP)))[None, None, :] + partial_sums(p)
            memory.p.index(0).store(p.to(memory.p.dtype))
            fence_async_shared()
            barrier()
    # Without a block no role has waited for Q, and the code below may use its memory.
    async_copy.wait_group(0)
    barrier()
    return o0, o1, o2, o3, m, l


@gluon.jit
def one_tile(
    q,
    window,
    compressed,
    requests,
    pools,
    output,
    scale,
    sizes,
    HEADS: gl.constexpr,
    KEYS: gl.constexpr,
    KV_INDEX: gl.constexpr,
    SIGN: gl.constexpr,
    UNIT: gl.constexpr,
    FORMATS: gl.constexpr,
    SPLIT: gl.constexpr,
):
    """Process some heads of a query and some blocks of its rows."""
    first_head = gl.program_id(0) * HEADS
    lists, work = cta_work(window, compressed, requests, sizes, KV_INDEX, KEYS)
    begin, end = work.begin, work.end
    # In flight while Q is requested.
    number = numbers_of(lists, begin, begin < end, pools.compressed, entries(words(gl.num_warps()), KEYS), KV_INDEX)
    memory = make_memory(HEADS, KEYS)
    copy_heads(q, work.query, first_head, output.heads, memory.q)
    UP: gl.constexpr = small_factor(FORMATS[0], FORMATS[1])
    scale = scale * UP
    o0, o1, o2, o3, m, l = attend(number, lists, begin, end, pools, memory, scale, HEADS, KV_INDEX, SIGN, UNIT, FORMATS)
    finish((o0, o1, o2, o3), m, l, memory, (work.query, first_head, gl.program_id(2)), output, scale, SPLIT, UP)


@gluon.jit
def v4_decode_swap_ab(
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
    KEYS: gl.constexpr = 64,
    PDL_LAUNCH: gl.constexpr = False,
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
    FORMATS: gl.constexpr = (WINDOW_FORMAT, WINDOW_FORMAT if KV_INDEX == NONE else COMPRESSED_FORMAT)
    one_tile(q, window_names, compressed_names, requests, pools, output, scale, sizes, HEADS, KEYS, KV_INDEX, SIGN,
             UNIT, FORMATS, SPLIT)  # fmt: skip
