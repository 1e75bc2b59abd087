"""V4 attention on sm_100a: 64 heads of one query token at a time, rows picked by number from one or two pools.

Every row is key and value at once: a block of 64 rows is gathered once, into two ring slots [64, 256] (halves of the
head dim), and read as K and as V. Two blocks are in the ring, with two S and two P. Role chart::

    gather   4 warps  | Q | block 0 | block 1 |                 | block 2, as P0 V0 frees it | ...
    scores   1 warp   |   |         | S0 = Q K0^T | S1 = Q K1^T |                            | S2 = Q K2^T | ...
    values   1 warp   |   |                       | ...         | O += P0 V0 | O += P1 V1    | ...
    softmax  4 warps  |   |                       | P0          | P1         | ...           | ...    | O / l -> out

Scores and values issue their products independently, so that whichever is ready goes next: with room for only two
blocks, a fixed order would leave the tensor core idle while a block is in flight.

A work tile is 64 heads of one query and one split of its rows. A CTA loops over work tiles: while softmax writes the
output of one, Q and the first blocks of the next arrive and their scores are computed. gather.py describes how rows are
gathered.

tensor memory   columns     holds
s               2 x 64      S of two blocks, fp32 [64, 64]: 64 rows use half of the 128 lanes
o               256         O, fp32 [64, 512]: its two halves lie side by side in the lanes

shared memory   bytes       holds
q               2 x 32768   [64, 256] each: columns 0-255 and 256-511 of Q
kv              4 x 32768   [64, 256] each: half h of block j at 2 (j % 2) + h
p               2 x 8192    [64, 64] each: P of block j at j % 2; the output rows leave through it
bias            2 x 256     fp32 per key: what is added to the scores of block j, at j % 2
job             4           the number of blocks of the work tile
barriers        8 each

barrier      arrives            count   waits                     means
q_ready      gather, bytes      1       scores, values, softmax   Q of the work tile is in q, its block count in job
q_free       commit of scores,  3       gather                    the work tile's scores are complete; job has been read
             values, softmax
kv_ready[i]  gather, or bytes   1       scores, values, softmax   slot i is filled; even i: the bias of the block too
kv_free[i]   commit of values   1       gather                    P V has used slot i
s_ready[s]   commit of scores   1       softmax                   S is complete
p_ready[s]   softmax            1       values, scores            P is stored, S is read, O is rescaled for this P V
pv_done[s]   commit of values   1       softmax                   P V is complete: P may be overwritten, O touched

No wait lags two phases behind: ready[i] is filled again after free[i], which follows p_ready; p_ready[s] comes again
after softmax has waited for pv_done[s], that is, for values; and s_ready[s] after scores has waited for p_ready[s].
The first P V of a work tile overwrites O: its p_ready comes after softmax has written the output of the work tile
before.
"""

from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout, allocate_tensor_memory, tcgen05_mma

from dsv4.kernels import softmax
from dsv4.kernels.compat import Value, aggregate, fence_async_shared, gl, gluon
from dsv4.kernels.ring import Barriers, Ring, Stage, init_barriers, new_barriers, new_ring
from dsv4.v4.kernels.sm100.epilogue import angles_of, finish_rows, tile_rows
from dsv4.v4.kernels.sm100.gather import gather_role, pools_of
from dsv4.v4.kernels.tile_scheduler import tile_coord


@aggregate
class Memory:
    """Tensor memory, shared memory and barriers."""

    s: Value
    o: Value
    q: Value
    kv: Ring  # slots are half blocks
    p: Value
    bias: Value
    job: Value
    q_ready: Barriers
    q_free: Barriers
    s_ready: Barriers
    p_ready: Barriers
    pv_done: Barriers


@gluon.jit
def make_memory(DTYPE: gl.constexpr):
    HALF: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 256], DTYPE)
    P: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], DTYPE)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q = gl.allocate_shared_memory(DTYPE, [2, 64, 256], HALF)
    slots = gl.allocate_shared_memory(DTYPE, [4, 64, 256], HALF)
    p = gl.allocate_shared_memory(DTYPE, [2, 64, 64], P)
    bias = gl.allocate_shared_memory(gl.float32, [2, 64], FLAT)
    job = gl.allocate_shared_memory(gl.int32, [1], FLAT)
    s = allocate_tensor_memory(gl.float32, [2, 64, 64], TensorMemoryLayout([64, 64], col_stride=1))
    o = allocate_tensor_memory(gl.float32, [64, 512], TensorMemoryLayout([64, 256], col_stride=1))
    q_ready = new_barriers(1)
    q_free = new_barriers(1, 3)
    kv = new_ring(slots)
    s_ready = new_barriers(2)
    p_ready = new_barriers(2)
    pv_done = new_barriers(2)
    init_barriers((q_ready, q_free, kv.ready, kv.free, s_ready, p_ready, pv_done))
    return Memory(s, o, q, kv, p, bias, job, q_ready, q_free, s_ready, p_ready, pv_done)


