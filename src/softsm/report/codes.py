"""The codes of all findings: what each one means and how to fix it. `softsm explain CODE` prints an entry."""

from __future__ import annotations

# code -> (meaning, how to fix it)
CODES: dict[str, tuple[str, str]] = {
    # order
    "race": (
        "Two accesses of the same bytes, or of the same tensor-memory cells, are not ordered, and at least one writes.",
        "Put synchronisation between the two: an mbarrier arrive and wait, bar.sync, a group wait, tcgen05.commit or "
        "tcgen05.wait; between generic and asynchronous accesses also fence.proxy.async. A release by one lane covers "
        "what that lane did; with bar.warp.sync before it, it covers what its warp did.",
    ),
    "read-only": (
        "ld.global.nc (__ldg, or a const __restrict__ pointer) reads what the same grid has written: the cache that it "
        "goes through is not coherent, and may hold older bytes.",
        "Read with an ordinary load: drop __ldg, or const and __restrict__ of the pointer.",
    ),
    "in-flight": (
        "The kernel ends, or frees tensor memory, while an asynchronous operation may still use it.",
        "Wait for the operation before the exit or the dealloc: for a TMA load its mbarrier, for a TMA store "
        "cp.async.bulk.wait_group, for a tensor-core operation tcgen05.commit and its mbarrier.",
    ),
    "peer-start": (
        "A CTA accesses its peer before it can know that the peer has started.",
        "Put barrier.cluster.arrive and barrier.cluster.wait before the first access of a peer's shared memory, and "
        "before the first tcgen05.alloc with cta_group::2.",
    ),
    "peer-exit": (
        "A CTA of a cluster may have ended while another one still accesses its shared memory.",
        "Put barrier.cluster.arrive and barrier.cluster.wait before the exit, or let the CTA wait for the last access.",
    ),
    "deadlock": (
        "No warp can make progress: each one waits for something that no other warp will do.",
        "Follow the wait-for cycle: the barrier with missing arrivals or bytes names who arrived "
        "last and what is missing.",
    ),
    # barriers
    "barrier-count": (
        "The number of arrivals that a barrier expects cannot be right.",
        "The count of mbarrier.init is the number of arrivals of a phase (1 for a TMA barrier); "
        "bytes belong to expect_tx. "
        "The thread count of bar.sync is the number of threads that take part, in whole warps.",
    ),
    "barrier-reuse": (
        "A warp arrives for the next phase of an mbarrier while this one still waits for bytes of copies.",
        "Before a slot is filled again, wait for the mbarrier by which its readers release it (the empty barrier), "
        "with the parity of the previous round; the readers must wait for the bytes before they release it.",
    ),
    "barrier-groups": (
        "Warps arrive at a named barrier for one phase, and nothing orders them after those of the phase before: "
        "hardware counts warps, not who they are, so warps of two groups may meet.",
        "Give each group of warps a barrier number of its own (0 to 15), or order the second use after the first.",
    ),
    "barrier-phase": (
        "A phase of a barrier completed and no warp waited for it, or a wait names a phase that completed long ago, or "
        "a warp waits at the barrier of the cluster without having arrived.",
        "Flip the parity each time the barrier is used again; wait for every phase once before the next one can end. "
        "If several warps arrive for one phase, they are its count in mbarrier.init. At the barrier of a cluster every "
        "thread of all its CTAs arrives, then waits.",
    ),
    "barrier-tx": (
        "The bytes announced by expect_tx differ from the bytes that the copies of the phase deliver.",
        "expect_tx counts the whole boxes of all copies that signal the barrier in that phase, "
        "filled elements included; copies of the next phase must wait until this one has ended.",
    ),
    "barrier-init": (
        "An mbarrier is used before its initialisation is visible, or initialised again while it is in use.",
        "Execute mbarrier.init, then fence.mbarrier_init.release.cluster or fence.proxy.async, then a barrier, then "
        "use it. Execute mbarrier.inval before you use the word for anything else.",
    ),
    "barrier-overwritten": (
        "A store overwrote an mbarrier that is still in use.",
        "Reserve the 8 bytes for the mbarrier, or execute mbarrier.inval before you use them for anything else.",
    ),
    "barrier-inval": (
        "An mbarrier is invalidated while a warp waits on it, or used after it was invalidated.",
        "Invalidate it after the last use, and initialise it before it is used again.",
    ),
    "barrier-number": ("The instruction names a barrier that does not exist.", "A CTA has the barriers 0 to 15."),
    "barrier-remote": (
        "An mbarrier of another CTA is used where only the CTA's own is allowed.",
        "Other CTAs may arrive and complete bytes; only the CTA itself may initialise and wait.",
    ),
    "barrier-uninitialised": (
        "There is no mbarrier at this address.",
        "Initialise it, and order the initialisation before the use by a barrier; in another CTA of the cluster, by "
        "barrier.cluster.arrive and barrier.cluster.wait.",
    ),
    # values
    "uninitialised": (
        "A value is read that was never written.",
        "Write it, or wait for the copy that delivers it, before reading.",
    ),
    "nan": (
        "A NaN enters the accumulator of a matrix product.",
        "Replace the element by 0 where it is loaded: 0 * NaN is NaN, so masking the other operand is not enough.",
    ),
    "operand": (
        "A matrix product read a different element from the one expected.",
        "Compare how the tile is written with how the descriptor reads it; `softsm explain descriptor` draws the map.",
    ),
    "type": (
        "Tensor-memory cells are read as a different type from the one they were written as.",
        "Convert A (cvt.rn.bf16x2.f32) before tcgen05.st, because it is packed in tensor memory, and read the columns "
        "that it was stored to.",
    ),
    "out-of-bounds-fill": (
        "A TMA box lies entirely outside its tensor, so it delivers only fill values.",
        "Bound the loop by the tensor's extent, or check the coordinates: their unit is elements, innermost first.",
    ),
    "out-of-bounds": (
        "An access lies outside the memory that the kernel was given.",
        "Compare the offset with the allocation named in the message; a Triton load or store of the last block needs "
        "a mask.",
    ),
    "misaligned": (
        "An address is not a multiple of what the access needs.",
        "Align it; for tensor memory use a shape that accepts the column (.32x32b accepts any).",
    ),
    # tensor memory and descriptors
    "lane-ownership": (
        "A warp touches tensor-memory lanes that are not its own.",
        "Warp w may touch lanes 32*(w%4) to 32*(w%4)+31: add (w%4) << 21 to the address, or give the "
        "work to another warp.",
    ),
    "tmem-lane": (
        "A tensor-memory address starts at a lane the operation does not accept.",
        "Start at the lane that the message names.",
    ),
    "tmem-address": (
        "The threads of a warp give different tensor-memory addresses.",
        "Compute the address from values that are equal in all threads of the warp.",
    ),
    "tmem-bounds": ("Tensor memory has 512 columns.", "Check the column of the address and the width of the access."),
    "tmem-cta-group": (
        "All tcgen05 instructions of a kernel carry the same .cta_group, and both CTAs of a pair do the same.",
        "Use one cta_group in the whole kernel.",
    ),
    "tmem-dealloc": (
        "tcgen05.dealloc frees something that tcgen05.alloc did not return.",
        "Free the address that alloc wrote, with its number of columns.",
    ),
    "tmem-granularity": ("A CTA allocates 32, 64, 128, 256 or 512 columns.", "Round up to one of these."),
    "tmem-leak": ("A CTA ends and still holds tensor memory.", "Add tcgen05.dealloc before the exit."),
    "tmem-relinquished": (
        "tcgen05.alloc comes after tcgen05.relinquish_alloc_permit.",
        "Allocate first; relinquish when no allocation follows.",
    ),
    "tmem-unallocated": (
        "The CTA uses tensor-memory columns that it has not allocated.",
        "Allocate them, and deallocate after the last use.",
    ),
    "descriptor": (
        "A shared-memory matrix descriptor is invalid: its fixed bits, swizzle mode or the memory it covers.",
        "`softsm explain descriptor` shows its fields and the bytes it reads.",
    ),
    "idesc": (
        "An instruction descriptor names a shape or type the instruction does not have.",
        "`softsm explain idesc` shows its fields.",
    ),
    "scale-copies": (
        "The scale factors differ between the four lane quarters.",
        "tcgen05.cp.32x128b.warpx4 writes all four.",
    ),
    "tensor-map": (
        "A tensor map is unusable.",
        "Encode it by the rules of cuTensorMapEncodeTiled; align it to 64 bytes.",
    ),
    "coordinate": (
        "The target does not accept a TMA coordinate or offset.",
        "On sm_90 loads begin at multiples of 16 bytes of the innermost dimension, stores and reductions at "
        "coordinates >= 0. im2col::w begins left of its bounding box or in it.",
    ),
    "cluster-launch": (
        "An asynchronous copy goes from shared memory or registers to shared memory, in a launch without clusters.",
        "Launch with clusters (.reqnctapercluster 1 is enough), or copy with loads and stores.",
    ),
    "multicast": ("The CTA mask of a multicast names CTAs that do not exist.", "Use bits below the cluster size."),
    "copy-size": ("The size of a bulk copy is not allowed.", "Sizes are multiples of 16 bytes."),
    "metadata": (
        "Metadata of a sparse product name one position twice, with sp::ordered_metadata in descending order, or hold "
        "a code that tf32 does not have.",
        "Give two different positions of 0 to 3 for every chunk, the smaller one in the lower bits; "
        "for tf32 0b0100 or 0b1110.",
    ),
    # wgmma
    "wgmma-registers": (
        "Registers of a wgmma are used while it may still read or write them.",
        "Execute wgmma.wait_group before you use the accumulator, and wgmma.fence between ordinary writes of registers "
        "and wgmma.mma_async.",
    ),
    "wgmma-operands": (
        "The warps of a warpgroup execute different products.",
        "Give the same operands in all four warps.",
    ),
    "warpgroup": (
        "wgmma and setmaxnreg are instructions of a warpgroup: four whole warps, warps 0 to 3 or 4 to 7 and so on.",
        "Launch a multiple of 128 threads, keep all lanes alive, and let all four warps execute it; setmaxnreg with "
        "one number.",
    ),
    # control
    "divergent": (
        "Only part of the warp reaches an .aligned or .sync instruction.",
        "Move it out of the divergent branch, or elect one thread after it. Lanes without work must not return before "
        "an mma, ldmatrix, stmatrix or shuffle of their warp: mask their loads and stores instead.",
    ),
    "branch-index": (
        "A jump table is indexed out of range.",
        "Compare the index of brx.idx with the number of its targets.",
    ),
    "recursion": ("A device function calls itself.", "Write a loop: functions have one frame each here."),
    "cluster-rank": (
        "An access names the shared memory of a CTA that the cluster does not have.",
        "Give mapa ranks below %cluster_nctarank.",
    ),
    "unsupported": (
        "softsm has no semantics for an operation with these operands.",
        "docs/isa.md lists the supported instructions.",
    ),
    "address": ("A variable has no address here.", "This is a bug in softsm; report it with the PTX."),
    "special-register": ("The program reads a predefined register that has no value here.", "Use another one."),
    "copy": ("An asynchronous copy could not be done.", "See the message: it names the operand and the instruction."),
    "internal": ("softsm reached an unexpected state.", "This is a bug in softsm; report it with the PTX."),
    "step-budget": (
        "The launch was ended: it executed more instructions than its budget (SOFTSM_BUDGET), or went on for long "
        "although no warp ended and no asynchronous operation completed (softsm check --patience).",
        "Look for a loop without end where the warps are; if it is only long, use --patience 0 or a larger budget.",
    ),
    "trap": ("The program executed trap.", "Its own check failed; see the line."),
    "assert": ("A device-side assertion failed.", "See the message."),
}


# Causes precede effects: a misused barrier makes accesses race, a race makes values wrong, and any of them may end in a
# deadlock.
_EFFECTS = (
    ("barrier-phase", "barrier-reuse", "in-flight", "peer-exit", "race", "wgmma-registers"),
    ("uninitialised",),
    ("operand", "nan", "type"),
    ("deadlock", "step-budget"),
)
_DEPTH = {code: 1 + depth for depth, codes in enumerate(_EFFECTS) for code in codes}


def depth(code: str) -> int:
    """Returns how far a finding of this code is from its cause; 0 if it is a cause itself."""
    return _DEPTH.get(code, 0)


def sentence(code: str) -> str:
    return CODES[code][0] if code in CODES else ""


def fix(code: str) -> str:
    return CODES[code][1] if code in CODES else ""
