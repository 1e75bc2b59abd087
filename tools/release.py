"""python tools/release.py v0.2.0: whether this tree is that version, and its part of the changelog, on stdout.

The tag, both pyproject.toml files, both __version__, CITATION.cff and a heading of CHANGELOG.md must agree, and so must
the dates of the last two.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def versions(root: Path = ROOT) -> dict[str, str]:
    """Where a version is written -> what is written there."""
    found = {}
    for file in ("pyproject.toml", "packages/softsm/pyproject.toml"):
        found[file] = tomllib.loads((root / file).read_text())["project"]["version"]
    for file in ("src/dsv4/__init__.py", "src/softsm/__init__.py"):
        found[file] = re.findall(r'^__version__ = "(.*)"', (root / file).read_text(), flags=re.M)[0]
    found["CITATION.cff"] = re.findall(r"^version: (.*)", (root / "CITATION.cff").read_text(), flags=re.M)[0]
    return found


def notes(version: str, text: str, root: Path = ROOT) -> str:
    """The section of a version; ValueError where it has none, no date, or another date than the citation."""
    section = re.search(rf"^## {re.escape(version)} \((\d{{4}}-\d\d-\d\d)\)\n(.*?)(?=^## |\Z)", text, flags=re.M | re.S)
    if section is None:
        raise ValueError(f"CHANGELOG.md: no heading `## {version} (YYYY-MM-DD)`")
    cited = re.findall(r"^date-released: (.*)", (root / "CITATION.cff").read_text(), flags=re.M)
    if cited != [section[1]]:
        raise ValueError(f"CITATION.cff: date-released is {cited}; CHANGELOG.md has {section[1]}")
    return section[2].strip() + "\n"


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/release.py v0.2.0")
    version = sys.argv[1].removeprefix("v")
    wrong = [f"{file}: {found}" for file, found in versions().items() if found != version]
    if wrong:
        sys.exit(f"the tag is {version}, but {'; '.join(wrong)}")
    try:
        print(notes(version, (ROOT / "CHANGELOG.md").read_text()), end="")
    except ValueError as problem:
        sys.exit(str(problem))


if __name__ == "__main__":
    main()
