"""Exhibits from the issue trackers of production kernels: each is the mistake alone, in a small kernel that we wrote,
with the place where it was found or fixed."""

from __future__ import annotations

import numpy as np

from softsm.museum import text as t
from softsm.museum.exhibits import Program, exhibit

SHARED = """.shared .align 1024 .b8 a[4096]; .shared .align 8 .b64 full; .shared .align 8 .b64 other;
.shared .align 4 .b8 buffer[512];"""
X = np.arange(4096, dtype=np.uint32)


def program(body: str, right=None, **launch) -> Program:
    text = t.kernel(body, "x out", shared=SHARED, target="sm_90a", version="8.6")
    return Program(text, [X, np.zeros(4096, np.uint32)], right=right, **launch)


def place(array: str, to: str, index: str = "%r0") -> str:
    """Computes the address of a thread's word in a shared array."""
    return f"mov.u32 %r90, {array};\nmad.lo.u32 {to}, {index}, 4, %r90;\n"


@exhibit(30, "row sums overwrite the row maxima that a slower warp still reads", "race")
def reused_buffer(bug: str) -> Program:
    """FlashMLA 9241ae3, sm100/decode/head64/kernel.cuh:229 and :309. Threads i and i ^ 64 hold halves of a row and
    exchange maxima through a buffer in each step of a loop; after the loop they exchange sums through the same buffer,
    with no barrier since the last read of a maximum. One named barrier fixes it. NVIDIA/cutlass 7107b05, MLA decode of
    example 77 (sm100_fmha_mla_tma_warpspecialized.hpp:1702 and :1706), has it between two steps of the loop."""
    exchange = "bar.sync 1, 128;\nld.shared.u32 %r13, [%r12];\nmax.u32 %r14, %r14, %r13;\n"
    body = place("buffer", "%r11") + "xor.b32 %r10, %r0, 64;\n" + place("buffer", "%r12", "%r10") + "mov.u32 %r14, 0;\n"
    for step in range(2):
        body += (
            "bar.sync 1, 128;\n" * (step > 0) + f"add.u32 %r15, %r0, {step};\nst.shared.u32 [%r11], %r15;\n" + exchange
        )
    body += "" if bug else "bar.sync 1, 128;\n"
    body += "st.shared.u32 [%r11], 7;\nbar.sync 1, 128;\nld.shared.u32 %r16, [%r12];\nadd.u32 %r16, %r16, %r14;\n"
    i = np.arange(128)
    right = np.maximum((i ^ 64) + 1, 0) + 7
    return program(body + t.out("%r16", "%rd2"), None if bug else lambda arrays: bool((arrays[1][:128] == right).all()))


@exhibit(31, "one lane arrives for what 32 lanes stored", "race")
def arrival_of_one(bug: str) -> Program:
    """NVIDIA/cudnn-frontend#426, the backward indexer for sm_100: a warp stores weights to shared memory, and one
    elected lane arrives at an mbarrier of count 1. The arrival releases only that lane's stores. The fix is a count of
    32 and an arrival of every lane."""
    weights = place("buffer", "%r11") + "mad.wide.u32 %rd10, %r2, 4, %rd1;\nld.global.u32 %r12, [%rd10];\n"
    weights += "st.shared.u32 [%r11], %r12;\n"
    weights += t.only("thread 0", t.arrive("full")) if bug else t.arrive("full")
    use = (
        t.wait("full", 0)
        + place("buffer", "%r11", "%r2")
        + "ld.shared.u32 %r13, [%r11];\n"
        + t.out("%r13", "%rd2", "%r2")
    )
    body = t.init(("full", 1 if bug else 32)) + t.only("warp 0", weights) + t.only("warp 1", use)
    return program(body, None if bug else lambda arrays: bool((arrays[1][:32] == X[:32]).all()), block=64)


