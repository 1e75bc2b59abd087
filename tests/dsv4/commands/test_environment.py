"""The list of environment variables is that of the sources, and so is the page."""

import re
from pathlib import Path

from dsv4.commands import environment

ROOT = Path(__file__).parents[3]
READ = re.compile(r"""(?:environ(?:\.get)?[\[(]|number_in\(|switched_on\(|_?SWITCH = )"([A-Z][A-Z0-9_]+)\"""")


def test_every_variable_that_the_sources_read_is_listed() -> None:
    texts = [path.read_text() for path in (ROOT / "src").rglob("*.py")]
    read = {name for text in texts for name in READ.findall(text)}
    ours = {variable.name for variable in (*environment.DSV4, *environment.SOFTSM)}
    assert {"DSV4_CHECK", "DSV4_AOT", "DSV4_VLLM_PARTS", "SOFTSM_BUDGET"} <= read
    assert ours <= read <= {variable.name for variable in environment.EVERY}


def test_the_page_has_every_variable_with_its_default_and_effect() -> None:
    page = (ROOT / "docs" / "environment.md").read_text()
    for variable in environment.EVERY:
        default = f"`{variable.default}`" if variable.default else "not set"
        assert f"| `{variable.name}` | {default} | {variable.effect} |" in page, variable.name
