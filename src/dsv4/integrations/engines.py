"""What the plug-ins for vLLM and SGLang have in common: the parts that a user names, the rows of prompts, experts."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsv4.moe.api import moe
from dsv4.moe.experts import Fp4Experts
from dsv4.runtime import checks
from dsv4.runtime.checks import Backend

LIMIT = 10.0  # limit of SwiGLU if an engine names none


def named_parts(variable: str, known: Sequence[str], default: str = "") -> list[str]:
    """Return the parts that an environment variable names, separated by commas; a ValueError names unknown ones."""
    named = [part.strip() for part in os.environ.get(variable, default).split(",") if part.strip()]
    if unknown := [part for part in named if part not in known]:
        checks.fail(variable, ", ".join(unknown), f"any of {', '.join(known)}, or nothing")
    return named


def rows_of_prompts(q: Tensor, rows: Tensor, lists: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """Prepare the rows, a bf16 workspace, and the lists [n, .., W] of a prefill for dsv4.v4_attention.

    On a CPU rows must have the dtype of q [n, H, D], and numbers are checked, but engines leave undefined what is past
    lengths [n] in a list. On a GPU both stay as they are.
    """
    if q.is_cuda:
        return rows, lists
    if lengths is not None:
        past = torch.arange(lists.shape[-1]) >= lengths.view(-1, *(1,) * (lists.ndim - 1))
        lists = lists.masked_fill(past, -1)
    return rows.to(q.dtype), lists  # exact


def unsupported_sizes(hidden: int, intermediate: int) -> tuple[str, str] | None:
    """Return (what was got, what is accepted) if no kernel has experts of these sizes on a rank; else None."""
    if hidden % 256 == 0 and intermediate % 128 == 0:
        return None
    got = f"experts of sizes {hidden} and {intermediate} on a rank"
    return got, "multiples of 256 and 128, or no experts among the parts"


class EngineExperts:
    """The experts of one layer on one rank."""

    def __init__(self, counted: Counter[str], limit: float | None, backend: Backend = "auto") -> None:
        self.counted, self.limit, self.backend = counted, LIMIT if limit is None else float(limit), backend
        self.experts: Fp4Experts | None = None

    def load(self, layer: Any, names: tuple[str, str, str, str]) -> None:
        """Take the parameters of these names (w13, its scales, w2, its scales) from the layer. Gate lies above up; the
        layer keeps empty ones, since engines look for them."""
        w13, s13, w2, s2 = (getattr(layer, name).data for name in names)
        codes = [x.view(torch.uint8) for x in (*w13.chunk(2, 1), w2)]
        scales = [x.view(torch.uint8) for x in (*s13.chunk(2, 1), s2)]
        self.experts = Fp4Experts.pack(codes[0], scales[0], codes[1], scales[1], codes[2], scales[2])
        for name in names:
            getattr(layer, name).data = w13.new_empty(0)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, expert_map: Tensor | None = None) -> Tensor:
        """Apply the experts. expert_map: int [experts of all ranks], the place of each on this rank or -1."""
        if self.experts is None:
            checks.fail("experts", "no weights yet", "a layer whose weights are loaded")
        if expert_map is not None:
            ids = torch.where(ids < 0, ids, expert_map[ids.clamp_min(0).long()].to(ids.dtype))
        self.counted["experts"] += 1
        return moe(x, self.experts, ids, weights.float(), limit=self.limit, backend=self.backend)
