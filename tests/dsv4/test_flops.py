"""What torch's FlopCounterMode counts of every operator: matrix products over what is seen, and nothing else."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import dsv4
from dsv4 import flops, reference

D = 64


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def counted(call):
    with FlopCounterMode(display=False) as mode:
        result = call()
    return mode.get_total_flops(), result


def backward(out):
    return counted(lambda: out.float().sum().backward())[0]


def test_every_operator_has_a_formula():
    names = {s.name.removeprefix("dsv4::") for s in torch._C._jit_get_all_schemas() if s.name.startswith("dsv4::")}
    ours = {x for x in names if x in vars(torch.ops.dsv4) or hasattr(torch.ops.dsv4, x)}
    assert ours and all(getattr(torch.ops.dsv4, x) in flop_registry for x in ours)


def test_experts():
    x, ids = torch.randn(5, 64, requires_grad=True), torch.tensor([[0, 2], [1, -1], [2, 1], [0, 1], [-1, -1]])
    weights = torch.randn(3, 64, 64), torch.randn(3, 64, 32)
    shared = torch.randn(32, 64), torch.randn(64, 16)
    got, out = counted(lambda: dsv4.moe(x, weights, ids, torch.rand(5, 2), activations="bf16", shared=shared))
    assert got == 6 * 64 * (7 * 32 + 5 * 16)
    assert backward(out) == 10 * 64 * (7 * 32 + 5 * 16)  # gate, up, dh, and dx by two matrices
    assert counted(lambda: dsv4.moe_route(x.detach(), torch.randn(9, 64)))[0] == 2 * 5 * 9 * 64


bounds = st.sampled_from([-1, 0, 1, 3, 10, 99])


@given(t=st.integers(0, 12), s=st.integers(0, 12), left=bounds, right=bounds)
def test_pairs_that_are_seen(t, s, left, right):
    assert flops.visible_pairs(t, s, left, right) == int(reference.visible(t, s, False, (left, right)).sum())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_dense(device):
    q, k, v = (torch.randn(2, n, h, D, device=device, requires_grad=True) for n, h in ((9, 4), (11, 2), (11, 2)))
    pairs = 2 * 4 * (9 * 11 - 9 * 8 // 2)
    got, out = counted(lambda: dsv4.fmha(q, k, v, causal=True))
    assert got == 4 * D * pairs
    assert backward(out) == 2.5 * got
    with torch.no_grad():
        assert counted(lambda: dsv4.fmha(q, k, v, causal=True))[0] == got
        assert counted(lambda: dsv4.fmha(q, k, v, causal=True, out=torch.empty_like(q)))[0] == got
    got, out = counted(lambda: dsv4.fmha(q.detach(), k.detach(), v, window=(3, 1)))
    assert backward(out) == got  # the scores again, and dV


def test_varlen_and_pages():
    q, k, v = (torch.randn(n, h, D, requires_grad=True) for n, h in ((9, 4), (11, 2), (11, 2)))
    cu_q, cu_k = ints(0, 4, 4, 8), ints(0, 5, 6, 10)
    pairs = 4 * ((2 + 3 + 4 + 5) + (1 + 2 + 3 + 4))
    got, out = counted(lambda: dsv4.fmha_varlen(q, k, v, cu_q, cu_k, causal=True))
    assert got == 4 * D * pairs and backward(out) == 2.5 * got
    meta = [x.detach().to("meta") for x in (q, k, v, cu_q, cu_k)]
    assert counted(lambda: dsv4.fmha_varlen(*meta, max_seqlen_k=6))[0] == 4 * D * 4 * 9 * 6  # the most there can be
    pages = torch.randn(5, 4, 2, D)
    args = (torch.randn(2, 1, 4, D), pages, pages, ints(0, 1, 2, 3).view(2, 2), ints(7, 2))
    assert counted(lambda: dsv4.fmha_paged(*args))[0] == 4 * D * 4 * (7 + 2)
    meta = [x.to("meta") for x in args]
    assert counted(lambda: dsv4.fmha_paged(*meta))[0] == 4 * D * 4 * 2 * 8


def test_v4():
    q, window, compressed = (torch.randn(*x, requires_grad=True) for x in ((3, 2, 512), (9, 512), (2, 4, 512)))
    lists, chosen = ints(0, 1, -1, 2, -1, -1, 3, 4, 5).view(3, 3), ints(0, 1, 7, 2, 3, -1).view(3, 2)
    got, out = counted(lambda: dsv4.v4_attention(q, window, lists, compressed, chosen, window_lengths=ints(3, 3, 1)))
    assert got == 4 * 2 * 512 * (2 + 1 + 1 + 5)
    assert backward(out) == 2.5 * got
    with torch.no_grad():
        table = dict(compressed_block_table=ints(0, 1, 1, 0).view(2, 2), request_starts=ints(0, 1, 2))
        table |= dict(compressed_lengths=ints(7, 3, 8))
        assert counted(lambda: dsv4.v4_attention(q, window, lists, compressed, **table))[0] == 4 * 2 * 512 * (6 + 10)
        cache = dsv4.Fp8Cache.pack(window, rows_per_page=4)
        assert counted(lambda: dsv4.v4_attention(q, cache, lists))[0] == 4 * 2 * 512 * 6
    meta = [x.detach().to("meta") for x in (q, window, lists, compressed, chosen)]
    assert counted(lambda: dsv4.v4_attention(*meta))[0] == 4 * 2 * 512 * (9 + 6)


def test_index():
    q, k, w = torch.randn(3, 4, 64), torch.randn(9, 64), torch.randn(3, 4)
    assert counted(lambda: dsv4.index_topk(q, k, w, 2, positions=ints(0, 7, 38)))[0] == 2 * 4 * 64 * (0 + 2 + 9)
    assert counted(lambda: dsv4.index_topk(q, k, w, 2, lengths=ints(1, 2, 3)))[0] == 2 * 4 * 64 * 6
    tensors = [x.requires_grad_() for x in (q, k, w)]
    lists, attention = ints(0, 3, 1, 2, -1, -1).view(3, 2), (torch.randn(3, 2, D), torch.randn(9, D), torch.randn(3, 2))
    got, loss = counted(lambda: dsv4.index_loss(*tensors, lists, *attention))
    assert got == 2 * 6 * (4 * 64 + 2 * D) and backward(loss) == 6 * 6 * 4 * 64


def test_what_has_no_products_counts_nothing():
    kv = torch.randn(8, 12, requires_grad=True)
    got, (rows, _) = counted(lambda: dsv4.compress(kv, torch.randn(8, 12), torch.randn(4, 12), torch.randn(6)))
    assert got == backward(rows) == 0
