"""Kernels whose programs are clusters of CTAs (num_ctas 2): how tensors and barriers lie over them.

Rows of queries, scores and outputs are split: each CTA has its own. Tiles of keys are alike in all: one CTA, the leader
(number 0), asks for them once and TMA multicast writes them to all. With one CTA the layouts are the plain ones, and
all of this works with Triton 3.6; clusters need 3.9. Layouts are made by functions of their own: in a kernel Triton 3.6
would take no computed value for their cga_layout.

barriers   lie in       an arrival in any CTA counts   a wait in any CTA
own        every CTA    there                          is for its own
common     the leader   at the leader                  is the leader's; other CTAs pass at once

PTX gets a memory descriptor as the address that it has in the leader: `mapa` makes it one of this CTA, or of the other.
"""

from dsv4.kernels.compat import cluster_barrier, gl, gluon, mbarrier


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
def flat(ctas):
    """Layout of vectors in shared memory that every CTA has whole."""
    return gl.SwizzledSharedLayout(1, 1, 1, [0], alike(ctas, 1))


@gluon.constexpr_function
def matrices(ctas, own):
    """Layout of 16-bit matrices in shared memory, split or alike."""
    return gl.NVMMASharedLayout(128, 16, rank=2, cga_layout=split(ctas, 2) if own else alike(ctas, 2))


@gluon.constexpr_function
def in_pieces(ctas):
    """Register layout of split matrices, 16 bytes per thread of four warps."""
    return gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0], split(ctas, 2))


@gluon.constexpr_function
def one_value(ctas, warps):
    """Register layout of vectors of one element, which every thread of every CTA has."""
    return gl.BlockedLayout([1], [32], [warps], [0], alike(ctas, 1))


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


ARRIVE_IN_BOTH = gl.constexpr("""{
    .reg .pred first;
    .reg .b32 lane, rank, here, there;
    mov.u32 lane, %laneid;
    setp.eq.u32 first, lane, 0;
    mov.u32 rank, %cluster_ctarank;
    mapa.shared::cluster.u32 here, $0, rank;
    xor.b32 rank, rank, 1;
    mapa.shared::cluster.u32 there, $0, rank;
    bar.warp.sync -1;
    @first mbarrier.arrive.shared::cluster.b64 _, [there];
    @first mbarrier.arrive.shared::cta.b64 _, [here];
}""")


@gluon.jit
def arrive_in_both(barrier):
    """Each warp arrives once at its own CTA's barrier and once at that of the other CTA of a pair.

    Not with .release.cluster, before which the assembler puts MEMBAR.ALL.GPU: says that this warp has read something,
    not that it has written."""
    gl.inline_asm(ARRIVE_IN_BOTH, "r", [barrier], (), False)


ARRIVE_EXPECTING = gl.constexpr("""{
    .reg .pred first;
    .reg .b32 lane, rank, here;
    mov.u32 lane, %laneid;
    setp.eq.u32 first, lane, 0;
    mov.u32 rank, %cluster_ctarank;
    mapa.shared::cluster.u32 here, $0, rank;
    bar.warp.sync -1;
    @first mbarrier.arrive.expect_tx.shared::cta.b64 _, [here], $1;
}""")


@gluon.jit
def arrive_expecting(barrier, NBYTES: gl.constexpr):
    """Each warp arrives once at its own CTA's barrier, which then also waits for so many bytes per warp."""
    gl.inline_asm(ARRIVE_EXPECTING, "r,r", [barrier, NBYTES], (), False)


@gluon.jit
def all_there():
    """All threads of all CTAs are here: what each did before, as making its barriers, is done."""
    cluster_barrier()
