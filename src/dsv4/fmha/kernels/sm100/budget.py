"""The cost of one main-loop iteration of the forward kernel on an SM of sm_100, resource by resource.

In an iteration, all query tiles of a CTA process one tile of keys. Nothing here was measured. The rates and their
sources:

- 8192 dense bf16 operations per clock and SM: 2.25 PFLOP/s of a B200
  ([FlashAttention-4](https://www.together.ai/blog/flashattention-4), arXiv 2603.05451) divided by 148 SMs at 1.85
  GHz; the count and the clock are assumed. CUTLASS agrees: `kind::f16` is twice as fast as Hopper
  ([table](https://github.com/NVIDIA/cutlass/blob/main/media/docs/cpp/blackwell_functionality.md)), and Hopper has
  4096.
- 16 exponentials per clock and SM (the multi-function unit) and 128 bytes of shared memory per clock and SM:
  according to FlashAttention-4 both are the same as on Hopper; the numbers are from [a summary of
  it](https://www.engineermaxxing.com/veanors/papers/flash-attention-4.html). Products with both operands in shared
  memory were [measured](https://newsletter.semianalysis.com/p/dissecting-nvidia-blackwell-tensor) to read about 128
  bytes per clock, too.
- With two query tiles 9 of 32 exponentials are computed with multiplications and additions, in the gradients of head
  dims 64 and 128 a quarter; exp cycles count the rest.
- A product of 64 rows uses half of the tensor core's rows: half the rate is assumed.
- No rate was found for tensor memory, so the table has its bytes but no cycles.
- 8 TB/s of device memory
  ([a table](https://docs.vultr.com/inference-cookbook/cuda/getting-started/hardware-overview)), 29 bytes per clock and
  SM.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4.fmha.kernels.sm100.entry import tiling

FLOPS_PER_CLOCK = 8192
EXPONENTIALS_PER_CLOCK = 16
SHARED_BYTES_PER_CLOCK = 128
MMA_K = 16  # k of one tcgen05.mma with 16-bit operands
MMA_N = 256  # n of one tcgen05.mma, at most
DEVICE_BYTES_PER_CLOCK = 29


@dataclass(frozen=True)
class Budget:
    head_dim: int
    p_tmem: bool
    rows: int  # query rows per CTA
    keys: int
    mma: int  # instructions
    tensor_cycles: int
    exponentials: int
    exp_cycles: int
    shared_bytes: int
    shared_cycles: int
    tensor_memory_bytes: int

    @property
    def bottleneck(self) -> str:
        cycles = {"tensor core": self.tensor_cycles, "exp": self.exp_cycles, "shared memory": self.shared_cycles}
        most = max(cycles.values())
        return " = ".join(name for name, n in cycles.items() if n == most)

    @property
    def tensor_share(self) -> float:
        """The best share of the tensor core's time, if everything else overlaps with the slowest resource."""
        return self.tensor_cycles / max(self.tensor_cycles, self.exp_cycles, self.shared_cycles)


