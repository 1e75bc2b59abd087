"""Modules of softsm build on each other in one direction, imports inside functions and for type checkers included."""

import ast
import functools
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2] / "src"


@functools.cache
def imports() -> dict[str, set[str]]:
    """module -> modules of softsm it imports anywhere, also for type checkers alone."""
    modules = {}
    for path in sorted((ROOT / "softsm").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    found = {}
    for name, path in modules.items():
        used: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                used |= {x.name for x in node.names}
            elif isinstance(node, ast.ImportFrom):
                whole = {f"{node.module}.{x.name}" for x in node.names}
                used |= whole if whole & modules.keys() else {node.module or ""}
        found[name] = used & modules.keys() - {name}
    return found


def test_no_module_needs_itself():
    graph = imports()
    assert len(graph) > 100 and "softsm.engine.program" in graph["softsm.engine.scheduler"]
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"imports go round: {' <- '.join(error.args[1])}") from None


def test_the_test_sees_a_circle():
    graph = imports() | {"softsm.engine.program": {"softsm.engine.scheduler"}}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return
    raise AssertionError("a circle was not noticed")


# From the bottom to the top. Folders on one line may use each other, as long as no circle of modules arises.
LAYERS = (
    ("errors", "accepted", "formats", "resident"),
    ("ptx", "memory"),
    ("engine", "isa"),  # the machine: an instruction is lowered by isa, and what runs it is engine
    ("timing_model",),
    ("report",),
    ("checks",),
    ("museum", "doors", "arguments"),
    ("commands",),
    ("cli", "pytest_plugin", "__main__"),
)


def layer(module: str) -> int:
    name = module.split(".")[1]
    return next(number for number, names in enumerate(LAYERS) if name in names)


def upward(graph: dict[str, set[str]]) -> list[str]:
    pairs = [(a, b) for a, used in graph.items() for b in used if "." in a and "." in b]
    return sorted(f"{a} -> {b}" for a, b in pairs if layer(a) < layer(b))


def test_no_import_runs_upwards():
    assert not upward(imports())


def test_the_test_sees_an_import_that_runs_upwards():
    graph = imports() | {"softsm.engine.scheduler": {"softsm.checks.checker"}}
    assert upward(graph) == ["softsm.engine.scheduler -> softsm.checks.checker"]


def test_every_folder_has_its_layer():
    names = {x.stem for x in (ROOT / "softsm").iterdir() if x.suffix == ".py" or (x / "__init__.py").is_file()}
    assert names - {"__init__"} == {name for names in LAYERS for name in names}
