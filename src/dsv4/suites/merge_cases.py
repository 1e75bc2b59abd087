"""Cases for `merge_states`: attention over parts of the keys, merged, is attention over all of them.

Context parallelism and split-KV rest on this; the sink must enter once, at the merge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import dsv4
from dsv4 import reference

from .calls import FEATURES, judge, judge_lse
from .case import Check, Draw, Where


@dataclass
class Merge:
    """Run fmha on each part of the keys without a sink, then merge with it."""

    q: Tensor  # [B, T, Hq, D]
    k: Tensor  # [B, S, Hkv, D]
    v: Tensor  # [B, S, Hkv, D]
    sink: Tensor | None
    cuts: list[int]  # the parts are 0..cuts[0], cuts[0]..cuts[1], ..

    def run(self, where: Where) -> tuple[Tensor, Tensor]:
        parts = []
        for begin, end in zip([0, *self.cuts], [*self.cuts, self.k.shape[1]], strict=True):
            with where.context():
                k, v = self.k[:, begin:end], self.v[:, begin:end]
                parts.append(dsv4.fmha(self.q, k, v, return_lse=True, backend=where.backend))
        return dsv4.merge_states([out for out, _ in parts], [lse for _, lse in parts], sink=self.sink)

    def check(self, got: tuple[Tensor, Tensor]) -> list[Check]:
        args: dict[str, Any] = {"q": self.q, "k": self.k, "v": self.v, "sink": self.sink}
        ref, ref_lse = reference.fmha(**args)
        out, lse = got
        # Every part is rounded to the dtype before the merge; so is the oracle's.
        parts = []
        for begin, end in zip([0, *self.cuts], [*self.cuts, self.k.shape[1]], strict=True):
            k, v = self.k[:, begin:end], self.v[:, begin:end]
            o, part_lse = reference.fmha(self.q, k, v, p_dtype=self.q.dtype)
            parts.append((o.to(self.q.dtype), part_lse))
        low, _ = reference.merge_states([o for o, _ in parts], [part for _, part in parts], sink=self.sink)
        return judge(out.to(self.q.dtype), ref, low, FEATURES) + judge_lse(lse, ref_lse)


def merge(draw: Draw, d: int, dtype: torch.dtype, cuts: list[int], s: int = 170, sink: bool = True) -> Merge:
    q = draw.normal(2, 11, 4, d, dtype=dtype)
    k, v = (draw.normal(2, s, 2, d, dtype=dtype) for _ in "kv")
    return Merge(q, k, v, draw.normal(4, scale=2.0) if sink else None, cuts)


def merge_specials() -> Iterator[tuple[str, Callable[..., Any], set[str]]]:
    yield "merge-2", partial(merge, cuts=[100]), {"merge", "sink"}
    yield "merge-4-uneven", partial(merge, cuts=[1, 64, 169]), {"merge", "sink"}
    yield "merge-empty-part", partial(merge, cuts=[0, 80, 80]), {"merge", "sink"}
    yield "merge-no-sink", partial(merge, cuts=[50, 90], sink=False), {"merge"}
