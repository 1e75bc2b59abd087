"""`softsm run`, `check` and `trace`: PTX files on arrays made on the command line, Python programs with softsm under
Triton."""

from __future__ import annotations

import json
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from typer.testing import CliRunner

from softsm.arguments import parse_argument
from softsm.cli import app
from softsm.commands.check import party_as_data
from softsm.memory.tensor_map import Swizzle
from softsm.memory.tensor_map_image import from_image
from softsm.report.diagnostics import Party

SCALE = """
.version 8.6 .target sm_90 .address_size 64
.visible .entry scale(.param .u64 x, .param .f32 f, .param .u32 n) .reqntid 64
{
    .reg .pred %p<2>; .reg .b32 %r<6>; .reg .f32 %f<4>; .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [x];
    ld.param.f32 %f1, [f];
    ld.param.u32 %r1, [n];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    setp.ge.u32 %p1, %r5, %r1;
    @%p1 ret;
    mad.wide.u32 %rd2, %r5, 4, %rd1;
    ld.global.f32 %f2, [%rd2];
    mul.f32 %f3, %f2, %f1;
    st.global.f32 [%rd2], %f3;
    ret;
}
"""

PROGRAM = """
import sys
import torch
import triton
import triton.language as tl

@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) + tl.load(y + i, mask=i < n), mask=i < n)

DEVICE = triton.runtime.driver.active.get_active_torch_device()
x, y = torch.randn(500, device="cuda"), torch.randn(500, device=DEVICE)
assert x.is_cuda and x.device == DEVICE
out = torch.empty_like(x)
add[lambda meta: (triton.cdiv(500, meta["BLOCK"]),)](x, y, out, 500, BLOCK=128)
print(sys.argv[1:], torch.cuda.get_device_capability(), torch.equal(out, x + y), __name__)
"""


@pytest.fixture
def ptx(tmp_path):
    path = tmp_path / "scale.ptx"
    path.write_text(SCALE)
    return path


def run(*words):
    return CliRunner().invoke(app, ["run", *map(str, words)])


def test_ptx_with_arguments(ptx, tmp_path):
    saved = tmp_path / "out.npy"
    done = run("--grid", 2, "--save", f"0={saved}", ptx, "f32[100]=arange", "f32=0.5", "u32=90")
    assert done.exit_code == 0, done.output
    assert "│ 89" in done.output  # element 0 stays zero
    expected = np.arange(100, dtype=np.float32)
    expected[:90] *= 0.5
    assert np.array_equal(np.load(saved), expected)


def test_out_of_bounds_is_reported_with_its_place(ptx):
    done = run("--grid", 2, ptx, "f32[80]", "f32=0.5", "u32=90")
    assert done.exit_code == 1 and "PTX line 16" in done.output and "argument x" in done.output


@pytest.mark.parametrize("words, message", [
    (["nowhere.ptx"], "there is no file nowhere.ptx"),
    (["PTX", "f32[80]"], "scale accepts 3"),
    (["--block", "32", "PTX", "f32[80]", "f32=1", "u32=1"], "the kernel requires (64, 1, 1)"),
        (["--grid", "a", "PTX", "f32[80]", "f32=1", "u32=1"], "grid: got 'a'"),
    (["PTX", "f33[80]", "f32=1", "u32=1"], "argument 0 (x): got 'f33[80]'"),
    (["PTX", "f32[80]", "f32=1", "u32=x"], "argument 2 (n): 'x' in 'u32=x' is not a number"),
    (["PTX", "f32[80]", "f64=1", "u32=1"], "args: parameter f has 4 bytes, got 8"),
    (["PTX", "f32[80]:none.npy", "f32=1", "u32=1"], "argument 0 (x): there is no file none.npy"),
    (["--arg", "f32[80]", "PTX", "f32=1"], "arg: got 'f32[80]' and 'f32=1'"),
    (["--arch", "sm_90a", "PTX", "f32[80]", "f32=1", "u32=1", "--cluster", "3"], "multiple of the cluster (3, 1, 1)"),
    (["--save", "7=x.npy", "PTX", "f32[80]", "f32=1", "u32=1"], "save: got '7=x.npy'"),
    (["--save", "f=x.npy", "PTX", "f32[80]", "f32=1", "u32=1"], "with an array for N: 0 (x)"),
])  # fmt: skip
def test_mistakes_are_named(ptx, words, message):
    done = run(*[ptx if w == "PTX" else w for w in words])
    assert done.exit_code == 2 and message in done.output


