"""Known allocations, and the message about an address outside all of them."""

from __future__ import annotations

import numpy as np
import pytest

from softsm.errors import Fault
from softsm.memory.global_memory import GlobalMemory


def memory(*named: tuple[int, int, str]) -> GlobalMemory:
    found = GlobalMemory()
    for start, size, name in named:
        found.add(start, size, name)
    return found


def test_an_access_inside_an_allocation_sees_its_bytes():
    data = np.arange(64, dtype=np.uint8)
    known = GlobalMemory()
    known.add(data.ctypes.data, data.nbytes, "argument x", data)
    assert known.view(data.ctypes.data + 3, 4).tolist() == [3, 4, 5, 6]


def test_overlapping_storages_are_one():
    known = memory((100, 50, "argument x"), (140, 60, "argument y"))
    assert len(known.allocations) == 1 and known.find(100, 100) and known.find(100, 101) is None


def test_the_nearest_allocation_is_named_with_its_distance():
    with pytest.raises(Fault, match=r"nearest: 8 bytes past the end of argument x \(400 bytes"):
        memory((70000, 400, "argument x"), (90000, 4, "argument y")).view(70400, 8)


def test_an_argument_is_named_although_another_tensor_lies_nearer():
    known = memory((70000, 400, "argument x"), (70512, 400, "a tensor whose data_ptr() was taken"))
    with pytest.raises(Fault, match=r"nearest: 8 bytes past .* was taken .*; nearest of the arguments: .* argument x"):
        known.view(70912, 8)


@pytest.mark.parametrize(
    "address, said",
    [
        (128, "a null pointer"),
        (69920, "it lies in memory, which was freed"),
        (1 << 47, "far from each: it may be a pointer"),
    ],
)
def test_what_is_no_allocation_is_named(address, said):
    known = memory((70000, 400, "argument x"))
    known.freed = [(69900, 50, "memory")]
    with pytest.raises(Fault, match=said):
        known.view(address, 8)
