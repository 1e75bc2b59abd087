"""Gradients of FMHA on sm_100a, head dims 64 and 128, in one launch: five products of the size of the scores.

A CTA owns 128 keys and streams tiles of 128 packed query rows past them. It adds dQ of each tile to an fp32 sum in
memory, in no fixed order; round_sum rounds the sum (round_sum.py). dK and dV stay in tensor memory::

    S^T = K Q^T    P^T = 2^(S^T scale - lse2) if visible    dP^T = V dO^T    dS^T = P^T (dP^T - delta)
    dV += P^T dO   dK += dS^T Q   dQ = dS K

P^T and dS^T are left operands as they lie in tensor memory. The product for dQ needs dS, not dS^T, and reads it
transposed from a copy of dS^T in shared memory. At head dim 128, dV, dK, S and dP fill tensor memory, so dQ overwrites
dP. Role chart::

    load      1 warp   | K V | Q0 dO0 | Q1 dO1 | ...
    mma       1 warp   | S0 dP0 |      | dV0 S1 | dK0 dQ0 | dP1 | dV1 S2 | dK1 dQ1 | dP2 | dV2 S3 | ...
    left      4 warps  |        | P0 . | dS0 .. | P1 .......... | dS1 .. | P2 .......... | ...      rows 0-63 of a tile
    right     4 warps  |        | P0 . | dS0 .. | P1 .......... | dS1 .. | P2 .......... | ...      rows 64-127
    add       4 warps  |                                  | dQ0 ................ | dQ1 ...

While left and right compute dS of a tile, the tensor core computes dV of that tile and S of the next. While they
compute the exponentials of the next, it computes dK, dQ and the next dP. add loads dQ into registers, so that its
columns are free for dP at once, and hands it to TMA through shared memory in pieces of 32 columns. A quarter of the
exponentials is computed without the exponential unit, which left and right share.

tensor memory   columns        holds                                       head dim 64     128
s               128            S^T, fp32 [128, 128]; P^T overwrites it     128             128
dp              128            dP^T; dS^T overwrites it                    128             128
dq              D              dQ; at head dim 128 it overwrites dp        64              0
acc             2 x D          dK and dV                                   128             256
                                                                           = 448           = 512

shared memory   bytes               holds                                                        head dim 64    128
x               2 x 256 D           [128, D] each: K, V                                          32 KiB         64
y               4 or 3 x 256 D      [128, D] each: Q in two slots, dO in two (128: in one)       64             96
ds              32768               [128, 128]: dS^T                                             32             32
pieces          2 x 16384           [128, 32], fp32: dQ on its way to memory                     32             32
stat            2048                [4, 128] fp32: lse2 and delta of the rows in the slots of Q  2              2
barriers        8 each

barrier         arrives             count       waits              means
x_ready         TMA bytes           1           mma                K and V are there
ready[i]        TMA bytes           1           mma, left, right   slot i is filled, and stat of the rows in it
free[i]         commit of mma       1           load               the products that read slot i are complete; of Q the
                                                                   last of them waited for ds_ready, so stat is read
landed          TMA bytes           1           load               VARLEN: K and V are there, unseen keys too
s_ready         commit of mma       1           left, right        S is complete
p_ready         left, right         2           mma                P is stored, S is read
dp_ready        commit of mma       1           left, right        dP is complete
ds_ready        left, right         2           mma                dS is stored twice, dP is read
dq_ready        commit of mma       1           add, left, right   dQ is complete, ds is read
dq_free         add                 1           mma                dQ is read
done            commit of mma       1           left, right        dK and dV are complete

S of the next tile overwrites P of this one, and dQ overwrites dS: the products that read them were issued before, and
the tensor core works in order. Rows past the end are as in backward_tiles.py.
"""

from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout, allocate_tensor_memory, tcgen05_mma

from dsv4.fmha.kernels import scores
from dsv4.fmha.kernels.backward_sequences import sizes_of, tile_of
from dsv4.fmha.kernels.ragged import pair_of
from dsv4.fmha.kernels.sm100.backward_mask import all_visible, streamed, zero_masked
from dsv4.fmha.kernels.sm100.backward_tiles import (
    Numbers,
    Result,
    TileProduct,
    accumulate,
    column_numbers,
    finish,
    load_own,
    load_y,
    operand,
    powers,
    scaled,
)
from dsv4.fmha.kernels.sm100.softmax_parts import whole
from dsv4.kernels.compat import Value, aggregate, fence_async_shared, gl, gluon, store_wait, tma_add
from dsv4.kernels.opaque import zero
from dsv4.kernels.ring import Barriers, Ring, Stage, init_barriers, new_barriers, new_ring


