"""How many iterations of a loop a piece of machine code performs."""

from softsm.timing_model import sass
from softsm.timing_model.blocks import Blocks
from softsm.timing_model.lower import Lowering
from softsm.timing_model.machine import BAR


def code(rows: list[tuple[int, str]], labels: dict[int, str]) -> sass.Code:
    """rows: PTX line and instruction; labels: by the number of the row that they precede."""
    return sass.read(
        "".join(
            (f"{labels[n]}:\n" if n in labels else "")
            + f'\t//## File ".nv_debug_ptx_txt", line {line}\n        /*{16 * n:04x}*/ {ins} ;\n'
            for n, (line, ins) in enumerate(rows)
        ),
        "",
    )


def filter_step(offset: int) -> list[tuple[int, str]]:
    return [(2, f"LDG.E R4, [R2.64+{offset}]"), (3, "FMUL R5, R4, R6"), (4, f"STG.E [R8.64+{offset}], R5")]


def test_loads_and_stores_tell_the_iterations_where_moves_and_counters_hide_them() -> None:
    """ptxas unrolls by four; a single iteration has as many moves and counters as four, so it is hardly shorter."""
    moves = [(n, "MOV R1, R2") for n in (5, 6, 7)] * 2
    turns = [row for k in range(4) for row in filter_step(4 * k)]
    rows = [(1, "MOV R1, R2"), *turns, *moves, (5, "@P0 BRA `(.L_x_0)"), *filter_step(0), *moves, (8, "EXIT")]
    lines = {1: 0, **dict.fromkeys(range(2, 8), 1), 8: 2}
    for width, counted in ((4, [4, 1]), (8, [2, 1])):
        blocks = Blocks([0, 1, 7], lines, sorted(lines), [], loops=[0, 1, 0], widths={2: width, 4: width})
        assert list(Lowering(code(rows, {1: ".L_x_0"}), blocks).parts[1]) == counted


def test_tests_between_copies_are_no_copy() -> None:
    """Behind four turns a block of six instructions with the loop's lines tests whether others follow."""
    between = [*[(2, "ULDC UR4, c[0x0][0x210]")] * 5, (4, "@P1 EXIT")]
    rows = [
        (1, "MOV R1, R2"),
        *filter_step(0) * 4,
        (4, "@P0 BRA `(.L_x_0)"),
        *between,
        *filter_step(0) * 2,
        (5, "EXIT"),
    ]
    lines = {1: 0, 2: 1, 3: 1, 4: 1, 5: 2}
    blocks = Blocks([0, 1, 4], lines, sorted(lines), [], loops=[0, 1, 0], widths={2: 4, 4: 4})
    assert list(Lowering(code(rows, {1: ".L_x_0"}), blocks).parts[1]) == [4, 2, 1]


def test_one_product_is_a_copy_of_four() -> None:
    """Its block is shorter than others that count as copies: products have no instructions beside them."""
    turn = [
        (2, "WARPGROUP.ARRIVE"),
        (2, "HGMMA.64x64x16.F32 R24, gdesc[UR8], R24, gsb0"),
        (3, "WARPGROUP.DEPBAR.LE gsb0, 0x0"),
    ]
    rows = [
        (1, "MOV R1, R2"),
        *turn * 4,
        (4, "@P0 BRA `(.L_x_0)"),
        (4, "@P1 BRA `(.L_x_1)"),
        *turn * 2,
        (4, "@P2 BRA `(.L_x_2)"),
        *turn,
        (5, "EXIT"),
    ]
    lines = {1: 0, 2: 1, 3: 1, 4: 1, 5: 2}
    blocks = Blocks([0, 1, 4], lines, sorted(lines), [], loops=[0, 1, 0], widths={})
    labels = {1: ".L_x_0", 22: ".L_x_1", 25: ".L_x_2"}
    found = Lowering(code(rows, labels), blocks).parts[1]
    assert {n: sum("HGMMA" in rows[i][1] for i in made) for n, made in found.items()} == {4: 4, 1: 1}


