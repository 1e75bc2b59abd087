"""How wrong the model has been: bands from the validation on an H200 (benchmarks/timing.py), never from a wish."""

from __future__ import annotations

from softsm.timing_model.parameters import Gpu

# From docs/timing.md, made by `python benchmarks/timing.py --table`: mean absolute error, worst.
MEAN, WORST, CASES, DATE = 0.072, 0.23, 114, "2026-11-16"
NINE_OF_TEN = 0.15  # nine of ten cases were off by at most this


def band(p) -> tuple[float, float]:
    """Factors around a prediction."""
    wide = NINE_OF_TEN
    if p.gpu.arch.startswith("sm_10"):
        wide = max(wide, 0.30)  # rates of others' microbenchmarks, a clock that was not measured
    return 1 / (1 + wide), 1 + wide


def statement(gpu: Gpu) -> str:
    checked = f"model checked on an H200: mean error {MEAN:.0%}, worst {WORST:.0%}, {CASES} cases, {DATE}"
    if not CASES:
        checked = "model not yet checked on a GPU"
    if gpu.arch.startswith("sm_10"):
        return f"predicted, never run on a B200; rates from published microbenchmarks; {checked}"
    return checked
