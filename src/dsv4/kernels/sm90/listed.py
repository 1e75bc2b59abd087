"""V4 attention on sm_90a: one query token, 64 of its heads per CTA, rows picked by number from one or two pools.

Every row is key and value at once, so a block of 64 rows is gathered once, into one slot [64, 512], and read as K and
as V. Left and right are those of wide.py, which describes how they share O; a third warpgroup gathers. Role chart::

    gather  4 warps  | half blocks 0, 1, 2, 3 of the next step, as left and right free them ...
    left    4 warps  | S0 = Q K0^T | softmax 0 -> P0 | O_L += P0 V0_L |           wait P1 | O_L += P1 V1_L
    right   4 warps  | S1 = Q K1^T |        wait P0 | O_R += P0 V0_R | softmax 1 -> P1    | O_R += P1 V1_R

The blocks of a query are those of its window list, then those of its compressed rows; a block never mixes pools. Rows
of plain tensors come by cp.async, rows of an Fp8Cache through registers, where they become bf16. A row that is not
there (-1, out of range, past the length) is filled with zeros, and its bias is -inf: 0 * NaN would be NaN.

shared memory   bytes               holds
q               2 x 32768           [64, 256] each: columns 0-255 and 256-511 of Q; the output rows leave through it
kv              4 x 32768           [64, 256] each: block b, half h at 2b + h
p               2 x 8192            [64, 64] each: P of block 0 and 1
bias            3 x 256             fp32 per key: what is added to the scores of block 0 and 1; a place for nothing
stat            6 x 256             fp32 per row: maximum after block 0, after block 1; factor 0, 1; sums of left, right
barriers        8 each

barrier         arrives                      count       waits          means
q_ready         left, right                  2           left, right    both halves of Q are in q
ready[2b + h]   gather                       1           left, right    half h of block b is in kv; if h = b, its bias
free[2b + h]    owner of half h              1           gather         O half h has used block b: refill its half h
p_ready[b]      the block's owner            1           the other      P, maximum and factor of block b are written
sum_ready[h]    owner of half h              1           the other      its row sums are written; it no longer reads q

The bias of block b is read by the block's owner before it frees half h = b, and written after that.
"""

from dsv4.kernels.compat import async_copy, gl, gluon, mbarrier
from dsv4.kernels.shared import loads
from dsv4.kernels.shared.gather import LIST, NONE, fill, share
from dsv4.kernels.shared.tiles import LISTED, split_range
from dsv4.kernels.sm90.wide import left_role, right_role


@gluon.jit
def fill_slot(window, compressed, kv, bias, step, SLOT: gl.constexpr, HOW: gl.constexpr, FP8: gl.constexpr,
              UNITS: gl.constexpr):  # fmt: skip
    """One half block of a step: of the window list, of the compressed rows after it, or of nothing."""
    window_pool, window_names, window_count, window_blocks = window
    compressed_pool, compressed_names, compressed_count = compressed
    B: gl.constexpr = SLOT // 2
    H: gl.constexpr = SLOT % 2
    tile = kv.index(SLOT)
    # One bias per block, written with the half that the block's owner frees; the other goes to a spare place.
    seen = bias.index(B if H == B else 2)
    block = step * 2 + B
    if block < window_blocks:
        fill(window_pool, window_names, block * 64, window_count, tile, seen, H, LIST, FP8[0], UNITS[0])
    elif HOW == NONE:
        fill(window_pool, window_names, 0, 0, tile, seen, H, LIST, FP8[0], UNITS[0])
    else:
        fill(compressed_pool, compressed_names, (block - window_blocks) * 64, compressed_count, tile, seen, H, HOW,
             FP8[1], UNITS[1])  # fmt: skip


@gluon.jit
def gather_role(window, compressed, ring, bias, step_begin, step_end, HOW: gl.constexpr, FP8: gl.constexpr,
                UNITS: gl.constexpr):  # fmt: skip
    """Fills the four half blocks of each step, as they become free.

    A half is announced while the next one is under way; the last of a step is not kept back until the first of the
    next step is free, because that one is freed by those who wait for it.
    """
    kv, ready, free = ring
    phase = 1  # the first wait on an untouched barrier passes
    for step in range(step_begin, step_end):
        for slot in gl.static_range(4):
            mbarrier.wait(free.index(slot), phase)
            fill_slot(window, compressed, kv, bias, step, slot, HOW, FP8, UNITS)
            async_copy.commit_group()
            if slot > 0:
                loads.announce(ready.index(slot - 1), 1)
        loads.announce(ready.index(3), 0)
        phase = phase ^ 1


