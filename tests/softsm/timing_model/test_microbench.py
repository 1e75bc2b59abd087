"""The microbenchmarks are legal programs: assembled for sm_90a, and run to their end by softsm."""

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks" / "microbench"


@pytest.mark.slow
def test_a_group_is_assembled_and_runs_in_softsm() -> None:
    command = [sys.executable, str(FOLDER), "--check", "--groups", "clock"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 errors" in done.stdout and done.stdout.rstrip().endswith("kernels, 0 failures")


PRODUCTS = {
    "interval RS N=128": "ptxas gives products the line of their fence, which stands behind a label",
    "interval fp8 SS N=128": "FP8 products have an opcode of their own",
    "group of 4, wait 0, SS N=64": "the loop is unrolled by four, with copies for two turns and for one",
    "group of 1, wait 0, SS N=64": "the copy for one turn has five instructions",
    "shfl beside N=128 SS": "shuffles take nothing of the shared-memory port",
    "imad beside N=64 SS": "instructions at half rate do not hold products up",
    "iadd3 beside N=64 SS": "two of them in turn, on two pipes, do",
    "8 products N=64, softmax x 6, 4 products N=128, 2 warpgroups": "products of a warpgroup stay together",
}


@pytest.fixture(scope="module")
def predicted() -> dict[str, str]:
    """The lines of the table by the names of its rows: what `--predict` prints, in this process."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        from model import table

        lines = table(list(PRODUCTS)).splitlines()[1:]
    for name in set(sys.modules) - before:  # `memory`, `model`, ...: names that others may have
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(FOLDER)):
            del sys.modules[name]
    return {name: line for name in PRODUCTS for line in lines if line.startswith(name)}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.compile
def test_the_model_gives_back_the_products_that_were_measured(name, predicted) -> None:
    row = predicted[name]
    assert abs(float(row.rstrip("%").split()[-1])) <= 6, f"{row}: {PRODUCTS[name]}"
