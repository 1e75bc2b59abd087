"""Which machine instructions a warp issues for the blocks of PTX that it runs through."""

from softsm.timing_model import sass
from softsm.timing_model.blocks import Blocks
from softsm.timing_model.lower import Lowering
from softsm.timing_model.machine import ARRIVAL, BAR, WAIT

PTX_LINES = {1: 0, 2: 1, 3: 1, 4: 2}  # a loop of one block (1) between two others
BLOCKS = Blocks([0, 1, 3], PTX_LINES, [1, 2, 3, 4], [], loops=[0, 1, 0])


def code(rows: list[tuple[int, str]]) -> sass.Code:
    text = "".join(
        f'\t//## File ".nv_debug_ptx_txt", line {line}\n        /*{16 * n:04x}*/                   {ins} ;\n'
        for n, (line, ins) in enumerate(rows)
    )
    return sass.read(text, "")


def test_a_loop_that_the_assembler_unrolled_whole_is_issued_once() -> None:
    turns = [(2, "FADD R1, R1, R3"), (3, "BAR.SYNC 0x0")] * 10
    found = code([(1, "MOV R1, R2"), *turns, (4, "EXIT")])
    assert len(found.blocks) == 1
    lowering = Lowering(found, BLOCKS)
    path = lowering._path([0, *[1] * 10, 2], [*range(11), 10], [(3, BAR)] * 10)
    assert path.instructions.tolist() == list(range(22))
    assert [n for n, e in enumerate(path.events.tolist()) if e >= 0] == list(range(2, 22, 2))


def test_a_loop_of_the_machine_code_is_issued_turn_by_turn() -> None:
    rows = [(1, "MOV R1, R2"), *[(2, "FADD R1, R1, R3")] * 20, (3, "@P0 BRA `(.L_x_0)"), (4, "EXIT")]
    text = "".join(
        (".L_x_0:\n" if n == 1 else "")
        + f'\t//## File ".nv_debug_ptx_txt", line {line}\n        /*{16 * n:04x}*/ {ins} ;\n'
        for n, (line, ins) in enumerate(rows)
    )
    lowering = Lowering(sass.read(text, ""), BLOCKS)
    path = lowering._path([0, 1, 1, 1, 2], [0] * 5, [])
    assert len(path.instructions) == 1 + 3 * 21 + 1


def test_a_loop_unrolled_without_a_single_turn_beside_it_is_issued_by_turns() -> None:
    """Before the loop stands its first turn, and the code before it. Of 17 turns the machine code has one, then eight
    at a time."""
    turn = [(n, f"{op} R1, R1, R3") for n, op in zip(range(2, 12), ("FADD", "FMUL", "LOP3", "SHF", "PRMT") * 2)]
    rows = [*[(1, "MOV R1, R2")] * 4, *turn, *turn * 8, (12, "@P0 BRA `(.L_x_0)"), (13, "EXIT")]
    text = "".join(
        (".L_x_0:\n" if n == 14 else "")
        + f'\t//## File ".nv_debug_ptx_txt", line {line}\n        /*{16 * n:04x}*/ {ins} ;\n'
        for n, (line, ins) in enumerate(rows)
    )
    lines = {1: 0, **dict.fromkeys(range(2, 13), 1), 13: 2}
    lowering = Lowering(sass.read(text, ""), Blocks([0, 1, 12], lines, sorted(lines), [], loops=[0, 1, 0]))
    path = lowering._path([0, *[1] * 16, 2], [0] * 18, [])
    assert len(path.instructions) == 14 + 2 * 81 + 1
    last = lowering._path([0, *[1] * 17, 2], [0] * 19, [])
    assert len(last.instructions) == 14 + 2 * 81 + 11 + 1


