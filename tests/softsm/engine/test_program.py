"""The state of a warp: its fields, and the numbers by which compiled code finds them."""

from softsm.engine import program as pg


def test_every_number_is_that_of_its_field():
    numbers = {name: x for name, x in vars(pg).items() if name.startswith("S_")}
    fields = pg.WARP_STATE.fields
    assert fields is not None and {f"S_{name.upper()}" for name in fields} == set(numbers)
    assert all(8 * x == fields[name[2:].lower()][1] for name, x in numbers.items())


def test_the_checker_fills_ten_fields_at_once():
    """checks/checker.py writes them in this order."""
    names = ["races", "shadow", "global_shadow", "clock", "known", "next_op", "slot", "slot0", "index", "warps"]
    first = list(pg.WARP_STATE.names).index("races")
    assert list(pg.WARP_STATE.names)[first : first + 10] == names