@aggregate
class Memory:
    """Shared memory, tensor memory and barriers."""

    x: Value
    y: Ring
    ds: Value
    pieces: Value
    stat: Value
    s: Value
    dp: Value
    dq: Value
    acc: Value
    x_ready: Barriers
    landed: Barriers
    s_ready: Barriers
    p_ready: Barriers
    dp_ready: Barriers
    ds_ready: Barriers
    dq_ready: Barriers
    dq_free: Barriers
    done: Barriers


@gluon.jit
def q_stage(j):
    """Return the stage with Q of tile j."""
    return Stage(j % 2, j // 2 % 2)


@gluon.jit
def dout_stage(memory, j):
    """Return the stage with dO of tile j."""
    SLOTS: gl.constexpr = memory.y.slots.shape[0] - 2
    return Stage(2 + j % SLOTS, j // SLOTS % 2)


@gluon.jit
def load_role(keys, rows, memory, work, sizes, numbers, D: gl.constexpr, VARLEN: gl.constexpr):
    LANES: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    load_own(keys, memory, work.own, sizes, D, True, VARLEN)
    for j in range(0, work.tiles):
        at_q = q_stage(j)
        at_dout = dout_stage(memory, j)
        row = work.first + j * 128
        number = row + gl.arange(0, 128, layout=LANES)
        lse2 = gl.load(numbers.lse2_ptr + number, mask=number < sizes.rows, other=float("inf"))
        delta = gl.load(numbers.delta_ptr + number, mask=number < sizes.rows, other=0.0)
        memory.y.free.wait(at_q.index, at_q.phase ^ 1)  # the first wait on an untouched barrier passes
        memory.stat.index(2 * at_q.index).store(lse2)
        memory.stat.index(2 * at_q.index + 1).store(delta)
        load_y(rows.x_desc, rows.x_place, memory, at_q.index, row, D)
        memory.y.free.wait(at_dout.index, at_dout.phase ^ 1)
        load_y(rows.y_desc, rows.y_place, memory, at_dout.index, row, D)


@gluon.jit
def mma_role(memory, work, D: gl.constexpr):
    x, ring, s, dp, acc = memory.x, memory.y, memory.s, memory.dp, memory.acc
    DTYPE: gl.constexpr = x.dtype
    n = work.tiles
    memory.x_ready.wait(0, 0)
    if n > 0:
        first_q = q_stage(0)
        first_dout = dout_stage(memory, 0)
        ring.wait(first_q)
        tcgen05_mma(x.index(0), ring.slot(first_q).permute((1, 0)), s, use_acc=False)
        memory.s_ready.arrive_after_mma(0)
        ring.wait(first_dout)
        tcgen05_mma(x.index(1), ring.slot(first_dout).permute((1, 0)), dp, use_acc=False)
        memory.dp_ready.arrive_after_mma(0)
        memory.p_ready.wait(0, 0)
        accumulate(acc.index(1), s, ring.slot(first_dout), 1, DTYPE)
        ring.release_after_mma(first_dout)
        for j in range(0, n):
            at = zero(j)  # otherwise ptxas keeps the descriptors of all products in registers, and spills them
            at_q = q_stage(j)
            next_q = q_stage(j + 1)
            next_dout = dout_stage(memory, j + 1)
            more = j + 1 < n
            if more:
                ring.wait(next_q)
                tcgen05_mma(x.index(at), ring.slot(next_q).permute((1, 0)), s, use_acc=False)
                memory.s_ready.arrive_after_mma(0)
            memory.ds_ready.wait(0, j % 2)
            accumulate(acc.index(0), dp, ring.slot(at_q), (j == 0).to(gl.int32), DTYPE)
            ring.release_after_mma(at_q)
            if D == 64:
                memory.dq_free.wait(0, (j + 1) % 2)
            tcgen05_mma(memory.ds.permute((1, 0)), x.index(at), memory.dq, use_acc=False)
            memory.dq_ready.arrive_after_mma(0)
            if more:
                ring.wait(next_dout)
                if D == 128:
                    memory.dq_free.wait(0, j % 2)
                tcgen05_mma(x.index(at + 1), ring.slot(next_dout).permute((1, 0)), dp, use_acc=False)
                memory.dp_ready.arrive_after_mma(0)
                memory.p_ready.wait(0, (j + 1) % 2)
                accumulate(acc.index(1), s, ring.slot(next_dout), 0, DTYPE)
                ring.release_after_mma(next_dout)
        memory.done.arrive_after_mma(0)


@gluon.jit
def score_role(memory, work, sizes, numbers, result, H: gl.constexpr, D: gl.constexpr, SCALED: gl.constexpr):
    """Compute P, then dS, of rows 64 H .. 64 H + 63 of every tile, and finally store dK or dV."""
    HALVES: gl.constexpr = TensorMemoryLayout([128, 64], col_stride=1)
    COLUMNS: gl.constexpr = 32  # columns at a time: the add role leaves no registers for more
    PARTS: gl.constexpr = 64 // COLUMNS
    s = memory.s.reinterpret(gl.float32, [2, 128, 64], HALVES).index(H)
    dp = memory.dp.reinterpret(gl.float32, [2, 128, 64], HALVES).index(H)
    p16 = operand(memory.s, H, memory.x.dtype)
    ds16 = operand(memory.dp, H, memory.x.dtype)
    L: gl.constexpr = s.slice(0, COLUMNS).get_reg_layout()
    own = work.own
    unmasked = all_visible(own, sizes, True)
    for j in range(0, work.tiles):
        first = work.first + j * 128
        masked = (first < unmasked[0]) | (first + 128 > unmasked[1])
        at_q = q_stage(j)
        memory.y.wait(at_q)  # stat of these rows
        lse2 = ()
        for c in gl.static_range(PARTS):
            lse2 += (column_numbers(memory, 2 * at_q.index, H * 64 + c * COLUMNS, L, COLUMNS),)
        memory.s_ready.wait(0, j % 2)
        p = ()
        score = ()
        for c in gl.static_range(PARTS):
            x, score_c = scores.exponents(s.slice(c * COLUMNS, COLUMNS).load(), lse2[c], numbers.scale)
            p_c = powers(x, masked)
            if masked:
                p_c = zero_masked(p_c, own, first + H * 64 + c * COLUMNS, sizes, L, True)
            rounded = p_c
            if SCALED:
                rounded = p_c * numbers.p_scale
            p16.slice(c * COLUMNS, COLUMNS).store(rounded.to(p16.dtype))
            p += (p_c,)
            score += (score_c,)
        memory.p_ready.arrive(0)
        delta = column_numbers(memory, 2 * at_q.index + 1, H * 64, L, COLUMNS)  # loaded before the wait
        memory.dp_ready.wait(0, j % 2)
        ds = ()
        for c in gl.static_range(PARTS):
            if c > 0:
                delta = column_numbers(memory, 2 * at_q.index + 1, H * 64 + c * COLUMNS, L, COLUMNS)
            x = scores.score_gradient(p[c], dp.slice(c * COLUMNS, COLUMNS).load(), delta, score[c], numbers.scale)
            if SCALED:
                x = x * numbers.ds_scale
            ds += (x.to(ds16.dtype),)
            ds16.slice(c * COLUMNS, COLUMNS).store(ds[c])
        memory.dq_ready.wait(0, (j + 1) % 2)  # the previous product has read memory.ds; the first wait passes
        memory.ds.slice(H * 64, 64, dim=1).store(ds[0] if PARTS == 1 else whole(ds[0], ds[1]))
        fence_async_shared()  # generic stores -> tensor-core reads
        memory.ds_ready.arrive(0)
    if work.tiles > 0:
        memory.done.wait(0, 0)
    if H == 0:
        finish(memory.acc.index(0), result.ptr0, result.stride0, result.factor0, work, sizes.keys, 0, D)
    else:
        finish(memory.acc.index(1), result.ptr1, result.stride1, result.factor1, work, sizes.keys, 0, D)


@gluon.jit
def add_role(memory, work, sums_desc, block, D: gl.constexpr):
    """Add dQ of every tile to the sum, in which the blocks of this sequence begin with `block`."""
    for j in range(0, work.tiles):
        memory.dq_ready.wait(0, j % 2)
        at = block + (work.first // 128 + j) * (D // 32)
        columns = ()
        for c in gl.static_range(D // 32):
            columns += (memory.dq.slice(c * 32, 32).load(),)
        memory.dq_free.arrive(0)
        for c in gl.static_range(D // 32):
            add_piece(columns[c], memory.pieces.index(c % 2), sums_desc, at + c)
    store_wait(0)  # shared memory must exist until the last piece has been read


@gluon.jit
def add_piece(x, piece, sums_desc, block):
    """Add x [128, 32] to a block, through a piece of shared memory that TMA has read since its last use."""
    store_wait(1)
    piece.store(x)
    fence_async_shared()
    tma_add(sums_desc, [block * 128, 0], piece)


@gluon.jit
def backward_keys(
    tensors,
    q_desc,
    k_desc,
    dout_desc,
    v_desc,
    sums_desc,
    ragged,
    dk,
    dv,
    whole,
    scales,
    D: gl.constexpr,
    SCALED: gl.constexpr,
    VARLEN: gl.constexpr,
    SCORE_REGS: gl.constexpr,
    ADD_REGS: gl.constexpr,
    WARP_REGS: gl.constexpr,
):
    """Compute dK, dV and the sum of dQ. Grid: tiles of keys, then (sequence, KV head). lse2, delta: fp32 by (sequence,
    KV head, packed row). sums_desc: the sum of dQ, in lines of 32 columns. SCALED, VARLEN: as in backward_tiles."""
    MATRIX: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, D], q_desc.dtype)
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, 128], q_desc.dtype)
    TILE: gl.constexpr = TensorMemoryLayout([128, 128], col_stride=1)
    x = gl.allocate_shared_memory(q_desc.dtype, [2, 128, D], MATRIX)
    y = gl.allocate_shared_memory(q_desc.dtype, [3 if D == 128 else 4, 128, D], MATRIX)
    ds = gl.allocate_shared_memory(q_desc.dtype, [128, 128], SQUARE)
    pieces = gl.allocate_shared_memory(gl.float32, [2, 128, 32], sums_desc.layout)
    stat = gl.allocate_shared_memory(gl.float32, [4, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    s = allocate_tensor_memory(gl.float32, [128, 128], TILE)
    dp = allocate_tensor_memory(gl.float32, [128, 128], TILE)
    acc = allocate_tensor_memory(gl.float32, [2, 128, D], TensorMemoryLayout([128, D], col_stride=1))
    dq = dp
    if D == 64:
        dq = allocate_tensor_memory(gl.float32, [128, D], TensorMemoryLayout([128, D], col_stride=1))
    x_ready = new_barriers(1)
    ring = new_ring(y)
    s_ready = new_barriers(1)
    p_ready = new_barriers(1, 2)
    dp_ready = new_barriers(1)
    ds_ready = new_barriers(1, 2)
    dq_ready = new_barriers(1)
    dq_free = new_barriers(1)
    done = new_barriers(1)
    barriers = (ring.ready, ring.free, x_ready, s_ready, p_ready, dp_ready, ds_ready, dq_ready, dq_free, done)
    landed = x_ready  # unused
    if VARLEN:
        landed = new_barriers(1)
        barriers += (landed,)
    init_barriers(barriers)
    memory = Memory(x, ring, ds, pieces, stat, s, dp, dq, acc, x_ready, landed, s_ready, p_ready, dp_ready, ds_ready,
                    dq_ready, dq_free, done)  # fmt: skip

    pair = gl.program_id(1)
    batch = pair // whole.heads
    head = pair - batch * whole.heads
    own = gl.program_id(0) * 128
    sizes = whole
    lse2_ptr = tensors.lse2_ptr + pair.to(gl.int64) * whole.rows
    delta_ptr = tensors.delta_ptr + pair.to(gl.int64) * whole.rows
    dk_ptr = dk.ptr + (batch.to(gl.int64) * dk.batch + head.to(gl.int64) * dk.head)
    dv_ptr = dv.ptr + (batch.to(gl.int64) * dv.batch + head.to(gl.int64) * dv.head)
    tile = pair * ((whole.rows + 127) // 128)
    first_row = 0
    first_key = 0
    if VARLEN:
        seq, own = tile_of(gl.program_id(0), tensors.cu_k_ptr, whole.sequences, 1)
        first_row, first_key, sizes = sizes_of(seq, own, whole, tensors.cu_q_ptr, tensors.cu_k_ptr, True)
        tile = pair * (whole.rows // 128 + whole.sequences) + first_row // 128 + seq
        lse2_ptr += first_row
        delta_ptr += first_row
        dk_ptr += first_key.to(gl.int64) * dk.row
        dv_ptr += first_key.to(gl.int64) * dv.row
    first, end = streamed(own, sizes, True)
    first = first // 128 * 128  # a tile of the sum
    work = TileProduct(own, first, (gl.maximum(end - first, 0) + 127) // 128)
    keys = pair_of(k_desc, v_desc, ragged.x0, ragged.x1, batch, head, first_key, sizes.keys, VARLEN)
    rows = pair_of(q_desc, dout_desc, ragged.y0, ragged.y1, batch, head, first_row, sizes.rows, VARLEN)
    ds_scale, dk_factor, dv_factor = scaled(scales, SCALED)
    numbers = Numbers(lse2_ptr, delta_ptr, scales.s, scales.p, ds_scale)
    result = Result(dk_ptr, dv_ptr, dk.row, dv.row, dk_factor, dv_factor)
    gl.warp_specialize(
        [
            (score_role, (memory, work, sizes, numbers, result, 0, D, SCALED)),
            (score_role, (memory, work, sizes, numbers, result, 1, D, SCALED)),
            (add_role, (memory, work, sums_desc, tile * (D // 32), D)),
            (mma_role, (memory, work, D)),
            (load_role, (keys, rows, memory, work, sizes, numbers, D, VARLEN)),
        ],
        [4, 4, 1, 1],
        [SCORE_REGS, ADD_REGS, WARP_REGS, WARP_REGS],
    )
