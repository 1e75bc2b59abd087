"""Suite `seeds`: the 64 configurations of the multi-tile Blackwell kernel this project started from, and eight more.

Theirs: head dim 64/128/256/512 x T 1/4/32/128 x S 128/256/384/512. Ours: S 1024 for T 1 and 128. Eight query heads on
one KV head, one sequence, every key seen.
"""

from __future__ import annotations

from functools import partial

import torch

from dsv4.runtime.checks import HEAD_DIMS

from .calls import SEEDS, Call
from .case import Case, Draw

QUERY_HEADS = 8


def sizes() -> list[tuple[int, int]]:
    """Return (T, S) of each head dim's 18 cases: the grid of 16, and two longer ones."""
    grid = [(t, s) for t in (1, 4, 32, 128) for s in (128, 256, 384, 512)]
    return grid + [(1, 1024), (128, 1024)]


def make(draw: Draw, d: int, t: int, s: int, dtype: torch.dtype) -> Call:
    q = draw.normal(1, t, QUERY_HEADS, d, dtype=dtype)
    k, v = (draw.normal(1, s, 1, d, dtype=dtype) for _ in "kv")
    return Call("fmha", {"q": q, "k": k, "v": v}, rule=SEEDS)


def seeds(dtype: torch.dtype = torch.bfloat16) -> list[Case]:
    """Return the 72 cases, head dim by head dim. The notes are bf16; kernel tests may ask for another dtype."""
    return [
        Case("seeds", f"d{d}-t{t}-s{s}", partial(make, d=d, t=t, s=s, dtype=dtype), d, dtype)
        for d in HEAD_DIMS
        for t, s in sizes()
    ]
