"""Gradients of V4 attention on sm_90a: 64 heads of one query per CTA, blocks of 64 listed rows, K = V.

    S = Q K^T    P = 2^(S scale2 - lse2)    dP = dO K^T    dS = scale P (dP - delta)
    dQ += dS K                               dKV[rows of the block] += P^T dO + dS^T Q

delta is dO . O, computed here, plus the rest from query_rows; for fp16 query_rows computes all of it. fp16: P and dS
are multiplied by a power of two before they are rounded (backward_scale.py), results divided.

Role chart::

    gather  4 warps | rows of block i + 1, as soon as both halves of dQ have used block i's ...
    scores  4 warps | S, dP of block i | P, dS -> P16, dS16 | dQ, columns 0-255 += dS K
    keys    4 warps | delta first | dQ, columns 256-511 += dS K of block i - 1 | its dKV, in eight pieces, to memory

`keys` sends one piece of dKV, 64 columns, to memory while the tensor cores work on the next; the last piece of a block
goes out while they work on the first of the next block. With two slots for P and dS, `scores` is a block ahead. Adding
dKV to memory is the limit: 128 KB per block, compared with 64 KB of rows that are read. P and dS are in the registers
of one role until they are rounded, so that dS is made from the unrounded P.

shared memory   bytes        holds
q, dout         2 x 65536    [2, 64, 256] each: halves of the columns
kv              65536        [2, 64, 256]: the block's rows; at the end dQ on its way out
p16, ds16       4 x 8192     [2, 64, 64] each: heads times rows, of two blocks
delta           256          [64] fp32, but for fp16
barriers        8 each

barrier    arrives             count       waits           means
q_ready    gather: TMA bytes   1 + bytes   scores, keys    Q and dO are there
ready      gather: copies      128         scores          the block is in kv
free       scores, keys        2           gather          S, dP and dQ have used the block
ds_ready   scores              1           keys            P16 and dS16 are written, S and dP are complete
used       keys                1           scores          dKV has used P16 and dS16
d_ready    keys                1           scores          delta is there

`keys` reads kv after ds_ready, which follows `ready` and the fence behind it in `scores`. At the end each owner of a
half writes its dQ over its half of kv: S and dP of the last block were complete before ds_ready, and no other role
reads that half.
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
    q_ready: Barriers
    ready: Barriers
    free: Barriers
    ds_ready: Barriers
    used: Barriers
    delta: Value
    d_ready: Barriers


@gluon.jit
def products(x, kv, step):
    """Multiply x [2, 64, 256] by the block's rows, transposed: [64 heads, 64 rows]. Two products, not waited for."""
    opaque = zero(step)  # otherwise all wgmma descriptors of a fixed slot would be kept in registers, and spilled
    s = gl.zeros([64, 64], gl.float32, SCORES)
    s = warpgroup_mma(x.index(opaque), kv.index(opaque).permute((1, 0)), s, use_acc=False, is_async=True)
    return warpgroup_mma(x.index(opaque + 1), kv.index(opaque + 1).permute((1, 0)), s, is_async=True)


def _add_asm() -> str:
    """Return PTX that adds 64 columns of two rows by whole lines of 128 bytes.

    Of a lane's 32 numbers, $8 on, two belong to row r, two to row r + 8, and so on. Lanes l and l ^ 4 have rows r and
    r ^ 1. Both send the second half of a line of theirs, so that together they add the line of the even row and then
    that of the odd one. $40, $42: places of the even row of r and of r + 8; $72, $74: of the odd one; 0 = none.
    """
    lines = [
        "{ .reg .pred second, at_even, at_odd; .reg .b32 lane, x<4>, a<4>, b<4>; .reg .b64 here, across, even, odd;",
        *(f"mov.b32 ${i}, 0;" for i in range(8)),
        "mov.u32 lane, %laneid; and.b32 x0, lane, 4; setp.ne.b32 second, x0, 0;",
        "and.b32 x1, lane, 3; shl.b32 x1, x1, 4; shl.b32 x0, x0, 4; or.b32 x0, x0, x1; xor.b32 x1, x0, 64;",
        "cvt.u64.u32 here, x0; cvt.u64.u32 across, x1;",
    ]
    for eight in range(2):  # row r, row r + 8
        for row, offset, first in (("even", "here", 40), ("odd", "across", 72)):
            place = f"${first + 2 * eight}"
            lines.append(f"setp.ne.b64 at_{row}, {place}, 0; add.s64 {row}, {place}, {offset};")
        for line in range(2):
            own = [8 + line * 16 + tile * 4 + eight * 2 + k for tile in range(2) for k in range(2)]
            for k, i in enumerate(own):
                lines.append(f"shfl.sync.bfly.b32 x{k}, ${i + 8}, 4, 31, -1;")
                lines.append(f"selp.b32 a{k}, x{k}, ${i}, second; selp.b32 b{k}, ${i}, x{k}, second;")
            for row, x in (("even", "a"), ("odd", "b")):
                values = f"{{{x}0, {x}1, {x}2, {x}3}}"
                lines.append(f"@at_{row} red.global.add.v4.f32 [{row} + {line * 128}], {values};")
    return "\n".join(lines) + "\n}"


