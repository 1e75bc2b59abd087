"""Merge attention over disjoint sets of keys by their log-sum-exp; the sink enters once, at the end."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsv4.runtime import checks


def merge_states(
    outs: Sequence[Tensor], lses: Sequence[Tensor], sink: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over the union of disjoint key sets, from the attention over each::

        lse = log(sum_n e^lse_n)      out = sum_n e^(lse_n - lse) out_n  *  1 / (1 + e^(sink - lse))

    outs: tensors of one shape, [B, T, H, D] or [N, H, D], made with sink=None; lses: fp32 [B, H, T] or [N, H].
    sink: fp32 [H]. Merges in fp32; out has the dtype of outs[0]; lse leaves the sink out, so it merges again.
    Partials in bf16 are rounded before and after; fp32 ones (an fp32 ``out=``, on the cpu backend) once, by the caller.
    A partial with lse -inf takes no part, whatever its out holds; nor one with +inf, FlashMLA's mark of a row that saw
    nothing. Where all are empty: out 0, lse -inf.
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
        checks.tensor(
            f"outs[{n}]", out, tuple(first.shape), checks.FLOATS, like=("outs[0]", first), unit_last=False
        )
        checks.tensor(
            f"lses[{n}]", lse, tuple(lse_shape), (torch.float32,), like=("outs[0]", first), unit_last=False
        )
    checks.sink(sink, heads, ("outs[0]", first))
    checks.forward_only(sink=sink, **{f"outs[{n}]": x for n, x in enumerate(outs)},
                        **{f"lses[{n}]": x for n, x in enumerate(lses)})  # fmt: skip

    parts = torch.stack(list(lses))  # [n, *lse]
    parts = torch.where(parts == float("inf"), float("-inf"), parts)
    lse = parts.logsumexp(0)
    weights = torch.where(parts == float("-inf"), 0, (parts - lse).exp())
    if sink is not None:
        logit = sink[:, None] if first.ndim == 4 else sink
        weights = weights * torch.sigmoid(lse - torch.where(lse == float("-inf"), float("inf"), logit))
    weights = (weights.transpose(2, 3) if first.ndim == 4 else weights)[..., None]  # [n, *out[:-1], 1]
    total = torch.zeros(first.shape, dtype=torch.float32, device=first.device)
    for weight, out in zip(weights, outs, strict=True):
        # where, not a product: a partial without weight may hold NaN
        total += torch.where(weight == 0, 0, weight * out.float())
    return total.to(first.dtype), lse
