"""Gradients of V4 attention on sm_100a: 64 heads of one query per CTA, blocks of 64 listed rows, K = V.

    S = Q K^T    P = 2^(S scale2 - lse2)    dP = dO K^T    dS = scale P (dP - delta)
    dQ += dS K                               dKV[rows of the block] += P^T dO + dS^T Q

fp16: P and dS are multiplied by a power of two before they are rounded (v4/kernels/backward_scale.py), results divided.

Role chart of a block::

    gather  4 warps | rows of the next block, as soon as dQ has used this one's ...
    mma     1 warp  | S, dP |       | dQ += dS K | dKV 0-127 | 128-255 |      | 256-383 | 384-511 | S, dP of the next
    scores  4 warps |       | P, dS |                                                             | ... in the end: dQ
    add 0   4 warps |                                        | 0-127 added ...... | 256-383 added ...       or stored
    add 1   4 warps |                                                  | 128-255 added ...... | 384-511 added ...

tensor memory   columns   holds
s, dp           2 x 64    fp32 [64, 64]: 64 rows use half of the 128 lanes
dq              256       fp32 [64, 512]: its two halves lie side by side in the lanes
dkv             128       fp32 [64, 256]: two quarters of the columns of the block's gradient, likewise     = 512

64 rows run the tensor core at half its rate. 128 heads of a pair of CTAs would run it at full rate, but a pair splits
the right operands of dQ and of dKV in two, and P and dS would have to be exchanged; 128 rows at a time instead of heads
do not fit: K, Q and dO would need 256 KiB of shared memory. The sums over the queries are the limit in any case: 128
KiB of fp32 to add for every block.

shared memory   bytes        holds
q, dout         2 x 65536    [2, 64, 256] each: halves of the columns
kv              65536        [2, 64, 256]: the block's rows; at the end dQ on its way out
p16, ds16       2 x 8192     [64, 64]: heads times rows                                                     = 208 KiB
(compiler's)    2 x 4096     columns of dKV on their way from a row per lane to lines of a row
barriers        8 each

barrier     arrives             count       waits          means
q_ready     gather: TMA bytes   1 + bytes   mma            Q and dO are there
ready       gather: copies      128         mma            the block is in kv
free        commit of mma       1           gather         S, dP and dQ have used the block
s_ready     commit of mma       1           scores         S is complete
dp_ready    commit of mma       1           scores         dP is complete
ds_ready    scores              1           mma            P and dS are written, S and dP are read
used        commit of mma       1           scores         dKV has used P and dS
part_ready  commit of mma       1           add            a quarter of dKV is complete: two barriers, one for either
part_free   add                 1           mma            half of dkv; it is read
dq_done     commit of mma       1           scores         dQ is complete

Rows are gathered, and contributions without atomics are laid out, as in the Hopper kernel. A row number of -1 is
filled with zeros, its P is 0, and nothing is added for it.
"""

from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout, allocate_tensor_memory, tcgen05_mma

from dsv4.kernels.compat import Value, aggregate, fence_async_shared, gl, gluon, reinterpret, store_wait
from dsv4.kernels.opaque import zero
from dsv4.kernels.ring import Barriers, init_barriers, new_barriers
from dsv4.v4.kernels.backward_arguments import Operands, query_and_target
from dsv4.v4.kernels.backward_gather import PANEL, gather_role, numbers, send_half
from dsv4.v4.kernels.backward_scale import dkv_factors, factors, keep_undo


@aggregate
class Memory:
    q: Value
    dout: Value
    kv: Value
    p16: Value
    ds16: Value
    s: Value
    dp: Value
    dq: Value
    dkv: Value
    q_ready: Barriers
    ready: Barriers
    free: Barriers
    s_ready: Barriers
    dp_ready: Barriers
    ds_ready: Barriers
    used: Barriers
    part_ready: Barriers
    part_free: Barriers
    dq_done: Barriers


