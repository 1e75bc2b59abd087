"""V4 attention on sm_100a: one query token, 64 of its heads per CTA, rows picked by number from one or two pools.

Every row is key and value at once: a block of 64 rows is gathered once, into two ring slots [64, 256] (halves of the
head dim), and read as K and as V. Two blocks are in the ring, two S and two P beside it. Role chart::

    gather   4 warps  | block 0 | block 1 |                 | block 2, as P0 V0 frees it | ...
    scores   1 warp   |         | S0 = Q K0^T | S1 = Q K1^T |                            | S2 = Q K2^T | ...
    values   1 warp   |                       | ...         | O += P0 V0 | O += P1 V1    | ...
    softmax  4 warps  | load Q  |             | P0          | P1         | ...           | ...   | O / l -> out, lse

Scores and values issue their products on their own, so that whichever has what it needs goes next: with room for two
blocks only, a fixed order would leave the tensor core idle while a block is on its way.

The blocks of a query are those of its window list, then those of its compressed rows; a block never mixes pools. A row
that is not there (-1, out of range, past the length) is filled with zeros, and its bias is -inf: 0 * NaN would be NaN.
Rows of a plain tensor come by TMA, four at a time, if they are equally far apart, else by cp.async; rows of an Fp8Cache
through registers, where they become bf16.

tensor memory   columns     holds
s               2 x 64      S of two blocks, fp32 [64, 64]: 64 rows use half of the 128 lanes
o               256         O, fp32 [64, 512]: its two halves lie side by side in the lanes

shared memory   bytes       holds
q               2 x 32768   [64, 256] each: columns 0-255 and 256-511 of Q; the output rows leave through it
kv              4 x 32768   [64, 256] each: half h of block j at 2 (j % 2) + h
p               2 x 8192    [64, 64] each: P of block j at j % 2
bias            3 x 256     fp32 per key: what is added to the scores of block j, at j % 2; a place for nothing
barriers        8 each

barrier      arrives            waits                     means
q_ready      softmax            scores                    Q is in q
ready[i]     gather, or bytes   scores, values, softmax   slot i of kv is filled; even i: the bias of the block too
free[i]      commit of values   gather                    P V has used slot i
s_ready[s]   commit of scores   softmax                   S is complete
p_ready[s]   softmax            values, scores            P is stored, S is read, O is rescaled for this P V
pv_done[s]   commit of values   softmax                   P V is complete: P may be overwritten, O touched

No wait lags two phases behind: ready[i] is filled again after free[i], which follows p_ready; p_ready[s] comes again
after softmax has waited for pv_done[s], that is, for values; and s_ready[s] after scores has waited for p_ready[s].
"""

from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    tcgen05_commit,
    tcgen05_mma,
)
from triton.experimental.gluon.language.nvidia.blackwell.tma import async_gather

from dsv4.kernels.compat import async_copy, fence_async_shared, gl, gluon, mbarrier, reinterpret
from dsv4.kernels.shared import loads, softmax
from dsv4.kernels.shared.gather import FP8, LIST, NONE, TMA, fill, numbers_of, share
from dsv4.kernels.shared.tiles import split_range

# O is rescaled only when a row's maximum grew by more than this (base 2): P stays below 2^8, exact enough in 16 bits.
RESCALE_ABOVE = gl.constexpr(8.0)
ONE = gl.constexpr(gl.BlockedLayout([1, 1], [32, 1], [4, 1], [1, 0]))  # a row number per thread
FOURS = gl.constexpr(gl.SliceLayout(1, gl.BlockedLayout([4, 1], [1, 32], [4, 1], [0, 1])))  # four per TMA, by warps


