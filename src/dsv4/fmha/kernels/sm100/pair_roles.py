"""Pairs of CTAs on sm_100a: memory, barriers and roles that V4 attention and FMHA share.

The tensor cores of a pair work on one product of 128 rows: each CTA has 64 rows in all of its 128 lanes, which is the
full rate; 64 rows of a single CTA have half of it. Each CTA holds half of the right operand: of K half of the rows (64
of 128 keys, all columns), of V half of the columns (of all 128 keys). Role chart of one work tile of three blocks, the
same in both CTAs; the first issues the products::

    load     4 warps  | Q K0 | K1 |       V0 | K2      | V1   V2  | Q K0 of the next work tile, as Q is free
    scores   1 warp   |      | S0 = Q K0^T   | S1      |      S2  | S0 of the next work tile
    values   1 warp   |      |               |         | O = P0 V0 | O += P1 V1 | O += P2 V2
    softmax  4 warps  |      |               | P0      | P1        | P2         | P0 of the next work tile ...
    store    4 warps  |      |               |         |           |            |            | O / l -> out

Each kernel has its own load, softmax and store roles. A slot is 128 keys of 256 columns, 32 KB in each CTA; two slots
are a place, which holds K or V of a block. A work tile of n blocks fills the two places in this order::

    place 0     K0 |    V0 |    V1 | ...        V(n-2) |            | K0 of the next work tile
    place 1        | K1    | K2    | ... K(n-1)        | V(n-1)     |

so that V of its last block and K of the next work tile's first are there at once.

tensor memory   columns     holds
s               2 x 64      S of two blocks, fp32 [128, 128]: the second half of the keys in the lanes from 64 on
o               2 x 128     O, fp32 [128, 256] each: of each half, the second 128 columns in the lanes from 64 on

shared memory   bytes       holds, in each CTA
q               2 x 32768   [64 rows, 256] each: columns 0-255 and 256-511 of Q
kv              4 x 32768   slots: K [64 keys, 256] or V [128 keys, 128]
p               2 x 16384   [64 rows, 128 keys] each: P of block j at j % 2
stat            128         for the two halves of 64 rows: whether the reference has to move
rows            2 x 256     references and sums of the 64 rows of a work tile whose scores are done
job             4           the number of blocks of the work tile (V4: and three words more)
barriers        8 each

A barrier "of the pair" is in the first CTA: both CTAs arrive there, and only the first waits. Each CTA has its own
copy of the others.

barrier        arrives            count   waits             means
job_ready      load (V4: plan)    1       all others        the number of blocks of the next work tile is in job
job_free       all others         4 or 5  load, plan        job has been read
q_ready        bytes or load,     1       scores            Q of the work tile is in q
               of the pair
q_free         commit of scores   1       load, plan        the work tile's scores are complete
k_ready[i]     bytes or load,     1       scores            slot i holds K
               of the pair
v_ready[i]     the same           1       values            slot i holds V
free[i]        commit of scores   1       load              the product has used slot i
               or values
s_ready[s]     commit of scores   1       softmax           S is complete
p_ready[s]     softmax, of the    1       values, scores    P is stored, S is read, O is rescaled for this P V
               pair
pv_done[s]     commit of values   1       softmax, store    P V is complete: P may be overwritten, O touched
rows_ready     softmax            1       store             references and sums of a work tile's rows are in rows
rows_free      store              1       softmax           rows has been read
o_free[h]      store, of the      1       values            half h of the columns of a work tile's O has been read
               pair

A commit arrives in both CTAs. No wait lags two phases behind, because K and V have separate barriers: a slot is filled
with K again, or with V, after its own last product (k_ready, v_ready); p_ready[s] completes again after softmax has
waited for pv_done[s], that is, for values, and s_ready[s] after scores has waited for p_ready[s]. Store waits for the
last pv_done of a work tile after softmax has waited for the phase before; the phase after belongs to a product that
follows the next work tile's first, which overwrites O and waits for o_free.

A thread of softmax holds half of the scores of a row. Its warps exchange no maxima, only whether some row has to move
(`softmax_block`): loads from shared memory queue behind those of products, and every exchange costs two barriers.
"""

from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout, allocate_tensor_memory, tcgen05_mma

from dsv4.kernels import softmax
from dsv4.kernels.compat import Value, aggregate, fence_async_shared, gl, gluon, reinterpret
from dsv4.kernels.ring import Barriers, init_barriers, new_pair_barriers

