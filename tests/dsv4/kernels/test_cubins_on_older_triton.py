"""Blackwell kernels on a Triton that cannot compile them, launched from files. Runs under every Triton (make
test-triton): its own names and layouts import and prepare them."""

from types import SimpleNamespace

import pytest

pytest.importorskip("triton")
from dsv4.commands import variants  # noqa: E402
from dsv4.runtime import aot, dispatch  # noqa: E402
from dsv4.runtime.launch import ReadyLaunch  # noqa: E402
from dsv4.runtime.settings import settings  # noqa: E402


@pytest.fixture
def old(monkeypatch, tmp_path):
    """Triton 3.7 on a B200 with a directory of compiled kernels; the driver only notes what it is asked to launch."""
    done = []

    def loaded(directory, variant, device):
        assert directory == str(tmp_path)
        return SimpleNamespace(launch=lambda grid, arguments: done.append((variant, grid)))

    monkeypatch.setattr(dispatch, "triton_version", lambda: (3, 7))
    monkeypatch.setattr(settings, "aot", tmp_path)
    monkeypatch.setattr(aot, "loaded", loaded)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    target = dispatch.compile_target("sm_100a")._replace(aot=tmp_path)
    return SimpleNamespace(directory=tmp_path, target=target, done=done)


PARTS = [
    ("v4", "fp8", "list"), ("v4", "bf16", "table"), ("paged", 512, "bf16", "split"), ("dense", 512, "bf16", "prefill"),
    ("index", True, 1), ("compress",),
]  # fmt: skip


@pytest.mark.parametrize("part", PARTS, ids=lambda part: " ".join(map(str, part)))
def test_every_launch_comes_from_a_file(old, part):
    found = variants.launches(part, variants.Sizes(), "sm_100a")
    assert found
    for x in found:
        name = aot.variant(x.kernel.__name__, [aot.argument_type(a) for a in x.arguments], x.constants, "sm_100a")
        (old.directory / f"{name}.json").touch()
        ReadyLaunch(x, old.target).launch(*x.arguments)
        assert old.done.pop() == (name, x.grid)


def test_a_kernel_without_a_file_is_named_and_not_compiled(old):
    x = variants.launches(PARTS[0], variants.Sizes(), "sm_100a")[0]
    message = f"{x.kernel.__name__}-.* cannot be compiled here: .* need triton >= 3.9; found 3.7"
    with pytest.raises(RuntimeError, match=message):
        ReadyLaunch(x, old.target)


def test_without_a_directory_nothing_is_compiled_either(old):
    """softsm takes no files: it asks the same question, and gets the same words."""
    x = variants.launches(PARTS[0], variants.Sizes(), "sm_100a")[0]
    with pytest.raises(RuntimeError, match="need triton >= 3.9; found 3.7"):
        ReadyLaunch(x, old.target._replace(aot=None, backend="softsm"))
