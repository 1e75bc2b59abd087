"""Gluon on Blackwell: tcgen05 with operands in shared and tensor memory, block scales, gather4, CTA pairs."""

from __future__ import annotations

import pytest
import torch
from bounds import assert_attention, assert_matmul
from gluon_names import (
    V36,
    TensorMemoryLayout,
    TensorMemoryScalesLayout,
    allocate_tensor_memory,
    barriers,
    blackwell_tma,
    descriptor,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    put,
    tcgen05_commit,
    tcgen05_mma,
    tcgen05_mma_scaled,
    tma,
    tma_load,
    tma_store,
    tmem_load,
    tmem_reinterpret,
)
from test_matmul import scaled_operand

needs_39 = pytest.mark.skipif(V36, reason="written with Triton 3.9's names")


@gluon.jit
def mma_shared(a_desc, b_desc, c_desc, K, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, BYTES: gl.constexpr):
    """C = A B^T, both operands in shared memory, the accumulator in tensor memory."""
    a = gl.allocate_shared_memory(a_desc.dtype, [BM, BK], a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, [BN, BK], b_desc.layout)
    c = gl.allocate_shared_memory(c_desc.dtype, [BM, BN], c_desc.layout)
    loaded = barriers(1)
    done = barriers(1)
    mbarrier.init(loaded.index(0), count=1)
    mbarrier.init(done.index(0), count=1)
    acc = allocate_tensor_memory(gl.float32, [BM, BN], TensorMemoryLayout([BM, BN], col_stride=1))
    phase = 0
    use = False
    for k in range(0, K, BK):
        mbarrier.expect(loaded.index(0), (BM + BN) * BK * BYTES)
        tma_load(a_desc, [0, k], loaded.index(0), a)
        tma_load(b_desc, [0, k], loaded.index(0), b)
        mbarrier.wait(loaded.index(0), phase)
        tcgen05_mma(a, b.permute((1, 0)), acc, use_acc=use)
        tcgen05_commit(done.index(0))
        mbarrier.wait(done.index(0), phase)
        phase ^= 1
        use = True
    mbarrier.invalidate(loaded.index(0))
    mbarrier.invalidate(done.index(0))
    c.store(tmem_load(acc).to(c_desc.dtype))
    fence_async_shared()
    tma_store(c_desc, [0, 0], c)
    tma.store_wait(0)


def check_mma_from_shared_memory(dtype, BM, BN, BK):
    a, b, c = torch.randn(BM, 128).to(dtype), torch.randn(BN, 128).to(dtype), torch.zeros(BM, BN).to(dtype)
    mma_shared[(1,)](descriptor(a, [BM, BK]), descriptor(b, [BN, BK]), descriptor(c, [BM, BN]), 128, BM, BN, BK, 2)
    assert_matmul(c, a, b.t())


@pytest.mark.parametrize(
    "dtype, BM, BN, BK", [(torch.bfloat16, 128, 128, 64), (torch.float16, 64, 64, 32), (torch.bfloat16, 128, 256, 16)]
)
def test_mma_from_shared_memory(sm100, dtype, BM, BN, BK):
    check_mma_from_shared_memory(dtype, BM, BN, BK)


def test_mma_from_shared_memory_in_every_order(sm100, order):
    check_mma_from_shared_memory(torch.bfloat16, 128, 128, 64)


def test_mma_fp8_and_tf32(sm100):
    a, b, c = torch.randn(128, 128), torch.randn(128, 128), torch.zeros(128, 128).half()
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    mma_shared[(1,)](
        descriptor(a8, [128, 64]), descriptor(b8, [128, 64]), descriptor(c, [128, 128]), 128, 128, 128, 64, 1
    )
    assert_matmul(c, a8.float(), b8.float().t())
    mma_shared[(1,)](
        descriptor(a, [128, 32]), descriptor(b, [128, 32]), descriptor(c, [128, 128]), 128, 128, 128, 32, 4
    )
    assert_matmul(c, a, b.t(), extra=2 * 2.0**-10)


