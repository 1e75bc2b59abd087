"""Gluon programs around the copy engine: im2col, reductions, scatter, padded fp4, multicast, work stealing."""

from __future__ import annotations

import pytest
import torch
from bounds import assert_matmul
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
    tcgen05_mma_scaled,
    tma,
    tma_load,
    tmem_load,
)
from test_matmul import scaled_operand

from softsm.engine.options import options

if V36:
    pytest.skip("written with Triton 3.9's names", allow_module_level=True)

from triton.experimental.gluon.language.nvidia.blackwell import clc
from triton.experimental.gluon.nvidia.hopper import TensorDescriptorIm2Col

ORDERS = ("eager", "latest", "random")


@gluon.jit
def im2col_tile(src, out_ptr, n, h, w, PIXELS: gl.constexpr, CHANNELS: gl.constexpr):
    tile = gl.allocate_shared_memory(src.dtype, [PIXELS, CHANNELS], src.layout)
    bar = barriers(1)
    mbarrier.init(bar.index(0), count=1)
    mbarrier.expect(bar.index(0), PIXELS * CHANNELS * 2)
    offsets = [gl.to_tensor(1).to(gl.int16), gl.to_tensor(2).to(gl.int16)]
    tma.async_load_im2col(src, [n, h, w, 0], offsets, bar.index(0), tile)
    mbarrier.wait(bar.index(0), 0)
    put(out_ptr, tile.load(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])))


@pytest.mark.parametrize("order", ORDERS)
def test_im2col(sm, order):
    """Pixels of two images in a box that starts a row above and ends two columns early, filter tap (1, 2)."""
    x = torch.randn(2, 6, 7, 64).half()
    layout = gl.NVMMASharedLayout(128, 16, rank=2)
    box = dict(pixel_box_lower_corner=[-1, 0], pixel_box_upper_corner=[0, -2])
    desc = TensorDescriptorIm2Col(x, list(x.shape), list(x.stride()), [32, 64], layout, **box)
    out = torch.zeros(32, 64).half()
    with options(order=order):
        im2col_tile[(1,)](desc, out, 0, 3, 1, 32, 64)
    n, h, w = 0, 3, 1
    for pixel in range(32):
        inside = h + 1 < 6 and w + 2 < 7
        assert torch.equal(out[pixel], x[n, h + 1, w + 2] if inside else torch.zeros(64).half())
        w += 1
        if w == 7 - 2:
            w, h = 0, h + 1
        if h == 6:
            h, n = -1, n + 1


@gluon.jit
def reduce_tile(dst, src_ptr, BM: gl.constexpr, BN: gl.constexpr):
    L: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, BM, layout=gl.SliceLayout(1, L))
    columns = gl.arange(0, BN, layout=gl.SliceLayout(0, L))
    tile = gl.allocate_shared_memory(dst.dtype, [BM, BN], dst.layout)
    tile.store(gl.load(src_ptr + rows[:, None] * BN + columns[None, :]))
    fence_async_shared()
    tma.async_atomic_add(dst, [gl.program_id(0) // 2 * BM, 0], tile)
    tma.store_wait(0, read_only=False)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_added_in_global_memory(sm, dtype, order):
    dst = torch.randint(-4, 5, (64, 32)).to(dtype)  # small integers: every order of additions is exact
    src = torch.randint(-4, 5, (32, 32)).to(dtype)
    wanted = (dst.view(2, 32, 32) + 2 * src).view(64, 32)
    with options(order=order):
        reduce_tile[(4,)](descriptor(dst, [32, 32]), src, 32, 32)
    assert torch.equal(dst, wanted)


@gluon.jit
def scatter_rows(desc, index_ptr, src_ptr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    index = gl.load(index_ptr + gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])))
    I: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, 4], [32, 1], [1, gl.num_warps()], [1, 0]))
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, L))
    tile = gl.allocate_shared_memory(desc.dtype, [ROWS, COLUMNS], desc.layout)
    tile.store(gl.load(src_ptr + rows[:, None] * COLUMNS + columns[None, :]))
    fence_async_shared()
    blackwell_tma.async_scatter(desc, gl.convert_layout(index, I), 64, tile)
    tma.store_wait(0)


@pytest.mark.parametrize("order", ORDERS)
def test_scatter4(sm100, order):
    table, rows = torch.randn(100, 128).bfloat16(), torch.randn(32, 64).bfloat16()
    index = torch.randperm(100)[:32].int()
    wanted = table.clone()
    wanted[index.long(), 64:] = rows
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    with options(order=order):
        scatter_rows[(1,)](descriptor(table, [1, 64], layout), index, rows, 32, 64)
    assert torch.equal(table, wanted)


