"""FMHA forward for head dim 512 on sm_90a where k is not v: 64 packed query rows per CTA.

As wide.py: left and right own one half of the columns of O each, keys come in blocks of 64, two per step, left computes
the scores of block 0 and right those of block 1. Beside Q there is room for two blocks [64, 512] of K or V, and the
order in which they come decides. Role chart, K0' and V0' being those of the next step::

    load   1 warp   | K1 | K0' | V1 | V0' ...
    left   4 warps  | O_L += P0 V0_L | S0' = Q K0'^T | O_L += P1 V1_L, softmax 0' -> P0'
    right  4 warps  | O_R += P0 V0_R | S1 = Q K1^T | softmax 1 -> P1 | O_R += P1 V1_R

Each softmax runs under a product: that of left under O += P1 V1, that of right under S0'. After the last step left
computes an S0' of what lies in its place, and drops it.

shared memory   bytes               holds
q               2 x 32768           [64, 256] each: columns 0-255 and 256-511 of Q; the output rows leave through it
kv              4 x 32768           [64, 256] each: halves 0, 1 of the first K0, then K1, V1, K1, V1, ...;
                                    2, 3 of the first V0, then K0', V0', K0', V0', ...
p               2 x 8192            [64, 64] each: P of block 0 and 1
stat            6 x 256             fp32 per row: maximum after block 0, after block 1; factor 0, 1; sums of left, right
barriers        8 each

barrier         arrives                      count       waits          means
q_asked         left, right                  2           load           the loads of Q are on their way
q_ready         left, right                  2           left, right    both halves of Q are in q
ready[i]        load: TMA bytes, or itself   1 + bytes   its users      half slot i of kv is filled
free[i]         who used it: K0, K0' left,   1           load           half slot i may be filled with the next
                K1 right, V the half's owner
p_ready[b]      the block's owner            1           the other      P, maximum and factor of block b are written
sum_ready[h]    owner of half h              1           the other      its row sums are written; it no longer reads q
landed          load: TMA bytes              1 + bytes   load           a tile with foreign rows is to be zeroed in part

Each half slot has two fillings per step, so the phase of a wait is that of what is waited for: V 0, K 1 (but the first
K0). Nobody may wait for a filling before the one between has come: for V1, left has p_ready[1], which says that K1 had
come; right has p_ready[0] for V0 and K1; left waits for right's half of V0 before that of K0'. P0 and its maximum and
factor are overwritten after p_ready[1], before which right waited for O_R += P0 V0_R; P1 and its own after p_ready[0],
before which left waited for O_L += P1 V1_L.
"""

from dsv4.kernels.compat import gl, gluon, mbarrier, warpgroup_mma, warpgroup_mma_wait
from dsv4.kernels.shared import softmax
from dsv4.kernels.shared.fmha import loads
from dsv4.kernels.sm90.fmha import work as parts
from dsv4.kernels.sm90.fmha.halves import begin_half, end_half, half_layout, publish, score_layout, scores


@gluon.jit
def fill_block(desc, cells, ring, landed, landed_phase, where, row, SLOT: gl.constexpr, PHASE: gl.constexpr,
               HOW: gl.constexpr):  # fmt: skip
    """64 keys from row on into half slots SLOT and SLOT + 1, as each becomes free."""
    kv, ready, free = ring
    for h in range(2):
        mbarrier.wait(free.index(SLOT + h), PHASE)
        landed_phase = loads.fill_any(desc, cells, kv.index(SLOT + h), ready.index(SLOT + h), landed, landed_phase,
                                      where, row, h * 256, 64, 256, HOW)  # fmt: skip
    return landed_phase


@gluon.jit
def load_role(source, ring, landed, q_asked, work, HOW: gl.constexpr):
    k_desc, v_desc, k_rows, v_rows, where = source
    first, step_begin, step_end, part_row = work
    phase = 0  # of landed
    row = first + step_begin * 128
    mbarrier.wait(q_asked, 0)  # as in wide.py
    if step_begin < step_end:  # the first wait on an untouched barrier passes
        phase = fill_block(k_desc, k_rows, ring, landed, phase, where, row, 0, 1, HOW)
        phase = fill_block(v_desc, v_rows, ring, landed, phase, where, row, 2, 1, HOW)
    for step in range(step_begin, step_end):
        row = first + step * 128 + 64
        phase = fill_block(k_desc, k_rows, ring, landed, phase, where, row, 0, 0, HOW)
        if step + 1 < step_end:
            phase = fill_block(k_desc, k_rows, ring, landed, phase, where, row + 64, 2, 0, HOW)
        phase = fill_block(v_desc, v_rows, ring, landed, phase, where, row, 0, 1, HOW)
        if step + 1 < step_end:
            phase = fill_block(v_desc, v_rows, ring, landed, phase, where, row + 64, 2, 1, HOW)


