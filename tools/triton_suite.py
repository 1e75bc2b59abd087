"""Triton's own test suites in softsm: `make test-triton-suite TRITON_SOURCE=path`.

    git clone --branch v3.9.0 --depth 1 https://github.com/triton-lang/triton path
    pip install scipy expecttest                           which some of their files import
    python tools/triton_suite.py path                      both suites, each launch checked
    python tools/triton_suite.py path --each 1             one set of parameters of each test function
    python tools/triton_suite.py path --record done.jsonl  in several runs: what the file has is not run again
    python tools/triton_suite.py path --record done.jsonl --table    only the table of what the file has

The suites stay where they are: nothing of them is part of this repository. Take the tag of the installed Triton. Each
file runs in a process of its own, as two files of the suites have the same name. The result is a table of counts by
file, as Markdown, and the list of tests that failed, with softsm's findings apart from other failures. Tests that need
several GPUs, AMD hardware or another architecture skip themselves. A test that takes longer than `--timeout` seconds is
cut off and counted as such: its result is unknown.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

SUITES = ("python/test/unit/language", "python/test/gluon")
OUTCOMES = ("passed", "found", "failed", "cut off", "skipped")
EACH, RECORD = "SOFTSM_SUITE_EACH", "SOFTSM_SUITE_RECORD"


def pytest_collection_modifyitems(config, items) -> None:
    """As a plug-in of that run: keeps so many tests of each function, spread evenly over its parameters, and of them
    those that are not in the record."""
    wanted = int(os.environ.get(EACH, "0"))
    functions: dict[str, list] = {}
    for item in items:
        functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = [spread(tests, wanted or len(tests)) for tests in functions.values()]
    done = {test["test"] for test in read(Path(os.environ[RECORD]))}
    keep = {id(item) for tests in kept for item in tests if item.nodeid not in done}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in keep])
    items[:] = [item for item in items if id(item) in keep]


def pytest_runtest_logreport(report) -> None:
    """A line of the record for each test that has a result: when it was called, or when its set-up was all."""
    if "PYTEST_XDIST_WORKER" in os.environ or not (
        report.when == "call" or (report.when == "setup" and not report.passed)
    ):
        return
    codes = "; ".join(value for name, value in report.user_properties if name == "softsm")
    crash = getattr(report.longrepr, "reprcrash", None)
    line = {
        "test": report.nodeid,
        "outcome": outcome(report, codes),
        "codes": codes,
        "why": getattr(crash, "message", ""),
    }
    write(Path(os.environ[RECORD]), line)


def outcome(report, codes: str) -> str:
    if not report.failed:
        return report.outcome
    why = str(report.longrepr)
    if "from pytest-timeout" in why:
        return "cut off"
    return "found" if codes or "softsm.errors.Fault" in why else "failed"


def read(record: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []


def write(record: Path, line: dict[str, str]) -> None:
    with record.open("a") as file:
        file.write(json.dumps(line) + "\n")


def spread(tests: list, wanted: int) -> list:
    """The middle of each of `wanted` equal parts."""
    n = min(wanted, len(tests))
    return [tests[(2 * i + 1) * len(tests) // (2 * n)] for i in range(n)]


def files(source: Path, suites: list[str]) -> list[str]:
    """The files of tests in the suites, which are files or folders of the checkout."""
    found = []
    for suite in suites:
        path = source / suite
        paths = sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
        found += [str(p.relative_to(source)) for p in paths]
    return found


def run(source: Path, file: str, record: Path, options: argparse.Namespace, extra: list[str]) -> None:
    """The tests of a file, each with a line in the record; a line for the whole file where pytest itself fails."""
    environment = {**os.environ, EACH: str(options.each), RECORD: str(record), "SOFTSM": options.arch}
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(Path(__file__).parent), environment.get("PYTHONPATH")))
    )
    parallel = ["-n", str(options.workers), "--dist", "worksteal"] if options.workers > 1 else []
    command = [sys.executable, "-m", "pytest", "-q", "-p", "triton_suite", "--softsm", "--tb=native"]
    command += [f"--timeout={options.timeout}", *parallel, file, *extra]
    done = subprocess.run(command, cwd=source, env=environment, check=False, stdout=sys.stderr)
    if done.returncode not in (0, 1, 5):  # 1: tests failed; 5: there was nothing to run
        write(record, {"test": file, "outcome": "failed", "codes": "", "why": f"pytest ended with {done.returncode}"})


def table(tests: list[dict[str, str]]) -> str:
    counts: dict[str, Counter] = {}
    listed = []
    for test in tests:
        file = test["test"].partition("::")[0]
        counts.setdefault(file, Counter())[test["outcome"]] += 1
        if test["outcome"] in ("found", "failed", "cut off"):
            why = "; ".join(filter(None, (test["codes"], test["why"].partition("\n")[0][:160])))
            listed.append(f"- {test['outcome']}: `{test['test']}`: {why}")
    lines = ["| file | " + " | ".join(OUTCOMES) + " |", "|---|" + "---|" * len(OUTCOMES)]
    for file, found in sorted(counts.items()):
        lines.append(f"| `{file}` | " + " | ".join(str(found[how]) for how in OUTCOMES) + " |")
    total = sum(counts.values(), Counter())
    lines.append("| all | " + " | ".join(str(total[how]) for how in OUTCOMES) + " |")
    return "\n".join([*lines, "", *sorted(listed)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a checkout of Triton, at the tag of the installed version")
    parser.add_argument("--suites", nargs="*", default=list(SUITES), help="files or folders of it")
    parser.add_argument("--arch", default="sm_100a", choices=("sm_90a", "sm_100a"))
    parser.add_argument("--each", type=int, default=0, help="so many tests of each function; default: all")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timeout", type=int, default=600, help="seconds for one test")
    parser.add_argument("--record", type=Path, help="a file of results, which is continued")
    parser.add_argument("--table", action="store_true", help="run nothing")
    options, extra = parser.parse_known_args()
    source = options.source.resolve()
    missing = [suite for suite in options.suites if not (source / suite).exists()]
    if missing:
        sys.exit(f"source: got {options.source}, accepted is a checkout of Triton: there is no {missing[0]}")
    with tempfile.TemporaryDirectory() as folder:
        record = (options.record or Path(folder) / "record.jsonl").resolve()
        for file in [] if options.table else files(source, options.suites):
            run(source, file, record, options, extra)
        print(table(read(record)))


if __name__ == "__main__":
    main()
