"""Triton's own test suites in softsm: `make test-triton-suite TRITON_SOURCE=path`.

    git clone --branch v3.9.0 --depth 1 https://github.com/triton-lang/triton path
    python tools/triton_suite.py path                      both suites, each launch checked
    python tools/triton_suite.py path --sample 100         100 tests of them, spread evenly over those collected

The suites stay where they are: nothing of them is part of this repository. Take the tag of the installed Triton. The
result is a table of counts by file, as Markdown, and the list of tests that failed, with softsm's findings apart from
other failures. Tests that ask for several GPUs, AMD hardware or another architecture skip themselves.
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
SAMPLE = "SOFTSM_SUITE_SAMPLE"


def pytest_collection_modifyitems(config, items) -> None:
    """As a plug-in of that run: keeps a sample, every n-th test of what was collected."""
    wanted = int(os.environ.get(SAMPLE, "0"))
    if not 0 < wanted < len(items):
        return
    keep = {i * len(items) // wanted for i in range(wanted)}
    dropped = [item for i, item in enumerate(items) if i not in keep]
    items[:] = [item for i, item in enumerate(items) if i in keep]
    config.hook.pytest_deselected(items=dropped)


def run(source: Path, suites: list[str], arch: str, sample: int, workers: int, extra: list[str]) -> ET.Element:
    """The report of pytest, as JUnit has it."""
    tools = str(Path(__file__).parent)
    environment = {**os.environ, SAMPLE: str(sample)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (tools, environment.get("PYTHONPATH"))))
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "triton_suite", f"--softsm={arch}", "--tb=short",
                   f"--junitxml={report.name}", "-n", str(workers), "--dist", "worksteal", *suites, *extra]  # fmt: skip
        subprocess.run(command, cwd=source, env=environment, check=False)
        return ET.parse(report.name).getroot()


def outcome(case: ET.Element) -> str:
    if case.find("skipped") is not None:
        return "skipped"
    problem = next((x for kind in ("failure", "error") if (x := case.find(kind)) is not None), None)
    if problem is None:
        return "passed"
    return "found" if (problem.get("message") or "").startswith("Failed: softsm:") else "failed"


def table(root: ET.Element) -> str:
    counts: dict[str, Counter] = {}
    listed = []
    for case in root.iter("testcase"):
        file, how = case.get("classname", "").replace(".", "/"), outcome(case)
        counts.setdefault(file, Counter())[how] += 1
        if how in ("found", "failed"):
            problem = next(x for kind in ("failure", "error") if (x := case.find(kind)) is not None)
            first = (problem.get("message") or "").splitlines()[:1]
            listed.append(f"- {how}: `{case.get('name')}` ({file}): {''.join(first)[:160]}")
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
    parser.add_argument("--sample", type=int, default=0, help="so many tests; default: all")
    parser.add_argument("--workers", type=int, default=2)
    options, extra = parser.parse_known_args()
    missing = [suite for suite in options.suites if not (options.source / suite.split("::")[0]).exists()]
    if missing:
        sys.exit(f"source: got {options.source}, accepted is a checkout of Triton: there is no {missing[0]}")
    root = run(options.source.resolve(), options.suites, options.arch, options.sample, options.workers, extra)
    print(table(root))


if __name__ == "__main__":
    main()
