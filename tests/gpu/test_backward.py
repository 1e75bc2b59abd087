"""Gradients on the GPU: every kernel against the fp64 formulas, results poisoned before, bits where they are promised.

Under compute-sanitizer (memcheck, then racecheck) the small ones are enough::

    compute-sanitizer --tool memcheck python -m pytest -q -p no:cacheprovider tests/gpu/test_backward.py -k small
"""

from dataclasses import replace

import fmha_gradients
import launches
import pytest
import torch
import v4_gradients
from fmha_gradients import BF16, FP16

import dsv4
from dsv4 import suites
from dsv4.fmha.kernels import chain
from dsv4.reference import backward as reference_backward

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(suites.gpu_arch() != "sm_90a", reason="needs a Hopper GPU: the gradient kernels are for it"),
]


def run(b):
    """Runs the kernels, or fails: torch code never steps in."""
    with torch.cuda.device(b.q.device):
        launches.run(b)
    torch.cuda.synchronize()


def results(b):
    names = ("dq", "dk", "dv", "dsink", "dwindow", "dcompressed")
    return [x for x in (getattr(b, name, None) for name in names) if x is not None]


def assert_same_bits_again(b):
    first = [x.clone() for x in results(b)]
    for x in results(b):
        x.fill_(float("nan"))
    run(b)
    assert all(torch.equal(x, y) for x, y in zip(first, results(b)))


MASKS = {
    "full": dict(t=300, s=517, heads=(2, 2)),
    "causal": dict(t=517, s=517, heads=(2, 2), causal=True, batch=2),
    "more-queries-than-keys": dict(t=700, s=300, heads=(1, 1), causal=True, sink=True),
    "window": dict(t=300, s=900, heads=(2, 1), window=(200, 17), dlse=True),
    "window-to-the-left": dict(t=900, s=900, heads=(2, 2), window=(64, 0)),
    "group-of-8-sink-dlse": dict(t=130, s=400, heads=(8, 1), causal=True, sink=True, dlse=True, batch=2),
    "group-of-3": dict(t=200, s=200, heads=(6, 2), softmax_scale=-0.1),
    "softcap": dict(t=300, s=400, heads=(4, 2), causal=True, sink=True, dlse=True, softcap=1.5),
    "small": dict(t=70, s=90, heads=(2, 1), causal=True, sink=True),
    "one-query": dict(t=1, s=1000, heads=(4, 4)),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("d", [64, 128, 256, 512])
def test_fmha(d, dtype, name):
    b, want, low = fmha_gradients.request(d=d, dtype=dtype, device="cuda", **MASKS[name])
    for x in (b, fmha_gradients.deterministic(b)):
        for gradient in results(x):
            gradient.fill_(float("nan"))
        run(x)
        fmha_gradients.check(x, want, low)
    assert_same_bits_again(x)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("d", [64, 128, 256, 512])
def test_varlen(d, softcap):
    """An empty sequence, one without queries, one without a row to spare; NaN in keys that no query sees."""
    starts = [0, 200, 200, 201, 457], [0, 300, 380, 381, 637]
    b, want, low = fmha_gradients.varlen_request(*starts, heads=2, d=d, device="cuda", softcap=softcap)
    run(b)
    fmha_gradients.check(b, want, low)


@pytest.mark.parametrize("name", fmha_gradients.CHAIN)
def test_chain_takes_sequences(name):
    b, want, low = fmha_gradients.varlen_request(**dict(d=256, device="cuda") | fmha_gradients.CHAIN[name])
    run(b)
    fmha_gradients.check(b, want, low)


def test_slabs_of_sequences_do_not_show(monkeypatch):
    fmha_gradients.check_slabs_of_sequences_do_not_show(run, monkeypatch, device="cuda")


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        dict(n=5, heads=64, window=(90, 70)),
        dict(n=300, heads=64, window=(500, 128), compressed=(700, 512), rope=64, dlse=True),
        dict(n=300, heads=128, window=(500, 128), compressed=(40, 100), rope=96, sink=False),
        dict(n=6, heads=40, window=(50, 70), compressed=(30, 40), rope=64),
        dict(n=6, heads=80, window=(90, 128), paged=True, sink=False),
    ],
    ids=["small", "many-queries", "two-tiles-of-heads-few-rows", "small-two-pools", "small-by-block-table"],
)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_v4(dtype, options, deterministic):
    b, want, low = v4_gradients.request(device="cuda", deterministic=deterministic, dtype=dtype, **options)
    run(b)
    v4_gradients.check(b, want, low)
    if deterministic:
        assert_same_bits_again(b)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("size", [2.0**-12, 2.0**9])