@gluon.jit(do_not_specialize=[
    "want_lse", "queries", "heads", "window_rows", "window_page_rows", "window_page_stride", "window_row_stride",
    "window_width", "window_line", "compressed_rows", "compressed_page_rows", "compressed_page_stride",
    "compressed_row_stride", "compressed_width", "compressed_line", "window_lengths", "compressed_lengths", "starts",
    "requests", "rope_positions", "rope_width", "rope_line", "num_splits", "tiles_per_split", "stride_qn", "stride_qh",
    "stride_on", "stride_oh", "stride_ln", "stride_lh",
])  # fmt: skip
def v4_listed(q_ptr, out_ptr, lse_ptr, sink_ptr, part_ptr, part_lse_ptr, window_ptr, window_list_ptr,
              window_lengths_ptr, compressed_ptr, compressed_list_ptr, compressed_lengths_ptr, starts_ptr, cos_sin_ptr,
              positions_ptr, scale, want_lse, queries, heads, window_rows, window_page_rows, window_page_stride,
              window_row_stride, window_width, window_line, compressed_rows, compressed_page_rows,
              compressed_page_stride, compressed_row_stride, compressed_width, compressed_line, window_lengths,
              compressed_lengths, starts, requests, rope_positions, rope_width, rope_line, num_splits, tiles_per_split,
              stride_qn, stride_qh, stride_on, stride_oh, stride_ln, stride_lh,
              HOW: gl.constexpr, SIGN: gl.constexpr, WINDOW_FP8: gl.constexpr, COMPRESSED_FP8: gl.constexpr,
              WINDOW_UNIT: gl.constexpr, COMPRESSED_UNIT: gl.constexpr, SPLIT: gl.constexpr,
              RIGHT_REGS: gl.constexpr, GATHER_REGS: gl.constexpr):  # fmt: skip
    head_tiles = (heads + 63) // 64
    query = gl.program_id(0) // head_tiles  # its tiles run side by side: one finds in L2 what the other read
    tile_row = (gl.program_id(0) - query * head_tiles) * 64
    split = gl.program_id(1)
    query64 = query.to(gl.int64)
    window_count, compressed_count, line = share(
        query, (window_lengths_ptr, window_lengths, window_width),
        (compressed_lengths_ptr, compressed_lengths, compressed_width), (starts_ptr, starts, requests), HOW,
    )  # fmt: skip
    window_blocks = (window_count + 63) // 64
    steps = (window_blocks + (compressed_count + 63) // 64 + 1) // 2
    step_begin, step_end = split_range(steps, split, num_splits, tiles_per_split)

    HALF: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 256], gl.bfloat16)
    P: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256], HALF)
    kv = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 256], HALF)
    p_smem = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], P)
    bias = gl.allocate_shared_memory(gl.float32, [3, 64], FLAT)
    stat = gl.allocate_shared_memory(gl.float32, [6, 64], FLAT)
    q_asked = gl.allocate_shared_memory(gl.int64, [1], BAR)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], BAR)
    ready = gl.allocate_shared_memory(gl.int64, [4, 1], BAR)
    free = gl.allocate_shared_memory(gl.int64, [4, 1], BAR)
    p_ready = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    sum_ready = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    mbarrier.init(q_asked, count=2)
    mbarrier.init(q_ready, count=2)
    for i in gl.static_range(4):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(p_ready.index(i), count=1)
        mbarrier.init(sum_ready.index(i), count=1)

    # The query as left and right know one: a sequence of one token, all heads of one KV head packed into rows.
    q_ptr += query64 * stride_qn * 8
    out_ptr += query64 * stride_on * 8
    lse_ptr += query64 * stride_ln
    position = gl.load(positions_ptr + query, mask=rope_width > 0, other=0).to(gl.int64)
    cos_sin_ptr += gl.minimum(gl.maximum(position, 0), rope_positions - 1) * rope_line
    common = (
        (q_ptr, out_ptr, lse_ptr, sink_ptr, part_ptr, part_lse_ptr),
        (0, stride_qh, 0, stride_oh, 0, stride_lh),
        (0, heads, heads, heads, 1, 0, 0, 0, scale, want_lse),
        (0, step_begin, step_end, split.to(gl.int64) * queries + query),
        (bias, (cos_sin_ptr, rope_width)),
    )
    window = (
        (window_ptr, window_rows, window_page_rows, window_page_stride, window_row_stride),
        (window_list_ptr + query64 * window_line, 1), window_count, window_blocks,
    )  # fmt: skip
    compressed = (
        (compressed_ptr, compressed_rows, compressed_page_rows, compressed_page_stride, compressed_row_stride),
        (compressed_list_ptr + line * compressed_line, compressed_page_rows), compressed_count,
    )  # fmt: skip
    ring = (kv, ready, free)
    gl.warp_specialize([
        (left_role, (q, p_smem, stat, q_asked, q_ready, p_ready, sum_ready, tile_row, ring, common, SPLIT, LISTED,
                     SIGN)),
        (right_role, (q, p_smem, stat, q_asked, q_ready, p_ready, sum_ready, tile_row, ring, common, SPLIT, LISTED,
                      SIGN)),
        (gather_role, (window, compressed, ring, bias, step_begin, step_end, HOW, (WINDOW_FP8, COMPRESSED_FP8),
                       (WINDOW_UNIT, COMPRESSED_UNIT))),
    ], [4, 4], [RIGHT_REGS, GATHER_REGS])  # fmt: skip
