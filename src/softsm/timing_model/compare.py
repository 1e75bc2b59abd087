"""Compares two runs: which engines, waits and source lines differ in time."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path

import numpy as np

from softsm.ptx.cplusplus import readable
from softsm.timing_model import report
from softsm.timing_model.follow import locations
from softsm.timing_model.prediction import Prediction
from softsm.timing_model.validated import band

LEAST = 0.01  # share of the longer run: smaller differences are left out
EVERY = 10_000  # stalls: all of them


@dataclass
class Difference:
    """An item that needs `first` and `second` us in the two runs. Engines overlap, and so do waits: do not sum them."""

    kind: str  # engine, wait or line
    what: str
    first: float
    second: float

    def __str__(self) -> str:
        more = self.second - self.first
        return f"{self.kind:6s} {self.what}: {self.first:.4g} us, {self.second:.4g} us ({more:+.4g})"


def longest(run: list[Prediction]) -> Prediction:
    return max(run, key=lambda p: p.body_us)


def differences(one: list[Prediction], other: list[Prediction]) -> list[Difference]:
    """Returns the differences between the longest launches of the two runs, the largest first."""
    a, b = longest(one), longest(other)
    out = [Difference("engine", k, float(a.busy[k] * a.body_us), float(b.busy.get(k, 0.0) * b.body_us)) for k in a.busy]
    names = same_places(a, b)
    for kind, of in (("wait", _waits), ("line", _lines)):
        found = [of(p, where) for p, where in zip((a, b), names)]
        out += [Difference(kind, what, *(x.get(what, 0.0) for x in found)) for what in found[0] | found[1]]
    least = LEAST * max(a.body_us, b.body_us)
    large = [d for d in out if abs(d.second - d.first) >= least]
    return sorted(large, key=lambda d: -abs(d.second - d.first))


def same_places(a: Prediction, b: Prediction) -> list[dict[int, str]]:
    """Returns the names of both runs' PTX lines. Lines of two files have one name if their text is the same, or if it
    was changed in its place: two versions of a program often lie in two files."""
    runs = [_places(p) for p in (a, b)]
    files = [sorted({place[0] for place in run.values()}) for run in runs]
    pairs = {x: next((y for y in files[1] if Path(x).name == Path(y).name), "") for x in files[0]}
    alone = [sorted(set(files[0]) - {x for x in pairs if pairs[x]}), sorted(set(files[1]) - set(pairs.values()))]
    pairs |= dict(zip(*alone)) if len(alone[0]) == len(alone[1]) == 1 else {}
    names: tuple[dict, dict] = {}, {}
    for x, y in pairs.items():
        one, other = _text(x, a), _text(y, b)
        if x == y and one == other:
            continue
        for tag, i, after, j, end in SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
            if tag == "equal" or after - i == end - j:
                for m, n in zip(range(i + 1, after + 1), range(j + 1, end + 1)):
                    both = _name((x, m)), _name((y, n))
                    names[0][x, m] = names[1][y, n] = " and ".join(dict.fromkeys(both))
        for n in range(1, len(other) + 1):  # what only the second has
            names[1].setdefault((y, n), _name((y, n)) + " of the second" * (_name((x, 0)) == _name((y, 0))))
    return [{line: known.get(place, _name(place)) for line, place in run.items()} for run, known in zip(runs, names)]


def _places(p: Prediction) -> dict[int, tuple[str, int]]:
    """Maps PTX lines to file and line; the file is '' if the PTX itself is the source."""
    if p.trace is None:
        return {}
    lines = range(1, p.trace.source.count("\n") + 2)
    return locations(p.trace.source, p.trace.name) or {n: ("", n) for n in lines}


def _name(place: tuple[str, int]) -> str:
    file, line = place
    return f"{Path(file).name}:{line}" if file else f"PTX line {line}"


def _text(file: str, p: Prediction) -> list[str]:
    assert p.trace is not None
    if not file:
        return p.trace.source.splitlines()
    try:
        return [line.strip() for line in Path(file).read_text().splitlines()]
    except (OSError, UnicodeDecodeError):  # the source was compiled elsewhere, or from a string
        return []


def _waits(p: Prediction, names: dict[int, str]) -> dict[str, float]:
    """Maps what a warp waits for, by role and source line, to us of its time."""
    out: dict[str, float] = {}
    for s in report.stalls(p, EVERY):
        what = str(replace(s, place=names.get(s.line, s.place))).rpartition(": ")[0]
        out[what] = out.get(what, 0.0) + s.cycles / max(s.total, 1.0) * p.body_us
    return out


def _lines(p: Prediction, names: dict[int, str]) -> dict[str, float]:
    """Maps source lines to the us that a warp spends there, waits included; the mean of all warps."""
    run, trace = p.run, p.trace
    if run is None or trace is None:
        return {}
    out: dict[str, float] = defaultdict(float)
    scale = p.body_us / max(float(np.mean(run.end - run.start)), 1.0) / len(run.warps)
    spent = run.stalls.sum(1)
    for i in np.flatnonzero(run.issued[:-1]).tolist():
        ins = run.code.instructions[i]
        cycles = spent[i] + run.issued[i] * max(ins.stall, 1)
        out[names.get(ins.line, f"PTX line {ins.line}")] += float(cycles) * scale
    return out


def verdict(one: list[Prediction], other: list[Prediction], first: float, second: float) -> str:
    """Judges whether the runs differ. The model's errors on two variants mostly agree, so half of the band decides."""
    width = max(max(high - 1, 1 - low) for low, high in (band(longest(run)) for run in (one, other)))
    ratio = second / first
    if abs(ratio - 1) < width / 2:
        return f"not told apart ({ratio - 1:+.1%}, band {width:.0%})"
    return f"the second is predicted {'slower' if ratio > 1 else 'faster'} by {abs(ratio - 1):.0%}"


def compare(one: list[Prediction], other: list[Prediction], first: float, second: float) -> str:
    """Returns the comparison as text. first and second: times of the runs in us."""
    if not one or not other:
        return "nothing to compare: a run without launches"
    lines = [f"first {first:.4g} us, second {second:.4g} us: {verdict(one, other, first, second)}"]
    names = [readable(longest(run).kernel) for run in (one, other)]
    which = names[0] if names[0] == names[1] else f"{names[0]} and {names[1]}"
    found = differences(one, other)
    if found:
        lines.append(f"  where {which} differ, the first and the second (they overlap and do not add up):")
    return "\n".join([*lines, *(f"    {d}" for d in found[: 2 * report.SHOWN])])


def as_dict(one: list[Prediction], other: list[Prediction], first: float, second: float) -> dict:
    if not one or not other:
        return {"verdict": "nothing to compare: a run without launches", "differences": []}
    rows = [
        {"kind": d.kind, "what": d.what, "first_us": round(d.first, 2), "second_us": round(d.second, 2)}
        for d in differences(one, other)
    ]
    return {"verdict": verdict(one, other, first, second), "differences": rows}
