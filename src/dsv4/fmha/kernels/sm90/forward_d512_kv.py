"""FMHA forward for head dim 512 on sm_90a if k is not v: 64 packed query rows per CTA.

As in forward_d512.py, left and right own one half of the columns of O each, keys are processed in blocks of 64, two per
step, left computes the scores of block 0 and right those of block 1. Besides Q there is room for two blocks [64, 512]
of K or V, so their order matters. Role chart, where K0' and V0' are those of the next step::

    load   1 warp   | K1 | K0' | V1 | V0' ...
    left   4 warps  | O_L += P0 V0_L | S0' = Q K0'^T | O_L += P1 V1_L, softmax 0' -> P0'
    right  4 warps  | O_R += P0 V0_R | S1 = Q K1^T | softmax 1 -> P1 | O_R += P1 V1_R

A maximum moves only if it grew by more than 8, so that most factors are 1 and warps skip the rescaling of O. Each
softmax overlaps with a product: left's with O += P1 V1, right's with S0'. After the last step left computes an S0' of
whatever the slot holds, and drops it.

shared memory   bytes               holds
q               2 x 32768           [64, 256] each: columns 0-255 and 256-511 of Q; the output rows leave through it
kv              4 x 32768           [64, 256] each: halves 0, 1 of the first K0, then K1, V1, K1, V1, ...;
                                    2, 3 of the first V0, then K0', V0', K0', V0', ...
p               2 x 8192            [64, 64] each: P of block 0 and 1
stat            6 x 256             fp32 per row: maximum after block 0, after block 1; factor 0, 1; sums of left, right
barriers        8 each

barrier         arrives                      count       waits          means
q_asked         left, right                  2           load           the loads of Q are in flight
q_ready         left, right                  2           left, right    both halves of Q are in q
ready[i]        load: TMA bytes, or itself   1 + bytes   its users      half slot i of kv is filled
free[i]         who used it: K0, K0' left,   1           load           half slot i may be filled with the next
                K1 right, V the half's owner
p_ready[b]      the block's owner            1           the other      P, maximum and factor of block b are written
sum_ready[h]    owner of half h              1           the other      its row sums are written; it no longer reads q
landed          load: TMA bytes              1 + bytes   load           a tile with rows of others, to be zeroed in part

Each half slot is filled twice per step, so the phase of a wait depends on the tensor: V 0, K 1 (except the first K0).
No role may wait for a filling before the previous one has arrived: for V1, left has p_ready[1], which implies that K1
had arrived; right has p_ready[0] for V0 and K1; left waits for right's half of V0 before that of K0'. P0 with its
maximum and factor is overwritten after p_ready[1], before which right waited for O_R += P0 V0_R; P1 with its own after
p_ready[0], before which left waited for O_L += P1 V1_L."""

from dsv4.fmha.kernels import loads
from dsv4.fmha.kernels.sm90 import work
from dsv4.fmha.kernels.sm90.d512_halves import begin_half, end_half, nothing_yet, publish, published, scores
from dsv4.kernels import softmax
from dsv4.kernels.compat import gl, gluon, warpgroup_mma, warpgroup_mma_wait
from dsv4.kernels.ring import Stage


@gluon.jit
def fill_block(
    desc,
    kv_rows,
    ring,
    landed,
    landed_phase,
    where,
    row,
    SLOT: gl.constexpr,
    PHASE: gl.constexpr,
    KV_LOAD: gl.constexpr,
):
    """Load the 64 keys from row on into half slots SLOT and SLOT + 1, as each becomes free."""
    for h in range(2):
        ring.acquire(Stage(SLOT + h, PHASE))
        landed_phase = loads.fill_any(
            desc,
            kv_rows,
            ring.slots.index(SLOT + h),
            ring.ready.at(SLOT + h),
            landed.at(0),
            landed_phase,
            where,
            row,
            h * 256,
            64,
            256,
            KV_LOAD,
        )
    return landed_phase


@gluon.jit
def fill_k(source, ring, landed, phase, row, SLOT: gl.constexpr, PHASE: gl.constexpr, KV_LOAD: gl.constexpr):
    return fill_block(source.k_desc, source.k_rows, ring, landed, phase, source.where, row, SLOT, PHASE, KV_LOAD)


@gluon.jit
def fill_v(source, ring, landed, phase, row, SLOT: gl.constexpr, PHASE: gl.constexpr, KV_LOAD: gl.constexpr):
    return fill_block(source.v_desc, source.v_rows, ring, landed, phase, source.where, row, SLOT, PHASE, KV_LOAD)


@gluon.jit
def load_role(source, ring, landed, q_asked, tiles, KV_LOAD: gl.constexpr):
    phase = 0  # phase of landed
    row = tiles.first + tiles.begin * 128
    q_asked.wait(0, 0)  # see forward_d512.py
    if tiles.begin < tiles.end:  # the first wait on an untouched barrier passes
        phase = fill_k(source, ring, landed, phase, row, 0, 1, KV_LOAD)
        phase = fill_v(source, ring, landed, phase, row, 2, 1, KV_LOAD)
    for step in range(tiles.begin, tiles.end):
        row = tiles.first + step * 128 + 64
        phase = fill_k(source, ring, landed, phase, row, 0, 0, KV_LOAD)
        if step + 1 < tiles.end:
            phase = fill_k(source, ring, landed, phase, row + 64, 2, 0, KV_LOAD)
        phase = fill_v(source, ring, landed, phase, row, 0, 1, KV_LOAD)
        if step + 1 < tiles.end:
            phase = fill_v(source, ring, landed, phase, row + 64, 2, 1, KV_LOAD)


