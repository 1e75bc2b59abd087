"""# 12. Hopper: attention with P in registers

On Blackwell P goes through tensor memory or shared memory (chapter 4). On Hopper it goes nowhere. The accumulator of
Q K^T holds two neighbouring columns of a row in each thread, and the left operand of a product may come from
registers, in the very same arrangement: round S to bf16 and it *is* the operand of P V. `gl.DotOperandLayout` names
that arrangement, and `convert_layout` to it costs no instruction. Only the conversion to bf16 does.

The price is registers. With 64 rows and 128 keys S takes 64 registers per thread, P 32 while it is in use, and O as
many as head dim / 2: 32 here, 256 at head dim 512, which is more than a thread has. That is why the library's kernel
for wide heads (`src/dsv4/fmha/kernels/sm90/forward_d512.py`) gives each of two warpgroups half of O's columns and
sends P through shared memory after all.

The loop is the online softmax of chapter 6. O is in registers, so rescaling it is a multiplication, not a round trip
through tensor memory; that is the one thing that Hopper makes easier.

The next tiles are copied at the end of a turn, so that they are on their way when the next turn begins. P V must be
complete by then, for it reads V. With `WAIT` = False the copy is issued one line too early; softsm names the copy and
the product.

Museum: exhibits 4 (fp32 cells read as bf16; here a type error, since registers have a type), 14 (a box outside).
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
    softmax,
    tma,
    torch,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def next_tiles(k_desc, v_desc, landed, k, v, i, tiles, D: gl.constexpr):
    if i < tiles:
        mbarrier.expect(landed, 2 * 128 * D * 2)
        tma.async_load(k_desc, [i * 128, 0], landed, k)
        tma.async_load(v_desc, [i * 128, 0], landed, v)


@gluon.jit
def attention(q_desc, k_desc, v_desc, o_ptr, scale, tiles, D: gl.constexpr, WAIT: gl.constexpr):
    """O [64, D] over `tiles` tiles of 128 keys; scale includes log2 e."""
    q = gl.allocate_shared_memory(q_desc.dtype, [64, D], q_desc.layout)
    k = gl.allocate_shared_memory(k_desc.dtype, [128, D], k_desc.layout)
    v = gl.allocate_shared_memory(v_desc.dtype, [128, D], v_desc.layout)
    landed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(landed, count=1)
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    PL: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    m = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SL))
    l = gl.zeros([64], gl.float32, gl.SliceLayout(1, SL))
    zero = gl.zeros([64, 128], gl.float32, SL)
    o = gl.zeros([64, D], gl.float32, OL)
    mbarrier.expect(landed, (64 + 2 * 128) * D * 2)
    tma.async_load(q_desc, [0, 0], landed, q)
    tma.async_load(k_desc, [0, 0], landed, k)
    tma.async_load(v_desc, [0, 0], landed, v)
    for i in range(tiles):
        mbarrier.wait(landed, i % 2)
        s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
        new = gl.maximum(m, gl.max(s, 1) * scale)
        p = gl.exp2(s * scale - new[:, None])
        rescale = gl.exp2(m - new)
        l = l * rescale + gl.sum(p, 1)
        m = new
        o = o * gl.convert_layout(rescale, gl.SliceLayout(1, OL))[:, None]
        sum_of_values = warpgroup_mma(gl.convert_layout(p.to(gl.bfloat16), PL), v, o, is_async=True)
        if not WAIT:
            next_tiles(k_desc, v_desc, landed, k, v, i + 1, tiles, D)
        o = warpgroup_mma_wait(num_outstanding=0, deps=(sum_of_values,))
        if WAIT:
            next_tiles(k_desc, v_desc, landed, k, v, i + 1, tiles, D)
    put(o_ptr, o / gl.convert_layout(l, gl.SliceLayout(1, OL))[:, None])


def attempt(wait: bool = True, order: str = "latest"):
    q, k, v = normal(64, 64), normal(384, 64, seed=1), normal(384, 64, seed=2)
    o = torch.full((64, 64), float("nan"))
    tiles = descriptor(q, [64, 64]), descriptor(k, [128, 64]), descriptor(v, [128, 64])
    report = run(attention, *tiles, o, 64**-0.5 * 1.4426950408889634, 3, 64, wait, order=order, arch="sm_90a")
    return o, softmax(q, k) @ v.double(), report


def check_three_tiles() -> None:
    for order in ("eager", "latest", "random"):
        o, want, report = attempt(order=order)
        compare(o, want)
        assert not report, str(report)


def check_a_copy_of_v_too_early_is_found() -> None:
    o, want, report = attempt(wait=False, order="eager")
    compare(o, want)
    assert "race" in report.codes(), str(report)


def show() -> None:
    o, want, _ = attempt()
    say(f"Three tiles of 128 keys, P in registers: relative error {compare(o, want):.2g}. V copied one wait too early:")
    say(str(next(iter(attempt(wait=False, order="eager")[2]))))


if __name__ == "__main__":
    from read import main

    main(__file__)
