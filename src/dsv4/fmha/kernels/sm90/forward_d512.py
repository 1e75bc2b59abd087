"""FMHA forward for head dim 512 on sm_90a: 64 packed query rows per CTA, O [64, 512] shared by two warpgroups.

O in fp32 is half of the register file, so each warpgroup owns one half of its columns, left and right. Keys are
processed in blocks of 64, two per step: left computes the scores of block 0, right those of block 1, and they exchange
P, the running maximum and the rescaling factor through shared memory. Role chart if k is v (MQA latents), and a block
is loaded once and read as K and as V; forward_d512_kv.py has the roles for a separate v::

    load   1 warp   | blocks of the next step ...
    left   4 warps  | S0 = Q K0^T | softmax 0 -> P0 | O_L += P0 V0_L |           wait P1 | O_L += P1 V1_L
    right  4 warps  | S1 = Q K1^T |        wait P0 | O_R += P0 V0_R | softmax 1 -> P1    | O_R += P1 V1_R

While one computes a softmax, the other keeps the tensor cores busy.

shared memory   bytes               holds
q               2 x 32768           [64, 256] each: columns 0-255 and 256-511 of Q; the output rows leave through it
kv              4 x 32768           [64, 256] each: block b, half h at 2b + h
p               2 x 8192            [64, 64] each: P of block 0 and 1
stat            6 x 256             fp32 per row: maximum after block 0, after block 1; factor 0, 1; sums of left, right
barriers        8 each

barrier         arrives                      count       waits          means
q_asked         left, right                  2           load           the loads of Q are in flight
q_ready         left, right                  2           left, right    both halves of Q are in q
ready[2b + h]   load: TMA bytes, or itself   1 + bytes   left, right    half h of block b is in kv
free[2b + h]    owner of half h              1           load           O half h has used block b: refill its half h
p_ready[b]      the block's owner            1           the other      P, maximum and factor of block b are written
sum_ready[h]    owner of half h              1           the other      its row sums are written; it no longer reads q
landed          load: TMA bytes              1 + bytes   load           a tile with rows of others, to be zeroed in part

Only the owner of half h frees it: it updates O after p_ready of that block, that is, after the block's owner has
computed S from both halves. P0 is overwritten in the next step only after right's O_R += P0 V0_R is complete, which
free[1] implies, and ready[1] after it. P1 is overwritten after p_ready[0] of the next step, before which left has
waited for O_L += P1 V1_L."""

from dsv4.fmha.kernels import loads
from dsv4.fmha.kernels.e4m3_rows import in_codes
from dsv4.fmha.kernels.sm90 import forward_d512_kv, work
from dsv4.fmha.kernels.sm90.d512_halves import (
    begin_half,
    end_half,
    make_memory,
    nothing_yet,
    publish,
    published,
    scores,
)
from dsv4.kernels import softmax
from dsv4.kernels.compat import gl, gluon, warpgroup_mma, warpgroup_mma_wait
from dsv4.kernels.ring import Stage


@gluon.jit
def load_role(source, ring, landed, q_asked, tiles, KV_LOAD: gl.constexpr):
    landed_phase = 0
    phase = 1  # the first wait on an untouched barrier passes
    q_asked.wait(0, 0)  # otherwise the loads of Q would queue behind a whole ring of K
    for step in range(tiles.begin, tiles.end):
        for slot in gl.static_range(4):
            ring.acquire(Stage(slot, phase))
            row = tiles.first + step * 128 + slot // 2 * 64
            landed_phase = loads.fill_any(
                source.k_desc,
                source.k_rows,
                ring.slots.index(slot),
                ring.ready.at(slot),
                landed.at(0),
                landed_phase,
                source.where,
                row,
                slot % 2 * 256,
                64,
                256,
                KV_LOAD,
            )
        phase = phase ^ 1


@gluon.jit
def left_step(o, m, l, memory, ring, bounds, work_tile, phase, step, KV_LOAD: gl.constexpr):
    """Compute the softmax of block 0, then O[:, :256] with both blocks."""
    RS: gl.constexpr = m.type.layout
    RO: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    LA: gl.constexpr = gl.DotOperandLayout(0, o.type.layout, 2)
    s = scores(memory, ring, 0, phase, step)
    s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
    s = work.finish_scores(s, work_tile.tiles.first + step * 128, bounds, KV_LOAD)
    p, m0, a0 = softmax.step(s, m, work_tile.problem.scale)
    l = l * a0 + gl.sum(p, 1)
    pb = p.to(memory.q.dtype)
    publish(pb, m0, a0, memory, 0)
    o = o * gl.convert_layout(a0, RO)[:, None]
    o = warpgroup_mma(gl.convert_layout(pb, LA), ring.slots.index(0), o, is_async=True)
    # The slot is freed before the wait for P1; otherwise all later loads would wait as well.
    o = warpgroup_mma_wait(num_outstanding=0, deps=(o,))
    ring.free.arrive(0)
    m, a1 = published(memory, phase, 1, RS)
    l = l * a1
    ring.wait(Stage(2, phase))
    o = o * gl.convert_layout(a1, RO)[:, None]
    o = warpgroup_mma(memory.p.index(1), ring.slots.index(2), o, is_async=True)
    o = warpgroup_mma_wait(num_outstanding=0, deps=(o,))
    ring.free.arrive(2)
    return o, m, l