@gluon.jit
def fetch_block(lines, names, first, count, ring, bias, j, HOW: gl.constexpr):
    """Block j by TMA, four rows at a time. lines: (descriptor, rows of the pool, rows per page, lines between pages).

    Line -1 is out of bounds, which TMA fills with zeros.
    """
    kv, ready, free = ring
    desc, rows, page_rows, gap = lines
    number = numbers_of(names, first, count, rows // page_rows, HOW, ONE)
    there = (number >= 0) & (number < rows)
    line = number
    if gap > 0:
        line += number // page_rows * gap
    line = gl.convert_layout(gl.where(there, line, -1), FOURS)
    for h in gl.static_range(2):
        slot = 2 * (j % 2) + h
        mbarrier.wait(free.index(slot), (j // 2 + 1) % 2)
        if h == 0:
            bias.index(j % 2).store(gl.where(there, 0.0, -float("inf")))
        mbarrier.expect(ready.index(slot), 64 * 256 * 2)
        async_gather(desc, line, h * 256, ready.index(slot), kv.index(slot))


@gluon.jit
def fill_block(pool, names, first, count, ring, bias, j, HOW: gl.constexpr, FP8: gl.constexpr, UNIT: gl.constexpr):
    """Block j by cp.async or through registers; its first half is announced while the second is under way."""
    kv, ready, free = ring
    for h in gl.static_range(2):
        slot = 2 * (j % 2) + h
        mbarrier.wait(free.index(slot), (j // 2 + 1) % 2)
        # The bias goes with the first half; that of the second has a place of its own, which nobody reads.
        place = j % 2 if h == 0 else 2
        fill(pool, names, first, count, kv.index(slot), bias.index(place), h, HOW, FP8, UNIT)
        async_copy.commit_group()
        if h == 1:
            loads.announce(ready.index(slot - 1), 1)
            loads.announce(ready.index(slot), 0)


@gluon.jit
def gather_block(source, first, ring, bias, j, HOW: gl.constexpr, WAY: gl.constexpr, UNIT: gl.constexpr):
    pool, lines, names, count = source
    if WAY == TMA:
        fetch_block(lines, names, first, count, ring, bias, j, HOW)
    else:
        fill_block(pool, names, first, count, ring, bias, j, HOW, WAY == FP8, UNIT)


@gluon.jit
def gather_role(window, compressed, ring, bias, window_blocks, begin, n, HOW: gl.constexpr, WAYS: gl.constexpr,
                UNITS: gl.constexpr):  # fmt: skip
    """Fills the two halves of each block as they become free: those of the window list, then the compressed rows."""
    for j in range(0, n):
        block = begin + j
        if HOW == NONE:
            gather_block(window, block * 64, ring, bias, j, LIST, WAYS[0], UNITS[0])
        elif block < window_blocks:
            gather_block(window, block * 64, ring, bias, j, LIST, WAYS[0], UNITS[0])
        else:
            gather_block(compressed, (block - window_blocks) * 64, ring, bias, j, HOW, WAYS[1], UNITS[1])


@gluon.jit
def scores_role(q, ring, s, q_ready, s_ready, p_ready, n):
    kv, ready, free = ring
    mbarrier.wait(q_ready, 0)
    for j in range(0, n):
        stage = j % 2
        if j >= 2:
            mbarrier.wait(p_ready.index(stage), (j // 2 - 1) % 2)
        for h in gl.static_range(2):
            mbarrier.wait(ready.index(2 * stage + h), (j // 2) % 2)
            tcgen05_mma(q.index(h), kv.index(2 * stage + h).permute((1, 0)), s.index(stage), use_acc=h > 0)
        tcgen05_commit(s_ready.index(stage))


@gluon.jit
def values_role(p, ring, o, p_ready, pv_done, n):
    kv, ready, free = ring
    for j in range(0, n):
        stage = j % 2
        mbarrier.wait(p_ready.index(stage), (j // 2) % 2)
        for h in gl.static_range(2):
            mbarrier.wait(ready.index(2 * stage + h), (j // 2) % 2)
            tcgen05_mma(p.index(stage), kv.index(2 * stage + h), o.slice(h * 256, 256), use_acc=j > 0)
            tcgen05_commit(free.index(2 * stage + h))
        tcgen05_commit(pv_done.index(stage))


@gluon.jit
def softmax_role(q, p, s, o, bias, barriers, ring, tensors, strides, problem, rope, tile_row, n):
    """Loads Q; P = exp2(S - m) block by block; rescales O where a maximum moved; in the end writes O / l."""
    q_ready, s_ready, p_ready, pv_done = barriers
    kv, ready, free = ring
    stride_qh, stride_oh, stride_lh = strides
    heads, scale, sign, want_lse, split, part_row = problem
    for h in gl.static_range(2):
        loads.load_rows(tensors[0], q.index(h), tile_row, heads, 0, heads, 0, stride_qh, h * 256, 64, 256, 64, sign)
    fence_async_shared()  # generic stores -> tensor-core reads
    mbarrier.arrive(q_ready, count=1)

    LS: gl.constexpr = s.index(0).get_reg_layout()
    RS: gl.constexpr = gl.SliceLayout(1, LS)
    PIECE: gl.constexpr = TensorMemoryLayout([64, 64], col_stride=1)  # of O
    PANEL: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)  # of Q
    LO: gl.constexpr = o.slice(0, 64).get_reg_layout()
    RO: gl.constexpr = gl.SliceLayout(1, LO)
    m = gl.full([64], -float("inf"), gl.float32, RS)
    l = gl.full([64], 0.0, gl.float32, RS)
    for j in range(0, n):
        stage = j % 2
        mbarrier.wait(ready.index(2 * stage), (j // 2) % 2)
        unseen = bias.index(stage).load(gl.SliceLayout(0, LS))
        mbarrier.wait(s_ready.index(stage), (j // 2) % 2)
        x = s.index(stage).load() + unseen[None, :]
        grown = gl.max(x, 1) * scale
        # A row keeps its reference while the maximum grows little; -inf - -inf is NaN, which is not above anything.
        moves = grown - m > RESCALE_ABOVE
        m_new = gl.where(moves, grown, m)
        alpha = gl.where(moves, gl.exp2(m - m_new), 1.0)
        if j > 0:
            if gl.min(alpha, 0) < 1.0:
                mbarrier.wait(pv_done.index(1 - stage), ((j - 1) // 2) % 2)
                factor = gl.convert_layout(alpha, RO)[:, None]
                for h in gl.static_range(2):
                    pieces = o.slice(h * 256, 256).reinterpret(gl.float32, [4, 64, 64], PIECE)
                    for c in range(0, 4):
                        pieces.index(c).store(pieces.index(c).load() * factor)
        m = m_new
        y = gl.exp2(x * scale - gl.where(m == -float("inf"), 0.0, m)[:, None])
        l = l * alpha + gl.sum(y, 1)
        if j >= 2:
            mbarrier.wait(pv_done.index(stage), (j // 2 - 1) % 2)
        p.index(stage).store(y.to(p.dtype))
        fence_async_shared()  # P is read by the tensor core
        mbarrier.arrive(p_ready.index(stage), count=1)

    q_ptr, out_ptr, lse_ptr, sink_ptr, part_ptr, part_lse_ptr = tensors
    row = tile_row + gl.arange(0, 64, layout=RS)
    here = row < heads
    sink = gl.load(sink_ptr + row, mask=here & (split == 0), other=-float("inf"))
    factor, lse = softmax.finish(m, l, sink)
    part = part_row * heads + row
    if split != 0:  # normalised partial result and its LSE in base 2; the combine kernel applies the sink
        gl.store(part_lse_ptr + part, lse, mask=here)
    else:
        gl.store(lse_ptr + row.to(gl.int64) * stride_lh, lse * softmax.LN2, mask=here & (want_lse != 0))
    if n > 0:
        mbarrier.wait(pv_done.index((n - 1) % 2), ((n - 1) // 2) % 2)
    factor = gl.convert_layout(factor, RO)[:, None]
    target = gl.convert_layout(part, RO)[:, None] * 512
    inside = gl.convert_layout(here, RO)[:, None]
    for h in gl.static_range(2):
        pieces = o.slice(h * 256, 256).reinterpret(gl.float32, [4, 64, 64], PIECE)
        panels = reinterpret(q.index(h), [4, 64, 64], PANEL)
        for c in range(0, 4):
            first = h * 256 + c * 64
            y = gl.zeros([64, 64], gl.float32, LO)
            if n > 0:  # else nobody ever wrote O
                y = softmax.turn_back(pieces.index(c).load(), rope, first, 512) * factor
            if split != 0:
                column = first + gl.arange(0, 64, layout=gl.SliceLayout(0, LO))
                gl.store(part_ptr + target + column[None, :], y, mask=inside)
            else:  # the products that read q are complete
                panels.index(c).store(y.to(q.dtype))
    if split == 0:
        for h in gl.static_range(2):
            loads.store_rows(out_ptr, q.index(h), tile_row, heads, 0, heads, 0, stride_oh, h * 256, 64, 256)


@gluon.jit(do_not_specialize=[
    "want_lse", "queries", "heads", "window_rows", "window_page_rows", "window_page_stride", "window_row_stride",
    "window_gap", "window_width", "window_line", "compressed_rows", "compressed_page_rows", "compressed_page_stride",
    "compressed_row_stride", "compressed_gap", "compressed_width", "compressed_line", "window_lengths",
    "compressed_lengths", "starts", "requests", "rope_positions", "rope_width", "rope_line", "num_splits",
    "tiles_per_split", "stride_qn", "stride_qh", "stride_on", "stride_oh", "stride_ln", "stride_lh", "sign", "split",
], do_not_specialize_on_alignment=[
    "lse_ptr", "sink_ptr", "part_lse_ptr", "window_list_ptr", "window_lengths_ptr", "compressed_list_ptr",
    "compressed_lengths_ptr", "starts_ptr", "cos_sin_ptr", "positions_ptr",
])  # fmt: skip
def v4_listed(q_ptr, out_ptr, lse_ptr, sink_ptr, part_ptr, part_lse_ptr, window_desc, window_ptr, window_list_ptr,
              window_lengths_ptr, compressed_desc, compressed_ptr, compressed_list_ptr, compressed_lengths_ptr,
              starts_ptr, cos_sin_ptr, positions_ptr, scale, want_lse, queries, heads, window_rows, window_page_rows,
              window_page_stride, window_row_stride, window_gap, window_width, window_line, compressed_rows,
              compressed_page_rows, compressed_page_stride, compressed_row_stride, compressed_gap, compressed_width,
              compressed_line, window_lengths, compressed_lengths, starts, requests, rope_positions, rope_width,
              rope_line, num_splits, tiles_per_split, stride_qn, stride_qh, stride_on, stride_oh, stride_ln, stride_lh,
              sign, split, HOW: gl.constexpr, WINDOW_WAY: gl.constexpr, COMPRESSED_WAY: gl.constexpr,
              WINDOW_UNIT: gl.constexpr, COMPRESSED_UNIT: gl.constexpr, GATHER_REGS: gl.constexpr,
              WARP_REGS: gl.constexpr):  # fmt: skip
    head_tiles = (heads + 63) // 64
    query = gl.program_id(0) // head_tiles  # its tiles run side by side: one finds in L2 what the other read
    tile_row = (gl.program_id(0) - query * head_tiles) * 64
    query64 = query.to(gl.int64)
    window_count, compressed_count, line = share(
        query, (window_lengths_ptr, window_lengths, window_width),
        (compressed_lengths_ptr, compressed_lengths, compressed_width), (starts_ptr, starts, requests), HOW,
    )  # fmt: skip
    window_blocks = (window_count + 63) // 64
    blocks = window_blocks + (compressed_count + 63) // 64
    begin, end = split_range(blocks, gl.program_id(1), num_splits, tiles_per_split)
    n = end - begin

    HALF: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 256], gl.bfloat16)
    P: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256], HALF)
    kv = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 256], HALF)
    p = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], P)
    bias = gl.allocate_shared_memory(gl.float32, [3, 64], FLAT)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], BAR)
    ready = gl.allocate_shared_memory(gl.int64, [4, 1], BAR)
    free = gl.allocate_shared_memory(gl.int64, [4, 1], BAR)
    s_ready = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    p_ready = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    pv_done = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    mbarrier.init(q_ready, count=1)
    for i in gl.static_range(4):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(s_ready.index(i), count=1)
        mbarrier.init(p_ready.index(i), count=1)
        mbarrier.init(pv_done.index(i), count=1)
    s = allocate_tensor_memory(gl.float32, [2, 64, 64], TensorMemoryLayout([64, 64], col_stride=1))
    o = allocate_tensor_memory(gl.float32, [64, 512], TensorMemoryLayout([64, 256], col_stride=1))

    position = gl.load(positions_ptr + query, mask=rope_width > 0, other=0).to(gl.int64)
    cos_sin_ptr += gl.minimum(gl.maximum(position, 0), rope_positions - 1) * rope_line
    tensors = (
        q_ptr + query64 * stride_qn * 8, out_ptr + query64 * stride_on * 8, lse_ptr + query64 * stride_ln, sink_ptr,
        part_ptr, part_lse_ptr,
    )  # fmt: skip
    part_row = gl.program_id(1).to(gl.int64) * queries + query
    problem = (heads, scale, sign, want_lse, split, part_row)
    window = (
        (window_ptr, window_rows, window_page_rows, window_page_stride, window_row_stride),
        (window_desc, window_rows, window_page_rows, window_gap),
        (window_list_ptr + query64 * window_line, 1), window_count,
    )  # fmt: skip
    compressed = (
        (compressed_ptr, compressed_rows, compressed_page_rows, compressed_page_stride, compressed_row_stride),
        (compressed_desc, compressed_rows, compressed_page_rows, compressed_gap),
        (compressed_list_ptr + line * compressed_line, compressed_page_rows), compressed_count,
    )  # fmt: skip
    ring = (kv, ready, free)
    gl.warp_specialize([
        (softmax_role, (q, p, s, o, bias, (q_ready, s_ready, p_ready, pv_done), ring, tensors,
                        (stride_qh, stride_oh, stride_lh), problem, (cos_sin_ptr, rope_width), tile_row, n)),
        (gather_role, (window, compressed, ring, bias, window_blocks, begin, n, HOW, (WINDOW_WAY, COMPRESSED_WAY),
                       (WINDOW_UNIT, COMPRESSED_UNIT))),
        (scores_role, (q, ring, s, q_ready, s_ready, p_ready, n)),
        (values_role, (p, ring, o, p_ready, pv_done, n)),
    ], [4, 1, 1], [GATHER_REGS, WARP_REGS, WARP_REGS])  # fmt: skip
