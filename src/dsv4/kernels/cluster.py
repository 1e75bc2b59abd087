"""Kernels whose programs are clusters of CTAs (num_ctas 2): how tensors and barriers lie over them.

Rows of queries, scores and outputs are split: each CTA has its own. Tiles of keys are alike in all: one CTA, the leader
(number 0), asks for them once and TMA multicast writes them to all. With one CTA the layouts are the plain ones, and
all of this works with Triton 3.6; clusters need 3.9. Layouts are made by functions of their own: in a kernel Triton 3.6
would take no computed value for their cga_layout.

barriers   lie in       an arrival in any CTA counts   a wait in any CTA
own        every CTA    there                          is for its own
common     the leader   at the leader                  is the leader's; other CTAs pass at once
"""

from dsv4.kernels.compat import gl, gluon, mbarrier


@gluon.constexpr_function
def split(ctas, rank):
    """cga_layout of tensors whose first dimension is split."""
    return [[1 << bit] + [0] * (rank - 1) for bit in range(ctas.bit_length() - 1)]


@gluon.constexpr_function
def alike(ctas, rank):
    """cga_layout of tensors that every CTA has whole."""
    return [[0] * rank for _ in range(ctas.bit_length() - 1)]


@gluon.constexpr_function
def vectors(ctas):
    """Layout of split vectors in shared memory."""
    return gl.SwizzledSharedLayout(1, 1, 1, [0], split(ctas, 1))


@gluon.constexpr_function
def matrices(ctas, own):
    """Layout of 16-bit matrices in shared memory, split or alike."""
    return gl.NVMMASharedLayout(128, 16, rank=2, cga_layout=split(ctas, 2) if own else alike(ctas, 2))


@gluon.constexpr_function
def in_pieces(ctas):
    """Register layout of split matrices, 16 bytes per thread of four warps."""
    return gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0], split(ctas, 2))


@gluon.constexpr_function
def _barriers(ctas, own):
    return mbarrier.MBarrierLayout(split(ctas, 1) if own else alike(ctas, 1))


@gluon.jit
def own_barriers(N: gl.constexpr):
    CTAS: gl.constexpr = gl.num_ctas()
    return gl.allocate_shared_memory(gl.int64, [N, CTAS], _barriers(CTAS, True))


@gluon.jit
def common_barriers(N: gl.constexpr):
    return gl.allocate_shared_memory(gl.int64, [N, 1], _barriers(gl.num_ctas(), False))


@gluon.jit
def expect(barrier, NBYTES: gl.constexpr):
    """The leader announces bytes to its barrier and to those of the others, and arrives at all of them.

    Not each CTA for itself: only the leader has waited until the slot is free, and another CTA that armed its barrier a
    second time before the first bytes had come would break it.
    """
    if gl.num_ctas() == 1:
        mbarrier.expect(barrier, NBYTES)
    else:
        mbarrier.expect(barrier, NBYTES, from_cta=0)
