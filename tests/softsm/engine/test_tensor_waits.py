"""Where the text says that nothing can happen between a tcgen05.ld or st and the place where its result is due."""

import pytest

import softsm
from softsm.engine import program as pg
from softsm.engine.tensor_waits import ACCESSES
from softsm.museum import text as t

ST, LD, ADD = t.store("%r4", 10, 2), t.load("%r4", 20, 2), "add.u32 %r30, %r31, %r32;\n"
USE, BAR = "add.u32 %r30, %r20, %r21;\n", "bar.sync 0;\n"


def distances(body: str) -> list[int]:
    """How far each access of the kernel is from its wait, in the order of the text."""
    code = softsm.load(t.kernel(body, shared=".shared .b32 place;")).assembled(checking=True).program.code
    return [int(r[5]) >> pg.DISTANCE for r in code if r[0] in ACCESSES]


@pytest.mark.parametrize(
    ("body", "want"),
    [
        (LD + t.WAIT_LD, [1]),
        (ST + t.WAIT_ST, [1]),
        (LD + ADD + ADD + t.WAIT_LD, [3]),
        (LD + USE, [1]),
        (LD + ADD + USE + BAR + t.WAIT_LD, [2]),
        (LD + BAR + t.WAIT_LD, [0]),
        (ST + BAR + t.WAIT_ST, [0]),
        (LD + "ld.shared.b32 %r30, [place];\n" + t.WAIT_LD, [0]),
        (LD + "bra.uni A;\nA:\n" + t.WAIT_LD, [1]),
        (ST + "bra.uni A;\nA:\n" + t.WAIT_ST, [2]),
        (ST + "@%p0 bra A;\nA:\n" + t.WAIT_ST, [0]),
        (LD + t.WAIT_ST + t.WAIT_LD, [2]),
        (ST + t.WAIT_LD + t.WAIT_ST, [2]),
        (ST + LD + USE + BAR + t.WAIT_ST, [2, 1]),
        (ST + "@%p0 " + LD + USE + t.WAIT_ST, [0, 1]),
        (ST + LD + t.WAIT_LD + BAR, [2, 1]),
        (ST, [0]),
        (ST + "A: bra.uni A;\n", [0]),
    ],
)
def test_records_up_to_where_the_result_is_due(body, want):
    assert distances(body) == want
