"""dK, dV and, with ADD_DQ, dQ of attention on sm_90a, head dims 64 and 128: a CTA owns 128 keys and streams the rows of
a pack of query heads past them, or one of `splits` parts of the rows if there are too few key tiles for the SMs. If
several CTAs own the same keys, their shares of dK and dV are summed in fp32 in memory.

    S^T = K Q^T    P^T = 2^(S^T scale - lse2) if visible    dP^T = V dO^T    dS^T = P^T (dP^T - delta)
    dV += P^T dO   dK += dS^T Q    dQ = dS K

With ADD_DQ there are five products, and dQ of the 128 keys is added to an fp32 sum in memory (gradient_sums.py), in no
fixed order: the last bits of dQ differ from run to run. Without it there are no atomics; backward_dq.py computes dQ,
and S and dP again: seven products. Role chart of a step, ROWS packed rows::

    load    1 warp  | Q, dO, lse2, delta of the next rows
    left    4 warps | keys 0-63:  P, dP meanwhile | dV in flight | dS | dK | half of the last dQ | next S, dQ to memory
    right   4 warps | keys 64-127: the same; while one computes exponentials the other keeps the tensor cores busy

A product for dQ reads the dS of left and right; left computes columns 0-63 of it at head dim 128, rows 0-63 at 64. It
belongs to the previous step, so neither role waits for the other's dS of this step.

shared memory   bytes                 holds
k, v            2 x 128 x D x 2       [2, 64, D] each: the keys of left and right; v finally holds dV, then dK
q, dout         SLOTS x ROWS x D x 2  [SLOTS, ROWS, D] each
stat            SLOTS x ROWS x 8      [SLOTS x 2, ROWS]: lse2 and delta of the rows, fp32
ds              2 x 128 x ROWS x 2    [2 x 2, 64, ROWS]: ADD_DQ: dS^T of left and of right, two steps
sum_tiles       2 x 64 x 64 x 4       [2, 128, 32]: ADD_DQ: fp32 on its way to sums: halves of dQ, finally dV and dK
barriers        8 each

barrier         arrives            count       waits          means
own_ready       load: TMA bytes    1 + bytes   left, right    K and V are there
ready[slot]     load: TMA bytes    1 + bytes   left, right    Q, dO and stat are in the slot
free[slot]      left, right        2           load           both have used it
ds_ready[slot]  left, right        2           left, right    dS of both is in the slot
landed          TMA bytes          1 + bytes   load           VARLEN: K and V are there, with keys that no query sees

Step n writes slot n & 1 of ds, which the product in step n - 1 (of dS n - 2) reads: both roles have finished it when
they release what they read in step n - 1, so free[slot] covers it too. This is why SLOTS is 2 with ADD_DQ.

Tensors are [batch, KV head, packed row, column] as in backward_scores.py. TMA fills what lies past the end with zeros;
P is 0 there, because of lse2 or of the mask. VARLEN: all sequences are one batch, and TMA stops at their ends too
(fmha/kernels/ragged.py). load zeroes keys before a window, which may hold NaN.
"""

