"""The kernel that makes compressed rows of states in an engine's pages, through softsm."""

import launches
import paged_states
import pytest

from dsv4.compress.pages import compress_pages
from dsv4.kernels.compat import TRITON_VERSION

BLACKWELL = pytest.param(
    "sm_100a",
    marks=[
        pytest.mark.slow,
        pytest.mark.skipif(TRITON_VERSION < (3, 9), reason="softsm's Blackwell needs triton >= 3.9"),
    ],
)


@pytest.mark.parametrize("arch", ["sm_90a", BLACKWELL])
@pytest.mark.parametrize("kind", ["csa", pytest.param("hca", marks=pytest.mark.slow), "indexer"])
def test_rows_are_those_of_every_request_alone(arch, kind):
    def run(**given):
        with launches.race_free(arch):
            compress_pages(**given, backend="softsm")

    paged_states.assert_rows(kind, run)
