"""P and dS of attention on sm_100a, to memory: tiles of 128 query rows times 128 keys, head dims 256 and 512.

    S = Q K^T     P = 2^(S scale - lse2) where seen     dP = dO V^T     dS = P (dP - delta)

backward.py multiplies the rest. Why not in one kernel as at head dim 128: dK and dV of 128 keys would take 512 columns
of tensor memory each at head dim 512 (256 each at 256), all there are without S and dP; and Q, dO, K and V of 128 rows
take 512 KiB of shared memory. With 64 rows the tensor core runs at half its rate. Stored once and read by three
products, P and dS cost 10 bytes for every 10 x head dim operations.

One CTA per multiprocessor loops over tiles. Role chart::

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

Tensors and tiles are those of the Hopper kernel, whose needed() and locate() say which tiles are computed, which are
written as zeros and which are left alone.
"""

from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    tcgen05_commit,
    tcgen05_mma,
)

from dsv4.fmha.kernels.backward_arguments import Operands
from dsv4.fmha.kernels.loads import advance
from dsv4.fmha.kernels.score_tiles import (
    Ring,
    Rows,
    ScoreScales,
    SlabSizes,
    load_role,
    locate,
    needed,
    row_terms,
    tiles_of,
    visible,
)
from dsv4.kernels.compat import (
    Value,
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    store_wait,
    tma_store,
)


@aggregate
class Stages:
    """Of S and dP, two each."""

    s: Value
    dp: Value
    s_ready: Value
    s_free: Value
    dp_ready: Value
    dp_free: Value


@gluon.jit
def chunks(acc, ring, slot, phase, CHUNKS: gl.constexpr, SLOTS: gl.constexpr):
    """acc [128, 128] = the products of the next chunks, added up."""
    for chunk in range(0, CHUNKS):
        mbarrier.wait(ring.ready.index(slot), phase)
        tcgen05_mma(ring.a.index(slot), ring.b.index(slot).permute((1, 0)), acc, use_acc=chunk > 0)
        tcgen05_commit(ring.free.index(slot))
        slot, phase = advance(slot, phase, SLOTS)
    return slot, phase


