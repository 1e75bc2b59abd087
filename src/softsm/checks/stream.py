"""The launches of a session that may overlap with the next one (checks/grids.py, ranks.py, beside.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from softsm.checks.accesses import Touched


# Flags of a word: four bits for the bytes written, four for those read, and whether by strong accesses alone.
WROTE, READ, STRONG_WRITE, STRONG_READ = 0x00F, 0x0F0, 0x100, 0x200


class Part(NamedTuple):
    start: int  # address of the first word
    flags: np.ndarray  # uint16 for each word

    def meeting(self, start: int, words: int) -> tuple[int, int]:
        """Returns the addresses of the first word that both have, and of the end."""
        return max(start, self.start), min(start + 4 * words, self.start + 4 * len(self.flags))

    def word(self, address: int) -> list[int]:
        """Returns the address of the word, if it is here."""
        low, high = self.meeting(address & ~3, 1)
        return [low] if low < high else []

    def between(self, low: int, high: int) -> np.ndarray:
        return self.flags[(low - self.start) // 4 : (high - self.start) // 4]


class Footprint(NamedTuple):
    """What a kernel, a copy or a set has accessed."""

    who: str
    source: object  # its string is the line of the program
    parts: list[Part]

    @property
    def nbytes(self) -> int:
        return sum(part.flags.nbytes for part in self.parts if part.flags.strides[0])

    def wrote(self, address: int) -> bool:
        at = ((address - part.start) // 4 for part in self.parts)
        return any(0 <= i < len(part.flags) and part.flags[i] & WROTE for i, part in zip(at, self.parts))

    def meets(self, other: Footprint) -> Iterator[tuple[int, bool, bool]]:
        """Yields words where one wrote what the other accessed: address, whether this one wrote, whether the other
        did."""
        for mine in self.parts:
            for theirs in other.parts:
                low, high = mine.meeting(theirs.start, len(theirs.flags))
                if low < high:
                    a, b = mine.between(low, high), theirs.between(low, high)
                    found = np.flatnonzero((a & b | a >> 4 & b | a & b >> 4) & WROTE)
                    for i in found[:1].tolist():
                        yield low + 4 * i, bool(a[i] & WROTE), bool(b[i] & WROTE)


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
    beside: tuple[Footprint, ...] = ()  # work that the next launch may run beside (checks/beside.py)
    keeps: bool = False  # whether the next launch leaves in `left` what it has accessed
    left: list[Part] = field(default_factory=list)

    def clear(self) -> None:
        self.last, self.loose, self.ranks = None, [], None
