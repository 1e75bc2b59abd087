"""Writes `docs/isa.md`: every instruction softsm executes, the file that says what it means, its tests, and what a GPU
said. `python tests/softsm/isa/isa_page.py` runs the tests to count them (a minute), then writes the page; with `--page`
it writes the page alone. The instructions come from the registry, so a new one appears by itself."""

from __future__ import annotations

import argparse
import collections
import json
import os
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PAGE, TESTS, RECORD = (ROOT / "docs" / name for name in ("isa.md", "isa-tests.json", "silicon-h200.json"))
FOLDERS = ["tests/softsm/isa"]

# Families: which leading modifiers belong to the instruction's name rather than to its form.
PARTS = {
    "cp": "async reduce bulk tensor prefetch commit_group wait_group wait_all mbarrier arrive",
    "mbarrier": "init inval arrive arrive_drop expect_tx complete_tx test_wait try_wait pending_count",
    "bar": "cta sync arrive red warp",
    "barrier": "cta cluster sync arrive red wait",
    "fence": "proxy mbarrier_init",
    "tensormap": "replace cp_fenceproxy",
    "tcgen05": "alloc dealloc relinquish_alloc_permit ld st cp shift mma ws commit fence wait",
    "wgmma": "mma_async fence commit_group wait_group",
    "clusterlaunchcontrol": "try_cancel query_cancel is_canceled get_first_ctaid",
    "griddepcontrol": "launch_dependents wait",
    "createpolicy": "fractional range cvt",
    "st": "async", "red": "async", "setmaxnreg": "inc dec",
}  # fmt: skip


def instruction(form: str) -> str:
    opcode, *rest = form.split(".")
    parts = PARTS.get(opcode, "").split()
    name = [opcode]
    for modifier in rest:
        if modifier not in parts:
            break
        if modifier != "cta":
            name.append(modifier)
    return ".".join(name)


def modifiers(form: str, name: str) -> set[str]:
    """What follows the name, with the many shapes of wgmma as one."""
    rest = [m for m in form.split(".") if m not in name.split(".")]
    return {re.sub(r"^m64n\d+k", "m64nNk", m) for m in rest}


def registered() -> dict[str, list[str]]:
    """Opcode -> chapters that lower it."""
    sys.path.insert(0, str(ROOT / "src"))
    from softsm.engine.assemble import load_chapters
    from softsm.isa import typed
    from softsm.isa.registry import LOWERERS

    load_chapters()
    found = {}
    for opcode, function in LOWERERS.items():
        functions = typed._TYPED.get(opcode, {}).values() or [function]
        found[opcode] = sorted({f.__module__.rsplit(".", 1)[1] for f in functions})
    return found


def title(chapter: str) -> str:
    text = (ROOT / "src" / "softsm" / "isa" / f"{chapter}.py").read_text()
    return re.sub(r"\s+", " ", text.split('"""')[1].split("\n\n")[0]).strip()


def page() -> str:
    known, record = json.loads(TESTS.read_text()), json.loads(RECORD.read_text())
    opcodes = registered()
    counts = collections.Counter(name for names in known["tests"].values() for name in names)
    on_gpu = collections.Counter(instruction(form) for form in record["forms"])
    names = {n for n in counts if n.split(".")[0] in opcodes}
    names |= {o for o in opcodes if not any(n.split(".")[0] == o for n in names)}
    chapters: dict[str, list[str]] = collections.defaultdict(list)
    for name in sorted(names):
        files = known["files"].get(name) or opcodes[name.split(".")[0]]
        chapters[files[0]].append(name)
    lines = [
        "# Instructions of softsm", "",
        "Made by `python tests/softsm/isa/isa_page.py` from the registry of instructions and from the tests.",
        f"{len(opcodes)} opcodes, {len(names)} instructions. An opcode that is not here, or a modifier without "
        "a meaning, is refused when a kernel is loaded.", "",
        "*Tests*: test functions of " + " and ".join(f"`{f}`" for f in FOLDERS) + " that load it; parametrised ones "
        "count once; moves, loads and stores also serve most other tests. *Modifiers*: those that these tests use. "
        "*GPU*: how many of its forms ran on the GPU below.", "",
        "## On a GPU", "",
        f"[silicon-h200.json](silicon-h200.json) is the record of {record['date']}: {record['device']}, "
        f"{record['driver']}: {record['results']:,} results of {record['tests passed'] + record['tests failed']} test "
        f"cases; {record['tests passed']} are what the tests expect of softsm too, {record['tests failed']} are not; "
        f"{record['tests not for this device']} are for sm_100a or test softsm's own messages.", "",
        "Repeat it, with that GPU, NumPy and ml_dtypes: `python tests/softsm/isa/on_silicon.py --record "
        "docs/silicon-h200.json`", "",
    ]  # fmt: skip
    if record["disagreements"]:
        lines += ["Cases that disagreed in that run:", ""]
        for test, group in grouped(record["disagreements"]).items():
            cases = f" ({len(group)} cases)" if len(group) > 1 else ""
            answer = NOTES.get(test, "open")
            lines.append(f"- `{test}`{cases}: {answer}")
        lines.append("")
    lines += ["Largest deviations of approximate instructions and tensor-core sums, 1 = the bound the test allows:", "",
              "| instruction | deviation |", "|---|---|"]  # fmt: skip
    lines += [f"| `{short(k)}` | {v:g} |" for k, v in record["worst"].items()]
    for chapter in sorted(chapters):
        lines += ["", f"## src/softsm/isa/{chapter}.py", "", title(chapter), "",
                  "| instruction | tests | modifiers | GPU |", "|---|---|---|---|"]  # fmt: skip
        for name in chapters[chapter]:
            others = [f for f in opcodes[name.split(".")[0]] if f != chapter]
            also = f" (also {', '.join(o + '.py' for o in others)})" if others and name in opcodes else ""
            used = " ".join(known["modifiers"].get(name, []))
            lines.append(f"| `{name}`{also} | {counts[name]} | {used} | {on_gpu[name] or ''} |")
    return "\n".join(lines) + "\n"


def grouped(entries: list[dict]) -> dict[str, list[dict]]:
    groups: dict[str, list[dict]] = {}
    for entry in entries:
        groups.setdefault(entry["test"], []).append(entry)
    return groups


def short(text: str) -> str:
    return re.sub(r"\{\{.*; (\S+ )|\s*\{d\}.*", lambda m: m.group(1) or "", text).split(" {")[0].split(" %")[0].strip()


# What became of a disagreement after the run of the record. Delete an entry when a new record no longer has it.
NOTES = {
    "test_convert.py::test_nans_between_floats": "a NaN narrowed from f64 to f32 keeps its sign and upper payload; "
    "test and softsm follow. f16 from f64 does too on the GPU (0x7e00, 0xfe00), softsm makes 0x7fff",
    "test_half.py::test_out_of_bounds_nan": "the out-of-bounds NaN of f16 is 0x7ff7 or 0xfff7; the test follows, "
    "softsm refuses .oob",
    "test_tma.py::test_loads_that_change_values": "the FTZ types do not flush, tf32 rounds ties to even and makes NaN "
    "0x7fffe000; test and softsm follow",
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--page", action="store_true", help="do not run the tests, only write the page")
    if not options.parse_args().page:
        sys.path.insert(0, str(HERE))
        command = [sys.executable, "-m", "pytest", "-p", "counting", "--instructions", str(TESTS), *FOLDERS,
                   "--ignore", str(HERE / "test_isa_page.py")]  # fmt: skip
        subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "PYTHONPATH": f"src:{HERE}"})
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
