"""Errors are made in one process and read in another: multiprocessing, pytest-xdist."""

import pickle

import pytest

from softsm.errors import Deadlock, Fault, PtxError, StepBudget, Unsupported


@pytest.mark.parametrize("error", [
    Fault("out-of-bounds", "load of 4 bytes"), Deadlock("no warp can make progress"), StepBudget("used up"),
    PtxError("expected a register", 3, 5), Unsupported("no such instruction", 7, 1),
], ids=lambda e: type(e).__name__)  # fmt: skip
def test_errors_can_be_pickled(error):
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error) and str(back) == str(error) and vars(back) == vars(error)
