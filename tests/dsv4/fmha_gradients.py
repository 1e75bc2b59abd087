"""Requests for the gradients of fmha, with what the formulas say: for the tests of kernels, in softsm and on a GPU."""

from dataclasses import replace
from itertools import pairwise

import launches
import pytest
import torch
from dsink import FAR_SINKS, assert_dsink

from dsv4 import reference
from dsv4.fmha import problem
from dsv4.fmha.backward import FmhaBackward
from dsv4.fmha.kernels import chain
from dsv4.reference import backward as reference_backward

BF16, FP16 = torch.bfloat16, torch.float16


def draw(*shape, dtype, seed, device="cpu"):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def deterministic(b):
    """The same request, with the same bits in every run."""
    return replace(b, forward=replace(b.forward, options=b.forward.options._replace(deterministic=True)))


def request(t, s, heads, d, dtype=BF16, device="cpu", sink=False, dlse=False, batch=1, **options):
    """Inputs with their forward pass, gradients of NaN; and what the formulas give, exactly and rounded."""
    q, dout = (draw(batch, t, heads[0], d, dtype=dtype, seed=n, device=device) for n in (0, 1))
    k, v = (draw(batch, s, heads[1], d, dtype=dtype, seed=n, device=device) for n in (2, 3))
    options["sink"] = draw(heads[0], dtype=torch.float32, seed=4, device=device) if sink else None
    dlse = draw(batch, heads[0], t, dtype=torch.float32, seed=5, device=device) if dlse else None
    out, lse = reference.fmha(q, k, v, **options)
    p = replace(problem.dense(q, k, v, **options), out=out.to(dtype), lse=lse.float())
    empty = [torch.full_like(x, float("nan")) for x in (q, k, v)]
    b = FmhaBackward(p, dout, dlse, *empty, torch.full([heads[0]], float("nan"), device=device) if sink else None)
    want = reference_backward.fmha(q, k, v, dout, dlse, **options)
    low = reference_backward.fmha(q, k, v, dout, dlse, p_dtype=dtype, **options)
    return b, want, low


VARLEN = {
    # Sequences without queries, without keys, of one token; more than 128 keys, so that a sequence has several tiles.
    "causal": dict(starts_q=(0, 40, 40, 41, 90, 100), starts_k=(0, 60, 80, 81, 221, 221)),
    "window-gqa-dlse": dict(
        starts_q=(0, 1, 60, 75), starts_k=(0, 130, 290, 300), heads=6, kv_heads=2, window=(30, 2), dlse=True
    ),
    "fp16-hd128": dict(dtype=FP16, d=128, starts_q=(0, 140, 150), starts_k=(0, 140, 200), heads=1),
}
CHAIN = {
    # The same for the chain of head dims 256 and 512; tiles that end in the middle of the next sequence's.
    "causal-dlse": dict(starts_q=(0, 40, 75, 75, 113, 273), starts_k=(0, 50, 95, 100, 148, 308), dlse=True),
    "window-gqa": dict(
        starts_q=(0, 20, 40, 60, 80), starts_k=(0, 45, 90, 235, 281), heads=6, kv_heads=2, window=(10, 2)
    ),
    "fp16-hd512": dict(dtype=FP16, d=512, starts_q=(0, 140, 150), starts_k=(0, 140, 200), heads=1),
}


def varlen_request(
    starts_q=(0, 40, 40, 90), starts_k=(0, 60, 80, 220), heads=2, d=64, device="cpu", kv_heads=None, dtype=BF16,
    dlse=False, **options,
):  # fmt: skip
    """Causal unless a window is given, with a sink. NaN in what no gradient may depend on: keys of sequences without
    queries, keys before the window of the first query, rows and keys of no sequence at the end (five each)."""
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in (starts_q, starts_k))
    rows, keys = starts_q[-1] + 5, starts_k[-1] + 5
    q, dout = (draw(rows, heads, d, dtype=dtype, seed=n, device=device) for n in (0, 1))
    k, v = (draw(keys, kv_heads or heads, d, dtype=dtype, seed=n, device=device) for n in (2, 3))
    options.setdefault("causal", "window" not in options)
    left = -1 if options["causal"] else options["window"][0]
    for (q0, q1), (k0, k1) in zip(pairwise(starts_q), pairwise(starts_k)):
        unseen = k1 - k0 if q0 == q1 else 0 if left < 0 else max(0, (k1 - k0) - (q1 - q0) - left)
        k[k0 : k0 + unseen] = v[k0 : k0 + unseen] = float("nan")
    k[starts_k[-1] :] = v[starts_k[-1] :] = float("nan")
    options["sink"] = draw(heads, dtype=torch.float32, seed=4, device=device)
    out, lse = reference.fmha_varlen(q, k, v, cu_q, cu_k, **options)
    p = replace(problem.varlen(q, k, v, cu_q, cu_k, **options), out=out.to(dtype), lse=lse.float())
    empty = [torch.full_like(x, float("nan")) for x in (q, k, v, options["sink"])]
    given = draw(rows, heads, dtype=torch.float32, seed=5, device=device) if dlse else None
    q[starts_q[-1] :] = dout[starts_q[-1] :] = float("nan")
    b = FmhaBackward(p, dout, given, *empty)
    finite = [x.nan_to_num() for x in (q, k, v)], dout.nan_to_num()
    want, low = (
        reference_backward.fmha_varlen(*finite[0], cu_q, cu_k, finite[1], given, p_dtype=x, **options)
        for x in (None, dtype)
    )
    return b, want, low


