"""V4 attention on sm_90a: 64 heads of one query token at a time, rows picked by number from one or two pools.

Every row is key and value at once, so a block of 64 rows is gathered once, into two slots [64, 256] (halves of the
head dim), and read as K and as V. Left and right share O as in forward_d512.py: each owns half of its columns, and they
hand each other P, the running maximum and the rescaling factor. A third group of 4 or 8 warps gathers half blocks 0, 1,
2, 3 of the next step, as left and right (4 warps each) free them. sparse_steps.py has the chart of a step, in two
orders.

A work tile is 64 heads of one query and one split of its rows. A CTA loops over work tiles: while left and right write
the output of one, Q and the first blocks of the next arrive. gather.py describes how. WHOLE_FIRST: the first work tiles
have all rows of a query, and their output is the result; the rest are splits (splits.whole_first).

shared memory   bytes               holds
q               2 x 32768           [64, 256] each: columns 0-255 and 256-511 of Q
kv              4 x 32768           [64, 256] each: block b of a step, half h at 2b + h; SPLIT_SLOTS: their columns
                                    0-127, and kv_right their columns 128-255, 4 x 16384 each
p0, p1          8192 each           [64, 64]: P of block 0 and 1; unless REG_STORE, output rows leave through them
m0, a0, m1, a1  256 each            fp32 per row: maximum after block 0 and 1, factor 0 and 1
bias            2 x 256             fp32 per key: what is added to the scores of block 0 and 1
sums            4 x 256             fp32 per row: sums of left and right, for two work tiles
job             2 x 16              of two work tiles: steps, query, first head, split
barriers        8 each

barrier         arrives                      count       waits          means
q_ready         gather: copies, itself       ARRIVALS    left, right    Q of the work tile is in q, and its job
q_free          left, right                  2           gather         the work tile's scores are complete: refill q
kv_ready[i]     gather: copies, itself       FILLS       left, right    i = 2b + h: half h of block b is in kv, and with
                                                                        h = 1 its bias
odd_ready[i]    gather: copies, itself       ARRIVALS    left, right    SPLIT_SLOTS: in place of kv_ready[2b + 1]
kv_free[i]      owner of half h              1           gather         O half h has used block b: refill its half h
p_ready[b]      the block's owner            1           the other      P, maximum and factor of block b are written
m_ready[b]      the block's owner            1           the other      resident: the maximum after block b is written
sum_ready[h]    owner of half h              1           the other      its row sums are written; its products are done

SPLIT_SLOTS is for packed rows by list with Triton before 3.9, which puts barriers of warps between stores to one
allocation: with two allocations for the halves there are three a block, not seven. The gathering warps store all of a
half block, meet at a barrier, and one thread arrives (gather.announce). So they do for the rows of gather_codes.py.
Copies write like ordinary stores; the roles that wait for them, or for unpacked rows, issue the fence before the tensor
core reads.
The bias of block b is written when both halves of its last use are free: its owner read it before it freed one of them.
P0 is overwritten in the next step only after right's O_R += P0 V0_R is complete: free[1] implies it, and ready[1] after
it. P1 is overwritten after p_ready[0] of the next step, before which left has waited for O_L += P1 V1_L. Resident: P0
is overwritten after m_ready[1] of the next step, before which right has waited for O_R += P0 V0_R; P1 after m_ready[0]
of the next step, before which left has waited for O_L += P1 V1_L; the maxima likewise. Left frees slot 2 after it has
waited for slot 0 of the next step, which is filled before. At the end of a work tile sum_ready means that the
other's products are complete, so both P are free; each then writes its own first in the next work tile. Sums and jobs
have two places: a turn later the other, or gather, may be ahead by one work tile, not by two.
"""

from dsv4.fmha.kernels.sm90.work import FP16_PARTIALS, half_to_fp16, in_pieces
from dsv4.kernels import dependent, softmax
from dsv4.kernels.compat import Value, aggregate, fence_async_shared, gl, gluon
from dsv4.kernels.opaque import zero
from dsv4.kernels.ring import Barriers, Ring, init_barriers, new_barriers, new_ring
from dsv4.v4.kernels.pool_rows import pool_in_units
from dsv4.v4.kernels.sm90.gather import BLOCKS, FIRST_HEAD, QUERY, SPLIT_NUMBER, gather_role, reads_aligned
from dsv4.v4.kernels.sm90.gather_codes import reads_codes
from dsv4.v4.kernels.sm90.row_numbers import Pools
from dsv4.v4.kernels.sm90.smem_store import arrivals
from dsv4.v4.kernels.sm90.sparse_steps import (
    SCORES,
    half_slot,
    left_begin,
    left_resident,
    left_step,
    right_resident,
    right_step,
)
from dsv4.v4.kernels.tile_scheduler import NONE

