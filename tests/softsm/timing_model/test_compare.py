"""Two runs are compared line by line, also where the second is another version of the file."""

import re

import numpy as np
import pytest

import softsm
from softsm.timing_model.compare import as_dict, differences

pytest.importorskip("triton")  # its wheel holds ptxas and nvdisasm

PTX = """
.version 8.3 .target sm_90a .address_size 64
.visible .entry k(.param .u64 x, .param .u32 n)
.reqntid 64, 1, 1
{
  .reg .b32 %r<12>; .reg .f32 %f<8>; .reg .b64 %d<4>; .reg .pred %p<4>;
  ld.param.u64 %d1, [x]; ld.param.u32 %r4, [n]; mov.u32 %r6, %tid.x; mov.u32 %r3, 0; mov.f32 %f1, 0f3f800000;
  mul.wide.u32 %d2, %r6, 4;
  add.u64 %d2, %d2, %d1;
TURN:
  add.f32 %f1, %f1, %f1;
  ex2.approx.f32 %f1, %f1;
  add.u32 %r3, %r3, 1; setp.lt.u32 %p1, %r3, %r4; @%p1 bra TURN;
  st.global.f32 [%d2], %f1; ret;
}"""


def run_of(ptx: str, n: int) -> list:
    with softsm.timing("h200") as timer:
        softsm.load(ptx).launch(1, 64, [np.zeros(64, np.float32), n])
    return timer.predictions


def lines_of(one: list, other: list) -> dict[str, tuple[float, float]]:
    return {d.what: (d.first, d.second) for d in differences(one, other) if d.kind == "line"}


def test_a_line_that_moved_is_one_line() -> None:
    comment = "// one\n// two\n"
    before, after = run_of(PTX, 500), run_of(PTX.replace(".visible", comment + ".visible"), 1000)
    found = lines_of(before, after)
    assert set(found) <= {f"PTX line {n} and PTX line {n + 2}" for n in range(1, 20)} and len(found) > 1
    assert all(1.5 < second / first < 2.5 for first, second in found.values())


def test_a_changed_line_keeps_its_place_and_a_new_one_is_of_the_second() -> None:
    before = run_of(PTX, 500)
    changed = lines_of(before, run_of(PTX.replace("ex2.approx", "lg2.approx"), 2000))
    assert {"PTX line 12", "PTX line 13"} <= set(changed) and not any("second" in what for what in changed)
    more = lines_of(before, run_of(PTX.replace("TURN:\n", "TURN:\n  sin.approx.f32 %f1, %f1;\n"), 500))
    assert more["PTX line 11 of the second"][0] == 0.0
    assert "PTX line 11" not in more and "PTX line 12" not in more


def test_two_versions_of_a_file_have_one_name_for_equal_lines(tmp_path) -> None:
    text = "def f():\n    add\n    power\n    turn\n"
    files = [tmp_path / name / "kernel.py" for name in ("old", "new")]
    for file, source in zip(files, (text, "# new\n" + text)):
        file.parent.mkdir()
        file.write_text(source)

    def placed(file, shift: int) -> str:
        head = f'.file 1 "{file}"\n'
        loc = {"add.f32": 2, "ex2": 3, "add.u32 %r3": 4}
        for start, line in loc.items():
            ptx_line = rf"\n  {re.escape(start)}"
            head_of = f"\n  .loc 1 {line + shift} 1\n  {start}"
            source.append(re.sub(ptx_line, head_of, source.pop()))
        return source[-1].replace(".visible", head + ".visible")

    runs = []
    for file, shift, n in zip(files, (0, 1), (500, 1000)):
        source = [PTX]
        runs.append(run_of(placed(file, shift), n))
    found = lines_of(*runs)
    assert "kernel.py:3 and kernel.py:4" in found and "kernel.py:3" not in found
    rows = as_dict(runs[0], runs[1], 1.0, 2.0)
    assert rows["verdict"].startswith("the second is predicted slower")
    assert any(row["kind"] == "wait" and "kernel.py:3 and kernel.py:4" in row["what"] for row in rows["differences"])
