"""The gradients of fmha by the Hopper kernels, through softsm, against the fp64 formulas."""

from dataclasses import replace

import pytest
import torch

import softsm
from dsv4 import reference, reference_backward
from dsv4.fmha import problem
from dsv4.fmha.backward import FmhaBackward
from dsv4.kernels.sm90.fmha import backward

BF16, FP16 = torch.bfloat16, torch.float16


def draw(*shape, dtype, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def request(t, s, heads, d, dtype=BF16, sink=False, dlse=False, batch=1, **options):
    """Inputs with their forward pass, gradients of NaN; and what the formulas give, exactly and rounded."""
    q, dout = (draw(batch, t, heads[0], d, dtype=dtype, seed=n) for n in (0, 1))
    k, v = (draw(batch, s, heads[1], d, dtype=dtype, seed=n) for n in (2, 3))
    options["sink"] = draw(heads[0], dtype=torch.float32, seed=4) if sink else None
    dlse = draw(batch, heads[0], t, dtype=torch.float32, seed=5) if dlse else None
    out, lse = reference.fmha(q, k, v, **options)
    p = replace(problem.dense(q, k, v, **options), out=out.to(dtype), lse=lse.float())
    empty = [torch.full_like(x, float("nan")) for x in (q, k, v)]
    b = FmhaBackward(p, dout, dlse, *empty, torch.full([heads[0]], float("nan")) if sink else None)
    want = reference_backward.fmha(q, k, v, dout, dlse, **options)
    low = reference_backward.fmha(q, k, v, dout, dlse, p_dtype=dtype, **options)
    return b, want, low


def run(b):
    with softsm.use("sm_90a"):
        backward.backward(b)


def check(b, want, low):
    p = b.forward
    blind = p.lse == float("-inf")
    blind = blind.transpose(1, 2) if p.kind == "dense" else blind  # queries that see nothing
    unseen = (want.v == 0).all(-1)  # keys that nobody sees
    for name, got, dead in (("q", b.dq, blind), ("k", b.dk, unseen), ("v", b.dv, unseen)):
        if got is None:
            continue
        ref, rounded = getattr(want, name), getattr(low, name).to(got.dtype).double()
        error, bound = ((x - ref).norm() / ref.norm() for x in (got.double(), rounded))
        assert float(error) <= 1.5 * float(bound), f"d{name}: {float(error):.2e}, rounded {float(bound):.2e}"
        assert not got[dead].any(), f"d{name}: a gradient where there is none"
    if b.dsink is not None:  # a sum with cancellation: held to the size of its terms
        error = (b.dsink.double() - want.sink).abs() / (1 + want.sink.abs())
        assert float(error.max()) < 1e-2


CASES = {
    "full-hd512": dict(t=130, s=150, heads=(1, 1), d=512),
    "causal-gqa-sink-dlse-hd128": dict(t=150, s=200, heads=(4, 2), d=128, causal=True, sink=True, dlse=True),
    "window-fp16-hd64": dict(t=200, s=150, heads=(2, 1), d=64, dtype=FP16, window=(40, 3), batch=2),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients(name):
    b, want, low = request(**CASES[name])
    run(b)
    check(b, want, low)


@pytest.mark.slow
@pytest.mark.parametrize("d", [64, 128, 256, 512])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    "options",
    [
        dict(t=129, s=257, heads=(2, 2)),
        dict(t=300, s=70, heads=(1, 1), causal=True, sink=True),  # rows that see nothing
        dict(t=70, s=300, heads=(3, 1), window=(20, 0), dlse=True),  # keys that nobody sees, a group of 3
        dict(t=1, s=140, heads=(8, 1), softmax_scale=-0.1),
    ],
)
def test_every_head_dim(d, dtype, options):
    b, want, low = request(d=d, dtype=dtype, **options)
    run(b)
    check(b, want, low)


def test_slabs_and_pieces_do_not_show(monkeypatch):
    """A slab of 128 tokens of one head, so that dK and dV are summed; pieces of 128; two multiprocessors."""
    monkeypatch.setattr(backward, "SLAB_BYTES", 0)
    monkeypatch.setattr(backward.Chain, "_pieces", lambda self, size: 128)
    monkeypatch.setattr(backward, "multiprocessors", lambda device: 2)
    b, want, low = request(t=300, s=330, heads=(2, 1), d=64, window=(150, 20), batch=2)
    run(b)
    check(b, want, low)


def test_only_what_is_wanted():
    for name in ("dq", "dk", "dv"):
        b, want, low = request(t=140, s=130, heads=(1, 1), d=64)
        b = replace(b, **{other: None for other in ("dq", "dk", "dv") if other != name})
        run(b)
        check(b, want, low)


def test_varlen_goes_sequence_by_sequence():
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 40, 40, 90], [0, 60, 80, 220]))
    q, dout = (draw(95, 2, 64, dtype=BF16, seed=n) for n in (0, 1))
    k, v = (draw(225, 2, 64, dtype=BF16, seed=n) for n in (2, 3))
    k[60:80] = v[60:80] = k[220:] = v[220:] = float("nan")  # a sequence without queries, rows of nobody
    sink = draw(2, dtype=torch.float32, seed=4)
    out, lse = reference.fmha_varlen(q, k, v, cu_q, cu_k, causal=True, sink=sink)
    p = replace(problem.varlen(q, k, v, cu_q, cu_k, causal=True, sink=sink), out=out.to(BF16), lse=lse.float())
    b = FmhaBackward(p, dout, None, *(torch.full_like(x, float("nan")) for x in (q, k, v)), torch.empty(2))
    run(b)
    options = dict(causal=True, sink=sink)
    check(b, reference_backward.fmha_varlen(q, k, v, cu_q, cu_k, dout, **options),
          reference_backward.fmha_varlen(q, k, v, cu_q, cu_k, dout, p_dtype=BF16, **options))  # fmt: skip


@pytest.mark.parametrize("order", ["latest", *(pytest.param(x, marks=pytest.mark.slow) for x in ("eager", "random"))])
def test_no_race_whenever_copies_and_products_complete(order, monkeypatch):
    """Seven tiles and more for each of two multiprocessors: every slot is filled again and again."""
    monkeypatch.setattr(backward, "multiprocessors", lambda device: 2)
    b, want, low = request(t=300, s=520, heads=(1, 1), d=64, causal=True)
    with softsm.use("sm_90a"), softsm.checking(races=True, order=order, seed=7) as report:
        backward.backward(b)
    assert "nothing found" in str(report), str(report)
    check(b, want, low)
