"""Store P and dS of attention on sm_100a in memory: tiles of 128 query rows times 128 keys, head dims 256 and 512.

    S = Q K^T     P = 2^(S scale - lse2) if visible     dP = dO V^T     dS = P (dP - delta)

backward_products computes the other products. One kernel, as at head dim 128, is not possible: dK and dV of 128 keys
would need 512 columns of tensor memory each at head dim 512 (256 each at 256), which leaves none for S and dP, and Q,
dO, K and V of 128 rows need 512 KiB of shared memory. With 64 rows the tensor core runs at half its rate. P and dS are
stored once and read by three products, which costs 10 bytes for every 10 x head dim operations.

One CTA per SM loops over tiles. Role chart::

    load    1 warp   | chunks of Q, K ... dO, V of tile a    | of tile b ...
    mma     1 warp   | S of a, all chunks | dP of a          | S of b             | dP of b ...
    left    4 warps  |                    | P of a, stored   | dS of a, stored    | P of b ...      keys 0-63
    right   4 warps  |                    | P of a, stored   | dS of a, stored    | P of b ...      keys 64-127

tensor memory   columns        holds
s               2 x 128        S of tile j at j % 2, fp32 [128, 128]
dp              2 x 128        dP, likewise                                             = 512

shared memory   bytes              holds
a               SLOTS x 16384      [128, 64]: a chunk of 64 columns of Q or dO
b               SLOTS x 16384      [128, 64]: the same columns of K or V
out             2 x 2 x 16384      [128, 64] each: P and dS of left, of right, on their way out      (all: 224 KiB)
barriers        8 each

barrier         arrives            count       waits          means
ready[slot]     TMA bytes          1           mma            a chunk is in the slot
free[slot]      commit of mma      1           load           the product that reads it is complete
s_ready[i]      commit of mma      1           left, right    S is complete
s_free[i]       left, right        2           mma            S is read
dp_ready[i]     commit of mma      1           left, right    dP is complete
dp_free[i]      left, right        2           mma            dP is read

Tensors and tiles are those of the Hopper kernel; score_tiles.score_tile() decides which tiles are computed, which are
written as zeros and which are not written.
"""

from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout, allocate_tensor_memory, tcgen05_mma

from dsv4.fmha.kernels.backward_arguments import Operands
from dsv4.fmha.kernels.score_tiles import Chunks, load_role, row_terms, score_tile, slab_of, visible
from dsv4.fmha.kernels.scores import probabilities, score_gradient
from dsv4.kernels.compat import aggregate, fence_async_shared, gl, gluon, reinterpret, store_wait, tma_store
from dsv4.kernels.ring import Ring, Stage, consumer_stage, init_barriers, new_ring


@aggregate
class Scores:
    """S and dP, two stages each."""

    s: Ring
    dp: Ring


@gluon.jit
def multiply(acc, chunks, stage, CHUNKS: gl.constexpr):
    """Set acc [128, 128] to the sum of the products of the next chunks."""
    ring = chunks.ring
    for chunk in range(0, CHUNKS):
        ring.wait(stage)
        tcgen05_mma(ring.slot(stage), chunks.b.index(stage.index).permute((1, 0)), acc, use_acc=chunk > 0)
        ring.release_after_mma(stage)
        stage = ring.next(stage)
    return stage