def test_a_loop_of_known_length_is_counted_by_its_loads() -> None:
    """Of sixteen loads that ptxas put first, most other instructions are only a third as frequent."""
    compare = [
        (3, "ISETP.LT.AND P0, PT, R1, R2, PT"),
        (3, "ISETP.GT.AND P1, PT, R1, R2, PT"),
        (4, "SEL R3, R4, R5, P0"),
    ]
    rows = [(1, "MOV R1, R2"), *[(2, "LDG.E R1, [R2.64]")] * 16, *compare * 5, (5, "@P0 BRA `(.L_x_0)"), (6, "EXIT")]
    lines = {1: 0, **dict.fromkeys(range(2, 6), 1), 6: 2}
    blocks = Blocks([0, 1, 5], lines, sorted(lines), [], loops=[0, 1, 0], widths={2: 4})
    lowering = Lowering(code(rows, {1: ".L_x_0"}), blocks)
    path = lowering._path([0, *[1] * 32, 2], [0] * 34, [])
    assert sum(rows[i][0] == 2 for i in path.instructions.tolist()) == 32


def test_the_end_of_the_last_copy_may_be_in_a_block_with_the_code_behind_the_loop() -> None:
    """Two turns, then one, each of which jumps over its load; the last store is in a block with the end of the code."""

    def turn(here: str) -> list[tuple[int, str]]:
        return [(2, f"@P1 BRA `({here})"), (2, "LDG.E R4, [R2.64]"), (2, "BSYNC B0"), (3, "STG.E [R8.64], R4")]

    rows = [(1, "MOV R1, R2"), *turn(".L_x_1"), *turn(".L_x_2"), (4, "@P0 BRA `(.L_x_0)"), *turn(".L_x_3"), (5, "EXIT")]
    labels = {1: ".L_x_0", 3: ".L_x_1", 7: ".L_x_2", 12: ".L_x_3"}
    lines = {1: 0, 2: 1, 3: 1, 4: 1, 5: 2}
    lowering = Lowering(code(rows, labels), Blocks([0, 1, 4], lines, sorted(lines), [], loops=[0, 1, 0]))
    assert list(lowering.parts[1]) == [2, 1]
    path = lowering._path([0, *[1] * 4, 2], [0] * 6, [])
    loads, stores = (sum(rows[i][1].startswith(op) for i in path.instructions.tolist()) for op in ("LDG", "STG"))
    assert (loads, stores) == (4, 4)


def test_a_first_test_before_a_loop_runs_once() -> None:
    """`while` of a condition with a barrier: ptxas tests before the loop whether it begins, and at the end of each
    turn whether another one follows."""
    test = [(2, "BAR.SYNC 0x0"), (3, "LDS R1, [R2]"), (4, "ISETP.GE.AND P4, PT, R1, 0x1, PT")]
    rows = [(1, "MOV R1, R2"), *test, (4, "@P4 BRA `(.L_x_0)"), (5, "SHF.R R9, R2"), *test, (4, "@P4 BRA `(.L_x_1)"),
            (6, "EXIT")]  # fmt: skip
    lines = {1: 0, 2: 1, 3: 1, 4: 1, 5: 2, 6: 3}
    blocks = Blocks([0, 1, 4, 5], lines, sorted(lines), [], loops=[0, 1, 1, 0])
    lowering = Lowering(code(rows, {5: ".L_x_1", 10: ".L_x_0"}), blocks)
    turns = 7  # of the body; the condition runs once more
    path = lowering._path(
        [0, *[1, 2] * turns, 1, 3],
        [*[0, 0], *[n for k in range(turns) for n in (k + 1,) * 2], turns + 1],
        [(2, BAR)] * (turns + 1),
    )
    ran = path.instructions.tolist()
    assert len(ran) == 5 + turns * 5 + 1
    assert [n for n, e in enumerate(path.events.tolist()) if e >= 0] == [
        n for n, i in enumerate(ran) if rows[i][0] == 2
    ]


def test_what_was_moved_before_a_loop_runs_once_for_each_entry() -> None:
    turn = [(n, f"{op} R1, R1, R3") for n, op in zip(range(2, 8), ("FADD", "FMUL", "LOP3") * 2)]
    before = [(1, "MOV R1, R2"), (2, "@P0 BRA `(.L_x_1)"), (3, "ULDC UR4, c[0x0][0x210]")]
    rows = [*before, *turn, (7, "@P0 BRA `(.L_x_0)"), (8, "EXIT")]
    lines = {1: 0, **dict.fromkeys(range(2, 8), 1), 8: 2}
    lowering = Lowering(
        code(rows, {3: ".L_x_0", 10: ".L_x_1"}), Blocks([0, 1, 7], lines, sorted(lines), [], loops=[0, 1, 0])
    )
    path = lowering._path([0, *[1] * 9, 0, *[1] * 9, 2], [0] * 21, [])
    assert path.instructions.tolist().count(2) == 2
    assert path.instructions.tolist().count(3) == 18
