"""The training loss of the lightning indexer: it trains the index scores to follow the attention's own weights."""

from typing import Any

import torch
from torch import Tensor

from dsv4.runtime import checks, gradients

# fp32 words of the gathered rows and scores of one block of queries: on a CPU what a cache holds, on a GPU enough to
# hide launches
BLOCK_BYTES = {"cpu": 32 << 20, "cuda": 512 << 20}


def index_loss(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    indices: Tensor,
    attention_q: Tensor,
    rows: Tensor,
    lse: Tensor,
    *,
    sink: Tensor | None = None,
    softmax_scale: float | None = None,
    scale: float | None = None,
) -> Tensor:
    """Compute the mean over queries of KL(p || softmax of the index scores), over the listed rows -> a scalar, fp32.

    ::

        p(n, s)     = sum_h e^(softmax_scale * attention_q[n, h] . rows[s] - L'[n, h]), divided by its sum over the list
        score(n, s) = scale * sum_h weights[n, h] * relu(q[n, h] . k[s])                as in dsv4.index_topk

    L' is log(e^lse + e^sink) of the whole attention, window rows included: lse as dsv4.v4_attention returns it.

    Args:
        q [N, H, D], k [M, D], weights [N, H]: the indexer's; they get gradients.
        indices: int32 [N, K], row numbers of k and of rows, -1 = nothing there: the chosen rows, or all visible ones.
            A query without rows contributes 0 to the mean.
        attention_q [N, heads, E], rows [M, E], lse [N, heads], sink [heads]: the attention's; no gradient.
        softmax_scale, scale: default E ** -0.5, and D ** -0.5 * H ** -0.5.

    Forward and backward work in blocks of queries, so no score matrix of the whole sequence is ever in memory. Besides
    the inputs, the gradient of the scores, fp32 [N, K], is saved for backward.
    """
    n, h, d = checks.tensor("q", q, ("N", "H", "D"), checks.FLOATS).shape
    if d == 0:
        checks.fail("q", f"shape {list(q.shape)}", "a head dim of at least 1")
    like = ("q", q)
    m = checks.tensor("k", k, ("M", d), checks.FLOATS, like=like).shape[0]
    checks.tensor("weights", weights, (n, h), checks.FLOATS, like=like, unit_last=False)
    checks.int32("indices", indices, (n, "K"), like)
    shape = checks.tensor("attention_q", attention_q, (n, "heads", "E"), checks.FLOATS, like=like).shape
    if shape[2] == 0:
        checks.fail("attention_q", f"shape {list(shape)}", "a head dim of at least 1")
    checks.tensor("rows", rows, (m, shape[2]), checks.FLOATS, like=like)
    checks.tensor("lse", lse, (n, shape[1]), (torch.float32,), like=like, unit_last=False)
    checks.sink(sink, shape[1], like)
    checks.no_tangents(q=q, k=k, weights=weights)
    softmax_scale = shape[2] ** -0.5 if softmax_scale is None else checks.number("softmax_scale", softmax_scale)
    scale = d**-0.5 * max(h, 1) ** -0.5 if scale is None else checks.number("scale", scale)
    fixed = (x if x is None else x.detach() for x in (attention_q, rows, lse, sink))
    return gradients.training("index_loss", False, q, k, weights, indices, *fixed, softmax_scale, scale)[0]


