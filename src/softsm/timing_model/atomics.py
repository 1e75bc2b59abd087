"""Atomic operations on global memory: how many slices of L2 execute them, and how long they delay reads."""

from __future__ import annotations

import math
import re

import numpy as np

from softsm.timing_model.follow import addressed_by
from softsm.timing_model.parameters import Gpu
from softsm.timing_model.sources import Source
from softsm.timing_model.trace import LaunchTrace

# Lines that atomics change -> slices of L2 that execute them; 512 bytes share a slice (4 to 64 lines: benchmarks/
# timing.py, histograms of seeds 101 to 404 and column sums of seed 606; the others: benchmarks/microbench, everyday).
SLICES = (1, 4, 8, 16, 32, 64, 256, 4096), (1.0, 1.5, 2.0, 3.5, 5.8, 11.0, 27.5, 59.0)
RELAXED = 0.3  # delay of reads behind atomics without fences, relative to those with fences
_FENCED = re.compile(r"\b(?:atom|red)\.[\w.:]*(?:acq_rel|acquire|release)")


def slices_of(s: Source, lines: float = math.inf) -> float:
    """Returns how many slices of L2 hold lines of s: few lines lie in few slices."""
    lines = max(1.0, min(s.size / 128, lines))
    return float(np.exp(np.interp(np.log(lines), np.log(SLICES[0]), np.log(SLICES[1]))))


def changed_together(trace: LaunchTrace, tensor: int, running: int, by: dict[int, frozenset[str]]) -> float:
    """Returns how many lines of a tensor the concurrent CTAs change. These are neighbours in the grid; CTAs that differ
    only in an index on which the address does not depend change the same lines."""
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
    """The atomic operations of a launch. running: CTAs that run concurrently."""

    def __init__(self, trace: LaunchTrace, sources: list[Source], gpu: Gpu, running: int):
        there = any(s.atomic for s in sources)
        self.waits = 1.0 if _FENCED.search(trace.source) else RELAXED
        by = addressed_by(trace.source) if there else {}
        lines = [changed_together(trace, n, running, by) if s.atomic else 0.0 for n, s in enumerate(sources)]
        self.slices = [slices_of(s, n) for s, n in zip(sources, lines)]
        # Time of L2 for the atomics: each slice executes one sector after another.
        self.ns = [s.atomic / (32 * gpu["atomic.slice"] * n) for s, n in zip(sources, self.slices)]

    def held_up_us(self) -> float:
        """Returns how long reads wait behind atomics on a few slices of L2, the paths to which are full."""
        return 1e-3 * self.waits * sum(ns * (1 - n / SLICES[1][-1]) for ns, n in zip(self.ns, self.slices))
