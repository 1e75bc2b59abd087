"""# 9. Two CTAs: head dim 512

At head dim 512 O of 128 rows is 128 lanes by 512 columns: all of tensor memory, and S has no place. Computing Q K^T
twice, once per half of the head dim, would be one way out, and a bad one. There are two good ones.

*64 rows per CTA.* A product of 64 rows leaves half of each 32-lane group unused, and the two halves of O fit side by
side into 256 columns. The library does this for decode, varlen, paged and split problems
(`src/dsv4/fmha/kernels/sm100/forward.py`).

*A pair of CTAs.* Two CTAs of a cluster, on two SMs, issue one product together (`cta_group::2`): 128 rows, 64 in each
CTA. Each holds in its tensor memory the 64 rows of its own, columns folded in two over the 128 lanes, so O takes 256
columns and S 64 of each. The right operand is split: each CTA loads *half* of K (half of the keys) and half of V
(half of the columns) and both tensor cores read both halves. Every byte of K and V is loaded once per pair instead of
once per CTA, which is the purpose of pairs. The library launches the pair for dense problems with at least 128 packed
query rows (`forward_pair.py` in the same folder; `pairs` in its `entry.py` has the exact rule).

One CTA, the leader, issues. The barriers follow from that: copies of both CTAs count bytes on the *leader's* barrier,
since it is the leader that must know when all is there. So its expected bytes are those of both, each CTA announcing
its own: if one announces the bytes of both, the barrier waits forever. The product's barrier is signalled in both
CTAs.

P goes through shared memory, each CTA its 64 rows; the fence is needed in each, and a cluster barrier before the
leader issues, since the product that the leader issues reads the P of both.

The kernel here does one tile of 128 keys. Q K^T runs over 8 steps of 64 columns, P V over two halves of O.

Museum: exhibits 28 (bytes counted twice in a pair), 6 (a CTA ends while its peer still reads it).
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
    run,
    say,
    softmax,
    tcgen05_mma,
    tma,
    torch,
)

ROWS, COLUMNS = ((1, 0),), ((0, 1),)  # the dimension that the second CTA continues
S_LAYOUT = TensorMemoryLayout([64, 128], col_stride=1, cga_layout=ROWS, two_ctas=True)
O_LAYOUT = TensorMemoryLayout([64, 256], col_stride=1, cga_layout=ROWS, two_ctas=True)
P_LAYOUT = gl.NVMMASharedLayout.get_default_for([128, 128], gl.bfloat16, cga_layout=ROWS)


@gluon.jit
def attention(q_desc, k_desc, v_desc, o_ptr, scale, SL: gl.constexpr, OL: gl.constexpr, PL: gl.constexpr):
    """128 queries and 128 keys of head dim 512, by a pair."""
    q = gl.allocate_shared_memory(q_desc.dtype, [128, 64], q_desc.layout)
    k = gl.allocate_shared_memory(k_desc.dtype, [128, 64], k_desc.layout)
    v = gl.allocate_shared_memory(v_desc.dtype, [128, 256], v_desc.layout)
    p = gl.allocate_shared_memory(gl.bfloat16, [128, 128], PL)
    landed = mbarrier.allocate_mbarrier(two_ctas=True)
    done = mbarrier.allocate_mbarrier()
    mbarrier.init(landed, count=1)
    mbarrier.init(done, count=1)
    s = allocate_tensor_memory(gl.float32, [128, 128], SL)
    o = allocate_tensor_memory(gl.float32, [2, 128, 256], OL)
    L: gl.constexpr = o.index(0).get_reg_layout()
    phase = 0
    for i in range(8):
        mbarrier.expect(landed, q_desc.nbytes_per_cta + k_desc.nbytes_per_cta)
        tma.async_load(q_desc, [0, i * 64], landed, q)
        tma.async_load(k_desc, [0, i * 64], landed, k)
        mbarrier.wait(landed, phase)
        tcgen05_mma(q, k.permute((1, 0)), s, use_acc=i > 0, mbarriers=[done])
        mbarrier.wait(done, phase)
        phase ^= 1
    x = s.load()
    m = gl.max(x, 1) * scale
    weight = gl.exp2(x * scale - m[:, None])
    l = gl.sum(weight, 1)
    p.store(weight.to(gl.bfloat16))
    fence_async_shared(cluster=True)
    gl.barrier(cluster=True)
    for half in gl.static_range(2):
        mbarrier.expect(landed, v_desc.nbytes_per_cta)
        tma.async_load(v_desc, [0, half * 256], landed, v)
        mbarrier.wait(landed, phase)
        tcgen05_mma(p, v, o.index(half), use_acc=False, mbarriers=[done])
        mbarrier.wait(done, phase)
        phase ^= 1
        y = o.index(half).load()
        y = y / gl.convert_layout(l, gl.SliceLayout(1, L))[:, None]
        row = gl.arange(0, 128, layout=gl.SliceLayout(1, L))
        column = half * 256 + gl.arange(0, 256, layout=gl.SliceLayout(0, L))
        gl.store(o_ptr + row[:, None] * 512 + column[None, :], y)


def attempt(order: str = "latest"):
    q, k, v = (normal(128, 512, seed=i) for i in range(3))
    o = torch.full((128, 512), float("nan"))
    tiles = [
        descriptor(q, [128, 64], cga_layout=ROWS),
        descriptor(k, [128, 64], cga_layout=ROWS),
        descriptor(v, [128, 256], cga_layout=COLUMNS),
    ]
    report = run(
        attention, *tiles, o, 512**-0.5 * 1.4426950408889634, S_LAYOUT, O_LAYOUT, P_LAYOUT, order=order, num_ctas=2
    )
    return o, softmax(q, k) @ v.double(), report


def check_pair() -> None:
    for order in ("eager", "latest", "random"):
        o, want, report = attempt(order)
        compare(o, want)
        assert not report, str(report)


def show() -> None:
    o, want, report = attempt()
    say(f"head dim 512 by a pair of CTAs: relative error {compare(o, want):.2g}; {report}")


if __name__ == "__main__":
    from read import main

    main(__file__)
