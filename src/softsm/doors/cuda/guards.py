"""Accesses of the host to memory that a kernel or a copy may still use: pages that the host can reach (managed and
pinned memory) are protected until the host has waited. host.cpp notes each access that meets such a page."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from softsm.checks.stream import WROTE, Footprint

PAGE = 4096  # as in host.cpp
MOST = 256  # accesses that host.cpp keeps


class Guard(NamedTuple):
    start: int
    end: int
    readable: bool  # a read is none of its business


class Access(ctypes.Structure):
    _fields_ = [("at", ctypes.c_size_t), ("writes", ctypes.c_size_t), ("place", ctypes.c_size_t)]


def pages(size: int) -> np.ndarray:
    """Returns memory of its own pages."""
    return np.frombuffer(mmap.mmap(-1, max(size, 1)), np.uint8)


def needed(footprint: Footprint, reachable: Iterable[tuple[int, int]]) -> list[Guard]:
    """Returns the guards of what a piece of work accesses. reachable: the (address, size) of allocations"""
    found = []
    for start, size in reachable:
        for part in footprint.parts:
            low, high = part.meeting(start & ~3, (size + 3) // 4)
            if low < high:
                wrote = bool(np.bitwise_or.reduce(part.between(low, high)) & WROTE)
                found.append(Guard(low // PAGE * PAGE, -(-high // PAGE) * PAGE, not wrote))
    return found


class Guards:
    """The half of the program's library that protects pages."""

    def __init__(self, library: ctypes.CDLL):
        self.library, self.closed = library, False
        self.count = ctypes.c_int.in_dll(library, "softsm_accessed")
        self.accesses = (Access * MOST).in_dll(library, "softsm_accesses")

    def lift(self) -> list[Access]:
        """Opens all pages; returns the accesses since they were protected."""
        if not self.closed:
            return []
        self.library.softsm_guard(None, 0)
        made = list(self.accesses[: self.count.value])
        self.closed, self.count.value = False, 0
        return made

    def protect(self, guards: list[Guard]) -> None:
        if guards:
            self.closed = True
            ordered = sorted(set(guards), key=lambda x: not x.readable)  # where several meet, the strictest is last
            table = np.array(ordered, np.uintp)
            self.library.softsm_guard(table.ctypes.data_as(ctypes.c_void_p), len(table))
