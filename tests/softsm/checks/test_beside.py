"""What kernels, copies and sets of different streams access, byte by byte."""

import numpy as np
import pytest

from softsm.checks.beside import of_range
from softsm.checks.stream import READ, WROTE, Footprint


def footprint(*ranges):
    return Footprint("", "", [part for r in ranges for part in of_range(*r)])


def test_a_range_is_its_bytes():
    (part,) = of_range(1001, 6, True)
    assert part.start == 1000 and part.flags.tolist() == [0xE, 0x7]
    (part,) = of_range(1001, 2, False)
    assert part.start == 1000 and part.flags.tolist() == [0x60]
    (part,) = of_range(1000, 1 << 40, True)
    assert part.flags[-1] == WROTE and len(part.flags) == 1 << 38
    (part,) = of_range(1000, 8, False)
    assert part.flags.tolist() == [READ, READ]


@pytest.mark.parametrize(
    "one, other, met",
    [
        ((1000, 6, True), (1006, 2, True), None),
        ((1000, 6, True), (1005, 2, True), (1004, True, True)),
        ((1000, 64, False), (1032, 64, False), None),
        ((1000, 64, False), (1032, 64, True), (1032, False, True)),
        ((1000, 64, True), (900, 101, False), (1000, True, False)),
        ((1000, 64, True), (900, 100, False), None),
    ],
)
def test_two_meet_in_a_byte_that_one_of_them_writes(one, other, met):
    assert list(footprint(one).meets(footprint(other))) == ([met] if met else [])
    assert footprint(one).wrote(one[0]) == one[2] and not footprint(one).wrote(one[0] + one[1] + 4)
    assert np.bitwise_or.reduce(footprint(one).parts[0].flags) in (WROTE, READ)