@gluon.jit
def mma_role(chunks, scores, slab, CHUNKS: gl.constexpr, M: gl.constexpr, VARLEN: gl.constexpr):
    stage = consumer_stage()
    count = gl.to_tensor(0)
    for tile_id in range(gl.program_id(0), slab.count, gl.num_programs(0)):
        if score_tile(tile_id, slab, M, VARLEN).some:
            at = Stage(count % 2, (count // 2 + 1) % 2)  # the first wait on an untouched barrier passes
            scores.s.acquire(at)
            stage = multiply(scores.s.slot(at), chunks, stage, CHUNKS)
            scores.s.ready.arrive_after_mma(at.index)
            scores.dp.acquire(at)
            stage = multiply(scores.dp.slot(at), chunks, stage, CHUNKS)
            scores.dp.ready.arrive_after_mma(at.index)
            count += 1


@gluon.jit
def send(x, tile, desc, pair, row, key):
    """Store x [128, 64] in memory through a tile of this role that TMA has read since its last use."""
    BOX: gl.constexpr = desc.layout
    store_wait(1)
    tile.store(x)
    fence_async_shared()
    tma_store(desc, [pair, row, key], reinterpret(tile, [1, 128, 64], BOX))


@gluon.jit
def score_role(
    scores,
    out,
    p_desc,
    ds_desc,
    terms,
    slab,
    scales,
    H: gl.constexpr,
    SCALED: gl.constexpr,
    M: gl.constexpr,
    VARLEN: gl.constexpr,
):
    """Compute P and dS of keys 64 H .. 64 H + 63 of every tile; a thread has one row."""
    DTYPE: gl.constexpr = out.dtype
    L: gl.constexpr = scores.s.slots.index(0).slice(0, 64).get_reg_layout()
    ds_scale = 1.0
    if SCALED:
        ds_scale = gl.load(scales.ds_ptr)
    count = gl.to_tensor(0)
    for tile_id in range(gl.program_id(0), slab.count, gl.num_programs(0)):
        tile = score_tile(tile_id, slab, M, VARLEN)
        pair, mine, to = tile.pair, tile.key + H * 64, tile.part.slab_row + tile.row
        if tile.some:
            at = Stage(count % 2, (count // 2) % 2)
            row = tile.row + gl.arange(0, 128, layout=gl.SliceLayout(1, L))
            lse2, delta = row_terms(terms, tile, row)
            scores.s.wait(at)
            p, s = probabilities(scores.s.slot(at).slice(H * 64, 64).load(), lse2[:, None], scales.s)
            scores.s.release(at)
            p = visible(p, tile.row, mine, tile.part)
            if SCALED:
                send((p * scales.p).to(DTYPE), out.index(0), p_desc, pair, to, mine)
            else:
                send(p.to(DTYPE), out.index(0), p_desc, pair, to, mine)
            scores.dp.wait(at)
            ds = score_gradient(p, scores.dp.slot(at).slice(H * 64, 64).load(), delta[:, None], s, scales.s)
            scores.dp.release(at)
            if SCALED:
                ds = ds * ds_scale
            send(ds.to(DTYPE), out.index(1), ds_desc, pair, to, mine)
            count += 1
        elif tile.read:
            nothing = gl.zeros([128, 64], DTYPE, L)
            send(nothing, out.index(0), p_desc, pair, to, mine)
            send(nothing, out.index(1), ds_desc, pair, to, mine)
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
    TILE: gl.constexpr = TensorMemoryLayout([128, 128], col_stride=1)
    a = gl.allocate_shared_memory(q_desc.dtype, [SLOTS, 128, 64], MATRIX)
    b = gl.allocate_shared_memory(q_desc.dtype, [SLOTS, 128, 64], MATRIX)
    left_out = gl.allocate_shared_memory(q_desc.dtype, [2, 128, 64], MATRIX)
    right_out = gl.allocate_shared_memory(q_desc.dtype, [2, 128, 64], MATRIX)
    s_tiles = allocate_tensor_memory(gl.float32, [2, 128, 128], TILE)
    dp_tiles = allocate_tensor_memory(gl.float32, [2, 128, 128], TILE)
    ring = new_ring(a)
    s = new_ring(s_tiles, 2)
    dp = new_ring(dp_tiles, 2)
    init_barriers((ring.ready, ring.free, s.ready, s.free, dp.ready, dp.free))
    slab = slab_of(sizes, sequences, VARLEN)
    operands = Operands(q_desc, k_desc, dout_desc, v_desc)
    chunks = Chunks(ring, b)
    scores = Scores(s, dp)
    gl.warp_specialize(
        [
            (score_role, (scores, left_out, p_desc, ds_desc, terms, slab, scales, 0, SCALED, M, VARLEN)),
            (score_role, (scores, right_out, p_desc, ds_desc, terms, slab, scales, 1, SCALED, M, VARLEN)),
            (mma_role, (chunks, scores, slab, CHUNKS, M, VARLEN)),
            (load_role, (operands, ragged, chunks, slab, CHUNKS, M, VARLEN)),
        ],
        [4, 1, 1],
        [SCORE_REGS, LOAD_REGS, LOAD_REGS],
    )
