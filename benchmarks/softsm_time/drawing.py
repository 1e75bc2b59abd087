"""Families of kernels whose problems (shape, type, form) and variants (tile, stages, warps) are drawn at random."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

from softsm_time.case import Call, Case

Drawn = tuple[str, str, Callable[[str], Call]]  # problem, variant, what makes the call on a device
Family = Callable[[random.Random], Iterator[Drawn]]
VARIANTS = 2  # of a problem


class Families(dict[str, Family]):
    """Families by name, in the order of the file; as a decorator it adds one."""

    def __call__(self, f: Family) -> Family:
        self[f.__name__] = f
        return f


def shuffled(r: random.Random, *options: tuple) -> Iterator[tuple]:
    """Every choice once, in a random order."""
    every = list(itertools.product(*options))
    yield from r.sample(every, len(every))


def variants(name: str, family: Family, words: str) -> list[Case]:
    """The first variants of the problem that the words draw."""
    found = itertools.islice(family(random.Random(words)), VARIANTS)
    return [Case(f"{name} {problem} {variant}", name, make, f"{name} {problem}") for problem, variant, make in found]
