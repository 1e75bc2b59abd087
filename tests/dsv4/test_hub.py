"""`dsv4 hub`: a build that loads under its own name, without the package, twice, and next to an installed dsv4."""

import json
import subprocess
import sys

import pytest

from dsv4.commands import hub

ALLOWED = {"einops", "helion", "tvm-ffi"}


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    return hub.write(tmp_path_factory.mktemp("hub"))


def run(program: str, *arguments) -> str:
    """Runs the program in a process that has torch and Triton, but neither dsv4 nor softsm."""
    refuse = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("dsv4", "softsm", "numba", "ml_dtypes", "typer", "rich"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
import importlib.util
def load(name, folder):
    spec = importlib.util.spec_from_file_location(name, f"{folder}/__init__.py", submodule_search_locations=[folder])
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
"""
    done = subprocess.run(
        [sys.executable, "-c", refuse + program, *map(str, arguments)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_description_has_what_the_hub_asks_for(build):
    name, folder, _ = build
    said = json.loads((folder / "metadata.json").read_text())
    assert {"name", "id", "version", "license", "python-depends", "backend"} <= set(said)
    assert said["id"] == name and name.isidentifier() and isinstance(said["version"], int)
    assert set(said["python-depends"]) <= ALLOWED


@pytest.mark.compile
def test_the_same_sources_give_the_same_name(build, tmp_path):
    assert hub.write(tmp_path / "again")[0] == build[0]


def test_every_kernel_is_in_the_build_and_no_command_is(build):
    modules = build[2]
    assert {"v4.kernels.sm90.entry", "fmha.kernels.sm100.entry", "runtime.dispatch"} <= set(modules)
    assert not [m for m in modules if m.startswith(("commands", "suites", "integrations.vllm"))]


@pytest.mark.slow  # a process; the others look at the same build
def test_it_computes_attention_without_the_package_and_under_two_names(build, tmp_path):
    name, folder, _ = build
    program = """
import shutil, torch
first = load(sys.argv[1], sys.argv[2])
torch.manual_seed(0)
q = torch.randn(40, 4, 128, dtype=torch.bfloat16)
starts = torch.tensor([0, 15, 40], dtype=torch.int32)
out = first.flash_attn_varlen_func(q, q, q, starts, starts, 25, 25, causal=True)
wanted = torch.nn.functional.scaled_dot_product_attention(*(q[:15].transpose(0, 1).float(),) * 3, is_causal=True)
rounded = 2 * 2**-9 * q.abs().max()  # P, and the result
assert (out[:15].transpose(0, 1).float() - wanted).abs().max() <= rounded
q = torch.randn(2, 8, 512, dtype=torch.bfloat16)
lists = torch.arange(64, dtype=torch.int32).expand(2, 64)
assert first.v4_attention(q, torch.randn(64, 512, dtype=torch.bfloat16), lists).shape == (2, 8, 512)
assert "dsv4" not in sys.modules and hasattr(torch.ops, sys.argv[1])
print("fine")
"""
    assert run(program, name, folder) == "fine\n"


def test_a_package_that_the_hub_lacks_is_named(monkeypatch, tmp_path):
    (tmp_path / "numbers_of.py").write_text("import numba\n")
    monkeypatch.setattr(hub, "PACKAGE", tmp_path)
    with pytest.raises(ImportError, match="dsv4.numbers_of imports numba"):
        hub.imports("numbers_of")
