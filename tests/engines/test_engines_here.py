"""An engine that is missing, or that cannot run on this CPU, fails `make test-engines`: nothing is skipped there."""

import ast
import importlib.util
from pathlib import Path

import pytest
from engines_here import in_a_process, needs


@pytest.mark.parametrize("asked, skipped", [("1", False), ("", True)])
def test_a_missing_engine_is_skipped_only_where_nobody_asked_for_engines(monkeypatch, asked, skipped):
    monkeypatch.setenv("DSV4_ENGINES", asked)
    assert needs("no_such_engine").args == (skipped,)


def run(tmp_path, code: str) -> dict:
    (tmp_path / "engine.py").write_text(code)
    return in_a_process("An engine", tmp_path / "engine.py", tmp_path, "checkpoint", {}, {})


def test_an_engine_that_a_signal_ends_fails_and_says_what_was_not_tested(tmp_path):
    """Fail as the wheel of an engine does on a CPU without its instructions."""
    code = "import os, signal; print('loading', flush=True); os.kill(os.getpid(), signal.SIGILL)"
    with pytest.raises(pytest.fail.Exception, match="(?s)ended by SIGILL on .*the plug-in was not tested.*loading"):
        run(tmp_path, code)


def test_an_engine_that_ends_with_an_error_fails_with_its_log(tmp_path):
    with pytest.raises(AssertionError, match="no such instruction"):
        run(tmp_path, "raise SystemExit('no such instruction')")


def test_the_result_comes_with_the_log(tmp_path):
    got = run(tmp_path, "import sys; print('all well'); open(sys.argv[3], 'w').write('{}')")
    assert got == {"log": "all well\n"}


def test_what_the_tests_of_engines_import_of_dsv4_is_there():
    """They run in an environment of their own, which few changes are tried in."""
    missing = []
    for file in sorted(Path(__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dsv4.caches")):
                continue
            module = importlib.import_module(node.module)
            missing += [f"{file.name}: {node.module}.{x.name}" for x in node.names if not hasattr(module, x.name)]
    assert not missing


def test_a_folder_of_tests_is_not_the_package_of_its_name(monkeypatch):
    """tests/dsv4 is on the path, and has a folder named kernels, as a package on the hub is."""
    monkeypatch.delenv("DSV4_ENGINES", raising=False)
    found = importlib.util.find_spec("kernels")
    assert needs("kernels").args[0] == (found is None or found.origin is None)