@gluon.jit
def left_steps(o, m, l, memory, ring, bounds, work_tile, KV_LOAD: gl.constexpr):
    """Process block 0 of each step and O[:, :256]."""
    kv, tiles = ring.slots, work_tile.tiles
    RS: gl.constexpr = m.type.layout
    RO: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    LA: gl.constexpr = gl.DotOperandLayout(0, o.type.layout, 2)
    if tiles.begin < tiles.end:
        s = scores(memory, ring, 0, 0, tiles.begin)
        s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
        ring.free.arrive(0)
        ring.free.arrive(1)
        s = work.finish_scores(s, tiles.first + tiles.begin * 128, bounds, KV_LOAD)
        p, m0, a0 = softmax.step(s, m, work_tile.problem.scale, softmax.RESCALE_ABOVE)
        sums = gl.sum(p, 1)
        pb = p.to(memory.q.dtype)
        publish(pb, m0, a0, memory, 0)
        pa = gl.convert_layout(pb, LA)
        phase = 0
        for step in range(tiles.begin, tiles.end):
            more = step + 1 < tiles.end
            l = l * a0 + sums
            o = softmax.rescale(o, a0)
            ring.wait(Stage(2, 0))
            o = warpgroup_mma(pa, kv.index(2), o, is_async=True)
            # Right's half of V0. This wait must precede the arrival: afterwards K0' could overwrite it, and the wait
            # hang.
            ring.wait(Stage(3, 0))
            o = warpgroup_mma_wait(num_outstanding=0, deps=(o,))
            ring.free.arrive(2)
            s = scores(memory, ring, 2, 1, step, more)
            m, a1 = published(memory, phase, 1, RS)
            l = l * a1
            o = o * gl.convert_layout(a1, RO)[:, None]  # never skipped: S is in flight
            ring.wait(Stage(0, 0))
            o = warpgroup_mma(memory.p.index(1), kv.index(0), o, is_async=True)
            s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
            ring.free.arrive(2, more)
            ring.free.arrive(3, more)
            s = work.finish_scores(s, tiles.first + step * 128 + 128, bounds, KV_LOAD)
            p, m0, a0 = softmax.step(s, m, work_tile.problem.scale, softmax.RESCALE_ABOVE)
            sums = softmax.pin(gl.sum(p, 1))
            pb = p.to(memory.q.dtype)
            o = warpgroup_mma_wait(num_outstanding=0, deps=(o,))
            ring.free.arrive(0)
            if more:
                publish(pb, m0, a0, memory, 0)
            pa = gl.convert_layout(pb, LA)
            phase = phase ^ 1
    return o, m, l


@gluon.jit
def right_steps(o, m, l, memory, ring, bounds, work_tile, KV_LOAD: gl.constexpr):
    """Process block 1 of each step and O[:, 256:]."""
    kv, tiles = ring.slots, work_tile.tiles
    RS: gl.constexpr = m.type.layout
    LA: gl.constexpr = gl.DotOperandLayout(0, o.type.layout, 2)
    phase = 0
    for step in range(tiles.begin, tiles.end):
        m0, a0 = published(memory, phase, 0, RS)
        o = softmax.rescale(o, a0)
        ring.wait(Stage(3, 0))
        o = warpgroup_mma(memory.p.index(0), kv.index(3), o, is_async=True)
        s = scores(memory, ring, 0, 1, step)
        o = warpgroup_mma_wait(num_outstanding=2, deps=(o,))
        ring.free.arrive(3)
        s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
        ring.free.arrive(0)
        ring.free.arrive(1)
        s = work.finish_scores(s, tiles.first + step * 128 + 64, bounds, KV_LOAD)
        p, m, a1 = softmax.step(s, m0, work_tile.problem.scale, softmax.RESCALE_ABOVE)
        l = softmax.pin(l * (a0 * a1) + gl.sum(p, 1))
        pb = p.to(memory.q.dtype)
        publish(pb, m, a1, memory, 1)
        ring.wait(Stage(1, 0))
        o = softmax.rescale(o, a1)
        o = warpgroup_mma(gl.convert_layout(pb, LA), kv.index(1), o, is_async=True)
        o = warpgroup_mma_wait(num_outstanding=0, deps=(o,))
        ring.free.arrive(1)
        phase = phase ^ 1
    return o, m, l


@gluon.jit
def half_role(
    memory,
    tile_row,
    ring,
    work_tile,
    HALF: gl.constexpr,
    SPLIT: gl.constexpr,
    KV_LOAD: gl.constexpr,
    SIGN: gl.constexpr,
):
    """Run left (HALF 0) or right (1)."""
    bounds = begin_half(memory, tile_row, work_tile, HALF, KV_LOAD, SIGN)
    o, m, l = nothing_yet()
    if HALF == 0:
        o, m, l = left_steps(o, m, l, memory, ring, bounds, work_tile, KV_LOAD)
    else:
        o, m, l = right_steps(o, m, l, memory, ring, bounds, work_tile, KV_LOAD)
    end_half(o, m, l, memory, tile_row, work_tile, HALF, SPLIT)