@gluon.jit
def attention_tile(
    q_desc, k_desc, v_desc, out_ptr, scale, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, P_LAYOUT: gl.constexpr
):
    """S = Q K^T from shared memory; P is written over S in tensor memory and is the left operand of P V."""
    q = gl.allocate_shared_memory(q_desc.dtype, [BM, D], q_desc.layout)
    k = gl.allocate_shared_memory(k_desc.dtype, [BN, D], k_desc.layout)
    v = gl.allocate_shared_memory(v_desc.dtype, [BN, D], v_desc.layout)
    loaded = barriers(1)
    done = barriers(1)
    mbarrier.init(loaded.index(0), count=1)
    mbarrier.init(done.index(0), count=1)
    mbarrier.expect(loaded.index(0), (BM * D + 2 * BN * D) * 2)
    tma_load(q_desc, [0, 0], loaded.index(0), q)
    tma_load(k_desc, [0, 0], loaded.index(0), k)
    tma_load(v_desc, [0, 0], loaded.index(0), v)
    s = allocate_tensor_memory(gl.float32, [BM, BN], TensorMemoryLayout([BM, BN], col_stride=1))
    o = allocate_tensor_memory(gl.float32, [BM, D], TensorMemoryLayout([BM, D], col_stride=1))
    mbarrier.wait(loaded.index(0), 0)
    tcgen05_mma(q, k.permute((1, 0)), s, use_acc=False, mbarriers=[done.index(0)])
    mbarrier.wait(done.index(0), 0)
    scores = tmem_load(s) * (scale * 1.4426950408889634)
    p = gl.exp2(scores - gl.max(scores, 1)[:, None])
    total = gl.sum(p, 1)
    in_tmem = tmem_reinterpret(s, q_desc.dtype, [BM, 2 * BN], P_LAYOUT).slice(0, BN)
    in_tmem.store(p.to(q_desc.dtype))
    tcgen05_mma(in_tmem, v, o, use_acc=False, mbarriers=[done.index(0)])
    mbarrier.wait(done.index(0), 1)
    result = tmem_load(o)
    put(out_ptr, (result / gl.convert_layout(total, gl.SliceLayout(1, result.type.layout))[:, None]).to(q_desc.dtype))


def check_mma_with_the_left_operand_in_tensor_memory():
    q, k, v = (torch.randn(128, 64).half() for _ in range(3))
    out = torch.zeros(128, 64).half()
    layout = TensorMemoryLayout((128, 128), col_stride=1)
    attention_tile[(1,)](*(descriptor(t, [128, 64]) for t in (q, k, v)), out, 0.125, 128, 128, 64, layout)
    assert_attention(out, q, k, v, 0.125)


def test_mma_with_the_left_operand_in_tensor_memory(sm100):
    check_mma_with_the_left_operand_in_tensor_memory()


def test_mma_with_the_left_operand_in_tensor_memory_in_every_order(sm100, order):
    check_mma_with_the_left_operand_in_tensor_memory()


