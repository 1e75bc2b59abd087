"""What a release needs: versions that agree, dates, files for GitHub that parse, one place for addresses."""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("release", ROOT / "tools" / "release.py")
assert spec and spec.loader
release = importlib.util.module_from_spec(spec)
spec.loader.exec_module(release)
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()


def test_every_place_has_one_version_and_its_notes_are_dated() -> None:
    (version,) = set(release.versions().values())
    assert "### dsv4" in release.notes(version, CHANGELOG)
    with pytest.raises(ValueError, match="no heading `## 9.9.9"):
        release.notes("9.9.9", CHANGELOG)
    with pytest.raises(ValueError, match="date-released is .*; CHANGELOG.md has 2001-01-01"):
        release.notes("9.9.9", "## 9.9.9 (2001-01-01)\n")
    headings = re.findall(r"^## (.*)", CHANGELOG, flags=re.M)
    assert [x for x in headings if x[0].isdigit()][0].startswith(f"{version} (")
    assert all(re.fullmatch(r"\d+\.\d+\.\d+ \(\d{4}-\d\d-\d\d\)|Not released yet", x) for x in headings)


@pytest.mark.parametrize(
    "file", [*sorted((ROOT / ".github").rglob("*.yml")), ROOT / "CITATION.cff"], ids=lambda f: f.name
)
def test_files_for_github_parse_and_name_what_exists(file: Path) -> None:
    content = yaml.safe_load(file.read_text())
    assert content
    if file.parent.name == "ISSUE_TEMPLATE" and file.name != "config.yml":
        assert {"name", "description", "body"} <= set(content) and len({x["id"] for x in content["body"]}) >= 3
    for path in re.findall(r"(?:python |run: )(?:sudo \S+ )?((?:tools|\.ci)/[\w./]+)", file.read_text()):
        assert (ROOT / path).exists()


def test_addresses_are_in_one_place() -> None:
    """[project.urls] of pyproject.toml; the site and the other distribution repeat it or read it."""
    projects = [tomllib.loads((ROOT / f / "pyproject.toml").read_text())["project"] for f in (".", "packages/softsm")]
    urls = projects[0].get("urls", {})
    assert urls == projects[1].get("urls", {})
    notebook = (ROOT / "examples" / "first_steps.ipynb").read_text()
    assert re.findall(r'ADDRESS = \\"(.*?)\\"', notebook) == [urls.get("Repository", "")]
    for file in ("mkdocs.yml", "CITATION.cff", "SECURITY.md"):
        assert not re.findall(r"https?://\S*(?:github|gitlab)\S*", (ROOT / file).read_text())
