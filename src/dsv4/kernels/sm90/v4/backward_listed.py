"""Gradients of V4 attention on sm_90a: 64 heads of one query per CTA, blocks of 64 listed rows, K = V.

    S = Q K^T    P = 2^(S scale2 - lse2)    dP = dO K^T    dS = scale P (dP - delta)
    dQ += dS K                               dKV[rows of the block] += P^T dO + dS^T Q

Role chart of a block::

    gather  4 warps | rows of the next block, as soon as dQ has used this one's ...
    left    4 warps | S, P -> P32, P16       |         wait dS | dQ_L += dS K_L | dKV, columns 0-255, added to memory
    right   4 warps | dP    | wait P32 | dS  |                 | dQ_R += dS K_R | dKV, columns 256-511

shared memory   bytes        holds
q, dout         2 x 65536    [2, 64, 256] each: halves of the columns
kv              65536        [2, 64, 256]: the block's rows; at the end dQ on its way out
p16, ds16       2 x 8192     [64, 64]: heads times rows
p32             16384        [64, 64]: P in fp32, because dS is made from the unrounded P
barriers        8 each

barrier    arrives             count       waits          means
q_ready    gather: TMA bytes   1 + bytes   left, right    Q and dO are there
ready      gather: copies      threads     left, right    the block is in kv
free       left, right         2           gather         S, dP and dQ have used the block
p_ready    left                1           right          P32 and P16 are written
ds_ready   right               1           left           dS16 is written
used       left, right         2           left           dKV has used P16 and dS16

right writes dS16 after p_ready, before which left has waited for `used`: nobody reads the old one. At the end each
owner of a half writes its dQ over its half of kv: S and dP of the last block were complete before p_ready and ds_ready.
A row number of -1 is filled with zeros, its P is 0, and nothing is added for it.
"""

from dsv4.kernels.compat import (
    async_copy,
    cp_async,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    store_wait,
    tma_load,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from dsv4.kernels.sm90.fmha.halves import zero

SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
HALF = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
PANEL = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))


@gluon.jit
def gather_role(descriptors, smem, barriers, pools, line, query, head, blocks, width):
    q_desc, dout_desc = descriptors
    q, dout, kv = smem
    q_ready, ready, free = barriers
    window_ptr, window_rows, window_stride, window_blocks, compressed_ptr, compressed_stride = pools
    BOX: gl.constexpr = q_desc.layout
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    mbarrier.expect(q_ready, 2 * 64 * 512 * 2)
    for half in gl.static_range(2):
        for panel in gl.static_range(4):
            place = [query, head, half * 256 + panel * 64]
            tma_load(q_desc, place, q_ready, reinterpret(q.index(half), [4, 1, 64, 64], BOX).index(panel))
            tma_load(dout_desc, place, q_ready, reinterpret(dout.index(half), [4, 1, 64, 64], BOX).index(panel))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, L))
    entry = gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    phase = 1  # the first wait on an untouched barrier passes
    for block in range(0, blocks):
        slot = block * 64 + entry
        number = gl.load(line + slot, mask=slot < width, other=-1)
        there = number >= 0
        in_window = block < window_blocks
        offset = (number - gl.where(in_window, 0, window_rows)).to(gl.int64)
        offset = offset * gl.where(in_window, window_stride, compressed_stride)
        base = gl.where(in_window, window_ptr, compressed_ptr)
        mbarrier.wait(free, phase)
        for half in gl.static_range(2):
            panels = reinterpret(kv.index(half), [4, 64, 64], PANEL)
            for panel in gl.static_range(4):
                here = base + offset[:, None] * 8 + (half * 256 + panel * 64 + column)[None, :]
                cp_async(panels.index(panel), here, mask=there[:, None])
        async_copy.mbarrier_arrive(ready, increment_count=False)
        phase = phase ^ 1


@gluon.jit
def products(x, kv, step):
    """x [2, 64, 256] times the block's rows, transposed: [64 heads, 64 rows]."""
    opaque = zero(step)  # else all wgmma descriptors of a fixed slot would be kept in registers, and spilled
    s = gl.zeros([64, 64], gl.float32, SCORES)
    s = warpgroup_mma(x.index(opaque), kv.index(opaque).permute((1, 0)), s, use_acc=False, is_async=True)
    s = warpgroup_mma(x.index(opaque + 1), kv.index(opaque + 1).permute((1, 0)), s, is_async=True)
    return warpgroup_mma_wait(num_outstanding=0, deps=(s,))


