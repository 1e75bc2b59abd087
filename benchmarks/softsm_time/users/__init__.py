"""Kernels as users write them, by hand, and none of the generator's families: a set a file, each predicted and
committed before it was measured.

    python benchmarks/timing.py --set third --predict --json FILE     # then --measure on an H200, then --table
"""

from __future__ import annotations

from softsm_time.case import Case
from softsm_time.drawing import VARIANTS, Families, variants

SETS = ("user", "second", "third", "fourth", "fifth", "sixth", "seventh")
SHAPES = 2  # of a kernel


def draw(families: Families, seed: int) -> list[Case]:
    """Two variants of two problems of every family."""
    out: dict[str, Case] = {}
    for name, family in families.items():
        problems: set[str] = set()
        for n in range(99):
            found = variants(name, family, f"{seed} {name} {n}")
            if len(found) == VARIANTS and found[0].variants not in problems:
                problems.add(found[0].variants)
                out |= {case.name: case for case in found}
            if len(problems) == SHAPES:
                break
    return list(out.values())
