"""V4 attention on sm_90a: 64 heads of one query token at a time, rows picked by number from one or two pools.

Every row is key and value at once, so a block of 64 rows is gathered once, into two slots [64, 256] (halves of the
head dim), and read as K and as V. Left and right share O as in wide.py: each owns half of its columns, and they hand
each other P, the running maximum and the rescaling factor. A third group of warps gathers. Role chart of a step::

    gather  4 or 8 warps | half blocks 0, 1, 2, 3 of the next step, as left and right free them ...
    left    4 warps      | S0 = Q K0^T | softmax 0 -> P0 | O_L += P0 V0_L |           wait P1 | O_L += P1 V1_L
    right   4 warps      | S1 = Q K1^T |        wait P0 | O_R += P0 V0_R | softmax 1 -> P1    | O_R += P1 V1_R

An item is 64 heads of one query and one split of its rows. A CTA loops over items: while left and right write the
output of one, Q and the first blocks of the next arrive. gather.py says how.

shared memory   bytes               holds
q               2 x 32768           [64, 256] each: columns 0-255 and 256-511 of Q
kv              4 x 32768           [64, 256] each: block b of a step, half h at 2b + h
p0, p1          8192 each           [64, 64]: P of block 0 and 1; the output rows leave through them, left's through p0
m0, a0, m1, a1  256 each            fp32 per row: maximum after block 0 and 1, factor 0 and 1
bias            2 x 256             fp32 per key: what is added to the scores of block 0 and 1
sums            4 x 256             fp32 per row: sums of left and right, by turns of items
job             2 x 16              of an item, by turns: steps, query, first head, split
barriers        8 each

barrier         arrives                      count       waits          means
q_ready         gather: copies, itself       threads+1   left, right    Q of the item is in q, and its job
q_free          left, right                  2           gather         the item's scores are complete: refill q
ready[2b + h]   gather: copies, itself       threads+1   left, right    half h of block b is in kv; if h = 1, its bias
free[2b + h]    owner of half h              1           gather         O half h has used block b: refill its half h
p_ready[b]      the block's owner            1           the other      P, maximum and factor of block b are written
sum_ready[h]    owner of half h              1           the other      its row sums are written; its products are done

Copies write like ordinary stores; those who wait for them, or for converted FP8 rows, put the fence before the tensor
core reads.
The bias of block b is written when both halves of its last use are free: its owner read it before it freed one of them.
P0 is overwritten in the next step only after right's O_R += P0 V0_R is complete: free[1] says so through ready[1]. P1
is overwritten after p_ready[0] of the next step, before which left has waited for O_L += P1 V1_L. At the end of an
item sum_ready says that the other's products are complete, so both P are free; each then writes its own first in the
next item. Sums and jobs have two places: a turn later the other, or gather, may be ahead by one item, not by two.
"""

from dsv4.kernels.compat import (
    Value,
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from dsv4.kernels.shared import softmax
from dsv4.kernels.shared.v4.arguments import Names, Output, Requests, Rope, Sizes
from dsv4.kernels.shared.v4.items import NONE
from dsv4.kernels.sm90.fmha.halves import zero
from dsv4.kernels.sm90.v4.gather import (
    FIRST_HEAD,
    QUERY,
    SPLIT_NUMBER,
    STEPS,
    Pool,
    Pools,
    Queries,
    arrivals,
    gather_role,
)

ONE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))


@aggregate
class Memory:
    q: Value
    kv: Value
    bias: Value
    job: Value
    # Apart, not one array: the compiler puts a barrier between accesses that may touch the same allocation.
    p0: Value
    p1: Value
    m0: Value
    a0: Value
    m1: Value
    a1: Value
    sums: Value


@aggregate
class Barriers:
    q_ready: Value
    q_free: Value
    ready: Value
    free: Value
    p_ready: Value
    sum_ready: Value


@gluon.jit
def make_memory():
    HALF: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 256], gl.bfloat16)
    P: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256], HALF)
    kv = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 256], HALF)
    p0 = gl.allocate_shared_memory(gl.bfloat16, [64, 64], P)
    p1 = gl.allocate_shared_memory(gl.bfloat16, [64, 64], P)
    m0 = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    a0 = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    m1 = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    a1 = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    bias = gl.allocate_shared_memory(gl.float32, [2, 64], FLAT)
    sums = gl.allocate_shared_memory(gl.float32, [4, 64], FLAT)
    job = gl.allocate_shared_memory(gl.int32, [8, 1], FLAT)
    return Memory(q, kv, bias, job, p0, p1, m0, a0, m1, a1, sums)


