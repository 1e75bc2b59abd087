"""V4 attention for 128 heads by two CTAs that share the rows of a query, through softsm: when, and what it computes.

No call takes it unasked, and all its roles but one are those of listed.py, which test_v4.py tries: what it computes is
slow."""

import dataclasses

import pytest
import torch
from agreement import assert_agrees
from launches import launched

import dsv4
import softsm
from dsv4 import reference
from dsv4.kernels.compat import TRITON_VERSION
from dsv4.kernels.sm90.v4 import entry
from dsv4.runtime import calls, dispatch
from dsv4.runtime.settings import settings
from dsv4.v4 import problem

SEED = 13
ORDERS = ("eager", "latest", "random")
clusters = pytest.mark.skipif(TRITON_VERSION < (3, 9), reason="Triton before 3.9 compiles no clusters of CTAs")


def pool(count: int, per_page: int = 64) -> dsv4.Fp8Cache:
    return dsv4.Fp8Cache.pack(torch.randn(count, 512).bfloat16(), rows_per_page=per_page)


def numbers(*shape: int, of: int) -> torch.Tensor:
    """Row numbers, repeated ones and -1 among them."""
    return torch.randint(-1, of, shape, dtype=torch.int32)


def drawn(queries: int, window: int = 150, compressed: int = 300, heads: int = 128) -> dict:
    torch.manual_seed(SEED)
    more = dict(compressed=pool(90), compressed_indices=numbers(queries, compressed, of=60)) if compressed else {}
    return dict(q=torch.randn(queries, heads, 512).bfloat16(), window=pool(100, 7), sink=torch.randn(heads),
                window_indices=numbers(queries, window, of=100), **more)  # fmt: skip


@pytest.fixture
def alone(monkeypatch):
    """Few queries would take another kernel; two multiprocessors are one pair."""
    monkeypatch.setattr(entry, "narrow", lambda p, target: None)
    monkeypatch.setattr(settings, "pair", True)
    calls.forget()
    yield
    calls.forget()


def run(order: str, arguments: dict, sms: int = 2, **options):
    out = torch.full_like(arguments["q"], float("nan"))
    with softsm.use("sm_90a", sms=sms), softsm.checking(races=True, order=order, seed=SEED) as report:
        got = dsv4.v4_attention(**arguments, **options, out=out, return_lse=True, backend="softsm")
    assert not report, str(report)
    return got


@clusters
@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_a_pair_takes_one_query_after_the_other(alone, order, monkeypatch):
    """Three and five blocks of the lists, the last of each in part; then nothing; then one block."""
    launches = launched(monkeypatch)
    arguments = drawn(3) | dict(
        window_lengths=torch.tensor([150, 0, 9], dtype=torch.int32),
        compressed_lengths=torch.tensor([300, 0, 0], dtype=torch.int32),
    )
    got = run(order, arguments)
    assert launches == ["v4_listed_pair"]
    assert_agrees(got, reference.v4_attention, **arguments)


@clusters
@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_splits_of_a_window_alone_and_heads_that_are_missing(alone, order, monkeypatch):
    """100 heads: the second CTA has 36. Five blocks of the window, in two splits."""
    launches = launched(monkeypatch)
    arguments = drawn(2, window=310, compressed=0, heads=100)
    plan = dsv4.plan(dsv4.v4_attention, batch=2, q_heads=100, kv_heads=1, head_dim=512, max_seqlen_k=310, device="cpu")
    plan = dataclasses.replace(plan, num_splits=2, scratch=torch.full((2 * 2 * 100 * 513,), float("nan")))
    got = run(order, arguments, plan=plan)
    assert launches[0] == "v4_listed_pair"
    assert_agrees(got, reference.v4_attention, **arguments)


def taken(arguments: dict, pair: bool = True, **changes) -> bool:
    p = dataclasses.replace(problem.build(**arguments), **changes)
    return entry.pairs(p, dispatch.compile_target("sm_90a", pair))


def test_it_is_taken_on_request_for_lists_of_fp8_rows_that_fill_the_machine():
    many = drawn(67)
    assert taken(many)
    assert not taken(many, pair=False)
    assert not taken(drawn(66))  # 132 tiles: no multiprocessor has a second one
    assert not taken(drawn(200, heads=64))
    assert not taken(many, deterministic=True)
    assert not taken(many | dict(compressed=torch.randn(90, 512).bfloat16()))
