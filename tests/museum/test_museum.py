"""Every exhibit: the bug is named, the corrected twin is right and silent under every order of completion."""

import pytest

from softsm.museum.exhibits import gather, judge

EXHIBITS = gather()


def test_all_exhibits_are_there():
    assert list(EXHIBITS) == list(range(1, 29))


@pytest.mark.parametrize("number", EXHIBITS)
def test_exhibit(number):
    verdict = judge(EXHIBITS[number])
    assert verdict.passed, verdict.problem