def check(b, want, low):
    p = b.forward
    blind = p.lse == float("-inf")
    blind = blind.transpose(1, 2) if p.kind == "dense" else blind  # queries that see nothing
    unseen = (want.v == 0).all(-1)  # keys that no query sees
    for name, got, dead in (("q", b.dq, blind), ("k", b.dk, unseen), ("v", b.dv, unseen)):
        if got is None:
            continue
        ref, rounded = getattr(want, name), getattr(low, name).to(got.dtype).double()
        error, bound = ((x - ref).norm() / ref.norm() for x in (got.double(), rounded))
        assert float(error) <= 1.5 * float(bound), f"d{name}: {float(error):.2e}, rounded {float(bound):.2e}"
        assert not got[dead].any(), f"d{name}: a gradient where there is none"
    if b.dsink is not None:
        lse, sink = (p.lse.transpose(1, 2) if p.kind == "dense" else p.lse), p.sink
        assert_dsink(b.dsink, want.sink, p.out, b.dout.nan_to_num(), lse, sink)


def check_a_large_gradient_of_the_lse(run, d, name):
    """A factor made for dO alone would bring dS to 2^18, more than fp16 holds. name: the gradient that is wanted."""
    b, _, _ = request(t=20, s=30, heads=(2, 1), d=d, dtype=FP16, dlse=True)
    p, dout, dlse = b.forward, b.dout * 2.0**-10, b.dlse * 2.0**6
    b = replace(b, dout=dout, dlse=dlse, **{other: None for other in ("dq", "dk", "dv") if other != name})
    run(b)
    check(b, *(reference_backward.fmha(p.q, p.k, p.v, dout, dlse, p_dtype=x) for x in (None, FP16)))


def check_sinks_far_above_the_lse(run, dtype=BF16, dkv=True):
    """d lse / dq and dk do not depend on the sink, however large it is; what it leaves of dO's terms is nothing."""
    b, _, _ = request(t=4, s=9, heads=(4, 2), d=64, dtype=dtype, causal=True, sink=True, dlse=True)
    b = b if dkv else replace(b, dk=None, dv=None)
    sink = torch.tensor(FAR_SINKS)
    inputs = (b.forward.q, b.forward.k, b.forward.v)
    out, lse = reference.fmha(*inputs, causal=True, sink=sink)
    b = replace(b, forward=replace(b.forward, sink=sink, out=out.to(dtype), lse=lse.float()))
    run(b)
    want, low = (
        reference_backward.fmha(*inputs, b.dout, b.dlse, causal=True, sink=sink, p_dtype=x) for x in (None, dtype)
    )
    check(b, want, low)
    for head, far in enumerate(FAR_SINKS):
        got, ref, rounded = (x[:, :, head].double() for x in (b.dq, want.q, low.q.to(dtype)))
        assert (got - ref).norm() <= 1.5 * (rounded - ref).norm(), f"sink {far}: |dq| {got.norm()} for {ref.norm()}"


QUICK_CHAIN = [("window-gqa", "latest")]
SLOW_CHAIN = [(x, y) for x in CHAIN for y in ("latest", "eager", "random") if (x, y) not in QUICK_CHAIN]
# Of VARLEN, in which order, dQ too: quickly, dK and dV alone.
TOGETHER = [
    ("causal", "latest", False),
    *(pytest.param(x, y, True, marks=pytest.mark.slow) for x in VARLEN for y in ("latest", "eager", "random")),
]


def check_chain_takes_sequences(arch, name, order, monkeypatch):
    """One launch of each kernel for all sequences."""
    b, want, low = varlen_request(**dict(d=256) | CHAIN[name])
    names = launches.launched(monkeypatch)
    with launches.race_free(arch, order=order, seed=7):
        launches.run(b)
    assert names == ["clear_past", "backward_rows", "backward_scores", "backward_products"]
    check(b, want, low)


def check_slabs_of_sequences_do_not_show(run, monkeypatch, device="cpu"):
    """Room for six row tiles, four of them for sequences that begin in the slab: 0, 1 and 2 begin at row tiles 0, 1 and
    2, 3 and 4 at 5 and 7, 5 at 9. With room for three, the first two and the last two go together, the others alone."""
    starts = (0, 40, 75, 300, 400, 560, 570)
    for tiles, launched in ((6, 3), (3, 4)):
        b, want, low = varlen_request(d=256, starts_q=starts, starts_k=starts, heads=1, device=device)
        p = b.forward
        bounds = dict(max_seqlen_q=225, max_seqlen_k=225)
        b = replace(b, forward=replace(p, **bounds, options=p.options._replace(**bounds)))
        monkeypatch.setattr(chain, "SLAB_BYTES", 4 * 128 * 128 * 2 * tiles)
        names = launches.launched(monkeypatch)
        run(b)
        assert names.count("backward_scores") == launched, names
        check(b, want, low)


def check_sequences_go_together(arch, kernels, name, order, dq, monkeypatch):
    """A gradient takes at most one launch of each of `kernels`, however many sequences there are: for dK and dV, then
    for dQ or the rest of it."""

    b, want, low = varlen_request(**VARLEN[name])
    b = b if dq else replace(b, dq=None)
    names = launches.launched(monkeypatch)
    with launches.race_free(arch, order=order, seed=7):
        launches.run(b)
    assert names[:3] == ["clear_past", "backward_rows", kernels[0]]
    assert set(names[3:]) == ({kernels[1]} if dq else set()) and len(names) <= 6
    check(b, want, low)
