"""Roles are read from the source, wherever the program lies now."""

from __future__ import annotations

import importlib
import sys
import types

import pytest

import softsm
from softsm.errors import Deadlock
from softsm.ptx import roles
from softsm.ptx.ast import SourceLoc
from softsm.report.diagnostics import Diagnostic, Party, Report

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


def test_a_deadlock_speaks_of_roles_and_barriers_by_their_names_in_the_source(tmp_path):
    """Warp 0, in `feed_role`, waits for an mbarrier without an arrival."""
    source = tmp_path / "program.py"
    source.write_text("def feed_role():\n    mbarrier.init(slot_free.index(i), count=1)\n    wait(slot_free)\n")
    text = f"""
.version 8.6 .target sm_90a .address_size 64
.visible .entry k()
{{
  .reg .pred %p<4>; .shared .align 8 .b64 bar;
  .loc 1 2 5
  mbarrier.init.shared::cta.b64 [bar], 1;
  .loc 1 3 5
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p1, [bar], 0;
  @!%p1 bra WAIT;
  ret;
}}
.file 1 "{source}"
"""
    with softsm.checking() as report, pytest.raises(Deadlock):
        softsm.load(text).launch(1, 1)
    assert "warp 0 (feed) of CTA" in str(report) and "mbarrier slot_free.index(0) (0x400)" in str(report), str(report)


def test_a_finding_comes_once_for_each_pair_of_source_lines():
    report = Report()
    for line in (10, 11, 12):
        report.add(Diagnostic("race", "two accesses", (Party("warp 0", line, "ld", "k.py:3", f"reads {line}"),)))
    report.add(Diagnostic("race", "two accesses", (Party("warp 0", 13, "ld", "k.py:4", "reads 13"),)))
    assert len(report) == 2 and report.again() == {0: 2}
    assert "and 2 more between the same source lines" in str(report)


def test_long_lists_of_registers_are_cut() -> None:
    many = ", ".join(f"%r{i}" for i in range(32))
    text = str(Party("warp 0", 7, f"tcgen05.ld.sync.aligned.32x32b.x32.b32 {{{many}}}, [%r40];", "k.py:3", "reads"))
    assert "b32 {%r0, ..., %r31}, [%r40];" in text
    few = "ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];"
    assert few in str(Party("warp 0", 7, few))


def test_lines_of_the_first_role_belong_to_the_file_it_is_imported_from(tmp_path, monkeypatch):
    """Triton puts it into the kernel, with the kernel's file name and its own lines."""
    (tmp_path / "roles_elsewhere.py").write_text("\n" * 9 + "def lead_role(x):\n    store(x)\n")
    kernel = tmp_path / "kernel_here.py"
    kernel.write_text(
        "from roles_elsewhere import lead_role\ndef kernel(x):\n    warp_specialize([(lead_role, (x,))])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("roles_elsewhere")
    found = roles.corrected(SourceLoc(str(kernel), 11, 5, "kernel"))
    assert found.file == str(tmp_path / "roles_elsewhere.py") and found.line == 11
    assert roles.entry_at(found) == "lead_role"
    for line in (3, 30):  # in the kernel, and nowhere
        assert roles.corrected(SourceLoc(str(kernel), line, 5, "kernel")).file == str(kernel)


def test_lines_of_an_imported_first_role_may_be_those_of_another_role_here(tmp_path, monkeypatch):
    """What Triton puts into the kernel is the first role alone: others have the place that they were inlined at."""
    (tmp_path / "leads_elsewhere.py").write_text("\n\ndef lead(x):\n    store(x)\n")
    kernel = tmp_path / "kernel_of_two.py"
    kernel.write_text(
        "from leads_elsewhere import lead\n\ndef follow(x):\n    load(x)\n\n"
        "def kernel(x):\n    warp_specialize([(lead, (x,)), (follow, (x,))])\n\n"
        "def other(x):\n    warp_specialize([(follow, (x,)), (lead, (x,))])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("leads_elsewhere")
    found = roles.corrected(SourceLoc(str(kernel), 4, 5, "kernel"))
    assert found.file == str(tmp_path / "leads_elsewhere.py") and roles.entry_at(found) == "lead"
    inlined = SourceLoc(str(kernel), 4, 5, "follow", SourceLoc(str(kernel), 6, 1, "kernel"))
    for loc in (inlined, SourceLoc(str(kernel), 4, 5, "other")):
        assert roles.corrected(loc) == loc and roles.entry_at(loc) == "follow"
