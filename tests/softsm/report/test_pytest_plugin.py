"""`pytest --softsm` in a process of its own: fails on a diagnostic, is silent otherwise, and costs nothing without."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys

import pytest

TESTS = '''
import sys
import numpy as np
import pytest
import softsm

PTX = """
.version 8.6 .target sm_90 .address_size 64
.visible .entry exchange(.param .u64 x) .reqntid 64
{
    .reg .b32 %r<8>; .reg .b64 %rd<4>; .shared .align 4 .b8 buffer[256];
    ld.param.u64 %rd1, [x];
    mov.u32 %r1, %tid.x;
    shl.b32 %r2, %r1, 2;
    mov.u32 %r3, buffer;
    add.u32 %r4, %r3, %r2;
    st.shared.u32 [%r4], %r1;
    BARRIER
    xor.b32 %r5, %r2, 128;
    add.u32 %r5, %r3, %r5;
    ld.shared.u32 %r6, [%r5];
    mad.wide.u32 %rd2, %r1, 4, %rd1;
    st.global.u32 [%rd2], %r6;
    ret;
}
"""

def test_right():
    softsm.load(PTX.replace("BARRIER", "bar.sync 0;")).launch(1, 64, [np.zeros(64, np.uint32)])

def test_racy():
    softsm.load(PTX.replace("BARRIER", "")).launch(1, 64, [np.zeros(64, np.uint32)])

def test_expects_it():
    with softsm.checking() as report:
        test_racy()
    assert report.codes()

def test_wrong_for_that_reason():
    softsm.load(PTX.replace("BARRIER", "")).launch(1, 64, [np.zeros(64, np.uint32)])
    assert not any("--softsm" in x for x in sys.argv)
'''

TRITON = """
import pytest
import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "none"

@triton.jit
def add_one(x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)

@triton.jit
def count(x, n, BLOCK: tl.constexpr):
    tl.store(x, tl.load(x) + tl.program_id(0))

@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_right(device):
    x = torch.zeros(100, device=device)
    add_one[(2,)](x, 100, BLOCK=64)
    assert (x == 1).all()

def test_racy():
    x = torch.zeros(1, device=DEVICE)
    count[(4,)](x, 1, BLOCK=64)

def test_target():
    assert torch.cuda.get_device_capability() == CAPABILITY
"""

# Files are all imported before the first test runs.
IMPORTED_LATE = """
@pytest.fixture(autouse=True)
def _softsm():
    global softsm
    import softsm
"""

DORMANT = """
import sys

def test_nothing_is_imported():
    assert "softsm.pytest_plugin" in sys.modules
    heavy = [m for m in sys.modules if m.startswith(("softsm.", "numba", "torch", "triton"))]
    assert heavy == ["softsm.pytest_plugin"], heavy
"""


def run(folder, text: str, *options: str, before: str = "") -> subprocess.CompletedProcess:
    """Runs the tests of `text`, after those of `before`."""
    (folder / "test_it.py").write_text(text)
    (folder / "test_before.py").write_text(before)
    (folder / "pytest.ini").write_text("[pytest]\n")
    installed = any(e.value == "softsm.pytest_plugin" for e in importlib.metadata.entry_points(group="pytest11"))
    plugin = [] if installed else ["-p", "softsm.pytest_plugin"]
    in_order = ["-p", "no:cacheprovider", "-p", "no:randomly"]
    command = [sys.executable, "-m", "pytest", "-q", *in_order, *plugin, *options, "test_before.py", "test_it.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=800)


@pytest.mark.compile
def test_without_the_flag_nothing_is_checked_or_imported(tmp_path) -> None:
    done = run(tmp_path, TESTS.replace("import softsm\n", "") + IMPORTED_LATE, before=DORMANT)
    assert "5 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("option", "capability"), [("--softsm=sm_90a", (9, 0)), pytest.param("--softsm", (10, 0), marks=pytest.mark.slow)]
)
def test_a_diagnostic_fails_the_test_and_triton_programs_need_nothing_else(
    tmp_path, monkeypatch, option, capability
) -> None:
    """PTX first, then Triton: no variable, no fixture; and the file that follows the option is a file."""
    monkeypatch.delenv("SOFTSM", raising=False)
    done = run(tmp_path, TRITON.replace("CAPABILITY", str(capability)), option, before=TESTS)
    assert "3 failed, 5 passed" in done.stdout, done.stdout + done.stderr
    ptx, wrong, triton = re.split("_ test_(?:racy|wrong_for_that_reason) _", done.stdout.split("FAILURES")[1])[1:4]
    for text in (ptx, wrong):
        assert all(x in text for x in ("softsm: 2 findings in 1 launch", "race: ", "fix: ", "st.shared.u32")), text
    assert "assert not any(" in wrong  # the test's own reason is not hidden
    assert "two launches" in triton
    for file in ("test_before.py", "test_it.py"):
        assert f"FAILED {file}::test_racy" in done.stdout


def test_an_unknown_architecture_is_refused(tmp_path) -> None:
    done = run(tmp_path, TESTS, "--softsm=sm_70")
    assert done.returncode == 4 and "--softsm" in done.stderr and "sm_70" in done.stderr
