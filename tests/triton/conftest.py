"""Triton and Gluon programs run whole: compiled for a target, executed by softsm on CPU tensors."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns when it is unset

import pytest
import torch
import triton

import softsm
from softsm.engine.options import options

# Reports under `pytest --softsm` that are right: (Triton version, test, why). The checker suppresses nothing, so such a
# test must fail.
WHY = "triton-lang/triton#9610: no fence.proxy.async between cp.async and the product that reads what it brought"
EXPECTED_REPORTS = [
    ("3.6.", f"{test}[{target}]", WHY)
    for target in ("sm_90a", "sm_100a")
    for test in (
        "test_matmul_of_a_transposed_operand",
        "test_matmul_with_one_warpgroup_and_large_tile",
        "test_matmul_tf32",
        "test_autotuned_matmul",
    )
] + [("3.6.", "test_matmul_fp8[sm_100a]", WHY)]


# `make test` tries one target: of programs without matrix products the PTX hardly differs, and the products of other
# people's programs are those of test_matmul.py.
EITHER_TARGET = ("test_elementwise.py", "test_language.py", "test_foreign_rows.py", "test_foreign_matrices.py")
# `make test-compile` has other people's programs: what they are made of is in the other files.
FOREIGN = ("test_foreign_rows.py", "test_foreign_matrices.py")
# In test_matmul.py these are not about the product; Hopper's is the quicker one to compile.
ON_HOPPER = (
    "test_autotuned_matmul",
    "test_grouped_gemm_with_pointer_arrays",
    "test_matmul_with_one_warpgroup_and_large_tile",
    "test_matmul_of_small_tiles_uses_mma",
    "test_persistent_matmul_with_host_descriptors",
    "test_persistent_matmul_with_device_descriptors",
    "test_persistent_matmul_with_device_descriptors_in_every_order",
)
# `make test-compile` has these about operands too: tests/softsm/isa has products of each kind in PTX, test_attention.py
# Blackwell's attention in every order.
OF_OPERANDS = ("test_matmul_of_a_transposed_operand", "test_matmul_tf32", "test_matmul_fp8", "test_matmul_int8")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    for item in items:
        target = item.callspec.params.get("sm") if getattr(item, "callspec", None) else None
        file, name = item.path.name, getattr(item, "originalname", "")
        if file in EITHER_TARGET and target == "sm_90a" or name in ON_HOPPER and target == "sm_100a":
            item.add_marker(pytest.mark.slow)
        if file in FOREIGN or name in OF_OPERANDS or name == "test_fused_attention" and target == "sm_100a":
            item.add_marker(pytest.mark.compile)
    if not (config.getoption("softsm", False) or config.getoption("softsm_strict", False)):
        return
    for version, name, why in EXPECTED_REPORTS:
        for item in items:
            if triton.__version__.startswith(version) and item.name == name:
                item.add_marker(pytest.mark.xfail(reason=why, raises=pytest.fail.Exception, strict=True))


@pytest.fixture(params=["sm_90a", "sm_100a"])
def sm(request):
    """softsm in use, for each target in turn."""
    with softsm.use(request.param):
        torch.manual_seed(0)
        yield request.param


@pytest.fixture
def sm90():
    with softsm.use("sm_90a"):
        torch.manual_seed(0)
        yield "sm_90a"


@pytest.fixture
def sm100():
    with softsm.use("sm_100a"):
        torch.manual_seed(0)
        yield "sm_100a"


@pytest.fixture(params=[("latest", 0), ("random", 1), ("random", 2)], ids=lambda p: f"{p[0]}{p[1] or ''}")
def order(request):
    """A right program is right whenever its asynchronous operations complete: late, as its waits allow, or at
    random."""
    with options(order=request.param[0], seed=request.param[1]):
        yield request.param


@pytest.fixture
def silent(sm):
    """What is right must not be reported: no false alarms at the default level."""
    with softsm.checking() as report:
        yield
    assert not report, str(report)
