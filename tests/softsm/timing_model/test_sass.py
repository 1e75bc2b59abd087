"""Blocks, lines and scheduling words of machine code, read from nvdisasm's text."""

import numpy as np
import pytest

import softsm
from softsm.timing_model import sass
from softsm.timing_model.loops import machine_depths

TEXT = """
\t//## File ".nv_debug_ptx_txt", line 7
        /*0000*/                   LDG.E.128 R4, desc[UR6][R2.64] ;           /* 0x0000000602047981 */
                                                                              /* 0x000ea4000c1e1d00 */
        /*0010*/              @!P0 BRA `(.L_x_0) ;                            /* 0x0000000000048947 */
                                                                              /* 0x000fea0003800000 */
\t//## File ".nv_debug_ptx_txt", line 9
        /*0020*/                   FADD R1, R4, R3 ;                          /* 0x0000000304017221 */
                                                                              /* 0x004fe20000000000 */
.L_x_0:
        /*0030*/                   EXIT ;                                     /* 0x000000000000794d */
                                                                              /* 0x000fea0003800000 */
"""


def test_blocks_end_at_branches_and_labels() -> None:
    code = sass.read(TEXT, "ptxas info : Used 40 registers\n 8 bytes stack frame, 8 bytes spill stores")
    assert [list(b) for b in code.blocks] == [[0, 1], [2], [3]]
    assert [i.line for i in code.instructions] == [7, 7, 9, 9]
    assert [i.guarded for i in code.instructions] == [False, True, False, False]
    assert (code.registers, code.spills) == (40, 8)


def test_a_loop_may_end_with_the_last_jump() -> None:
    """Behind the code stand a jump to itself and NOPs; the jump before them is the loop of an exact gelu, which was
    taken for a loop that ptxas had unrolled."""
    jump = "        /*{:04x}*/                   {} ;   /* 0x0 */\n"
    text = (
        ".L_x_1:\n" + jump.format(0, "FADD R1, R4, R3") + jump.format(16, "@P0 EXIT") + jump.format(32, "BRA `(.L_x_1)")
    )
    padding = ".L_x_2:\n" + jump.format(48, "BRA `(.L_x_2)") + jump.format(64, "NOP")
    code = sass.read(text + padding, "")
    assert [i.opcode for i in code.instructions] == ["FADD", "EXIT", "BRA"] and machine_depths(code) == [1, 1]


def test_a_load_raises_a_scoreboard_that_its_user_waits_for() -> None:
    load, branch, add, _ = sass.read(TEXT, "").instructions
    assert (load.stall, load.sets, load.holds, load.waits) == (2, 2, sass.NONE, 0)
    assert (branch.stall, branch.sets, branch.holds, branch.waits) == (5, sass.NONE, sass.NONE, 0)
    assert (add.stall, add.sets, add.waits) == (1, sass.NONE, 1 << load.sets)


KERNEL = """
.visible .entry NAME(
  .param .u64 x
)
.reqntid 32
{
  .reg .b32 %r<4>; .reg .b64 %d<2>; .reg .f32 %f<4>; // a brace } in a comment
  { .reg .b32 %r9; mov.u32 %r9, 1; }
  ld.param.u64 %d1, [x]; ld.global.f32 %f1, [%d1];
  WORK
  st.global.f32 [%d1], %f1; ret;
}
"""
MODULE = ".version 8.3 .target sm_90a .address_size 64\n.shared .b32 box;\n"
LITTLE = KERNEL.replace("NAME", "little").replace("WORK", "add.f32 %f1, %f1, %f1;")
MUCH = KERNEL.replace("NAME", "much").replace("WORK", "ex2.approx.f32 %f1, %f1;" * 400)


def test_other_kernels_of_a_module_are_left_out() -> None:
    both = MODULE + MUCH + LITTLE
    one = sass.alone(both, "little")
    assert one == MODULE + "\n" * MUCH.count("\n") + LITTLE
    assert sass.alone(MODULE + LITTLE, "little") == MODULE + LITTLE
    assert "mov.u32 %r9" in sass.alone(both, "much") and ".entry little" not in sass.alone(both, "much")


def test_a_kernel_takes_as_long_beside_another() -> None:
    pytest.importorskip("triton")  # its wheel holds ptxas and nvdisasm
    times = []
    for source in (MODULE + LITTLE, MODULE + MUCH + LITTLE):
        with softsm.timing("h200") as timer:
            softsm.load(source, "little").launch(1000, 32, [np.zeros(64, np.float32)])
        times.append(timer.us)
    assert times[0] == times[1]


@pytest.mark.compile
def test_ptx_of_a_newer_version_is_assembled_as_the_newest_that_is_known() -> None:
    """clang 22 names version 8.8, which the ptxas of Triton 3.6 rejects whatever the code is."""
    known, newer = (
        f".version {n}\n.target sm_90a\n.address_size 64\n.visible .entry k() {{ ret; }}" for n in (8.3, 99.9)
    )
    assert sass.assembled(newer, "sm_90a")[0]
    with pytest.raises(sass.ToolError, match="ptxas"):
        sass.assembled(known.replace("ret;", "nothing;"), "sm_90a")
