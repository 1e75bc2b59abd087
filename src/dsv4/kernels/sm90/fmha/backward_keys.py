"""dK and dV of attention on sm_90a, head dims 64 and 128: a CTA owns 128 keys and goes through the rows. No atomics.

    S^T = K Q^T    P^T = 2^(S^T scale - lse2) where seen    dP^T = V dO^T    dS^T = P^T (dP^T - delta)
    dV += P^T dO   dK += dS^T Q

dQ is backward_dq.py's: seven products in all instead of five. Role chart of a step, 64 packed rows::

    load    1 warp  | Q, dO, lse2, delta of the next rows
    left    4 warps | keys 0-63:  P, dP under it | dV under way | dS | dK, and S of the next rows
    right   4 warps | keys 64-127: the same; while one takes the exponential the other keeps the tensor cores busy

shared memory   bytes               holds
k, v            2 x 128 x D x 2     [2, 64, D] each: the keys of left and right; v in the end dV, then dK
q, dout         SLOTS x 64 x D x 2  [SLOTS, 64, D] each
stat            SLOTS x 512         [SLOTS x 2, 64]: lse2 and delta of the rows, fp32
barriers        8 each

barrier       arrives            count       waits          means
kv_ready      load: TMA bytes    1 + bytes   left, right    K and V are there
ready[slot]   load: TMA bytes    1 + bytes   left, right    Q, dO and stat are in the slot
free[slot]    left, right        2           load           both have used it

Tensors are [batch, KV head, packed row, column] as in backward_scores.py. TMA fills what lies past the end with zeros;
P is 0 there, because of lse2 or of the mask.
"""

