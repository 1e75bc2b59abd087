"""What DESIGN.md says about files and functions is so: they exist, and an instruction passes them in that order. And
what stands on what in dsv4: no import runs up."""

import ast
import functools
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import softsm

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "DESIGN.md").read_text()
PATHS = re.findall(r"^## (The path of a [^\n]*)\n(.*?)(?=^## |\Z)", TEXT, flags=re.M | re.S)
KERNEL = """.version 8.7 .target sm_90a .address_size 64
.visible .entry k(.param .u64 src) {
.reg .b32 %r<4>; .reg .b64 %rd<4>;
.shared .align 16 .b8 data[512];
mov.u32 %r1, data;
ld.param.u64 %rd1, [src];
cp.async.cg.shared.global [%r1], [%rd1], 16;
cp.async.wait_all;
ld.shared.u32 %r2, [%r1+256];
ret;
}
"""


def named(section: str) -> list[tuple[str, str]]:
    """(file, function) in the order of the list: `file.py` and the names in code behind it, up to the next file."""
    found, file = [], ""
    for code in re.findall(r"`([^`]+)`", section):
        if code.endswith(".py"):
            file = code
        elif re.fullmatch(r"[A-Za-z_]\w*(\.\w+)?", code) and file:
            found.append((file, code))
    return found


def defined(file: str) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.ClassDef):
            names |= {node.name} | {f"{node.name}.{x.name}" for x in node.body if isinstance(x, ast.FunctionDef)}
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
    return names


@pytest.mark.parametrize(("title", "section"), PATHS, ids=[title for title, _ in PATHS])
def test_every_file_and_function_is_there(title: str, section: str) -> None:
    files = [code for code in re.findall(r"`([^`]+\.py)`", section)]
    assert len(files) >= 5
    for file in files:
        assert (ROOT / file).is_file(), f"{title}: there is no {file}"
    known = {file: defined(file) for file in files}
    for file, name in named(section):
        assert any(name in names for names in known.values()), f"{title}: no {name} in {file}"


def test_an_instruction_takes_the_path_described() -> None:
    """Functions in the order of their first call, compared with the list."""
    section = dict(PATHS)["The path of a PTX instruction"]
    wanted = {}
    for file, name in named(section):
        if name in defined(file) and name not in ("Instruction", "lowers", "micro", "Machine", "AsyncOp"):
            wanted[str(ROOT / file), name] = None
    called: dict[tuple[str, str], None] = {}

    def watch(frame, event, _):
        if event == "call":
            place = frame.f_code.co_filename, frame.f_code.co_qualname
            if place in wanted:
                called.setdefault(place)

    softsm.load.cache_clear()
    with softsm.checking(order="latest") as report:
        sys.setprofile(watch)
        try:
            softsm.load(KERNEL).launch(1, 1, [np.zeros(64, np.uint32)])
        finally:
            sys.setprofile(None)
    assert report.codes() == ["uninitialised"]
    assert list(called) == list(wanted)


# Folders and modules of dsv4 from the bottom: what is in a line imports what is in lines above it, and itself.
LAYERS = (
    "runtime", "kernels", "reference", "caches", "fmha", "v4", "index", "compress", "moe", "flops", "merge",
    "elementwise", "distributed", "integrations", "suites", "bench", "commands", "__main__",
)  # fmt: skip
BESIDE = ("v4", "index", "compress", "moe")
PEERS = {one: tuple(x for x in BESIDE if x != one) for one in BESIDE}
PACKAGE = ROOT / "src" / "dsv4"


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in PACKAGE.rglob("*.py")}


@functools.cache
def imports(name: str) -> frozenset[str]:
    """The modules of dsv4 that a module names in an import, also inside of functions. Importing a module by its name as
    text (runtime/dispatch.py) is not one: that is how an operation finds its kernels."""
    package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {x.name for x in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {base, *(f"{base}.{x.name}" for x in node.names)}
    return frozenset(x for x in found if x in MODULES and x != name and not name.startswith(f"{x}."))


def test_no_import_of_dsv4_runs_up() -> None:
    assert {name.split(".")[1] for name in MODULES if "." in name} == set(LAYERS)
    wrong = []
    for name in MODULES:
        for other in imports(name):
            if name == "dsv4" or other == "dsv4":
                continue  # the public names
            here, there = name.split(".")[1], other.split(".")[1]
            if LAYERS.index(there) > LAYERS.index(here) or there in PEERS.get(here, ()):
                wrong.append(f"{name} imports {other}")
    assert not wrong, "\n".join(wrong)


def test_no_circle_of_modules_in_dsv4() -> None:
    graph = {name: set(imports(name)) for name in MODULES}
    while free := [name for name, others in graph.items() if not others]:
        for name in free:
            del graph[name]
        for others in graph.values():
            others -= set(free)
    assert not graph, f"in a circle, or above one: {sorted(graph)}"


def test_no_folder_of_dsv4_is_a_quarter_of_it() -> None:
    lines: dict[str, int] = {}
    for name, path in MODULES.items():
        folder = name.split(".")[1] if "." in name else "dsv4"
        lines[folder] = lines.get(folder, 0) + len(path.read_text().splitlines())
    command = (PACKAGE.parent / "dsv4_command").glob("*.py")
    lines["commands"] += sum(len(path.read_text().splitlines()) for path in command)
    largest = max(lines, key=lambda folder: lines[folder])
    assert 4 * lines[largest] < sum(lines.values()), f"{largest}: {lines[largest]} of {sum(lines.values())} lines"
