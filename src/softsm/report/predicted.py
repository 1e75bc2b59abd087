"""Turns a replay into a recording for report/timeline.py, with the model's times in nanoseconds."""

from __future__ import annotations

from softsm.report.recording import Clock, Launch, Recorder, Track
from softsm.timing_model import machine
from softsm.timing_model.machine import LOG_COPY as COPY
from softsm.timing_model.machine import LOG_PRODUCT as PRODUCT
from softsm.timing_model.prediction import Prediction
from softsm.timing_model.validated import statement


def recorded(p: Prediction) -> Recorder:
    """Records the CTAs of one multiprocessor: waits of warps, products and copies of its engines."""
    run, trace = p.run, p.trace
    assert run is not None and trace is not None
    out = Recorder()
    out.unit = "ns"
    out.model = f"Nanoseconds of a multiprocessor of a {p.gpu.name} at {p.clock:.2f} GHz, predicted. {statement(p.gpu)}"
    ns = 1 / p.clock
    launch = Launch(
        p.kernel,
        trace.arch,
        p.grid,
        trace.block,
        trace.cluster,
        trace.shared,
        "replayed",
        trace.source,
        0,
        round(float(run.end.max()) * ns),
    )
    launch.ctas = [trace.clusters[n].first for n in run.order]
    out.launches.append(launch)
    for number, (inst, k) in enumerate(run.warps):
        w = trace.clusters[run.order[inst]].warps[k]
        track = Track(0, inst, "warp", w.index)
        out.clocks[track] = Clock(track, round(float(run.end[inst]) * ns), role=w.role)
        del number
    lanes: dict[tuple[int, str], list[int]] = {}
    for warp, pos, begin, end, kind, more in run.log:
        inst, k = run.warps[int(warp)]
        w = trace.clusters[run.order[inst]].warps[k]
        i = int(run.s_ins[int(pos)])
        ins = run.code.instructions[i] if i < len(run.code.instructions) else None
        details = {"ptx line": ins.line if ins else 0}
        a, b = round(float(begin) * ns), round(float(end) * ns)
        if int(kind) == PRODUCT:
            out.add(
                Track(0, inst, "tensor core", 0), ins.opcode if ins else "product", a, max(b, a + 1), "mma", **details
            )
        elif int(kind) == COPY:
            ends = lanes.setdefault((inst, "TMA"), [])
            row = next((n for n, e in enumerate(ends) if e <= a), len(ends))
            ends[row : row + 1] = [b]
            out.add(Track(0, inst, "TMA", row), "TMA load", a, max(b, a + 1), "copy", bytes=int(more), **details)
        else:
            name = "wait"
            event = run.event(int(warp), int(pos))
            if event is not None:
                names = trace.clusters[run.order[inst]].names
                if int(event[0]) == 2 and int(event[1]) < len(names):
                    name = f"wait {names[int(event[1])]}"
            out.add(
                Track(0, inst, "warp", w.index),
                f"{name} ({machine.REASONS[int(kind)]})",
                a,
                max(b, a + 1),
                "wait",
                **details,
            )
    return out
