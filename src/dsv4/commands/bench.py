"""`dsv4 bench`: speed on this GPU, beside what else can be imported, and how far from the machine's ceilings."""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer
from rich.table import Table

from . import show

BEGIN = "<!-- speed: made by `dsv4 bench --from benchmarks/results/h200.json --write README.md` -->"
END = "<!-- end of speed -->"
PAIR = "dsv4 aot, two CTAs"  # kernels/sm90/fmha/pair.py, from the directory of --aot
SUITES = ("dense", "v4", "index", "backward", "all")


def bench(
    suite: Annotated[str, typer.Option(help="dense, v4, index, backward or all")] = "dense",
    match: Annotated[str, typer.Option(help="only cases whose name contains this")] = "",
    repeats: Annotated[int, typer.Option(help="timed replays per call")] = 30,
    aot: Annotated[Path | None, typer.Option(help="also time the kernels of this `dsv4 compile` directory")] = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="write the measurements here")] = None,
    plot: Annotated[Path | None, typer.Option(help="draw them here (needs matplotlib)")] = None,
    limit: Annotated[float, typer.Option(help="begin no case after so many seconds")] = float("inf"),
    recorded: Annotated[Path | None, typer.Option("--from", help="measure nothing: take this --json file")] = None,
    write: Annotated[Path | None, typer.Option(help="put the table into this file, between its marks")] = None,
) -> None:
    """Time dsv4 and every peer that can be imported, by turns: CUDA-graph replays with a cold L2, medians, clocks.

    Peers: torch, FlashMLA, FFPA, DeepGEMM, flash-attn. A wheel unpacked into a folder on PYTHONPATH is enough; the
    docstring of dsv4.bench.peers has the commands.
    """
    if suite not in SUITES:
        refuse(f"--suite {suite}: it is one of {', '.join(SUITES)}")
    if recorded is not None:
        record = read(recorded)
        show.console().print(markdown(record), markup=False)
        if plot is not None:
            draw(record, plot)
        if write is not None:
            write.write_text(replaced(write.read_text(), record))
        return
    if write is not None:
        refuse("--write needs --from: a table is made from a record that is kept")
    if not torch.cuda.is_available():
        refuse("it needs a GPU; torch sees none here (--from shows a recorded run)")
    from dsv4 import bench as measuring

    cases = [case for case in measuring.cases(suite) if match in case.name]
    if not cases:
        refuse(f"no case matches {match!r}; there are {', '.join(case.name for case in measuring.cases(suite))}")
    record, failed = run(cases, repeats, aot, limit, as_json)
    if plot is not None:
        draw(record, plot)
    raise typer.Exit(1 if failed else 0)


def run(
    cases: list[Any], repeats: int, aot: Path | None, limit: float, as_json: Path | None
) -> tuple[dict[str, Any], bool]:
    """(the record, whether one of ours failed). The JSON is written after every case: an interrupted run loses one."""
    import triton

    from dsv4 import bench as measuring
    from dsv4.bench import peers

    warnings.filterwarnings("ignore", module="dsv4.bench")  # torch says at length why a backend refuses
    out, begin, failed = show.console(), time.monotonic(), False
    ceilings = measuring.ceilings()
    record: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "peers": peers.here(), "ceilings": {k: round(v, 3) for k, v in ceilings.items()}, "cases": [],
    }  # fmt: skip
    if aot is not None:
        record["aot_triton"] = ", ".join(sorted({json.loads(p.read_text())["triton"] for p in aot.glob("*.json")}))
    for name, version in record["peers"].items():
        out.print(f"{name}: {version}", markup=False, highlight=False)
    table = Table(title=f"{record['device']}: copy {ceilings['copy_terabytes_per_second']:.2f} TB/s, "
                        f"matmul {ceilings['matmul_tflops']:.0f} TFLOP/s")  # fmt: skip
    for column in ("case", "who", "us", "TFLOP/s", "TB/s", "MHz", "dsv4 is"):
        table.add_column(column, justify="left" if column in ("case", "who") else "right")
    for case in cases:
        if time.monotonic() - begin > limit:
            out.print(f"no time left for {case.name}", markup=False)
            continue
        found = measuring.measure(case, repeats, aot).as_json()
        record["cases"].append(found)
        failed |= "dsv4" not in found["microseconds"]
        for row in rows(found):
            table.add_row(*row)
        if as_json is not None:
            as_json.write_text(json.dumps(record, indent=1) + "\n")
    out.print(table)
    return record, failed


