"""dK, dV and, with ADD_DQ, dQ of attention on sm_90a, head dims 64 and 128: a work tile has 128 keys and streams the
rows of a pack of query heads past them, or one of `splits` parts of the rows if there are too few key tiles for the
SMs. If several work tiles have the same keys, their shares of dK and dV are summed in fp32 in memory. With LOOP, one
CTA per SM loops over work tiles (key_tiles.py): the next V is loaded once the last dP is complete, the next K while dK
and dV are stored. Otherwise each work tile has a CTA.

    S^T = K Q^T    P^T = 2^(S^T scale - lse2) if visible    dP^T = V dO^T    dS^T = P^T (dP^T - delta)
    dV += P^T dO   dK += dS^T Q    dQ = dS K

With ADD_DQ there are five products, and dQ of the 128 keys is added to an fp32 sum in memory (gradient_sums.py), in no
fixed order: the last bits of dQ differ from run to run. Without it there are no atomics; backward_dq.py computes dQ,
and S and dP again: seven products. Role chart of a step, ROWS packed rows::

    load    1 warp  | V, K of the next work tile; Q, dO, lse2, delta of the next rows
    left    4 warps | keys 0-63:  P, dP meanwhile | dV in flight | dS | dK | half of the last dQ | next S, dQ to memory
    right   4 warps | keys 64-127: the same; while one computes exponentials the other keeps the tensor cores busy

A product for dQ reads the dS of left and right; left computes columns 0-63 of it at head dim 128, rows 0-63 at 64. It
belongs to the previous step, so neither role waits for the other's dS of this step.

shared memory   bytes                 holds
k, v            2 x 128 x D x 2       [2, 64, D] each: the keys of left and right
q, dout         SLOTS x ROWS x D x 2  [SLOTS, ROWS, D] each
stat            SLOTS x ROWS x 8      [SLOTS x 2, ROWS]: lse2 and delta of the rows, fp32
ds              2 x 128 x ROWS x 2    [2 x 2, 64, ROWS]: ADD_DQ: dS^T of left and of right, two steps
sum_tiles       2 x 64 x 64 x 4       [2, 128, 32]: ADD_DQ: fp32 on its way to sums: halves of dQ, finally dV and dK
results         2 x 64 x D x 2        [2, 64, D]: dV, then dK, of left and right; with ADD_DQ in sum_tiles
tickets         2 x 4                 [2, 1]: numbers of work tiles
barriers        8 each

barrier         arrives            count       waits          means
k_ready         load: TMA bytes    1 + bytes   left, right    K is there
k_free          left, right        2           load           both have multiplied it: the last dQ is complete
v_ready         load: TMA bytes    1 + bytes   left, right    V is there
v_free          left, right        2           load           the last dP of both is complete
ready[slot]     load: TMA bytes    1 + bytes   left, right    Q, dO and stat are in the slot
free[slot]      left, right        2           load           both have used it
ds_ready[slot]  left, right        2           left, right    dS of both is in the slot
landed          TMA bytes          1 + bytes   load           VARLEN: K and V are there, with keys that no query sees
tickets_ready   load               1           left, right    the number of the next work tile is there
tickets_free    left, right        2           load           both have read it

Steps are counted through all work tiles. Step n writes slot n & 1 of ds, which the product in step n - 1 (of dS n - 2)
reads: both roles have finished it when they release what they read in step n - 1, so free[slot] covers it too. This is
why SLOTS is 2 with ADD_DQ. The last step of a work tile computes an S that nothing uses, and its slot is released
behind it.

Tensors are [batch, KV head, packed row, column] as in backward_scores.py. TMA fills what lies past the end with zeros;
P is 0 there, because of lse2 or of the mask. VARLEN: all sequences are one batch, and TMA stops at their ends too
(fmha/kernels/ragged.py). load zeroes keys before a window, which may hold NaN.
"""

