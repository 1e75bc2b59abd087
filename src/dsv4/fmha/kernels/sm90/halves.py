"""What a warpgroup that owns one half of the columns of O [64, 512] does before, between and after its products.

HALF: 0 or 1. Shared memory and barriers are those of wide.py, wide_kv.py and pair.py. In a cluster of
two CTAs the shapes are those of both, [128, ..] where it says 64 rows here, and the layouts give each CTA 64 of them.
"""

from dsv4.fmha.kernels import loads
from dsv4.fmha.kernels.sm90 import work
from dsv4.fmha.kernels.tiles import PAGES, ROWS, sight
from dsv4.kernels import cluster
from dsv4.kernels.compat import Value, aggregate, fence_async_shared, gl, gluon, mbarrier, warpgroup_mma
from dsv4.kernels.opaque import zero

# The first of two places in stat, for left and right.
MAXIMUM, FACTOR, SUMS = gl.constexpr(0), gl.constexpr(2), gl.constexpr(4)


@aggregate
class Room:
    """What left and right share but for K and V: see wide.py."""

    q: Value
    p: Value
    stat: Value
    q_asked: Value
    q_ready: Value
    p_ready: Value
    sum_ready: Value


@aggregate
class Ring:
    """K and V in half slots."""

    kv: Value
    ready: Value
    free: Value


@gluon.constexpr_function
def score_layout(ctas):
    """Of scores [64, 64]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16], cluster.split(ctas, 2))


@gluon.constexpr_function
def half_layout(ctas):
    """Of one half of O [64, 256]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16], cluster.split(ctas, 2))


@gluon.jit
def make_room(dtype: gl.constexpr, HOW: gl.constexpr):
    """Shared memory and barriers, as wide.py lists them -> Room, Ring, landed."""
    CTAS: gl.constexpr = gl.num_ctas()
    MINE: gl.constexpr = cluster.matrices(CTAS, True)
    ALIKE: gl.constexpr = cluster.matrices(CTAS, False)
    q = gl.allocate_shared_memory(dtype, [2, 64 * CTAS, 256], MINE)
    kv = gl.allocate_shared_memory(dtype, [4, 64, 256], ALIKE)
    p = gl.allocate_shared_memory(dtype, [2, 64 * CTAS, 64], MINE)
    stat = gl.allocate_shared_memory(gl.float32, [6, 64 * CTAS], cluster.vectors(CTAS))
    q_asked = cluster.own_barriers(1).index(0)
    q_ready = cluster.own_barriers(1).index(0)
    ready = cluster.own_barriers(4)
    free = cluster.common_barriers(4)
    p_ready = cluster.own_barriers(2)
    sum_ready = cluster.own_barriers(2)
    landed = q_ready
    if HOW == ROWS or HOW == PAGES:  # else nobody uses it: see rows.make_ring
        landed = cluster.own_barriers(1).index(0)
        mbarrier.init(landed, count=1)
    mbarrier.init(q_asked, count=2)
    mbarrier.init(q_ready, count=2)
    for i in gl.static_range(4):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(p_ready.index(i), count=1)
        mbarrier.init(sum_ready.index(i), count=1)
    return Room(q, p, stat, q_asked, q_ready, p_ready, sum_ready), Ring(kv, ready, free), landed


@gluon.jit
def begin_half(room, tile_row, share, HALF: gl.constexpr, HOW: gl.constexpr, SIGN: gl.constexpr):
    """Load this half's columns of Q -> what the rows see."""
    q, problem, strides = room.q, share.problem, share.strides
    M: gl.constexpr = q.shape[1]
    loads.load_rows(share.tensors.q_ptr, q.index(HALF), tile_row, problem.rows, problem.head, problem.group, strides.qt,
                    strides.qh, HALF * 256, M, 256, 256, SIGN, room.q_asked)  # fmt: skip
    fence_async_shared()
    mbarrier.arrive(room.q_ready, count=1)
    RS: gl.constexpr = gl.SliceLayout(1, score_layout(gl.num_ctas()))
    seen = sight(tile_row, share, M, 128, HOW, RS)
    mbarrier.wait(room.q_ready, 0)
    return seen


@gluon.jit
def nothing_yet(M: gl.constexpr):
    """Half of O, and the maximum and sum of each row, before the first key."""
    RS: gl.constexpr = gl.SliceLayout(1, score_layout(gl.num_ctas()))
    o = gl.zeros([M, 256], gl.float32, half_layout(gl.num_ctas()))
    m = gl.full([M], -float("inf"), gl.float32, RS)
    return o, m, gl.full([M], 0.0, gl.float32, RS)


@gluon.jit
def scores(room, ring, slot, phase, step, there=True):
    """S [64, 64] of the block in slots slot, slot + 1 (halves of the head dim): two groups issued, not waited for.

    Without ``there`` nothing comes: the scores are those of whatever lies in the slots.
    """
    q, kv = room.q, ring.kv
    opaque = zero(step)  # else all 64 wgmma descriptors of a fixed slot would be kept in registers, and spilled
    M: gl.constexpr = q.shape[1]
    s = gl.zeros([M, 64], gl.float32, score_layout(gl.num_ctas()))
    mbarrier.wait(ring.ready.index(slot), phase, pred=there)
    s = warpgroup_mma(q.index(opaque), kv.index(opaque + slot).permute((1, 0)), s, use_acc=False, is_async=True)
    mbarrier.wait(ring.ready.index(slot + 1), phase, pred=there)
    return warpgroup_mma(q.index(opaque + 1), kv.index(opaque + slot + 1).permute((1, 0)), s, is_async=True)


@gluon.jit
def publish(p, m, a, room, BLOCK: gl.constexpr):
    """P, the maximum and the factor of this warpgroup's block for the other one."""
    room.p.index(BLOCK).store(p)
    room.stat.index(MAXIMUM + BLOCK).store(m)
    room.stat.index(FACTOR + BLOCK).store(a)
    fence_async_shared()
    mbarrier.arrive(room.p_ready.index(BLOCK), count=1)


@gluon.jit
def published(room, phase, BLOCK: gl.constexpr, RS: gl.constexpr):
    """The maximum and the factor of the other warpgroup's block; its P may be read."""
    mbarrier.wait(room.p_ready.index(BLOCK), phase)
    m = room.stat.index(MAXIMUM + BLOCK).load(RS)
    return m, room.stat.index(FACTOR + BLOCK).load(RS)


@gluon.jit
def end_half(o, m, l, room, tile_row, share, HALF: gl.constexpr, SPLIT: gl.constexpr):
    """Add up the row sums of both warpgroups, write this half of O."""
    room.stat.index(SUMS + HALF).store(l)
    mbarrier.arrive(room.sum_ready.index(HALF), count=1)
    mbarrier.wait(room.sum_ready.index(1 - HALF), 0)
    l = l + room.stat.index(SUMS + 1 - HALF).load(l.type.layout)
    work.write(o, m, l, room.q.index(HALF), tile_row, share, HALF * 256, 512, SPLIT)
