"""Times of cases by softsm, without a GPU."""

from __future__ import annotations

import json
import pickle
import time
from pathlib import Path

import torch

import softsm
from softsm.timing_model.parameters import GPUS
from softsm.timing_model.timer import Timer
from softsm.timing_model.validated import band
from softsm_time.case import Case


def predict(path: Path, cases: list[Case], gpu: str, traces: Path | None, shim: bool) -> None:
    """Results are added to the file, so that a run may be cut short and taken up again. Traces that are
    kept make the next run with another model a matter of a second each. shim: the programs ask for CUDA tensors."""
    found: dict[str, dict] = json.loads(path.read_text())["cases"] if path.exists() else {}
    for case in cases:
        if case.name in found:
            continue
        begin = time.time()
        kind = getattr(case, "gpu", gpu)
        kept = traces / f"{kind} {case.name.replace('/', ' ')}.pickle" if traces else None
        try:
            if kept is not None and kept.exists():
                timer = Timer(kind)
                for trace in pickle.loads(kept.read_bytes()):
                    timer.traced(trace)
            else:
                torch.manual_seed(0)  # paths that depend on values are the same in every run
                use = softsm.use(GPUS[kind].arch, sms=int(GPUS[kind]["sms"]), cuda_shim=shim)
                with use, softsm.timing(kind, values=case.values) as timer:
                    case.make("cpu")()
                if kept is not None:
                    kept.parent.mkdir(parents=True, exist_ok=True)
                    kept.write_bytes(pickle.dumps([p.trace for p in timer.predictions]))
            found[case.name] = row(timer)
        except Exception as why:  # one case must not lose the others
            found[case.name] = {"error": f"{type(why).__name__}: {why}"[:300]}
        found[case.name]["seconds"] = round(time.time() - begin, 1)
        path.write_text(json.dumps({"cases": found}, indent=0) + "\n")
        made = found[case.name]
        print(f"{case.name:60s} {made.get('us', 0):10.1f} us {made.get('error', '')}", flush=True)


def row(timer: Timer) -> dict:
    """The launches of a case together; shares are of the longest."""
    heavy = max(timer.predictions, key=lambda p: p.body_us)
    low, high = band(heavy)
    return {
        "us": round(timer.us, 2),
        "band": [round(timer.us * low, 2), round(timer.us * high, 2)],
        "kernels": len(timer.predictions),
        "after_first": round(timer.us_from(1), 2),  # of a forward and backward pass the latter
        "longest": heavy.kernel,
        "bound": heavy.bound,
        "cycles": round(sum(p.cycles for p in timer.predictions)),
        "mhz": round(heavy.clock * 1e3),
        "busy": {k: round(float(v), 2) for k, v in heavy.busy.items() if v >= 0.005},
    }
