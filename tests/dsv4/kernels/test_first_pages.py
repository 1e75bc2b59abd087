"""The first page of a kernel file has a table of its barriers: it names those that the code has, with their counts."""

import ast
import functools
import re
from pathlib import Path

import pytest

import dsv4

ROOT = Path(dsv4.__file__).parent


@functools.cache
def page(path: Path) -> str:
    text = path.read_text()
    return (ast.get_docstring(ast.parse(text)) or "") if "\nbarrier " in text else ""  # parsing takes time


FILES = [p for p in sorted(ROOT.rglob("*.py")) if "\nbarrier " in page(p)]
COUNTED = [p for p in FILES if re.search(r"^barrier .* count ", page(p), re.M)]


def calls(tree: ast.AST, *functions: str) -> list[tuple[str, ast.Call]]:
    """(name, call) of `name = function(...)`."""
    return [
        (x.targets[0].id, x.value)
        for x in ast.walk(tree)
        if isinstance(x, ast.Assign)
        and isinstance(x.targets[0], ast.Name)
        and isinstance(x.value, ast.Call)
        and ast.unparse(x.value.func) in functions
    ]


def made(path: Path) -> dict[str, str]:
    """{barrier: its count} of the rings and barriers that the file makes, or the function make_... that it imports."""
    tree, found = ast.parse(path.read_text()), {}
    for name, call in calls(tree, "new_barriers"):
        found[name] = ast.unparse(call.args[1]) if len(call.args) > 1 else "1"
    for name, call in calls(tree, "new_ring"):
        free, ready = (
            [*(ast.unparse(x) for x in call.args[1:]), "1", "1"][:2]
            if len(call.args) < 3
            else (ast.unparse(call.args[1]), ast.unparse(call.args[2]))
        )
        prefix = "" if name == "ring" else f"{name}_"
        found |= {f"{prefix}ready": ready, f"{prefix}free": free}
    for x in tree.body if not found else ():
        if isinstance(x, ast.ImportFrom) and any(y.name.startswith("make_") for y in x.names):
            found |= made(ROOT.parent / (x.module.replace(".", "/") + ".py"))
    return found


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
    """The names in the first column, without what is in brackets."""
    return re.findall(r"[a-z]\w*", re.sub(r"\[.*?\]", "", line.split("  ")[0]))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_barriers_of_the_table_are_those_of_the_code(path):
    code = path.read_text()
    listed = fields(ast.parse(code), "Barriers") or list(made(path))
    said = [name for line in table(path)[1:] for name in names(line)]
    assert said and (not listed or sorted(said) == sorted(listed))


@pytest.mark.parametrize("path", COUNTED, ids=lambda p: str(p.relative_to(ROOT)))
def test_counts_of_the_table_are_those_of_the_code(path):
    head, *lines = table(path)
    said = {name: line[head.index("count") :].split()[0] for line in lines for name in names(line)}
    counts = made(path)
    if not counts:
        counts = {
            re.match(r"\w+", ast.unparse(call.args[0]))[0]: ast.unparse(call.keywords[0].value)
            for call in ast.walk(ast.parse(path.read_text()))
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "mbarrier.init"
        }
        counts = {name: n for name, n in counts.items() if n.isdigit()}
    assert {name: said[name] for name in counts} == counts
