"""Extends a few clusters to all of the grid: how long each takes, and when the last one ends."""

from __future__ import annotations

import heapq

import numpy as np

from softsm.timing_model.trace import LaunchTrace

QUEUE = 3, 6  # CTAs in a row that the replay looks at: at least, at most
GOLDEN = 0.6180339887498949  # its multiples lie evenly between whole numbers


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


def queues_of(kinds: list[int], shares: list[float] | None, resident: int, waves: int) -> list[list[int]]:
    """Kinds of clusters (traces) in each slot of a multiprocessor, in turn. Each is once neither the first of its
    slot, which begins with cold code, nor the last, which ends alone; as far as a slot runs that many. Where the shares
    of the traces are known, each kind is there as often as in the grid: beside a long one mostly others run."""
    each = sorted(set(kinds))
    many = len(each)
    length, most = QUEUE
    while length < most and {(s + k * resident) % many for s in range(resident) for k in range(1, length - 1)} < set(
        range(many)
    ):
        length += 1
    length = min(length, waves + 1)
    if shares is None:
        return [[each[(s + k * resident) % many] for k in range(length)] for s in range(resident)]
    up_to = np.cumsum([sum(x for x, kind in zip(shares, kinds) if kind == n) for n in each])
    chosen = np.minimum(np.searchsorted(up_to, np.arange(resident * length) * GOLDEN % 1.0), many - 1)
    queues = [[each[n] for n in row] for row in chosen.reshape(length, resident).T.tolist()]
    inner = [(s, k) for k in range(1, length - 1) for s in range(resident)]
    for n, (s, k) in zip(each, inner):
        if all(n not in q[1:-1] for q in queues):
            queues[s][k] = n
    return queues
