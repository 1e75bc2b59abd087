"""Gluon on Hopper: TMA, mbarriers, wgmma from shared memory and registers, warp specialisation."""

from __future__ import annotations

import pytest
import torch
from bounds import assert_matmul
from gluon_names import (
    async_copy,
    barriers,
    cp_async,
    descriptor,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    put,
    tma,
    tma_load,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def tma_copy(src, dst, BM: gl.constexpr, BN: gl.constexpr):
    """One tile in, one tile out, through shared memory and the async proxy only."""
    pid = gl.program_id(0)
    tile = gl.allocate_shared_memory(src.dtype, [BM, BN], src.layout)
    bar = barriers(1)
    mbarrier.init(bar.index(0), count=1)
    mbarrier.expect(bar.index(0), BM * BN * 4)
    tma_load(src, [pid * BM, 0], bar.index(0), tile)
    mbarrier.wait(bar.index(0), 0)
    tma_store(dst, [pid * BM, 0], tile)
    tma.store_wait(0)


def test_tma_copy(sm):
    x, y = torch.randn(100, 32), torch.zeros(100, 32)  # the last tile of 32 rows is partly outside
    tma_copy[(4,)](descriptor(x, [32, 32]), descriptor(y, [32, 32]), 32, 32, num_warps=4)
    assert torch.equal(x, y)


@gluon.jit
def wgmma_shared(a_desc, b_desc, c_desc, K, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr):
    """C = A B^T over K in steps of BK; both operands in shared memory."""
    a = gl.allocate_shared_memory(a_desc.dtype, [BM, BK], a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, [BN, BK], b_desc.layout)
    c = gl.allocate_shared_memory(c_desc.dtype, [BM, BN], c_desc.layout)
    bar = barriers(1)
    mbarrier.init(bar.index(0), count=1)
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    acc = gl.zeros([BM, BN], gl.float32, L)
    phase = 0
    for k in range(0, K, BK):
        mbarrier.expect(bar.index(0), (BM * BK + BN * BK) * 2)
        tma_load(a_desc, [0, k], bar.index(0), a)
        tma_load(b_desc, [0, k], bar.index(0), b)
        mbarrier.wait(bar.index(0), phase)
        phase ^= 1
        acc = warpgroup_mma(a, b.permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.invalidate(bar.index(0))
    c.store(acc.to(c_desc.dtype))
    fence_async_shared()
    tma_store(c_desc, [0, 0], c)
    tma.store_wait(0)


def check_wgmma_from_shared_memory(dtype, BK):
    a, b, c = torch.randn(64, 128).to(dtype), torch.randn(128, 128).to(dtype), torch.zeros(64, 128).to(dtype)
    wgmma_shared[(1,)](descriptor(a, [64, BK]), descriptor(b, [128, BK]), descriptor(c, [64, 128]), 128, 64, 128, BK)
    assert_matmul(c, a, b.t())


@pytest.mark.parametrize(  # swizzles of 32, 64 and 128 bytes
    "dtype, BK", [(torch.float16, 16), (torch.float16, 32), (torch.bfloat16, 64)]
)
def test_wgmma_from_shared_memory(sm90, dtype, BK):
    check_wgmma_from_shared_memory(dtype, BK)


def test_wgmma_from_shared_memory_in_every_order(sm90, order):
    check_wgmma_from_shared_memory(torch.bfloat16, 64)


@gluon.jit
def wgmma_registers(a_ptr, b_desc, out_ptr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr):
    """A from registers, B [K, N] (so MN-major) from shared memory."""
    b = gl.allocate_shared_memory(b_desc.dtype, [BK, BN], b_desc.layout)
    bar = barriers(1)
    mbarrier.init(bar.index(0), count=1)
    mbarrier.expect(bar.index(0), BN * BK * 2)
    tma_load(b_desc, [0, 0], bar.index(0), b)
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    AL: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=L, k_width=2)
    rows = gl.arange(0, BM, layout=gl.SliceLayout(1, AL))
    k = gl.arange(0, BK, layout=gl.SliceLayout(0, AL))
    a = gl.load(a_ptr + rows[:, None] * BK + k[None, :])
    mbarrier.wait(bar.index(0), 0)
    acc = warpgroup_mma(a, b, gl.zeros([BM, BN], gl.float32, L), is_async=True)
    put(out_ptr, warpgroup_mma_wait(num_outstanding=0, deps=(acc,)))


def check_wgmma_from_registers():
    a, b, out = torch.randn(64, 64).half(), torch.randn(64, 128).half(), torch.zeros(64, 128)
    wgmma_registers[(1,)](a, descriptor(b, [64, 128]), out, 64, 128, 64)
    assert_matmul(out, a, b)


def test_wgmma_from_registers(sm90):
    check_wgmma_from_registers()


def test_wgmma_from_registers_in_every_order(sm90, order):
    check_wgmma_from_registers()


# -- warp specialisation: a producer fills a ring of stages, a consumer empties it ---------------------------


@gluon.jit
def pipeline_producer(
    a_desc, b_desc, row, column, K, a, b, ready, free, BYTES: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr
):
    stage = 0
    phase = 1  # the first round finds every stage free
    for k in range(0, K, BK):
        mbarrier.wait(free.index(stage), phase)
        mbarrier.expect(ready.index(stage), BYTES)
        tma_load(a_desc, [row, k], ready.index(stage), a.index(stage))
        tma_load(b_desc, [column, k], ready.index(stage), b.index(stage))
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def pipeline_consumer(out_ptr, row, column, N, K, a, b, ready, free, BM: gl.constexpr, BN: gl.constexpr,
                      BK: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    acc = gl.zeros([BM, BN], gl.float32, L)
    stage = 0
    phase = 0
    for _ in range(0, K, BK):
        mbarrier.wait(ready.index(stage), phase)
        acc = warpgroup_mma(a.index(stage), b.index(stage).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(free.index(stage), count=1)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    rows = row + gl.arange(0, BM, layout=gl.SliceLayout(1, L))
    columns = column + gl.arange(0, BN, layout=gl.SliceLayout(0, L))
    gl.store(out_ptr + rows[:, None] * N + columns[None, :], acc)


@gluon.jit
def pipelined_matmul(
    a_desc, b_desc, out_ptr, N, K, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr
):
    a = gl.allocate_shared_memory(a_desc.dtype, [STAGES, BM, BK], a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, [STAGES, BN, BK], b_desc.layout)
    ready = barriers(STAGES)
    free = barriers(STAGES)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    row = gl.program_id(0) * BM
    column = gl.program_id(1) * BN
    gl.warp_specialize(
        [
            (pipeline_consumer, (out_ptr, row, column, N, K, a, b, ready, free, BM, BN, BK, STAGES)),
            (pipeline_producer, (a_desc, b_desc, row, column, K, a, b, ready, free, (BM + BN) * BK * 2, BK, STAGES)),
        ],
        [1],
        [24],
    )


def check_warp_specialised_matmul(stages):
    a, b, out = torch.randn(128, 320).half(), torch.randn(128, 320).half(), torch.zeros(128, 128)
    pipelined_matmul[(2, 2)](descriptor(a, [64, 64]), descriptor(b, [64, 64]), out, 128, 320, 64, 64, 64, stages)
    assert_matmul(out, a, b.t())


@pytest.mark.parametrize("stages", [1, 3])
def test_warp_specialised_matmul(sm90, stages):
    check_warp_specialised_matmul(stages)


def test_warp_specialised_matmul_in_every_order(sm90, order):
    check_warp_specialised_matmul(3)


# -- cp.async gather under warp specialisation, on both targets ---------------------------------------------


@gluon.jit
def gather_producer(kv_ptr, index_ptr, n, tiles, ready, free, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, BN, layout=gl.SliceLayout(1, L))
    columns = gl.arange(0, D, layout=gl.SliceLayout(0, L))
    stage = 0
    phase = 1
    for i in range(0, n, BN):
        index = gl.load(index_ptr + i + rows)
        mbarrier.wait(free.index(stage), phase)
        cp_async(
            tiles.index(stage),
            kv_ptr + index[:, None].to(gl.int64) * D + columns[None, :],
            mask=(index[:, None] >= 0) & (columns[None, :] < D),
        )
        async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def gather_consumer(out_ptr, n, tiles, ready, free, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    total = gl.zeros([BN, D], gl.float32, L)
    stage = 0
    phase = 0
    for _ in range(0, n, BN):
        mbarrier.wait(ready.index(stage), phase)
        total += tiles.index(stage).load(L).to(gl.float32)
        mbarrier.arrive(free.index(stage), count=1)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    put(out_ptr, total)


@gluon.jit
def gather_sum(kv_ptr, index_ptr, out_ptr, n, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
    SL: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, D], gl.bfloat16)
    tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, D], SL)
    ready = barriers(STAGES)
    free = barriers(STAGES)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=128)  # noinc: one arrival per thread of the producer
        mbarrier.init(free.index(i), count=1)
    gl.warp_specialize(
        [
            (gather_consumer, (out_ptr, n, tiles, ready, free, BN, D, STAGES)),
            (gather_producer, (kv_ptr, index_ptr, n, tiles, ready, free, BN, D, STAGES)),
        ],
        [4],
        [40],
    )


def check_gather_by_cp_async():
    kv = torch.randn(500, 128).bfloat16()
    index = torch.randint(-1, 500, (64 * 5,), dtype=torch.int32)
    out = torch.zeros(64, 128)
    gather_sum[(1,)](kv, index, out, index.numel(), 64, 128, 2)
    rows = torch.where((index >= 0)[:, None], kv[index.clamp(min=0).long()].float(), 0.0)
    exact = torch.zeros(64, 128)
    for part in rows.view(5, 64, 128):
        exact += part  # the same order, so the same roundings
    assert torch.equal(out, exact)


def test_gather_by_cp_async(sm):
    check_gather_by_cp_async()


def test_gather_by_cp_async_in_every_order(sm, order):
    check_gather_by_cp_async()
