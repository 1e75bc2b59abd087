"""Runs the instruction tests on a GPU and keeps a record: `python on_silicon.py [--record file.json] [test file ...]`.

Only NumPy, ml_dtypes and a CUDA driver are needed. A test is judged by its own expectation, the one that softsm meets
under pytest; softsm itself is not run. After a fault a CUDA context is lost, so the tests of a file run in a process
of their own, and a new one goes on after a test that faulted or hung.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import importlib.util
import inspect
import json
import pathlib
import queue
import subprocess
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

HERE = pathlib.Path(__file__).resolve().parent
SILENCE = 40  # seconds without a sign of life of a test: it hangs
LOST = ("illegal", "launch failure", "misaligned", "launch timed out", "unspecified")


# -- one file, in a process of its own -------------------------------------------------------------------------------


class NotForDevices(Exception):
    """A test of softsm's own messages."""


def stand_in() -> types.ModuleType:
    """Install the part of pytest that the test files need to be imported and run."""

    def parametrize(names, values, **_):
        names = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)

        def mark(function):
            rows = [dict(zip(names, v if len(names) > 1 else (v,))) for v in values]
            function.cases = [{**case, **row} for case in getattr(function, "cases", [{}]) for row in rows]
            return function

        return mark

    def raises(*_, **__):
        raise NotForDevices

    def fixture(function):
        return function  # it makes a part of softsm: a test that takes one is not for devices

    module = types.ModuleType("pytest")
    module.mark = types.SimpleNamespace(parametrize=parametrize, slow=lambda function: function)
    module.raises, module.fixture = raises, fixture
    return module


