"""The kernel of two CTAs that share K and V (head dim 512), through softsm: when it is taken, and what it computes.

No call takes it unasked, and its roles are those of one CTA, which test_fmha.py tries: what it computes is slow."""

import dataclasses

import pytest
import torch
from agreement import assert_agrees

import dsv4
import softsm
from dsv4 import reference
from dsv4.fmha import problem
from dsv4.kernels import compat
from dsv4.kernels.compat import TRITON_VERSION
from dsv4.runtime import calls, dispatch
from dsv4.runtime.settings import settings

clusters = pytest.mark.skipif(TRITON_VERSION < (3, 9), reason="Triton before 3.9 compiles no clusters of CTAs")


@pytest.fixture(autouse=True)
def asked_for(monkeypatch):
    monkeypatch.setattr(settings, "pair", True)


def draw(tokens, keys, q_heads=1, kv_heads=1, dtype=torch.bfloat16):
    q = torch.randn(1, tokens, q_heads, 512).to(dtype)
    return q, torch.randn(1, keys, kv_heads, 512).to(dtype), torch.randn(1, keys, kv_heads, 512).to(dtype)


def run(q, k, v, splits=1, **options):
    """(out, lse) in softsm, by one CTA or two as DSV4_PAIR says."""
    plan = dsv4.plan(dsv4.fmha, batch=1, q_heads=q.shape[2], kv_heads=k.shape[2], head_dim=512, max_seqlen_q=q.shape[1],
                     max_seqlen_k=k.shape[1], device="cpu")  # fmt: skip
    scratch = torch.full((splits * q.shape[1] * q.shape[2] * 513,), float("nan"))
    plan = dataclasses.replace(plan, num_splits=splits, scratch=scratch)
    out = torch.full_like(q, float("nan"))
    with softsm.use("sm_90a"):
        return dsv4.fmha(q, k, v, out=out, return_lse=True, plan=plan, backend="softsm", **options)


def right(got, q, k, v, **options):
    assert_agrees(got, reference.fmha, q, k, v, **options)


def kernel_of(p, pair=True):
    outputs = dict(out=torch.empty_like(p.q), lse=torch.empty(p.lse_shape))
    p = dataclasses.replace(p, **outputs, num_splits=1, same_kv=p.k is p.v)
    first, *_ = calls.launches_of(p, dispatch.compile_target("sm_90a", pair=pair))
    return first.kernel.__name__, first.constants.get("num_ctas", 1)


def test_it_is_taken_only_where_it_is_asked_for_and_serves():
    q, k, v = draw(65, 10)
    one, two = ("fmha_wide", 1), ("fmha_pair", 2)
    assert kernel_of(problem.dense(q, k, v)) == two
    assert kernel_of(problem.dense(q, k, k)) == one  # k is v
    assert kernel_of(problem.dense(q[:, :64], k, v)) == one  # one tile of rows
    cu = torch.tensor([0, 65], dtype=torch.int32)
    assert kernel_of(problem.varlen(q[0], k[0], v[0], cu, cu, max_seqlen_q=65)) == one
    assert kernel_of(problem.dense(q, k, v), pair=False) == one


def test_a_triton_without_clusters_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(compat, "TRITON_VERSION", (3, 8))
    with pytest.raises(RuntimeError, match="fmha_pair: got Triton .*; accepted: 3.9 or newer"):
        run(*draw(65, 10))


@clusters
@pytest.mark.slow
@pytest.mark.parametrize("order", ["random", "eager", "latest"])
def test_no_race_whenever_copies_and_products_complete(order):
    """Three steps, so that every slot is filled again; the second CTA has fewer rows than it has room for."""
    q, k, v = draw(100, 300)
    with softsm.checking(races=True, order=order, seed=7) as report:
        got = run(q, k, v, causal=True)
    assert "nothing found" in str(report), str(report)
    right(got, q, k, v, causal=True)


@clusters
@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_no_slot_is_filled_before_both_have_seen_it(seed):
    """Ten steps. A wait for a filling that the next one has overtaken would not end."""
    q, k, v = draw(128, 1234)
    with softsm.checking(races=False, order="random", seed=seed) as report:
        got = run(q, k, v)
    assert not report, str(report)
    right(got, q, k, v)


@clusters
@pytest.mark.slow
def test_the_bits_of_one_cta(monkeypatch):
    """Also where the second CTA of the last pair has no rows."""
    q, k, v = draw(130, 333)
    for causal in (False, True):
        monkeypatch.setattr(settings, "pair", True)
        two = run(q, k, v, causal=causal)
        monkeypatch.setattr(settings, "pair", False)
        one = run(q, k, v, causal=causal)
        assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])


@clusters
@pytest.mark.slow
def test_packed_heads_windows_sinks_fp16_and_splits():
    q, k, v = draw(70, 300, 4, 2, torch.float16)
    sink = torch.randn(4)
    right(run(q, k, v, window=(100, 20), sink=sink), q, k, v, window=(100, 20), sink=sink)
    right(run(q, k, v, splits=2, causal=True, sink=sink), q, k, v, causal=True, sink=sink)
    right(run(q, k, v, softmax_scale=-0.1), q, k, v, softmax_scale=-0.1)
    more = draw(65, 1)  # one key, which the last row alone sees: nothing for the first CTA
    right(run(*more, causal=True), *more, causal=True)
