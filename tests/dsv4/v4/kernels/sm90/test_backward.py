"""The gradients of v4_attention by the Hopper kernels, through softsm, against the fp64 formulas.

Quickly, in bf16 with atomic additions; the quick variant of the Blackwell kernel is the deterministic one of fp16."""

from dataclasses import replace
from functools import partial

import launches
import pytest
import torch
from dsink import FAR_SINKS
from v4_gradients import (
    ANY_SIZE_FP16,
    BF16,
    EIGHT_BLOCKS,
    FP16,
    LONG_LISTS,
    TWO_POOLS,
    TWO_TILES_OF_HEADS,
    check,
    check_in_softsm,
    request,
)

import softsm
from dsv4 import reference
from dsv4.reference import backward as reference_backward
from dsv4.v4.kernels import backward as shared

pytestmark = pytest.mark.compile


def run(b):
    with softsm.use("sm_90a"):
        launches.run(b)


check_problem = partial(check_in_softsm, "sm_90a")


@pytest.mark.slow
def test_window_alone():
    check_problem(dict(n=3, heads=64, window=(90, 70)))


@pytest.mark.parametrize("deterministic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_pools_rotation_and_the_gradient_of_the_lse(deterministic):
    check_problem(TWO_POOLS, deterministic=deterministic)


def test_a_sink_far_above_the_lse_leaves_the_gradient_of_the_lse():
    check_problem(TWO_POOLS, sink=FAR_SINKS)


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_two_tiles_of_heads_and_rows_by_block_table(deterministic):
    check_problem(TWO_TILES_OF_HEADS, deterministic=deterministic)


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
    check_problem(EIGHT_BLOCKS, order)


@pytest.mark.parametrize("deterministic", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [BF16, pytest.param(FP16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("order", ["latest", *(pytest.param(o, marks=pytest.mark.slow) for o in ("eager", "random"))])
def test_long_lists_of_two_pools_without_a_race(order, dtype, deterministic):
    check_problem(LONG_LISTS, order, dtype=dtype, deterministic=deterministic)


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("size", [2.0**-12, 2.0**9])
def test_fp16_of_gradients_that_are_small_or_large(size, deterministic):
    """dS without a factor would be less than fp16's least number, or more than its largest."""
    check_problem(ANY_SIZE_FP16, size=size, deterministic=deterministic)


@pytest.mark.slow
def test_fp16_of_queries_whose_gradients_differ_in_size():
    """One dO is 2^20 times as large as the other: dQ of both is as exact as alone. Its rows are its own."""
    b, _, _ = request(2, 16, (40, 20), dtype=FP16)
    listed = torch.stack([torch.arange(20), torch.arange(20, 40)]).int()
    b.dout[0] *= 2.0**10
    b.dout[1] *= 2.0**-10
    p = b.forward
    args = dict(q=p.q, window=p.window.nan_to_num(), window_indices=listed, sink=p.sink)
    out, lse = reference.v4_attention(**args)
    p = replace(p, window=args["window"], window_indices=listed, out=out.half(), lse=lse.float())
    b = replace(b, forward=p)
    run(b)
    want, low = (reference_backward.v4_attention(**args, dout=b.dout, p_dtype=x) for x in (None, FP16))
    for query, mine in enumerate((slice(0, 20), slice(20, 40))):
        for got, ref, rounded in (
            (b.dq[query], want.q[query], low.q[query]),
            (b.dwindow[mine], want.window[mine], low.window[mine]),
        ):
            error, bound = (float((x - ref).norm() / ref.norm()) for x in (got.double(), rounded.half().double()))
            assert error <= 1.5 * bound, f"query {query}: {error:.2e}, rounded {bound:.2e}"


TWO_POOLS_ONLY_WINDOW = {name: x for name, x in TWO_POOLS.items() if name != "compressed"}


def test_pools_that_begin_at_an_odd_address_are_copied():
    b, want, low = request(**TWO_POOLS)
    odd = {
        name: torch.empty(x.numel() + 1, dtype=BF16)[1:].view_as(x).copy_(x)
        for name in ("window", "compressed")
        for x in (getattr(b.forward, name),)
    }
    b = replace(b, forward=replace(b.forward, **odd))
    run(b)
    check(b, want, low)


def test_a_block_table_of_no_requests_names_no_rows():
    b, want, low = request(**TWO_POOLS_ONLY_WINDOW)
    table = dict(block_table=torch.zeros(0, 2, dtype=torch.int32), request_starts=torch.zeros(1, dtype=torch.int32))
    rows, lengths = torch.full((6, 8, 512), float("nan"), dtype=BF16), torch.full((b.forward.batch,), 13)
    p = replace(b.forward, compressed=rows, compressed_lengths=lengths.int(), **table)
    with_rows = replace(b, forward=p, dcompressed=torch.empty_like(rows))
    run(with_rows)
    check(b, want, low)
    assert not with_rows.dcompressed.any()


def test_what_the_kernels_do_not_take_is_said():
    b, _, _ = request(2, 8, (20, 9))
    assert shared.supports(b) is None
    assert "float32" in shared.supports(replace(b, forward=replace(b.forward, q=b.forward.q.float())))
