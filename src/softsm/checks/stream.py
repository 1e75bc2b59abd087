"""The launches of a session that may overlap with the next one (checks/grids.py)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from softsm.checks.accesses import Touched


class Grid(NamedTuple):
    """What a launch touched, and how many earlier launches its shadow began with: their operations have the first
    numbers."""

    touched: Touched
    inherited: int


class Unknown(NamedTuple):
    """Accesses by a GPU of which some others know nothing."""

    gpu: int
    ignorant: int  # bits of these others


class Ranks(NamedTuple):
    """A launch of several GPUs that ended without the host waiting for all of them."""

    touched: Touched
    tenants: list[tuple[int, int, int]]  # (slot, first epoch, GPU) of each warp
    ends: np.ndarray  # for each GPU, what its warps had acquired: an epoch for each slot
    issuers: dict[int, Unknown]  # asynchronous operations


@dataclass
class Stream:
    last: Grid | None = None  # the previous one, if it launches dependents
    loose: list[Grid] = field(default_factory=list)  # earlier ones, oldest first
    ranks: Ranks | None = None

    def clear(self) -> None:
        self.last, self.loose, self.ranks = None, [], None
