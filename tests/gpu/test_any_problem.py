"""Random problems (tests/dsv4/any_problem.py, any_v4_problem.py) on a GPU."""

import any_problem
import any_v4_problem
import pytest

from dsv4 import suites

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(suites.gpu_arch() is None, reason="needs a GPU that dsv4 has kernels for"),
]


@pytest.mark.parametrize("group", range(16))
def test_fmha(group):
    for seed in range(any_problem.SEED + 12 * group, any_problem.SEED + 12 * (group + 1)):
        problem = any_problem.Problem(seed, suites.Where("cuda").resolve(), any_problem.DIMS[group % 4 : group % 4 + 1])
        assert not (wrong := problem.wrong()), f"DSV4_SEED={seed} {problem}: {wrong}"


@pytest.mark.parametrize("group", range(8))
def test_v4(group):
    for seed in range(any_v4_problem.SEED + 12 * group, any_v4_problem.SEED + 12 * (group + 1)):
        problem = any_v4_problem.Problem(seed, suites.Where("cuda").resolve())
        assert not (wrong := problem.wrong()), f"DSV4_SEED={seed} {problem}: {wrong}"
