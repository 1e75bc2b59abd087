"""`softsm time`: what a user reads when the program ends, however it does."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import softsm
from softsm.cli import app
from softsm.commands import time as command
from softsm.doors.triton.runtime import bench_once

pytest.importorskip("triton")  # its wheel holds ptxas and nvdisasm

PTX = """
.version 8.3 .target sm_90a .address_size 64
.visible .entry doubled(.param .u64 x, .param .u32 n)
.reqntid 32, 1, 1
{
  .reg .b32 %r<4>, %f<2>; .reg .b64 %d<4>; .reg .pred %p<2>;
  ld.param.u64 %d1, [x]; ld.param.u32 %r3, [n]; mov.u32 %r1, %tid.x; mul.wide.u32 %d2, %r1, 4; add.u64 %d2, %d2, %d1;
  ld.global.b32 %f1, [%d2]; mov.u32 %r2, 0;
LOOP:
  add.rn.f32 %f1, %f1, %f1; add.u32 %r2, %r2, 1; setp.lt.u32 %p1, %r2, %r3; @%p1 bra LOOP;
  st.global.b32 [%d2], %f1; ret;
}"""
PROGRAM = f"""
import numpy as np
import sys
import softsm
kernel = softsm.load('''{PTX}''')
x = np.ones(32, np.float32)
def launch(n):
    kernel.launch(1, 32, [x, n])
