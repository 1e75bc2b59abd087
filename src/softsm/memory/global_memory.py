"""Global memory is the host's memory, but only where the program was given it.

Every address a kernel uses is checked against the known allocations: storages of argument tensors, scratch, module
variables, parameters, and storages whose `data_ptr()` was taken while softsm is in use. The interpreter checks with
the sorted table `lo`/`hi`; everything else goes through `view`.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
from dataclasses import dataclass

import numpy as np

from softsm.errors import Fault

PARAMETERS = "the kernel's parameters"  # name of an allocation
NULL, FAR = 1 << 16, 1 << 36  # bytes: no host has memory so low; an index of 32 bits does not lead so far


@dataclass
class Allocation:
    start: int
    size: int
    name: str
    keep: object = None  # what must stay alive while the allocation is known

    @functools.cached_property
    def bytes(self) -> np.ndarray:
        """uint8 view of the whole allocation. Made at the first use: a program may own thousands of storages."""
        return np.frombuffer(memoryview((ctypes.c_uint8 * self.size).from_address(self.start)), np.uint8)

    @property
    def end(self) -> int:
        return self.start + self.size


class GlobalMemory:
    def __init__(self) -> None:
        self.starts: list[int] = []
        self.allocations: list[Allocation] = []
        self.freed: list[tuple[int, int, str]] = []  # first address, size and name, for messages
        self.copies: list[tuple[str, np.ndarray, np.ndarray]] = []  # copies of read-only arguments: name, array, copy

    def check_copies(self) -> None:
        """Raises ValueError if a launch has written to the copy of a read-only array."""
        copies, self.copies = self.copies, []
        for name, array, copy in copies:
            if array.tobytes() != copy.tobytes():
                raise ValueError(
                    f"args: parameter {name}: got a read-only array, which the kernel writes; accepted: a writable one"
                )

    @property
    def lo(self) -> np.ndarray:
        """First addresses, sorted; `hi` are the addresses after the last bytes."""
        return np.array(self.starts, np.uint64)

    @property
    def hi(self) -> np.ndarray:
        return np.array([a.end for a in self.allocations], np.uint64)

    def add(self, start: int, size: int, name: str, keep: object = None) -> None:
        """Make [start, start + size) known. Overlapping storages are merged into one."""
        if size <= 0:
            return
        end = start + size
        i = bisect.bisect_right(self.starts, start)
        if i and self.allocations[i - 1].end >= end:
            return
        while i and self.allocations[i - 1].end > start:
            i -= 1
        j = i
        names, keeps = [name], [keep]
        while j < len(self.allocations) and self.allocations[j].start < end:
            old = self.allocations[j]
            start, end = min(start, old.start), max(end, old.end)
            names.append(old.name)
            keeps.append(old.keep)
            j += 1
        self.allocations[i:j] = [Allocation(start, end - start, ", ".join(dict.fromkeys(names)), keeps)]
        self.starts[i:j] = [start]

    def find(self, address: int, size: int) -> Allocation | None:
        i = bisect.bisect_right(self.starts, address)
        if i and address + size <= self.allocations[i - 1].end:
            return self.allocations[i - 1]
        return None

    def view(self, address: int, size: int, access: str = "access") -> np.ndarray:
        """Returns a uint8 view of [address, address + size); a Fault names the nearest allocation when it is not
        ours.
        """
        a = self.find(address, size)
        if a is None:
            raise Fault("out-of-bounds", self.describe(address, size, access))
        return a.bytes[address - a.start : address - a.start + size]

    def describe(self, address: int, size: int, access: str) -> str:
        text = f"{access} of {size} bytes at global address {address:#x} is outside every known allocation"
        for start, length, name in self.freed:
            if start <= address < start + length:
                return f"{text}; it lies in {name}, which was freed"
        if address < NULL:
            return text + "; it is a null pointer, or an offset from one"
        if not self.allocations:
            return text + "; there are none"
        if all(self._distance(a, address, size) > FAR for a in self.allocations):
            return text + ", and far from each: it may be a pointer of the host"
        nearest = f"{text}; nearest: {self._beside(self.allocations, address, size)}"
        # Prefer the kernel's own arguments: it more likely ran past one of these than past a tensor that lies nearer.
        given = [a for a in self.allocations if "argument " in a.name]
        if given and "argument " not in nearest:
            nearest += f"; nearest of the arguments: {self._beside(given, address, size)}"
        return nearest

    @staticmethod
    def _distance(a: Allocation, address: int, size: int) -> int:
        return max(a.start - address, address + size - a.end, 0)

    @staticmethod
    def _beside(allocations: list[Allocation], address: int, size: int) -> str:
        near = min(allocations, key=lambda a: GlobalMemory._distance(a, address, size))
        if address < near.start:
            place = f"{near.start - address} bytes before the start of"
        else:
            place = f"{address + size - near.end} bytes past the end of"
        return f"{place} {near.name} ({near.size} bytes at {near.start:#x})"
