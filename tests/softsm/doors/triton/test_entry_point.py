"""The `triton.backends` entry point: asleep unless SOFTSM is set, and `import triton` works both ways.

The package need not be installed: a dist-info folder with the entry point is put on the path of a fresh process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[4] / "src"


@pytest.fixture
def run(tmp_path):
    info = tmp_path / "site" / "softsm_entry-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: softsm-entry\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[triton.backends]\nsoftsm = softsm.doors.triton\n")

    def run(code: str, softsm: str | None = None, check: bool = True) -> subprocess.CompletedProcess:
        env = {k: v for k, v in os.environ.items() if k not in ("SOFTSM", "TRITON_BACKENDS_IN_TREE")}
        env["PYTHONPATH"] = os.pathsep.join([str(SOURCE), str(info.parent), env.get("PYTHONPATH", "")])
        env["TRITON_DEFAULT_FP_FUSION"] = "1"
        if softsm is not None:
            env["SOFTSM"] = softsm
        program = tmp_path / "program.py"  # in a file: Triton reads the source of its kernels
        program.write_text(code)
        done = subprocess.run([sys.executable, str(program)], env=env, capture_output=True, text=True)
        assert not check or done.returncode == 0, done.stderr
        return done

    return run


def test_asleep_it_imports_nothing_heavy_and_patches_nothing(run):
    """test_use.py: in use it is Triton's compiler and driver, and all of that goes away again."""
    done = run("""
import sys, triton
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
assert "softsm" in backends and not backends["softsm"].driver.is_active()
assert type(make_backend(GPUTarget("cuda", 90, 32))).__module__ == "triton.backends.nvidia.compiler"
print(sorted(m for m in sys.modules if m == "torch" or m == "numba" or m.startswith("softsm")))
""")
    loaded = ["softsm", "softsm.doors"] + [f"softsm.doors.triton{x}" for x in ("", ".compiler", ".driver")]
    assert done.stdout.strip() == str(loaded)


@pytest.mark.parametrize(
    "arch, first, second",
    [("sm_100a", "triton", "torch"), pytest.param("sm_90a", "torch", "triton", marks=pytest.mark.slow)],
)
@pytest.mark.compile
def test_awake(run, arch, first, second):
    """The other order of imports is quick in tests/softsm/report/test_pytest_plugin.py."""
    done = run(
        f"""
import {first}
import {second}
import triton.testing
import softsm
assert softsm.active_arch() == "{arch}"
target = triton.runtime.driver.active.get_current_target()
assert f"sm_{{target.arch}}a" == "{arch}"
assert torch.zeros(3, device="cuda").is_cuda
assert torch.cuda.get_device_capability() == divmod(target.arch, 10)
with softsm.use("sm_90a"):
    assert triton.runtime.driver.active.get_current_target().arch == 90
assert triton.runtime.driver.active.get_current_target() == target
triton.testing.do_bench(lambda: print("call"))
from triton.compiler.compiler import AsmDict
assert AsmDict(softsm=b"", ptx=".version 8.6\\n.target sm_90a\\n.address_size 64")["cubin"][:4] == b"\\x7fELF"
""",
        softsm=arch,
    )
    assert done.stdout.split() == ["call"]  # a benchmark is one call


def test_unknown_architecture_is_said_at_once(run):
    done = run("import triton", softsm="sm_75", check=False)
    assert done.returncode and "SOFTSM: got 'sm_75'; accepted: sm_90a, sm_100a, sm_103a" in done.stderr
