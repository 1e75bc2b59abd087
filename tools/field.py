"""Published kernels in softsm: `make test-field SOURCES=folder`.

The folder holds checkouts of the projects (PROJECTS in tools/field_kernels.py, with their commits); nothing of them is
part of this repository. Kernels with a main() of their own run as they are; the others are called by the programs in
tests/field, which compare with fp64. Each is compiled by clang 20 or newer with the headers of a CUDA toolkit
(CUDA_HOME) and checked in every order of completion. Every finding has a judgement (JUDGED, there); one without it, or
a wrong result, is a failure.

    python tools/field.py folder                     all
    python tools/field.py folder --only prefill      those with this in their names
    python tools/field.py folder --write             also put their lines into docs/field.md
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from field_kernels import JUDGED, KERNELS, PACKAGES, PROJECTS, Kernel, folder_of

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "field.md"
BEGIN, END = "<!-- made by tools/field.py -->", "<!-- end -->"


def command(kernel: Kernel, sources: Path) -> list[str]:
    flags = " ".join(f"'{flag}'" for flag in kernel.flags_at(sources))
    words = ["check", str(kernel.source(sources)), "--json", "--arch", kernel.arch, "--sms", str(kernel.sms)]
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


def row(kernel: Kernel, sources: Path) -> tuple[str, str, bool]:
    """The first cell and the whole line of the table, and whether it is as it should be."""
    where, began = f"{kernel.project}: {kernel.name} ({kernel.arch})", time.monotonic()
    done = subprocess.run(
        command(kernel, sources), capture_output=True, text=True, check=False, env=environment(kernel, sources)
    )
    seconds = time.monotonic() - began
    if "{\n" not in done.stdout:
        print(f"{kernel.name}: {done.stderr[-2000:]}", file=sys.stderr)
        return where, f"| {where} | does not run | |", False
    report = json.loads(done.stdout[done.stdout.index("{\n") :])
    for failure in report["failures"]:
        print(f"{kernel.name}: {failure['text']}", file=sys.stderr)
    unjudged = [f for f in report["findings"] if not judgement(kernel, f)]
    for f in unjudged:
        print(f"{kernel.name}: no judgement of {f['code']} {place(f)}: {f['message']}", file=sys.stderr)
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
    print(f"{kernel.name}: {right}, {seconds:.0f} s", file=sys.stderr, flush=True)
    line = f"| {where} | {right} | {'; '.join(found) or 'nothing'} |"
    return where, line, right.startswith(("right", "wrong, by")) and not unjudged


def commits(sources: Path) -> list[str]:
    """Projects that are missing, or at another commit."""
    wrong = []
    for name, (address, commit) in PROJECTS.items():
        ask = ["git", "-C", str(sources / name), "rev-parse", "HEAD"]
        head = subprocess.run(ask, capture_output=True, text=True, check=False).stdout
        if not head.startswith(commit):
            wrong.append(f"git clone {address} {sources / name} && git -C {sources / name} checkout {commit}")
    for name, version in PACKAGES.items():
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
    wrong = commits(sources)
    if wrong:
        sys.exit("SOURCES: these are missing, or at another commit:\n" + "\n".join(wrong))
    if not (Path(os.environ.get("CUDA_HOME", "")) / "include" / "cuda_runtime.h").is_file():
        sys.exit("CUDA_HOME: the headers of a CUDA toolkit are needed (tested: 12.8)")
    kernels = [x for x in KERNELS if options.only in f"{x.project} {x.name} {x.arch}"]
    known = dict(re.findall(r"^\| ([^|]+) (\|.*)$", PAGE.read_text(), re.M))
    well = True
    with ThreadPoolExecutor(options.jobs) as pool:
        for where, line, ok in pool.map(lambda kernel: row(kernel, sources), kernels):
            known[where], well = line.removeprefix(f"| {where} "), well and ok
            print(line, flush=True)
            if options.write:
                write(known)
    sys.exit(not well)


def write(known: dict[str, str]) -> None:
    """The table of docs/field.md: a kernel that did not run now keeps its line."""
    names = [f"{x.project}: {x.name} ({x.arch})" for x in KERNELS]
    lines = [f"| {name} {known[name]}" for name in names if name in known]
    table = "\n".join([BEGIN, "| kernel | result | found |", "|---|---|---|", *lines, END])
    PAGE.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: table, PAGE.read_text(), flags=re.DOTALL))


if __name__ == "__main__":
    main()