KEYS = gl.constexpr(128)
# Layouts over two CTAs: with a basis of zeros both have the same, a one splits that dimension.
SLOT_K = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2, cga_layout=[[1, 0]]))
SLOT_V = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2, cga_layout=[[0, 1]]))
SLOT_BYTES = gl.constexpr(128 * 256)  # bytes of a slot in one CTA
# Triton 3.6 and 3.7 have no such layout and never compile these kernels, but launch their cubins (DSV4_AOT).
PIECE = gl.constexpr(
    TensorMemoryLayout([64, 64], col_stride=1, cga_layout=[[1, 0]], two_ctas=True)
    if "cga_layout" in TensorMemoryLayout.__dataclass_fields__
    else None
)
PANEL = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2, cga_layout=[[1, 0]]))
OWN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0], cga_layout=[[0]]))  # each CTA has its own values
HALVES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0], cga_layout=[[1]]))  # each CTA has half of the values
FLAGS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0], cga_layout=[[1, 0]]))  # each CTA has half of the rows
ALL = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0], cga_layout=[[0]]))  # every warp has all 128 values
GAP = gl.constexpr(96)  # a piece of O is 32 columns and, as many columns further, 32 more


@aggregate
class Memory:
    """Tensor memory, shared memory and barriers."""

    s: Value
    o: Value
    q: Value
    kv: Value
    p: Value
    stat: Value
    rows: Value
    job: Value
    bias: Value  # V4: see sparse_pair.py
    bias_ready: Barriers
    job_ready: Barriers
    job_free: Barriers
    q_ready: Barriers
    q_free: Barriers
    k_ready: Barriers
    v_ready: Barriers
    free: Barriers
    s_ready: Barriers
    p_ready: Barriers
    pv_done: Barriers
    rows_ready: Barriers
    rows_free: Barriers
    o_free: Barriers


@aggregate
class OutputRows:
    """Rows in global memory: pointer, offset of each row and whether it is there."""

    ptr: Value
    row: Value
    here: Value


@gluon.jit
def make_memory(DTYPE: gl.constexpr, WORDS: gl.constexpr, READERS: gl.constexpr, BIAS: gl.constexpr):
    """Allocate memory and barriers. A job has WORDS words, which READERS roles read; BIAS: for V4."""
    S: gl.constexpr = TensorMemoryLayout([64, 128], col_stride=1, cga_layout=[[1, 0]], two_ctas=True)
    O: gl.constexpr = TensorMemoryLayout([64, 256], col_stride=1, cga_layout=[[1, 0]], two_ctas=True)
    q = gl.allocate_shared_memory(DTYPE, [2, 128, 256], SLOT_K)
    kv = gl.allocate_shared_memory(DTYPE, [4, 128, 256], SLOT_K)
    p = gl.allocate_shared_memory(DTYPE, [2, 128, 128], PANEL)
    stat = gl.allocate_shared_memory(gl.int8, [128, 2], FLAGS)
    rows = gl.allocate_shared_memory(gl.float32, [2, 128], HALVES)
    job = gl.allocate_shared_memory(gl.int32, [WORDS, 1], OWN)
    s = allocate_tensor_memory(gl.float32, [2, 128, 128], S)
    o = allocate_tensor_memory(gl.float32, [2, 128, 256], O)
    job_ready = new_pair_barriers(1)
    job_free = new_pair_barriers(1, READERS)
    q_ready = new_pair_barriers(1, 1, True)
    q_free = new_pair_barriers(1)
    k_ready = new_pair_barriers(4, 1, True)
    v_ready = new_pair_barriers(4, 1, True)
    free = new_pair_barriers(4)
    s_ready = new_pair_barriers(2)
    p_ready = new_pair_barriers(2, 1, True)
    pv_done = new_pair_barriers(2)
    rows_ready = new_pair_barriers(1)
    rows_free = new_pair_barriers(1)
    o_free = new_pair_barriers(2, 1, True)
    barriers = (
        job_ready,
        job_free,
        q_ready,
        q_free,
        k_ready,
        v_ready,
        free,
        s_ready,
        p_ready,
        pv_done,
        rows_ready,
        rows_free,
        o_free,
    )
    bias = job  # unused
    bias_ready = job_ready
    if BIAS:
        bias = gl.allocate_shared_memory(gl.bfloat16, [3, 128], OWN)
        bias_ready = new_pair_barriers(3)
        barriers += (bias_ready,)
    init_barriers(barriers)
    return Memory(
        s,
        o,
        q,
        kv,
        p,
        stat,
        rows,
        job,
        bias,
        bias_ready,
        job_ready,
        job_free,
        q_ready,
        q_free,
        k_ready,
        v_ready,
        free,
        s_ready,
        p_ready,
        pv_done,
        rows_ready,
        rows_free,
        o_free,
    )