@gluon.jit
def begin(memory, turn):
    """Wait for Q of the next work tile -> its number of blocks."""
    memory.q_ready.wait(0, turn % 2)
    return gl.max(memory.job.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def scores_role(memory, num_tiles):
    """Compute S = Q K^T block by block."""
    q, kv, s = memory.q, memory.kv, memory.s
    at = 0  # blocks so far
    turn = 0
    for _tile_id in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        n = begin(memory, turn)
        for j in range(at, at + n):
            stage = j % 2
            if j >= 2:
                memory.p_ready.wait(stage, (j // 2 - 1) % 2)
            for h in gl.static_range(2):
                kv.wait(Stage(2 * stage + h, (j // 2) % 2))
                tcgen05_mma(q.index(h), kv.slots.index(2 * stage + h).permute((1, 0)), s.index(stage), use_acc=h > 0)
            memory.s_ready.arrive_after_mma(stage)
        if n > 0:
            memory.q_free.arrive_after_mma(0)
        else:
            memory.q_free.arrive(0)
        at += n
        turn += 1


@gluon.jit
def values_role(memory, num_tiles):
    """Compute O += P V block by block."""
    kv, p, o = memory.kv, memory.p, memory.o
    at = 0
    turn = 0
    for _tile_id in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        n = begin(memory, turn)
        memory.q_free.arrive(0)
        for j in range(at, at + n):
            stage = j % 2
            memory.p_ready.wait(stage, (j // 2) % 2)
            for h in gl.static_range(2):
                kv.wait(Stage(2 * stage + h, (j // 2) % 2))
                tcgen05_mma(p.index(stage), kv.slots.index(2 * stage + h), o.slice(h * 256, 256), use_acc=j > at)
                kv.free.arrive_after_mma(2 * stage + h)
            memory.pv_done.arrive_after_mma(stage)
        at += n
        turn += 1


@gluon.jit
def softmax_block(x, m, l, at, first, memory):
    """Compute P of block `at` from its scores in base 2 -> (maximum, sum) of each row. Rescale O if a maximum moved."""
    p, o = memory.p, memory.o
    LO: gl.constexpr = o.slice(0, 64).get_reg_layout()
    PIECE: gl.constexpr = TensorMemoryLayout([64, 64], col_stride=1)
    stage = at % 2
    grown = gl.max(x, 1)
    # A row keeps its reference while the maximum grows little; -inf - -inf is NaN, which is not above anything.
    moves = grown - m > softmax.RESCALE_ABOVE
    m_new = gl.where(moves, grown, m)
    alpha = gl.where(moves, gl.exp2(m - m_new), 1.0)
    if at > first:
        if gl.min(alpha, 0) < 1.0:
            memory.pv_done.wait(1 - stage, ((at - 1) // 2) % 2)
            factor = gl.convert_layout(alpha, gl.SliceLayout(1, LO))[:, None]
            for h in gl.static_range(2):
                pieces = o.slice(h * 256, 256).reinterpret(gl.float32, [4, 64, 64], PIECE)
                for c in range(0, 4):
                    pieces.index(c).store(pieces.index(c).load() * factor)
    y = gl.exp2(x - gl.where(m_new == -float("inf"), 0.0, m_new)[:, None])
    if at >= 2:
        memory.pv_done.wait(stage, (at // 2 - 1) % 2)
    p.index(stage).store(y.to(p.dtype))
    fence_async_shared()  # P is read by the tensor core
    memory.p_ready.arrive(stage)
    return m_new, l * alpha + gl.sum(y, 1)


@gluon.jit
def write(place, factor, angles_ptr, there, memory, output, split):
    """Write O times a factor per row to out, or fp32 to part, through p; zeros if O was not written (`there` is 0)."""
    o, p, heads, first_head = memory.o, memory.p, output.heads, place.first_head
    out_ptr = output.out_ptr + place.query.to(gl.int64) * output.stride_on * 8
    part_ptr = output.part_ptr + place.part_row * 512
    rope = (angles_ptr, output.rope.width)
    LO: gl.constexpr = o.slice(0, 64).get_reg_layout()
    PIECE: gl.constexpr = TensorMemoryLayout([64, 64], col_stride=1)
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    factor = gl.convert_layout(factor, gl.SliceLayout(1, LO))[:, None]
    row = first_head + gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, L))
    offset = (row.to(gl.int64) * output.stride_oh * 8)[:, None] + column[None, :]
    own_row = first_head + gl.arange(0, 64, layout=gl.SliceLayout(1, LO))
    own_column = gl.arange(0, 64, layout=gl.SliceLayout(0, LO))
    own = (own_row * 512)[:, None] + own_column[None, :]
    for h in gl.static_range(2):
        pieces = o.slice(h * 256, 256).reinterpret(gl.float32, [4, 64, 64], PIECE)
        for c in range(0, 4):
            first = h * 256 + c * 64
            y = gl.zeros([64, 64], gl.float32, LO)
            if there > 0:
                y = softmax.inverse_rope(pieces.index(c).load(), rope, first, 512) * factor
            if split != 0:
                gl.store(part_ptr + own + first, y, mask=(own_row < heads)[:, None])
            else:
                p.index(c % 2).store(y.to(p.dtype))
                gl.store(out_ptr + offset + first, p.index(c % 2).load(L), mask=(row < heads)[:, None])


@gluon.jit
def softmax_role(memory, output, num_tiles, scale, split):
    """Compute P = exp2(S - m) block by block, and at the end of a work tile O / l -> out, lse."""
    s, kv = memory.s, memory.kv
    LS: gl.constexpr = s.index(0).get_reg_layout()
    RS: gl.constexpr = gl.SliceLayout(1, LS)
    at = 0
    turn = 0
    for tile_id in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        query, first_head, part = tile_coord(tile_id, output.queries, output.heads)
        n = begin(memory, turn)
        memory.q_free.arrive(0)
        m = gl.full([64], -float("inf"), gl.float32, RS)
        l = gl.full([64], 0.0, gl.float32, RS)
        for j in range(at, at + n):
            kv.wait(Stage(2 * (j % 2), (j // 2) % 2))
            bias = memory.bias.index(j % 2).load(gl.SliceLayout(0, LS))
            memory.s_ready.wait(j % 2, (j // 2) % 2)
            x = s.index(j % 2).load() * scale + bias[None, :]
            m, l = softmax_block(x, m, l, j, at, memory)
        at += n
        turn += 1
        place = tile_rows(query, first_head, part, output, split, 64, RS)
        factor = finish_rows(m, l, place, output, split)
        angles_ptr = angles_of(query, output.rope)
        if n > 0:
            memory.pv_done.wait((at - 1) % 2, ((at - 1) // 2) % 2)
        write(place, factor, angles_ptr, n, memory, output, split)


@gluon.jit
def v4_sparse(
    q_desc,
    window_desc,
    window,
    window_names,
    compressed_desc,
    compressed,
    compressed_names,
    requests,
    output,
    sizes,
    signed_scale,
    KV_INDEX: gl.constexpr,
    WINDOW_LOAD: gl.constexpr,
    COMPRESSED_LOAD: gl.constexpr,
    WINDOW_UNIT: gl.constexpr,
    COMPRESSED_UNIT: gl.constexpr,
    WINDOW_FORMAT: gl.constexpr,
    COMPRESSED_FORMAT: gl.constexpr,
    GATHER_REGS: gl.constexpr,
    WARP_REGS: gl.constexpr,
):
    pools = pools_of(window, window_desc, compressed, compressed_desc)
    memory = make_memory(q_desc.dtype)
    num_tiles = sizes.num_tiles
    gl.warp_specialize([
        (softmax_role, (memory, output, num_tiles, signed_scale, output.split)),
        (gather_role, (q_desc, window_names, compressed_names, requests, pools, memory, sizes, KV_INDEX,
                       (WINDOW_LOAD, COMPRESSED_LOAD), (WINDOW_UNIT, COMPRESSED_UNIT),
                       (WINDOW_FORMAT, COMPRESSED_FORMAT))),
        (scores_role, (memory, num_tiles)),
        (values_role, (memory, num_tiles)),
    ], [4, 1, 1], [GATHER_REGS, WARP_REGS, WARP_REGS])  # fmt: skip
