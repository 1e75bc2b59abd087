"""dQ of attention on sm_90a by itself, head dims 64 and 128: a CTA owns 128 rows and goes through the keys.

    S = Q K^T    P = 2^(S scale - lse2) where seen    dP = dO V^T    dS = P (dP - delta)    dQ += dS K

dK and dV are backward_keys.py's: seven products in all instead of five, and no atomics. Role chart::

    load    1 warp  | Q, dO | K, V of the next keys ...
    left    4 warps | rows 0-63:  S | dP, P under it | dS | dQ and the next S
    right   4 warps | rows 64-127: the same; while one takes the exponential the other keeps the tensor cores busy

shared memory   bytes                holds
q, dout         2 x 64 x D x 2       [2, 64, D] each: rows of left and right; q in the end dQ
k, v            SLOTS x 128 x D x 2  [SLOTS, 128, D] each
barriers        8 each

barrier         arrives            count       waits          means
q_ready         load: TMA bytes    1 + bytes   left, right    Q and dO are there
ready[slot]     load: TMA bytes    1 + bytes   left, right    K and V are in the slot
free[slot]      left, right        2           load           both have used it
"""

from dsv4.kernels.compat import gl, gluon, mbarrier, reinterpret, tma_load, warpgroup_mma, warpgroup_mma_wait
from dsv4.kernels.shared.fmha.tiles import end_key, first_key
from dsv4.kernels.shared.opaque import zero
from dsv4.kernels.sm90.fmha.backward_keys import accumulator, next_slot, send


