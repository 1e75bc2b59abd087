"""Extrapolates from a few clusters to the whole grid: the duration of each, and the end of the last."""

from __future__ import annotations

import heapq

import numpy as np

from softsm.timing_model.trace import LaunchTrace

MANY = 2000  # waves
ROUNDS = 50  # waves after which the multiprocessors have had nearly equal work
LONGEST = 0.98  # clusters with at least this share of the longest one's instructions count as equally long
QUEUE = 3, 6  # consecutive CTAs per slot in the replay: minimum, maximum
GOLDEN = 0.6180339887498949  # the fractional parts of its multiples are evenly spread


def over_grid(trace: LaunchTrace, known: list[tuple[int, float]]) -> np.ndarray:
    """Interpolates a value for every cluster of the grid from the sampled ones, by its instruction count where that is
    known, else by its first coordinate if the value depends on it."""
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
        # Values grow to a plateau, as with a window of keys, and reach it somewhere before the middle.
        at[1] = (at[0] + at[1]) // 2
    return np.interp(every % first, at, means)


def durations(start: np.ndarray, end: np.ndarray, kinds: np.ndarray, resident: int) -> tuple[dict[int, float], float]:
    """Returns how long each kind of cluster runs on a full multiprocessor, and how much longer the first ones run,
    which start together with cold caches. A cluster that ends after the last has started had fewer beside it; it
    counts only if all of its kind did."""
    took, full, first = end - start, end <= start.max(), np.arange(len(kinds)) < resident
    known, more = {}, []
    for n in sorted(set(kinds.tolist())):
        mine = kinds == n
        warm, cold = took[mine & full & ~first], took[mine & full & first]
        if len(warm) and len(cold):
            more.append(float(cold.mean() - warm.mean()))
        known[n] = float(next(x for x in (warm, cold, took[mine & ~first], took[mine]) if len(x)).mean())
    return known, max(0.0, float(np.mean(more))) if more else 0.0


def makespan(durations: np.ndarray, slots: int, more: float) -> float:
    """Returns when the last cluster ends. Each starts in the first free slot; a slot's first one runs `more` longer."""
    if len(durations) <= slots or durations.min() == durations.max():
        return float(durations[:slots].max() + more + durations[0] * (-(-len(durations) // slots) - 1))
    if len(durations) > MANY * slots:  # one after the other would take seconds, and the last ones decide little
        return float(durations.sum() / slots + more + durations.max() / 2)
    ends = (durations[:slots] + more).tolist()
    heapq.heapify(ends)
    for d in durations[slots:].tolist():
        heapq.heapreplace(ends, ends[0] + d)
    return max(ends)


def most_work(work: np.ndarray, sms: int, resident: int, alone: float) -> float:
    """Returns when the last multiprocessor has done the work of its clusters, if each does 1 in a unit of time, at most
    `resident` clusters share it evenly, one of them uses at most `alone` of it, and a cluster that ends lets the next
    one in. Where long clusters lie together some multiprocessors get more of them than others."""
    if len(work) > ROUNDS * sms * resident:
        return float(work.sum() / sms)
    first = min(len(work), sms * resident)
    left = [np.sort(work[n:first:sms]).tolist() for n in range(sms)]  # what each has done when its clusters end
    done, now = [0.0] * sms, [0.0] * sms
    pending: list[tuple[float, int]] = []

    def wait(n: int) -> None:
        if left[n]:
            heapq.heappush(pending, (now[n] + (left[n][0] - done[n]) / min(alone, 1 / len(left[n])), n))

    for n in range(sms):
        wait(n)
    end = 0.0
    for extra in [*work[first:].tolist(), *[0.0] * first]:
        end, n = heapq.heappop(pending)
        now[n], done[n] = end, heapq.heappop(left[n])
        if extra:
            heapq.heappush(left[n], done[n] + extra)
        wait(n)
    return end


def unevenness(work: np.ndarray, sms: int, resident: int, alone: float, schedulers: int) -> float:
    """Returns the work of the multiprocessor that ends last, relative to the mean of all, or that of a scheduler if
    clusters are so small that each stays on one of `schedulers`, or on a pair of them."""
    most = (n * most_work(work, sms * n, max(1, resident // n), min(1.0, alone * n)) for n in sorted({1, schedulers}))
    return max(1.0, float(max(most) * sms / work.sum()))


def beside_longest(trace: LaunchTrace, each: int, sms: int, heavy: int) -> list[int]:
    """Returns the traces of the clusters, at most `each`, on the multiprocessor that ends last if the whole grid runs
    at once: of those with one of the longest clusters, the one with most work. heavy: the trace of such a cluster."""
    if trace.lengths is None:
        return [heavy] * each
    on = np.bincount(np.arange(trace.total) % sms, trace.lengths)  # instructions of each multiprocessor
    ends = (trace.lengths >= LONGEST * trace.lengths.max()).nonzero()[0]
    longest = int(ends[on[ends % sms].argmax()])
    known = trace.lengths[[c.number for c in trace.clusters]]
    others = (n for n in range(longest % sms, trace.total, sms) if n != longest)
    return [heavy, *(int(np.abs(known - trace.lengths[n]).argmin()) for n in others)]


def queues_of(kinds: list[int], shares: list[float] | None, resident: int, waves: int) -> list[list[int]]:
    """Returns the kinds of clusters (traces) that start on each slot of a multiprocessor, and of those that follow
    wherever one becomes free, in order. Each kind is once neither in the first row, which starts with cold code, nor in
    the last, which ends alone, if there are so many. Where the shares of the traces are known, each kind is as frequent
    as in the grid: a long one mostly runs next to others."""
    each = sorted(set(kinds))
    many = len(each)
    length, most = QUEUE
    while length < most and {(s + k * resident) % many for s in range(resident) for k in range(1, length - 1)} < set(
        range(many)
    ):
        length += 1
    length = min(length, waves + 1)
    inner = [(s, k) for k in range(1, length - 1) for s in range(resident)]
    if shares is None or len(inner) < many:  # too few places for frequencies
        return [[each[(s + k * resident) % many] for k in range(length)] for s in range(resident)]
    up_to = np.cumsum([sum(x for x, kind in zip(shares, kinds) if kind == n) for n in each])
    chosen = np.minimum(np.searchsorted(up_to, np.arange(resident * length) * GOLDEN % 1.0), many - 1)
    queues = [[each[n] for n in row] for row in chosen.reshape(length, resident).T.tolist()]
    for n, (s, k) in zip(each, inner):
        if all(n not in q[1:-1] for q in queues):
            queues[s][k] = n
    return queues
