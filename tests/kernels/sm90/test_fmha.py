"""The Hopper kernels on a CPU, through softsm: one case per part of the code; the rest of the suites is slow."""

import dataclasses

import pytest
import torch

import dsv4
from dsv4 import reference, suites
from dsv4.kernels.sm90 import fmha

softsm = pytest.importorskip("softsm")
if not hasattr(softsm, "use"):
    pytest.skip("this softsm cannot run Triton programs", allow_module_level=True)

SEED = 7
WHERE = suites.Where("softsm", "sm_90a")
CASES = {str(case): case for case in suites.fmha()}
QUICK = [
    "fmha/causal-odd-gqa-d64-bf16",  # one consumer, packed heads, masks
    "fmha/t129-s257-d64-fp16",  # three consumers under Triton 3.6
    "fmha/varlen-d128-bf16",  # two consumers, rows of neighbours zeroed
    "fmha/paged-d256-bf16",
    "fmha/paged-12-d64-fp16",  # pages that TMA boxes do not tile
    "fmha/window-sink-mqa-d512-bf16",
    "fmha/paged-k-is-v-d512-bf16",
]


@pytest.mark.parametrize("name", QUICK)
def test_one_case_of_each_part(name):
    result = suites.run_case(CASES[name], WHERE, SEED)
    assert result.ok, result.why()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in QUICK])
def test_the_other_cases(name):
    result = suites.run_case(CASES[name], WHERE, SEED)
    assert result.ok, result.why()


@pytest.mark.parametrize("head_dim, same_kv", [(128, False), (512, True)])
def test_split_keys_are_merged_in_order(head_dim, same_kv):
    """Three splits of two tiles, the last without keys, NaN in the buffers; twice the same bits."""
    q = torch.randn(1, 1, 8, head_dim).bfloat16()
    k = torch.randn(1, 200, 1, head_dim).bfloat16()
    v = k if same_kv else torch.randn_like(k)
    sink = torch.randn(8)
    plan = dsv4.plan(dsv4.fmha, batch=1, q_heads=8, kv_heads=1, head_dim=head_dim, max_seqlen_k=200, device="cpu")
    outs = []
    for _ in range(2):
        scratch = torch.full((3 * 8 * (head_dim + 1),), float("nan"))
        plan = dataclasses.replace(plan, num_splits=3, scratch=scratch)
        with softsm.use("sm_90a"):
            outs.append(dsv4.fmha(q, k, v, sink=sink, return_lse=True, plan=plan, backend="softsm"))
    want, want_lse = reference.fmha(q, k, v, sink=sink)
    (out, lse), (again, _) = outs
    assert torch.equal(out, again)
    assert float((out.double() - want).norm() / want.norm()) < 4e-3
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("head_dim, causal", [(64, True), (64, False), pytest.param(256, True, marks=pytest.mark.slow)])
def test_one_block_loops_over_many_tiles(head_dim, causal, monkeypatch):
    """As on a GPU with two multiprocessors: the ring and its phases go on from tile to tile."""
    monkeypatch.setattr(fmha, "_multiprocessors", lambda device: 2)
    q = torch.randn(2, 330, 2, head_dim).bfloat16()
    k, v = torch.randn(2, 200, 2, head_dim).bfloat16(), torch.randn(2, 200, 2, head_dim).bfloat16()
    assert fmha.config(dsv4.problem.dense(q, k, v, causal=causal)).loop
    out = torch.full_like(q, float("nan"))
    with softsm.use("sm_90a"):
        _, lse = dsv4.fmha(q, k, v, causal=causal, out=out, return_lse=True, backend="softsm")
    want, want_lse = reference.fmha(q, k, v, causal=causal)
    assert float((out.double() - want).norm() / want.norm()) < 4e-3
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-4)


def test_every_head_dim_has_a_configuration():
    for d, rows in ((64, 1), (64, 300), (128, 1), (128, 300), (256, 1), (256, 300), (512, 1), (512, 300)):
        q = torch.empty(1, rows, 1, d, dtype=torch.bfloat16)
        c = fmha.config(dsv4.problem.dense(q, q, q))
        assert c.keys % 64 == 0 and c.consumers in (1, 2, 3)


@pytest.mark.parametrize(
    "head_dim, same_kv, order",
    [(128, False, "latest"), pytest.param(512, False, "random", marks=pytest.mark.slow), (512, True, "latest")],
)
def test_no_race_whenever_copies_and_products_complete(head_dim, same_kv, order):
    """Asynchronous operations complete as late as they may, or at random; the happens-before checker is silent."""
    q = torch.randn(1, 70, 1, head_dim).bfloat16()
    k = torch.randn(1, 200, 1, head_dim).bfloat16()
    v = k if same_kv else torch.randn_like(k)
    with softsm.use("sm_90a"), softsm.checking(races=True, order=order, seed=SEED) as report:
        out = dsv4.fmha(q, k, v, causal=True, backend="softsm")
    assert "nothing found" in str(report), str(report)
    want, _ = reference.fmha(q, k, v, causal=True)
    assert float((out.double() - want).norm() / want.norm()) < 4e-3