@exhibit(32, "a barrier of the whole grid, and more CTAs than fit on the GPU", "deadlock")
def too_many_ctas(bug: str) -> Program:
    """sgl-project/sglang#36657: CTAs count arrivals in global memory and spin until all have arrived. A CTA without an
    SM never arrives, so all CTAs of the grid must be resident (in production another kernel held an SM). Here there are
    4 SMs, and each CTA fills one."""
    count = 8 if bug else 4
    barrier = "bar.sync 0;\n" + t.only(
        "%p0",
        "atom.add.release.gpu.global.u32 %r10, [%rd2], 1;\nSPIN:\nld.acquire.gpu.global.u32 %r11, [%rd2];\n"
        f"setp.lt.u32 %p4, %r11, {count};\n@%p4 bra SPIN;\n",
    )
    tile = ".shared .align 16 .b8 tile[131072];"
    text = t.kernel(barrier + "bar.sync 0;\n", "x out", shared=tile, target="sm_90a", version="8.6")
    return Program(text, [X, np.zeros(64, np.uint32)], grid=count, block=32)


@exhibit(33, "a copy fills a stage that lanes of the warp still read", "race")
def stage_reused(bug: str) -> Program:
    """deepseek-ai/DeepGEMM#389, the combine step of the mega MoE kernels: a warp reads a stage that a copy has filled,
    and an elected lane issues the next copy into it. elect.sync does not order memory, so the other lanes may not have
    read yet. The fix there is fence.proxy.async in every lane; bar.warp.sync makes sure that all lanes got that far."""
    copy = "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [a], [%rd10], 128, [full];\n"
    elect = "elect.sync _|%p4, 0xffffffff;\n"
    body, lines = t.init("full"), []
    body += place("a", "%r11", "%r2") + "mov.u32 %r12, 0;\n"
    for stage in range(2):
        issue = f"add.s64 %rd10, %rd1, {128 * stage};\n" + t.expect("full", 128) + copy
        lines.append(elect + t.only("%p4", issue) + "bar.warp.sync 0xffffffff;\n" + t.wait("full", stage))
        lines.append("ld.shared.u32 %r13, [%r11];\nadd.u32 %r12, %r12, %r13;\n")
        if not bug:
            lines.append("fence.proxy.async.shared::cta;\nbar.warp.sync 0xffffffff;\n")
    right = X[:32] + X[32:64]
    body += "".join(lines) + t.out("%r12", "%rd2")
    return program(body, None if bug else lambda arrays: bool((arrays[1][:32] == right).all()), block=32)


@exhibit(34, "a pair of CTAs allocates tensor memory before both have started", "peer-start")
def early_pair(bug: str) -> Program:
    """NVIDIA/cutlass#3316, tutorials 04 and 05 of CuTe for Blackwell: tcgen05.alloc with cta_group::2 works on the
    tensor memory of the peer, which must have been launched. The fix is a cluster barrier before it."""
    meet = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"
    ask = "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [place], 32;\n"
    free = "ld.shared.u32 %r10, [place];\ntcgen05.dealloc.cta_group::2.sync.aligned.b32 %r10, 32;\n"
    body = ("" if bug else meet) + t.only("warp 0", ask) + meet + t.only("warp 0", free) + meet
    return Program(t.kernel(body, "x", shared=".shared .align 4 .b32 place;"), [X], grid=2, block=64, cluster=2)


