"""The gradients of v4_attention by the Hopper kernels, through softsm, against the fp64 formulas."""

from dataclasses import replace

import pytest
import torch
from v4_gradients import check, request

import softsm
from dsv4.kernels.shared.v4 import backward as shared
from dsv4.kernels.sm90.v4 import backward


def run(b):
    with softsm.use("sm_90a"):
        backward.backward(b)


@pytest.mark.slow
def test_window_alone():
    b, want, low = request(3, 64, (90, 70))
    run(b)
    check(b, want, low)


@pytest.mark.parametrize("deterministic", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_two_pools_rotation_and_the_gradient_of_the_lse(deterministic):
    """Quickly, the deterministic one; the other is the quick one of the Blackwell kernel."""
    b, want, low = request(3, 40, (50, 70), (30, 40), rope=64, dlse=True, deterministic=deterministic)
    run(b)
    check(b, want, low)


@pytest.mark.slow
def test_two_tiles_of_heads_and_rows_by_block_table():
    for deterministic in (False, True):
        b, want, low = request(3, 80, (90, 128), sink=False, paged=True, rope=96, deterministic=deterministic)
        run(b)
        check(b, want, low)


@pytest.mark.slow
def test_deterministic_in_parts(monkeypatch):
    """One query at a time is held, and twice the same bits; lists of more than fold_rows takes at a time."""
    b, want, low = request(4, 16, (9, 140), deterministic=True)
    monkeypatch.setattr(shared, "STORED_BYTES", 0)
    run(b)
    check(b, want, low)
    first = b.dwindow.clone()
    run(b)
    assert torch.equal(b.dwindow, first)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["latest", "eager", "random"])
def test_no_race_whenever_copies_and_products_complete(order):
    """Eight blocks, so that every barrier goes round several times."""
    b, want, low = request(2, 64, (90, 400), (30, 70))
    with softsm.use("sm_90a"), softsm.checking(races=True, order=order, seed=7) as report:
        backward.backward(b)
    assert "nothing found" in str(report), str(report)
    check(b, want, low)


def test_what_the_kernels_do_not_take_is_said():
    b, _, _ = request(2, 8, (20, 9))
    assert backward.supports(b) is None
    assert "float16" in backward.supports(replace(b, forward=replace(b.forward, q=b.forward.q.half())))
