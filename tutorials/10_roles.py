"""# 10. Roles: many warps, many barriers

One thread of control waits for everything in turn, and the tensor core idles while softmax runs. In the library's
kernel every party is a *role* with its own warps: a warp that issues copies, one that issues products, four or
eight for softmax, four that rescale and store O. `gl.warp_specialize` starts them; after that they meet at barriers
only.

Now a barrier table is worth more than the code. For each barrier: who arrives, how often, who waits, and what passing
it means. `ready`: the copy engine, by bytes; products wait; the tile is in shared memory. `free`: the tensor core, by
commit; the load role waits; all products that read the slot are complete. `done`: the tensor core; the storing role
waits; the accumulator is complete. From the table follow the counts of `init`: the number of *arrivals*, 1 each here.
Bytes are not arrivals, they are announced with `expect`; a barrier initialised with 16384 waits for 16384 arrivals.

The first time round is special. A slot is free before anybody has freed it, so the load role waits for parity 1
first: the phase *before* phase 0 counts as complete. Wait for parity 0 there and the kernel stands still: the load
role waits for a product, the product for a copy, and none of them moves. On a GPU that is a process that does not end.
softsm detects that no warp can make progress, and reports who waits for which barrier and phase, and who should have
arrived.

Registers are shared out among the roles too (`worker_num_regs`): a load warp needs few, a softmax thread with a row
of 128 scores needs 200. From here, `src/dsv4/fmha/kernels/sm100/forward.py` is the same thing with more roles: read its
first page.

Museum: exhibits 15 (participant counts), 16 (waiting for a phase that nothing signals), 19 and 20 (counts and bytes),
26 (commit by another thread than the product's).
"""

from ladder import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    compare,
    descriptor,
    gl,
    gluon,
    mbarrier,
    normal,
    put,
    run,
    say,
    tcgen05_commit,
    tcgen05_mma,
    tma,
    torch,
)

import softsm


@gluon.jit
def load_role(a_desc, b_desc, a, b, ready, free, steps, FIRST: gl.constexpr):
    for i in range(steps):
        slot = i % 2
        mbarrier.wait(free.index(slot), (i // 2 + FIRST) % 2)
        mbarrier.expect(ready.index(slot), 2 * 128 * 64 * 2)
        tma.async_load(a_desc, [0, i * 64], ready.index(slot), a.index(slot))
        tma.async_load(b_desc, [0, i * 64], ready.index(slot), b.index(slot))


@gluon.jit
def mma_role(a, b, c, ready, free, done, steps):
    for i in range(steps):
        slot = i % 2
        mbarrier.wait(ready.index(slot), (i // 2) % 2)
        tcgen05_mma(a.index(slot), b.index(slot).permute((1, 0)), c, use_acc=i > 0)
        tcgen05_commit(free.index(slot))
    tcgen05_commit(done)


@gluon.jit
def store_role(c_ptr, c, done):
    mbarrier.wait(done, 0)
    put(c_ptr, c.load())


@gluon.jit
def matmul(a_desc, b_desc, c_ptr, steps, FIRST: gl.constexpr):
    """C [128, 128] = A B^T, 64 columns per step, a ring of two slots."""
    a = gl.allocate_shared_memory(a_desc.dtype, [2, 128, 64], a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, [2, 128, 64], b_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    mbarrier.init(done, count=1)
    c = allocate_tensor_memory(gl.float32, [128, 128], TensorMemoryLayout([128, 128], col_stride=1))
    gl.warp_specialize(
        [
            (store_role, (c_ptr, c, done)),
            (mma_role, (a, b, c, ready, free, done, steps)),
            (load_role, (a_desc, b_desc, a, b, ready, free, steps, FIRST)),
        ],
        [1, 1],
        [48, 48],
    )


def attempt(first: int = 1, order: str = "latest"):
    a, b, c = normal(128, 320), normal(128, 320, seed=1), torch.full((128, 128), float("nan"))
    with softsm.counting() as activity:
        report = run(matmul, descriptor(a, [128, 64]), descriptor(b, [128, 64]), c, 5, first, order=order)
    return c, a.double() @ b.double().T, report, activity


def check_any_order() -> None:
    for order in ("eager", "latest", "random"):
        c, want, report, _ = attempt(order=order)
        compare(c, want, 2.0**-20)
        assert not report, str(report)


def check_who_did_what() -> None:
    roles = attempt()[3].roles
    assert roles["load_role"].operations["TMA load"].count == 10  # five steps, two tiles each
    assert roles["load_role"].operations["TMA load"].bytes == 2 * 128 * 320 * 2
    assert roles["mma_role"].operations["tcgen05.mma"].count == 320 // 16
    assert roles["store_role"].warps == 4 and roles["mma_role"].warps == roles["load_role"].warps == 1


def check_the_wrong_first_phase_is_a_deadlock() -> None:
    try:
        attempt(first=0)
    except softsm.errors.Deadlock as why:
        text = str(why)
        assert "warp 6 (mma) of CTA (0, 0, 0) waits for warp 7 (load)" in text
        assert "warp 7 (load) of CTA (0, 0, 0) waits for warp 6 (mma)" in text
    else:
        raise AssertionError("no deadlock was reported")


def show() -> None:
    for name, role in attempt()[3].roles.items():
        work = ", ".join(f"{x.count} {kind}" for kind, x in role.operations.items())
        say(f"{name:12} {role.warps} warps, {role.instructions} instructions; {work or 'no asynchronous operation'}")
    try:
        attempt(first=0)
    except softsm.errors.Deadlock as why:
        say(f"The load role waits for parity 0 first:\n{why}")


if __name__ == "__main__":
    from read import main

    main(__file__)