def _blocks(q, k, indices, attention_q):
    per_query = indices.shape[1] * (q.shape[2] + attention_q.shape[2] + 3 * q.shape[1] + attention_q.shape[1])
    step = max(1, BLOCK_BYTES[q.device.type] // max(4 * per_query, 1))
    return (slice(i, i + step) for i in range(0, q.shape[0] if indices.shape[1] and len(k) else 0, step))


def _product(x, y):
    """Multiply batches x @ y, summed in fp32. A GPU uses its tensor cores, with 16-bit operands as they are."""
    if x.is_cuda and x.dtype == y.dtype and x.dtype != torch.float32:
        return torch.bmm(x, y, out_dtype=torch.float32)
    return torch.bmm(x.float(), y.float())


def _listed(x, indices):
    """Return (row numbers, 0 for absent ones; which are present; the rows) of a block of queries."""
    there = (indices >= 0) & (indices < x.shape[0])
    number = indices.long().masked_fill(~there, 0)
    return number, there, x[number]


def _keys(k, indices):
    """Return the same with zeros for absent rows: row 0, which stands for them, may hold anything."""
    number, there, keys = _listed(k, indices)
    return number, there, keys.masked_fill_(~there[..., None], 0)


def _target(attention_q, rows, indices, lse, sink, softmax_scale):
    """Return p [b, K] of a block of queries; 0 in a line without rows."""
    _, there, latent = _listed(rows, indices)
    whole = lse if sink is None else torch.logaddexp(lse, sink)
    whole = torch.where(lse == float("-inf"), float("inf"), whole)
    p = (_product(attention_q, latent.mT) * softmax_scale - whole[..., None]).exp_().sum(1)
    p = p.masked_fill_(~there, 0)
    total = p.sum(1, keepdim=True)
    return p / torch.where(total == 0, 1, total)


def _forward(q, k, weights, indices, attention_q, rows, lse, sink, softmax_scale, scale) -> tuple[Tensor, Tensor]:
    """Return the loss, and its gradient with respect to the scores [N, K], times N."""
    if checks.values_checked(q):
        checks.in_range("indices", indices, -1, k.shape[0] - 1)
    loss = torch.zeros((), dtype=torch.float32, device=q.device)
    dscore = torch.zeros(indices.shape, dtype=torch.float32, device=q.device)
    for some in _blocks(q, k, indices, attention_q):
        p = _target(attention_q[some], rows, indices[some], lse[some], sink, softmax_scale)
        _, there, keys = _keys(k, indices[some])
        score = scale * torch.bmm(weights[some].float()[:, None], _product(q[some], keys.mT).relu_())[:, 0]
        there &= p.any(1, keepdim=True)
        log = torch.where(there, score.masked_fill(~there, float("-inf")).log_softmax(1), 0)
        loss += (torch.xlogy(p, p) - p * log).sum()
        dscore[some] = torch.where(there, log.exp() - p, 0)
    return loss / max(q.shape[0], 1), dscore


def _fake_forward(q, k, weights, indices, *rest) -> tuple[Tensor, Tensor]:
    options = dict(dtype=torch.float32, device=q.device)
    return torch.empty((), **options), torch.empty(indices.shape, **options)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs[:4], output[1])
    ctx.scale = inputs[9]


def _gradients(ctx: Any, dloss: Tensor, _: Any) -> tuple:
    grads = torch.ops.dsv4.index_loss_backward(dloss, *ctx.saved_tensors, ctx.scale)
    asked = ctx.needs_input_grad
    return *(gradients.or_none(x, want) for x, want in zip(grads, asked)), *(None,) * 7


def _backward(dloss, q, k, weights, indices, dscore, scale):
    dq, dweights = (x.new_zeros(x.shape) for x in (q, weights))  # contiguous, as the fake kernel declares
    dk = torch.zeros(k.shape, dtype=torch.float32, device=k.device)
    for some in _blocks(q, k, indices, q):
        number, _, keys = _keys(k, indices[some])
        dots = _product(q[some], keys.mT)  # [b, H, K]
        ds = dscore[some] * (scale * dloss / q.shape[0])
        dweights[some] = torch.bmm(dots.relu(), ds[..., None])[..., 0].to(dweights.dtype)
        ddots = torch.where(dots > 0, weights[some].float()[..., None] * ds[:, None], 0)
        dq[some] = torch.bmm(ddots, keys.float()).to(dq.dtype)
        dk.index_add_(0, number.flatten(), torch.bmm(ddots.mT, q[some].float()).flatten(0, 1))
    return dq, dk.to(k.dtype), dweights


def _fake_backward(dloss, q, k, weights, *rest):
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, weights))


TENSORS = (
    "Tensor q, Tensor k, Tensor weights, Tensor indices, Tensor attention_q, Tensor rows, Tensor lse, Tensor? sink, "
    "float softmax_scale, float scale"
)
gradients.define(
    "index_loss",
    TENSORS,
    "(Tensor, Tensor)",
    (_forward, _fake_forward),
    "Tensor dloss, Tensor q, Tensor k, Tensor weights, Tensor indices, Tensor dscore, float scale",
    "(Tensor, Tensor, Tensor)",
    (_backward, _fake_backward),
    _save,
    _gradients,
)