def test_a_rest_that_is_cut_where_the_machine_code_jumps_over_a_load_is_told_by_its_loads() -> None:
    """Four turns, then two, then one that jumps over its load: it is in three pieces, none of which is a turn."""
    turn = [(2, "LDG.E R4, [R2.64]"), *[(n, f"{op} R1, R1, R3") for n, op in zip((3, 4, 5), ("FADD", "FMUL", "SHF"))]]
    one = [*[(3, "FADD R1, R1, R3")] * 7, (2, "@P1 BRA `(.L_x_1)"), turn[0], *turn[1:] * 2]
    rows = [
        (1, "MOV R1, R2"),
        *turn * 4,
        (6, "@P0 BRA `(.L_x_0)"),
        *turn * 2,
        (6, "@P2 BRA `(.L_x_2)"),
        *one,
        (7, "EXIT"),
    ]
    labels = {1: ".L_x_0:\n", len(rows) - 7: ".L_x_1:\n", len(rows) - 1: ".L_x_2:\n"}
    text = "".join(
        labels.get(n, "") + f'\t//## File ".nv_debug_ptx_txt", line {line}\n        /*{16 * n:04x}*/ {ins} ;\n'
        for n, (line, ins) in enumerate(rows)
    )
    lines = {1: 0, **dict.fromkeys(range(2, 7), 1), 7: 2}
    lowering = Lowering(sass.read(text, ""), Blocks([0, 1, 6], lines, sorted(lines), [], loops=[0, 1, 0]))
    assert list(lowering.parts[1]) == [4, 2, 1]
    path = lowering._path([0, *[1] * 7, 2], [0] * 9, [])
    loads = [i for i in path.instructions.tolist() if lowering.code.instructions[i].opcode == "LDG.E"]
    assert len(loads) == 7


def test_copies_that_are_cut_at_every_load_are_told_by_the_jumps_between_them() -> None:
    """A turn loads, if its predicate is true, and stores: ptxas jumps over each load and meets the other way at a
    BSYNC. Four turns are a loop, then there are two, then one, each behind a jump over it."""

    def turns(count: int, first: int) -> str:
        out = ""
        for n in range(first, first + count):
            out += row(2, f"BSSY B0, `(.L_x_{n})") + row(2, f"@P1 BRA `(.L_x_{n})") + row(2, "LDG.E R4, [R2.64]")
            out += f".L_x_{n}:\n" + row(2, "BSYNC B0") + row(3, "FADD R4, R4, R3") + row(4, "@!P1 STG.E [R6.64], R4")
        return out

    made = [0]

    def row(line: int, ins: str) -> str:
        made[0] += 1
        return f'\t//## File ".nv_debug_ptx_txt", line {line}\n        /*{16 * made[0]:04x}*/ {ins} ;\n'

    text = row(1, "MOV R1, R2") + ".L_x_20:\n" + turns(4, 0) + row(5, "@P0 BRA `(.L_x_20)")
    text += row(5, "@P2 BRA `(.L_x_21)") + turns(2, 4)
    text += ".L_x_21:\n" + row(5, "@P3 BRA `(.L_x_22)") + turns(1, 6) + ".L_x_22:\n" + row(6, "EXIT")
    lines = {1: 0, **dict.fromkeys(range(2, 6), 1), 6: 2}
    lowering = Lowering(sass.read(text, ""), Blocks([0, 1, 6], lines, sorted(lines), [], loops=[0, 1, 0]))
    assert list(lowering.parts[1]) == [4, 2, 1]
    path = lowering._path([0, *[1] * 15, 2], [0] * 17, [])
    issued = [lowering.code.instructions[i].opcode for i in path.instructions.tolist()]
    assert issued.count("LDG.E") == issued.count("STG.E") == 15
    first, second = (issued.index(op) for op in ("LDG.E", "STG.E"))
    assert first < second < issued.index("LDG.E", first + 1)


def test_instructions_of_one_line_are_no_copies_of_a_loop() -> None:
    """Inline PTX has many instructions in a line: that an opcode is there ten times does not make it ten turns."""
    rows = [(n, f"{op} R1, R1") for n in range(2, 12) for op in ("MUFU.EX2", "FMUL") for _ in range(10)]
    rows = [(1, "MOV R1, R2"), *rows, (12, "@P0 BRA `(.L_x_0)"), (13, "EXIT")]
    text = "".join(
        (".L_x_0:\n" if n == 1 else "")
        + f'\t//## File ".nv_debug_ptx_txt", line {line}\n        /*{16 * n:04x}*/ {ins} ;\n'
        for n, (line, ins) in enumerate(rows)
    )
    lines = {1: 0, **dict.fromkeys(range(2, 13), 1), 13: 2}
    blocks = Blocks([0, 1, 12], lines, sorted(lines), [], loops=[0, 1, 0], crowded=set(range(2, 12)))
    path = Lowering(sass.read(text, ""), blocks)._path([0, *[1] * 16, 2], [0] * 18, [])
    assert len(path.instructions) == 1 + 16 * 201 + 1