@gluon.jit
def gradients(dq, smem, scores, free, used, rows, target, step, H: gl.constexpr, ADD: gl.constexpr):
    """This half of dQ and of dKV of a block. target: (dkv, or where this block's contributions are stored)."""
    q, dout, kv = smem
    p16, ds16 = scores
    opaque = zero(step)
    dq = warpgroup_mma(ds16, kv.index(opaque + H), dq, is_async=True)
    q_panels = reinterpret(q.index(H), [4, 64, 64], PANEL)
    dout_panels = reinterpret(dout.index(H), [4, 64, 64], PANEL)
    column = H * 256 + gl.arange(0, 64, layout=gl.SliceLayout(0, SCORES))
    there = (rows >= 0)[:, None]
    for piece in gl.static_range(4):
        part = gl.zeros([64, 64], gl.float32, SCORES)
        at = zero(step) + piece
        part = warpgroup_mma(p16.permute((1, 0)), dout_panels.index(at), part, use_acc=False, is_async=True)
        part = warpgroup_mma(ds16.permute((1, 0)), q_panels.index(at), part, is_async=True)
        if piece == 0:
            dq = warpgroup_mma_wait(num_outstanding=2, deps=(dq,))
            mbarrier.arrive(free, count=1)
        part = warpgroup_mma_wait(num_outstanding=0, deps=(part,))
        if ADD:
            place = target + rows.to(gl.int64)[:, None] * 512 + (column + piece * 64)[None, :]
            gl.atomic_add(place, part, mask=there, sem="relaxed")
        else:
            slot = gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
            place = target + slot[:, None] * 512 + (column + piece * 64)[None, :]
            gl.store(place, part.to(gl.bfloat16), mask=there)
    mbarrier.arrive(used, count=1)
    return dq


@gluon.jit
def end(dq, kv, dq_desc, query, head, H: gl.constexpr):
    """This half of dQ to memory, by way of its half of kv."""
    BOX: gl.constexpr = dq_desc.layout
    kv.index(H).store(dq.to(kv.dtype))
    fence_async_shared()
    panels = reinterpret(kv.index(H), [4, 1, 64, 64], BOX)
    for panel in gl.static_range(4):
        tma_store(dq_desc, [query, head, H * 256 + panel * 64], panels.index(panel))
    store_wait(0)


@gluon.jit
def numbers(line, block, width, L: gl.constexpr):
    slot = block * 64 + gl.arange(0, 64, layout=L)
    return gl.load(line + slot, mask=slot < width, other=-1)


@gluon.jit
def left_role(smem, scores, p32, barriers, stats, line, target, target_step, dq_desc, query, head, heads, blocks, width,
              ADD: gl.constexpr):  # fmt: skip
    """S, P; columns 0-255 of dQ and dKV."""
    q_ready, ready, free, p_ready, ds_ready, used = barriers
    lse2_ptr, delta_ptr, scale2, scale = stats
    q, dout, kv = smem
    p16, ds16 = scores
    row = head + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
    lse2 = gl.load(lse2_ptr + query.to(gl.int64) * heads + row, mask=row < heads, other=float("inf"))
    dq = gl.zeros([64, 256], gl.float32, HALF)
    mbarrier.wait(q_ready, 0)
    phase = 0
    for block in range(0, blocks):
        there = numbers(line, block, width, gl.SliceLayout(0, SCORES)) >= 0
        rows = numbers(line, block, width, gl.SliceLayout(1, SCORES))
        mbarrier.wait(ready, phase)
        fence_async_shared()  # cp.async writes like ordinary stores -> tensor-core reads
        s = products(q, kv, block)
        p = gl.where(there[None, :], gl.exp2(s * scale2 - lse2[:, None]), 0.0)
        mbarrier.wait(used, phase ^ 1)
        p32.store(p)
        p16.store(p.to(p16.dtype))
        fence_async_shared()
        mbarrier.arrive(p_ready, count=1)
        mbarrier.wait(ds_ready, phase)
        dq = gradients(dq, smem, scores, free, used, rows, target + block * target_step, block, 0, ADD)
        phase = phase ^ 1
    end(dq, kv, dq_desc, query, head, 0)


@gluon.jit
def right_role(smem, scores, p32, barriers, stats, line, target, target_step, dq_desc, query, head, heads, blocks,
               width, ADD: gl.constexpr):  # fmt: skip
    """dP, dS; columns 256-511 of dQ and dKV."""
    q_ready, ready, free, p_ready, ds_ready, used = barriers
    lse2_ptr, delta_ptr, scale2, scale = stats
    q, dout, kv = smem
    p16, ds16 = scores
    row = head + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
    delta = gl.load(delta_ptr + query.to(gl.int64) * heads + row, mask=row < heads, other=0.0)
    dq = gl.zeros([64, 256], gl.float32, HALF)
    mbarrier.wait(q_ready, 0)
    phase = 0
    for block in range(0, blocks):
        rows = numbers(line, block, width, gl.SliceLayout(1, SCORES))
        mbarrier.wait(ready, phase)
        fence_async_shared()
        dp = products(dout, kv, block)
        mbarrier.wait(p_ready, phase)
        ds = p32.load(SCORES) * (dp - delta[:, None]) * scale
        ds16.store(ds.to(ds16.dtype))
        fence_async_shared()
        mbarrier.arrive(ds_ready, count=1)
        dq = gradients(dq, smem, scores, free, used, rows, target + block * target_step, block, 1, ADD)
        phase = phase ^ 1
    end(dq, kv, dq_desc, query, head, 1)


