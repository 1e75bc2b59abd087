"""softcap in the kernels of both architectures, through softsm: scores that reach the cap, NaN where results go."""

from dataclasses import replace

import fmha_gradients
import launches
import pytest
import torch
from agreement import assert_agrees, qkv

import dsv4
import softsm
from dsv4 import reference
from dsv4.fmha import problem
from dsv4.fmha.kernels.scores import score_scale

ARCHS = ["sm_90a", "sm_100a"]
SOFTCAP = 1.5
QUICK = ("sm_90a", 64, False)
slow = pytest.mark.slow


def poisoned(p):
    return replace(p, out=torch.full_like(p.q, float("nan")), lse=torch.full(p.lse_shape, float("nan")))


SIZES = [(64, False), (128, False), (256, False), (512, False), (512, True)]


@pytest.mark.parametrize(
    "arch, d, same_kv", [QUICK, *(pytest.param(a, *x, marks=slow) for a in ARCHS for x in SIZES if (a, *x) != QUICK)]
)
def test_split_keys(arch, d, same_kv):
    """Each of two splits applies the cap. On sm_100a the kernel that reads pages by cp.async has a quick test of it
    (sm100/test_forward.py)."""
    q, k, v = (3 * x for x in qkv(1, 6, 150, 4, 2, d, torch.bfloat16))
    v, options = k if same_kv else v, dict(causal=True, softcap=SOFTCAP, sink=torch.randn(4))
    p = replace(poisoned(problem.dense(q, k, v, **options)), num_splits=2, same_kv=same_kv)
    with launches.race_free(arch):
        launches.run(p)
    assert_agrees((p.out, p.lse), reference.fmha, q, k, v, **options)


@slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128, 512])
def test_large_problems(arch, causal, d, monkeypatch):
    """The kernel that loops over row tiles on sm_90a, with and without masks; pairs of CTAs on sm_100a."""
    launches.num_sms(monkeypatch, 2)
    q, k, v = (3 * x for x in qkv(1, 256, 256, 2, 2, d, torch.bfloat16))
    p = poisoned(problem.dense(q, k, v, causal=causal, softcap=SOFTCAP))
    with softsm.use(arch):
        launches.run(p)
    assert_agrees((p.out, p.lse), reference.fmha, q, k, v, causal=causal, softcap=SOFTCAP)


@slow
@pytest.mark.parametrize("arch", ARCHS)
def test_varlen_and_pages(arch):
    q, k, v = (3 * x[0] for x in qkv(1, 40, 90, 2, 1, 64, torch.bfloat16))
    cu_q, cu_k = torch.tensor([0, 15, 40]).int(), torch.tensor([0, 30, 90]).int()
    pages, table, lengths = (
        k.view(9, 10, 1, 64),
        torch.tensor([[5, 0, 2], [1, 3, 8]]).int(),
        torch.tensor([11, 30]).int(),
    )
    queries, options = q.view(2, 20, 2, 64), dict(softcap=SOFTCAP)
    with softsm.use(arch):
        varlen = dsv4.fmha_varlen(q, k, v, cu_q, cu_k, return_lse=True, backend="softsm", **options)
        paged = dsv4.fmha_paged(queries, pages, pages, table, lengths, return_lse=True, backend="softsm", **options)
    assert_agrees(varlen, reference.fmha_varlen, q, k, v, cu_q, cu_k, **options)
    assert_agrees(paged, reference.fmha_paged, queries, pages, pages, table, lengths, **options)


VARLEN = dict(starts_q=(0, 20, 50), starts_k=(0, 60, 100), heads=2, kv_heads=1, softcap=SOFTCAP)
DENSE = dict(t=40, s=70, heads=(2, 1), causal=True, sink=True, dlse=True, softcap=SOFTCAP)


@slow  # sm90/test_backward.py has quick gradients with softcap, and quick ones of sequences
@pytest.mark.parametrize("arch", ARCHS)
def test_gradients_of_a_varlen_batch(arch):
    check(arch, *fmha_gradients.varlen_request(**VARLEN))


@slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("d", [64, 128, 256, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients(arch, d, dtype):
    check(arch, *fmha_gradients.request(**DENSE, d=d, dtype=dtype))


def check(arch, b, want, low):
    with softsm.use(arch):
        launches.run(b)
    fmha_gradients.check(b, want, low)


def test_any_cap_becomes_numbers_that_kernels_take():
    x = torch.empty(1, 1, 1, 64)
    for softcap in (1e-300, 1e-38, 1.0, 3e38):
        for number in score_scale(problem.dense(x, x, x, softcap=softcap), -0.2):
            assert torch.tensor(number, dtype=torch.float32).isfinite()
    assert score_scale(problem.dense(x, x, x, softcap=0.0), 0.2) == (0.2, None)
