"""V4 attention on sm_100a by pairs of CTAs: 128 heads of one query token at a time, 64 of them in each CTA.

The tensor cores of a pair work on one product of 128 rows: each CTA has 64 rows in all of its 128 lanes, which is the
full rate, where 64 rows of one CTA alone (listed.py) have half of it. A block is 128 rows picked by number, as K split
by rows over the pair and as V by columns: gather_pair.py says how it comes and where it lies. Role chart of one item of
three blocks, the same in both CTAs; products are issued by the first::

    gather   4 warps  | Q K0 | K1 |       V0 | K2      | V1   V2  | Q K0 of the next item, as Q is free
    scores   1 warp   |      | S0 = Q K0^T   | S1      |      S2  | S0 of the next item
    values   1 warp   |      |               |         | O = P0 V0 | O += P1 V1 | O += P2 V2
    softmax  4 warps  |      |               | P0      | P1        | P2         |            | O / l -> out

tensor memory   columns     holds
s               2 x 64      S of two blocks, fp32 [128, 128]: the second half of the keys in the lanes from 64 on
o               2 x 128     O, fp32 [128, 256] each: of each half, the second 128 columns in the lanes from 64 on

shared memory   bytes       holds, in each CTA
q               2 x 32768   [64 heads, 256] each: columns 0-255 and 256-511 of Q
kv              4 x 32768   slots: K [64 keys, 256] or V [128 keys, 128]
p               2 x 16384   [64 heads, 128 keys] each: P of block j at j % 2; the output rows leave through it
bias            4 x 256     bf16 per key: what is added to the scores of block j, at j % 4
stat            256         factors of the 64 rows, to see whether any is not 1
job             4           the number of blocks of the item
barriers        8 each

A barrier of the pair is the first CTA's: both arrive there, and it alone waits. The others are each CTA's own.

barrier        arrives            count   waits             means
job_ready      gather             1       all others        the number of blocks of the next item is in job
job_free       all others         3       gather            job has been read
q_ready        bytes, of the pair 1       scores            Q of the item is in q
q_free         commit of scores   1       gather            the item's scores are complete
k_ready[i]     bytes or gather,   1       scores            slot i holds K
               of the pair
v_ready[i]     the same           1       values            slot i holds V
free[i]        commit of scores   1       gather            the product has used slot i
               or values
bias_ready[b]  gather             1       softmax           the bias of a block is there
s_ready[s]     commit of scores   1       softmax           S is complete
p_ready[s]     softmax, of the    1       values, scores    P is stored, S is read, O is rescaled for this P V
               pair
pv_done[s]     commit of values   1       softmax           P V is complete: P may be overwritten, O touched

A commit arrives in both CTAs. No wait lags two phases behind, K and V having barriers of their own: a slot is filled
with K again, or with V, after its own last product (k_ready, v_ready); p_ready[s] comes again after softmax has waited
for pv_done[s], that is, for values, and s_ready[s] after scores has waited for p_ready[s]. The bias of block j is
overwritten by that of block j + 4: before, gather has filled a slot again whose product followed p_ready of block j.
The first P V of an item overwrites O: its p_ready comes after softmax has written the output of the item before.
"""

from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    tcgen05_commit,
    tcgen05_mma,
)

from dsv4.kernels.compat import fence_async_shared, gl, gluon, mbarrier, reinterpret
from dsv4.kernels.shared import softmax
from dsv4.kernels.shared.v4.arguments import Names, Requests
from dsv4.kernels.shared.v4.items import place_of
from dsv4.kernels.sm100.v4.gather_pair import SLOT_K, SLOT_V, gather_role, place_of_k, place_of_v

PIECE = gl.constexpr(TensorMemoryLayout([64, 64], col_stride=1, cga_layout=[[1, 0]], two_ctas=True))
PANEL = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2, cga_layout=[[1, 0]]))
OWN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0], cga_layout=[[0]]))  # each CTA has its own values
HALVES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0], cga_layout=[[1]]))  # each CTA has half of the values
OUT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0], cga_layout=[[1, 0]]))  # 16 bytes per thread
GAP = gl.constexpr(96)  # a piece of O is 32 columns and, as many columns further, 32 more