@gluon.jit(do_not_specialize=[
    "scale2", "scale", "heads", "width", "window_rows", "window_stride", "window_blocks", "compressed_stride",
    "query_begin", "queries",
])  # fmt: skip
def backward_listed(q_desc, dout_desc, dq_desc, rows_ptr, blocks_ptr, lse2_ptr, delta_ptr, window_ptr, compressed_ptr,
                    target_ptr, scale2, scale, heads, width, window_rows, window_stride, window_blocks,
                    compressed_stride, query_begin, queries,
                    ADD: gl.constexpr, RIGHT_REGS: gl.constexpr, GATHER_REGS: gl.constexpr):  # fmt: skip
    """rows [N, width] of both pools by one number, compressed rows after the window's: window_blocks blocks of 64
    entries name window rows, the others compressed ones. blocks [N]: how many a query has. target: dkv fp32 [rows, 512]
    to add to; without ADD the contributions, bf16 [head tiles, queries from query_begin on, width rounded up to 64,
    512], to be summed later."""
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256], TILE)
    dout = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256], TILE)
    kv = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256], TILE)
    p16 = gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE)
    ds16 = gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE)
    p32 = gl.allocate_shared_memory(gl.float32, [64, 64], FLAT)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], BAR)
    ready = gl.allocate_shared_memory(gl.int64, [1], BAR)
    free = gl.allocate_shared_memory(gl.int64, [1], BAR)
    p_ready = gl.allocate_shared_memory(gl.int64, [1], BAR)
    ds_ready = gl.allocate_shared_memory(gl.int64, [1], BAR)
    used = gl.allocate_shared_memory(gl.int64, [1], BAR)
    mbarrier.init(q_ready, count=1)
    mbarrier.init(ready, count=128)
    mbarrier.init(free, count=2)
    mbarrier.init(p_ready, count=1)
    mbarrier.init(ds_ready, count=1)
    mbarrier.init(used, count=2)
    query = query_begin + gl.program_id(0)
    head = gl.program_id(1) * 64
    blocks = gl.load(blocks_ptr + query)
    line = rows_ptr + query.to(gl.int64) * width
    target = target_ptr
    target_step = 0
    if not ADD:
        padded = (width + 63) // 64 * 64
        target += (gl.program_id(1).to(gl.int64) * queries + gl.program_id(0)) * padded * 512
        target_step = 64 * 512
    smem = (q, dout, kv)
    scores = (p16, ds16)
    barriers = (q_ready, ready, free, p_ready, ds_ready, used)
    stats = (lse2_ptr, delta_ptr, scale2, scale)
    pools = (window_ptr, window_rows, window_stride, window_blocks, compressed_ptr, compressed_stride)
    gl.warp_specialize([
        (left_role, (smem, scores, p32, barriers, stats, line, target, target_step, dq_desc, query, head, heads, blocks,
                     width, ADD)),
        (right_role, (smem, scores, p32, barriers, stats, line, target, target_step, dq_desc, query, head, heads,
                      blocks, width, ADD)),
        (gather_role, ((q_desc, dout_desc), smem, (q_ready, ready, free), pools, line, query, head, blocks, width)),
    ], [4, 4], [RIGHT_REGS, GATHER_REGS])  # fmt: skip


@gluon.jit(do_not_specialize=["head_tiles", "entries", "per_tile"])
def fold_rows(parts_ptr, order_ptr, starts_ptr, sums_ptr, head_tiles, entries, per_tile):
    """dkv[row] += its contributions, in the order of the lists: one program per row. order: where they lie, by row;
    starts [rows + 1]: which of them are the row's. per_tile: contributions of one head tile."""
    L: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    row = gl.program_id(0)
    column = gl.arange(0, 512, layout=L)
    begin = gl.load(starts_ptr + row)
    end_ = gl.load(starts_ptr + row + 1)
    total = gl.load(sums_ptr + row.to(gl.int64) * 512 + column)
    for entry in range(begin, end_):
        at = gl.load(order_ptr + entry).to(gl.int64)
        for tile in range(0, head_tiles):
            total += gl.load(parts_ptr + (tile.to(gl.int64) * per_tile + at) * 512 + column).to(gl.float32)
    gl.store(sums_ptr + row.to(gl.int64) * 512 + column, total)
