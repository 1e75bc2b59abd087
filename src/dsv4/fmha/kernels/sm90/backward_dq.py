"""Only dQ of attention on sm_90a, head dims 64 and 128: a CTA owns 128 rows and streams the keys past them.

    S = Q K^T    P = 2^(S scale - lse2) if visible    dP = dO V^T    dS = P (dP - delta)    dQ += dS K

backward_keys.py computes dK and dV: together seven products instead of five, and no atomics. Role chart::

    load    1 warp  | Q, dO | K, V of the next keys ...
    left    4 warps | rows 0-63:  S | dP, P meanwhile | dS | dQ and the next S
    right   4 warps | rows 64-127: the same; while one computes exponentials the other keeps the tensor cores busy

shared memory   bytes                holds
q, dout         2 x 64 x D x 2       [2, 64, D] each: rows of left and right; q finally holds dQ
k, v            SLOTS x 128 x D x 2  [SLOTS, 128, D] each
barriers        8 each

barrier         arrives            count       waits          means
own_ready       load: TMA bytes    1 + bytes   left, right    Q and dO are there
ready[slot]     load: TMA bytes    1 + bytes   left, right    K and V are in the slot
free[slot]      left, right        2           load           both have used it

Keys before a window, which may hold NaN, are not read: the first tile of keys begins at the first row's window.
"""

from dsv4.fmha.kernels.backward_arguments import GradientTile, Terms
from dsv4.fmha.kernels.backward_sequences import sizes_of, tile_of
from dsv4.fmha.kernels.ragged import pair_of, place_of
from dsv4.fmha.kernels.scores import probabilities, score_gradient
from dsv4.fmha.kernels.sm90.backward_keys import accumulator, scores, send
from dsv4.fmha.kernels.sm90.gradient_loads import load_next, load_own
from dsv4.fmha.kernels.tiles import end_key, first_key
from dsv4.kernels.compat import Value, aggregate, gl, gluon, warpgroup_mma, warpgroup_mma_wait
from dsv4.kernels.opaque import zero
from dsv4.kernels.ring import Barriers, Ring, consumer_stage, init_barriers, new_barriers, new_ring, producer_stage


@aggregate
class Memory:
    q: Value
    dout: Value
    ring: Ring  # slots of K, and of v
    v: Value
    own_ready: Barriers


