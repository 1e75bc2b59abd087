"""Which instruction uses a register of a tcgen05.ld first, on any way to it."""

import pytest

from softsm.engine.tensor_loads import first_uses
from softsm.museum import text as t
from softsm.ptx import parse

A, B = t.load("%r3", 10, 2), t.load("%r3", 12, 2)
ADD = "add.u32 %r30, %r10, %r12;\n"


def uses(body: str) -> dict[str, list[int]]:
    """Text of an instruction -> numbers of the loads it uses, in the order of the text."""
    function = parse(t.kernel(body)).functions["k"]
    loads = [id(x) for x in function.body if getattr(x, "name", "").startswith("tcgen05.ld")]
    found = first_uses(function)
    return {x.text: sorted(loads.index(load) for load in found[id(x)]) for x in function.body if id(x) in found}


@pytest.mark.parametrize(
    ("body", "want"),
    [
        (A + B + ADD + ADD, {"add.u32 %r30, %r10, %r12;": [0, 1]}),
        (A + t.WAIT_LD + B + ADD, {"add.u32 %r30, %r10, %r12;": [1]}),
        (A + B + "st.shared.u32 [%r11], %r0;\n" + ADD, {"st.shared.u32 [%r11], %r0;": [0], ADD[:-1]: [1]}),
        (A + "mov.b32 %r12, %r10;\n" + ADD, {"mov.b32 %r12, %r10;": [], ADD[:-1]: [0]}),
        (A + "@%p1 mov.b32 %r12, %r10;\n" + ADD, {"@%p1 mov.b32 %r12, %r10;": [0]}),
        (A + "mov.b32 %r10, 0;\n" + ADD, {"mov.b32 %r10, 0;": []}),
        (A + A, {A[:-1]: []}),
        ("TOP:\n" + ADD + A + "@%p1 bra TOP;\n", {ADD[:-1]: [0]}),  # the use is before the load in the text
        (A + "bra.uni X;\nY:\n" + ADD + "ret;\nX:\nbra Y;\n", {ADD[:-1]: [0]}),
        (A + "@%p1 bra X;\n" + t.WAIT_LD + "X:\n" + ADD, {ADD[:-1]: [0]}),
        (A + "ret;\n" + ADD, {}),
        (ADD, {}),
    ],
)
def test_first_uses(body, want):
    assert uses(body) == want


def test_a_jump_table_leads_to_the_use():
    body = A + "and.b32 %r40, %r2, 1;\nts: .branchtargets X, Y;\nbrx.idx %r40, ts;\nX:\nret;\nY:\n" + ADD
    assert uses(body) == {ADD[:-1]: [0]}
