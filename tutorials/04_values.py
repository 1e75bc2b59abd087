"""# 4. Values: O = P V, with P from tensor memory and from shared memory

The second product has P as its left operand. The tensor core reads that operand from shared memory (the SS form) or
from tensor memory (the TS form); the right one, V, is always in shared memory.

TS is the short way: softmax has just written P into tensor memory. The operand is *packed*: two bf16 per 32-bit
column, low half first. Store the fp32 number 1.0 there and the tensor core sees 0.0 and 1.0 side by side, so a sum of
sixteen ones gives 8, half of the right result, without an error. In Gluon the type of the tensor-memory view
is the type of what is stored, so convert first and store through a bf16 view.

SS needs P in shared memory, in the layout that the tensor core reads. An ordinary store writes through the *generic
proxy*, the tensor core reads through the *async proxy*, and neither sees what the other wrote before a
`fence.proxy.async`; a barrier alone is not enough. Triton puts that fence in by itself where it sees the
store and the product in one piece of code. Between warps of different roles (chapter 10) it does not, and in PTX
nothing does.

Both forms may follow Q K^T in one kernel, in any order: PTX allows the mix, and the kernel below does it. Where mixing
seems to crash a kernel, look first at the descriptor of A, which only the SS form uses, and at whether the kernel ends
before its products do; softsm names both (exhibits 5 and 6).

V needs no transposing pass: its tile is [keys, D], read as a right operand whose columns run fastest, which is what the
descriptor's major-ness bit is for.

Museum: exhibits 4 (fp32 cells read as bf16), 5 (SS after TS), 17 (P read from S's columns), 25 (missing proxy fence).
"""

from ladder import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    compare,
    descriptor,
    fence_async_shared,
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
def both_ways(q_desc, k_desc, v_desc, ts_ptr, ss_ptr, scale, D: gl.constexpr, PACKED: gl.constexpr):
    """O = softmax(Q K^T) V twice: P as a tensor-memory operand, then as a shared-memory one."""
    q = gl.allocate_shared_memory(q_desc.dtype, [128, D], q_desc.layout)
    k = gl.allocate_shared_memory(k_desc.dtype, [128, D], k_desc.layout)
    v = gl.allocate_shared_memory(v_desc.dtype, [128, D], v_desc.layout)
    PL: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, 128], gl.bfloat16)
    p_shared = gl.allocate_shared_memory(gl.bfloat16, [128, 128], PL)
    landed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(landed, count=1)
    mbarrier.init(done, count=1)
    s = allocate_tensor_memory(gl.float32, [128, 128], TensorMemoryLayout([128, 128], col_stride=1))
    o = allocate_tensor_memory(gl.float32, [2, 128, D], TensorMemoryLayout([128, D], col_stride=1))
    mbarrier.expect(landed, 3 * 128 * D * 2)
    tma.async_load(q_desc, [0, 0], landed, q)
    tma.async_load(k_desc, [0, 0], landed, k)
    tma.async_load(v_desc, [0, 0], landed, v)
    mbarrier.wait(landed, 0)
    tcgen05_mma(q, k.permute((1, 0)), s, use_acc=False)
    tcgen05_commit(done)
    mbarrier.wait(done, 0)

    x = s.load()
    p = gl.exp2(x * scale - (gl.max(x, 1) * scale)[:, None])
    p = (p / gl.sum(p, 1)[:, None]).to(gl.bfloat16)
    p_tensor = s.reinterpret(gl.bfloat16, [128, 256], TensorMemoryLayout([128, 128], col_stride=1)).slice(0, 128)
    if PACKED:
        p_tensor.store(p)
    else:
        s.store(p.to(gl.float32))  # one number per column, which the tensor core reads as two
    p_shared.store(p)
    fence_async_shared()  # ordinary stores -> tensor-core reads
    gl.barrier()
    tcgen05_mma(p_tensor, v, o.index(0), use_acc=False)
    tcgen05_mma(p_shared, v, o.index(1), use_acc=False)
    tcgen05_commit(done)
    mbarrier.wait(done, 1)
    put(ts_ptr, o.index(0).load())
    put(ss_ptr, o.index(1).load())


def attempt(packed: bool = True):
    q, k, v = (normal(128, 64, seed=i) for i in range(3))
    ts, ss = torch.full((128, 64), float("nan")), torch.full((128, 64), float("nan"))
    tiles = [descriptor(x, [128, 64]) for x in (q, k, v)]
    report = run(both_ways, *tiles, ts, ss, 64**-0.5 * 1.4426950408889634, 64, packed)
    return ts, ss, softmax(q, k) @ v.double(), report


def check_both_forms() -> None:
    ts, ss, want, report = attempt()
    compare(ts, want)
    assert torch.equal(ts, ss) and not report, str(report)


def check_unpacked_p() -> None:
    """SS is right in the same kernel; TS multiplies the low halves of fp32 numbers as if they were bf16."""
    ts, ss, want, report = attempt(packed=False)
    compare(ss, want)
    assert not ((ts - want).norm() / want.norm()).item() < 0.1
    assert "type" in report.codes(), str(report)


def show() -> None:
    ts, ss, want, _ = attempt()
    say(f"TS: relative error {compare(ts, want):.2g}; SS gives the same bits: {torch.equal(ts, ss)}.")
    ts, ss, want, report = attempt(packed=False)
    wrong = ((ts - want).norm() / want.norm()).item()
    say(f"P stored as fp32: relative error {wrong:.2g} by TS, {compare(ss, want):.2g} by SS; softsm says:")
    say(str(next(iter(report))))


if __name__ == "__main__":
    from read import main

    main(__file__)
