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
    monkeypatch.syspath_prepend(ROOT / "tools")  # its kernels are a module beside it
    spec = importlib.util.spec_from_file_location("field_tool", ROOT / "tools" / "field.py")
    sys.modules["field_tool"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    for name in ("field_tool", "field_kernels"):
        del sys.modules[name]
    monkeypatch.undo()


def test_the_page_lists_known_kernels_each_with_its_judgement(tool):
    names = {f"{x.project}: {x.name} ({x.arch})" for x in tool.KERNELS}
    page = tool.PAGE.read_text()
    rows = re.findall(r"^\| ([^|]+: [^|]+) \| ([^|]+) \| ([^|]+) \|$", page, re.M)
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
    assert len(tool.commits(tmp_path)) == len(tool.PROJECTS) + len(tool.PACKAGES)
