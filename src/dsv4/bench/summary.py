"""Many recorded cases in few lines: slowest, worst tenth, median and fastest of each kind, relative to the best peer.

Nothing is chosen by hand: every case in which something else can run is counted, losses and wins alike.
"""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

Record = dict[str, Any]
TOGETHER = ("compress", "write")  # kinds that need no more than their first word
OPERATIONS = ("v4", "prefill", "decode", "varlen", "index", "compress", "write", "moe")  # the order of the rows


def has_peer(case: dict[str, Any]) -> bool:
    """Return whether both our call and a peer's ran."""
    return "dsv4" in case["microseconds"] and not all(who.startswith("dsv4") for who in case["microseconds"])


def best_peer(case: dict[str, Any]) -> str:
    """Return the fastest that does the same; a name that ends with "alone" is of one that does less."""
    others = {who: us for who, us in case["microseconds"].items() if not who.startswith("dsv4")}
    others = {who: us for who, us in others.items() if not who.endswith("alone")} or others
    return min(others, key=others.__getitem__)


def is_record(record: Any) -> bool:
    return isinstance(record, dict) and {"device", "ceilings", "cases"} <= record.keys()


def records(folder: Path) -> list[Record]:
    """Return what `dsv4 bench --json` wrote into a folder, in the order of the names."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return [record for record in found if is_record(record)]


def kind(name: str) -> str:
    """Return what a case is about: the first words of its name, without the mask and without sizes."""
    words: list[str] = []
    for word in name.split():
        if word[0].isdigit() or word[0] == "(":
            break
        if word not in ("full", "causal"):
            words.append(word)
    return words[0] if words[0] in TOGETHER else " ".join(words)


def place(name: str) -> tuple[bool, int, int, bool, str]:
    """Return the sort key of a kind: by operation, gradients last, then by head dim, random shapes after fixed ones."""
    words = name.split()
    first = next(word for word in words if word not in ("random", "backward", "eager"))
    operation = OPERATIONS.index(first) if first in OPERATIONS else OPERATIONS.index("prefill")
    width = re.search(r"\bhd(\d+)", name)
    return "backward" in words, operation, int(width[1]) if width else 0, words[0] == "random", name


def speeds(many: list[Record]) -> dict[str, list[tuple[float, str]]]:
    """Return, by kind, (our speed relative to the best peer's, the peer) of every case."""
    found: dict[str, list[tuple[float, str]]] = {}
    for record in many:
        drawn = "random " if "drawn" in record else ""
        for case in filter(has_peer, record["cases"]):
            peer = best_peer(case)
            ratio = case["microseconds"][peer] / case["microseconds"]["dsv4"]
            found.setdefault(drawn + kind(case["case"]), []).append((ratio, peer))
    return {name: found[name] for name in sorted(found, key=place)}


def worst_tenth(ratios: list[float]) -> float:
    """Return the first decile, interpolated: nine of ten cases are at least as fast."""
    ordered = sorted(ratios)
    place = 0.1 * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def table(many: list[Record]) -> str:
    """Return a table in Markdown, one row per kind."""
    machines = dict.fromkeys(f"{r['device']}, torch {r['torch']}, Triton {r['triton']}" for r in many)
    lines = [
        f"{'; '.join(machines)}. CUDA-graph replays, cold L2, medians; dsv4 and its peers alternate in one process.",
        "",
        "| | cases | best peer | slowest | worst tenth | median | fastest |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in speeds(many).items():
        ratios = [ratio for ratio, _ in found]
        peers = Counter(peer.split(",")[0] for _, peer in found).most_common()
        best = ", ".join(f"{peer} ({count})" for peer, count in peers) if len(peers) > 1 else peers[0][0]
        low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
        tenth = worst_tenth(ratios)
        lines.append(f"| {name} | {len(found)} | {best} | {low:.2f}x | {tenth:.2f}x | {middle:.2f}x | {high:.2f}x |")
    return "\n".join(lines)


def draw(many: list[Record], path: Any) -> None:
    """Draw a dot per case, a line per kind, on a logarithmic scale; 1 is as fast as the best peer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = speeds(many)
    figure, axes = pyplot.subplots(figsize=(9, 0.32 * len(found) + 1))
    for line, (_, cases) in enumerate(found.items()):
        ratios = [ratio for ratio, _ in cases]
        axes.plot([min(ratios), max(ratios)], [line, line], color="#9db7d5", linewidth=3, zorder=1)
        colours = ["#3b6ea8" if ratio >= 1 else "#c0504d" for ratio in ratios]
        axes.scatter(ratios, [line] * len(ratios), color=colours, s=18, zorder=2)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}x")
    axes.set_yticks(range(len(found)), list(found))
    axes.invert_yaxis()
    axes.set_xlabel(f"speed relative to the best peer in the same run, {many[0]['device']}")
    figure.tight_layout()
    figure.savefig(path)
