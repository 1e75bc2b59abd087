"""# 5. One tile: attention complete

Chapters 1, 3 and 4 in one kernel, for 128 queries and 128 keys, with the two things that make it attention as a
library needs it: the division by the row sum is done at the end, on O, and the logarithm of the row's denominator
(LSE) is returned, so that results over different keys can be merged later (chapter 8).

Tensor memory: S in columns 0 to 127, P over S's first 64, O in the 64 columns after it. The plan is part of the design:
512 columns are all there is, and an allocation that does not fit is not an error of the compiler, it is an empty
kernel.

The last wait is the one that is easy to lose. O may be read when the *last* P V product is complete, not when it has
been issued. A kernel that normalises O while that product is under way is right whenever the product happens to be
faster, which on a quiet machine is always.

P is not normalised now: its largest element is 1, its sum is what l is. The sum is taken before rounding to bf16, in
fp32; the error of rounding P is then the only one that matters, about 2^-9 of a weight.

Museum: exhibits 6 (ending while a product is in flight), 9 (P not stored yet), 10 (O touched too early).
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
    softmax,
    tcgen05_commit,
    tcgen05_mma,
    tma,
    torch,
)


@gluon.jit
def attention(q_desc, k_desc, v_desc, o_ptr, lse_ptr, scale, D: gl.constexpr, WAIT: gl.constexpr):
    q = gl.allocate_shared_memory(q_desc.dtype, [128, D], q_desc.layout)
    k = gl.allocate_shared_memory(k_desc.dtype, [128, D], k_desc.layout)
    v = gl.allocate_shared_memory(v_desc.dtype, [128, D], v_desc.layout)
    landed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())  # Q and K; V
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(landed.index(0), count=1)
    mbarrier.init(landed.index(1), count=1)
    mbarrier.init(done, count=1)
    s = allocate_tensor_memory(gl.float32, [128, 128], TensorMemoryLayout([128, 128], col_stride=1))
    o = allocate_tensor_memory(gl.float32, [128, D], TensorMemoryLayout([128, D], col_stride=1))
    p = s.reinterpret(gl.bfloat16, [128, 256], TensorMemoryLayout([128, 128], col_stride=1)).slice(0, 128)

    mbarrier.expect(landed.index(0), 2 * 128 * D * 2)
    tma.async_load(q_desc, [0, 0], landed.index(0), q)
    tma.async_load(k_desc, [0, 0], landed.index(0), k)
    mbarrier.expect(landed.index(1), 128 * D * 2)
    tma.async_load(v_desc, [0, 0], landed.index(1), v)  # not needed before P is there
    mbarrier.wait(landed.index(0), 0)
    tcgen05_mma(q, k.permute((1, 0)), s, use_acc=False)
    tcgen05_commit(done)
    mbarrier.wait(done, 0)

    x = s.load()
    m = gl.max(x, 1) * scale
    weight = gl.exp2(x * scale - m[:, None])
    l = gl.sum(weight, 1)
    p.store(weight.to(gl.bfloat16))
    gl.barrier()  # all four warps have stored their rows of P
    mbarrier.wait(landed.index(1), 0)
    tcgen05_mma(p, v, o, use_acc=False)
    tcgen05_commit(done)
    if WAIT:
        mbarrier.wait(done, 1)

    y = o.load()
    L: gl.constexpr = gl.SliceLayout(1, y.type.layout)
    put(o_ptr, y / gl.convert_layout(l, L)[:, None])
    row = gl.arange(0, 128, layout=l.type.layout)
    gl.store(lse_ptr + row, (m + gl.log2(l)) * 0.6931471805599453)
    if not WAIT:
        mbarrier.wait(done, 1)


def attempt(wait: bool = True, order: str = "latest"):
    q, k, v = (normal(128, 64, seed=i) for i in range(3))
    o, lse = torch.full((128, 64), float("nan")), torch.full((128,), float("nan"))
    tiles = [descriptor(x, [128, 64]) for x in (q, k, v)]
    report = run(attention, *tiles, o, lse, 64**-0.5 * 1.4426950408889634, 64, wait, order=order)
    want_lse = torch.logsumexp(q.double() @ k.double().T / 8, -1)
    return (o, lse), (softmax(q, k) @ v.double(), want_lse), report


def check_result() -> None:
    (o, lse), (want, want_lse), report = attempt()
    compare(o, want)
    compare(lse, want_lse, 2.0**-18)
    assert not report, str(report)


def check_reading_o_too_early_is_found() -> None:
    """The eager order gives the right number, and the race is reported all the same."""
    (o, _), (want, _), report = attempt(wait=False, order="eager")
    compare(o, want)
    assert "race" in report.codes(), str(report)


def show() -> None:
    (o, lse), (want, want_lse), _ = attempt()
    say(f"O: relative error {compare(o, want):.2g}, LSE: {compare(lse, want_lse):.2g}. Reading O one wait too early:")
    say(str(next(iter(attempt(wait=False, order="eager")[2]))))


if __name__ == "__main__":
    from read import main

    main(__file__)
