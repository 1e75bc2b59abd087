"""softcap: score = softcap * tanh(softmax_scale * q . k / softcap), before masks and the sink."""

import math

import pytest
import torch
from agreement import assert_agrees, qkv

import dsv4
from dsv4 import reference
from dsv4.fmha import cpu
from dsv4.fmha.options import FmhaOptions
from dsv4.reference import backward as reference_backward

CAPS = [0.5, 5.0, 50.0, 1e6]


def by_autograd(q, k, v, softcap, scale, left=-1, sink=None):
    """Causal attention in fp64, with nothing of dsv4 in it."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = q @ k.mT * scale
    s = softcap * torch.tanh(s / softcap)
    i, j = torch.arange(s.shape[2])[:, None] + s.shape[3] - s.shape[2], torch.arange(s.shape[3])
    s = s.masked_fill((j > i) | ((left >= 0) & (j < i - left)), -math.inf)
    lse = s.logsumexp(-1)
    total = lse if sink is None else torch.logaddexp(lse, sink.double()[:, None])
    return ((s - total[..., None]).exp() @ v).transpose(1, 2), lse


@pytest.mark.parametrize("softcap", CAPS)
def test_the_reference_is_what_the_papers_say(softcap):
    q, k, v = (3 * x for x in qkv(2, 5, 9, 4, 2, 64, torch.float32))
    sink = torch.randn(4)
    for scale in (0.125, -0.3):
        given = [x.clone().requires_grad_() for x in (q, k, v, sink)]
        want = by_autograd(*given[:3], softcap, scale, 3, given[3])
        options = dict(causal=True, window=(3, 0), sink=sink, softmax_scale=scale, softcap=softcap)
        for x, y in zip(reference.fmha(q, k, v, **options), want):
            torch.testing.assert_close(x, y.detach())
        dout, dlse = (torch.randn(x.shape, dtype=torch.float64) for x in want)
        found = reference_backward.fmha(q, k, v, dout, dlse, **options)
        wanted = torch.autograd.grad(want, given, (dout, dlse))
        for x, y in zip(found, wanted):
            torch.testing.assert_close(x.float(), y)


@pytest.mark.parametrize("softcap", CAPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [dict(), dict(causal=True), dict(window=(40, 9)), dict(softmax_scale=-2.0)], ids=str
)
def test_the_cpu_computes_it(softcap, dtype, options):
    q, k, v = qkv(2, 150, 170, 4, 2, 64, dtype)
    options = options | dict(softcap=softcap, sink=torch.randn(4))
    assert_agrees(dsv4.fmha(q, k, v, return_lse=True, **options), reference.fmha, q, k, v, **options)


def test_blocks_of_keys_and_of_queries_are_joined(monkeypatch):
    monkeypatch.setattr(cpu, "QUERY_BLOCK", 16)
    monkeypatch.setattr(cpu, "MASK_LIMIT", 1)
    q, k, v = qkv(1, 40, 50, 2, 2, 64, torch.float32)
    options = dict(causal=True, window=(9, 0), softcap=2.0)
    assert_agrees(dsv4.fmha(q, k, v, return_lse=True, **options), reference.fmha, q, k, v, **options)


def test_varlen_and_pages():
    q, k, v = (x[0] for x in qkv(1, 12, 30, 2, 1, 64, torch.float32))
    cu_q, cu_k = torch.tensor([0, 5, 12]).int(), torch.tensor([0, 9, 30]).int()
    out = dsv4.fmha_varlen(q, k, v, cu_q, cu_k, softcap=1.5, return_lse=True)
    assert_agrees(out, reference.fmha_varlen, q, k, v, cu_q, cu_k, softcap=1.5)
    pages, table, lengths = (
        k.view(6, 5, 1, 64),
        torch.tensor([[5, 0, 2], [1, 3, 4]]).int(),
        torch.tensor([11, 15]).int(),
    )
    queries = q.view(2, 6, 2, 64)
    out = dsv4.fmha_paged(queries, pages, pages, table, lengths, softcap=1.5, causal=True, return_lse=True)
    assert_agrees(out, reference.fmha_paged, queries, pages, pages, table, lengths, softcap=1.5, causal=True)


@pytest.mark.parametrize("varlen", [False, True])
def test_gradients_on_the_cpu(varlen):
    q, k, v = (3 * x for x in qkv(1, 20, 30, 4, 2, 64, torch.float32))
    sink = torch.randn(4)
    given = [x.requires_grad_() for x in (q, k, v, sink)]
    options = dict(causal=True, softcap=2.0)
    if varlen:
        cu = [torch.tensor([0, n]).int() for n in (20, 30)]
        out, lse = dsv4.fmha_varlen(q[0], k[0], v[0], *cu, sink=sink, return_lse=True, **options)
        out, lse = out[None], lse.T[None]
    else:
        out, lse = dsv4.fmha(q, k, v, sink=sink, return_lse=True, **options)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    found = torch.autograd.grad((out, lse), given, (dout, dlse))
    with torch.no_grad():
        want = reference_backward.fmha(q, k, v, dout, dlse, sink=sink, **options)
    for x, y in zip(found, want):
        torch.testing.assert_close(x, y.float(), rtol=1e-4, atol=1e-5)


def test_none_and_0_are_no_cap_and_other_values_are_refused():
    q, k, v = qkv(1, 3, 5, 2, 2, 64, torch.float32)
    plain = dsv4.fmha(q, k, v)
    for nothing in (None, 0, 0.0):
        assert torch.equal(dsv4.fmha(q, k, v, softcap=nothing), plain)
        assert FmhaOptions(softcap=nothing).resolved(64) == FmhaOptions().resolved(64)
    wrong_ones = [(-1, "float -1.0"), (math.inf, "float inf"), (math.nan, "float nan"), (True, "bool True")]
    for wrong, said in [*wrong_ones, ("5", "str '5'")]:
        with pytest.raises(ValueError, match=f"^softcap: got {said}; accepted: None or a finite number >= 0"):
            dsv4.fmha(q, k, v, softcap=wrong)
    with pytest.raises(ValueError, match="^softcap: got float -1.0"):
        torch.ops.dsv4.fmha(q, k, v, softcap=-1.0)


def test_torch_compile_sees_it():
    q, k, v = qkv(1, 3, 5, 2, 2, 64, torch.float32)

    def call(q, k, v):
        return dsv4.fmha(q, k, v, causal=True, softcap=2.0)

    assert torch.equal(torch.compile(call, fullgraph=True, backend="eager")(q, k, v), call(q, k, v))