@gluon.jit
def keys_of(row, sizes):
    """[first, end) of the tiles of 128 keys that some of 128 packed rows see."""
    rows, tokens, keys, group, left, right = sizes
    first = first_key(row // group, tokens, keys, left)
    end = end_key(gl.minimum((row + 127) // group, tokens - 1), tokens, keys, right)
    return first // 128 * 128, end


@gluon.jit
def load_role(descriptors, smem, barriers, where, row, sizes, D: gl.constexpr, SLOTS: gl.constexpr):
    q_desc, k_desc, dout_desc, v_desc = descriptors
    q, dout, k, v = smem
    q_ready, ready, free = barriers
    batch, head = where
    PANELS: gl.constexpr = D // 64
    BOX: gl.constexpr = q_desc.layout
    mbarrier.expect(q_ready, 2 * 128 * D * 2)
    for half in gl.static_range(2):
        q_panels = reinterpret(q.index(half), [PANELS, 1, 1, 64, 64], BOX)
        dout_panels = reinterpret(dout.index(half), [PANELS, 1, 1, 64, 64], BOX)
        for panel in gl.static_range(PANELS):
            place = [batch, head, row + half * 64, panel * 64]
            tma_load(q_desc, place, q_ready, q_panels.index(panel))
            tma_load(dout_desc, place, q_ready, dout_panels.index(panel))
    first, end = keys_of(row, sizes)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)  # the first wait on an untouched barrier passes
    for key in range(first, end, 128):
        mbarrier.wait(free.index(slot), phase)
        mbarrier.expect(ready.index(slot), 2 * 128 * D * 2)
        k_panels = reinterpret(k.index(slot), [PANELS, 1, 1, 128, 64], BOX)
        v_panels = reinterpret(v.index(slot), [PANELS, 1, 1, 128, 64], BOX)
        for panel in gl.static_range(PANELS):
            tma_load(k_desc, [batch, head, key, panel * 64], ready.index(slot), k_panels.index(panel))
            tma_load(v_desc, [batch, head, key, panel * 64], ready.index(slot), v_panels.index(panel))
        slot, phase = next_slot(slot, phase, SLOTS)


@gluon.jit
def visible(p, row, key, sizes, LS: gl.constexpr):
    """P [64 rows, 128 keys], 0 where the row does not see the key."""
    rows, tokens, keys, group, left, right = sizes
    last = gl.minimum((row + 63) // group, tokens - 1)
    if (key < first_key(last, tokens, keys, left)) | (key + 128 > end_key(row // group, tokens, keys, right)):
        token = (row + gl.arange(0, 64, layout=gl.SliceLayout(1, LS))) // group
        number = key + gl.arange(0, 128, layout=gl.SliceLayout(0, LS))
        apart = number[None, :] - (token + (keys - tokens))[:, None]
        p = gl.where((apart >= -left) & (apart <= right) & (number < keys)[None, :], p, 0.0)
    return p


@gluon.jit
def scores(q, k, LS: gl.constexpr):
    """Q [64, D] times K [128, D], transposed; under way."""
    s = gl.zeros([64, 128], gl.float32, LS)
    return warpgroup_mma(q, k.permute((1, 0)), s, use_acc=False, is_async=True)


@gluon.jit
def step(s, dq, smem, barriers, row, key, slot, phase, turn, stats, sizes, scales,
         W: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr, SCALED: gl.constexpr, MORE: gl.constexpr):  # fmt: skip
    """128 keys, S of which is under way -> S of the next 128 with MORE."""
    q, dout, k, v = smem
    q_ready, ready, free = barriers
    lse2, delta = stats
    scale2, ds_scale = scales
    LS: gl.constexpr = accumulator(128)
    LA: gl.constexpr = gl.DotOperandLayout(0, accumulator(D), 2)
    opaque = zero(turn)  # else the wgmma descriptors of fixed places would be kept in registers
    s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
    dp = scores(dout.index(opaque + W), v.index(slot), LS)
    p = gl.exp2(s * scale2 - lse2[:, None])
    p = visible(p, row, key, sizes, LS)
    dp = warpgroup_mma_wait(num_outstanding=0, deps=(dp,))
    d = p * (dp - delta[:, None])
    if SCALED:
        d = d * ds_scale
    dq = warpgroup_mma(gl.convert_layout(d.to(q.dtype), LA), k.index(slot), dq, is_async=True)
    after, after_phase = next_slot(slot, phase, SLOTS)
    if MORE:
        mbarrier.wait(ready.index(after), after_phase)
        s = scores(q.index(opaque + W), k.index(after), LS)
        dq = warpgroup_mma_wait(num_outstanding=1, deps=(dq,))
    else:
        dq = warpgroup_mma_wait(num_outstanding=0, deps=(dq,))
    mbarrier.arrive(free.index(slot), count=1)
    return s, dq, after, after_phase


@gluon.jit
def dq_role(smem, barriers, dq_desc, stats, where, tile_row, sizes, scales,
            W: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr, SCALED: gl.constexpr):  # fmt: skip
    q, dout, k, v = smem
    q_ready, ready, free = barriers
    lse2_ptr, delta_ptr = stats
    scale2, scale, ds_scale_ptr = scales
    batch, head = where
    LS: gl.constexpr = accumulator(128)
    row = tile_row + 64 * W
    number = row + gl.arange(0, 64, layout=gl.SliceLayout(1, LS))
    there = number < sizes[0]
    terms = (gl.load(lse2_ptr + number, mask=there, other=float("inf")),
             gl.load(delta_ptr + number, mask=there, other=0.0))  # fmt: skip
    ds_scale = 1.0
    if SCALED:
        ds_scale = gl.load(ds_scale_ptr)
    factors = (scale2, ds_scale)
    dq = gl.zeros([64, D], gl.float32, accumulator(D))
    first, end = keys_of(tile_row, sizes)
    mbarrier.wait(q_ready, 0)
    if first < end:
        slot = gl.to_tensor(0)
        phase = gl.to_tensor(0)
        mbarrier.wait(ready.index(0), 0)
        s = scores(q.index(W), k.index(0), LS)
        steps = (end - first + 127) // 128
        for turn in range(0, steps - 1):
            s, dq, slot, phase = step(s, dq, smem, barriers, row, first + turn * 128, slot, phase, turn, terms, sizes,
                                      factors, W, D, SLOTS, SCALED, True)  # fmt: skip
        _, dq, _, _ = step(s, dq, smem, barriers, row, first + (steps - 1) * 128, slot, phase, steps - 1, terms, sizes,
                           factors, W, D, SLOTS, SCALED, False)  # fmt: skip
    if SCALED:
        scale = scale / ds_scale
    send(dq * scale, q.index(W), dq_desc, batch, head, row, D)


@gluon.jit(do_not_specialize=["scale2", "scale", "rows", "tokens", "keys", "group", "left", "right", "kv_heads"])
def backward_dq(q_desc, k_desc, dout_desc, v_desc, dq_desc, lse2_ptr, delta_ptr, ds_scale_ptr, scale2, scale, rows,
                tokens, keys, group, left, right, kv_heads,
                D: gl.constexpr, SLOTS: gl.constexpr, SCALED: gl.constexpr, DQ_REGS: gl.constexpr,
                LOAD_REGS: gl.constexpr):  # fmt: skip
    """One program: 128 packed rows of a pair of sequence and KV head. lse2, delta [pairs, rows]; dq [batch, KV head,
    packed row, column] like q."""
    DTYPE: gl.constexpr = q_desc.dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q = gl.allocate_shared_memory(DTYPE, [2, 64, D], TILE)
    dout = gl.allocate_shared_memory(DTYPE, [2, 64, D], TILE)
    k = gl.allocate_shared_memory(DTYPE, [SLOTS, 128, D], TILE)
    v = gl.allocate_shared_memory(DTYPE, [SLOTS, 128, D], TILE)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], BAR)
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BAR)
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BAR)
    mbarrier.init(q_ready, count=1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    tiles = (rows + 127) // 128
    pair = gl.program_id(0) // tiles
    row = (tiles - 1 - (gl.program_id(0) - pair * tiles)) * 128  # of causal ones the longest first
    where = (pair // kv_heads, pair % kv_heads)
    sizes = (rows, tokens, keys, group, left, right)
    smem = (q, dout, k, v)
    barriers = (q_ready, ready, free)
    stats = (lse2_ptr + pair.to(gl.int64) * rows, delta_ptr + pair.to(gl.int64) * rows)
    scales = (scale2, scale, ds_scale_ptr)
    gl.warp_specialize([
        (dq_role, (smem, barriers, dq_desc, stats, where, row, sizes, scales, 0, D, SLOTS, SCALED)),
        (dq_role, (smem, barriers, dq_desc, stats, where, row, sizes, scales, 1, D, SLOTS, SCALED)),
        (load_role, ((q_desc, k_desc, dout_desc, v_desc), smem, barriers, where, row, sizes, D, SLOTS)),
    ], [4, 1], [DQ_REGS, LOAD_REGS])  # fmt: skip
