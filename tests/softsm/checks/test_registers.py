"""Reads of registers that nothing wrote, found on the flow of the program."""

import numpy as np

import softsm
from softsm.museum import text as t


def found(body):
    with softsm.checking(strict=True) as report:
        softsm.load(t.kernel(body, "out", target="sm_90a", version="8.6")).launch(1, 32, [np.zeros(32, np.uint32)])
    return [d.message for d in report]


def test_a_register_that_nobody_wrote():
    assert found(t.out("%r50")) == ["register %r50 is read, but nothing before it writes it"]
    assert found("mov.u32 %r50, 1;\n" + t.out("%r50")) == []


def test_a_write_on_one_of_two_ways_is_enough():
    body = "@%p0 bra A;\nmov.u32 %r50, 1;\nbra B;\nA:\nmov.u32 %r51, 1;\nB:\n"
    assert found(body + t.out("%r50") + t.out("%r51")) == []


def test_a_write_behind_the_read_does_not_count_but_one_around_a_loop_does():
    assert len(found(t.out("%r50") + "mov.u32 %r50, 1;\n")) == 1
    loop = "mov.u32 %r60, 0;\nLOOP:\nsetp.eq.u32 %p4, %r60, 0;\n@%p4 bra FIRST;\n" + t.out("%r50") + "FIRST:\n"
    loop += "mov.u32 %r50, 7;\nadd.u32 %r60, %r60, 1;\nsetp.lt.u32 %p5, %r60, 3;\n@%p5 bra LOOP;\n"
    assert found(loop) == []


def test_code_that_nobody_reaches_is_not_looked_at():
    assert found("bra END;\n" + t.out("%r50") + "END:\n") == []


def test_addresses_and_guards_are_reads():
    assert "register %rd9 is read" in found("setp.eq.u32 %p4, %r0, 99;\n@%p4 st.global.u32 [%rd9], 1;\n")[0]
    assert "register %p9 is read" in found("@%p9 mov.u32 %r50, 1;\n")[0]