@gluon.jit
def mma_role(memory, query):
    q, dout, kv, p16, ds16 = memory.q, memory.dout, memory.kv, memory.p16, memory.ds16
    memory.q_ready.wait(0, 0)
    for block in range(0, query.blocks):
        phase = block % 2
        memory.ready.wait(0, phase)
        fence_async_shared()  # cp.async writes like ordinary stores -> tensor-core reads
        at = zero(block)  # otherwise the descriptors of all products would be kept in registers, and spilled
        for h in gl.static_range(2):
            tcgen05_mma(q.index(at + h), kv.index(at + h).permute((1, 0)), memory.s, use_acc=h > 0)
        memory.s_ready.arrive_after_mma(0)
        for h in gl.static_range(2):
            tcgen05_mma(dout.index(at + h), kv.index(at + h).permute((1, 0)), memory.dp, use_acc=h > 0)
        memory.dp_ready.arrive_after_mma(0)
        memory.ds_ready.wait(0, phase)
        for h in gl.static_range(2):
            tcgen05_mma(ds16, kv.index(at + h), memory.dq.slice(h * 256, 256), use_acc=block > 0)
        memory.free.arrive_after_mma(0)
        for h in gl.static_range(2):
            for c in gl.static_range(2):
                memory.part_free.wait(c, (h + 1) % 2)  # twice in a block; the first wait of all passes
                part = memory.dkv.slice(c * 128, 128)
                tcgen05_mma(p16.permute((1, 0)), dout.index(at + h).slice(c * 128, 128, dim=1), part, use_acc=False)
                tcgen05_mma(ds16.permute((1, 0)), q.index(at + h).slice(c * 128, 128, dim=1), part, use_acc=True)
                memory.part_ready.arrive_after_mma(c)
        memory.used.arrive_after_mma(0)
    memory.dq_done.arrive_after_mma(0)


@gluon.jit
def score_role(memory, terms, query, dq_desc, SCALED: gl.constexpr):
    """Compute P and dS of every block, and in the end write dQ to memory."""
    p16, ds16, kv = memory.p16, memory.ds16, memory.kv
    L: gl.constexpr = memory.s.get_reg_layout()
    row = query.head + gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    at = query.number.to(gl.int64) * query.heads + row
    lse2 = gl.load(terms.lse2_ptr + at, mask=row < query.heads, other=float("inf"))
    delta = gl.load(terms.delta_ptr + at, mask=row < query.heads, other=0.0)
    up, down = 1.0, 1.0
    if SCALED:
        up, down = factors(terms, query)
    for block in range(0, query.blocks):
        phase = block % 2
        there = numbers(query, block, gl.SliceLayout(0, L)) >= 0
        memory.s_ready.wait(0, phase)
        p = gl.where(there[None, :], gl.exp2(memory.s.load() * terms.scale2 - lse2[:, None]), 0.0)
        memory.used.wait(0, phase ^ 1)  # the first wait on an untouched barrier passes
        if SCALED:
            p = p * up
        p16.store(p.to(p16.dtype))
        memory.dp_ready.wait(0, phase)
        ds = p * (memory.dp.load() - delta[:, None]) * terms.scale
        ds16.store(ds.to(ds16.dtype))
        fence_async_shared()  # generic stores -> tensor-core reads
        memory.ds_ready.arrive(0)
    memory.dq_done.wait(0, 0)
    LO: gl.constexpr = memory.dq.slice(0, 64).get_reg_layout()
    for h in gl.static_range(2):
        panels = reinterpret(kv.index(h), [4, 64, 64], PANEL)
        for i in gl.static_range(4):
            x = gl.zeros([64, 64], gl.float32, LO)
            if query.blocks > 0:  # without a block, dQ was never written
                x = memory.dq.slice(h * 256 + i * 64, 64).load()
                if SCALED:
                    x = x * down
            panels.index(i).store(x.to(kv.dtype))
    fence_async_shared()
    for h in gl.static_range(2):
        send_half(dq_desc, kv, query, h)
    store_wait(0)


