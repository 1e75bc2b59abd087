"""Every exhibit: the bug is named, the corrected twin is right and silent under every order of completion."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from softsm.cli import app
from softsm.museum.judge import gather, judge

EXHIBITS = gather()
STRICT = (Path(__file__).parents[2] / "docs" / "strict.md").read_text()


def test_all_exhibits_are_there():
    assert list(EXHIBITS) == list(range(1, 40))


@pytest.mark.parametrize("number", EXHIBITS)
def test_exhibit(number):
    verdict = judge(EXHIBITS[number])
    assert verdict.passed, verdict.problem
    assert len(verdict.shown) == len(EXHIBITS[number].bugs)
    reason = re.search(rf"^\| {number} \| (\w+) \| .+ \|$", STRICT, flags=re.M)
    assert verdict.level == (reason[1] if reason else "default"), "docs/strict.md gives levels and reasons"


def test_the_command_prints_one_line_each():
    result = CliRunner().invoke(app, ["museum", "3", "23"])
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert len(lines) == 3 and lines[-1] == "2 passed, 0 failed"
    assert lines[0].split()[:4] == ["3", "ok", "default", "misaligned"]
    assert CliRunner().invoke(app, ["museum", "99"]).exit_code == 2