def test_bad_ptx_names_the_line(tmp_path, ptx):
    done = run("--entry", "other", ptx)
    assert done.exit_code == 1 and "these entries: scale" in done.output
    path = tmp_path / "bad.ptx"
    path.write_text(SCALE.replace("mul.f32 %f3", "mull.f32 %f3"))
    done = run(path, "f32[80]", "f32=1", "u32=1")
    assert done.exit_code == 1 and "PTX line 17" in done.output and "mull" in done.output


@pytest.mark.parametrize("arch, capability", [("sm_90a", "(9, 0)"), ("sm_100a", "(10, 0)"), ("sm_103a", "(10, 3)")])
def test_program_with_its_own_arguments(tmp_path, arch, capability):
    import torch

    if torch.cuda.is_available():
        pytest.skip("the shim is rejected if CUDA is available")
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    done = run("--arch", arch, path, "--flag", 3)
    assert done.exit_code == 0, done.output
    assert f"['--flag', '3'] {capability} True __main__" in done.output


def test_an_error_of_the_program_is_shown_as_python_shows_it(tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("the shim is rejected if CUDA is available")
    path = tmp_path / "program.py"
    raising, broken = "def f():\n    raise KeyError('x')\nf()\n", "print(1\n"
    for text, last in ((raising, "KeyError: 'x'"), (broken, "was never closed")):
        path.write_text(text)
        done = run(path)
        assert done.exit_code == 1 and last in done.output.splitlines()[-1], done.output
        assert "runpy" not in done.output and "softsm/cli.py" not in done.output


def test_unknown_architecture(tmp_path):
    path = tmp_path / "program.py"
    path.write_text("")
    done = run("--arch", "sm_70", path)
    assert done.exit_code == 2 and "arch: got 'sm_70'" in done.output


def test_argument_forms(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save(tmp_path / "x.npy", np.ones(3))
    assert parse_argument(str(tmp_path / "x.npy")).tolist() == [1, 1, 1]
    assert parse_argument("u8[2,3]=7").tolist() == [[7] * 3] * 2
    assert parse_argument("bf16[2]=1.5").astype(float).tolist() == [1.5, 1.5]
    assert parse_argument("s64=-0x10") == -16 and parse_argument("f32=1e-3").dtype == np.float32
    np.save("half.npy", np.full((2, 3), 0.5, ml_dtypes.bfloat16))
    for form in ("bf16[2,3]:half.npy", "bf16[2,3]=half.npy"):
        assert parse_argument(form).astype(float).tolist() == [[0.5] * 3] * 2
    assert parse_argument("bf16[3]:x.npy").dtype == ml_dtypes.bfloat16
    with pytest.raises(ValueError, match=r"accepted: the shape of the file, \[3\]"):
        parse_argument("f32[4]:x.npy")
    assert parse_argument("f32[8]:rand").ctypes.data % 256 == 0
    first, second = parse_argument("f32[4]=random", 1), parse_argument("f32[4]=random", 1)
    assert np.array_equal(first, second) and parse_argument("u32[4]=random", 1).dtype == np.uint32


def test_a_tensor_map_on_the_command_line():
    array = parse_argument("bf16[256,128]:rand")
    made = parse_argument("map[64,32;swizzle=64]:arg1", 0, [np.float32(1), array])
    found = from_image(bytes(made))
    assert made.array is array and found.base == array.ctypes.data and found.swizzle is Swizzle.B64
    assert (found.dims, found.strides, found.box) == ((128, 256), (256,), (32, 64))
    assert parse_argument("map[16]:f32[64]:3").array.tolist() == [3] * 64
    for text, words in (
        ("map[64]:arg0", "maps over arrays"),
        ("map[64,64]:arg2", "arg0 to arg1"),
        ("map[64]:arg1", "box: got"),
        ("map[64,64;swizzle=12]:arg1", "swizzles of 0, 32, 64, 128"),
        ("map:arg1", "accepted: forms"),
        ("map[64,64;swizzle=32]:arg1", "box_dim"),
    ):
        with pytest.raises(ValueError, match="^argument: got .*" + words):
            parse_argument(text, 0, [np.float32(1), array])


RACY = """
import torch, triton, triton.language as tl

@triton.jit
def last(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.sum(tl.load(x + i, mask=i < n, other=0.0))
    before = tl.load(out)
    tl.store(out, before + total)

x, out = torch.ones(512, device="cuda"), torch.zeros(1, device="cuda")
last[(4,)](x, out, 512, BLOCK=128)
print("total", out.item())
FINISH
"""


def softsm_command(*words):
    return CliRunner().invoke(app, [*map(str, words)], prog_name="softsm")


@pytest.fixture
def racy(tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("the shim is rejected if CUDA is available")
    path = tmp_path / "racy.py"
    path.write_text(RACY.replace("FINISH", ""))
    return path


def test_check_names_a_race_once(racy):
    """One race in the source is many in PTX and in four orders."""
    done = softsm_command("check", racy)
    assert done.exit_code == 1
    assert done.output.count("total 512.0") == 1  # what the program prints is shown once
    lines = done.output.splitlines()
    orders = "latest, eager, random (seed 0), random (seed 1)"
    assert lines[-1] == f"2 findings in 1 launch; default level; orders {orders}"
    assert sum(line.startswith("race: ") for line in lines) == 2  # load and store, store and store
    assert "racy.py:9" in done.output and "racy.py:8" in done.output and "atomic" in done.output


def test_check_is_silent_about_a_right_program(tmp_path, racy):
    racy.write_text(
        racy.read_text()
        .replace("before = tl.load(out)", "")
        .replace("tl.store(out, before + total)", "tl.atomic_add(out, total)")
    )
    done = softsm_command("check", racy, "--arch", "sm_90a")
    assert done.exit_code == 0, done.output
    assert "nothing found in 1 launch" in done.output.splitlines()[-1]


def test_check_of_ptx(ptx):
    done = softsm_command("check", ptx, "f32[128]", "f32=0.5", "u32=128", "--grid", "2", "--order", "latest")
    assert done.exit_code == 0 and "orders latest" in done.output, done.output
    done = softsm_command("check", "--grid", 2, ptx, "f32[80]", "f32=0.5", "u32=90")
    assert done.exit_code == 1
    assert done.output.count("out-of-bounds: ") == 1 and "PTX line 16" in done.output


def test_the_command_of_the_documentation(tmp_path, ptx):
    np.save(tmp_path / "in.npy", np.arange(64.0))
    words = ["--arch", "sm_90a", "--grid", "1,1,1", "--block", "64,1,1", "--cluster", "1", "--arg",
             f"f32[64]:{tmp_path}/in.npy", "--arg", "f32=2", "--arg", "i32=64"]  # fmt: skip
    for command in ("run", "check", "trace"):
        more = ["-o", tmp_path / "out"] if command == "trace" else ["--save", f"x={tmp_path}/out.npy"]
        done = softsm_command(command, ptx, *words, *more)
        assert done.exit_code == 0, done.output
    assert np.array_equal(np.load(tmp_path / "out.npy"), np.arange(64) * 2)
    done = softsm_command("check", ptx, *words[2:], "--arch", "sm_100a", "--order", "latest")
    assert done.exit_code == 0  # .target sm_90 runs there too
    ptx.write_text(SCALE.replace("sm_90", "sm_90a"))
    done = softsm_command("check", ptx, *words[2:], "--arch", "sm_100a")
    assert done.exit_code == 2 and "arch: got 'sm_100a'; accepted: what runs the module's .target" in done.output


def test_a_loop_without_end_is_a_finding_and_other_orders_are_left_out(tmp_path):
    head, _, body = SCALE.partition("    ld.param.u64 %rd1, [x];")
    path = tmp_path / "endless.ptx"
    path.write_text(f"{head}    ld.param.u64 %rd1, [x];\nLOOP: st.volatile.global.u32 [%rd1], %r1;\n bra LOOP;\n{body}")
    words = ["check", str(path), "--arg", "f32[4]", "--arg", "f32=1", "--arg", "u32=4", "--patience"]
    done = CliRunner().invoke(app, [*words, "0.005"])
    assert done.exit_code == 1 and done.stdout.startswith("step-budget: no warp has ended"), done.output
    assert "warps 0, 1 of CTA (0, 0, 0) run at PTX line" in done.stdout and "orders latest\n" in done.stdout
    done = CliRunner().invoke(app, [*words, "-1"])
    assert done.exit_code == 2 and "patience: got -1" in done.output


def test_json_of_a_check(ptx, tmp_path):
    done = softsm_command("check", "--json", "--grid", 2, ptx, "f32[80]", "f32=0.5", "u32=90", "--order", "eager")
    data = json.loads(done.stdout)
    assert done.exit_code == 1 and data["schema"] == "softsm.check/1" and data["status"] == "findings"
    assert (data["level"], data["orders"], data["launches"], data["file"]) == ("default", ["eager"], 1, str(ptx))
    [found] = data["findings"]
    assert found["code"] == "out-of-bounds" and found["stopped"] and found["orders"] == ["eager"] and found["fix"]
    done = softsm_command("check", "--json", ptx, "f32[64]", "f32=0.5", "u32=64", "--order", "eager")
    assert done.exit_code == 0 and json.loads(done.stdout)["status"] == "clean"
    (tmp_path / "x.py").write_text("print('hello')\nraise KeyError('x')\n")
    done = softsm_command("check", "--json", tmp_path / "x.py", "--order", "eager")
    data = json.loads(done.stdout)
    assert done.exit_code == 1 and data["status"] == "failed" and "KeyError" in data["failures"][0]["text"]


def test_parties_in_json(racy):
    data = json.loads(softsm_command("check", "--json", racy, "--order", "latest").stdout)
    party = data["findings"][0]["parties"][0]
    assert party["source"]["file"].endswith("racy.py") and party["source"]["line"] in (8, 9)
    assert party["ptx"]["line"] and party["ptx"]["instruction"] and party["who"].startswith("warp")
    assert party["source"]["called_at"] == []
    for function in ("", " in wait"):
        text = f"/a/ring.py:3{function}, called at /a/ring.py:5, /a/k.py:8"
        source = party_as_data(Party("warp 1", 7, "ret;", text))["source"]
        assert (source["file"], source["line"], source["function"]) == ("/a/ring.py", 3, function[4:])
        assert source["called_at"] == [{"file": "/a/ring.py", "line": 5}, {"file": "/a/k.py", "line": 8}]


def test_a_typo_is_named(racy, monkeypatch):
    racy.write_text("import sys\nprint(sys.argv[1:])\n")
    for words in (["--oder", "latest"], ["--", "--oder", "latest"]):
        monkeypatch.setattr("sys.argv", ["softsm", "run", str(racy), *words])
        done = softsm_command("run", racy, *words)
        assert (done.exit_code == 2 and "did you mean --order?" in done.output) == (words[0] == "--oder")


def test_a_program_that_fails_by_itself(tmp_path, racy):
    racy.write_text("import sys\nsys.exit(3)\n")
    done = softsm_command("check", racy, "--order", "latest")
    assert done.exit_code == 1 and "ended with status 3" in done.output
    assert done.output.splitlines()[-1] == "not checked: the program failed"
    racy.write_text("raise KeyError('x')\n")
    done = softsm_command("check", racy)
    assert done.exit_code == 1 and done.output.count("KeyError: 'x'") == 1 and "runpy" not in done.output


def test_a_program_that_launches_nothing(ptx, tmp_path):
    """It would pass whatever its kernels do."""
    (tmp_path / "idle.py").write_text("print('hello')\n")
    done = softsm_command("check", tmp_path / "idle.py")
    assert done.exit_code == 1 and done.output.splitlines() == ["hello", "not checked: no kernel was launched"]
    done = softsm_command("check", tmp_path / "idle.py", "--json")
    data = json.loads(done.stdout)
    assert (done.exit_code, data["status"], data["launches"]) == (1, "failed", 0)
    assert data["failures"] == [{"text": "no kernel was launched", "orders": data["orders"]}]
    done = softsm_command("check", ptx, "f32[64]", "f32=0.5", "u32=64")
    assert done.exit_code == 0 and "nothing found in 1 launch;" in done.output and "not checked" not in done.output


def test_run_says_that_nothing_was_checked(ptx):
    done = softsm_command("run", ptx, "f32[64]", "f32=0.5", "u32=64")
    assert done.output.splitlines()[-1].startswith("nothing was checked; `softsm check ")


def test_options_behind_the_file_are_taken(ptx, tmp_path):
    done = softsm_command("run", ptx, "f32[100]=arange", "f32=0.5", "u32=90", "--grid", "2")
    assert done.exit_code == 0 and "│ 89" in done.output, done.output
    done = softsm_command("run", ptx, "f32[100]", "f32=0.5", "u32=90", "--gird", "2")
    assert done.exit_code == 2 and "--gird: there is no such option; did you mean --grid?" in done.output


def test_an_unknown_option_ahead_of_the_file_is_named(ptx):
    done = softsm_command("check", "--archh", "sm_90a", ptx)
    assert done.exit_code == 2
    assert done.output == "softsm check: --archh: there is no such option; did you mean --arch?\n"
    done = softsm_command("time", "--nothing", ptx)
    assert (done.exit_code, done.output) == (2, "softsm time: --nothing: there is no such option\n")


def test_behind_two_dashes_everything_is_the_programs(tmp_path, racy):
    racy.write_text("import sys\nprint(sys.argv[1:])\n")
    done = softsm_command("run", racy, "--flag", "1", "--", "--seed", "7", "--arch", "x")
    assert "['--flag', '1', '--seed', '7', '--arch', 'x']" in done.output


@pytest.mark.parametrize("command", ["run", "check", "trace"])
def test_an_unknown_order_is_one_line(ptx, command):
    done = softsm_command(command, ptx, "--order", "sideways")
    assert done.exit_code == 2 and len(done.output.splitlines()) == 1
    assert done.output.startswith(f"softsm {command}: --order: got 'sideways'; accepted: eager, latest, random")


WRONG = {"--sms": "0", "--seed": "-5", "--arch": "sm_80"}


@pytest.mark.parametrize("command", ["run", "check", "trace"])
@pytest.mark.parametrize("option", WRONG)
def test_a_wrong_option_is_one_line_and_nothing_runs(racy, tmp_path, command, option):
    racy.write_text("raise SystemExit('it ran')\n")
    where = ["-o", tmp_path / "out"] if command == "trace" else []
    done = softsm_command(command, racy, option, WRONG[option], *where)
    assert done.exit_code == 2 and len(done.output.splitlines()) == 1
    assert done.output.startswith(f"softsm {command}: {option}: got ") and "accepted: " in done.output
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_said_before_anything_runs(racy, ptx, tmp_path):
    racy.write_text("raise SystemExit('it ran')\n")
    (tmp_path / "file").write_text("")
    for command in ("trace", "time"):
        done = softsm_command(command, racy, "-o", tmp_path / "file")
        assert done.exit_code == 2 and "output: got " in done.output and "it ran" not in done.output
    done = softsm_command("run", ptx, "f32[64]", "f32=2", "u32=64", "--save", f"0={tmp_path}/none/x.npy")
    assert done.exit_code == 2 and "save: got " in done.output


def test_time_takes_no_clock_below_zero(tmp_path):
    (tmp_path / "program.py").write_text("")
    done = softsm_command("time", tmp_path / "program.py", "--clock", "-3")
    assert done.exit_code == 2 and done.output.startswith("softsm time: --clock: got -3.0; accepted: ")


@pytest.mark.parametrize("text", ["u32=70000000000", "u32=-1", "u8[8]=300", "f32[99999999999999]"])
def test_numbers_that_do_not_fit_are_refused(text):
    with pytest.raises(ValueError, match="^argument: got .*; accepted: "):
        parse_argument(text)


def test_trace_prints_what_it_found(racy, tmp_path):
    done = softsm_command("trace", racy, "-o", tmp_path / "out")
    assert done.exit_code == 1 and "2 findings" in done.output
    assert done.output.count("race: two accesses of global memory") == 2


def test_options_of_time_behind_the_file_are_taken(tmp_path):
    (tmp_path / "program.py").write_text("raise SystemExit(3)\n")
    result = CliRunner().invoke(app, ["time", str(tmp_path / "program.py"), "--gpu", "b2"])
    assert result.exit_code == 2 and "gpu: got 'b2'; accepted:" in result.output


def test_version():
    import importlib.metadata

    import softsm

    done = softsm_command("--version")
    assert done.output == f"softsm {softsm.__version__}\n"
    assert softsm.__version__ == importlib.metadata.version("dsv4")


@pytest.mark.parametrize(
    "command, says",
    [
        ("chekc x.py", "softsm: chekc: there is no such command; did you mean check?"),
        ("check", "softsm check: file: is missing"),
        ("bogus", "softsm: bogus: there is no such command\n"),
        ("check --sms", "softsm check: --sms: needs a value"),
        ("check --json=3 no.py", "softsm check: --json: has no value"),
        ("serve now", "softsm serve: now: there is no such argument"),
        ("check no.py", "softsm check: there is no file no.py"),
        ("time --gpu b2 no.py", "softsm time: there is no file no.py"),
        ("museum 99", "softsm museum: numbers: got 99; accepted: 1 to "),
        ("explain nothing", "softsm explain: topic: got 'nothing'; accepted: "),
        ("serve --idle 0", "softsm serve: --idle: got 0.0; accepted: numbers > 0"),
        ("museum x", "softsm museum: numbers: got 'x'; accepted: a valid integer"),
        ("check --patience x no.py", "softsm check: --patience: got 'x'; accepted: a valid number"),
        ("time --compare-arguments x pyproject.toml", "softsm time: --compare-arguments: got 'x'; accepted: only with"),
        ("time --clok 2", "softsm time: --clok: there is no such option; did you mean --clock?"),
        ("run --filee", "softsm run: --filee: there is no such option\n"),
        ("run --strikt", "softsm run: --strikt: there is no such option\n"),
        ("museum --ful", "softsm museum: --ful: there is no such option; did you mean --full?"),
    ],
)
def test_wrong_usage_is_one_line_with_the_name_of_the_command(command, says):
    done = CliRunner().invoke(app, command.split(), prog_name="softsm")
    assert done.exit_code == 2 and done.output.startswith(says) and done.output.count("\n") == 1, done.output


def test_a_shell_completes_commands_and_options():
    asks = {"_SOFTSM_COMPLETE": "complete_bash", "COMP_WORDS": "softsm che", "COMP_CWORD": "1"}
    assert CliRunner().invoke(app, env=asks, prog_name="softsm").output.split() == ["check"]


def test_a_terminal_is_told_what_a_command_waits_for(capsys, monkeypatch):
    from softsm.commands.program import loading

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with loading("a_package_that_is_not_loaded"):
        assert capsys.readouterr().err == "loading softsm ..."
    assert capsys.readouterr().err == "\r\x1b[K"
    with loading("sys"):
        assert not capsys.readouterr().err


def test_wrong_usage_waits_for_no_import(tmp_path):
    """Numba and torch take seconds."""
    wrong = ["check no.py", "check --sms 0 x.py", "check --patience -1 x.py", "run no.py", "trace no.py", "time no.py"]
    (tmp_path / "x.py").touch()
    program = f"""
import sys
from softsm.cli import app
for words in {wrong!r}:
    try:
        app(words.split())
    except SystemExit as done:
        assert done.code == 2, words
    assert not {{"numba", "torch", "triton"}} & set(sys.modules), words
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr.count("\n") == len(wrong), done.stderr
