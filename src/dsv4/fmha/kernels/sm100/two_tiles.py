"""The roles of forward.py with two query tiles in flight: head dims 64 and 128.

A tile's scores stay in tensor memory only until its softmax group has them in registers, and P has columns of its own.
So the products for the next keys are issued before P V of these, and a group waits for nothing but its own work. The
tiles use one S alternately, each while the other computes its exponentials.

    mma         | S0 .. S1 .. | S0' PV0 | S1' PV1 | S0" PV0' | ...
    softmax 0   |  read S0, P0 ............ | read S0', P0' ...
    softmax 1   |        read S1, P1 ............ | read S1', P1' ...

A row keeps its reference until its maximum has grown by 8 in base 2. If a reference moves, the group itself rescales O,
so that the tensor core waits for no other role. The group finds out before it waits for P V of the previous keys. Some
exponentials are computed without the exponential unit, which the groups share (`softmax_parts.exp2_by_both`): between
two products P V of a tile there is little else than exponentials. ptxas would schedule all other arithmetic of a step
first or last, while the unit is idle; so the third quarter of the columns depends on the sum of the first, and the
fourth on that of the second.
"""

from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout, tcgen05_mma

from dsv4.fmha.kernels.sm100.softmax_parts import exp2_by_both, halves, load_queries, scores, store_rows
from dsv4.fmha.kernels.tiles import mask_bounds
from dsv4.kernels import softmax
from dsv4.kernels.compat import gl, gluon
from dsv4.kernels.ring import consumer_stage

VOTES = gl.constexpr(8)  # number of the hardware barrier of tile 0; Triton uses the first few
ANY = gl.constexpr("""{
    .reg .pred mine, some;
    setp.ne.b32 mine, $1, 0;
    bar.red.or.pred some, $2, 128, mine;
    selp.b32 $0, 1, 0, some;
}""")
AFTER = gl.constexpr("{ .reg .b32 a; shr.u32 a, $2, 31; add.s32 $0, $1, a; }")


@gluon.jit
def multiply_scores(memory, TILE: gl.constexpr, stage):
    """Multiply S of a tile for the keys in a ring slot."""
    s = memory.s.index(0)
    tcgen05_mma(memory.q.index(TILE), memory.ring.slot(stage).permute((1, 0)), s, use_acc=False)
    memory.s_ready.arrive_after_mma(TILE)


@gluon.jit
def mma_role(memory, n):
    multiply(memory, consumer_stage(), n, 0, 0)


@gluon.jit
def multiply(memory, stage, n, before, turn):
    """Issue the products of a work tile with n tiles of keys; return the next stage of the ring. before: the tiles of
    keys of earlier work tiles; turn: the parity of their number."""
    ring, s_read = memory.ring, memory.s_read
    if n > 0:
        ring.wait(stage)
        memory.q_ready.wait(0, turn)
        s_read.wait(1, (before + 1) % 2)
        multiply_scores(memory, 0, stage)
        memory.q_ready.wait(1, turn)
        s_read.wait(0, before % 2)
        multiply_scores(memory, 1, stage)
        ring.release_after_mma(stage)
        stage = ring.next(stage)
        for j in range(0, n):
            k_stage = stage
            if j + 1 < n:
                ring.wait(stage)
                stage = ring.next(stage)
            for i in gl.static_range(2):
                if j + 1 < n:
                    s_read.wait(1 - i, (before + j + i) % 2)  # the other tile, which used S before
                    multiply_scores(memory, i, k_stage)
                    if i == 1:
                        ring.release_after_mma(k_stage)
                if i == 0:
                    ring.wait(stage)
                memory.p_ready.wait(i, (before + j) % 2)
                tcgen05_mma(memory.p.index(i), ring.slot(stage), memory.o.index(i), use_acc=j > 0)
                memory.pv_done.arrive_after_mma(i)
            ring.release_after_mma(stage)
            stage = ring.next(stage)
    return stage


@gluon.jit
def rescale(o, alpha):
    """Multiply the rows of O by alpha, a few columns at a time, so that the scores stay in registers."""
    BM: gl.constexpr = o.shape[0]
    N: gl.constexpr = o.shape[1] // 16
    parts = o.reinterpret(gl.float32, [N, BM, 16], TensorMemoryLayout([BM, 16], col_stride=1))
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, parts.index(0).get_reg_layout()))
    for c in range(0, N):
        parts.index(c).store(parts.index(c).load() * alpha[:, None])


@gluon.jit
def some_row(x, TILE: gl.constexpr):
    """Return whether x holds for some row of the tile. A maximum over rows would use shared memory, where its loads
    queue behind those of products."""
    return gl.inline_asm(ANY, "=r,r,n", [x.to(gl.int32), VOTES + TILE], gl.int32, False) > 0


