"""Matrix products: grouped program order, pointer arrays, tensor descriptors, persistent kernels, block scales."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from bounds import assert_matmul
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def matmul_kernel(a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
                  BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
                  RELU: tl.constexpr):  # fmt: skip
    pid = tl.program_id(0)
    blocks_m, blocks_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    first = pid // (GROUP * blocks_n) * GROUP
    rows = min(blocks_m - first, GROUP)
    pid_m = first + pid % (GROUP * blocks_n) % rows
    pid_n = pid % (GROUP * blocks_n) // rows
    m = (pid_m * BM + tl.arange(0, BM)) % M
    n = (pid_n * BN + tl.arange(0, BN)) % N
    k = tl.arange(0, BK)
    a = a_ptr + m[:, None] * stride_am + k[None, :] * stride_ak
    b = b_ptr + k[:, None] * stride_bk + n[None, :] * stride_bn
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for step in range(0, tl.cdiv(K, BK)):
        left = K - step * BK
        x = tl.load(a, mask=k[None, :] < left, other=0.0)
        y = tl.load(b, mask=k[:, None] < left, other=0.0)
        acc = tl.dot(x, y, acc)
        a += BK * stride_ak
        b += BK * stride_bk
    if RELU:
        acc = tl.maximum(acc, 0)
    cm = pid_m * BM + tl.arange(0, BM)
    cn = pid_n * BN + tl.arange(0, BN)
    mask = (cm[:, None] < M) & (cn[None, :] < N)
    tl.store(c_ptr + cm[:, None] * stride_cm + cn[None, :] * stride_cn, acc.to(c_ptr.dtype.element_ty), mask=mask)


def matmul(a, b, dtype=torch.float32, BM=64, BN=64, BK=32, RELU=False, **options):
    (M, K), N = a.shape, b.shape[1]
    c = torch.full((M, N), float("nan"), dtype=dtype)
    grid = (triton.cdiv(M, BM) * triton.cdiv(N, BN),)
    matmul_kernel[grid](
        a, b, c, M, N, K, *a.stride(), *b.stride(), *c.stride(), BM, BN, BK, GROUP=2, RELU=RELU, **options
    )
    return c


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_matmul(sm, dtype):
    a, b = torch.randn(150, 100).to(dtype), torch.randn(100, 130).to(dtype)
    assert_matmul(matmul(a, b, dtype), a, b)


def test_matmul_of_a_transposed_operand(sm):
    a, b = torch.randn(64, 64).half(), torch.randn(128, 64).half().t()
    assert_matmul(matmul(a, b), a, b)


@pytest.mark.compile
def test_matmul_with_one_warpgroup_and_large_tile(sm):
    a, b = torch.randn(128, 64).half(), torch.randn(64, 128).half()
    assert_matmul(matmul(a, b, BM=128, BN=128, BK=64, num_warps=4, num_stages=2), a, b)


def test_matmul_of_small_tiles_uses_mma(sm):
    a, b = torch.randn(16, 64).half(), torch.randn(64, 16).half()
    assert_matmul(matmul(a, b, BM=16, BN=16, num_warps=1), a, b)


def test_matmul_tf32(sm):
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    assert_matmul(matmul(a, b), a, b, extra=2 * 2.0**-10)  # ten mantissa bits, truncated


def test_matmul_fp8(sm):
    a, b = torch.randn(64, 64).to(torch.float8_e5m2), torch.randn(64, 64).to(torch.float8_e5m2)
    assert_matmul(matmul(a, b), a.float(), b.float(), extra=2.0**-13 if sm == "sm_90a" else 0)


def test_matmul_int8(sm):
    @triton.jit
    def kernel(a, b, c, N: tl.constexpr):
        i = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
        tl.store(c + i, tl.dot(tl.load(a + i), tl.load(b + i), out_dtype=tl.int32))

    a = torch.randint(-128, 128, (64, 64), dtype=torch.int8)
    b = torch.randint(-128, 128, (64, 64), dtype=torch.int8)
    c = torch.empty(64, 64, dtype=torch.int32)
    kernel[(1,)](a, b, c, 64)
    assert torch.equal(c, a.int() @ b.int())


def test_autotuned_matmul(sm):
    configs = [triton.Config({"BM": m, "BN": 64, "BK": 32}, num_warps=4, num_stages=s) for m, s in ((64, 2), (64, 3))]
    tuned = triton.autotune(configs, key=["M", "N", "K"])(matmul_kernel)
    a, b, c = torch.randn(128, 64).half(), torch.randn(64, 64).half(), torch.empty(128, 64)
    tuned[lambda meta: (triton.cdiv(128, meta["BM"]),)](
        a, b, c, 128, 64, 64, *a.stride(), *b.stride(), *c.stride(), GROUP=1, RELU=True
    )
    assert_matmul(c, a, b, relu=True)


@triton.jit
def grouped_kernel(a_ptrs, b_ptrs, c_ptrs, sizes, groups, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """A fixed number of programs walks over the tiles of all problems. The operands come as arrays of addresses."""
    tile = tl.program_id(0)
    before = 0
    for g in range(groups):
        m, n, k = tl.load(sizes + g * 3), tl.load(sizes + g * 3 + 1), tl.load(sizes + g * 3 + 2)
        columns = tl.cdiv(n, BN)
        tiles = tl.cdiv(m, BM) * columns
        while tile >= before and tile < before + tiles:
            a = tl.load(a_ptrs + g).to(tl.pointer_type(tl.float16))
            b = tl.load(b_ptrs + g).to(tl.pointer_type(tl.float16))
            c = tl.load(c_ptrs + g).to(tl.pointer_type(tl.float16))
            rm = (tile - before) // columns * BM + tl.arange(0, BM)
            rn = (tile - before) % columns * BN + tl.arange(0, BN)
            rk = tl.arange(0, BK)
            acc = tl.zeros((BM, BN), dtype=tl.float32)
            for start in range(0, k, BK):
                x = tl.load(a + rm[:, None] * k + (start + rk)[None, :])
                y = tl.load(b + (start + rk)[:, None] * n + rn[None, :])
                acc = tl.dot(x, y, acc)
            tl.store(c + rm[:, None] * n + rn[None, :], acc.to(tl.float16))
            tile += tl.num_programs(0)
        before += tiles


def test_grouped_gemm_with_pointer_arrays(sm):
    shapes = [(64, 64, 64), (128, 64, 32), (64, 128, 96)]
    a = [torch.randn(m, k).half() for m, n, k in shapes]
    b = [torch.randn(k, n).half() for m, n, k in shapes]
    c = [torch.zeros(m, n).half() for m, n, k in shapes]
    addresses = [torch.tensor([t.data_ptr() for t in group]) for group in (a, b, c)]
    sizes = torch.tensor(shapes, dtype=torch.int32)
    grouped_kernel[(2,)](*addresses, sizes, len(shapes), BM=64, BN=64, BK=32)
    for x, y, z in zip(a, b, c):
        assert_matmul(z, x, y)


@triton.jit
def descriptor_kernel(a_desc, b_desc, c_desc, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    columns = tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BM) * columns, tl.num_programs(0)):
        m, n = tile // columns * BM, tile % columns * BN
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for k in range(0, K, BK):
            acc = tl.dot(a_desc.load([m, k]), b_desc.load([n, k]).T, acc)
        c_desc.store([m, n], acc.to(c_desc.dtype))


@triton.jit
def device_descriptor_kernel(a_ptr, b_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    a_desc = tl.make_tensor_descriptor(a_ptr, [M, K], [K, 1], [BM, BK])
    b_desc = tl.make_tensor_descriptor(b_ptr, [N, K], [K, 1], [BN, BK])
    c_desc = tl.make_tensor_descriptor(c_ptr, [M, N], [N, 1], [BM, BN])
    descriptor_kernel(a_desc, b_desc, c_desc, M, N, K, BM, BN, BK)


def persistent_operands():
    M, N, K = 200, 128, 96  # the last tile of rows is partly outside
    a, b = torch.randn(M, K).half(), torch.randn(N, K).half()
    return a, b, torch.full((M, N), float("nan")).half(), (M, N, K)


def test_persistent_matmul_with_host_descriptors(sm):
    a, b, c, sizes = persistent_operands()
    blocks = [64, 32], [64, 32], [64, 64]
    descriptors = [TensorDescriptor.from_tensor(t, block) for t, block in zip((a, b, c), blocks)]
    descriptor_kernel[(3,)](*descriptors, *sizes, BM=64, BN=64, BK=32)
    assert_matmul(c, a, b.t())


def check_persistent_matmul_with_device_descriptors():
    triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8))
    a, b, c, sizes = persistent_operands()
    device_descriptor_kernel[(3,)](a, b, c, *sizes, BM=64, BN=64, BK=32)
    assert_matmul(c, a, b.t())


def test_persistent_matmul_with_device_descriptors(sm):
    check_persistent_matmul_with_device_descriptors()


def test_persistent_matmul_with_device_descriptors_in_every_order(sm, order):
    check_persistent_matmul_with_device_descriptors()


@triton.jit
def scaled_kernel(a_ptr, as_ptr, b_ptr, bs_ptr, c_ptr, FORMAT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                  K: tl.constexpr, PACKED: tl.constexpr, VEC: tl.constexpr):  # fmt: skip
    m, n = tl.arange(0, BM), tl.arange(0, BN)
    kb = tl.arange(0, K // PACKED)
    ks = tl.arange(0, K // VEC)
    a = tl.load(a_ptr + m[:, None] * (K // PACKED) + kb[None, :])
    b = tl.load(b_ptr + n[:, None] * (K // PACKED) + kb[None, :])
    sa = tl.load(as_ptr + m[:, None] * (K // VEC) + ks[None, :])
    sb = tl.load(bs_ptr + n[:, None] * (K // VEC) + ks[None, :])
    c = tl.dot_scaled(a, sa, FORMAT, b.T, sb, FORMAT)
    tl.store(c_ptr + m[:, None] * BN + n[None, :], c)


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def scaled_operand(rows: int, K: int, form: str, vec: int):
    """-> bytes as stored, scale bytes, the values they mean."""
    if form == "e2m1":
        raw = torch.randint(0, 256, (rows, K // 2), dtype=torch.uint8)
        nibbles = torch.stack([raw & 15, raw >> 4], -1).reshape(rows, K)
        values = E2M1[(nibbles & 7).long()] * (1 - 2 * (nibbles >> 3).float())
    else:
        raw = torch.randn(rows, K).to(torch.float8_e4m3fn if form == "e4m3" else torch.float8_e5m2)
        values = raw.float()
    if vec == 16:
        scales = (torch.rand(rows, K // vec) * 4 + 0.5).to(torch.float8_e4m3fn)
        factors = scales.float()
    else:
        scales = torch.randint(120, 134, (rows, K // vec), dtype=torch.uint8)
        factors = torch.exp2(scales.float() - 127)
    return raw, scales, values * factors.repeat_interleave(vec, 1)


@pytest.mark.parametrize(
    "sm, form, vec",
    [
        ("sm_100a", "e4m3", 32),
        *(
            pytest.param(*x, marks=pytest.mark.compile)
            for x in (("sm_90a", "e2m1", 32), ("sm_100a", "e2m1", 32), ("sm_100a", "e2m1", 16))
        ),
        *(
            pytest.param(*x, marks=pytest.mark.slow)
            for x in (("sm_90a", "e4m3", 32), ("sm_90a", "e5m2", 32), ("sm_100a", "e5m2", 32))
        ),
    ],
    indirect=["sm"],
)
def test_block_scaled_matmul(sm, form, vec):
    """Triton has scales of 16 elements (nvfp4) from sm_100 on; before, it multiplies in bf16."""
    K, size = 128, 128 if sm == "sm_100a" else 64
    a, sa, left = scaled_operand(size, K, form, vec)
    b, sb, right = scaled_operand(size, K, form, vec)
    c = torch.empty(size, size)
    packed = 2 if form == "e2m1" else 1
    scaled_kernel[(1,)](a, sa, b, sb, c, form, size, size, K, packed, vec)
    assert_matmul(c, left, right.t(), extra=0 if sm == "sm_100a" else 2.0**-8)  # sm_90: products in bf16
