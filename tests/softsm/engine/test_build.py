"""Generated code: names, numbers, the cache on disk."""

import os
import subprocess
import sys

import pytest

from softsm.engine import assemble, build
from softsm.engine import program as pg
from softsm.isa.registry import MICROS, Micro

assemble.load_chapters()


def test_numbers_agree_with_the_assembler():
    numbers = assemble.micro_numbers()
    hot, cold = build.numbered(pg.FIRST_MICRO)
    assert {m.name: n for n, m in hot + cold} == numbers


def test_the_flat_loop_stays_within_what_numba_bears():
    assert sum(m.hot for m in MICROS.values()) <= 180
    assert all(len(source.splitlines()) <= build.BANK + 10 for source in build.bank_sources(pg.FIRST_MICRO))


@pytest.mark.parametrize("micro, text", [
    (Micro("x", "u", "uu", "a + b", True), "vst(R, rd, m, ldU(R,ra) + ldU(R,rb))"),
    (Micro("x", "d", "d", "a * a", True), "a_x = ldD(Q,ra); vst(Q, rd, m, a_x * a_x)"),
    (Micro("x.y", "p", "ff", "a < b", True), "pst(P, rd, m, ldF(R,ra) < ldF(R,rb))"),
    (Micro("x", "u", "uup", "sel(c, a, b)", True), "vst(R, rd, m, sel(pld(P,rc), ldU(R,ra), ldU(R,rb)))"),
])
def test_a_micro_operation_becomes_one_statement(micro, text):
    assert build.statement(micro) == text


SOURCE = """
from numba import njit
@njit("i8(i8)", cache=True)
def f(x):
    return x + 1
"""


def test_a_module_is_compiled_once_and_found_again(tmp_path, monkeypatch):
    monkeypatch.setenv("SOFTSM_CACHE", str(tmp_path))
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


def test_the_cache_folder_is_the_users_own(monkeypatch, tmp_path):
    monkeypatch.delenv("SOFTSM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.cache_folder() == tmp_path / "softsm"
