"""The gradients of v4_attention by the Blackwell kernel, through softsm, against the fp64 formulas.

Quickly, the deterministic ones of fp16, whose P and dS are scaled; the quick variant of the Hopper kernel is that of
bf16 with atomic additions."""

from functools import partial

import pytest
from dsink import FAR_SINKS
from v4_gradients import (
    ANY_SIZE_FP16,
    BF16,
    EIGHT_BLOCKS,
    FP16,
    LONG_LISTS,
    TWO_POOLS,
    TWO_TILES_OF_HEADS,
    check_in_softsm,
)

check = partial(check_in_softsm, "sm_100a")


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_two_pools_rotation_and_the_gradient_of_the_lse(deterministic):
    check(TWO_POOLS, deterministic=deterministic)


@pytest.mark.compile
def test_a_sink_far_above_the_lse_leaves_the_gradient_of_the_lse():
    check(LONG_LISTS, sink=FAR_SINKS, dtype=FP16, deterministic=True)


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_two_tiles_of_heads_and_rows_by_block_table(deterministic):
    check(TWO_TILES_OF_HEADS, deterministic=deterministic)


@pytest.mark.compile
@pytest.mark.parametrize("deterministic", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [FP16, pytest.param(BF16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("order", ["latest", *(pytest.param(o, marks=pytest.mark.slow) for o in ("eager", "random"))])
def test_long_lists_of_two_pools_without_a_race(order, dtype, deterministic):
    check(LONG_LISTS, order, dtype=dtype, deterministic=deterministic)


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("size", [2.0**-12, 2.0**9])
def test_fp16_of_gradients_that_are_small_or_large(size, deterministic):
    check(ANY_SIZE_FP16, size=size, deterministic=deterministic)


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("order", ["latest", "eager", "random"])
def test_no_race_whenever_copies_and_products_complete(order, deterministic):
    check(EIGHT_BLOCKS, order, deterministic=deterministic)