@gluon.jit
def left_role(room, tile_row, ring, common, SPLIT: gl.constexpr, HOW: gl.constexpr, SIGN: gl.constexpr):
    """Block 0 of each step and O[:, :256]."""
    q, p_smem, stat, q_asked, q_ready, p_ready, sum_ready = room
    kv, ready, free = ring
    tensors, strides, problem, work, pages = common
    first, step_begin, step_end, part_row = work
    scale = problem[8]
    seen = begin_half(q, q_asked, q_ready, tile_row, common, 0, HOW, SIGN)
    M: gl.constexpr = q.shape[1]
    LO: gl.constexpr = half_layout(gl.num_ctas())
    RO: gl.constexpr = gl.SliceLayout(1, LO)
    LA: gl.constexpr = gl.DotOperandLayout(0, LO, 2)
    RS: gl.constexpr = gl.SliceLayout(1, score_layout(gl.num_ctas()))
    o = gl.zeros([M, 256], gl.float32, LO)
    m = gl.full([M], -float("inf"), gl.float32, RS)
    l = gl.full([M], 0.0, gl.float32, RS)
    if step_begin < step_end:
        s = scores(q, kv, ready, 0, 0, step_begin)
        s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
        mbarrier.arrive(free.index(0), count=1)
        mbarrier.arrive(free.index(1), count=1)
        s = parts.mask(s, first + step_begin * 128, seen, problem, pages, HOW)
        p, m0, a0 = softmax.step(s, m, scale)
        sums = gl.sum(p, 1)
        pb = p.to(q.dtype)
        publish(pb, m0, a0, p_smem, stat, p_ready, 0)
        pa = gl.convert_layout(pb, LA)
        phase = 0
        for step in range(step_begin, step_end):
            more = step + 1 < step_end
            l = l * a0 + sums
            o = o * gl.convert_layout(a0, RO)[:, None]
            mbarrier.wait(ready.index(2), 0)
            o = warpgroup_mma(pa, kv.index(2), o, is_async=True)
            # Right's half of V0. Not after the arrival: then K0' could have come to its place, and this wait not end.
            mbarrier.wait(ready.index(3), 0)
            o = warpgroup_mma_wait(num_outstanding=0, deps=(o,))
            mbarrier.arrive(free.index(2), count=1)
            s = scores(q, kv, ready, 2, 1, step, more)
            mbarrier.wait(p_ready.index(1), phase)
            m = stat.index(1).load(RS)
            a1 = stat.index(3).load(RS)
            l = l * a1
            o = o * gl.convert_layout(a1, RO)[:, None]
            mbarrier.wait(ready.index(0), 0)
            o = warpgroup_mma(p_smem.index(1), kv.index(0), o, is_async=True)
            s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
            mbarrier.arrive(free.index(2), count=1, pred=more)
            mbarrier.arrive(free.index(3), count=1, pred=more)
            s = parts.mask(s, first + step * 128 + 128, seen, problem, pages, HOW)
            p, m0, a0 = softmax.step(s, m, scale)
            sums = softmax.pin(gl.sum(p, 1))
            pb = p.to(q.dtype)
            o = warpgroup_mma_wait(num_outstanding=0, deps=(o,))
            mbarrier.arrive(free.index(0), count=1)
            if more:
                publish(pb, m0, a0, p_smem, stat, p_ready, 0)
            pa = gl.convert_layout(pb, LA)
            phase = phase ^ 1
    end_half(o, m, l, q, stat, sum_ready, tile_row, common, 0, SPLIT)


@gluon.jit
def right_role(room, tile_row, ring, common, SPLIT: gl.constexpr, HOW: gl.constexpr, SIGN: gl.constexpr):
    """Block 1 of each step and O[:, 256:]."""
    q, p_smem, stat, q_asked, q_ready, p_ready, sum_ready = room
    kv, ready, free = ring
    tensors, strides, problem, work, pages = common
    first, step_begin, step_end, part_row = work
    scale = problem[8]
    seen = begin_half(q, q_asked, q_ready, tile_row, common, 1, HOW, SIGN)
    M: gl.constexpr = q.shape[1]
    LO: gl.constexpr = half_layout(gl.num_ctas())
    RO: gl.constexpr = gl.SliceLayout(1, LO)
    LA: gl.constexpr = gl.DotOperandLayout(0, LO, 2)
    RS: gl.constexpr = gl.SliceLayout(1, score_layout(gl.num_ctas()))
    o = gl.zeros([M, 256], gl.float32, LO)
    m = gl.full([M], -float("inf"), gl.float32, RS)
    l = gl.full([M], 0.0, gl.float32, RS)
    phase = 0
    for step in range(step_begin, step_end):
        mbarrier.wait(p_ready.index(0), phase)
        m0 = stat.index(0).load(RS)
        a0 = stat.index(2).load(RS)
        o = o * gl.convert_layout(a0, RO)[:, None]
        mbarrier.wait(ready.index(3), 0)
        o = warpgroup_mma(p_smem.index(0), kv.index(3), o, is_async=True)
        s = scores(q, kv, ready, 0, 1, step)
        o = warpgroup_mma_wait(num_outstanding=2, deps=(o,))
        mbarrier.arrive(free.index(3), count=1)
        s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
        mbarrier.arrive(free.index(0), count=1)
        mbarrier.arrive(free.index(1), count=1)
        s = parts.mask(s, first + step * 128 + 64, seen, problem, pages, HOW)
        p, m, a1 = softmax.step(s, m0, scale)
        l = softmax.pin(l * (a0 * a1) + gl.sum(p, 1))
        pb = p.to(q.dtype)
        publish(pb, m, a1, p_smem, stat, p_ready, 1)
        mbarrier.wait(ready.index(1), 0)
        o = o * gl.convert_layout(a1, RO)[:, None]
        o = warpgroup_mma(gl.convert_layout(pb, LA), kv.index(1), o, is_async=True)
        o = warpgroup_mma_wait(num_outstanding=0, deps=(o,))
        mbarrier.arrive(free.index(1), count=1)
        phase = phase ^ 1
    end_half(o, m, l, q, stat, sum_ready, tile_row, common, 1, SPLIT)
