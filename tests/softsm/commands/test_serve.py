"""`softsm serve`: commands run in copies of a resident process, as they would run by themselves."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from softsm import resident
from softsm.commands.serve import difference

# Without what `preload` imports: such a server starts at once. A command `check` of PTX needs neither torch nor Triton.
LIGHT = """
from softsm import cli, resident
from softsm.commands.serve import Server
Server(resident.socket_path(), cli.run_command).run(60)
"""
SLEEP = "import time; print('begun', flush=True); time.sleep(60)"


@pytest.fixture
def environment(tmp_path):
    return {**os.environ, "TMPDIR": str(tmp_path), "SOFTSM_SERVE": "1"}


def started(environment, *command):
    """A resident process that listens."""
    process = subprocess.Popen([sys.executable, *command], env=environment)
    folder = Path(environment["TMPDIR"]) / f"softsm-{os.getuid()}"
    for _ in range(6000):
        if folder.exists() and any(resident.alive(path) for path in folder.iterdir()):
            return process
        assert process.poll() is None
        time.sleep(0.01)
    raise AssertionError("it does not listen")


@pytest.fixture
def server(environment):
    process = started(environment, "-c", LIGHT)
    yield process
    process.send_signal(signal.SIGINT)
    process.wait()
    assert not list((Path(environment["TMPDIR"]) / f"softsm-{os.getuid()}").iterdir())  # it takes its socket away


def softsm(environment, *arguments, folder=None, **more):
    command = [sys.executable, "-m", "softsm", *arguments]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, **more)


def test_the_status_and_the_streams_are_those_of_the_command(server, environment, tmp_path):
    done = softsm(environment, "check", "missing.ptx", folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "softsm check: there is no file missing.ptx\n")
    assert server.poll() is None


def test_a_process_of_other_settings_is_not_used(server, environment, tmp_path):
    done = softsm({**environment, "SOFTSM_BUDGET": "7"}, "check", "missing.ptx", folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0].startswith("softsm serve is not used: SOFTSM_BUDGET differs")


def test_it_can_be_switched_off_and_need_not_run(environment, tmp_path):
    for given in (environment, {**environment, "SOFTSM_SERVE": "0"}):
        code = "from softsm import resident; assert resident.hand_over('softsm', ['--version']) is None"
        subprocess.run([sys.executable, "-c", code], env=given, cwd=tmp_path, check=True)


@pytest.mark.parametrize(
    "how, status", [(signal.SIGINT, 2), pytest.param(signal.SIGTERM, 128 + signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_signal_reaches_the_command(server, environment, tmp_path, how, status):
    asks = """
        import sys
        from softsm import resident
        sys.exit(resident.hand_over("pytest", ["-q", "-p", "no:cacheprovider", "-s", "test_it.py"]))
    """
    (tmp_path / "test_it.py").write_text(f"def test_it():\n    {SLEEP}\n")
    command = [sys.executable, "-c", textwrap.dedent(asks)]
    with subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        assert "begun" in client.stdout.readline()
        client.send_signal(how)
        client.stdout.read()
        assert client.wait() == status  # 2: pytest was interrupted


def test_only_a_socket_of_this_user_is_trusted(tmp_path):
    folder = tmp_path / "softsm"
    folder.mkdir(mode=0o700)
    assert not resident.trusted(folder / "none")
    (folder / "file").touch()
    assert not resident.trusted(folder / "file")


def test_what_differs_is_named():
    mine = resident.identity()
    assert difference(mine, mine) == ""
    assert difference(mine, mine | {"torch": ["elsewhere", 0]}).startswith("torch differs")
    assert difference(mine, {**mine, "TRITON_INTERPRET": "1"}).startswith("TRITON_INTERPRET differs")


@pytest.mark.slow
def test_a_race_is_found_as_without(environment, tmp_path):
    program = """
        import torch, triton
        import triton.language as tl

        @triton.jit
        def count(total):
            tl.store(total, tl.load(total) + 1)

        total = torch.zeros(1)
        count[(4,)](total)

        def test_it():
            count[(4,)](torch.zeros(1))
    """
    (tmp_path / "test_count.py").write_text(textwrap.dedent(program))
    process = started(environment, "-m", "softsm", "serve")
    try:
        twice = softsm(environment, "serve")
        assert twice.returncode == 1 and "runs already" in twice.stderr
        for given in (environment, {**environment, "SOFTSM_SERVE": "0"}):
            done = softsm(given, "check", "--arch", "sm_90a", "test_count.py", folder=tmp_path)
            assert done.returncode == 1 and "2 findings in 1 launch" in done.stdout, done.stderr
            command = [sys.executable, "-m", "pytest", "--softsm=sm_90a", "-p", "no:cacheprovider", "test_count.py"]
            tests = subprocess.run(command, env=given, cwd=tmp_path, capture_output=True, text=True)
            assert tests.returncode == 1 and "softsm: 2 findings in 1 launch" in tests.stdout, tests.stdout
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()
