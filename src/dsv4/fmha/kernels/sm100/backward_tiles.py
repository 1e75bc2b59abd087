"""Gradients of FMHA on sm_100a, head dims 64 and 128: two launches of one kernel, no atomics, the same bits every run.

A CTA owns 128 rows of X and streams tiles of 128 rows of Y past them. X and Y of each launch::

    launch    X0, X1    Y0, Y1    S = X0 Y0^T   dP = X1 Y1^T        accumulated in tensor memory
    KEYS      K, V      Q, dO     S^T           dP^T                dV += P^T dO,  dK += dS^T Q
    queries   Q, dO     K, V      S             dP                  dQ += dS K

    P = 2^(S scale - lse2) if visible     dS = P (dP - delta)

P^T and dS^T are the left operands as they lie in tensor memory; nothing is transposed. The launches need seven products
of the size of the scores, and a kernel that adds dQ with atomics needs five, but there is no fp32 workspace, no second
pass over it, and one order of summation. Query heads of one KV head are packed rows (tiles.py), so the loop sums dK and
dV over them. Role chart (KEYS)::

    load      1 warp   | X0 X1 | Y0 Y1 of tile 0 | of tile 1 | ...
    mma       1 warp   | S0 dP0 |      | dV(P0) S1 |       | dK(dS0) dP1 | dV(P1) S2 | ...
    left      4 warps  |        | P0 .......|  dS0 ........|  P1 ....... | ...           columns 0-63 of every tile
    right     4 warps  |        | P0 .......|  dS0 ........|  P1 ....... | ...           columns 64-127

While left and right compute the exponentials of a tile, the tensor core multiplies dS of the previous tile; while they
compute dS, it multiplies P. dQ needs no P: S of the next tile is issued as soon as this one is in registers, one
product earlier than for dK and dV. A quarter of the exponentials is computed without the exponential unit, which left
and right share. A row of Q is a column of S^T: every thread reads lse2 and delta of all columns from shared memory,
delta during the exponentials.

tensor memory   columns        holds                                       head dim 64     128
s               128            S, fp32 [128, 128]; P overwrites it         128             128
dp              128            dP; dS overwrites it                        128             128
acc             2 x D          dK and dV; or D columns: dQ                 128             256
                                                                           = 384           = 512

P and dS of columns 0-63, as 16-bit numbers, lie in the first half of these columns of S, and those of 64-127 in the
first half of theirs: left and right access different columns, and the left operand is two tiles of K = 64.

shared memory   bytes               holds
x               2 x 256 D           [128, D] each: X0, X1
y               4 or 5 x 256 D      [128, D] each: Y0 in two slots (queries: three, S is ahead of dQ), Y1 in two
                                    (all: 192 or 224 KiB at 128)
stat            2048                KEYS: [4, 128] fp32: lse2 and delta of the rows in the slots of Y0
barriers        8 each

barrier         arrives             count       waits              means
x_ready         TMA bytes           1           mma                X is there
ready[i]        TMA bytes           1           mma; KEYS: left,   slot i is filled, and stat of the rows in it
                                                right
free[i]         commit of mma       1           load               the products that read slot i are complete; KEYS: of
                                                                   Y0 the last of them waited for ds_ready, so stat is
                                                                   read
landed          TMA bytes           1           load               VARLEN, KEYS: X is there, unseen keys too
s_ready         commit of mma       1           left, right        S is complete
p_ready         left, right         2           mma                S is read; KEYS: P is stored
dp_ready        commit of mma       1           left, right        dP is complete
ds_ready        left, right         2           mma                dS is stored, dP is read
done            commit of mma       1           left, right        the accumulators are complete

S of the next tile overwrites P of this one, and dP overwrites dS: the products that read them were issued earlier, and
the tensor core works in order. TMA fills what lies past the end of a tensor with zeros, so products read no other rows.
lse2 of rows past the end is +inf, which makes P 0 (2^-126 without the exponential unit, and zeros multiply it).
VARLEN: all sequences are one batch, and TMA stops at their ends too (fmha/kernels/ragged.py). load zeroes keys before a
window, which may hold NaN.
"""

from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout, allocate_tensor_memory, tcgen05_mma

from dsv4.fmha.kernels import scores
from dsv4.fmha.kernels.backward_sequences import first_visible, sizes_of, tile_of
from dsv4.fmha.kernels.loads import zero_invisible
from dsv4.fmha.kernels.ragged import load_pair, load_rows, pair_of
from dsv4.fmha.kernels.sm100.backward_mask import all_visible, streamed, zero_masked
from dsv4.fmha.kernels.sm100.softmax_parts import exp2_by_fma, halves, whole
from dsv4.kernels.compat import Value, aggregate, fence_async_shared, gl, gluon, mbarrier
from dsv4.kernels.opaque import zero
from dsv4.kernels.ring import Barriers, Ring, Stage, init_barriers, new_barriers, new_ring


