"""# 11. Hopper: S = Q K^T with wgmma

The three chapters from here on are about Hopper. Copies are the same: TMA into shared memory, an mbarrier that counts
bytes. Products are not. There is no tensor memory: a *warpgroup*, four warps side by side, issues the product together
and holds the accumulator in its own registers, 64 rows by up to 256 columns. Each warp has 16 of the rows; a row is
spread over the four threads of a quad, so a row maximum needs two shuffles (`gl.max` does them).

`wgmma` is asynchronous too, but nothing arrives at a barrier. Products are put into groups, and
`warpgroup_mma_wait(n)` waits until at most n groups are in flight. Two things may only happen after that wait: using
the accumulator's registers, and overwriting the tiles that the product reads. Gluon enforces the first, because an
asynchronous product gives a value that only the wait turns into a tensor. Nothing enforces the second.

The kernel below multiplies in steps and reuses its two tiles. With `OUTSTANDING` = 0 every product is complete before
the next copy is issued. With 1, the last product may still read the tile that the copy overwrites: a race, and usually
the right result, because the copy takes longer than the product.

Operands in shared memory come with a descriptor, as on Blackwell: the same swizzles, other bits in the descriptor.

Museum: exhibits 1 and 2 (row pitch), 21 (constant parity).
"""

from ladder import (
    compare,
    descriptor,
    gl,
    gluon,
    mbarrier,
    normal,
    put,
    run,
    say,
    tma,
    torch,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def scores(q_desc, k_desc, s_ptr, D: gl.constexpr, STEP: gl.constexpr, OUTSTANDING: gl.constexpr):
    """S [64, 128] = Q [64, D] K [128, D]^T, STEP columns at a time."""
    q = gl.allocate_shared_memory(q_desc.dtype, [64, STEP], q_desc.layout)
    k = gl.allocate_shared_memory(k_desc.dtype, [128, STEP], k_desc.layout)
    landed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(landed, count=1)
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    s = gl.zeros([64, 128], gl.float32, L)
    for i in range(D // STEP):
        mbarrier.expect(landed, (64 + 128) * STEP * 2)
        tma.async_load(q_desc, [0, i * STEP], landed, q)
        tma.async_load(k_desc, [0, i * STEP], landed, k)
        mbarrier.wait(landed, i % 2)
        s = warpgroup_mma(q, k.permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(num_outstanding=OUTSTANDING, deps=(s,))
    s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
    put(s_ptr, s)


def attempt(outstanding: int = 0, order: str = "latest"):
    q, k, s = normal(64, 128), normal(128, 128, seed=1), torch.full((64, 128), float("nan"))
    tiles = descriptor(q, [64, 32]), descriptor(k, [128, 32])
    report = run(scores, *tiles, s, 128, 32, outstanding, order=order, arch="sm_90a")
    return s, q.double() @ k.double().T, report


def check_four_steps() -> None:
    for order in ("eager", "latest", "random"):
        s, want, report = attempt(order=order)
        compare(s, want, 2.0**-20)
        assert not report, str(report)


def check_a_copy_over_a_tile_in_use_is_found() -> None:
    """Although every copy and product completes at once, and the numbers are right."""
    s, want, report = attempt(outstanding=1, order="eager")
    compare(s, want, 2.0**-20)
    assert "race" in report.codes(), str(report)


def show() -> None:
    s, want, report = attempt(outstanding=1, order="eager")
    say(f"One product outstanding: the result is right by luck (relative error {compare(s, want):.1g}); softsm says:")
    say(str(next(iter(report))))


if __name__ == "__main__":
    from read import main

    main(__file__)
