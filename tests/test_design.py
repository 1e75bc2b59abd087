"""What DESIGN.md says about files and functions is so: they exist, and an instruction passes them in that order."""

import ast
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import softsm

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "DESIGN.md").read_text()
PATHS = re.findall(r"^## (The path of a [^\n]*)\n(.*?)(?=^## |\Z)", TEXT, flags=re.M | re.S)
KERNEL = """.version 8.7
.target sm_90a
.address_size 64
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
    # The checked twin of a kernel is assembled when it is launched: both times count once, at the first.
    assert list(called) == list(wanted)
