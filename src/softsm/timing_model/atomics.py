"""Atomic operations on global memory: how many slices of L2 execute them, and how long they delay reads."""

from __future__ import annotations

import math
import re

import numpy as np

from softsm.timing_model.follow import addressed_by
from softsm.timing_model.parameters import Gpu
from softsm.timing_model.sources import Source
from softsm.timing_model.trace import LaunchTrace

# Lines that atomics change -> slices of L2 that execute them (benchmarks/microbench, groups everyday and sums).
SLICES = (
    (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096),
    (1.0, 1.2, 2.1, 2.1, 3.5, 8.0, 14.0, 27.0, 28.4, 50.0, 52.0, 60.0),
)
# CTAs that change the same lines in the same order -> share of these slices, if there are more than FEW_LINES (sums).
IN_STEP, FEW_LINES = ((1, 2, 16, 64), (1.0, 0.85, 0.82, 0.65)), 16
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
    return lines_of(trace, tensor) * math.prod(sides[name[-1]] for name in on)


def lines_of(trace: LaunchTrace, tensor: int) -> float:
    """Returns how many lines of a tensor a CTA changes."""
    return max(c.traffic.get((tensor, "atomic"), 0) for c in trace.clusters) / 128 / math.prod(trace.cluster)


def in_step(sharers: float, lines: float) -> float:
    """Returns which share of the slices executes atomics if so many CTAs change each line."""
    if lines <= FEW_LINES or math.isinf(lines):
        return 1.0
    return float(np.interp(np.log(max(1.0, sharers)), np.log(IN_STEP[0]), IN_STEP[1]))


class Atomics:
    """The atomic operations of a launch. running: CTAs that run concurrently."""

    def __init__(self, trace: LaunchTrace, sources: list[Source], gpu: Gpu, running: int):
        there = any(s.atomic for s in sources)
        self.waits = 1.0 if _FENCED.search(trace.source) else RELAXED
        by = addressed_by(trace.source) if there else {}
        lines = [changed_together(trace, n, running, by) if s.atomic else 0.0 for n, s in enumerate(sources)]
        self.slices = [
            slices_of(s, n) * in_step(running * lines_of(trace, k) / n if n else 0.0, n)
            for k, (s, n) in enumerate(zip(sources, lines))
        ]
        # Time of L2 for the atomics: each slice executes one sector after another.
        self.ns = [s.atomic / (32 * gpu["atomic.slice"] * n) for s, n in zip(sources, self.slices)]

    def held_up_us(self) -> float:
        """Returns how long reads wait behind atomics on a few slices of L2, the paths to which are full."""
        return 1e-3 * self.waits * sum(ns * (1 - n / SLICES[1][-1]) for ns, n in zip(self.ns, self.slices))
