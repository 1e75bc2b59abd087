"""Registers, blocks and lines of machine code, read from nvdisasm's text."""

import pytest

from softsm.clock import sass


@pytest.mark.parametrize(
    ("opcode", "operands", "writes", "reads"),
    [
        ("FFMA", "R4, R5, R6, R4", (4,), (5, 6, 4)),
        ("LDS.128", "R8, [R3+UR4]", (8, 9, 10, 11), (3, sass.UNIFORM + 4)),
        ("STS.128", "[R3], R8", (), (3, 8, 9, 10, 11)),
        ("ISETP.GE.AND", "P5, PT, R5, R4, PT", (sass.PREDICATE + 5,), (5, 4)),
        ("IMAD.WIDE", "R2, R0, 0x4, R6", (2, 3), (0, 6)),
        ("LOP3.LUT", "R195, R8, 0x1, RZ, 0xfc, !PT", (195,), (8,)),
        ("HGMMA.64x128x16.F32.BF16", "R24, R4, gdesc[UR8], R24, gsb0", (), (4, 5, 6, 7)),
        ("HGMMA.64x128x16.F32.BF16", "R24, gdesc[UR8], R24", (), ()),
        ("SYNCS.ARRIVE.TRANS64.A1T0", "RZ, [UR8+0x38120], RZ", (), (sass.UNIFORM + 8,)),
    ],
)  # fmt: skip
def test_registers(opcode, operands, writes, reads) -> None:
    assert sass.registers_of(opcode, operands) == (writes, reads)


TEXT = """
\t//## File ".nv_debug_ptx_txt", line 7
        /*0000*/                   MOV R1, R2 ;
        /*0010*/              @!P0 BRA `(.L_x_0) ;
\t//## File ".nv_debug_ptx_txt", line 9
        /*0020*/                   FADD R1, R1, R3 ;
.L_x_0:
        /*0030*/                   EXIT ;
"""


def test_blocks_end_at_branches_and_labels() -> None:
    code = sass.read(TEXT, "ptxas info : Used 40 registers\n 8 bytes stack frame, 8 bytes spill stores")
    assert [list(b) for b in code.blocks] == [[0, 1], [2], [3]]
    assert [i.line for i in code.instructions] == [7, 7, 9, 9]
    assert code.instructions[1].guarded and sass.PREDICATE in code.instructions[1].reads
    assert (code.registers, code.spills) == (40, 8)
