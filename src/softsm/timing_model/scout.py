"""Handles grids whose CTAs' durations depend on data (rows of different lengths, lists, early exits), or on their place
in a way that CTAs along one axis do not show: many CTAs run untraced first, only to count their instructions.

Then an average CTA, the longest and the shortest are traced; the durations of all others follow from their instruction
counts (grid.py). The cost is bounded by a number of instructions, not of CTAs.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from softsm.engine import program as pg
from softsm.engine.launch import Kernel
from softsm.engine.scheduler import Machine
from softsm.engine.warps import Cta
from softsm.timing_model.follow import branch_on_place, branch_on_value, mask_on_load
from softsm.timing_model.path_slice import Path, sliced
from softsm.timing_model.sass import alone

COST = 16_000_000  # instructions in all: two seconds
MACRO, CTA = 400, 1500  # cost, in instructions, of one that Python executes, and of starting a CTA
SPLIT = 70  # per turn of a warp whose threads took both sides of a branch: Python chooses and joins them
NOTHING = 8  # records that do nothing take the time of one that does (path_slice.py)
FEW = 8  # fewer clusters of a larger grid do not represent the others
MOST = 1 << 22  # clusters whose lengths are kept
MASKED, MASKED_COST = 32, COST // 8  # clusters, and instructions, that show what masks from data let through
ALIKE, MANY_ALIKE = 1.02, 512  # after this many equal clusters the model assumes that the others are equal, too


@functools.lru_cache(64)
def on_data(source: str, values: bool) -> bool:
    return branch_on_value(source, range(1, source.count("\n") + 2), values) is not None


def worthwhile(kernel: Kernel, shape: list[int], together: int, values: bool) -> bool:
    """shape: clusters along each axis of the grid. together: how many run at the same time at most; if all do, the
    longest decides, and those at the ends are looked at anyway. values: whether products are computed."""
    source, total = alone(kernel.module.source, kernel.name), math.prod(shape)
    if total > MOST:
        return False
    return on_data(source, values) or total > together and branch_on_place(source, axis_of(shape))


def axis_of(shape: list[int]) -> int:
    """Returns the axis along which the CTAs that are traced lie."""
    return 0 if shape[0] > 1 else shape.index(max(shape))


def first_samples(shape: list[int], total: int, sms: int, most: int) -> list[int]:
    """Returns the clusters to run: both ends of the grid's first dimension and one between them, not in the middle,
    where another image may begin. If all start together, the longest counts; with masks it is at an end."""
    axis = axis_of(shape)
    ends = 0, shape[axis] - 1
    points = set()
    for value in (ends if total <= sms else (0, 7 * shape[axis] // 12, ends[1]))[:most]:
        at = [n // 2 for n in shape]
        at[axis] = value
        points.add(at[0] + shape[0] * (at[1] + shape[1] * at[2]))
    return sorted(points)


def with_masked(samples: list[int], total: int, source: str) -> list[int]:
    """Returns these clusters and others all over the grid if data decide which lanes access memory, as in rows that are
    padded: three rows do not tell how much all read."""
    if total <= len(samples) or not mask_on_load(source):
        return samples
    return list(dict.fromkeys([*samples, *spread(total)[:MASKED]]))


def spread(total: int) -> list[int]:
    """Returns all numbers below total, in an order whose every prefix is spread evenly over them."""
    step = max(1, round(total * (math.sqrt(5) - 1) / 2))
    while math.gcd(step, total) > 1:
        step += 1
    return [n * step % total for n in range(total)]


class Scouts:
    """The clusters that run untraced first, one after the other."""

    def __init__(self, machine: Machine, place):
        self.machine, self.place, self.order = machine, place, spread(machine.left)
        self.live = 0
        self.path: Path | None = None  # while only what decides the path runs
        self._begin()
        plain = machine.run_code

        def run(*given):
            result, divided = plain(*given), given[-1]
            self.steps[self.order[self.begun - 1]] += result[4]
            self.cost += (result[4] if self.path is None else result[4] // NOTHING) + SPLIT * divided
            return result

        machine.run_code = run

    def _begin(self) -> None:
        self.cost = self.begun = 0
        self.steps: dict[int, int] = {}
        self.machine.clusters, self.machine.left = map(self.place, self.order), 1

    def began(self, cta: Cta) -> None:
        if cta.rank == 0:
            self.steps[self.order[self.begun]] = 0
            self.begun += 1
        self.cost += CTA
        self.live += 1
        if self.path is not None:
            for w in cta.warps:
                w.S[pg.S_CODE] = self.path.code.ctypes.data
            for w in cta.warps[1:] if self.path.alike else ():
                w.fragments[0].pc = self.path.end

    def executed(self) -> None:
        self.cost += MACRO

    def ended(self) -> bool:
        """Returns whether the CTA that ended was the last of all."""
        self.live -= 1
        if self.begun == 1 and not self.live and self.path is None and self.cost * len(self.order) > COST:
            # Too many to run whole. A grid that runs whole also leaves what later launches read.
            self.path = sliced(self.machine.kernel)
            if self.path is not None:
                self._begin()
                return False
        affordable = COST * self.begun // max(1, self.cost)  # total clusters within COST, if the others are like these
        more = self.cost < COST and self.begun < len(self.order) and affordable >= min(FEW, len(self.order))
        if self.begun == MANY_ALIKE and not self.live:
            more &= max(self.steps.values()) > ALIKE * min(self.steps.values())
        self.machine.left = int(not self.live and more)
        return not self.live and not more

    def ran_whole(self) -> bool:
        """Returns whether all clusters wrote what they write."""
        return self.path is None and self.begun == len(self.order)

    def lengths(self) -> np.ndarray | None:
        """Returns the instructions of every cluster of the grid; a cluster that did not run gets those of the nearest
        one. None: too few ran, or all are equal."""
        numbers = np.array(sorted(self.steps))
        steps = np.array([self.steps[n] for n in numbers.tolist()], float)
        if len(steps) < min(FEW, len(self.order)) or steps.max() <= ALIKE * steps.min():
            return None
        nearest = np.searchsorted((numbers[1:] + numbers[:-1]) / 2, np.arange(len(self.order)))
        return steps[nearest]

    def along_axis(self, shape: list[int], samples: list[int]) -> bool:
        """Returns whether the lengths depend on the place along the axis of the traced CTAs alone, and lie between
        those of the samples, as under a causal mask; in a window of keys they stop growing."""
        axis, before = axis_of(shape), math.prod(shape[: axis_of(shape)])
        at: dict[int, set[int]] = {}
        for n, steps in self.steps.items():
            at.setdefault(n // before % shape[axis], set()).add(steps)
        places = sorted(at)
        lengths = np.array([max(at[x]) for x in places], float)
        known = sorted({n // before % shape[axis] for n in samples})
        between = np.interp(places, known, np.interp(known, places, lengths))
        return all(len(found) == 1 for found in at.values()) and bool(
            abs(between - lengths).max() < 0.1 * lengths.max()
        )

    def chosen(self, lengths: np.ndarray, most: int) -> list[int]:
        """Returns the numbers of an average cluster, the longest and the shortest."""
        numbers = sorted(self.steps)
        mean = lengths.mean()
        average = min(numbers, key=lambda n: abs(self.steps[n] - mean))
        ends = max(numbers, key=self.steps.__getitem__), min(numbers, key=self.steps.__getitem__)
        return sorted({n for n in (average, *ends)[:most]})
