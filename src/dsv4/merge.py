"""Merge attention over disjoint sets of keys by their log-sum-exp; the sink is applied once, at the end."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsv4.runtime import checks, gradients


def merge_states(outs: Sequence[Tensor], lses: Sequence[Tensor], sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Merge attention over disjoint sets of keys into the attention over their union::

        lse = log(sum_n e^lse_n)      out = sum_n e^(lse_n - lse) out_n  *  1 / (1 + e^(sink - lse))

    outs: tensors of one shape, [B, T, H, D] or [N, H, D], made with sink=None; lses: fp32 [B, H, T] or [N, H].
    sink: fp32 [H]. Merging is done in fp32; out has the dtype of outs[0]. lse does not include the sink, so it can be
    merged again. bf16 partials are rounded before and after merging; fp32 partials (made with an fp32 ``out=``) only
    once, by the caller. A partial with lse -inf is ignored, whatever its out contains; so is one with +inf, FlashMLA's
    mark of a row that saw nothing. If all partials are empty, out is 0 and lse is -inf. Gradients exist with
    respect to outs, lses and sink.
    """
    x: Any
    for name, x in (("outs", outs), ("lses", lses)):
        listed = x.ndim > 0 if checks.is_tensor(x) else isinstance(x, Sequence) and not isinstance(x, (str, bytes))
        if not listed or len(x) == 0:
            checks.fail(name, checks.describe(x), "a list of at least one tensor")
    if len(outs) != len(lses):
        checks.fail("lses", f"{len(lses)} tensors", f"{len(outs)}, as many as outs")
    first = outs[0]
    if not checks.is_tensor(first) or first.ndim not in (3, 4):
        checks.fail("outs[0]", checks.describe(first), "a tensor [B, T, H, D] or [N, H, D]")
    lse_shape = first.shape[:2] if first.ndim == 3 else (first.shape[0], first.shape[2], first.shape[1])
    heads = first.shape[-2]
    for n, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        checks.tensor(f"outs[{n}]", out, tuple(first.shape), checks.FLOATS, like=("outs[0]", first), unit_last=False)
        checks.tensor(f"lses[{n}]", lse, tuple(lse_shape), (torch.float32,), like=("outs[0]", first), unit_last=False)
    checks.sink(sink, heads, ("outs[0]", first))
    tensors = {"sink": sink} | {f"outs[{n}]": x for n, x in enumerate(outs)}
    tensors |= {f"lses[{n}]": x for n, x in enumerate(lses)}
    checks.no_tangents(**tensors)
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors.values()):
        return gradients.training("merge_states", False, list(outs), list(lses), sink)
    return _merged(list(outs), list(lses), sink)


def _weights(lses: list[Tensor], sink: Tensor | None, four: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (lse, each partial's share of the softmax [n, *lse], what the sink leaves of it and its own share [*lse]).

    Everything is relative to the largest LSE, not to the merged one, in which a large LSE leaves no room for log n."""
    parts = torch.stack(lses)
    parts = torch.where(parts == float("inf"), float("-inf"), parts)
    top = parts.amax(0)
    empty = top == float("-inf")
    top = torch.where(empty, 0, top)
    weights = (parts - top).exp()
    total = weights.sum(0)
    lse, shares = top + total.log(), weights / torch.where(empty, 1, total)
    keep, lost = torch.ones_like(lse), torch.zeros_like(lse)
    if sink is not None:
        over = torch.where(empty, float("inf"), (sink[:, None] if four else sink) - top - total.log())
        keep, lost = torch.sigmoid(-over), torch.sigmoid(over)  # 1 - keep would lose its bits where lost is small
    return lse, shares, keep, lost


def _merged(outs: list[Tensor], lses: list[Tensor], sink: Tensor | None) -> tuple[Tensor, Tensor]:
    first = outs[0]
    lse, shares, keep, _ = _weights(lses, sink, first.ndim == 4)
    weights = shares * keep
    weights = (weights.transpose(2, 3) if first.ndim == 4 else weights)[..., None]  # [n, *out[:-1], 1]
    total = torch.zeros(first.shape, dtype=torch.float32, device=first.device)
    for weight, out in zip(weights, outs, strict=True):
        # where, not a product: a partial result without weight may hold NaN. Not in place, which torch.vmap rejects
        total = total + torch.where(weight == 0, 0, weight * out.float())
    return total.to(first.dtype), lse


# The operators with gradients; reference/backward.py has the formulas.


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.set_materialize_grads(False)
    outs, lses, sink = inputs
    ctx.count = len(outs)
    ctx.save_for_backward(*outs, *lses, sink)


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple:
    n = ctx.count
    if dout is None and dlse is None:
        return [None] * n, [None] * n, None
    saved = ctx.saved_tensors
    outs, lses, sink = list(saved[:n]), list(saved[n : 2 * n]), saved[2 * n]
    grads = torch.ops.dsv4.merge_states_backward(dout, dlse, outs, lses, sink)
    return grads[:n], grads[n : 2 * n], grads[2 * n] if sink is not None else None


def _backward(dout, dlse, outs, lses, sink) -> list[Tensor]:
    four, first = outs[0].ndim == 4, outs[0]
    lse, shares, keep, lost = _weights(lses, sink, four)
    keep = torch.where(lse == float("-inf"), 0, keep)
    dout = torch.zeros_like(first) if dout is None else dout
    dots, douts = [], []
    for out, share in zip(outs, shares, strict=True):
        weight = ((share * keep).transpose(1, 2) if four else share * keep)[..., None]
        nothing = ((share == 0).transpose(1, 2) if four else share == 0)[..., None]
        douts.append((dout.float() * weight).to(out.dtype))
        dot = (torch.where(nothing, 0, out.float()) * dout.float()).sum(-1)
        dots.append(dot.transpose(1, 2) if four else dot)
    g = torch.stack(dots)
    mean = (shares * g).sum(0)
    per_lse = keep * (g - mean) + keep * lost * mean
    if dlse is not None:
        per_lse = per_lse + torch.where(lse == float("-inf"), 0, dlse)
    grads = [*douts, *(x * y for x, y in zip(shares, per_lse))]  # one by one: results of an operator share no memory
    if sink is not None:
        of_sink = -(keep * lost * mean)
        grads.append((of_sink.transpose(1, 2) if four else of_sink).flatten(0, -2).sum(0))
    return [x.contiguous() for x in grads]


def _fake_backward(dout, dlse, outs, lses, sink) -> list[Tensor]:
    given = [*outs, *lses, *([] if sink is None else [sink])]
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in given]


gradients.define(
    "merge_states",
    "Tensor[] outs, Tensor[] lses, Tensor? sink",
    "(Tensor, Tensor)",
    (_merged, _merged),
    "Tensor? dout, Tensor? dlse, Tensor[] outs, Tensor[] lses, Tensor? sink",
    "Tensor[]",
    (_backward, _fake_backward),
    _save,
    _gradients,
)
