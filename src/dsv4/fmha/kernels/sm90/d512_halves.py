"""The work of a warpgroup that owns one half of the columns of O [64, 512], before, between and after its products.

HALF: 0 or 1. Shared memory and barriers are those of forward_d512.py and forward_d512_kv.py.
"""

from dsv4.fmha.kernels import loads
from dsv4.fmha.kernels.arguments import query_rows
from dsv4.fmha.kernels.sm90 import work
from dsv4.fmha.kernels.tiles import PAGES, ROWS, mask_bounds
from dsv4.kernels import softmax
from dsv4.kernels.compat import Value, aggregate, fence_async_shared, gl, gluon, warpgroup_mma
from dsv4.kernels.opaque import zero
from dsv4.kernels.ring import Barriers, Stage, init_barriers, new_barriers, new_ring

# The first of two places in stat, for left and right.
MAXIMUM, FACTOR, SUMS = gl.constexpr(0), gl.constexpr(2), gl.constexpr(4)


@aggregate
class Memory:
    """The memory that left and right share, except K and V: see forward_d512.py."""

    q: Value
    p: Value
    stat: Value
    q_asked: Barriers
    q_ready: Barriers
    p_ready: Barriers
    sum_ready: Barriers


# Layouts of scores [64, 64], and of one half of O [64, 256]
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
HALF_O = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))


@gluon.jit
def make_memory(DTYPE: gl.constexpr, KV_LOAD: gl.constexpr, CODES: gl.constexpr):
    """Make what forward_d512.py lists; return (Memory, ring of half slots for K and V, landed)."""
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    q = gl.allocate_shared_memory(DTYPE, [2, 64, 256], MATRIX)
    kv = gl.allocate_shared_memory(DTYPE, [4, 64, 256], MATRIX)
    p = gl.allocate_shared_memory(DTYPE, [2, 64, 64], MATRIX)
    stat = gl.allocate_shared_memory(gl.float32, [6, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_asked = new_barriers(1, 2)
    q_ready = new_barriers(1, 2)
    ring = new_ring(kv)
    p_ready = new_barriers(2)
    sum_ready = new_barriers(2)
    barriers = (q_asked, q_ready, ring.ready, ring.free, p_ready, sum_ready)
    landed = q_ready  # unused
    if not CODES and (KV_LOAD == ROWS or KV_LOAD == PAGES):
        landed = new_barriers(1)
        barriers += (landed,)
    init_barriers(barriers)
    return Memory(q, p, stat, q_asked, q_ready, p_ready, sum_ready), ring, landed


@gluon.jit
def begin_half(memory, tile_row, work_tile, HALF: gl.constexpr, KV_LOAD: gl.constexpr, SIGN: gl.constexpr):
    """Load this half's columns of Q; return the mask bounds of the rows."""
    q, asked = memory.q.index(HALF), memory.q_asked.at(0)
    loads.load_rows(query_rows(work_tile), q, tile_row, HALF * 256, 64, 256, 256, SIGN, asked)
    fence_async_shared()
    memory.q_ready.arrive(0)
    bounds = mask_bounds(tile_row, work_tile, 64, 128, KV_LOAD, gl.SliceLayout(1, SCORES))
    memory.q_ready.wait(0, 0)
    return bounds


@gluon.jit
def nothing_yet():
    """Return half of O, and the maximum and sum of each row, before the first key."""
    RS: gl.constexpr = gl.SliceLayout(1, SCORES)
    o = gl.zeros([64, 256], gl.float32, HALF_O)
    m = gl.full([64], softmax.LOWEST, gl.float32, RS)
    return o, m, gl.full([64], 0.0, gl.float32, RS)


@gluon.jit
def scores(memory, ring, slot, phase, step, there=True):
    """Return S [64, 64] of the block in slots slot, slot + 1 (halves of the head dim): two groups, not waited for.

    Without ``there`` nothing is loaded: the scores are those of whatever the slots hold.
    """
    q, kv = memory.q, ring.slots
    opaque = zero(step)  # otherwise ptxas keeps all 64 wgmma descriptors of a fixed slot in registers, and spills
    s = gl.zeros([64, 64], gl.float32, SCORES)
    ring.wait(Stage(slot, phase), there)
    s = warpgroup_mma(q.index(opaque), kv.index(opaque + slot).permute((1, 0)), s, use_acc=False, is_async=True)
    ring.wait(Stage(slot + 1, phase), there)
    return warpgroup_mma(q.index(opaque + 1), kv.index(opaque + slot + 1).permute((1, 0)), s, is_async=True)


@gluon.jit
def publish(p, m, a, memory, BLOCK: gl.constexpr):
    """Store P, the maximum and the factor of this warpgroup's block for the other one."""
    memory.p.index(BLOCK).store(p)
    memory.stat.index(MAXIMUM + BLOCK).store(m)
    memory.stat.index(FACTOR + BLOCK).store(a)
    fence_async_shared()
    memory.p_ready.arrive(BLOCK)


@gluon.jit
def published(memory, phase, BLOCK: gl.constexpr, RS: gl.constexpr):
    """Return the maximum and the factor of the other warpgroup's block; its P may be read."""
    memory.p_ready.wait(BLOCK, phase)
    m = memory.stat.index(MAXIMUM + BLOCK).load(RS)
    return m, memory.stat.index(FACTOR + BLOCK).load(RS)


@gluon.jit
def end_half(o, m, l, memory, tile_row, work_tile, HALF: gl.constexpr, SPLIT: gl.constexpr):
    """Add up the row sums of both warpgroups, write this half of O."""
    memory.stat.index(SUMS + HALF).store(l)
    memory.sum_ready.arrive(HALF)
    memory.sum_ready.wait(1 - HALF, 0)
    l = l + memory.stat.index(SUMS + 1 - HALF).load(l.type.layout)
    work.write(o, m, l, memory.q.index(HALF), tile_row, work_tile, HALF * 256, 512, SPLIT)