@aggregate
class Memory:
    """Shared memory, tensor memory and barriers."""

    x: Value
    y: Ring
    s: Value
    dp: Value
    acc: Value
    stat: Value  # KEYS: lse2 and delta of the rows in the slots of y
    x_ready: Barriers
    landed: Barriers
    s_ready: Barriers
    p_ready: Barriers
    dp_ready: Barriers
    ds_ready: Barriers
    done: Barriers


@aggregate
class TileProduct:
    """The work of one CTA: the rows of X from `own` on, and `tiles` tiles of Y from row `first` on."""

    own: Value
    first: Value
    tiles: Value


@aggregate
class Numbers:
    """The exponent to subtract and delta, by row of this (sequence, KV head). The scales of S (base 2), P and dS."""

    lse2_ptr: Value
    delta_ptr: Value
    scale: Value
    p_scale: Value
    ds_scale: Value


@aggregate
class Result:
    """Gradients of this (sequence, KV head): KEYS: dk and dv, else dq; the strides of their rows, in elements."""

    ptr0: Value
    ptr1: Value
    stride0: Value
    stride1: Value
    factor0: Value
    factor1: Value


@gluon.jit
def stage0(memory, j):
    """Return the stage with Y0 of tile j."""
    DEPTH: gl.constexpr = memory.y.slots.shape[0] - 2
    return Stage(j % DEPTH, j // DEPTH % 2)


@gluon.jit
def stage1(memory, j):
    """Return the stage with Y1 of tile j."""
    DEPTH: gl.constexpr = memory.y.slots.shape[0] - 2
    return Stage(DEPTH + j % 2, j // 2 % 2)


@gluon.jit
def load_x(x, memory, ready, own, D: gl.constexpr):
    mbarrier.expect(ready, 2 * 128 * D * 2)
    load_pair(x, memory.x.index(0), memory.x.index(1), ready, own, D)


@gluon.jit
def load_own(x, memory, own, sizes, D: gl.constexpr, KEYS: gl.constexpr, VARLEN: gl.constexpr):
    """Load X, with 0 in keys that no query sees."""
    unseen: gl.constexpr = False
    if KEYS and VARLEN:
        unseen = own < first_visible(sizes)
    if unseen:
        load_x(x, memory, memory.landed.at(0), own, D)
        memory.landed.wait(0, 0)
        zero_invisible(memory.x.index(0), own, first_visible(sizes), sizes.keys, 128, D)
        zero_invisible(memory.x.index(1), own, first_visible(sizes), sizes.keys, 128, D)
        fence_async_shared()  # generic stores -> tensor-core reads
        memory.x_ready.arrive(0)
    else:
        load_x(x, memory, memory.x_ready.at(0), own, D)


@gluon.jit
def load_y(desc, place, memory, slot, row, D: gl.constexpr):
    """Load a tile of Y from `row` of the sequence on."""
    mbarrier.expect(memory.y.ready.at(slot), 128 * D * 2)
    load_rows(desc, place, memory.y.slots.index(slot), memory.y.ready.at(slot), row, D)


@gluon.jit
def load_role(x, y, memory, work, sizes, numbers, D: gl.constexpr, KEYS: gl.constexpr, VARLEN: gl.constexpr):
    LANES: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    load_own(x, memory, work.own, sizes, D, KEYS, VARLEN)
    for j in range(0, work.tiles):
        at0 = stage0(memory, j)
        at1 = stage1(memory, j)
        row = work.first + j * 128
        if KEYS:
            number = row + gl.arange(0, 128, layout=LANES)
            lse2 = gl.load(numbers.lse2_ptr + number, mask=number < sizes.rows, other=float("inf"))
            delta = gl.load(numbers.delta_ptr + number, mask=number < sizes.rows, other=0.0)
        memory.y.free.wait(at0.index, at0.phase ^ 1)  # the first wait on an untouched barrier passes
        if KEYS:
            memory.stat.index(2 * at0.index).store(lse2)
            memory.stat.index(2 * at0.index + 1).store(delta)
        load_y(y.x_desc, y.x_place, memory, at0.index, row, D)
        memory.y.free.wait(at1.index, at1.phase ^ 1)
        load_y(y.y_desc, y.y_place, memory, at1.index, row, D)


@gluon.jit
def operand(tile, H: gl.constexpr, DTYPE: gl.constexpr):
    """Return the 16-bit numbers [128, 64] of half H, in the first half of the columns of its fp32 numbers."""
    half = tile.reinterpret(gl.float32, [2, 128, 64], TensorMemoryLayout([128, 64], col_stride=1)).index(H)
    return half.reinterpret(DTYPE, [128, 128], TensorMemoryLayout([128, 128], col_stride=1)).slice(0, 64)


@gluon.jit
def accumulate(acc, tile, y, first, DTYPE: gl.constexpr):
    """Add P or dS [128, 128], by halves, times y [128, D] to acc; first: overwrite acc."""
    for h in gl.static_range(2):
        tcgen05_mma(operand(tile, h, DTYPE), y.slice(h * 64, 64, dim=0), acc, use_acc=(h > 0) | (first == 0))


@gluon.jit
def mma_role(memory, work, KEYS: gl.constexpr):
    x, ring, s, dp, acc = memory.x, memory.y, memory.s, memory.dp, memory.acc
    DTYPE: gl.constexpr = x.dtype
    n = work.tiles
    memory.x_ready.wait(0, 0)
    if n > 0:
        begin0 = stage0(memory, 0)
        begin1 = stage1(memory, 0)
        ring.wait(begin0)
        tcgen05_mma(x.index(0), ring.slot(begin0).permute((1, 0)), s, use_acc=False)
        memory.s_ready.arrive_after_mma(0)
        ring.wait(begin1)
        tcgen05_mma(x.index(1), ring.slot(begin1).permute((1, 0)), dp, use_acc=False)
        memory.dp_ready.arrive_after_mma(0)
        if not KEYS:
            ring.release_after_mma(begin1)
        for j in range(0, n):
            at = zero(j)  # otherwise ptxas keeps the descriptors of all products in registers, and spills them
            at0 = stage0(memory, j)
            at1 = stage1(memory, j)
            next0 = stage0(memory, j + 1)
            next1 = stage1(memory, j + 1)
            more = j + 1 < n
            begins = (j == 0).to(gl.int32)
            memory.p_ready.wait(0, j % 2)
            if KEYS:
                accumulate(acc.index(1), s, ring.slot(at1), begins, DTYPE)
                ring.release_after_mma(at1)
            if more:
                ring.wait(next0)
                tcgen05_mma(x.index(at), ring.slot(next0).permute((1, 0)), s, use_acc=False)
                memory.s_ready.arrive_after_mma(0)
            memory.ds_ready.wait(0, j % 2)
            accumulate(acc.index(0), dp, ring.slot(at0), begins, DTYPE)
            ring.release_after_mma(at0)
            if more:
                ring.wait(next1)
                tcgen05_mma(x.index(at + 1), ring.slot(next1).permute((1, 0)), dp, use_acc=False)
                memory.dp_ready.arrive_after_mma(0)
                if not KEYS:
                    ring.release_after_mma(next1)
        memory.done.arrive_after_mma(0)


@gluon.jit
def row_numbers(ptr, own, sizes, L: gl.constexpr, OTHER: gl.constexpr):
    """Return lse2 or delta of the rows of scores [128, 64] from `own` on, one per thread."""
    row = (own + gl.arange(0, 128, layout=gl.SliceLayout(1, L)))[:, None]
    return gl.load(ptr + row, mask=row < sizes.rows, other=OTHER)


@gluon.jit
def column_numbers(memory, number, first, L: gl.constexpr, COLUMNS: gl.constexpr = 64):
    """Return lse2 or delta of columns of the scores, all of them in every thread."""
    return memory.stat.index(number).slice(first, COLUMNS).load(gl.SliceLayout(0, L))[None, :]


@gluon.jit
def powers(x, masked):
    """Return 2^x; a quarter of the columns without the exponential unit, which both groups share, unless some row is
    masked: there 2^-inf has to be 0."""
    a, b = halves(x)
    b, c = halves(b)
    if masked:
        c = gl.exp2(c)
    else:
        c = exp2_by_fma(c)
    return gl.convert_layout(whole(gl.exp2(a), whole(gl.exp2(b), c)), x.type.layout)


@gluon.jit
def score_role(
    memory, work, sizes, numbers, result, H: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr, SCALED: gl.constexpr
):
    """Compute P, then dS, of columns 64 H .. 64 H + 63 of every tile, and finally store a half of the result."""
    HALVES: gl.constexpr = TensorMemoryLayout([128, 64], col_stride=1)
    s = memory.s.reinterpret(gl.float32, [2, 128, 64], HALVES).index(H)
    dp = memory.dp.reinterpret(gl.float32, [2, 128, 64], HALVES).index(H)
    p16 = operand(memory.s, H, memory.x.dtype)
    ds16 = operand(memory.dp, H, memory.x.dtype)
    L: gl.constexpr = s.get_reg_layout()
    own = work.own
    if not KEYS:
        lse2 = row_numbers(numbers.lse2_ptr, own, sizes, L, float("inf"))
        delta = row_numbers(numbers.delta_ptr, own, sizes, L, 0.0)
    unmasked = all_visible(own, sizes, KEYS)
    for j in range(0, work.tiles):
        first = work.first + j * 128
        masked = (first < unmasked[0]) | (first + 128 > unmasked[1])
        if KEYS:
            at0 = stage0(memory, j)
            memory.y.wait(at0)  # stat of these rows
            lse2 = column_numbers(memory, 2 * at0.index, H * 64, L)
        memory.s_ready.wait(0, j % 2)
        x = s.load()
        if not KEYS:
            memory.p_ready.arrive(0)
        x, score = scores.exponents(x, lse2, numbers.scale)
        if KEYS:
            delta = column_numbers(memory, 2 * at0.index + 1, H * 64, L)  # during the exponentials
        p = powers(x, masked)
        if masked:
            p = zero_masked(p, own, first + H * 64, sizes, L, KEYS)
        if KEYS:
            rounded = p
            if SCALED:
                rounded = p * numbers.p_scale
            p16.store(rounded.to(p16.dtype))
            memory.p_ready.arrive(0)
        memory.dp_ready.wait(0, j % 2)
        ds = scores.score_gradient(p, dp.load(), delta, score, numbers.scale)
        if SCALED:
            ds = ds * numbers.ds_scale
        ds16.store(ds.to(ds16.dtype))
        memory.ds_ready.arrive(0)
    if work.tiles > 0:
        memory.done.wait(0, 0)
    if KEYS:
        if H == 0:
            finish(memory.acc.index(0), result.ptr0, result.stride0, result.factor0, work, sizes.keys, 0, D)
        else:
            finish(memory.acc.index(1), result.ptr1, result.stride1, result.factor1, work, sizes.keys, 0, D)
    else:
        finish(memory.acc.index(0), result.ptr0, result.stride0, result.factor0, work, sizes.rows, H * (D // 2), D // 2)


@gluon.jit
def finish(acc, ptr, stride, factor, work, rows, BEGIN: gl.constexpr, WIDTH: gl.constexpr):
    """Store columns BEGIN .. of an accumulator [128, D], times factor, as rows of the gradient; 0 without any tile."""
    L: gl.constexpr = acc.slice(0, 32).get_reg_layout()
    row = work.own + gl.arange(0, 128, layout=gl.SliceLayout(1, L))
    offset = row.to(gl.int64) * stride
    for c in gl.static_range(WIDTH // 32):
        column = BEGIN + c * 32 + gl.arange(0, 32, layout=gl.SliceLayout(0, L))
        x = gl.zeros([128, 32], gl.float32, L)
        if work.tiles > 0:
            x = acc.slice(BEGIN + c * 32, 32).load() * factor
        gl.store(ptr + offset[:, None] + column[None, :], x.to(ptr.dtype.element_ty), mask=(row < rows)[:, None])


@gluon.jit
def scaled(scales, SCALED: gl.constexpr):
    """Return (the scale of dS, the factors of dQ or dK and of dV)."""
    ds_scale = 1.0
    factor0 = scales.gradient
    factor1 = 1.0
    if SCALED:
        ds_scale = gl.load(scales.ds_ptr)
        factor0 = scales.gradient / ds_scale
        factor1 = 1.0 / scales.p
    return ds_scale, factor0, factor1


@gluon.jit
def backward_tiles(
    tensors,
    x0_desc,
    x1_desc,
    y0_desc,
    y1_desc,
    ragged,
    gradient0,
    gradient1,
    whole,
    scales,
    D: gl.constexpr,
    KEYS: gl.constexpr,
    SCALED: gl.constexpr,
    VARLEN: gl.constexpr,
    SCORE_REGS: gl.constexpr,
    WARP_REGS: gl.constexpr,
):
    """Compute gradients. Grid: tiles of X, then (sequence, KV head). lse2, delta: fp32 by (sequence, KV head, packed
    row). KEYS: gradients of k and v, otherwise of q, twice. SCALED (fp16): P was multiplied by scales.p and dS by the
    number at scales.ds_ptr. VARLEN: `whole` has rows, tokens and keys of all sequences; they start at cu_q and cu_k."""
    MATRIX: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, D], x0_desc.dtype)
    OUTPUTS: gl.constexpr = 2 if KEYS else 1
    x = gl.allocate_shared_memory(x0_desc.dtype, [2, 128, D], MATRIX)
    y = gl.allocate_shared_memory(x0_desc.dtype, [4 if KEYS else 5, 128, D], MATRIX)
    s = allocate_tensor_memory(gl.float32, [128, 128], TensorMemoryLayout([128, 128], col_stride=1))
    dp = allocate_tensor_memory(gl.float32, [128, 128], TensorMemoryLayout([128, 128], col_stride=1))
    acc = allocate_tensor_memory(gl.float32, [OUTPUTS, 128, D], TensorMemoryLayout([128, D], col_stride=1))
    stat = y  # unused
    if KEYS:
        stat = gl.allocate_shared_memory(gl.float32, [4, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    x_ready = new_barriers(1)
    ring = new_ring(y)
    s_ready = new_barriers(1)
    p_ready = new_barriers(1, 2)
    dp_ready = new_barriers(1)
    ds_ready = new_barriers(1, 2)
    done = new_barriers(1)
    barriers = (ring.ready, ring.free, x_ready, s_ready, p_ready, dp_ready, ds_ready, done)
    landed = x_ready  # unused
    if VARLEN:
        landed = new_barriers(1)
        barriers += (landed,)
    init_barriers(barriers)
    memory = Memory(x, ring, s, dp, acc, stat, x_ready, landed, s_ready, p_ready, dp_ready, ds_ready, done)

    pair = gl.program_id(1)
    batch = pair // whole.heads
    head = pair - batch * whole.heads
    own = gl.program_id(0) * 128
    sizes = whole
    lse2_ptr = tensors.lse2_ptr + pair.to(gl.int64) * whole.rows
    delta_ptr = tensors.delta_ptr + pair.to(gl.int64) * whole.rows
    ptr0 = gradient0.ptr + (batch.to(gl.int64) * gradient0.batch + head.to(gl.int64) * gradient0.head)
    ptr1 = gradient1.ptr + (batch.to(gl.int64) * gradient1.batch + head.to(gl.int64) * gradient1.head)
    x_begin = 0
    y_begin = 0
    if VARLEN:
        if KEYS:
            seq, own = tile_of(gl.program_id(0), tensors.cu_k_ptr, whole.sequences, 1)
            y_begin, x_begin, sizes = sizes_of(seq, own, whole, tensors.cu_q_ptr, tensors.cu_k_ptr, True)
            lse2_ptr += y_begin
            delta_ptr += y_begin
        else:
            seq, own = tile_of(gl.program_id(0), tensors.cu_q_ptr, whole.sequences, whole.group)
            x_begin, y_begin, sizes = sizes_of(seq, own, whole, tensors.cu_q_ptr, tensors.cu_k_ptr, False)
            lse2_ptr += x_begin
            delta_ptr += x_begin
        ptr0 += x_begin.to(gl.int64) * gradient0.row
        ptr1 += x_begin.to(gl.int64) * gradient1.row
    first, end = streamed(own, sizes, KEYS)
    work = TileProduct(own, first, (gl.maximum(end - first, 0) + 127) // 128)
    x_end, y_end = (sizes.keys, sizes.rows) if KEYS else (sizes.rows, sizes.keys)
    x_pair = pair_of(x0_desc, x1_desc, ragged.x0, ragged.x1, batch, head, x_begin, x_end, VARLEN)
    y_pair = pair_of(y0_desc, y1_desc, ragged.y0, ragged.y1, batch, head, y_begin, y_end, VARLEN)
    ds_scale, factor0, factor1 = scaled(scales, SCALED)
    numbers = Numbers(lse2_ptr, delta_ptr, scales.s, scales.p, ds_scale)
    result = Result(ptr0, ptr1, gradient0.row, gradient1.row, factor0, factor1)
    gl.warp_specialize(
        [
            (score_role, (memory, work, sizes, numbers, result, 0, D, KEYS, SCALED)),
            (score_role, (memory, work, sizes, numbers, result, 1, D, KEYS, SCALED)),
            (mma_role, (memory, work, KEYS)),
            (load_role, (x_pair, y_pair, memory, work, sizes, numbers, D, KEYS, VARLEN)),
        ],
        [4, 1, 1],
        [SCORE_REGS, WARP_REGS, WARP_REGS],
    )