from dsv4.fmha.kernels.backward_sequences import first_visible
from dsv4.fmha.kernels.loads import zero_invisible
from dsv4.fmha.kernels.ragged import pair_of
from dsv4.fmha.kernels.scores import probabilities, score_gradient
from dsv4.fmha.kernels.sm90.gradient_loads import load_halves, load_next
from dsv4.fmha.kernels.sm90.gradient_sums import Sums, add_block, add_blocks, store_blocks
from dsv4.fmha.kernels.sm90.key_tiles import Problem, locate
from dsv4.fmha.kernels.sm90.tile_scheduler import hand_out, take_ticket, ticket_slots
from dsv4.kernels import dependent
from dsv4.kernels.compat import (
    Value,
    aggregate,
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    reinterpret_as,
    store_wait,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from dsv4.kernels.opaque import zero
from dsv4.kernels.ring import (
    Barriers,
    Ring,
    Stage,
    consumer_stage,
    init_barriers,
    new_barriers,
    new_ring,
    producer_stage,
)
from dsv4.kernels.signals import take

ALL = gl.constexpr(1 << 30)  # a number past every row


@aggregate
class Memory:
    k: Value
    v: Value
    ring: Ring  # slots of Q, dout and stat
    dout: Value
    stat: Value
    ds: Value  # ADD_DQ
    sum_tiles: Value  # ADD_DQ
    results: Value
    tickets: Ring
    k_ready: Barriers
    k_free: Barriers
    v_ready: Barriers
    v_free: Barriers
    landed: Barriers  # VARLEN
    ds_ready: Barriers  # ADD_DQ


@aggregate
class KeyOperands:
    """TMA descriptors, and `ragged`, their weights in a varlen batch."""

    q_desc: Value
    k_desc: Value
    dout_desc: Value
    v_desc: Value
    dk_desc: Value
    dv_desc: Value
    sums_desc: Value
    ragged: Value


@aggregate
class Shares:
    """Where work tiles with the same keys put their dK and dV."""

    shared: Value
    dk_block: Value  # ADD_DQ: first blocks of the sums, in the memory of dQ's
    dv_block: Value
    ptr: Value  # else: parts of all of dK, then those of dV


@gluon.jit
def make_barriers(slots, VARLEN: gl.constexpr, ADD_DQ: gl.constexpr, LOOP: gl.constexpr):
    """Return (ring over the slots, tickets, k_ready, k_free, v_ready, v_free, landed, ds_ready)."""
    k_ready = new_barriers(1)
    k_free = new_barriers(1, 2)
    v_ready = new_barriers(1)
    v_free = new_barriers(1, 2)
    ring = new_ring(slots, 2)
    barriers = (k_ready, k_free, v_ready, v_free, ring.ready, ring.free)
    tickets = ring  # unused
    if LOOP:
        tickets = new_ring(ticket_slots(), 2)
        barriers += (tickets.ready, tickets.free)
    landed = k_ready  # unused
    ds_ready = k_ready
    if VARLEN:
        landed = new_barriers(1)
        barriers += (landed,)
    if ADD_DQ:
        ds_ready = new_barriers(2, 2)
        barriers += (ds_ready,)
    init_barriers(barriers)
    return ring, tickets, k_ready, k_free, v_ready, v_free, landed, ds_ready


@gluon.constexpr_function
def accumulator(columns):
    """Return zeros [64, columns] in the layout of a warpgroup's accumulator."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def load_keys(keys, memory, work, phase, landed_phase, D: gl.constexpr, VARLEN: gl.constexpr):
    """Load V and K of 128 keys once the previous ones have been read; return the next phase of landed."""
    BYTES: gl.constexpr = 128 * D * 2
    key, sizes = work.place.own, work.sizes
    memory.v_free.wait(0, phase)
    unseen: gl.constexpr = False
    if VARLEN:
        unseen = key < first_visible(sizes)
    if unseen:
        memory.k_free.wait(0, phase)
        landed = memory.landed.at(0)
        mbarrier.expect(landed, 2 * BYTES)
        load_halves(keys.x_desc, keys.x_place, memory.k, landed, key, D)
        load_halves(keys.y_desc, keys.y_place, memory.v, landed, key, D)
        memory.landed.wait(0, landed_phase)
        landed_phase ^= 1
        for half in gl.static_range(2):
            zero_invisible(memory.k.index(half), key + half * 64, first_visible(sizes), sizes.keys, 64, D)
            zero_invisible(memory.v.index(half), key + half * 64, first_visible(sizes), sizes.keys, 64, D)
        fence_async_shared()  # generic stores -> tensor-core reads
        memory.v_ready.arrive(0)
        memory.k_ready.arrive(0)
    else:
        mbarrier.expect(memory.v_ready.at(0), BYTES)
        load_halves(keys.y_desc, keys.y_place, memory.v, memory.v_ready.at(0), key, D)
        memory.k_free.wait(0, phase)
        mbarrier.expect(memory.k_ready.at(0), BYTES)
        load_halves(keys.x_desc, keys.x_place, memory.k, memory.k_ready.at(0), key, D)
    return landed_phase


@gluon.jit
def terms_of(problem, work, row, ROWS: gl.constexpr):
    """Load lse2 and delta of ROWS rows; past the end they are those of rows that see nothing."""
    number = row + gl.arange(0, ROWS, layout=gl.BlockedLayout([2], [32], [1], [0]))
    lse2 = gl.load(problem.tensors.lse2_ptr + work.row + number, mask=number < work.sizes.rows, other=float("inf"))
    delta = gl.load(problem.tensors.delta_ptr + work.row + number, mask=number < work.sizes.rows, other=0.0)
    return lse2, delta


@gluon.jit
def load_role(problem, operands, memory, ticket_ptr, D: gl.constexpr, VARLEN: gl.constexpr, LOOP: gl.constexpr,
              LISTED: gl.constexpr):  # fmt: skip
    ROWS: gl.constexpr = memory.stat.shape[1]
    ring, ragged = memory.ring, operands.ragged
    stage, ticket, phase, landed_phase = producer_stage(), producer_stage(), gl.to_tensor(1), gl.to_tensor(0)
    number = gl.program_id(0)
    while number < problem.order.count:
        work = locate(number, problem, D, ROWS, VARLEN, LISTED)
        place, sizes = work.place, work.sizes
        keys = pair_of(operands.k_desc, operands.v_desc, ragged.k, ragged.v, place.batch, place.kv_head,
                       place.first_key, sizes.keys, VARLEN)  # fmt: skip
        rows = pair_of(operands.q_desc, operands.dout_desc, ragged.q, ragged.dout, place.batch, place.head,
                       place.first_row, sizes.rows, VARLEN)  # fmt: skip
        landed_phase = load_keys(keys, memory, work, phase, landed_phase, D, VARLEN)
        for row in range(work.first, work.end, ROWS):
            lse2, delta = terms_of(problem, work, row, ROWS)
            ring.acquire(stage)
            memory.stat.index(stage.index * 2).store(lse2)
            memory.stat.index(stage.index * 2 + 1).store(delta)
            barrier()  # one lane arrives for all; Triton 3.6 inserts no barrier here
            load_next(rows, ring.slot(stage), memory.dout.index(stage.index), ring.ready_at(stage), row, D)
            stage = ring.next(stage)
        number = problem.order.count
        if LOOP:
            number = gl.num_programs(0) + take(ticket_ptr)
            ticket = hand_out(memory.tickets, ticket, number)
        phase ^= 1


@gluon.jit
def scores(x, y):
    """Return x [64, D] times the transpose of y [rows, D], in flight."""
    ROWS: gl.constexpr = y.shape[0]
    s = gl.zeros([64, ROWS], gl.float32, accumulator(ROWS))
    return warpgroup_mma(x, y.permute((1, 0)), s, use_acc=False, is_async=True)


@gluon.jit
def attending_rows(key, sizes):
    """Return [first, end) of the packed rows that see a key (a number or a tensor of numbers)."""
    offset = sizes.keys - sizes.tokens
    first = gl.minimum(gl.maximum(key - offset - sizes.right, 0), sizes.tokens)
    end = gl.minimum(gl.maximum(key - offset + sizes.left + 1, 0), sizes.tokens)
    # Rows past the last one need no mask: their P is 0 because of lse2.
    return gl.where(key < sizes.keys, first * sizes.group, ALL), gl.where(end < sizes.tokens, end * sizes.group, ALL)


@gluon.jit
def visible(p, row, key, whole, sizes, LS: gl.constexpr):
    """Return P^T [64 keys, rows], with 0 where the row does not see the key. whole: [first, end) of the rows that see
    all of them, computed once, because the token of a row needs a division."""
    ROWS: gl.constexpr = p.shape[1]
    if (row < whole[0]) | (row + ROWS > whole[1]):
        number = row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, LS))[None, :]
        first, end = attending_rows(key + gl.arange(0, 64, layout=gl.SliceLayout(1, LS)), sizes)
        p = gl.where((number >= first[:, None]) & (number < end[:, None]), p, 0.0)
    return p


@gluon.jit
def multiply_by_keys(memory, turn, opaque, W: gl.constexpr, D: gl.constexpr):
    """Multiply dS of both roles in step `turn`, which is ready, by all keys; return role W's half of dQ, [64, 64], in
    flight."""
    PANEL: gl.constexpr = memory.k.layout
    ROWS: gl.constexpr = memory.stat.shape[1]
    keys = reinterpret(memory.k, [2 * (D // 64), 64, 64], PANEL)
    ds = reinterpret(memory.ds, [4 * (ROWS // 64), 64, 64], PANEL)
    slot = turn & 1
    dq = gl.zeros([64, 64], gl.float32, accumulator(64))
    for side in gl.static_range(2):
        left = ds.index((slot * 2 + side) * (ROWS // 64) + (W if ROWS == 128 else 0)).permute((1, 0))
        right = keys.index(opaque + side * (D // 64) + (W if D == 128 else 0))
        dq = warpgroup_mma(left, right, dq, use_acc=side > 0, is_async=True)
    return dq


@gluon.jit
def stage_of(turn):
    """Return the stage of a step: there are two slots."""
    return Stage(turn & 1, turn >> 1 & 1)


@gluon.jit
def step(s, dk, dv, memory, sums, row, key, turn, more, whole, sizes, scales, ds_scale, W: gl.constexpr,
         D: gl.constexpr, SCALED: gl.constexpr, ADD_DQ: gl.constexpr, FIRST: gl.constexpr):  # fmt: skip
    """Process the rows from `row` on, whose S is in flight; return S of the next rows. If there are no more, return an
    S of the same rows, unused, and do not release their slot. turn: number of the step in all work tiles. ADD_DQ: also
    dQ of the previous rows, unless this is the FIRST step of a work tile."""
    k, v, ring, stat = memory.k, memory.v, memory.ring, memory.stat
    ROWS: gl.constexpr = stat.shape[1]
    stage = stage_of(turn)
    q, dout = ring.slot(stage), memory.dout.index(stage.index)
    LS: gl.constexpr = accumulator(ROWS)
    LA: gl.constexpr = gl.DotOperandLayout(0, accumulator(D), 2)
    lse2 = stat.index(stage.index * 2).load(gl.SliceLayout(0, LS))
    s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
    opaque = zero(turn)  # otherwise ptxas keeps the wgmma descriptors of fixed places in registers
    dp = scores(v.index(opaque + W), dout)
    p, s = probabilities(s, lse2[None, :], scales.s)
    p = visible(p, row, key, whole, sizes, LS)
    if SCALED:
        p16 = (p * scales.p).to(q.dtype)
    else:
        p16 = p.to(q.dtype)
    # With 128 rows, P and dP leave no registers for a product of P in flight.
    EARLY: gl.constexpr = ROWS == 64
    if EARLY:
        dv = warpgroup_mma(gl.convert_layout(p16, LA), dout, dv, is_async=True)
        dp = warpgroup_mma_wait(num_outstanding=1, deps=(dp,))
    else:
        dp = warpgroup_mma_wait(num_outstanding=0, deps=(dp,))
    delta = stat.index(stage.index * 2 + 1).load(gl.SliceLayout(0, LS))
    d = score_gradient(p, dp, delta[None, :], s, scales.s)
    if SCALED:
        d = d * ds_scale
    d16 = d.to(q.dtype)
    if not EARLY:
        dv = warpgroup_mma(gl.convert_layout(p16, LA), dout, dv, is_async=True)
    dk = warpgroup_mma(gl.convert_layout(d16, LA), q, dk, is_async=True)
    dv = warpgroup_mma_wait(num_outstanding=1, deps=(dv,))  # P's registers are free
    if ADD_DQ:
        before = stage_of(turn - 1)
        ring.free.wait(before.index, before.phase)  # the other role has multiplied what this slot of ds holds
        if not FIRST:
            memory.ds_ready.wait(before.index, before.phase)  # here, not at the product: no barrier of warps
        memory.ds.index((turn & 1) * 2 + W).store(d16)
        fence_async_shared()  # generic stores -> tensor-core reads
        barrier()
        memory.ds_ready.arrive_once(turn & 1)
        if not FIRST:
            dq = multiply_by_keys(memory, turn - 1, opaque, W, D)
    after = stage_of(turn + 1)
    ring.wait(after, pred=more)
    s = scores(k.index(opaque + W), ring.slots.index(gl.where(more, after.index, stage.index)))
    if ADD_DQ and not FIRST:
        dq, dk = warpgroup_mma_wait(num_outstanding=1, deps=(dq, dk))
        store_wait(0)  # dQ's tile has been read
        barrier()
        ring.free.arrive_once(stage.index, pred=more)
        add_block(dq, sums, sums.dq + (row // 64 - ROWS // 64) * (D // 64) + W, W)
    else:
        dk = warpgroup_mma_wait(num_outstanding=1, deps=(dk,))
        barrier()
        ring.free.arrive_once(stage.index, pred=more)
    return s, dk, dv


@gluon.jit
def send(x, tile, desc, place, row, D: gl.constexpr):
    """Store x [64, D] in the rows from `row` on of a sequence and head, through the tile."""
    tile.store(x.to(tile.dtype))
    fence_async_shared()
    BOX: gl.constexpr = desc.layout
    panels = reinterpret(tile, [D // 64, 1, 1, 64, 64], BOX)
    for panel in gl.static_range(D // 64):
        tma_store(desc, [place.outer, place.offset, place.begin + row, panel * 64], panels.index(panel))
    store_wait(0)


@gluon.jit
def process(work, turn, phase, problem, operands, memory, shares, scales, ds_scale, W: gl.constexpr, D: gl.constexpr,
            SCALED: gl.constexpr, VARLEN: gl.constexpr, ADD_DQ: gl.constexpr):  # fmt: skip
    """Compute dK and dV of 64 keys of a work tile; return the number of the next step."""
    dk = gl.zeros([64, D], gl.float32, accumulator(D))
    dv = gl.zeros([64, D], gl.float32, accumulator(D))
    ROWS: gl.constexpr = memory.stat.shape[1]
    first, end, sizes, place, ring = work.first, work.end, work.sizes, work.place, memory.ring
    mine = place.own + 64 * W
    sums = Sums(operands.sums_desc, memory.sum_tiles, work.rows_block, shares.dk_block + work.keys_block,
                shares.dv_block + work.keys_block)  # fmt: skip
    memory.k_ready.wait(0, phase)
    memory.v_ready.wait(0, phase)
    if first < end:
        ring.wait(stage_of(turn))
        s = scores(memory.k.index(W), ring.slot(stage_of(turn)))
        steps = (end - first + ROWS - 1) // ROWS
        whole = attending_rows(mine + 63, sizes)[0], attending_rows(mine, sizes)[1]
        begun: gl.constexpr = 1 if ADD_DQ else 0
        if ADD_DQ:
            s, dk, dv = step(s, dk, dv, memory, sums, first, mine, turn, steps > 1, whole, sizes, scales, ds_scale, W,
                             D, SCALED, True, True)  # fmt: skip
        for n in range(begun, steps):
            s, dk, dv = step(s, dk, dv, memory, sums, first + n * ROWS, mine, turn + n, n + 1 < steps, whole, sizes,
                             scales, ds_scale, W, D, SCALED, ADD_DQ, False)  # fmt: skip
        turn += steps
        memory.v_free.arrive(0)
        if ADD_DQ:
            last = stage_of(turn - 1)
            memory.ds_ready.wait(last.index, last.phase)
            dq = multiply_by_keys(memory, turn - 1, zero(turn), W, D)
            dq, s = warpgroup_mma_wait(num_outstanding=0, deps=(dq, s))
            store_wait(0)
            ring.release(stage_of(turn - 1))
            memory.k_free.arrive(0)
            add_block(dq, sums, sums.dq + (first // 64 + (steps - 1) * (ROWS // 64)) * (D // 64) + W, W)
        else:
            warpgroup_mma_wait(num_outstanding=0, deps=(s,))
            ring.release(stage_of(turn - 1))
            memory.k_free.arrive(0)
    else:
        memory.v_free.arrive(0)
        memory.k_free.arrive(0)
    scale = scales.gradient
    if SCALED:
        dv = dv / scales.p
        scale = scale / ds_scale
    if shares.shared:
        if ADD_DQ:
            if first < end:
                add_blocks(dv, sums, sums.dv + W * (D // 64), W, D)
                add_blocks(dk * scale, sums, sums.dk + W * (D // 64), W, D)
        else:
            part_ptr = shares.ptr + work.part.to(gl.int64) * (128 * D) + W * (64 * D)
            store_blocks(dv, part_ptr + problem.order.count.to(gl.int64) * (128 * D), D)
            store_blocks(dk * scale, part_ptr, D)
    else:
        results = pair_of(operands.dk_desc, operands.dv_desc, operands.ragged.dk, operands.ragged.dv, place.batch,
                          place.kv_head, place.first_key, sizes.keys, VARLEN)  # fmt: skip
        DTYPE: gl.constexpr = memory.k.dtype
        TILE: gl.constexpr = memory.k.layout
        if ADD_DQ:
            tile = reinterpret_as(memory.sum_tiles.index(W), DTYPE, [128 // D, 64, D], TILE).index(0)
        else:
            tile = memory.results.index(W)
        store_wait(0)
        barrier()  # the tile has been read
        send(dv, tile, results.y_desc, results.y_place, mine, D)
        send(dk * scale, tile, results.x_desc, results.x_place, mine, D)
    return turn


@gluon.jit
def gradient_role(problem, operands, memory, shares, scales, W: gl.constexpr, D: gl.constexpr, SCALED: gl.constexpr,
                  VARLEN: gl.constexpr, ADD_DQ: gl.constexpr, LOOP: gl.constexpr,
                  LISTED: gl.constexpr):  # fmt: skip
    """Compute dK and dV of half of the keys of each work tile."""
    ROWS: gl.constexpr = memory.stat.shape[1]
    ds_scale = 1.0
    if SCALED:
        ds_scale = gl.load(scales.ds_ptr)
    ticket, turn, phase = consumer_stage(), gl.to_tensor(0), gl.to_tensor(0)
    number = gl.program_id(0)
    if LOOP:
        while number < problem.order.count:
            work = locate(number, problem, D, ROWS, VARLEN, LISTED)
            turn = process(work, turn, phase, problem, operands, memory, shares, scales, ds_scale, W, D, SCALED, VARLEN,
                           ADD_DQ)  # fmt: skip
            number, ticket = take_ticket(memory.tickets, ticket)
            phase ^= 1
    else:
        work = locate(number, problem, D, ROWS, VARLEN, False)
        process(work, turn, phase, problem, operands, memory, shares, scales, ds_scale, W, D, SCALED, VARLEN, ADD_DQ)
    if ADD_DQ:
        store_wait(0)  # shared memory must exist until the last tile has been read


@gluon.jit
def backward_keys(
    tensors,
    q_desc,
    k_desc,
    dout_desc,
    v_desc,
    sums_desc,
    dk_desc,
    dv_desc,
    ragged,
    order,
    shares,
    ticket_ptr,
    whole,
    scales,
    D: gl.constexpr,
    SLOTS: gl.constexpr,
    SCALED: gl.constexpr,
    VARLEN: gl.constexpr,
    ROWS: gl.constexpr,
    ADD_DQ: gl.constexpr,
    LOOP: gl.constexpr,
    LISTED: gl.constexpr,
    GRADIENT_REGS: gl.constexpr,
    LOAD_REGS: gl.constexpr,
):
    """Compute dK and dV, and add dQ. lse2, delta [pairs, rows]. VARLEN: `whole` has rows, tokens and keys of all
    sequences, whose starts are in cu_q and cu_k. sums_desc: the sums of gradient_sums.py. ticket_ptr: one number, 0.
    LISTED: the order of a varlen batch's tiles is in a list."""
    DTYPE: gl.constexpr = q_desc.dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k = gl.allocate_shared_memory(DTYPE, [2, 64, D], TILE)
    v = gl.allocate_shared_memory(DTYPE, [2, 64, D], TILE)
    q = gl.allocate_shared_memory(DTYPE, [SLOTS, ROWS, D], TILE)
    dout = gl.allocate_shared_memory(DTYPE, [SLOTS, ROWS, D], TILE)
    stat = gl.allocate_shared_memory(gl.float32, [SLOTS * 2, ROWS], FLAT)
    ds = stat  # unused
    sum_tiles = stat
    results = stat
    if ADD_DQ:
        ds = gl.allocate_shared_memory(DTYPE, [4, 64, ROWS], TILE)
        sum_tiles = gl.allocate_shared_memory(gl.float32, [2, 128, 32], sums_desc.layout)
    else:
        results = gl.allocate_shared_memory(DTYPE, [2, 64, D], TILE)
    ring, tickets, k_ready, k_free, v_ready, v_free, landed, ds_ready = make_barriers(q, VARLEN, ADD_DQ, LOOP)
    memory = Memory(k, v, ring, dout, stat, ds, sum_tiles, results, tickets, k_ready, k_free, v_ready, v_free, landed,
                    ds_ready)  # fmt: skip
    dependent.wait_on_prior_grid()  # backward_rows, or a copy
    dependent.launch_dependents()  # round_sum
    problem = Problem(order, tensors, whole)
    operands = KeyOperands(q_desc, k_desc, dout_desc, v_desc, dk_desc, dv_desc, sums_desc, ragged)
    share = Shares(order.splits.number * order.packs.number > 1, shares.dk_block, shares.dv_block, shares.ptr)
    gl.warp_specialize(
        [
            (gradient_role, (problem, operands, memory, share, scales, 0, D, SCALED, VARLEN, ADD_DQ, LOOP, LISTED)),
            (gradient_role, (problem, operands, memory, share, scales, 1, D, SCALED, VARLEN, ADD_DQ, LOOP, LISTED)),
            (load_role, (problem, operands, memory, ticket_ptr, D, VARLEN, LOOP, LISTED)),
        ],
        [4, 1],
        [GRADIENT_REGS, LOAD_REGS],
    )