from dsv4.fmha.kernels.backward_arguments import GradientTile, Terms
from dsv4.fmha.kernels.backward_sequences import first_visible, sizes_of, tile_of
from dsv4.fmha.kernels.loads import zero_invisible
from dsv4.fmha.kernels.ragged import pair_of
from dsv4.fmha.kernels.scores import probabilities, score_gradient
from dsv4.fmha.kernels.sm90.gradient_loads import load_next, load_own
from dsv4.fmha.kernels.sm90.gradient_sums import Sums, add_block, add_blocks, store_blocks
from dsv4.kernels.compat import (
    Value,
    aggregate,
    barrier,
    fence_async_shared,
    gl,
    gluon,
    reinterpret,
    store_wait,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from dsv4.kernels.opaque import zero
from dsv4.kernels.ring import Barriers, Ring, consumer_stage, init_barriers, new_barriers, new_ring, producer_stage

ALL = gl.constexpr(1 << 30)  # past every row


@aggregate
class Part:
    """The rows that a CTA processes: a part of those that see its keys."""

    first: Value  # packed row, the first of a step
    end: Value
    shared: Value  # other CTAs have the same keys
    dk_ptr: Value  # then, without ADD_DQ: blocks of gradient_sums.py, for the 128 keys
    dv_ptr: Value


@aggregate
class Memory:
    k: Value
    v: Value
    ring: Ring  # of Q, and with it dout and stat
    dout: Value
    stat: Value
    own_ready: Barriers
    landed: Barriers
    ds: Value  # ADD_DQ
    ds_ready: Barriers


@gluon.jit
def make_barriers(slots, VARLEN: gl.constexpr, ADD_DQ: gl.constexpr):
    """Return (ring over the slots, own_ready, landed, ds_ready)."""
    own_ready = new_barriers(1)
    ring = new_ring(slots, 2)
    barriers = (own_ready, ring.ready, ring.free)
    landed = own_ready  # unused
    ds_ready = own_ready
    if VARLEN:
        landed = new_barriers(1)
        barriers += (landed,)
    if ADD_DQ:
        ds_ready = new_barriers(2, 2)
        barriers += (ds_ready,)
    init_barriers(barriers)
    return ring, own_ready, landed, ds_ready


@gluon.constexpr_function
def accumulator(columns):
    """Return zeros [64, columns] in the layout of a warpgroup's accumulator."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def rows_of(key, sizes, ROWS: gl.constexpr):
    """Return [first, end) of the tiles of packed rows that see some of 128 keys."""
    offset = sizes.keys - sizes.tokens
    first = gl.maximum(key - offset - sizes.right, 0)
    end = gl.minimum(gl.minimum(key + 128, sizes.keys) - offset + sizes.left, sizes.tokens)
    return first * sizes.group // ROWS * ROWS, end * sizes.group


@gluon.jit
def cut(first, end, split, splits, ROWS: gl.constexpr):
    """Return [first, end) of part `split`, in whole steps of ROWS rows."""
    steps = (gl.maximum(end - first, 0) + ROWS - 1) // ROWS
    return first + steps * split // splits * ROWS, gl.minimum(first + steps * (split + 1) // splits * ROWS, end)


@gluon.jit
def load_keys(keys, memory, own, sizes, D: gl.constexpr, VARLEN: gl.constexpr):
    """Load K and V of 128 keys."""
    unseen: gl.constexpr = False
    if VARLEN:
        unseen = own < first_visible(sizes)
    if unseen:
        load_own(keys, memory.k, memory.v, memory.landed.at(0), own, D)
        memory.landed.wait(0, 0)
        for half in gl.static_range(2):
            zero_invisible(memory.k.index(half), own + half * 64, first_visible(sizes), sizes.keys, 64, D)
            zero_invisible(memory.v.index(half), own + half * 64, first_visible(sizes), sizes.keys, 64, D)
        fence_async_shared()  # generic stores -> tensor-core reads
        memory.own_ready.arrive(0)
    else:
        load_own(keys, memory.k, memory.v, memory.own_ready.at(0), own, D)


@gluon.jit
def load_role(rows, keys, memory, terms, own, part, sizes, D: gl.constexpr, VARLEN: gl.constexpr):
    ROW: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    load_keys(keys, memory, own, sizes, D, VARLEN)
    ROWS: gl.constexpr = memory.stat.shape[1]
    ring, stage = memory.ring, producer_stage()
    for row in range(part.first, part.end, ROWS):
        number = row + gl.arange(0, ROWS, layout=ROW)
        lse2 = gl.load(terms.lse2_ptr + number, mask=number < sizes.rows, other=float("inf"))
        delta = gl.load(terms.delta_ptr + number, mask=number < sizes.rows, other=0.0)
        ring.acquire(stage)
        memory.stat.index(stage.index * 2).store(lse2)
        memory.stat.index(stage.index * 2 + 1).store(delta)
        barrier()  # one lane arrives for all; Triton 3.6 inserts no barrier here
        load_next(rows, ring.slot(stage), memory.dout.index(stage.index), ring.ready_at(stage), row, D)
        stage = ring.next(stage)


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
    """Multiply dS of both roles in step `turn` by all keys; return role W's half of dQ, [64, 64], in flight."""
    PANEL: gl.constexpr = memory.k.layout
    ROWS: gl.constexpr = memory.stat.shape[1]
    keys = reinterpret(memory.k, [2 * (D // 64), 64, 64], PANEL)
    ds = reinterpret(memory.ds, [4 * (ROWS // 64), 64, 64], PANEL)
    slot = turn & 1
    memory.ds_ready.wait(slot, turn >> 1 & 1)
    dq = gl.zeros([64, 64], gl.float32, accumulator(64))
    for side in gl.static_range(2):
        left = ds.index((slot * 2 + side) * (ROWS // 64) + (W if ROWS == 128 else 0)).permute((1, 0))
        right = keys.index(opaque + side * (D // 64) + (W if D == 128 else 0))
        dq = warpgroup_mma(left, right, dq, use_acc=side > 0, is_async=True)
    return dq


@gluon.jit
def step(s, dk, dv, memory, sums, row, key, stage, turn, more, whole, sizes, scales, ds_scale, W: gl.constexpr,
         D: gl.constexpr, SCALED: gl.constexpr, ADD_DQ: gl.constexpr, FIRST: gl.constexpr):  # fmt: skip
    """Process the rows from `row` on, whose S is in flight; return S of the next rows, or, unused, of the same rows if
    there are no more. turn: number of the step. ADD_DQ: also dQ of the previous rows, unless this is the FIRST step."""
    k, v, ring, stat = memory.k, memory.v, memory.ring, memory.stat
    ROWS: gl.constexpr = stat.shape[1]
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
        if not FIRST:
            ring.free.wait((turn - 1) & 1, (turn - 1) >> 1 & 1)  # the other role has multiplied what this slot holds
        memory.ds.index((turn & 1) * 2 + W).store(d16)
        fence_async_shared()  # generic stores -> tensor-core reads
        memory.ds_ready.arrive(turn & 1)
        if not FIRST:
            dq = multiply_by_keys(memory, turn - 1, opaque, W, D)
    after = ring.next(stage)
    ring.wait(after, pred=more)
    s = scores(k.index(opaque + W), ring.slots.index(gl.where(more, after.index, stage.index)))
    if ADD_DQ and not FIRST:
        dq, dk = warpgroup_mma_wait(num_outstanding=1, deps=(dq, dk))
        store_wait(0)  # dQ's tile has been read; before the barrier with which release begins
        ring.release(stage)
        add_block(dq, sums, sums.dq + (row // 64 - ROWS // 64) * (D // 64) + W, W)
    else:
        dk = warpgroup_mma_wait(num_outstanding=1, deps=(dk,))
        ring.release(stage)
    return s, dk, dv, after


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
def gradient_role(memory, sums, results, own, part, sizes, scales, W: gl.constexpr, D: gl.constexpr,
                  SCALED: gl.constexpr, ADD_DQ: gl.constexpr):  # fmt: skip
    """Compute dK and dV of 64 keys from a part of the rows. results: dK and dV."""
    dk = gl.zeros([64, D], gl.float32, accumulator(D))
    dv = gl.zeros([64, D], gl.float32, accumulator(D))
    ds_scale = 1.0
    if SCALED:
        ds_scale = gl.load(scales.ds_ptr)
    ROWS: gl.constexpr = memory.stat.shape[1]
    first, end = part.first, part.end
    mine = own + 64 * W
    memory.own_ready.wait(0, 0)
    if first < end:
        stage = consumer_stage()
        memory.ring.wait(stage)
        s = scores(memory.k.index(W), memory.ring.slot(stage))
        steps = (end - first + ROWS - 1) // ROWS
        whole = attending_rows(mine + 63, sizes)[0], attending_rows(mine, sizes)[1]
        if ADD_DQ:
            s, dk, dv, stage = step(s, dk, dv, memory, sums, first, mine, stage, gl.to_tensor(0), steps > 1, whole,
                                    sizes, scales, ds_scale, W, D, SCALED, True, True)  # fmt: skip
            for turn in range(1, steps):
                s, dk, dv, stage = step(s, dk, dv, memory, sums, first + turn * ROWS, mine, stage, turn,
                                        turn + 1 < steps, whole, sizes, scales, ds_scale, W, D, SCALED, True,
                                        False)  # fmt: skip
            dq = multiply_by_keys(memory, steps - 1, zero(steps), W, D)
            dq, s = warpgroup_mma_wait(num_outstanding=0, deps=(dq, s))
            store_wait(0)
            add_block(dq, sums, sums.dq + (first // 64 + (steps - 1) * (ROWS // 64)) * (D // 64) + W, W)
        else:
            for turn in range(0, steps):
                s, dk, dv, stage = step(s, dk, dv, memory, sums, first + turn * ROWS, mine, stage, turn,
                                        turn + 1 < steps, whole, sizes, scales, ds_scale, W, D, SCALED, False,
                                        False)  # fmt: skip
            warpgroup_mma_wait(num_outstanding=0, deps=(s,))
    scale = scales.gradient
    if SCALED:
        dv = dv / scales.p
        scale = scale / ds_scale
    if part.shared:
        if ADD_DQ:
            if first < end:
                add_blocks(dv, sums, sums.dv + W * (D // 64), W, D)
                add_blocks(dk * scale, sums, sums.dk + W * (D // 64), W, D)
        else:
            store_blocks(dv, part.dv_ptr + W * (64 * D), D)
            store_blocks(dk * scale, part.dk_ptr + W * (64 * D), D)
    else:
        tile = memory.v.index(W)
        send(dv, tile, results.y_desc, results.y_place, mine, D)
        send(dk * scale, tile, results.x_desc, results.x_place, mine, D)
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
    parts,
    whole,
    scales,
    D: gl.constexpr,
    SLOTS: gl.constexpr,
    SCALED: gl.constexpr,
    VARLEN: gl.constexpr,
    ROWS: gl.constexpr,
    ADD_DQ: gl.constexpr,
    GRADIENT_REGS: gl.constexpr,
    LOAD_REGS: gl.constexpr,
):
    """Compute dK and dV, and add dQ. A program has 128 keys of a pair of sequence and pack of query heads, and one of
    `parts.splits` parts of the rows. lse2, delta [pairs, rows]. VARLEN: `whole` has rows, tokens and keys of all
    sequences, whose starts are in cu_q and cu_k. sums_desc: the sums of gradient_sums.py."""
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
    if ADD_DQ:
        ds = gl.allocate_shared_memory(DTYPE, [4, 64, ROWS], TILE)
        sum_tiles = gl.allocate_shared_memory(gl.float32, [2, 128, 32], sums_desc.layout)
    ring, own_ready, landed, ds_ready = make_barriers(q, VARLEN, ADD_DQ)
    splits = parts.splits
    tiles = (whole.keys + 127) // 128
    if VARLEN:
        tiles = whole.keys // 128 + whole.sequences
    pieces = tiles * splits
    pairs = gl.num_programs(0) // pieces
    # Several pairs are listed together, the longest tiles of all of them first: a single pair would begin its longest
    # ones when others end. With more pairs, more rows would be in use than the L2 holds.
    begun = gl.program_id(0) // (pieces * parts.at_once) * parts.at_once
    width = gl.minimum(pairs - begun, parts.at_once)
    place = gl.program_id(0) - begun * pieces
    piece = place // width
    pair = begun + (place - piece * width)
    tile = piece // splits
    split = piece - tile * splits
    key = tile * 128
    dk_parts_ptr = parts.ptr + ((split * pairs + pair) * tiles + tile).to(gl.int64) * (128 * D)
    dv_parts_ptr = dk_parts_ptr + gl.num_programs(0).to(gl.int64) * (128 * D)
    head = pair % whole.heads
    work = GradientTile(pair // whole.heads, head, head // parts.packs, key, 0, 0)
    sizes = whole
    first_block = pair * ((whole.rows + 127) // 128) * (D // 32)
    lse2_ptr = tensors.lse2_ptr + pair.to(gl.int64) * whole.rows
    delta_ptr = tensors.delta_ptr + pair.to(gl.int64) * whole.rows
    if VARLEN:
        seq, key = tile_of(tile, tensors.cu_k_ptr, whole.sequences, 1)
        first_block = pair * (whole.rows // 128 + whole.sequences)
        first_row, first_key, sizes = sizes_of(seq, key, whole, tensors.cu_q_ptr, tensors.cu_k_ptr, True)
        first_block = (first_block + first_row // 128 + seq) * (D // 32)
        work = GradientTile(0, pair, pair // parts.packs, key, first_row, first_key)
        lse2_ptr += first_row
        delta_ptr += first_row
    first, end = rows_of(work.own, sizes, ROWS)
    first, end = cut(first, end, split, splits, ROWS)
    part = Part(first, end, splits * parts.packs > 1, dk_parts_ptr, dv_parts_ptr)
    memory = Memory(k, v, ring, dout, stat, own_ready, landed, ds, ds_ready)
    own_block = (pair // parts.packs * tiles + tile) * (D // 32)
    sums = Sums(sums_desc, sum_tiles, first_block, parts.dk_block + own_block, parts.dv_block + own_block)
    terms = Terms(lse2_ptr, delta_ptr)
    rows = pair_of(q_desc, dout_desc, ragged.q, ragged.dout, work.batch, work.head, work.first_row, sizes.rows, VARLEN)
    batch, head, begin = work.batch, work.kv_head, work.first_key
    keys = pair_of(k_desc, v_desc, ragged.k, ragged.v, batch, head, begin, sizes.keys, VARLEN)
    results = pair_of(dk_desc, dv_desc, ragged.dk, ragged.dv, batch, head, begin, sizes.keys, VARLEN)
    gl.warp_specialize(
        [
            (gradient_role, (memory, sums, results, work.own, part, sizes, scales, 0, D, SCALED, ADD_DQ)),
            (gradient_role, (memory, sums, results, work.own, part, sizes, scales, 1, D, SCALED, ADD_DQ)),
            (load_role, (rows, keys, memory, terms, work.own, part, sizes, D, VARLEN)),
        ],
        [4, 1],
        [GRADIENT_REGS, LOAD_REGS],
    )
