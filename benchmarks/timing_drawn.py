"""Cases drawn at random for the timing model, so that it is judged by kernels that it was not made for.

`draw(seed)` gives two variants (tile, stages, warps) of one problem (shape, type, form) of every family. A round of the
protocol takes a fresh seed: `timing.py --seed N --predict` first, whose file is committed; then `--seed N --measure` on
the GPU; then `--table`. A seed that has been looked at is a development seed from then on.
"""

from __future__ import annotations

import random

import timing_families_fused  # noqa: F401
import timing_families_products  # noqa: F401
import timing_families_states  # noqa: F401
import timing_families_tables  # noqa: F401
import timing_families_words  # noqa: F401  they fill FAMILIES
from timing_case import Case
from timing_family import FAMILIES


def draw(seed: int, variants: int = 2, families: int | None = None) -> list[Case]:
    """families: how many of them, chosen by the seed, in a round with little time; by default all."""
    out = []
    chosen = random.Random(f"{seed} families").sample(list(FAMILIES), families) if families else FAMILIES
    for name in chosen:
        f = FAMILIES[name]
        r = random.Random(f"{seed} {name}")
        for _, (problem, variant, make) in zip(range(variants), f(r)):
            out.append(Case(f"{name} {problem} {variant}", name, make, f"{name} {problem}"))
    return out
