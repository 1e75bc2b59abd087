"""Grids whose CTAs take as long as data tells them (rows of different lengths, lists, early exits): many of them run
without a word before a few are traced, and their instructions are counted.

The traced ones are then an average, the longest and the shortest; all others take as long as their numbers of
instructions say (grid.py). What this costs is bounded: a number of instructions, not a number of CTAs.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from softsm.engine.launch import Kernel
from softsm.engine.scheduler import Machine
from softsm.engine.warps import Cta
from softsm.timing_model.follow import branch_on_load

COST = 16_000_000  # instructions in all: two seconds
MACRO, CTA = 400, 1500  # instructions that take as long as one that Python does, and as the start of a CTA
FEW = 8  # clusters of a larger grid say nothing about the others
ALIKE, MANY_ALIKE = 1.02, 512  # after so many that are alike the others are taken to be, too


@functools.lru_cache(64)
def _branches_on_data(source: str) -> bool:
    return branch_on_load(source, range(1, source.count("\n") + 2)) is not None


def worthwhile(kernel: Kernel, total: int, traced: int) -> bool:
    return total > traced and _branches_on_data(kernel.module.source)


def spread(total: int) -> list[int]:
    """All numbers below total, in an order whose every beginning is spread over them evenly."""
    step = max(1, round(total * (math.sqrt(5) - 1) / 2))
    while math.gcd(step, total) > 1:
        step += 1
    return [n * step % total for n in range(total)]


class Scouts:
    """The clusters that run first, one after the other."""

    def __init__(self, machine: Machine, place):
        self.machine, self.order = machine, spread(machine.left)
        self.cost = self.begun = self.live = 0
        self.steps: dict[int, int] = {}
        plain = machine.run_code

        def run(*given):
            result = plain(*given)
            self.steps[self.order[self.begun - 1]] += result[4]
            self.cost += result[4]
            return result

        machine.clusters, machine.left, machine.run_code = map(place, self.order), 1, run

    def began(self, cta: Cta) -> None:
        if cta.rank == 0:
            self.steps[self.order[self.begun]] = 0
            self.begun += 1
        self.cost += CTA
        self.live += 1

    def executed(self) -> None:
        self.cost += MACRO

    def ended(self) -> bool:
        """Whether the CTA that ended was the last of all."""
        self.live -= 1
        affordable = COST * self.begun // max(1, self.cost)  # clusters in all, if the others are like these
        more = self.cost < COST and self.begun < len(self.order) and affordable >= min(FEW, len(self.order))
        if self.begun == MANY_ALIKE and not self.live:
            more &= max(self.steps.values()) > ALIKE * min(self.steps.values())
        self.machine.left = int(not self.live and more)
        return not self.live and not more

    def lengths(self) -> np.ndarray | None:
        """Instructions of every cluster of the grid: of those that did not run, what the nearest took. None: too few
        ran, or they are alike."""
        numbers = np.array(sorted(self.steps))
        steps = np.array([self.steps[n] for n in numbers.tolist()], float)
        if len(steps) < min(FEW, len(self.order)) or steps.max() <= ALIKE * steps.min():
            return None
        nearest = np.searchsorted((numbers[1:] + numbers[:-1]) / 2, np.arange(len(self.order)))
        return steps[nearest]

    def chosen(self, lengths: np.ndarray, most: int) -> list[int]:
        """An average one, the longest, the shortest."""
        numbers = sorted(self.steps)
        mean = lengths.mean()
        average = min(numbers, key=lambda n: abs(self.steps[n] - mean))
        ends = max(numbers, key=self.steps.__getitem__), min(numbers, key=self.steps.__getitem__)
        return sorted({n for n in (average, *ends)[:most]})
