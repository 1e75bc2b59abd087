"""Random problems (tests/dsv4/any_problem.py) on the CPU, and in softsm on both architectures."""

import launches
import pytest
from any_problem import DIMS, SEED, Problem

from dsv4 import suites


def test_on_a_cpu():
    """The same problems for the cpu backend; and proof that they are fair."""
    for seed in range(SEED, SEED + 30):
        problem = Problem(seed, suites.Where("cpu"))
        assert not (wrong := problem.wrong()), f"DSV4_SEED={seed} {problem}: {wrong}"


@pytest.mark.slow
@pytest.mark.parametrize("n", range(12))
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_in_softsm(arch, n, monkeypatch):
    """Half of them on a GPU with two SMs, so that CTAs loop over work tiles."""
    softsm = pytest.importorskip("softsm")
    if n % 2:
        launches.num_sms(monkeypatch, 2)
    problem = Problem(SEED + n, suites.Where("softsm", arch), DIMS[n % 4 : n % 4 + 1])
    with softsm.checking(races=n % 3 == 0, order=("latest", "random")[n % 2], seed=SEED) as report:
        wrong = problem.wrong()
    assert not wrong and not report, f"DSV4_SEED={SEED + n} {problem}: {wrong} {report}"