@gluon.jit
def right_step(o, l, memory, ring, bounds, work_tile, phase, step, KV_LOAD: gl.constexpr):
    """Compute O[:, 256:] with block 0 while S of block 1 is computed, then its softmax, then O with block 1."""
    RS: gl.constexpr = l.type.layout
    RO: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    LA: gl.constexpr = gl.DotOperandLayout(0, o.type.layout, 2)
    s = scores(memory, ring, 2, phase, step)
    # Both groups of S stay in flight. ptxas does not see the wait at the loop's end and would wait for all here.
    o = warpgroup_mma_wait(num_outstanding=2, deps=(o,))
    m0, a0 = published(memory, phase, 0, RS)
    o = o * gl.convert_layout(a0, RO)[:, None]
    ring.wait(Stage(1, phase))
    o = warpgroup_mma(memory.p.index(0), ring.slots.index(1), o, is_async=True)
    s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
    s = work.finish_scores(s, work_tile.tiles.first + step * 128 + 64, bounds, KV_LOAD)
    p, m, a1 = softmax.step(s, m0, work_tile.problem.scale)
    l = softmax.pin(l * (a0 * a1) + gl.sum(p, 1))
    pb = p.to(memory.q.dtype)
    publish(pb, m, a1, memory, 1)
    o = warpgroup_mma_wait(num_outstanding=0, deps=(o,))
    ring.free.arrive(1)
    o = o * gl.convert_layout(a1, RO)[:, None]
    o = warpgroup_mma(gl.convert_layout(pb, LA), ring.slots.index(3), o, is_async=True)
    o = warpgroup_mma_wait(num_outstanding=0, deps=(o,))
    ring.free.arrive(3)
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
    phase = 0
    for step in range(work_tile.tiles.begin, work_tile.tiles.end):
        if HALF == 0:
            o, m, l = left_step(o, m, l, memory, ring, bounds, work_tile, phase, step, KV_LOAD)
        else:
            o, m, l = right_step(o, l, memory, ring, bounds, work_tile, phase, step, KV_LOAD)
        phase = phase ^ 1
    end_half(o, m, l, memory, tile_row, work_tile, HALF, SPLIT)


@gluon.jit
def fmha_forward_d512(
    tensors,
    k_desc,
    v_desc,
    sizes,
    strides,
    opts,
    KV_LOAD: gl.constexpr,
    SIGN: gl.constexpr,
    SAME_KV: gl.constexpr,
    SPLIT: gl.constexpr,
    RIGHT_REGS: gl.constexpr,
    PRODUCER_REGS: gl.constexpr,
    LOAD_WARPS: gl.constexpr = 1,
):
    work.clear_rest(tensors, sizes, strides, opts, 512, KV_LOAD, SPLIT)
    coord = work.block_coord(tensors, sizes, opts, loads.box_rows(k_desc), 64, 128, KV_LOAD)
    tile_row = coord.tile_row
    if tile_row < coord.rows:
        memory, ring, landed = make_memory(tensors.q_ptr.dtype.element_ty, KV_LOAD, in_codes(tensors.k_ptr.dtype))
        work_tile, source = work.make_work_tile(coord, tensors, sizes, strides, opts, k_desc, v_desc, KV_LOAD)
        if SAME_KV:
            gl.warp_specialize(
                [
                    (half_role, (memory, tile_row, ring, work_tile, 0, SPLIT, KV_LOAD, SIGN)),
                    (half_role, (memory, tile_row, ring, work_tile, 1, SPLIT, KV_LOAD, SIGN)),
                    (load_role, (source, ring, landed, memory.q_asked, work_tile.tiles, KV_LOAD)),
                ],
                [4, LOAD_WARPS],
                [RIGHT_REGS, PRODUCER_REGS],
            )
        else:
            gl.warp_specialize(
                [
                    (forward_d512_kv.half_role, (memory, tile_row, ring, work_tile, 0, SPLIT, KV_LOAD, SIGN)),
                    (forward_d512_kv.half_role, (memory, tile_row, ring, work_tile, 1, SPLIT, KV_LOAD, SIGN)),
                    (forward_d512_kv.load_role, (source, ring, landed, memory.q_asked, work_tile.tiles, KV_LOAD)),
                ],
                [4, LOAD_WARPS],
                [RIGHT_REGS, PRODUCER_REGS],
            )
