"""The two distributions, dsv4 and softsm: built, checked, installed into an empty environment and used there.

What needs a build is slow; .ci/run runs it after the quick tests."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECTS = {"softsm": "packages/softsm", "dsv4": "."}
BESIDE = {"softsm": [], "dsv4": ["dsv4_command"]}  # modules that a wheel holds outside its package
# Byte code appears and is renamed while other workers import.
IGNORED = shutil.ignore_patterns("*.egg-info", "__pycache__")
NEEDED = [name for name in ("build", "twine", "setuptools") if importlib.util.find_spec(name) is None]


def run(*command: object, cwd: Path) -> str:
    """Runs a command without this repository's sources on the path."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both wheels and both source distributions."""
    if NEEDED:
        if os.environ.get("DSV4_CI"):
            pytest.fail(f"DSV4_CI is set, but {NEEDED} are not installed")
        pytest.skip(f"not installed: {NEEDED} (pip install -e '.[dev]')")
    folder, tree = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("tree")
    for name in "LICENSE Makefile MANIFEST.in README.md pyproject.toml constraints.txt mkdocs.yml".split():
        shutil.copy(ROOT / name, tree)
    for name in ("src", "packages", "docs", "tests", "tutorials", "benchmarks"):  # a build leaves files next to sources
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=IGNORED)
    for project in PROJECTS.values():
        options = "--no-isolation --skip-dependency-check --outdir".split()
        run(sys.executable, "-m", "build", *options, folder, tree / project, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def fresh(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheels, in which torch and the other dependencies are those of this one."""
    folder = tmp_path_factory.mktemp("fresh")
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    packages = next((folder / "lib").glob("python*")) / "site-packages"
    # A path in a .pth file is added as it is: the editable installation of this repository there stays inactive.
    specs = [importlib.util.find_spec(name) for name in ("torch", "triton", "numba", "typer")]
    homes = {str(Path(spec.origin).parents[1]) for spec in specs if spec and spec.origin}
    homes = sorted(homes, key=sys.path.index)  # where two hold a package, the one that counts here
    (packages / "dependencies.pth").write_text("\n".join(homes) + "\n")
    wheels = built.glob("*.whl")
    python = folder / "bin" / "python"
    options = "--no-deps --no-index --no-compile".split()
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, *wheels, cwd=folder)
    return folder


@pytest.mark.slow
def test_metadata_and_descriptions_pass_twine(built: Path) -> None:
    assert len(list(built.iterdir())) == 4
    run(sys.executable, "-m", "twine", "check", "--strict", *built.iterdir(), cwd=built)


@pytest.mark.slow
def test_a_wheel_holds_its_own_package_and_says_that_it_is_typed(built: Path) -> None:
    for name in PROJECTS:
        (wheel,) = built.glob(f"{name}-*.whl")
        files = zipfile.ZipFile(wheel).namelist()
        assert f"{name}/py.typed" in files
        assert {file.split("/")[0].split("-")[0] for file in files} == {name, *BESIDE[name]}
    names = set(zipfile.ZipFile(next(built.glob("softsm-*.whl"))).namelist())
    cuda = {
        f"softsm/doors/cuda/{name}" for name in ("host.cpp", "include/cuda_runtime.h", "toolkit/curand_mtgp32_kernel.h")
    }
    assert {"softsm/report/page.html", *cuda} <= names


@pytest.mark.slow
def test_the_source_distribution_has_documents_tutorials_and_tests(built: Path) -> None:
    (archive,) = built.glob("dsv4-*.tar.gz")
    files = {name.partition("/")[2] for name in tarfile.open(archive).getnames()}
    wanted = "docs/install.md mkdocs.yml tutorials/01_scores.py tests/conftest.py tests/softsm/test_cli.py Makefile"
    assert set(wanted.split()) | {"src/softsm/cli.py", "packages/softsm/pyproject.toml"} <= files
    assert not [name for name in files if name.endswith(".pyc")]


PROGRAM = """
import runpy, sys
from importlib.metadata import entry_points, requires, version
import dsv4, softsm, torch
assert dsv4.__file__.startswith(sys.prefix) and softsm.__file__.startswith(sys.prefix), (dsv4.__file__, softsm.__file__)
assert dsv4.__version__ == version("dsv4") == softsm.__version__ == version("softsm")
q = torch.randn(1, 3, 4, 64)
assert dsv4.fmha(q, q, q).shape == q.shape
for group, name in (("triton.backends", "softsm"), ("pytest11", "softsm"), ("vllm.general_plugins", "dsv4")):
    assert [x.load() for x in entry_points(group=group, name=name)], group
sys.argv = ["dsv4", "--version"]
runpy.run_path(f"{sys.prefix}/bin/dsv4", run_name="__main__")
"""


@pytest.mark.slow
def test_an_installation_computes_finds_its_plug_ins_and_both_commands_say_their_version(fresh: Path) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert run(fresh / "bin" / "python", "-c", PROGRAM, cwd=fresh) == f"dsv4 {version}\n"
    assert run(fresh / "bin" / "softsm", "--version", cwd=fresh) == f"softsm {version}\n"


@pytest.mark.slow
def test_softsm_needs_neither_dsv4_nor_torch_to_check_ptx(fresh: Path) -> None:
    refuse = "import sys; sys.modules.update(dict.fromkeys(('dsv4', 'torch', 'triton')))\n"
    program = "from softsm.cli import app; app(['museum', '16'])"
    assert "1 passed, 0 failed" in run(fresh / "bin" / "python", "-c", refuse + program, cwd=fresh)


@pytest.mark.compile
def test_kernels_need_nothing_but_torch_and_triton(tmp_path: Path) -> None:
    """What the Hugging Face hub demands of a kernel; also beside engines that pin another numba. And the folders that
    docstrings name need no import of their own, where nothing else has imported them."""
    refused = ("numba", "llvmlite", "ml_dtypes", "typer", "rich")
    program = f"""
import sys
sys.modules.update(dict.fromkeys({refused!r}))
sys.path.insert(0, {str(ROOT / "src")!r})
import importlib, triton  # which imports the backends that are installed, softsm's too
sys.modules["softsm"] = None
import torch, dsv4
dsv4.reference.rope_table(4, 8), dsv4.integrations, dsv4.distributed
assert not hasattr(dsv4, "no_such_name")
for arch in ("sm90", "sm100"):
    for operation in ("fmha", "v4", "index", "compress", "moe"):
        importlib.import_module(f"dsv4.{{operation}}.kernels.{{arch}}.entry")
import dsv4.integrations.flash_mla, dsv4.integrations.flash_attn, dsv4.distributed
q = torch.randn(2, 4, 512)
assert dsv4.v4_attention(q, torch.randn(9, 512), torch.zeros(2, 3, dtype=torch.int32)).shape == q.shape
print("fine")
"""
    assert run(sys.executable, "-c", program, cwd=tmp_path) == "fine\n"


@pytest.mark.parametrize("page", ["packages/dsv4.md", "packages/softsm/README.md"])
def test_a_long_description_has_no_link_that_only_works_here(page: str) -> None:
    prose = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.S)
    assert not [x for x in re.findall(r"\]\(([^)]+)\)", prose) if not x.startswith("https://")]


def test_the_emulator_does_not_ask_for_the_kernels() -> None:
    softsm = tomllib.loads((ROOT / "packages" / "softsm" / "pyproject.toml").read_text())["project"]
    dsv4 = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not [x for x in softsm["dependencies"] if re.match("dsv4|torch|triton", x)]
    assert not [x for x in dsv4["dependencies"] if re.match("softsm|numba|llvmlite|ml_dtypes", x)]
    assert dsv4["optional-dependencies"]["softsm"] == [f"softsm=={softsm['version']}"]
