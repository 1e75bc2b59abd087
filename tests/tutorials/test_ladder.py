"""The chapters of tutorials/ do what they say: each of their checks is a test, and what they print can be printed."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import sys
from functools import cache
from pathlib import Path

import pytest

from dsv4.runtime import dispatch

if dispatch.triton_version() < (3, 9):
    pytest.skip("the chapters are written for triton >= 3.9", allow_module_level=True)

FOLDER = Path(__file__).parents[2] / "tutorials"
CHAPTERS = sorted(FOLDER.glob("[0-9]*.py"))


@cache
def chapter(path: Path):
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))  # chapters import `ladder`
    spec = importlib.util.spec_from_file_location(f"chapter_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def checks(path: Path) -> list[str]:
    return re.findall(r"^def (check_\w+)", path.read_text(), re.M)


QUICK = ("02", "11", "13")  # of each kind one; the others only take longer to compile


@pytest.mark.parametrize(
    "path", [pytest.param(x, marks=[pytest.mark.compile] * (x.name[:2] not in QUICK), id=x.stem) for x in CHAPTERS]
)
def test_chapter(path: Path, capsys: pytest.CaptureFixture) -> None:
    """One test per chapter, so that its kernels are compiled once."""
    found = checks(path)
    assert found, "a chapter without a check"
    for name in found:
        getattr(chapter(path), name)()
    chapter(path).show()
    assert capsys.readouterr().out.strip()


def test_every_chapter_names_its_exhibits() -> None:
    assert len(CHAPTERS) == 13
    for path in CHAPTERS:
        assert re.search(r"^Museum: exhibits? \d+", chapter(path).__doc__, re.M), path.name


def test_a_chapter_run_directly_prints_its_page_and_its_checks(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chapter 2, which launches least; in this process, as `python 02_tensor_memory.py` in one of its own."""
    path, ended = FOLDER / "02_tensor_memory.py", []
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(os, "_exit", ended.append)
    runpy.run_path(str(path), run_name="__main__")
    said = capsys.readouterr().out
    assert ended == [0] and "Museum: exhibits" in said
    assert said.count("\nok ") == len(checks(path))


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_every_chapter_can_be_run_directly(path: Path) -> None:
    assert path.read_text().endswith("    from read import main\n\n    main(__file__)\n")
