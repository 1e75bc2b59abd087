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

from dsv4.kernels.compat import async_copy, cp_async, gl, gluon, mbarrier, reinterpret
from dsv4.kernels.shared import loads
from dsv4.kernels.shared.tiles import LISTED, split_range
from dsv4.kernels.sm90.wide import left_role, right_role

NONE, LIST, TABLE = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)  # how compressed rows are named
LANES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # 16 bytes of bf16 per thread
LANES8 = gl.constexpr(gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0]))  # 16 bytes of e4m3 per thread


@gluon.jit
def request_of(query, starts_ptr, requests, given):
    """The request that a query belongs to: the last one that starts at or before it; `requests` if there is none.

    Without starts every query is a request of its own.
    """
    low = gl.where(given, 0, query + 1)
    high = gl.where(given, requests + 1, query + 1)
    while low < high:
        middle = (low + high) // 2
        if gl.load(starts_ptr + middle) <= query:
            low = middle + 1
        else:
            high = middle
    return gl.where(low == 0, requests, low - 1)


@gluon.jit
def numbers_of(names, first, count, pages, HOW: gl.constexpr, L: gl.constexpr):
    """Row numbers of 64 entries from `first` on, -1 past `count`. names: (list or table line, rows per page)."""
    line_ptr, page_rows = names
    place = first + gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    if HOW == TABLE:
        page = gl.load(line_ptr + place // page_rows, mask=place < count, other=-1)
        page = gl.where(page < pages, page, -1)  # before the product, which may not fit
        return gl.where(page >= 0, page * page_rows + place % page_rows, -1)
    return gl.load(line_ptr + place, mask=place < count, other=-1)


@gluon.jit
def bias_of(number, rows):
    return gl.where((number >= 0) & (number < rows), 0.0, -float("inf"))


@gluon.jit
def fill_plain(pool, names, first, count, tile, bias, H: gl.constexpr, HOW: gl.constexpr):
    """Half H of 64 rows by cp.async, one group. pool: (pointer, rows, rows per page, page and row stride / 8)."""
    ptr, rows, page_rows, page_stride, row_stride = pool
    number = numbers_of(names, first, count, rows // page_rows, HOW, LANES)
    there = (number >= 0) & (number < rows)
    page = number // page_rows
    offset = page.to(gl.int64) * page_stride + (number - page * page_rows).to(gl.int64) * row_stride
    PANEL: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    panels = reinterpret(tile, [4, 64, 64], PANEL)
    column = H * 256 + gl.arange(0, 64, layout=gl.SliceLayout(0, LANES))
    for panel in gl.static_range(4):
        pointers = ptr + offset[:, None] * 8 + (column + panel * 64)[None, :]
        cp_async(panels.index(panel), pointers, mask=there[:, None])
    bias.store(bias_of(number, rows))


@gluon.jit
def fp8_piece(ptr, data, scales, there, INDEX: gl.constexpr):
    """64 values [64, 64] of each row as bf16: one of the seven pieces with a scale, or the last, which is bf16."""
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, LANES8))
    if INDEX == 7:
        rope_ptr = ptr.to(gl.pointer_type(gl.bfloat16))
        piece = gl.load(rope_ptr + (data // 2)[:, None] + (224 + column)[None, :], mask=there[:, None], other=0.0)
    else:
        x = gl.load(ptr + data[:, None] + (INDEX * 64 + column)[None, :], mask=there[:, None], other=0)
        # 2^(s - 127) in bf16 is s in the exponent's place; 0 is a subnormal, 255 is NaN.
        s = gl.load(ptr + scales + INDEX, mask=there, other=127).to(gl.int32)
        s = gl.where(s == 0, 0x40, gl.where(s == 255, 0x7FC0, s << 7)).to(gl.int16).to(gl.bfloat16, bitcast=True)
        piece = x.to(gl.float8e4nv, bitcast=True).to(gl.bfloat16) * s[:, None]
    return piece


@gluon.jit
def fill_fp8(pool, names, first, count, tile, bias, H: gl.constexpr, HOW: gl.constexpr, UNIT: gl.constexpr):
    """Half H of 64 rows of an Fp8Cache, as bf16. pool: (bytes, rows, rows per page, page stride / UNIT, -)."""
    ptr, rows, page_rows, page_stride, _ = pool
    number = numbers_of(names, first, count, rows // page_rows, HOW, LANES8)
    there = (number >= 0) & (number < rows)
    page = number // page_rows
    place = (number - page * page_rows).to(gl.int64)
    start = page.to(gl.int64) * page_stride * UNIT  # bytes
    PANEL: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    panels = reinterpret(tile, [4, 64, 64], PANEL)
    for panel in gl.static_range(4):
        scales = start + page_rows.to(gl.int64) * 576 + place * 8
        panels.index(panel).store(fp8_piece(ptr, start + place * 576, scales, there, H * 4 + panel))
    bias.store(bias_of(number, rows))


@gluon.jit
def fill(pool, names, first, count, tile, bias, H: gl.constexpr, HOW: gl.constexpr, FP8: gl.constexpr,
         UNIT: gl.constexpr):  # fmt: skip
    if FP8:
        fill_fp8(pool, names, first, count, tile, bias, H, HOW, UNIT)
    else:
        fill_plain(pool, names, first, count, tile, bias, H, HOW)


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
    # Lengths that are not given are as wide as the list.
    window_count = gl.load(window_lengths_ptr + query, mask=window_lengths != 0, other=window_width)
    window_count = gl.minimum(gl.maximum(window_count, 0), window_width)
    window_blocks = (window_count + 63) // 64
    compressed_count = 0
    line = query64
    if HOW != NONE:
        compressed_count = gl.load(compressed_lengths_ptr + query, mask=compressed_lengths != 0, other=compressed_width)
        compressed_count = gl.minimum(gl.maximum(compressed_count, 0), compressed_width)
    if HOW == TABLE:
        request = request_of(query, starts_ptr, requests, starts != 0)
        compressed_count = gl.where(request < requests, compressed_count, 0)  # none past the last request
        line = gl.minimum(request, requests - 1).to(gl.int64)
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
    q_ready = gl.allocate_shared_memory(gl.int64, [1], BAR)
    ready = gl.allocate_shared_memory(gl.int64, [4, 1], BAR)
    free = gl.allocate_shared_memory(gl.int64, [4, 1], BAR)
    p_ready = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    sum_ready = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
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
    SAME_KV: gl.constexpr = True
    gl.warp_specialize([
        (left_role, (q, p_smem, stat, q_ready, p_ready, sum_ready, tile_row, ring, common, SAME_KV, SPLIT, LISTED,
                     SIGN)),
        (right_role, (q, p_smem, stat, q_ready, p_ready, sum_ready, tile_row, ring, common, SAME_KV, SPLIT, LISTED,
                      SIGN)),
        (gather_role, (window, compressed, ring, bias, step_begin, step_end, HOW, (WINDOW_FP8, COMPRESSED_FP8),
                       (WINDOW_UNIT, COMPRESSED_UNIT))),
    ], [4, 4], [RIGHT_REGS, GATHER_REGS])  # fmt: skip
