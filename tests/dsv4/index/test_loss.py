"""The indexer's loss and its gradients against the formulas, with a target made from the attention itself."""

import pytest
import torch
from live_bytes import LiveBytes

import dsv4
from dsv4.index import loss as module
from dsv4.reference import backward as reference_backward

N, H, D, M, E, HEADS = 6, 3, 16, 9, 64, 4


def draw(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs(sink):
    """The attention sees two window rows and the compressed ones: its LSE is over all of them."""
    indices = torch.randint(-1, M, (N, 5), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    indices[2] = -1
    q, rows, window = draw(N, HEADS, E, seed=2), draw(M, E, seed=3), draw(4, E, seed=4)
    lists = torch.tensor([[0, 1]] * N, dtype=torch.int32)
    sink = draw(HEADS, seed=5) if sink else None
    _, lse = dsv4.v4_attention(q, window, lists, rows, indices, sink=sink, return_lse=True)
    whole = lse.double() if sink is None else torch.logaddexp(lse.double(), sink.double())
    weight = (torch.einsum("nhe,me->nhm", q.double(), rows.double()) * E**-0.5 - whole[..., None]).exp().sum(1)
    target = weight.gather(1, indices.long().clamp_min(0))
    learnt = [x.requires_grad_() for x in (draw(N, H, D, seed=6), draw(M, D, seed=7), draw(N, H, seed=8))]
    return learnt, indices, (q, rows, lse), sink, target


def bound(learnt, attention):
    """Exponents are off by the roundings of fp32 in their sums, of E terms (the attention's logits) and of H * D (the
    index scores), which add up like a random walk; twice that. It is the relative error of a weight, and the absolute
    one of a logarithm."""
    (q, k, weights), (attention_q, rows, _) = ([x.detach().double() for x in given] for given in (learnt, attention))
    logits = torch.einsum("nhe,me->nhm", attention_q, rows) * E**-0.5
    scores = torch.einsum("nhm,nh->nm", torch.einsum("nhd,md->nhm", q, k).relu(), weights) * (D * H) ** -0.5
    return 2 * 2.0**-24 * float(E**0.5 * logits.abs().max() + (D * H) ** 0.5 * scores.abs().max())


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("block", [0, 1 << 20])
def test_loss_and_gradients(sink, block, monkeypatch):
    monkeypatch.setitem(module.BLOCK_BYTES, "cpu", block)
    learnt, indices, attention, sink, target = inputs(sink)
    loss = dsv4.index_loss(*learnt, indices, *attention, sink=sink)
    want, *grads = reference_backward.index_loss(*(x.detach() for x in learnt), indices, target)
    allowed = bound(learnt, attention)
    assert float((loss.double() - want).abs()) <= allowed
    for got, ref in zip(torch.autograd.grad(3 * loss, learnt), grads):
        assert float((got.double() - 3 * ref).norm() / (3 * ref).norm()) <= allowed


def test_no_row_yet():
    """The first tokens of a sequence have finished no row: nothing is listed, and the loss is 0."""
    learnt = [x.requires_grad_() for x in (draw(N, H, D, seed=6), draw(0, D, seed=7), draw(N, H, seed=8))]
    indices = torch.full((N, 5), -1, dtype=torch.int32)
    loss = dsv4.index_loss(*learnt, indices, draw(N, HEADS, E, seed=2), draw(0, E, seed=3), draw(N, HEADS, seed=4))
    assert loss.item() == 0
    for given, grad in zip(learnt, torch.autograd.grad(loss, learnt)):
        assert torch.equal(grad, torch.zeros_like(given))


@pytest.mark.parametrize("name, sizes", [("q", (0, E)), ("attention_q", (D, 0))])
def test_a_head_dim_of_zero_is_named(name, sizes):
    d, e = sizes
    indices = torch.full((N, 5), -1, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"^{name}: got shape .*accepted: a head dim of at least 1"):
        dsv4.index_loss(
            torch.zeros(N, H, d), torch.zeros(M, d), torch.zeros(N, H), indices, torch.zeros(N, HEADS, e),
            torch.zeros(M, e), torch.zeros(N, HEADS),
        )  # fmt: skip


def test_no_scores_of_the_whole_sequence_are_in_memory(monkeypatch):
    """Forward and backward hold less than half the products of the indexer's queries with their listed keys."""
    n, h, d, m, listed, e = 512, 16, 8, 100, 64, 64
    learnt = [draw(*x, seed=6) for x in ((n, h, d), (m, d), (n, h))]
    attention = draw(n, 4, e, seed=2), draw(m, e, seed=3), torch.full((n, 4), 8.0)
    indices = torch.randint(0, m, (n, listed), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    scores = 4 * n * h * listed
    given, dscore = (*learnt, indices, *attention, None, 0.1, 0.1), torch.ones(n, listed)
    for block, few in ((1 << 17, True), (1 << 30, False)):  # all queries at once: the meter sees them
        monkeypatch.setitem(module.BLOCK_BYTES, "cpu", block)
        for run in (
            lambda: module._forward(*given),
            lambda: module._backward(torch.ones(()), *learnt, indices, dscore, 0.1),
        ):
            with LiveBytes(*learnt, indices, *attention, dscore) as live:
                run()
            assert (0 < live.peak < scores / 2) == few, f"{live.peak / scores:.2f} times the products"


def test_rows_that_nobody_lists_may_hold_nan():
    """-1 is looked up as row 0. A query without rows, and one whose attention saw nothing, have no gradient."""
    learnt, indices, (q, rows, lse), _, _ = inputs(False)
    indices = torch.where(indices == 0, 1, indices)
    lse[4] = float("-inf")
    k, rows = learnt[1].detach(), rows.clone()
    k[0] = rows[0] = float("nan")
    learnt[1] = k.requires_grad_()
    loss = dsv4.index_loss(*learnt, indices, q, rows, lse)
    dq, dk, dweights = torch.autograd.grad(loss, learnt)
    assert loss.isfinite() and all(x.isfinite().all() for x in (dq, dk, dweights))
    assert not dq[[2, 4]].any() and not dweights[[2, 4]].any() and not dk[0].any() and dq[0].any()


def test_wrong_arguments_are_named():
    learnt, indices, attention, _, _ = inputs(False)
    with pytest.raises(ValueError, match="indices: got dtype int64"):
        dsv4.index_loss(*learnt, indices.long(), *attention)
    with pytest.raises(ValueError, match="indices: got values from"):
        dsv4.index_loss(*learnt, indices + 9, *attention)