ONE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@aggregate
class Memory:
    """Shared memory and barriers."""

    q: Value
    kv: Ring  # slots are half blocks
    kv_right: Value  # SPLIT_SLOTS: their right halves
    odd_ready: Barriers  # barriers of slots 1 and 3; SPLIT_SLOTS: separate, else the compiler guards them together
    bias: Value
    job: Value
    # Two arrays: the compiler puts a barrier between accesses that may touch the same allocation.
    p0: Value
    p1: Value
    m0: Value
    a0: Value
    m1: Value
    a1: Value
    sums: Value
    q_ready: Barriers
    q_free: Barriers
    p_ready: Barriers
    m_ready: Barriers
    sum_ready: Barriers


@gluon.jit
def make_memory(
    DTYPE: gl.constexpr,
    GATHER_WARPS: gl.constexpr,
    RESIDENT: gl.constexpr,
    SPLIT_SLOTS: gl.constexpr,
    CODES: gl.constexpr,
):
    HALF: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 256], DTYPE)
    P: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], DTYPE)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ARRIVALS: gl.constexpr = arrivals(GATHER_WARPS)
    q = gl.allocate_shared_memory(DTYPE, [2, 64, 256], HALF)
    if SPLIT_SLOTS:
        slots = gl.allocate_shared_memory(DTYPE, [4, 64, 128], half_slot(DTYPE))
        kv_right = gl.allocate_shared_memory(DTYPE, [4, 64, 128], half_slot(DTYPE))
    else:
        slots = gl.allocate_shared_memory(DTYPE, [4, 64, 256], HALF)
        kv_right = slots  # unused
    p0 = gl.allocate_shared_memory(DTYPE, [64, 64], P)
    p1 = gl.allocate_shared_memory(DTYPE, [64, 64], P)
    m0 = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    a0 = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    m1 = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    a1 = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    bias = gl.allocate_shared_memory(gl.float32, [2, 64], FLAT)
    sums = gl.allocate_shared_memory(gl.float32, [4, 64], FLAT)
    job = gl.allocate_shared_memory(gl.int32, [8, 1], FLAT)
    q_ready = new_barriers(1, ARRIVALS)
    q_free = new_barriers(1, 2)
    FILLS: gl.constexpr = 1 if SPLIT_SLOTS or CODES else ARRIVALS
    kv = new_ring(slots, 1, FILLS)
    p_ready = new_barriers(2)
    sum_ready = new_barriers(2)
    barriers = (q_ready, q_free, kv.ready, kv.free, p_ready, sum_ready)
    odd_ready = kv.ready
    if SPLIT_SLOTS:
        odd_ready = new_barriers(4, ARRIVALS)
        barriers += (odd_ready,)
    m_ready = p_ready  # unused
    if RESIDENT:
        m_ready = new_barriers(2)
        barriers += (m_ready,)
    init_barriers(barriers)
    return Memory(
        q,
        kv,
        kv_right,
        odd_ready,
        bias,
        job,
        p0,
        p1,
        m0,
        a0,
        m1,
        a1,
        sums,
        q_ready,
        q_free,
        p_ready,
        m_ready,
        sum_ready,
    )


@gluon.jit
def read(job, turn, WHAT: gl.constexpr):
    """Read a number that the gathering warps wrote about the work tile of this turn."""
    return gl.max(job.index(turn * 4 + WHAT).load(ONE), 0)


@gluon.jit
def begin(memory, turn):
    """Wait for Q of the next work tile -> its number of blocks."""
    memory.q_ready.wait(0, turn)
    fence_async_shared()  # cp.async writes like ordinary stores -> tensor-core reads
    return read(memory.job, turn, BLOCKS)


