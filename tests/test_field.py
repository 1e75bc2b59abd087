"""The table of published kernels (docs/field.md) is that of tools/field.py."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tool():
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.syspath_prepend(ROOT / "tools")  # its kernels are a module in the same folder
    spec = importlib.util.spec_from_file_location("field_tool", ROOT / "tools" / "field.py")
    sys.modules["field_tool"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    for name in ("field_tool", "field_kernels"):
        del sys.modules[name]
    monkeypatch.undo()


def test_the_page_lists_known_kernels_each_with_its_judgement(tool):
    names = {tool.title(x) for x in tool.KERNELS}
    page = tool.PAGE.read_text()
    rows = re.findall(r"^\| ([^|]+: [^|]+?)(?: °)? \| ([^|]+) \| ([^|]+) \|$", page, re.M)
    assert len(rows) > 15 and {where for where, _, _ in rows} <= names
    for where, result, found in rows:
        assert "NOT JUDGED" not in found, where
        assert result in ("right", "right where it ends") or (result.startswith("wrong, by") and "real" in found), where
    for address, commit in tool.PROJECTS.values():
        assert f"]({address}) | {commit} |" in page
    assert all(f"{name}=={version}" in page for name, version in tool.PACKAGES.items())


def test_judgements_name_kernels_that_are_there(tool):
    for name, _, _ in tool.JUDGED:
        assert any(name in x.name for x in tool.KERNELS), name


def test_a_command_names_the_sources(tool, tmp_path):
    for kernel in tool.KERNELS:
        words = tool.command(kernel, tmp_path)
        said = words[words.index("--clang-flags") + 1] if "--clang-flags" in words else words[-1]
        assert "{" not in said
        if kernel.file != "packages.py":  # it finds them by PYTHONPATH
            assert str(tmp_path) in " ".join(words), kernel.name
    assert len({(x.project, x.name, x.arch) for x in tool.KERNELS}) == len(tool.KERNELS)
    assert len(tool.commits(tmp_path, tool.KERNELS)) == len(tool.PROJECTS) + len(tool.PACKAGES)
    assert [x.split()[2].rsplit("/", 1)[1] for x in tool.commits(tmp_path, tool.KERNELS[:1])] == ["cutlass"]


def test_a_finding_without_a_judgement_is_a_failure(tool):
    kernel = next(x for x in tool.KERNELS if "tutorial 01_mma" in x.name)
    report = {"failures": [], "warnings": [], "findings": [], "orders": ["eager"], "launches": 1}
    assert tool.row(kernel, report) == (f"| {tool.title(kernel)} | right | nothing |", True)
    finding = {"code": "race", "message": "", "parties": [], "stopped": False, "orders": ["eager"]}
    line, well = tool.row(kernel, report | {"findings": [finding]})
    assert "NOT JUDGED" in line and not well
    assert not tool.row(kernel, {})[1]


def test_the_table_names_one_commit_of_softsm_and_marks_other_lines(tool, tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    new, old, *_ = tool.KERNELS
    lines = [f"| {tool.title(x)} | right | old |" for x in (new, old)]
    page.write_text("\n".join(["before", tool.BEGIN, *lines, tool.END, "after"]))
    monkeypatch.setattr(tool, "PAGE", page)
    monkeypatch.setattr(tool, "find_clang", lambda: "clang++")
    monkeypatch.setattr(tool, "version_of", lambda clang: 22)
    report = {"failures": [], "warnings": [], "findings": [], "orders": ["eager"], "launches": 1}
    for _ in range(2):  # a mark is not lost, nor made twice
        tool.write({tool.title(new): report}, "0123abcd")
        text = page.read_text()
        assert "1 of 2 lines are of one commit of softsm, 0123abcd, with clang 22" in text
        assert f"| {tool.title(new)} | right | nothing |" in text and f"| {tool.title(old)} ° | right | old |" in text
    tool.write({tool.title(new): report, tool.title(old): report}, "4567abcd")
    text = page.read_text()
    assert "2 of 2 lines" in text and "°" not in text and text.startswith("before") and text.endswith("after")