"""


def timed(path, text: str, *options: str):
    (path / "program.py").write_text(PROGRAM + text)
    return CliRunner().invoke(app, ["time", "--gpu", "h200", *options, str(path / "program.py")])


def test_launches_before_a_failed_check_have_their_times(tmp_path) -> None:
    done = timed(tmp_path, "launch(1)\nassert False, 'far off'\nlaunch(2)\n")
    assert done.exit_code == 1, done.output
    assert done.output.count("doubled on H200: ") == 1
    assert "AssertionError: far off" in done.output and "If it was a check of results" in done.output
    found = json.loads(timed(tmp_path, "launch(1)\nassert False, 'far off'\n", "--json").stdout)
    assert len(found["launches"]) == 1 and "AssertionError: far off" in found["failure"]


@pytest.mark.parametrize(("status", "code"), [(0, 0), (3, 1)])
def test_a_program_that_exits_has_its_times(tmp_path, status, code) -> None:
    done = timed(tmp_path, f"launch(1)\nsys.exit({status})\n")
    assert done.exit_code == code and "doubled on H200: " in done.output
    assert ("ended with status 3" in done.output) == bool(code)


def test_a_program_that_launches_nothing_has_no_time(tmp_path) -> None:
    done = timed(tmp_path, "print('hello')\n")
    assert done.exit_code == 1 and done.output.splitlines()[-1] == "no time: no kernel was launched"
    found = json.loads(timed(tmp_path, "", "--json").stdout)
    assert found["launches"] == [] and found["failure"] == "no time: no kernel was launched"


def test_without_triton_the_missing_wheel_is_all_that_is_said(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    (tmp_path / "doubled.ptx").write_text(PTX.replace("doubled", "doubled_without"))  # not in the cache
    done = CliRunner().invoke(app, ["time", str(tmp_path / "doubled.ptx"), "--arg", "f32[32]", "--arg", "i32=1"])
    assert done.exit_code == 1, done.output
    assert "softsm time needs Triton's wheel" in done.output and "products are not" not in done.output


def test_a_program_that_checks_its_kernels_is_timed_without(tmp_path) -> None:
    done = timed(tmp_path, "with softsm.checking(order='latest') as report:\n    launch(1)\nassert not report\n")
    assert done.exit_code == 0, done.output
    assert "doubled on H200: " in done.output


def test_equal_launches_are_shown_once(tmp_path) -> None:
    """The first reads from device memory what the others find in L2."""
    done = timed(tmp_path, "for n in (1, 1, 1, 400, 1):\n    launch(n)\n")
    assert done.exit_code == 0 and done.output.count("us predicted") == 3
    assert "launch 1: doubled on H200: " in done.output and "launch 4: doubled on H200: " in done.output
    assert "launches 2 to 3, 5: doubled on H200: " in done.output and "5 launches in a row: " in done.output
    printing = "for n in (1, 1):\n    launch(n)\nprint('no JSON')\n"
    found = json.loads(timed(tmp_path, printing, "--json").stdout)
    assert len(found["launches"]) == 2 and found["schema"] == "softsm.time/1"
    described = (Path(__file__).parents[3] / "docs" / "reports.md").read_text().split("### `softsm time --json`")[1]
    assert all(f"`{name}`" in described for name in (*found, *found["launches"][0]))


def test_ranges_of_launches() -> None:
    assert command.ranges([1]) == "1" and command.ranges([1, 2, 4, 7, 8, 9]) == "1 to 2, 4, 7 to 9"


def test_a_tuner_gets_predicted_times_while_launches_are_timed() -> None:
    import numpy as np

    def call(n: int):
        return lambda: softsm.load(PTX).launch(1, 32, [np.ones(32, np.float32), n])

    with softsm.use("sm_90a", sms=132):
        counted = bench_once(call(1)), bench_once(call(1000))
        with softsm.timing("h200") as timer:
            short, [long, _] = bench_once(call(1)), bench_once(call(1000), quantiles=(0.5, 0.2))
    assert counted[0] < counted[1] and short < long
    assert [short, long] == pytest.approx([p.us * 1e-3 for p in timer.predictions])


def test_programs_that_are_compared_may_have_arguments_of_their_own(tmp_path) -> None:
    (tmp_path / "other.py").write_text(PROGRAM + "launch(int(sys.argv[1]))\n")
    other = ("--compare", str(tmp_path / "other.py"), "--compare-arguments", "4000")
    (tmp_path / "program.py").write_text(PROGRAM + "launch(int(sys.argv[1]))\n")
    done = CliRunner().invoke(app, ["time", "--gpu", "h200", *other, str(tmp_path / "program.py"), "1"])
    assert done.exit_code == 0 and "the second is predicted slower" in done.output, done.output
    assert "line   PTX line 10: " in done.output, done.output
    done = CliRunner().invoke(app, ["time", "--gpu", "h200", "--json", *other, str(tmp_path / "program.py"), "1"])
    found = json.loads(done.output)
    assert [len(run["launches"]) for run in found["runs"]] == [1, 1] and "slower" in found["verdict"]
    assert found["differences"][0]["kind"] == "line"
    assert all(d["second_us"] > d["first_us"] for d in found["differences"])
    done = timed(tmp_path, "launch(1)\n", "--compare-arguments", "4000")
    assert done.exit_code == 2 and "only with --compare" in done.output


def test_a_fault_may_come_from_what_did_not_run(tmp_path) -> None:
    done = timed(tmp_path, "launch(1)\nx = np.ones(8, np.float32)\nlaunch(1)\n")
    assert done.exit_code == 1 and "no time: out-of-bounds" in done.output
    assert "what a launch reads of an earlier one is incomplete" in " ".join(done.output.split())


COUNTER = """
.version 8.3 .target sm_90a .address_size 64
.visible .entry counter(.param .u64 x)
.reqntid 32, 1, 1
{
  .reg .b32 %r<4>; .reg .b64 %d<2>; .reg .pred %p<2>;
  ld.param.u64 %d1, [x];
NEXT:
  atom.global.add.u32 %r1, [%d1], 1; setp.lt.u32 %p1, %r1, 4000; @%p1 bra NEXT;
  ret;
}"""


def test_a_launch_without_a_prediction_is_left_out(tmp_path) -> None:
    """The others have their times, and a tuner does not take it for the fastest."""
    text = f"""
from softsm.doors.triton.runtime import bench_once
def work():
    softsm.load('''{COUNTER}''').launch(500, 32, [np.zeros(1, np.uint32)])
with softsm.use("sm_90a", sms=132):
    launch(1)
    print("measured", bench_once(work))
    launch(1000)
"""
    done = timed(tmp_path, text)
    assert done.exit_code == 1 and done.output.count("us predicted") == 2, done.output
    assert "no time: counter: the branch at PTX line" in done.output and "measured inf" in done.output
    assert "2 launches in a row without 1 that have no time: " in done.output
    found = json.loads(timed(tmp_path, text, "--json").stdout)
    assert len(found["launches"]) == 2 and "depends on what the atomic operation" in found["left_out"][0]
