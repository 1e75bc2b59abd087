"""The name of a source file leads to its tests: tests/softsm/isa mirrors src/softsm/isa."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
OTHERS = {"isa_page"}  # the page about all of them


def modules() -> set[str]:
    return {path.stem for path in (ROOT / "src/softsm/isa").glob("*.py")} - {"__init__"}


def files() -> set[str]:
    return {path.stem.removeprefix("test_") for path in (ROOT / "tests/softsm/isa").glob("test_*.py")}


def test_every_chapter_has_a_test_file_of_its_name():
    assert len(modules()) > 30
    assert not modules() - files(), "chapters without tests/softsm/isa/test_<name>.py"


def test_every_test_file_is_named_after_a_chapter():
    """test_<chapter>.py, or test_<chapter>_<what>.py where one file would be too long."""
    lost = [name for name in files() - OTHERS if not any(f"{name}_".startswith(f"{m}_") for m in modules())]
    assert not lost, f"no chapter of this name: {lost}"
