"""Gradients of V4 attention on sm_90a: 64 heads of one query per CTA, blocks of 64 listed rows, K = V.

    S = Q K^T    P = 2^(S scale2 - lse2)    dP = dO K^T    dS = scale P (dP - delta)
    dQ += dS K                               dKV[rows of the block] += P^T dO + dS^T Q

fp16: P and dS are multiplied by a power of two before they are rounded (shared/v4/backward_scale.py), results divided.

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
ready      gather: copies      128         left, right    the block is in kv
free       left, right         2           gather         S, dP and dQ have used the block
p_ready    left                1           right          P32 and P16 are written
ds_ready   right               1           left           dS16 is written
used       left, right         2           left           dKV has used P16 and dS16

right writes dS16 after p_ready, before which left has waited for `used`: nobody reads the old one. At the end each
owner of a half writes its dQ over its half of kv: S and dP of the last block were complete before p_ready and ds_ready.
A row number of -1 is filled with zeros, its P is 0, and nothing is added for it.
"""

from dsv4.kernels.compat import (
    Value,
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    reinterpret,
    store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from dsv4.kernels.opaque import zero
from dsv4.kernels.ring import Barriers, init_barriers, new_barriers
from dsv4.v4.kernels.backward_arguments import Operands, query_and_target
from dsv4.v4.kernels.backward_gather import PANEL, gather_role, numbers, send_half
from dsv4.v4.kernels.backward_scale import dkv_factors, factors, keep_undo

SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
HALF = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))


@aggregate
class Memory:
    q: Value
    dout: Value
    kv: Value
    p16: Value
    ds16: Value
    p32: Value
    q_ready: Barriers
    ready: Barriers
    free: Barriers
    p_ready: Barriers
    ds_ready: Barriers
    used: Barriers


@gluon.jit
def products(x, kv, step):
    """x [2, 64, 256] times the block's rows, transposed: [64 heads, 64 rows]."""
    opaque = zero(step)  # else all wgmma descriptors of a fixed slot would be kept in registers, and spilled
    s = gl.zeros([64, 64], gl.float32, SCORES)
    s = warpgroup_mma(x.index(opaque), kv.index(opaque).permute((1, 0)), s, use_acc=False, is_async=True)
    s = warpgroup_mma(x.index(opaque + 1), kv.index(opaque + 1).permute((1, 0)), s, is_async=True)
    return warpgroup_mma_wait(num_outstanding=0, deps=(s,))


# Of a lane's eight numbers two are columns c, c + 1 of row r, two the same of row r + 8, four those of columns c + 8,
# c + 9. Neighbouring lanes exchange, so that each has four columns of each row, and adds them at once: half as many
# requests as with pairs. $10, $12: the rows' places, 0 = none; $18: the column, in bytes.
ADD = gl.constexpr("""{
.reg .pred odd, there; .reg .b32 lane, x, y, a, b, c, d; .reg .b64 place, column;
mov.u32 lane, %laneid; and.b32 lane, lane, 1; setp.ne.b32 odd, lane, 0;
cvt.u64.u32 column, $18; mov.b32 $0, 0; mov.b32 $1, 0;
selp.b32 x, $2, $6, odd; selp.b32 y, $3, $7, odd;
shfl.sync.bfly.b32 x, x, 1, 31, -1; shfl.sync.bfly.b32 y, y, 1, 31, -1;
selp.b32 a, x, $2, odd; selp.b32 b, y, $3, odd; selp.b32 c, $6, x, odd; selp.b32 d, $7, y, odd;
setp.ne.b64 there, $10, 0; add.s64 place, $10, column;
@there red.global.add.v4.f32 [place], {a, b, c, d};
selp.b32 x, $4, $8, odd; selp.b32 y, $5, $9, odd;
shfl.sync.bfly.b32 x, x, 1, 31, -1; shfl.sync.bfly.b32 y, y, 1, 31, -1;
selp.b32 a, x, $4, odd; selp.b32 b, y, $5, odd; selp.b32 c, $8, x, odd; selp.b32 d, $9, y, odd;
setp.ne.b64 there, $12, 0; add.s64 place, $12, column;
@there red.global.add.v4.f32 [place], {a, b, c, d};
}""")