@gluon.jit
def place_of_k(i):
    """Return (place of K of block i, how often the work tile has filled it before)."""
    return gl.minimum(i, 1), gl.maximum(i - 1, 0)


@gluon.jit
def place_of_v(i, n):
    return gl.where(i == n - 1, 1, 0), gl.minimum(i + 1, n - 1)


@gluon.jit
def tell(words, turn, memory):
    """Publish the job of the next work tile: its number of blocks, and other words."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0], cga_layout=[[0]])
    memory.job_free.wait(0, (turn + 1) % 2)
    for i in gl.static_range(len(words)):
        memory.job.index(i).store(gl.full([1], words[i], gl.int32, L))
    memory.job_ready.arrive(0)


@gluon.jit
def job_of(turn, WORDS: gl.constexpr, memory):
    """Return the job of the next work tile."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0], cga_layout=[[0]])
    memory.job_ready.wait(0, turn % 2)
    words = ()
    for i in gl.static_range(WORDS):
        words = words + (gl.max(memory.job.index(i).load(L), 0),)
    memory.job_free.arrive(0)
    return words


@gluon.jit
def begin(turn, memory):
    """Return the number of blocks of the next work tile."""
    return job_of(turn, 1, memory)[0]


@gluon.jit
def last_scores(full, memory):
    """Wait for the last commits, which arrive in both CTAs: neither CTA may exit before. For the warp that loads Q."""
    if full > 0:
        memory.q_free.wait(0, (full - 1) % 2)


@gluon.jit
def last_slots(at, memory):
    """Do the same at the end of the warps that load K and V."""
    if at > 0:
        for slot in gl.static_range(4):
            memory.free.wait(slot, (at - 1) % 2)


