"""compress with gradients: its training operators, for whole sequences (no state before, none differentiated after).

Per row: w = softmax over its slots, y = sum w c, then RMSNorm and RoPE. With dn the row's gradient rotated back::

    dweight = sum dn y / rms        dy = (weight dn - yhat mean(weight dn yhat)) / rms        yhat = y / rms
    dc_j    = w_j dy                dgate_j = w_j (c_j - y) dy                                dbias = sums of dgate

A token's a-half feeds only the next window and its b-half only its own, so every dc and dgate is written once. The code
is torch, for any device, in blocks of windows; only the inputs are saved.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4.compress import forward
from dsv4.compress.problem import Parameters, state_size
from dsv4.runtime import gradients
from dsv4.runtime.options import schema

BLOCK_BYTES = 64 << 20  # bytes of one tensor of slots, in fp32

ARGUMENTS = ", ".join(["Tensor kv", "Tensor? gate", *schema(Parameters, defaults=False).values()])
TENSORS = 5  # the first arguments; the last of them, cos_sin, has no gradient


class Sums(NamedTuple):
    """Gradients to be filled: windows write those of kv and gate, and add to the others, in fp32 (fp64 for fp64 kv)."""

    kv: Tensor
    gate: Tensor
    bias: Tensor
    weight: Tensor


def call(kv: Tensor, gate: Tensor | None, given: Parameters, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows, and kv and gate of the state after them, which have no gradient."""
    return gradients.training("compress", False, kv, gate, *given, backend)


def _forward(kv, gate, *rest) -> tuple[Tensor, Tensor, Tensor]:
    *given, backend = rest
    with torch.no_grad():
        rows, state = forward.run(kv, gate, None, Parameters(*given), None, None, backend)
    # as the fake kernel declares, whatever the strides of kv
    return rows.contiguous(), state.kv.contiguous(), state.gate.contiguous()


def _fake_forward(kv, gate, *rest) -> tuple[Tensor, Tensor, Tensor]:
    given = Parameters(*rest[:-1])
    d, tokens = given.norm_weight.shape[0], kv.shape[-2]
    kept = (*kv.shape[:-2], state_size(tokens, given.m, kv.shape[-1] == 2 * d), kv.shape[-1])
    compute = torch.float64 if kv.dtype == torch.float64 else torch.float32
    new_kv, new_gate = (torch.empty(kept, dtype=compute, device=kv.device) for _ in "kg")
    rows = torch.empty(*kv.shape[:-2], tokens // given.m, d, dtype=given.dtype, device=kv.device)
    return rows, new_kv, new_gate


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*inputs[:TENSORS])
    ctx.rest = inputs[TENSORS:-1]


def _gradients(ctx: Any, drows: Tensor | None, *_: Any) -> tuple:
    if drows is None:
        return (None,) * len(ctx.needs_input_grad)
    asked = list(ctx.needs_input_grad[: TENSORS - 1])
    grads = torch.ops.dsv4.compress_backward(drows, *ctx.saved_tensors, *ctx.rest, asked)
    found = [gradients.or_none(x, want) for x, want in zip(grads, asked)]
    return *found, *(None,) * (len(ctx.needs_input_grad) - len(found))


