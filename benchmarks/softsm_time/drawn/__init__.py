"""Cases drawn at random for the timing model, so that it is judged by kernels that it was not made for.

`draw(seed)` gives two variants of one problem of every family. A round of the protocol takes a fresh seed: `timing.py
--seed N --predict` first, whose file is committed; then `--seed N --measure` on the GPU; then `--table`. A seed that
has been looked at is a development seed from then on.
"""

from __future__ import annotations

import random

from softsm_time.case import Case
from softsm_time.drawing import variants
from softsm_time.drawn import fused, products, rows, states, tables

# Seeds that were drawn depend on the order.
FAMILIES = {**fused.family, **products.family, **states.family, **tables.family, **rows.family}


def draw(seed: int, families: int | None = None) -> list[Case]:
    """families: how many of them, chosen by the seed, in a round with little time; by default all."""
    chosen = random.Random(f"{seed} families").sample(list(FAMILIES), families) if families else FAMILIES
    return [case for name in chosen for case in variants(name, FAMILIES[name], f"{seed} {name}")]