@gluon.jit
def make_barriers(GATHER_WARPS: gl.constexpr):
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q_ready = gl.allocate_shared_memory(gl.int64, [1], BAR)
    q_free = gl.allocate_shared_memory(gl.int64, [1], BAR)
    ready = gl.allocate_shared_memory(gl.int64, [4, 1], BAR)
    free = gl.allocate_shared_memory(gl.int64, [4, 1], BAR)
    p_ready = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    sum_ready = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    mbarrier.init(q_ready, count=arrivals(GATHER_WARPS))
    mbarrier.init(q_free, count=2)
    for i in gl.static_range(4):
        mbarrier.init(ready.index(i), count=arrivals(GATHER_WARPS))
        mbarrier.init(free.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(p_ready.index(i), count=1)
        mbarrier.init(sum_ready.index(i), count=1)
    return Barriers(q_ready, q_free, ready, free, p_ready, sum_ready)


@gluon.jit
def read(job, turn, WHAT: gl.constexpr):
    """A number that the gathering warps wrote about the item of this turn."""
    return gl.max(job.index(turn * 4 + WHAT).load(ONE), 0)


@gluon.jit
def begin(q_ready, job, turn):
    """Q of the next item is there -> its number of steps."""
    mbarrier.wait(q_ready, turn)
    fence_async_shared()  # cp.async writes like ordinary stores -> tensor-core reads
    return read(job, turn, STEPS)


@gluon.jit
def landed(ready, phase):
    mbarrier.wait(ready, phase)
    fence_async_shared()


@gluon.jit
def scores(memory, ready, slot, phase, step):
    """S [64, 64] of the block in slots slot, slot + 1 (halves of the head dim): two groups issued, not waited for."""
    q, kv = memory.q, memory.kv
    opaque = zero(step)  # else all 64 wgmma descriptors of a fixed slot would be kept in registers, and spilled
    s = gl.zeros([64, 64], gl.float32, SCORES)
    landed(ready.index(slot), phase)
    s = warpgroup_mma(q.index(opaque), kv.index(opaque + slot).permute((1, 0)), s, use_acc=False, is_async=True)
    landed(ready.index(slot + 1), phase)
    return warpgroup_mma(q.index(opaque + 1), kv.index(opaque + slot + 1).permute((1, 0)), s, is_async=True)


@gluon.jit
def mask(s, bias, SIGN: gl.constexpr):
    """Scores of rows that are not there become -inf. SIGN: of the softmax scale."""
    if SIGN == 0:
        s = gl.zeros_like(s)
    elif SIGN < 0:
        s = -s
    return s + bias[None, :]


@gluon.jit
def partial_sums(p):
    """What each thread holds of the sums of the rows: [64, 64] -> [64, 4], no exchange between lanes."""
    return gl.sum(gl.sum(p.reshape([64, 8, 4, 2]), 3), 1)


@gluon.jit
def halves(x, L: gl.constexpr):
    """[64, 2 C] -> left and right [64, C] in layout L: registers change their names."""
    a, b = gl.split(x.reshape([64, 2, x.shape[1] // 2]).permute((0, 2, 1)))
    return gl.convert_layout(a, L), gl.convert_layout(b, L)


@gluon.jit
def store_quarter(o, smem, pointers, there):
    """O [64, 64] by way of smem, 16 bytes per thread."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    smem.store(o.to(smem.dtype))
    gl.store(pointers, smem.load(L), mask=there)


@gluon.jit
def end_half(o, m, l, memory, barriers, steps, turn, output, HALF: gl.constexpr, SPLIT: gl.constexpr):
    """Add up the row sums of both warpgroups, write this half of O; left also writes the LSE."""
    rope = output.rope
    LO: gl.constexpr = o.type.layout
    RS: gl.constexpr = m.type.layout
    RO: gl.constexpr = gl.SliceLayout(1, LO)
    query, first_head = read(memory.job, turn, QUERY), read(memory.job, turn, FIRST_HEAD)
    split = read(memory.job, turn, SPLIT_NUMBER)
    head = first_head + gl.arange(0, 64, layout=RS)
    sink = gl.full([64], -float("inf"), gl.float32, RS)
    if not SPLIT:
        sink = softmax.sink_of(output.sink_ptr, head, head < output.heads)
    line_ptr = rope.cos_sin_ptr
    width = rope.width + zero(query)  # else what the epilogue computes from it would be kept in registers across items
    if width > 0:
        position = gl.load(rope.positions_ptr + query).to(gl.int64)
        line_ptr += gl.minimum(gl.maximum(position, 0), rope.positions - 1) * rope.line
        o = softmax.turn_back(o, (line_ptr, width), HALF * 256, 512)
    l = gl.convert_layout(gl.sum(l, 1), RS)
    memory.sums.index(2 * turn + HALF).store(l)
    mbarrier.arrive(barriers.sum_ready.index(HALF), count=1)
    mbarrier.wait(barriers.sum_ready.index(1 - HALF), turn)
    l = l + memory.sums.index(2 * turn + 1 - HALF).load(RS)
    if SPLIT:  # normalised partial result and its LSE in base 2; the combine kernel applies the sink
        factor, lse = softmax.finish(m, l, sink)
        part = (split.to(gl.int64) * output.queries + query) * output.heads + head
        if HALF == 0:
            gl.store(output.part_lse_ptr + part, lse, mask=head < output.heads)
        if steps > 0:
            o = o * gl.convert_layout(factor, RO)[:, None]
            column = HALF * 256 + gl.arange(0, 256, layout=gl.SliceLayout(0, LO))
            gl.store(output.part_ptr + gl.convert_layout(part, RO)[:, None] * 512 + column[None, :], o,
                     mask=gl.convert_layout(head < output.heads, RO)[:, None])  # fmt: skip
    else:
        factor, lse = softmax.finish(m, l, sink)
        if HALF == 0:
            gl.store(output.lse_ptr + query.to(gl.int64) * output.stride_ln + head.to(gl.int64) * output.stride_lh,
                     lse * softmax.LN2, mask=(head < output.heads) & (output.want_lse != 0))  # fmt: skip
        o = o * gl.convert_layout(factor, RO)[:, None]
        L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        LH: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
        row = first_head + gl.arange(0, 64, layout=gl.SliceLayout(1, L))
        column = HALF * 256 + gl.arange(0, 64, layout=gl.SliceLayout(0, L))
        offset = (query.to(gl.int64) * output.stride_on + row.to(gl.int64) * output.stride_oh) * 8
        pointers = output.out_ptr + offset[:, None] + column[None, :]
        there = (row < output.heads)[:, None]
        mine = memory.p0 if HALF == 0 else memory.p1
        # Both P are free: the other warpgroup's products have ended, too, before it gave its sums.
        a, b = halves(o, LH)
        a0, a1 = halves(a, SCORES)
        store_quarter(a0, mine, pointers, there)
        store_quarter(a1, mine, pointers + 64, there)
        b0, b1 = halves(b, SCORES)
        store_quarter(b0, mine, pointers + 128, there)
        store_quarter(b1, mine, pointers + 192, there)


@gluon.jit
def left_step(o, m, l, memory, barriers, phase, step, steps, scale, SIGN: gl.constexpr):
    """Softmax of block 0, then O[:, :256] with both blocks."""
    ready, free, p_ready = barriers.ready, barriers.free, barriers.p_ready
    RS: gl.constexpr = m.type.layout
    RO: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    RP: gl.constexpr = gl.SliceLayout(1, l.type.layout)
    LA: gl.constexpr = gl.DotOperandLayout(0, o.type.layout, 2)
    s = scores(memory, ready, 0, phase, step)
    seen = memory.bias.index(0).load(gl.SliceLayout(0, SCORES))
    s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
    if step + 1 == steps:
        mbarrier.arrive(barriers.q_free, count=1)
    s = mask(s, seen, SIGN)
    p, m0, a0 = softmax.step(s, m, scale)
    l = l * gl.convert_layout(a0, RP)[:, None] + partial_sums(p)
    pb = p.to(memory.q.dtype)
    memory.p0.store(pb)
    memory.m0.store(m0)
    memory.a0.store(a0)
    fence_async_shared()
    mbarrier.arrive(p_ready.index(0), count=1)
    o = o * gl.convert_layout(a0, RO)[:, None]
    o = warpgroup_mma(gl.convert_layout(pb, LA), memory.kv.index(zero(step)), o, is_async=True)
    landed(ready.index(2), phase)
    o = warpgroup_mma_wait(num_outstanding=0, deps=(o,))
    mbarrier.arrive(free.index(0), count=1)
    mbarrier.wait(p_ready.index(1), phase)
    m = memory.m1.load(RS)
    a1 = memory.a1.load(RS)
    l = l * gl.convert_layout(a1, RP)[:, None]
    o = o * gl.convert_layout(a1, RO)[:, None]
    o = warpgroup_mma(memory.p1, memory.kv.index(zero(step) + 2), o, is_async=True)
    o = warpgroup_mma_wait(num_outstanding=0, deps=(o,))
    mbarrier.arrive(free.index(2), count=1)
    return o, m, l


@gluon.jit
def right_step(o, l, memory, barriers, phase, step, steps, scale, SIGN: gl.constexpr):
    """O[:, 256:] with block 0 while S of block 1 is computed, then its softmax, then O with block 1."""
    ready, free, p_ready = barriers.ready, barriers.free, barriers.p_ready
    RS: gl.constexpr = gl.SliceLayout(1, SCORES)
    RO: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    RP: gl.constexpr = gl.SliceLayout(1, l.type.layout)
    LA: gl.constexpr = gl.DotOperandLayout(0, o.type.layout, 2)
    s = scores(memory, ready, 2, phase, step)
    seen = memory.bias.index(1).load(gl.SliceLayout(0, SCORES))
    landed(ready.index(1), phase)
    mbarrier.wait(p_ready.index(0), phase)
    m0 = memory.m0.load(RS)
    a0 = memory.a0.load(RS)
    # O is complete, but the assembler does not see it across the loop, and would wait for S, too.
    o = warpgroup_mma_wait(num_outstanding=2, deps=(o,))
    o = o * gl.convert_layout(a0, RO)[:, None]
    o = warpgroup_mma(memory.p0, memory.kv.index(zero(step) + 1), o, is_async=True)
    s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
    if step + 1 == steps:
        mbarrier.arrive(barriers.q_free, count=1)
    s = mask(s, seen, SIGN)
    p, m, a1 = softmax.step(s, m0, scale)
    l = softmax.pin(l * gl.convert_layout(a0 * a1, RP)[:, None] + partial_sums(p))
    pb = p.to(memory.q.dtype)
    memory.p1.store(pb)
    memory.m1.store(m)
    memory.a1.store(a1)
    fence_async_shared()
    mbarrier.arrive(p_ready.index(1), count=1)
    o = warpgroup_mma_wait(num_outstanding=0, deps=(o,))
    mbarrier.arrive(free.index(1), count=1)
    o = o * gl.convert_layout(a1, RO)[:, None]
    o = warpgroup_mma(gl.convert_layout(pb, LA), memory.kv.index(zero(step) + 3), o, is_async=True)
    o = warpgroup_mma_wait(num_outstanding=0, deps=(o,))
    mbarrier.arrive(free.index(3), count=1)
    return o, m, l


@gluon.jit
def half_role(memory, barriers, items, scale, output, HALF: gl.constexpr, SPLIT: gl.constexpr, SIGN: gl.constexpr,
              N: gl.constexpr):  # fmt: skip
    """Left (HALF 0) or right (1). N: columns of O per product."""
    LO: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    LP: gl.constexpr = partial_sums(gl.zeros([64, 64], gl.float32, SCORES)).type.layout
    phase = 0
    turn = 0
    for _item in range(gl.program_id(0), items, gl.num_programs(0)):
        steps = begin(barriers.q_ready, memory.job, turn)
        o = gl.zeros([64, 256], gl.float32, LO)
        m = gl.full([64], -float("inf"), gl.float32, gl.SliceLayout(1, SCORES))
        l = gl.full([64, 4], 0.0, gl.float32, LP)
        for step in range(0, steps):
            if HALF == 0:
                o, m, l = left_step(o, m, l, memory, barriers, phase, step, steps, scale, SIGN)
            else:
                o, m, l = right_step(o, l, memory, barriers, phase, step, steps, scale, SIGN)
            phase = phase ^ 1
        if steps == 0:
            mbarrier.arrive(barriers.q_free, count=1)
        end_half(o, m, l, memory, barriers, steps, turn, output, HALF, SPLIT)
        turn = turn ^ 1


@gluon.jit(do_not_specialize=[
    "want_lse", "items", "queries", "heads", "window_rows", "window_page_rows", "window_page_stride",
    "window_row_stride", "window_inverse", "window_shift", "window_width", "window_line", "compressed_rows",
    "compressed_page_rows", "compressed_page_stride", "compressed_row_stride", "compressed_inverse", "compressed_shift",
    "compressed_width", "compressed_line", "window_lengths", "compressed_lengths", "starts", "requests",
    "rope_positions", "rope_width", "rope_line", "num_splits", "tiles_per_split", "stride_qn", "stride_qh", "stride_on",
    "stride_oh", "stride_ln", "stride_lh",
])  # fmt: skip
def v4_listed(q_ptr, out_ptr, lse_ptr, sink_ptr, part_ptr, part_lse_ptr, window_ptr, window_list_ptr,
              window_lengths_ptr, compressed_ptr, compressed_list_ptr, compressed_lengths_ptr, starts_ptr, cos_sin_ptr,
              positions_ptr, scale, want_lse, items, queries, heads, window_rows, window_page_rows, window_page_stride,
              window_row_stride, window_inverse, window_shift, window_width, window_line, compressed_rows,
              compressed_page_rows, compressed_page_stride, compressed_row_stride, compressed_inverse,
              compressed_shift, compressed_width, compressed_line, window_lengths, compressed_lengths, starts, requests,
              rope_positions, rope_width, rope_line, num_splits, tiles_per_split, stride_qn, stride_qh, stride_on,
              stride_oh, stride_ln, stride_lh,
              HOW: gl.constexpr, SIGN: gl.constexpr, WINDOW_FP8: gl.constexpr, COMPRESSED_FP8: gl.constexpr,
              WINDOW_UNIT: gl.constexpr, COMPRESSED_UNIT: gl.constexpr, SPLIT: gl.constexpr,
              RIGHT_REGS: gl.constexpr, GATHER_REGS: gl.constexpr, GATHER_WARPS: gl.constexpr):  # fmt: skip
    # Two Fp8Caches are read in one way, that of the lesser unit.
    UNIT: gl.constexpr = min(WINDOW_UNIT, COMPRESSED_UNIT)
    if WINDOW_FP8:
        window_page_stride *= WINDOW_UNIT // UNIT
    if COMPRESSED_FP8:
        compressed_page_stride *= COMPRESSED_UNIT // UNIT
    FP8: gl.constexpr = (WINDOW_FP8, WINDOW_FP8 if HOW == NONE else COMPRESSED_FP8)
    q = Queries(q_ptr, stride_qn, stride_qh)
    window = Names(window_list_ptr, window_line, window_lengths_ptr, window_lengths, window_width)
    compressed = Names(compressed_list_ptr, compressed_line, compressed_lengths_ptr, compressed_lengths,
                       compressed_width)  # fmt: skip
    pools = Pools(
        Pool(window_ptr, window_rows, window_page_rows, window_page_stride, window_row_stride, window_inverse,
             window_shift),
        Pool(compressed_ptr, compressed_rows, compressed_page_rows, compressed_page_stride, compressed_row_stride,
             compressed_inverse, compressed_shift),
    )  # fmt: skip
    requests = Requests(starts_ptr, starts, requests)
    rope = Rope(cos_sin_ptr, positions_ptr, rope_positions, rope_width, rope_line)
    output = Output(out_ptr, lse_ptr, sink_ptr, part_ptr, part_lse_ptr, stride_on, stride_oh, stride_ln, stride_lh,
                    queries, heads, rope, want_lse)  # fmt: skip
    sizes = Sizes(queries, heads, num_splits, tiles_per_split)

    memory = make_memory()
    barriers = make_barriers(GATHER_WARPS)
    # Columns of O per product: with 16 warps there are 128 registers at launch, too few for 256, says the assembler.
    N: gl.constexpr = 256 if GATHER_WARPS == 4 else 128
    gl.warp_specialize([
        (half_role, (memory, barriers, items, scale, output, 0, SPLIT, SIGN, N)),
        (half_role, (memory, barriers, items, scale, output, 1, SPLIT, SIGN, N)),
        (gather_role, (q, window, compressed, requests, pools, memory, barriers, items, sizes, HOW, FP8, UNIT)),
    ], [4, GATHER_WARPS], [RIGHT_REGS, GATHER_REGS])  # fmt: skip