@gluon.jit
def begin(job_ready, job_free, job, turn):
    """The number of blocks of the next item."""
    mbarrier.wait(job_ready, turn % 2)
    n = gl.max(job.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0], cga_layout=[[0]])), 0)
    mbarrier.arrive(job_free, count=1)
    return n


@gluon.jit
def scores_role(q, job, job_ready, job_free, q_ready, q_free, ring, s, s_ready, p_ready, items):
    kv, k_ready, v_ready, free = ring
    at = 0  # blocks so far
    full = 0  # items so far that have blocks
    turn = 0
    for _item in range(gl.program_id(0), items, gl.num_programs(0)):
        n = begin(job_ready, job_free, job, turn)
        if n > 0:
            mbarrier.wait(q_ready, full % 2)
        for i in range(0, n):
            stage = (at + i) % 2
            if at + i >= 2:
                mbarrier.wait(p_ready.index(stage), ((at + i) // 2 - 1) % 2)
            place, _use = place_of_k(i)
            # Place 0 has had K once per item, place 1 all the others.
            phase = gl.where(i == 0, full, at - full + i - 1) % 2
            for h in gl.static_range(2):
                slot = 2 * place + h
                mbarrier.wait(k_ready.index(slot), phase)
                tcgen05_mma(q.index(h), kv.index(slot).permute((1, 0)), s.index(stage), use_acc=h > 0)
                tcgen05_commit(free.index(slot))
            tcgen05_commit(s_ready.index(stage))
            tcgen05_commit(q_free, pred=i == n - 1)
        at += n
        full += gl.minimum(n, 1)
        turn += 1


@gluon.jit
def values_role(p, job, job_ready, job_free, ring, o, p_ready, pv_done, items):
    kv, k_ready, v_ready, free = ring
    at = 0
    full = 0
    turn = 0
    for _item in range(gl.program_id(0), items, gl.num_programs(0)):
        n = begin(job_ready, job_free, job, turn)
        for i in range(0, n):
            stage = (at + i) % 2
            mbarrier.wait(p_ready.index(stage), ((at + i) // 2) % 2)
            place, _use = place_of_v(i, n)
            # Place 1 has had V once per item, place 0 all the others.
            phase = gl.where(i == n - 1, full, at - full + i) % 2
            for h in gl.static_range(2):
                slot = 2 * place + h
                mbarrier.wait(v_ready.index(slot), phase)
                v = reinterpret(kv.index(slot), [128, 256], SLOT_V)
                tcgen05_mma(p.index(stage), v, o.index(h), use_acc=i > 0)
                tcgen05_commit(free.index(slot))
            tcgen05_commit(pv_done.index(stage))
        at += n
        full += gl.minimum(n, 1)
        turn += 1


@gluon.jit
def softmax_block(x, m, l, at, first, p, o, stat, p_ready, pv_done):
    """P of block `at` from its scores in base 2 -> (maximum, sum) of each row. O is rescaled where a maximum moved."""
    LO: gl.constexpr = o.index(0).reinterpret(gl.float32, [4, 128, 64], PIECE).index(0).get_reg_layout()
    stage = at % 2
    grown = gl.max(x, 1)
    moves = grown - m > softmax.RESCALE_ABOVE
    m_new = gl.where(moves, grown, m)
    alpha = gl.where(moves, gl.exp2(m - m_new), 1.0)
    if at > first:
        stat.store(alpha)
        own = reinterpret(stat, [64], OWN).load(gl.BlockedLayout([1], [32], [4], [0], cga_layout=[[0]]))
        if gl.min(own, 0) < 1.0:
            mbarrier.wait(pv_done.index(1 - stage), ((at - 1) // 2) % 2)
            factor = gl.convert_layout(alpha, gl.SliceLayout(1, LO))[:, None]
            for h in gl.static_range(2):
                pieces = o.index(h).reinterpret(gl.float32, [4, 128, 64], PIECE)
                for c in range(0, 4):
                    pieces.index(c).store(pieces.index(c).load() * factor)
    y = gl.exp2(x - gl.where(m_new == -float("inf"), 0.0, m_new)[:, None])
    if at >= 2:
        mbarrier.wait(pv_done.index(stage), (at // 2 - 1) % 2)
    p.index(stage).store(y.to(p.dtype))
    fence_async_shared()  # P is read by the tensor core
    mbarrier.arrive(p_ready.index(stage), count=1)
    return m_new, l * alpha + gl.sum(y, 1)


@gluon.jit
def write(o, p, factor, there, out, part, rope, split, TURN: gl.constexpr = True):
    """O times a factor per row -> out, or fp32 -> part, by way of p; zeros where nobody wrote O (`there` is 0).

    out: pointer, offset of each row and whether it is there, in layout OUT; part: the same, as O comes from tensor
    memory.
    """
    out_ptr, out_row, out_here = out
    part_ptr, part_row, part_here = part
    LO: gl.constexpr = o.index(0).reinterpret(gl.float32, [4, 128, 64], PIECE).index(0).get_reg_layout()
    factor = gl.convert_layout(factor, gl.SliceLayout(1, LO))[:, None]
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, OUT))
    column += column // 32 * GAP
    offset = out_row[:, None] + column[None, :]
    part_column = gl.arange(0, 64, layout=gl.SliceLayout(0, LO))
    part_column += part_column // 32 * GAP
    part_offset = part_row[:, None] + part_column[None, :]
    staged = reinterpret(p, [4, 128, 64], PANEL)
    for h in gl.static_range(2):
        pieces = o.index(h).reinterpret(gl.float32, [4, 128, 64], PIECE)
        for c in range(0, 4):
            first = h * 256 + c * 32
            y = gl.zeros([128, 64], gl.float32, LO)
            if there > 0:
                y = pieces.index(c).load()
                if TURN:
                    y = softmax.turn_back(y, rope, first, 512, GAP)
                y = y * factor
            if split != 0:
                gl.store(part_ptr + part_offset + first, y, mask=part_here[:, None])
            else:
                staged.index(c % 2).store(y.to(p.dtype))
                gl.store(out_ptr + offset + first, staged.index(c % 2).load(OUT), mask=out_here[:, None])


@gluon.jit
def softmax_role(p, s, o, job, stat, bias, barriers, tensors, strides, rope, items, sizes, scale, want_lse, split):
    """P = exp2(S - m) block by block, and in the end of an item O / l -> out, lse."""
    job_ready, job_free, bias_ready, s_ready, p_ready, pv_done = barriers
    out_ptr, lse_ptr, sink_ptr, part_ptr, part_lse_ptr = tensors
    stride_on, stride_oh, stride_ln, stride_lh = strides
    queries, heads = sizes
    cos_sin_ptr, positions_ptr, rope_positions, rope_width, rope_line = rope
    LS: gl.constexpr = s.index(0).get_reg_layout()
    RS: gl.constexpr = gl.SliceLayout(1, LS)
    LO: gl.constexpr = o.index(0).reinterpret(gl.float32, [4, 128, 64], PIECE).index(0).get_reg_layout()
    at = 0
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        query, first_head, part = place_of(item, queries, heads, 128)
        n = begin(job_ready, job_free, job, turn)
        m = gl.full([128], -float("inf"), gl.float32, RS)
        l = gl.full([128], 0.0, gl.float32, RS)
        for j in range(at, at + n):
            mbarrier.wait(bias_ready.index(j % 4), (j // 4) % 2)
            unseen = bias.index(j % 4).load(gl.SliceLayout(0, LS)).to(gl.float32)
            mbarrier.wait(s_ready.index(j % 2), (j // 2) % 2)
            x = s.index(j % 2).load() * scale + unseen[None, :]
            m, l = softmax_block(x, m, l, j, at, p, o, stat, p_ready, pv_done)
        at += n
        turn += 1

        head = first_head + gl.arange(0, 128, layout=RS)
        here = head < heads
        sink = softmax.sink_of(sink_ptr, head, here & (split == 0))
        factor, lse = softmax.finish(m, l, sink)
        part_row = (part.to(gl.int64) * queries + query) * heads
        if split != 0:  # normalised partial result and its LSE in base 2; the combine kernel applies the sink
            gl.store(part_lse_ptr + part_row + head, lse, mask=here)
        else:
            gl.store(lse_ptr + query.to(gl.int64) * stride_ln + head.to(gl.int64) * stride_lh, lse * softmax.LN2,
                     mask=here & (want_lse != 0))  # fmt: skip
        position = gl.load(positions_ptr + query, mask=rope_width > 0, other=0).to(gl.int64)
        angles = cos_sin_ptr + gl.minimum(gl.maximum(position, 0), rope_positions - 1) * rope_line
        if n > 0:
            mbarrier.wait(pv_done.index((at - 1) % 2), ((at - 1) // 2) % 2)
        row = first_head + gl.arange(0, 128, layout=gl.SliceLayout(1, OUT))
        out = (out_ptr + query.to(gl.int64) * stride_on * 8, row.to(gl.int64) * stride_oh * 8, row < heads)
        row = first_head + gl.arange(0, 128, layout=gl.SliceLayout(1, LO))
        write(o, p, factor, n, out, (part_ptr + part_row * 512, row * 512, row < heads), (angles, rope_width), split)
    if at > 1:  # a commit that nobody needed to wait for: it arrives in both CTAs, and neither may be gone before
        mbarrier.wait(pv_done.index(at % 2), (at // 2 - 1) % 2)


@gluon.jit(do_not_specialize=[
    "want_lse", "items", "queries", "heads", "window_rows", "window_page_rows", "window_page_stride",
    "window_row_stride", "window_gap", "window_width", "window_line", "compressed_rows", "compressed_page_rows",
    "compressed_page_stride", "compressed_row_stride", "compressed_gap", "compressed_width", "compressed_line",
    "window_lengths", "compressed_lengths", "starts", "requests", "rope_positions", "rope_width", "rope_line",
    "num_splits", "tiles_per_split", "stride_on", "stride_oh", "stride_ln", "stride_lh", "split",
], do_not_specialize_on_alignment=[
    "lse_ptr", "sink_ptr", "part_lse_ptr", "window_list_ptr", "window_lengths_ptr", "compressed_list_ptr",
    "compressed_lengths_ptr", "starts_ptr", "cos_sin_ptr", "positions_ptr",
])  # fmt: skip
def v4_listed_pair(out_ptr, q_desc, lse_ptr, sink_ptr, part_ptr, part_lse_ptr, window_desc, window_ptr,
                   window_list_ptr, window_lengths_ptr, compressed_desc, compressed_ptr, compressed_list_ptr,
                   compressed_lengths_ptr, starts_ptr, cos_sin_ptr, positions_ptr, signed_scale, want_lse, items,
                   queries, heads, window_rows, window_page_rows, window_page_stride, window_row_stride, window_gap,
                   window_width, window_line, compressed_rows, compressed_page_rows, compressed_page_stride,
                   compressed_row_stride, compressed_gap, compressed_width, compressed_line, window_lengths,
                   compressed_lengths, starts, requests, rope_positions, rope_width, rope_line, num_splits,
                   tiles_per_split, stride_on, stride_oh, stride_ln, stride_lh, split, HOW: gl.constexpr,
                   WINDOW_WAY: gl.constexpr, COMPRESSED_WAY: gl.constexpr, WINDOW_UNIT: gl.constexpr,
                   COMPRESSED_UNIT: gl.constexpr, GATHER_REGS: gl.constexpr, WARP_REGS: gl.constexpr):  # fmt: skip
    q = gl.allocate_shared_memory(gl.bfloat16, [2, 128, 256], SLOT_K)
    kv = gl.allocate_shared_memory(gl.bfloat16, [4, 128, 256], SLOT_K)
    p = gl.allocate_shared_memory(gl.bfloat16, [2, 128, 128], PANEL)
    bias = gl.allocate_shared_memory(gl.bfloat16, [4, 128], OWN)
    stat = gl.allocate_shared_memory(gl.float32, [128], HALVES)
    job = gl.allocate_shared_memory(gl.int32, [1], OWN)
    job_ready = mbarrier.allocate_mbarrier()
    job_free = mbarrier.allocate_mbarrier()
    q_ready = mbarrier.allocate_mbarrier(two_ctas=True)
    q_free = mbarrier.allocate_mbarrier()
    k_ready = mbarrier.allocate_mbarrier(batch=4, two_ctas=True)
    v_ready = mbarrier.allocate_mbarrier(batch=4, two_ctas=True)
    free = mbarrier.allocate_mbarrier(batch=4)
    bias_ready = mbarrier.allocate_mbarrier(batch=4)
    s_ready = mbarrier.allocate_mbarrier(batch=2)
    p_ready = mbarrier.allocate_mbarrier(batch=2, two_ctas=True)
    pv_done = mbarrier.allocate_mbarrier(batch=2)
    mbarrier.init(job_ready, count=1)
    mbarrier.init(job_free, count=3)
    mbarrier.init(q_ready, count=1)
    mbarrier.init(q_free, count=1)
    for i in gl.static_range(4):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
        mbarrier.init(bias_ready.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(s_ready.index(i), count=1)
        mbarrier.init(p_ready.index(i), count=1)
        mbarrier.init(pv_done.index(i), count=1)
    S: gl.constexpr = TensorMemoryLayout([64, 128], col_stride=1, cga_layout=[[1, 0]], two_ctas=True)
    O: gl.constexpr = TensorMemoryLayout([64, 256], col_stride=1, cga_layout=[[1, 0]], two_ctas=True)
    s = allocate_tensor_memory(gl.float32, [2, 128, 128], S)
    o = allocate_tensor_memory(gl.float32, [2, 128, 256], O)

    names = (
        Names(window_list_ptr, window_line, window_lengths_ptr, window_lengths, window_width),
        Names(compressed_list_ptr, compressed_line, compressed_lengths_ptr, compressed_lengths, compressed_width),
    )
    pools = (
        (window_ptr, window_desc, window_rows, window_page_rows, window_page_stride, window_row_stride, window_gap),
        (compressed_ptr, compressed_desc, compressed_rows, compressed_page_rows, compressed_page_stride,
         compressed_row_stride, compressed_gap),
    )  # fmt: skip
    ring = (kv, k_ready, v_ready, free)
    gl.warp_specialize([
        (softmax_role, (p, s, o, job, stat, bias, (job_ready, job_free, bias_ready, s_ready, p_ready, pv_done),
                        (out_ptr, lse_ptr, sink_ptr, part_ptr, part_lse_ptr),
                        (stride_on, stride_oh, stride_ln, stride_lh),
                        (cos_sin_ptr, positions_ptr, rope_positions, rope_width, rope_line), items, (queries, heads),
                        signed_scale, want_lse, split)),
        (gather_role, (q_desc, names, Requests(starts_ptr, starts, requests), pools, q, job, bias,
                       (job_ready, job_free, q_ready, q_free, bias_ready), ring, items,
                       (queries, heads, num_splits, tiles_per_split), HOW, (WINDOW_WAY, COMPRESSED_WAY),
                       (WINDOW_UNIT, COMPRESSED_UNIT))),
        (scores_role, (q, job, job_ready, job_free, q_ready, q_free, ring, s, s_ready, p_ready, items)),
        (values_role, (p, job, job_ready, job_free, ring, o, p_ready, pv_done, items)),
    ], [4, 1, 1], [GATHER_REGS, WARP_REGS, WARP_REGS])  # fmt: skip