def _backward(drows, kv, gate, *rest) -> tuple[Tensor, ...]:
    given, asked = Parameters(*rest[:-1]), rest[-1]
    compute = torch.float64 if kv.dtype == torch.float64 else torch.float32
    d, m = given.norm_weight.shape[0], given.m
    overlap, windows = kv.shape[-1] == 2 * d, kv.shape[-2] // m
    # An absent input has a gradient without elements, which autograd does not request.
    nothing = kv.new_zeros(0)
    bias = nothing if given.position_bias is None else given.position_bias
    dbias, dweight = (torch.zeros(x.shape, dtype=compute, device=kv.device) for x in (bias, given.norm_weight))
    into = Sums(kv.new_zeros(kv.shape), nothing if gate is None else gate.new_zeros(gate.shape), dbias, dweight)
    slots = 2 * m if overlap else m
    block = max(1, BLOCK_BYTES // max(4 * slots * d * max(kv.shape[:-2].numel(), 1), 1))
    for begin in range(0, windows, block):
        _windows(drows, kv, gate, given, begin, min(begin + block, windows), into)
    made = into._replace(bias=dbias.to(bias.dtype), weight=dweight.to(given.norm_weight.dtype))
    return tuple(x if want else gradients.gradient_like(x, False) for x, want in zip(made, asked))


def _windows(
    drows: Tensor, kv: Tensor, gate: Tensor | None, given: Parameters, begin: int, end: int, into: Sums
) -> None:
    """Write the share of windows begin .. end to `into`."""
    bias, d, m, compute = given.position_bias, given.norm_weight.shape[0], given.m, into.weight.dtype
    overlap = kv.shape[-1] == 2 * d
    weight = given.norm_weight.to(compute)

    def own(x: Tensor, first: int, last: int, half: slice) -> Tensor:
        return x[..., first * m : last * m, half].unflatten(-2, (last - first, m))

    halves = [(begin, end, slice(d, 2 * d) if overlap else slice(0, d), 0)]
    if overlap:  # the a-half of the previous window; window 0 has none
        halves.insert(0, (max(begin - 1, 0), end - 1, slice(0, d), int(begin == 0)))
    values, logits = [], []
    for first, last, half, missing in halves:
        value = own(kv, first, last, half).to(compute)
        logit = torch.zeros_like(value) if gate is None else own(gate, first, last, half).to(compute)
        if bias is not None:
            logit = logit + bias[:, half].to(compute)
        if missing:
            shape = (*value.shape[:-3], 1, m, d)
            value = torch.cat([value.new_zeros(shape), value], -3)
            logit = torch.cat([logit.new_full(shape, float("-inf")), logit], -3)
        values.append(value)
        logits.append(logit)
    c = torch.cat(values, -2)  # [..., windows, slots, d]
    share = torch.cat(logits, -2).softmax(-2)
    y = (share * c).sum(-2)
    rms = (y.square().mean(-1, keepdim=True) + given.eps).sqrt()
    yhat = y / rms
    dn = drows[..., begin:end, :].to(compute)
    if given.cos_sin is not None:
        dn = _turned_back(dn, given.cos_sin, torch.arange(begin, end, device=kv.device) * m)
    into.weight.add_((dn * yhat).flatten(0, -2).sum(0))
    scaled = weight * dn
    dy = ((scaled - yhat * (scaled * yhat).mean(-1, keepdim=True)) / rms).unsqueeze(-2)
    of_value = share * dy
    of_gate = of_value * (c - y.unsqueeze(-2))
    at = 0
    for first, last, half, missing in halves:
        for whole, x in zip(into[: 1 if gate is None else 2], (of_value, of_gate)):
            part = x[..., missing:, at : at + m, :]
            whole[..., first * m : last * m, half] = part.flatten(-3, -2).to(whole.dtype)
        if bias is not None:
            into.bias[:, half] += of_gate[..., missing:, at : at + m, :].flatten(0, -3).sum(0)
        at += m


def _turned_back(rows: Tensor, cos_sin: Tensor, positions: Tensor) -> Tensor:
    r = cos_sin.shape[1]
    cos, sin = cos_sin[positions].to(rows.dtype).chunk(2, -1)
    even, odd = rows[..., -r::2], rows[..., rows.shape[-1] - r + 1 :: 2]
    turned = torch.stack([even * cos + odd * sin, odd * cos - even * sin], -1).flatten(-2)
    return torch.cat([rows[..., :-r], turned], -1)


def _fake_backward(drows, kv, *rest) -> tuple[Tensor, ...]:
    learned = (kv, *rest)[: TENSORS - 1]
    return tuple(gradients.gradient_like(kv if x is None else x, want) for x, want in zip(learned, rest[-1]))


gradients.define(
    "compress",
    f"{ARGUMENTS}, str backend",
    "(Tensor, Tensor, Tensor)",
    (_forward, _fake_forward),
    f"Tensor drows, {ARGUMENTS}, bool[] asked",
    "(Tensor, Tensor, Tensor, Tensor)",
    (_backward, _fake_backward),
    _save,
    _gradients,
)