def test_fp16_of_v4_gradients_that_are_small_or_large(size, deterministic):
    b, want, low = v4_gradients.request(
        30, 80, (500, 128), (70, 200), dlse=True, device="cuda", dtype=FP16, size=size, deterministic=deterministic
    )
    run(b)
    v4_gradients.check(b, want, low)


def test_only_what_is_wanted():
    for d in (128, 256):
        for name in ("dq", "dk", "dv"):
            b, want, low = fmha_gradients.request(t=140, s=230, heads=(2, 1), d=d, device="cuda")
            b = replace(b, **{other: None for other in ("dq", "dk", "dv") if other != name})
            run(b)
            fmha_gradients.check(b, want, low)


def test_index_loss():
    """It is torch code with products of bf16 operands: everything but the last rounding of a gradient is fp32."""
    n, m, listed, heads = 50, 70, 40, 8
    q, k, weights = (fmha_gradients.draw(*x, dtype=BF16, seed=len(x)) for x in ((n, 16, 128), (m, 128), (n, 16)))
    attention_q, rows = (fmha_gradients.draw(*x, dtype=BF16, seed=9) for x in ((n, heads, 512), (m, 512)))
    indices = torch.randint(-1, m, (n, listed), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    lse = torch.full((n, heads), 3.0)
    target = (torch.einsum("nhe,me->nhm", attention_q.double(), rows.double()) * 512**-0.5 - 3).exp().sum(1)
    want, *ref = reference_backward.index_loss(q, k, weights, indices, target.gather(1, indices.long().clamp_min(0)))
    learnt = [x.cuda().requires_grad_() for x in (q, k, weights)]
    loss = dsv4.index_loss(*learnt, *(x.cuda() for x in (indices, attention_q, rows, lse)))
    # Exponents are off by what sums in fp32 lose: tensor cores add 16 products at a time and cut off, so that errors
    # add up; twice that. It is the absolute error of a logarithm and the relative one of a weight.
    logits = torch.einsum("nhe,me->nhm", attention_q.double(), rows.double()) * 512**-0.5
    scores = torch.einsum("nhm,nh->nm", torch.einsum("nhd,md->nhm", q.double(), k.double()).relu(), weights.double())
    scores = scores * (128 * 16) ** -0.5
    bound = 2 * 2.0**-23 * float(512 / 16 * logits.abs().max() + (128 / 16 + 16) * scores.abs().max())
    assert float((loss.detach().double().cpu() - want).abs()) <= bound
    for got, exact in zip(torch.autograd.grad(loss, learnt), ref):
        assert float((got.double().cpu() - exact).norm() / exact.norm()) <= 2**-9 + bound  # and a rounding to bf16


@pytest.mark.parametrize("d", [64, 128, 256, 512])
def test_memory_is_within_twice_the_forward_pass(d):
    """Besides inputs, output and gradients, which a caller holds anyway, no more than twice q, k, v and out; above head
    dim 128 the slab of scores on top of it."""
    q, k, v = (torch.randn(2, 2048, 16, d, device="cuda", dtype=BF16, requires_grad=True) for _ in "qkv")
    out = dsv4.fmha(q, k, v, causal=True)
    dout = torch.randn_like(out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(out, (q, k, v), dout)
    taken = torch.cuda.max_memory_allocated() - before - 3 * q.numel() * 2
    forward = 4 * q.numel() * 2
    slab = chain.SLAB_BYTES if d > 128 else 0
    assert taken <= 2 * forward + slab, f"{taken / forward:.2f} times the forward's tensors"
