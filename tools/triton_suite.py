"""Triton's own test suites in softsm: `make test-triton-suite TRITON_SOURCE=path`.

    git clone --branch v3.9.0 --depth 1 https://github.com/triton-lang/triton path
    pip install scipy expecttest                           which some of their files import
    python tools/triton_suite.py path                      both suites, each launch checked
    python tools/triton_suite.py path --each 1             one set of parameters of each test function

The suites stay where they are: nothing of them is part of this repository. Take the tag of the installed Triton. Each
file runs in a process of its own, as two files of the suites have the same name. The result is a table of counts by
file, as Markdown, and the list of tests that failed, with softsm's findings apart from other failures. Tests that need
several GPUs, AMD hardware or another architecture skip themselves.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

SUITES = ("python/test/unit/language", "python/test/gluon")
OUTCOMES = ("passed", "found", "failed", "skipped")
EACH = "SOFTSM_SUITE_EACH"


def pytest_collection_modifyitems(config, items) -> None:
    """As a plug-in of that run: keeps so many tests of each function, spread evenly over its parameters."""
    wanted = int(os.environ.get(EACH, "0"))
    if not wanted:
        return
    functions: dict[str, list] = {}
    for item in items:
        functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = [spread(tests, wanted) for tests in functions.values()]
    keep = {id(item) for tests in kept for item in tests}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in keep])
    items[:] = [item for item in items if id(item) in keep]


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


def run(source: Path, file: str, arch: str, each: int, workers: int, extra: list[str]) -> list[ET.Element]:
    """The test cases of a file, as pytest's JUnit report has them."""
    tools = str(Path(__file__).parent)
    environment = {**os.environ, EACH: str(each), "SOFTSM": arch}  # of processes that tests start, too
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (tools, environment.get("PYTHONPATH"))))
    parallel = ["-n", str(workers), "--dist", "worksteal"] if workers > 1 else []
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "triton_suite", "--softsm", "--tb=short",
                   f"--junitxml={report.name}", *parallel, file, *extra]  # fmt: skip
        subprocess.run(command, cwd=source, env=environment, check=False, stdout=sys.stderr)
        try:
            return list(ET.parse(report.name).getroot().iter("testcase"))
        except ET.ParseError:  # pytest itself has failed: its output says how
            case = ET.Element("testcase", name="the whole file")
            ET.SubElement(case, "error", message="pytest wrote no report")
            return [case]


def outcome(case: ET.Element) -> str:
    if case.find("skipped") is not None:
        return "skipped"
    problem = next((x for kind in ("failure", "error") if (x := case.find(kind)) is not None), None)
    if problem is None:
        return "passed"
    return "found" if any(x.get("name") == "softsm" for x in case.iter("property")) else "failed"


def table(cases: dict[str, list[ET.Element]]) -> str:
    counts: dict[str, Counter] = {}
    listed = []
    for file, case in [(file, case) for file, of_file in cases.items() for case in of_file]:
        how = outcome(case)
        counts.setdefault(file, Counter())[how] += 1
        if how in ("found", "failed"):
            problem = next(x for kind in ("failure", "error") if (x := case.find(kind)) is not None)
            first = "".join((problem.get("message") or "").splitlines()[:1])
            codes = "".join(f"{x.get('value')}; " for x in case.iter("property") if x.get("name") == "softsm")
            listed.append(f"- {how}: `{case.get('name')}` ({file}): {codes}{first[:160]}")
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
    options, extra = parser.parse_known_args()
    source = options.source.resolve()
    missing = [suite for suite in options.suites if not (source / suite).exists()]
    if missing:
        sys.exit(f"source: got {options.source}, accepted is a checkout of Triton: there is no {missing[0]}")
    cases = {}
    for file in files(source, options.suites):
        cases[file] = run(source, file, options.arch, options.each, options.workers, extra)
        print(table({file: cases[file]}), file=sys.stderr, flush=True)
    print(table(cases))


if __name__ == "__main__":
    main()
