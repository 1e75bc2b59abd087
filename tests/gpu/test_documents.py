"""Examples of the documents that need a GPU: blocks marked `py`; those marked `python` run everywhere."""

import re
import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = [
    (page.stem, code)
    for page in sorted(DOCS.glob("*.md"))
    for code in re.findall(r"^```py\n(.*?)^```$", page.read_text(), flags=re.M | re.S)
]


def test_there_is_one() -> None:
    assert EXAMPLES


@pytest.mark.gpu
@pytest.mark.parametrize(("page", "code"), EXAMPLES, ids=[page for page, _ in EXAMPLES])
def test_example_runs(page: str, code: str, tmp_path: Path) -> None:
    file = tmp_path / f"{page}.py"
    file.write_text(code)
    runpy.run_path(str(file))
