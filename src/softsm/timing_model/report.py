"""A prediction in words: time with its band, what the engines did, who waits for what, and where in the source."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from softsm.ptx.cplusplus import readable
from softsm.timing_model import machine
from softsm.timing_model.follow import places_of
from softsm.timing_model.machine import WAIT
from softsm.timing_model.path import critical_path
from softsm.timing_model.prediction import Prediction
from softsm.timing_model.validated import band, depends_on_data, doubts, statement

SHOWN = 6
NEEDS = {
    "registers": "an operand",
    "pipe": "its pipe",
    "issue": "an issue slot",
    "shared memory": "shared memory",
    "code": "its code (first run, not in a cache)",
}


@dataclass
class Stall:
    cycles: float  # cycles of a warp that runs the line
    total: float  # cycles of the replay
    reason: str
    role: str
    line: int
    place: str
    what: str  # barrier, or the instruction

    def __str__(self) -> str:
        who, verb = (self.role, "waits") if self.role else ("warps", "wait")
        targets = {
            "barrier": f"for {self.what}",
            "products": "for products",
            "copies": "for copies",
            "bar.sync": "at bar.sync",
        }
        if self.reason in targets:
            words = f"{who} {verb} {targets[self.reason]}"
        else:
            words = f"{who}: {self.what} waits for {NEEDS.get(self.reason, self.reason)}"
        return f"{words} at {self.place}: {self.cycles:.0f} of {self.total:.0f} cycles"


def stalls(p: Prediction, shown: int = SHOWN) -> list[Stall]:
    """Returns the longest waits, by role and source line."""
    run, trace = p.run, p.trace
    if run is None or trace is None:
        return []
    roles_of: dict[int, set[str]] = {}
    warps_of: dict[int, set[tuple[int, int]]] = {}  # block of code -> (cluster, warp) that run it
    times = {n: run.order.count(n) for n in set(run.order)}
    for n in times:
        for k, w in enumerate(trace.clusters[n].warps):
            for b in set(w.blocks):
                roles_of.setdefault(b, set()).add(w.role)
                warps_of.setdefault(b, set()).add((n, k))
    barriers, places = _barriers(p), places_of(trace.source, trace.name)
    found: dict[tuple, list] = {}
    for i in np.argsort(-run.stalls.sum(1))[:200].tolist():
        if i >= len(run.code.instructions):
            continue
        ins = run.code.instructions[i]
        block = trace.blocks.of(ins.line)
        roles = roles_of.get(block, {""})
        role = next(iter(roles)) if len(roles) == 1 else ""
        for reason, cycles in enumerate(run.stalls[i]):
            if cycles > 0:
                name = machine.REASONS[reason]
                what = barriers.get(i, ins.opcode) if name == "barrier" else ins.opcode.split(".")[0]
                place = places.get(ins.line, f"PTX line {ins.line}")
                key = name, role, place, what if name == "barrier" else ""
                entry = found.setdefault(key, [0.0, ins.line, what, set()])
                entry[0] += cycles
                entry[3] |= warps_of.get(block, set())  # two partitions that run one function have two copies of it
    total = float(np.mean(run.end - run.start))
    out = []
    for key, (cycles, line, what, warps) in found.items():
        mean = cycles / max(1, sum(times[n] for n, _ in warps))
        out.append(Stall(mean, total, key[0], key[1], line, key[2], what))
    # Leave out warps that wait from begin to end: those of other roles, idle at the barrier where the roles split.
    return sorted((s for s in out if s.cycles < 0.97 * total), key=lambda s: -s.cycles)[:shown]


def _barriers(p: Prediction) -> dict[int, str]:
    """Maps machine instructions to the mbarriers they wait for."""
    run, trace = p.run, p.trace
    assert run is not None and trace is not None
    names = trace.clusters[run.order[0]].names
    out: dict[int, set[str]] = {}
    streams = run.streams[run.order[0]]
    for path, first in zip(streams.paths, streams.firsts):
        places = np.flatnonzero(path.events >= 0)
        events = streams.table[path.events[places] + first, :2].astype(int).tolist()
        for i, (kind, barrier) in zip(path.instructions[places].tolist(), events):
            if kind == WAIT and barrier < len(names):
                out.setdefault(i, set()).add(names[barrier])
    return {i: "/".join(sorted(found)[:3]) for i, found in out.items()}


def doubt(p: Prediction) -> str:
    """Tells what makes the time a guess: the CTAs' paths depend on data, and the sampled ones differ."""
    trace, found = p.trace, depends_on_data(p)
    if found is None or trace is None:
        return ""
    value, branch = (places_of(trace.source, trace.name).get(n, f"PTX line {n}") for n in found)
    what = "compares" if "setp." in trace.source.splitlines()[found[0] - 1] else "loads"
    why = f"how long a CTA runs depends on data (the branch at {branch}, on what {value} {what}), and the"
    if trace.lengths is not None:
        return f"{why} longest executes {trace.lengths.max() / trace.lengths.mean():.1f} times as much as the average"
    return (
        f"a guess: {why} {len(trace.clusters)} of {trace.total} that were looked at differ; the others are taken to "
        "lie between them"
    )


