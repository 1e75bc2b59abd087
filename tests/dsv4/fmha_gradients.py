"""Requests for the gradients of fmha with the answer: what the tests of the kernels of every architecture share."""

from dataclasses import replace

import torch

from dsv4 import reference, reference_backward
from dsv4.fmha import problem
from dsv4.fmha.backward import FmhaBackward

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


def varlen_request():
    """Three sequences, one without queries whose keys are NaN; rows of nobody at the end."""
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 40, 40, 90], [0, 60, 80, 220]))
    q, dout = (draw(95, 2, 64, dtype=BF16, seed=n) for n in (0, 1))
    k, v = (draw(225, 2, 64, dtype=BF16, seed=n) for n in (2, 3))
    k[60:80] = v[60:80] = k[220:] = v[220:] = float("nan")  # a sequence without queries, rows of nobody
    options = dict(causal=True, sink=draw(2, dtype=torch.float32, seed=4))
    out, lse = reference.fmha_varlen(q, k, v, cu_q, cu_k, **options)
    p = replace(problem.varlen(q, k, v, cu_q, cu_k, **options), out=out.to(BF16), lse=lse.float())
    b = FmhaBackward(p, dout, None, *(torch.full_like(x, float("nan")) for x in (q, k, v)), torch.empty(2))
    want = reference_backward.fmha_varlen(q, k, v, cu_q, cu_k, dout, **options)
    return b, want, reference_backward.fmha_varlen(q, k, v, cu_q, cu_k, dout, p_dtype=BF16, **options)


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