ADD = gl.constexpr(_add_asm())
ADD_REGISTERS = gl.constexpr(",".join(["=r"] * 8 + ["r"] * 32 + ["l"] * 64))


@gluon.jit
def add(part, places, first):
    """Add 64 columns of dKV, from `first` on, to their rows in memory. They stay in the order of registers: of 16
    columns a lane's c, c + 1, c + 8, c + 9 are neighbours. Whole lines pay: 3.8 instead of 3.1 TB/s."""
    even, odd = places
    even = gl.where(even != 0, even + first * 4, 0)[:, None]
    odd = gl.where(odd != 0, odd + first * 4, 0)[:, None]
    part, even = gl.broadcast(part, even)
    part, odd = gl.broadcast(part, odd)
    gl.inline_asm_elementwise(ADD, ADD_REGISTERS, [part, even, odd], dtype=gl.int8, is_pure=False, pack=32)


# Of a lane's sixteen numbers, in pairs, those of rows r and r + 8 alternate. $12, $14: the rows' places, 0 = none; $28:
# the column, in bytes.
KEEP = gl.constexpr("""{
.reg .pred there; .reg .b64 place, column;
mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; cvt.u64.u32 column, $28;
setp.ne.b64 there, $12, 0; add.s64 place, $12, column; @there st.global.v4.b32 [place], {$4, $6, $8, $10};
setp.ne.b64 there, $14, 0; add.s64 place, $14, column; @there st.global.v4.b32 [place], {$5, $7, $9, $11};
}""")


