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

from dsv4.kernels.compat import (
    Value,
    aggregate,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from dsv4.kernels.shared.fmha.backward_arguments import Operands, Scales, Share, Sizes, Terms
from dsv4.kernels.shared.fmha.tiles import end_key, first_key
from dsv4.kernels.shared.opaque import zero
from dsv4.kernels.sm90.fmha.backward_keys import accumulator, next_slot, send


@aggregate
class Memory:
    q: Value
    dout: Value
    k: Value
    v: Value


@aggregate
class Barriers:
    q_ready: Value
    ready: Value
    free: Value


@gluon.jit
def keys_of(row, sizes):
    """[first, end) of the tiles of 128 keys that some of 128 packed rows see."""
    tokens, keys = sizes.tokens, sizes.keys
    first = first_key(row // sizes.group, tokens, keys, sizes.left)
    end = end_key(gl.minimum((row + 127) // sizes.group, tokens - 1), tokens, keys, sizes.right)
    return first // 128 * 128, end


@gluon.jit
def load_role(operands, memory, barriers, share, sizes, D: gl.constexpr, SLOTS: gl.constexpr):
    batch, head = share.batch, share.head
    PANELS: gl.constexpr = D // 64
    BOX: gl.constexpr = operands.q_desc.layout
    mbarrier.expect(barriers.q_ready, 2 * 128 * D * 2)
    for half in gl.static_range(2):
        q_panels = reinterpret(memory.q.index(half), [PANELS, 1, 1, 64, 64], BOX)
        dout_panels = reinterpret(memory.dout.index(half), [PANELS, 1, 1, 64, 64], BOX)
        for panel in gl.static_range(PANELS):
            place = [batch, head, share.own + half * 64, panel * 64]
            tma_load(operands.q_desc, place, barriers.q_ready, q_panels.index(panel))
            tma_load(operands.dout_desc, place, barriers.q_ready, dout_panels.index(panel))
    first, end = keys_of(share.own, sizes)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)  # the first wait on an untouched barrier passes
    for key in range(first, end, 128):
        mbarrier.wait(barriers.free.index(slot), phase)
        ready = barriers.ready.index(slot)
        mbarrier.expect(ready, 2 * 128 * D * 2)
        k_panels = reinterpret(memory.k.index(slot), [PANELS, 1, 1, 128, 64], BOX)
        v_panels = reinterpret(memory.v.index(slot), [PANELS, 1, 1, 128, 64], BOX)
        for panel in gl.static_range(PANELS):
            tma_load(operands.k_desc, [batch, head, key, panel * 64], ready, k_panels.index(panel))
            tma_load(operands.v_desc, [batch, head, key, panel * 64], ready, v_panels.index(panel))
        slot, phase = next_slot(slot, phase, SLOTS)


@gluon.jit
def visible(p, row, key, sizes, LS: gl.constexpr):
    """P [64 rows, 128 keys], 0 where the row does not see the key."""
    tokens, keys, group, left, right = sizes.tokens, sizes.keys, sizes.group, sizes.left, sizes.right
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
def step(s, dq, memory, barriers, row, key, slot, phase, turn, lse2, delta, sizes, scales, ds_scale,
         W: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr, SCALED: gl.constexpr, MORE: gl.constexpr):  # fmt: skip
    """128 keys, S of which is under way -> S of the next 128 with MORE."""
    q, dout, k, v = memory.q, memory.dout, memory.k, memory.v
    LS: gl.constexpr = accumulator(128)
    LA: gl.constexpr = gl.DotOperandLayout(0, accumulator(D), 2)
    opaque = zero(turn)  # else the wgmma descriptors of fixed places would be kept in registers
    s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
    dp = scores(dout.index(opaque + W), v.index(slot), LS)
    p = gl.exp2(s * scales.s - lse2[:, None])
    p = visible(p, row, key, sizes, LS)
    dp = warpgroup_mma_wait(num_outstanding=0, deps=(dp,))
    d = p * (dp - delta[:, None])
    if SCALED:
        d = d * ds_scale
    dq = warpgroup_mma(gl.convert_layout(d.to(q.dtype), LA), k.index(slot), dq, is_async=True)
    after, after_phase = next_slot(slot, phase, SLOTS)
    if MORE:
        mbarrier.wait(barriers.ready.index(after), after_phase)
        s = scores(q.index(opaque + W), k.index(after), LS)
        dq = warpgroup_mma_wait(num_outstanding=1, deps=(dq,))
    else:
        dq = warpgroup_mma_wait(num_outstanding=0, deps=(dq,))
    mbarrier.arrive(barriers.free.index(slot), count=1)
    return s, dq, after, after_phase


@gluon.jit
def dq_role(memory, barriers, dq_desc, terms, share, sizes, scales,
            W: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr, SCALED: gl.constexpr):  # fmt: skip
    """dQ of 64 packed rows."""
    LS: gl.constexpr = accumulator(128)
    row = share.own + 64 * W
    number = row + gl.arange(0, 64, layout=gl.SliceLayout(1, LS))
    lse2 = gl.load(terms.lse2_ptr + number, mask=number < sizes.rows, other=float("inf"))
    delta = gl.load(terms.delta_ptr + number, mask=number < sizes.rows, other=0.0)
    ds_scale = 1.0
    if SCALED:
        ds_scale = gl.load(scales.ds_ptr)
    dq = gl.zeros([64, D], gl.float32, accumulator(D))
    first, end = keys_of(share.own, sizes)
    mbarrier.wait(barriers.q_ready, 0)
    if first < end:
        slot = gl.to_tensor(0)
        phase = gl.to_tensor(0)
        mbarrier.wait(barriers.ready.index(0), 0)
        s = scores(memory.q.index(W), memory.k.index(0), LS)
        steps = (end - first + 127) // 128
        for turn in range(0, steps - 1):
            s, dq, slot, phase = step(s, dq, memory, barriers, row, first + turn * 128, slot, phase, turn, lse2, delta,
                                      sizes, scales, ds_scale, W, D, SLOTS, SCALED, True)  # fmt: skip
        _, dq, _, _ = step(s, dq, memory, barriers, row, first + (steps - 1) * 128, slot, phase, steps - 1, lse2, delta,
                           sizes, scales, ds_scale, W, D, SLOTS, SCALED, False)  # fmt: skip
    scale = scales.gradient
    if SCALED:
        scale = scale / ds_scale
    send(dq * scale, memory.q.index(W), dq_desc, share, row, D)


@gluon.jit(do_not_specialize=["scale2", "scale", "rows", "tokens", "keys", "group", "left", "right", "kv_heads"])
def backward_dq(lse2_ptr, delta_ptr, ds_scale_ptr, q_desc, k_desc, dout_desc, v_desc, dq_desc, scale2, scale, rows,
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
    share = Share(pair // kv_heads, pair % kv_heads, row)
    sizes = Sizes(rows, tokens, keys, group, left, right)
    operands = Operands(q_desc, k_desc, dout_desc, v_desc)
    memory = Memory(q, dout, k, v)
    barriers = Barriers(q_ready, ready, free)
    terms = Terms(lse2_ptr + pair.to(gl.int64) * rows, delta_ptr + pair.to(gl.int64) * rows)
    scales = Scales(scale2, 1.0, scale, ds_scale_ptr)
    gl.warp_specialize([
        (dq_role, (memory, barriers, dq_desc, terms, share, sizes, scales, 0, D, SLOTS, SCALED)),
        (dq_role, (memory, barriers, dq_desc, terms, share, sizes, scales, 1, D, SLOTS, SCALED)),
        (load_role, (operands, memory, barriers, share, sizes, D, SLOTS)),
    ], [4, 1], [DQ_REGS, LOAD_REGS])  # fmt: skip