@gluon.jit
def mma_scaled(a_desc, b_desc, as_ptr, bs_ptr, out_ptr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
               PACKED: gl.constexpr, VEC: gl.constexpr, FORMAT: gl.constexpr, scale_dtype: gl.constexpr):  # fmt: skip
    a = gl.allocate_shared_memory(a_desc.dtype, [BM, BK // PACKED], a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, [BN, BK // PACKED], b_desc.layout)
    loaded = barriers(1)
    done = barriers(1)
    mbarrier.init(loaded.index(0), count=1)
    mbarrier.init(done.index(0), count=1)
    mbarrier.expect(loaded.index(0), (BM + BN) * BK // PACKED)
    tma_load(a_desc, [0, 0], loaded.index(0), a)
    tma_load(b_desc, [0, 0], loaded.index(0), b)
    sa = allocate_tensor_memory(scale_dtype, [BM, BK // VEC], TensorMemoryScalesLayout())
    sb = allocate_tensor_memory(scale_dtype, [BN, BK // VEC], TensorMemoryScalesLayout())
    la: gl.constexpr = sa.get_reg_layout()
    lb: gl.constexpr = sb.get_reg_layout()
    ra = gl.arange(0, BM, layout=gl.SliceLayout(1, la))
    ca = gl.arange(0, BK // VEC, layout=gl.SliceLayout(0, la))
    rb = gl.arange(0, BN, layout=gl.SliceLayout(1, lb))
    cb = gl.arange(0, BK // VEC, layout=gl.SliceLayout(0, lb))
    sa.store(gl.load(as_ptr + ra[:, None] * (BK // VEC) + ca[None, :]))
    sb.store(gl.load(bs_ptr + rb[:, None] * (BK // VEC) + cb[None, :]))
    acc = allocate_tensor_memory(gl.float32, [BM, BN], TensorMemoryLayout([BM, BN], col_stride=1))
    mbarrier.wait(loaded.index(0), 0)
    tcgen05_mma_scaled(a, b.permute((1, 0)), acc, sa, sb, FORMAT, FORMAT, use_acc=False)
    tcgen05_commit(done.index(0))
    mbarrier.wait(done.index(0), 0)
    put(out_ptr, tmem_load(acc))


@needs_39
@pytest.mark.parametrize("form, vec", [("e2m1", 32), ("e2m1", 16), ("e4m3", 32)])
def test_mma_with_block_scales(sm100, form, vec):
    BM, BN, BK = 128, 128, 128
    a, sa, left = scaled_operand(BM, BK, form, vec)
    b, sb, right = scaled_operand(BN, BK, form, vec)
    packed = 2 if form == "e2m1" else 1
    out = torch.zeros(BM, BN)
    mma_scaled[(1,)](descriptor(a, [BM, BK // packed]), descriptor(b, [BN, BK // packed]), sa, sb, out, BM, BN, BK,
                     packed, vec, form, gl.float8e4nv if vec == 16 else gl.uint8)  # fmt: skip
    assert_matmul(out, left, right.t())


@gluon.jit
def gather_rows(desc, index_ptr, out_ptr, column, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    index = gl.load(index_ptr + gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])))
    L: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, 4], [32, 1], [1, gl.num_warps()], [1, 0]))
    tile = gl.allocate_shared_memory(desc.dtype, [ROWS, COLUMNS], desc.layout)
    bar = barriers(1)
    mbarrier.init(bar.index(0), count=1)
    mbarrier.expect(bar.index(0), ROWS * COLUMNS * 2)
    blackwell_tma.async_gather(desc, gl.convert_layout(index, L), column, bar.index(0), tile)
    mbarrier.wait(bar.index(0), 0)
    mbarrier.invalidate(bar.index(0))
    put(out_ptr, tile.load(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])))


def check_gather4():
    table = torch.randn(300, 128).bfloat16()
    index = torch.randint(0, 300, (64,), dtype=torch.int32)
    index[5] = 300  # one past the end: zeros
    out = torch.ones(64, 64).bfloat16()
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    gather_rows[(1,)](descriptor(table, [1, 64], layout), index, out, 64, 64, 64)
    expected = torch.cat([table, torch.zeros(1, 128).bfloat16()])[index.long(), 64:]
    assert torch.equal(out, expected)


def test_gather4(sm100):
    check_gather4()


def test_gather4_in_every_order(sm100, order):
    check_gather4()


@gluon.jit
def pair_matmul(a_desc, b_desc, out_ptr, K, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, ACC: gl.constexpr):
    """Two CTAs share one product: each holds half of the rows of A and of B."""
    a = gl.allocate_shared_memory(a_desc.dtype, [BM, BK], a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, [BN, BK], b_desc.layout)
    loaded = mbarrier.allocate_mbarrier(two_ctas=True)
    done = mbarrier.allocate_mbarrier()
    mbarrier.init(loaded, count=1)
    mbarrier.init(done, count=1)
    acc = allocate_tensor_memory(gl.float32, [BM, BN], ACC)
    phase = 0
    use = False
    for k in range(0, K, BK):
        mbarrier.expect(loaded, a_desc.nbytes_per_cta + b_desc.nbytes_per_cta)
        tma_load(a_desc, [0, k], loaded, a)
        tma_load(b_desc, [0, k], loaded, b)
        mbarrier.wait(loaded, phase)
        tcgen05_mma(a, b.permute((1, 0)), acc, use_acc=use, mbarriers=[done])
        mbarrier.wait(done, phase)
        phase ^= 1
        use = True
    put(out_ptr, tmem_load(acc))


def check_pair_of_ctas(BM):
    BN, BK, K = 128, 64, 128
    rows = ((1, 0),)  # the second CTA continues the rows
    a, b, out = torch.randn(BM, K).half(), torch.randn(BN, K).half(), torch.zeros(BM, BN)
    layouts = [gl.NVMMASharedLayout.get_default_for([n, BK], gl.float16, cga_layout=rows) for n in (BM, BN)]
    acc = TensorMemoryLayout([BM // 2, BN], col_stride=1, cga_layout=rows, two_ctas=True)
    pair_matmul[(1,)](
        descriptor(a, [BM, BK], layouts[0]), descriptor(b, [BN, BK], layouts[1]), out, K, BM, BN, BK, acc, num_ctas=2
    )
    assert_matmul(out, a, b.t())


@needs_39
@pytest.mark.parametrize("BM", [128, 256])
def test_pair_of_ctas(sm100, BM):
    check_pair_of_ctas(BM)


@needs_39
def test_pair_of_ctas_in_every_order(sm100, order):
    check_pair_of_ctas(256)


# -- warp specialisation: loader, MMA and epilogue partitions ---------------------------------------------------


@gluon.jit
def load_partition(a_desc, b_desc, tiles, columns, K, a, b, ready, free, BM: gl.constexpr, BN: gl.constexpr,
                   BK: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    i = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        for k in range(0, K, BK):
            stage = i % STAGES
            mbarrier.wait(free.index(stage), (i // STAGES & 1) ^ 1)
            mbarrier.expect(ready.index(stage), (BM + BN) * BK * 2)
            tma_load(a_desc, [tile // columns * BM, k], ready.index(stage), a.index(stage))
            tma_load(b_desc, [tile % columns * BN, k], ready.index(stage), b.index(stage))
            i += 1


@gluon.jit
def mma_partition(tiles, K, a, b, acc, ready, free, full, empty, BK: gl.constexpr, STAGES: gl.constexpr):
    i = 0
    t = 0
    for _ in range(gl.program_id(0), tiles, gl.num_programs(0)):
        mbarrier.wait(empty.index(t % 2), (t // 2 & 1) ^ 1)
        use = False
        for _k in range(0, K, BK):
            stage = i % STAGES
            mbarrier.wait(ready.index(stage), i // STAGES & 1)
            tcgen05_mma(a.index(stage), b.index(stage).permute((1, 0)), acc.index(t % 2), use_acc=use)
            tcgen05_commit(free.index(stage))
            use = True
            i += 1
        tcgen05_commit(full.index(t % 2))
        t += 1


@gluon.jit
def epilogue_partition(out_ptr, tiles, columns, N, acc, full, empty, BM: gl.constexpr, BN: gl.constexpr):
    t = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        mbarrier.wait(full.index(t % 2), t // 2 & 1)
        x = tmem_load(acc.index(t % 2))
        mbarrier.arrive(empty.index(t % 2), count=1)
        L: gl.constexpr = x.type.layout
        rows = tile // columns * BM + gl.arange(0, BM, layout=gl.SliceLayout(1, L))
        cols = tile % columns * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, L))
        gl.store(out_ptr + rows[:, None] * N + cols[None, :], x)
        t += 1


@gluon.jit
def specialised_matmul(
    a_desc, b_desc, out_ptr, M, N, K, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr
):
    """A persistent kernel with two accumulators: the epilogue of one tile overlaps with the products of the next."""
    a = gl.allocate_shared_memory(a_desc.dtype, [STAGES, BM, BK], a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, [STAGES, BN, BK], b_desc.layout)
    acc = allocate_tensor_memory(gl.float32, [2, BM, BN], TensorMemoryLayout([BM, BN], col_stride=1))
    ready = barriers(STAGES)
    free = barriers(STAGES)
    full = barriers(2)
    empty = barriers(2)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    columns = gl.cdiv(N, BN)
    tiles = gl.cdiv(M, BM) * columns
    gl.warp_specialize(
        [
            (epilogue_partition, (out_ptr, tiles, columns, N, acc, full, empty, BM, BN)),
            (mma_partition, (tiles, K, a, b, acc, ready, free, full, empty, BK, STAGES)),
            (load_partition, (a_desc, b_desc, tiles, columns, K, a, b, ready, free, BM, BN, BK, STAGES)),
        ],
        [1, 1],
        [24, 24],
    )


def check_warp_specialised_persistent_matmul(programs):
    M, N, K = 256, 192, 128
    a, b, out = torch.randn(M, K).bfloat16(), torch.randn(N, K).bfloat16(), torch.zeros(M, N)
    specialised_matmul[(programs,)](
        descriptor(a, [128, 64]), descriptor(b, [64, 64]), out, M, N, K, 128, 64, 64, 2, num_warps=4
    )
    assert_matmul(out, a, b.t())


@pytest.mark.parametrize("programs", [1, 3])
def test_warp_specialised_persistent_matmul(sm100, programs):
    check_warp_specialised_persistent_matmul(programs)


def test_warp_specialised_persistent_matmul_in_every_order(sm100, order):
    check_warp_specialised_persistent_matmul(2)
