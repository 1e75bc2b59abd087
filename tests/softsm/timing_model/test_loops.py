"""Depth of blocks in loops, of graphs and of machine code."""

from softsm.timing_model import sass
from softsm.timing_model.loops import depths, machine_depths


def test_loops_inside_each_other() -> None:
    #      0 -> 1 -> 2 -> 3 -> 4, 2 -> 2, 3 -> 1
    assert depths(5, [(0, 1), (1, 2), (2, 2), (2, 3), (3, 1), (3, 4)], [0]) == [0, 1, 2, 1, 0]


def test_a_way_back_into_the_middle_is_no_loop_of_the_middle() -> None:
    # 1 is the first try of a wait, 3 the second, behind all other code; 2 goes on.
    assert depths(4, [(0, 1), (1, 2), (1, 3), (3, 3), (3, 2)], [0]) == [0, 0, 0, 1]


def test_blocks_that_cannot_be_reached_are_in_no_loop() -> None:
    assert depths(3, [(0, 0), (1, 2), (2, 1)], [0]) == [1, 0, 0]


def test_branches_of_machine_code() -> None:
    text = """
        /*0000*/                   MOV R1, R2 ;
.L_x_1:
        /*0010*/                   FADD R1, R1, R3 ;
        /*0020*/               @P0 BRA `(.L_x_1) ;
        /*0030*/                   BRA `(.L_x_2) ;
.L_x_3:
        /*0040*/                   FADD R1, R1, R3 ;
.L_x_2:
        /*0050*/                   EXIT ;
"""
    code = sass.read(text, "")
    assert machine_depths(code) == [0, 1, 0, 0, 0]