@gluon.jit
def after(m, l):
    """Return m so that ptxas cannot use it before l: the sign of a sum of powers, 0, is added to its bits."""
    l = gl.convert_layout(l, m.type.layout)
    return gl.inline_asm_elementwise(AFTER, "=r,r,r", [m, l], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def store_quarter(x, factor, m, masked, p, QUARTER: gl.constexpr):
    """Store P = 2^(x factor - m) of a quarter of the columns in tensor memory; return the sum of each row."""
    R: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    x = x * gl.convert_layout(factor, R)[:, None] - gl.convert_layout(m, R)[:, None]
    if masked or QUARTER == 3:  # 2^-inf; no arithmetic follows the last quarter that could overlap with more
        y = gl.exp2(x)
    else:
        y = exp2_by_both(x)
    part = p.slice(QUARTER * x.shape[1], x.shape[1])
    part.store(gl.convert_layout(y.to(p.dtype), part.get_reg_layout()))
    return gl.sum(y, 1)


@gluon.jit
def step(memory, bounds, m, l, j, before, column, scale, masked, TILE: gl.constexpr, KV_LOAD: gl.constexpr):
    """Store P of one tile of keys; return the rows' references and sums. masked: some row does not see some keys."""
    s, p = memory.s.index(0), memory.p.index(TILE)
    x = scores(s, column, masked, bounds, s.get_reg_layout(), KV_LOAD)
    memory.s_read.arrive(TILE)
    top = gl.max(x, 1)
    # Large scores are rare: while a row has none its factor is the scale, which keeps the chain to the vote short.
    factor = gl.full([s.shape[0]], scale, gl.float32, top.type.layout)
    some = some_row((top * scale - m > softmax.RESCALE_ABOVE) | softmax.is_large(top, scale), TILE)
    if j > 0:
        memory.pv_done.wait(TILE, (before + j - 1) % 2)  # O and P of the previous keys are no longer in use
    if some:
        factor = softmax.row_scale(top, scale)
        top = top * factor
        moves = top - m > softmax.RESCALE_ABOVE
        alpha = gl.where(moves, gl.exp2(m - top), 1.0)
        m = gl.where(moves, top, m)
        l *= alpha
        if j > 0:
            rescale(memory.o.index(TILE), alpha)
    a, c = halves(x)
    a, b = halves(a)
    c, d = halves(c)
    a = store_quarter(a, factor, m, masked, p, 0)
    b = store_quarter(b, factor, m, masked, p, 1)
    later = after(m, a)
    c = store_quarter(c, factor, later, masked, p, 2)
    d = store_quarter(d, factor, after(later, b), masked, p, 3)
    memory.p_ready.arrive(TILE)
    l += gl.convert_layout(a, l.type.layout) + gl.convert_layout(b, l.type.layout)
    return m, l + (gl.convert_layout(c, l.type.layout) + gl.convert_layout(d, l.type.layout))


@gluon.jit
def softmax_role(memory, work_tile, tile_row, sign, split, TILE: gl.constexpr, D: gl.constexpr, KV_LOAD: gl.constexpr):
    """Process the rows of one tile, one per thread: load Q, compute P tile by tile, finally store O / l."""
    n = work_tile.tiles.end - work_tile.tiles.begin
    load_queries(memory, work_tile, tile_row, sign, TILE, D, D)
    m, l = attend(memory, work_tile, tile_row, 0, TILE, KV_LOAD)
    store_rows(work_tile, memory.o.index(TILE), memory.pv_done.at(TILE), m, l, tile_row, n, 0, split, D, D)


@gluon.jit
def attend(memory, work_tile, tile_row, before, TILE: gl.constexpr, KV_LOAD: gl.constexpr):
    """Compute P of one tile of rows for all keys; return the rows' references and sums. before: see multiply."""
    tiles, scale = work_tile.tiles, work_tile.problem.scale
    BM: gl.constexpr = memory.q.shape[1]
    BN: gl.constexpr = memory.ring.slots.shape[1]
    RS: gl.constexpr = gl.SliceLayout(1, memory.s.index(0).get_reg_layout())
    bounds = mask_bounds(tile_row, work_tile, BM, BN, KV_LOAD, RS)
    m = gl.full([BM], softmax.LOWEST, gl.float32, RS)
    l = gl.full([BM], 0.0, gl.float32, RS)
    for j in range(0, tiles.end - tiles.begin):
        memory.s_ready.wait(TILE, (before + j) % 2)
        column = tiles.first + (tiles.begin + j) * BN
        masked = bounds.bad | (column < bounds.full_first) | (column + BN > bounds.full_end)
        # The step exists twice, because a branch around the mask alone would move all scores to other registers.
        if masked:
            m, l = step(memory, bounds, m, l, j, before, column, scale, True, TILE, KV_LOAD)
        else:
            m, l = step(memory, bounds, m, l, j, before, column, scale, False, TILE, KV_LOAD)
    return m, l
