"""The first page of a kernel file has a table of its barriers: it names those that the code has, with their counts."""

import ast
import re
from pathlib import Path

import pytest

import dsv4

ROOT = Path(dsv4.__file__).parent


def page(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""


FILES = [p for p in sorted(ROOT.rglob("*.py")) if "\nbarrier " in page(p)]
COUNTED = [p for p in FILES if re.search(r"^barrier .* count ", page(p), re.M) and "class Barriers" in p.read_text()]


def fields(tree: ast.Module, cls: str) -> list[str]:
    return [
        x.target.id
        for c in tree.body
        if isinstance(c, ast.ClassDef) and c.name == cls
        for x in c.body
        if isinstance(x, ast.AnnAssign)
    ]


def table(path: Path) -> list[str]:
    """Lines of the table of barriers, its head first, up to an empty line, without continued lines."""
    found = page(path)
    lines = found[re.search("^barrier ", found, re.M).start() :].partition("\n\n")[0].splitlines()
    return [line for line in lines if line[:1].strip()]


def names(line: str) -> list[str]:
    """Of the first column, without what is in brackets."""
    return re.findall(r"[a-z]\w*", re.sub(r"\[.*?\]", "", line.split("  ")[0]))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_barriers_of_the_table_are_those_of_the_code(path):
    code = path.read_text()
    listed = fields(ast.parse(code), "Barriers")
    said = [name for line in table(path)[1:] for name in names(line)]
    assert said and (not listed or sorted(said) == sorted(listed))


@pytest.mark.parametrize("path", COUNTED, ids=lambda p: str(p.relative_to(ROOT)))
def test_counts_of_the_table_are_those_of_the_code(path):
    head, *lines = table(path)
    said = {name: line[head.index("count") :].split()[0] for line in lines for name in names(line)}
    made = {
        re.match(r"\w+", ast.unparse(call.args[0]))[0]: ast.unparse(call.keywords[0].value)
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "mbarrier.init"
    }
    numbers = {name: n for name, n in made.items() if n.isdigit()}
    assert numbers and {name: said[name] for name in numbers} == numbers