@gluon.jit
def add(part, rows, target, first):
    """target[rows, first .. first + 64] += part; rows of -1 take nothing."""
    place = gl.where(rows >= 0, target.to(gl.int64) + rows.to(gl.int64) * 2048, 0)[:, None]
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, SCORES))
    # the first column of a lane's four: among the first eight of sixteen, odd lanes among the second
    column = (first + column // 16 * 16 + column // 2 % 2 * 8 + column // 4 % 2 * 4)[None, :]
    part, place = gl.broadcast(part, place)
    part, column = gl.broadcast(part, column * 4)
    gl.inline_asm_elementwise(
        ADD, "=r,=r" + ",r" * 8 + ",l" * 8 + ",r" * 8, [part, place, column], dtype=gl.int8, is_pure=False, pack=8
    )


# Of a lane's sixteen numbers, in pairs, those of rows r and r + 8 alternate. $12, $14: the rows' places, 0 = none; $28:
# the column, in bytes.
KEEP = gl.constexpr("""{
.reg .pred there; .reg .b64 place, column;
mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; cvt.u64.u32 column, $28;
setp.ne.b64 there, $12, 0; add.s64 place, $12, column; @there st.global.v4.b32 [place], {$4, $6, $8, $10};
setp.ne.b64 there, $14, 0; add.s64 place, $14, column; @there st.global.v4.b32 [place], {$5, $7, $9, $11};
}""")


@gluon.jit
def keep(part, rows, target, first):
    """part to target, in the order of registers: a lane's eight columns c, c + 1, c + 8, ..., c + 25 of 32 are
    neighbours in memory. Nothing of rows of -1."""
    slot = gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
    place = gl.where(rows >= 0, target.to(gl.int64) + slot * 1024, 0)[:, None]
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, SCORES))
    column = (first + column // 32 * 32 + column // 2 % 4 * 8)[None, :]
    part, place = gl.broadcast(part.to(target.dtype.element_ty), place)
    part, column = gl.broadcast(part, column * 2)
    gl.inline_asm_elementwise(KEEP, "=r,=r,=r,=r" + ",r" * 8 + ",l" * 16 + ",r" * 16, [part, place, column],
                              dtype=gl.int8, is_pure=False, pack=16)  # fmt: skip


@gluon.jit
def gradients(dq, memory, rows, target, block, factor, H: gl.constexpr, ATOMIC: gl.constexpr, SCALED: gl.constexpr):
    """This half of dQ and of dKV of a block. factor: of dKV, SCALED."""
    p16, ds16 = memory.p16, memory.ds16
    place = target.ptr + block * target.step
    opaque = zero(block)
    dq = warpgroup_mma(ds16, memory.kv.index(opaque + H), dq, is_async=True)
    q_panels = reinterpret(memory.q.index(H), [4, 64, 64], PANEL)
    dout_panels = reinterpret(memory.dout.index(H), [4, 64, 64], PANEL)
    for piece in gl.static_range(4):
        part = gl.zeros([64, 64], gl.float32, SCORES)
        at = zero(block) + piece
        part = warpgroup_mma(p16.permute((1, 0)), dout_panels.index(at), part, use_acc=False, is_async=True)
        part = warpgroup_mma(ds16.permute((1, 0)), q_panels.index(at), part, is_async=True)
        if piece == 0:
            dq = warpgroup_mma_wait(num_outstanding=2, deps=(dq,))
            memory.free.arrive(0)
        part = warpgroup_mma_wait(num_outstanding=0, deps=(part,))
        if piece == 3:
            memory.used.arrive(0)
        if SCALED:
            part = part * factor
        if ATOMIC:
            add(part, rows, place, H * 256 + piece * 64)
        else:
            keep(part, rows, place, H * 256 + piece * 64)
    return dq


@gluon.jit
def end(dq, kv, dq_desc, query, H: gl.constexpr):
    """This half of dQ to memory, by way of its half of kv."""
    kv.index(H).store(dq.to(kv.dtype))
    fence_async_shared()
    send_half(dq_desc, kv, query, H)
    store_wait(0)


@gluon.jit
def left_role(memory, terms, target, dq_desc, query, ATOMIC: gl.constexpr, SCALED: gl.constexpr):
    """S, P; columns 0-255 of dQ and dKV."""
    heads = query.heads
    row = query.head + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
    lse2 = gl.load(terms.lse2_ptr + query.number.to(gl.int64) * heads + row, mask=row < heads, other=float("inf"))
    up, down, factor = 1.0, 1.0, 1.0
    if SCALED:
        up, down = factors(terms, query)
        factor, undo = dkv_factors(terms, query, down, ATOMIC)
        if not ATOMIC:
            keep_undo(target, query, undo)
    dq = gl.zeros([64, 256], gl.float32, HALF)
    memory.q_ready.wait(0, 0)
    phase = 0
    for block in range(0, query.blocks):
        there = numbers(query, block, gl.SliceLayout(0, SCORES)) >= 0
        rows = numbers(query, block, gl.SliceLayout(1, SCORES))
        memory.ready.wait(0, phase)
        fence_async_shared()  # cp.async writes like ordinary stores -> tensor-core reads
        s = products(memory.q, memory.kv, block)
        p = gl.where(there[None, :], gl.exp2(s * terms.scale2 - lse2[:, None]), 0.0)
        memory.used.wait(0, phase ^ 1)
        if SCALED:
            p = p * up
        memory.p32.store(p)
        memory.p16.store(p.to(memory.p16.dtype))
        fence_async_shared()
        memory.p_ready.arrive(0)
        memory.ds_ready.wait(0, phase)
        dq = gradients(dq, memory, rows, target, block, factor, 0, ATOMIC, SCALED)
        phase = phase ^ 1
    if SCALED:
        dq = dq * down
    end(dq, memory.kv, dq_desc, query, 0)


@gluon.jit
def right_role(memory, terms, target, dq_desc, query, ATOMIC: gl.constexpr, SCALED: gl.constexpr):
    """dP, dS; columns 256-511 of dQ and dKV."""
    heads = query.heads
    row = query.head + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
    delta = gl.load(terms.delta_ptr + query.number.to(gl.int64) * heads + row, mask=row < heads, other=0.0)
    down, factor = 1.0, 1.0
    if SCALED:
        _, down = factors(terms, query)
        factor, _ = dkv_factors(terms, query, down, ATOMIC)
    dq = gl.zeros([64, 256], gl.float32, HALF)
    memory.q_ready.wait(0, 0)
    phase = 0
    for block in range(0, query.blocks):
        rows = numbers(query, block, gl.SliceLayout(1, SCORES))
        memory.ready.wait(0, phase)
        fence_async_shared()
        dp = products(memory.dout, memory.kv, block)
        memory.p_ready.wait(0, phase)
        ds = memory.p32.load(SCORES) * (dp - delta[:, None]) * terms.scale
        memory.ds16.store(ds.to(memory.ds16.dtype))
        fence_async_shared()
        memory.ds_ready.arrive(0)
        dq = gradients(dq, memory, rows, target, block, factor, 1, ATOMIC, SCALED)
        phase = phase ^ 1
    if SCALED:
        dq = dq * down
    end(dq, memory.kv, dq_desc, query, 1)


@gluon.jit
def backward_sparse(
    q_desc,
    dout_desc,
    turned_desc,
    dq_desc,
    lists,
    pools,
    terms,
    contributions,
    ATOMIC: gl.constexpr,
    TURNED: gl.constexpr,
    SCALED: gl.constexpr,
    RIGHT_REGS: gl.constexpr,
    GATHER_REGS: gl.constexpr,
):
    """rows [N, width] of both pools by one number, compressed rows after the window's: window_blocks blocks of 64
    entries name window rows, the others compressed ones. blocks [N]: how many a query has. target: dkv fp32 [rows, 512]
    to add to; without ATOMIC the contributions [head tiles, queries from query_begin on, width rounded up to 64, 512 in
    the order of keep()], to be summed later. The last TURNED panels of 64 columns of dO are those of turned. SCALED
    (fp16): most and sizes [N, H], and undo [head tiles, queries, blocks]: what undoes the contributions' factor."""
    DTYPE: gl.constexpr = q_desc.dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    q = gl.allocate_shared_memory(DTYPE, [2, 64, 256], TILE)
    dout = gl.allocate_shared_memory(DTYPE, [2, 64, 256], TILE)
    kv = gl.allocate_shared_memory(DTYPE, [2, 64, 256], TILE)
    p16 = gl.allocate_shared_memory(DTYPE, [64, 64], TILE)
    ds16 = gl.allocate_shared_memory(DTYPE, [64, 64], TILE)
    p32 = gl.allocate_shared_memory(gl.float32, [64, 64], FLAT)
    q_ready = new_barriers(1)
    ready = new_barriers(1, 128)
    free = new_barriers(1, 2)
    p_ready = new_barriers(1)
    ds_ready = new_barriers(1)
    used = new_barriers(1, 2)
    init_barriers((q_ready, ready, free, p_ready, ds_ready, used))
    query, target = query_and_target(lists, contributions, ATOMIC)
    operands = Operands(q_desc, dout_desc, turned_desc)
    memory = Memory(q, dout, kv, p16, ds16, p32, q_ready, ready, free, p_ready, ds_ready, used)
    gl.warp_specialize([
        (left_role, (memory, terms, target, dq_desc, query, ATOMIC, SCALED)),
        (right_role, (memory, terms, target, dq_desc, query, ATOMIC, SCALED)),
        (gather_role, (operands, memory, pools, query, TURNED)),
    ], [4, 4], [RIGHT_REGS, GATHER_REGS])  # fmt: skip
