"""benchmarks/softsm_time: the figures by which predictions are judged, and the cases that were recorded."""

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return lambda name: importlib.import_module(f"softsm_time.{name}")


@pytest.fixture
def tables(load) -> ModuleType:
    return load("tables")


def tau(tables: ModuleType, *rows: tuple[float, float]) -> float:
    """Return the concordance of (measured, predicted) times of variants of one problem."""
    return tables.concordance([("case", *row) for row in rows], lambda a, b: True)[0]


def test_a_pair_that_is_predicted_to_be_equal_is_neither_right_nor_wrong(tables: ModuleType) -> None:
    assert tau(tables, (1, 1), (2, 2)) == tau(tables, (2, 2), (1, 1)) == 1
    assert tau(tables, (1, 2), (2, 1)) == tau(tables, (2, 1), (1, 2)) == -1
    assert tau(tables, (1, 5), (2, 5)) == tau(tables, (2, 5), (1, 5)) == 0


def test_pairs_within_five_percent_do_not_count(tables: ModuleType) -> None:
    assert tau(tables, (1, 1), (1.04, 0.5)) == 0


def test_every_problem_of_the_table_of_peers_is_a_case(load, tables: ModuleType) -> None:
    assert {peer[0] for peer in tables.PEERS} <= {case.name for case in load("development").BLACKWELL}


@pytest.mark.parametrize("record", ["drawn-1818", "drawn-1919", "own-1620", "sixth", "seventh"])
def test_what_was_recorded_is_drawn_again(load, record: str) -> None:
    name, _, seed = record.partition("-")
    cases = load(name).draw(int(seed)) if seed else load(f"users.{name}").CASES
    recorded = json.loads((BENCHMARKS / f"results/timing/{record}-predicted.json").read_text())["cases"]
    assert sorted(recorded) == sorted(case.name for case in cases)
