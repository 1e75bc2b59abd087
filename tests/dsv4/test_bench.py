"""What `dsv4 bench` says, from recorded measurements: the README's table is theirs, and the arithmetic is right."""

import json
from pathlib import Path

import pytest
import typer

from dsv4 import bench as measuring
from dsv4.commands import bench

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "benchmarks/results/h200.json").read_text())
README = (ROOT / "README.md").read_text()


def test_the_table_in_the_readme_is_the_recorded_one():
    assert bench.replaced(README, RECORD) == README, (
        "run: dsv4 bench --from benchmarks/results/h200.json --write README.md"
    )


def test_a_file_without_marks_is_refused():
    with pytest.raises(typer.BadParameter, match="no marks"):
        bench.replaced("nothing here", RECORD)


def test_every_case_was_recorded_and_won_or_lost_against_a_peer():
    assert [c["case"] for c in RECORD["cases"]] == [c.name for c in measuring.CASES]
    for case in RECORD["cases"]:
        assert case["microseconds"]["dsv4"] > 0 and bench.best_peer(case) in case["microseconds"]


def test_flops_and_bytes_of_a_case():
    full = measuring.BenchCase("x", 2, 4, 4, 8, 8, 64)
    assert full.flops == 4 * 2 * 4 * 8 * 8 * 64
    assert full.bytes == 2 * 2 * 64 * (2 * 8 * 4 + 2 * 8 * 4)
    causal = measuring.BenchCase("x", 1, 1, 1, 3, 5, 64, causal=True)  # queries see 3, 4 and 5 keys
    assert causal.flops == 4 * 12 * 64
    assert measuring.BenchCase("x", 1, 1, 1, 1, 5, 64, same_kv=True).bytes == 2 * 64 * (5 + 2)


def test_without_a_gpu_it_says_so():
    import torch
    from typer.testing import CliRunner

    from dsv4.cli import app

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    result = CliRunner().invoke(app, ["bench"])
    assert result.exit_code == 2 and "needs a GPU" in result.output


def test_a_record_that_is_none_is_refused_in_words(tmp_path):
    from typer.testing import CliRunner

    from dsv4.cli import app

    (tmp_path / "text").write_text("no JSON")
    (tmp_path / "other").write_text("[1]")
    for name in ("text", "other", "absent"):
        result = CliRunner().invoke(app, ["bench", "--from", str(tmp_path / name)])
        assert result.exit_code == 2 and f"dsv4 bench: {tmp_path / name}: " in result.output


def test_a_case_without_peer_or_result_is_no_row():
    lone = RECORD | {"cases": [{"case": "x", "microseconds": who} for who in ({}, {"dsv4": 1.0}, {"torch": 1.0})]}
    assert bench.markdown(lone).endswith("|---|---|---|---|---|---|")


def test_two_ctas_are_a_row_of_their_own():
    times = {"dsv4": 4.0, "dsv4 aot": 4.5, "dsv4 aot, two CTAs": 5.0, "torch": 20.0}
    case = {"case": "prefill", "microseconds": times, "tflops": {who: 100 / us for who, us in times.items()},
            "terabytes_per_second": {}}  # fmt: skip
    lines = bench.markdown(RECORD | {"cases": [case], "aot_triton": "3.9.0"}).splitlines()
    assert lines[-2:] == [
        "| prefill | 4 us | 25 TFLOP/s | torch | 20 us | 5.00x |",
        "| prefill, two CTAs (Triton 3.9.0 cubin) | 5 us | 20 TFLOP/s | torch | 20 us | 4.00x |",
    ]
