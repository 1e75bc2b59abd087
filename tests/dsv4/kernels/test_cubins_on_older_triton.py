"""Blackwell kernels on a Triton that cannot compile them, launched from files. Runs under every Triton (make
test-triton): its own names and layouts import and prepare them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
from dsv4.commands import variants  # noqa: E402
from dsv4.fmha.backward import FMHA_BACKWARD  # noqa: E402
from dsv4.fmha.options import FmhaOptions  # noqa: E402
from dsv4.runtime import aot, calls, dispatch, driver  # noqa: E402
from dsv4.runtime.calls import Given  # noqa: E402
from dsv4.runtime.launch import ready_launch  # noqa: E402
from dsv4.runtime.program import Changing, Program  # noqa: E402
from dsv4.runtime.settings import settings  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture
def old(monkeypatch, tmp_path):
    """Triton 3.7 on a B200 with a directory of compiled kernels; the driver only notes what it is asked to launch."""
    done, variants, types = [], [], []

    def loaded(directory, variant, device):
        assert directory == str(tmp_path)
        variants.append(variant)
        kinds = tuple("fp32" if kind == "f32" else kind for kind in types)
        meta = dict(elem_type=10, elem_size=2, block_size=[64, 64], swizzle=3)
        descriptors = (meta,) * sum(kind.startswith("tensordesc") for kind in kinds)
        return driver.Function(variant, len(variants), device, 128, 0, 1, False, kinds, descriptors)

    def start(reference, handle, parameters, extra):
        grid = reference._obj
        done.append((variants[handle.value - 1], (grid.gx, grid.gy, grid.gz)))
        return 0

    nothing = dict(cuTensorMapEncodeTiled=lambda *_: 0, cuTensorMapReplaceAddress=lambda *_: 0)
    monkeypatch.setattr(driver, "cuda", lambda: SimpleNamespace(cuLaunchKernelEx=start, **nothing))

    monkeypatch.setattr(dispatch, "triton_version", lambda: (3, 7))
    monkeypatch.setattr(settings, "aot", tmp_path)
    monkeypatch.setattr(aot, "loaded", loaded)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    target = dispatch.compile_target("sm_100a")._replace(aot=tmp_path)
    return SimpleNamespace(directory=tmp_path, target=target, done=done, types=types)


PARTS = [
    ("v4", "fp8", "list"),
    ("v4", "bf16", "table"),
    ("paged", 512, "bf16", "split"),
    ("dense", 512, "bf16", "prefill"),
    ("index", True, 1),
    ("compress",),
]
GRADIENTS = [("fmha-backward", 64, "bf16"), ("fmha-backward", 512, "bf16"), ("v4-backward", "bf16")]


@pytest.mark.parametrize("part", PARTS + GRADIENTS, ids=lambda part: " ".join(map(str, part)))
def test_every_launch_comes_from_a_file(old, part):
    (old.directory / "backward_rows-0123.json").touch()  # there are compiled gradients
    found = variants.launches(part, variants.Sizes(), "sm_100a")
    assert found
    for x in found:
        old.types[:] = aot.argument_types(x.arguments)
        name = aot.variant(x.kernel.__name__, old.types, x.constants, "sm_100a")
        (old.directory / f"{name}.json").touch()
        if part == ("compress",):  # launched one by one, of tensors
            flat = [a for y in x.arguments for a in (y if isinstance(y, tuple) else (y,))]
            tensors = [a for a in flat if isinstance(a, torch.Tensor) or type(a) is Changing]
            program = Program({f"{n}": a if isinstance(a, torch.Tensor) else None for n, a in enumerate(tensors)}, CPU)
            x = replace(x, arguments=program.stand_ins(x.arguments))
        ready_launch(x, old.target)[1].run([], [0] * 100, 0)
        assert old.done.pop() == (name, (*x.grid, 1, 1)[:3])


@pytest.mark.parametrize("operation", ["fmha", "v4"])
def test_gradients_come_from_files_where_there_are_some(old, operation):
    """Without any, torch computes them: a directory with only the forward pass removes nothing."""
    (old.directory / "fmha_forward-0123.json").touch()
    with pytest.raises(RuntimeError, match="need triton >= 3.9; found 3.7.*DSV4_AOT"):
        dispatch.kernel_module(operation, (10, 0), backward=True)
    (old.directory / "backward_rows-0123.json").touch()
    name = f"dsv4.{operation}.kernels.sm100.backward"
    assert dispatch.kernel_module(operation, (10, 0), backward=True).__name__ == name


def test_torch_computes_gradients_where_there_are_no_kernels_for_them(old, monkeypatch):
    monkeypatch.setattr(dispatch, "resolve", lambda backend, device: "cuda")
    monkeypatch.setattr(dispatch, "cuda_target", lambda device: old.target)
    monkeypatch.setattr("torch.cuda.current_device", lambda: None)
    x = torch.randn(1, 5, 1, 64)
    given = (x, x, x, None, None, None, x, torch.zeros(1, 1, 5), x, None)
    options = FmhaOptions()
    wanted, nothing = (True, False, False, False), (None,) * 4
    dq, *others = calls.run(FMHA_BACKWARD, Given(given, options, wanted, nothing), "auto")
    assert dq.isfinite().all() and others == [None] * 3
    with pytest.raises(RuntimeError, match="need triton >= 3.9"):
        calls.run(FMHA_BACKWARD, Given(given, options, wanted, nothing), "cuda")


def test_a_kernel_without_a_file_is_named_and_not_compiled(old):
    x = variants.launches(PARTS[0], variants.Sizes(), "sm_100a")[0]
    message = f"{x.kernel.__name__}-.* cannot be compiled here: .* need triton >= 3.9; found 3.7"
    with pytest.raises(RuntimeError, match=message):
        ready_launch(x, old.target)


def test_without_a_directory_nothing_is_compiled_either(old):
    """softsm takes no files: it asks the same question, and gets the same words."""
    x = variants.launches(PARTS[0], variants.Sizes(), "sm_100a")[0]
    with pytest.raises(RuntimeError, match="need triton >= 3.9; found 3.7"):
        ready_launch(x, old.target._replace(aot=None, backend="softsm"))
