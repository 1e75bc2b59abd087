"""The gradients of v4_attention by the Blackwell kernel, through softsm, against the fp64 formulas."""

import pytest
from v4_gradients import FP16, check, request

import softsm
from dsv4.kernels.sm100.v4 import backward


def run(b):
    with softsm.use("sm_100a"):
        backward.backward(b)


@pytest.mark.parametrize("deterministic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_pools_rotation_and_the_gradient_of_the_lse(deterministic):
    b, want, low = request(3, 40, (50, 70), (30, 40), rope=64, dlse=True, deterministic=deterministic)
    run(b)
    check(b, want, low)


@pytest.mark.slow
def test_two_tiles_of_heads_and_rows_by_block_table():
    for deterministic in (False, True):
        b, want, low = request(3, 80, (90, 128), sink=False, paged=True, rope=96, deterministic=deterministic)
        run(b)
        check(b, want, low)


@pytest.mark.parametrize("deterministic", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("order", ["latest", *(pytest.param(o, marks=pytest.mark.slow) for o in ("eager", "random"))])
def test_fp16_without_a_race(order, deterministic):
    b, want, low = request(2, 40, (50, 130), (30, 40), rope=64, dlse=True, dtype=FP16, deterministic=deterministic)
    with softsm.use("sm_100a"), softsm.checking(races=True, order=order, seed=7) as report:
        backward.backward(b)
    assert "nothing found" in str(report), str(report)
    check(b, want, low)


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("size", [2.0**-12, 2.0**9])
def test_fp16_of_gradients_that_are_small_or_large(size, deterministic):
    b, want, low = request(3, 80, (50, 70), (30, 40), dlse=True, dtype=FP16, size=size, deterministic=deterministic)
    run(b)
    check(b, want, low)


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("order", ["latest", "eager", "random"])
def test_no_race_whenever_copies_and_products_complete(order, deterministic):
    """Eight blocks, so that every barrier goes round several times."""
    b, want, low = request(2, 64, (90, 400), (30, 70), deterministic=deterministic)
    with softsm.use("sm_100a"), softsm.checking(races=True, order=order, seed=7) as report:
        backward.backward(b)
    assert "nothing found" in str(report), str(report)
    check(b, want, low)
