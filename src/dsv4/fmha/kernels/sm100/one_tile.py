"""The roles of forward.py with one query tile: head dims 256 and 512. S has two stages, so that the products for the
next keys overlap with the softmax of these; a separate role rescales O."""

from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout, tcgen05_mma

from dsv4.fmha.kernels.sm100.softmax_parts import load_queries, scores, store_p, store_rows
from dsv4.fmha.kernels.tiles import mask_bounds
from dsv4.kernels import softmax
from dsv4.kernels.compat import fence_async_shared, gl, gluon, mbarrier
from dsv4.kernels.ring import consumer_stage

AT_A_TIME = gl.constexpr(64)  # columns of O


@gluon.jit
def p_operand(s, p, DTYPE: gl.constexpr, P_TMEM: gl.constexpr):
    """Return P of a stage: the first half of S's columns, as 16-bit elements, or a shared-memory tile."""
    if P_TMEM:
        BM: gl.constexpr = s.shape[0]
        BN: gl.constexpr = s.shape[1]
        PL: gl.constexpr = TensorMemoryLayout([BM, BN], col_stride=1)
        return s.reinterpret(DTYPE, [BM, 2 * BN], PL).slice(0, BN)
    else:
        return p


@gluon.jit
def mma_role(memory, n, k_is_v, D: gl.constexpr, P_TMEM: gl.constexpr):
    q, ring, s, o = memory.q, memory.ring, memory.s, memory.o.index(0)
    SLOTS: gl.constexpr = ring.slots.shape[0]
    DS: gl.constexpr = ring.slots.shape[2]
    PARTS: gl.constexpr = D // DS
    memory.q_ready.wait(0, 0)
    stage = consumer_stage()
    if n > 0:
        for part in gl.static_range(PARTS):
            ring.wait(stage)
            tcgen05_mma(q.index(part), ring.slot(stage).permute((1, 0)), s.index(0), use_acc=part > 0)
            if part == PARTS - 1:
                memory.s_ready.arrive_after_mma(0)
            ring.release_after_mma(stage, k_is_v == 0)
            stage = ring.next(stage)
        held = 0  # k is v: the slot of these keys, which P V reads once more and frees
        for j in range(0, n):
            at = j % 2  # stage of S and P
            next_held = stage.index
            if j + 1 < n:
                for part in gl.static_range(PARTS):
                    ring.wait(stage)
                    tcgen05_mma(q.index(part), ring.slot(stage).permute((1, 0)), s.index(1 - at), use_acc=part > 0)
                    ring.release_after_mma(stage, k_is_v == 0)
                    stage = ring.next(stage)
                memory.s_ready.arrive_after_mma(1 - at)
            memory.p_ready.wait(at, (j // 2) % 2)
            if j > 0:
                memory.o_rescaled.wait(0, (j - 1) % 2)
            p = p_operand(s.index(at), memory.p.index(at), q.dtype, P_TMEM)
            for part in gl.static_range(PARTS):
                v_slot = (held + part) % SLOTS
                if k_is_v == 0:
                    v_slot = stage.index
                    ring.wait(stage)
                    stage = ring.next(stage)
                if PARTS == 1:
                    tcgen05_mma(p, ring.slots.index(v_slot), o, use_acc=j > 0)
                else:
                    tcgen05_mma(p, ring.slots.index(v_slot), o.slice(part * DS, DS), use_acc=j > 0)
                ring.free.arrive_after_mma(v_slot)
            memory.pv_done.arrive_after_mma(0)
            held = next_held


@gluon.jit
def step(memory, bounds, m, l, j, column, scale, masked, P_TMEM: gl.constexpr, KV_LOAD: gl.constexpr):
    """Store P of one tile of keys; return the rows' maxima and sums. masked: some row does not see some keys."""
    stage = j % 2
    s = memory.s.index(stage)
    LS: gl.constexpr = s.get_reg_layout()
    x = scores(s, column, masked, bounds, LS, KV_LOAD)
    top = gl.max(x, 1)
    factor = softmax.row_scale(top, scale)
    top = top * factor
    moves = top - m > softmax.RESCALE_ABOVE  # a row keeps its reference while the maximum grows little
    m_new = gl.where(moves, top, m)
    alpha = gl.where(moves, gl.exp2(m - m_new), 1.0)
    if j > 0:
        memory.stat_free.wait(0, (j - 1) % 2)
        memory.stat.index(0).store(alpha)
        memory.stat_ready.arrive(0)
    m = m_new
    p = p_operand(s, memory.p.index(stage), memory.q.dtype, P_TMEM)
    l *= alpha
    y = store_p(x, factor, m, p.slice(0, s.shape[1], dim=1))
    if not P_TMEM:
        fence_async_shared()  # P is read by the tensor core
    memory.p_ready.arrive(stage)
    l += gl.sum(y, 1)
    return m, l


@gluon.jit
def softmax_role(memory, work_tile, tile_row, sign, D: gl.constexpr, P_TMEM: gl.constexpr, KV_LOAD: gl.constexpr):
    """Load Q, then compute P = exp2(S - m) tile by tile; a thread has one row."""
    tiles, scale = work_tile.tiles, work_tile.problem.scale
    BM: gl.constexpr = memory.q.shape[1]
    BN: gl.constexpr = memory.ring.slots.shape[1]
    RS: gl.constexpr = gl.SliceLayout(1, memory.s.index(0).get_reg_layout())
    load_queries(memory, work_tile, tile_row, sign, 0, D, 64)
    bounds = mask_bounds(tile_row, work_tile, BM, BN, KV_LOAD, RS)
    m = gl.full([BM], softmax.LOWEST, gl.float32, RS)
    l = gl.full([BM], 0.0, gl.float32, RS)
    for j in range(0, tiles.end - tiles.begin):
        memory.s_ready.wait(j % 2, (j // 2) % 2)
        column = tiles.first + (tiles.begin + j) * BN
        masked = bounds.bad | (column < bounds.full_first) | (column + BN > bounds.full_end)
        if P_TMEM:  # the step exists twice: a branch around the mask alone would move all scores to other registers
            if masked:
                m, l = step(memory, bounds, m, l, j, column, scale, True, P_TMEM, KV_LOAD)
            else:
                m, l = step(memory, bounds, m, l, j, column, scale, False, P_TMEM, KV_LOAD)
        else:
            m, l = step(memory, bounds, m, l, j, column, scale, masked, P_TMEM, KV_LOAD)
    last = gl.maximum(tiles.end - tiles.begin, 1) - 1
    memory.stat_free.wait(0, last % 2)
    memory.stat.index(0).store(m)
    memory.stat.index(1).store(l)
    memory.stat_ready.arrive(0)


@gluon.jit
def correction_role(memory, work_tile, tile_row, n, split, D: gl.constexpr):
    """Rescale O if a maximum moved; finally normalise and store it."""
    o, stat, pv_done = memory.o.index(0), memory.stat, memory.pv_done.at(0)
    RO: gl.constexpr = gl.SliceLayout(1, o.slice(0, AT_A_TIME).get_reg_layout())
    for j in range(1, n):
        memory.stat_ready.wait(0, (j - 1) % 2)
        alpha = stat.index(0).load(RO)
        memory.stat_free.arrive(0)
        mbarrier.wait(pv_done, (j - 1) % 2)
        if gl.min(alpha, 0) < 1.0:
            for c in gl.static_range(D // AT_A_TIME):
                view = o.slice(c * AT_A_TIME, AT_A_TIME)
                view.store(view.load() * alpha[:, None])
        memory.o_rescaled.arrive(0)
    memory.stat_ready.wait(0, (gl.maximum(n, 1) - 1) % 2)
    m = stat.index(0).load(RO)
    l = stat.index(1).load(RO)
    store_rows(work_tile, o, pv_done, m, l, tile_row, n, 0, split, D, AT_A_TIME)
