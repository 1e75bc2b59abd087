"""Atomic operations on global memory: how many slices of L2 do them, and for how long they hold up reads."""

from __future__ import annotations

import math
import re

import numpy as np

from softsm.timing_model.follow import addressed_by
from softsm.timing_model.parameters import Gpu
from softsm.timing_model.sources import Source
from softsm.timing_model.trace import LaunchTrace

# Lines that atomics go to -> slices of L2 that do them: 512 bytes lie in one (4 to 64 lines: benchmarks/timing.py,
# histograms of seeds 101 to 404 and sums of columns of seed 606; the others: benchmarks/microbench, everyday).
SLICES = (1, 4, 8, 16, 32, 64, 256, 4096), (1.0, 1.5, 2.0, 3.5, 5.8, 11.0, 27.5, 59.0)
RELAXED = 0.3  # of the time for which reads wait behind atomics with fences, those without
_FENCED = re.compile(r"\b(?:atom|red)\.[\w.:]*(?:acq_rel|acquire|release)")


def slices_of(s: Source, lines: float = math.inf) -> float:
    """How many slices of L2 have lines of s: few lines lie in few slices."""
    lines = max(1.0, min(s.size / 128, lines))
    return float(np.exp(np.interp(np.log(lines), np.log(SLICES[0]), np.log(SLICES[1]))))


def changed_together(trace: LaunchTrace, tensor: int, running: int, by: dict[int, frozenset[str]]) -> float:
    """Lines of a tensor that the CTAs which run together change. They are neighbours in the grid; those whose numbers
    the address does not depend on change the same ones."""
    lines = (line for line, a in trace.access.items() if a.space == "atomic" and tensor in a.tensors)
    on = frozenset[str]().union(*(by.get(line, {"data"}) for line in lines))
    if "data" in on:
        return math.inf
    x, y, z = trace.grid
    running = min(running, x * y * z)
    sides = {"x": min(x, running), "y": min(y, running / x + 1), "z": min(z, running / x / y + 1)}
    ctas = math.prod(trace.cluster)
    each = max(c.traffic.get((tensor, "atomic"), 0) for c in trace.clusters) / 128 / ctas
    return each * math.prod(sides[name[-1]] for name in on)


class Atomics:
    """Those of a launch; running: CTAs at a time."""

    def __init__(self, trace: LaunchTrace, sources: list[Source], gpu: Gpu, running: int):
        there = any(s.atomic for s in sources)
        self.waits = 1.0 if _FENCED.search(trace.source) else RELAXED
        by = addressed_by(trace.source) if there else {}
        lines = [changed_together(trace, n, running, by) if s.atomic else 0.0 for n, s in enumerate(sources)]
        self.slices = [slices_of(s, n) for s, n in zip(sources, lines)]
        # What L2 needs for them: each slice does one sector after another.
        self.ns = [s.atomic / (32 * gpu["atomic.slice"] * n) for s, n in zip(sources, self.slices)]

    def held_up_us(self) -> float:
        """How long reads wait behind them at few slices of L2: the ways to them are full."""
        return 1e-3 * self.waits * sum(ns * (1 - n / SLICES[1][-1]) for ns, n in zip(self.ns, self.slices))