@gluon.jit
def add_role(memory, target, terms, query, PART: gl.constexpr, ATOMIC: gl.constexpr, SCALED: gl.constexpr):
    """Add every block's dKV to the rows it names, or store it next to those of other queries, to be summed later. PART:
    which half of dkv."""
    L: gl.constexpr = memory.dkv.slice(0, 64).get_reg_layout()
    # A lane has columns of one row. A warp must add whole sectors at once: L2 updates a sector at a time. Its 16 rows
    # stay with it, so that it waits for no other warp.
    LINES: gl.constexpr = gl.BlockedLayout([8, 4], [2, 16], [4, 1], [1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, LINES if ATOMIC else L)
    slot = gl.arange(0, 64, layout=gl.SliceLayout(1, L)).to(gl.int64)
    factor = 1.0
    if SCALED:
        _, down = factors(terms, query)
        factor, undo = dkv_factors(terms, query, down, ATOMIC)
        if not ATOMIC:
            if PART == 0:
                keep_undo(target, query, undo)
    # This loop is not unrolled: the compiler merges two loads of the same tensor memory, whatever waits are between
    # them.
    for half in range(0, 2 * query.blocks):
        block = half // 2
        rows = numbers(query, block, ROWS)
        there = (rows >= 0)[:, None]
        memory.part_ready.wait(PART, half % 2)
        for c in gl.static_range(2):
            first = half % 2 * 256 + PART * 128 + c * 64
            x = memory.dkv.slice(PART * 128 + c * 64, 64).load()
            if c == 1:
                memory.part_free.arrive(PART)
            if SCALED:
                x = x * factor
            if ATOMIC:
                column = first + gl.arange(0, 64, layout=gl.SliceLayout(0, LINES))
                place = target.ptr + rows.to(gl.int64)[:, None] * 512 + column[None, :]
                gl.atomic_add(place, gl.convert_layout(x, LINES), mask=there, sem="relaxed")
            else:  # store in the order of Hopper's keep(), which fold_rows undoes
                column = first + gl.arange(0, 64, layout=gl.SliceLayout(0, L))
                column = column // 32 * 32 + column // 2 % 4 * 8 + column // 8 % 4 * 2 + column % 2
                place = target.ptr + block * target.step + slot[:, None] * 512 + column[None, :]
                gl.store(place, x.to(target.ptr.dtype.element_ty), mask=there)


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
    ADD_REGS: gl.constexpr,
    GATHER_REGS: gl.constexpr,
    MMA_REGS: gl.constexpr,
):
    """Compute the gradients; the arguments are those of the Hopper kernel of this name."""
    DTYPE: gl.constexpr = q_desc.dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q = gl.allocate_shared_memory(DTYPE, [2, 64, 256], TILE)
    dout = gl.allocate_shared_memory(DTYPE, [2, 64, 256], TILE)
    kv = gl.allocate_shared_memory(DTYPE, [2, 64, 256], TILE)
    p16 = gl.allocate_shared_memory(DTYPE, [64, 64], TILE)
    ds16 = gl.allocate_shared_memory(DTYPE, [64, 64], TILE)
    s = allocate_tensor_memory(gl.float32, [64, 64], TensorMemoryLayout([64, 64], col_stride=1))
    dp = allocate_tensor_memory(gl.float32, [64, 64], TensorMemoryLayout([64, 64], col_stride=1))
    dq = allocate_tensor_memory(gl.float32, [64, 512], TensorMemoryLayout([64, 256], col_stride=1))
    dkv = allocate_tensor_memory(gl.float32, [64, 256], TensorMemoryLayout([64, 128], col_stride=1))
    q_ready = new_barriers(1)
    ready = new_barriers(1, 128)
    free = new_barriers(1)
    s_ready = new_barriers(1)
    dp_ready = new_barriers(1)
    ds_ready = new_barriers(1)
    used = new_barriers(1)
    part_ready = new_barriers(2)
    part_free = new_barriers(2)
    dq_done = new_barriers(1)
    init_barriers((q_ready, ready, free, s_ready, dp_ready, ds_ready, used, part_ready, part_free, dq_done))
    query, target = query_and_target(lists, contributions, ATOMIC)
    operands = Operands(q_desc, dout_desc, turned_desc)
    memory = Memory(
        q,
        dout,
        kv,
        p16,
        ds16,
        s,
        dp,
        dq,
        dkv,
        q_ready,
        ready,
        free,
        s_ready,
        dp_ready,
        ds_ready,
        used,
        part_ready,
        part_free,
        dq_done,
    )
    gl.warp_specialize(
        [
            (score_role, (memory, terms, query, dq_desc, SCALED)),
            (add_role, (memory, target, terms, query, 0, ATOMIC, SCALED)),
            (add_role, (memory, target, terms, query, 1, ATOMIC, SCALED)),
            (gather_role, (operands, memory, pools, query, TURNED)),
            (mma_role, (memory, query)),
        ],
        [4, 4, 4, 1],
        [ADD_REGS, ADD_REGS, GATHER_REGS, MMA_REGS],
    )