from dsv4.kernels.compat import (
    Value,
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    store_wait,
    tma_load,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from dsv4.kernels.shared.fmha.backward_arguments import Operands, Scales, Share, Sizes, Terms
from dsv4.kernels.shared.fmha.tiles import end_key, first_key
from dsv4.kernels.shared.opaque import zero


@aggregate
class Memory:
    k: Value
    v: Value
    q: Value
    dout: Value
    stat: Value


@aggregate
class Barriers:
    kv_ready: Value
    ready: Value
    free: Value


@gluon.constexpr_function
def accumulator(columns):
    """[64, columns] of a warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def next_slot(slot, phase, SLOTS: gl.constexpr):
    slot = slot + 1
    phase = gl.where(slot == SLOTS, phase ^ 1, phase)
    return gl.where(slot == SLOTS, 0, slot), phase


@gluon.jit
def rows_of(key, sizes):
    """[first, end) of the tiles of 64 packed rows that see some of 128 keys."""
    offset = sizes.keys - sizes.tokens
    first = gl.maximum(key - offset - sizes.right, 0)
    end = gl.minimum(gl.minimum(key + 128, sizes.keys) - offset + sizes.left, sizes.tokens)
    return first * sizes.group // 64 * 64, end * sizes.group


@gluon.jit
def load_role(operands, memory, barriers, terms, share, sizes, D: gl.constexpr, SLOTS: gl.constexpr):
    batch, head = share.batch, share.head
    PANELS: gl.constexpr = D // 64
    BOX: gl.constexpr = operands.q_desc.layout
    ROW: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    mbarrier.expect(barriers.kv_ready, 2 * 128 * D * 2)
    for half in gl.static_range(2):
        k_panels = reinterpret(memory.k.index(half), [PANELS, 1, 1, 64, 64], BOX)
        v_panels = reinterpret(memory.v.index(half), [PANELS, 1, 1, 64, 64], BOX)
        for panel in gl.static_range(PANELS):
            place = [batch, head, share.own + half * 64, panel * 64]
            tma_load(operands.k_desc, place, barriers.kv_ready, k_panels.index(panel))
            tma_load(operands.v_desc, place, barriers.kv_ready, v_panels.index(panel))
    first, end = rows_of(share.own, sizes)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)  # the first wait on an untouched barrier passes
    for row in range(first, end, 64):
        number = row + gl.arange(0, 64, layout=ROW)
        lse2 = gl.load(terms.lse2_ptr + number, mask=number < sizes.rows, other=float("inf"))
        delta = gl.load(terms.delta_ptr + number, mask=number < sizes.rows, other=0.0)
        mbarrier.wait(barriers.free.index(slot), phase)
        memory.stat.index(slot * 2).store(lse2)
        memory.stat.index(slot * 2 + 1).store(delta)
        ready = barriers.ready.index(slot)
        mbarrier.expect(ready, 2 * 64 * D * 2)
        q_panels = reinterpret(memory.q.index(slot), [PANELS, 1, 1, 64, 64], BOX)
        dout_panels = reinterpret(memory.dout.index(slot), [PANELS, 1, 1, 64, 64], BOX)
        for panel in gl.static_range(PANELS):
            tma_load(operands.q_desc, [batch, head, row, panel * 64], ready, q_panels.index(panel))
            tma_load(operands.dout_desc, [batch, head, row, panel * 64], ready, dout_panels.index(panel))
        slot, phase = next_slot(slot, phase, SLOTS)


@gluon.jit
def scores(x, y, LS: gl.constexpr):
    """x [64 keys, D] times y [64 rows, D], transposed; under way."""
    s = gl.zeros([64, 64], gl.float32, LS)
    return warpgroup_mma(x, y.permute((1, 0)), s, use_acc=False, is_async=True)


@gluon.jit
def visible(p, row, key, sizes, LS: gl.constexpr):
    """P^T [64 keys, 64 rows], 0 where the row does not see the key."""
    tokens, keys, group, left, right = sizes.tokens, sizes.keys, sizes.group, sizes.left, sizes.right
    last = gl.minimum((row + 63) // group, tokens - 1)
    if (key < first_key(last, tokens, keys, left)) | (key + 64 > end_key(row // group, tokens, keys, right)):
        token = (row + gl.arange(0, 64, layout=gl.SliceLayout(0, LS))) // group
        number = key + gl.arange(0, 64, layout=gl.SliceLayout(1, LS))
        apart = (number - (keys - tokens))[:, None] - token[None, :]
        p = gl.where((apart >= -left) & (apart <= right) & (number < keys)[:, None], p, 0.0)
    return p


@gluon.jit
def step(s, dk, dv, memory, barriers, row, key, slot, phase, turn, sizes, scales, ds_scale,
         W: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr, SCALED: gl.constexpr, MORE: gl.constexpr):  # fmt: skip
    """64 rows, S of which is under way -> S of the next 64 with MORE. turn: number of the step."""
    k, v, q, dout, stat = memory.k, memory.v, memory.q, memory.dout, memory.stat
    LS: gl.constexpr = accumulator(64)
    LA: gl.constexpr = gl.DotOperandLayout(0, accumulator(D), 2)
    lse2 = stat.index(slot * 2).load(gl.SliceLayout(0, LS))
    s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
    opaque = zero(turn)  # else the wgmma descriptors of fixed places would be kept in registers
    dp = scores(v.index(opaque + W), dout.index(slot), LS)
    p = gl.exp2(s * scales.s - lse2[None, :])
    p = visible(p, row, key, sizes, LS)
    if SCALED:
        p16 = (p * scales.p).to(q.dtype)
    else:
        p16 = p.to(q.dtype)
    dv = warpgroup_mma(gl.convert_layout(p16, LA), dout.index(slot), dv, is_async=True)
    dp = warpgroup_mma_wait(num_outstanding=1, deps=(dp,))
    delta = stat.index(slot * 2 + 1).load(gl.SliceLayout(0, LS))
    d = p * (dp - delta[None, :])
    if SCALED:
        d = d * ds_scale
    d16 = d.to(q.dtype)
    dk = warpgroup_mma(gl.convert_layout(d16, LA), q.index(slot), dk, is_async=True)
    dv = warpgroup_mma_wait(num_outstanding=1, deps=(dv,))  # P's registers are free
    after, after_phase = next_slot(slot, phase, SLOTS)
    if MORE:
        mbarrier.wait(barriers.ready.index(after), after_phase)
        s = scores(k.index(opaque + W), q.index(after), LS)
    NEWER: gl.constexpr = 1 if MORE else 0
    dk = warpgroup_mma_wait(num_outstanding=NEWER, deps=(dk,))
    mbarrier.arrive(barriers.free.index(slot), count=1)
    return s, dk, dv, after, after_phase


@gluon.jit
def send(x, tile, desc, share, row, D: gl.constexpr):
    """x [64, D] to rows from `row` on, by way of the tile."""
    tile.store(x.to(tile.dtype))
    fence_async_shared()
    BOX: gl.constexpr = desc.layout
    panels = reinterpret(tile, [D // 64, 1, 1, 64, 64], BOX)
    for panel in gl.static_range(D // 64):
        tma_store(desc, [share.batch, share.head, row, panel * 64], panels.index(panel))
    store_wait(0)


@gluon.jit
def gradient_role(memory, barriers, dk_desc, dv_desc, share, sizes, scales,
                  W: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr, SCALED: gl.constexpr):  # fmt: skip
    """dK and dV of 64 keys."""
    LS: gl.constexpr = accumulator(64)
    dk = gl.zeros([64, D], gl.float32, accumulator(D))
    dv = gl.zeros([64, D], gl.float32, accumulator(D))
    ds_scale = 1.0
    if SCALED:
        ds_scale = gl.load(scales.ds_ptr)
    first, end = rows_of(share.own, sizes)
    mine = share.own + 64 * W
    mbarrier.wait(barriers.kv_ready, 0)
    if first < end:
        slot = gl.to_tensor(0)
        phase = gl.to_tensor(0)
        mbarrier.wait(barriers.ready.index(0), 0)
        s = scores(memory.k.index(W), memory.q.index(0), LS)
        steps = (end - first + 63) // 64
        for turn in range(0, steps - 1):
            s, dk, dv, slot, phase = step(s, dk, dv, memory, barriers, first + turn * 64, mine, slot, phase, turn,
                                          sizes, scales, ds_scale, W, D, SLOTS, SCALED, True)  # fmt: skip
        _, dk, dv, _, _ = step(s, dk, dv, memory, barriers, first + (steps - 1) * 64, mine, slot, phase, steps - 1,
                               sizes, scales, ds_scale, W, D, SLOTS, SCALED, False)  # fmt: skip
    scale = scales.gradient
    if SCALED:
        dv = dv / scales.p
        scale = scale / ds_scale
    send(dv, memory.v.index(W), dv_desc, share, mine, D)
    send(dk * scale, memory.v.index(W), dk_desc, share, mine, D)


@gluon.jit(do_not_specialize=["scale2", "scale", "p_scale", "rows", "tokens", "keys", "group", "left", "right",
                              "kv_heads"])  # fmt: skip
def backward_keys(lse2_ptr, delta_ptr, ds_scale_ptr, q_desc, k_desc, dout_desc, v_desc, dk_desc, dv_desc, scale2, scale,
                  p_scale, rows, tokens, keys, group, left, right, kv_heads,
                  D: gl.constexpr, SLOTS: gl.constexpr, SCALED: gl.constexpr, GRADIENT_REGS: gl.constexpr,
                  LOAD_REGS: gl.constexpr):  # fmt: skip
    """One program: 128 keys of a pair of sequence and KV head. lse2, delta [pairs, rows]. p_scale, ds_scale: what P and
    dS are multiplied by in fp16."""
    DTYPE: gl.constexpr = q_desc.dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    k = gl.allocate_shared_memory(DTYPE, [2, 64, D], TILE)
    v = gl.allocate_shared_memory(DTYPE, [2, 64, D], TILE)
    q = gl.allocate_shared_memory(DTYPE, [SLOTS, 64, D], TILE)
    dout = gl.allocate_shared_memory(DTYPE, [SLOTS, 64, D], TILE)
    stat = gl.allocate_shared_memory(gl.float32, [SLOTS * 2, 64], FLAT)
    kv_ready = gl.allocate_shared_memory(gl.int64, [1], BAR)
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BAR)
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BAR)
    mbarrier.init(kv_ready, count=1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    tiles = (keys + 127) // 128
    pair = gl.program_id(0) // tiles
    key = (gl.program_id(0) - pair * tiles) * 128
    share = Share(pair // kv_heads, pair % kv_heads, key)
    sizes = Sizes(rows, tokens, keys, group, left, right)
    operands = Operands(q_desc, k_desc, dout_desc, v_desc)
    memory = Memory(k, v, q, dout, stat)
    barriers = Barriers(kv_ready, ready, free)
    terms = Terms(lse2_ptr + pair.to(gl.int64) * rows, delta_ptr + pair.to(gl.int64) * rows)
    scales = Scales(scale2, p_scale, scale, ds_scale_ptr)
    gl.warp_specialize([
        (gradient_role, (memory, barriers, dk_desc, dv_desc, share, sizes, scales, 0, D, SLOTS, SCALED)),
        (gradient_role, (memory, barriers, dk_desc, dv_desc, share, sizes, scales, 1, D, SLOTS, SCALED)),
        (load_role, (operands, memory, barriers, terms, share, sizes, D, SLOTS)),
    ], [4, 1], [GRADIENT_REGS, LOAD_REGS])  # fmt: skip