@gluon.jit
def last_values(at, memory):
    """Do the same for a commit that softmax did not need to wait for."""
    if at > 1:
        memory.pv_done.wait(at % 2, (at // 2 - 1) % 2)


@gluon.jit
def scores_role(memory, num_tiles):
    """Compute S = Q K^T block by block."""
    at = 0  # blocks so far
    full = 0  # work tiles so far that have blocks
    turn = 0
    for _tile_id in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        n = begin(turn, memory)
        if n > 0:
            memory.q_ready.wait(0, full % 2)
        for i in range(0, n):
            stage = (at + i) % 2
            if at + i >= 2:
                memory.p_ready.wait(stage, ((at + i) // 2 - 1) % 2)
            place, _use = place_of_k(i)
            # Place 0 has held K once per work tile; place 1 has held all other K.
            phase = gl.where(i == 0, full, at - full + i - 1) % 2
            for h in gl.static_range(2):
                slot = 2 * place + h
                memory.k_ready.wait(slot, phase)
                k = memory.kv.index(slot).permute((1, 0))
                tcgen05_mma(memory.q.index(h), k, memory.s.index(stage), use_acc=h > 0)
                memory.free.arrive_after_mma(slot)
            memory.s_ready.arrive_after_mma(stage)
            memory.q_free.arrive_after_mma(0, i == n - 1)
        at += n
        full += gl.minimum(n, 1)
        turn += 1


@gluon.jit
def values_role(memory, num_tiles):
    """Compute O += P V block by block."""
    at = 0
    full = 0
    turn = 0
    for _tile_id in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        n = begin(turn, memory)
        for i in range(0, n):
            stage = (at + i) % 2
            memory.p_ready.wait(stage, ((at + i) // 2) % 2)
            place, _use = place_of_v(i, n)
            # Place 1 has held V once per work tile; place 0 has held all other V.
            phase = gl.where(i == n - 1, full, at - full + i) % 2
            for h in gl.static_range(2):
                slot = 2 * place + h
                memory.v_ready.wait(slot, phase)
                if i == 0:
                    memory.o_free.wait(h, (full + 1) % 2)
                v = reinterpret(memory.kv.index(slot), [128, 256], SLOT_V)
                tcgen05_mma(memory.p.index(stage), v, memory.o.index(h), use_acc=i > 0)
                memory.free.arrive_after_mma(slot)
            memory.pv_done.arrive_after_mma(stage)
        at += n
        full += gl.minimum(n, 1)
        turn += 1
    if full > 0:  # both CTAs arrive at a barrier of the first, which may not exit before
        for h in gl.static_range(2):
            memory.o_free.wait(h, (full - 1) % 2)


@gluon.jit
def by_halves(x):
    """Return scores [rows, keys] as [rows, 2, keys / 2]: a thread holds the first or the second half of a row."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2])


@gluon.jit
def softmax_block(x, m, l, at, first, memory):
    """Store P of block `at` from its scores in base 2 (by halves); return (reference of each row, sum of each half).

    The warps only exchange whether some row has to move, which each thread decides for its half. If one has to, the
    halves exchange their maxima, and O is rescaled.
    """
    p, o, stat = memory.p, memory.o, memory.stat
    LO: gl.constexpr = o.index(0).reinterpret(gl.float32, [4, 128, 64], PIECE).index(0).get_reg_layout()
    stage = at % 2
    grown = gl.max(x, 2)
    stat.store((grown - m[:, None] > softmax.RESCALE_ABOVE).to(gl.int8))  # -inf - -inf is NaN, not above anything
    if gl.max(reinterpret(stat, [128], OWN).load(ALL).to(gl.int32), 0) > 0:
        top = gl.max(grown, 1)
        moves = top - m > softmax.RESCALE_ABOVE
        alpha = gl.where(moves, gl.exp2(m - top), 1.0)
        m = gl.where(moves, top, m)
        l *= alpha[:, None]
        if at > first:
            memory.pv_done.wait(1 - stage, ((at - 1) // 2) % 2)
            factor = gl.convert_layout(alpha, gl.SliceLayout(1, LO))[:, None]
            for h in gl.static_range(2):
                pieces = o.index(h).reinterpret(gl.float32, [4, 128, 64], PIECE)
                for c in range(0, 4):
                    pieces.index(c).store(pieces.index(c).load() * factor)
    y = gl.exp2(x - gl.where(m == -float("inf"), 0.0, m)[:, None, None])
    if at >= 2:
        memory.pv_done.wait(stage, (at // 2 - 1) % 2)
    p.index(stage).store(y.to(p.dtype).reshape([128, 128]))
    fence_async_shared()  # P is read by the tensor core
    memory.p_ready.arrive(stage)
    return m, l + gl.sum(y, 2)


@gluon.jit
def hand_over(m, l, turn, memory):
    """Hand the references and sums of a work tile's rows from softmax to store."""
    memory.rows_free.wait(0, (turn + 1) % 2)
    memory.rows.index(0).store(m)
    memory.rows.index(1).store(gl.sum(l, 1))
    memory.rows_ready.arrive(0)


@gluon.jit
def take_over(turn, memory):
    """Return (reference, sum) of each row, in the layout of O."""
    L: gl.constexpr = memory.o.index(0).reinterpret(gl.float32, [4, 128, 64], PIECE).index(0).get_reg_layout()
    memory.rows_ready.wait(0, turn % 2)
    m = memory.rows.index(0).load(gl.SliceLayout(1, L))
    l = memory.rows.index(1).load(gl.SliceLayout(1, L))
    memory.rows_free.arrive(0)
    return m, l


@gluon.jit
def write(factor, there, out, part, memory, rope, split, TURN: gl.constexpr = True):
    """Store O times a factor per row in out, or as fp32 in part; zeros if O was not written (`there` is 0). A thread
    has 32 columns of a row and stores them as they are: shared memory has no room to transpose them.

    All row vectors are in the layout of O.
    """
    o = memory.o
    LO: gl.constexpr = o.index(0).reinterpret(gl.float32, [4, 128, 64], PIECE).index(0).get_reg_layout()
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, LO))
    column += column // 32 * GAP
    offset = out.row[:, None] + column[None, :]
    part_offset = part.row[:, None] + column[None, :]
    for h in gl.static_range(2):
        pieces = o.index(h).reinterpret(gl.float32, [4, 128, 64], PIECE)
        for c in range(0, 4):
            first = h * 256 + c * 32
            y = gl.zeros([128, 64], gl.float32, LO)
            if there > 0:
                y = pieces.index(c).load()
                if c == 3:
                    memory.o_free.arrive(h)
                if TURN:
                    y = softmax.inverse_rope(y, rope, first, 512, GAP)
                y = y * factor[:, None]
            if split != 0:
                gl.store(part.ptr + part_offset + first, y, mask=part.here[:, None])
            else:
                gl.store(out.ptr + offset + first, y.to(memory.p.dtype), mask=out.here[:, None])
