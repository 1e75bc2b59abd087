"""FMHA forward on sm_100a, head dims 64 to 512.

One CTA takes TILES tiles of BM packed query rows of one (sequence, KV head) and walks its keys in tiles of BN. With two
tiles the softmax of one runs under the matrix products of the other; with one, S has two stages and the product for
the next keys is issued before P V of these. Role chart (two tiles; S0 = scores of tile 0)::

    load        | K0   V0   K1   V1   ...
    mma         | S0 S1 | PV0 S0' | PV1 S1' | PV0' ...                     one warp, all tensor-core work
    softmax 0   | load Q |  P0 | ...  | P0' | ...                          4 warps, a row per thread
    softmax 1   | load Q |      P1 | ...  | P1'                            4 warps (two tiles only)
    correction  |        |       | O0 *= alpha | O1 *= alpha | ... | O / l -> out, lse     4 warps

head dim   BM x TILES   BN    S stages   tensor memory (columns)                shared memory (KiB), P in shared memory
64         128 x 2      128   1          S 2x128, O 2x64      = 384             Q 32  ring 4 x 16   P 64
128        128 x 2      128   1          S 2x128, O 2x128     = 512             Q 64  ring 3 x 32   P 64  (4 without P)
256        128 x 1      64    2          S 2x64,  O 256       = 384             Q 64  ring 4 x 32   P 32
512        64  x 1      64    2          S 2x64,  O 256 (*)   = 384             Q 64  ring 4 x 32   P 16
(*) 64 rows use half of the 128 lanes; the two halves of O lie side by side in the lanes, 256 columns each.

P takes the place of S in tensor memory (P_TMEM) or goes through shared memory. At 512 the A operand of 64 rows cannot
come from tensor memory, so P goes through shared memory there. A ring slot holds BN keys of min(D, 256) columns:
at 512 a K or V tile is two slots. With one query tile and k the same tensor as v (latents), a tile is loaded once and
stays in its slots for both products.

barrier          arrives                    waits          means
q_ready          each softmax role          mma            Q is in shared memory, visible to the tensor core
slot_ready[r]    TMA bytes, or load warp    mma            K or V is in ring slot r
slot_free[r]     commit of mma              load           the products that read slot r are complete (k is v: both)
s_ready[s]       commit of mma              softmax        S is complete; also every product issued before it, so P's
                                                           buffer of the same stage may be overwritten
p_ready[s][k]    softmax                    mma            piece k of P is stored; the first one: S is read
stat_ready[i]    softmax                    correction     alpha (in the end: maximum and sum) of tile i is in stat
stat_free[i]     correction                 softmax        stat of tile i is read
o_rescaled[i]    correction                 mma            O of tile i is rescaled for the next P V
pv_done[i]       commit of mma              correction     P V is complete: O of tile i may be touched
landed           TMA bytes                  load           a tile with foreign rows is there, to be zeroed in part
"""

from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    tcgen05_commit,
    tcgen05_mma,
)

from dsv4.kernels.compat import Value, aggregate, fence_async_shared, gl, gluon, mbarrier, reinterpret
from dsv4.kernels.shared import softmax
from dsv4.kernels.shared.fmha import loads
from dsv4.kernels.shared.fmha.arguments import Problem, Share, Source, Strides, Tensors, Tiles
from dsv4.kernels.shared.fmha.tiles import (
    Pages,
    bad_pages,
    end_key,
    first_key,
    see_pages_by_bits,
    sequence,
    split_range,
)
from dsv4.kernels.sm100.fmha.load_role import advance, load_role


@aggregate
class Memory:
    s: Value
    o: Value
    q: Value
    ring: Value
    p: Value
    stat: Value  # alpha or maximum of each tile, then sums


@aggregate
class Barriers:
    q_ready: Value
    slot_ready: Value
    slot_free: Value
    s_ready: Value
    p_ready: Value
    stat_ready: Value
    stat_free: Value
    o_rescaled: Value
    pv_done: Value
    landed: Value


@aggregate
class Seen:
    """What rows see: each row's keys [first, end); the keys of the sequence; its pages, and whether any is none."""

    row_first: Value
    row_end: Value
    keys: Value
    pages: Pages
    bad: Value


