"""# 13. Hopper: a producer warp and a consumer warpgroup

Roles on Hopper follow from one fact: a product is issued by the warpgroup that holds the accumulator. So there is no
product warp as in chapter 10. One *producer* warp issues copies; *consumer* warpgroups multiply, do the softmax and
keep their own rows of O. With two of them the tensor core works for one while the other does exponentials.

The barrier table has two lines. `ready`: the copy engine, by bytes; the consumer waits; the tile is in shared memory.
`free`: the consumer, one arrival; the producer waits; the products that read the slot are complete. On Blackwell the
tensor core itself signals `free`, by a commit. Here the consumer does, so it must wait for its product first: an
arrival in the wrong line gives the slot away too early. `EARLY` does that, and the copy engine overwrites what the
tensor core reads. With two slots the copy is a whole step away, so the result stays right until somebody makes the copy
faster.

To keep the tensor core busy, the consumer leaves one product in flight: it issues the product of step i, waits until at
most one is outstanding, and then frees the slot of step i - 1.

From here, `src/dsv4/fmha/kernels/sm90/forward.py` is this loop with a softmax between two products. Read its first
page.

Museum: exhibits 15 (participant counts), 19 and 20 (counts and bytes), 21 (constant parity).
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

import softsm


@gluon.jit
def load_role(a_desc, b_desc, a, b, ready, free, steps):
    for i in range(steps):
        slot = i % 2
        mbarrier.wait(free.index(slot), (i // 2 + 1) % 2)  # parity 1 first: a slot is free before anybody frees it
        mbarrier.expect(ready.index(slot), (64 + 128) * 64 * 2)
        tma.async_load(a_desc, [0, i * 64], ready.index(slot), a.index(slot))
        tma.async_load(b_desc, [0, i * 64], ready.index(slot), b.index(slot))


@gluon.jit
def product_role(c_ptr, a, b, ready, free, steps, EARLY: gl.constexpr):
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    c = gl.zeros([64, 128], gl.float32, L)
    for i in range(steps):
        slot = i % 2
        mbarrier.wait(ready.index(slot), i // 2 % 2)
        c = warpgroup_mma(a.index(slot), b.index(slot).permute((1, 0)), c, is_async=True)
        if EARLY:
            mbarrier.arrive(free.index(slot), count=1)
        c = warpgroup_mma_wait(num_outstanding=1, deps=(c,))
        if not EARLY and i > 0:
            mbarrier.arrive(free.index(1 - slot), count=1)  # the product of step i - 1 is complete
    c = warpgroup_mma_wait(num_outstanding=0, deps=(c,))
    put(c_ptr, c)


@gluon.jit
def matmul(a_desc, b_desc, c_ptr, steps, EARLY: gl.constexpr):
    """C [64, 128] = A B^T, 64 columns at a time, two slots."""
    a = gl.allocate_shared_memory(a_desc.dtype, [2, 64, 64], a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, [2, 128, 64], b_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    gl.warp_specialize(  # the first role has the launch's four warps, the second one warp and 24 registers per thread
        [
            (product_role, (c_ptr, a, b, ready, free, steps, EARLY)),
            (load_role, (a_desc, b_desc, a, b, ready, free, steps)),
        ],
        [1],
        [24],
    )


def attempt(early: bool = False, order: str = "latest"):
    a, b, c = normal(64, 320), normal(128, 320, seed=1), torch.full((64, 128), float("nan"))
    with softsm.counting() as activity:
        report = run(matmul, descriptor(a, [64, 64]), descriptor(b, [128, 64]), c, 5, early, order=order, arch="sm_90a")
    return c, a.double() @ b.double().T, report, activity


def check_any_order() -> None:
    for order in ("eager", "latest", "random"):
        c, want, report, _ = attempt(order=order)
        compare(c, want, 2.0**-20)
        assert not report, str(report)


def check_who_did_what() -> None:
    roles = attempt()[3].roles
    assert roles["load_role"].operations["TMA load"].count == 10  # five steps, two tiles each
    assert roles["product_role"].warps == 4 and roles["load_role"].warps == 1


def check_a_slot_freed_too_early_is_found() -> None:
    c, want, report, _ = attempt(early=True, order="eager")
    compare(c, want, 2.0**-20)
    assert "race" in report.codes(), str(report)


def show() -> None:
    for name, role in attempt()[3].roles.items():
        work = ", ".join(f"{x.count} {kind}" for kind, x in role.operations.items())
        say(f"{name:12} {role.warps} warps, {role.instructions} instructions; {work or 'no asynchronous operation'}")
    say("A slot freed before its product is complete:")
    say(str(next(iter(attempt(early=True, order="eager")[2]))))


if __name__ == "__main__":
    from read import main

    main(__file__)
