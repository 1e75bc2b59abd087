"""Published kernels in softsm: `make test-field SOURCES=folder`.

The folder holds checkouts of the projects (PROJECTS in tools/field_kernels.py, with their commits); nothing of them is
part of this repository. Kernels with a main() of their own run as they are; the others are called by the programs in
tests/field, which compare with fp64. Each is compiled by clang 20 or newer with the headers of a CUDA toolkit
(CUDA_HOME) and checked in every order of completion. Every finding has a judgement (JUDGED, there); one without it, or
a wrong result, is a failure.

    python tools/field.py folder                     all
    python tools/field.py folder --only prefill      those with this in their names
    python tools/field.py folder --write             the table of docs/field.md, of one commit

With --write, reports are kept in the folder for as long as src/softsm, the kernel and the compiler are the same, so it
goes on where it was interrupted. A kernel that has no report yet keeps its line on the page, with a mark.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from field_kernels import JUDGED, KERNELS, PACKAGES, PROJECTS, Kernel, folder_of

from softsm.doors.cuda.compile import find_clang, version_of

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "field.md"
BEGIN, END = "<!-- made by tools/field.py -->", "<!-- end -->"


def command(kernel: Kernel, sources: Path) -> list[str]:
    flags = " ".join(f"'{flag}'" for flag in kernel.flags_at(sources))
    words = ["check", str(kernel.source(sources)), "--json", "--arch", kernel.arch, "--sms", str(kernel.sms)]
    words += ["--ranks", str(kernel.ranks)] if kernel.ranks > 1 else []
    words += ["--clang-flags", flags] if flags else []
    arguments = kernel.arguments_at(sources)
    return [sys.executable, "-m", "softsm", *words, *(["--", *arguments] if arguments else [])]


def environment(kernel: Kernel, sources: Path) -> dict[str, str]:
    """Python programs find packages in a folder of the sources. Each kernel has a folder of its own in FIELD_OUT, for
    its outputs (tools/field_gpu.py compares them)."""
    found = dict(os.environ)
    if kernel.file.endswith(".py"):
        path = (os.environ.get("PYTHONPATH"), str(sources / "packages"))
        found["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    if "FIELD_OUT" in found:
        out = Path(found["FIELD_OUT"]).resolve() / folder_of(kernel)
        out.mkdir(parents=True, exist_ok=True)
        found["FIELD_OUT"] = str(out)
    return found


def place(finding: dict) -> str:
    """`phase1.cuh:229 against :309`"""
    found = [f"{Path(p['source']['file']).name}:{p['source']['line']}" for p in finding["parties"] if p["source"]]
    return " against ".join(dict.fromkeys(found))


def named(finding: dict) -> str:
    return f"`{finding['code']}` {place(finding)}".rstrip()


def judgement(kernel: Kernel, finding: dict) -> str:
    for (name, code, at), text in JUDGED.items():
        if name in kernel.name and code == finding["code"] and at in place(finding):
            return text
    return ""


def title(kernel: Kernel) -> str:
    return f"{kernel.project}: {kernel.name} ({kernel.arch})"


def report_of(kernel: Kernel, sources: Path) -> dict:
    """What softsm says, or nothing where it does not run."""
    began = time.monotonic()
    done = subprocess.run(
        command(kernel, sources), capture_output=True, text=True, check=False, env=environment(kernel, sources)
    )
    print(f"{title(kernel)}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    if "{\n" not in done.stdout:
        print(done.stderr[-2000:], file=sys.stderr)
        return {}
    return json.loads(done.stdout[done.stdout.index("{\n") :])


def report_file(kernel: Kernel, sources: Path, tree: str) -> Path:
    """The name says what was run: softsm, by its tree, the kernel and the compiler."""
    own = [ROOT / "tests" / "field" / name for name in (kernel.file, "field.h", "maps.h")]
    facts = [tree, repr(kernel), str(version_of(find_clang())), *(path.read_text() for path in own if path.is_file())]
    name = f"{folder_of(kernel)}-{hashlib.sha256(chr(0).join(facts).encode()).hexdigest()[:12]}.json"
    return sources / "reports" / name


def kept_report(kernel: Kernel, sources: Path, tree: str) -> dict:
    """That of an earlier run, if what was run is the same."""
    file = report_file(kernel, sources, tree)
    if file.is_file():
        return json.loads(file.read_text())
    report = report_of(kernel, sources)
    if report:
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(report, indent=1))
    return report


def row(kernel: Kernel, report: dict) -> tuple[str, bool]:
    """The line of the table, and whether it is as it should be."""
    where = title(kernel)
    if not report:
        return f"| {where} | does not run | |", False
    for failure in report["failures"]:
        print(f"{where}: {failure['text']}", file=sys.stderr)
    unjudged = [f for f in report["findings"] if not judgement(kernel, f)]
    for f in unjudged:
        print(f"{where}: no judgement of {f['code']} {place(f)}: {f['message']}", file=sys.stderr)
    alike: dict[str, list[str]] = {}
    for f in report["findings"]:
        alike.setdefault(judgement(kernel, f) or "NOT JUDGED", []).append(named(f))
    found = [f"{', '.join(dict.fromkeys(names))}: {text}" for text, names in alike.items()]
    notes = sorted({named(w) for w in report["warnings"]})
    found += [f"warning {note}" for note in notes]
    excused = any(judgement(kernel, f).startswith("real") for f in report["findings"])
    right = "right" if not report["failures"] else "wrong, by that" if excused else "wrong"
    if right == "right" and any(f["stopped"] for f in report["findings"]):
        ended = set(report["orders"]) - {x for f in report["findings"] if f["stopped"] for x in f["orders"]}
        right = "right where it ends" if ended else "does not end"
    if not report["launches"]:
        right = "nothing was launched"
    line = f"| {where} | {right} | {'; '.join(found) or 'nothing'} |"
    return line, right.startswith(("right", "wrong, by")) and not unjudged


def commits(sources: Path, kernels: list[Kernel]) -> list[str]:
    """What these kernels need and is missing, or at another commit."""
    wrong = []
    python = any(kernel.file.endswith(".py") for kernel in kernels)
    for name, (address, commit) in PROJECTS.items():
        if not any(name == kernel.project or f"{{{name}}}" in str(kernel.flags) for kernel in kernels):
            continue
        ask = ["git", "-C", str(sources / name), "rev-parse", "HEAD"]
        head = subprocess.run(ask, capture_output=True, text=True, check=False).stdout
        if not head.startswith(commit):
            wrong.append(f"git clone {address} {sources / name} && git -C {sources / name} checkout {commit}")
    for name, version in PACKAGES.items() if python else ():
        if not list((sources / "packages").glob(f"{name.replace('-', '_')}-{version}.dist-info")):
            wrong.append(f"pip install --no-deps --target {sources / 'packages'} {name}=={version}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, help="folder with the checkouts")
    parser.add_argument("--only", default="", help="kernels with this in their names")
    parser.add_argument("--write", action="store_true", help="put the lines into docs/field.md")
    parser.add_argument("--jobs", type=int, default=1, help="kernels at a time")
    options = parser.parse_args()
    sources = options.sources.resolve()
    kernels = [x for x in KERNELS if options.only in title(x)]
    wrong = commits(sources, kernels)
    if wrong:
        sys.exit("SOURCES: these are missing, or at another commit:\n" + "\n".join(wrong))
    if not (Path(os.environ.get("CUDA_HOME", "")) / "include" / "cuda_runtime.h").is_file():
        sys.exit("CUDA_HOME: the headers of a CUDA toolkit are needed (tested: 12.8)")
    git = ["git", "-C", str(ROOT)]
    tree = subprocess.check_output([*git, "rev-parse", "HEAD:src/softsm"], text=True).strip()
    if options.write and subprocess.check_output([*git, "status", "--porcelain", "src/softsm", "tests/field", "tools"]):
        sys.exit("--write: the tree differs from its commit")

    def judged(kernel: Kernel) -> tuple[str, bool]:
        line, well = row(kernel, kept_report(kernel, sources, tree) if options.write else report_of(kernel, sources))
        print(line, flush=True)
        return line, well

    with ThreadPoolExecutor(options.jobs) as pool:
        lines = list(pool.map(judged, kernels))
    if options.write:
        commit = subprocess.check_output(
            [*git, "log", "-1", "--format=%h", "--abbrev=8", "--", "src/softsm"], text=True
        )
        files = {title(x): report_file(x, sources, tree) for x in KERNELS}
        reports = {name: json.loads(file.read_text()) for name, file in files.items() if file.is_file()}
        write(reports, commit.strip())
    sys.exit(not all(well for _, well in lines))


def write(reports: dict[str, dict], commit: str) -> None:
    """The table of the page. Lines of another commit are marked."""
    before = dict(re.findall(r"^\| ([^|]+?) °? ?(\|.*)$", PAGE.read_text(), re.M))
    lines = []
    for kernel in KERNELS:
        name = title(kernel)
        if name in reports:
            lines.append(row(kernel, reports[name])[0])
        elif name in before:
            lines.append(f"| {name} ° {before[name]}")
    marked = sum(" ° |" in line for line in lines)
    made = f"with clang {version_of(find_clang())}, on {platform.machine()}"
    said = f"{len(lines) - marked} of {len(lines)} lines are of one commit of softsm, {commit}, {made}."
    said += " Those marked ° are of earlier commits." if marked else ""
    table = "\n".join([BEGIN, said, "", "| kernel | result | found |", "|---|---|---|", *lines, END])
    PAGE.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: table, PAGE.read_text(), flags=re.DOTALL))


if __name__ == "__main__":
    main()
