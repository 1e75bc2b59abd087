"""Machine code of Hopper kernels: from the ptxas of Triton's wheel that spills less."""

import subprocess
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton import knobs  # noqa: E402
from triton.backends.nvidia import compiler  # noqa: E402

from dsv4.runtime import aot, assembler  # noqa: E402
from dsv4.runtime.dispatch import triton_version  # noqa: E402


@triton.jit
def square_and_add(x_ptr, BLOCK: tl.constexpr):
    at = x_ptr + tl.arange(0, BLOCK)
    x = tl.load(at)
    tl.store(at, x * x + x)


@pytest.fixture(scope="module")
def hopper():
    """Compile where Triton is told not to fuse products and sums, as from 3.10 on by default."""
    with knobs.language.scope():
        knobs.language.default_fp_fusion = False
        return aot.compile_kernel(square_and_add, [torch.empty(128)], {"BLOCK": 128, "num_warps": 4})


def test_products_and_sums_are_fused_whatever_the_default_of_triton(hopper):
    assert "fma.rn" in hopper.asm["ptx"]


def test_hopper_kernels_are_assembled_by_ptxas_12_whatever_triton_uses(hopper):
    cubin = assembler.cubin_of(hopper)
    if triton_version() < (3, 9):
        assert cubin is hopper.asm["cubin"]
        return
    assert cubin[:4] == b"\x7fELF" and b"square_and_add" in cubin
    # Cubins contain their PTX, for debuggers: ptxas 12.9 reads no later version than 8.8.
    assert b".version 8.8" in cubin and b".version 8.8" not in hopper.asm["cubin"]


def test_a_blackwell_kernel_keeps_the_machine_code_of_triton(hopper):
    target = SimpleNamespace(backend="cuda", arch=100)
    other = SimpleNamespace(asm=dict(hopper.asm) | {"cubin": b"theirs"}, metadata=SimpleNamespace(target=target))
    assert assembler.cubin_of(other) == b"theirs"


def test_where_triton_keeps_no_ptx_its_machine_code_is_used(hopper):
    other = SimpleNamespace(asm={"cubin": b"theirs"}, metadata=hopper.metadata)
    assert assembler.cubin_of(other) == b"theirs"


def test_ptx_that_the_older_assembler_rejects_keeps_the_machine_code_of_triton(hopper):
    asm = {"cubin": b"theirs", "ptx": hopper.asm["ptx"].replace("ret;", "no.such.instruction;")}
    other = SimpleNamespace(asm=asm, metadata=hopper.metadata)
    assert assembler.cubin_of(other) == b"theirs"


def test_a_wheel_without_an_older_assembler_keeps_the_machine_code_of_triton(hopper):
    with knobs.nvidia.scope():
        knobs.nvidia.ptxas = compiler.get_ptxas(100).path
        assert assembler.cubin_of(hopper) is hopper.asm["cubin"]


def test_what_was_assembled_once_is_kept(hopper, monkeypatch):
    first = assembler.cubin_of(hopper)
    monkeypatch.setattr(subprocess, "run", None)
    assert assembler.cubin_of(hopper) == first
