"""dsv4.merge_states: parts of the keys, in any order and number, give the whole; the sink enters once."""

import pytest
import torch
from agreement import assert_lse, assert_same, qkv
from hypothesis import given
from hypothesis import strategies as st

import dsv4
from dsv4 import reference

INF = float("inf")


@given(
    cuts=st.lists(st.integers(0, 30), min_size=0, max_size=4),
    sink=st.sampled_from([None, 0.5, -INF, INF]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    flat=st.booleans(),
)
def test_parts_give_the_whole(cuts, sink, dtype, flat):
    q, k, v = qkv(1 if flat else 2, 6, 30, 4, 2, 64, dtype)
    sink = None if sink is None else torch.full((4,), sink)
    edges = [0, *sorted(cuts), 30]
    parts = [reference.fmha(q, k[:, a:b], v[:, a:b]) for a, b in zip(edges, edges[1:])]
    parts = [(out.to(dtype), lse.float()) for out, lse in parts]
    want, want_lse = reference.fmha(q, k, v, sink=sink)
    if flat:
        parts = [(out[0], lse[0].T) for out, lse in parts]
        want, want_lse = want[0], want_lse[0].T
    out, lse = dsv4.merge_states([p[0] for p in parts], [p[1] for p in parts], sink=sink)
    assert out.dtype == dtype and lse.dtype == torch.float32
    # Partials and result are rounded to the dtype; weights e^(lse_n - lse) carry the rounding of an fp32 LSE below 8.
    eps, lse_eps = torch.finfo(dtype).eps, 8 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(out.double(), want, rtol=0, atol=(eps + 2 * lse_eps) * v.abs().max().item())
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=lse_eps)


def test_the_merged_lse_merges_again():
    q, k, v = qkv(2, 3, 12, 2, 2, 64)
    a, b, c = (dsv4.fmha(q, k[:, i : i + 4], v[:, i : i + 4], return_lse=True) for i in (0, 4, 8))
    ab = dsv4.merge_states([a[0], b[0]], [a[1], b[1]])
    at_once = dsv4.merge_states([x[0] for x in (a, b, c)], [x[1] for x in (a, b, c)])
    in_steps = dsv4.merge_states([ab[0], c[0]], [ab[1], c[1]])
    assert_same(in_steps[0], at_once[0])
    assert_lse(in_steps[1], at_once[1])


def test_an_empty_part_may_hold_anything():
    out, lse = torch.ones(2, 3, 64), torch.zeros(2, 3)
    junk, empty = torch.full((2, 3, 64), float("nan")), torch.full((2, 3), -INF)
    merged, merged_lse = dsv4.merge_states([junk, out], [empty, lse])
    assert torch.equal(merged, out) and torch.equal(merged_lse, lse)
    merged, merged_lse = dsv4.merge_states([junk], [empty], sink=torch.tensor([0.0, INF, -INF]))
    assert bool((merged == 0).all()) and bool((merged_lse == -INF).all())


def test_stacked_tensors_are_taken_too():
    outs, lses = torch.randn(3, 4, 2, 64), torch.randn(3, 4, 2)
    assert torch.equal(dsv4.merge_states(outs, lses)[0], dsv4.merge_states(list(outs), list(lses))[0])


@pytest.mark.parametrize(
    "outs, lses, sink, argument",
    [
        ([], [], None, "outs"),
        (None, [torch.zeros(4, 2)], None, "outs"),
        ([torch.zeros(4, 2, 64)], [], None, "lses"),
        ([torch.zeros(4, 2, 64)], [torch.zeros(4, 2), torch.zeros(4, 2)], None, "lses"),
        ([torch.zeros(4, 2)], [torch.zeros(4)], None, "outs[0]"),
        ([torch.zeros(4, 2, 64)], [torch.zeros(2, 4)], None, "lses[0]"),
        ([torch.zeros(1, 4, 2, 64)], [torch.zeros(1, 4, 2)], None, "lses[0]"),
        ([torch.zeros(4, 2, 64)], [torch.zeros(4, 2).double()], None, "lses[0]"),
        ([torch.zeros(4, 2, 64), torch.zeros(3, 2, 64)], [torch.zeros(4, 2)] * 2, None, "outs[1]"),
        ([torch.zeros(4, 2, 64)], [torch.zeros(4, 2)], torch.zeros(3), "sink"),
    ],
)
def test_bad_input(outs, lses, sink, argument):
    with pytest.raises(ValueError, match="accepted") as error:
        dsv4.merge_states(outs, lses, sink)
    assert str(error.value).startswith(f"{argument}: got ")


