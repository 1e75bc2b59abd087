"""Numba modules: the cache on disk."""

import os
import subprocess
import sys

import numba

from softsm.engine import build

SOURCE = """
from numba import njit
@njit("i8(i8)", cache=True)
def f(x):
    return x + 1
"""


def test_a_module_is_compiled_once_and_found_again(tmp_path, monkeypatch):
    monkeypatch.setenv("SOFTSM_CACHE", str(tmp_path))
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")  # where the environment has put Numba's cache does not count
    assert build.load("tiny", SOURCE).f(1) == 2
    (index,) = (tmp_path / "__pycache__").glob("tiny_*.nbi")
    before = index.stat().st_mtime_ns
    program = f"from softsm.engine import build; print(build.load('tiny', {SOURCE!r}).f(2))"
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "3" and "compiling" not in run.stderr
    assert index.stat().st_mtime_ns == before
    assert build.load("tiny", SOURCE + "# changed").f(1) == 2
    assert len(list(tmp_path.glob("tiny_*.py"))) == 2


USER = """
from numba import njit
@njit("i8(i8)", cache=True)
def g(x):
    return tiny.f(x) * 10
"""


def test_a_module_that_another_one_uses_decides_its_name(tmp_path, monkeypatch):
    monkeypatch.setenv("SOFTSM_CACHE", str(tmp_path))
    first = build.load("user", USER, tiny=build.load("tiny", SOURCE))
    second = build.load("user", USER, tiny=build.load("tiny", SOURCE.replace("x + 1", "x + 2")))
    assert (first.g(1), second.g(1)) == (20, 30)


def test_less_effort_is_for_one_module_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("SOFTSM_CACHE", str(tmp_path))
    monkeypatch.setattr(numba.config, "OPT", type(numba.config.OPT)(3))
    assert build.load("tiny", "from numba import config\nlevel = int(config.OPT)", effort=2).level == 2
    assert numba.config.OPT == 3
    monkeypatch.setattr(numba.config, "OPT", type(numba.config.OPT)(0))  # somebody looks for a bug
    assert build.load("tiny", "from numba import config\nlevel = int(config.OPT)  #", effort=2).level == 0
