"""What the source calls an mbarrier, through the functions that were inlined."""

import pytest

from softsm.ptx.ast import SourceLoc
from softsm.ptx.spelling import mbarrier_at

LIBRARY = """class Barriers:
    def wait(self, i, phase):
        mbarrier.wait(self.bars.index(i), phase)


class Ring:
    def acquire(self, stage):
        self.free.wait(stage.index, stage.phase)


def fill(slot, ready, bytes):
    mbarrier.expect(ready, bytes)
"""
KERNEL = """def load_role(k, stage):
    k.acquire(stage)
    fill(
        k.slot(stage),
        bytes=8, ready=k.ready_at(stage))
    x = 1
"""


@pytest.fixture
def places(tmp_path):
    for name, text in (("library.py", LIBRARY), ("kernel.py", KERNEL)):
        (tmp_path / name).write_text(text)

    def chain(*lines: tuple[str, int]) -> SourceLoc:
        loc = None
        for file, line in reversed(lines):
            loc = SourceLoc(str(tmp_path / file), line, 1, "k", loc)
        return loc

    return chain


def test_arguments_stand_for_parameters(places):
    assert mbarrier_at(places(("library.py", 3))) == "self.bars.index(i)"
    whole = places(("library.py", 3), ("library.py", 8), ("kernel.py", 2))
    assert mbarrier_at(whole) == "k.free.bars.index(stage.index)"
    assert mbarrier_at(places(("library.py", 12), ("kernel.py", 3))) == "k.ready_at(stage)"


def test_a_place_that_names_none(places):
    assert mbarrier_at(places(("kernel.py", 6))) == ""
    assert mbarrier_at(places(("library.py", 3), ("kernel.py", 6))) == "self.bars.index(i)"
    assert mbarrier_at(SourceLoc("/nowhere.py", 3, 1)) == ""
