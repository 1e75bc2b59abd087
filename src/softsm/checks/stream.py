"""The launches of a session that may overlap with the next one (checks/grids.py)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from softsm.checks.accesses import Touched


class Grid(NamedTuple):
    """What a launch touched, and how many earlier launches its shadow began with: their operations have the first
    numbers."""

    touched: Touched
    inherited: int


@dataclass
class Stream:
    last: Grid | None = None  # the previous one, if it launches dependents
    loose: list[Grid] = field(default_factory=list)  # earlier ones, oldest first

    def clear(self) -> None:
        self.last, self.loose = None, []
