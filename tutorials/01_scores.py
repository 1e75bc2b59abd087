"""# 1. Scores: S = Q K^T by the tensor core

The first half of attention is one matrix product. On Blackwell it involves three parties: the copy engine (TMA) loads
tiles of Q and K into shared memory, one thread issues the product, and the tensor core writes the result to *tensor
memory*, 128 lanes of 512 columns that only the tensor core and a few load and store instructions can reach.

All three are asynchronous. A copy signals its completion through an *mbarrier*: the kernel announces how many bytes to
expect, and a wait on the barrier's phase passes when they have arrived. A product signals through another one, on which
`tcgen05_commit` arrives. The phase of a barrier flips each time it completes, so the n-th use waits for parity n % 2:
a constant 0 is right once, then lets every thread through, then hangs.

A tensor-core instruction multiplies 16 columns of bf16. Head dim 16 is one of them, head dim 64 four, all into the
same accumulator: `use_acc=False` starts it, `True` adds. Wider tiles come in steps; each step reuses the two tiles in
shared memory, so the copy of step n + 1 must wait until the product of step n has *read* them. That is what waiting
for `done` is for, and it is the wait that is easy to forget: with an engine that copies slowly the result is right
anyway.

The copy engine and the tensor core must agree on where rows lie in shared memory: both get the same swizzle
(here by `NVMMASharedLayout.get_default_for`: 32 bytes for 16 columns, 128 bytes for 64). The row pitch the tensor
core assumes is the width of that swizzle, never the width of your tile. Write rows by hand with another pitch, or
read a wide tile through a descriptor made for a narrow one, and even and odd columns change places.

Museum: exhibits 1 and 2 (row pitch), 7 (the coordinate of a copy), 21 (constant parity).
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


@gluon.jit
def scores(q_desc, k_desc, s_ptr, D: gl.constexpr, STEP: gl.constexpr, WAIT: gl.constexpr):
    """S [128, 128] = Q [128, D] K [128, D]^T, STEP columns at a time."""
    q = gl.allocate_shared_memory(q_desc.dtype, [128, STEP], q_desc.layout)
    k = gl.allocate_shared_memory(k_desc.dtype, [128, STEP], k_desc.layout)
    landed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(landed, count=1)
    mbarrier.init(done, count=1)
    s = allocate_tensor_memory(gl.float32, [128, 128], TensorMemoryLayout([128, 128], col_stride=1))
    for i in range(D // STEP):
        mbarrier.expect(landed, 2 * 128 * STEP * 2)
        tma.async_load(q_desc, [0, i * STEP], landed, q)
        tma.async_load(k_desc, [0, i * STEP], landed, k)
        mbarrier.wait(landed, i % 2)
        tcgen05_mma(q, k.permute((1, 0)), s, use_acc=i > 0)
        tcgen05_commit(done)
        if WAIT:
            mbarrier.wait(done, i % 2)  # the next copy overwrites what this product reads
    if not WAIT:
        mbarrier.wait(done, (D // STEP - 1) % 2)
    put(s_ptr, s.load())


def attempt(d: int, step: int, wait: bool = True, order: str = "latest"):
    q, k, s = normal(128, d), normal(128, d, seed=1), torch.full((128, 128), float("nan"))
    report = run(scores, descriptor(q, [128, step]), descriptor(k, [128, step]), s, d, step, wait, order=order)
    return s, q.double() @ k.double().T, report


def check_one_step() -> None:
    s, want, report = attempt(16, 16)
    compare(s, want, 2.0**-20)
    assert not report, str(report)


def check_several_steps() -> None:
    s, want, report = attempt(64, 16)
    compare(s, want, 2.0**-20)
    assert not report, str(report)


def check_a_forgotten_wait_is_found() -> None:
    """softsm finds it even if every copy and product completes at once, and the number is right."""
    s, want, report = attempt(64, 16, wait=False, order="eager")
    compare(s, want, 2.0**-20)
    assert "race" in report.codes(), str(report)


def show() -> None:
    s, want, report = attempt(64, 16, wait=False, order="eager")
    say(f"Without the wait the result is right by luck (relative error {compare(s, want):.1g}); softsm says:")
    say(str(next(iter(report))))


if __name__ == "__main__":
    from read import main

    main(__file__)
