"""Helpers next to the tests are found by name in several folders: no name may occur twice."""

import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_names_of_helpers_are_unique() -> None:
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["pythonpath"]
    names = Counter(path.stem for folder in folders for path in (ROOT / folder).glob("*.py"))
    twice = [name for name, count in names.items() if count > 1 and not name.startswith(("test_", "conftest"))]
    assert names and not twice, f"the first folder's file would be taken for the others': {twice}"