def rows(case: dict[str, Any]) -> list[tuple[str, ...]]:
    """One line for everyone who has a time, the fastest peer last; and who refused."""
    us = case["microseconds"]
    lines = []
    for who in sorted(us, key=lambda who: (not who.startswith("dsv4"), -us[who])):
        ratio = "" if who == "dsv4" or "dsv4" not in us else f"{us[who] / us['dsv4']:.2f}x"
        lines.append((case["case"], who, f"{us[who]:.1f}", f"{case['tflops'][who]:.0f}",
                      f"{case['terabytes_per_second'][who]:.2f}", f"{case['megahertz'][who]}", ratio))  # fmt: skip
    if "dsv4" not in us:
        lines.insert(0, (case["case"], "dsv4", case["refused"].get("dsv4", "failed"), "", "", "", ""))
    return [(name if n == 0 else "", *rest) for n, (name, *rest) in enumerate(lines)]


def refuse(why: str) -> NoReturn:
    print(f"dsv4 bench: {why}", file=sys.stderr)
    raise typer.Exit(2)


def read(path: Path) -> dict[str, Any]:
    """What --json wrote."""
    try:
        record = json.loads(path.read_text())
        return record if "cases" in record else refuse(f"{path}: not a file that dsv4 bench --json wrote")
    except (OSError, ValueError, TypeError) as problem:
        refuse(f"{path}: {problem}")


def markdown(record: dict[str, Any]) -> str:
    """The table of the README: one row per case, the better of all peers beside ours."""
    turns = "; ours and theirs by turns" if "peers" in record else ""
    lines = [
        f"{record['device']}, torch {record['torch']}, Triton {record['triton']}; CUDA-graph replay, cold L2, "
        f"medians{turns}. "
        f"Ceilings: copy {record['ceilings']['copy_terabytes_per_second']:.2f} TB/s, "
        f"bf16 matmul {record['ceilings']['matmul_tflops']:.0f} TFLOP/s.",
        "",
        "| case | dsv4 | | best peer | | speed |",
        "|---|---|---|---|---|---|",
    ]
    for case in record["cases"]:
        if not has_peer(case):
            continue  # it failed, or nothing else can run it
        peer = best_peer(case)
        bytes_count = "decode" in case["case"] or not case.get("flops", 1)
        unit, values = ("TB/s", case["terabytes_per_second"]) if bytes_count else ("TFLOP/s", case["tflops"])
        theirs = case["microseconds"][peer]
        for name, who in ours(case, record):
            mine = case["microseconds"][who]
            lines.append(
                f"| {name} | {mine:.0f} us | {values[who]:.4g} {unit} | {peer} | {theirs:.0f} us "
                f"| {theirs / mine:.2f}x |"
            )
    return "\n".join(lines)


def ours(case: dict[str, Any], record: dict[str, Any]) -> list[tuple[str, str]]:
    """(name of the row, whose time): dsv4 as it is called, and the kernel that it takes only where it is asked to."""
    rows = [(case["case"], "dsv4")]
    if PAIR in case["microseconds"]:
        rows.append((f"{case['case']}, two CTAs (Triton {record['aot_triton']} cubin)", PAIR))
    return rows


def has_peer(case: dict[str, Any]) -> bool:
    """Whether ours ran, and somebody else."""
    return "dsv4" in case["microseconds"] and not all(who.startswith("dsv4") for who in case["microseconds"])


def best_peer(case: dict[str, Any]) -> str:
    """The fastest that does the same; a name that ends with "alone" is of one that does less."""
    others = {who: us for who, us in case["microseconds"].items() if not who.startswith("dsv4")}
    others = {who: us for who, us in others.items() if not who.endswith("alone")} or others
    return min(others, key=others.__getitem__)


def replaced(text: str, record: dict[str, Any]) -> str:
    """The text with the table between the marks made anew."""
    head, mark, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not mark or not end:
        raise typer.BadParameter(f"the file has no marks {BEGIN!r} and {END!r}")
    return f"{head}{BEGIN}\n\n{markdown(record)}\n\n{END}{tail}"


def draw(record: dict[str, Any], path: Path) -> None:
    """Bars: each case's speed relative to its best peer's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = [case for case in record["cases"] if has_peer(case)]
    names, ratios, peers = [], [], []
    for case in cases:
        peer = best_peer(case)
        for name, who in ours(case, record):
            names.append(name)
            peers.append(peer)
            ratios.append(case["microseconds"][peer] / case["microseconds"][who])
    figure, axes = pyplot.subplots(figsize=(9, 0.45 * len(names) + 1.2))
    bars = axes.barh(names, ratios, color="#3b6ea8")
    axes.bar_label(bars, [f"{r:.2f}x {p}" for r, p in zip(ratios, peers)], padding=4, fontsize=8)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlim(0, max(ratios) * 1.35)
    axes.invert_yaxis()
    axes.set_xlabel(f"speed relative to the best peer, {record['device']}")
    figure.tight_layout()
    figure.savefig(path)
