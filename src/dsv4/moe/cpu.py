"""moe and moe_route in torch: the CPU backend, and the fallback of a GPU without a kernel for a problem."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from dsv4.moe import formats
from dsv4.moe.problem import MoeProblem, RouteProblem


def forward(p: MoeProblem | RouteProblem) -> None:
    """Fill the outputs of the problem."""
    if isinstance(p, RouteProblem):
        _route(p)
    else:
        _experts(p)


def _route(p: RouteProblem) -> None:
    assert p.ids is not None and p.weights is not None
    scores = softplus(p.x.float() @ p.gate.float().T).sqrt()
    if p.table is not None and p.token_ids is not None:
        known = (p.token_ids >= 0) & (p.token_ids < p.table.shape[0])
        ids = p.table[p.token_ids.clamp(0, p.table.shape[0] - 1).long()].long()
        ids = ids.masked_fill(~known[:, None], 0)
    if p.table is None or p.bias_vl is not None:
        choice = scores if p.bias is None else scores + p.bias
        if p.bias_vl is not None and p.image is not None:
            choice = torch.where(p.image[:, None], scores + p.bias_vl, choice)
        best = _lowest_first(choice, p.topk)
        ids = best if p.table is None else torch.where(p.image[:, None], best, ids)  # type: ignore[index]
    chosen = scores.gather(1, ids.clamp(0, p.gate.shape[0] - 1))
    p.weights.copy_(chosen / (chosen.sum(-1, keepdim=True) + p.eps) * p.scale)
    p.ids.copy_(ids)


def _lowest_first(x: Tensor, k: int) -> Tensor:
    """Return the columns of the k largest, falling; of equal values the lower column first."""
    return x.sort(dim=-1, descending=True, stable=True).indices[:, :k]


def rounded(x: Tensor, activations: str) -> Tensor:
    """Round fp32 rows as a recipe does."""
    if activations == "bf16":
        return x.float()
    if activations == "nvfp4":
        packed, e4m3 = formats.quantize_nvfp4(x)
        values, scales = formats.fp4_values(packed), e4m3.float()
    else:
        codes, scales = formats.quantize(x, formats.columns(activations, x.shape[-1]))
        values = codes.float()
    return (values.unflatten(-1, (scales.shape[-1], -1)) * scales[..., None]).flatten(-2)


def numbers_of(p: MoeProblem, expert: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return gate and up [I, H], down [H, I] of an expert in fp32."""
    if p.format == "bf16":
        gate, up = p.w13[expert].float().chunk(2)
        return gate, up, p.w2[expert].float()
    found = []
    for tiles, scales, factors in ((p.w13, p.w13_scales, p.w13_factors), (p.w2, p.w2_scales, p.w2_factors)):
        assert scales is not None and factors is not None
        found.append(formats.dequantize(tiles[expert], scales[expert], factors[expert], torch.float32, p.layout))
    return *formats.apart(found[0], p.layout), formats.down(found[1], p.layout, back=True)


def mlp(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    weight: Tensor,
    limit: float,
    dtype: torch.dtype,
    activations: str,
) -> Tensor:
    """Apply an expert to rows [n, H] that are already rounded; weight [n, 1]. Round where the model rounds."""
    g = (x @ gate.T).to(dtype).float().clamp(max=limit)
    u = (x @ up.T).to(dtype).float().clamp(-limit, limit)
    h = (silu(g) * u * weight).to(dtype)
    return (rounded(h, activations) @ down.T).to(dtype)


def _experts(p: MoeProblem) -> None:
    assert p.out is not None
    dtype, ids = p.x.dtype, p.ids.long()
    x = rounded(p.x, p.activations)
    slots = torch.zeros(p.tokens, p.topk, p.hidden, dtype=dtype, device=p.x.device) if p.slots is None else p.slots
    slots.zero_()
    for e in range(p.experts):
        token, slot = (ids == e).nonzero(as_tuple=True)
        if not len(token):
            continue
        gate, up, down = numbers_of(p, e)
        for n in _batches(token, p.deterministic):
            t, j = token[n], slot[n]
            slots[t, j] = mlp(x[t], gate, up, down, p.weights[t, j, None], p.limit, dtype, p.activations)
    total = torch.zeros(p.tokens, p.hidden, dtype=torch.float32, device=p.x.device)
    for one in slots.unbind(1):
        total += one
    if p.shared_w13 is not None:
        total += shared(p)
    p.out.copy_(total)


def _batches(rows: Tensor, deterministic: bool) -> list[slice]:
    """Split an expert's rows into batches to multiply: a product of several rows may sum in another order."""
    return [slice(n, n + 1) for n in range(len(rows))] if deterministic else [slice(None)]


def shared(p: MoeProblem) -> Tensor:
    """Return the shared expert's output: every token, weight 1. Its weights are numbers, activations as above."""
    assert p.shared_w13 is not None and p.shared_w2 is not None
    x = rounded(p.x, p.activations)
    if p.x.is_cuda and p.x.dtype == torch.bfloat16:  # bf16 holds all FP8 and FP4 values, so cuBLAS needs no fp32
        g, u = (x.to(p.x.dtype) @ p.shared_w13.T).float().chunk(2, -1)
        h = (silu(g.clamp(max=p.limit)) * u.clamp(-p.limit, p.limit)).to(p.x.dtype)
        return rounded(h, p.activations).to(p.x.dtype) @ p.shared_w2.T
    gate, up = p.shared_w13.float().chunk(2)
    one = torch.ones(1, dtype=torch.float32, device=p.x.device)
    down = p.shared_w2.float()
    made = [mlp(x[n], gate, up, down, one, p.limit, p.x.dtype, p.activations) for n in _batches(x, p.deterministic)]
    return torch.cat(made)
