"""Store P and dS of attention on sm_90a in memory: tiles of 128 query rows times 128 keys.

    S = Q K^T     P = 2^(S scale - lse2) if visible     dP = dO V^T     dS = P (dP - delta)

backward_products computes the other products. One CTA per SM loops over tiles. Role chart::

    load    1 warp   | chunks of Q, K ... dO, V of tile a    | of tile b ...
    left    4 warps  | S of rows 0-63, all chunks | dP chunks 0, 1 | P, stored | dP, other chunks | dS, stored
    right   4 warps  | the same of rows 64-127; while one computes exponentials the other keeps the tensor cores busy

shared memory   bytes              holds
a               SLOTS x 16384      [128, 64]: a chunk of 64 columns of Q or dO
b               SLOTS x 16384      [128, 64]: the same columns of K or V
tile            2 x 16384          [64, 128] of left and right: P, then dS, on their way out
barriers        8 each

barrier         arrives            count       waits          means
ready[slot]     load: TMA bytes    1 + bytes   left, right    a chunk is in the slot
free[slot]      left, right        2           load           both have used it

Tensors are [batch, KV head, packed row, column]: row r is token r // group of query head r % group of the KV head. TMA
fills what lies past the end of a tensor with zeros, so products read no other rows; lse2 of such rows is +inf.
A tile that no row sees is skipped, or written as zeros if backward_products will read it: score_tile() decides. In a
varlen batch, slabs.py defines where P and dS of a sequence are; TMA stops at its end (ragged.py).
"""

from dsv4.fmha.kernels.backward_arguments import Operands
from dsv4.fmha.kernels.score_tiles import Chunks, load_role, row_terms, score_tile, slab_of, visible
from dsv4.fmha.kernels.scores import probabilities, score_gradient
from dsv4.kernels import dependent
from dsv4.kernels.compat import (
    fence_async_shared,
    gl,
    gluon,
    reinterpret,
    store_wait,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from dsv4.kernels.ring import consumer_stage, init_barriers, new_ring


@gluon.jit
def multiply(acc, chunks, stage, last, begin, end, W: gl.constexpr):
    """Add chunks begin .. end to acc [64, 128]. The newest product is in flight and its slot, `last`, in use; -1:
    none."""
    ring = chunks.ring
    for chunk in range(begin, end):
        ring.wait(stage)
        acc = warpgroup_mma(
            ring.slot(stage).slice(64 * W, 64, dim=0),
            chunks.b.index(stage.index).permute((1, 0)),
            acc,
            use_acc=chunk > 0,
            is_async=True,
        )
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        ring.free.arrive(gl.maximum(last, 0), last >= 0)
        last = stage.index
        stage = ring.next(stage)
    return acc, stage, last


@gluon.jit
def send(x, tile, desc, pair, row, key):
    """Store x [64, 128] in memory through the warpgroup's tile, after TMA has read what was there before."""
    BOX: gl.constexpr = desc.layout
    store_wait(0)
    tile.store(x)
    fence_async_shared()
    panels = reinterpret(tile, [2, 1, 64, 64], BOX)
    tma_store(desc, [pair, row, key], panels.index(0))
    tma_store(desc, [pair, row, key + 64], panels.index(1))


@gluon.jit
def score_role(
    chunks,
    out,
    p_desc,
    ds_desc,
    terms,
    slab,
    scales,
    W: gl.constexpr,
    CHUNKS: gl.constexpr,
    SCALED: gl.constexpr,
    M: gl.constexpr,
    VARLEN: gl.constexpr,
):
    """Compute P and dS of rows 64 W .. 64 W + 63 of every tile."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    EARLY: gl.constexpr = 2 if CHUNKS > 2 else 1  # chunks of dP that overlap with the exponentials
    ds_scale = 1.0
    if SCALED:
        ds_scale = gl.load(scales.ds_ptr)
    stage = consumer_stage()
    for tile_id in range(gl.program_id(0), slab.count, gl.num_programs(0)):
        tile = score_tile(tile_id, slab, M, VARLEN)
        pair, key, first_row = tile.pair, tile.key, tile.row + 64 * W
        to = tile.part.slab_row + first_row
        if tile.some:
            row = first_row + gl.arange(0, 64, layout=gl.SliceLayout(1, L))
            lse2, delta = row_terms(terms, tile, row)
            s = gl.zeros([64, 128], gl.float32, L)
            s, stage, last = multiply(s, chunks, stage, gl.to_tensor(-1), 0, CHUNKS, W)
            dp = gl.zeros([64, 128], gl.float32, L)
            dp, stage, last = multiply(dp, chunks, stage, last, 0, EARLY, W)
            s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))  # complete by now, but the compiler must see it
            p, s = probabilities(s, lse2[:, None], scales.s)
            p = visible(p, first_row, key, tile.part)
            if SCALED:
                send((p * scales.p).to(out.dtype), out, p_desc, pair, to, key)
            else:
                send(p.to(out.dtype), out, p_desc, pair, to, key)
            dp, stage, last = multiply(dp, chunks, stage, last, EARLY, CHUNKS, W)
            dp = warpgroup_mma_wait(num_outstanding=0, deps=(dp,))
            chunks.ring.free.arrive(last)
            ds = score_gradient(p, dp, delta[:, None], s, scales.s)
            if SCALED:
                ds = ds * ds_scale
            send(ds.to(out.dtype), out, ds_desc, pair, to, key)
        elif tile.read:
            nothing = gl.zeros([64, 128], out.dtype, L)
            send(nothing, out, p_desc, pair, to, key)
            send(nothing, out, ds_desc, pair, to, key)
    store_wait(0)


@gluon.jit
def backward_scores(
    q_desc,
    k_desc,
    dout_desc,
    v_desc,
    p_desc,
    ds_desc,
    ragged,
    terms,
    sizes,
    sequences,
    scales,
    D: gl.constexpr,
    M: gl.constexpr,
    SLOTS: gl.constexpr,
    SCALED: gl.constexpr,
    VARLEN: gl.constexpr,
    SCORE_REGS: gl.constexpr,
    LOAD_REGS: gl.constexpr,
):
    """Store P and dS. terms: lse2 and delta [pairs of the slab, all rows of a pair]. M: rows of a tile of
    backward_products."""
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    CHUNKS: gl.constexpr = D // 64
    a = gl.allocate_shared_memory(q_desc.dtype, [SLOTS, 128, 64], MATRIX)
    b = gl.allocate_shared_memory(q_desc.dtype, [SLOTS, 128, 64], MATRIX)
    left_tile = gl.allocate_shared_memory(q_desc.dtype, [64, 128], MATRIX)
    right_tile = gl.allocate_shared_memory(q_desc.dtype, [64, 128], MATRIX)
    ring = new_ring(a, 2)
    init_barriers((ring.ready, ring.free))
    dependent.wait_on_prior_grid()  # backward_rows, a copy, or the products of the slab before
    dependent.launch_dependents()
    slab = slab_of(sizes, sequences, VARLEN)
    operands = Operands(q_desc, k_desc, dout_desc, v_desc)
    chunks = Chunks(ring, b)
    gl.warp_specialize(
        [
            (score_role, (chunks, left_tile, p_desc, ds_desc, terms, slab, scales, 0, CHUNKS, SCALED, M, VARLEN)),
            (score_role, (chunks, right_tile, p_desc, ds_desc, terms, slab, scales, 1, CHUNKS, SCALED, M, VARLEN)),
            (load_role, (operands, ragged, chunks, slab, CHUNKS, M, VARLEN)),
        ],
        [4, 1],
        [SCORE_REGS, LOAD_REGS],
    )