@gluon.jit
def make_memory(DTYPE: gl.constexpr, D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, TILES: gl.constexpr,
                SLOTS: gl.constexpr, P_TMEM: gl.constexpr):  # fmt: skip
    DS: gl.constexpr = min(D, 256)
    STAGES: gl.constexpr = 2  # of S and P: one per tile, or two of the one tile
    P_ROWS: gl.constexpr = 8 if P_TMEM else BM
    QL: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, DS], DTYPE)
    KL: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, DS], DTYPE)
    PL: gl.constexpr = gl.NVMMASharedLayout.get_default_for([P_ROWS, BN], DTYPE)
    ROW: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q = gl.allocate_shared_memory(DTYPE, [TILES * (D // DS), BM, DS], QL)
    ring = gl.allocate_shared_memory(DTYPE, [SLOTS, BN, DS], KL)
    p = gl.allocate_shared_memory(DTYPE, [STAGES, P_ROWS, BN], PL)
    stat = gl.allocate_shared_memory(gl.float32, [2 * TILES, BM], ROW)
    s = allocate_tensor_memory(gl.float32, [STAGES, BM, BN], TensorMemoryLayout([BM, BN], col_stride=1))
    o = allocate_tensor_memory(gl.float32, [TILES, BM, D], TensorMemoryLayout([BM, DS], col_stride=1))
    return Memory(s, o, q, ring, p, stat)


@gluon.jit
def make_barriers(TILES: gl.constexpr, SLOTS: gl.constexpr, PIECES: gl.constexpr):
    STAGES: gl.constexpr = 2
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q_ready = gl.allocate_shared_memory(gl.int64, [1], BAR)
    slot_ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BAR)
    slot_free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BAR)
    s_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    p_ready = gl.allocate_shared_memory(gl.int64, [STAGES * PIECES, 1], BAR)
    stat_ready = gl.allocate_shared_memory(gl.int64, [TILES, 1], BAR)
    stat_free = gl.allocate_shared_memory(gl.int64, [TILES, 1], BAR)
    o_rescaled = gl.allocate_shared_memory(gl.int64, [TILES, 1], BAR)
    pv_done = gl.allocate_shared_memory(gl.int64, [TILES, 1], BAR)
    landed = gl.allocate_shared_memory(gl.int64, [1], BAR)
    mbarrier.init(q_ready, count=TILES)
    mbarrier.init(landed, count=1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(slot_ready.index(i), count=1)
        mbarrier.init(slot_free.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(s_ready.index(i), count=1)
        for k in gl.static_range(PIECES):
            mbarrier.init(p_ready.index(i * PIECES + k), count=1)
    for i in gl.static_range(TILES):
        mbarrier.init(stat_ready.index(i), count=1)
        mbarrier.init(stat_free.index(i), count=1)
        mbarrier.init(o_rescaled.index(i), count=1)
        mbarrier.init(pv_done.index(i), count=1)
        mbarrier.arrive(stat_free.index(i), count=1)  # nothing to read yet
    return Barriers(q_ready, slot_ready, slot_free, s_ready, p_ready, stat_ready, stat_free, o_rescaled, pv_done,
                    landed)  # fmt: skip


@gluon.constexpr_function
def pieces(tiles, p_tmem, d):
    """In how many pieces P is handed to the tensor core, so that the product of some keys runs under the exponentials
    of those that follow. The products of head dim 64 are too short for three."""
    return 1 if tiles == 1 or not p_tmem else 2 if d == 64 else 3


@gluon.constexpr_function
def piece(k, n, keys):
    """(first key, number of keys) of piece k of n: half of the keys, then the others in one or in two."""
    rest = keys // 2 // (n - 1)
    return (0, keys // 2) if k == 0 else (keys // 2 + (k - 1) * rest, rest)


@gluon.jit
def p_operand(s, p, DTYPE: gl.constexpr, P_TMEM: gl.constexpr):
    """Where P of a stage lives: the first half of S's columns, as 16-bit elements, or a shared-memory tile."""
    if P_TMEM:
        BM: gl.constexpr = s.shape[0]
        BN: gl.constexpr = s.shape[1]
        PL: gl.constexpr = TensorMemoryLayout([BM, BN], col_stride=1)
        return s.reinterpret(DTYPE, [BM, 2 * BN], PL).slice(0, BN)
    else:
        return p


@gluon.jit
def multiply_piece(p, v, o, use_acc, PIECE: gl.constexpr, PIECES: gl.constexpr):
    """O += P V of some of the keys."""
    K: gl.constexpr = piece(PIECE, PIECES, v.shape[0])
    tcgen05_mma(p.slice(K[0], K[1]), v.slice(K[0], K[1]), o, use_acc=use_acc)


@gluon.jit
def mma_role(memory, barriers, n, k_is_v, D: gl.constexpr, TILES: gl.constexpr, P_TMEM: gl.constexpr):
    q, ring, p_smem, s, o = memory.q, memory.ring, memory.p, memory.s, memory.o
    slot_ready, slot_free, s_ready = barriers.slot_ready, barriers.slot_free, barriers.s_ready
    p_ready, o_rescaled, pv_done = barriers.p_ready, barriers.o_rescaled, barriers.pv_done
    SLOTS: gl.constexpr = ring.shape[0]
    DS: gl.constexpr = ring.shape[2]
    PARTS: gl.constexpr = D // DS
    PIECES: gl.constexpr = pieces(TILES, P_TMEM, D)
    mbarrier.wait(barriers.q_ready, 0)
    slot = 0
    phase = 0
    if n > 0:
        for part in gl.static_range(PARTS):
            mbarrier.wait(slot_ready.index(slot), phase)
            for i in gl.static_range(TILES):
                tcgen05_mma(q.index(i * PARTS + part), ring.index(slot).permute((1, 0)), s.index(i), use_acc=part > 0)
                if part == PARTS - 1:
                    tcgen05_commit(s_ready.index(i))
            tcgen05_commit(slot_free.index(slot), pred=k_is_v == 0)
            slot, phase = advance(slot, phase, SLOTS)
        held = 0  # k is v: the slot of these keys, which P V reads once more and frees
        for j in range(0, n):
            if TILES == 1:
                stage = j % 2
                next_held = slot
                if j + 1 < n:
                    for part in gl.static_range(PARTS):
                        mbarrier.wait(slot_ready.index(slot), phase)
                        tcgen05_mma(q.index(part), ring.index(slot).permute((1, 0)), s.index(1 - stage),
                                    use_acc=part > 0)  # fmt: skip
                        tcgen05_commit(slot_free.index(slot), pred=k_is_v == 0)
                        slot, phase = advance(slot, phase, SLOTS)
                    tcgen05_commit(s_ready.index(1 - stage))
                mbarrier.wait(p_ready.index(stage), (j // 2) % 2)
                if j > 0:
                    mbarrier.wait(o_rescaled.index(0), (j - 1) % 2)
                p = p_operand(s.index(stage), p_smem.index(stage), ring.dtype, P_TMEM)
                for part in gl.static_range(PARTS):
                    v_slot = (held + part) % SLOTS
                    if k_is_v == 0:
                        v_slot = slot
                        mbarrier.wait(slot_ready.index(slot), phase)
                        slot, phase = advance(slot, phase, SLOTS)
                    if PARTS == 1:
                        tcgen05_mma(p, ring.index(v_slot), o.index(0), use_acc=j > 0)
                    else:
                        tcgen05_mma(p, ring.index(v_slot), o.index(0).slice(part * DS, DS), use_acc=j > 0)
                    tcgen05_commit(slot_free.index(v_slot))
                tcgen05_commit(pv_done.index(0))
                held = next_held
            else:
                k_slot, k_phase = advance(slot, phase, SLOTS)
                mbarrier.wait(slot_ready.index(slot), phase)
                if j + 1 < n:
                    mbarrier.wait(slot_ready.index(k_slot), k_phase)
                for i in gl.static_range(TILES):
                    p = p_operand(s.index(i), p_smem.index(i), ring.dtype, P_TMEM)
                    if j > 0:  # before P is there: what comes early must not be waited for late
                        mbarrier.wait(o_rescaled.index(i), (j - 1) % 2)
                    for k in gl.static_range(PIECES):
                        mbarrier.wait(p_ready.index(i * PIECES + k), j % 2)
                        if PIECES == 1:
                            tcgen05_mma(p, ring.index(slot), o.index(i), use_acc=j > 0)
                        else:
                            multiply_piece(p, ring.index(slot), o.index(i), (j > 0) | (k > 0), k, PIECES)
                    tcgen05_commit(pv_done.index(i))
                    if i == TILES - 1:
                        tcgen05_commit(slot_free.index(slot))
                    if j + 1 < n:
                        # Overwrites S, where P was: the tensor core reads P before, the two are pipelined in order.
                        tcgen05_mma(q.index(i), ring.index(k_slot).permute((1, 0)), s.index(i), use_acc=False)
                        tcgen05_commit(s_ready.index(i))
                        if i == TILES - 1:
                            tcgen05_commit(slot_free.index(k_slot))
                slot, phase = advance(k_slot, k_phase, SLOTS)


@gluon.jit
def scores(s, first_column, masked, seen, L: gl.constexpr, HOW: gl.constexpr):
    """Some columns of S from tensor memory; those that a row does not see are -inf."""
    x = s.load()
    if masked:
        x = softmax.see(x, first_column, seen.row_first, seen.row_end, L)
        if HOW >= loads.PAGES:
            if seen.bad:
                x = see_pages_by_bits(x, first_column, seen.keys, seen.pages, L)
    return x


@gluon.jit
def store_p(x, scale, m, p):
    """P = exp2(x scale - m) of some columns -> where the tensor core reads it. Returns P before rounding."""
    y = gl.exp2(x * scale - m[:, None])
    p.store(y.to(p.dtype))
    return y


@gluon.constexpr_function
def columns_at_a_time(keys, p_tmem):
    """Columns of S that a thread has at a time. They are kept in registers from the maximum to P where P takes their
    place in tensor memory; where S stays and is wide, they are read twice: the addresses of a swizzled P leave no
    registers for all."""
    return keys if p_tmem or keys == 64 else 32


@gluon.jit
def step(memory, barriers, seen, m, l, j, stage, column, scale, masked, TILE: gl.constexpr, D: gl.constexpr,
         TILES: gl.constexpr, P_TMEM: gl.constexpr, HOW: gl.constexpr):  # fmt: skip
    """P of one tile of keys -> the rows' maxima and sums. masked: whether some row does not see some of these keys."""
    s, p_smem, stat, q = memory.s, memory.p, memory.stat, memory.q
    p_ready, stat_ready, stat_free = barriers.p_ready, barriers.stat_ready, barriers.stat_free
    BM: gl.constexpr = q.shape[1]
    BN: gl.constexpr = memory.ring.shape[1]
    C: gl.constexpr = columns_at_a_time(BN, P_TMEM)
    KEEP: gl.constexpr = P_TMEM or BN == 64
    PIECES: gl.constexpr = pieces(TILES, P_TMEM, D)
    LS: gl.constexpr = s.index(0).slice(0, C).get_reg_layout()
    RS: gl.constexpr = gl.SliceLayout(1, LS)
    parts = s.index(stage).reinterpret(gl.float32, [BN // C, BM, C], TensorMemoryLayout([BM, C], col_stride=1))
    if KEEP:
        x = scores(parts.index(0), column, masked, seen, LS, HOW)
        top = gl.max(x, 1)
    else:
        top = gl.full([BM], -float("inf"), gl.float32, RS)
        for c in range(0, BN // C):
            x = scores(parts.index(c), column + c * C, masked, seen, LS, HOW)
            top = gl.maximum(top, gl.max(x, 1))
    grown = top * scale
    # A row keeps its reference while the maximum grows little; -inf - -inf is NaN, which is not above anything.
    moves = (grown - m > softmax.RESCALE_ABOVE) | (j == 0)
    m_new = gl.where(moves, gl.maximum(grown, m), m)
    alpha = gl.where(moves & (m_new > -float("inf")), gl.exp2(m - m_new), 1.0)
    if j > 0:
        mbarrier.wait(stat_free.index(TILE), (j - 1) % 2)
        stat.index(TILE).store(alpha)
        mbarrier.arrive(stat_ready.index(TILE), count=1)
    m = m_new
    safe = gl.where(m == -float("inf"), 0.0, m)
    p = p_operand(s.index(stage), p_smem.index(stage), q.dtype, P_TMEM)
    l *= alpha
    if PIECES > 1:
        LH: gl.constexpr = p.slice(0, BN // 2).get_reg_layout()
        REST: gl.constexpr = BN // 2 // (PIECES - 1)
        LR: gl.constexpr = p.slice(0, REST).get_reg_layout()
        x, rest = x.reshape([BM, 2, BN // 2]).permute((0, 2, 1)).split()
        shift = gl.convert_layout(safe, gl.SliceLayout(1, LH))
        y = store_p(gl.convert_layout(x, LH), scale, shift, p.slice(0, BN // 2))
        mbarrier.arrive(p_ready.index(stage * PIECES), count=1)
        total = gl.convert_layout(gl.sum(y, 1), RS)
        shift = gl.convert_layout(safe, gl.SliceLayout(1, LR))
        if PIECES == 3:
            x, rest = rest.reshape([BM, 2, REST]).permute((0, 2, 1)).split()
            y = store_p(gl.convert_layout(x, LR), scale, shift, p.slice(BN // 2, REST))
            mbarrier.arrive(p_ready.index(stage * PIECES + 1), count=1)
            total += gl.convert_layout(gl.sum(y, 1), RS)
        y = store_p(gl.convert_layout(rest, LR), scale, shift, p.slice(BN - REST, REST))
        mbarrier.arrive(p_ready.index(stage * PIECES + PIECES - 1), count=1)
        l += total + gl.convert_layout(gl.sum(y, 1), RS)
    elif KEEP:
        y = store_p(x, scale, safe, p.slice(0, C, dim=1))
        if P_TMEM:
            mbarrier.arrive(p_ready.index(stage), count=1)
        l += gl.sum(y, 1)
    else:
        panels = reinterpret(p, [BN // 64, BM, 64], gl.NVMMASharedLayout.get_default_for([BM, 64], q.dtype))
        for c in range(0, BN // 64):
            for i in gl.static_range(64 // C):
                x = scores(parts.index(c * (64 // C) + i), column + c * 64 + i * C, masked, seen, LS, HOW)
                l += gl.sum(store_p(x, scale, safe, panels.index(c).slice(i * C, C, dim=1)), 1)
    if not P_TMEM:
        fence_async_shared()  # P is read by the tensor core
        mbarrier.arrive(p_ready.index(stage), count=1)
    return m, l


@gluon.jit
def softmax_role(memory, barriers, share, tile_row, sign, TILE: gl.constexpr, D: gl.constexpr, TILES: gl.constexpr,
                 P_TMEM: gl.constexpr, HOW: gl.constexpr):  # fmt: skip
    """Rows of one tile: loads Q, then P = exp2(S - m) tile by tile, one row per thread."""
    q, s, stat = memory.q, memory.s, memory.stat
    s_ready, stat_ready, stat_free = barriers.s_ready, barriers.stat_ready, barriers.stat_free
    problem, tiles, pages = share.problem, share.tiles, share.pages
    group, tokens, keys, left, right = problem.group, problem.tokens, problem.keys, problem.left, problem.right
    scale = problem.scale
    BM: gl.constexpr = q.shape[1]
    BN: gl.constexpr = memory.ring.shape[1]
    DS: gl.constexpr = q.shape[2]
    PARTS: gl.constexpr = D // DS
    STAGES: gl.constexpr = 2 if TILES == 1 else 1
    LS: gl.constexpr = s.index(0).slice(0, columns_at_a_time(BN, P_TMEM)).get_reg_layout()
    RS: gl.constexpr = gl.SliceLayout(1, LS)
    for part in gl.static_range(PARTS):
        loads.load_rows(share.tensors.q_ptr, q.index(TILE * PARTS + part), tile_row, problem.rows, problem.head, group,
                        share.strides.qt, share.strides.qh, part * DS, BM, DS, 128 if P_TMEM and DS == 128 else 64,
                        sign)  # fmt: skip
    fence_async_shared()  # generic stores -> tensor-core reads
    mbarrier.arrive(barriers.q_ready, count=1)

    row = tile_row + gl.arange(0, BM, layout=RS)
    row_first = first_key(row // group, tokens, keys, left)
    row_end = end_key(row // group, tokens, keys, right)
    # Keys that all rows of this tile see; inside them no mask is needed.
    token_last = gl.minimum((tile_row + BM - 1) // group, tokens - 1)
    full_first = first_key(token_last, tokens, keys, left)
    full_end = end_key(tile_row // group, tokens, keys, right)
    bad = False
    if HOW >= loads.PAGES:
        bad = bad_pages(pages, tiles.first + tiles.begin * BN, gl.minimum(tiles.first + tiles.end * BN, keys))
    seen = Seen(row_first, row_end, keys, pages, bad)

    m = gl.full([BM], -float("inf"), gl.float32, RS)
    l = gl.full([BM], 0.0, gl.float32, RS)
    for j in range(0, tiles.end - tiles.begin):
        stage = TILE
        if TILES == 1:
            stage = j % 2
        mbarrier.wait(s_ready.index(stage), (j // STAGES) % 2)
        column = tiles.first + (tiles.begin + j) * BN
        masked = bad | (column < full_first) | (column + BN > full_end)
        if P_TMEM:  # two copies of the step: a branch around the mask alone would move all scores to other registers
            if masked:
                m, l = step(memory, barriers, seen, m, l, j, stage, column, scale, True, TILE, D, TILES, P_TMEM, HOW)
            else:
                m, l = step(memory, barriers, seen, m, l, j, stage, column, scale, False, TILE, D, TILES, P_TMEM, HOW)
        else:
            m, l = step(memory, barriers, seen, m, l, j, stage, column, scale, masked, TILE, D, TILES, P_TMEM, HOW)
    last = gl.maximum(tiles.end - tiles.begin, 1) - 1
    mbarrier.wait(stat_free.index(TILE), last % 2)
    stat.index(TILE).store(m)
    stat.index(TILES + TILE).store(l)
    mbarrier.arrive(stat_ready.index(TILE), count=1)


@gluon.jit
def correction_role(memory, barriers, share, tile_row, n, split, D: gl.constexpr, TILES: gl.constexpr):
    """Rescales O when a maximum moved, and in the end normalises it and stores it."""
    o, stat, pv_done = memory.o, memory.stat, barriers.pv_done
    stat_ready, stat_free = barriers.stat_ready, barriers.stat_free
    tensors, strides, problem = share.tensors, share.strides, share.problem
    group, head = problem.group, problem.head
    BM: gl.constexpr = memory.q.shape[1]
    # Columns at a time. Two tiles leave this role few registers, and those of a store stay in use until it is done.
    C: gl.constexpr = 32 if TILES == 2 else 64
    RESCALED: gl.constexpr = 16 if TILES == 2 else 64
    LR: gl.constexpr = o.index(0).slice(0, RESCALED).get_reg_layout()
    LO: gl.constexpr = o.index(0).slice(0, C).get_reg_layout()
    RO: gl.constexpr = gl.SliceLayout(1, LO)
    for j in range(1, n):
        for i in gl.static_range(TILES):
            mbarrier.wait(stat_ready.index(i), (j - 1) % 2)
            alpha = stat.index(i).load(gl.SliceLayout(1, LR))
            mbarrier.arrive(stat_free.index(i), count=1)
            mbarrier.wait(pv_done.index(i), (j - 1) % 2)
            if gl.min(alpha, 0) < 1.0:
                for c in gl.static_range(D // RESCALED):
                    view = o.index(i).slice(c * RESCALED, RESCALED)
                    view.store(view.load() * alpha[:, None])
            mbarrier.arrive(barriers.o_rescaled.index(i), count=1)
    last = gl.maximum(n, 1) - 1
    for i in gl.static_range(TILES):
        mbarrier.wait(stat_ready.index(i), last % 2)
        m = stat.index(i).load(RO)
        l = stat.index(TILES + i).load(RO)
        if n > 0:
            mbarrier.wait(pv_done.index(i), (n - 1) % 2)
        row = tile_row + i * BM + gl.arange(0, BM, layout=RO)
        token = row // group
        q_head = head * group + row % group
        here = row < problem.rows
        part = (share.tiles.part_row + token.to(gl.int64)) * problem.q_heads + q_head
        target = loads.row_offsets(row, head, group, strides.ot, strides.oh)
        sink = softmax.sink_of(tensors.sink_ptr, q_head, here & (split == 0))
        factor, lse = softmax.finish(m, l, sink)
        if split != 0:  # normalised partial result and its LSE in base 2; the combine kernel applies the sink
            gl.store(tensors.part_lse_ptr + part, lse, mask=here)
        else:
            gl.store(tensors.lse_ptr + token.to(gl.int64) * strides.lt + q_head.to(gl.int64) * strides.lh,
                     lse * softmax.LN2, mask=here & (problem.want_lse != 0))  # fmt: skip
        for c in gl.static_range(D // C):
            column = c * C + gl.arange(0, C, layout=gl.SliceLayout(0, LO))
            x = gl.zeros([BM, C], gl.float32, LO)
            if n > 0:  # else nobody ever wrote O
                x = o.index(i).slice(c * C, C).load() * factor[:, None]
            if split != 0:
                gl.store(tensors.part_ptr + (part * D)[:, None] + column[None, :], x, mask=here[:, None])
            else:
                y = x.to(tensors.out_ptr.dtype.element_ty)
                gl.store(tensors.out_ptr + target[:, None] + column[None, :], y, mask=here[:, None])


# One variant per head dim, dtype, P path and way of reading keys: nothing else may make Triton compile again.
@gluon.jit(
    do_not_specialize=[
        "want_lse", "total_q", "total_k", "tokens", "keys", "kv_heads", "group", "page_size", "table_stride",
        "left", "right", "num_splits", "tiles_per_split", "stride_qb", "stride_qt", "stride_qh", "stride_ob",
        "stride_ot", "stride_oh", "stride_lb", "stride_lt", "stride_lh", "stride_kb", "stride_kt", "stride_kh",
        "stride_vb", "stride_vt", "stride_vh", "k_is_v", "sign",
    ],
    do_not_specialize_on_alignment=[
        "lse_ptr", "sink_ptr", "cu_q_ptr", "cu_k_ptr", "lengths_ptr", "table_ptr", "part_lse_ptr",
    ],
)  # fmt: skip
def fmha_forward(q_ptr, k_desc, v_desc, out_ptr, lse_ptr, sink_ptr, cu_q_ptr, cu_k_ptr, lengths_ptr, table_ptr,
                 part_ptr, part_lse_ptr, k_ptr, v_ptr, scale, want_lse, total_q, total_k, tokens, keys,
                 kv_heads, group, page_size, table_stride, left, right, num_splits, tiles_per_split,
                 stride_qb, stride_qt, stride_qh, stride_ob, stride_ot, stride_oh, stride_lb, stride_lt, stride_lh,
                 stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh, k_is_v, sign,
                 D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, TILES: gl.constexpr, SLOTS: gl.constexpr,
                 P_TMEM: gl.constexpr, HOW: gl.constexpr, SOFTMAX_REGS: gl.constexpr,
                 WARP_REGS: gl.constexpr):  # fmt: skip
    seq = gl.program_id(2)
    head = gl.program_id(1) % kv_heads
    split = gl.program_id(1) // kv_heads
    varlen = tokens == 0  # as the host says it
    q_start, tokens, k_start, keys = sequence(seq, varlen, tokens, keys, total_q, total_k, cu_q_ptr, cu_k_ptr,
                                              lengths_ptr, HOW)  # fmt: skip
    rows = tokens * group
    tile_row = (gl.num_programs(0) - 1 - gl.program_id(0)) * (BM * TILES)  # causal: the longest tiles start first
    if tile_row < rows:
        token_last = gl.minimum((tile_row + BM * TILES - 1) // group, tokens - 1)
        first = first_key(tile_row // group, tokens, keys, left)
        end = end_key(token_last, tokens, keys, right)
        if HOW == loads.PAGES:
            first = first // k_desc.block_shape[1] * k_desc.block_shape[1]  # a TMA box stays within one page
        tiles = (gl.maximum(end - first, 0) + BN - 1) // BN
        tile_begin, tile_end = split_range(tiles, split, num_splits, tiles_per_split)
        n = tile_end - tile_begin

        memory = make_memory(k_desc.dtype, D, BM, BN, TILES, SLOTS, P_TMEM)
        barriers = make_barriers(TILES, SLOTS, pieces(TILES, P_TMEM, D))

        # The tensors of this sequence. 64-bit: a batch may be larger than 2^31 elements.
        q_ptr += (seq.to(gl.int64) * stride_qb + q_start.to(gl.int64) * stride_qt) * 8
        out_ptr += (seq.to(gl.int64) * stride_ob + q_start.to(gl.int64) * stride_ot) * 8
        lse_ptr += seq.to(gl.int64) * stride_lb + q_start.to(gl.int64) * stride_lt
        table_ptr += seq.to(gl.int64) * table_stride
        # Row of the partial results: split-major, then as the rows of q (token, head).
        part_row = split.to(gl.int64) * total_q + gl.where(varlen, q_start, seq * tokens)
        is_split = (part_ptr.to(gl.int64) != 0).to(gl.int32)  # no memory for partial results: none are wanted
        outer = gl.where(varlen, 0, seq)
        # TMA fills what lies past a dense tensor with zeros; elsewhere other rows follow the last key.
        landed_end = keys
        if HOW == loads.ROWS:
            landed_end = gl.where(varlen, keys, 0x7FFFFFFF)
        strides = Strides(stride_qt, stride_qh, stride_ot, stride_oh, stride_lt, stride_lh, stride_qb, stride_ob,
                          stride_lb)  # fmt: skip
        problem = Problem(head, group, kv_heads * group, rows, tokens, keys, left, right, scale, want_lse)
        tiles = Tiles(first, tile_begin, tile_end, part_row)
        share = Share(Tensors(q_ptr, out_ptr, lse_ptr, sink_ptr, part_ptr, part_lse_ptr), strides, problem, tiles,
                      Pages(table_ptr, page_size, total_k))  # fmt: skip
        where = loads.Where(outer, head, k_start, keys, first_key(0, tokens, keys, left), landed_end, table_ptr,
                            page_size)  # fmt: skip
        source = Source(k_desc, v_desc, loads.Cells(k_ptr, total_k, stride_kb, stride_kt, stride_kh),
                        loads.Cells(v_ptr, total_k, stride_vb, stride_vt, stride_vh), where)  # fmt: skip
        # Tiles of two slots by cp.async would wait for each other: a slot is announced only after the next is free.
        if TILES == 2 or HOW == loads.CELLS:
            k_is_v = 0
        if TILES == 2:
            gl.warp_specialize([
                (correction_role, (memory, barriers, share, tile_row, n, is_split, D, TILES)),
                (softmax_role, (memory, barriers, share, tile_row, sign, 0, D, TILES, P_TMEM, HOW)),
                (softmax_role, (memory, barriers, share, tile_row + BM, sign, 1, D, TILES, P_TMEM, HOW)),
                (mma_role, (memory, barriers, n, k_is_v, D, TILES, P_TMEM)),
                (load_role, (source, memory, barriers, tiles, k_is_v, D, TILES, HOW)),
            ], [4, 4, 1, 1], [SOFTMAX_REGS, SOFTMAX_REGS, WARP_REGS, WARP_REGS])  # fmt: skip
        else:
            gl.warp_specialize([
                (correction_role, (memory, barriers, share, tile_row, n, is_split, D, TILES)),
                (softmax_role, (memory, barriers, share, tile_row, sign, 0, D, TILES, P_TMEM, HOW)),
                (mma_role, (memory, barriers, n, k_is_v, D, TILES, P_TMEM)),
                (load_role, (source, memory, barriers, tiles, k_is_v, D, TILES, HOW)),
            ], [4, 1, 1], [SOFTMAX_REGS, WARP_REGS, WARP_REGS])  # fmt: skip
