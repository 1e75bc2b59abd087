"""Finds the role of a warp: the function of the program's source that it executes.

Compilers name only the kernel in their line tables, but every instruction has its place in the source and the places
where that was inlined. This module reads the functions at those places from the source itself. One that the program
gives to `warp_specialize`, or whose name ends in `_role`, `_partition` or `_worker`, names the warp.

A compiler's cache outlives the folder where a program was first compiled, and keeps that folder's name in its line
tables; a missing file is therefore looked up among those that the running program was loaded from.
"""

from __future__ import annotations

import ast
import functools
import sys
from pathlib import Path

from softsm.ptx.ast import SourceLoc
from softsm.ptx.cplusplus import outside

ENDINGS = ("_role", "_partition", "_worker")
MOST_CALLERS = 3  # callers that are named


@functools.lru_cache(maxsize=256)
def located(file: str) -> Path:
    """Returns where a line table's file is now: that path, or the loaded file that shares the longest end of it."""
    path = Path(file)
    if path.is_file():
        return path
    loaded = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    same = {Path(name) for name in loaded if name and Path(name).name == path.name}
    return max(sorted(same), key=lambda there: common_end(there, path), default=path)


def common_end(one: Path, other: Path) -> int:
    """Counts the names that two paths share at their ends."""
    pairs = zip(reversed(one.parts), reversed(other.parts), strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one.parts), len(other.parts)))


@functools.lru_cache(maxsize=256)
def functions(file: str) -> tuple[tuple[int, int, str], ...]:
    """Returns (first line, last line, name) of the functions in a Python file; empty if it cannot be read."""
    try:
        tree = ast.parse(located(file).read_text())
    except (OSError, SyntaxError, ValueError):
        return ()
    found = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))
    return tuple((n.lineno, n.end_lineno or n.lineno, n.name) for n in found)


@functools.lru_cache(maxsize=256)
def specialized(file: str) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """Returns (line, names of the functions) of each [(function, arguments), ...] that a Python file gives to
    `warp_specialize`."""
    try:
        tree = ast.parse(located(file).read_text())
    except (OSError, SyntaxError, ValueError):
        return ()
    found = []
    for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call) and last_name(n.func) == "warp_specialize"):
        for listed in (n for n in call.args[:1] if isinstance(n, (ast.List, ast.Tuple))):
            names = (last_name(pair.elts[0]) for pair in listed.elts if isinstance(pair, ast.Tuple) and pair.elts)
            found.append((call.lineno, tuple(names)))
    return tuple(found)


@functools.lru_cache(maxsize=256)
def partitions(file: str) -> frozenset[str]:
    """Returns the names of all functions that a Python file gives to `warp_specialize`."""
    return frozenset(name for _, names in specialized(file) for name in names if name)


def last_name(node: ast.expr) -> str:
    """Returns `f` for f and for module.f; '' for anything else."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


@functools.lru_cache(maxsize=1 << 16)
def function_at(file: str, line: int) -> str:
    """Returns the innermost function around a line of a source file, '' if there is none."""
    inside = [(last - first, name) for first, last, name in functions(file) if first <= line <= last]
    return min(inside)[1] if inside else ""


@functools.lru_cache(maxsize=256)
def imported_from(file: str) -> dict[str, tuple[str, ...]]:
    """Maps names that a Python file imports from loaded modules to the files of those modules."""
    try:
        tree = ast.parse(located(file).read_text())
    except (OSError, SyntaxError, ValueError):
        return {}
    found: dict[str, tuple[str, ...]] = {}
    for node in (n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module):
        ends = (node.module, f".{node.module}")
        modules = [
            m for name, m in list(sys.modules.items()) if name == ends[0] or node.level and name.endswith(ends[1])
        ]
        files = tuple(path for m in modules if (path := getattr(m, "__file__", None)))
        found |= {alias.asname or alias.name: files for alias in node.names}
    return found


@functools.lru_cache(maxsize=1 << 16)
def corrected(loc: SourceLoc) -> SourceLoc:
    """Corrects the file of a place. A compiler that inlines the first function of `warp_specialize` keeps its lines but
    gives them the kernel's file. A line outside the kernel, inside such an imported function, belongs to its file."""
    kernels = [(first, last) for first, last, name in functions(loc.file) if name == loc.function]
    if loc.caller is not None or not kernels or any(first <= loc.line <= last for first, last in kernels):
        return loc
    firsts = [(line, names[0]) for line, names in specialized(loc.file) if names]
    own = [name for line, name in firsts if any(first <= line <= last for first, last in kernels)]
    entries = set(own or (name for _, name in firsts))
    imported = imported_from(loc.file)
    if function_at(loc.file, loc.line) in entries - imported.keys():
        return loc
    for name in sorted(entries & imported.keys()):
        for file in imported[name]:
            if function_at(file, loc.line) == name:
                caller = SourceLoc(loc.file, kernels[0][0], 0, loc.function)
                return SourceLoc(file, loc.line, loc.column, name, caller)
    return loc


def place_of(ins) -> SourceLoc | None:
    """Returns the place in the source that an instruction comes from."""
    return None if ins.loc is None else corrected(outside(ins.loc))


def called_at(loc: SourceLoc) -> str:
    """Returns `, called at FILE:LINE, ...`, the callers of a place in an inlined function up to the first one in
    another file, else ''. The functions of a library are called from many places."""
    callers: list[SourceLoc] = []
    caller = loc.caller
    while caller is not None and len(callers) < MOST_CALLERS:
        callers.append(caller)
        caller = caller.caller if caller.file == loc.file else None
    return f", called at {', '.join(f'{x.file}:{x.line}' for x in callers)}" if callers else ""


def entry_at(place) -> str:
    """Returns the function that names the warp's role at a place of the source or where that was inlined; '' if the
    source has none."""
    chain = []
    while place is not None:
        chain.append(place)
        place = place.caller
    entries = frozenset[str]().union(*(partitions(file) for file in {at.file for at in chain}))
    for at in chain:
        for name in (at.function.rpartition(".")[2], function_at(at.file, at.line)):
            if name in entries or name.endswith(ENDINGS):
                return name
    return ""


def role_of(ins) -> str:
    """Returns the role of an instruction, without its ending; '' if the source names none."""
    name = entry_at(place_of(ins))
    ending = next((e for e in ENDINGS if name.endswith(e)), "")
    return name.removesuffix(ending).strip("_")


@functools.lru_cache(maxsize=4096)
def source_lines(file: str, line: int, around: int = 3) -> tuple[tuple[int, str], ...]:
    """Returns numbered lines of a source file around a place; empty if it cannot be read."""
    try:
        text = located(file).read_text().splitlines()
    except (OSError, ValueError):
        return ()
    first = max(1, line - around)
    return tuple((n, text[n - 1]) for n in range(first, min(line + around, len(text)) + 1))
