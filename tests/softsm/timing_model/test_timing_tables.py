"""The figures of benchmarks/timing_tables.py, by which predictions are judged."""

import importlib
import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).parents[3] / "benchmarks" / "timing_tables.py"


def tau(*rows: tuple[float, float]) -> float:
    """Return the concordance of (measured, predicted) times of variants of one problem."""
    found = importlib.util.spec_from_file_location("timing_tables", PATH)
    assert found is not None and found.loader is not None
    tables = importlib.util.module_from_spec(found)
    found.loader.exec_module(tables)
    return tables.concordance([("case", *row) for row in rows], lambda a, b: True)[0]


def test_a_pair_that_is_predicted_to_be_equal_is_neither_right_nor_wrong() -> None:
    assert tau((1, 1), (2, 2)) == tau((2, 2), (1, 1)) == 1
    assert tau((1, 2), (2, 1)) == tau((2, 1), (1, 2)) == -1
    assert tau((1, 5), (2, 5)) == tau((2, 5), (1, 5)) == 0


def test_pairs_within_five_percent_do_not_count() -> None:
    assert tau((1, 1), (1.04, 0.5)) == 0


def test_every_problem_of_the_table_of_peers_is_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PATH.parent))
    cases, tables = (importlib.import_module(name) for name in ("timing_cases", "timing_tables"))
    assert {peer[0] for peer in tables.PEERS} <= {case.name for case in cases.BLACKWELL}