@exhibit(35, "a pair of CTAs shares its copies, and each works for another group", "deadlock")
def pair_across_groups(bug: str) -> Program:
    """deepseek-ai/DeepGEMM#429 and #415, the k-grouped GEMMs for sm_90: CTA 0 multicasts tiles to the pair, into a
    stage that both must have released. Where a group has an odd number of tiles, a pair lies across two groups, whose
    loops differ in length: CTA 1 releases its last stage, and CTA 0 waits for one more release. The fix is pairs that
    stay in their group. Here the loops have 3 and 1 steps, or 3 and 3."""
    both = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"
    steps = "mov.u32 %r10, %cluster_ctarank;\nmov.u32 %r11, 3;\nsetp.eq.u32 %p5, %r10, 1;\n"
    steps += f"@%p5 mov.u32 %r11, {1 if bug else 3};\n"
    copy = t.wait("other", "%r15", ".acquire.cluster") + (
        "mov.u16 %h1, 3;\nmad.wide.u32 %rd10, %r12, 128, %rd1;\ncp.async.bulk.shared::cluster.global"
        ".mbarrier::complete_tx::bytes.multicast::cluster [a], [%rd10], 128, [full], %h1;\n"
    )
    work = t.expect("full", 128) + t.only("%p6", copy) + t.wait("full", "%r14")
    work += "ld.shared.u32 %r16, [a];\nadd.u32 %r13, %r13, %r16;\n"
    work += "mov.u32 %r17, other;\nmapa.shared::cluster.u32 %r18, %r17, 0;\n"
    work += "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r18];\n"
    loop = f"LOOP:\nand.b32 %r14, %r12, 1;\nxor.b32 %r15, %r14, 1;\n{work}add.u32 %r12, %r12, 1;\n"
    loop += "setp.lt.u32 %p4, %r12, %r11;\n@%p4 bra LOOP;\n" + t.out("%r13", "%rd2", "%r10")
    body = t.init("full", ("other", 2)) + steps + both + "mov.u32 %r12, 0;\nmov.u32 %r13, 0;\n"
    body += "setp.eq.u32 %p6, %r10, 0;\n" + t.only("%p0", loop) + "bar.sync 0;\n" + both
    right = X[0] + X[32] + X[64]
    return program(
        body, None if bug else lambda arrays: bool((arrays[1][:2] == right).all()), grid=2, block=32, cluster=2
    )


@exhibit(36, "row maxima are announced before their store to tensor memory is complete", "race")
def announced_early(bug: str) -> Program:
    """NVIDIA/cutlass#2687 and #3653, the softmax of example 77 (attention for Blackwell): warp 0 stores to tensor
    memory and arrives; warp 4, which has the same lanes, waits and loads. An arrival does not wait for tcgen05.st; the
    fix is tcgen05.wait::st before it."""
    give = "add.u32 %r20, %r0, 5;\nmov.u32 %r21, 7;\n" + t.lanes_of_warp("%r10") + t.store("%r10", 20, 2)
    give += ("" if bug else t.WAIT_ST) + t.BEFORE + t.arrive("full")
    take = t.wait("full", 0) + t.AFTER + t.lanes_of_warp("%r10") + t.load("%r10", 30, 2) + t.WAIT_LD
    take += "add.u32 %r30, %r30, %r31;\n" + t.out("%r30", "%rd2", "%r2")
    body = t.init(("full", 32)) + t.alloc(32) + t.only("warp 0", give) + t.only("warp 4", take) + t.BEFORE
    text = t.kernel(body + t.dealloc(32), "x out", shared=SHARED + ".shared .align 4 .b32 place;")
    right = None if bug else lambda arrays: bool((arrays[1][:32] == X[:32] + 12).all())
    return Program(text, [X, np.zeros(4096, np.uint32)], block=160, right=right)


@exhibit(37, "the next tile is loaded into the only buffer while a product still reads it", "race")
def loaded_early(bug: str) -> Program:
    """triton-lang/triton f4fca2c0b, tutorial 13 of Gluon (convolution by im2col): a step issues its loads first and
    then waits for the product of the previous step, which reads the same buffer. The fix is to wait before the
    loads."""
    copy = "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [a], [%rd1], 4096, [full];\n"
    body = t.init("full", "other") + t.alloc(32) + t.fill("b", 256) + "fence.proxy.async;\nbar.sync 0;\n"
    work = t.descriptor("%rd10", "a") + t.descriptor("%rd11", "b")
    for step in range(2):
        early = t.wait("other", 0) if step else ""
        work += ("" if bug else early) + t.expect("full", 4096) + copy + t.wait("full", step) + (early if bug else "")
        work += t.mma("%r3", "%rd10", "%rd11", t.idesc(), add=step) + t.commit("other")
    body += t.only("thread 0", work + t.wait("other", 1)) + t.BEFORE
    text = t.kernel(
        body + t.dealloc(32), "x", shared=SHARED + ".shared .align 1024 .b8 b[256]; .shared .align 4 .b32 place;"
    )
    return Program(text, [np.full(1024, t.ONES, np.uint32)])