@pytest.mark.parametrize("merge", [dsv4.merge_states, reference.merge_states])
def test_flash_mla_marks_empty_rows_with_plus_infinity(merge):
    out, lse = torch.ones(2, 3, 64), torch.zeros(2, 3)
    junk, empty = torch.full((2, 3, 64), float("nan")), torch.full((2, 3), INF)
    merged, merged_lse = merge([junk, out], [empty, lse])
    assert bool((merged == 1).all()) and bool((merged_lse == 0).all())
    merged, merged_lse = merge([junk], [empty], sink=torch.zeros(3))
    assert bool((merged == 0).all()) and bool((merged_lse == -INF).all())


@pytest.mark.parametrize("operation", ["fmha", "v4_attention"])
def test_fp32_partials_of_bf16_inputs_are_rounded_once(operation):
    """Three parts are as near to fp64 as one softmax in fp32 whose result is rounded, and nearer than bf16 partials."""
    if operation == "fmha":
        q, k, v = qkv(2, 6, 60, 4, 2, 64, torch.bfloat16)
        want, _ = reference.fmha(q, k, v)
        calls = [(dsv4.fmha, (q, k[:, n : n + 20], v[:, n : n + 20])) for n in (0, 20, 40)]
    else:
        q, rows = torch.randn(6, 4, 64).bfloat16(), torch.randn(60, 64).bfloat16()
        lists = torch.arange(60).int().expand(6, 60).contiguous()
        want, _ = reference.v4_attention(q, rows, lists)
        calls = [(dsv4.v4_attention, (q, rows, lists[:, n : n + 20].contiguous())) for n in (0, 20, 40)]
    errors = {}
    for dtype in (torch.float32, torch.bfloat16):
        parts = [f(*args, return_lse=True, out=torch.empty(q.shape, dtype=dtype)) for f, args in calls]
        out, _ = dsv4.merge_states([out for out, _ in parts], [lse for _, lse in parts])
        assert out.dtype == dtype
        errors[dtype] = (out.bfloat16().double() - want).norm()
    once = (want.bfloat16().double() - want).norm()
    assert errors[torch.float32] <= 1.01 * once < errors[torch.bfloat16]
    with pytest.raises(ValueError, match="^out: got dtype float16; accepted: bfloat16, float32$"):
        calls[0][0](*calls[0][1], out=torch.empty(q.shape, dtype=torch.float16))


@pytest.mark.parametrize("size", [0.0, 2.0**16, 2.0**24, -(2.0**31)])
def test_parts_with_large_lses_are_averaged_not_added(size):
    """An fp32 LSE of 2^24 has no room for log 2: weights must not be relative to the merged LSE."""
    outs = [torch.randn(1, 3, 2, 64) for _ in range(3)]
    lses = [torch.full((1, 2, 3), size) for _ in range(3)]
    for sink in (None, torch.full((2,), size)):
        want, want_lse = reference.merge_states(outs, lses, sink)
        out, lse = dsv4.merge_states(outs, lses, sink)
        torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
        assert torch.equal(lse, want_lse.float())
        got = backward_of_merging(outs, lses, sink)
        for x, y in zip(got, reference.backward.merge_states(outs, lses, sink, torch.ones_like(outs[0]))):
            for a, b in zip(*((x, y) if isinstance(x, list) else ([x], [y]))):
                torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4) if b is not None else None


def backward_of_merging(outs, lses, sink):
    leaves = [x.clone().requires_grad_() for x in (*outs, *lses, *([] if sink is None else [sink]))]
    out, _ = dsv4.merge_states(leaves[:3], leaves[3:6], leaves[6] if sink is not None else None)
    grads = torch.autograd.grad(out.sum(), leaves)
    return list(grads[:3]), list(grads[3:6]), grads[6] if sink is not None else None


def test_weights_of_pieces_add_up_to_1_on_a_cpu():
    """Scores of 2^24; keys that all queries see are a piece of their own."""
    q, k, v = torch.full((1, 600, 1, 64), 2.0**12), torch.full((1, 900, 1, 64), 2.0**9), torch.ones(1, 900, 1, 64)
    torch.testing.assert_close(dsv4.fmha(q, k, v, causal=True), torch.ones_like(q))
    torch.testing.assert_close(dsv4.fmha(q, k, v, softcap=2.0**24), torch.ones_like(q))


def test_vmap_merges_each_example():
    outs, lses = torch.randn(2, 3, 5, 4, 8), torch.randn(2, 3, 5, 4)
    got = torch.vmap(lambda out, lse: dsv4.merge_states(list(out), list(lse)), in_dims=1)(outs, lses)
    for n in range(3):
        want = dsv4.merge_states(list(outs[:, n]), list(lses[:, n]))
        assert all(torch.equal(x[n], y) for x, y in zip(got, want))
