"""Which backend runs what, and the errors when it cannot."""

import sys
from functools import cache
from types import ModuleType, SimpleNamespace

import pytest
import torch
from agreement import assert_agrees, qkv

import dsv4
import softsm
from dsv4 import reference
from dsv4.runtime import dispatch
from dsv4.runtime.settings import settings

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")


@pytest.mark.parametrize(
    "backend, device, want",
    [
        ("auto", CPU, "cpu"),
        ("auto", CUDA, "cuda"),
        ("cpu", CPU, "cpu"),
        ("cuda", CUDA, "cuda"),
        ("softsm", CPU, "softsm"),
    ],
)
def test_resolve(backend, device, want):
    assert dispatch.resolve(backend, device) == want


@pytest.mark.parametrize("backend, device", [("cpu", CUDA), ("softsm", CUDA), ("cuda", CPU)])
def test_the_backend_must_suit_the_device(backend, device):
    with pytest.raises(ValueError, match=f"backend: got '{backend}' with tensors on {device.type}"):
        dispatch.resolve(backend, device)


@pytest.mark.parametrize(
    "version, arch, says",
    [
        ((3, 5), (9, 0), "need triton >= 3.6; found 3.5. .*DSV4_AOT"),
        ((3, 8), (10, 0), "need triton >= 3.9; found 3.8. .*dsv4-cubins"),
        (None, (9, 0), "need triton >= 3.6, and Triton is not installed: pip install triton .*'cpu' works without it$"),
    ],
)
def test_old_triton_is_named(monkeypatch, version, arch, says):
    monkeypatch.setattr(dispatch, "triton_version", lambda: version)
    with pytest.raises(RuntimeError, match=says):
        dispatch.kernel_module("fmha", arch)


@pytest.mark.parametrize("operation", dispatch.OPERATIONS)
def test_old_triton_may_launch_compiled_kernels(monkeypatch, tmp_path, operation):
    monkeypatch.setattr(dispatch, "triton_version", lambda: (3, 7))
    with pytest.raises(RuntimeError, match="DSV4_AOT"):
        dispatch.kernel_module(operation, (10, 0))
    monkeypatch.setattr(settings, "aot", tmp_path)
    assert dispatch.kernel_module(operation, (10, 0)).__name__ == f"dsv4.{operation}.kernels.sm100.entry"


@pytest.mark.parametrize(
    "capability, hip, named",
    [
        ((8, 0), None, "NVIDIA A100-SXM4-80GB, compute capability 8.0"),
        ((9, 0), "7.2", "AMD Instinct MI250X, an AMD GPU"),  # gfx90a, which torch calls 9.0
    ],
)
def test_a_gpu_without_kernels_is_named_and_so_is_the_way_out(monkeypatch, capability, hip, named):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: named.split(",")[0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    text = f"backend: got 'cuda' on {named}, for which .* 9.0 .H100, H200, GH200.*10.3 .B300, GB300.*backend='cpu'"
    with pytest.raises(RuntimeError, match=text):
        dispatch.kernel_module("fmha", dispatch.capability_of())
    assert not dispatch.has_kernels(torch.device("cuda"))


def test_b300_takes_the_kernels_of_b200():
    for operation in dispatch.OPERATIONS:
        assert dispatch.kernel_module(operation, (10, 3)) is dispatch.kernel_module(operation, (10, 0))


def test_missing_kernel_is_named():
    with pytest.raises(RuntimeError, match="no nothing kernel for sm_90a"):
        dispatch.kernel_module("nothing", (9, 0))


def test_fp32_is_for_the_cpu_backend():
    with pytest.raises(ValueError, match="q: got dtype torch.float32 on backend 'softsm'"):
        dsv4.fmha(*qkv(1, 2, 3, 1, 1, 64), backend="softsm")


@pytest.fixture
def played(monkeypatch):
    """A stand-in for softsm and for the kernels of both architectures: records what was asked of them."""
    seen = SimpleNamespace(archs=[], inside=None, active=None, reason=None, problems=[])

    class Use:
        def __init__(self, arch):
            self.arch = arch

        def __enter__(self):
            seen.inside = self.arch
            seen.archs.append(self.arch)

        def __exit__(self, *_):
            seen.inside = None

    fake = ModuleType("softsm")
    fake.use, fake.active_arch = Use, lambda: seen.active
    monkeypatch.setitem(sys.modules, "softsm", fake)
    properties = {"multiprocessor_count": 3}
    device = SimpleNamespace(get_device_properties=lambda number: properties)
    active = SimpleNamespace(utils=device, get_current_device=lambda: 0, get_current_stream=lambda number: 0)
    monkeypatch.setattr("triton.runtime.driver._active", active)

    def kernels(operation, capability, backward=False):
        def prepare(problem, target, program):
            assert seen.inside is not None and target.num_sms == 3
            seen.problems.append((capability, problem))
            program.fill(problem.out, 7)
            if problem.lse is not None:
                program.fill(problem.lse, 1)

        return SimpleNamespace(supports=lambda problem: seen.reason, prepare=prepare)

    monkeypatch.setattr(dispatch, "kernel_module", kernels)
    return seen


@pytest.mark.parametrize("active, capability", [(None, (10, 0)), ("sm_90a", (9, 0)), ("sm_100a", (10, 0))])
def test_softsm_runs_the_kernels_of_the_active_architecture(played, active, capability):
    played.active = active
    q, k, v = qkv(1, 2, 3, 2, 1, 64, torch.bfloat16)
    out, lse = dsv4.fmha(q, k, v, backend="softsm", causal=True, return_lse=True)
    assert bool((out == 7).all()) and bool((lse == 1).all())
    assert played.archs == [active or "sm_100a"] and played.inside is None
    got_capability, problem = played.problems[0]
    assert got_capability == capability and (problem.left, problem.right) == (-1, 0) and problem.kind == "dense"


def test_what_the_kernel_refuses_is_passed_on(played):
    played.reason = "head dim 64 is not built"
    with pytest.raises(ValueError, match="'softsm' cannot run this fmha problem: head dim 64 is not built"):
        dsv4.fmha(*qkv(1, 2, 3, 2, 1, 64, torch.bfloat16), backend="softsm")


def test_kernels_never_see_a_problem_without_keys(played):
    out, lse = dsv4.fmha(*qkv(1, 2, 0, 2, 1, 64, torch.bfloat16), backend="softsm", return_lse=True)
    assert not played.problems and bool((out == 0).all()) and bool((lse == -float("inf")).all())


@pytest.mark.skipif(torch.cuda.is_available(), reason="device='cuda' means the GPU here")
@pytest.mark.parametrize("backend, emulated", [("auto", True), ("cuda", True), ("softsm", True), ("cpu", False)])
def test_the_gpu_of_a_program_under_softsm_is_the_emulator(monkeypatch, backend, emulated):
    """In `softsm check program.py` tensors have the device cuda, but there is no libcuda."""
    q, k, v = qkv(1, 2, 3, 2, 1, 64, torch.bfloat16)
    monkeypatch.setattr(dispatch, "resolve", cache(dispatch.resolve.__wrapped__))  # for this process, cuda is not a GPU
    with softsm.use("sm_90a", cuda_shim=True), softsm.checking() as report:
        out, lse = dsv4.fmha(q.to("cuda"), k.to("cuda"), v.to("cuda"), return_lse=True, backend=backend)
    assert_agrees((out, lse), reference.fmha, q, k, v)
    assert bool(report.launches) == emulated and not report
