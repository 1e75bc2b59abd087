"""Extends a few clusters to all of the grid: how long each takes, and when the last one ends."""

from __future__ import annotations

import heapq

import numpy as np

from softsm.timing_model.trace import LaunchTrace


def over_grid(trace: LaunchTrace, known: list[tuple[int, float]]) -> np.ndarray:
    """A value for every cluster of the grid, from the sampled ones: by its number of instructions where that is known,
    else by its first coordinate if that tells."""
    first = -(-trace.grid[0] // trace.cluster[0])
    every, numbers = np.arange(trace.total), np.array([n for n, _ in known])
    values = np.array([v for _, v in known])
    if len(known) == 1 or values.max() <= values.min() * 1.02:
        return np.full(trace.total, values.mean())
    if trace.lengths is not None:
        steps = trace.lengths[numbers]
        order = steps.argsort()
        return np.interp(trace.lengths, steps[order], values[order])
    if len(set((numbers % first).tolist())) == 1:
        return np.interp(every, numbers, values)
    at = sorted(set((numbers % first).tolist()))
    means = [float(values[numbers % first == x].mean()) for x in at]
    if len(at) == 3 and abs(means[1] - means[2]) <= 0.02 * means[2] < means[1] - means[0]:
        # They grow up to some length, as with a window of keys: that is reached somewhere before the middle.
        at[1] = (at[0] + at[1]) // 2
    return np.interp(every % first, at, means)


def makespan(durations: np.ndarray, slots: int, more: float) -> float:
    """When the last ends, each in the place of the first that ends; the first of each place takes `more`."""
    if len(durations) <= slots or durations.min() == durations.max():
        return float(durations[:slots].max() + more + durations[0] * (-(-len(durations) // slots) - 1))
    ends = (durations[:slots] + more).tolist()
    heapq.heapify(ends)
    for d in durations[slots:].tolist():
        heapq.heapreplace(ends, ends[0] + d)
    return max(ends)


def beside_longest(trace: LaunchTrace, each: int, sms: int, heavy: int) -> list[int]:
    """Traces of the clusters on the multiprocessor that decides, `each` at most, if all of the grid run at once. heavy:
    the trace of the longest."""
    if trace.lengths is None:
        return [heavy] * each
    longest = int(trace.lengths.argmax())
    known = trace.lengths[[c.number for c in trace.clusters]]
    others = (n for n in range(longest % sms, trace.total, sms) if n != longest)
    return [heavy, *(int(np.abs(known - trace.lengths[n]).argmin()) for n in others)]
