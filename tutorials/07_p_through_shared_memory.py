"""# 7. P through shared memory: wide heads

At head dim 64 the plan of chapter 6 needs 192 of the 512 columns. At head dim 256 O alone needs 256, and at 512 all
of them. P in tensor memory lies over S and costs nothing extra, as long as the product may read its left operand
there; with 64 rows per product (head dim 512 in one CTA) it may not. So the other way must work as well: P as a tile
in shared memory.

The trouble with that way is only ever *where each element goes*. The thread holds a row (chapter 2), the tensor core
reads [128 rows, 64 columns] panels whose 16-byte pieces are permuted: piece c of row r lies at piece c XOR (r % 8).
Write that by hand from a register fragment and every mistake gives numbers near zero. Let the layout do it:
`p_shared.store(p)` converts a register tensor in any layout to the layout of the buffer, which is also the one that
the product uses.

Wide heads also change the tiles. K and V tiles of 128 keys and 256 columns are 64 KB each: with Q of 64 KB that is
all of shared memory and no ring at all. So the tiles are 64 keys long here; S is 64 columns wide.

Budget of this kernel at head dim 256: tensor memory S 64 + O 256 columns, rounded up to 512 by the allocator. Shared
memory Q 64 KB, one K and one V tile of 32 KB each, P 16 KB. The library's kernel has four slots instead of these two
tiles.

Museum: exhibits 18 (wrong swizzle by hand), 25 (the proxy fence), 2 (row pitch and panels).
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
    tcgen05_commit,
    tcgen05_mma,
    tma,
    torch,
)


@gluon.jit
def attention(q_desc, k_desc, v_desc, o_ptr, keys, scale, D: gl.constexpr, BN: gl.constexpr):
    """128 queries, head dim D, keys a multiple of BN."""
    q = gl.allocate_shared_memory(q_desc.dtype, [128, D], q_desc.layout)
    k = gl.allocate_shared_memory(k_desc.dtype, [BN, D], k_desc.layout)
    v = gl.allocate_shared_memory(v_desc.dtype, [BN, D], v_desc.layout)
    p = gl.allocate_shared_memory(gl.bfloat16, [128, BN], gl.NVMMASharedLayout.get_default_for([128, BN], gl.bfloat16))
    landed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_landed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(landed, count=1)
    mbarrier.init(q_landed, count=1)
    mbarrier.init(done, count=1)
    s = allocate_tensor_memory(gl.float32, [128, BN], TensorMemoryLayout([128, BN], col_stride=1))
    o = allocate_tensor_memory(gl.float32, [128, D], TensorMemoryLayout([128, D], col_stride=1))
    LO: gl.constexpr = o.slice(0, 64).get_reg_layout()
    RO: gl.constexpr = gl.SliceLayout(1, LO)
    RS: gl.constexpr = gl.SliceLayout(1, s.get_reg_layout())
    mbarrier.expect(q_landed, 128 * D * 2)
    tma.async_load(q_desc, [0, 0], q_landed, q)
    mbarrier.wait(q_landed, 0)
    m = gl.full([128], -float("inf"), gl.float32, RS)
    l = gl.full([128], 0.0, gl.float32, RS)
    for i in range(keys // BN):
        mbarrier.expect(landed, 2 * BN * D * 2)
        tma.async_load(k_desc, [i * BN, 0], landed, k)
        tma.async_load(v_desc, [i * BN, 0], landed, v)
        mbarrier.wait(landed, i % 2)
        tcgen05_mma(q, k.permute((1, 0)), s, use_acc=False)
        tcgen05_commit(done)
        mbarrier.wait(done, 0)
        x = s.load()
        m_new = gl.maximum(m, gl.max(x, 1) * scale)
        alpha = gl.exp2(m - m_new)
        m = m_new
        weight = gl.exp2(x * scale - m[:, None])
        l = l * alpha + gl.sum(weight, 1)
        if i > 0:
            for c in gl.static_range(D // 64):  # a row of O does not fit into the registers of a thread
                part = o.slice(c * 64, 64)
                part.store(part.load() * gl.convert_layout(alpha, RO)[:, None])
        p.store(weight.to(gl.bfloat16))
        fence_async_shared()
        gl.barrier()
        tcgen05_mma(p, v, o, use_acc=i > 0)
        tcgen05_commit(done)
        mbarrier.wait(done, 1)
    for c in gl.static_range(D // 64):
        y = o.slice(c * 64, 64).load() / gl.convert_layout(l, RO)[:, None]
        row = gl.arange(0, 128, layout=RO)
        column = c * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, LO))
        gl.store(o_ptr + row[:, None] * D + column[None, :], y)


def attempt(d: int, keys: int, order: str = "latest"):
    q, k, v = normal(128, d), normal(keys, d, seed=1), normal(keys, d, seed=2)
    o = torch.full((128, d), float("nan"))
    tiles = [descriptor(q, [128, d]), descriptor(k, [64, d]), descriptor(v, [64, d])]
    report = run(attention, *tiles, o, keys, d**-0.5 * 1.4426950408889634, d, 64, order=order)
    return o, softmax(q, k) @ v.double(), report


def place(row: int, column: int) -> int:
    """Byte offset of P[row, column] in a [128, 64] bf16 tile with the 128-byte swizzle, as the tensor core reads it."""
    piece, inside = divmod(column * 2, 16)
    return row * 128 + (piece ^ row % 8) * 16 + inside


def check_wide_head() -> None:
    o, want, report = attempt(256, 192)
    compare(o, want)
    assert not report, str(report)


def check_narrow_head() -> None:
    o, want, report = attempt(64, 128, order="random")
    compare(o, want)
    assert not report, str(report)


def check_the_swizzle_is_a_permutation() -> None:
    places = {place(row, column) for row in range(128) for column in range(64)}
    assert places == set(range(0, 128 * 128, 2))


def show() -> None:
    o, want, _ = attempt(256, 192)
    say(f"head dim 256: relative error {compare(o, want):.2g}")
    say(", ".join(f"P[{row}, 8] lies at byte {place(row, 8)}" for row in (0, 1, 3, 8)))


if __name__ == "__main__":
    from read import main

    main(__file__)
