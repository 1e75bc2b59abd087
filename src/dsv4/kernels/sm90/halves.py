"""What a warpgroup that owns one half of the columns of O [64, 512] does before, between and after its products.

HALF: 0 or 1. Shared memory, barriers and tuples are those of wide.py, wide_kv.py and parts.py.
"""

from dsv4.kernels.compat import fence_async_shared, gl, gluon, mbarrier, warpgroup_mma
from dsv4.kernels.shared import loads
from dsv4.kernels.sm90 import parts

_S = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
_O = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
# Layouts: scores [64, 64] and their rows; one half of O [64, 256], its rows, and P as the product's left operand.
LS, RS = gl.constexpr(_S), gl.constexpr(gl.SliceLayout(1, _S))
LO, RO, LA = gl.constexpr(_O), gl.constexpr(gl.SliceLayout(1, _O)), gl.constexpr(gl.DotOperandLayout(0, _O, 2))


@gluon.jit
def zero(x):
    """0 for any integer, but the compiler cannot know."""
    return gl.inline_asm_elementwise("and.b32 $0, $1, 0;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def begin_half(q, q_asked, q_ready, tile_row, common, HALF: gl.constexpr, HOW: gl.constexpr,
               SIGN: gl.constexpr):  # fmt: skip
    """Load this half's columns of Q -> what the rows see."""
    tensors, strides, problem, work, pages = common
    loads.load_rows(tensors[0], q.index(HALF), tile_row, problem[3], problem[0], problem[1], strides[0], strides[1],
                    HALF * 256, 64, 256, 256, SIGN, q_asked)  # fmt: skip
    fence_async_shared()
    mbarrier.arrive(q_ready, count=1)
    seen = parts.sight(tile_row, problem, work, pages, 128, HOW, RS)
    mbarrier.wait(q_ready, 0)
    return seen


@gluon.jit
def scores(q, kv, ready, slot, phase, step, there=True):
    """S [64, 64] of the block in slots slot, slot + 1 (halves of the head dim): two groups issued, not waited for.

    Without ``there`` nothing comes: the scores are those of whatever lies in the slots.
    """
    opaque = zero(step)  # else all 64 wgmma descriptors of a fixed slot would be kept in registers, and spilled
    s = gl.zeros([64, 64], gl.float32, LS)
    mbarrier.wait(ready.index(slot), phase, pred=there)
    s = warpgroup_mma(q.index(opaque), kv.index(opaque + slot).permute((1, 0)), s, use_acc=False, is_async=True)
    mbarrier.wait(ready.index(slot + 1), phase, pred=there)
    return warpgroup_mma(q.index(opaque + 1), kv.index(opaque + slot + 1).permute((1, 0)), s, is_async=True)


@gluon.jit
def publish(p, m, a, p_smem, stat, p_ready, BLOCK: gl.constexpr):
    """P, the maximum and the factor of this warpgroup's block for the other one."""
    p_smem.index(BLOCK).store(p)
    stat.index(BLOCK).store(m)
    stat.index(2 + BLOCK).store(a)
    fence_async_shared()
    mbarrier.arrive(p_ready.index(BLOCK), count=1)


@gluon.jit
def end_half(o, m, l, q, stat, sum_ready, tile_row, common, HALF: gl.constexpr,
             SPLIT: gl.constexpr):  # fmt: skip
    """Add up the row sums of both warpgroups, write this half of O."""
    stat.index(4 + HALF).store(l)
    mbarrier.arrive(sum_ready.index(HALF), count=1)
    mbarrier.wait(sum_ready.index(1 - HALF), 0)
    l = l + stat.index(5 - HALF).load(RS)
    parts.write(o, m, l, q.index(HALF), tile_row, common, HALF * 256, 512, SPLIT)
