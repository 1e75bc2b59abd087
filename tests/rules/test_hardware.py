"""What an H200 answered where PTX is silent (benchmarks/results/rules-h200.json): softsm answers the same."""

import importlib.util
import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
RECORD = {row["name"]: row for row in json.loads((FOLDER / "results" / "rules-h200.json").read_text())["rows"]}


@pytest.fixture(scope="module")
def answers():
    spec = importlib.util.spec_from_file_location("hardware_rules", FOLDER / "microbench" / "rules.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {row["name"]: row for row in module.rows(module.Machine())}


def test_answers_are_those_of_the_record(answers):
    assert list(answers) == list(RECORD)
    for name, row in answers.items():
        measured = {key: value for key, value in RECORD[name].items() if key != "tried"}  # softsm tries fewer
        assert {key: value for key, value in row.items() if key != "tried"} == measured


def test_equal_lanes_are_one_operation_each():
    assert {RECORD[f"32 lanes, one {how} reduction"]["adds"] for how in ("bulk", "tensor")} == {32}


def test_nothing_went_wrong_in_a_large_number_of_tries():
    counted = [row for row in RECORD.values() if "wrong" in row]
    assert len(counted) == 7 and all(row["wrong"] == 0 and row["tried"] > 10**8 for row in counted)
