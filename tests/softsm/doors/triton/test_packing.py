"""Launch arguments -> PTX parameters. `launches` checks every size against the compiled kernel's parameter list."""

from __future__ import annotations

import struct

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import softsm
from softsm.memory import tensor_map_image
from softsm.memory.tensor_map import DataType

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def values(launch, *formats):
    return [struct.unpack("<" + f, a)[0] for f, a in zip(formats, launch.args)]


def test_scalars(launches):
    @triton.jit
    def kernel(out, i32, i64, neg, f, flag, h, u):
        tl.store(out, i32 + i64 + neg + f + flag + h + u)

    with softsm.use("sm_90a"):
        kernel[(1,)](torch.zeros(1), 5, 2**40, -3, 0.1, True, 1e40, 2**63 + 2)
    got = values(launches[0], "Q", "i", "q", "i", "f", "B", "f", "Q")[1:]
    assert got[:3] == [5, 2**40, -3] and got[3] == pytest.approx(0.1) and got[4] == 1
    assert got[5] == float("inf") and got[6] == 2**63 + 2


def test_one_and_none_are_specialised_away(launches):
    @triton.jit
    def kernel(out, one, nothing, n):
        tl.store(out, one + n)

    with softsm.use("sm_90a"):
        kernel[(1,)](torch.zeros(1), 1, None, 7)
    assert values(launches[0], "Q", "i")[1] == 7


def test_tuples_are_flattened(launches):
    @triton.jit
    def kernel(pair, n):
        tl.store(pair[0], tl.load(pair[1]) + n)

    a, b = torch.zeros(1), torch.zeros(1)
    with softsm.use("sm_90a"):
        kernel[(1,)]((a, b), 7)
    assert values(launches[0], "Q", "Q", "i") == [a.data_ptr(), b.data_ptr(), 7]
    assert launches[0].memory.find(b.data_ptr(), 4).name == "argument pair[1] [1]"


def test_reinterpreted_tensor(launches):
    @triton.jit
    def kernel(x):
        tl.store(x + 1, tl.load(x))

    raw = torch.zeros(64, dtype=torch.int8)
    with softsm.use("sm_90a"):
        kernel[(1,)](triton.reinterpret(raw, tl.float8e5))
    assert values(launches[0], "Q") == [raw.data_ptr()]
    assert launches[0].memory.find(raw.data_ptr(), 64) is not None


@triton.jit
def copy(src, dst, M: tl.constexpr, N: tl.constexpr):
    dst.store([0, 0], src.load([0, 0]))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_host_descriptor(launches, arch):
    x, y = torch.zeros(100, 64, dtype=torch.bfloat16), torch.zeros(100, 64, dtype=torch.bfloat16)
    with softsm.use(arch):
        copy[(1,)](TensorDescriptor.from_tensor(x, [32, 64]), TensorDescriptor.from_tensor(y, [32, 64]), 32, 64)
    (launch,) = launches
    decoded = tensor_map_image.from_image(launch.args[0])
    assert decoded.base == x.data_ptr() and decoded.dims == (64, 100) and decoded.strides == (128,)
    assert decoded.box == (64, 32) and decoded.data_type == DataType.BFLOAT16
    assert [struct.unpack("<i", a)[0] for a in launch.args[1:3]] == [100, 64]
    assert [struct.unpack("<q", a)[0] for a in launch.args[3:5]] == [64, 1]
    assert launch.memory.find(x.data_ptr(), 100 * 64 * 2) is not None


def test_descriptor_that_breaks_a_rule_names_argument_and_field(launches):
    x = torch.zeros(8, 64, dtype=torch.bfloat16)
    good = TensorDescriptor.from_tensor(x, [8, 64])
    bad = TensorDescriptor.from_tensor(x, [8, 64])
    bad.shape = [0, 64]
    with softsm.use("sm_90a"), pytest.raises(ValueError, match="^dst: global_dim"):
        copy[(1,)](good, bad, 8, 64)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_device_descriptor_gets_scratch(launches, arch):
    @triton.jit
    def kernel(x, y, M, N, BM: tl.constexpr, BN: tl.constexpr):
        src = tl.make_tensor_descriptor(x, [M, N], [N, 1], [BM, BN])
        dst = tl.make_tensor_descriptor(y, [M, N], [N, 1], [BM, BN])
        dst.store([0, 0], src.load([0, 0]))

    x, y = torch.zeros(64, 64), torch.zeros(64, 64)
    asked, skip = [], iter((0, 32))  # memory that is aligned, and that is not

    def allocate(size, align, stream):
        asked.append((size, align))
        return torch.empty(size + 64, dtype=torch.int8)[next(skip) :][:size]

    triton.set_allocator(allocate)
    for _ in range(2):
        with softsm.use(arch):
            kernel[(2,)](x, y, 64, 64, 32, 32)
        (scratch,) = struct.unpack("<Q", launches[-1].args[-2])
        assert scratch % 128 == 0 and launches[-1].memory.find(scratch, 512) is not None
    assert asked == [(2 * 2 * 128, 128)] * 2  # exactly what the kernel needs


def test_scratch_without_an_allocator_is_tritons_error(launches):
    from triton.runtime import _allocation

    @triton.jit
    def kernel(x, BM: tl.constexpr):
        d = tl.make_tensor_descriptor(x, [64, 64], [64, 1], [BM, 64])
        d.store([0, 0], d.load([0, 0]))

    triton.set_allocator(
        _allocation._NULL_ALLOCATOR if hasattr(_allocation, "_NULL_ALLOCATOR") else _allocation.NullAllocator()
    )
    with softsm.use("sm_90a"), pytest.raises(RuntimeError, match="no allocator was set"):
        kernel[(1,)](torch.zeros(64, 64), 64)


def test_clusters_and_warp_counts(launches):
    @triton.jit
    def kernel(x, B: tl.constexpr):
        i = tl.arange(0, B)
        tl.store(x + i, tl.load(x + i) + 1)

    with softsm.use("sm_90a"):
        kernel[(3, 2)](torch.zeros(512), B=512, num_warps=8, num_ctas=2)
    (launch,) = launches
    assert launch.grid == (6, 2, 1) and launch.block == (256, 1, 1) and launch.cluster == (2, 1, 1)