@gluon.jit
def keep(part, places, first, DTYPE: gl.constexpr):
    """Store part at its places, in the order of registers: a lane's eight columns c, c + 1, c + 8, ..., c + 25 of 32
    are neighbours in memory."""
    place, _ = places
    place = place[:, None]
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, SCORES))
    column = (first + column // 32 * 32 + column // 2 % 4 * 8)[None, :]
    part, place = gl.broadcast(part.to(DTYPE), place)
    part, column = gl.broadcast(part, column * 2)
    gl.inline_asm_elementwise(
        KEEP,
        "=r,=r,=r,=r" + ",r" * 8 + ",l" * 16 + ",r" * 16,
        [part, place, column],
        dtype=gl.int8,
        is_pure=False,
        pack=16,
    )


@gluon.jit
def places_of(query, target, block, ATOMIC: gl.constexpr):
    """Return where a block's dKV goes, 0 = nowhere. ATOMIC: the rows to add to, of an even entry and of the next odd
    one. Else the rows of this block's contribution, twice."""
    entry = gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
    base = target.ptr.to(gl.int64)
    if ATOMIC:
        entry = block * 64 + entry
        even, odd = entry & -2, entry | 1
        even = gl.load(query.line + even, mask=even < query.width, other=-1)
        odd = gl.load(query.line + odd, mask=odd < query.width, other=-1)
        even = gl.where(even >= 0, base + even.to(gl.int64) * 2048, 0)
        odd = gl.where(odd >= 0, base + odd.to(gl.int64) * 2048, 0)
        return even, odd
    else:
        rows = numbers(query, block, gl.SliceLayout(1, SCORES))
        place = base + (block * target.step).to(gl.int64) * 2 + entry * 1024
        place = gl.where(rows >= 0, place, 0)
        return place, place


@gluon.jit
def moved(x):
    """Move x to registers other than a product's: to read those, ptxas waits for every product in flight (C7517)."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def nowhere():
    none = gl.zeros([64], gl.int64, gl.SliceLayout(1, SCORES))
    return none, none


@gluon.jit
def send(part, places, piece, factor, target, ATOMIC: gl.constexpr, SCALED: gl.constexpr):
    """Send a piece of dKV to memory."""
    if SCALED:
        part = part * factor
    if ATOMIC:
        add(part, places, piece * 64)
    else:
        keep(part, places, piece * 64, target.ptr.dtype.element_ty)


@gluon.jit
def end(dq, kv, dq_desc, query, H: gl.constexpr):
    """Write this half of dQ to memory, through its half of kv."""
    kv.index(H).store(dq.to(kv.dtype))
    fence_async_shared()
    send_half(dq_desc, kv, query, H)
    store_wait(0)


@gluon.jit
def find_delta(memory, terms, outputs, query, TURNED: gl.constexpr):
    """Compute dO . O of the 64 heads: store it in delta, and times the sink's share in memory. O is read directly from
    memory: no other role reads it."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = query.head + gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, L))
    there = row < query.heads
    place = query.number.to(gl.int64) * query.heads + row
    line = (query.number.to(gl.int64) * outputs.out_n + row.to(gl.int64) * outputs.out_h) * 8
    share = gl.load(outputs.share_ptr + place, mask=there, other=0.0)
    rest = gl.load(terms.delta_ptr + place, mask=there, other=0.0)
    tail = gl.zeros([64], gl.float32, gl.SliceLayout(1, L))
    if TURNED > 0:
        tail = gl.load(outputs.tail_ptr + place, mask=there, other=0.0)
    o = ()  # all of it is in flight while Q and dO are loaded
    for panel in gl.static_range(8 - TURNED):
        here = outputs.out_ptr + line[:, None] + (panel * 64 + column)[None, :]
        o += (gl.load(here, mask=there[:, None], other=0.0),)
    panels = reinterpret(memory.dout, [8, 64, 64], PANEL)
    memory.q_ready.wait(0, 0)
    products = gl.zeros([64, 64], gl.float32, L)
    for panel in gl.static_range(8 - TURNED):
        products += o[panel].to(gl.float32) * panels.index(panel).load(L).to(gl.float32)
    dot = tail + gl.sum(products, 1)
    memory.delta.store(dot + rest)
    memory.d_ready.arrive(0)
    gl.store(outputs.share_ptr + place, gl.where(share == 0.0, 0.0, share * dot), mask=there)


@gluon.jit
def scores_role(memory, terms, target, dq_desc, query, ATOMIC: gl.constexpr, SCALED: gl.constexpr):
    """Compute S, dP, P, dS, and columns 0-255 of dQ."""
    heads = query.heads
    row = query.head + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
    place = query.number.to(gl.int64) * heads + row
    lse2 = gl.load(terms.lse2_ptr + place, mask=row < heads, other=float("inf"))
    up, down = 1.0, 1.0
    if SCALED:
        delta = gl.load(terms.delta_ptr + place, mask=row < heads, other=0.0)
        up, down = factors(terms, query)
        if not ATOMIC:
            _, undo = dkv_factors(terms, query, down, ATOMIC)
            keep_undo(target, query, undo)
    dq = gl.zeros([64, 256], gl.float32, HALF)
    memory.q_ready.wait(0, 0)
    for block in range(0, query.blocks):
        there = numbers(query, block, gl.SliceLayout(0, SCORES)) >= 0
        slot = block & 1
        memory.ready.wait(0, slot)
        fence_async_shared()  # cp.async writes like ordinary stores -> tensor-core reads
        s = products(memory.q, memory.kv, block)
        dp = products(memory.dout, memory.kv, block)
        s = warpgroup_mma_wait(num_outstanding=2, deps=(s,))
        p = gl.where(there[None, :], gl.exp2(s * terms.scale2 - lse2[:, None]), 0.0)
        if SCALED:
            p = p * up
        memory.used.wait(slot, (block >> 1 & 1) ^ 1)
        memory.p16.index(slot).store(p.to(memory.p16.dtype))
        if not SCALED:
            memory.d_ready.wait(0, 0)  # keys computed it while the first block was in flight
            delta = memory.delta.load(gl.SliceLayout(1, SCORES))
        dp = warpgroup_mma_wait(num_outstanding=0, deps=(dp,))
        ds = (p * (dp - delta[:, None]) * terms.scale).to(memory.ds16.dtype)
        memory.ds16.index(slot).store(ds)
        fence_async_shared()
        memory.ds_ready.arrive(slot)
        a = gl.convert_layout(ds, gl.DotOperandLayout(0, HALF, 2))
        dq = warpgroup_mma(a, memory.kv.index(zero(block)), dq, is_async=True)
        dq = warpgroup_mma_wait(num_outstanding=0, deps=(dq,))
        memory.free.arrive(0)
    if SCALED:
        dq = dq * down
    end(dq, memory.kv, dq_desc, query, 0)


@gluon.jit
def piece_of_dkv(memory, slot, at):
    """Issue two products for 64 columns of dKV, those of panel `at`, without a wait."""
    q_panels = reinterpret(memory.q, [8, 64, 64], PANEL)
    dout_panels = reinterpret(memory.dout, [8, 64, 64], PANEL)
    part = gl.zeros([64, 64], gl.float32, SCORES)
    p = memory.p16.index(slot).permute((1, 0))
    part = warpgroup_mma(p, dout_panels.index(at), part, use_acc=False, is_async=True)
    ds = memory.ds16.index(slot).permute((1, 0))
    return warpgroup_mma(ds, q_panels.index(at), part, is_async=True)


@gluon.jit
def keys_role(
    memory, terms, outputs, target, dq_desc, query, ATOMIC: gl.constexpr, TURNED: gl.constexpr, SCALED: gl.constexpr
):
    """Compute delta, dKV, and columns 256-511 of dQ."""
    down, factor = 1.0, 1.0
    if SCALED:
        _, down = factors(terms, query)
        factor, _ = dkv_factors(terms, query, down, ATOMIC)
    else:
        find_delta(memory, terms, outputs, query, TURNED)
    dq = gl.zeros([64, 256], gl.float32, HALF)
    last = gl.zeros([64, 64], gl.float32, SCORES)  # the last piece of the previous block
    last_places = nowhere()
    memory.q_ready.wait(0, 0)
    for block in range(0, query.blocks):
        slot = block & 1
        opaque = zero(block)
        places = places_of(query, target, block, ATOMIC)
        memory.ds_ready.wait(slot, block >> 1 & 1)
        part = piece_of_dkv(memory, slot, opaque)
        dq = warpgroup_mma(memory.ds16.index(slot), memory.kv.index(opaque + 1), dq, is_async=True)
        send(last, last_places, 7, factor, target, ATOMIC, SCALED)
        for piece in gl.static_range(7):
            following = piece_of_dkv(memory, slot, opaque + (piece + 1))
            if piece == 0:
                part = warpgroup_mma_wait(num_outstanding=3, deps=(part,))
            elif piece == 1:
                dq, part = warpgroup_mma_wait(num_outstanding=2, deps=(dq, part))
                memory.free.arrive(0)
            else:
                part = warpgroup_mma_wait(num_outstanding=2, deps=(part,))
            send(part, places, piece, factor, target, ATOMIC, SCALED)
            part = following
        last = moved(warpgroup_mma_wait(num_outstanding=0, deps=(part,)))
        memory.used.arrive(slot)
        last_places = places
    send(last, last_places, 7, factor, target, ATOMIC, SCALED)
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
    outputs,
    contributions,
    ATOMIC: gl.constexpr,
    TURNED: gl.constexpr,
    SCALED: gl.constexpr,
    KEYS_REGS: gl.constexpr,
    GATHER_REGS: gl.constexpr,
):
    """Compute gradients of rows [N, width] of both pools by one number, compressed rows after the window's:
    window_blocks blocks of 64 entries name window rows, the others compressed ones. blocks [N]: how many a query
    has. target: dkv fp32 [rows, 512 in the order of add()] to add to; without ATOMIC the contributions [head tiles,
    queries from query_begin on, width rounded up to 64, 512 in the order of keep()], to be summed later. The last
    TURNED panels of 64 columns of dO are those of turned. SCALED (fp16): most and sizes [N, H], and undo [head
    tiles, queries, blocks]: what undoes the contributions' factor."""
    DTYPE: gl.constexpr = q_desc.dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q = gl.allocate_shared_memory(DTYPE, [2, 64, 256], TILE)
    dout = gl.allocate_shared_memory(DTYPE, [2, 64, 256], TILE)
    kv = gl.allocate_shared_memory(DTYPE, [2, 64, 256], TILE)
    p16 = gl.allocate_shared_memory(DTYPE, [2, 64, 64], TILE)
    ds16 = gl.allocate_shared_memory(DTYPE, [2, 64, 64], TILE)
    q_ready = new_barriers(1)
    ready = new_barriers(1, 128)
    free = new_barriers(1, 2)
    ds_ready = new_barriers(2)
    used = new_barriers(2)
    delta = gl.allocate_shared_memory(gl.float32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    d_ready = new_barriers(1)
    init_barriers((q_ready, ready, free, ds_ready, used, d_ready))
    query, target = query_and_target(lists, contributions, ATOMIC)
    operands = Operands(q_desc, dout_desc, turned_desc)
    memory = Memory(q, dout, kv, p16, ds16, q_ready, ready, free, ds_ready, used, delta, d_ready)
    gl.warp_specialize(
        [
            (scores_role, (memory, terms, target, dq_desc, query, ATOMIC, SCALED)),
            (keys_role, (memory, terms, outputs, target, dq_desc, query, ATOMIC, TURNED, SCALED)),
            (gather_role, (operands, memory, pools, query, TURNED)),
        ],
        [4, 4],
        [KEYS_REGS, GATHER_REGS],
    )