@exhibit(38, "numbers of tokens are cleared for the next call while a late warp still polls them", "race", "deadlock")
def cleared_early(bug: str) -> Program:
    """deepseek-ai/DeepGEMM 54e2261, sm100_bf16_mega_moe.cuh:569: when all epilogues have arrived, a CTA clears the
    token counts that dispatch warps poll. No warp waits for a dispatch warp without tokens to pull: if it is late, it
    reads 0 and polls forever. The fix is a barrier of dispatch and epilogue warps before the epilogue arrives."""
    poll = "POLL:\nld.volatile.global.u32 %r10, [%rd1];\nsetp.eq.u32 %p4, %r10, 0;\n@%p4 bra POLL;\n"
    poll += "mov.u32 %r11, %ctaid.x;\n" + t.out("%r10", "%rd2", "%r11")
    arrive = "atom.add.release.gpu.global.u32 %r12, [%rd1+4], 1;\nALL:\nld.acquire.gpu.global.u32 %r12, [%rd1+4];\n"
    arrive += "setp.lt.u32 %p4, %r12, 2;\n@%p4 bra ALL;\n"
    clear = "mov.u32 %r11, %ctaid.x;\nsetp.eq.u32 %p5, %r11, 1;\n@%p5 st.global.u32 [%rd1], 0;\n"
    body = t.only("thread 0", poll) + ("" if bug else "bar.sync 1, 64;\n") + t.only("thread 32", arrive)
    body += "bar.sync 2, 64;\n" + t.only("thread 0", clear)
    counts, text = np.array([5, 0], np.uint32), t.kernel(body, "counts out", target="sm_90a", version="8.6")
    right = None if bug else lambda arrays: bool((arrays[1][:2] == 5).all())
    return Program(text, [counts, np.zeros(2, np.uint32)], grid=2, block=64, right=right)


@exhibit(39, "tensor memory is freed after a barrier of only some of its users", "in-flight", "tmem-unallocated")
def freed_early(bug: str) -> Program:
    """NVIDIA/cutlass 7107b05, the backward of example 77 (sm100_fmha_bwd_kernel_tma_warpspecialized.hpp:1815): compute
    warps meet and free all columns, while the warps that accumulate dQ may still load theirs. The fix is a barrier at
    which both arrive. Here these are warps 0 to 3, and warp 4, which has the lanes of warp 0."""
    give = "add.u32 %r20, %r0, 5;\nmov.u32 %r21, 7;\n" + t.lanes_of_warp("%r10") + t.store("%r10", 20, 2) + t.WAIT_ST
    take = t.lanes_of_warp("%r10") + t.load("%r10", 30, 2) + t.WAIT_LD
    take += "add.u32 %r30, %r30, %r31;\n" + t.out("%r30", "%rd2", "%r2")
    body = t.alloc(32) + t.only("warp 0", give) + t.BEFORE + "bar.sync 0;\n" + t.AFTER + t.only("warp 4", take)
    free = "bar.sync 1, 128;\n" + t.dealloc(32, sync=False)
    body += "setp.lt.u32 %p4, %r1, 4;\n" + t.only("%p4", free) if bug else t.BEFORE + t.dealloc(32)
    text = t.kernel(body, "x out", shared=SHARED + ".shared .align 4 .b32 place;")
    right = None if bug else lambda arrays: bool((arrays[1][:32] == X[:32] + 12).all())
    return Program(text, [X, np.zeros(4096, np.uint32)], block=160, right=right)