def test_a_wait_belongs_to_its_first_try_not_to_the_second_behind_all_other_code() -> None:
    """The first try has a neighbour's line. Another wait's first try is a short block too, but asks something else."""
    rows = [
        (1, "SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR25], R71"), (1, "@!P2 BRA `(.L_x_5)"),
        (3, "SYNCS.ARRIVE.TRANS64 RZ, [UR25+0x8], R2"), (3, "@!P1 BRA `(.L_x_6)"),
        (3, "SYNCS.PHASECHK.TRANS64.TRYWAIT P4, [UR25+0x10], R71"), (3, "@!P4 BRA `(.L_x_7)"), (3, "EXIT"),
        (2, "SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR25], R71"), (2, "@!P2 BRA `(.L_x_5)"), (2, "EXIT"),
    ]  # fmt: skip
    lowering = Lowering(code(rows), Blocks([0], {1: 0, 2: 0, 3: 0}, [1, 2, 3], [], loops=[0]))
    path = lowering._path([0], [0], [(2, WAIT), (3, ARRIVAL)])
    placed = [path.instructions[n] for n, e in enumerate(path.events.tolist()) if e >= 0]
    assert placed == [0, 2]


def test_loops_around_a_loop_that_became_one_do_not_unroll_it() -> None:
    """PTX has two loops around a third; the machine code has one loop around the innermost."""
    rows = [
        (1, "MOV R1, R2"),
        *[(2, "IADD3 R4, R4, 0x1, RZ")] * 3,
        *[(3, "FADD R1, R1, R3")] * 20,
        (3, "@P0 BRA `(.L_x_1)"),
        (4, "@P1 BRA `(.L_x_0)"),
        (5, "EXIT"),
    ]
    text = "".join(
        (".L_x_0:\n" if n == 1 else ".L_x_1:\n" if n == 4 else "")
        + f'\t//## File ".nv_debug_ptx_txt", line {line}\n        /*{16 * n:04x}*/ {ins} ;\n'
        for n, (line, ins) in enumerate(rows)
    )
    blocks = Blocks([0, 1, 2, 3, 4], {n + 1: n for n in range(5)}, [1, 2, 3, 4, 5], [], loops=[0, 2, 3, 2, 0])
    path = Lowering(sass.read(text, ""), blocks)._path([0, 1, 2, 2, 2, 3, 1, 2, 3, 4], [0] * 10, [])
    assert sum(3 < i < 25 for i in path.instructions.tolist()) == 4 * 21


def test_a_second_try_whose_phase_is_in_another_register_is_no_wait() -> None:
    """Behind the end of the program: the phase once more, and the same question. The wait is at the first one, before
    the product that follows it; at the second it would come after it, and a ring would have a slot more."""
    wait = "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR17+0x16000]"
    rows = [
        (1, "MOV R1, R2"),
        (2, "IADD3 R22, R22, 0x1, RZ"),
        (2, f"{wait}, R22"),
        (2, "@!P0 BRA `(.L_x_1)"),
        *[(3, "FADD R1, R1, R3")] * 8,
        (3, "@P1 BRA `(.L_x_0)"),
        (4, "EXIT"),
        (3, "IMAD.U32 R18, RZ, RZ, UR9"),
        (3, f"{wait}, R18"),
        (3, "@!P0 BRA `(.L_x_1)"),
    ]
    text = "".join(
        {1: ".L_x_0:\n", 14: ".L_x_1:\n"}.get(n, "")
        + f'\t//## File ".nv_debug_ptx_txt", line {line}\n        /*{16 * n:04x}*/ {ins} ;\n'
        for n, (line, ins) in enumerate(rows)
    )
    lowering = Lowering(sass.read(text, ""), BLOCKS)
    path = lowering._path([0, 1, 1, 2], [0, 0, 1, 2], [(3, WAIT)] * 2)
    at = [path.instructions.tolist()[n] for n, e in enumerate(path.events.tolist()) if e >= 0]
    assert at == [2, 2]
