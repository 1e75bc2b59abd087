"""Triton and Gluon programs run whole: compiled for a target, executed by softsm on CPU tensors."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns when it is unset

import pytest
import torch

import softsm


@pytest.fixture(params=["sm_90a", "sm_100a"])
def sm(request):
    """softsm in use, for each target in turn."""
    with softsm.use(request.param):
        torch.manual_seed(0)
        yield request.param


@pytest.fixture
def sm90():
    with softsm.use("sm_90a"):
        torch.manual_seed(0)
        yield "sm_90a"


@pytest.fixture
def sm100():
    with softsm.use("sm_100a"):
        torch.manual_seed(0)
        yield "sm_100a"
