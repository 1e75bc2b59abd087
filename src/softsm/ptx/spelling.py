"""Finds what a program's source calls an operand of an instruction, following the inlined callers.

A project's library wraps mbarriers in its own functions. `self.bars.index(i)` in a method `wait` tells nothing, but a
method of a ring calls it as `self.free.wait(stage.index)`, and `k.acquire(stage)` calls that one. The places where an
instruction was inlined give these lines; with arguments substituted for parameters, the mbarrier is
`k.free.bars.index(stage.index)`.
"""

from __future__ import annotations

import ast
import functools

from softsm.ptx.ast import SourceLoc
from softsm.ptx.roles import last_name, located

USES = frozenset({"arrive", "wait", "expect", "commit", "tcgen05_commit", "mbarrier_arrive"})


@functools.lru_cache(maxsize=256)
def parsed(file: str) -> ast.Module | None:
    try:
        return ast.parse(located(file).read_text())
    except (OSError, SyntaxError, ValueError):
        return None


def around(file: str, line: int, kind: type) -> list:
    """Returns the nodes of a kind (calls or functions) that contain a line, the innermost last."""
    tree = parsed(file)
    nodes: list = [n for n in ast.walk(tree) if isinstance(n, kind)] if tree is not None else []
    found = [n for n in nodes if n.lineno <= line <= n.end_lineno]
    return sorted(found, key=lambda n: n.lineno - n.end_lineno)


def arguments(function: ast.FunctionDef, call: ast.Call) -> dict[str, ast.expr]:
    """Maps parameters to a call's arguments."""
    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
    given = list(call.args)
    if names[:1] == ["self"] and isinstance(call.func, ast.Attribute):
        given.insert(0, call.func.value)
    return dict(zip(names, given)) | {k.arg: k.value for k in call.keywords if k.arg}


class Replaced(ast.NodeTransformer):
    def __init__(self, names: dict[str, ast.expr]):
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.names.get(node.id, node)


@functools.lru_cache(maxsize=4096)
def mbarrier_at(loc: SourceLoc) -> str:
    """Returns the mbarrier that the statement at a place waits for or arrives at, as the outermost caller that passes
    it spells it; '' where the source does not tell."""
    calls = [n for n in around(loc.file, loc.line, ast.Call) if last_name(n.func) in USES and n.args]
    if not calls:
        return ""
    found: ast.expr = calls[-1].args[0]
    place: SourceLoc | None = loc
    while place is not None and place.caller is not None:
        functions = around(place.file, place.line, ast.FunctionDef)
        if not functions:
            break
        outer = around(place.caller.file, place.caller.line, ast.Call)
        outer = [n for n in outer if last_name(n.func) == functions[-1].name]
        roots = {n.id for n in ast.walk(found) if isinstance(n, ast.Name)}
        given = arguments(functions[-1], outer[-1]) if outer else {}
        if not roots & given.keys():
            break
        found = ast.fix_missing_locations(Replaced(given).visit(ast.parse(ast.unparse(found), mode="eval").body))
        place = place.caller
    return ast.unparse(found)