@gluon.jit
def halves(x, L: gl.constexpr):
    """Split [64, 2 C] into left and right [64, C] in layout L, without moving registers."""
    a, b = gl.split(x.reshape([64, 2, x.shape[1] // 2]).permute((0, 2, 1)))
    return gl.convert_layout(a, L), gl.convert_layout(b, L)


@gluon.jit
def store_quarter(o, smem, pointers, there):
    """Store O [64, 64] through smem, 16 bytes per thread."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    smem.store(o.to(smem.dtype))
    gl.store(pointers, smem.load(L), mask=there)


@gluon.jit
def end_half(
    o,
    m,
    l,
    memory,
    blocks,
    turn,
    output,
    whole,
    HALF: gl.constexpr,
    SPLIT: gl.constexpr,
    WHOLE_FIRST: gl.constexpr,
    REG_STORE: gl.constexpr,
):
    """Add up the row sums of both warpgroups, write this half of O; left also writes the LSE."""
    rope = output.rope
    RS: gl.constexpr = m.type.layout
    query, first_head = read(memory.job, turn, QUERY), read(memory.job, turn, FIRST_HEAD)
    split = read(memory.job, turn, SPLIT_NUMBER)
    head = first_head + gl.arange(0, 64, layout=RS)
    sink = gl.full([64], -float("inf"), gl.float32, RS)
    if WHOLE_FIRST or not SPLIT:
        sink = softmax.sink_of(output.sink_ptr, head, head < output.heads)
    line_ptr = rope.cos_sin_ptr
    # Opaque: otherwise what the epilogue computes from it would stay in registers across work tiles.
    width = rope.width + zero(query)
    if width > 0:
        position = gl.load(rope.positions_ptr + query).to(gl.int64)
        line_ptr += gl.minimum(gl.maximum(position, 0), rope.positions - 1) * rope.line
        o = softmax.inverse_rope(o, (line_ptr, width), HALF * 256, 512)
    l = gl.convert_layout(gl.sum(l, 1), RS)
    memory.sums.index(2 * turn + HALF).store(l)
    memory.sum_ready.arrive(HALF)
    memory.sum_ready.wait(1 - HALF, turn)
    l = l + memory.sums.index(2 * turn + 1 - HALF).load(RS)
    if WHOLE_FIRST:
        if split < 0:
            store_result(o, m, l, sink, memory, query, first_head, output, HALF, REG_STORE)
        else:
            store_partial(o, m, l, blocks, query - whole, first_head, split, output, HALF, SPLIT)
    elif SPLIT:
        store_partial(o, m, l, blocks, query, first_head, split, output, HALF, SPLIT)
    else:
        store_result(o, m, l, sink, memory, query, first_head, output, HALF, REG_STORE)


@gluon.jit
def store_partial(o, m, l, blocks, query, first_head, split, output, HALF: gl.constexpr, SPLIT: gl.constexpr):
    """Store this half of a normalised partial result and its LSE in base 2; the combine kernel applies the sink."""
    LO: gl.constexpr = o.type.layout
    RS: gl.constexpr = m.type.layout
    RO: gl.constexpr = gl.SliceLayout(1, LO)
    head = first_head + gl.arange(0, 64, layout=RS)
    sink = gl.full([64], -float("inf"), gl.float32, RS)
    if SPLIT == FP16_PARTIALS:
        factor, lse = softmax.finish(m, l, sink)
        part_row = (split.to(gl.int64) * output.queries + query) * output.heads
        lse_ptr = output.part_lse_ptr + (part_row + head) * 4
        if HALF == 0:
            gl.store(lse_ptr, lse, mask=head < output.heads)
        if blocks > 0:
            x, down = half_to_fp16(o, gl.convert_layout(factor, RO))
            gl.store(lse_ptr + 1 + HALF, gl.convert_layout(down, RS), mask=head < output.heads)
            LW: gl.constexpr = x.type.layout
            row = first_head + gl.arange(0, 64, layout=gl.SliceLayout(1, LW))
            column = HALF * 256 + gl.arange(0, 256, layout=gl.SliceLayout(0, LW))
            values_ptr = output.part_ptr.to(gl.pointer_type(gl.float16), bitcast=True)
            gl.store(
                values_ptr + (part_row + row)[:, None] * 512 + column[None, :], x, mask=(row < output.heads)[:, None]
            )
    else:
        factor, lse = softmax.finish(m, l, sink)
        part = (split.to(gl.int64) * output.queries + query) * output.heads + head
        if HALF == 0:
            gl.store(output.part_lse_ptr + part, lse, mask=head < output.heads)
        if blocks > 0:
            o = o * gl.convert_layout(factor, RO)[:, None]
            column = HALF * 256 + gl.arange(0, 256, layout=gl.SliceLayout(0, LO))
            gl.store(
                output.part_ptr + gl.convert_layout(part, RO)[:, None] * 512 + column[None, :],
                o,
                mask=gl.convert_layout(head < output.heads, RO)[:, None],
            )


@gluon.jit
def store_result(o, m, l, sink, memory, query, first_head, output, HALF: gl.constexpr, REG_STORE: gl.constexpr):
    """Store this half of O and, on the left, the LSE."""
    LO: gl.constexpr = o.type.layout
    RS: gl.constexpr = m.type.layout
    RO: gl.constexpr = gl.SliceLayout(1, LO)
    head = first_head + gl.arange(0, 64, layout=RS)
    factor, lse = softmax.finish(m, l, sink)
    if HALF == 0:
        gl.store(
            output.lse_ptr + query.to(gl.int64) * output.stride_ln + head.to(gl.int64) * output.stride_lh,
            lse * softmax.LN2,
            mask=(head < output.heads) & (output.want_lse != 0),
        )
    o = o * gl.convert_layout(factor, RO)[:, None]
    if REG_STORE:
        x = in_pieces(o.to(output.out_ptr.dtype.element_ty))
        LW: gl.constexpr = x.type.layout
        row = first_head + gl.arange(0, 64, layout=gl.SliceLayout(1, LW))
        column = HALF * 256 + gl.arange(0, 256, layout=gl.SliceLayout(0, LW))
        offset = (query.to(gl.int64) * output.stride_on + row.to(gl.int64) * output.stride_oh) * 8
        gl.store(output.out_ptr + offset[:, None] + column[None, :], x, mask=(row < output.heads)[:, None])
    else:
        L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        LH: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
        row = first_head + gl.arange(0, 64, layout=gl.SliceLayout(1, L))
        column = HALF * 256 + gl.arange(0, 64, layout=gl.SliceLayout(0, L))
        offset = (query.to(gl.int64) * output.stride_on + row.to(gl.int64) * output.stride_oh) * 8
        pointers = output.out_ptr + offset[:, None] + column[None, :]
        there = (row < output.heads)[:, None]
        mine = memory.p0 if HALF == 0 else memory.p1
        # Both P are free: the other warpgroup's products ended before it wrote its sums.
        a, b = halves(o, LH)
        a0, a1 = halves(a, SCORES)
        store_quarter(a0, mine, pointers, there)
        store_quarter(a1, mine, pointers + 64, there)
        b0, b1 = halves(b, SCORES)
        store_quarter(b0, mine, pointers + 128, there)
        store_quarter(b1, mine, pointers + 192, there)


@gluon.jit
def half_role(
    memory,
    num_tiles,
    stride,
    scale,
    output,
    whole,
    HALF: gl.constexpr,
    SPLIT: gl.constexpr,
    WHOLE_FIRST: gl.constexpr,
    SIGN: gl.constexpr,
    N: gl.constexpr,
    RESIDENT: gl.constexpr,
    REG_STORE: gl.constexpr,
    SPLIT_SLOTS: gl.constexpr,
):
    """Run left (HALF 0) or right (1). N: columns of O per product."""
    LO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    LP: gl.constexpr = softmax.partial_sums(gl.zeros([64, 64], gl.float32, SCORES)).type.layout
    phase = 0
    turn = 0
    for _tile_id in range(gl.program_id(0), num_tiles, stride):
        blocks = begin(memory, turn)
        steps = blocks // 2
        o = gl.zeros([64, 256], gl.float32, LO)
        m = gl.full([64], softmax.LOWEST, gl.float32, gl.SliceLayout(1, SCORES))
        l = gl.full([64, 4], 0.0, gl.float32, LP)
        if RESIDENT and HALF == 0:
            s = left_begin(memory, phase, steps, SIGN)
            for step in range(0, steps):
                o, s, m, l = left_resident(o, s, m, l, memory, phase, step, steps, scale, SIGN)
                phase = phase ^ 1
        else:
            for step in range(0, steps):
                if RESIDENT:
                    o, m, l = right_resident(o, m, l, memory, phase, step, steps, scale, SIGN)
                elif HALF == 0:
                    o, m, l = left_step(o, m, l, memory, phase, step, blocks, scale, SIGN, SPLIT_SLOTS)
                else:
                    o, m, l = right_step(o, l, memory, phase, step, blocks, scale, SIGN, SPLIT_SLOTS)
                phase = phase ^ 1
            if blocks == 0:
                memory.q_free.arrive(0)
        end_half(o, softmax.true_maximum(m, scale), l, memory, blocks, turn, output, whole,
                 HALF, SPLIT, WHOLE_FIRST, REG_STORE)  # fmt: skip
        turn = turn ^ 1


@gluon.jit
def v4_sparse(
    q,
    window,
    window_names,
    compressed,
    compressed_names,
    requests,
    output,
    sizes,
    scale,
    KV_INDEX: gl.constexpr,
    SIGN: gl.constexpr,
    WINDOW_FORMAT: gl.constexpr,
    COMPRESSED_FORMAT: gl.constexpr,
    WINDOW_UNIT: gl.constexpr,
    COMPRESSED_UNIT: gl.constexpr,
    SPLIT: gl.constexpr,
    RESIDENT: gl.constexpr,
    RIGHT_REGS: gl.constexpr,
    GATHER_REGS: gl.constexpr,
    GATHER_WARPS: gl.constexpr,
    PDL_WAIT: gl.constexpr = False,
    PDL_LAUNCH: gl.constexpr = False,
    REG_STORE: gl.constexpr = False,
    MAY_SPLIT_SLOTS: gl.constexpr = False,
    WHOLE_FIRST: gl.constexpr = False,
    AFTER: gl.constexpr = False,
):
    if PDL_LAUNCH:
        gl.static_assert(not PDL_WAIT)  # the grid after the next would not wait for this one: see dependent.py
        dependent.launch_dependents()
    # Two packed pools are read in the same way, that of the smaller unit.
    UNIT: gl.constexpr = min(WINDOW_UNIT, COMPRESSED_UNIT)
    pools = Pools(
        pool_in_units(window, WINDOW_UNIT // UNIT if WINDOW_FORMAT.coded > 0 else 1),
        pool_in_units(compressed, COMPRESSED_UNIT // UNIT if COMPRESSED_FORMAT.coded > 0 else 1),
    )
    FORMATS: gl.constexpr = (WINDOW_FORMAT, WINDOW_FORMAT if KV_INDEX == NONE else COMPRESSED_FORMAT)
    # The first `alone` CTAs have one work tile each, the others share what is left: see splits.uneven.
    num_tiles = gl.where(gl.program_id(0) < sizes.alone, gl.program_id(0) + 1, sizes.num_tiles)
    stride = gl.num_programs(0) - sizes.alone

    SPLIT_SLOTS: gl.constexpr = MAY_SPLIT_SLOTS and reads_aligned(FORMATS[0], FORMATS[1], UNIT, KV_INDEX)
    CODES: gl.constexpr = reads_codes(FORMATS[0], FORMATS[1], UNIT, KV_INDEX, SPLIT)
    memory = make_memory(q.ptr.dtype.element_ty, GATHER_WARPS, RESIDENT, SPLIT_SLOTS, CODES)
    # Columns of O per product: 16 warps have 128 registers at launch, which the assembler finds too few for 256.
    N: gl.constexpr = 256 if GATHER_WARPS == 4 else 128
    gl.warp_specialize([
        (half_role, (memory, num_tiles, stride, scale, output, sizes.whole, 0, SPLIT, WHOLE_FIRST, SIGN, N,
                     RESIDENT, REG_STORE, SPLIT_SLOTS)),
        (half_role, (memory, num_tiles, stride, scale, output, sizes.whole, 1, SPLIT, WHOLE_FIRST, SIGN, N,
                     RESIDENT, REG_STORE, SPLIT_SLOTS)),
        (gather_role, (q, window_names, compressed_names, requests, pools, memory, num_tiles, stride, sizes,
                       KV_INDEX, FORMATS, UNIT, RESIDENT, PDL_WAIT, SPLIT, SPLIT_SLOTS, WHOLE_FIRST, AFTER)),
    ], [4, GATHER_WARPS], [RIGHT_REGS, GATHER_REGS])  # fmt: skip
    if AFTER:  # the next grid waits for this one, and so for the one before it, too
        dependent.wait_on_prior_grid()