def budget(head_dim: int, p_tmem: bool) -> Budget:
    options = tiling(head_dim, p_tmem).options
    rows, keys, tiles = options["BM"], options["BN"], options["TILES"]
    qk = head_dim // MMA_K
    pv = keys // MMA_K * -(-head_dim // MMA_N)
    flops = 2 * 2 * tiles * rows * keys * head_dim
    rate = FLOPS_PER_CLOCK if rows == 128 else FLOPS_PER_CLOCK // 2
    tile = keys * head_dim * 2  # bytes of a K or V tile
    scores = rows * keys
    by_unit = tiles * scores * 23 // 32 if tiles == 2 else tiles * scores
    # TMA writes K and V. For each query tile the tensor core reads Q and K, then V; if softmax writes P to shared
    # memory, it reads P too, once for every 256 columns of O.
    p_bytes = 0 if p_tmem else (1 + -(-head_dim // MMA_N)) * 2 * scores
    shared = 2 * tile + tiles * (rows * head_dim * 2 + 2 * tile + p_bytes)
    # S: written by the tensor core, read by softmax. P: written, then read. O: read and written by the tensor core.
    tensor_memory = tiles * (2 * 4 * scores + (2 * 2 * scores if p_tmem else 0) + 2 * 4 * rows * head_dim)
    return Budget(
        head_dim,
        p_tmem,
        rows * tiles,
        keys,
        tiles * (qk + pv),
        flops // rate,
        tiles * scores,
        by_unit // EXPONENTIALS_PER_CLOCK,
        shared,
        shared // SHARED_BYTES_PER_CLOCK,
        tensor_memory,
    )


def pair_budget() -> Budget:
    """Return the budget of one CTA of a pair at head dim 512, which shares its products: half of K and half of V are in
    its memory."""
    rows, keys, d = 64, 128, 512
    half, scores = keys * d, rows * keys  # bytes of half a tile; elements
    shared = 2 * half + rows * d * 2 + 2 * half + (1 + d // MMA_N) * 2 * scores
    return Budget(
        d,
        False,
        rows,
        keys,
        d // MMA_K + keys // MMA_K * (d // MMA_N),
        2 * 2 * rows * keys * d // FLOPS_PER_CLOCK,
        scores,
        scores // EXPONENTIALS_PER_CLOCK,
        shared,
        shared // SHARED_BYTES_PER_CLOCK,
        2 * 4 * scores + 2 * 4 * rows * d,
    )


@dataclass(frozen=True)
class SparseBudget:
    """The budget of one CTA for a block of listed rows and 64 heads of one query."""

    rows: str  # bf16, fp8
    ctas: int  # CTAs that share the products
    keys: int
    mma: int
    tensor_cycles: int
    exp_cycles: int
    shared_bytes: int
    shared_cycles: int
    l2_bytes: int
    device_bytes: int  # bytes from device memory if no row is found in L2, and the two CTAs of a pair read a row once
    device_cycles: int


def sparse(rows: str, ctas: int = 1) -> SparseBudget:
    heads, keys, d = 64, 64 * ctas, 512
    flops = 2 * 2 * heads * keys * d
    rate = FLOPS_PER_CLOCK // 2 if ctas == 1 else FLOPS_PER_CLOCK
    # One CTA reads a block twice, as K and as V. Each of a pair has half of it as K and half of it as V.
    block, scores = keys * d * 2, heads * keys * 2
    # Written: the block and P. Read: Q and K for S; P for each half of O, and V.
    shared = block + scores + heads * d * 2 + (2 * block) // ctas + d // MMA_N * scores
    fetched = keys * {"bf16": 2 * d, "fp8": 584}[rows]
    return SparseBudget(
        rows,
        ctas,
        keys,
        d // MMA_K + keys // MMA_K * (d // MMA_N),
        flops // rate,
        heads * keys // EXPONENTIALS_PER_CLOCK,
        shared,
        shared // SHARED_BYTES_PER_CLOCK,
        fetched,
        fetched // ctas,
        fetched // ctas // DEVICE_BYTES_PER_CLOCK,
    )


@dataclass(frozen=True)
class BackwardBudget:
    """The budget of one step of a gradient kernel: a tile of rows times keys, all products of it."""

    kernel: str
    rows: int
    keys: int
    products: int
    tensor_cycles: int
    exp_cycles: int
    shared_bytes: int

    @property
    def shared_cycles(self) -> int:
        return self.shared_bytes // SHARED_BYTES_PER_CLOCK

    @property
    def tensor_share(self) -> float:
        """The best share of the tensor core's time, if everything else overlaps with the slowest resource."""
        return self.tensor_cycles / max(self.tensor_cycles, self.exp_cycles, self.shared_cycles)


def backward_budgets() -> list[BackwardBudget]:
    found, tile = [], 128 * 128
    for d in (64, 128):
        operand = 128 * d * 2
        for owner, products in (("keys, dQ added", 5), ("keys", 4), ("queries", 3)):
            # Written: two streamed tiles. Read: both operands of S and of dP; the others have P or dS, which is in
            # tensor memory, on their left.
            shared = (2 + 4 + products - 2) * operand
            if products == 5:  # the left operand of dQ, dS, is written and read, and so is dQ, in fp32
                shared += 2 * tile * 2 + 2 * 2 * operand
            found.append(
                BackwardBudget(
                    f"head dim {d}, own {owner}",
                    128,
                    128,
                    products,
                    products * 2 * tile * d // FLOPS_PER_CLOCK,
                    tile * 3 // 4 // EXPONENTIALS_PER_CLOCK,
                    shared,
                )
            )
    for d in (256, 512):
        # Operands of S and dP are written and read; P and dS are written, and read by TMA.
        shared = 2 * 4 * 128 * d * 2 + 2 * 2 * tile * 2
        found.append(
            BackwardBudget(
                f"head dim {d}, P and dS",
                128,
                128,
                2,
                2 * 2 * tile * d // FLOPS_PER_CLOCK,
                tile // EXPONENTIALS_PER_CLOCK,
                shared,
            )
        )
    block, scores = 64 * 512 * 2, 64 * 64 * 2
    # Written: the block, P and dS. Read: two operands each of S and dP; dS for each half of dQ, and the block; P and dS
    # for each quarter of dKV, and dO and Q.
    shared = block + 2 * scores + 4 * block + 2 * scores + block + 8 * scores + 2 * block
    found.append(
        BackwardBudget(
            "V4, 64 heads",
            64,
            64,
            5,
            5 * 2 * 64 * 64 * 512 * 2 // FLOPS_PER_CLOCK,
            64 * 64 // EXPONENTIALS_PER_CLOCK,
            shared,
        )
    )
    return found