def as_dict(p: Prediction) -> dict:
    low, high = band(p)
    return {
        "kernel": p.kernel, "gpu": p.gpu.name, "grid": list(p.grid), "threads": p.threads, "ctas": p.ctas,
        "resident": p.resident, "waves": round(p.waves, 2), "cycles": round(p.cycles), "clock_ghz": round(p.clock, 3),
        "us": round(p.us, 2), "us_low": round(p.us * low, 2), "us_high": round(p.us * high, 2),
        "less_certain": [d.words for d in doubts(p)],
        "without_launch_us": round(p.body_us, 2), "bound": p.bound,
        "busy": {k: round(float(v), 3) for k, v in p.busy.items()},
        "roofline_us": {k: round(float(v), 2) for k, v in p.roofline.items()},
        "registers": p.registers, "spilled_bytes": p.spills, "stalls": [str(s) for s in stalls(p)],
        "critical_path": [dataclasses.asdict(x) for x in critical_path(p)[1][:20]], "doubt": doubt(p),
    }  # fmt: skip


def text(p: Prediction) -> str:
    low, high = band(p)
    digits = 2 if p.gpu.arch.startswith("sm_10") else 4
    limit = p.limit
    lines = [
        f"{readable(p.kernel)} on {p.gpu.name}: {_round(p.us, digits)} us predicted "
        f"({_round(p.us * low, digits)} to {_round(p.us * high, digits)}), "
        f"{_round(p.cycles / 1e3, digits)} k cycles at {p.clock:.2f} GHz",
        f"  {p.ctas} CTA{'s' * (p.ctas != 1)} of {p.threads} threads, {p.resident} on a multiprocessor, "
        f"{f'{p.waves:.2f} waves' if p.waves > 1 else 'one wave'}; {p.registers} registers, {p.spills} bytes spilled",
        "  busy: " + (", ".join(f"{k} {v:.0%}" for k, v in p.busy.items() if v >= 0.005) or "nothing over 0.5%"),
        f"  {_bound(p)}; {_round(p.body_us, digits)} us without the launch, "
        f"{p.body_us / max(p.roofline[limit], 1e-9):.3g} times what {limit} needs at least",
    ]
    if words := doubt(p):
        lines.append(f"  {words}")
    lines += [f"  less certain: {d.words} (within {d.width:.0%})" for d in doubts(p)]
    waits = stalls(p)
    if waits:
        lines.append("  longest waits of a warp:")
    lines += [f"    {s}" for s in waits]
    cycles, links = critical_path(p)
    if links:
        lines.append(f"  critical path of a CTA, {cycles:.0f} cycles:")
        lines += [f"    {x.cycles / cycles:4.0%}  {x}" for x in links[:SHOWN]]
    return "\n".join(lines)


def _bound(p: Prediction) -> str:
    if not p.bound.startswith("chain"):
        return f"bound by {p.bound}"
    return f"bound by a chain of waits (no engine is busy for 60% of the time; {p.bound[7:-1]})"


def _round(x: float, digits: int) -> str:
    return f"{float(f'{x:.{digits}g}'):g}"


def notice(predictions: list[Prediction]) -> str:
    return statement(predictions[0].gpu) if predictions else ""
