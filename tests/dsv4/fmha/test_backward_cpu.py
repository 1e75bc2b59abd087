"""The gradients of fmha on a CPU, in fp64, against the formulas: blocks must not show."""

from dataclasses import replace

import pytest
import torch
from live_bytes import LiveBytes

from dsv4 import reference
from dsv4.fmha import backward_cpu, problem
from dsv4.fmha.backward import FmhaBackward
from dsv4.fmha.options import FmhaOptions
from dsv4.reference import backward as reference_backward

D = 16


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def gradients(q, k, v, dout, dlse=None, *, causal=False, window=(-1, -1), sink=None, cu=None, wanted="qkvs"):
    """Call the backend directly: the public function does not accept fp64."""
    left, right = window[0], 0 if causal else window[1]
    options = dict(causal=causal, window=window, sink=sink)
    if cu is None:
        out, lse = reference.fmha(q, k, v, **options)
        more = dict(kind="dense", max_seqlen_q=q.shape[1], max_seqlen_k=k.shape[1])
    else:
        out, lse = reference.fmha_varlen(q, k, v, *cu, **options)
        more = dict(kind="varlen", max_seqlen_q=len(q), max_seqlen_k=len(k), cu_seqlens_q=cu[0], cu_seqlens_k=cu[1])
    p = problem.FmhaProblem(
        q=q, k=k, v=v, options=FmhaOptions.of((left, right), softmax_scale=D**-0.5), sink=sink, out=out, lse=lse, **more
    )
    nan = {name: torch.full_like(x, float("nan")) for name, x in zip("qkv", (q, k, v)) if name in wanted}
    b = FmhaBackward(p, dout, dlse, nan.get("q"), nan.get("k"), nan.get("v"))
    if sink is not None and "s" in wanted:
        b = replace(b, dsink=torch.full_like(sink, float("nan")))
    backward_cpu.backward(b)
    return b.dq, b.dk, b.dv, b.dsink


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(backward_cpu, "KEY_BLOCK", 8)
    monkeypatch.setattr(backward_cpu, "QUERY_BLOCK", 4)
    monkeypatch.setattr(backward_cpu, "SCORE_BYTES", 0)
    monkeypatch.setattr(backward_cpu, "SUM_BYTES", 0)


def agree(got, want):
    for a, b in zip(got, want, strict=True):
        if b is not None:
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)  # fp64: sums that cancel, 2^-53 a rounding


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (6, 1)])
@pytest.mark.parametrize(
    "window, causal", [((-1, -1), False), ((-1, -1), True), ((5, 2), False), ((0, 9), False), ((3, -1), True)]
)
@pytest.mark.parametrize("t, s", [(33, 33), (19, 40), (40, 19), (1, 21)])
def test_dense(t, s, window, causal, heads):
    q, k, v = normal(2, t, heads[0], D), normal(2, s, heads[1], D, seed=1), normal(2, s, heads[1], D, seed=2)
    dout, dlse, sink = normal(2, t, heads[0], D, seed=3), normal(2, heads[0], t), normal(heads[0])
    for options in (dict(), dict(sink=sink), dict(dlse=dlse), dict(sink=sink, dlse=dlse)):
        options |= dict(window=window, causal=causal)
        agree(gradients(q, k, v, dout, **options), reference_backward.fmha(q, k, v, dout, **options))


def test_varlen_with_sequences_of_nothing_and_rows_of_nobody():
    cu = [torch.tensor(x, dtype=torch.int32) for x in ([0, 17, 17, 30], [0, 0, 12, 43])]
    q, k, v, dout = normal(35, 4, D), normal(45, 2, D), normal(45, 2, D, seed=1), normal(35, 4, D, seed=2)
    k[43:] = v[43:] = k[:12] = v[:12] = float("nan")
    options = dict(dlse=normal(35, 4), sink=normal(4), causal=True)
    agree(gradients(q, k, v, dout, cu=cu, **options), reference_backward.fmha_varlen(q, k, v, *cu, dout, **options))


@pytest.mark.parametrize("wanted", ["q", "k", "v", "s", "qv", "ks"])
def test_only_what_is_wanted(wanted):
    q, k, v, dout = (normal(1, 9, 2, D, seed=n) for n in range(4))
    sink = normal(2)
    got = gradients(q, k, v, dout, sink=sink, wanted=wanted)
    want = reference_backward.fmha(q, k, v, dout, sink=sink)
    for name, a, b in zip("qkvs", got, want):
        assert (a is None) == (name not in wanted)
        if a is not None:
            torch.testing.assert_close(a, b)


def test_an_lse_of_minus_infinity_may_have_a_gradient_of_nan():
    q, k, v, dout = (normal(1, n, 1, D, seed=seed) for seed, n in enumerate((5, 3, 3, 5)))
    dlse = normal(1, 1, 5)
    want = gradients(q, k, v, dout, dlse, causal=True)
    dlse[..., :2] = float("nan")  # two queries see nothing
    agree(gradients(q, k, v, dout, dlse, causal=True), want)


def test_memory_is_within_twice_the_forward_pass(monkeypatch):
    """Besides inputs, output and gradients no more than twice the bytes of q, k, v and out: all scores of one head
    alone would be four times as many."""
    for name, value in (("KEY_BLOCK", 256), ("QUERY_BLOCK", 128), ("SCORE_BYTES", 1 << 18), ("SUM_BYTES", 1 << 18)):
        monkeypatch.setattr(backward_cpu, name, value)
    q, k, v, out, dout, *given = (torch.randn(1, 2048, 2, 64) for _ in range(8))
    lse = torch.full((1, 2, 2048), 8.0)
    p = problem.FmhaProblem(
        q=q, k=k, v=v, options=FmhaOptions.of((-1, 0), softmax_scale=0.1), out=out, lse=lse, kind="dense",
        max_seqlen_q=2048, max_seqlen_k=2048,
    )  # fmt: skip
    with LiveBytes(q, k, v, out, dout, lse, *given) as live:
        backward_cpu.backward(FmhaBackward(p, dout, None, *given))
    forward = sum(x.nbytes for x in (q, k, v, out))
    assert 0 < live.peak <= 2 * forward, f"{live.peak / forward:.2f} times the forward's tensors"
    with LiveBytes(q, k) as live:  # and the meter sees such a matrix
        torch.softmax(q[0, :, 0] @ k[0, :, 0].T, -1)
    assert live.peak > 2 * forward
