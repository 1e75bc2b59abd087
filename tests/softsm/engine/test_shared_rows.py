"""Registers that share rows: which ones may, and that results stay the same."""

import numpy as np
import pytest

import softsm
from softsm.engine.shared_rows import shared_rows
from softsm.ptx import parse

HEAD = """.version 8.7 .target sm_100a .address_size 64
.visible .entry k(.param .u64 x)
{
.reg .b32 %r<40>; .reg .f32 %f<40>; .reg .b64 %rd<20>; .reg .pred %p<8>;
ld.param.u64 %rd1, [x];
mov.u32 %r1, %tid.x;
mul.wide.u32 %rd2, %r1, 4;
add.s64 %rd3, %rd1, %rd2;
ld.global.u32 %r2, [%rd3];
"""
TAIL = "st.global.u32 [%rd3], %r30;\nret;\n}\n"


def shares(body):
    module = parse(HEAD + body + TAIL)
    return shared_rows(module.functions["k"])


def test_a_value_of_one_stretch_shares():
    rows = shares("add.u32 %r3, %r2, 1;\nadd.u32 %r4, %r3, 1;\nadd.u32 %r30, %r4, 1;\n")
    assert {"%r3", "%r4"} <= rows.keys()
    assert rows["%r3"] != rows["%r4"], "an instruction may write before it reads"
    rows = shares("add.u32 %r3, %r2, 1;\nadd.u32 %r4, %r3, 1;\nadd.u32 %r5, %r4, 1;\nadd.u32 %r30, %r5, %r2;\n")
    assert rows["%r5"] == rows["%r3"], "which is over by then"


@pytest.mark.parametrize("body, name", [
    ("add.u32 %r3, %r3, 1;\nmov.u32 %r30, %r3;\n", "%r3"),
    ("setp.eq.u32 %p1, %r1, 0;\n@%p1 mov.u32 %r3, 1;\n@!%p1 mov.u32 %r3, 2;\nmov.u32 %r30, %r3;\n", "%r3"),
    ("add.u32 %r3, %r2, 1;\nNEXT:\nmov.u32 %r30, %r3;\n", "%r3"),
    ("add.u32 %r3, %r2, 1;\nsetp.eq.u32 %p1, %r1, 0;\n@%p1 bra NEXT;\nmov.u32 %r30, %r3;\nNEXT:\n", "%r3"),
    ("elect.sync %r3|%p1, -1;\nmov.u32 %r30, %r3;\n", "%r3"),
    ("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r3}, [%r2];\nmov.u32 %r30, %r3;\n", "%r3"),
    ("add.u32 %r3, %r2, 1;\ntcgen05.st.sync.aligned.32x32b.x1.b32 [%r2], {%r3};\nmov.u32 %r30, %r3;\n", "%r3"),
    ("mov.pred %p2, 1;\nselp.u32 %r30, 1, 0, %p2;\n", "%p2"),
], ids=["read first", "guarded", "behind a label", "behind a branch", "not arithmetic", "delivered later",
        "an operand of tcgen05", "a predicate"])  # fmt: skip
def test_others_have_a_row_of_their_own(body, name):
    assert name not in shares(body)


def test_a_loop_of_many_values_has_the_results_of_its_formulas():
    """Lanes leave the loop one by one: fragments of the warp run different stretches on the same rows."""
    steps = "".join(
        f"mad.lo.u32 %r{n + 1}, %r{n}, {n}, %r2;\nxor.b32 %r{n + 2}, %r{n + 1}, {n};\n" for n in range(5, 21, 2)
    )
    body = f"""mov.u32 %r31, 0; mov.u32 %r30, 0;
LOOP:
mov.u32 %r5, %r31;
{steps}add.u32 %r30, %r30, %r21;
add.u32 %r31, %r31, 1;
setp.le.u32 %p1, %r31, %r1;
@%p1 bra LOOP;
add.u32 %r6, %r30, %r2;
shl.b32 %r7, %r6, 1;
xor.b32 %r30, %r7, %r6;
"""
    assert len({row for name, row in shares(body).items() if name.startswith("%r")}) < 6
    data = np.random.default_rng(0).integers(0, 1 << 32, 32, dtype=np.uint32)
    want = []
    for lane, x in enumerate(data.tolist()):
        total = 0
        for i in range(lane + 1):
            value = i
            for n in range(5, 21, 2):
                value = (value * n + x & 0xFFFFFFFF) ^ n
            total = total + value & 0xFFFFFFFF
        total = total + x & 0xFFFFFFFF
        want.append((total << 1 & 0xFFFFFFFF) ^ total)
    softsm.load(HEAD + body + TAIL).launch(1, 32, [data])
    assert data.tolist() == want
