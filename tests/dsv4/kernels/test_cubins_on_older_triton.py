"""Blackwell kernels on a Triton that cannot compile them, launched from files. Runs under every Triton (make
test-triton): its own names and layouts import and prepare them."""

from types import SimpleNamespace

import pytest

pytest.importorskip("triton")
from dsv4.commands.compile import ROWS, problems, v4_problems  # noqa: E402
from dsv4.runtime import aot, calls, dispatch  # noqa: E402
from dsv4.runtime.launch import ReadyLaunch  # noqa: E402


@pytest.fixture
def old(monkeypatch, tmp_path):
    """Triton 3.7 on a B200 with a directory of compiled kernels; the driver only notes what it is asked to launch."""
    done = []

    def loaded(directory, variant, device):
        assert directory == str(tmp_path)
        return SimpleNamespace(launch=lambda grid, arguments: done.append((variant, grid)))

    monkeypatch.setattr(dispatch, "triton_version", lambda: (3, 7))
    monkeypatch.setattr(dispatch, "_aot", (tmp_path, False))
    monkeypatch.setattr(aot, "loaded", loaded)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    target = dispatch.compile_target("sm_100a")._replace(aot=tmp_path)
    return SimpleNamespace(directory=tmp_path, target=target, done=done)


def launches(kind: str, how: str, target) -> list:
    found = v4_problems(kind, how) if kind in ROWS else problems(512, "bf16", kind, how)
    return [x for p in found for x in calls.launches_of(p, target)]


@pytest.mark.parametrize("kind, how", [("fp8", "list"), ("bf16", "table"), ("paged", "split"), ("dense", "prefill")])
def test_every_launch_comes_from_a_file(old, kind, how):
    found = launches(kind, how, old.target)
    assert found
    for x in found:
        name = aot.variant(x.kernel.__name__, [aot.argument_type(a) for a in x.arguments], x.constants, "sm_100a")
        (old.directory / f"{name}.json").touch()
        ReadyLaunch(x, old.target).launch(*x.arguments)
        assert old.done.pop() == (name, x.grid)


def test_a_kernel_without_a_file_is_named_and_not_compiled(old):
    x = launches("fp8", "list", old.target)[0]
    message = f"{x.kernel.__name__}-.* cannot be compiled here: .* need triton >= 3.9; found 3.7"
    with pytest.raises(RuntimeError, match=message):
        ReadyLaunch(x, old.target)


def test_without_a_directory_nothing_is_compiled_either(old):
    """softsm takes no files: it asks the same question, and gets the same words."""
    x = launches("fp8", "list", old.target)[0]
    with pytest.raises(RuntimeError, match="need triton >= 3.9; found 3.7"):
        ReadyLaunch(x, old.target._replace(aot=None, backend="softsm"))