def cases_of(path: pathlib.Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, function in list(vars(module).items()):
        if name.startswith("test_") and callable(function) and function.__module__ == path.stem:
            for case in getattr(function, "cases", [{}]):
                yield name, function, case


def fixtures(function) -> set[str]:
    return {name for name, p in inspect.signature(function).parameters.items() if p.default is p.empty}


def worker(path: pathlib.Path, first: int) -> None:
    """Run the file's cases from number `first` on; each prints a line of JSON before and after."""
    sys.path[:0] = [str(HERE), str(HERE.parents[2] / "src")]
    sys.modules["pytest"] = stand_in()
    import silicon

    silicon.have_softsm = lambda: False
    device = silicon.cuda()
    assert device is not None, "no CUDA device"
    say({"device": silicon.RECORD.device, "driver": device.version})
    for number, (name, function, case) in enumerate(cases_of(path)):
        if number < first:
            continue
        silicon.RECORD.clear()
        shown = ", ".join(f"{k}={v!r}" for k, v in case.items())
        say({"begin": number, "test": f"{path.name}::{name}", "case": shown[:200]})
        outcome, text = "passed", ""
        try:
            if fixtures(function) - set(case):
                raise NotForDevices
            function(**case)
            if not silicon.RECORD.results:
                outcome = "none"
        except (NotForDevices, ImportError):
            outcome = "none"
        except Exception as error:
            mine = isinstance(error, AssertionError)
            if mine and "neither softsm nor" in str(error):
                outcome = "none"
            else:
                outcome = "failed" if mine else "error"
                text = (str(error) if mine else f"{type(error).__name__}: {error}")[:1500]
        say({"end": number, "outcome": outcome, "text": text, **silicon.RECORD.kept(), "forms": forms(silicon.RECORD)})
        if outcome == "error" and any(word in text for word in LOST):
            sys.exit(3)


def forms(record) -> list[str]:
    from softsm.ptx import parse

    bodies = [f.body for ptx in record.texts for f in parse(ptx).functions.values()]
    return sorted({x.name for body in bodies for x in body if hasattr(x, "opcode")})


def say(message: dict) -> None:
    print(json.dumps(message), flush=True)


# -- all files -------------------------------------------------------------------------------------------------------


def run_file(path: pathlib.Path) -> tuple[dict, list[dict]]:
    """-> what the device said of itself, and one entry per case."""
    about, entries, first = {}, [], 0
    while True:
        command = [sys.executable, str(HERE / "on_silicon.py"), "--worker", str(first), str(path)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        begun, hung = None, False
        for line in lines_of(child):
            if line is None:
                hung = True
                child.kill()
                break
            message = json.loads(line)
            if "begin" in message:
                begun = message
            elif "end" in message:
                entries.append({**begun, **message})
                begun = None
            else:
                about = message
        errors = child.communicate()[1]
        if begun is not None:
            text = "no answer" if hung else f"the process ended: {errors[-500:]}"
            entries.append({**begun, "end": begun["begin"], "outcome": "error", "text": text})
        if begun is None and child.returncode not in (0, 3):  # it could not even be imported
            entries.append({"test": path.name, "case": "", "outcome": "error", "text": errors[-1500:]})
            return about, entries
        if begun is None and child.returncode == 0:
            return about, entries
        first = entries[-1]["begin"] + 1


def lines_of(child):
    """The child's lines, None when none comes for too long."""
    lines: queue.Queue = queue.Queue()

    def read():
        for line in child.stdout:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=SILENCE)
        except queue.Empty:
            yield None
            return
        if not line:
            return
        yield line


def summary(about: dict, entries: list[dict], seconds: float) -> dict:
    """Return the record as plain, sorted data, so that two runs can be compared."""
    files: dict[str, collections.Counter] = {}
    worst: dict[str, float] = {}
    refused: dict[str, str] = {}
    disagreements, found = [], set()
    for e in entries:
        count = files.setdefault(e["test"].split("::")[0], collections.Counter())
        kind = {"none": "not for this device", "error": "failed"}.get(e["outcome"], e["outcome"])
        count[kind] += 1
        count["results"] += e.get("results", 0)
        for name, value in e.get("worst", {}).items():
            worst[name] = max(value, worst.get(name, 0.0))
        refused |= e.get("refused", {})
        found.update(e.get("forms", ()))
        if kind == "failed":
            disagreements.append({k: e[k] for k in ("test", "case", "text")} | {"details": e.get("disagreements", [])})
    total = sum(files.values(), collections.Counter())
    return {
        "date": time.strftime("%Y-%m-%d"), **about, "seconds": round(seconds, 1), "results": total["results"],
        "tests passed": total["passed"], "tests failed": total["failed"],
        "tests not for this device": total["not for this device"],
        "files": {name: dict(sorted(c.items())) for name, c in sorted(files.items()) if c["results"] or c["failed"]},
        "worst": {k: round(v, 4) for k, v in sorted(worst.items())}, "refused": refused,
        "disagreements": disagreements, "forms": sorted(found),
    }  # fmt: skip


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--record", type=pathlib.Path, help="keep what was measured in this file")
    options.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options.add_argument("--processes", type=int, default=4)
    options.add_argument("files", nargs="*", type=pathlib.Path)
    chosen = options.parse_args()
    if chosen.worker is not None:
        worker(chosen.files[0], chosen.worker)
        return 0
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        print("no CUDA driver here")
        return 2
    started = time.perf_counter()
    paths = [p if p.exists() else HERE / p for p in chosen.files]
    paths = paths or [p for p in sorted(HERE.glob("test_*.py")) if p.stem != "test_isa_page"]
    with ThreadPoolExecutor(chosen.processes) as pool:
        parts = list(pool.map(run_file, paths))
    entries = [e for _, part in parts for e in part]
    record = summary(parts[0][0], entries, time.perf_counter() - started)
    for e in record["disagreements"]:
        print(f"FAILED {e['test']} {e['case']}: {e['text']}")
    print(
        f"{record['device']}: {record['results']} results, {record['tests passed']} tests passed, "
        f"{record['tests failed']} failed, {record['tests not for this device']} not for this device, "
        f"{record['seconds']} s"
    )
    if chosen.record:
        chosen.record.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    return int(record["tests failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