@gluon.jit
def steal_work(out_ptr):
    """Persistent programs that take over the launches that have not started."""
    answer = gl.allocate_shared_memory(gl.int64, [2], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bar = barriers(1)
    mbarrier.init(bar.index(0), count=1)
    pid = gl.program_id(0)
    phase = 0
    more = True
    while more:
        gl.atomic_add(out_ptr + pid, 1)
        mbarrier.expect(bar.index(0), 16)
        clc.try_cancel(answer, bar.index(0))
        mbarrier.wait(bar.index(0), phase)
        phase ^= 1
        result = clc.load_result(answer)
        more = result.is_canceled()
        if more:
            pid = result.program_id(0)


@pytest.mark.parametrize("order", ORDERS)
def test_every_program_is_done_once_when_work_is_stolen(sm100, order):
    out = torch.zeros(100, dtype=torch.int32)
    with options(order=order):
        steal_work[(100,)](out)
    assert (out == 1).all()


@gluon.jit
def mixed_product(a_desc, b_desc, as_ptr, bs_ptr, out_ptr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr):
    a = gl.allocate_shared_memory(a_desc.dtype, [BM, BK], a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, [BN, BK // 2], b_desc.layout)
    loaded = barriers(1)
    done = barriers(1)
    mbarrier.init(loaded.index(0), count=1)
    mbarrier.init(done.index(0), count=1)
    mbarrier.expect(loaded.index(0), a_desc.nbytes_per_cta + b_desc.nbytes_per_cta)
    tma_load(a_desc, [0, 0], loaded.index(0), a)
    tma_load(b_desc, [0, 0], loaded.index(0), b)
    sa = allocate_tensor_memory(gl.uint8, [BM, BK // 32], TensorMemoryScalesLayout())
    sb = allocate_tensor_memory(gl.uint8, [BN, BK // 32], TensorMemoryScalesLayout())
    la: gl.constexpr = sa.get_reg_layout()
    lb: gl.constexpr = sb.get_reg_layout()
    ra = gl.arange(0, BM, layout=gl.SliceLayout(1, la))
    ca = gl.arange(0, BK // 32, layout=gl.SliceLayout(0, la))
    rb = gl.arange(0, BN, layout=gl.SliceLayout(1, lb))
    cb = gl.arange(0, BK // 32, layout=gl.SliceLayout(0, lb))
    sa.store(gl.load(as_ptr + ra[:, None] * (BK // 32) + ca[None, :]))
    sb.store(gl.load(bs_ptr + rb[:, None] * (BK // 32) + cb[None, :]))
    acc = allocate_tensor_memory(gl.float32, [BM, BN], TensorMemoryLayout([BM, BN], col_stride=1))
    mbarrier.wait(loaded.index(0), 0)
    tcgen05_mma_scaled(a, b.permute((1, 0)), acc, sa, sb, "e4m3", "e2m1", use_acc=False)
    tcgen05_commit(done.index(0))
    mbarrier.wait(done.index(0), 0)
    put(out_ptr, tmem_load(acc))


@pytest.mark.parametrize("order", ORDERS)
def test_fp4_padded_to_bytes_by_the_copy(sm100, order):
    """e4m3 times e2m1: the map of the fp4 operand spreads 16 values over 16 bytes, half of them gaps."""
    BM, BN, BK = 128, 128, 128
    a, sa, left = scaled_operand(BM, BK, "e4m3", 32)
    b, sb, right = scaled_operand(BN, BK, "e2m1", 32)
    padded = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2, fp4_padded=True)
    out = torch.zeros(BM, BN)
    with options(order=order):
        mixed_product[(1,)](descriptor(a, [BM, BK]), descriptor(b, [BN, BK // 2], padded), sa, sb, out, BM, BN, BK)
    assert_matmul(out, left, right.t())


@gluon.jit
def shared_by_all(src, out_ptr, BM: gl.constexpr, BN: gl.constexpr):
    tile = gl.allocate_shared_memory(src.dtype, [BM, BN], src.layout)
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, src.nbytes_per_cta)
    tma_load(src, [0, 0], bar, tile, multicast=True)
    mbarrier.wait(bar, 0)
    put(out_ptr, tile.load(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0], cga_layout=[[0, 0]])))


@pytest.mark.parametrize("order", ORDERS)
def test_multicast(sm, order):
    """Both CTAs hold the whole tile; each half of the copy is issued once and lands in both."""
    x, out = torch.randn(64, 64).half(), torch.zeros(64, 64).half()
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16, cga_layout=((0, 0),))
    with options(order=order):
        compiled = shared_by_all[(1,)](descriptor(x, [64, 64], layout), out, 64, 64, num_ctas=2)
    assert "multicast::cluster" in compiled.asm["ptx"]
    assert torch.equal(x, out)
