"""The performance handbook stays short, and what it cites is in the archive of the lab book."""

import re
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
HANDBOOK = (BENCHMARKS / "NOTES.md").read_text()
ARCHIVE = {path.name: path.read_text() for path in (BENCHMARKS / "archive").glob("*.md")}
INDEX = ARCHIVE.pop("README.md")


def numbers(text: str) -> set[int]:
    """1-3, 7 is 1, 2, 3 and 7."""
    spans = [[int(end) for end in part.split("-")] for part in text.split(", ")]
    return {number for span in spans for number in range(span[0], span[-1] + 1)}


def test_the_handbook_has_at_most_400_lines() -> None:
    assert len(HANDBOOK.splitlines()) <= 400


def test_the_index_lists_every_section_of_every_file() -> None:
    listed = {name: numbers(given) for name, given in re.findall(r"^\| \[(\S+)\]\(\1\) \| ([\d, -]+) \|", INDEX, re.M)}
    found = {name: {int(n) for n in re.findall(r"^## (\d+)\. ", text, re.M)} for name, text in ARCHIVE.items()}
    assert listed == found
    assert set.union(*found.values()) == set(range(1, max(set.union(*found.values())) + 1))


def test_sections_that_the_handbook_cites_are_there() -> None:
    cited = set.union(*(numbers(given) for given in re.findall(r"\[(\d+(?:(?:, |-)\d+)*)\]", HANDBOOK)))
    known = {int(n) for text in ARCHIVE.values() for n in re.findall(r"^## (\d+)\. ", text, re.M)}
    assert cited and cited <= known, cited - known


def test_files_that_the_handbook_names_are_there() -> None:
    files = set(re.findall(r"(?:benchmarks/)?((?:results|archive)/[\w.-]+\.(?:json|txt|md))", HANDBOOK))
    missing = [name for name in files if not (BENCHMARKS / name).is_file()]
    assert len(files) >= 4 and not missing, missing