@gluon.jit
def mma_role(ring, stages, sizes, tiles, CHUNKS: gl.constexpr, SLOTS: gl.constexpr):
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    count = gl.to_tensor(0)
    for item in range(gl.program_id(0), tiles.count, gl.num_programs(0)):
        pair, row, key = locate(item, tiles)
        some, read = needed(row, key, sizes)
        if some:
            i = count % 2
            before = (count // 2 + 1) % 2  # the first wait on an untouched barrier passes
            mbarrier.wait(stages.s_free.index(i), before)
            slot, phase = chunks(stages.s.index(i), ring, slot, phase, CHUNKS, SLOTS)
            tcgen05_commit(stages.s_ready.index(i))
            mbarrier.wait(stages.dp_free.index(i), before)
            slot, phase = chunks(stages.dp.index(i), ring, slot, phase, CHUNKS, SLOTS)
            tcgen05_commit(stages.dp_ready.index(i))
            count += 1


@gluon.jit
def send(x, tile, desc, pair, row, key):
    """x [128, 64] to memory by way of a tile of this role, from which the one before the last has left."""
    BOX: gl.constexpr = desc.layout
    store_wait(1)
    tile.store(x)
    fence_async_shared()
    tma_store(desc, [pair, row, key], reinterpret(tile, [1, 128, 64], BOX))


@gluon.jit
def score_role(stages, out, p_desc, ds_desc, terms, sizes, tiles, scales, H: gl.constexpr, SCALED: gl.constexpr):
    """Keys 64 H .. 64 H + 63 of every tile, one row per thread."""
    DTYPE: gl.constexpr = out.dtype
    L: gl.constexpr = stages.s.index(0).slice(0, 64).get_reg_layout()
    ds_scale = 1.0
    if SCALED:
        ds_scale = gl.load(scales.ds_ptr)
    count = gl.to_tensor(0)
    for item in range(gl.program_id(0), tiles.count, gl.num_programs(0)):
        pair, first_row, key = locate(item, tiles)
        some, read = needed(first_row, key, sizes)
        mine = key + H * 64
        if some:
            i = count % 2
            phase = (count // 2) % 2
            row = first_row + gl.arange(0, 128, layout=gl.SliceLayout(1, L))
            lse2, delta = row_terms(terms, pair, row, sizes)
            mbarrier.wait(stages.s_ready.index(i), phase)
            p = gl.exp2(stages.s.index(i).slice(H * 64, 64).load() * scales.s - lse2[:, None])
            mbarrier.arrive(stages.s_free.index(i), count=1)
            p = visible(p, first_row, mine, sizes)
            if SCALED:
                send((p * scales.p).to(DTYPE), out.index(0), p_desc, pair, first_row, mine)
            else:
                send(p.to(DTYPE), out.index(0), p_desc, pair, first_row, mine)
            mbarrier.wait(stages.dp_ready.index(i), phase)
            ds = p * (stages.dp.index(i).slice(H * 64, 64).load() - delta[:, None])
            mbarrier.arrive(stages.dp_free.index(i), count=1)
            if SCALED:
                ds = ds * ds_scale
            send(ds.to(DTYPE), out.index(1), ds_desc, pair, first_row, mine)
            count += 1
        elif read:
            nothing = gl.zeros([128, 64], DTYPE, L)
            send(nothing, out.index(0), p_desc, pair, first_row, mine)
            send(nothing, out.index(1), ds_desc, pair, first_row, mine)
    store_wait(0)


@gluon.jit(do_not_specialize=[
    "all_rows", "rows", "row_begin", "tokens", "keys", "group", "left", "right", "row_piece", "key_piece", "pairs",
    "pair_begin", "kv_heads", "scale", "p_scale",
])  # fmt: skip
def backward_scores(lse2_ptr, delta_ptr, ds_scale_ptr, q_desc, k_desc, dout_desc, v_desc, p_desc, ds_desc, scale,
                    p_scale, all_rows, rows, row_begin, tokens, keys, group, left, right, row_piece, key_piece, pairs,
                    pair_begin, kv_heads,
                    D: gl.constexpr, SLOTS: gl.constexpr, SCALED: gl.constexpr, SCORE_REGS: gl.constexpr,
                    LOAD_REGS: gl.constexpr):  # fmt: skip
    """rows: of the slab, `row_begin` its first; lse2 and delta [pairs of the slab, all_rows]."""
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    CHUNKS: gl.constexpr = D // 64
    TILE: gl.constexpr = TensorMemoryLayout([128, 128], col_stride=1)
    a = gl.allocate_shared_memory(q_desc.dtype, [SLOTS, 128, 64], MATRIX)
    b = gl.allocate_shared_memory(q_desc.dtype, [SLOTS, 128, 64], MATRIX)
    left_out = gl.allocate_shared_memory(q_desc.dtype, [2, 128, 64], MATRIX)
    right_out = gl.allocate_shared_memory(q_desc.dtype, [2, 128, 64], MATRIX)
    s = allocate_tensor_memory(gl.float32, [2, 128, 128], TILE)
    dp = allocate_tensor_memory(gl.float32, [2, 128, 128], TILE)
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BAR)
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BAR)
    s_ready = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    s_free = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    dp_ready = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    dp_free = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    for i in gl.static_range(SLOTS):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(s_ready.index(i), count=1)
        mbarrier.init(s_free.index(i), count=2)
        mbarrier.init(dp_ready.index(i), count=1)
        mbarrier.init(dp_free.index(i), count=2)
    tiles = tiles_of(rows, keys, pairs)
    sizes = SlabSizes(rows, row_begin, tokens, keys, group, left, right, row_piece, key_piece)
    operands = Operands(q_desc, k_desc, dout_desc, v_desc)
    ring = Ring(a, b, ready, free)
    stages = Stages(s, dp, s_ready, s_free, dp_ready, dp_free)
    terms = Rows(lse2_ptr, delta_ptr, all_rows)
    scales = ScoreScales(scale, p_scale, ds_scale_ptr)
    gl.warp_specialize([
        (score_role, (stages, left_out, p_desc, ds_desc, terms, sizes, tiles, scales, 0, SCALED)),
        (score_role, (stages, right_out, p_desc, ds_desc, terms, sizes, tiles, scales, 1, SCALED)),
        (mma_role, (ring, stages, sizes, tiles, CHUNKS, SLOTS)),
        (load_role, (operands, ring, sizes, tiles, pair_begin, kv_heads, CHUNKS, SLOTS)),
    ], [4, 1, 1], [SCORE_REGS, LOAD_REGS, LOAD_REGS])  # fmt: skip
