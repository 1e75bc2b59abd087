"""dsv4.fmha_varlen on the cpu backend: sequences of all lengths, zero included, laid end to end."""

import pytest
import torch
from agreement import assert_agrees, qkv
from hypothesis import given
from hypothesis import strategies as st

import dsv4
from dsv4 import reference
from dsv4.fmha import cpu
from dsv4.fmha import problem as fmha_problem
from dsv4.fmha.backward import FMHA_BACKWARD
from dsv4.fmha.options import FmhaOptions


def starts(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def sequences(lengths_q, lengths_k, hq=4, hkv=2, d=64, dtype=torch.float32, tail=0):
    q, k, v = (x[0] for x in qkv(1, sum(lengths_q) + tail, sum(lengths_k) + tail, hq, hkv, d, dtype))
    return q, k, v, starts(lengths_q), starts(lengths_k)


def check(*args, **options):
    got = dsv4.fmha_varlen(*args, return_lse=True, **options)
    options = {k: v for k, v in options.items() if k not in ("max_seqlen_q", "max_seqlen_k")}
    assert_agrees(got, reference.fmha_varlen, *args, sink_last=cpu.sink_last(args[0].dtype), **options)
    return got


@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 90)), min_size=0, max_size=5),
    window=st.sampled_from([(-1, -1), (10, 3), (0, -1)]),
    causal=st.booleans(),
    sink=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_lengths(lengths, window, causal, sink, dtype):
    args = sequences([a for a, _ in lengths], [b for _, b in lengths], dtype=dtype)
    check(*args, causal=causal, window=window, sink=torch.randn(4) if sink else None)


def test_bounds_are_accepted():
    check(*sequences([3, 7], [9, 7]), max_seqlen_q=7, max_seqlen_k=500)


def test_rows_of_no_sequence():
    q, k, v, cu_q, cu_k = sequences([3, 4], [5, 6], tail=3)
    q[7:], k[11:], v[11:] = float("nan"), float("nan"), float("nan")
    out, lse = dsv4.fmha_varlen(q, k, v, cu_q, cu_k, return_lse=True)
    assert bool((out[7:] == 0).all()) and bool((lse[7:] == -float("inf")).all()) and not out.isnan().any()


@pytest.mark.parametrize("backend", ["cpu", "softsm"])
@pytest.mark.parametrize("d", [64, 256])
def test_rows_of_a_batch_without_sequences(d, backend):
    softsm = pytest.importorskip("softsm")
    pytest.importorskip("triton")
    q, k, v = (torch.randn(5, 1, d).bfloat16().requires_grad_() for _ in "qkv")
    none = torch.zeros(1, dtype=torch.int32)
    with softsm.use("sm_90a"):
        out, lse = dsv4.fmha_varlen(q, k, v, none, none, return_lse=True, backend=backend)
        gradients = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert not out.any() and (lse == -torch.inf).all() and not any(x.any() for x in gradients)


def test_a_sequence_does_not_feel_its_neighbour():
    q, k, v, cu_q, cu_k = sequences([3, 4, 2], [5, 6, 9])
    want, want_lse = dsv4.fmha_varlen(q, k, v, cu_q, cu_k, causal=True, return_lse=True)
    k[5:11], v[5:11] = float("nan"), float("inf")
    out, lse = dsv4.fmha_varlen(q, k, v, cu_q, cu_k, causal=True, return_lse=True)
    others = [0, 1, 2, 7, 8]
    assert torch.equal(out[others], want[others]) and torch.equal(lse[others], want_lse[others])


def test_out():
    args = sequences([3, 4], [5, 6])
    out = torch.full((7, 4, 96), float("nan"))[..., :64]
    assert dsv4.fmha_varlen(*args, out=out) is out
    assert torch.equal(out, dsv4.fmha_varlen(*args))


@pytest.mark.parametrize("lengths_q, lengths_k", [([], []), ([0, 0], [0, 0]), ([2], [0]), ([0], [2])])
def test_nothing(lengths_q, lengths_k):
    out, lse = dsv4.fmha_varlen(*sequences(lengths_q, lengths_k), return_lse=True, sink=torch.zeros(4))
    assert bool((out == 0).all()) and bool((lse == -float("inf")).all())


def test_bounds_of_zero_leave_rows_past_the_last_sequence():
    """A bound of 0 queries, or keys: no kernel has a tile to run, and rows of no sequence still have results."""
    q, k, v, cu_q, cu_k = sequences([0, 0], [0, 3], dtype=torch.bfloat16, tail=5)
    for bounds in ({"max_seqlen_q": 0}, {"max_seqlen_q": 0, "max_seqlen_k": 3}):
        problem = fmha_problem.varlen(q, k, v, cu_q, cu_k, options=FmhaOptions(**bounds))
        assert problem.no_keys()
        out, lse = dsv4.fmha_varlen(q, k, v, cu_q, cu_k, return_lse=True, **bounds)
        assert bool((out == 0).all()) and bool((lse == -float("inf")).all())


def test_loose_bounds_count_no_more_than_the_rows_in_gradients():
    """The kernels' workspace follows the bounds."""
    q, k, v, cu_q, cu_k = sequences([3, 4], [5, 6])
    tensors = (q, k, v, None, cu_q, cu_k, q, torch.zeros(7, 4), q, None)
    options = FmhaOptions(max_seqlen_q=1 << 20, max_seqlen_k=1 << 20)
    backward = FMHA_BACKWARD.build(**FMHA_BACKWARD.named(tensors, options))
    assert (backward.forward.max_seqlen_q, backward.forward.max_seqlen_k) == (7, 11)