@gluon.jit
def keys_of(row, sizes):
    """Return [first, end) of the keys that some of 128 packed rows see."""
    tokens, keys = sizes.tokens, sizes.keys
    first = first_key(row // sizes.group, tokens, keys, sizes.left)
    end = end_key(gl.minimum((row + 127) // sizes.group, tokens - 1), tokens, keys, sizes.right)
    return first, end


@gluon.jit
def load_role(rows, keys, memory, own, sizes, D: gl.constexpr):
    load_own(rows, memory.q, memory.dout, memory.own_ready.at(0), own, D)
    first, end = keys_of(own, sizes)
    ring, stage = memory.ring, producer_stage()
    for key in range(first, end, 128):
        ring.acquire(stage)
        load_next(keys, ring.slot(stage), memory.v.index(stage.index), ring.ready_at(stage), key, D)
        stage = ring.next(stage)


@gluon.jit
def visible(p, row, key, sizes, LS: gl.constexpr):
    """Return P [64 rows, 128 keys], with 0 where the row does not see the key."""
    tokens, keys, group, left, right = sizes.tokens, sizes.keys, sizes.group, sizes.left, sizes.right
    last = gl.minimum((row + 63) // group, tokens - 1)
    if (key < first_key(last, tokens, keys, left)) | (key + 128 > end_key(row // group, tokens, keys, right)):
        token = (row + gl.arange(0, 64, layout=gl.SliceLayout(1, LS))) // group
        number = key + gl.arange(0, 128, layout=gl.SliceLayout(0, LS))
        apart = number[None, :] - (token + (keys - tokens))[:, None]
        p = gl.where((apart >= -left) & (apart <= right) & (number < keys)[None, :], p, 0.0)
    return p


@aggregate
class Role:
    """What does not change from step to step of a role."""

    memory: Memory
    row: Value  # the first of its 64
    lse2: Value
    delta: Value
    sizes: Value
    scales: Value
    ds_scale: Value


@gluon.jit
def step(s, dq, role, key, stage, turn, W: gl.constexpr, SCALED: gl.constexpr, MORE: gl.constexpr):
    """Process 128 keys, whose S is in flight; return S of the next 128 with MORE."""
    memory, scales = role.memory, role.scales
    q, dout, ring = memory.q, memory.dout, memory.ring
    D: gl.constexpr = q.shape[2]
    LS: gl.constexpr = accumulator(128)
    LA: gl.constexpr = gl.DotOperandLayout(0, accumulator(D), 2)
    opaque = zero(turn)  # otherwise ptxas keeps the wgmma descriptors of fixed places in registers
    s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
    dp = scores(dout.index(opaque + W), memory.v.index(stage.index))
    p, s = probabilities(s, role.lse2[:, None], scales.s)
    p = visible(p, role.row, key, role.sizes, LS)
    dp = warpgroup_mma_wait(num_outstanding=0, deps=(dp,))
    d = score_gradient(p, dp, role.delta[:, None], s, scales.s)
    if SCALED:
        d = d * role.ds_scale
    dq = warpgroup_mma(gl.convert_layout(d.to(q.dtype), LA), ring.slot(stage), dq, is_async=True)
    after = ring.next(stage)
    if MORE:
        ring.wait(after)
        s = scores(q.index(opaque + W), ring.slot(after))
        dq = warpgroup_mma_wait(num_outstanding=1, deps=(dq,))
    else:
        dq = warpgroup_mma_wait(num_outstanding=0, deps=(dq,))
    ring.release(stage)
    return s, dq, after


@gluon.jit
def dq_role(memory, dq_desc, place, terms, own, sizes, scales, W: gl.constexpr, D: gl.constexpr, SCALED: gl.constexpr):
    """Compute dQ of 64 packed rows."""
    LS: gl.constexpr = accumulator(128)
    row = own + 64 * W
    number = row + gl.arange(0, 64, layout=gl.SliceLayout(1, LS))
    lse2 = gl.load(terms.lse2_ptr + number, mask=number < sizes.rows, other=float("inf"))
    delta = gl.load(terms.delta_ptr + number, mask=number < sizes.rows, other=0.0)
    ds_scale = 1.0
    if SCALED:
        ds_scale = gl.load(scales.ds_ptr)
    dq = gl.zeros([64, D], gl.float32, accumulator(D))
    first, end = keys_of(own, sizes)
    memory.own_ready.wait(0, 0)
    if first < end:
        stage = consumer_stage()
        memory.ring.wait(stage)
        role = Role(memory, row, lse2, delta, sizes, scales, ds_scale)
        s = scores(memory.q.index(W), memory.ring.slot(stage))
        steps = (end - first + 127) // 128
        for turn in range(0, steps - 1):
            s, dq, stage = step(s, dq, role, first + turn * 128, stage, turn, W, SCALED, True)
        _, dq, _ = step(s, dq, role, first + (steps - 1) * 128, stage, steps - 1, W, SCALED, False)
    scale = scales.gradient
    if SCALED:
        scale = scale / ds_scale
    send(dq * scale, memory.q.index(W), dq_desc, place, row, D)


@gluon.jit
def backward_dq(
    tensors,
    q_desc,
    k_desc,
    dout_desc,
    v_desc,
    dq_desc,
    ragged,
    whole,
    scales,
    D: gl.constexpr,
    SLOTS: gl.constexpr,
    SCALED: gl.constexpr,
    VARLEN: gl.constexpr,
    DQ_REGS: gl.constexpr,
    LOAD_REGS: gl.constexpr,
):
    """Compute dQ. A program has 128 packed rows of a pair of sequence and KV head. lse2, delta [pairs, rows]; dq
    [batch, KV head, packed row, column] like q. VARLEN as in backward_keys."""
    DTYPE: gl.constexpr = q_desc.dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    q = gl.allocate_shared_memory(DTYPE, [2, 64, D], TILE)
    dout = gl.allocate_shared_memory(DTYPE, [2, 64, D], TILE)
    k = gl.allocate_shared_memory(DTYPE, [SLOTS, 128, D], TILE)
    v = gl.allocate_shared_memory(DTYPE, [SLOTS, 128, D], TILE)
    own_ready = new_barriers(1)
    ring = new_ring(k, 2)
    init_barriers((own_ready, ring.ready, ring.free))
    tiles = (whole.rows + 127) // 128
    if VARLEN:
        tiles = whole.rows // 128 + whole.sequences
    pair = gl.program_id(0) // tiles
    row = (tiles - 1 - (gl.program_id(0) - pair * tiles)) * 128  # causal: the longest tiles start first
    head = pair % whole.heads
    work = GradientTile(pair // whole.heads, head, head, row, 0, 0)
    sizes = whole
    lse2_ptr = tensors.lse2_ptr + pair.to(gl.int64) * whole.rows
    delta_ptr = tensors.delta_ptr + pair.to(gl.int64) * whole.rows
    if VARLEN:
        seq, row = tile_of(row // 128, tensors.cu_q_ptr, whole.sequences, whole.group)
        first_row, first_key, sizes = sizes_of(seq, row, whole, tensors.cu_q_ptr, tensors.cu_k_ptr, False)
        work = GradientTile(0, pair, pair, row, first_row, first_key)
        lse2_ptr += first_row
        delta_ptr += first_row
    batch, head, begin, end = work.batch, work.head, work.first_row, sizes.rows
    rows = pair_of(q_desc, dout_desc, ragged.q, ragged.dout, batch, head, begin, end, VARLEN)
    keys = pair_of(k_desc, v_desc, ragged.k, ragged.v, batch, head, work.first_key, sizes.keys, VARLEN)
    dq_place = place_of(dq_desc, ragged.dq, batch, head, begin, end, VARLEN)
    memory = Memory(q, dout, ring, v, own_ready)
    terms = Terms(lse2_ptr, delta_ptr)
    gl.warp_specialize(
        [
            (dq_role, (memory, dq_desc, dq_place, terms, work.own, sizes, scales, 0, D, SCALED)),
            (dq_role, (memory, dq_desc, dq_place, terms, work.own, sizes, scales, 1, D, SCALED)),
            (load_role, (rows, keys, memory, work.own, sizes, D)),
        ],
        [4, 1],
        [DQ_REGS, LOAD_REGS],
    )
