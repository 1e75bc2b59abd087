"""The oracle of the experts, in fp64: how a token's experts are chosen, and what they compute.

:func:`moe` computes without rounding. Given a dtype it rounds where the model does, and with a recipe ("fp8_128",
"fp8_32", "fp8_token") it rounds x and h to FP8: the difference between the two is what rounding costs, and bounds what
a backend may cost. Every step is differentiable, so autograd on it is the oracle of the gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor


def moe_route(
    x: Tensor,
    gate: Tensor,
    bias: Tensor | None = None,
    bias_vl: Tensor | None = None,
    image: Tensor | None = None,
    table: Tensor | None = None,
    token_ids: Tensor | None = None,
    topk: int = 6,
    scale: float = 1.5,
    eps: float = 1e-20,
) -> tuple[Tensor, Tensor]:
    """Route token by token -> (ids [T, topk], weights [T, topk] in fp64)."""
    ids, weights = [], []
    for t, logits in enumerate(x.double() @ gate.double().T):
        scores = (logits.clamp_min(0) + torch.log1p(torch.exp(-logits.abs()))).sqrt()
        of_image = image is not None and bool(image[t])
        if table is not None and token_ids is not None and not of_image:
            chosen = table[token_ids[t]].long()
        else:
            added = bias_vl if of_image else bias
            choice = scores if added is None else scores + added.double()
            chosen = choice.sort(descending=True, stable=True).indices[:topk]
        ids.append(chosen)
        weights.append(scores[chosen] / (scores[chosen].sum() + eps) * scale)
    return torch.stack(ids), torch.stack(weights)


def fp8(x: Tensor, columns: int) -> Tensor:
    """Round x [..., k] to e4m3 with one power of two for each group of columns: the least that clips nothing."""
    groups = x.unflatten(-1, (-1, columns))
    target = groups.abs().amax(-1, keepdim=True).clamp_min(1e-4).float() * torch.tensor(1 / 448).float()
    mantissa, exponent = torch.frexp(target)  # computed in fp32, as in the model
    scale = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int()).double()
    return ((groups / scale).float().to(torch.float8_e4m3fn).double() * scale).flatten(-2)


def fp4(x: Tensor) -> Tensor:
    """Round x [..., k] to E2M1 with one e4m3 scale for 16 columns: the nearest to amax / 6."""
    groups = x.float().unflatten(-1, (-1, 16))
    scale = (groups.abs().amax(-1, keepdim=True) / 6).clamp(2.0**-9, 448).to(torch.float8_e4m3fn).float()
    small = (groups / scale).double()  # computed in fp32, as in the model
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64, device=x.device)
    above = small.abs()[..., None] - (values[1:] + values[:-1]) / 2
    odd = torch.arange(7, device=x.device) % 2 == 1  # a tie above an odd code goes up, to the even one
    return (values[((above > 0) | ((above == 0) & odd)).sum(-1)] * small.sign() * scale.double()).flatten(-2)


def mlp(
    x: Tensor, w13: Tensor, w2: Tensor, weight: Tensor, limit: float, dtype: torch.dtype | None, recipe: str
) -> Tensor:
    """Apply one expert to rows [n, H]: gate above up in w13 [2 I, H], down in w2 [H, I], weight [n, 1]."""

    def to(y: Tensor) -> Tensor:
        return y if dtype is None else y.to(dtype).double()

    def to_fp8(y: Tensor) -> Tensor:
        if recipe == "nvfp4":
            return fp4(y)
        return y if recipe == "bf16" else fp8(y, {"fp8_128": 128, "fp8_32": 32}.get(recipe, y.shape[-1]))

    gate, up = (to(to_fp8(x) @ w13.T)).chunk(2, -1)
    h = torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit) * weight
    return to(to_fp8(to(h)) @ w2.T)


def moe(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    ids: Tensor,
    weights: Tensor,
    shared: tuple[Tensor, Tensor] | None = None,
    limit: float = 10.0,
    dtype: torch.dtype | None = None,
    recipe: str = "bf16",
) -> tuple[Tensor, Tensor]:
    """Compute (out [T, H], slots [T, k, H]) in fp64; w13 [E, 2 I, H] and w2 [E, H, I] are numbers, not codes."""
    x, w13, w2, weights = (y.double() for y in (x, w13, w2, weights))
    slots = []
    for t, chosen in enumerate(ids.tolist()):
        for j, e in enumerate(chosen):
            there = 0 <= e < len(w13)
            made = mlp(x[t : t + 1], w13[e], w2[e], weights[t, j], limit, dtype, recipe)[0] if there else 0 * x[t]
            slots.append(made)
    each = torch.stack(slots).view(*ids.shape, x.shape[1])
    out = each.sum(1)
    if shared is not None:
        one = torch.ones((), dtype=torch.float64, device=x.device)
        out = out + mlp(x, shared[0].double(), shared[1].double(), one, limit, dtype, recipe)
    return out, each
