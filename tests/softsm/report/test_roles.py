"""Roles are read from the source, wherever the program lies now."""

from __future__ import annotations

import sys
import types

import pytest

from softsm.ptx.ast import SourceLoc
from softsm.report import roles

SOURCE = "def load_role():\n    copy()\n\n\ndef kernel():\n    load_role()\n"


@pytest.fixture(autouse=True)
def fresh():
    for known in (roles.located, roles.functions, roles.function_at, roles.partitions, roles.source_lines):
        known.cache_clear()


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A loaded program, kernels/attention.py."""
    path = tmp_path / "here" / "kernels" / "attention.py"
    path.parent.mkdir(parents=True)
    path.write_text(SOURCE)
    module = types.ModuleType("program_of_this_test")
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return path


def test_the_innermost_function_around_a_line(program):
    assert [roles.function_at(str(program), n) for n in (2, 6, 4)] == ["load_role", "kernel", ""]


def test_a_program_compiled_elsewhere_keeps_its_roles(program):
    assert roles.function_at("/gone/kernels/attention.py", 2) == "load_role"
    assert roles.source_lines("/gone/kernels/attention.py", 5, around=0) == ((5, "def kernel():"),)


def test_the_longest_common_end_of_the_path_decides(program, monkeypatch):
    other = types.ModuleType("another_program_of_this_test")
    other.__file__ = str(program.parent.parent / "attention.py")
    monkeypatch.setitem(sys.modules, other.__name__, other)
    (program.parent.parent / "attention.py").write_text("x = 1\n")
    assert roles.function_at("/gone/kernels/attention.py", 2) == "load_role"


def test_a_file_that_is_nowhere_names_nothing():
    assert roles.function_at("/gone/nobody_has_this.py", 2) == ""


PARTITIONS = """def left(x):
    helper(x)


def feed(x):
    helper(x)


def helper(x):
    copy(x)


def kernel(x):
    gl.warp_specialize([
        (left, (x,)),
        (loads.feed, (x,)),
    ], [1], [24])
    helper(x)
"""


def test_what_is_given_to_warp_specialize_is_a_role(program):
    program.write_text(PARTITIONS)
    assert roles.partitions(str(program)) == {"left", "feed"}
    kernel = SourceLoc(str(program), 14, 5, "kernel")
    inlined = {f: SourceLoc(str(program), line, 5, "kernel", kernel) for f, line in (("left", 2), ("feed", 6))}
    for name, place in inlined.items():
        deep = SourceLoc(str(program), 10, 5, "kernel", place)
        assert roles.role_of(types.SimpleNamespace(loc=deep)) == name
    assert roles.role_of(types.SimpleNamespace(loc=SourceLoc(str(program), 10, 5, "kernel", kernel))) == ""
